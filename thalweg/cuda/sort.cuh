// A block sorts numbers where they lie, in shared or global memory.
#ifndef THALWEG_CUDA_SORT_CUH
#define THALWEG_CUDA_SORT_CUH

#include <stdint.h>

namespace thalweg::cuda {

// Bitonic, every exchange ascending, so that a length which is no power of two needs no padding: what would stand
// behind the end is larger than all and never moves. All threads of the block come here; the numbers are theirs after.
template <class E, class Before>
__device__ void sort_in_block(E* x, int64_t n, Before before) {
  auto exchange = [&](int64_t i, int64_t j) {
    if (j >= n) return;
    const E a = x[i], b = x[j];
    if (before(b, a)) x[i] = b, x[j] = a;
  };
  int top = 0;  // 2^top >= n
  while ((int64_t(1) << top) < n) ++top;
  const int64_t pairs = top > 0 ? int64_t(1) << (top - 1) : 0;
  __syncthreads();
  for (int size = 1; size <= top; ++size) {  // runs of 2^size
    const int64_t half = int64_t(1) << (size - 1);
    for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
      const int64_t run = i >> (size - 1) << size, at = i & (half - 1);
      exchange(run + at, run + 2 * half - 1 - at);
    }
    __syncthreads();
    for (int step = size - 2; step >= 0; --step) {
      for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
        const int64_t at = (i >> step << (step + 1)) + (i & ((int64_t(1) << step) - 1));
        exchange(at, at + (int64_t(1) << step));
      }
      __syncthreads();
    }
  }
}

}  // namespace thalweg::cuda
#endif
