// What the two passes of cpu_generic share: rows in and out of any dtype and stride.
#ifndef THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CPU_GENERIC_H
#define THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CPU_GENERIC_H

#include <cmath>
#include <limits>

#include "thalweg/core/tensor.h"
#include "thalweg/ops/block_sparse_attention/problem.h"
#include "thalweg/ops/block_sparse_attention/walk.h"

namespace thalweg::block_sparse_attention::generic {

inline bool is_there(const thalweg_tensor& t) { return t.dtype != THALWEG_NONE; }
inline int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

template <class A>
A load(const thalweg_tensor& t, int64_t offset) {
  switch (t.dtype) {
    case THALWEG_F64: return A(static_cast<const double*>(t.data)[offset]);
    case THALWEG_F32: return A(static_cast<const float*>(t.data)[offset]);
    case THALWEG_BF16: return A(to_float(static_cast<const bf16*>(t.data)[offset]));
    default: return A(to_float(static_cast<const f16*>(t.data)[offset]));
  }
}
template <class A>
void store(const thalweg_tensor& t, int64_t offset, A x) {
  switch (t.dtype) {
    case THALWEG_F64: static_cast<double*>(t.data)[offset] = double(x); return;
    case THALWEG_F32: static_cast<float*>(t.data)[offset] = float(x); return;
    case THALWEG_BF16: static_cast<bf16*>(t.data)[offset] = to_bf16(float(x)); return;
    default: static_cast<f16*>(t.data)[offset] = to_f16(float(x)); return;
  }
}

// Element (b, t, h) of [B T H], and where row (b, t, h) of [B T H K] starts.
inline int64_t offset_of(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head) {
  return b * t.stride[0] + token * t.stride[1] + head * t.stride[2];
}
template <class A>
A load_at(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head) {
  return load<A>(t, offset_of(t, b, token, head));
}
template <class A>
void store_at(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head, A x) {
  if (is_there(t)) store(t, offset_of(t, b, token, head), x);
}
template <class A>
void load_row(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head, A* row) {
  for (int64_t i = 0, at = offset_of(t, b, token, head); i < t.shape[3]; ++i) row[i] = load<A>(t, at + i);
}
template <class A>
void store_row(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head, const A* row) {
  for (int64_t i = 0, at = offset_of(t, b, token, head); i < t.shape[3]; ++i) store(t, at + i, row[i]);
}

// Rows [begin, end) of every head, or elements of [B T H], become x.
inline void fill_rows(const thalweg_tensor& t, int64_t b, int64_t begin, int64_t end, double x) {
  if (!is_there(t)) return;
  for (int64_t token = begin; token < end; ++token)
    for (int64_t h = 0; h < t.shape[2]; ++h)
      for (int64_t i = 0; i < (t.rank > 3 ? t.shape[3] : 1); ++i) store(t, offset_of(t, b, token, h) + i, x);
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
