// Every CUDA call goes through cuda_check: a failure becomes an Error with CUDA's own words.
#ifndef THALWEG_CUDA_CHECK_H
#define THALWEG_CUDA_CHECK_H

#include <cuda_runtime.h>

#include "thalweg/core/fail.h"

namespace thalweg::cuda {

// `what` says what the call was for: "launch of cuda_generic_fwd".
inline void cuda_check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // errors that do not stick are not the next call's
  fail(code == cudaErrorMemoryAllocation ? THALWEG_OUT_OF_MEMORY : THALWEG_DEVICE_ERROR, "cuda: %s: %s (%s)", what,
       cudaGetErrorString(code), cudaGetErrorName(code));
}

}  // namespace thalweg::cuda
#endif
