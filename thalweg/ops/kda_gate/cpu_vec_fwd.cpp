// cpu_vec_fwd – KDA gate, forward, vectors along K.
//
// Math     y = x + dt_bias    g = -exp(A_log) softplus(y), or lower_bound sigmoid(exp(A_log) y)
// Shapes   x,g [B T L HV K]  A_log [HV]  dt_bias [HV K]
// Takes    x and g of f32, bf16, f16, each its own; K contiguous, other strides free; parameters of any float dtype
// Threads  one task per block of tokens
// Vectors  along K
// Tile     about 32 K elements a task; four vectors at a time, step by step, so that their chains of latencies overlap
// Scratch  shared: a ChannelGate a head, dt_bias as floats (zeros without it)
// Numerics float32 (thalweg/cpu/blocks/channel_gate.h), rounded once, to g
// Traps    dt_bias is added as zeros when absent: a load that the cache serves, not a branch.
// Measured 2 Zen 3 cores, AVX2, T4096 HV32 K128 float32, shares of copy bandwidth: softplus form 0.75, lower-bound form
//          0.72 (`thalweg bench kda_gate.fwd@perf`, noisy; before the table of roots and the loop over heads).
//          bf16 in and out: 2.4 times as fast as simd.h's exp and log1p with the same loads and stores.
//          2 cores of an Emerald Rapids: AVX-512 0.83 and 0.84, AVX2 0.72 and 0.64 (record emerald-2core, before the
//          quotient of the lower-bound form, since then 0.82 and 0.79 on a busier machine); AVX-512 0.57 not streamed,
//          0.65 in the lower-bound form with subnormal powers of two. In cache a vector of 16 takes 4.6 ns and one of
//          8 3.5 ns, 3.8 and 2.6 ns in the lower-bound form.
//          Lost: memory asked 256 or 512 elements ahead, or not at all (up to 1.2 times slower), into the L2 only (the
//          same); once a line instead of once a vector (AVX2, lower-bound form: 4 % slower); 2 vectors at a time, 6
//          (spills), 8 (AVX-512: faster in cache, slower from memory); the logarithm's even and odd terms apart, one
//          term less (4 % faster; the error passes the limit), or with AVX2 its coefficients by shuffles (7 % slower).
#include "thalweg/ops/kda_gate/vec.h"

