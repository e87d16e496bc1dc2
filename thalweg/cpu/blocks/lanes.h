// Signs of a float vector as bits, and back: a relu's derivative in one bit an element. For files compiled per
// instruction set.
#ifndef THALWEG_CPU_BLOCKS_LANES_H
#define THALWEG_CPU_BLOCKS_LANES_H

#include "thalweg/cpu/simd.h"

namespace thalweg {
namespace {

// positive_lanes: bit i is set where x[i] > 0 (not where it is NaN). where_lanes: x in the lanes whose bit is set, 0
// in the others.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
[[gnu::always_inline]] inline uint32_t positive_lanes(vf x) {
  return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
}
[[gnu::always_inline]] inline vf where_lanes(uint32_t bits, vf x) { return _mm512_maskz_mov_ps(__mmask16(bits), x); }
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
[[gnu::always_inline]] inline uint32_t positive_lanes(vf x) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ)));
}
[[gnu::always_inline]] inline vf where_lanes(uint32_t bits, vf x) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(bits)), lane), lane);
  return _mm256_and_ps(_mm256_castsi256_ps(set), x);
}
#else
inline uint32_t positive_lanes(vf x) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= uint32_t(x[i] > 0) << i;
  return bits;
}
inline vf where_lanes(uint32_t bits, vf x) {
  for (int i = 0; i < kLanes; ++i)
    if (!(bits >> i & 1)) x[i] = 0;
  return x;
}
#endif

}  // namespace
}  // namespace thalweg
#endif
