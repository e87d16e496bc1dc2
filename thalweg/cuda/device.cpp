// CUDA devices, each read once.
#include "thalweg/core/device.h"

#include <cuda_runtime.h>

#include <memory>
#include <mutex>
#include <vector>

#include "thalweg/core/fail.h"
#include "thalweg/cuda/check.h"

namespace thalweg {
namespace {

using cuda::cuda_check;

int read_attribute(cudaDeviceAttr attribute, int32_t id, const char* what) {
  int value = 0;
  cuda_check(cudaDeviceGetAttribute(&value, attribute, id), what);
  return value;
}

Device read_device(int32_t id) {
  const int major = read_attribute(cudaDevAttrComputeCapabilityMajor, id, "reading the compute capability");
  const int minor = read_attribute(cudaDevAttrComputeCapabilityMinor, id, "reading the compute capability");
  if (major != 9 || minor != 0)
    fail(THALWEG_DEVICE_ERROR, "cuda: device %d: compute capability, got %d.%d, expected 9.0 (Hopper)", id, major, minor);
  Device d = cpu_device();
  d.backend = THALWEG_CUDA;
  d.id = id;
  d.l1_bytes = d.l3_bytes = 0;
  d.l2_bytes = read_attribute(cudaDevAttrL2CacheSize, id, "reading the size of L2");
  d.num_sms = read_attribute(cudaDevAttrMultiProcessorCount, id, "counting multiprocessors");
  d.smem_bytes = read_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, id, "reading the shared memory of a block");
  return d;
}

}  // namespace

const Device& cuda_device(int32_t id) {
  static std::mutex mutex;
  static std::vector<std::unique_ptr<const Device>> devices;
  std::lock_guard lock(mutex);
  if (devices.empty()) {
    int count = 0;
    cuda_check(cudaGetDeviceCount(&count), "looking for a GPU");
    if (count == 0) fail(THALWEG_DEVICE_ERROR, "cuda: got no GPU, expected one of compute capability 9.0 (Hopper)");
    devices.resize(static_cast<size_t>(count));
  }
  if (id < 0 || id >= int32_t(devices.size()))
    fail(THALWEG_DEVICE_ERROR, "cuda: device, got %d, expected 0 to %zu", id, devices.size() - 1);
  auto& device = devices[static_cast<size_t>(id)];
  if (!device) device = std::make_unique<const Device>(read_device(id));
  return *device;
}

CudaDeviceScope::CudaDeviceScope(int32_t id) {
  int now = -1;
  cuda_check(cudaGetDevice(&now), "asking for the current device");
  if (now == id) return;
  cuda_check(cudaSetDevice(id), "setting the tensors' device");
  before_ = now;
}
CudaDeviceScope::~CudaDeviceScope() {
  if (before_ >= 0) cudaSetDevice(before_);
}

void fail_no_cuda() { fail(THALWEG_INTERNAL, "cuda: got a call, expected none without a row for it"); }

}  // namespace thalweg
