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
// A vector's instructions are one chain of 75 cycles. Kernels that memory bounds take N vectors at once, step by
// step, so that N chains overlap: the functions on arrays, in place of x.
//
// Relative error of g where |g| is 1e-30 or more: 6e-7 + 1.3e-8 |x| below 0 in the softplus form (x itself above
// 17, where float32 cannot tell), 6e-7 + 6e-8 |a x| in the lower-bound form; 9e-7 instead of 6e-7 with kTable. Smaller
// results fade to 0. Where the gate saturates, g is at its limit and the slopes are 0. NaN stays NaN.
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
  float exponent;     // log2(e) a / scale^2
  float highest;      // |x scale^2| above this is taken as this: t is 0
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
  ChannelGate gate{A_log, lower_bound, 1.f, 1.f, kLog2E, 88.f, !(A_log > kUsualA_log || A_log < -kUsualA_log)};
  if (gate.usual) {
    gate.rate = float(__builtin_exp(double(A_log)));
    if (lower_bound == 0.f) return gate;
    gate.exponent = float(__builtin_exp(double(A_log)) * 1.44269504088896341);
  } else {
    // Past 176 every x that is not 0 saturates, and every softplus above 1e-38 overflows.
    const double bounded = A_log > 176.f ? 176. : A_log < -176.f ? -176. : double(A_log);
    gate.rate = float(__builtin_exp(0.5 * bounded));
    if (lower_bound == 0.f) return gate;
    const double exponent = bounded * 1.44269504088896341, half = __builtin_floor(0.5 * exponent);
    gate.scale = float(__builtin_exp2(half));
    gate.exponent = float(__builtin_exp2(exponent - 2. * half) * 1.44269504088896341);
  }
  gate.highest = 127.f / gate.exponent;
  return gate;
}

// ---- steps on N vectors -----------------------------------------------------------------------------

typedef int32_t Whole __attribute__((vector_size(sizeof(vf))));

// On Zen 3, max, min and comparisons of floats go where multiplications go; these do not.
[[gnu::always_inline]] inline vf absolute(vf x) { return vf(Whole(x) & 0x7fffffff); }
// max(0, x), where NaN need not stay.
[[gnu::always_inline]] inline vf positive_part(vf x) { return vf(Whole(x) > 0 ? Whole(x) : Whole{}); }
// y where x has a minus sign, else z.
[[gnu::always_inline]] inline vf where_negative(vf x, vf y, vf z) { return Whole(x) < 0 ? y : z; }

template <int64_t N, class Step>
[[gnu::always_inline]] inline void each(Step step) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < N; ++i) step(i);
}

// t = 2^(x exponent) for x exponent in [-127, 128.5]; 0 below -126.5.
template <int64_t N>
[[gnu::always_inline]] inline void power(const vf (&x)[N], vf exponent, vf (&t)[N]) {
  const vf magic = set1(12582912.f + 127.f);  // 1.5 * 2^23: rounds to whole; 127 is the bias of float32
  vf shifted[N], f[N];
  each<N>([&](int64_t i) { shifted[i] = fma(x[i], exponent, magic); });
  each<N>([&](int64_t i) { f[i] = fma(x[i], exponent, magic - shifted[i]); });
  // As power_of_fraction() of sigmoid.h.
  each<N>([&](int64_t i) { t[i] = fma(f[i], set1(1.326472149e-3f), set1(9.671512991e-3f)); });
  each<N>([&](int64_t i) { t[i] = fma(t[i], f[i], set1(5.550733581e-2f)); });
  each<N>([&](int64_t i) { t[i] = fma(t[i], f[i], set1(2.402224243e-1f)); });
  each<N>([&](int64_t i) { t[i] = fma(t[i], f[i], set1(6.931470037e-1f)); });
  each<N>([&](int64_t i) { t[i] = fma(t[i], f[i], set1(1.f)); });
  // A product, since adding to the exponent would lose NaN.
  each<N>([&](int64_t i) { t[i] = t[i] * vf(Whole(shifted[i]) << 23); });
}
[[gnu::always_inline]] inline vf power(vf x, vf exponent) {
  const vf one[1] = {x};
  vf t[1];
  power(one, exponent, t);
  return t[0];
}

