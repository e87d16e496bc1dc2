// sm90_chunk_prep - the factors of every chunk as a kernel of its own: sm90_chunk_prep.cuh, one block of 128 threads a
// slot and key head. For calls whose chains fill the device; where they do not, sm90_chunk_fwd makes the factors too.
#include "thalweg/ops/gated_delta_rule/sm90_chunk_prep.cuh"

#include "thalweg/cuda/launch.h"

namespace thalweg::gated_delta_rule::sm90 {
namespace {

// Which chunk the slot is: of the last sequence whose first slot is not behind it.
__device__ inline Place find_chunk(const ChunkArgs& a, int64_t slot) {
  int64_t n = -1;
  for (int64_t first = 0; first < a.N; first += kPrepThreads) {
    const int64_t mine = first + threadIdx.x;
    const bool before = mine < a.N && first_slot(span_of(a, mine).begin, mine) <= slot;
    n += __syncthreads_count(before);
  }
  if (n < 0) return {0, 0, 0};
  const cuda::Span span = span_of(a, n);
  const int64_t row = span.begin + (slot - first_slot(span.begin, n)) * kChunk, left = span.end - row;
  const int valid = left <= 0 || !span.valid ? 0 : left < kChunk ? int(left) : kChunk;
  return a.spans ? Place{0, row, valid} : Place{n, row - n * a.T, valid};
}

template <class E, int KD>
__global__ void __launch_bounds__(kPrepThreads, 4) chunk_prep(const __grid_constant__ ChunkArgs a) {
  extern __shared__ __align__(1024) char smem[];
  PrepSmem<KD>& s = *reinterpret_cast<PrepSmem<KD>*>(smem);
  const unsigned slot = blockIdx.x / unsigned(a.H), h = blockIdx.x % unsigned(a.H);
  const Place p = find_chunk(a, slot);
  if (p.valid == 0) return;
  const int thread = rotated(threadIdx.x, blockIdx.x / 132);  // the blocks that a multiprocessor starts with
  zero_A(s, thread);
  const int64_t hv = int64_t(h) * (unsigned(a.HV) / unsigned(a.H));
  make_factors<E, KD>(a, s, p, int(h), a.factors + (slot * a.HV + hv) * kFactorBytes, thread, 1);
}

template <class E>
void launch_dtype(const Problem& p, const ChunkArgs& a, const Exec& exec) {
  if (p.K == 128)
    cuda::launch(exec, "sm90_chunk_prep", chunk_prep<E, 128>, {chunk_slots(p) * p.H}, kPrepThreads,
                 sizeof(PrepSmem<128>), a);
  else
    cuda::launch(exec, "sm90_chunk_prep", chunk_prep<E, 64>, {chunk_slots(p) * p.H}, kPrepThreads, sizeof(PrepSmem<64>),
                 a);
}

}  // namespace

void launch_prep(const Problem& p, const ChunkArgs& a, const Exec& exec) {
  if (p.dtype == THALWEG_F16)
    launch_dtype<__half>(p, a, exec);
  else
    launch_dtype<__nv_bfloat16>(p, a, exec);
}

}  // namespace thalweg::gated_delta_rule::sm90
