// Single instructions of the special-function unit, without the handling of subnormals that nvcc adds around them.
#ifndef THALWEG_CUDA_SM90_APPROX_CUH
#define THALWEG_CUDA_SM90_APPROX_CUH

namespace thalweg::cuda {

// 2^x to 2 ulp; results and arguments below 2^-126 count as 0 (of the argument: 2^0 is 1). NaN stays NaN.
__device__ __forceinline__ float approx_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to 1 ulp; of infinity 0, of a subnormal an infinity.
__device__ __forceinline__ float approx_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace thalweg::cuda
#endif
