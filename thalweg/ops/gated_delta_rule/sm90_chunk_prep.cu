// sm90_chunk_prep - the factors of every chunk as a kernel of its own: sm90_chunk_prep.cuh, a block a multiprocessor.
// For calls whose chains fill the device; where they do not, sm90_chunk_fwd makes the factors too.
#include "thalweg/ops/gated_delta_rule/sm90_chunk_prep.cuh"

#include "thalweg/cuda/sm90/launch_behind.h"

namespace thalweg::gated_delta_rule::sm90 {
namespace {

// The chunk of a slot: of the last sequence whose first slot is not behind it.
__device__ inline PrepItem find_slot(const ChunkArgs& a, int64_t slot, int h) {
  int64_t n = -1;
  for (int64_t end = a.N; n + 1 < end;) {
    const int64_t middle = (n + end) / 2;
    if (first_slot(span_of(a, middle).begin, middle) <= slot)
      n = middle;
    else
      end = middle;
  }
  if (n < 0) return {};
  const cuda::Span span = span_of(a, n);
  const int64_t row = span.begin + (slot - first_slot(span.begin, n)) * kChunk, left = span.end - row;
  const int valid = left <= 0 || !span.valid ? 0 : left < kChunk ? int(left) : kChunk;
  const Place place{a.spans ? 0 : n, a.spans ? row : row - n * a.T, valid};
  return {place, h, slot};
}

// Slot of rank i: first the last chunks of all sequences, were these of one length, and at the end the first ones, so
// that the factors with which all chains begin are the ones that are still in L2. Of N sequences, `each` slots in each.
__device__ inline int64_t in_order(int64_t i, unsigned each, unsigned N) {
  if (i >= int64_t(each) * N) return i;
  const unsigned back = unsigned(i) / N;
  return int64_t(unsigned(i) - back * N) * each + (each - 1 - back);
}

template <class E, int KD>
__device__ void run_slots(const ChunkArgs& a, const Maps& maps, char* bytes) {
  const int group = threadIdx.x / kGroup;
  const int64_t slots = a.B * a.T / kChunk + a.N, step = int64_t(gridDim.x) * kPrepGroups;
  const unsigned N = unsigned(a.N), each = N > 0 && slots < INT32_MAX ? unsigned(slots) / N : 0;
  make_factors<E, KD>(
      a, maps, reinterpret_cast<PrepSmem<KD>*>(bytes)[group], blockIdx.x + int64_t(group) * gridDim.x, step,
      slots * a.H, threadIdx.x % kGroup, 1 + group,
      [&](int64_t i) {
        const int64_t slot = i < INT32_MAX ? unsigned(i) / unsigned(a.H) : i / a.H;  // the short division is faster
        return find_slot(a, in_order(slot, each, N), int(i - slot * a.H));
      },
      [](const char*) {});
}

template <class E, int KD>
__global__ void __launch_bounds__(kPrepThreads, 1)
    chunk_prep(const __grid_constant__ ChunkArgs a, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char bytes[];
  grid_wait();
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.next_job = min(a.jobs, a.num_sms);
  grid_let_next_start();
  run_slots<E, KD>(a, maps, bytes);
  zero_rest<E>(a, blockIdx.x, gridDim.x);
}

template <class E, int KD>
void launch_of(const Problem& p, const ChunkArgs& a, const Maps& maps, const Exec& exec) {
  static_assert(kPrepGroups * sizeof(PrepSmem<KD>) <= 227 * 1024);
  const int64_t items = chunk_slots(p) * p.H, blocks = items < 1 ? 1 : items < a.num_sms ? items : a.num_sms;
  constexpr int64_t kBytes = kPrepGroups * sizeof(PrepSmem<KD>);
  if (a.spans)  // behind the kernel that checks the borders
    launch_behind(exec, "sm90_chunk_prep", chunk_prep<E, KD>, {blocks}, kPrepThreads, kBytes, a, maps);
  else
    cuda::launch(exec, "sm90_chunk_prep", chunk_prep<E, KD>, {blocks}, kPrepThreads, kBytes, a, maps);
}

}  // namespace

void launch_prep(const Problem& p, const ChunkArgs& a, const Maps& maps, const Exec& exec) {
  const bool half = p.dtype == THALWEG_F16;
  if (p.K == 128)
    return half ? launch_of<__half, 128>(p, a, maps, exec) : launch_of<__nv_bfloat16, 128>(p, a, maps, exec);
  return half ? launch_of<__half, 64>(p, a, maps, exec) : launch_of<__nv_bfloat16, 64>(p, a, maps, exec);
}

}  // namespace thalweg::gated_delta_rule::sm90
