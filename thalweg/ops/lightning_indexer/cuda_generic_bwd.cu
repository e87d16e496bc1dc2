// cuda_generic - lightning indexer, backward, any dtype and strides.
//
// Math     dI = d_loss ((sum p) y - p) + d_scores
//          d_w[h] = scale sum_e dI relu(u)    d_q[h] = scale w[h] sum_e dI H(u) k[s_e]
//          d_k[s] = sum_{t,h,e} dI scale w[h] H(u) q[h]
// Shapes   q [B T H K]  k [B S K]  w [B T H]  indices, p, d_scores [B T E]  d_loss [B T]
// Takes    anything valid
// Grid     queries: a block of 256 threads each, for dI, d_q and d_w; keys: a block of 8 warps each, y: 512 columns
// Tile     32 heads x 32 entries; a key's warps take every eighth pair of an entry and a head
// Smem     28 KiB static; keys: a row of sums
// Regs     a thread has 4 products and 32 (f64: 16) sums; keys: a lane has 16 sums
// Order    entries in the list's order; a key's entries by query and place, heads ascend, warps 0 to 7
// Numerics float32, float64 where q is; sums of the softmax, of p and of d_k in float64
// Traps    H(u) selects: a key that is not finite never meets a factor of 0. Lists are turned around with integer
//          atomics and sorted after
// Measured not tuned: it is the judge of the fast rows
#include "thalweg/cuda/inverse.cuh"
#include "thalweg/ops/lightning_indexer/cuda_generic.cuh"

namespace thalweg::lightning_indexer {
namespace {

using Args = thalweg_lightning_indexer_bwd_args;

struct Call {
  Problem p;
  Args args;
  Sequences sequences;
  void* gradients;

