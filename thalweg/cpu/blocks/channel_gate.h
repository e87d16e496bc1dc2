// The per-channel gate of Kimi Delta Attention on float vectors, for files compiled per instruction set.
//
// With x = raw gate + dt_bias and a = exp(A_log), the natural-log gate is
//
//   g = -a softplus(x)                 the softplus form; softplus(x) = max(x, 0) + log(1 + t),  t = e^-|x|
//   g = lower_bound sigmoid(a x)       the lower-bound form; without A_log a is 1
//
// A ChannelGate holds what one head's A_log decides. Usual heads (|A_log| <= 18) take about 25 instructions a
// vector; others a slower way, in which a and its product with a tiny softplus or slope are two factors, so that
// what is finite as a whole stays finite: A_log = 90 is beyond float32.
//
// Relative error of g where |g| is 1e-30 or more: 6e-7 + 1.3e-8 |x| below 0 in the softplus form (x itself above
// 17, where float32 cannot tell), 6e-7 + 6e-8 |a x| in the lower-bound form. Smaller results fade to 0. Where the
// gate saturates, g is at its limit and the slopes are 0. NaN stays NaN.
#ifndef THALWEG_CPU_BLOCKS_CHANNEL_GATE_H
#define THALWEG_CPU_BLOCKS_CHANNEL_GATE_H

#include "thalweg/cpu/blocks/sigmoid.h"

namespace thalweg {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kUsualA_log = 18.f;  // e^18 times the smallest normal float is below 1e-30

struct ChannelGate {
  float A_log;
  float lower_bound;  // 0: the softplus form
  float rate;         // a; of an unusual head exp(A_log / 2), the root of a
  float scale;        // of x before `exponent`: 1, or of an unusual head the root of a power of two
  float exponent;     // log2(e) a / scale^2; log2(e) in the softplus form
  float lowest;       // -|x scale^2| below this is taken as this: t is 0
  bool usual;
};

// What the gradient d of g is multiplied with; the factors are apart so that d may be what keeps them finite.
struct GateSlopes {
  vf g;
  vf x, x_factor;          // dg/dx = x x_factor
  vf A_log, A_log_factor;  // dg/dA_log = A_log A_log_factor
};

inline ChannelGate channel_gate(bool has_A_log, float A_log, float lower_bound) {
  if (!has_A_log) A_log = 0.f;
  ChannelGate gate{A_log, lower_bound, 1.f, 1.f, kLog2E, -88.f, !(A_log > kUsualA_log || A_log < -kUsualA_log)};
  if (gate.usual) {
    gate.rate = float(__builtin_exp(double(A_log)));
    if (lower_bound == 0.f) return gate;
    gate.exponent = float(__builtin_exp(double(A_log)) * 1.44269504088896341);
  } else {
    // Past 176 every x that is not 0 saturates, and every softplus above 1e-38 overflows.
    const double bounded = A_log > 176.f ? 176. : A_log < -176.f ? -176. : double(A_log);
    gate.rate = float(__builtin_exp(0.5 * bounded));
    if (lower_bound == 0.f) return gate;
    const double exponent = bounded * 1.44269504088896341;
    const double half = __builtin_floor(0.5 * exponent);
    gate.scale = float(__builtin_exp2(half));
    gate.exponent = float(__builtin_exp2(exponent - 2. * half) * 1.44269504088896341);
  }
  gate.lowest = -127.f / gate.exponent;
  return gate;
}

// -|x|
[[gnu::always_inline]] inline vf minus_abs(vf x) { return min(x, zero() - x); }

// 2^(x exponent) for x exponent in [-127, 0]; 0 below -126.5.
[[gnu::always_inline]] inline vf power(vf x, vf exponent) {
  typedef int32_t Whole __attribute__((vector_size(sizeof(vf))));
  const vf magic = set1(12582912.f + 127.f);  // 1.5 * 2^23: rounds to whole; 127 is the bias of float32
  const vf shifted = fma(x, exponent, magic);
  const vf p = power_of_fraction(fma(x, exponent, magic - shifted));
  return p * vf(Whole(shifted) << 23);  // a product, since adding to the exponent would lose NaN
}

// log(1 + t) / t for t in [0, 1], to 2e-7.
[[gnu::always_inline]] inline vf log1p_ratio(vf t) {
  const vf z = t * t;
  vf even = set1(4.40897769e-2f), odd = set1(-8.53924969e-3f);
  even = fma(even, z, set1(1.774525483e-1f)), odd = fma(odd, z, set1(-1.076819123e-1f));
  even = fma(even, z, set1(3.327548051e-1f)), odd = fma(odd, z, set1(-2.449546738e-1f));
  even = fma(even, z, set1(9.999998057e-1f)), odd = fma(odd, z, set1(-4.999740544e-1f));
  return fma(odd, t, even);
}

// 1 / d to 1 ulp for d in [1, 2].
[[gnu::always_inline]] inline vf reciprocal(vf d) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
  const vf r = _mm512_maskz_rcp14_ps(__mmask16(-1), d);
  return fma(r, fnma(d, r, set1(1.f)), r);
#elif defined(__AVX2__) && defined(__FMA__)
  const vf r = _mm256_rcp_ps(d);
  return fma(r, fnma(d, r, set1(1.f)), r);
#else
  return set1(1.f) / d;
#endif
}

