// cuda_generic - sparse flash attention, forward, any dtype and strides.
//
// Math      as cpu_generic: each visible key once and its multiplicity as a weight (cuda_lists.cu); scores of 32 heads
//           and 32 keys at a time; m, l and o grow as in block_sparse_attention's row; p by a second kernel, from
//           scores computed again and the final m and l
// Shapes    q [B T H K] k [B S K] v [B S V] q_rope [B T H KR] k_rope [B S KR] indices [B T E] o [B T H V]
// Takes     anything valid
// Grid      x: a block of 256 threads for each query and 32 of its heads; y: chunks of V of 256 (f64: 128) columns,
//           each of which computes the scores again. p: a block a query
// Tile      32 heads x 32 keys
// Smem      26 KiB static
// Regs      a thread has 4 scores and 32 (16) sums
// Order     keys ascend; p: heads ascend
// Numerics  float32 (float64 for f64)
// Traps     an entry that is skipped makes no address
// Measured  not tuned: it is the judge of the fast rows
#include "thalweg/ops/sparse_flash_attention/cuda_generic.cuh"

namespace thalweg::sparse_flash_attention {
namespace {

using Args = thalweg_sparse_flash_attention_fwd_args;

template <class A>
__device__ void store_softmax(const Args& a, int64_t b, int64_t t, int64_t h, const Softmax<A>& softmax, bool sums) {
  const A lse = sums ? softmax.m + log(softmax.l) : -A(INFINITY);
  if (is_there(a.lse)) store_at(a.lse, offset_of(a.lse, b, t, h), lse);
  if (is_there(a.row_max)) store_at(a.row_max, offset_of(a.row_max, b, t, h), softmax.m);
  if (is_there(a.row_sum)) store_at(a.row_sum, offset_of(a.row_sum, b, t, h), softmax.l);
}

template <class A>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(Problem p, Args a, Sequences sequences, Lists lists,
                                                              Softmax<A>* softmaxes) {
  __shared__ Stage<A> stage;
  __shared__ Weights<A> weights;
  __shared__ ListTile tile;
  const int row = row_of_thread(), lane = lane_of_thread();
  const int64_t first = blockIdx.y * kGroupColumns<A>, head_tiles = (p.H + kTileRows - 1) / kTileRows;
  for (int64_t work = blockIdx.x; work < p.B * p.T * head_tiles; work += gridDim.x) {
    const int64_t b = work / head_tiles / p.T, t = work / head_tiles % p.T;
    const int64_t h0 = work % head_tiles * kTileRows, h = h0 + row;
    const VisibleRange range = visible_range(p, sequences, b, t);
    const bool sinks = range.used && h < p.H && is_there(a.sink);
    Softmax<A> softmax{-A(INFINITY), 0};
    if (sinks) softmax = {load_at<A>(a.sink, h * a.sink.stride[0]), 1};
    A o[kGroups][2 * kVec<A>] = {};
    const List list = list_at(p, lists, b, t);
    for (int64_t i0 = 0; i0 < list.num_positions; i0 += kTileCols) {
      const uint32_t all = load_tile(p, list, range, i0, tile), bits = h < p.H ? all : 0;
      if (all == 0) continue;
      A s[kPerLane], counts[kPerLane];
      counts_of_lane(tile, counts);
      score_tile(stage, p, a, HeadRows{b, t, h0, p.H}, KeyRows{b, tile}, s);
      const A factor = add_to_softmax(bits_of_lane(bits), counts, s, &softmax.m, &softmax.l);
      for (int x = 0; x < kPerLane; ++x) weights[row][lane + x * kLanes] = s[x];
      const thalweg_tensor& value = p.latent ? a.k : a.v;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        for (int x = 0; x < 2 * kVec<A>; ++x) o[g][x] *= factor;
        if (first + g * kChunk<A> < p.V)
          outer(stage, weights, bits, value, KeyRows{b, tile}.of(value), first + g * kChunk<A>, p.V, o[g]);
      }
    }
    if (h >= p.H) continue;
    if (softmax.m == -A(INFINITY)) softmax = {0, 0};  // nothing, or terms of 0 alone
    if (!range.valid) softmax = {nan_of<A>(), nan_of<A>()};
    for (int x = 0; x < kGroups * 2 * kVec<A>; ++x) {
      A& sum = o[x / (2 * kVec<A>)][x % (2 * kVec<A>)];
      sum = softmax.l == 0 ? A(0) : sum / softmax.l;
    }
    store_columns(a.o, offset_of(a.o, b, t, h), first, o);
    if (first > 0 || lane > 0) continue;
    store_softmax(a, b, t, h, softmax, softmax.l != 0);
    if (p.wants_p) softmaxes[(b * p.T + t) * p.H + h] = softmax;
  }
}

template <class A>
void forward(const Problem& p, const Args& args, const Exec& exec, const CudaWorkspace& w) {
  auto* softmaxes = static_cast<Softmax<A>*>(w.statistics);
  const int64_t chunks = p.V > kGroupColumns<A> ? ceil_div(p.V, kGroupColumns<A>) : 1;
  launch(exec, "sparse_flash_attention.fwd cuda_generic", forward_kernel<A>,
         {capped_grid(p.B * p.T * ceil_div(p.H, kTileRows)), chunks}, kThreads, 0, p, args, w.sequences,
         w.lists, softmaxes);
  if (p.wants_p)
    launch(exec, "sparse_flash_attention.fwd p", shares_kernel<A, Args>, {capped_grid(p.B * p.T)}, kThreads, 0, p, args,
           w.sequences, softmaxes, false);
}

}  // namespace

void cuda_generic_fwd(const Problem& p, const Plan&, const Args& args, const Exec& exec) {
  const CudaWorkspace w = lay_out_cuda(p, false, exec.workspace);
  prepare(p, args, exec, w);
  p.dtype == THALWEG_F64 ? forward<double>(p, args, exec, w) : forward<float>(p, args, exec, w);
}

}  // namespace thalweg::sparse_flash_attention
