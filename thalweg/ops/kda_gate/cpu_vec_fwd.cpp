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
// Measured 2 Zen 3 cores, AVX2, T4096 HV32 K128 float32: predicted 0.8 of copy bandwidth; softplus form 0.54, lower-bound
//          form 0.70. bf16 in and out: 2.4 times as fast as simd.h's exp and log1p with the same loads and stores.
#include "thalweg/ops/kda_gate/vec.h"

namespace thalweg::kda_gate {
namespace {

struct Call {
  const Problem& p;
  const thalweg_kda_gate_fwd_args& args;
  Parameters parameters;
  int64_t block;
};

enum Form { kSoftplus, kUnusualSoftplus, kLowerBound, kUnusualLowerBound };

// g in place of y.
template <Form form, int64_t N>
[[gnu::always_inline]] inline void to_gates(const ChannelGate& gate, vf (&y)[N]) {
  if constexpr (form == kSoftplus) usual_softplus<N, false>(gate, y, nullptr);
  if constexpr (form == kUnusualSoftplus) each<N>([&](int64_t i) { y[i] = unusual_softplus(gate, y[i]).g; });
  if constexpr (form == kLowerBound) lower_bound_gate<N, true>(gate, y);
  if constexpr (form == kUnusualLowerBound) lower_bound_gate<N, false>(gate, y);
}

template <class X, class G, bool kStreams, Form form>
void forward_row(const ChannelGate gate, const typename X::Element* x, const float* dt_bias, typename G::Element* g,
                 int64_t K) {
  int64_t k = 0;
  for (; k + kStep * kLanes <= K; k += kStep * kLanes) {
    vf y[kStep];
    each<kStep>([&](int64_t i) { y[i] = X::load(x + k + i * kLanes) + load(dt_bias + k + i * kLanes); });
    to_gates<form>(gate, y);
    put<G, kStreams>(g + k, y);
  }
  for (; k < K; k += kLanes) {
    const int64_t n = K - k < kLanes ? K - k : kLanes;
    vf y[1] = {X::load_n(x + k, n) + load_n(dt_bias + k, n)};
    to_gates<form>(gate, y);
    G::store_n(g + k, y[0], n);
  }
}

template <class X, class G, bool kStreams>
void forward_task(void* arg, int64_t i, int64_t) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const int64_t first = i * call.block, pitch = row_pitch(p);
  const int64_t last = first + call.block < num_tokens(p) ? first + call.block : num_tokens(p);
  for (int64_t token = first; token < last; ++token) {
    const auto* x = token_at<const typename X::Element>(p, call.args.x, token);
    auto* g = token_at<typename G::Element>(p, call.args.g, token);
    const float* dt_bias = call.parameters.dt_bias;
    for (int64_t hv = 0; hv < p.HV; ++hv, x += call.args.x.stride[3], g += call.args.g.stride[3], dt_bias += pitch) {
      const ChannelGate& gate = call.parameters.gates[hv];
      if (gate.lower_bound == 0.f) {
        if (gate.usual) forward_row<X, G, kStreams, kSoftplus>(gate, x, dt_bias, g, p.K);
        else forward_row<X, G, kStreams, kUnusualSoftplus>(gate, x, dt_bias, g, p.K);
      } else {
        if (gate.usual) forward_row<X, G, kStreams, kLowerBound>(gate, x, dt_bias, g, p.K);
        else forward_row<X, G, kStreams, kUnusualLowerBound>(gate, x, dt_bias, g, p.K);
      }
    }
  }
  if (kStreams) stream_fence();
}

template <class X, bool kStreams>
Task task_of(thalweg_dtype g) {
  if (g == THALWEG_F32) return forward_task<X, F32, kStreams>;
  return g == THALWEG_BF16 ? forward_task<X, Bf16, kStreams> : forward_task<X, F16, kStreams>;
}
template <bool kStreams>
Task task_of(thalweg_dtype x, thalweg_dtype g) {
  if (x == THALWEG_F32) return task_of<F32, kStreams>(g);
  return x == THALWEG_BF16 ? task_of<Bf16, kStreams>(g) : task_of<F16, kStreams>(g);
}

}  // namespace

namespace THALWEG_ISA {

void cpu_vec_fwd(const Problem& p, const Plan& plan, const thalweg_kda_gate_fwd_args& args, const Exec& exec) {
  Call call{p, args, load_parameters(p, args, exec.workspace), plan.values[kBlock]};
  const bool stream = plan.values[kStream] && is_stream_aligned(args.g);
  const Task task = stream ? task_of<true>(p.dtype, p.g_dtype) : task_of<false>(p.dtype, p.g_dtype);
  parallel_tasks(exec, ceil_div(num_tokens(p), call.block), plan.num_slots, task, &call);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::kda_gate