// ---- the softplus form ------------------------------------------------------------------------------

[[gnu::always_inline]] inline vf usual_softplus_gate(const ChannelGate& gate, vf x) {
  const vf t = power(max(set1(-88.f), minus_abs(x)), set1(kLog2E));
  return set1(-gate.rate) * fma(t, log1p_ratio(t), max(zero(), x));
}
[[gnu::always_inline]] inline vf usual_softplus_slope(const ChannelGate& gate, vf x, vf* g) {
  const vf t = power(max(set1(-88.f), minus_abs(x)), set1(kLog2E)), rate = set1(-gate.rate);
  *g = rate * fma(t, log1p_ratio(t), max(zero(), x));
  const vf r = reciprocal(t + set1(1.f));
  return rate * where_greater(zero(), x, t * r, r);
}

// a t is e^(A_log + x): its square root is `half`, and what rounding the sum lost is `lost`.
inline GateSlopes unusual_softplus(const ChannelGate& gate, vf x) {
  const vf A_log = min(set1(1e4f), max(set1(-1e4f), set1(gate.A_log))), one = set1(1.f);
  const vf low = max(set1(-2e4f), min(zero(), x)), sum = A_log + low, part = sum - A_log;
  const vf lost = one + ((A_log - (sum - part)) + (low - part));
  const vf half = exp(set1(0.5f) * min(set1(176.f), sum)), t = exp(minus_abs(x)), ratio = log1p_ratio(t);
  const vf softplus = lost * where_greater(zero(), x, ratio, fma(t, ratio, max(zero(), x)));
  const vf rate = zero() - half;
  return {rate * softplus * half, rate * lost * reciprocal(t + one), half, rate * softplus, half};
}

// ---- the lower-bound form ---------------------------------------------------------------------------

[[gnu::always_inline]] inline vf scaled(const ChannelGate& gate, vf x) {  // -|x scale^2|
  const vf s = set1(gate.scale);
  return max(set1(gate.lowest), minus_abs(x) * s * s);
}
[[gnu::always_inline]] inline vf lower_bound_gate(const ChannelGate& gate, vf x) {
  const vf t = power(scaled(gate, x), set1(gate.exponent)), r = reciprocal(t + set1(1.f));
  return set1(gate.lower_bound) * where_greater(zero(), x, t * r, r);
}
[[gnu::always_inline]] inline GateSlopes lower_bound_slopes(const ChannelGate& gate, vf x) {
  const vf u = scaled(gate, x), t = power(u, set1(gate.exponent)), r = reciprocal(t + set1(1.f));
  const vf bound = set1(gate.lower_bound), slope = bound * (t * r * r);
  const vf size = u * set1(gate.exponent * 0.693147180559945309f);  // -|a x|
  const vf rate = set1(gate.rate);
  return {bound * where_greater(zero(), x, t * r, r), slope * rate, gate.usual ? set1(1.f) : rate,
          slope * where_greater(zero(), x, size, zero() - size), set1(1.f)};
}

// ---- either -----------------------------------------------------------------------------------------

// Every slope of g. x = raw + dt_bias.
[[gnu::always_inline]] inline GateSlopes gate_slopes(const ChannelGate& gate, vf x) {
  if (gate.lower_bound != 0.f) return lower_bound_slopes(gate, x);
  if (!gate.usual) return unusual_softplus(gate, x);
  vf g;
  const vf slope = usual_softplus_slope(gate, x, &g), one = set1(1.f);
  return {g, slope, one, g, one};
}

// g of x = raw + dt_bias.
[[gnu::always_inline]] inline vf gate_of(const ChannelGate& gate, vf x) {
  if (gate.lower_bound != 0.f) return lower_bound_gate(gate, x);
  return gate.usual ? usual_softplus_gate(gate, x) : unusual_softplus(gate, x).g;
}

// dg/dx, and g. A slope beyond float32 counts as the largest float, so that 0 times it is 0.
[[gnu::always_inline]] inline vf gate_slope(const ChannelGate& gate, vf x, vf* g) {
  const GateSlopes slopes = gate_slopes(gate, x);
  *g = slopes.g;
  return max(set1(-3.402823466e38f), slopes.x * slopes.x_factor);
}

}  // namespace
}  // namespace thalweg
#endif
