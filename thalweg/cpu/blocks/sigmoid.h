// The logistic function, SiLU and its slope for kernels that memory bounds, for files compiled per
// instruction set. About half the instructions of simd.h's exp and a division:
//
//   e = 2^(-x log2 e), the fraction by a polynomial of degree 5; 1 / (1 + e) by estimate and Newton step.
//
// sigmoid to about 4 ulp for |x| <= 20, then 1.3e-8 |x| more from log2 e in one float; 0 below -87.3,
// where it leaves the normal floats. Infinities give the limits (silu(-inf) = 0), NaN stays NaN.
#ifndef THALWEG_CPU_BLOCKS_SIGMOID_H
#define THALWEG_CPU_BLOCKS_SIGMOID_H

#include "thalweg/cpu/simd.h"

namespace thalweg {
namespace {

constexpr float kSigmoidRange = 87.3f;

// 2^f, |f| <= 1/2, to 1.3 ulp.
[[gnu::always_inline]] inline vf power_of_fraction(vf f) {
  vf p = set1(1.326472149e-3f);
  p = fma(p, f, set1(9.671512991e-3f));
  p = fma(p, f, set1(5.550733581e-2f));
  p = fma(p, f, set1(2.402224243e-1f));
  p = fma(p, f, set1(6.931470037e-1f));
  return fma(p, f, set1(1.f));
}

// sigmoid(x) and e = exp(-x): 1 - sigmoid(x) is sigmoid e, exact where the difference would cancel.
struct Logistic {
  vf sigmoid, e;
};

// x within the range of logistic_of_bounded; NaN stays.
[[gnu::always_inline]] inline vf bounded_for_sigmoid(vf x) {
  return min(set1(kSigmoidRange), max(set1(-kSigmoidRange), x));
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
[[gnu::always_inline]] inline Logistic logistic_of_bounded(vf x) {
  const vf minus_log2e = set1(-1.44269504088896341f);
  const vf n = round(x * minus_log2e);
  const vf e = scale_by_power(power_of_fraction(fma(x, minus_log2e, zero() - n)), n), d = e + set1(1.f);
  const vf r = _mm512_maskz_rcp14_ps(__mmask16(-1), d);
  return {fma(r, fnma(d, r, set1(1.f)), r), e};
}
#elif defined(__AVX2__) && defined(__FMA__)
[[gnu::always_inline]] inline Logistic logistic_of_bounded(vf x) {
  const vf minus_log2e = set1(-1.44269504088896341f);
  const vf magic = set1(12582912.f + 127.f);  // 1.5 * 2^23: rounds to whole; 127 is the bias of float32
  const vf shifted = fma(x, minus_log2e, magic);
  const vf p = power_of_fraction(fma(x, minus_log2e, magic - shifted));
  const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  const vf e = p * _mm256_castsi256_ps(power), d = e + set1(1.f);  // a product: NaN stays, whatever its bits
  const vf r = _mm256_rcp_ps(d);
  return {fma(r, fnma(d, r, set1(1.f)), r), e};
}
#else
inline Logistic logistic_of_bounded(vf x) {
  const vf e = exp(zero() - x);
  return {set1(1.f) / (set1(1.f) + e), e};
}
#endif

// 0 where x is below the range.
[[gnu::always_inline]] inline vf zero_below_range(vf x, vf s) {
  return where_greater(set1(-kSigmoidRange), x, zero(), s);
}

[[gnu::always_inline]] inline vf fast_sigmoid(vf x) {
  return zero_below_range(x, logistic_of_bounded(bounded_for_sigmoid(x)).sigmoid);
}
[[gnu::always_inline]] inline vf fast_silu(vf x) {
  const vf low = max(set1(-kSigmoidRange), x);
  return zero_below_range(x, low * logistic_of_bounded(min(set1(kSigmoidRange), low)).sigmoid);
}
// The slopes: s (1 - s), and s (1 + x (1 - s)).
[[gnu::always_inline]] inline vf fast_sigmoid_slope(vf x, vf* sigmoid) {
  const Logistic l = logistic_of_bounded(bounded_for_sigmoid(x));
  *sigmoid = zero_below_range(x, l.sigmoid);
  const vf slope = where_greater(x, set1(kSigmoidRange), zero(), l.sigmoid * (l.sigmoid * l.e));
  return zero_below_range(x, slope);
}
[[gnu::always_inline]] inline vf fast_silu_slope(vf x, vf* silu) {
  const vf bounded = bounded_for_sigmoid(x);
  const Logistic l = logistic_of_bounded(bounded);
  *silu = zero_below_range(x, max(set1(-kSigmoidRange), x) * l.sigmoid);
  return zero_below_range(x, l.sigmoid * fma(bounded, l.sigmoid * l.e, set1(1.f)));
}

}  // namespace
}  // namespace thalweg
#endif
