// The chunked backwards of the delta rules: products that do not know how the decay runs.
#ifndef THALWEG_CPU_BLOCKS_CHUNK_BWD_PRODUCTS_H
#define THALWEG_CPU_BLOCKS_CHUNK_BWD_PRODUCTS_H

#include "thalweg/cpu/blocks/chunk_bwd_io.h"

namespace thalweg {
namespace {

// cols [Vp 3C] = d_o, d_v and r, panels, with tokens along the row.
inline void turn_columns(const Dims& dims, const float* d_o, const float* d_v, const float* r, float* cols) {
  for (int64_t p = 0; p < dims.Vp / kPanel; ++p) {
    float* to = cols + p * kPanel * 3 * kC;
    const int64_t at = p * kC * kPanel;
    transpose(d_o + at, kPanel, kC, kPanel, to, 3 * kC);
    transpose(d_v + at, kPanel, kC, kPanel, to + kC, 3 * kC);
    transpose(r + at, kPanel, kC, kPanel, to + 2 * kC, 3 * kC);
  }
}

// One tile of key channels: acc[l] = its rows times a third of cols.
template <int R>
[[gnu::always_inline]] inline void state_times_columns(const Dims& dims, const float* S, const float* cols,
                                                       vf (&acc)[R][kCV]) {
  tile_zero(acc);
  for (int64_t p = 0; p < dims.Vp / kPanel; ++p)
    tile_mac(kPanel, S + p * dims.Kp * kPanel, kPanel, 1, cols + p * kPanel * 3 * kC, 3 * kC, acc);
}

// The same for all three thirds at once, where a chunk's tokens are one vector: one panel.
template <int R>
[[gnu::always_inline]] inline void columns_mac(const float* S, const float* dS, const float* cols, vf (&acc)[R][2],
                                               vf (&acc_r)[R][1]) {
  for (int64_t j = 0; j < kPanel; ++j) {
    vf d_o = load(cols + j * 3 * kC), d_v = load(cols + j * 3 * kC + kC), r = load(cols + j * 3 * kC + 2 * kC);
#pragma GCC unroll 8
    for (int l = 0; l < R; ++l) {
      vf x = set1(S[l * kPanel + j]);
      acc[l][0] = fma(x, d_o, acc[l][0]);
      acc[l][1] = fma(x, d_v, acc[l][1]);
      acc_r[l][0] = fma(set1(dS[l * kPanel + j]), r, acc_r[l][0]);
    }
  }
}

// to [C C] = x_i . r_j for x in panels.
template <bool careful>
inline void delta_products(const Dims& dims, const float* x, const float* cols, float* to) {
  auto product = [&](auto tile, int64_t row) __attribute__((always_inline)) {
    vf acc[tile.count][kCV], lost[tile.count][kCV];
    tile_zero(acc), tile_zero(lost);
    for (int64_t p = 0; p < dims.Vp / kPanel; ++p) {
      const float *a = x + (p * kC + row) * kPanel, *b = cols + p * kPanel * 3 * kC + 2 * kC;
      if constexpr (careful) tile_mac_careful(kPanel, a, kPanel, 1, b, 3 * kC, acc, lost);
      else tile_mac(kPanel, a, kPanel, 1, b, 3 * kC, acc);
    }
    if constexpr (careful) tile_add(lost, acc);
    tile_store(to + row * kC, kC, acc);
  };
  for (int64_t i = 0; i < kC; i += kRows)
    if constexpr (careful) for_tiles_of_16(i, product);
    else for_token_tiles(i, product);
}

}  // namespace
}  // namespace thalweg
#endif
