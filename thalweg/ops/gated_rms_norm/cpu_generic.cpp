// cpu_generic – gated RMS norm, forward and backward, any dtype and strides.
//
// Math     r = 1 / sqrt(mean(x^2) + eps)    xh = x r    y = xh weight a(gate)
//          d_gate = d_y xh weight a'    d_weight = sum d_y a xh    z = d_y a weight
//          d_x = r (z - xh mean(xh z))
// Shapes   x,gate,y [M D]  weight [D]  rstd [M]
// Takes    anything valid
// Threads  one task per block of rows
// Vectors  whatever the compiler makes of the loops over a row
// Tile     64 rows forward, backward_block() rows backward
// Scratch  the weight, shared; 6 rows a slot; backward: partial sums [blocks][D], shared
// Numerics float32, float64 where x is float64; sums along a row in float64. d_weight: 64 rows at a time, these per
// block, blocks in
//          order in float64; partitioned by size only.
// Traps    a(gate) at minus infinity is silu's limit 0, not inf * 0. eps below the smallest normal float32
//          counts as that number, so that a row of zeros stays finite.
// Measured the vector rows are the fast ones; see their headers
#include <algorithm>
#include <cmath>
#include <limits>

#include "thalweg/core/signature.h"
#include "thalweg/cpu/rows.h"
#include "thalweg/ops/gated_rms_norm/problem.h"

