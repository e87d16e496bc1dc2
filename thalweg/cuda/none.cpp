// A build without CUDA: calls with CUDA tensors end here, with the reason.
#include "thalweg/core/device.h"
#include "thalweg/core/fail.h"

namespace thalweg {

void fail_no_cuda() {
  fail(THALWEG_DEVICE_ERROR, "cuda: got CUDA tensors, expected CPU tensors (this library was built without CUDA)");
}

const Device& cuda_device(int32_t) { fail_no_cuda(); }
CudaDeviceScope::CudaDeviceScope(int32_t) { fail_no_cuda(); }
CudaDeviceScope::~CudaDeviceScope() = default;

}  // namespace thalweg

extern "C" thalweg_status thalweg_prepare(int32_t) {
  return thalweg::guard([] { thalweg::fail_no_cuda(); });
}
