// Rows and states between storage of any float dtype and float32 scratch, for files compiled per
// instruction set. Rows may have any alignment; offsets are 64-bit.
//
// Kernels whose inner loops load storage are templates on F32, Bf16 or F16 (`S::load`, `S::Element`);
// what is called once a row or once a state takes the dtype at run time and takes float64 too.
// S::stream(p, x, y) writes two vectors past the caches; p is kStreamAlign aligned, and stream_fence() ends it.
#ifndef THALWEG_CPU_BLOCKS_ROWS_H
#define THALWEG_CPU_BLOCKS_ROWS_H

#include "thalweg/core/types.h"
#include "thalweg/cpu/simd.h"

namespace thalweg {
namespace {

constexpr int64_t kStreamAlign = 4 * kLanes;

struct F32 {
  using Element = float;
  [[gnu::always_inline]] static vf load(const float* p) { return thalweg::load(p); }
  [[gnu::always_inline]] static vf load_n(const float* p, int64_t n) { return thalweg::load_n(p, n); }
  [[gnu::always_inline]] static void store(float* p, vf x) { thalweg::store(p, x); }
  [[gnu::always_inline]] static void store_n(float* p, vf x, int64_t n) { thalweg::store_n(p, x, n); }
  [[gnu::always_inline]] static void stream(float* p, vf x, vf y) {
    thalweg::stream(p, x);
    thalweg::stream(p + kLanes, y);
  }
};
struct Bf16 {
  using Element = uint16_t;
  [[gnu::always_inline]] static vf load(const uint16_t* p) { return load_bf16(p); }
  [[gnu::always_inline]] static vf load_n(const uint16_t* p, int64_t n) { return load_bf16_n(p, n); }
  [[gnu::always_inline]] static void store(uint16_t* p, vf x) { store_bf16(p, x); }
  [[gnu::always_inline]] static void store_n(uint16_t* p, vf x, int64_t n) { store_bf16_n(p, x, n); }
  [[gnu::always_inline]] static void stream(uint16_t* p, vf x, vf y) { stream_bf16(p, x, y); }
};
struct F16 {
  using Element = uint16_t;
  [[gnu::always_inline]] static vf load(const uint16_t* p) { return load_f16(p); }
  [[gnu::always_inline]] static vf load_n(const uint16_t* p, int64_t n) { return load_f16_n(p, n); }
  [[gnu::always_inline]] static void store(uint16_t* p, vf x) { store_f16(p, x); }
  [[gnu::always_inline]] static void store_n(uint16_t* p, vf x, int64_t n) { store_f16_n(p, x, n); }
  [[gnu::always_inline]] static void stream(uint16_t* p, vf x, vf y) { stream_f16(p, x, y); }
};

inline int64_t element_bytes(thalweg_dtype dtype) {
  return dtype == THALWEG_F64 ? 8 : dtype == THALWEG_F32 ? 4 : 2;
}

// The address of element (i0, i1, i2, i3) of a tensor of rank 4 or less.
inline char* element_at(const thalweg_tensor& t, int64_t i0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0) {
  int64_t index[4] = {i0, i1, i2, i3}, offset = 0;
  for (int axis = 0; axis < t.rank && axis < 4; ++axis) offset += index[axis] * t.stride[axis];
  return static_cast<char*>(t.data) + offset * element_bytes(t.dtype);
}

template <class S>
inline void read_row_of(const typename S::Element* p, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, S::load(p + i));
  if (i < n) store_n(out + i, S::load_n(p + i, n - i), n - i);
}
template <class S>
inline void write_row_of(typename S::Element* p, int64_t n, const float* in) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) S::store(p + i, load(in + i));
  if (i < n) S::store_n(p + i, load_n(in + i, n - i), n - i);
}

// out[0, n) = p[0, n) as float32.
inline void read_row(thalweg_dtype dtype, const void* p, int64_t n, float* out) {
  if (dtype == THALWEG_F32) read_row_of<F32>(static_cast<const float*>(p), n, out);
  if (dtype == THALWEG_BF16) read_row_of<Bf16>(static_cast<const uint16_t*>(p), n, out);
  if (dtype == THALWEG_F16) read_row_of<F16>(static_cast<const uint16_t*>(p), n, out);
  if (dtype == THALWEG_F64)
    for (int64_t i = 0; i < n; ++i) out[i] = float(static_cast<const double*>(p)[i]);
}
// p[0, n) = in[0, n), rounded to the dtype.
inline void write_row(thalweg_dtype dtype, void* p, int64_t n, const float* in) {
  if (dtype == THALWEG_F32) write_row_of<F32>(static_cast<float*>(p), n, in);
  if (dtype == THALWEG_BF16) write_row_of<Bf16>(static_cast<uint16_t*>(p), n, in);
  if (dtype == THALWEG_F16) write_row_of<F16>(static_cast<uint16_t*>(p), n, in);
  if (dtype == THALWEG_F64)
    for (int64_t i = 0; i < n; ++i) static_cast<double*>(p)[i] = double(in[i]);
}