namespace thalweg::gated_rms_norm {
namespace {

constexpr int64_t kForwardBlock = 64;
constexpr int64_t kSumRows = 64;

template <class A>
A finite(A x) {
  constexpr A limit = std::numeric_limits<A>::max();
  return x < -limit ? -limit : x > limit ? limit : x;
}

// a(gate), and a'(gate) when `slope` is given.
template <class A>
A activate(Gate gate, A g, A* slope) {
  if (gate == kNoGate) return 1;
  constexpr A limit = std::numeric_limits<A>::max();
  const A s = 1 / (1 + std::exp(-g));
  if (slope) *slope = gate == kSigmoid ? s * (1 - s) : s * (1 + finite(g) * (1 - s));
  return gate == kSigmoid ? s : (g < -limit ? -limit : g) * s;
}

template <class A>
A reciprocal_rms(const Problem& p, const A* x) {
  double sum = 0;
  for (int64_t d = 0; d < p.D; ++d) sum += double(x[d]) * double(x[d]);
  const A mean = A(sum / double(std::max<int64_t>(1, p.D)));
  return 1 / std::sqrt(mean + std::max(A(p.eps), std::numeric_limits<A>::min()));
}

template <class Args>
struct Call {
  const Problem& p;
  const Args& args;
  char* shared;   // the weight, then the partial sums
  char* scratch;  // slot_bytes a slot
  int64_t slot_bytes, block;
};

template <class A, class Args>
A* scratch_row(const Call<Args>& call, int64_t slot, int64_t row) {
  return reinterpret_cast<A*>(call.scratch + slot * call.slot_bytes) + row * row_pitch(call.p);
}

template <class A>
void load_gate(const Problem& p, const thalweg_tensor& gate, int64_t m, A* row) {
  if (p.gate != kNoGate) load_row(gate, m * gate.stride[0], 1, p.D, row);
}

template <class A>
void forward_task(void* arg, int64_t i, int64_t slot) {
  const auto& call = *static_cast<const Call<thalweg_gated_rms_norm_fwd_args>*>(arg);
  const Problem& p = call.p;
  const auto& args = call.args;
  const A* weight = reinterpret_cast<const A*>(call.shared);
  A *x = scratch_row<A>(call, slot, 0), *gate = scratch_row<A>(call, slot, 1), *y = scratch_row<A>(call, slot, 2);
  for (int64_t m = i * call.block; m < std::min((i + 1) * call.block, p.M); ++m) {
    load_row(args.x, m * args.x.stride[0], 1, p.D, x);
    load_gate(p, args.gate, m, gate);
    const A r = reciprocal_rms(p, x);
    for (int64_t d = 0; d < p.D; ++d)
      y[d] = x[d] * r * weight[d] * (p.gate == kNoGate ? A(1) : activate<A>(p.gate, gate[d], nullptr));
    store_row(args.y, m * args.y.stride[0], 1, p.D, y);
    if (present(args.rstd)) store_row(args.rstd, m * args.rstd.stride[0], 1, 1, &r);
  }
}

template <class A>
void backward_task(void* arg, int64_t i, int64_t slot) {
  const auto& call = *static_cast<const Call<thalweg_gated_rms_norm_bwd_args>*>(arg);
  const Problem& p = call.p;
  const auto& args = call.args;
  const A* weight = reinterpret_cast<const A*>(call.shared);
  A *x = scratch_row<A>(call, slot, 0), *gate = scratch_row<A>(call, slot, 1), *d_y = scratch_row<A>(call, slot, 2),
    *z = scratch_row<A>(call, slot, 3), *d_gate = scratch_row<A>(call, slot, 4), *sums = scratch_row<A>(call, slot, 5);
  A* partial = p.sums ? reinterpret_cast<A*>(call.shared) + (1 + i) * row_pitch(p) : nullptr;
  std::fill_n(sums, p.D, A(0));
  if (p.sums) std::fill_n(partial, p.D, A(0));
  const int64_t first = i * call.block, last = std::min(first + call.block, p.M);
  for (int64_t m = first; m < last; ++m) {
    load_row(args.x, m * args.x.stride[0], 1, p.D, x);
    load_row(args.d_y, m * args.d_y.stride[0], 1, p.D, d_y);
    load_gate(p, args.gate, m, gate);
    const A r = reciprocal_rms(p, x);
    double dot = 0;
    for (int64_t d = 0; d < p.D; ++d) {
      A slope = 0;
      const A a = p.gate == kNoGate ? A(1) : activate(p.gate, gate[d], &slope);
      x[d] *= r;
      d_gate[d] = d_y[d] * weight[d] * x[d] * slope;
      sums[d] += d_y[d] * a * x[d];
      z[d] = d_y[d] * weight[d] * a;
      dot += double(x[d] * z[d]);
    }
    const A mean = A(dot / double(p.D));
    for (int64_t d = 0; d < p.D; ++d) z[d] = r * (z[d] - x[d] * mean);
    if (present(args.d_x)) store_row(args.d_x, m * args.d_x.stride[0], 1, p.D, z);
    if (present(args.d_gate)) store_row(args.d_gate, m * args.d_gate.stride[0], 1, p.D, d_gate);
    if (p.sums && ((m - first + 1) % kSumRows == 0 || m + 1 == last))
      for (int64_t d = 0; d < p.D; ++d) {
        partial[d] += sums[d];
        sums[d] = 0;
      }
  }
}

template <class A, class Args, class Task>
int64_t run(const Problem& p, const Plan& plan, const Args& args, const Exec& exec, int64_t block, Task task) {
  Call<Args> call{p, args, exec.workspace, exec.workspace + plan.shared_bytes, plan.slot_bytes, block};
  load_weight(p, args.weight, reinterpret_cast<A*>(call.shared));
  const int64_t num_blocks = (p.M + block - 1) / block;
  parallel_tasks(exec, num_blocks, plan.num_slots, task, &call);
  return num_blocks;
}

template <class A>
void backward(const Problem& p, const Plan& plan, const thalweg_gated_rms_norm_bwd_args& args, const Exec& exec) {
  const int64_t num_blocks = run<A>(p, plan, args, exec, backward_block(p), backward_task<A>);
  const A* partials = reinterpret_cast<const A*>(exec.workspace) + row_pitch(p);
  sum_partials(p, args.d_weight, partials, row_pitch(p), num_blocks, exec);
}

}  // namespace

void cpu_generic_fwd(const Problem& p, const Plan& plan, const thalweg_gated_rms_norm_fwd_args& args,
                     const Exec& exec) {
  if (p.dtype == THALWEG_F64)
    run<double>(p, plan, args, exec, kForwardBlock, forward_task<double>);
  else
    run<float>(p, plan, args, exec, kForwardBlock, forward_task<float>);
}

void cpu_generic_bwd(const Problem& p, const Plan& plan, const thalweg_gated_rms_norm_bwd_args& args,
                     const Exec& exec) {
  if (p.dtype == THALWEG_F64)
    backward<double>(p, plan, args, exec);
  else
    backward<float>(p, plan, args, exec);
}

}  // namespace thalweg::gated_rms_norm
