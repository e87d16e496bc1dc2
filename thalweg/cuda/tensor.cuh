// Elements of tensors of any dtype and stride on the device, to and from the arithmetic A (float or double).
#ifndef THALWEG_CUDA_TENSOR_CUH
#define THALWEG_CUDA_TENSOR_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "thalweg/core/types.h"

namespace thalweg::cuda {

__host__ __device__ inline bool is_there(const thalweg_tensor& t) { return t.dtype != THALWEG_NONE; }

// Element `offset` (in elements, as strides count) of a float tensor.
template <class A>
__device__ A load_at(const thalweg_tensor& t, int64_t offset) {
  switch (t.dtype) {
    case THALWEG_F64: return A(static_cast<const double*>(t.data)[offset]);
    case THALWEG_F32: return A(static_cast<const float*>(t.data)[offset]);
    case THALWEG_BF16: return A(__bfloat162float(static_cast<const __nv_bfloat16*>(t.data)[offset]));
    default: return A(__half2float(static_cast<const __half*>(t.data)[offset]));
  }
}

template <class A>
__device__ void store_at(const thalweg_tensor& t, int64_t offset, A x) {
  switch (t.dtype) {
    case THALWEG_F64: static_cast<double*>(t.data)[offset] = double(x); break;
    case THALWEG_F32: static_cast<float*>(t.data)[offset] = float(x); break;
    case THALWEG_BF16: static_cast<__nv_bfloat16*>(t.data)[offset] = __float2bfloat16_rn(float(x)); break;
    default: static_cast<__half*>(t.data)[offset] = __float2half_rn(float(x));
  }
}

// Element i, or (i, j) of rank 2, of an i32 or i64 tensor.
__device__ inline int64_t int_at(const thalweg_tensor& t, int64_t i, int64_t j = 0) {
  const int64_t at = i * t.stride[0] + (t.rank > 1 ? j * t.stride[1] : 0);
  return t.dtype == THALWEG_I64 ? static_cast<const int64_t*>(t.data)[at] : static_cast<const int32_t*>(t.data)[at];
}

// Sums over a warp; every lane gets the same number.
template <class A>
__device__ A warp_sum(A x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

template <class A>
__device__ A nan_of() {
  return A(__int_as_float(0x7fffffff));
}

}  // namespace thalweg::cuda
#endif
