// thalweg_prepare: the device's context, and every kernel loaded into it, before a caller captures.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <vector>

#include "thalweg/core/device.h"
#include "thalweg/core/fail.h"
#include "thalweg/cuda/check.h"

namespace thalweg::cuda {

bool list_file(const void* kernel);  // launch.h

namespace {

std::vector<const void*>& files() {
  static std::vector<const void*> kernels;
  return kernels;
}

// A function of the driver, found through the runtime, so that nothing links against the driver.
template <class Function>
Function driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  cuda_check(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess)
    fail(THALWEG_DEVICE_ERROR, "cuda: %s: got a driver without it, expected one of CUDA 12.5 or later", name);
  return reinterpret_cast<Function>(function);
}

void driver_check(CUresult code, const char* what) {
  if (code != CUDA_SUCCESS) fail(THALWEG_DEVICE_ERROR, "cuda: %s: CUresult %d", what, int(code));
}

// Loads the kernels of the library that `listed` belongs to.
void load_file(const void* listed) {
  const auto library_of = driver_function<PFN_cuKernelGetLibrary_v12050>("cuKernelGetLibrary", 12050);
  const auto count_of = driver_function<PFN_cuLibraryGetKernelCount_v12040>("cuLibraryGetKernelCount", 12040);
  const auto enumerate = driver_function<PFN_cuLibraryEnumerateKernels_v12040>("cuLibraryEnumerateKernels", 12040);
  const auto function_of = driver_function<PFN_cuKernelGetFunction_v12000>("cuKernelGetFunction", 12000);
  const auto load = driver_function<PFN_cuFuncLoad_v12040>("cuFuncLoad", 12040);
  cudaKernel_t kernel;
  cuda_check(cudaGetKernel(&kernel, listed), "looking for a file's kernels");
  CUlibrary library;
  driver_check(library_of(&library, kernel), "cuKernelGetLibrary");
  unsigned count = 0;
  driver_check(count_of(&count, library), "cuLibraryGetKernelCount");
  std::vector<CUkernel> kernels(count);
  driver_check(enumerate(kernels.data(), count, library), "cuLibraryEnumerateKernels");
  for (CUkernel each : kernels) {
    CUfunction function;
    driver_check(function_of(&function, each), "cuKernelGetFunction");
    driver_check(load(function), "cuFuncLoad");
  }
}

}  // namespace

bool list_file(const void* kernel) {
  files().push_back(kernel);
  return true;
}

}  // namespace thalweg::cuda

extern "C" thalweg_status thalweg_prepare(int32_t id) {
  return thalweg::guard([&] {
    thalweg::cuda_device(id);
    thalweg::CudaDeviceScope scope(id);
    thalweg::cuda::cuda_check(cudaFree(nullptr), "making the device's context");
    for (const void* kernel : thalweg::cuda::files()) thalweg::cuda::load_file(kernel);
  });
}
