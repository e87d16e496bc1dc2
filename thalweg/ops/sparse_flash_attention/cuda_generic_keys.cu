// cuda_generic - sparse flash attention, backward, any dtype and strides: d_k, d_k_rope and d_v.
//
// Math      d_k_j = scale sum dS_j q, d_v_j = sum P_j d_o over the queries whose lists name j and their heads; P and dS
//           from scores and products computed again
// Shapes    q [B T H K] k, d_k [B S K] v, d_v [B S V] q_rope [B T H KR] k_rope [B S KR] d_o [B T H V]
// Takes     anything valid
// Grid      x: a block of 8 warps a key; y: 576 columns of its gradients, each of which computes P and dS again
// Tile      a warp takes every eighth pair of a query that lists the key and a head; channels lie along its lanes
// Smem      a row of sums
// Regs      a lane has 18 sums
// Order     queries, heads ascend; a warp's own pairs, then warps 0 to 7
// Numerics  float32 (float64 for f64)
// Traps     lists are turned around with integer atomics and sorted after, so sums have one order. Where the value is
//           the latent, its gradient is added to the first V columns of d_k
// Measured  not tuned: it is the judge of the fast rows
#include "thalweg/cuda/inverse.cuh"
#include "thalweg/ops/sparse_flash_attention/cuda_generic_bwd.cuh"

