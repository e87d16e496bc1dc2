// What the passes of cuda_generic share: what a query sees, a tile of its list, and p.
#ifndef THALWEG_OPS_SPARSE_FLASH_ATTENTION_CUDA_GENERIC_CUH
#define THALWEG_OPS_SPARSE_FLASH_ATTENTION_CUDA_GENERIC_CUH

#include <stddef.h>

#include "thalweg/cuda/attention.cuh"
#include "thalweg/cuda/sequences.cuh"
#include "thalweg/ops/sparse_flash_attention/cuda_workspace.h"

namespace thalweg::sparse_flash_attention {

// cuda_lists.cu: the lists of all queries.
void make_lists(const Problem& p, const thalweg_tensor& indices, const cuda::Sequences& sequences, const Lists& lists,
                const Exec& exec);

namespace {

using namespace cuda;

__device__ inline int64_t offset_of(const thalweg_tensor& t, int64_t i, int64_t j, int64_t k = 0) {
  return i * t.stride[0] + j * t.stride[1] + (t.rank > 2 ? k * t.stride[2] : 0);
}

// The query of row (b, t): positions below `limit` are visible, counted from row `first` of k[b].
struct VisibleRange {
  int64_t first, limit;
  bool used, valid;
};
__device__ inline int64_t limit_of(const Problem& p, const Pair& pair, int64_t t) {
  const int64_t causal = t - pair.q_begin + 1 + pair.k_len - pair.q_len;
  const int64_t limit = p.causal && causal < pair.k_len ? causal : pair.k_len;
  return limit > 0 ? limit : 0;
}
__device__ inline VisibleRange visible_range(const Problem& p, const Sequences& sequences, int64_t b, int64_t t) {
  const RowPlace place = place_of_query(sequences, b, t);
  if (!place.used) return {0, 0, false, place.valid};
  const Pair& pair = sequences.pairs[place.n];
  return {pair.k_begin, limit_of(p, pair, t), true, true};
}

__device__ inline int64_t entry_at(const thalweg_tensor& indices, int64_t b, int64_t t, int64_t e) {
  const int64_t at = offset_of(indices, b, t, e);
  return indices.dtype == THALWEG_I64 ? static_cast<const int64_t*>(indices.data)[at]
                                      : static_cast<const int32_t*>(indices.data)[at];
}
// Whether any position of it is visible; tested before it is multiplied.
__device__ inline bool is_visible(const Problem& p, int64_t entry, int64_t limit) {
  return entry >= 0 && limit > 0 && entry <= (limit - 1) / p.block;
}

// The list of one query, one position of an entry after the other.
struct List {
  const int32_t *entries, *counts;
  int64_t num_positions;  // those that the limit cuts off among them
};
__device__ inline List list_at(const Problem& p, const Lists& lists, int64_t b, int64_t t) {
  const int64_t row = b * p.T + t;
  return {lists.entries + row * p.E, lists.counts + row * p.E, lists.lengths[row] * p.block};
}

// kTileCols positions: rows of k[b], kNoRow where there is none, and how often they count.
struct ListTile {
  int64_t rows[kTileCols];
  int32_t counts[kTileCols];
  uint32_t bits;  // those that are there
};
// `entry_of(i)` and `count_of(i)` are of entry i of the list. All threads of the block come here and get the bits.
template <class EntryOf, class CountOf>
__device__ uint32_t fill_tile(const Problem& p, const VisibleRange& range, int64_t i0, int64_t num_positions,
                              EntryOf entry_of, CountOf count_of, ListTile& tile) {
  __syncthreads();
  if (threadIdx.x < kTileCols) {
    const int64_t i = i0 + threadIdx.x;
    const int64_t entry = i < num_positions ? entry_of(i / p.block) : -1;
    const int64_t position = is_visible(p, entry, range.limit) ? entry * p.block + i % p.block : range.limit;
    const int64_t row = position < range.limit ? range.first + position : kNoRow;
    tile.rows[threadIdx.x] = row;
    tile.counts[threadIdx.x] = row != kNoRow ? count_of(i / p.block) : 0;
    const uint32_t bits = __ballot_sync(0xffffffffu, row != kNoRow);
    if (threadIdx.x == 0) tile.bits = bits;
  }
  __syncthreads();
  return tile.bits;
}
// Positions [i0, i0 + kTileCols) of a list.
__device__ inline uint32_t load_tile(const Problem& p, const List& list, const VisibleRange& range, int64_t i0,
                                     ListTile& tile) {
  return fill_tile(
      p, range, i0, list.num_positions, [&](int64_t i) { return int64_t(list.entries[i]); },
      [&](int64_t i) { return list.counts[i]; }, tile);
}
// The same of the list as it was given.
__device__ inline uint32_t load_given_tile(const Problem& p, const thalweg_tensor& indices, const VisibleRange& range,
                                           int64_t b, int64_t t, int64_t i0, ListTile& tile) {
  return fill_tile(
      p, range, i0, p.E * p.block, [&](int64_t e) { return entry_at(indices, b, t, e); }, [](int64_t) { return 1; },
      tile);
}
template <class A>
__device__ void counts_of_lane(const ListTile& tile, A (&counts)[kPerLane]) {
  for (int x = 0; x < kPerLane; ++x) counts[x] = A(tile.counts[lane_of_thread() + x * kLanes]);
}
__device__ inline uint32_t bits_of_lane(uint32_t bits) {
  uint32_t mine = 0;
  for (int x = 0; x < kPerLane; ++x) mine |= (bits >> (lane_of_thread() + x * kLanes) & 1) << x;
  return mine;
}

// Where rows of a tensor lie: of heads h0 .. of a query, and of a tile's keys.
struct HeadRows {
  int64_t b, t, h0, H;
  __device__ auto of(const thalweg_tensor& tensor) const {
    return [&tensor, *this](int r) { return h0 + r < H ? offset_of(tensor, b, t, h0 + r) : kNoRow; };
  }
};
struct KeyRows {
  int64_t b;
  const ListTile& tile;
  __device__ auto of(const thalweg_tensor& tensor) const {
    return [&tensor, *this](int c) { return tile.rows[c] != kNoRow ? offset_of(tensor, b, tile.rows[c]) : kNoRow; };
  }
};

// Scaled scores of a tile of heads and slots.
template <class A, class Args>
__device__ void score_tile(Stage<A>& stage, const Problem& p, const Args& a, const HeadRows& heads, const KeyRows& keys,
                           A (&s)[kPerLane]) {
  for (int x = 0; x < kPerLane; ++x) s[x] = 0;
  inner(stage, a.q, heads.of(a.q), a.k, keys.of(a.k), p.K, s);
  if (p.KR > 0) inner(stage, a.q_rope, heads.of(a.q_rope), a.k_rope, keys.of(a.k_rope), p.KR, s);
  for (int x = 0; x < kPerLane; ++x) s[x] *= A(p.scale);
}

// A head's softmax: P = exp(s - m) / l; 0 everywhere where l is 0.
template <class A>
struct Softmax {
  A m, l;
};

// p [B T E]: the mean over heads of P, summed over the positions of an entry. A block for each query. Backward rows
// keep (L, delta): there P = exp(s - L).
template <class A, class Args>
__global__ void __launch_bounds__(kThreads) shares_kernel(Problem p, Args a, Sequences sequences,
                                                          const Softmax<A>* softmaxes, bool backward) {
  __shared__ Stage<A> stage;
  __shared__ Weights<A> weights;
  __shared__ ListTile tile;
  const int row = row_of_thread(), lane = lane_of_thread();
  for (int64_t work = blockIdx.x; work < p.B * p.T; work += gridDim.x) {
    const int64_t b = work / p.T, t = work % p.T;
    const VisibleRange range = visible_range(p, sequences, b, t);
    A of_entry = 0;  // of blocks of more than one tile
    for (int64_t i0 = 0; i0 < p.E * p.block; i0 += kTileCols) {
      const uint32_t bits = load_given_tile(p, a.indices, range, b, t, i0, tile);
      A share = 0;
      for (int64_t h0 = 0; h0 < p.H && bits != 0; h0 += kTileRows) {
        A s[kPerLane];
        score_tile(stage, p, a, HeadRows{b, t, h0, p.H}, KeyRows{b, tile}, s);
        Softmax<A> softmax{0, 0};
        if (h0 + row < p.H) softmax = softmaxes[work * p.H + h0 + row];
        if (backward) softmax = {softmax.m, isinf(softmax.m) || h0 + row >= p.H ? A(0) : A(1)};
        const uint32_t mine = softmax.l == 0 ? 0 : bits_of_lane(bits);
        for (int x = 0; x < kPerLane; ++x)
          weights[row][lane + x * kLanes] = mine >> x & 1 ? exp(s[x] - softmax.m) / softmax.l : A(0);
        __syncthreads();
        if (threadIdx.x < kTileCols)
          for (int r = 0; r < kTileRows; ++r) share += weights[r][threadIdx.x];
        __syncthreads();
      }
      if (threadIdx.x >= kTileCols) continue;
      share /= A(p.H);
      const int positions = p.block < kTileCols ? int(p.block) : kTileCols;
      A sum = share;
      for (int i = 1; i < positions; ++i) {
        const A other = __shfl_down_sync(0xffffffffu, share, i);
        sum += other;
      }
      of_entry += sum;
      const int64_t i = i0 + threadIdx.x, e = i / p.block;
      if (threadIdx.x % positions != 0 || e >= p.E || (i + positions) % p.block != 0) continue;
      store_at(a.p, offset_of(a.p, b, t, e), range.valid ? of_entry : nan_of<A>());
      of_entry = 0;
    }
  }
}

template <class Args>
void prepare(const Problem& p, const Args& args, const Exec& exec, const CudaWorkspace& w) {
  prepare_sequences(exec, w.sequences,
                    {args.cu_seqlens, args.cu_seqlens_k, args.q_lens, args.k_lens, offsetof(Args, cu_seqlens),
                     offsetof(Args, cu_seqlens_k), offsetof(Args, q_lens), offsetof(Args, k_lens)},
                    {});
  make_lists(p, args.indices, w.sequences, w.lists, exec);
}

}  // namespace
}  // namespace thalweg::sparse_flash_attention
#endif
