// cuda_generic - sparse flash attention, backward, any dtype and strides: statistics, d_q, d_sink and p. The gradients
// of keys and values are in cuda_generic_keys.cu.
//
// Math      L as given, or computed again; delta = <d_o, o> - d_lse, or sum_j P_j <d_o, v_j> - d_lse where o is absent;
//           dS_j = P_j (<d_o, v_j> - delta), d_q = scale sum_j dS_j k_j; P_j with the key's multiplicity.
//           A query that sees one key (often, perhaps) and no sink has dS_j = P_j d_lse, exactly
// Shapes    q, d_q [B T H K] k [B S K] v [B S V] q_rope [B T H KR] k_rope [B S KR] indices [B T E] o, d_o [B T H V]
// Takes     anything valid
// Grid      statistics: a block of 256 threads for each query and 32 of its heads; d_q: likewise, y: 256 (f64: 128)
//           columns of d_q and d_q_rope, each of which computes P and dS again; p: a block a query
// Tile      32 heads x 32 keys
// Smem      26 KiB static
// Regs      a thread has 4 scores, 4 products and 32 (16) sums
// Order     keys ascend; d_sink: 256 sums of every 256th query, added as a tree
// Numerics  float32 (float64 for f64), d_sink in float64
// Traps     delta from o is the diagonal of a tile of products: 32 times the work, and the very bits of the others
// Measured  not tuned: it is the judge of the fast rows
#include "thalweg/ops/sparse_flash_attention/cuda_generic_bwd.cuh"

