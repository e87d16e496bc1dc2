// cpu_vec_bwd – KDA gate, backward, vectors along K.
//
// Math     y = x + dt_bias    d_x = d_g dg/dy    d_A_log = sum d_g dg/dA_log    d_dt_bias = sum d_x
// Shapes   x,d_g,d_x [B T L HV K]  A_log,d_A_log [HV]  dt_bias,d_dt_bias [HV K]
// Takes    x and d_g of f32, bf16, f16, each its own; K contiguous, other strides free; parameters of any float dtype
// Threads  one task per block of tokens (backward_block) and group of heads; blocks and groups by size alone
// Vectors  along K; the terms of d_A_log lane by lane
// Tile     four vectors at a time, step by step, so that their chains of latencies overlap
// Scratch  per slot, for the heads of a group: a row of sums and a vector of sums, at most about 32 KiB. Shared: the
//          parameters, partial sums in float64, at most 64 blocks
// Numerics float32 (thalweg/cpu/blocks/channel_gate.h); sums over 64 tokens in float32, these per block and the
//          blocks in order in float64; d_dt_bias sums d_x before it is rounded
// Traps    a slope may be beyond float32 where its product with d_g is not: it comes in two factors (GateSlopes).
// Measured not timed on a quiet machine yet; `thalweg bench kda_gate.bwd@perf` prints it
#include "thalweg/ops/kda_gate/vec.h"

