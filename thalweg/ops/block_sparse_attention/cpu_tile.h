// What the rows of bf16 tiles share: where the rows of a tile of keys lie, and the next ones asked for ahead. For files
// compiled for amx.
#ifndef THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CPU_TILE_H
#define THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CPU_TILE_H

#include "thalweg/cpu/blocks/tile_gemm.h"
#include "thalweg/ops/block_sparse_attention/cpu_flash.h"

namespace thalweg::block_sparse_attention {
namespace {

static_assert(kKeys % kTileDepth == 0);

inline const uint16_t* half_row(const thalweg_tensor& t, const Item& item, int64_t token, int64_t head) {
  return reinterpret_cast<const uint16_t*>(element_at(t, item.batch, token, head));
}

// Rows of a tile of keys; null past the last one, so that it counts as zeros.
struct KeyRows {
  const uint16_t *k[kKeys], *v[kKeys];
  int64_t key[kKeys], keys;

  void find(const KeyTile& tile, const thalweg_tensor& k_rows, const thalweg_tensor& v_rows, const Item& item,
            int64_t head) {
    keys = tile.keys;
    tile.each([&](int64_t row, int64_t token) __attribute__((always_inline)) {
      k[row] = half_row(k_rows, item, item.k_begin + token, head);
      v[row] = half_row(v_rows, item, item.k_begin + token, head);
      key[row] = token;
    });
    for (int64_t row = keys; row < kKeys; ++row) k[row] = v[row] = nullptr;
  }
};

// Whether all of a right matrix [depth, width] are finite numbers.
inline bool all_finite(const uint16_t* right, int64_t depth, int64_t width) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  const int64_t n = tiles_of(depth, kTileDepth) * tiles_of(width, kTileSide) * kTile;
  __mmask32 bad = 0;
  for (int64_t i = 0; i < n; i += kTileDepth)
    bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(right + i), exponent), exponent);
  return bad == 0;
}

// Asks for what the next tile reads, a few of its keys after each block of a product.
struct RowsAhead {
  const KeyRows& rows;
  int64_t each, next;  // keys at a time; the first not asked for
  RowsAhead(const KeyRows& keys, int64_t blocks) : rows(keys), each(ceil_div(keys.keys, blocks)), next(0) {}

  template <class Fetch>
  [[gnu::always_inline]] void some(Fetch&& fetch) {
    for (int64_t i = 0; i < each && next < rows.keys; ++i, ++next) fetch(next);
  }
};
inline void fetch_halves(const uint16_t* row, int64_t n) {
  for (int64_t i = 0; i < n; i += kTileDepth) prefetch_l2(row + i);
}
inline int64_t blocks_of(int64_t M, int64_t N) { return tiles_of(M, 2 * kTileSide) * tiles_of(N, 2 * kTileSide); }

}  // namespace
}  // namespace thalweg::block_sparse_attention
#endif
