// cuda_generic - block_sparse_attention, fwd, any dtype and strides.
//
// Math      s_j = scale <q, k_j> of the keys that a query sees, 32 keys at a time; m, l = sum exp(s_j - m) and
//           o = sum exp(s_j - m) v_j are kept as they grow, the sink being the first term; o is divided by l at the end
// Shapes    q [B T H K]  k [B S HK K]  v [B S HK V]  block_mask [N HM NQ NK]  o [B T H V]
// Takes     everything valid
// Grid      x: a block of 256 threads for each head and tile of 32 queries of a sequence; y: chunks of V of 256 (f64:
//           128) columns, each of which computes the scores again. Rows of no sequence: a block for each token
// Tile      32 queries x 32 keys; tiles of the mask without a kept pair are skipped
// Smem      25 KiB static (f64: 26 KiB): a chunk of 64 (32) channels of queries and of keys or values, weights
// Regs      a thread has 4 scores and 32 (16) sums
// Order     keys ascend
// Numerics  float32 (float64 for f64); exponents of differences from the running maximum, none above 0
// Traps     what a query does not see is selected away, never multiplied by 0: it may be NaN
// Measured  not tuned: it is the judge of the fast rows
#include "thalweg/ops/block_sparse_attention/cuda_generic.cuh"

namespace thalweg::block_sparse_attention {
namespace {

using Args = thalweg_block_sparse_attention_fwd_args;

// A query's softmax so far, the same in all lanes of its row.
template <class A>
struct Softmax {
  A m, l;
  bool sees;
};

template <class A>
__device__ void store_softmax(const Args& a, int64_t b, int64_t t, int64_t h, const Softmax<A>& softmax) {
  const A lse = softmax.sees ? softmax.m + log(softmax.l) : -A(INFINITY);
  if (is_there(a.lse)) store_at(a.lse, offset_of(a.lse, b, t, h), lse);
  if (is_there(a.row_max)) store_at(a.row_max, offset_of(a.row_max, b, t, h), softmax.sees ? softmax.m : A(0));
  if (is_there(a.row_sum)) store_at(a.row_sum, offset_of(a.row_sum, b, t, h), softmax.sees ? softmax.l : A(0));
}

template <class A>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(Problem p, Args a, Sequences sequences, int64_t tiles) {
  __shared__ Stage<A> stage;
  __shared__ Weights<A> weights;
  const int row = row_of_thread(), lane = lane_of_thread();
  const int64_t first = blockIdx.y * kGroupColumns<A>;
  for (int64_t work = blockIdx.x; work < tiles * p.H; work += gridDim.x) {
    const int64_t h = work % p.H, hk = h / (p.H / p.HK);
    const Tile tile = tile_at(sequences, work / p.H, p.T, kTileRows, &Pair::q_begin);
    const Pair pair = sequences.pairs[tile.n];
    if (tile.first >= pair.q_len) continue;
    const int64_t b = batch_of(sequences, tile.n), i = tile.first + row, t = pair.q_begin + i;
    const bool used = i < pair.q_len;
    const HeadMask mask = head_mask(p, a.block_mask, pair, tile.n, h);
    Softmax<A> softmax{-A(INFINITY), 0, is_there(a.sink)};
    if (is_there(a.sink)) softmax.m = load_at<A>(a.sink, h * a.sink.stride[0]), softmax.l = 1;
    A o[kGroups][2 * kVec<A>] = {};
    auto query_at = [&](int r) {
      return tile.first + r < pair.q_len ? offset_of(a.q, b, pair.q_begin + tile.first + r, h) : kNoRow;
    };
    for (int64_t j0 = 0; j0 < pair.k_len; j0 += kTileCols) {
      uint32_t mine = 0;
      for (int x = 0; x < kPerLane; ++x) {
        const int64_t j = j0 + lane + x * kLanes;
        if (used && j < pair.k_len && mask.sees(i, j)) mine |= 1u << x;
      }
      if (!__syncthreads_or(int(mine))) continue;
      auto key_at = [&](const thalweg_tensor& tensor) {
        return [&](int c) { return j0 + c < pair.k_len ? offset_of(tensor, b, pair.k_begin + j0 + c, hk) : kNoRow; };
      };
      A s[kPerLane] = {};
      inner(stage, a.q, query_at, a.k, key_at(a.k), p.K, s);
      for (int x = 0; x < kPerLane; ++x) s[x] *= A(p.scale);
      const A once[kPerLane] = {1, 1, 1, 1};
      const A factor = add_to_softmax(mine, once, s, &softmax.m, &softmax.l);
      for (int x = 0; x < kPerLane; ++x) weights[row][lane + x * kLanes] = s[x];
      const uint32_t bits = row_bits(mine);
      softmax.sees = softmax.sees || bits != 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        for (int x = 0; x < 2 * kVec<A>; ++x) o[g][x] *= factor;
        if (first + g * kChunk<A> < p.V)
          outer(stage, weights, bits, a.v, key_at(a.v), first + g * kChunk<A>, p.V, o[g]);
      }
    }
    if (!used) continue;
    for (int x = 0; x < kGroups * 2 * kVec<A>; ++x) {
      A& sum = o[x / (2 * kVec<A>)][x % (2 * kVec<A>)];
      sum = softmax.sees ? sum / softmax.l : A(0);
    }
    store_columns(a.o, offset_of(a.o, b, t, h), first, o);
    if (first == 0 && lane == 0) store_softmax(a, b, t, h, softmax);
  }
}

__global__ void rest_kernel(Problem p, Args a, Sequences sequences) {
  for (int64_t r = blockIdx.x; r < p.B * p.T; r += gridDim.x) {
    const int64_t b = r / p.T, t = r % p.T;
    const RowPlace place = place_of_query(sequences, b, t);
    if (place.used) continue;
    fill_row(a.o, b, t, place.valid, 0);
    fill_row(a.lse, b, t, place.valid, -INFINITY);
    fill_row(a.row_max, b, t, place.valid, 0);
    fill_row(a.row_sum, b, t, place.valid, 0);
  }
}

template <class A>
void forward(const Problem& p, const Args& args, const Exec& exec, const Sequences& sequences) {
  const int64_t tiles = num_tiles(sequences, p.T, kTileRows);
  launch(exec, "block_sparse_attention.fwd cuda_generic", forward_kernel<A>,
         {capped_grid(tiles * p.H), ceil_div(p.V, kGroupColumns<A>)}, kThreads, 0, p, args, sequences, tiles);
}

}  // namespace

void cuda_generic_fwd(const Problem& p, const Plan&, const Args& args, const Exec& exec) {
  const CudaWorkspace w = lay_out_cuda(p, false, exec.workspace);
  prepare(p, args, exec, w.sequences);
  launch(exec, "block_sparse_attention.fwd rest", rest_kernel, {capped_grid(p.B * p.T)}, 128, 0, p, args, w.sequences);
  p.dtype == THALWEG_F64 ? forward<double>(p, args, exec, w.sequences) : forward<float>(p, args, exec, w.sequences);
}

}  // namespace thalweg::block_sparse_attention