namespace thalweg::sparse_flash_attention {
namespace {

// Whether a query sees exactly one position.
__device__ bool sees_one(const Problem& p, const List& list, const VisibleRange& range) {
  if (list.num_positions != p.block) return false;
  return p.block == 1 || range.limit - int64_t(list.entries[0]) * p.block == 1;
}

// L of a head from what was kept of the forward.
template <class A>
__device__ A kept_log_sum(const Args& a, int64_t b, int64_t t, int64_t h) {
  const A L = is_there(a.lse) ? load_at<A>(a.lse, offset_of(a.lse, b, t, h))
                              : load_at<A>(a.row_max, offset_of(a.row_max, b, t, h)) +
                                    log(load_at<A>(a.row_sum, offset_of(a.row_sum, b, t, h)));
  return isfinite(L) ? L : A(INFINITY);
}

// Shared memory of a block that walks a list.
template <class A>
struct Walk {
  Stage<A> stage;
  Weights<A> weights;
  ListTile tile;
};

// One block for the query's heads h0 ..: L and delta of each, the same in all lanes of its row.
template <class A>
__device__ Statistic<A> find_statistic(const Call& call, Walk<A>& walk, const VisibleRange& range, int64_t b, int64_t t,
                                       int64_t h0) {
  const Problem& p = call.p;
  const Args& a = call.args;
  const int64_t h = h0 + row_of_thread();
  const thalweg_tensor& value = p.latent ? a.k : a.v;
  const HeadRows heads{b, t, h0, p.H};
  const KeyRows keys{b, walk.tile};
  const List list = list_at(p, call.lists, b, t);
  Statistic<A> found{A(INFINITY), 0};
  if (p.has_lse || p.has_row_sum) {
    if (h < p.H) found.L = kept_log_sum<A>(a, b, t, h);
  } else {
    Softmax<A> softmax{-A(INFINITY), 0};
    if (h < p.H && is_there(a.sink)) softmax = {load_at<A>(a.sink, h * a.sink.stride[0]), 1};
    for (int64_t i0 = 0; i0 < list.num_positions; i0 += kTileCols) {
      const uint32_t bits = load_tile(p, list, range, i0, walk.tile);
      if (bits == 0) continue;
      A s[kPerLane], counts[kPerLane];
      counts_of_lane(walk.tile, counts);
      score_tile(walk.stage, p, a, heads, keys, s);
      add_to_softmax(bits_of_lane(bits), counts, s, &softmax.m, &softmax.l);
    }
    found.L = softmax.m == -A(INFINITY) || softmax.l == 0 ? A(INFINITY) : softmax.m + log(softmax.l);
  }
  if (p.has_o) {
    A products[kPerLane] = {};
    inner(walk.stage, a.d_o, heads.of(a.d_o), a.o, heads.of(a.o), p.V, products);
    found.delta = diagonal_of(products);
  } else {
    for (int64_t i0 = 0; i0 < list.num_positions; i0 += kTileCols) {
      const uint32_t bits = load_tile(p, list, range, i0, walk.tile);
      if (bits == 0) continue;
      A s[kPerLane], counts[kPerLane], dP[kPerLane] = {}, sum = 0;
      counts_of_lane(walk.tile, counts);
      score_tile(walk.stage, p, a, heads, keys, s);
      inner(walk.stage, a.d_o, heads.of(a.d_o), value, keys.of(value), p.V, dP);
      for (int x = 0; x < kPerLane; ++x)
        sum += bits_of_lane(bits) >> x & 1 ? counts[x] * exp(s[x] - found.L) * dP[x] : A(0);
      found.delta += row_sum(sum);
    }
  }
  if (isinf(found.L))
    found.delta = 0;
  else if (is_there(a.d_lse) && h < p.H)
    found.delta -= load_at<A>(a.d_lse, offset_of(a.d_lse, b, t, h));
  return found;
}

template <class A>
__global__ void __launch_bounds__(kThreads) statistics_kernel(Call call) {
  __shared__ Walk<A> walk;
  const Problem& p = call.p;
  const int64_t head_tiles = (p.H + kTileRows - 1) / kTileRows;
  for (int64_t work = blockIdx.x; work < p.B * p.T * head_tiles; work += gridDim.x) {
    const int64_t b = work / head_tiles / p.T, t = work / head_tiles % p.T, h0 = work % head_tiles * kTileRows;
    const VisibleRange range = visible_range(p, call.sequences, b, t);
    Statistic<A> found{A(INFINITY), range.valid ? A(0) : nan_of<A>()};
    if (range.used) found = find_statistic(call, walk, range, b, t, h0);
    const int64_t h = h0 + row_of_thread();
    if (threadIdx.x == 0 && h0 == 0)
      call.alone[b * p.T + t] = !is_there(call.args.sink) && sees_one(p, list_at(p, call.lists, b, t), range);
    if (h < p.H && lane_of_thread() == 0) call.statistics<A>()[(b * p.T + t) * p.H + h] = found;
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads, 2) queries_kernel(Call call) {
  __shared__ Walk<A> walk;
  const Problem& p = call.p;
  const Args& a = call.args;
  const int row = row_of_thread(), lane = lane_of_thread();
  const int64_t head_tiles = (p.H + kTileRows - 1) / kTileRows, of_key = (p.K + kChunk<A> - 1) / kChunk<A>;
  for (int64_t work = blockIdx.x; work < p.B * p.T * head_tiles; work += gridDim.x) {
    const int64_t b = work / head_tiles / p.T, t = work / head_tiles % p.T;
    const int64_t h0 = work % head_tiles * kTileRows, h = h0 + row;
    const VisibleRange range = visible_range(p, call.sequences, b, t);
    const thalweg_tensor& value = p.latent ? a.k : a.v;
    const HeadRows heads{b, t, h0, p.H};
    const KeyRows keys{b, walk.tile};
    Statistic<A> statistic{A(INFINITY), 0};
    if (h < p.H) statistic = call.statistics<A>()[(b * p.T + t) * p.H + h];
    A d_q[kGroups][2 * kVec<A>] = {};
    const List list = list_at(p, call.lists, b, t);
    for (int64_t i0 = 0; i0 < list.num_positions; i0 += kTileCols) {
      const uint32_t all = load_tile(p, list, range, i0, walk.tile), bits = isinf(statistic.L) ? 0 : all;
      if (all == 0) continue;
      A s[kPerLane], counts[kPerLane], dP[kPerLane] = {};
      counts_of_lane(walk.tile, counts);
      score_tile(walk.stage, p, a, heads, keys, s);
      inner(walk.stage, a.d_o, heads.of(a.d_o), value, keys.of(value), p.V, dP);
      for (int x = 0; x < kPerLane && bits != 0; ++x)  // read where a bit is set
        walk.weights[row][lane + x * kLanes] =
            A(p.scale) * score_gradient(call, statistic, b, t, h, counts[x] * exp(s[x] - statistic.L), dP[x]);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int64_t chunk = int64_t(blockIdx.y) * kGroups + g;
        if (chunk < of_key)
          outer(walk.stage, walk.weights, bits, a.k, keys.of(a.k), chunk * kChunk<A>, p.K, d_q[g]);
        else if ((chunk - of_key) * kChunk<A> < p.KR)
          outer(walk.stage, walk.weights, bits, a.k_rope, keys.of(a.k_rope), (chunk - of_key) * kChunk<A>, p.KR,
                d_q[g]);
      }
    }
    if (h >= p.H) continue;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int64_t chunk = int64_t(blockIdx.y) * kGroups + g;
      for (int x = 0; x < 2 * kVec<A>; ++x) d_q[g][x] = range.valid ? d_q[g][x] : nan_of<A>();
      if (chunk < of_key && is_there(a.d_q))
        store_chunk(a.d_q, offset_of(a.d_q, b, t, h), chunk * kChunk<A>, d_q[g]);
      if (chunk >= of_key && is_there(a.d_q_rope))
        store_chunk(a.d_q_rope, offset_of(a.d_q_rope, b, t, h), (chunk - of_key) * kChunk<A>, d_q[g]);
    }
  }
}

template <class A>
void backward(const Call& call, const Exec& exec) {
  const Problem& p = call.p;
  const Args& a = call.args;
  const int64_t tiles = capped_grid(p.B * p.T * ceil_div(p.H, kTileRows)),
                chunks = ceil_div(p.K, kChunk<A>) + ceil_div(p.KR, kChunk<A>);
  launch(exec, "sparse_flash_attention.bwd statistics", statistics_kernel<A>, {tiles}, kThreads, 0, call);
  if (p.wants_d_q)
    launch(exec, "sparse_flash_attention.bwd queries", queries_kernel<A>, {tiles, ceil_div(chunks, kGroups)}, kThreads,
           0, call);
  if (p.wants_d_sink) sum_sink(exec, call.statistics<A>(), p.B * p.T, p.H, a.sink, a.d_sink);
  if (p.wants_p)
    launch(exec, "sparse_flash_attention.bwd p", shares_kernel<A, Args>, {capped_grid(p.B * p.T)}, kThreads, 0, p, a,
           call.sequences, static_cast<const Softmax<A>*>(call.kept), true);
}

}  // namespace

void cuda_generic_bwd(const Problem& p, const Plan&, const Args& args, const Exec& exec) {
  const CudaWorkspace w = lay_out_cuda(p, true, exec.workspace);
  const Call call{p, args, w.sequences, w.lists, w.statistics, w.alone};
  prepare(p, args, exec, w);
  p.dtype == THALWEG_F64 ? backward<double>(call, exec) : backward<float>(call, exec);
  if (p.wants_d_kv) cuda_generic_keys(call, w.inverse, exec);
}

}  // namespace thalweg::sparse_flash_attention
