// cuda_generic - block_sparse_attention, bwd, any dtype and strides.
//
// Math      P_j = exp(s_j - L),  dS_j = P_j (<d_o, v_j> - delta),  delta = <d_o, o> - d_lse
//           d_q = scale sum_j dS_j k_j,  d_k_j = scale sum dS_j q,  d_v_j = sum P_j d_o,
//           d_sink = -sum exp(z - L) delta
// Shapes    q [B T H K]  k [B S HK K]  v [B S HK V]  block_mask [N HM NQ NK]  o, d_o [B T H V]  lse [B T H]
// Takes     everything valid
// Grid      five kernels: L and delta of every query and head; d_q of a tile of 32 queries of a head; d_k and d_v of a
//           tile of 32 keys of a key head; d_sink, a block a head; rows of no sequence. y: chunks of 256 (f64: 128)
//           columns of a gradient, each of which computes P and dS again
// Tile      32 rows x 32 columns of P; tiles of the mask without a kept pair are skipped
// Smem      26 to 35 KiB static
// Regs      a thread has 4 scores, 4 products and 32 (16) sums
// Order     d_q: keys ascend; d_k, d_v: heads of the key head, in each queries ascend; d_sink: 256 sums of every 256th
//           token, added as a tree
// Numerics  float32 (float64 for f64), d_sink in float64. A query that sees nothing has L = +inf; none of its rows is
//           read. delta is summed as <d_o, v_j> is, so that a query that sees one key has dS = 0
// Traps     delta is the diagonal of a tile of products: 32 times the work, and the very bits of the others
// Measured  not tuned: it is the judge of the fast rows
#include "thalweg/ops/block_sparse_attention/cuda_generic.cuh"

namespace thalweg::block_sparse_attention {
namespace {

using Args = thalweg_block_sparse_attention_bwd_args;

struct Call {
  Problem p;
  Args args;
  Sequences sequences;
  void* statistics;