// t = 2^(x exponent), or 1 more, to 5e-7, for x exponent in [-127, 127]; the power is 0 below -126.5. With steps of
// 1/16 or 1/8 of a power of two from a table that is one register, whose shuffles leave the multipliers free. For gates
// that go to memory (kTable): sums of slopes may cancel, and saturated ones must be 0.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
// The bits of 2^(j/16), less j where the shift below will add it.
alignas(64) constexpr uint32_t kRoots[16] = {
    0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
    0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};
template <int64_t N, bool kPlusOne>
[[gnu::always_inline]] inline void table_power(const vf (&x)[N], vf exponent, vf (&t)[N]) {
  const vf magic = set1(786432.f);  // 1.5 * 2^19: rounds to sixteenths
  const __m512i roots = _mm512_load_si512(kRoots);
  vf shifted[N], f[N], p[N];
  each<N>([&](int64_t i) { shifted[i] = fma(x[i], exponent, magic); });
  each<N>([&](int64_t i) { f[i] = fma(x[i], exponent, magic - shifted[i]); });
  each<N>([&](int64_t i) { p[i] = fma(f[i], set1(2.402194589e-1f), set1(6.931878328e-1f)); });
  each<N>([&](int64_t i) { p[i] = fma(p[i], f[i], set1(1.f)); });
  each<N>([&](int64_t i) {
    const __m512i at = _mm512_castps_si512(shifted[i]);
    const __m512i root = _mm512_maskz_permutexvar_epi32(__mmask16(-1), at, roots);
    const vf power = _mm512_castsi512_ps(_mm512_add_epi32(root, _mm512_maskz_slli_epi32(__mmask16(-1), at, 19)));
    t[i] = kPlusOne ? fma(p[i], power, set1(1.f)) : p[i] * power;
  });
}
#elif defined(__AVX2__) && defined(__FMA__)
alignas(32) constexpr uint32_t kRoots[8] = {0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                            0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};
template <int64_t N, bool kPlusOne>
[[gnu::always_inline]] inline void table_power(const vf (&x)[N], vf exponent, vf (&t)[N]) {
  const vf magic = set1(1572864.f);  // 1.5 * 2^20: rounds to eighths
  const __m256i roots = _mm256_load_si256(reinterpret_cast<const __m256i*>(kRoots));
  vf shifted[N], f[N], p[N];
  each<N>([&](int64_t i) { shifted[i] = fma(x[i], exponent, magic); });
  each<N>([&](int64_t i) { f[i] = fma(x[i], exponent, magic - shifted[i]); });
  each<N>([&](int64_t i) { p[i] = fma(f[i], set1(5.549890175e-2f), set1(2.402640730e-1f)); });
  each<N>([&](int64_t i) { p[i] = fma(p[i], f[i], set1(6.931471825e-1f)); });
  each<N>([&](int64_t i) { p[i] = fma(p[i], f[i], set1(1.f)); });
  each<N>([&](int64_t i) {
    const __m256i at = _mm256_castps_si256(shifted[i]), root = _mm256_permutevar8x32_epi32(roots, at);
    const vf power = _mm256_castsi256_ps(_mm256_add_epi32(root, _mm256_slli_epi32(at, 20)));
    t[i] = kPlusOne ? fma(p[i], power, set1(1.f)) : p[i] * power;
  });
}
#else
template <int64_t N, bool kPlusOne>
inline void table_power(const vf (&x)[N], vf exponent, vf (&t)[N]) {
  power(x, exponent, t);
  if constexpr (kPlusOne) each<N>([&](int64_t i) { t[i] = t[i] + set1(1.f); });
}
#endif

// log(1 + t) / t for t in [0, 1], to 2e-7.
template <int64_t N>
[[gnu::always_inline]] inline void log1p_ratio(const vf (&t)[N], vf (&p)[N]) {
  each<N>([&](int64_t i) { p[i] = fma(t[i], set1(-8.53924969e-3f), set1(4.40897769e-2f)); });
  each<N>([&](int64_t i) { p[i] = fma(p[i], t[i], set1(-1.076819123e-1f)); });
  each<N>([&](int64_t i) { p[i] = fma(p[i], t[i], set1(1.774525483e-1f)); });
  each<N>([&](int64_t i) { p[i] = fma(p[i], t[i], set1(-2.449546738e-1f)); });
  each<N>([&](int64_t i) { p[i] = fma(p[i], t[i], set1(3.327548051e-1f)); });
  each<N>([&](int64_t i) { p[i] = fma(p[i], t[i], set1(-4.999740544e-1f)); });
  each<N>([&](int64_t i) { p[i] = fma(p[i], t[i], set1(9.999998057e-1f)); });
}

