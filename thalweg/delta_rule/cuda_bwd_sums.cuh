// What the generic backward's blocks leave in the workspace, added up: per token, value head and group of slices an
// entry of d_q [rows], d_k [rows], d_g [gates], d_beta of the normed q, k and the effective gate. Always in the same
// order, so the gradients' bits are too.
#ifndef THALWEG_DELTA_RULE_CUDA_BWD_SUMS_CUH
#define THALWEG_DELTA_RULE_CUDA_BWD_SUMS_CUH

#include "thalweg/delta_rule/cuda_tokens.cuh"

namespace thalweg::delta_rule {
namespace {

constexpr int64_t kSumThreads = 128;
enum RowKind : int32_t { kOfSequence, kOfNone, kOfWrong };  // the last: of a sequence whose borders are wrong

// A block a sequence, and one more for the rows past the last.
static __global__ void mark_rows_kernel(const __grid_constant__ Problem p, const cuda::Span* spans, int32_t* kinds) {
  for (int64_t n = blockIdx.x; n <= p.N; n += gridDim.x) {
    int64_t begin = first_unused(p, spans), end = p.T;
    int32_t kind = kOfNone;
    if (n < p.N) {
      const cuda::Span span = cuda::span_at(spans, n);
      begin = span.begin, end = span.end, kind = span.valid ? kOfSequence : kOfWrong;
    }
    for (int64_t t = begin + threadIdx.x; t < end; t += blockDim.x) kinds[t] = kind;
  }
}
inline void mark_rows(const Problem& p, const BwdLayout& l, const Exec& exec) {
  cuda::launch(exec, "mark_rows", mark_rows_kernel, {cuda::capped_grid(p.N + 1)}, kSumThreads, 0, p,
               reinterpret_cast<const cuda::Span*>(exec.workspace),
               reinterpret_cast<int32_t*>(exec.workspace + l.kinds_at));
}

template <class A>
struct Entries {
  const A* partial;      // [B T, HV, groups, entry]
  const int32_t* kinds;  // [T], packed sequences only
};
// Number e of the entry of (row, hv), over the groups.
template <class A>
__device__ double entry_sum(const Problem& p, const BwdLayout& l, const Entries<A>& in, int64_t row, int64_t hv,
                            int64_t e) {
  const A* from = in.partial + (row * p.HV + hv) * l.groups * l.entry + e;
  double sum = 0;
  for (int64_t g = 0; g < l.groups; ++g) sum += from[g * l.entry];
  return sum;
}
template <class A>
__device__ RowKind kind_of(const Problem& p, const Entries<A>& in, int64_t row) {
  return p.packed ? RowKind(in.kinds[row]) : kOfSequence;
}

// One warp: d_x [K] of a row and key head: the group's value heads, then back through the norm of x.
template <class A>
__device__ void store_key_gradient(const Problem& p, const BwdLayout& l, const Entries<A>& in, RowKind kind,
                                   const thalweg_tensor& x, const thalweg_tensor& d_x, bool norm, int64_t row,
                                   int64_t h, int64_t part) {
  if (!is_there(d_x)) return;
  const int lane = threadIdx.x % 32;
  const int64_t b = row / p.T, t = row % p.T, group = p.HV / p.H, to = token_at(d_x, b, t, h);
  if (kind != kOfSequence) {
    for (int64_t i = lane; i < p.K; i += 32) store_at(d_x, to + i, kind == kOfNone ? A(0) : cuda::nan_of<A>());
    return;
  }
  constexpr int kMost = 512 / 32;  // numbers of a lane
  A d[kMost], y[kMost], xx = 0, along = 0;
#pragma unroll
  for (int m = 0; m < kMost; ++m) {
    const int64_t i = lane + 32 * m;
    d[m] = y[m] = 0;
    if (i >= p.K) continue;
    double sum = 0;
    for (int64_t hv = h * group; hv < (h + 1) * group; ++hv) sum += entry_sum(p, l, in, row, hv, part + i);
    d[m] = A(sum);
    if (norm) y[m] = load_at<A>(x, token_at(x, b, t, h) + i);
    xx += y[m] * y[m], along += y[m] * d[m];
  }
  // d_x = (d - y (y . d)) / |x| with y = x / |x|
  const A factor = norm ? 1 / sqrt(warp_sum(xx) + A(1e-6)) : A(1);
  along = norm ? warp_sum(along) * factor * factor : A(0);
#pragma unroll
  for (int m = 0; m < kMost; ++m)
    if (lane + 32 * m < p.K) store_at(d_x, to + lane + 32 * m, factor * (d[m] - y[m] * along));
}

// A warp takes one (row, key head).
template <class A, class Args>
__global__ void __launch_bounds__(kSumThreads)
    key_gradients_kernel(const __grid_constant__ Problem p, const __grid_constant__ BwdLayout l,
                         const __grid_constant__ Args a, Entries<A> in) {
  const int64_t step = int64_t(gridDim.x) * (kSumThreads / 32), all = p.B * p.T * p.H;
  for (int64_t i = int64_t(blockIdx.x) * (kSumThreads / 32) + threadIdx.x / 32; i < all; i += step) {
    const int64_t row = i / p.H, h = i % p.H;
    const RowKind kind = kind_of(p, in, row);
    store_key_gradient(p, l, in, kind, a.q, a.d_q, a.use_qk_l2norm, row, h, 0);
    store_key_gradient(p, l, in, kind, a.k, a.d_k, a.use_qk_l2norm, row, h, l.cut.rows);
  }
}

// What the gate of one channel and token adds to the sums. In float64: the sum for d_A_log may nearly cancel.
struct GateTerms {
  double rate, bias;  // for d_A_log and d_dt_bias
};
template <class A, class Args>
__device__ GateTerms store_gate_gradient(const Problem& p, const BwdLayout& l, const Args& a, const Entries<A>& in,
                                         int64_t row, int64_t hv, int64_t c) {
  const int64_t b = row / p.T, t = row % p.T;
  const RowKind kind = kind_of(p, in, row);
  GateTerms terms{0, 0};
  if (kind == kOfWrong) terms = {cuda::nan_of<double>(), cuda::nan_of<double>()};
  if (kind == kOfSequence) {
    const double dg = entry_sum(p, l, in, row, hv, 2 * l.cut.rows + c);
    const Gate<double> gate = load_gate<double>(p, a, b, t, hv, c);
    // 0 where the gradient is 0: the gate may be infinite.
    const double dx = dg == 0 ? 0 : dg * gate.slope;
    terms.bias = dx;
    terms.rate = p.lower_bound == 0 ? (dg == 0 ? 0 : dg * gate.g) : (dx == 0 ? 0 : dx * gate.x);
  }
  if (is_there(a.d_g))
    store_at(a.d_g, token_at(a.d_g, b, t, hv) + (p.channels > 1 ? c * a.d_g.stride[3] : 0), terms.bias);
  return terms;
}
template <class A, class Args>
__device__ void store_beta_gradient(const Problem& p, const BwdLayout& l, const Args& a, const Entries<A>& in,
                                    int64_t row, int64_t hv) {
  if (!is_there(a.d_beta)) return;
  const int64_t b = row / p.T, t = row % p.T;
  const RowKind kind = kind_of(p, in, row);
  A d = kind == kOfNone ? A(0) : cuda::nan_of<A>();
  if (kind == kOfSequence) d = entry_sum(p, l, in, row, hv, 2 * l.cut.rows + l.gates) * load_beta<A>(a, b, t, hv).slope;
  store_at(a.d_beta, token_at(a.d_beta, b, t, hv), d);
}

// A block takes kGateChunk rows of a value head; sums [chunks, HV, 1 + channels] gets what they add up to.
template <class A, class Args>
__global__ void __launch_bounds__(kSumThreads)
    gate_gradients_kernel(const __grid_constant__ Problem p, const __grid_constant__ BwdLayout l,
                          const __grid_constant__ Args a, Entries<A> in, double* sums) {
  static_assert(kGateChunk == 32);
  __shared__ double warps[kSumThreads / 32];
  const int64_t all = l.chunks * p.HV, tokens = p.B * p.T;
  for (int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    const int64_t first = i / p.HV * kGateChunk, hv = i % p.HV;
    const int64_t count = tokens - first < kGateChunk ? tokens - first : kGateChunk;
    double* to = sums + i * (1 + p.channels);
    double rate = 0;
    if (p.channels == 1) {  // a lane a row
      GateTerms terms{0, 0};
      if (threadIdx.x < count) terms = store_gate_gradient(p, l, a, in, first + threadIdx.x, hv, 0);
      rate = terms.rate;
      const double bias = warp_sum(terms.bias);
      if (threadIdx.x == 0) to[1] = bias;
    } else {
      for (int64_t c = threadIdx.x; c < p.channels; c += kSumThreads) {
        double bias = 0;
        for (int64_t m = 0; m < count; ++m) {
          const GateTerms terms = store_gate_gradient(p, l, a, in, first + m, hv, c);
          rate += terms.rate, bias += terms.bias;
        }
        to[1 + c] = bias;
      }
    }
    rate = warp_sum(rate);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = rate;
    __syncthreads();
    if (threadIdx.x == 0) to[0] = (warps[0] + warps[1]) + (warps[2] + warps[3]);
    if (threadIdx.x < count) store_beta_gradient(p, l, a, in, first + threadIdx.x, hv);
    __syncthreads();
  }
}

// A thread takes one number of d_A_log or d_dt_bias.
template <class Args>
__global__ void parameter_gradients_kernel(const __grid_constant__ Problem p, const __grid_constant__ BwdLayout l,
                                           const __grid_constant__ Args a, const double* sums) {
  const int64_t per_head = 1 + p.channels, all = p.HV * per_head, step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < all; i += step) {
    const int64_t hv = i / per_head, which = i % per_head;
    const thalweg_tensor& to = which == 0 ? a.d_A_log : a.d_dt_bias;
    if (!is_there(to)) continue;
    double sum = 0;
    for (int64_t chunk = 0; chunk < l.chunks; ++chunk) sum += sums[chunk * all + i];
    const int64_t channel = p.channels > 1 && which > 0 ? (which - 1) * to.stride[1] : 0;
    store_at(to, hv * to.stride[0] + channel, sum);
  }
}

template <class A, class Args>
void add_gradients(const Problem& p, const BwdLayout& l, const Args& a, const Exec& exec) {
  const Entries<A> in{reinterpret_cast<const A*>(exec.workspace + l.partial_at),
                      reinterpret_cast<const int32_t*>(exec.workspace + l.kinds_at)};
  auto* sums = reinterpret_cast<double*>(exec.workspace + l.sums_at);
  if (is_there(a.d_q) || is_there(a.d_k))
    cuda::launch(exec, "key_gradients", key_gradients_kernel<A, Args>,
                 {cuda::capped_grid(cuda::ceil_div(p.B * p.T * p.H, kSumThreads / 32))}, kSumThreads, 0, p, l, a, in);
  const bool parameters = is_there(a.d_A_log) || is_there(a.d_dt_bias);
  if (is_there(a.d_g) || is_there(a.d_beta) || parameters)
    cuda::launch(exec, "gate_gradients", gate_gradients_kernel<A, Args>, {cuda::capped_grid(l.chunks * p.HV)},
                 kSumThreads, 0, p, l, a, in, sums);
  if (parameters)
    cuda::launch(exec, "parameter_gradients", parameter_gradients_kernel<Args>,
                 {cuda::capped_grid(cuda::ceil_div(p.HV * (1 + p.channels), kSumThreads))}, kSumThreads, 0, p, l, a,
                 static_cast<const double*>(sums));
}

}  // namespace
}  // namespace thalweg::delta_rule
#endif
