// Pieces of cpu_chunk_bwd.cpp: the mathematics of one chunk. Letters as in its header.
#ifndef THALWEG_OPS_KIMI_DELTA_ATTENTION_CPU_CHUNK_BWD_STEPS_H
#define THALWEG_OPS_KIMI_DELTA_ATTENTION_CPU_CHUNK_BWD_STEPS_H

#include "thalweg/cpu/blocks/chunk_bwd_products.h"
#include "thalweg/ops/kimi_delta_attention/cpu_chunk_bwd_io.h"

namespace thalweg::kimi_delta_attention {
namespace {

// A chunk as its key head sees it.
struct Keys {
  float* q;       // blocks, normalised where asked, without scale
  float* k;       // blocks, of this chunk
  float* q_rstd;  // [C]
  float* k_rstd;  // [C] of this chunk
  float* d_q;     // blocks: sum over value heads
  float* d_k;     // blocks
};

// A chunk as one value head sees it.
struct Head {
  Strengths* strengths;  // of this chunk
  float* g;              // blocks, of this chunk
  float* kk;             // [C C] of this chunk: sum over channels of k_i D_ij k_j, strictly lower
  float* a;              // blocks: exp(g_i)
  float* e;              // blocks: decay from the chunk's start to token i
  float* decay;          // [Kp] decay over the chunk
  float* q_in;           // blocks: scale e_i q_i
  float* minus_k_in;     // blocks: -e_i k_i
  float* k_out;          // blocks: d_j k_j; in the forward pass beta_j d_j k_j
  float* columns;        // [Kp C]: minus_k_in (forward) or k_out (backward) with tokens along the row
  float* now;            // [C 16] scratch: keys decayed to the current token
  float* lanes;          // [C C lanes] scratch: sums over channels before their lanes are added up
  float* minus_L;        // [C C]
  float* P;              // [C C] scale sum of q_i D_ij k_j, lower with diagonal
  float* reads;          // [C C] R
  float* writes;         // [C C] W
  float* d_o;            // panels [Vp/panel][C][panel]
  float* d_v;            // panels
  float* cols;           // [Vp 3C]: d_o^T, d_v^T, r^T beside each other
  float* r_dot;          // [C lanes] partial sums of y_i . r_i
  float* turned;         // [3][16 C] scratch
  float* S_d_o;          // blocks: S d_o_i
  float* S_d_v;          // blocks: S d_v_i
  float* dS_r;           // blocks: dS r_i
  float* row_sums;       // [Kp lanes] partial sums over V of S * dS
  float* carried;        // [Kp] decay times those sums
  float* triangle;       // [C C 16] scratch: D_ij k_j
  float* d_g;            // blocks
  float* raw;            // blocks: the gate as given
};

// ---- keys -------------------------------------------------------------------------------------------

// rstd [C] = 1 / sqrt(sum x^2 + 1e-6) of the tokens of x, blocks, and x times it.
inline void normalise(float* x, int64_t Kp, float* rstd) {
  for (int64_t i = 0; i < kC; ++i) {
    vf sum[kBV];
    for (int v = 0; v < kBV; ++v) sum[v] = zero();
    for (int64_t k = 0; k < Kp; k += kRows)
      for (int v = 0; v < kBV; ++v) {
        vf y = load(x + k * kC + i * kRows + v * kLanes);
        sum[v] = fma(y, y, sum[v]);
      }
    vf total = sum[0];
    for (int v = 1; v < kBV; ++v) total = total + sum[v];
    const vf s = set1(1.f) / sqrt(set1(hsum(total) + 1e-6f));
    rstd[i] = s[0];
    for (int64_t k = 0; k < Kp; k += kRows)
      for (int v = 0; v < kBV; ++v) {
        float* to = x + k * kC + i * kRows + v * kLanes;
        store(to, s * load(to));
      }
  }
}

// d <- rstd (d - y (y . d)) for the normalised y, both blocks.
inline void normalise_gradient(const float* y, const float* rstd, int64_t Kp, float* d) {
  for (int64_t i = 0; i < kC; ++i) {
    vf dot = zero();
    for (int64_t k = 0; k < Kp; k += kRows)
      for (int v = 0; v < kBV; ++v) {
        const int64_t at = k * kC + i * kRows + v * kLanes;
        dot = fma(load(y + at), load(d + at), dot);
      }
    const vf along = set1(hsum(dot)), s = set1(rstd[i]);
    for (int64_t k = 0; k < Kp; k += kRows)
      for (int v = 0; v < kBV; ++v) {
        const int64_t at = k * kC + i * kRows + v * kLanes;
        store(d + at, s * fnma(along, load(y + at), load(d + at)));
      }
  }
}

// ---- decays -----------------------------------------------------------------------------------------

// a and e of every token and channel.
inline void decays(const float* g, int64_t Kp, float* a, float* e) {
  for (int64_t k = 0; k < Kp; k += kRows)
    for (int v = 0; v < kBV; ++v) {
      vf sum = zero();
      for (int64_t i = 0; i < kC; ++i) {
        const int64_t at = k * kC + i * kRows + v * kLanes;
        const vf x = load(g + at);
        sum = sum + x;
        store(a + at, exp(x));
        store(e + at, exp(sum));
      }
    }
}

// to = factor e_i x_i, blocks.
inline void entering(const float* e, const float* x, float factor, int64_t Kp, float* to) {
  const vf f = set1(factor);
  for (int64_t at = 0; at < Kp * kC; at += kLanes) store(to + at, f * load(e + at) * load(x + at));
}

// to = beta_j d_j k_j, blocks, with beta [C] or without, and the decay over the chunk, [Kp].
inline void leaving(const float* g, const float* k, const float* beta, int64_t Kp, float* to, float* decay) {
  for (int64_t c = 0; c < Kp; c += kRows)
    for (int v = 0; v < kBV; ++v) {
      vf sum = zero();
      for (int64_t j = kC - 1; j >= 0; --j) {
        const int64_t at = c * kC + j * kRows + v * kLanes;
        vf x = exp(sum) * load(k + at);
        if (beta) x = set1(beta[j]) * x;
        store(to + at, x);
        sum = sum + load(g + at);
      }
      store(decay + c + v * kLanes, exp(sum));
    }
}

// cols [Kp C] of x, blocks.
inline void turn_blocks(const float* x, int64_t Kp, float* cols) {
  for (int64_t k = 0; k < Kp; k += kRows) transpose(x + k * kC, kRows, kC, kRows, cols + k * kC, kC);
}

// to[i], i < n, = the sum of the lanes of vector i; n is a multiple of kLanes.
inline void sum_lanes_of(const float* lanes, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += kLanes) {
    vf square[kLanes];
#pragma GCC unroll 16
    for (int64_t l = 0; l < kLanes; ++l) square[l] = load(lanes + (i + l) * kLanes);
    transpose_square(square);
#pragma GCC unroll 4
    for (int64_t step = 1; step < kLanes; step *= 2)
#pragma GCC unroll 16
      for (int64_t l = 0; l < kLanes; l += 2 * step) square[l] = square[l] + square[l + step];
    store(to + i, square[0]);
  }
}

// to [C C] = sum over channels of x_i D_ij k_j, lower with or without the diagonal, 0 above. A lane adds up Kp /
// lanes terms, so no sum is long: solves with keys that are alike, and beta near 2, repeat their error with
// alternating signs of nothing smaller than the state.
template <bool diagonal>
inline void pair_products(const float* x, const float* k, const float* a, int64_t Kp, float* now, float* lanes,
                          float* to) {
  memset(lanes, 0, size_t(kSquare * kLanes) * sizeof(float));
  for (int64_t c = 0; c < Kp * kC; c += kSquare)
    for (int64_t i = 0; i < kC; ++i) {
      vf x_i[kBV], a_i[kBV];
      for (int v = 0; v < kBV; ++v) {
        x_i[v] = load(x + c + i * kRows + v * kLanes), a_i[v] = load(a + c + i * kRows + v * kLanes);
        store(now + i * kRows + v * kLanes, load(k + c + i * kRows + v * kLanes));
      }
      float* sums = lanes + i * kC * kLanes;
      for (int64_t j = 0; j < i; ++j) {
        vf sum = load(sums + j * kLanes);
        for (int v = 0; v < kBV; ++v) {
          float* at = now + j * kRows + v * kLanes;
          const vf y = load(at) * a_i[v];
          store(at, y);
          sum = fma(x_i[v], y, sum);
        }
        store(sums + j * kLanes, sum);
      }
      if constexpr (diagonal) {
        vf sum = load(sums + i * kLanes);
        for (int v = 0; v < kBV; ++v) sum = fma(x_i[v], load(now + i * kRows + v * kLanes), sum);
        store(sums + i * kLanes, sum);
      }
    }
  sum_lanes_of(lanes, kSquare, to);
}

// ---- forward ----------------------------------------------------------------------------------------

// minus_L_ij = -f kk_ij for i > j, else 0, with f = beta_i or beta_j.
template <bool by_row>
inline void lower_factor(const float* kk, const float* beta, float* minus_L) {
  for (int64_t i = 0; i < kC; ++i)
    for (int v = 0; v < kCV; ++v) {
      const int64_t at = i * kC + v * kLanes, n = i - v * kLanes, before = n < 0 ? 0 : n > kLanes ? kLanes : n;
      const vf x = (by_row ? set1(beta[i]) : load(beta + v * kLanes)) * load(kk + at);
      store(minus_L + at, first_n(before, zero() - x, zero()));
    }
}

// r, panels: holds v, becomes the deltas before beta, r_i = v_i - S^T e_i k_i - sum_j<i kk_ij beta_j r_j.
inline void chunk_deltas(const Dims& dims, const Head& head, const float* S, float* r, Ahead* ahead) {
  lower_factor<false>(head.kk, head.strengths->beta, head.minus_L);
  for (int64_t p = 0; p < dims.Vp / kPanel; ++p) {
    const float* S_p = S + p * dims.Kp * kPanel;
    float* r_p = r + p * kC * kPanel;
    for_tiles_of_16(0, [&](auto tile, int64_t row) __attribute__((always_inline)) {
      vf acc[tile.count][2];
      tile_zero(acc);
      tile_mac(dims.Kp, head.columns + row, 1, kC, S_p, kPanel, acc);
#pragma GCC unroll 8
      for (int l = 0; l < tile.count; ++l) {
        float* to = r_p + (row + l) * kPanel;
        store(to, load(to) + acc[l][0]);
        store(to + kLanes, load(to + kLanes) + acc[l][1]);
      }
    });
    solve_lower(head.minus_L, r_p);
    fetch(ahead);
  }
}

// acc = a tile of a state, its rows times decay [rows].
template <int R>
[[gnu::always_inline]] inline void tile_decay(const float* decay, vf (&acc)[R][2]) {
#pragma GCC unroll 8
  for (int l = 0; l < R; ++l) {
    const vf f = set1(decay[l]);
    acc[l][0] = f * acc[l][0], acc[l][1] = f * acc[l][1];
  }
}

// S_after = decay S_before + sum_j (beta_j d_j k_j) r_j^T; both may be one.
inline void advance_state(const Dims& dims, const Head& head, const float* r, const float* S_before, float* S_after,
                          Ahead* ahead) {
  for (int64_t p = 0; p < dims.Vp / kPanel; ++p)
    for (int64_t k = 0; k < dims.Kp; k += kRows) {
      for_tiles_of_16(0, [&](auto tile, int64_t row) __attribute__((always_inline)) {
        const int64_t at = (p * dims.Kp + k + row) * kPanel;
        vf acc[tile.count][2];
        tile_load(S_before + at, kPanel, 1.f, acc);
        tile_decay(head.decay + k + row, acc);
        tile_mac(kC, head.k_out + k * kC + row, 1, kRows, r + p * kC * kPanel, kPanel, acc);
        tile_store(S_after + at, kPanel, acc);
      });
      fetch(ahead);
    }
}

// ---- backward ---------------------------------------------------------------------------------------

// d_v_i = beta_i y_i with y = (I + L)^-T (P^T d_o + k_out dS), panels; the parts of y . r for d_beta.
inline void chunk_d_v(const Dims& dims, const Head& head, const float* r, const float* dS, Ahead* ahead) {
  lower_factor<true>(head.kk, head.strengths->beta, head.minus_L);
  for (int64_t i = 0; i < kC; ++i) store(head.r_dot + i * kLanes, zero());
  for (int64_t p = 0; p < dims.Vp / kPanel; ++p) {
    const int64_t at = p * kC * kPanel;
    const float *dS_p = dS + p * dims.Kp * kPanel, *d_o = head.d_o + at, *r_p = r + at;
    float* d_v = head.d_v + at;
    for_tiles_of_16(0, [&](auto tile, int64_t row) __attribute__((always_inline)) {
      vf acc[tile.count][2];
      tile_zero(acc);
      tile_mac(dims.Kp, head.columns + row, 1, kC, dS_p, kPanel, acc);
      tile_mac_below(kC - row, head.P + row * kC + row, d_o + row * kPanel, acc);
      tile_store(d_v + row * kPanel, kPanel, acc);
    });
    solve_upper(head.minus_L, d_v);
    fetch(ahead);
    for (int64_t i = 0; i < kC; ++i) {
      vf beta = set1(head.strengths->beta[i]), dot = load(head.r_dot + i * kLanes);
      for (int64_t x = i * kPanel; x < (i + 1) * kPanel; x += kLanes) {
        vf y = load(d_v + x);
        dot = fma(y, load(r_p + x), dot);
        store(d_v + x, beta * y);
      }
      store(head.r_dot + i * kLanes, dot);
    }
  }
}

// S d_o^T, S d_v^T, dS r^T, for all tokens of the chunk.
inline void state_gradients(const Dims& dims, const Head& head, const float* S, const float* dS, Ahead* ahead) {
  for (int64_t k = 0; k < dims.Kp; k += kRows) {
    for_tiles_of_16(0, [&](auto tile, int64_t row) __attribute__((always_inline)) {
      constexpr int R = tile.count;
      const float *S_row = S + (k + row) * kPanel, *dS_row = dS + (k + row) * kPanel;
      float* to = head.turned + row * kC;
      if constexpr (kCV == 1) {
        vf acc[R][2], acc_r[R][1];
        tile_zero(acc), tile_zero(acc_r);
        for (int64_t p = 0; p < dims.Vp / kPanel; ++p)
          columns_mac(S_row + p * dims.Kp * kPanel, dS_row + p * dims.Kp * kPanel, head.cols + p * kPanel * 3 * kC, acc,
                      acc_r);
#pragma GCC unroll 8
        for (int l = 0; l < R; ++l) {
          store(to + l * kC, acc[l][0]);
          store(to + l * kC + kSquare, acc[l][1]);
          store(to + l * kC + 2 * kSquare, acc_r[l][0]);
        }
      } else {
        vf acc[R][kCV];
        state_times_columns(dims, S_row, head.cols, acc);
        tile_store(to, kC, acc);
        state_times_columns(dims, S_row, head.cols + kC, acc);
        tile_store(to + kSquare, kC, acc);
        state_times_columns(dims, dS_row, head.cols + 2 * kC, acc);
        tile_store(to + 2 * kSquare, kC, acc);
      }
    });
    transpose(head.turned, kC, kRows, kC, head.S_d_o + k * kC, kRows);
    transpose(head.turned + kSquare, kC, kRows, kC, head.S_d_v + k * kC, kRows);
    transpose(head.turned + 2 * kSquare, kC, kRows, kC, head.dS_r + k * kC, kRows);
    fetch(ahead);
  }
}

// dS <- decay dS + sum_i e_i (scale q_i d_o_i^T - k_i d_v_i^T); `carried` of before.
inline void carry_back(const Dims& dims, const Head& head, const float* S, float* dS, Ahead* ahead) {
  memset(head.row_sums, 0, size_t(dims.Kp * kLanes) * sizeof(float));
  for (int64_t p = 0; p < dims.Vp / kPanel; ++p) {
    const float *d_o = head.d_o + p * kC * kPanel, *d_v = head.d_v + p * kC * kPanel;
    for (int64_t k = 0; k < dims.Kp; k += kRows) {
      for_tiles_of_16(0, [&](auto tile, int64_t row) __attribute__((always_inline)) {
        const int64_t at = (p * dims.Kp + k + row) * kPanel;
        vf acc[tile.count][2];
        tile_load(dS + at, kPanel, 1.f, acc);
#pragma GCC unroll 8
        for (int l = 0; l < tile.count; ++l) {
          float* sums = head.row_sums + (k + row + l) * kLanes;
          const vf sum = fma(acc[l][0], load(S + at + l * kPanel), load(sums));
          store(sums, fma(acc[l][1], load(S + at + l * kPanel + kLanes), sum));
        }
        tile_decay(head.decay + k + row, acc);
        tile_mac(kC, head.q_in + k * kC + row, 1, kRows, d_o, kPanel, acc);
        tile_mac(kC, head.minus_k_in + k * kC + row, 1, kRows, d_v, kPanel, acc);
        tile_store(dS + at, kPanel, acc);
      });
      fetch(ahead);
    }
  }
  sum_lanes_of(head.row_sums, dims.Kp, head.carried);
  for (int64_t k = 0; k < dims.Kp; k += kLanes)
    store(head.carried + k, load(head.decay + k) * load(head.carried + k));
}

// R and W.
inline void token_gradients(const Dims& dims, const Head& head, float scale) {
  delta_products<false>(dims, head.d_o, head.cols, head.reads);
  delta_products<true>(dims, head.d_v, head.cols, head.writes);
  for (int64_t at = 0; at < kSquare; at += kLanes) {
    const vf beta = load(head.strengths->beta + at % kC);
    store(head.reads + at, set1(scale) * beta * load(head.reads + at));
    store(head.writes + at, zero() - beta * load(head.writes + at));
  }
}

// One block of 16 channels: what the value head adds to d_q and d_k, and d_g. Every product goes into d_g of just the
// tokens whose decay it has as a factor, so that nothing large cancels however small the decay is. Triangles are
// walked: what a token has nothing to do with may be non-finite.
inline void channel_gradients(const Keys& keys, const Head& head, int64_t block, float scale) {
  const int64_t at = block * kSquare;
  const float *q = keys.q + at, *k = keys.k + at, *a = head.a + at, *e = head.e + at;
  const float *S_d_o = head.S_d_o + at, *S_d_v = head.S_d_v + at, *beta = head.strengths->beta;
  float *d_q = keys.d_q + at, *d_k = keys.d_k + at, *d_g = head.d_g + at, *back = head.dS_r + at;
  // Rows: d_q, and of d_k what key i reads. d_g_i: what reads the entering state at token i.
  for (int64_t i = 0; i < kC; ++i) {
    const float *reads = head.reads + i * kC, *writes = head.writes + i * kC;
    float* to = head.triangle + i * kSquare;
    const float* row = i > 0 ? to - kSquare : to;  // of the token before
    vf a_i[kBV], by_q[kBV], by_k[kBV];
    for (int v = 0; v < kBV; ++v) {
      const int64_t x = i * kRows + v * kLanes;
      a_i[v] = load(a + x);
      by_q[v] = set1(scale) * load(e + x) * load(S_d_o + x);
      by_k[v] = zero() - load(e + x) * load(S_d_v + x);
      store(d_g + x, fma(load(q + x), by_q[v], load(k + x) * by_k[v]));
      store(to + x, load(k + x));
    }
    for (int64_t j = 0; j < i; ++j) {
      const vf read = set1(reads[j]), write = set1(writes[j]);
      for (int v = 0; v < kBV; ++v) {
        const vf y = load(row + j * kRows + v * kLanes) * a_i[v];
        store(to + j * kRows + v * kLanes, y);
        by_q[v] = fma(read, y, by_q[v]);
        by_k[v] = fma(write, y, by_k[v]);
      }
    }
    for (int v = 0; v < kBV; ++v) {
      const int64_t x = i * kRows + v * kLanes;
      store(d_q + x, load(d_q + x) + fma(set1(reads[i]), load(k + x), by_q[v]));
      store(d_k + x, load(d_k + x) + by_k[v]);
      store(back + x, set1(beta[i]) * load(back + x));
    }
  }
  // Columns: what later tokens and the leaving state give back to key j, decayed token by token on its way. At token
  // i it meets the key as decayed to there, which is what they owe to the decays up to i.
  vf entered[kBV];
  for (int v = 0; v < kBV; ++v) entered[v] = load(head.carried + block * kRows + v * kLanes);
  for (int64_t i = kC - 1; i >= 0; --i) {
    const float *row = head.triangle + i * kSquare, *reads = head.reads + i * kC, *writes = head.writes + i * kC;
    vf q_i[kBV], k_i[kBV], a_i[kBV], crossing[kBV];
    for (int v = 0; v < kBV; ++v) {
      const int64_t x = i * kRows + v * kLanes;
      q_i[v] = load(q + x), k_i[v] = load(k + x), a_i[v] = load(a + x);
      entered[v] = entered[v] + load(d_g + x);
      crossing[v] = entered[v];
      store(d_k + x, load(d_k + x) + fma(set1(reads[i]), q_i[v], load(back + x)));
    }
    for (int64_t j = 0; j < i; ++j) {
      const vf read = set1(reads[j]), write = set1(writes[j]);
      for (int v = 0; v < kBV; ++v) {
        const int64_t x = j * kRows + v * kLanes;
        const vf y = fma(write, k_i[v], fma(read, q_i[v], load(back + x)));
        crossing[v] = fma(load(row + x), y, crossing[v]);
        store(back + x, y * a_i[v]);
      }
    }
    for (int v = 0; v < kBV; ++v) store(d_g + i * kRows + v * kLanes, crossing[v]);
  }
}

}  // namespace
}  // namespace thalweg::kimi_delta_attention
#endif
