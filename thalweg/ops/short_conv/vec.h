// Partial vectors and streamed lines. For files compiled per instruction set only.
#ifndef THALWEG_OPS_SHORT_CONV_VEC_H
#define THALWEG_OPS_SHORT_CONV_VEC_H

#include "thalweg/cpu/blocks/rows.h"
#include "thalweg/cpu/blocks/sigmoid.h"

namespace thalweg::short_conv {
namespace {

// The first n of a vector's elements, or, where `whole`, all of them.
template <class S, bool whole>
[[gnu::always_inline]] inline vf get(const typename S::Element* p, int64_t n) {
  if constexpr (whole)
    return S::load(p);
  else
    return S::load_n(p, n);
}
template <class S, bool whole>
[[gnu::always_inline]] inline void put(typename S::Element* p, vf x, int64_t n) {
  if constexpr (whole)
    S::store(p, x);
  else
    S::store_n(p, x, n);
}

// Lines of 64 bytes: groups compute one line of channels of several tokens into a tile, then write each
// token's line whole, around the caches.
constexpr int64_t kLineBytes = 64;

inline bool rows_are_lines(const thalweg_tensor& t) {
  const int64_t bytes = element_bytes(t.dtype);
  return reinterpret_cast<uintptr_t>(t.data) % kLineBytes == 0 && t.stride[0] * bytes % kLineBytes == 0 &&
         t.stride[1] * bytes % kLineBytes == 0;
}

[[gnu::always_inline]] inline void stream_line(void* to, const void* from) {
  const float* in = static_cast<const float*>(from);
  float* out = static_cast<float*>(to);
  for (int64_t i = 0; i < kLineBytes / 4; i += kLanes) stream(out + i, load(in + i));
}

// The widths that models use take groups of tokens; others one token at a time, for the sake of the build's time.
constexpr bool is_usual(int W) { return W >= 2 && W <= 4; }

template <class Element>
Element* row_at(const thalweg_tensor& t, int64_t T, int64_t r, int64_t d0) {
  return t.dtype ? static_cast<Element*>(t.data) + r / T * t.stride[0] + r % T * t.stride[1] + d0 : nullptr;
}

}  // namespace
}  // namespace thalweg::short_conv
#endif
