// The logistic function, SiLU and their slopes in float32, with the unit's 2^x and 1/x: relative error 3e-7 + 6e-8 |x|.
// Below -88, where the sigmoid leaves the normal floats, 0. Infinities give the limits, NaN stays NaN.
#ifndef THALWEG_CUDA_SM90_SIGMOID_CUH
#define THALWEG_CUDA_SM90_SIGMOID_CUH

#include "thalweg/cuda/sm90/approx.cuh"

namespace thalweg::cuda {

constexpr float kMinusLog2E = -1.44269504088896341f, kSigmoidRange = 88.f;

__device__ __forceinline__ float fast_sigmoid(float x) {
  return approx_reciprocal(1.f + approx_exp2(x * kMinusLog2E));
}
__device__ __forceinline__ float fast_silu(float x) {
  return (x < -kSigmoidRange ? -kSigmoidRange : x) * fast_sigmoid(x);
}

// sigmoid(x) and 1 - sigmoid(x), this as sigmoid(x) e^-x: the difference would cancel. x within the range.
struct Logistic {
  float sigmoid, rest;
};
__device__ __forceinline__ Logistic logistic_of_bounded(float x) {
  const float e = approx_exp2(x * kMinusLog2E), s = approx_reciprocal(1.f + e);
  return {s, s * e};
}

// The slope; sigmoid(x) or silu(x) through the pointer.
__device__ __forceinline__ float fast_sigmoid_slope(float x, float* sigmoid) {
  const float low = x < -kSigmoidRange ? -kSigmoidRange : x;
  const Logistic l = logistic_of_bounded(low);
  *sigmoid = l.sigmoid;
  return l.sigmoid * l.rest;
}
__device__ __forceinline__ float fast_silu_slope(float x, float* silu) {
  const float low = x < -kSigmoidRange ? -kSigmoidRange : x, bounded = low > kSigmoidRange ? kSigmoidRange : low;
  const Logistic l = logistic_of_bounded(bounded);
  *silu = low * l.sigmoid;
  return l.sigmoid * fmaf(bounded, l.rest, 1.f);
}

}  // namespace thalweg::cuda
#endif
