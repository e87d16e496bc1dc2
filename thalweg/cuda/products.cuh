// Small matrix products of rows that lie anywhere, of any dtype, for the generic rows: a block of kThreads takes
// kTileRows rows against kTileCols others, and thread (row, lane) has columns lane, lane + 8, ... of its row.
//
// Sums run over channels in order, in pieces of kChunk that are added up: a product's bits depend on its two rows
// alone. Rows that no pair needs may hold anything: products with them are selected away, never multiplied by 0.
#ifndef THALWEG_CUDA_PRODUCTS_CUH
#define THALWEG_CUDA_PRODUCTS_CUH

#include "thalweg/cuda/tensor.cuh"

namespace thalweg::cuda {

constexpr int kTileRows = 32, kTileCols = 32, kThreads = 256;
constexpr int kLanes = kThreads / kTileRows, kPerLane = kTileCols / kLanes;
constexpr int64_t kNoRow = INT64_MIN;  // the offset of a row that is not there: zeros are taken

// kVec elements make 16 bytes. A lane of outer() has 2 kVec of kChunk columns: 0 .. kVec from lane * kVec, and the same
// from the other half.
template <class A>
constexpr int kVec = 16 / sizeof(A);
template <class A>
constexpr int kChunk = 2 * kLanes * kVec<A>;
constexpr int kGroups = 4;  // chunks of sums that a thread keeps
template <class A>
constexpr int64_t kGroupColumns = kGroups * kChunk<A>;

template <class A>
struct alignas(16) Vec {
  A x[kVec<A>];
};

template <class A>
struct alignas(16) Stage {
  A a[kTileRows][kChunk<A> + kVec<A>], b[kTileCols][kChunk<A> + kVec<A>];
};

__device__ inline int row_of_thread() { return int(threadIdx.x) / kLanes; }
__device__ inline int lane_of_thread() { return int(threadIdx.x) % kLanes; }
template <class A>
__device__ int column_of(int x) {
  return x / kVec<A> * (kLanes * kVec<A>) + lane_of_thread() * kVec<A> + x % kVec<A>;
}

__device__ inline float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double fused(double a, double b, double c) { return fma(a, b, c); }
__device__ inline float as_number(float x, float) { return x; }
__device__ inline double as_number(double x, double) { return x; }
__device__ inline float as_number(__half x, float) { return __half2float(x); }
__device__ inline float as_number(__nv_bfloat16 x, float) { return __bfloat162float(x); }

template <class A, class E, class At>
__device__ void stage_elements(A (*out)[kChunk<A> + kVec<A>], const E* data, At at, int64_t first, int64_t width) {
  constexpr int kStep = kThreads / kChunk<A>, kCount = kTileRows / kStep;
  const int column = threadIdx.x % kChunk<A>, row = threadIdx.x / kChunk<A>;
  const bool inside = first + column < width;
  E x[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t offset = at(row + i * kStep);
    x[i] = E(0.0f);
    if (inside && offset != kNoRow) x[i] = data[offset + first + column];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) out[row + i * kStep][column] = as_number(x[i], A(0));
}

// Channels [first, first + kChunk) of rows that start at element at(i), of `width` channels each; behind them 0.
template <class A, class At>
__device__ void stage_rows(A (*out)[kChunk<A> + kVec<A>], const thalweg_tensor& t, At at, int64_t first,
                           int64_t width) {
  if constexpr (sizeof(A) == 8) {
    stage_elements(out, static_cast<const double*>(t.data), at, first, width);
  } else if (t.dtype == THALWEG_F32) {
    stage_elements(out, static_cast<const float*>(t.data), at, first, width);
  } else if (t.dtype == THALWEG_BF16) {
    stage_elements(out, static_cast<const __nv_bfloat16*>(t.data), at, first, width);
  } else {
    stage_elements(out, static_cast<const __half*>(t.data), at, first, width);
  }
}

// sums[x] += <row of a, row lane + 8 x of b>. All threads of the block come here.
template <class A, class AtA, class AtB>
__device__ void inner(Stage<A>& stage, const thalweg_tensor& a, AtA at_a, const thalweg_tensor& b, AtB at_b,
                      int64_t width, A (&sums)[kPerLane]) {
  const int row = row_of_thread(), lane = lane_of_thread();
  for (int64_t first = 0; first < width; first += kChunk<A>) {
    __syncthreads();
    stage_rows(stage.a, a, at_a, first, width);
    stage_rows(stage.b, b, at_b, first, width);
    __syncthreads();
    const int64_t left = width - first < kChunk<A> ? width - first : kChunk<A>;
    A part[kPerLane] = {};
#pragma unroll 4
    for (int c = 0; c < left; c += kVec<A>) {
      const Vec<A> x = *reinterpret_cast<const Vec<A>*>(&stage.a[row][c]);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const Vec<A> y = *reinterpret_cast<const Vec<A>*>(&stage.b[lane + j * kLanes][c]);
#pragma unroll
        for (int v = 0; v < kVec<A>; ++v) part[j] = fused(x.x[v], y.x[v], part[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) sums[j] += part[j];
  }
}

template <class A>
using Weights = A[kTileRows][kTileCols + 1];

// sums[x] += sum_j weights[row][j] b[j][first + column_of(x)] over the j whose bit is set.
template <class A, class At>
__device__ void outer(Stage<A>& stage, const Weights<A>& weights, uint32_t bits, const thalweg_tensor& b, At at,
                      int64_t first, int64_t width, A (&sums)[2 * kVec<A>]) {
  const int row = row_of_thread(), lane = lane_of_thread();
  __syncthreads();
  stage_rows(stage.b, b, at, first, width);
  __syncthreads();
#pragma unroll 4
  for (int j = 0; j < kTileCols; ++j) {
    if (!(bits >> j & 1)) continue;
    const A weight = weights[row][j];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Vec<A> y = *reinterpret_cast<const Vec<A>*>(&stage.b[j][(half * kLanes + lane) * kVec<A>]);
#pragma unroll
      for (int v = 0; v < kVec<A>; ++v) sums[half * kVec<A> + v] = fused(weight, y.x[v], sums[half * kVec<A> + v]);
    }
  }
}

// The thread's sums to columns [first + column_of(x)) of a row that starts at element `row`.
template <class A>
__device__ void store_chunk(const thalweg_tensor& t, int64_t row, int64_t first, const A (&sums)[2 * kVec<A>]) {
  const int64_t width = t.shape[t.rank - 1];
#pragma unroll
  for (int x = 0; x < 2 * kVec<A>; ++x)
    if (first + column_of<A>(x) < width) store_at(t, row + first + column_of<A>(x), sums[x]);
}
template <class A>
__device__ void store_columns(const thalweg_tensor& t, int64_t row, int64_t first,
                              const A (&sums)[kGroups][2 * kVec<A>]) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g) store_chunk(t, row, first + g * kChunk<A>, sums[g]);
}

