// The gate's activation on float vectors. For files compiled per instruction set only.
#ifndef THALWEG_OPS_GATED_RMS_NORM_VEC_H
#define THALWEG_OPS_GATED_RMS_NORM_VEC_H

#include "thalweg/cpu/blocks/rows.h"
#include "thalweg/cpu/blocks/sigmoid.h"
#include "thalweg/ops/gated_rms_norm/problem.h"

namespace thalweg::gated_rms_norm {
namespace {

constexpr float kSmallest = 1.1754943508222875e-38f;

// a(gate)
template <Gate kGate>
[[gnu::always_inline]] inline vf activate(vf g) {
  if constexpr (kGate == kNoGate) return set1(1.f);
  if constexpr (kGate == kSigmoid) return fast_sigmoid(g);
  return fast_silu(g);
}

// a(gate) and its slope; their limits at the infinities.
template <Gate kGate>
[[gnu::always_inline]] inline vf activate(vf g, vf* slope) {
  *slope = zero();
  vf a = set1(1.f);
  if constexpr (kGate == kSilu) *slope = fast_silu_slope(g, &a);
  if constexpr (kGate == kSigmoid) *slope = fast_sigmoid_slope(g, &a);
  return a;
}

// Sum of squares of n elements.
template <class S>
[[gnu::always_inline]] inline float sum_of_squares(const typename S::Element* x, int64_t n) {
  vf sum[4] = {zero(), zero(), zero(), zero()};
  int64_t d = 0;
  for (; d + 4 * kLanes <= n; d += 4 * kLanes)
    for (int v = 0; v < 4; ++v) {
      const vf a = S::load(x + d + v * kLanes);
      sum[v] = fma(a, a, sum[v]);
    }
  for (; d + kLanes <= n; d += kLanes) {
    const vf a = S::load(x + d);
    sum[0] = fma(a, a, sum[0]);
  }
  if (d < n) {
    const vf a = S::load_n(x + d, n - d);
    sum[1] = fma(a, a, sum[1]);
  }
  return hsum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// 1 / sqrt(mean + eps) of a row.
template <class S>
[[gnu::always_inline]] inline float reciprocal_rms(const typename S::Element* x, int64_t n, float eps) {
  return 1.f / __builtin_sqrtf(sum_of_squares<S>(x, n) / float(n > 0 ? n : 1) + eps);
}

inline float float_eps(double eps) { return eps < double(kSmallest) ? kSmallest : float(eps); }

// True when every row of t starts where streamed stores may.
inline bool is_stream_aligned(const thalweg_tensor& t, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(t.data) % kStreamAlign == 0 && t.stride[0] * bytes % kStreamAlign == 0;
}

template <class E>
E* row_at(const thalweg_tensor& t, int64_t m) {
  return static_cast<E*>(t.data) + m * t.stride[0];
}

}  // namespace
}  // namespace thalweg::gated_rms_norm
#endif
