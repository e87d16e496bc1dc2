// What the flash rows of the sparse flash attention share: gathered keys, heads across the lanes, scores. For files
// compiled per instruction set.
#ifndef THALWEG_OPS_SPARSE_FLASH_ATTENTION_CPU_FLASH_TILES_H
#define THALWEG_OPS_SPARSE_FLASH_ATTENTION_CPU_FLASH_TILES_H

#include "thalweg/cpu/blocks/gemm.h"
#include "thalweg/cpu/blocks/rows.h"
#include "thalweg/ops/sparse_flash_attention/problem.h"

namespace thalweg::sparse_flash_attention {
namespace {

inline bool is_there(const thalweg_tensor& t) { return t.dtype != THALWEG_NONE; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Lends out pieces of a workspace, each from a 64-byte border on.
struct Piece {
  char* at;
  template <class T>
  T* take(int64_t count) {
    T* here = reinterpret_cast<T*>(at);
    at += round_up(count * int64_t(sizeof(T)), 64);
    return here;
  }
};

// The gathered rows of up to kTileKeys keys of one list.
struct Tile {
  const Problem& p;
  const Inputs& in;
  FlashShape shape;
  bool separate;  // values are gathered too
  float* rows;    // [kTileKeys][shape.row]
  static constexpr int64_t kAhead = 6;

  // `v` may be the memory of `k`: then it is not gathered twice.
  static bool is_separate(const Problem& p, const Inputs& in) {
    if (p.latent) return false;
    return in.v.data != in.k.data || in.v.stride[0] != in.k.stride[0] || in.v.stride[1] != in.k.stride[1] || p.V > p.K;
  }
  const float* values() const { return separate ? rows + shape.key : rows; }

  // Asks for row `row` of k[b], its rope part and its value.
  void fetch(int64_t b, int64_t row) const {
    fetch_row(in.k, b, row, p.K);
    if (p.KR > 0) fetch_row(in.k_rope, b, row, p.KR);
    if (separate) fetch_row(in.v, b, row, p.V);
  }
  static void fetch_row(const thalweg_tensor& t, int64_t b, int64_t row, int64_t width) {
    const char* from = element_at(t, b, row);
    for (int64_t at = 0; at < width * element_bytes(t.dtype); at += 64) prefetch(from + at);
  }

  // Keys [0, n) of a list that goes on to `all`. Rows lie anywhere, so that each would wait for memory: they are asked
  // for some keys ahead, those of the next tile too.
  void gather(int64_t b, int64_t first, const int32_t* keys, int64_t n, int64_t all) {
    const int64_t W = key_width(p);
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < all) fetch(b, first + keys[i + kAhead]);
      float* row = rows + i * shape.row;
      read_row(p.dtype, element_at(in.k, b, first + keys[i]), p.K, row);
      if (p.KR > 0) read_row(p.dtype, element_at(in.k_rope, b, first + keys[i]), p.KR, row + p.K);
      for (int64_t c = W; c < shape.key; ++c) row[c] = 0;
      if (!separate) continue;
      read_row(p.dtype, element_at(in.v, b, first + keys[i]), p.V, row + shape.key);
      for (int64_t c = p.V; c < shape.value; ++c) row[shape.key + c] = 0;
    }
  }
};

// Few heads of one query: products along the row instead of heads along the lanes.
inline bool few_heads(const Problem& p) { return p.H <= kLanes / 2; }

// The rows of a product with keys: heads of one query, or of several.
struct Rows {
  int64_t n;
  bool few;
};
inline Rows rows_of(const Problem& p) { return {p.H, few_heads(p)}; }

// Rows for scores(): few as they are, [n][width]; else along the lanes, in panels of kPanel (the last may be kLanes
// wide), [panel][width][rows of the panel], rows past n zero. `width` is a multiple of kLanes.
inline void arrange_heads(Rows these, const float* rows, int64_t row, int64_t width, int64_t heads, float factor,
                          float* out) {
  const vf times = set1(factor);
  if (these.few) {
    for (int64_t h = 0; h < these.n; ++h)
      for (int64_t c = 0; c < width; c += kLanes) store(out + h * width + c, times * load(rows + h * row + c));
    return;
  }
  for (int64_t h = 0; h < heads; h += kLanes) {
    const int64_t panel = h / kPanel * kPanel, panel_width = least(kPanel, heads - panel);
    for (int64_t c = 0; c < width; c += kLanes) {
      vf block[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) block[i] = h + i < these.n ? times * load(rows + (h + i) * row + c) : zero();
      transpose(block);
      for (int64_t i = 0; i < kLanes; ++i) store(out + panel * width + (c + i) * panel_width + h - panel, block[i]);
    }
  }
}

constexpr int kFewKeys = kVectorRegisters == 32 ? 4 : 2;  // that few heads take together

// Sums along rows of storage S: acc[key][head] += row(key) q(head), lane by lane.
template <class S, int KEYS, int HEADS>
[[gnu::always_inline]] inline void few_products(const typename S::Element* const* rows, int64_t width, const float* q,
                                                int64_t q_row, vf (&acc)[KEYS][HEADS]) {
  for (int64_t c = 0; c < width; c += kLanes) {
    vf y[HEADS];
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; ++h) y[h] = load(q + h * q_row + c);
#pragma GCC unroll 4
    for (int i = 0; i < KEYS; ++i) {
      const vf x = S::load(rows[i] + c);
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; ++h) acc[i][h] = fma(x, y[h], acc[i][h]);
    }
  }
}

