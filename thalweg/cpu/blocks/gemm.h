// Register-tiled float32 products on small operands in scratch (an L1 or L2 working set), for files
// compiled per instruction set.
//
//   gemm       C[m,n] = sum_k A[m,k] B[k,n]
//   gemm_add   C[m,n] = c_scale C[m,n] + sum_k A[m,k] B[k,n]      c_scale one number, or one of each row m
//
// A is read element by element (broadcast), so any strides serve: A[m,k] is a[m * a_row + k * a_col].
// A row-major [M,K] matrix has a_row = its row length and a_col = 1; the transposed form of a rank-C
// update, C[K,V] += X^T Y with X [C,K] row-major, has M = K, a_row = 1, a_col = X's row length.
// Constant strides (a packed [k][16] scratch) are best: the functions inline and addresses become
// immediates. B and C are row-major with rows b_row and c_row apart; N is a multiple of kLanes (pad in
// scratch). Rows need no alignment, but 64-byte aligned ones are faster.
//
// N is walked in panels of 2 vectors, M in tiles of kTileRows rows. A panel of B that is used again and
// again (a state) is best stored as a panel of its own, b_row = kPanel: a 512-byte stride uses a quarter
// of the L1 sets. k runs in ascending order into one accumulator per element, so the bits of a row do
// not depend on M, of a column not on N.
//
//   gemm(16, 32, K, x, 1, 16, s, kPanel, r, kPanel);                // R = X^T S, X packed [K][16]
//   gemm_add(K, kPanel, 16, x, 16, 1, u, kPanel, s, kPanel, decay);  // S = decay S + X U
//
// Products with more in them (a fused start or end) are written with tile_mac on their own accumulators.
#ifndef THALWEG_CPU_BLOCKS_GEMM_H
#define THALWEG_CPU_BLOCKS_GEMM_H

#include "thalweg/cpu/simd.h"

namespace thalweg {
namespace {

// A tile of kTileRows x 2 vectors: its accumulators, two vectors of B and a broadcast fit the registers,
// and there are enough independent sums to cover the latency of two FMA units.
constexpr int64_t kTileRows = kVectorRegisters == 32 ? 8 : 6;
constexpr int64_t kPanel = 2 * kLanes;

// acc[i][v] += sum_k A[i,k] B[k, v-th vector]
template <int MR, int NV>
[[gnu::always_inline]] inline void tile_mac(int64_t K, const float* a, int64_t a_row, int64_t a_col, const float* b,
                                            int64_t b_row, vf (&acc)[MR][NV]) {
#pragma GCC unroll 2
  for (int64_t k = 0; k < K; ++k) {
    vf y[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) y[v] = load(b + k * b_row + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      vf x = set1(a[i * a_row + k * a_col]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[i][v] = fma(x, y[v], acc[i][v]);
    }
  }
}

template <int MR, int NV>
[[gnu::always_inline]] inline void tile_zero(vf (&acc)[MR][NV]) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[i][v] = zero();
}

// The factor of row i: one number for all, or one of each row.
[[gnu::always_inline]] inline float row_scale(float scale, int64_t) { return scale; }
[[gnu::always_inline]] inline float row_scale(const float* scale, int64_t i) { return scale[i]; }
[[gnu::always_inline]] inline float from_row(float scale, int64_t) { return scale; }
[[gnu::always_inline]] inline const float* from_row(const float* scale, int64_t i) { return scale + i; }

template <int MR, int NV, class Scale>
[[gnu::always_inline]] inline void tile_load(const float* c, int64_t c_row, Scale scale, vf (&acc)[MR][NV]) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
    vf s = set1(row_scale(scale, i));
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[i][v] = s * load(c + i * c_row + v * kLanes);
  }
}

template <int MR, int NV>
[[gnu::always_inline]] inline void tile_store(float* c, int64_t c_row, const vf (&acc)[MR][NV]) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(c + i * c_row + v * kLanes, acc[i][v]);
}

// Terms of a careful sum that are added up plainly.
constexpr int64_t kSumBlock = 8;

// acc[i][v] = sum_k A[i,k] B[k, v-th vector] rounded about once; K is a multiple of kSumBlock. Sums of few terms,
// and what is lost when they join the total is kept beside it.
template <int MR, int NV>
[[gnu::always_inline]] inline void tile_mac_careful(int64_t K, const float* a, int64_t a_row, int64_t a_col,
                                                    const float* b, int64_t b_row, vf (&acc)[MR][NV],
                                                    vf (&lost)[MR][NV]) {
  for (int64_t k = 0; k < K; k += kSumBlock) {
    vf part[MR][NV];
    tile_zero(part);
    tile_mac(kSumBlock, a + k * a_col, a_row, a_col, b + k * b_row, b_row, part);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const vf old = acc[i][v], sum = old + part[i][v], taken = sum - old;
        lost[i][v] += (old - (sum - taken)) + (part[i][v] - taken);
        acc[i][v] = sum;
      }
  }
}
template <int MR, int NV>
[[gnu::always_inline]] inline void tile_add(const vf (&x)[MR][NV], vf (&acc)[MR][NV]) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[i][v] += x[i][v];
}

