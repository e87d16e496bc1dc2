// The second stage of sums over tokens: partial sums [blocks][columns] become one number a column. A fixed order:
// each of kSumLanes lanes takes every kSumLanes-th block, ascending, in float64; then lanes in order.
#ifndef THALWEG_CUDA_COLUMN_SUMS_CUH
#define THALWEG_CUDA_COLUMN_SUMS_CUH

#include "thalweg/cuda/launch.h"

namespace thalweg::cuda {

constexpr int kSumColumns = 32, kSumLanes = 32;

// out(column, sum) stores one column.
template <class A, class Out>
__global__ void __launch_bounds__(kSumColumns* kSumLanes)
    column_sums_kernel(const A* partials, int64_t blocks, int64_t columns, Out out) {
  __shared__ double sums[kSumLanes][kSumColumns];
  const int lane = int(threadIdx.x) / kSumColumns, at = int(threadIdx.x) % kSumColumns;
  for (int64_t first = int64_t(blockIdx.x) * kSumColumns; first < columns; first += int64_t(gridDim.x) * kSumColumns) {
    const int64_t column = first + at;
    double sum = 0;
    if (column < columns) {
#pragma unroll 8
      for (int64_t block = lane; block < blocks; block += kSumLanes) sum += double(partials[block * columns + column]);
    }
    sums[lane][at] = sum;
    __syncthreads();
    if (lane == 0 && column < columns) {
      double total = 0;
      for (int i = 0; i < kSumLanes; ++i) total += sums[i][at];
      out(column, total);
    }
    __syncthreads();
  }
}

template <class A, class Out>
void column_sums(const Exec& exec, const char* name, const A* partials, int64_t blocks, int64_t columns,
                 const Out& out) {
  launch(exec, name, column_sums_kernel<A, Out>, {capped_grid(ceil_div(columns, kSumColumns))}, kSumColumns * kSumLanes,
         0, partials, blocks, columns, out);
}

// Threads of a block as lanes x columns: a power of two of columns, at most 256, that covers `width` if it can.
struct Tile {
  int columns, lanes;
};
constexpr int kTileThreads = 256;
inline Tile tile_of(int64_t width) {
  int columns = 1;
  while (columns < width && columns < kTileThreads) columns *= 2;
  return {columns, kTileThreads / columns};
}

}  // namespace thalweg::cuda
#endif
