// What the vector rows share: a query packed for products with keys, the scores of a block of keys, and the signs
// that the backward needs. For files compiled per instruction set only.
//
// Vectors lie along the heads. A query is packed as panels of two vectors of heads, [K][2 kLanes] each (the last
// one may be a single vector), so that a product of kTileRows keys and a panel reads its keys element by element,
// wherever they lie: contiguous rows and the entries of a list run the same code.
#ifndef THALWEG_OPS_LIGHTNING_INDEXER_TILES_H
#define THALWEG_OPS_LIGHTNING_INDEXER_TILES_H

#include "thalweg/cpu/blocks/gemm.h"
#include "thalweg/cpu/blocks/lanes.h"
#include "thalweg/cpu/blocks/rows.h"
#include "thalweg/ops/lightning_indexer/problem.h"

namespace thalweg::lightning_indexer {
namespace {

// Keys of a block, in whole tiles: with a panel of the query they fit the L1 at K = 128, while all panels pass.
constexpr int64_t kBlockKeys = 24;
static_assert(kBlockKeys % kTileRows == 0);

// Sizes of scratch, in floats.
struct Pitches {
  int64_t heads;     // H, whole vectors
  int64_t channels;  // K, whole vectors
  int64_t row;       // of a key or a head in scratch: off a power of two, so that tiles spread over the sets of the L1
  explicit Pitches(const Problem& p)
      : heads(round_up(p.H, kLanes)), channels(round_up(p.K, kLanes)), row(channels + kPitchPad) {}
};

// Cuts memory into arrays of whole cache lines; from null, for its size alone.
struct Cutter {
  char* base;
  int64_t at = 0;
  template <class T>
  T* take(int64_t n) {
    char* here = base + at;
    at += round_up(n * int64_t(sizeof(T)), 64);
    return reinterpret_cast<T*>(here);
  }
};

// The keys as float32 rows, once a call; one task a block of rows.
struct KeyRows {
  const Problem& p;
  const thalweg_tensor& k;
  float* rows;  // [B S][pitch], 0 behind K
  int64_t pitch;
};
constexpr int64_t kKeysOfATask = 256;

inline void key_rows_task(void* arg, int64_t i, int64_t) {
  const KeyRows& all = *static_cast<const KeyRows*>(arg);
  const int64_t n = all.p.B * all.p.S, last = (i + 1) * kKeysOfATask < n ? (i + 1) * kKeysOfATask : n;
  for (int64_t key = i * kKeysOfATask; key < last; ++key) {
    float* row = all.rows + key * all.pitch;
    read_row(all.k.dtype, element_at(all.k, key / all.p.S, key % all.p.S), all.p.K, row);
    for (int64_t c = all.p.K; c < all.pitch; ++c) row[c] = 0;
  }
}

inline void read_keys(const Problem& p, const Plan& plan, const thalweg_tensor& k, float* rows, const Exec& exec) {
  KeyRows all{p, k, rows, Pitches(p).row};
  parallel_tasks(exec, (p.B * p.S + kKeysOfATask - 1) / kKeysOfATask, plan.num_slots, key_rows_task, &all);
}

// Row r of q as rows [heads][pitch.row], zeros behind H and K.
inline void read_query(const Problem& p, const thalweg_tensor& q, int64_t r, float* rows) {
  const Pitches pitch(p);
  for (int64_t h = 0; h < pitch.heads; ++h) {
    float* row = rows + h * pitch.row;
    if (h < p.H) read_row(q.dtype, element_at(q, r / p.T, r % p.T, h), p.K, row);
    for (int64_t c = h < p.H ? p.K : 0; c < pitch.channels; ++c) row[c] = 0;
  }
}

// Row r of w times the scale [heads], zeros behind H.
inline void read_weights(const Problem& p, const thalweg_tensor& w, int64_t r, float* out) {
  const Pitches pitch(p);
  read_row(w.dtype, element_at(w, r / p.T, r % p.T), p.H, out);
  for (int64_t h = 0; h < p.H; ++h) out[h] *= float(p.scale);
  for (int64_t h = p.H; h < pitch.heads; ++h) out[h] = 0;
}

// rows [heads][pitch.row] as panels [channels][heads of the panel].
inline void pack_query(const Problem& p, const float* rows, float* panels) {
  const Pitches pitch(p);
  for (int64_t h = 0; h < pitch.heads; h += kLanes) {
    const int64_t panel = h / kPanel * kPanel;
    const int64_t width = pitch.heads - panel < kPanel ? kLanes : kPanel;
    float* out = panels + panel * pitch.channels + (h - panel);
    for (int64_t c = 0; c < pitch.channels; c += kLanes) {
      vf block[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) block[i] = load(rows + (h + i) * pitch.row + c);
      transpose(block);
      for (int64_t i = 0; i < kLanes; ++i) store(out + (c + i) * width, block[i]);
    }
  }
}

// Asks for the keys of a list's entries [from, to), which lie anywhere, before they are needed.
inline void prefetch_keys(const Problem& p, const float* keys, const int64_t* rows, int64_t from, int64_t to) {
  const Pitches pitch(p);
  for (int64_t i = from; i < to; ++i)
    for (int64_t c = 0; c < pitch.channels; c += 16) prefetch_l2(keys + rows[i] * pitch.row + c);
}

// u of kTileRows keys and one panel of NV vectors; then w relu(u) is added to the keys' sums, and the signs of u go
// to signs, which is null where nobody asks.
template <int NV>
[[gnu::always_inline]] inline void score_tile(int64_t channels, const float* const* keys, const float* panel,
                                              const float* w, bool first, float* sums, uint8_t* signs,
                                              int64_t signs_row) {
  vf acc[kTileRows][NV];
  tile_zero(acc);
#pragma GCC unroll 2
  for (int64_t c = 0; c < channels; ++c) {
    vf y[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) y[v] = load(panel + (c * NV + v) * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) {
      const vf x = set1(keys[i][c]);
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) acc[i][v] = fma(x, y[v], acc[i][v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) {
    vf sum = first ? zero() : load(sums + i * kLanes);
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) sum = fma(load(w + v * kLanes), max(zero(), acc[i][v]), sum);  // keeps NaN
    store(sums + i * kLanes, sum);
    if (!signs) continue;
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      const uint32_t bits = positive_lanes(acc[i][v]);
      memcpy(signs + i * signs_row + v * kLanes / 8, &bits, size_t(kLanes / 8));
    }
  }
}

// I of `count` keys, at most kBlockKeys; keys[] has room for whole tiles and is filled up here. sums is
// [kBlockKeys][kLanes]; signs [whole tiles][heads / 8] or null.
inline void score_block(const Problem& p, int64_t count, const float** keys, const float* panels, const float* w,
                        float* sums, float* scores, uint8_t* signs) {
  const Pitches pitch(p);
  const int64_t whole = round_up(count, kTileRows), signs_row = pitch.heads / 8;
  for (int64_t i = count; i < whole; ++i) keys[i] = keys[count - 1];
  for (int64_t h = 0; h < pitch.heads; h += kPanel)
    for (int64_t i = 0; i < whole; i += kTileRows) {
      uint8_t* tile_signs = signs ? signs + i * signs_row + h / 8 : nullptr;
      const float* panel = panels + h * pitch.channels;
      if (pitch.heads - h >= kPanel)
        score_tile<2>(pitch.channels, keys + i, panel, w + h, h == 0, sums + i * kLanes, tile_signs, signs_row);
      else
        score_tile<1>(pitch.channels, keys + i, panel, w + h, h == 0, sums + i * kLanes, tile_signs, signs_row);
    }
  for (int64_t i = 0; i < count; ++i) scores[i] = pitch.heads ? hsum(load(sums + i * kLanes)) : 0.f;
}

}  // namespace
}  // namespace thalweg::lightning_indexer
#endif