namespace thalweg::kda_gate {
namespace {

constexpr int64_t kAhead = 1024;  // elements between a row's loads and what is asked of memory

struct Call {
  const Problem& p;
  const thalweg_kda_gate_fwd_args& args;
  Parameters parameters;
  int64_t block;
  bool stream;
};

// g in place of y, of a usual head.
template <bool kSoftplus, int64_t N>
[[gnu::always_inline]] inline void to_gates(const ChannelGate& gate, vf (&y)[N]) {
  if constexpr (kSoftplus) usual_softplus<N, false, true>(gate, y, nullptr);
  else table_lower_bound(gate, y);
}

[[gnu::noinline]] vf unusual_gate(const ChannelGate& gate, vf x) {
  if (gate.lower_bound == 0.f) return unusual_softplus(gate, x).g;
  vf y[1] = {x};
  lower_bound_gate<1, false>(gate, y);
  return y[0];
}

template <class X, class G, bool kSoftplus>
[[gnu::always_inline]] inline void forward_row(const ChannelGate gate, const typename X::Element* x,
                                               const float* dt_bias, typename G::Element* g, int64_t K, bool stream) {
  int64_t k = 0;
  for (; k + kStep * kLanes <= K; k += kStep * kLanes) {
    vf y[kStep];
    each<kStep>([&](int64_t i) {
      const auto* at = x + k + i * kLanes;
      __builtin_prefetch(at + kAhead);
      y[i] = X::load(at) + load(dt_bias + k + i * kLanes);
    });
    to_gates<kSoftplus>(gate, y);
    put<G>(g + k, y, stream);
  }
  for (; k < K; k += kLanes) {
    const int64_t n = K - k < kLanes ? K - k : kLanes;
    vf y[1] = {X::load_n(x + k, n) + load_n(dt_bias + k, n)};
    to_gates<kSoftplus>(gate, y);
    G::store_n(g + k, y[0], n);
  }
}

template <class X, class G>
void unusual_row(const ChannelGate& gate, const typename X::Element* x, const float* dt_bias, typename G::Element* g,
                 int64_t K) {
  for (int64_t k = 0; k < K; k += kLanes) {
    const int64_t n = K - k < kLanes ? K - k : kLanes;
    G::store_n(g + k, unusual_gate(gate, X::load_n(x + k, n) + load_n(dt_bias + k, n)), n);
  }
}

// The rows of a token's heads. Heads that are not usual come apart, so that in the loop of those that are the
// constants stay in registers from row to row.
template <class X, class G, bool kSoftplus>
[[gnu::noinline]] void forward_rows(const Call& call, int64_t heads, const ChannelGate* gates,
                                    const typename X::Element* x, const float* dt_bias, typename G::Element* g) {
  const int64_t K = call.p.K, pitch = row_pitch(call.p);
  const int64_t x_stride = call.args.x.stride[3], g_stride = call.args.g.stride[3];
  const bool stream = call.stream;
  for (int64_t hv = 0; hv < heads; ++hv, x += x_stride, g += g_stride, dt_bias += pitch)
    forward_row<X, G, kSoftplus>(gates[hv], x, dt_bias, g, K, stream);
}

template <class X, class G>
void forward_task(void* arg, int64_t i, int64_t) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const int64_t first = i * call.block, pitch = row_pitch(p);
  const int64_t last = first + call.block < num_tokens(p) ? first + call.block : num_tokens(p);
  for (int64_t token = first; token < last; ++token) {
    const auto* x = token_at<const typename X::Element>(p, call.args.x, token);
    auto* g = token_at<typename G::Element>(p, call.args.g, token);
    for (int64_t hv = 0, end; hv < p.HV; hv = end) {
      const ChannelGate* gates = call.parameters.gates;
      for (end = hv; end < p.HV && gates[end].usual; ++end) {}
      const float* dt_bias = call.parameters.dt_bias + hv * pitch;
      const auto* x_row = x + hv * call.args.x.stride[3];
      auto* g_row = g + hv * call.args.g.stride[3];
      if (end == hv) unusual_row<X, G>(gates[end++], x_row, dt_bias, g_row, p.K);
      else if (p.lower_bound == 0.) forward_rows<X, G, true>(call, end - hv, gates + hv, x_row, dt_bias, g_row);
      else forward_rows<X, G, false>(call, end - hv, gates + hv, x_row, dt_bias, g_row);
    }
  }
  if (call.stream) stream_fence();
}

template <class X>
Task task_of(thalweg_dtype g) {
  if (g == THALWEG_F32) return forward_task<X, F32>;
  return g == THALWEG_BF16 ? forward_task<X, Bf16> : forward_task<X, F16>;
}
Task task_of(thalweg_dtype x, thalweg_dtype g) {
  if (x == THALWEG_F32) return task_of<F32>(g);
  return x == THALWEG_BF16 ? task_of<Bf16>(g) : task_of<F16>(g);
}

}  // namespace

namespace THALWEG_ISA {

void cpu_vec_fwd(const Problem& p, const Plan& plan, const thalweg_kda_gate_fwd_args& args, const Exec& exec) {
  const bool stream = plan.values[kStream] && is_stream_aligned(args.g);
  Call call{p, args, load_parameters(p, args, exec.workspace), plan.values[kBlock], stream};
  parallel_tasks(exec, ceil_div(num_tokens(p), call.block), plan.num_slots, task_of(p.dtype, p.g_dtype), &call);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::kda_gate
