// What the fast rows share: tiles of queries, tiles of kept keys, and rows that become 0. For files compiled per
// instruction set.
#ifndef THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CPU_FLASH_H
#define THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CPU_FLASH_H

#include "thalweg/cpu/blocks/softmax.h"
#include "thalweg/ops/block_sparse_attention/walk.h"

namespace thalweg::block_sparse_attention {
namespace {

constexpr int64_t kKeys = 96;  // of a key tile at most: whole register tiles of 6 and of 8 rows

inline bool is_there(const thalweg_tensor& t) { return t.dtype != THALWEG_NONE; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A query block is cut into `pieces` tiles of `rows` queries, the last one shorter.
struct Cut {
  int64_t pieces, rows;
};
inline Cut cut_blocks(const Problem& p, int64_t most) {
  const int64_t pieces = ceil_div(p.block_q, most), rows = ceil_div(p.block_q, pieces);
  return {pieces, rows < p.block_q ? round_up(rows, 16) : rows};
}
// Tiles of the longest sequence.
inline int64_t num_tiles(const Problem& p, const Cut& cut) { return ceil_div(p.longest_q, p.block_q) * cut.pieces; }

// Tile i of a sequence: `rows` queries from `t` on, none past the sequence's end.
struct Queries {
  int64_t t, rows;
};
inline Queries queries_at(const Problem& p, const Item& item, const Cut& cut, int64_t i) {
  const int64_t block = i / cut.pieces * p.block_q, t = block + i % cut.pieces * cut.rows;
  int64_t end = t + cut.rows;
  if (end > block + p.block_q) end = block + p.block_q;
  if (end > item.q_len) end = item.q_len;
  return {t, end > t ? end - t : 0};
}

// Up to kKeys kept keys, as runs of neighbours.
struct KeyTile {
  struct Run {
    int64_t key, first, count;  // keys [key, key + count) are rows first and on of the tile
  };
  Run runs[kKeys];
  int64_t num_runs, keys;

  bool take(Walk* walk) {
    num_runs = keys = 0;
    int64_t key;
    while (keys < kKeys) {
      const int64_t count = walk->next(kKeys - keys, &key);
      if (count == 0) break;
      runs[num_runs++] = {key, keys, count};
      keys += count;
    }
    return keys > 0;
  }

  // Calls body(row of the tile, key) for every key.
  template <class Body>
  [[gnu::always_inline]] void each(Body&& body) const {
    for (int64_t r = 0; r < num_runs; ++r)
      for (int64_t i = 0; i < runs[r].count; ++i) body(runs[r].first + i, runs[r].key + i);
  }
};

// Queries of the tile that lie before the first one to see a key: by causality, and in `rows` at most.
inline int64_t blind_queries(const Problem& p, const Item& item, const Queries& tile, int64_t key) {
  if (!p.causal) return 0;
  const int64_t n = key - (item.k_len - item.q_len) - tile.t;
  return n < 0 ? 0 : n < tile.rows ? n : tile.rows;
}

// Up to kLanes rows of a [B T H K] tensor as float32, `pitch` apart, whole vectors of them; rows that `skip` are 0.
template <class Skip>
[[gnu::always_inline]] inline void read_rows(const thalweg_tensor& t, const Item& item, int64_t head, int64_t first,
                                             int64_t rows, int64_t width, float* out, int64_t pitch, Skip&& skip) {
  for (int64_t r = 0; r < rows; ++r) {
    float* to = out + r * pitch;
    for (int64_t i = width / kLanes * kLanes; i < width; i += kLanes) store(to + i, zero());
    if (skip(first + r))
      for (int64_t i = 0; i < width; i += kLanes) store(to + i, zero());
    else
      read_row(t.dtype, element_at(t, item.batch, item.q_begin + first + r, head), width, to);
  }
}

// Rows [begin, end) of every head of [B T H K] become 0, elements of [B T H] become x.
inline void clear_rows(const thalweg_tensor& t, int64_t b, int64_t begin, int64_t end) {
  if (!is_there(t)) return;
  for (int64_t i = begin; i < end; ++i)
    for (int64_t h = 0; h < t.shape[2]; ++h)
      memset(element_at(t, b, i, h), 0, size_t(t.shape[3] * element_bytes(t.dtype)));
}
inline void clear_elements(const thalweg_tensor& t, int64_t b, int64_t begin, int64_t end, float x) {
  if (!is_there(t)) return;
  for (int64_t i = begin; i < end; ++i)
    for (int64_t h = 0; h < t.shape[2]; ++h) *reinterpret_cast<float*>(element_at(t, b, i, h)) = x;
}

// Hands out a slot's memory; with a null base it only counts.
struct Carver {
  char* base;
  int64_t used = 0;
  float* floats(int64_t n) {
    char* at = base ? base + used : nullptr;
    used += round_up(n * 4, 64);
    return reinterpret_cast<float*>(at);
  }
  uint16_t* halves(int64_t n) { return reinterpret_cast<uint16_t*>(floats((n + 1) / 2)); }
};

}  // namespace
}  // namespace thalweg::block_sparse_attention
#endif