  template <class A>
  __device__ Statistic<A>& statistic(int64_t b, int64_t t, int64_t h) const {
    return static_cast<Statistic<A>*>(statistics)[(b * p.T + t) * p.H + h];
  }
};

// L of a query, +inf where it sees nothing.
template <class A>
__device__ A log_sum(const Args& a, int64_t b, int64_t t, int64_t h) {
  double L, l = 1;
  if (is_there(a.lse)) {
    L = load_at<double>(a.lse, offset_of(a.lse, b, t, h));
  } else {
    l = load_at<double>(a.row_sum, offset_of(a.row_sum, b, t, h));
    L = load_at<double>(a.row_max, offset_of(a.row_max, b, t, h)) + log(l);
  }
  return l != 0 && isfinite(L) ? A(L) : A(INFINITY);
}

template <class A>
__global__ void __launch_bounds__(kThreads) statistics_kernel(Call call, int64_t tiles) {
  __shared__ Stage<A> stage;
  __shared__ bool alive[kTileRows];
  const Problem& p = call.p;
  const Args& a = call.args;
  const int row = row_of_thread(), lane = lane_of_thread();
  for (int64_t work = blockIdx.x; work < p.B * p.H * tiles; work += gridDim.x) {
    const int64_t h = work % p.H, first = work / p.H % tiles * kTileRows, b = work / p.H / tiles, t = first + row;
    const RowPlace place = t < p.T ? place_of_query(call.sequences, b, t) : RowPlace{0, false, true};
    const A L = place.used ? log_sum<A>(a, b, t, h) : A(INFINITY);
    __syncthreads();
    if (lane == 0) alive[row] = !isinf(L);
    __syncthreads();
    auto at = [&](const thalweg_tensor& tensor) {
      return [&](int i) { return alive[i] ? offset_of(tensor, b, first + i, h) : kNoRow; };
    };
    A s[kPerLane] = {};
    if (is_there(a.d_o)) inner(stage, a.d_o, at(a.d_o), a.o, at(a.o), p.V, s);
    A delta = diagonal_of(s);
    if (lane > 0 || t >= p.T) continue;
    if (isinf(L))
      delta = place.valid ? A(0) : nan_of<A>();
    else if (is_there(a.d_lse))
      delta -= load_at<A>(a.d_lse, offset_of(a.d_lse, b, t, h));
    call.statistic<A>(b, t, h) = {L, delta};
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads, 2) queries_kernel(Call call, int64_t tiles) {
  __shared__ Stage<A> stage;
  __shared__ Weights<A> weights;
  const Problem& p = call.p;
  const Args& a = call.args;
  const int row = row_of_thread(), lane = lane_of_thread();
  const int64_t first = blockIdx.y * kGroupColumns<A>;
  for (int64_t work = blockIdx.x; work < tiles * p.H; work += gridDim.x) {
    const int64_t h = work % p.H, hk = h / (p.H / p.HK);
    const Tile tile = tile_at(call.sequences, work / p.H, p.T, kTileRows, &Pair::q_begin);
    const Pair pair = call.sequences.pairs[tile.n];
    if (tile.first >= pair.q_len) continue;
    const int64_t b = batch_of(call.sequences, tile.n), i = tile.first + row, t = pair.q_begin + i;
    const HeadMask mask = head_mask(p, a.block_mask, pair, tile.n, h);
    const bool used = i < pair.q_len;
    const Statistic<A> statistic = used ? call.statistic<A>(b, t, h) : Statistic<A>{A(INFINITY), 0};
    const bool alive = !isinf(statistic.L);
    A d_q[kGroups][2 * kVec<A>] = {};
    auto query_at = [&](const thalweg_tensor& tensor) {
      return [&](int r) {
        return tile.first + r < pair.q_len ? offset_of(tensor, b, pair.q_begin + tile.first + r, h) : kNoRow;
      };
    };
    for (int64_t j0 = 0; j0 < pair.k_len; j0 += kTileCols) {
      uint32_t mine = 0;
      for (int x = 0; x < kPerLane; ++x) {
        const int64_t j = j0 + lane + x * kLanes;
        if (alive && j < pair.k_len && mask.sees(i, j)) mine |= 1u << x;
      }
      if (!__syncthreads_or(int(mine))) continue;
      auto key_at = [&](const thalweg_tensor& tensor) {
        return [&](int c) { return j0 + c < pair.k_len ? offset_of(tensor, b, pair.k_begin + j0 + c, hk) : kNoRow; };
      };
      A s[kPerLane] = {}, dP[kPerLane] = {};
      inner(stage, a.q, query_at(a.q), a.k, key_at(a.k), p.K, s);
      if (p.has_d_o) inner(stage, a.d_o, query_at(a.d_o), a.v, key_at(a.v), p.V, dP);
      for (int x = 0; x < kPerLane; ++x) {
        const A dS = exp(A(p.scale) * s[x] - statistic.L) * (dP[x] - statistic.delta);
        weights[row][lane + x * kLanes] = mine >> x & 1 ? A(p.scale) * dS : A(0);
      }
      const uint32_t bits = row_bits(mine);
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        if (first + g * kChunk<A> < p.K)
          outer(stage, weights, bits, a.k, key_at(a.k), first + g * kChunk<A>, p.K, d_q[g]);
    }
    if (used) store_columns(a.d_q, offset_of(a.d_q, b, t, h), first, d_q);
  }
}

// Chunk `index` of a key's gradients: of d_k, and behind them of d_v.
template <class A>
struct Chunk {
  bool of_value;
  int64_t first, width;
  __device__ Chunk(const Problem& p, int64_t index) {
    const int64_t of_key = (p.K + kChunk<A> - 1) / kChunk<A>;
    of_value = index >= of_key;
    first = (of_value ? index - of_key : index) * kChunk<A>;
    width = of_value ? p.V : p.K;
  }
};

template <class A>
__global__ void __launch_bounds__(kThreads, 2) keys_kernel(Call call, int64_t tiles) {
  __shared__ Stage<A> stage;
  __shared__ Weights<A> P, dS;
  const Problem& p = call.p;
  const Args& a = call.args;
  const int row = row_of_thread(), lane = lane_of_thread();
  for (int64_t work = blockIdx.x; work < tiles * p.HK; work += gridDim.x) {
    const int64_t hk = work % p.HK, G = p.H / p.HK;
    const Tile tile = tile_at(call.sequences, work / p.HK, p.S, kTileRows, &Pair::k_begin);
    const Pair pair = call.sequences.pairs[tile.n];
    if (tile.first >= pair.k_len) continue;
    const int64_t b = batch_of(call.sequences, tile.n), j = tile.first + row;
    const bool used = j < pair.k_len;
    A sums[kGroups][2 * kVec<A>] = {};
    auto key_at = [&](const thalweg_tensor& tensor) {
      return [&](int r) {
        return tile.first + r < pair.k_len ? offset_of(tensor, b, pair.k_begin + tile.first + r, hk) : kNoRow;
      };
    };
    for (int64_t h = hk * G; h < (hk + 1) * G; ++h) {
      const HeadMask mask = head_mask(p, a.block_mask, pair, tile.n, h);
      const int64_t earliest = p.causal && tile.first > mask.offset ? tile.first - mask.offset : 0;
      for (int64_t i0 = earliest / kTileCols * kTileCols; i0 < pair.q_len; i0 += kTileCols) {
        Statistic<A> statistic[kPerLane];
        uint32_t mine = 0;
        for (int x = 0; x < kPerLane; ++x) {
          const int64_t i = i0 + lane + x * kLanes;
          statistic[x] = {A(INFINITY), 0};
          if (!used || i >= pair.q_len || !mask.sees(i, j)) continue;
          statistic[x] = call.statistic<A>(b, pair.q_begin + i, h);
          if (!isinf(statistic[x].L)) mine |= 1u << x;
        }
        if (!__syncthreads_or(int(mine))) continue;
        auto query_at = [&](const thalweg_tensor& tensor) {
          return [&](int c) { return i0 + c < pair.q_len ? offset_of(tensor, b, pair.q_begin + i0 + c, h) : kNoRow; };
        };
        A s[kPerLane] = {}, dP[kPerLane] = {};
        inner(stage, a.k, key_at(a.k), a.q, query_at(a.q), p.K, s);
        if (p.has_d_o) inner(stage, a.v, key_at(a.v), a.d_o, query_at(a.d_o), p.V, dP);
        for (int x = 0; x < kPerLane; ++x) {
          const A weight = mine >> x & 1 ? exp(A(p.scale) * s[x] - statistic[x].L) : A(0);
          P[row][lane + x * kLanes] = weight;
          dS[row][lane + x * kLanes] = mine >> x & 1 ? A(p.scale) * weight * (dP[x] - statistic[x].delta) : A(0);
        }
        const uint32_t bits = row_bits(mine);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const Chunk<A> chunk(p, int64_t(blockIdx.y) * kGroups + g);
          if (!chunk.of_value)
            outer(stage, dS, bits, a.q, query_at(a.q), chunk.first, chunk.width, sums[g]);
          else if (chunk.first < chunk.width && p.has_d_o)
            outer(stage, P, bits, a.d_o, query_at(a.d_o), chunk.first, chunk.width, sums[g]);
        }
      }
    }
    if (!used) continue;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const Chunk<A> chunk(p, int64_t(blockIdx.y) * kGroups + g);
      const thalweg_tensor& out = chunk.of_value ? a.d_v : a.d_k;
      if (is_there(out)) store_chunk(out, offset_of(out, b, pair.k_begin + j, hk), chunk.first, sums[g]);
    }
  }
}

__global__ void rest_kernel(Call call) {
  const Problem& p = call.p;
  for (int64_t r = blockIdx.x; r < p.B * (p.T + p.S); r += gridDim.x) {
    const bool query = r < p.B * p.T;
    const int64_t row = query ? r : r - p.B * p.T, tokens = query ? p.T : p.S, b = row / tokens, token = row % tokens;
    const RowPlace place = query ? place_of_query(call.sequences, b, token) : place_of_key(call.sequences, b, token);
    if (place.used) continue;
    if (query) {
      fill_row(call.args.d_q, b, token, place.valid, 0);
    } else {
      fill_row(call.args.d_k, b, token, place.valid, 0);
      fill_row(call.args.d_v, b, token, place.valid, 0);
    }
  }
}

template <class A>
void backward(const Call& call, const Exec& exec) {
  const Problem& p = call.p;
  const Args& a = call.args;
  const int64_t rows = ceil_div(p.T, kTileRows), q_tiles = num_tiles(call.sequences, p.T, kTileRows),
                k_tiles = num_tiles(call.sequences, p.S, kTileRows),
                chunks = ceil_div(p.K, kChunk<A>) + ceil_div(p.V, kChunk<A>);
  launch(exec, "block_sparse_attention.bwd statistics", statistics_kernel<A>, {capped_grid(p.B * p.H * rows)}, kThreads,
         0, call, rows);
  if (is_there(a.d_q))
    launch(exec, "block_sparse_attention.bwd queries", queries_kernel<A>,
           {capped_grid(q_tiles * p.H), ceil_div(p.K, kGroupColumns<A>)}, kThreads, 0, call, q_tiles);
  if (is_there(a.d_k) || is_there(a.d_v))
    launch(exec, "block_sparse_attention.bwd keys", keys_kernel<A>,
           {capped_grid(k_tiles * p.HK), ceil_div(chunks, kGroups)}, kThreads, 0, call, k_tiles);
  if (is_there(a.d_sink))
    sum_sink(exec, static_cast<const Statistic<A>*>(call.statistics), p.B * p.T, p.H, a.sink, a.d_sink);
}

}  // namespace

void cuda_generic_bwd(const Problem& p, const Plan&, const Args& args, const Exec& exec) {
  const CudaWorkspace w = lay_out_cuda(p, true, exec.workspace);
  const Call call{p, args, w.sequences, w.statistics};
  prepare(p, args, exec, w.sequences);
  launch(exec, "block_sparse_attention.bwd rest", rest_kernel, {capped_grid(p.B * (p.T + p.S))}, 128, 0, call);
  p.dtype == THALWEG_F64 ? backward<double>(call, exec) : backward<float>(call, exec);
}

}  // namespace thalweg::block_sparse_attention
