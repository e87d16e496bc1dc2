// cuda_generic - lightning indexer, forward, any dtype and strides.
//
// Math     u[h] = <q[h], k[s]>    I[s] = sum_h scale w[h] relu(u[h]), then the E largest by radix selection: digits of
//          8 bits from the top find the E-th largest, positions are gathered in order, and sorted by score
// Shapes   q [B T H K]  k [B S K]  w [B T H]  indices, scores [B T E]
// Takes    anything valid
// Grid     values[0] blocks of 256 threads, each of which takes every so manieth query
// Tile     32 heads x 32 keys
// Smem     27 KiB static
// Regs     a thread has 4 products
// Order    channels, heads; at equal scores the smaller position first
// Numerics float32, float64 where q is. A score's bits depend on its query and key alone
// Traps    relu keeps NaN, which ranks as minus infinity, and -0 as 0, as select.cpp has it
// Measured not tuned: it is the judge of the fast rows
#include "thalweg/cuda/sort.cuh"
#include "thalweg/ops/lightning_indexer/cuda_generic.cuh"

namespace thalweg::lightning_indexer {
namespace {

using Args = thalweg_lightning_indexer_fwd_args;

// Unsigned numbers that order as the scores do.
__device__ uint32_t order_of(float x) {
  const uint32_t u = __float_as_uint(x == x ? x + 0.0f : -INFINITY);
  return u >> 31 ? ~u : u | 0x80000000u;
}
__device__ uint64_t order_of(double x) {
  const uint64_t u = uint64_t(__double_as_longlong(x == x ? x + 0.0 : -double(INFINITY)));
  return u >> 63 ? ~u : u | 0x8000000000000000u;
}
template <class A>
using Order = decltype(order_of(A(0)));

struct Selection {
  uint32_t counts[256];
  int32_t warps[kThreads / 32];
  int32_t digit, rank;
};

// The E-th largest of n > E scores; `ties` gets how many of its equals belong to the E.
template <class A>
__device__ Order<A> threshold(const A* scores, int64_t n, int64_t E, Selection& shared, int32_t* ties) {
  Order<A> found = 0, known = 0;
  int32_t rank = int32_t(E);
  for (int shift = int(sizeof(A)) * 8 - 8; shift >= 0; shift -= 8) {
    __syncthreads();
    shared.counts[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += kThreads) {
      const Order<A> order = order_of(scores[i]);
      if ((order & known) == found) atomicAdd(&shared.counts[order >> shift & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = 255;
      while (int64_t(shared.counts[digit]) < rank) rank -= int32_t(shared.counts[digit--]);
      shared.digit = digit, shared.rank = rank;
    }
    __syncthreads();
    rank = shared.rank;
    found |= Order<A>(shared.digit) << shift;
    known |= Order<A>(255) << shift;
  }
  *ties = rank;
  return found;
}

// How many threads below have the flag; `all` gets how many do.
__device__ int32_t count_before(bool flag, Selection& shared, int32_t* all) {
  const uint32_t votes = __ballot_sync(0xffffffffu, flag);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = __popc(votes);
  __syncthreads();
  int32_t before = __popc(votes & ((1u << threadIdx.x % 32) - 1));
  *all = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < int(threadIdx.x) / 32) before += shared.warps[w];
    *all += shared.warps[w];
  }
  return before;
}

// The best `E` of n scores, or all, positions ascending. Returns how many.
template <class A>
__device__ int64_t select(const A* scores, int64_t n, int64_t E, Selection& shared, Candidate<A>* best) {
  if (n <= E) {
    for (int64_t i = threadIdx.x; i < n; i += kThreads) best[i] = {order_of(scores[i]), int32_t(i)};
    return n;
  }
  if (E == 0) return 0;
  int32_t ties;
  const Order<A> least = threshold(scores, n, E, shared, &ties);
  int64_t count = 0, equals = 0;
  for (int64_t first = 0; first < n; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    const Order<A> order = i < n ? order_of(scores[i]) : 0;
    int32_t here;
    const bool equal = i < n && order == least;
    const int64_t rank = equals + count_before(equal, shared, &here);
    equals += here;
    const bool taken = i < n && (order > least || (equal && rank < ties));
    const int64_t at = count + count_before(taken, shared, &here);
    count += here;
    if (taken) best[at] = {order, int32_t(i)};
  }
  return count;
}

template <class A>
__global__ void __launch_bounds__(kThreads) forward_kernel(Problem p, Args a, Sequences sequences, A* all_scores,
                                                           Candidate<A>* all_candidates) {
  __shared__ Scorer<A> scorer;
  __shared__ Selection selection;
  A* scores = all_scores + blockIdx.x * p.S;
  Candidate<A>* best = all_candidates + blockIdx.x * (p.S < p.E ? p.S : p.E);
  for (int64_t r = blockIdx.x; r < p.B * p.T; r += gridDim.x) {
    const int64_t b = r / p.T, t = r % p.T;
    const VisibleKeys keys = visible_keys(p, a, sequences, b, t);
    const int64_t n = keys.end - keys.begin;
    for (int64_t i0 = 0; i0 < n; i0 += kTileCols) {
      load_tile([&](int c) { return i0 + c < n ? keys.first + keys.begin + i0 + c : kNoRow; }, scorer.tile);
      const A score = score_tile(p, a, scorer, b, t);
      if (threadIdx.x < kTileCols && i0 + threadIdx.x < n) scores[i0 + threadIdx.x] = score;
    }
    __syncthreads();
    const int64_t count = select(scores, n, p.E, selection, best);
    if (!p.by_index)
      sort_in_block(best, count, [](const Candidate<A>& x, const Candidate<A>& y) {
        return x.order > y.order || (x.order == y.order && x.position < y.position);
      });
    __syncthreads();
    for (int64_t e = threadIdx.x; e < p.E; e += kThreads) {
      store_int(a.indices, offset_of(a.indices, b, t, e), e < count ? keys.begin + best[e].position : -1);
      if (!is_there(a.scores)) continue;
      const A score = e < count ? scores[best[e].position] : -A(INFINITY);
      store_at(a.scores, offset_of(a.scores, b, t, e),
               !keys.valid ? nan_of<A>() : score == score ? score : -A(INFINITY));
    }
    __syncthreads();
  }
}

template <class A>
void forward(const Problem& p, const Args& args, const Exec& exec, const CudaWorkspace& w) {
  launch(exec, "lightning_indexer.fwd cuda_generic", forward_kernel<A>, {w.slots}, kThreads, 0, p, args, w.sequences,
         static_cast<A*>(w.scores), static_cast<Candidate<A>*>(w.candidates));
}

}  // namespace

void cuda_generic_fwd(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  const CudaWorkspace w = lay_out_cuda(p, CudaPass::kFwd, plan.values[0], exec.workspace);
  prepare(p, args, exec, w.sequences);
  if (p.B * p.T == 0) return;
  p.dtype == THALWEG_F64 ? forward<double>(p, args, exec, w) : forward<float>(p, args, exec, w);
}

}  // namespace thalweg::lightning_indexer