// What column `row` of a row's products is: <row of a, row of b>. The same in all its lanes.
template <class A>
__device__ A diagonal_of(const A (&products)[kPerLane]) {
  const int row = row_of_thread();
  static_assert(kPerLane == 4);
  const bool odd = row / kLanes & 1, high = row / kLanes & 2;
  const A low_pair = odd ? products[1] : products[0], high_pair = odd ? products[3] : products[2];
  return __shfl_sync(0xffffffffu, high ? high_pair : low_pair, row % kLanes, kLanes);
}

// Over the lanes of a row.
template <class A>
__device__ A row_sum(A x) {
  for (int step = 1; step < kLanes; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
template <class A>
__device__ A row_max(A x) {
  for (int step = 1; step < kLanes; step *= 2) {
    const A other = __shfl_xor_sync(0xffffffffu, x, step);
    x = other > x ? other : x;
  }
  return x;
}
// `mine` has a bit x for column lane + 8 x; the result one for each column.
__device__ inline uint32_t row_bits(uint32_t mine) {
  uint32_t bits = 0;
  for (int x = 0; x < kPerLane; ++x) bits |= (mine >> x & 1) << (lane_of_thread() + x * kLanes);
  for (int step = 1; step < kLanes; step *= 2) bits |= __shfl_xor_sync(0xffffffffu, bits, step);
  return bits;
}

// Adds scores, each `counts` times, to the row's softmax: maximum m, sum l; they become counts exp(s - m). Returns what
// sums of earlier columns are to be multiplied by.
template <class A>
__device__ A add_to_softmax(uint32_t mine, const A (&counts)[kPerLane], A (&s)[kPerLane], A* m, A* l) {
  const A lowest = -A(INFINITY);
  A top = *m;
#pragma unroll
  for (int x = 0; x < kPerLane; ++x) top = (mine >> x & 1) && s[x] > top ? s[x] : top;
  top = row_max(top);
  A sum = 0;
#pragma unroll
  for (int x = 0; x < kPerLane; ++x) {
    s[x] = mine >> x & 1 ? counts[x] * exp(s[x] - (top == lowest ? A(0) : top)) : A(0);
    sum += s[x];
  }
  const A factor = *m == lowest ? A(0) : exp(*m - top);
  *l = *l * factor + row_sum(sum);
  *m = top;
  return factor;
}

// The sum over a block of kThreads, in a fixed order; every thread gets it.
template <class A>
__device__ A block_sum(A x, A (&scratch)[kThreads]) {
  __syncthreads();
  scratch[threadIdx.x] = x;
  for (int step = kThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < step) scratch[threadIdx.x] += scratch[threadIdx.x + step];
  }
  __syncthreads();
  return scratch[0];
}

}  // namespace thalweg::cuda
#endif
