// The inner loops of cpu_chunk_fwd: one chunk of one panel of the state, and the fetching of rows that goes on
// between its products. The mathematics and the traps are in the header of cpu_chunk_fwd.cpp.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_CPU_CHUNK_FWD_TILES_H
#define THALWEG_OPS_GATED_DELTA_RULE_CPU_CHUNK_FWD_TILES_H

#include "thalweg/cpu/blocks/gemm.h"

namespace thalweg::gated_delta_rule {
namespace {

constexpr int64_t C = 16;  // tokens of a chunk

// ---- the next block's rows ----------------------------------------------------------------------------

// Fetches the tokens that are worked on next while others are. In [B T H K] storage a row of a token is on a page
// of its own, and page walks overlap only when they are close together: touch() asks for one line of each page of
// a few tokens of the next block at once, for all heads of the task. The rows themselves follow, those of the head
// that comes next, one row at a time between products (fetch_row).
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kBurst = 16;  // tokens

struct Touch {
  const char* at[4];           // q, k, v and o of the block's first token and the task's first head
  int64_t stride[4];           // bytes from token to token
  int64_t head_stride[4];
  int64_t heads[4];            // of the task
  int64_t tokens, touched;     // of the next block; asked for so far
  int64_t bursts, steps, due;  // of kBurst tokens, spread over `steps` calls
};

struct Fetch {
  const char* at[3];           // q, k and v of the block's first token and the next head
  int64_t stride[3];
  int64_t value_stride;        // from value head to value head
  int64_t heads;               // value heads
  int64_t k_bytes, v_bytes;
  int64_t token, which;        // the next row: q, k, then the heads of v
  int64_t rows, steps, due;    // `rows` are spread over `steps` calls
  int64_t limit;               // tokens that have been touched
};

struct Ahead {
  Touch touch;
  Fetch fetch;
  bool next_block;  // fetch is of the block that touch walks
};

[[gnu::noinline]] void touch_tokens(Touch* f, int64_t end) {
  for (; f->touched < end; ++f->touched)
    for (int j = 0; j < 4; ++j) {
      const char* p = f->at[j] + f->touched * f->stride[j];
      uintptr_t page = 0;
      for (int64_t i = 0; i < f->heads[j]; ++i, p += f->head_stride[j]) {
        uintptr_t here = reinterpret_cast<uintptr_t>(p) / kPageBytes;
        if (here != page) prefetch(p);
        page = here;
      }
    }
}

[[gnu::always_inline]] inline void touch(Ahead* ahead) {
  Touch* f = &ahead->touch;
  for (f->due += f->bursts; f->due >= f->steps; f->due -= f->steps)
    touch_tokens(f, f->tokens - f->touched < kBurst ? f->tokens : f->touched + kBurst);
  if (ahead->next_block) ahead->fetch.limit = f->touched;
}

[[gnu::always_inline]] inline void fetch_row(Fetch* f) {
  for (f->due += f->rows; f->due >= f->steps; f->due -= f->steps) {
    if (f->token >= f->limit) return;
    int64_t j = f->which < 2 ? f->which : 2, bytes = j < 2 ? f->k_bytes : f->v_bytes;
    const char* p = f->at[j] + f->token * f->stride[j] + (f->which - j) * f->value_stride;
    for (int64_t i = 0; i < bytes; i += 64) prefetch(p + i);
    if (++f->which == 2 + f->heads) f->which = 0, ++f->token;
  }
}

// ---- the chunk: one panel of the state ---------------------------------------------------------------

struct Chunk {
  int64_t Kp, rows;
  const float *xk, *xq, *l, *p, *e, *d, *beta;
  float *vo, *u, *w, *s;
};

// Rows I0 .. I0+MR of u: beta (v - e K S), less what the chunk's earlier tokens wrote.
template <int I0, int MR>
[[gnu::always_inline]] inline void solve_tile(const Chunk& c) {
  vf acc[MR][2];
  tile_zero<MR, 2>(acc);
  tile_mac<MR, 2>(c.Kp, c.xk + I0, 1, C, c.s, kPanel, acc);
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
    vf e = set1(c.e[I0 + i]), beta = set1(c.beta[I0 + i]);
    for (int v = 0; v < 2; ++v) acc[i][v] = beta * fnma(e, acc[i][v], load(c.vo + (I0 + i) * kPanel + v * kLanes));
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
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
    vf d = set1(c.d[I0 + i]);
    for (int v = 0; v < 2; ++v) store(c.w + (I0 + i) * kPanel + v * kLanes, d * acc[i][v]);
  }
}

// Rows I0 .. I0+MR of o: e Q S plus what the chunk's tokens wrote, each row its own included.
template <int I0, int MR>
[[gnu::always_inline]] inline void output_tile(const Chunk& c) {
  vf acc[MR][2];
  tile_zero<MR, 2>(acc);
  tile_mac<MR, 2>(c.Kp, c.xq + I0, 1, C, c.s, kPanel, acc);
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
    vf e = set1(c.e[I0 + i]);
    for (int v = 0; v < 2; ++v) acc[i][v] = e * acc[i][v];
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

// A tile is skipped where the chunk is too short for it; the rows of others never depend on it.
[[gnu::noinline]] void chunk_rows(const Chunk& c) {
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

// S <- e_last S + sum_j k_j (d_j u_j)^T
[[gnu::noinline]] void update_state(const Chunk& c, Fetch* fetch) {
  float decay = c.e[C - 1];
  for (int64_t k = 0; k < c.Kp; k += kUpdateRows) {
    int64_t rows = c.Kp - k < kUpdateRows ? c.Kp - k : kUpdateRows;
    const float* x = c.xk + k * C;
    float* s = c.s + k * kPanel;
    if (c.rows == C) gemm_panel<2, true>(rows, C, x, C, 1, c.w, kPanel, s, kPanel, decay);
    else gemm_panel<2, true>(rows, c.rows, x, C, 1, c.w, kPanel, s, kPanel, decay);
    fetch_row(fetch);
  }
}

}  // namespace
}  // namespace thalweg::gated_delta_rule
#endif
