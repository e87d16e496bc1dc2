// The gate in float32 on N elements, for the sm90 rows: as cpu/blocks/channel_gate.h, with the unit's 2^x and 1/x.
//
// y = x + dt_bias, a = exp(A_log), t = e^-|y| (softplus form) or e^-|a y|:
//
//   g = -a softplus(y),  softplus(y) = max(y, 0) + log(1 + t)       dg/dy = -a sigmoid(y)        dg/dA_log = g
//   g = lower_bound s,   s = sigmoid(a y)                           dg/dy = a dg/dz,  dg/dz = lower_bound s (1 - s)
//                                                                   dg/dA_log = dg/dz a y
//
// log(1 + t) is t times a polynomial, so it fades out with e^y: relative error of g 5e-6 at most down to 1e-30, of
// which 6e-8 |y| is the rounding of the exponent. Smaller results fade to 0. Heads with |A_log| above 18 take a slower
// way, in which a and its product with a tiny softplus or slope are two factors. NaN stays NaN.
#ifndef THALWEG_OPS_KDA_GATE_SM90_GATE_CUH
#define THALWEG_OPS_KDA_GATE_SM90_GATE_CUH

#include <cuda_fp16.h>

#include <type_traits>

#include "thalweg/cuda/sm90/approx.cuh"
#include "thalweg/cuda/tensor.cuh"