// 1 / d to 12 bits or more, for d up to 2^127; 0 above 2^126.
template <int64_t N>
[[gnu::always_inline]] inline void approximate_reciprocal(const vf (&d)[N], vf (&r)[N]) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
  each<N>([&](int64_t i) {
    r[i] = _mm512_maskz_rcp14_ps(_mm512_cmp_ps_mask(d[i], set1(0x1p126f), _CMP_NGT_UQ), d[i]);  // NaN too
  });
#elif defined(__AVX2__) && defined(__FMA__)
  each<N>([&](int64_t i) { r[i] = _mm256_rcp_ps(d[i]); });
#else
  each<N>([&](int64_t i) { r[i] = where_greater(d[i], set1(0x1p126f), zero(), set1(1.f) / d[i]); });
#endif
}

// 1 / (1 + t) to 1 ulp for t in [0, 1].
template <int64_t N>
[[gnu::always_inline]] inline void reciprocal(const vf (&t)[N], vf (&r)[N]) {
  const vf one = set1(1.f);
  vf d[N];
  each<N>([&](int64_t i) { d[i] = t[i] + one; });
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
  each<N>([&](int64_t i) { r[i] = _mm512_maskz_rcp14_ps(__mmask16(-1), d[i]); });
  each<N>([&](int64_t i) { r[i] = fma(r[i], fnma(d[i], r[i], one), r[i]); });
#elif defined(__AVX2__) && defined(__FMA__)
  each<N>([&](int64_t i) { r[i] = _mm256_rcp_ps(d[i]); });
  each<N>([&](int64_t i) { r[i] = fma(r[i], fnma(d[i], r[i], one), r[i]); });
#else
  each<N>([&](int64_t i) { r[i] = one / d[i]; });
#endif
}

// ---- the softplus form ------------------------------------------------------------------------------

// g in place of x, and dg/dx where it is wanted (`slope` may be null).
template <int64_t N, bool kSlope, bool kTable = false>
[[gnu::always_inline]] inline void usual_softplus(const ChannelGate& gate, vf (&x)[N], vf* slope) {
  const vf rate = set1(-gate.rate);
  vf t[N], p[N];
  each<N>([&](int64_t i) { p[i] = min(set1(88.f), absolute(x[i])); });
  if constexpr (kTable) table_power<N, false>(p, set1(-kLog2E), t);
  else power(p, set1(-kLog2E), t);
  if constexpr (kSlope) {
    vf r[N];
    reciprocal(t, r);
    each<N>([&](int64_t i) { slope[i] = rate * where_negative(x[i], t[i] * r[i], r[i]); });
  }
  log1p_ratio(t, p);
  each<N>([&](int64_t i) { x[i] = rate * fma(t[i], p[i], positive_part(x[i])); });
}

// a t is e^(A_log + x): its square root is `half`, and what rounding the sum lost is `lost`.
inline GateSlopes unusual_softplus(const ChannelGate& gate, vf x) {
  const vf A_log = min(set1(1e4f), max(set1(-1e4f), set1(gate.A_log))), one = set1(1.f);
  const vf low = max(set1(-2e4f), min(zero(), x)), sum = A_log + low, part = sum - A_log;
  const vf lost = one + ((A_log - (sum - part)) + (low - part));
  const vf half = exp(set1(0.5f) * min(set1(176.f), sum));
  vf t[1] = {exp(zero() - absolute(x))}, p[1], r[1];
  log1p_ratio(t, p);
  reciprocal(t, r);
  const vf softplus = lost * where_greater(zero(), x, p[0], fma(t[0], p[0], max(zero(), x)));
  const vf rate = zero() - half, A_slope = max(set1(-3.402823466e38f), rate * softplus);
  return {rate * softplus * half, rate * lost * r[0], half, A_slope, half};
}

