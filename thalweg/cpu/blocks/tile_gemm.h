// Products of bf16 matrices in tile registers, and what packs their operands. For files compiled for amx.
//
// A packed matrix is a row of tiles of kTile bf16, each 16 lines x 64 bytes; what the matrix lacks to whole tiles is 0.
//   left   A [M, K]: tile (i, j) holds rows 16 i on, columns 32 j on; at i ceil(K / 32) + j
//   right  B [K, N]: tile (j, n) holds rows 32 j on, columns 16 n on, two rows in a line, interleaved; at
//          n ceil(K / 32) + j
// A row that is null counts as zeros, so that scattered rows need no copy.
#ifndef THALWEG_CPU_BLOCKS_TILE_GEMM_H
#define THALWEG_CPU_BLOCKS_TILE_GEMM_H

#include "thalweg/cpu/blocks/rows.h"
#include "thalweg/cpu/tiles.h"

namespace thalweg {
namespace {

constexpr int64_t kTile = kTileSide * kTileDepth;
constexpr int64_t kTileLine = 64;  // bytes

constexpr int64_t tiles_of(int64_t n, int64_t side) { return (n + side - 1) / side; }

// 32 of n bf16 from p on, the others 0; nothing of a null row is read.
[[gnu::always_inline]] inline __m512i load_halves(const uint16_t* p, int64_t n) {
  if (!p) return _mm512_setzero_si512();
  if (n >= kTileDepth) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi16((__mmask32(1) << n) - 1, p);
}
// 16 of n, each in a dword of its own.
[[gnu::always_inline]] inline __m512i load_dwords(const uint16_t* p, int64_t n) {
  if (!p) return _mm512_setzero_si512();
  const __mmask16 lanes = n >= kLanes ? __mmask16(-1) : first_lanes(n);
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, p));
}

// Row r of a left matrix of K columns.
inline void row_to_left(const uint16_t* row, int64_t K, uint16_t* left, int64_t r) {
  uint16_t* to = left + r / kTileSide * tiles_of(K, kTileDepth) * kTile + r % kTileSide * kTileDepth;
  for (int64_t k = 0; k < K; k += kTileDepth, to += kTile)
    _mm512_storeu_si512(to, load_halves(row ? row + k : nullptr, K - k));
}

// Rows k and k + 1, k even, of a right matrix [depth, N] of `deep` tiles along its depth.
inline void rows_to_right(const uint16_t* row, const uint16_t* next, int64_t N, int64_t deep, uint16_t* right,
                          int64_t k) {
  uint16_t* to = right + k / kTileDepth * kTile + k % kTileDepth / 2 * kTileDepth;
  for (int64_t n = 0; n < N; n += kTileSide, to += deep * kTile) {
    const __m512i low = load_dwords(row ? row + n : nullptr, N - n);
    const __m512i high = load_dwords(next ? next + n : nullptr, N - n);
    _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
}

// A right matrix from its rows; `rows` goes on to a multiple of 32.
inline void rows_to_right(const uint16_t* const* rows, int64_t depth, int64_t width, uint16_t* right) {
  const int64_t deep = tiles_of(depth, kTileDepth);
  for (int64_t row = 0; row < deep * kTileDepth; row += 2)
    rows_to_right(rows[row], rows[row + 1], width, deep, right, row);
}

// Sixteen rows of K bf16 as columns 16 n on of a right matrix [K, N].
inline void rows_to_right_columns(const uint16_t* const* rows, int64_t K, uint16_t* right, int64_t n) {
  uint16_t* to = right + n * tiles_of(K, kTileDepth) * kTile;
  for (int64_t k = 0; k < K; k += kTileDepth, to += kTile) {
    vf x[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) x[r] = _mm512_castsi512_ps(load_halves(rows[r] ? rows[r] + k : nullptr, K - k));
    transpose(x);
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) store(reinterpret_cast<float*>(to) + r * kLanes, x[r]);
  }
}

// Lane by lane (bf16 of low, bf16 of high) as a dword, rounded to nearest even; subnormal numbers become 0.
[[gnu::always_inline]] inline vf pair_halves(vf low, vf high) {
  const __m512i halves = __m512i(_mm512_cvtne2ps_pbh(high, low));  // 16 of low, then 16 of high
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, halves));
}

// The transpose of float32 rows [K, M], row_stride apart, M in whole vectors, as a left matrix [M, K].
inline void rows_to_left_columns(const float* rows, int64_t row_stride, int64_t K, int64_t M, uint16_t* left) {
  for (int64_t m = 0; m < M; m += kTileSide)
    for (int64_t k = 0; k < K; k += kTileDepth, left += kTile) {
      const float* from = rows + k * row_stride + m;
      vf x[16];
      if (k + kTileDepth <= K) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
          x[i] = pair_halves(load(from + 2 * i * row_stride), load(from + (2 * i + 1) * row_stride));
      } else {
        for (int i = 0; i < 16; ++i) {
          const bool low = k + 2 * i < K, high = k + 2 * i + 1 < K;
          x[i] = pair_halves(low ? load(from + 2 * i * row_stride) : zero(),
                             high ? load(from + (2 * i + 1) * row_stride) : zero());
        }
      }
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) store(reinterpret_cast<float*>(left) + i * kLanes, x[i]);
    }
}

