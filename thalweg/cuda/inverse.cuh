// Builds inverse lists (inverse.h): count, prefix sums, fill by integer atomics, and a sort of each list, after which
// nothing depends on the order in which threads came.
#ifndef THALWEG_CUDA_INVERSE_CUH
#define THALWEG_CUDA_INVERSE_CUH

#include "thalweg/cuda/inverse.h"
#include "thalweg/cuda/launch.h"
#include "thalweg/cuda/sort.cuh"

namespace thalweg::cuda {

__device__ inline int64_t add_one(int64_t* count) {
  return int64_t(atomicAdd(reinterpret_cast<unsigned long long*>(count), 1ull));
}

static __global__ void clear_counts_kernel(Inverse inverse) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < inverse.num_ids; i += step) inverse.next[i] = 0;
}

// `ids(slot)` is the id that a slot names, or -1.
template <class Ids>
__global__ void count_slots_kernel(Inverse inverse, Ids ids) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < inverse.num_slots;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t id = ids(i);
    if (id >= 0) add_one(inverse.next + id);
  }
}

// One block: counts to starts; `next` starts there too.
static __global__ void start_lists_kernel(Inverse inverse) {
  __shared__ int64_t sums[1024];
  int64_t before = 0;
  for (int64_t first = 0; first < inverse.num_ids; first += 1024) {
    const int64_t i = first + threadIdx.x, mine = i < inverse.num_ids ? inverse.next[i] : 0;
    __syncthreads();
    sums[threadIdx.x] = mine;
    for (int step = 1; step < 1024; step *= 2) {
      __syncthreads();
      const int64_t other = int(threadIdx.x) >= step ? sums[threadIdx.x - step] : 0;
      __syncthreads();
      sums[threadIdx.x] += other;
    }
    __syncthreads();
    if (i < inverse.num_ids) inverse.starts[i] = inverse.next[i] = before + sums[threadIdx.x] - mine;
    before += sums[1023];
  }
  if (threadIdx.x == 0) inverse.starts[inverse.num_ids] = before;
}

template <class Ids>
__global__ void fill_lists_kernel(Inverse inverse, Ids ids) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < inverse.num_slots;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t id = ids(i);
    if (id >= 0) inverse.slots[add_one(inverse.next + id)] = i;
  }
}

static __global__ void sort_lists_kernel(Inverse inverse) {
  constexpr int64_t kShort = 2048;
  __shared__ int64_t scratch[kShort];
  auto before = [](int64_t a, int64_t b) { return a < b; };
  for (int64_t id = blockIdx.x; id < inverse.num_ids; id += gridDim.x) {
    int64_t* list = inverse.slots + inverse.starts[id];
    const int64_t n = inverse.starts[id + 1] - inverse.starts[id];
    if (n > kShort) {
      sort_in_block(list, n, before);
    } else if (n > 1) {
      for (int64_t i = threadIdx.x; i < n; i += blockDim.x) scratch[i] = list[i];
      sort_in_block(scratch, n, before);
      for (int64_t i = threadIdx.x; i < n; i += blockDim.x) list[i] = scratch[i];
      __syncthreads();
    }
  }
}

template <class Ids>
void build_inverse(const Exec& exec, const Inverse& inverse, const Ids& ids) {
  const Grid slots{capped_grid(ceil_div(inverse.num_slots, 256))};
  launch(exec, "inverse: clear", clear_counts_kernel, {capped_grid(ceil_div(inverse.num_ids, 256))}, 256, 0, inverse);
  launch(exec, "inverse: count", count_slots_kernel<Ids>, slots, 256, 0, inverse, ids);
  launch(exec, "inverse: starts", start_lists_kernel, {1}, 1024, 0, inverse);
  launch(exec, "inverse: fill", fill_lists_kernel<Ids>, slots, 256, 0, inverse, ids);
  launch(exec, "inverse: sort", sort_lists_kernel, {capped_grid(inverse.num_ids)}, 256, 0, inverse);
}

}  // namespace thalweg::cuda
#endif