// ---- the lower-bound form ---------------------------------------------------------------------------

// |x scale^2|
template <bool kUsual>
[[gnu::always_inline]] inline vf scaled(const ChannelGate& gate, vf x) {
  const vf u = absolute(x), s = set1(gate.scale);
  return min(set1(gate.highest), kUsual ? u : u * s * s);
}

// g in place of x.
template <int64_t N, bool kUsual>
[[gnu::always_inline]] inline void lower_bound_gate(const ChannelGate& gate, vf (&x)[N]) {
  vf u[N], t[N], r[N];
  each<N>([&](int64_t i) { u[i] = scaled<kUsual>(gate, x[i]); });
  power(u, set1(-gate.exponent), t);
  reciprocal(t, r);
  each<N>([&](int64_t i) { r[i] = r[i] * set1(gate.lower_bound); });
  each<N>([&](int64_t i) { x[i] = where_negative(x[i], t[i] * r[i], r[i]); });
}

// g of a usual head in place of x, for gates that go to memory: lower_bound / (1 + e^-ax) needs no choice by sign, and
// a power of two that is subnormal (an assist, a hundred cycles) is never made: from highest / 4 on the sum is 1.
template <int64_t N>
[[gnu::always_inline]] inline void table_lower_bound(const ChannelGate& gate, vf (&x)[N]) {
  const vf lowest = set1(-gate.highest), highest = set1(.25f * gate.highest), one = set1(1.f);
  vf d[N], r[N];
  each<N>([&](int64_t i) { x[i] = min(highest, max(lowest, x[i])); });
  table_power<N, true>(x, set1(-gate.exponent), d);
  approximate_reciprocal(d, r);
  each<N>([&](int64_t i) { d[i] = fnma(d[i], r[i], one); });
  each<N>([&](int64_t i) { r[i] = r[i] * set1(gate.lower_bound); });
  each<N>([&](int64_t i) { x[i] = fma(r[i], d[i], r[i]); });
}

template <int64_t N, bool kUsual>
[[gnu::always_inline]] inline void lower_bound_slopes(const ChannelGate& gate, const vf (&x)[N], GateSlopes (&s)[N]) {
  const vf bound = set1(gate.lower_bound), rate = set1(gate.rate), one = set1(1.f);
  const vf a = set1(gate.exponent * 0.693147180559945309f);  // u a = |exp(A_log) x|
  vf u[N], t[N], r[N];
  each<N>([&](int64_t i) { u[i] = scaled<kUsual>(gate, x[i]); });
  power(u, set1(-gate.exponent), t);
  reciprocal(t, r);
  each<N>([&](int64_t i) {
    const vf bounded = r[i] * bound, falling = t[i] * bounded, slope = falling * r[i], size = u[i] * a;
    s[i].g = where_negative(x[i], falling, bounded);
    s[i].x = slope * rate, s[i].x_factor = kUsual ? one : rate;
    s[i].A_log = slope * where_negative(x[i], zero() - size, size), s[i].A_log_factor = one;
  });
}

// ---- either, one vector -----------------------------------------------------------------------------

// Every slope of g. x = raw + dt_bias.
[[gnu::always_inline]] inline GateSlopes gate_slopes(const ChannelGate& gate, vf x) {
  vf g[1] = {x}, slope[1];
  GateSlopes s[1];
  if (gate.lower_bound != 0.f) {
    lower_bound_slopes<1, false>(gate, g, s);
    if (gate.usual) s[0].x_factor = set1(1.f);
    return s[0];
  }
  if (!gate.usual) return unusual_softplus(gate, x);
  usual_softplus<1, true>(gate, g, slope);
  return {g[0], slope[0], set1(1.f), g[0], set1(1.f)};
}

// g of x = raw + dt_bias.
[[gnu::always_inline]] inline vf gate_of(const ChannelGate& gate, vf x) {
  vf g[1] = {x};
  if (gate.lower_bound != 0.f) lower_bound_gate<1, false>(gate, g);
  else if (gate.usual) usual_softplus<1, false>(gate, g, nullptr);
  else g[0] = unusual_softplus(gate, x).g;
  return g[0];
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
