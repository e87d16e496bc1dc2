// Stored element types as float vectors, and SiLU. For files compiled per instruction set only.
#ifndef THALWEG_OPS_SHORT_CONV_VEC_H
#define THALWEG_OPS_SHORT_CONV_VEC_H

#include "thalweg/cpu/simd.h"

namespace thalweg::short_conv {
namespace {

struct F32 {
  using Stored = float;
  [[gnu::always_inline]] static inline vf load(const float* p) { return thalweg::load(p); }
  [[gnu::always_inline]] static inline vf load_n(const float* p, int64_t n) { return thalweg::load_n(p, n); }
  [[gnu::always_inline]] static inline void store(float* p, vf x) { thalweg::store(p, x); }
  [[gnu::always_inline]] static inline void store_n(float* p, vf x, int64_t n) { thalweg::store_n(p, x, n); }
};
struct Bf16 {
  using Stored = uint16_t;
  [[gnu::always_inline]] static inline vf load(const uint16_t* p) { return load_bf16(p); }
  [[gnu::always_inline]] static inline vf load_n(const uint16_t* p, int64_t n) { return load_bf16_n(p, n); }
  [[gnu::always_inline]] static inline void store(uint16_t* p, vf x) { store_bf16(p, x); }
  [[gnu::always_inline]] static inline void store_n(uint16_t* p, vf x, int64_t n) { store_bf16_n(p, x, n); }
};
struct F16 {
  using Stored = uint16_t;
  [[gnu::always_inline]] static inline vf load(const uint16_t* p) { return load_f16(p); }
  [[gnu::always_inline]] static inline vf load_n(const uint16_t* p, int64_t n) { return load_f16_n(p, n); }
  [[gnu::always_inline]] static inline void store(uint16_t* p, vf x) { store_f16(p, x); }
  [[gnu::always_inline]] static inline void store_n(uint16_t* p, vf x, int64_t n) { store_f16_n(p, x, n); }
};

// The first n of a vector's elements, or, where `whole`, all of them.
template <class E, bool whole>
[[gnu::always_inline]] inline vf get(const typename E::Stored* p, int64_t n) {
  if constexpr (whole)
    return E::load(p);
  else
    return E::load_n(p, n);
}
template <class E, bool whole>
[[gnu::always_inline]] inline void put(typename E::Stored* p, vf x, int64_t n) {
  if constexpr (whole)
    E::store(p, x);
  else
    E::store_n(p, x, n);
}

constexpr float kLargest = 3.4028234663852886e38f;
constexpr int64_t kLineBytes = 64;

inline bool is_line_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kLineBytes == 0; }

// x sigmoid(x); its limit 0 at minus infinity.
[[gnu::always_inline]] inline vf silu_of(vf x) {
  return max(set1(-kLargest), x) / (set1(1.f) + exp(zero() - x));
}

// Slope of silu; its limits at the infinities.
[[gnu::always_inline]] inline vf silu_slope(vf x) {
  vf one = set1(1.f), s = one / (one + exp(zero() - x));
  vf bounded = min(set1(kLargest), max(set1(-kLargest), x));
  return s * fma(bounded, one - s, one);
}

// Copies one line of a tile to memory around the caches.
[[gnu::always_inline]] inline void stream_line(void* to, const void* from) {
  constexpr int64_t step = kLanes;  // floats
  const float* in = static_cast<const float*>(from);
  float* out = static_cast<float*>(to);
  for (int64_t i = 0; i < kLineBytes / 4; i += step) stream(out + i, load(in + i));
}

}  // namespace
}  // namespace thalweg::short_conv
#endif
