// roof_kernels – the loops whose rates are the roofs.
//
// Math     fma: x <- x * a + b in independent registers; copy: to <- from; scale: x <- x * factor;
//          exp_log: to <- log(1 + exp(from)) by the functions of simd.h, bf16 in and out
// Shapes   flat arrays
// Takes    64-byte aligned, a multiple of 64 bytes
// Threads  one caller per thread, disjoint ranges
// Vectors  8 floats (avx2) or 16 (avx512); fma keeps 12 or 24 of them in flight, which covers two ports
//          of latency 4 (and 5)
// Tile     none
// Scratch  none
// Numerics values stay finite: |a| < 1
// Traps    copy ends with a store fence, so that its bytes have left when it returns
// Measured printed by every `thalweg bench`
#include "tools/thalweg/roof.h"

#include "thalweg/cpu/simd.h"

namespace thalweg::roof::THALWEG_ISA {
namespace {

#if defined(__AVX512F__)
typedef __m512 Vec;
constexpr int kFloats = 16, kChains = 24;
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec mul_add(Vec x, Vec a, Vec b) { return _mm512_fmadd_ps(x, a, b); }
inline Vec mul(Vec x, Vec y) { return _mm512_mul_ps(x, y); }
inline Vec load(const float* p) { return _mm512_load_ps(p); }
inline void store(float* p, Vec x) { _mm512_store_ps(p, x); }
inline void stream(float* p, Vec x) { _mm512_stream_ps(p, x); }
#else
typedef __m256 Vec;
constexpr int kFloats = 8, kChains = 12;
inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec mul_add(Vec x, Vec a, Vec b) { return _mm256_fmadd_ps(x, a, b); }
inline Vec mul(Vec x, Vec y) { return _mm256_mul_ps(x, y); }
inline Vec load(const float* p) { return _mm256_load_ps(p); }
inline void store(float* p, Vec x) { _mm256_store_ps(p, x); }
inline void stream(float* p, Vec x) { _mm256_stream_ps(p, x); }
#endif

constexpr int kLine = 16 / kFloats;  // vectors of a 64-byte line

}  // namespace

int64_t fma_flops_per_round() { return 2 * kFloats * kChains; }

double fma(int64_t rounds, float a, float b) {
  Vec x[kChains], va = set1(a), vb = set1(b);
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) x[i] = set1(float(i));
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) x[i] = mul_add(x[i], va, vb);
  }
  float sum[kFloats] __attribute__((aligned(64)));
  double total = 0;
  for (int i = 0; i < kChains; ++i) {
    store(sum, x[i]);
    total += double(sum[0]) + double(sum[kFloats - 1]);
  }
  return total;
}

void copy(void* to, const void* from, size_t bytes) {
  float* t = static_cast<float*>(to);
  const float* f = static_cast<const float*>(from);
  for (size_t i = 0; i < bytes / 4; i += 64) {
    size_t n = bytes / 4 - i < 64 ? bytes / 4 - i : 64;
    for (size_t j = 0; j < n; j += kFloats) stream(t + i + j, load(f + i + j));
  }
  _mm_sfence();
}

void scale(void* data, size_t bytes, float factor) {
  float* x = static_cast<float*>(data);
  Vec s = set1(factor);
  for (size_t i = 0; i < bytes / 4; i += 16) {
#pragma GCC unroll 2
    for (int j = 0; j < kLine; ++j) store(x + i + j * kFloats, mul(load(x + i + j * kFloats), s));
  }
}

void exp_log(void* to, const void* from, size_t bytes) {
  uint16_t* t = static_cast<uint16_t*>(to);
  const uint16_t* f = static_cast<const uint16_t*>(from);
  for (size_t i = 0; i < bytes / 2; i += 2 * size_t(kLanes))
    stream_bf16(t + i, log1p(exp(load_bf16(f + i))), log1p(exp(load_bf16(f + i + kLanes))));
  _mm_sfence();
}

}  // namespace thalweg::roof::THALWEG_ISA