namespace thalweg::sparse_flash_attention {
namespace {

constexpr int kWarps = kThreads / 32, kColumns = 18;  // columns of a lane

// The block of positions that a key of sequence n is in, as num_key_blocks() counts them.
__device__ int64_t block_of(const Problem& p, const Pair& pair, int64_t n, int64_t position) {
  return (p.packed ? pair.k_begin / p.block + n : n * ((p.S + p.block - 1) / p.block)) + position / p.block;
}

// The block that place `slot` of the queries' lists names.
struct NamedBlock {
  Problem p;
  Lists lists;
  Sequences sequences;
  __device__ int64_t operator()(int64_t slot) const {
    const int64_t row = slot / p.E;
    if (slot % p.E >= lists.lengths[row]) return -1;
    const RowPlace place = place_of_query(sequences, row / p.T, row % p.T);
    return block_of(p, sequences.pairs[place.n], place.n, int64_t(lists.entries[slot]) * p.block);
  }
};

template <class A, class E>
struct Rows {
  const E *q, *q_rope, *d_o, *k, *k_rope, *v;
};
template <class E>
__device__ const E* row_at(const thalweg_tensor& t, int64_t i, int64_t j, int64_t k = 0) {
  return is_there(t) ? static_cast<const E*>(t.data) + offset_of(t, i, j, k) : nullptr;
}
template <class A, class E>
__device__ A dot(const E* x, const E* y, int64_t n) {
  A sum = 0;
  for (int64_t c = threadIdx.x % 32; c < n; c += 32) sum = fused(as_number(x[c], A(0)), as_number(y[c], A(0)), sum);
  return sum;
}

// Column c of [d_k | d_k_rope | d_v], of one pair.
template <class A, class E>
__device__ A term(const Problem& p, const Rows<A, E>& rows, int64_t c, A P, A dS) {
  A sum = 0;
  if (c < p.K) sum = dS * as_number(rows.q[c], A(0));
  else if (c < p.K + p.KR) sum = dS * as_number(rows.q_rope[c - p.K], A(0));
  const int64_t of_value = p.latent ? c : c - p.K - p.KR;
  if (of_value >= 0 && of_value < p.V) sum = fused(P, as_number(rows.d_o[of_value], A(0)), sum);
  return sum;
}

template <class A>
__device__ void store_column(const Call& call, int64_t b, int64_t j, int64_t c, A x) {
  const Problem& p = call.p;
  const Args& a = call.args;
  if (c < p.K) {
    if (is_there(a.d_k)) store_at(a.d_k, offset_of(a.d_k, b, j) + c, x);
  } else if (c < p.K + p.KR) {
    if (is_there(a.d_k_rope)) store_at(a.d_k_rope, offset_of(a.d_k_rope, b, j) + c - p.K, x);
  } else if (is_there(a.d_v)) {
    store_at(a.d_v, offset_of(a.d_v, b, j) + c - p.K - p.KR, x);
  }
}

// A warp's share of the pairs that see key (b, j) of sequence n.
template <class A, class E>
__device__ void add_pairs(const Call& call, const Inverse& inverse, const Pair& pair, int64_t n, int64_t b, int64_t j,
                          int64_t first, int64_t width, A (&sums)[kColumns]) {
  const Problem& p = call.p;
  const Args& a = call.args;
  const int64_t position = j - pair.k_begin, id = block_of(p, pair, n, position);
  const int64_t begin = inverse.starts[id], pairs = (inverse.starts[id + 1] - begin) * p.H;
  for (int64_t i = threadIdx.x / 32; i < pairs; i += kWarps) {
    const int64_t slot = inverse.slots[begin + i / p.H], row = slot / p.E, t = row % p.T, h = i % p.H;
    if (position >= limit_of(p, pair, t)) continue;
    const Statistic<A> statistic = call.statistics<A>()[row * p.H + h];
    if (isinf(statistic.L)) continue;
    const thalweg_tensor& value = p.latent ? a.k : a.v;
    const Rows<A, E> rows{row_at<E>(a.q, b, t, h), row_at<E>(a.q_rope, b, t, h), row_at<E>(a.d_o, b, t, h),
                          row_at<E>(a.k, b, j),    row_at<E>(a.k_rope, b, j),    row_at<E>(value, b, j)};
    const A s = A(p.scale) * warp_sum(dot<A>(rows.q, rows.k, p.K) + dot<A>(rows.q_rope, rows.k_rope, p.KR));
    const A P = A(call.lists.counts[slot]) * exp(s - statistic.L), dP = warp_sum(dot<A>(rows.d_o, rows.v, p.V));
    const A dS = A(p.scale) * score_gradient(call, statistic, b, t, h, P, dP);
#pragma unroll
    for (int x = 0; x < kColumns; ++x) {
      const int64_t c = first + threadIdx.x % 32 + x * 32;
      if (c < width) sums[x] += term(p, rows, c, P, dS);
    }
  }
}

template <class A, class E>
__global__ void __launch_bounds__(kThreads) keys_kernel(Call call, Inverse inverse) {
  __shared__ A row[kColumns * 32];
  const Problem& p = call.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first = int64_t(blockIdx.y) * kColumns * 32, width = p.K + p.KR + (p.latent ? 0 : p.V);
  for (int64_t work = blockIdx.x; work < p.B * p.S; work += gridDim.x) {
    const int64_t b = work / p.S, j = work % p.S;
    const RowPlace place = place_of_key(call.sequences, b, j);
    A sums[kColumns] = {};
    if (place.used)
      add_pairs<A, E>(call, inverse, call.sequences.pairs[place.n], place.n, b, j, first, width, sums);
    for (int w = 0; w < kWarps; ++w) {
      __syncthreads();
      if (warp != w) continue;
#pragma unroll
      for (int x = 0; x < kColumns; ++x) row[lane + x * 32] = (w > 0 ? row[lane + x * 32] : A(0)) + sums[x];
    }
    __syncthreads();
    for (int64_t c = threadIdx.x; c < kColumns * 32 && first + c < width; c += kThreads)
      store_column(call, b, j, first + c, place.valid ? row[c] : nan_of<A>());
    __syncthreads();
  }
}

template <class A, class E>
void keys(const Call& call, const Inverse& inverse, const Exec& exec) {
  const Problem& p = call.p;
  const int64_t width = p.K + p.KR + (p.latent ? 0 : p.V);
  launch(exec, "sparse_flash_attention.bwd keys", keys_kernel<A, E>,
         {capped_grid(p.B * p.S), ceil_div(width, kColumns * 32)}, kThreads, 0, call, inverse);
}

}  // namespace

void cuda_generic_keys(const Call& call, const Inverse& inverse, const Exec& exec) {
  build_inverse(exec, inverse, NamedBlock{call.p, call.lists, call.sequences});
  switch (call.p.dtype) {
    case THALWEG_F64: return keys<double, double>(call, inverse, exec);
    case THALWEG_F32: return keys<float, float>(call, inverse, exec);
    case THALWEG_BF16: return keys<float, __nv_bfloat16>(call, inverse, exec);
    default: return keys<float, __half>(call, inverse, exec);
  }
}

}  // namespace thalweg::sparse_flash_attention
