// The chunked backwards of the delta rules: sizes of a chunk, products on its tiles, transposes, triangular solves.
#ifndef THALWEG_CPU_BLOCKS_CHUNK_BWD_TILES_H
#define THALWEG_CPU_BLOCKS_CHUNK_BWD_TILES_H

#include "thalweg/cpu/blocks/gemm.h"
#include "thalweg/cpu/blocks/rows.h"

namespace thalweg {
namespace {

constexpr int64_t kC = 16;                     // tokens of a chunk
constexpr int kCV = int(kC / kLanes);          // vectors of a row over the chunk's tokens
constexpr int64_t kRows = 16;                  // K is padded to a multiple of it
constexpr int64_t kSquare = kC * kC;           // floats of a [C C] matrix

struct Dims {
  int64_t K, V, Kp, Vp;  // as given, and padded to whole tiles
};

template <int n>
struct Rows {
  static constexpr int count = n;
};

// body(Rows<R>, r) over tiles of R rows that cover [at, at + 16): 8+8, or 6+5+5 with 16 registers.
template <class Body>
[[gnu::always_inline]] inline void for_tiles_of_16(int64_t at, Body body) {
  if constexpr (kVectorRegisters == 32) {
    body(Rows<8>{}, at);
    body(Rows<8>{}, at + 8);
  } else {
    body(Rows<6>{}, at);
    body(Rows<5>{}, at + 6);
    body(Rows<5>{}, at + 11);
  }
}

// The same for tiles whose width is the chunk's tokens; of one vector, 16 rows fit and wait less for each other.
template <class Body>
[[gnu::always_inline]] inline void for_token_tiles(int64_t at, Body body) {
  if constexpr (kCV == 1) body(Rows<16>{}, at);
  else for_tiles_of_16(at, body);
}

template <int MR, int NV>
[[gnu::always_inline]] inline void tile_scale(vf s, vf (&acc)[MR][NV]) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[i][v] = s * acc[i][v];
}

// nothrow: at -O0 GCC does not see it and would give the callers an unwind table, with a weak symbol.
[[gnu::always_inline, gnu::nothrow]] inline void transpose_square(vf (&a)[kLanes]) { thalweg::transpose(a); }

// to [columns rows] = from [rows columns] transposed; both counts are multiples of kLanes.
inline void transpose(const float* from, int64_t from_row, int64_t rows, int64_t columns, float* to, int64_t to_row) {
  for (int64_t i = 0; i < rows; i += kLanes)
    for (int64_t j = 0; j < columns; j += kLanes) {
      vf square[kLanes];
#pragma GCC unroll 16
      for (int64_t l = 0; l < kLanes; ++l) square[l] = load(from + (i + l) * from_row + j);
      transpose_square(square);
#pragma GCC unroll 16
      for (int64_t l = 0; l < kLanes; ++l) store(to + (j + l) * to_row + i, square[l]);
    }
}

// acc[i] += sum_{l >= i} P[l,i] x[l], P a [C C] matrix from its tile on the diagonal on, x [C panel] from the tile's
// first row on; `rows` of them follow. The tile's triangle is walked: x may be non-finite where P has nothing.
template <int R>
[[gnu::always_inline]] inline void tile_mac_below(int64_t rows, const float* P, const float* x, vf (&acc)[R][2]) {
#pragma GCC unroll 8
  for (int l = 0; l < R; ++l) {
    const vf y[2] = {load(x + l * kPanel), load(x + l * kPanel + kLanes)};
#pragma GCC unroll 8
    for (int i = 0; i <= l; ++i) {
      const vf f = set1(P[l * kC + i]);
      acc[i][0] = fma(f, y[0], acc[i][0]);
      acc[i][1] = fma(f, y[1], acc[i][1]);
    }
  }
  tile_mac(rows - R, P + R * kC, 1, kC, x + R * kPanel, kPanel, acc);
}

// acc[i] += sum_l A[l,i] w[l], where row l of the triangle w [C C], w_row apart, has the first l + 1 lanes (lower), or
// lanes l and up. Only those lanes change, so row l of A may be non-finite.
template <bool lower, int R>
inline void tile_mac_triangle(const float* a, int64_t a_row, const float* w, int64_t w_row, vf (&acc)[R][kCV]) {
  for (int64_t l = 0; l < kC; ++l)
    for (int v = 0; v < kCV; ++v) {
      const int64_t n = l + lower - v * kLanes, first = n < 0 ? 0 : n > kLanes ? kLanes : n;
      const vf y = load(w + l * w_row + v * kLanes);
      for (int i = 0; i < R; ++i) {
        const vf sum = fma(set1(a[l * a_row + i]), y, acc[i][v]);
        acc[i][v] = lower ? first_n(first, sum, acc[i][v]) : first_n(first, acc[i][v], sum);
      }
    }
}

// Rows of a triangular solve that stay in registers together, and vectors of a panel beside each other.
constexpr int kSolveRows = 8;
constexpr int kSolveVectors = kVectorRegisters == 32 ? 2 : 1;

// x [C panel] <- (I + L)^-1 x, where minus_L [C C] holds -L, strictly lower. Forward substitution.
[[gnu::always_inline]] inline void solve_lower(const float* minus_L, float* x) {
  for (int64_t v = 0; v < kPanel; v += kSolveVectors * kLanes)
    for (int64_t i = 0; i < kC; i += kSolveRows) {
      vf acc[kSolveRows][kSolveVectors];
      tile_load(x + i * kPanel + v, kPanel, 1.f, acc);
      tile_mac(i, minus_L + i * kC, kC, 1, x + v, kPanel, acc);
#pragma GCC unroll 8
      for (int j = 0; j < kSolveRows - 1; ++j)
#pragma GCC unroll 8
        for (int l = j + 1; l < kSolveRows; ++l)
#pragma GCC unroll 2
          for (int c = 0; c < kSolveVectors; ++c)
            acc[l][c] = fma(set1(minus_L[(i + l) * kC + i + j]), acc[j][c], acc[l][c]);
      tile_store(x + i * kPanel + v, kPanel, acc);
    }
}

// x [C panel] <- (I + L)^-T x. Back substitution.
[[gnu::always_inline]] inline void solve_upper(const float* minus_L, float* x) {
  for (int64_t v = 0; v < kPanel; v += kSolveVectors * kLanes)
    for (int64_t i = kC - kSolveRows; i >= 0; i -= kSolveRows) {
      vf acc[kSolveRows][kSolveVectors];
      const int64_t after = i + kSolveRows;
      tile_load(x + i * kPanel + v, kPanel, 1.f, acc);
      tile_mac(kC - after, minus_L + after * kC + i, 1, kC, x + after * kPanel + v, kPanel, acc);
#pragma GCC unroll 8
      for (int j = kSolveRows - 1; j > 0; --j)
#pragma GCC unroll 8
        for (int l = 0; l < j; ++l)
#pragma GCC unroll 2
          for (int c = 0; c < kSolveVectors; ++c)
            acc[l][c] = fma(set1(minus_L[(i + j) * kC + i + l]), acc[j][c], acc[l][c]);
      tile_store(x + i * kPanel + v, kPanel, acc);
    }
}

// Sum of the first n floats of a row over the chunk's tokens.
[[gnu::always_inline, gnu::nothrow]] inline float sum_first(const float* row, int64_t n) {
  vf sum = zero();
#pragma GCC unroll 4
  for (int v = 0; v < kCV; ++v) {
    int64_t left = n - v * kLanes;
    sum += first_n(left < 0 ? 0 : left > kLanes ? kLanes : left, load(row + v * kLanes), zero());
  }
  return hsum(sum);
}

[[gnu::always_inline, gnu::nothrow]] inline float sum_lanes(const float* p) { return hsum(load(p)); }

}  // namespace
}  // namespace thalweg
#endif
