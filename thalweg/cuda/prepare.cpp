// thalweg_prepare: the device's context, made before a caller captures.
#include <cuda_runtime.h>

#include "thalweg/core/device.h"
#include "thalweg/core/fail.h"
#include "thalweg/cuda/check.h"

extern "C" thalweg_status thalweg_prepare(int32_t id) {
  return thalweg::guard([&] {
    thalweg::cuda_device(id);
    thalweg::CudaDeviceScope scope(id);
    thalweg::cuda::cuda_check(cudaFree(nullptr), "making the device's context");
  });
}