// Float32 rows [M, K], row_stride apart, K in whole vectors, as a left matrix.
inline void rows_to_left(const float* rows, int64_t row_stride, int64_t M, int64_t K, uint16_t* left) {
  const int64_t deep = tiles_of(K, kTileDepth);
  for (int64_t m = 0; m < M; ++m, rows += row_stride) {
    uint16_t* to = left + m / kTileSide * deep * kTile + m % kTileSide * kTileDepth;
    for (int64_t k = 0; k < K; k += kTileDepth, to += kTile) {
      const vf high = k + kLanes < K ? load(rows + k + kLanes) : zero();
      _mm512_storeu_si512(to, __m512i(_mm512_cvtne2ps_pbh(high, load(rows + k))));
    }
  }
}

inline void scale_block(float* c, int64_t c_row, int64_t rows, int64_t columns, vf factor) {
  for (int64_t r = 0; r < rows; ++r, c += c_row)
    for (int64_t i = 0; i < columns; i += kLanes) store(c + i, load(c + i) * factor);
}

// One block of 1 or 2 x 1 or 2 tiles of C = A B, or += with kAdd. c_row in floats.
template <int kRows, int kColumns, bool kAdd>
[[gnu::always_inline]] inline void multiply_block(int64_t deep, const uint16_t* a, const uint16_t* b, float* c,
                                                  int64_t c_row) {
  const int64_t a_next = deep * kTile, b_next = deep * kTile, line = c_row * 4;
  float* below = c + kTileSide * c_row;
  if (kAdd) {
    load_tile<0>(c, line);
    if (kColumns > 1) load_tile<1>(c + kTileSide, line);
    if (kRows > 1) load_tile<2>(below, line);
    if (kRows > 1 && kColumns > 1) load_tile<3>(below + kTileSide, line);
  } else {
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
  }
  for (int64_t j = 0; j < deep; ++j, a += kTile, b += kTile) {
    load_tile<6>(b, kTileLine);
    load_tile<4>(a, kTileLine);
    multiply<0, 4, 6>();
    if (kColumns > 1) load_tile<7>(b + b_next, kTileLine);
    if (kColumns > 1) multiply<1, 4, 7>();
    if (kRows > 1) load_tile<5>(a + a_next, kTileLine);
    if (kRows > 1) multiply<2, 5, 6>();
    if (kRows > 1 && kColumns > 1) multiply<3, 5, 7>();
  }
  store_tile<0>(c, line);
  if (kColumns > 1) store_tile<1>(c + kTileSide, line);
  if (kRows > 1) store_tile<2>(below, line);
  if (kRows > 1 && kColumns > 1) store_tile<3>(below + kTileSide, line);
}

// C [M, N] = A B with M, N and K in whole tiles, or += with kAdd; after(c, rows, columns) sees each block of C.
template <bool kAdd, class After>
[[gnu::always_inline]] inline void multiply_tiles(int64_t M, int64_t N, int64_t K, const uint16_t* a, const uint16_t* b,
                                                  float* c, int64_t c_row, After&& after) {
  const int64_t deep = tiles_of(K, kTileDepth), step = kTileSide * deep * kTileDepth;
  constexpr int64_t kTwo = 2 * kTileSide;
  for (int64_t n = 0; n < N; n += kTwo, b += 2 * step) {
    const uint16_t* left = a;
    for (int64_t m = 0; m < M; m += kTwo, left += 2 * step) {
      float* to = c + m * c_row + n;
      const bool two_rows = M - m > kTileSide, two_columns = N - n > kTileSide;
      if (two_rows && two_columns)
        multiply_block<2, 2, kAdd>(deep, left, b, to, c_row);
      else if (two_rows)
        multiply_block<2, 1, kAdd>(deep, left, b, to, c_row);
      else if (two_columns)
        multiply_block<1, 2, kAdd>(deep, left, b, to, c_row);
      else
        multiply_block<1, 1, kAdd>(deep, left, b, to, c_row);
      after(to, two_rows ? kTwo : kTileSide, two_columns ? kTwo : kTileSide);
    }
  }
}
template <bool kAdd>
[[gnu::always_inline]] inline void multiply_tiles(int64_t M, int64_t N, int64_t K, const uint16_t* a, const uint16_t* b,
                                                  float* c, int64_t c_row) {
  multiply_tiles<kAdd>(M, N, K, a, b, c, c_row, [](float*, int64_t, int64_t) {});
}

}  // namespace
}  // namespace thalweg
#endif