namespace thalweg::kda_gate {
namespace {

constexpr int64_t kSumTokens = 64;  // float32 sums before they join the block's

struct Call {
  const Problem& p;
  const thalweg_kda_gate_bwd_args& args;
  Parameters parameters;
  double *channels, *heads;  // [blocks][HV][pitch], [blocks][HV]
  char* scratch;
  int64_t slot_bytes, block, group, num_groups;
  bool stream;
};

[[gnu::noinline]] GateSlopes unusual_slopes(const ChannelGate& gate, vf y) { return gate_slopes(gate, y); }

// What d_g adds to d_x and, in place of y, to d_A_log.
template <bool kSoftplus, int64_t N>
[[gnu::always_inline]] inline void to_terms(const ChannelGate& gate, const vf (&d_g)[N], vf (&y)[N], vf (&d_x)[N]) {
  if constexpr (kSoftplus) {
    usual_softplus<N, true>(gate, y, d_x);
    each<N>([&](int64_t i) { y[i] = d_g[i] * y[i], d_x[i] = d_g[i] * d_x[i]; });
  } else {
    GateSlopes s[N];
    if (gate.usual) lower_bound_slopes<N, true>(gate, y, s);
    else each<N>([&](int64_t i) { s[i] = unusual_slopes(gate, y[i]); });
    each<N>([&](int64_t i) {
      y[i] = d_g[i] * s[i].A_log * s[i].A_log_factor;
      d_x[i] = d_g[i] * s[i].x * s[i].x_factor;
    });
  }
}

// Pointers of one row; d_x and sums may be null.
template <class X, class D>
struct Row {
  const typename X::Element* x;
  const typename D::Element* d_g;
  typename X::Element* d_x;
  const float* dt_bias;
  float *channels, *head;  // [pitch], [kLanes]
};

template <class X, class D, bool kSoftplus>
void backward_row(const ChannelGate gate, const Row<X, D>& row, int64_t K, bool stream) {
  vf head = zero();
  int64_t k = 0;
  for (; k + kStep * kLanes <= K; k += kStep * kLanes) {
    vf y[kStep], d_g[kStep], d_x[kStep];
    each<kStep>([&](int64_t i) { y[i] = X::load(row.x + k + i * kLanes) + load(row.dt_bias + k + i * kLanes); });
    each<kStep>([&](int64_t i) { d_g[i] = D::load(row.d_g + k + i * kLanes); });
    to_terms<kSoftplus>(gate, d_g, y, d_x);
    each<kStep>([&](int64_t i) {
      head = head + y[i];
      float* sum = row.channels + k + i * kLanes;
      if (row.channels) store(sum, load(sum) + d_x[i]);
    });
    if (row.d_x) put<X>(row.d_x + k, d_x, stream);
  }
  for (; k < K; k += kLanes) {
    const int64_t n = K - k < kLanes ? K - k : kLanes;
    vf y[1] = {X::load_n(row.x + k, n) + load_n(row.dt_bias + k, n)}, d_g[1] = {D::load_n(row.d_g + k, n)}, d_x[1];
    to_terms<kSoftplus>(gate, d_g, y, d_x);
    head = head + first_n(n, y[0], zero());
    if (row.channels) store_n(row.channels + k, load_n(row.channels + k, n) + d_x[0], n);
    if (row.d_x) X::store_n(row.d_x + k, d_x[0], n);
  }
  if (row.head) store(row.head, load(row.head) + head);
}

// The float32 sums of a group's heads join the block's, and start again.
void flush(const Call& call, int64_t block, int64_t first_head, int64_t num_heads, float* channels, float* heads) {
  const Problem& p = call.p;
  const int64_t pitch = row_pitch(p);
  if (p.channel_sums) {
    double* to = call.channels + (block * p.HV + first_head) * pitch;
    for (int64_t i = 0; i < num_heads * pitch; ++i) to[i] += double(channels[i]);
    memset(channels, 0, size_t(num_heads * pitch) * sizeof(float));
  }
  if (p.head_sums) {
    for (int64_t h = 0; h < num_heads; ++h)
      call.heads[block * p.HV + first_head + h] += double(hsum(load(heads + h * kVecHeadFloats)));
    memset(heads, 0, size_t(num_heads * kVecHeadFloats) * sizeof(float));
  }
}

template <class X, class D>
void backward_task(void* arg, int64_t i, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const auto& args = call.args;
  const int64_t block = i / call.num_groups, first_head = i % call.num_groups * call.group, pitch = row_pitch(p);
  const int64_t num_heads = p.HV - first_head < call.group ? p.HV - first_head : call.group;
  const int64_t first = block * call.block;
  const int64_t last = first + call.block < num_tokens(p) ? first + call.block : num_tokens(p);
  float* channels = reinterpret_cast<float*>(call.scratch + slot * call.slot_bytes);
  float* heads = channels + num_heads * pitch;
  memset(channels, 0, size_t(num_heads * (pitch + kVecHeadFloats)) * sizeof(float));
  if (p.channel_sums)
    memset(call.channels + (block * p.HV + first_head) * pitch, 0, size_t(num_heads * pitch) * sizeof(double));
  if (p.head_sums) memset(call.heads + block * p.HV + first_head, 0, size_t(num_heads) * sizeof(double));
  for (int64_t token = first; token < last; ++token) {
    const auto* x = token_at<const typename X::Element>(p, args.x, token);
    const auto* d_g = token_at<const typename D::Element>(p, args.d_g, token);
    auto* d_x = args.d_x.dtype ? token_at<typename X::Element>(p, args.d_x, token) : nullptr;
    for (int64_t h = 0; h < num_heads; ++h) {
      const int64_t hv = first_head + h;
      const Row<X, D> row{x + hv * args.x.stride[3],
                          d_g + hv * args.d_g.stride[3],
                          d_x ? d_x + hv * args.d_x.stride[3] : nullptr,
                          call.parameters.dt_bias + hv * pitch,
                          p.channel_sums ? channels + h * pitch : nullptr,
                          p.head_sums ? heads + h * kVecHeadFloats : nullptr};
      const ChannelGate& gate = call.parameters.gates[hv];
      if (gate.usual && gate.lower_bound == 0.f) backward_row<X, D, true>(gate, row, p.K, call.stream);
      else backward_row<X, D, false>(gate, row, p.K, call.stream);
    }
    if ((token - first + 1) % kSumTokens == 0 || token + 1 == last)
      flush(call, block, first_head, num_heads, channels, heads);
  }
  if (call.stream) stream_fence();
}

template <class X>
Task task_of(thalweg_dtype d_g) {
  if (d_g == THALWEG_F32) return backward_task<X, F32>;
  return d_g == THALWEG_BF16 ? backward_task<X, Bf16> : backward_task<X, F16>;
}
Task task_of(thalweg_dtype x, thalweg_dtype d_g) {
  if (x == THALWEG_F32) return task_of<F32>(d_g);
  return x == THALWEG_BF16 ? task_of<Bf16>(d_g) : task_of<F16>(d_g);
}

}  // namespace

namespace THALWEG_ISA {

void cpu_vec_bwd(const Problem& p, const Plan& plan, const thalweg_kda_gate_bwd_args& args, const Exec& exec) {
  const int64_t block = plan.values[kBlock], group = plan.values[kGroup], num_blocks = ceil_div(num_tokens(p), block);
  const Shared shared = shared_of(p, kVecGateBytes, kVecBiasBytes, num_blocks);
  Call call{p,
            args,
            load_parameters(p, args, exec.workspace),
            reinterpret_cast<double*>(exec.workspace + shared.channels),
            reinterpret_cast<double*>(exec.workspace + shared.heads),
            exec.workspace + plan.shared_bytes,
            plan.slot_bytes,
            block,
            group,
            ceil_div(p.HV, group),
            plan.values[kStream] && args.d_x.dtype && is_stream_aligned(args.d_x)};
  parallel_tasks(exec, num_blocks * call.num_groups, plan.num_slots, task_of(p.dtype, p.g_dtype), &call);
  store_sums(p, args, call.channels, call.heads, num_blocks, exec);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::kda_gate