// Rows i .. i+MR of a product.
template <int MR, int NV, bool kAdd, class Scale>
[[gnu::always_inline]] inline void gemm_tile(int64_t i, int64_t K, const float* a, int64_t a_row, int64_t a_col,
                                             const float* b, int64_t b_row, float* c, int64_t c_row, Scale c_scale) {
  vf acc[MR][NV];
  if (kAdd) tile_load<MR, NV>(c + i * c_row, c_row, from_row(c_scale, i), acc);
  else tile_zero<MR, NV>(acc);
  tile_mac<MR, NV>(K, a + i * a_row, a_row, a_col, b, b_row, acc);
  tile_store<MR, NV>(c + i * c_row, c_row, acc);
}

// One panel of NV vectors.
template <int NV, bool kAdd, class Scale>
[[gnu::always_inline]] inline void gemm_panel(int64_t M, int64_t K, const float* a, int64_t a_row, int64_t a_col,
                                              const float* b, int64_t b_row, float* c, int64_t c_row, Scale c_scale) {
  int64_t i = 0;
  if constexpr (NV == 1)  // twice the rows: enough sums for the latency, and one load of B for all of them
    for (; M - i >= 2 * kTileRows; i += 2 * kTileRows)
      gemm_tile<2 * kTileRows, NV, kAdd>(i, K, a, a_row, a_col, b, b_row, c, c_row, c_scale);
  // Where the tile has 6 rows, 8 that are left make two tiles of 4: one of 2 would wait for its own sums.
  for (; M - i >= kTileRows && (kTileRows == 8 || M - i != 8); i += kTileRows)
    gemm_tile<kTileRows, NV, kAdd>(i, K, a, a_row, a_col, b, b_row, c, c_row, c_scale);
  for (; M - i >= 4; i += 4) gemm_tile<4, NV, kAdd>(i, K, a, a_row, a_col, b, b_row, c, c_row, c_scale);
  if (M - i >= 2) {
    gemm_tile<2, NV, kAdd>(i, K, a, a_row, a_col, b, b_row, c, c_row, c_scale);
    i += 2;
  }
  if (M - i >= 1) gemm_tile<1, NV, kAdd>(i, K, a, a_row, a_col, b, b_row, c, c_row, c_scale);
}

template <bool kAdd, class Scale>
[[gnu::always_inline]] inline void gemm_any(int64_t M, int64_t N, int64_t K, const float* a, int64_t a_row,
                                            int64_t a_col, const float* b, int64_t b_row, float* c, int64_t c_row,
                                            Scale c_scale) {
  int64_t n = 0;
  for (; N - n >= kPanel; n += kPanel) gemm_panel<2, kAdd>(M, K, a, a_row, a_col, b + n, b_row, c + n, c_row, c_scale);
  if (n < N) gemm_panel<1, kAdd>(M, K, a, a_row, a_col, b + n, b_row, c + n, c_row, c_scale);
}

// C[M,N] = A[M,K] B[K,N]
[[gnu::always_inline]] inline void gemm(int64_t M, int64_t N, int64_t K, const float* a, int64_t a_row, int64_t a_col,
                                        const float* b, int64_t b_row, float* c, int64_t c_row) {
  gemm_any<false>(M, N, K, a, a_row, a_col, b, b_row, c, c_row, 0.f);
}

// C[M,N] = A[M,K] B[K,N], every sum rounded about once, for one panel or less: N = NV vectors, K a multiple of
// kSumBlock, M of kRows.
template <int NV>
[[gnu::always_inline]] inline void gemm_careful(int64_t M, int64_t K, const float* a, int64_t a_row, int64_t a_col,
                                                const float* b, int64_t b_row, float* c, int64_t c_row) {
  constexpr int kRows = kVectorRegisters / (4 * NV);  // three sets of sums, and room
  for (int64_t i = 0; i < M; i += kRows) {
    vf acc[kRows][NV], lost[kRows][NV];
    tile_zero(acc), tile_zero(lost);
    tile_mac_careful(K, a + i * a_row, a_row, a_col, b, b_row, acc, lost);
    tile_add(lost, acc);
    tile_store(c + i * c_row, c_row, acc);
  }
}

// C[M,N] = c_scale C[M,N] + A[M,K] B[K,N]
template <class Scale = float>
[[gnu::always_inline]] inline void gemm_add(int64_t M, int64_t N, int64_t K, const float* a, int64_t a_row,
                                            int64_t a_col, const float* b, int64_t b_row, float* c, int64_t c_row,
                                            Scale c_scale = 1.f) {
  gemm_any<true>(M, N, K, a, a_row, a_col, b, b_row, c, c_row, c_scale);
}

}  // namespace
}  // namespace thalweg
#endif
