// Pieces of cpu_chunk_bwd.cpp: the mathematics of one chunk. Letters as in its header.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_CPU_CHUNK_BWD_STEPS_H
#define THALWEG_OPS_GATED_DELTA_RULE_CPU_CHUNK_BWD_STEPS_H

#include "thalweg/cpu/blocks/chunk_bwd_products.h"
#include "thalweg/ops/gated_delta_rule/cpu_chunk_bwd_io.h"

namespace thalweg::gated_delta_rule {
namespace {

// A chunk as its key head sees it.
struct Keys {
  float* q_rows;     // [C Kp], normalised where asked, without scale
  float* k_rows;     // [C Kp]
  float* q_cols;     // [Kp C]
  float* k_cols;     // [Kp C]
  float* qk;         // [C C] q_i . k_j
  float* kk;         // [C C] k_i . k_j of this chunk
  float* q_rstd;     // [C]
  float* k_rstd;     // [C] of this chunk
  float* d_q_cols;   // [Kp C] sum over value heads
  float* d_k_cols;   // [Kp C]
  float* reads;      // [C C] sum over value heads of scale D_ij (d_o_i . u_j), lower with diagonal
  float* writes;     // [C C] sum over value heads of -D_ij (d_v_i . u_j), strictly lower
  float* weights;    // [C 2C] reads^T beside writes + writes^T
};

// A chunk as one value head sees it.
struct Head {
  Scalars* scalars;
  float* D;        // [C C] decay from token j to token i, 0 above the diagonal; the last row leads to the end
  float* E;        // [C] decay from the chunk's start to token i
  float* minus_L;  // [C C]
  float* P;        // [C C] scale D_ij (q_i . k_j), lower with diagonal
  float* Z;        // [C C] scratch
  float* products; // [C C] scratch
  float* d_o;      // panels [Vp/panel][C][panel]
  float* d_v;      // panels
  float* d_o_decayed;  // panels: scale E_i d_o_i
  float* d_v_decayed;  // panels: -E_i d_v_i; in the forward pass D_nj u_j
  float* cols;     // [Vp 3C]: d_o^T, d_v^T, r^T beside each other
  float* r_dot;    // [C lanes] partial sums of d_u_i . r_i
  float* read_gate;   // [C] z
  float* write_gate;  // [C] y
};

// ---- keys -------------------------------------------------------------------------------------------

// rstd [C] = 1 / sqrt(sum x^2 + 1e-6) of the columns of cols [Kp C], and cols times it.
inline void normalise_columns(float* cols, int64_t Kp, float* rstd) {
  for (int v = 0; v < kCV; ++v) {
    vf sum[4] = {zero(), zero(), zero(), zero()};
    for (int64_t k = 0; k < Kp; k += 4)
#pragma GCC unroll 4
      for (int l = 0; l < 4; ++l) {
        vf x = load(cols + (k + l) * kC + v * kLanes);
        sum[l] = fma(x, x, sum[l]);
      }
    vf scale = set1(1.f) / sqrt((sum[0] + sum[1]) + (sum[2] + sum[3]) + set1(1e-6f));
    store(rstd + v * kLanes, scale);
    for (int64_t k = 0; k < Kp; ++k) {
      float* to = cols + k * kC + v * kLanes;
      store(to, scale * load(to));
    }
  }
}

inline void scale_rows(float* rows, int64_t Kp, const float* rstd) {
  for (int64_t i = 0; i < kC; ++i) {
    vf scale = set1(rstd[i]);
    for (int64_t at = 0; at < Kp; at += kLanes) store(rows + i * Kp + at, scale * load(rows + i * Kp + at));
  }
}

// to [C C] = x^T y for x, y [Kp C].
inline void token_products(const float* x_cols, const float* y_cols, int64_t Kp, float* to) {
  for (int64_t i = 0; i < kC; i += kRows)
    for_token_tiles(i, [&](auto tile, int64_t r) __attribute__((always_inline)) {
      vf acc[tile.count][kCV];
      tile_zero(acc);
      tile_mac(Kp, x_cols + r, 1, kC, y_cols, kC, acc);
      tile_store(to + r * kC, kC, acc);
    });
}

// to [C C] = x^T x for x [Kp C], to the last digit: solves with keys that are alike, and beta near 2, repeat
// its error with alternating signs of nothing smaller than the state.
inline void key_products(const float* x_cols, int64_t Kp, float* to) {
  for (int64_t i = 0; i < kC; i += kRows)
    for_tiles_of_16(i, [&](auto tile, int64_t r) __attribute__((always_inline)) {
      vf acc[tile.count][kCV], lost[tile.count][kCV];
      tile_zero(acc), tile_zero(lost);
      tile_mac_careful(Kp, x_cols + r, 1, kC, x_cols, kC, acc, lost);
      tile_add(lost, acc);
      tile_store(to + r * kC, kC, acc);
    });
}

// Whether every row of q and k is finite, by its products with all keys (or they overflow).
inline bool are_finite(const Keys& keys) {
  vf sum = zero();
  for (int64_t at = 0; at < kSquare; at += kLanes) {
    sum = fma(zero(), load(keys.qk + at), sum);
    sum = fma(zero(), load(keys.kk + at), sum);
  }
  return hsum(sum) == 0.f;
}

// ---- decays -----------------------------------------------------------------------------------------

// Exponents are sums of the gates between two tokens, never differences of sums, so a gate of -1000 or
// minus infinity costs the others nothing. What would be subnormal is 0.
inline vf decay_of(vf sum) { return where_greater(set1(-87.f), sum, zero(), exp(sum)); }

inline void decays(const float* g, float* D, float* E) {
  vf since[kCV];  // sum of g over (j, i]
  for (int v = 0; v < kCV; ++v) since[v] = zero();
  alignas(64) float start[kC];
  float sum = 0;
  for (int64_t i = 0; i < kC; ++i) {
    sum += g[i];
    start[i] = sum;
    for (int v = 0; v < kCV; ++v) {
      const int64_t n = i - v * kLanes, before = n < 0 ? 0 : n > kLanes ? kLanes : n;
      const int64_t upto = n + 1 < 0 ? 0 : n + 1 > kLanes ? kLanes : n + 1;
      since[v] = first_n(before, since[v] + set1(g[i]), zero());
      store(D + i * kC + v * kLanes, first_n(upto, decay_of(since[v]), zero()));
    }
  }
  for (int64_t i = 0; i < kC; i += kLanes) store(E + i, decay_of(load(start + i)));
}

// minus_L_ij = -f D_ij kk_ij for i > j, else 0, with f = beta_i or beta_j.
template <bool by_row>
inline void lower_factor(const float* D, const float* kk, const float* beta, float* minus_L) {
  for (int64_t i = 0; i < kC; ++i)
    for (int v = 0; v < kCV; ++v) {
      const int64_t n = i - v * kLanes, before = n < 0 ? 0 : n > kLanes ? kLanes : n, at = i * kC + v * kLanes;
      vf x = zero() - load(D + at) * load(kk + at);
      x = x * (by_row ? set1(beta[i]) : load(beta + v * kLanes));
      store(minus_L + at, first_n(before, x, zero()));
    }
}

// ---- forward ----------------------------------------------------------------------------------------

// r, panels: holds v, becomes the deltas before beta, r_i = v_i - E_i k_i S - sum_j<i kk_ij D_ij beta_j r_j.
inline void chunk_deltas(const Dims& dims, const Keys& keys, const Head& head, const float* S, float* r,
                         Ahead* ahead) {
  lower_factor<false>(head.D, keys.kk, head.scalars->beta, head.minus_L);
  for (int64_t p = 0; p < dims.Vp / kPanel; ++p) {
    const float* S_p = S + p * dims.Kp * kPanel;
    float* r_p = r + p * kC * kPanel;
    for (int64_t i = 0; i < kC; i += kRows)
      for_tiles_of_16(i, [&](auto tile, int64_t row) __attribute__((always_inline)) {
        vf acc[tile.count][2];
        tile_zero(acc);
        tile_mac(dims.Kp, keys.k_cols + row, 1, kC, S_p, kPanel, acc);
#pragma GCC unroll 8
        for (int l = 0; l < tile.count; ++l) {
          vf e = set1(head.E[row + l]);
          float* to = r_p + (row + l) * kPanel;
          store(to, fnma(e, acc[l][0], load(to)));
          store(to + kLanes, fnma(e, acc[l][1], load(to + kLanes)));
        }
      });
    solve_lower(head.minus_L, r_p);
    fetch(ahead);
  }
}

// What the deltas enter the next state with, [C]: D_nj beta_j.
inline void write_factors(const Head& head, float* factors) {
  for (int64_t i = 0; i < kC; i += kLanes)
    store(factors + i, load(head.D + (kC - 1) * kC + i) * load(head.scalars->beta + i));
}

// S_after = E_n S_before + sum_j k_j D_nj u_j; both may be one. u: scratch, panels.
inline void advance_state(const Dims& dims, const float* k_rows, const float* factors, float E_n, const float* r,
                          float* u, const float* S_before, float* S_after, Ahead* ahead) {
  for (int64_t p = 0; p < dims.Vp / kPanel; ++p) {
    float* u_p = u + p * kC * kPanel;
    const float* r_p = r + p * kC * kPanel;
    for (int64_t i = 0; i < kC; ++i) {
      vf f = set1(factors[i]);
      store(u_p + i * kPanel, f * load(r_p + i * kPanel));
      store(u_p + i * kPanel + kLanes, f * load(r_p + i * kPanel + kLanes));
    }
    for (int64_t k = 0; k < dims.Kp; k += kRows) {
      for_tiles_of_16(k, [&](auto tile, int64_t row) __attribute__((always_inline)) {
        const int64_t at = (p * dims.Kp + row) * kPanel;
        vf acc[tile.count][2];
        tile_load(S_before + at, kPanel, E_n, acc);
        tile_mac(kC, k_rows + row, 1, dims.Kp, u_p, kPanel, acc);
        tile_store(S_after + at, kPanel, acc);
      });
      fetch(ahead);
    }
  }
}

// ---- backward ---------------------------------------------------------------------------------------

// P, and the factor of the solve.
inline void backward_factors(const Keys& keys, const Head& head, float scale) {
  lower_factor<true>(head.D, keys.kk, head.scalars->beta, head.minus_L);
  for (int64_t at = 0; at < kSquare; at += kLanes)
    store(head.P + at, set1(scale) * load(head.D + at) * load(keys.qk + at));
}

// d_v_i = beta_i y_i with y = (I + L)^-T (P^T d_o + D_n k dS), panels; the parts of y . r for d_beta.
inline void chunk_d_v(const Dims& dims, const Keys& keys, const Head& head, const float* r, const float* dS,
                      float scale, Ahead* ahead) {
  const float* D_n = head.D + (kC - 1) * kC;
  for (int64_t i = 0; i < kC; ++i) store(head.r_dot + i * kLanes, zero());
  for (int64_t p = 0; p < dims.Vp / kPanel; ++p) {
    const int64_t at = p * kC * kPanel;
    const float *dS_p = dS + p * dims.Kp * kPanel, *d_o = head.d_o + at, *r_p = r + at;
    float *d_v = head.d_v + at, *d_o_decayed = head.d_o_decayed + at, *d_v_decayed = head.d_v_decayed + at;
    for (int64_t i = 0; i < kC; i += kRows)
      for_tiles_of_16(i, [&](auto tile, int64_t row) __attribute__((always_inline)) {
        vf acc[tile.count][2];
        tile_zero(acc);
        tile_mac(dims.Kp, keys.k_cols + row, 1, kC, dS_p, kPanel, acc);
#pragma GCC unroll 8
        for (int l = 0; l < tile.count; ++l) {
          vf f = set1(D_n[row + l]);
          acc[l][0] = f * acc[l][0], acc[l][1] = f * acc[l][1];
        }
        tile_mac_below(kC - row, head.P + row * kC + row, d_o + row * kPanel, acc);
        tile_store(d_v + row * kPanel, kPanel, acc);
      });
    solve_upper(head.minus_L, d_v);
    fetch(ahead);
    for (int64_t i = 0; i < kC; ++i) {
      vf beta = set1(head.scalars->beta[i]), e = set1(head.E[i]), dot = load(head.r_dot + i * kLanes);
      for (int64_t x = i * kPanel; x < (i + 1) * kPanel; x += kLanes) {
        vf y = load(d_v + x);
        dot = fma(y, load(r_p + x), dot);
        y = beta * y;
        store(d_v + x, y);
        store(d_v_decayed + x, zero() - e * y);
        store(d_o_decayed + x, set1(scale) * e * load(d_o + x));
      }
      store(head.r_dot + i * kLanes, dot);
    }
  }
}

// gradient[row] += sign factor x, gate += sign other[row] factor x, over the rows of a tile.
template <int first, int R, int N>
[[gnu::always_inline]] inline void take_columns(const vf (&acc)[R][N], const float* factor, bool minus,
                                                const float* other, float* gradient, float* gate) {
#pragma GCC unroll 4
  for (int v = 0; v < kCV; ++v) {
    vf f = load(factor + v * kLanes), sum = load(gate + v * kLanes);
    if (minus) f = zero() - f;
#pragma GCC unroll 8
    for (int l = 0; l < R; ++l) {
      vf x = f * acc[l][first + v];
      float* to = gradient + l * kC + v * kLanes;
      store(to, load(to) + x);
      sum = fma(load(other + l * kC + v * kLanes), x, sum);
    }
    store(gate + v * kLanes, sum);
  }
}

// The state's part of d_q, d_k and of the gate: q and k against S d_o^T, S d_v^T, dS r^T.
inline void state_gradients(const Dims& dims, const Keys& keys, const Head& head, const float* S, const float* dS,
                            float scale, Ahead* ahead) {
  alignas(64) float read[kC], write[kC];
  const float* D_n = head.D + (kC - 1) * kC;
  for (int64_t i = 0; i < kC; i += kLanes) {
    store(read + i, set1(scale) * load(head.E + i));
    store(write + i, load(head.scalars->beta + i) * load(D_n + i));
    store(head.read_gate + i, zero());
    store(head.write_gate + i, zero());
  }
  for (int64_t k = 0; k < dims.Kp; k += kRows) {
    for_tiles_of_16(k, [&](auto tile, int64_t row) __attribute__((always_inline)) {
      constexpr int R = tile.count;
      const int64_t at = row * kC;
      const float *S_row = S + row * kPanel, *dS_row = dS + row * kPanel;
      if constexpr (kCV == 1) {
        vf acc[R][2], acc_r[R][1];
        tile_zero(acc), tile_zero(acc_r);
        for (int64_t p = 0; p < dims.Vp / kPanel; ++p)
          columns_mac(S_row + p * dims.Kp * kPanel, dS_row + p * dims.Kp * kPanel, head.cols + p * kPanel * 3 * kC, acc,
                      acc_r);
        take_columns<0>(acc, read, false, keys.q_cols + at, keys.d_q_cols + at, head.read_gate);
        take_columns<1>(acc, head.E, true, keys.k_cols + at, keys.d_k_cols + at, head.read_gate);
        take_columns<0>(acc_r, write, false, keys.k_cols + at, keys.d_k_cols + at, head.write_gate);
      } else {
        vf acc[R][kCV];
        state_times_columns(dims, S_row, head.cols, acc);
        take_columns<0>(acc, read, false, keys.q_cols + at, keys.d_q_cols + at, head.read_gate);
        state_times_columns(dims, S_row, head.cols + kC, acc);
        take_columns<0>(acc, head.E, true, keys.k_cols + at, keys.d_k_cols + at, head.read_gate);
        state_times_columns(dims, dS_row, head.cols + 2 * kC, acc);
        take_columns<0>(acc, write, false, keys.k_cols + at, keys.d_k_cols + at, head.write_gate);
      }
    });
    fetch(ahead);
  }
}

// dS <- E_n dS + scale sum_i E_i q_i d_o_i - sum_i E_i k_i d_v_i; returns sum(S * dS) of before.
inline float carry_back(const Dims& dims, const Keys& keys, const Head& head, const float* S, float* dS,
                        Ahead* ahead) {
  const float E_n = head.E[kC - 1];
  vf total = zero();
  for (int64_t p = 0; p < dims.Vp / kPanel; ++p) {
    const float *d_o = head.d_o_decayed + p * kC * kPanel, *d_v = head.d_v_decayed + p * kC * kPanel;
    for (int64_t k = 0; k < dims.Kp; k += kRows) {
      for_tiles_of_16(k, [&](auto tile, int64_t row) __attribute__((always_inline)) {
        const int64_t at = (p * dims.Kp + row) * kPanel;
        vf acc[tile.count][2], sum[2] = {zero(), zero()};
        tile_load(dS + at, kPanel, 1.f, acc);
#pragma GCC unroll 8
        for (int l = 0; l < tile.count; ++l) {
          sum[0] = fma(acc[l][0], load(S + at + l * kPanel), sum[0]);
          sum[1] = fma(acc[l][1], load(S + at + l * kPanel + kLanes), sum[1]);
        }
        tile_scale(set1(E_n), acc);
        tile_mac(kC, keys.q_rows + row, 1, dims.Kp, d_o, kPanel, acc);
        tile_mac(kC, keys.k_rows + row, 1, dims.Kp, d_v, kPanel, acc);
        tile_store(dS + at, kPanel, acc);
        total = total + (sum[0] + sum[1]);
      });
      fetch(ahead);
    }
  }
  return hsum(total);
}

// Adds this head's reads and writes; Z_ij = both times their products, strictly lower.
inline void token_gradients(const Dims& dims, const Keys& keys, const Head& head, float scale) {
  delta_products<false>(dims, head.d_o, head.cols, head.Z);
  delta_products<true>(dims, head.d_v, head.cols, head.products);
  for (int64_t i = 0; i < kC; ++i)
    for (int v = 0; v < kCV; ++v) {
      const int64_t n = i - v * kLanes, before = n < 0 ? 0 : n > kLanes ? kLanes : n, at = i * kC + v * kLanes;
      const int64_t upto = n + 1 < 0 ? 0 : n + 1 > kLanes ? kLanes : n + 1;
      vf f = load(head.D + at) * load(head.scalars->beta + v * kLanes);
      vf read = first_n(upto, set1(scale) * f * load(head.Z + at), zero());
      vf write = first_n(before, zero() - f * load(head.products + at), zero());
      store(keys.reads + at, load(keys.reads + at) + read);
      store(keys.writes + at, load(keys.writes + at) + write);
      vf z = fma(read, load(keys.qk + at), write * load(keys.kk + at));
      store(head.Z + at, first_n(before, z, zero()));
    }
}

// d_g [C]: every product that token t's decay is a factor of, times that decay, and no other, so that
// nothing large cancels however small the decay is.
inline void gate_gradient(const Head& head, float state_product, float* d_g) {
  vf below[kCV];  // sum over i >= t of Z_i
  for (int v = 0; v < kCV; ++v) below[v] = zero();
  alignas(64) float row[kC];
  float reads = 0, writes = 0;
  for (int64_t t = kC - 1; t >= 0; --t) {
    reads += head.read_gate[t];
    for (int v = 0; v < kCV; ++v) {
      below[v] = below[v] + load(head.Z + t * kC + v * kLanes);
      store(row + v * kLanes, below[v]);
    }
    d_g[t] = reads + sum_first(row, t);
  }
  for (int64_t t = 0; t < kC; ++t) {
    d_g[t] += head.E[kC - 1] * state_product + writes;
    writes += head.write_gate[t];
  }
}

// ---- d_q and d_k of the key head --------------------------------------------------------------------

// d_q_i += sum_j reads_ij k_j;  d_k_j += sum_i reads_ij q_i + sum_i (writes + writes^T)_ij k_i. The products take the
// zeros of the triangle `reads` along where the rows of q and k allow it.
template <bool finite>
inline void add_pairs(const Dims& dims, const Keys& keys) {
  for (int64_t k = 0; k < dims.Kp; k += kRows)
    for_tiles_of_16(k, [&](auto tile, int64_t row) __attribute__((always_inline)) {
      const float *q_rows = keys.q_rows + row, *k_rows = keys.k_rows + row;
      vf acc[tile.count][kCV];
      tile_load(keys.d_q_cols + row * kC, kC, 1.f, acc);
      if constexpr (finite) tile_mac(kC, k_rows, 1, dims.Kp, keys.weights, 2 * kC, acc);
      else tile_mac_triangle<false>(k_rows, dims.Kp, keys.weights, 2 * kC, acc);
      tile_store(keys.d_q_cols + row * kC, kC, acc);
      tile_load(keys.d_k_cols + row * kC, kC, 1.f, acc);
      tile_mac(kC, k_rows, 1, dims.Kp, keys.weights + kC, 2 * kC, acc);
      if constexpr (finite) tile_mac(kC, q_rows, 1, dims.Kp, keys.reads, kC, acc);
      else tile_mac_triangle<true>(q_rows, dims.Kp, keys.reads, kC, acc);
      tile_store(keys.d_k_cols + row * kC, kC, acc);
    });
}

inline void pair_gradients(const Dims& dims, const Keys& keys) {
  transpose(keys.reads, kC, kC, kC, keys.weights, 2 * kC);
  transpose(keys.writes, kC, kC, kC, keys.weights + kC, 2 * kC);
  for (int64_t i = 0; i < kC; ++i)
    for (int v = 0; v < kCV; ++v) {
      float* to = keys.weights + (2 * i + 1) * kC + v * kLanes;
      store(to, load(to) + load(keys.writes + i * kC + v * kLanes));
    }
  if (are_finite(keys)) add_pairs<true>(dims, keys);
  else add_pairs<false>(dims, keys);
}

// d_rows [C Kp] <- rstd (d - y (y . d)) for the normalised y.
inline void normalise_gradient(const float* rows, const float* rstd, int64_t Kp, float* d_rows) {
  for (int64_t i = 0; i < kC; ++i) {
    const float* y = rows + i * Kp;
    float* d = d_rows + i * Kp;
    vf dot = zero();
    for (int64_t at = 0; at < Kp; at += kLanes) dot = fma(load(y + at), load(d + at), dot);
    vf along = set1(hsum(dot)), s = set1(rstd[i]);
    for (int64_t at = 0; at < Kp; at += kLanes) store(d + at, s * fnma(along, load(y + at), load(d + at)));
  }
}

}  // namespace
}  // namespace thalweg::gated_delta_rule
#endif
