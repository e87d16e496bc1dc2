// cuda_generic - sparse flash attention: the lists of all queries, as every pass walks them: visible entries in
// ascending order, each once, and how often it is listed. A list's order then changes no bit of any sum.
//
// A block a query: visible entries are gathered, sorted where they lie, and repeats counted.
#include "thalweg/cuda/sort.cuh"
#include "thalweg/ops/sparse_flash_attention/cuda_generic.cuh"

namespace thalweg::sparse_flash_attention {
namespace {

// Where the threads with the flag put what they have, in order; `all` gets how many have it.
__device__ int32_t place_among(bool flag, int32_t (&warps)[kThreads / 32], int32_t* all) {
  const uint32_t votes = __ballot_sync(0xffffffffu, flag);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = __popc(votes);
  __syncthreads();
  int32_t before = __popc(votes & ((1u << threadIdx.x % 32) - 1));
  *all = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < int(threadIdx.x) / 32) before += warps[w];
    *all += warps[w];
  }
  return before;
}

// Sorted entries to each once, and where each begins; both in place, since nothing moves up.
__device__ int64_t drop_repeats(int32_t* entries, int32_t* begins, int64_t n, int32_t (&warps)[kThreads / 32]) {
  int64_t kept = 0;
  for (int64_t first = 0; first < n; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    const int32_t entry = i < n ? entries[i] : 0;
    const bool is_new = i < n && (i == 0 || entry != entries[i - 1]);
    int32_t here;
    const int64_t at = kept + place_among(is_new, warps, &here);  // all have read before anyone writes
    if (is_new) entries[at] = entry, begins[at] = int32_t(i);
    kept += here;
    __syncthreads();
  }
  return kept;
}

__global__ void __launch_bounds__(kThreads) lists_kernel(Problem p, thalweg_tensor indices, Sequences sequences,
                                                         Lists lists) {
  constexpr int64_t kShort = 2048;
  __shared__ int32_t warps[kThreads / 32], scratch[kShort];
  auto before = [](int32_t a, int32_t b) { return a < b; };
  for (int64_t row = blockIdx.x; row < p.B * p.T; row += gridDim.x) {
    const int64_t b = row / p.T, t = row % p.T;
    const VisibleRange range = visible_range(p, sequences, b, t);
    int32_t *entries = lists.entries + row * p.E, *counts = lists.counts + row * p.E;
    int64_t n = 0;
    for (int64_t first = 0; first < p.E && range.limit > 0; first += kThreads) {
      const int64_t entry = first + threadIdx.x < p.E ? entry_at(indices, b, t, first + threadIdx.x) : -1;
      const bool visible = is_visible(p, entry, range.limit);
      int32_t here;
      const int64_t at = n + place_among(visible, warps, &here);
      if (visible) entries[at] = int32_t(entry);
      n += here;
    }
    __syncthreads();
    if (n > kShort) {
      sort_in_block(entries, n, before);
    } else {
      for (int64_t i = threadIdx.x; i < n; i += kThreads) scratch[i] = entries[i];
      sort_in_block(scratch, n, before);
      for (int64_t i = threadIdx.x; i < n; i += kThreads) entries[i] = scratch[i];
      __syncthreads();
    }
    const int64_t kept = drop_repeats(entries, counts, n, warps);
    for (int64_t first = 0; first < kept; first += kThreads) {
      const int64_t i = first + threadIdx.x;
      const int32_t count = i < kept ? int32_t(i + 1 < kept ? counts[i + 1] : n) - counts[i] : 0;
      __syncthreads();
      if (i < kept) counts[i] = count;
      __syncthreads();
    }
    if (threadIdx.x == 0) lists.lengths[row] = kept;
    __syncthreads();
  }
}

}  // namespace

void make_lists(const Problem& p, const thalweg_tensor& indices, const Sequences& sequences, const Lists& lists,
                const Exec& exec) {
  launch(exec, "sparse_flash_attention lists", lists_kernel, {capped_grid(p.B * p.T)}, kThreads, 0, p, indices,
         sequences, lists);
}

}  // namespace thalweg::sparse_flash_attention