template <int KEYS, int HEADS>
[[gnu::always_inline]] inline void store_few(const vf (&acc)[KEYS][HEADS], float* s, int64_t heads) {
#pragma GCC unroll 4
  for (int i = 0; i < KEYS; ++i)
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; ++h) s[i * heads + h] = hsum(acc[i][h]);
}

template <int KEYS, int HEADS>
[[gnu::always_inline]] inline void few_scores(const float* rows, int64_t row, int64_t width, const float* q, float* s,
                                              int64_t heads) {
  vf acc[KEYS][HEADS];
  tile_zero(acc);
  const float* at[KEYS];
  for (int i = 0; i < KEYS; ++i) at[i] = rows + i * row;
  few_products<F32>(at, width, q, width, acc);
  store_few(acc, s, heads);
}

template <int HEADS>
[[gnu::noinline]] void scores_of_few(int64_t n, const float* rows, int64_t row, int64_t width, const float* q, float* s,
                                     int64_t heads) {
  int64_t i = 0;
  for (; i + kFewKeys <= n; i += kFewKeys) few_scores<kFewKeys, HEADS>(rows + i * row, row, width, q, s + i * heads, heads);
  for (; i < n; ++i) few_scores<1, HEADS>(rows + i * row, row, width, q, s + i * heads, heads);
}

// s[n][heads] = rows[n][width] times the arranged heads.
[[gnu::noinline]] void scores(Rows these, int64_t n, const float* rows, int64_t row, int64_t width,
                              const float* q, float* s, int64_t heads) {
  if (these.few) {
    int64_t h = 0;
    for (; h + 4 <= these.n; h += 4) scores_of_few<4>(n, rows, row, width, q + h * width, s + h, heads);
    if (these.n - h == 3) scores_of_few<3>(n, rows, row, width, q + h * width, s + h, heads);
    if (these.n - h == 2) scores_of_few<2>(n, rows, row, width, q + h * width, s + h, heads);
    if (these.n - h == 1) scores_of_few<1>(n, rows, row, width, q + h * width, s + h, heads);
    return;
  }
  int64_t h = 0;
  for (; h + kPanel <= heads; h += kPanel) gemm(n, kPanel, width, rows, row, 1, q + h * width, kPanel, s + h, heads);
  if (h < heads) gemm(n, kLanes, width, rows, row, 1, q + h * width, kLanes, s + h, heads);
}

// o[H][width] += s^T times rows: sums over n keys.
[[gnu::noinline]] void add_rows(int64_t H, int64_t n, int64_t width, const float* s, int64_t heads, const float* rows,
                                int64_t row, float* o, int64_t o_row) {
  gemm_add(H, width, n, s, 1, heads, rows, row, o, o_row);
}

// Row (b, t) of q and q_rope, or of a tensor of values, as [H][row] with zeros behind.
inline void read_heads(const Problem& p, const thalweg_tensor& t, const thalweg_tensor* rope, int64_t b, int64_t i,
                       int64_t width, int64_t padded_width, float* out, int64_t row) {
  for (int64_t h = 0; h < p.H; ++h) {
    float* to = out + h * row;
    read_row(p.dtype, element_at(t, b, i, h), width, to);
    int64_t c = width;
    if (rope && p.KR > 0) {
      read_row(p.dtype, element_at(*rope, b, i, h), p.KR, to + c);
      c += p.KR;
    }
    for (int64_t d = c; d < padded_width; ++d) to[d] = 0;
  }
}

// One element of a tensor of any float dtype, as float32.
inline float float_at(const thalweg_tensor& t, int64_t i, int64_t j = 0, int64_t k = 0) {
  float x = 0;
  read_strided(t.dtype, element_at(t, i, j, k), 0, 1, &x);
  return x;
}
inline void put_statistic(const thalweg_tensor& t, int64_t b, int64_t i, int64_t h, float x) {
  if (is_there(t)) write_strided(t.dtype, element_at(t, b, i, h), 0, 1, &x);
}

}  // namespace
}  // namespace thalweg::sparse_flash_attention
#endif
