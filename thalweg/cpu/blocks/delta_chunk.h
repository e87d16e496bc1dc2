// The products of one chunk of tokens with one panel of a state, for the chunked forwards of the delta rules:
//
//   u_i = beta_i (v_i - a_i) - sum_{j<i} beta_i KK_ij u_j     a_i = S^T k_i, k_i decayed since the chunk's start
//   o_i = b_i + sum_{j<=i} QK_ij u_j                          b_i = S^T q_i, likewise
//   S  <- decay S + sum_j k_j u_j^T                           k_j decayed up to the chunk's end
//
// With a decay of the whole head (HeadChunk) keys and queries are shared by value heads, packed [K][C], and the
// decays multiply what comes of them. With a decay per channel (ChannelChunk) they come decayed, as rows [C][Kp].
// Rows only read earlier rows: triangles are walked, not masked.
#ifndef THALWEG_CPU_BLOCKS_DELTA_CHUNK_H
#define THALWEG_CPU_BLOCKS_DELTA_CHUNK_H

#include "thalweg/cpu/blocks/ahead.h"
#include "thalweg/cpu/blocks/gemm.h"

namespace thalweg {
namespace {

constexpr int64_t C = 16;  // tokens of a chunk

struct Chunk {
  int64_t Kp, rows;       // K padded to whole vectors; tokens
  const float *k, *q;     // keys and queries that read the state
  const float *l, *p;     // [C C]  -beta_i KK_ij below the diagonal, QK_ij up to it
  const float* beta;      // [C]
  float *vo, *u, *s;      // [C kPanel] v, then o; [C kPanel]; [Kp kPanel]
};

struct HeadChunk : Chunk {  // k, q [Kp C]
  static constexpr bool kPerChannel = false;
  const float *e, *d;  // [C]  decay from the chunk's start to row i, from row j to the chunk's end
  float* w;            // [C kPanel]  d_j u_j
};

struct ChannelChunk : Chunk {  // k, q [C Kp]
  static constexpr bool kPerChannel = true;
  const float* kd;    // [C Kp]  keys that are written
  const float* last;  // [Kp]    decay of the whole chunk
};

// Products of rows I0 .. I0+MR of x with the state.
template <int I0, int MR, class X>
[[gnu::always_inline]] inline void read_tile(const X& c, const float* x, vf (&acc)[MR][2]) {
  tile_zero<MR, 2>(acc);
  if constexpr (X::kPerChannel) tile_mac<MR, 2>(c.Kp, x + I0 * c.Kp, c.Kp, 1, c.s, kPanel, acc);
  else tile_mac<MR, 2>(c.Kp, x + I0, 1, C, c.s, kPanel, acc);
}

// Rows I0 .. I0+MR of u: beta (v - e K S), less what the chunk's earlier tokens wrote.
template <int I0, int MR, class X>
[[gnu::always_inline]] inline void solve_tile(const X& c) {
  vf acc[MR][2];
  read_tile<I0>(c, c.k, acc);
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
    vf beta = set1(c.beta[I0 + i]);
    for (int v = 0; v < 2; ++v) {
      vf value = load(c.vo + (I0 + i) * kPanel + v * kLanes);
      if constexpr (X::kPerChannel) acc[i][v] = beta * (value - acc[i][v]);
      else acc[i][v] = beta * fnma(set1(c.e[I0 + i]), acc[i][v], value);
    }
  }
  tile_mac<MR, 2>(I0, c.l + I0 * C, C, 1, c.u, kPanel, acc);
#pragma GCC unroll 16
  for (int j = 0; j < MR; ++j) {
#pragma GCC unroll 16
    for (int i = j + 1; i < MR; ++i) {
      vf l = set1(c.l[(I0 + i) * C + I0 + j]);
      for (int v = 0; v < 2; ++v) acc[i][v] = fma(l, acc[j][v], acc[i][v]);
    }
  }
  tile_store<MR, 2>(c.u + I0 * kPanel, kPanel, acc);
  if constexpr (!X::kPerChannel) {
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      vf d = set1(c.d[I0 + i]);
      for (int v = 0; v < 2; ++v) store(c.w + (I0 + i) * kPanel + v * kLanes, d * acc[i][v]);
    }
  }
}

// Rows I0 .. I0+MR of o: e Q S plus what the chunk's tokens wrote, each row its own included.
template <int I0, int MR, class X>
[[gnu::always_inline]] inline void output_tile(const X& c) {
  vf acc[MR][2];
  read_tile<I0>(c, c.q, acc);
  if constexpr (!X::kPerChannel) {
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      vf e = set1(c.e[I0 + i]);
      for (int v = 0; v < 2; ++v) acc[i][v] = e * acc[i][v];
    }
  }
  tile_mac<MR, 2>(I0, c.p + I0 * C, C, 1, c.u, kPanel, acc);
#pragma GCC unroll 16
  for (int j = 0; j < MR; ++j) {
    vf u[2] = {load(c.u + (I0 + j) * kPanel), load(c.u + (I0 + j) * kPanel + kLanes)};
#pragma GCC unroll 16
    for (int i = j; i < MR; ++i) {
      vf p = set1(c.p[(I0 + i) * C + I0 + j]);
      for (int v = 0; v < 2; ++v) acc[i][v] = fma(p, u[v], acc[i][v]);
    }
  }
  tile_store<MR, 2>(c.vo + I0 * kPanel, kPanel, acc);
}

// u and o. A tile is skipped where the chunk is too short for it; the rows of others never depend on it.
template <class X>
[[gnu::noinline]] void chunk_rows(const X& c) {
  if constexpr (kTileRows == 8) {
    solve_tile<0, 8>(c);
    if (c.rows > 8) solve_tile<8, 8>(c);
    output_tile<0, 8>(c);
    if (c.rows > 8) output_tile<8, 8>(c);
  } else {
    solve_tile<0, 6>(c);
    if (c.rows > 6) solve_tile<6, 6>(c);
    if (c.rows > 12) solve_tile<12, 4>(c);
    output_tile<0, 6>(c);
    if (c.rows > 6) output_tile<6, 6>(c);
    if (c.rows > 12) output_tile<12, 4>(c);
  }
}

constexpr int64_t kUpdateRows = kTileRows == 8 ? 16 : 24;  // rows of the state between two fetched rows

// Rows k .. k+rows of the state take in `tokens` tokens.
[[gnu::always_inline]] inline void update_rows(const HeadChunk& c, int64_t k, int64_t rows, int64_t tokens) {
  gemm_panel<2, true>(rows, tokens, c.k + k * C, C, 1, c.w, kPanel, c.s + k * kPanel, kPanel, c.e[C - 1]);
}
[[gnu::always_inline]] inline void update_rows(const ChannelChunk& c, int64_t k, int64_t rows, int64_t tokens) {
  gemm_panel<2, true>(rows, tokens, c.kd + k, 1, c.Kp, c.u, kPanel, c.s + k * kPanel, kPanel, c.last + k);
}

template <class X>
[[gnu::noinline]] void update_state(const X& c, Fetch* fetch) {
  for (int64_t k = 0; k < c.Kp; k += kUpdateRows) {
    int64_t rows = c.Kp - k < kUpdateRows ? c.Kp - k : kUpdateRows;
    if (c.rows == C) update_rows(c, k, rows, C);
    else update_rows(c, k, rows, c.rows);
    fetch_row(fetch);
  }
}

}  // namespace
}  // namespace thalweg
#endif