namespace thalweg::kda_gate {
namespace {

constexpr float kLog2E = 1.44269504088896341f, kUsualA_log = 18.f, kLargest = 3.402823466e38f;

// What A_log decides for a head.
struct HeadGate {
  float A_log, lower_bound;
  float rate;      // a; of an unusual head its root
  float scale;     // of y before `exponent`: 1, or of an unusual head the root of a power of two
  float exponent;  // log2(e) a / scale^2, or log2(e) in the softplus form
  bool usual;
};

// A_log of a head, as two floats: one alone would lose what float64 says, and gates far out multiply that by |a y|.
struct RateLog {
  float high, low;
};
__device__ __forceinline__ RateLog rate_log(const thalweg_tensor& A_log, int64_t hv) {
  const int64_t at = hv * A_log.stride[0];
  if (A_log.dtype != THALWEG_F64) return {cuda::is_there(A_log) ? cuda::load_at<float>(A_log, at) : 0.f, 0.f};
  const double exact = static_cast<const double*>(A_log.data)[at];
  const float high = float(exact);
  return {high, fabsf(high) <= 176.f ? float(exact - double(high)) : 0.f};
}

// log2(e) e^A_log for |A_log| up to 18: relative error 1.2e-7.
__device__ inline float exponent_of(RateLog A_log) {
  const float high = A_log.high * kLog2E, n = rintf(high + 0.52876637f);  // log2(log2(e)) joins the exponent
  const float rest = fmaf(A_log.high, 1.92596299e-8f, A_log.low * kLog2E);
  const float low = fmaf(A_log.high, kLog2E, -high) + rest + 0.52876637f;
  const float z = ((high - n) + low) * 0.693147181f;
  float p = fmaf(z, 1.98412698e-4f, 1.38888889e-3f);
  p = fmaf(p, z, 8.33333333e-3f);
  p = fmaf(p, z, 4.16666667e-2f);
  p = fmaf(p, z, 1.66666667e-1f);
  p = fmaf(p, z, 0.5f);
  p = fmaf(p, z, 1.f);
  return fmaf(p, z, 1.f) * __int_as_float((int(n) + 127) << 23);
}

template <bool kSoftplus>
__device__ __forceinline__ HeadGate head_gate(const thalweg_tensor& A_logs, int64_t hv, float lower_bound) {
  const RateLog A_log = rate_log(A_logs, hv);
  HeadGate gate{A_log.high, lower_bound, 1.f, 1.f, kLog2E, !(fabsf(A_log.high) > kUsualA_log)};
  if (gate.usual) {
    gate.rate = expf(A_log.high);
    if constexpr (!kSoftplus) gate.exponent = exponent_of(A_log);
    return gate;
  }
  // Past 176 every y that is not 0 saturates, and every softplus above 1e-38 overflows.
  const float bounded = fminf(176.f, fmaxf(-176.f, A_log.high));
  gate.rate = expf(0.5f * bounded);
  if constexpr (kSoftplus) return gate;
  const float high = bounded * kLog2E;  // as two floats: an exponent near 254 has a coarse last place
  const float low = fmaf(bounded, kLog2E, -high) + fmaf(bounded, 1.92596299e-8f, A_log.low * kLog2E);
  const float half = floorf(0.5f * high);
  gate.scale = exp2f(half);
  gate.exponent = exp2f((high - 2.f * half) + low) * kLog2E;
  return gate;
}

// log(1 + t) / t for t in [0, 1]: relative error 2e-7, where the result is rounded to f16 8e-6, to bf16 6e-5.
enum Accuracy { kFloat = 7, kForF16 = 5, kForBf16 = 4 };  // degrees

template <Accuracy kDegree = kFloat>
__device__ __forceinline__ float log1p_ratio(float t) {
  if constexpr (kDegree == kForBf16) {
    float p = fmaf(t, 4.134730237e-2f, -1.574272070e-1f);
    p = fmaf(p, t, 3.063009293e-1f);
    p = fmaf(p, t, -4.969778053e-1f);
    return fmaf(p, t, 9.999432779e-1f);
  }
  if constexpr (kDegree == kForF16) {
    float p = fmaf(t, -2.386915171e-2f, 1.012222848e-1f);
    p = fmaf(p, t, -2.100486900e-1f);
    p = fmaf(p, t, 3.252066803e-1f);
    p = fmaf(p, t, -4.993613647e-1f);
    return fmaf(p, t, 9.999915982e-1f);
  }
  float p = fmaf(t, -8.53924969e-3f, 4.40897769e-2f);
  p = fmaf(p, t, -1.076819123e-1f);
  p = fmaf(p, t, 1.774525483e-1f);
  p = fmaf(p, t, -2.449546738e-1f);
  p = fmaf(p, t, 3.327548051e-1f);
  p = fmaf(p, t, -4.999740544e-1f);
  return fmaf(p, t, 9.999998057e-1f);
}

// What g of this type needs.
template <class G>
constexpr Accuracy kAccuracy = sizeof(G) == 4              ? kFloat
                               : std::is_same_v<G, __half> ? kForF16
                                                           : kForBf16;

// ---- usual heads ------------------------------------------------------------------------------------

// g of y.
template <bool kSoftplus, Accuracy kDegree>
__device__ __forceinline__ float usual_gate(const HeadGate& gate, float y) {
  const float t = cuda::approx_exp2(fabsf(y) * (kSoftplus ? -kLog2E : -gate.exponent));
  if constexpr (kSoftplus) return -gate.rate * fmaf(t, log1p_ratio<kDegree>(t), fmaxf(y, 0.f));
  const float r = gate.lower_bound * cuda::approx_reciprocal(1.f + t);
  return y < 0.f ? t * r : r;
}

struct Slopes {
  float y, A_log;
};

template <bool kSoftplus>
__device__ __forceinline__ Slopes usual_slopes(const HeadGate& gate, float y) {
  const float size = fabsf(y), rate = kSoftplus ? -kLog2E : -gate.exponent, power = size * rate;
  float t = cuda::approx_exp2(power);
  // What rounding the product lost: the terms of d_A_log may nearly cancel.
  if constexpr (!kSoftplus) t = fmaf(t, fmaf(size, rate, -power) * 0.693147181f, t);
  const float r = cuda::approx_reciprocal(1.f + t);
  if constexpr (kSoftplus)
    return {-gate.rate * (y < 0.f ? t * r : r), -gate.rate * fmaf(t, log1p_ratio(t), fmaxf(y, 0.f))};
  const float slope = t * (gate.lower_bound * r) * r;  // dg/dz
  return {slope * gate.rate, t == 0.f ? 0.f : slope * (gate.rate * y)};
}

// ---- unusual heads ----------------------------------------------------------------------------------

// What a gradient d is multiplied with, one after another: d may be what keeps the product finite.
struct Factors {
  float g;
  float y, y_factor;
  float A_log, A_log_factor;
};

// a t is e^(A_log + y): its square root is `half`, and what rounding the sum lost is `lost`.
__device__ inline Factors unusual_softplus(const HeadGate& gate, float y) {
  const float A_log = fminf(1e4f, fmaxf(-1e4f, gate.A_log)), low = fmaxf(-2e4f, y < 0.f ? y : 0.f);
  const float sum = A_log + low, part = sum - A_log, lost = 1.f + ((A_log - (sum - part)) + (low - part));
  const float half = expf(0.5f * fminf(176.f, sum)), t = expf(-fabsf(y));
  const float softplus = lost * (y < 0.f ? log1p_ratio(t) : fmaf(t, log1p_ratio(t), y));
  return {-half * softplus * half, -half * lost / (1.f + t), half, fmaxf(-kLargest, -half * softplus), half};
}

__device__ inline Factors unusual_bounded(const HeadGate& gate, float y) {
  const float size = fabsf(y) * gate.scale * gate.scale;
  const float t = exp2f(-fminf(size * gate.exponent, 160.f)), r = gate.lower_bound / (1.f + t);
  const float slope = t * r / (1.f + t), z = fminf(size, 200.f / gate.exponent) * (gate.exponent / kLog2E);
  return {y < 0.f ? t * r : r, slope * gate.rate, gate.rate, t == 0.f ? 0.f : slope * copysignf(z, y), 1.f};
}

template <bool kSoftplus>
__device__ __forceinline__ Factors unusual_gate(const HeadGate& gate, float y) {
  if constexpr (kSoftplus) return unusual_softplus(gate, y);
  return unusual_bounded(gate, y);
}

}  // namespace
}  // namespace thalweg::kda_gate
#endif
