// What attention kernels share: powers of two of scores that lie below a maximum, causal borders, panels. For files
// compiled per instruction set.
//
// Scores are kept in units of log 2 (the queries are multiplied by scale log2(e) as they are packed), transposed: a
// score row is one key, its lanes are queries, so that maxima and sums over keys go down the rows.
//
// A panel is what gemm.h walks as B: kPanel columns of a matrix, row after row, kPanel apart. A matrix of n columns has
// ceil(n / kPanel) of them, each `rows` x kPanel; columns past n hold 0 up to the next vector.
#ifndef THALWEG_CPU_BLOCKS_SOFTMAX_H
#define THALWEG_CPU_BLOCKS_SOFTMAX_H

#include "thalweg/cpu/blocks/gemm.h"
#include "thalweg/cpu/blocks/rows.h"
#include "thalweg/cpu/blocks/sigmoid.h"

namespace thalweg {
namespace {

constexpr float kLog2e = 1.44269504088896341f;
constexpr double kLn2 = 0.693147180559945309;
constexpr float kLowest = -3.40282347e38f;  // where a maximum starts: finite, so that no difference is inf - inf

// 2^x for x <= 0 to 1.5 ulp, 0 from -126.5 down, NaN stays; up to x = 128, which gives infinity, it is right too.
[[gnu::always_inline]] inline vf exp2_nonpositive(vf x) {
  const vf bounded = max(set1(-127.f), x);
#if defined(__AVX2__) && !defined(__AVX512F__)
  const vf magic = set1(12583039.f);  // 1.5 * 2^23 + 127: the whole part lands in the low bits, biased
  const vf shifted = bounded + magic;
  const vf p = power_of_fraction(bounded - (shifted - magic));
  return p * _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23));  // as a product: NaN stays
#else
  const vf n = round(bounded);
  const vf power = scale_by_power(power_of_fraction(bounded - n), n);
  return where_greater(set1(-126.5f), x, zero(), power);  // or a score of -inf would weigh 2^-127
#endif
}

// Rows of a score matrix lie this far apart for `queries` columns: whole vectors, and never a power of two.
constexpr int64_t score_row(int64_t queries) { return round_up(queries, 16) + 16; }

// One row of storage as columns of panels.
template <class S>
inline void row_to_panels_of(const typename S::Element* p, int64_t n, float* out, int64_t panel) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const vf x = i + kLanes <= n ? S::load(p + i) : S::load_n(p + i, n - i);
    store(out + i / kPanel * panel + i % kPanel, x);
  }
}
inline void row_to_panels(thalweg_dtype dtype, const void* p, int64_t n, float* out, int64_t panel) {
  if (dtype == THALWEG_F32) row_to_panels_of<F32>(static_cast<const float*>(p), n, out, panel);
  if (dtype == THALWEG_BF16) row_to_panels_of<Bf16>(static_cast<const uint16_t*>(p), n, out, panel);
  if (dtype == THALWEG_F16) row_to_panels_of<F16>(static_cast<const uint16_t*>(p), n, out, panel);
}

// The transpose of up to kLanes rows [rows, n] (`from`, from_row apart, whole vectors of them readable) as columns
// [column, column + kLanes) of panels n x kPanel, times `factor`. Columns past `rows` become 0.
inline void rows_to_columns(const float* from, int64_t from_row, int64_t rows, int64_t n, float factor, float* panels,
                            int64_t column) {
  float* out = panels + column / kPanel * n * kPanel + column % kPanel;
  for (int64_t i = 0; i < n; i += kLanes) {
    vf x[kLanes];
    for (int64_t r = 0; r < kLanes; ++r) x[r] = r < rows ? load(from + r * from_row + i) * set1(factor) : zero();
    transpose(x);
    for (int64_t j = 0; j < kLanes && i + j < n; ++j) store(out + (i + j) * kPanel, x[j]);
  }
}

// Walks the panels of B [k, n]: C[m, n] = A[m, k] B, or += with kAdd.
template <bool kAdd>
[[gnu::always_inline]] inline void gemm_panels(int64_t M, int64_t N, int64_t K, const float* a, int64_t a_row,
                                               int64_t a_col, const float* b, int64_t b_panel, float* c,
                                               int64_t c_row) {
  for (int64_t n = 0; n < N; n += kPanel, b += b_panel) {
    if (N - n > kLanes)
      gemm_panel<2, kAdd>(M, K, a, a_row, a_col, b, kPanel, c + n, c_row, 1.f);
    else
      gemm_panel<1, kAdd>(M, K, a, a_row, a_col, b, kPanel, c + n, c_row, 1.f);
  }
}

// The first n of `columns` scores of a row become x: queries that lie before the first one that sees the key.
inline void fill_first(float* row, int64_t n, int64_t columns, float x) {
  for (int64_t c = 0; c < columns && c < n; c += kLanes)
    store(row + c, first_n(n - c < kLanes ? n - c : kLanes, set1(x), load(row + c)));
}

// Online softmax over one more tile of keys: per query (lane) the maximum m, the sum l and, for what was summed
// before, the factor alpha. Scores become 2^(score - m).
inline void softmax_step(float* scores, int64_t row, int64_t keys, int64_t columns, float* m, float* l, float* alpha) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    float* s = scores + c;
    const vf old = load(m + c);
    vf top[4] = {old, old, old, old};
    int64_t j = 0;
    for (; j + 4 <= keys; j += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) top[i] = max(top[i], load(s + (j + i) * row));
    for (; j < keys; ++j) top[0] = max(top[0], load(s + j * row));
    const vf now = max(max(top[0], top[1]), max(top[2], top[3]));
    const vf factor = exp2_nonpositive(old - now);
    vf sum[4] = {load(l + c) * factor, zero(), zero(), zero()};
    for (j = 0; j + 4 <= keys; j += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const vf p = exp2_nonpositive(load(s + (j + i) * row) - now);
        store(s + (j + i) * row, p);
        sum[i] += p;
      }
    for (; j < keys; ++j) {
      const vf p = exp2_nonpositive(load(s + j * row) - now);
      store(s + j * row, p);
      sum[0] += p;
    }
    store(m + c, now);
    store(l + c, (sum[0] + sum[1]) + (sum[2] + sum[3]));
    store(alpha + c, factor);
  }
}

}  // namespace
}  // namespace thalweg
#endif
