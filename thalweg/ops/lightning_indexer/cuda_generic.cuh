// What the passes of cuda_generic share: which keys a query sees, and the scores of 32 keys at a time.
#ifndef THALWEG_OPS_LIGHTNING_INDEXER_CUDA_GENERIC_CUH
#define THALWEG_OPS_LIGHTNING_INDEXER_CUDA_GENERIC_CUH

#include <stddef.h>

#include "thalweg/cuda/products.cuh"
#include "thalweg/cuda/sequences.cuh"
#include "thalweg/ops/lightning_indexer/cuda_workspace.h"

namespace thalweg::lightning_indexer {
namespace {

using namespace cuda;

__device__ inline int64_t offset_of(const thalweg_tensor& t, int64_t i, int64_t j, int64_t k = 0) {
  return i * t.stride[0] + j * t.stride[1] + (t.rank > 2 ? k * t.stride[2] : 0);
}

__device__ inline int64_t load_int(const thalweg_tensor& t, int64_t offset) {
  return t.dtype == THALWEG_I64 ? static_cast<const int64_t*>(t.data)[offset]
                                : static_cast<const int32_t*>(t.data)[offset];
}
__device__ inline void store_int(const thalweg_tensor& t, int64_t offset, int64_t x) {
  if (t.dtype == THALWEG_I64)
    static_cast<int64_t*>(t.data)[offset] = x;
  else
    static_cast<int32_t*>(t.data)[offset] = int32_t(x);
}

// Query (b, t) sees positions [begin, end), counted from row `first` of k[b].
struct VisibleKeys {
  int64_t first, begin, end;
  bool valid;
  __device__ bool has(int64_t position) const { return begin <= position && position < end; }
};
template <class Args>
__device__ VisibleKeys visible_keys(const Problem& p, const Args& a, const Sequences& sequences, int64_t b, int64_t t) {
  const RowPlace place = place_of_query(sequences, b, t);
  if (!place.used) return {0, 0, 0, place.valid};
  const Pair& pair = sequences.pairs[place.n];
  int64_t begin = 0, end = pair.k_len;
  const int64_t causal = t - pair.q_begin + pair.k_len - pair.q_len + 1;
  if (p.causal && causal < end) end = causal;
  if (is_there(a.start)) {
    const int64_t start = load_int(a.start, offset_of(a.start, b, t));
    if (start > begin) begin = start;
  }
  if (is_there(a.end)) {
    const int64_t given = load_int(a.end, offset_of(a.end, b, t));
    if (given < end) end = given;
  }
  if (begin >= end) return {0, 0, 0, true};
  return {pair.k_begin, begin, end, true};
}

// kTileCols keys: rows of k[b], kNoRow where there is none.
struct KeyTile {
  int64_t rows[kTileCols];
  uint32_t bits;  // the others
};
// `row_of(c)` says which row column c has. All threads of the block come here and get the bits.
template <class RowOf>
__device__ uint32_t load_tile(RowOf row_of, KeyTile& tile) {
  __syncthreads();
  if (threadIdx.x < kTileCols) {
    const int64_t row = row_of(int(threadIdx.x));
    tile.rows[threadIdx.x] = row;
    const uint32_t bits = __ballot_sync(0xffffffffu, row != kNoRow);
    if (threadIdx.x == 0) tile.bits = bits;
  }
  __syncthreads();
  return tile.bits;
}
__device__ inline uint32_t bits_of_lane(uint32_t bits) {
  uint32_t mine = 0;
  for (int x = 0; x < kPerLane; ++x) mine |= (bits >> (lane_of_thread() + x * kLanes) & 1) << x;
  return mine;
}

// The key of entry e of a query's list, or key e itself; kNoRow where it is not visible.
template <class Args>
__device__ int64_t entry_row(const Problem& p, const Args& a, const VisibleKeys& keys, int64_t b, int64_t t,
                             int64_t e) {
  if (e >= p.E || keys.begin == keys.end) return kNoRow;
  const int64_t position = p.dense ? e : load_int(a.indices, offset_of(a.indices, b, t, e));
  return keys.has(position) ? keys.first + position : kNoRow;
}

// Shared memory of a block that scores keys.
template <class A>
struct Scorer {
  Stage<A> stage;
  Weights<A> weights;
  KeyTile tile;
};

// Products of heads h0 .. and the tile's keys.
template <class A, class Args>
__device__ void multiply_tile(const Problem& p, const Args& a, Scorer<A>& scorer, int64_t b, int64_t t, int64_t h0,
                              A (&u)[kPerLane]) {
  auto head_at = [&](int r) { return h0 + r < p.H ? offset_of(a.q, b, t, h0 + r) : kNoRow; };
  auto key_at = [&](int c) { return scorer.tile.rows[c] != kNoRow ? offset_of(a.k, b, scorer.tile.rows[c]) : kNoRow; };
  for (int x = 0; x < kPerLane; ++x) u[x] = 0;
  inner(scorer.stage, a.q, head_at, a.k, key_at, p.K, u);
}

template <class A, class Args>
__device__ A weight_of(const Problem& p, const Args& a, int64_t b, int64_t t, int64_t h) {
  return h < p.H ? A(p.scale) * load_at<A>(a.w, offset_of(a.w, b, t, h)) : A(0);
}

// I of the tile's keys, heads added in order: thread c has that of column c.
template <class A, class Args>
__device__ A score_tile(const Problem& p, const Args& a, Scorer<A>& scorer, int64_t b, int64_t t) {
  const int row = row_of_thread(), lane = lane_of_thread();
  A score = 0;
  for (int64_t h0 = 0; h0 < p.H; h0 += kTileRows) {
    A u[kPerLane];
    multiply_tile(p, a, scorer, b, t, h0, u);
    const A weight = weight_of<A>(p, a, b, t, h0 + row);
    __syncthreads();
    for (int x = 0; x < kPerLane; ++x)  // NaN stays
      scorer.weights[row][lane + x * kLanes] = h0 + row < p.H ? weight * (u[x] < 0 ? A(0) : u[x]) : A(0);
    __syncthreads();
    if (threadIdx.x < kTileCols)
      for (int r = 0; r < kTileRows; ++r) score += scorer.weights[r][threadIdx.x];
  }
  return score;
}

// I of every visible entry of a row, to scores[e].
template <class A, class Args>
__device__ void score_entries(const Problem& p, const Args& a, const VisibleKeys& keys, Scorer<A>& scorer, int64_t b,
                              int64_t t, A* scores) {
  for (int64_t e0 = 0; e0 < p.E; e0 += kTileCols) {
    if (load_tile([&](int c) { return entry_row(p, a, keys, b, t, e0 + c); }, scorer.tile) == 0) continue;
    const A score = score_tile(p, a, scorer, b, t);
    if (threadIdx.x < kTileCols && scorer.tile.rows[threadIdx.x] != kNoRow) scores[e0 + threadIdx.x] = score;
  }
  __syncthreads();
}

// Of the visible entries of a row: the largest score, the sum of exp(I - top) and of p.
template <class A>
struct Softmax {
  A top;
  double sum, total;
};
template <class A, class Args>
__device__ Softmax<A> softmax_of(const Problem& p, const Args& a, const VisibleKeys& keys, int64_t b, int64_t t,
                                 const A* scores) {
  __shared__ double scratch[kThreads];
  __shared__ A tops[kThreads];
  A top = -A(INFINITY);
  for (int64_t e = threadIdx.x; e < p.E; e += kThreads)
    if (entry_row(p, a, keys, b, t, e) != kNoRow && scores[e] > top) top = scores[e];
  __syncthreads();
  tops[threadIdx.x] = top;
  for (int step = kThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < step && tops[threadIdx.x + step] > tops[threadIdx.x])
      tops[threadIdx.x] = tops[threadIdx.x + step];
  }
  __syncthreads();
  top = tops[0];
  double sum = 0, total = 0;
  for (int64_t e = threadIdx.x; e < p.E; e += kThreads) {
    if (entry_row(p, a, keys, b, t, e) == kNoRow) continue;
    sum += double(exp(scores[e] - top));
    if (is_there(a.p)) total += double(load_at<A>(a.p, offset_of(a.p, b, t, e)));
  }
  return {top, block_sum(sum, scratch), block_sum(total, scratch)};
}

template <class Args>
void prepare(const Problem& p, const Args& args, const Exec& exec, const Sequences& sequences) {
  SequenceLimits limits;
  limits.field = offsetof(Args, cu_seqlens_k);
  if (p.dense) limits.k_room = p.E;
  prepare_sequences(exec, sequences,
                    {args.cu_seqlens, args.cu_seqlens_k, args.q_lens, args.k_lens, offsetof(Args, cu_seqlens),
                     offsetof(Args, cu_seqlens_k), offsetof(Args, q_lens), offsetof(Args, k_lens)},
                    limits);
}

}  // namespace
}  // namespace thalweg::lightning_indexer
#endif