// out[i] = p[i * stride] as float32; any stride, zero and negative ones too.
inline void read_strided(thalweg_dtype dtype, const void* p, int64_t stride, int64_t n, float* out) {
  if (dtype == THALWEG_F32)
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<const float*>(p)[i * stride];
  if (dtype == THALWEG_BF16)
    for (int64_t i = 0; i < n; ++i) out[i] = float_of_bf16(static_cast<const uint16_t*>(p)[i * stride]);
  if (dtype == THALWEG_F16)
    for (int64_t i = 0; i < n; ++i) out[i] = float_of_f16(static_cast<const uint16_t*>(p)[i * stride]);
  if (dtype == THALWEG_F64)
    for (int64_t i = 0; i < n; ++i) out[i] = float(static_cast<const double*>(p)[i * stride]);
}
// p[i * stride] = in[i], rounded to the dtype.
inline void write_strided(thalweg_dtype dtype, void* p, int64_t stride, int64_t n, const float* in) {
  if (dtype == THALWEG_F32)
    for (int64_t i = 0; i < n; ++i) static_cast<float*>(p)[i * stride] = in[i];
  if (dtype == THALWEG_BF16)
    for (int64_t i = 0; i < n; ++i) static_cast<uint16_t*>(p)[i * stride] = bf16_of_float(in[i]);
  if (dtype == THALWEG_F16)
    for (int64_t i = 0; i < n; ++i) static_cast<uint16_t*>(p)[i * stride] = f16_of_float(in[i]);
  if (dtype == THALWEG_F64)
    for (int64_t i = 0; i < n; ++i) static_cast<double*>(p)[i * stride] = double(in[i]);
}

// A block [rows, cols] of a state in storage, K- or V-contiguous, to and from scratch with rows
// `s_row` apart. Walks storage along its contiguous axis; `line` holds max(rows, cols) floats.
inline void read_state(thalweg_dtype dtype, const void* p, int64_t row_stride, int64_t col_stride, int64_t rows,
                       int64_t cols, float* s, int64_t s_row, float* line) {
  int64_t bytes = element_bytes(dtype);
  const char* base = static_cast<const char*>(p);
  if (col_stride == 1) {
    for (int64_t k = 0; k < rows; ++k) read_row(dtype, base + k * row_stride * bytes, cols, s + k * s_row);
    return;
  }
  for (int64_t v = 0; v < cols; ++v) {
    read_strided(dtype, base + v * col_stride * bytes, row_stride, rows, line);
    for (int64_t k = 0; k < rows; ++k) s[k * s_row + v] = line[k];
  }
}
inline void write_state(thalweg_dtype dtype, void* p, int64_t row_stride, int64_t col_stride, int64_t rows,
                        int64_t cols, const float* s, int64_t s_row, float* line) {
  int64_t bytes = element_bytes(dtype);
  char* base = static_cast<char*>(p);
  if (col_stride == 1) {
    for (int64_t k = 0; k < rows; ++k) write_row(dtype, base + k * row_stride * bytes, cols, s + k * s_row);
    return;
  }
  for (int64_t v = 0; v < cols; ++v) {
    for (int64_t k = 0; k < rows; ++k) line[k] = s[k * s_row + v];
    write_strided(dtype, base + v * col_stride * bytes, row_stride, rows, line);
  }
}

// b[j][i] = a[i][j] for kLanes x kLanes elements that are given as vectors.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
[[gnu::always_inline]] inline void transpose(vf (&a)[16]) {
  vf b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // columns 0..3 of each 128-bit lane, four rows in each
    __m512d x0 = _mm512_castps_pd(b[4 * i]), x1 = _mm512_castps_pd(b[4 * i + 1]);
    __m512d x2 = _mm512_castps_pd(b[4 * i + 2]), x3 = _mm512_castps_pd(b[4 * i + 3]);
    a[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(x0, x2));
    a[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x0, x2));
    a[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(x1, x3));
    a[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(x1, x3));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // a[4r + i] holds column i, i+4, i+8, i+12 of rows 4r .. 4r+3
    vf low = _mm512_shuffle_f32x4(a[i], a[4 + i], 0x88), high = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0x88);
    vf low1 = _mm512_shuffle_f32x4(a[i], a[4 + i], 0xdd), high1 = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0xdd);
    b[i] = _mm512_shuffle_f32x4(low, high, 0x88);
    b[8 + i] = _mm512_shuffle_f32x4(low, high, 0xdd);
    b[4 + i] = _mm512_shuffle_f32x4(low1, high1, 0x88);
    b[12 + i] = _mm512_shuffle_f32x4(low1, high1, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = b[i];
}
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
[[gnu::always_inline]] inline void transpose(vf (&a)[8]) {
  vf b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    a[4 * i] = _mm256_shuffle_ps(b[4 * i], b[4 * i + 2], 0x44);
    a[4 * i + 1] = _mm256_shuffle_ps(b[4 * i], b[4 * i + 2], 0xee);
    a[4 * i + 2] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], 0x44);
    a[4 * i + 3] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm256_permute2f128_ps(a[i], a[4 + i], 0x20);
    b[4 + i] = _mm256_permute2f128_ps(a[i], a[4 + i], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = b[i];
}
#else
inline void transpose(vf (&a)[4]) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < i; ++j) {
      float x = a[i][j];
      a[i][j] = a[j][i];
      a[j][i] = x;
    }
}
#endif

}  // namespace
}  // namespace thalweg
#endif
