// The chunked backwards of the delta rules: tensors of any dtype and stride in, float32 scratch, and back.
#ifndef THALWEG_CPU_BLOCKS_CHUNK_BWD_IO_H
#define THALWEG_CPU_BLOCKS_CHUNK_BWD_IO_H

#include "thalweg/cpu/blocks/chunk_bwd_tiles.h"

namespace thalweg {
namespace {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// The floats of a slot, handed out in order; 64-byte aligned.
struct Carver {
  char* base;  // null when only counting
  int64_t used;
  float* take(int64_t n) {
    float* p = base ? reinterpret_cast<float*>(base + used) : nullptr;
    used += round_up(n * int64_t(sizeof(float)), 64);
    return p;
  }
};

inline bool is_there(const thalweg_tensor& t) { return t.dtype != THALWEG_NONE; }

// Element 0 of a token of one head in a [B T heads dim] or [B T heads] tensor, and the step to the next token.
struct Tokens {
  char* data;    // null: the tensor is absent
  int64_t step;  // elements
  thalweg_dtype dtype;
};
inline Tokens tokens_at(const thalweg_tensor& t, int64_t T, int64_t row, int64_t head) {
  if (!is_there(t)) return {nullptr, 0, THALWEG_NONE};
  return {element_at(t, row / T, row % T, head), t.stride[1], t.dtype};
}

inline float load_element(const thalweg_tensor& t, int64_t i) {
  float x = 0;
  read_strided(t.dtype, element_at(t, i), 1, 1, &x);
  return x;
}
inline void store_element(const thalweg_tensor& t, double x, int64_t i, int64_t j = 0) {
  const float y = float(x);
  if (t.dtype == THALWEG_F64) memcpy(element_at(t, i, j), &x, sizeof(x));
  else write_strided(t.dtype, element_at(t, i, j), 1, 1, &y);
}

// ---- contiguous rows: f32, bf16, f16 ----------------------------------------------------------------

// Where element `at` of a row of scratch is: rows of [C width] lie flat, or as panels [width/panel][C][panel].
using Place = int64_t (*)(int64_t row, int64_t at, int64_t width);
inline int64_t flat(int64_t row, int64_t at, int64_t width) { return row * width + at; }
inline int64_t paneled(int64_t row, int64_t at, int64_t) { return (at / kPanel * kC + row) * kPanel + at % kPanel; }

template <class S, Place place>
inline void load_rows_as(const Tokens& from, int64_t count, int64_t n, int64_t width, float* to) {
  const auto* data = reinterpret_cast<const typename S::Element*>(from.data);
  for (int64_t i = 0; i < kC; ++i)
    for (int64_t at = 0; at < width; at += kLanes) {
      vf x = zero();
      if (i < count && at < n) {
        const auto* p = data + i * from.step + at;
        x = n - at >= kLanes ? S::load(p) : S::load_n(p, n - at);
      }
      store(to + place(i, at, width), x);
    }
}
// `count` rows of n elements into `to`, [C width] in either layout; the rest of the C rows and of the width is 0.
template <Place place>
inline void load_rows(const Tokens& from, int64_t count, int64_t n, int64_t width, float* to) {
  if (!from.data) load_rows_as<F32, place>(from, 0, n, width, to);
  if (from.dtype == THALWEG_F32) load_rows_as<F32, place>(from, count, n, width, to);
  if (from.dtype == THALWEG_BF16) load_rows_as<Bf16, place>(from, count, n, width, to);
  if (from.dtype == THALWEG_F16) load_rows_as<F16, place>(from, count, n, width, to);
}

template <class S, Place place>
inline void store_rows_as(const Tokens& to, int64_t count, int64_t n, int64_t width, const float* from) {
  auto* data = reinterpret_cast<typename S::Element*>(to.data);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t at = 0; at < n; at += kLanes) {
      auto* p = data + i * to.step + at;
      vf x = load(from + place(i, at, width));
      if (n - at >= kLanes) S::store(p, x);
      else S::store_n(p, x, n - at);
    }
}
template <Place place>
inline void store_rows(const Tokens& to, int64_t count, int64_t n, int64_t width, const float* from) {
  if (to.dtype == THALWEG_F32) store_rows_as<F32, place>(to, count, n, width, from);
  if (to.dtype == THALWEG_BF16) store_rows_as<Bf16, place>(to, count, n, width, from);
  if (to.dtype == THALWEG_F16) store_rows_as<F16, place>(to, count, n, width, from);
}

// Rows that are wanted later. A token's row of [B T heads dim] storage is on a page of its own, and page walks
// overlap only when they are close together: touch() asks for the first line of every row at once, fetch(), called
// between products, for the others bit by bit.
struct Ahead {
  struct Set {
    const char* data;
    int64_t step, rows, bytes;
    bool to_write;
  } sets[6];
  int64_t count, lines, calls;  // lines: beside the first ones; calls of fetch() that they are spread over
  int64_t set, row, at;         // where fetch() is
};
inline void want(Ahead* ahead, const Tokens& rows, int64_t count, int64_t n, bool to_write) {
  if (!rows.data || count <= 0) return;
  const int64_t bytes = n * element_bytes(rows.dtype);
  ahead->sets[ahead->count++] = {rows.data, rows.step * element_bytes(rows.dtype), count, bytes, to_write};
  ahead->lines += count * ((bytes - 1) / 64);
  ahead->at = 64;
}
[[gnu::always_inline]] inline void prefetch_line(const Ahead::Set& set, int64_t row, int64_t at) {
  const char* p = set.data + row * set.step + at;
  if (set.to_write) prefetch_write(p);
  else prefetch(p);
}
inline void touch(const Ahead& ahead) {
  for (int64_t s = 0; s < ahead.count; ++s)
    for (int64_t i = 0; i < ahead.sets[s].rows; ++i) prefetch_line(ahead.sets[s], i, 0);
}
inline void fetch(Ahead* ahead) {
  int64_t n = (ahead->lines + ahead->calls - 1) / ahead->calls;
  while (n > 0 && ahead->set < ahead->count) {
    const Ahead::Set& set = ahead->sets[ahead->set];
    if (ahead->at < set.bytes) {
      prefetch_line(set, ahead->row, ahead->at);
      ahead->at += 64;
      --n;
    } else {
      ahead->at = 64;
      if (++ahead->row == set.rows) ahead->row = 0, ++ahead->set;
    }
  }
}

// Rows [begin, end) of a [B T heads (dim)] gradient: zeros, for tokens that belong to no sequence.
inline void zero_rows(const thalweg_tensor& t, int64_t T, int64_t begin, int64_t end, int64_t head) {
  if (!is_there(t)) return;
  const int64_t n = t.rank == 4 ? t.shape[3] : 1, bytes = element_bytes(t.dtype);  // dim is contiguous
  for (int64_t row = begin; row < end; ++row) memset(tokens_at(t, T, row, head).data, 0, size_t(n * bytes));
}

// ---- states: [N HV K V], K or V contiguous, any float dtype; in scratch as panels [Vp/panel][Kp][panel] ----

// line: [max(K, panel)] scratch.
inline void load_state(const thalweg_tensor& t, int64_t n, int64_t hv, const Dims& d, float* S, float* line) {
  if (!is_there(t) || d.K < d.Kp || d.V < d.Vp) memset(S, 0, size_t(d.Kp * d.Vp) * sizeof(float));
  for (int64_t j = 0; is_there(t) && j < d.V; j += kPanel)
    read_state(t.dtype, element_at(t, n, hv, 0, j), t.stride[2], t.stride[3], d.K, d.V - j < kPanel ? d.V - j : kPanel,
               S + j * d.Kp, kPanel, line);
}
inline void store_state(const thalweg_tensor& t, int64_t n, int64_t hv, const Dims& d, const float* S, float* line) {
  for (int64_t j = 0; is_there(t) && j < d.V; j += kPanel)
    write_state(t.dtype, element_at(t, n, hv, 0, j), t.stride[2], t.stride[3], d.K, d.V - j < kPanel ? d.V - j : kPanel,
                S + j * d.Kp, kPanel, line);
}

// ---- write strength ---------------------------------------------------------------------------------

// The write strengths of a chunk's tokens for one value head, effective; 0 past the last token.
struct alignas(64) Strengths {
  float beta[kC], beta_slope[kC];  // beta_slope: d beta / d(logit)
};

// beta [.. kC] of `count` tokens; where there is no tensor it is 1.
inline void load_beta(const Tokens& from, int64_t count, bool use_sigmoid, bool allow_neg_eigval, Strengths* s) {
  for (int64_t i = 0; i < kC; ++i) s->beta[i] = i < count ? 1.f : 0.f;
  if (from.data) read_strided(from.dtype, from.data, from.step, count, s->beta);
  for (int64_t i = 0; i < kC; i += kLanes) {
    const int64_t left = count - i < 0 ? 0 : count - i > kLanes ? kLanes : count - i;
    vf b = load(s->beta + i), slope = set1(1.f);
    if (use_sigmoid) {
      vf c = set1(allow_neg_eigval ? 2.f : 1.f), p = sigmoid(b);
      slope = c * p * sigmoid(zero() - b);
      b = first_n(left, c * p, zero());
    }
    store(s->beta + i, b);
    store(s->beta_slope + i, slope);
  }
}

}  // namespace
}  // namespace thalweg
#endif