  template <class A>
  __device__ A* dI(int64_t row) const {
    return static_cast<A*>(gradients) + row * p.E;
  }
};

// Scores of row (b, t) to their gradients, where an entry is visible.
template <class A>
__device__ void differentiate(const Call& call, const VisibleKeys& keys, int64_t b, int64_t t, A* dI) {
  const Problem& p = call.p;
  const Args& a = call.args;
  Softmax<A> softmax{};
  A d_loss = 0;
  if (is_there(a.d_loss)) {
    softmax = softmax_of(p, a, keys, b, t, dI);
    d_loss = load_at<A>(a.d_loss, offset_of(a.d_loss, b, t));
  }
  const A factor = A(softmax.total / softmax.sum);
  __syncthreads();
  for (int64_t e = threadIdx.x; e < p.E; e += kThreads) {
    if (entry_row(p, a, keys, b, t, e) == kNoRow) continue;
    A x = 0;
    if (is_there(a.d_loss))
      x = d_loss * (factor * exp(dI[e] - softmax.top) - load_at<A>(a.p, offset_of(a.p, b, t, e)));
    if (is_there(a.d_scores)) x += load_at<A>(a.d_scores, offset_of(a.d_scores, b, t, e));
    dI[e] = x;
  }
  __syncthreads();
}

// d_w, and columns [first, first + kGroupColumns) of d_q, of heads h0 .. of row (b, t).
template <class A>
__device__ void finish_heads(const Call& call, Scorer<A>& scorer, const VisibleKeys& keys, int64_t b, int64_t t,
                             int64_t h0, int64_t first, const A* dI) {
  const Problem& p = call.p;
  const Args& a = call.args;
  const int row = row_of_thread(), lane = lane_of_thread();
  const int64_t h = h0 + row;
  A d_q[kGroups][2 * kVec<A>] = {}, d_w = 0;
  for (int64_t e0 = 0; e0 < p.E; e0 += kTileCols) {
    const uint32_t bits = load_tile([&](int c) { return entry_row(p, a, keys, b, t, e0 + c); }, scorer.tile);
    if (bits == 0) continue;
    A u[kPerLane], sum = 0;
    multiply_tile(p, a, scorer, b, t, h0, u);
    uint32_t mine = 0;
    for (int x = 0; x < kPerLane; ++x) {
      if (h >= p.H || !(bits_of_lane(bits) >> x & 1) || !(u[x] > 0)) continue;
      mine |= 1u << x;
      const A gradient = dI[e0 + lane + x * kLanes];
      sum = fused(gradient, u[x], sum);
      scorer.weights[row][lane + x * kLanes] = gradient;  // read where a bit is set
    }
    d_w += row_sum(sum);
    const uint32_t positive = row_bits(mine);
    auto key_at = [&](int c) {
      return scorer.tile.rows[c] != kNoRow ? offset_of(a.k, b, scorer.tile.rows[c]) : kNoRow;
    };
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      if (first + g * kChunk<A> < p.K)
        outer(scorer.stage, scorer.weights, positive, a.k, key_at, first + g * kChunk<A>, p.K, d_q[g]);
  }
  if (h >= p.H) return;
  // A query that sees nothing may be padding: its w is not read into a product.
  const A weight = keys.begin < keys.end ? weight_of<A>(p, a, b, t, h) : A(0);
  for (int x = 0; x < kGroups * 2 * kVec<A>; ++x) {
    A& gradient = d_q[x / (2 * kVec<A>)][x % (2 * kVec<A>)];
    gradient = keys.valid ? (keys.begin < keys.end ? gradient * weight : A(0)) : nan_of<A>();
  }
  if (is_there(a.d_q)) store_columns(a.d_q, offset_of(a.d_q, b, t, h), first, d_q);
  if (first == 0 && lane == 0 && is_there(a.d_w))
    store_at(a.d_w, offset_of(a.d_w, b, t, h), keys.valid ? A(p.scale) * d_w : nan_of<A>());
}

template <class A>
__global__ void __launch_bounds__(kThreads, 2) queries_kernel(Call call) {
  __shared__ Scorer<A> scorer;
  const Problem& p = call.p;
  const Args& a = call.args;
  for (int64_t r = blockIdx.x; r < p.B * p.T; r += gridDim.x) {
    const int64_t b = r / p.T, t = r % p.T;
    const VisibleKeys keys = visible_keys(p, a, call.sequences, b, t);
    A* dI = call.dI<A>(r);
    score_entries(p, a, keys, scorer, b, t, dI);
    differentiate(call, keys, b, t, dI);
    if (!is_there(a.d_q) && !is_there(a.d_w)) continue;
    for (int64_t h0 = 0; h0 < p.H; h0 += kTileRows)
      for (int64_t first = 0; first == 0 || first < p.K; first += kGroupColumns<A>)
        finish_heads(call, scorer, keys, b, t, h0, first, static_cast<const A*>(dI));
  }
}

// ---- d_k --------------------------------------------------------------------------------------------

constexpr int kWarps = kThreads / 32, kColumns = 16;  // columns of a lane

struct NamedKey {
  Problem p;
  Args args;
  Sequences sequences;
  __device__ int64_t operator()(int64_t slot) const {
    const int64_t row = slot / p.E, b = row / p.T, t = row % p.T;
    const int64_t key = entry_row(p, args, visible_keys(p, args, sequences, b, t), b, t, slot % p.E);
    return key == kNoRow ? -1 : b * p.S + key;
  }
};

// Adds the terms of one entry and head to a warp's row of d_k.
template <class A, class E>
__device__ void add_term(const Call& call, int64_t slot, int64_t h, int64_t b, int64_t j, int64_t first,
                         double (&sums)[kColumns]) {
  const Problem& p = call.p;
  const Args& a = call.args;
  const int64_t t = slot / p.E % p.T;
  const int lane = threadIdx.x % 32;
  const E *q = static_cast<const E*>(a.q.data) + offset_of(a.q, b, t, h),
          *k = static_cast<const E*>(a.k.data) + offset_of(a.k, b, j);
  A u = 0;
  for (int64_t c = lane; c < p.K; c += 32) u = fused(as_number(q[c], A(0)), as_number(k[c], A(0)), u);
  if (!(warp_sum(u) > 0)) return;
  const A factor = static_cast<const A*>(call.gradients)[slot] * weight_of<A>(p, a, b, t, h);
#pragma unroll
  for (int x = 0; x < kColumns; ++x)
    if (first + lane + x * 32 < p.K) sums[x] += double(factor * as_number(q[first + lane + x * 32], A(0)));
}

// A warp's share of the entries that name key j, or of the queries that see it.
template <class A, class E>
__device__ void add_terms(const Call& call, const Inverse& inverse, const Pair& pair, int64_t b, int64_t j,
                          int64_t first, double (&sums)[kColumns]) {
  const Problem& p = call.p;
  const int64_t begin = p.dense ? 0 : inverse.starts[b * p.S + j];
  const int64_t entries = p.dense ? pair.q_len : inverse.starts[b * p.S + j + 1] - begin;
  for (int64_t i = threadIdx.x / 32; i < entries * p.H; i += kWarps) {
    const int64_t t = pair.q_begin + i / p.H, position = j - pair.k_begin;
    if (p.dense && !visible_keys(p, call.args, call.sequences, b, t).has(position)) continue;
    const int64_t slot = p.dense ? (b * p.T + t) * p.E + position : inverse.slots[begin + i / p.H];
    add_term<A, E>(call, slot, i % p.H, b, j, first, sums);
  }
}

template <class A, class E>
__global__ void __launch_bounds__(kThreads) keys_kernel(Call call, Inverse inverse) {
  __shared__ double row[kColumns * 32];
  const Problem& p = call.p;
  const thalweg_tensor& d_k = call.args.d_k;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first = int64_t(blockIdx.y) * kColumns * 32;
  for (int64_t work = blockIdx.x; work < p.B * p.S; work += gridDim.x) {
    const int64_t b = work / p.S, j = work % p.S;
    const RowPlace place = place_of_key(call.sequences, b, j);
    double sums[kColumns] = {};
    if (place.used) add_terms<A, E>(call, inverse, call.sequences.pairs[place.n], b, j, first, sums);
    for (int w = 0; w < kWarps; ++w) {
      __syncthreads();
      if (warp != w) continue;
#pragma unroll
      for (int x = 0; x < kColumns; ++x) row[lane + x * 32] = (w > 0 ? row[lane + x * 32] : 0) + sums[x];
    }
    __syncthreads();
    for (int64_t c = threadIdx.x; c < kColumns * 32 && first + c < p.K; c += kThreads)
      store_at(d_k, offset_of(d_k, b, j) + first + c, place.valid ? row[c] : nan_of<double>());
    __syncthreads();
  }
}

template <class A, class E>
void backward(const Call& call, const Inverse& inverse, const Exec& exec) {
  const Problem& p = call.p;
  launch(exec, "lightning_indexer.bwd queries", queries_kernel<A>, {capped_grid(p.B * p.T)}, kThreads, 0, call);
  if (!p.wants_d_k) return;
  if (!p.dense) build_inverse(exec, inverse, NamedKey{p, call.args, call.sequences});
  launch(exec, "lightning_indexer.bwd keys", keys_kernel<A, E>,
         {capped_grid(p.B * p.S), ceil_div(p.K, kColumns * 32)}, kThreads, 0, call, inverse);
}

}  // namespace

void cuda_generic_bwd(const Problem& p, const Plan&, const Args& args, const Exec& exec) {
  const CudaWorkspace w = lay_out_cuda(p, CudaPass::kBwd, 0, exec.workspace);
  const Call call{p, args, w.sequences, w.scores};
  prepare(p, args, exec, w.sequences);
  switch (p.dtype) {
    case THALWEG_F64: return backward<double, double>(call, w.inverse, exec);
    case THALWEG_F32: return backward<float, float>(call, w.inverse, exec);
    case THALWEG_BF16: return backward<float, __nv_bfloat16>(call, w.inverse, exec);
    default: return backward<float, __half>(call, w.inverse, exec);
  }
}

}  // namespace thalweg::lightning_indexer
