// What the two passes of cpu_generic share: rows in and out of any dtype and stride.
#ifndef THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CPU_GENERIC_H
#define THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CPU_GENERIC_H

#include <cmath>
#include <limits>

#include "thalweg/cpu/rows.h"
#include "thalweg/ops/block_sparse_attention/problem.h"
#include "thalweg/ops/block_sparse_attention/walk.h"

namespace thalweg::block_sparse_attention::generic {

inline bool is_there(const thalweg_tensor& t) { return t.dtype != THALWEG_NONE; }
inline int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Element (b, t, h) of [B T H], and where row (b, t, h) of [B T H K] starts.
inline int64_t offset_of(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head) {
  return b * t.stride[0] + token * t.stride[1] + head * t.stride[2];
}
template <class A>
A load_at(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head) {
  return thalweg::load_at<A>(t, offset_of(t, b, token, head));
}
template <class A>
void store_at(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head, A x) {
  if (is_there(t)) thalweg::store_at(t, offset_of(t, b, token, head), x);
}
template <class A>
void load_row(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head, A* row) {
  thalweg::load_row(t, offset_of(t, b, token, head), 1, t.shape[3], row);
}
template <class A>
void store_row(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head, const A* row) {
  thalweg::store_row(t, offset_of(t, b, token, head), 1, t.shape[3], row);
}

// Rows [begin, end) of every head, or elements of [B T H], become x.
inline void fill_rows(const thalweg_tensor& t, int64_t b, int64_t begin, int64_t end, double x) {
  if (!is_there(t)) return;
  for (int64_t token = begin; token < end; ++token)
    for (int64_t h = 0; h < t.shape[2]; ++h)
      for (int64_t i = 0; i < (t.rank > 3 ? t.shape[3] : 1); ++i)
        thalweg::store_at(t, offset_of(t, b, token, h) + i, x);
}

template <class A>
A dot(const A* a, const A* b, int64_t n) {
  A part[4] = {};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (int l = 0; l < 4; ++l) part[l] += a[i + l] * b[i + l];
  for (; i < n; ++i) part[0] += a[i] * b[i];
  return (part[0] + part[1]) + (part[2] + part[3]);
}
template <class A>
void axpy(A x, const A* a, int64_t n, A* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x * a[i];
}

}  // namespace thalweg::block_sparse_attention::generic
#endif
