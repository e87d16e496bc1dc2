// Float vectors for files that are compiled once per instruction set.
//
// Everything sits in an anonymous namespace, so each such file has its own copy and its object holds no
// symbol that another file's could replace. Include it only there, and include no C++ standard header
// beside it. The widest set that the compiler flags allow is used: AVX-512 (F, BW, DQ, VL), AVX2 with FMA
// and F16C, else 4 lanes of plain vector code.
//
// vf is a vector of kLanes floats; + - * / and comparisons of the compiler's vector extension work on it.
// max and min follow the hardware: when an operand is NaN the second one is returned, so max(limit, x)
// keeps a NaN in x. `*_n` functions touch the first n elements only, 0 <= n <= kLanes; loads fill the
// rest with 0. Sixteen-bit storage is uint16_t; stores round to nearest even and keep NaN.
#ifndef THALWEG_CPU_SIMD_H
#define THALWEG_CPU_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own undefined vectors (its bug 105593)
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace thalweg {
namespace {

// ---- numbers ---------------------------------------------------------------------------------------

inline float float_of_bits(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}
inline uint32_t bits_of_float(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
inline float infinity() { return __builtin_inff(); }

inline float float_of_bf16(uint16_t x) { return float_of_bits(uint32_t(x) << 16); }
inline uint16_t bf16_of_float(float x) {
  uint32_t u = bits_of_float(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40u);
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
inline float float_of_f16(uint16_t x) {
  uint32_t sign = uint32_t(x & 0x8000u) << 16, rest = x & 0x7fffu;
  if (rest >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest >= 0x400u) return float_of_bits(sign | ((rest << 13) + 0x38000000u));
  return float_of_bits(sign | bits_of_float(float(rest) * 0x1p-24f));
}
inline uint16_t f16_of_float(float x) {
  uint32_t u = bits_of_float(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
  if (rest > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (rest >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  if (rest < 0x38800000u) return uint16_t(sign | (bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000u));
  return uint16_t(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}

// ---- the vector of each instruction set -------------------------------------------------------------

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

using vf = __m512;
constexpr int64_t kLanes = 16;
constexpr int kVectorRegisters = 32;

[[gnu::always_inline]] inline __mmask16 first_lanes(int64_t n) { return __mmask16((1u << n) - 1u); }

[[gnu::always_inline]] inline vf load(const float* p) { return _mm512_loadu_ps(p); }
[[gnu::always_inline]] inline vf load_n(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
[[gnu::always_inline]] inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
[[gnu::always_inline]] inline void store_n(float* p, vf x, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
[[gnu::always_inline]] inline vf set1(float x) { return _mm512_set1_ps(x); }
[[gnu::always_inline]] inline vf zero() { return _mm512_setzero_ps(); }
[[gnu::always_inline]] inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
[[gnu::always_inline]] inline vf fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
[[gnu::always_inline]] inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
[[gnu::always_inline]] inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
[[gnu::always_inline]] inline vf sqrt(vf x) { return _mm512_sqrt_ps(x); }
[[gnu::always_inline]] inline vf round(vf x) { return _mm512_roundscale_ps(x, 0x08); }
// x * 2^n for whole n; subnormal results are rounded, not flushed.
[[gnu::always_inline]] inline vf scale_by_power(vf x, vf n) { return _mm512_scalef_ps(x, n); }
// Lane by lane: a > b ? x : y (y where a or b is NaN).
[[gnu::always_inline]] inline vf where_greater(vf a, vf b, vf x, vf y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x);
}
// The first n lanes of x, the others of y.
[[gnu::always_inline]] inline vf first_n(int64_t n, vf x, vf y) { return _mm512_mask_blend_ps(first_lanes(n), y, x); }
// x = mantissa * 2^exponent with the mantissa in [0.5, 1); x positive and normal.
[[gnu::always_inline]] inline vf split_exponent(vf x, vf* exponent) {
  *exponent = _mm512_getexp_ps(x) + _mm512_set1_ps(1.f);
  return _mm512_getmant_ps(x, _MM_MANT_NORM_p5_1, _MM_MANT_SIGN_src);
}
[[gnu::always_inline]] inline float hsum(vf x) {
  __m256 a = _mm512_castps512_ps256(x) + _mm512_extractf32x8_ps(x, 1);
  __m128 b = _mm256_castps256_ps128(a) + _mm256_extractf128_ps(a, 1);
  b = b + _mm_movehl_ps(b, b);
  return b[0] + b[1];
}
[[gnu::always_inline]] inline float hmax(vf x) { return _mm512_reduce_max_ps(x); }
// p is 64-byte aligned.
[[gnu::always_inline]] inline void stream(float* p, vf x) { _mm512_stream_ps(p, x); }

[[gnu::always_inline]] inline vf widen_bf16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
[[gnu::always_inline]] inline __m256i narrow_bf16(vf x) {
  __m512i u = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
[[gnu::always_inline]] inline vf load_bf16(const uint16_t* p) {
  return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
[[gnu::always_inline]] inline vf load_bf16_n(const uint16_t* p, int64_t n) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
[[gnu::always_inline]] inline void store_bf16(uint16_t* p, vf x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(x));
}
[[gnu::always_inline]] inline void store_bf16_n(uint16_t* p, vf x, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(x));
}
[[gnu::always_inline]] inline vf load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
[[gnu::always_inline]] inline vf load_f16_n(const uint16_t* p, int64_t n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
[[gnu::always_inline]] inline void store_f16(uint16_t* p, vf x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
// Two vectors of 16-bit numbers as one streamed line; p is 64-byte aligned.
[[gnu::always_inline]] inline void stream_bf16(uint16_t* p, vf x, vf y) {
  __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(narrow_bf16(x)), narrow_bf16(y), 1);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), both);
}
[[gnu::always_inline]] inline void stream_f16(uint16_t* p, vf x, vf y) {
  __m256i a = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), b = _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
}
[[gnu::always_inline]] inline void store_f16_n(uint16_t* p, vf x, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

using vf = __m256;
constexpr int64_t kLanes = 8;
constexpr int kVectorRegisters = 16;

[[gnu::always_inline]] inline __m256i first_lanes(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
[[gnu::always_inline]] inline vf load(const float* p) { return _mm256_loadu_ps(p); }
[[gnu::always_inline]] inline vf load_n(const float* p, int64_t n) { return _mm256_maskload_ps(p, first_lanes(n)); }
[[gnu::always_inline]] inline void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
[[gnu::always_inline]] inline void store_n(float* p, vf x, int64_t n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
[[gnu::always_inline]] inline vf set1(float x) { return _mm256_set1_ps(x); }
[[gnu::always_inline]] inline vf zero() { return _mm256_setzero_ps(); }
[[gnu::always_inline]] inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
[[gnu::always_inline]] inline vf fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
[[gnu::always_inline]] inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
[[gnu::always_inline]] inline vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
[[gnu::always_inline]] inline vf sqrt(vf x) { return _mm256_sqrt_ps(x); }
[[gnu::always_inline]] inline vf round(vf x) { return _mm256_round_ps(x, 0x08); }
[[gnu::always_inline]] inline vf scale_by_power(vf x, vf n) {
  __m256i i = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(i, 1), bias = _mm256_set1_epi32(127);
  __m256i rest = _mm256_sub_epi32(i, half);
  __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  __m256 b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return x * a * b;
}
[[gnu::always_inline]] inline vf where_greater(vf a, vf b, vf x, vf y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
}
[[gnu::always_inline]] inline vf first_n(int64_t n, vf x, vf y) {
  return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(first_lanes(n)));
}
[[gnu::always_inline]] inline vf split_exponent(vf x, vf* exponent) {
  __m256i u = _mm256_castps_si256(x);
  *exponent = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(u, 23), _mm256_set1_epi32(126)));
  __m256i m = _mm256_or_si256(_mm256_and_si256(u, _mm256_set1_epi32(0x7fffff)), _mm256_set1_epi32(0x3f000000));
  return _mm256_castsi256_ps(m);
}
[[gnu::always_inline]] inline float hsum(vf x) {
  __m128 b = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
  b = b + _mm_movehl_ps(b, b);
  return b[0] + b[1];
}
[[gnu::always_inline]] inline float hmax(vf x) {
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return b[0] > b[1] ? b[0] : b[1];
}
// p is 32-byte aligned.
[[gnu::always_inline]] inline void stream(float* p, vf x) { _mm256_stream_ps(p, x); }

[[gnu::always_inline]] inline vf widen_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
[[gnu::always_inline]] inline __m128i narrow_bf16(vf x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
  __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
[[gnu::always_inline]] inline __m128i load_16_n(const uint16_t* p, int64_t n) {
  uint16_t part[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  memcpy(part, p, size_t(n) * 2);
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(part));
}
[[gnu::always_inline]] inline void store_16_n(uint16_t* p, __m128i x, int64_t n) {
  uint16_t part[8];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(part), x);
  memcpy(p, part, size_t(n) * 2);
}
[[gnu::always_inline]] inline vf load_bf16(const uint16_t* p) {
  return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
[[gnu::always_inline]] inline vf load_bf16_n(const uint16_t* p, int64_t n) { return widen_bf16(load_16_n(p, n)); }
[[gnu::always_inline]] inline void store_bf16(uint16_t* p, vf x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bf16(x));
}
[[gnu::always_inline]] inline void store_bf16_n(uint16_t* p, vf x, int64_t n) { store_16_n(p, narrow_bf16(x), n); }
[[gnu::always_inline]] inline vf load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
[[gnu::always_inline]] inline vf load_f16_n(const uint16_t* p, int64_t n) { return _mm256_cvtph_ps(load_16_n(p, n)); }
[[gnu::always_inline]] inline void store_f16(uint16_t* p, vf x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
// Two vectors of 16-bit numbers as one streamed store; p is 32-byte aligned.
[[gnu::always_inline]] inline void stream_bf16(uint16_t* p, vf x, vf y) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm256_set_m128i(narrow_bf16(y), narrow_bf16(x)));
}
[[gnu::always_inline]] inline void stream_f16(uint16_t* p, vf x, vf y) {
  __m128i a = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), b = _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm256_set_m128i(b, a));
}
[[gnu::always_inline]] inline void store_f16_n(uint16_t* p, vf x, int64_t n) {
  store_16_n(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), n);
}

#else

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
constexpr int64_t kLanes = 4;
constexpr int kVectorRegisters = 16;

inline vf set1(float x) { return vf{x, x, x, x}; }
inline vf zero() { return set1(0.f); }
inline vf load_n(const float* p, int64_t n) {
  vf x = zero();
  memcpy(&x, p, size_t(n) * 4);
  return x;
}
inline vf load(const float* p) {
  vf x;
  memcpy(&x, p, 16);
  return x;
}
inline void store(float* p, vf x) { memcpy(p, &x, 16); }
inline void store_n(float* p, vf x, int64_t n) { memcpy(p, &x, size_t(n) * 4); }
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline vf fnma(vf a, vf b, vf c) { return c - a * b; }
inline vf where_greater(vf a, vf b, vf x, vf y) { return a > b ? x : y; }
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return b > a ? a : b; }
inline vf sqrt(vf x) {
  for (int i = 0; i < 4; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}
inline vf round(vf x) {  // for |x| < 2^22
  vf magic = set1(12582912.f);
  return (x + magic) - magic;
}
inline vf scale_by_power(vf x, vf n) {
  for (int i = 0; i < 4; ++i) {
    int32_t e = n[i] == n[i] ? int32_t(n[i]) : 0, half = e >> 1;
    x[i] *= float_of_bits(uint32_t(half + 127) << 23);
    x[i] *= float_of_bits(uint32_t(e - half + 127) << 23);
  }
  return x;
}
inline vf first_n(int64_t n, vf x, vf y) {
  memcpy(&y, &x, size_t(n) * 4);
  return y;
}
inline vf split_exponent(vf x, vf* exponent) {
  for (int i = 0; i < 4; ++i) {
    uint32_t u = bits_of_float(x[i]);
    (*exponent)[i] = float(int32_t(u >> 23) - 126);
    x[i] = float_of_bits((u & 0x7fffffu) | 0x3f000000u);
  }
  return x;
}
inline float hsum(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float hmax(vf x) {
  float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}
inline void stream(float* p, vf x) { store(p, x); }

inline vf load_bf16_n(const uint16_t* p, int64_t n) {
  vf x = zero();
  for (int64_t i = 0; i < n; ++i) x[i] = float_of_bf16(p[i]);
  return x;
}
inline void store_bf16_n(uint16_t* p, vf x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = bf16_of_float(x[i]);
}
inline vf load_f16_n(const uint16_t* p, int64_t n) {
  vf x = zero();
  for (int64_t i = 0; i < n; ++i) x[i] = float_of_f16(p[i]);
  return x;
}
inline void store_f16_n(uint16_t* p, vf x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = f16_of_float(x[i]);
}
inline vf load_bf16(const uint16_t* p) { return load_bf16_n(p, 4); }
inline void store_bf16(uint16_t* p, vf x) { store_bf16_n(p, x, 4); }
inline vf load_f16(const uint16_t* p) { return load_f16_n(p, 4); }
inline void store_f16(uint16_t* p, vf x) { store_f16_n(p, x, 4); }
inline void stream_bf16(uint16_t* p, vf x, vf y) {
  store_bf16(p, x);
  store_bf16(p + 4, y);
}
inline void stream_f16(uint16_t* p, vf x, vf y) {
  store_f16(p, x);
  store_f16(p + 4, y);
}

#endif

// ---- the same for all -------------------------------------------------------------------------------

[[gnu::always_inline]] inline vf add(vf a, vf b) { return a + b; }
[[gnu::always_inline]] inline vf sub(vf a, vf b) { return a - b; }
[[gnu::always_inline]] inline vf mul(vf a, vf b) { return a * b; }
[[gnu::always_inline]] inline vf div(vf a, vf b) { return a / b; }

// As asm, since GCC takes a function that only prefetches for one without effects and drops its calls.
[[gnu::always_inline]] inline void prefetch(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 0, 3);
#endif
}
// Into the L2 but not the L1.
[[gnu::always_inline]] inline void prefetch_l2(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 0, 2);
#endif
}
// For a line that will be written.
[[gnu::always_inline]] inline void prefetch_write(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 1, 3);
#endif
}
// Makes streamed stores visible in order; once at the end of a task that used stream().
[[gnu::always_inline]] inline void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// e^x to 1.1 ulp; exp(0) = 1 and exp(-inf) = 0 exactly, NaN stays NaN.
[[gnu::always_inline]] inline vf exp(vf x) {
  x = min(set1(89.f), max(set1(-104.f), x));
  vf n = round(x * set1(1.44269504088896341f));
  vf r = fnma(n, set1(-2.12194440e-4f), fnma(n, set1(0.693359375f), x));
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  vf y = fma(p, r * r, r) + set1(1.f);
  return scale_by_power(y, n);
}

// log(1 + y) for y >= 0 to 1.3 ulp, tiny y included.
[[gnu::always_inline]] inline vf log1p(vf y) {
  vf one = set1(1.f), u = y + one;
  // What rounding 1 + y lost, taken from the smaller addend.
  vf lost = where_greater(y, one, one - (u - y), y - (u - one));
  vf e, m = split_exponent(u, &e);
  vf root_half = set1(0.707106781186547524f);
  vf low = where_greater(root_half, m, one, zero());
  e = e - low;
  vf f = m + where_greater(root_half, m, m, zero()) - one;
  vf z = f * f;
  vf p = set1(7.0376836292e-2f);
  p = fma(p, f, set1(-1.1514610310e-1f));
  p = fma(p, f, set1(1.1676998740e-1f));
  p = fma(p, f, set1(-1.2420140846e-1f));
  p = fma(p, f, set1(1.4249322787e-1f));
  p = fma(p, f, set1(-1.6668057665e-1f));
  p = fma(p, f, set1(2.0000714765e-1f));
  p = fma(p, f, set1(-2.4999993993e-1f));
  p = fma(p, f, set1(3.3333331174e-1f));
  vf tail = fma(p * z, f, e * set1(-2.12194440e-4f));
  tail = fma(z, set1(-0.5f), tail);
  vf log_u = fma(e, set1(0.693359375f), f + tail);
  return log_u + lost / u;
}

// log(1 + e^x) to 2 ulp; x itself above 20.
[[gnu::always_inline]] inline vf softplus(vf x) {
  vf twenty = set1(20.f);
  vf small = log1p(exp(min(twenty, x)));
  return where_greater(x, twenty, x, small);
}

// To 3 ulp.
[[gnu::always_inline]] inline vf sigmoid(vf x) { return set1(1.f) / (set1(1.f) + exp(zero() - x)); }
[[gnu::always_inline]] inline vf silu(vf x) { return x / (set1(1.f) + exp(zero() - x)); }

}  // namespace
}  // namespace thalweg
#endif
