// cpu_vec_bwd – gated RMS norm, backward, vectors along a row.
//
// Math     xh = x r    d_gate = d_y xh weight a'    d_weight = sum d_y a xh    z = d_y a weight
//          d_x = r (z - xh mean(xh z))
// Shapes   x,gate,d_y,d_x,d_gate [M D]  weight,d_weight [D]
// Takes    x of f32, bf16, f16, gate of the same dtype; weight of any float dtype; rows any stride apart
// Threads  one task per block of rows; blocks by size alone (backward_block)
// Vectors  along a row; three sweeps: squares; z, d_gate, sums and xh . z; d_x. A row stays in L1 between them
// Tile     one row
// Scratch  per slot two rows: z, sums of d_weight. Shared: the weight, partial sums [blocks][D], at most 64 blocks
// Numerics float32; d_weight: 64 rows at a time, these per block, blocks in order in float64 (sum_partials)
// Traps    1 - sigmoid is taken as sigmoid times e, which does not cancel where the gate saturates.
// Measured prediction: bound by the traffic of five rows (2.5 copies). Zen 5, M65536 D128 f32, one thread's CPU time
//          with other work beside it: AVX-512 4.9 ms, AVX2 5.7 ms (6.9 with exp and a division), copy times 2.5 3.9.
#include "thalweg/ops/gated_rms_norm/vec.h"

namespace thalweg::gated_rms_norm {
namespace {

constexpr int64_t kSumRows = 64;  // float32 sums before they join the block's

struct Call {
  const Problem& p;
  const thalweg_gated_rms_norm_bwd_args& args;
  const float* weight;  // [D]
  float* partials;      // [blocks][pitch]
  char* scratch;
  int64_t slot_bytes, block, pitch;
  bool stream;
};

// Pointers of one row; d_x, d_gate and sums may be null.
template <class S>
struct Row {
  const typename S::Element *x, *gate, *d_y;
  typename S::Element *d_x, *d_gate;
  const float* weight;
  float *z, *sums;
  float r;
};

// What one vector of a row adds: z, d_gate, a term of d_weight and of the dot product of xh and z.
struct Terms {
  vf xh, z, d_gate, d_weight;
};
template <Gate kGate>
[[gnu::always_inline]] inline Terms terms(vf x, vf gate, vf d_y, vf weight, vf r) {
  vf slope;
  const vf a = activate<kGate>(gate, &slope);
  const vf xh = x * r, scaled = d_y * weight;
  return {xh, scaled * a, scaled * xh * slope, d_y * a * xh};
}

// z to scratch, d_gate and the sums of d_weight; returns xh . z.
template <class S, Gate kGate, bool kStreams>
[[gnu::always_inline]] inline float first_sweep(const Row<S>& row, int64_t D) {
  const vf r = set1(row.r);
  vf dot[2] = {zero(), zero()};
  int64_t d = 0;
  for (; d + 2 * kLanes <= D; d += 2 * kLanes) {
    vf d_gate[2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const int64_t at = d + v * kLanes;
      const Terms t = terms<kGate>(S::load(row.x + at), kGate == kNoGate ? zero() : S::load(row.gate + at),
                                   S::load(row.d_y + at), load(row.weight + at), r);
      store(row.z + at, t.z);
      if (row.sums) store(row.sums + at, load(row.sums + at) + t.d_weight);
      dot[v] = fma(t.xh, t.z, dot[v]);
      d_gate[v] = t.d_gate;
    }
    if (!row.d_gate) continue;
    if constexpr (kStreams) {
      S::stream(row.d_gate + d, d_gate[0], d_gate[1]);
    } else {
      S::store(row.d_gate + d, d_gate[0]);
      S::store(row.d_gate + d + kLanes, d_gate[1]);
    }
  }
  for (; d < D; d += kLanes) {
    const int64_t n = D - d < kLanes ? D - d : kLanes;
    const Terms t = terms<kGate>(S::load_n(row.x + d, n), kGate == kNoGate ? zero() : S::load_n(row.gate + d, n),
                                 S::load_n(row.d_y + d, n), load_n(row.weight + d, n), r);
    store_n(row.z + d, t.z, n);
    if (row.sums) store_n(row.sums + d, load_n(row.sums + d, n) + t.d_weight, n);
    dot[0] = fma(t.xh, t.z, dot[0]);
    if (row.d_gate) S::store_n(row.d_gate + d, t.d_gate, n);
  }
  return hsum(dot[0] + dot[1]);
}

// d_x = r (z - xh mean)
template <class S, bool kStreams>
[[gnu::always_inline]] inline void second_sweep(const Row<S>& row, float mean, int64_t D) {
  const vf r = set1(row.r), factor = set1(row.r * mean);
  auto at = [&](int64_t d) { return r * fnma(S::load(row.x + d), factor, load(row.z + d)); };
  int64_t d = 0;
  if constexpr (kStreams)
    for (; d + 2 * kLanes <= D; d += 2 * kLanes) S::stream(row.d_x + d, at(d), at(d + kLanes));
  for (; d + kLanes <= D; d += kLanes) S::store(row.d_x + d, at(d));
  if (d < D) {
    const int64_t n = D - d;
    S::store_n(row.d_x + d, r * fnma(S::load_n(row.x + d, n), factor, load_n(row.z + d, n)), n);
  }
}

inline void add_to(float* to, float* sums, int64_t n) {
  int64_t d = 0;
  for (; d + kLanes <= n; d += kLanes) store(to + d, load(to + d) + load(sums + d));
  if (d < n) store_n(to + d, load_n(to + d, n - d) + load_n(sums + d, n - d), n - d);
  memset(sums, 0, size_t(n) * sizeof(float));
}

template <class S, Gate kGate, bool kStreams>
void backward_task(void* arg, int64_t i, int64_t slot) {
  using Element = typename S::Element;
  const Call& call = *static_cast<const Call*>(arg);
  const auto& args = call.args;
  const int64_t D = call.p.D, first = i * call.block;
  const int64_t last = first + call.block < call.p.M ? first + call.block : call.p.M;
  const float eps = float_eps(call.p.eps);
  float* scratch = reinterpret_cast<float*>(call.scratch + slot * call.slot_bytes);
  float* partial = call.p.sums ? call.partials + i * call.pitch : nullptr;
  Row<S> row;
  row.weight = call.weight;
  row.z = scratch;
  row.sums = call.p.sums ? scratch + call.pitch : nullptr;
  if (call.p.sums) {
    memset(partial, 0, size_t(D) * sizeof(float));
    memset(row.sums, 0, size_t(D) * sizeof(float));
  }
  for (int64_t m = first; m < last; ++m) {
    row.x = row_at<const Element>(args.x, m);
    row.gate = kGate == kNoGate ? nullptr : row_at<const Element>(args.gate, m);
    row.d_y = row_at<const Element>(args.d_y, m);
    row.d_x = args.d_x.dtype ? row_at<Element>(args.d_x, m) : nullptr;
    row.d_gate = kGate != kNoGate && args.d_gate.dtype ? row_at<Element>(args.d_gate, m) : nullptr;
    row.r = reciprocal_rms<S>(row.x, D, eps);
    const float dot = first_sweep<S, kGate, kStreams>(row, D);
    if (row.d_x) second_sweep<S, kStreams>(row, dot / float(D), D);
    if (row.sums && ((m - first + 1) % kSumRows == 0 || m + 1 == last)) add_to(partial, row.sums, D);
  }
  if (kStreams) stream_fence();
}

using Task = void (*)(void*, int64_t, int64_t);

template <class S>
Task task_of(Gate gate, bool stream) {
  constexpr Task tasks[3][2] = {
      {backward_task<S, kNoGate, false>, backward_task<S, kNoGate, true>},
      {backward_task<S, kSilu, false>, backward_task<S, kSilu, true>},
      {backward_task<S, kSigmoid, false>, backward_task<S, kSigmoid, true>},
  };
  return tasks[gate][stream];
}

}  // namespace

namespace THALWEG_ISA {

void cpu_vec_bwd(const Problem& p, const Plan& plan, const thalweg_gated_rms_norm_bwd_args& args, const Exec& exec) {
  const int64_t pitch = row_pitch(p), bytes = element_bytes(p.dtype);
  float* weight = reinterpret_cast<float*>(exec.workspace);
  load_weight(p, args.weight, weight);
  const bool stream = plan.values[kStream] && (!args.d_x.dtype || is_stream_aligned(args.d_x, bytes)) &&
                      (!args.d_gate.dtype || is_stream_aligned(args.d_gate, bytes));
  Call call{
      p,     args,  weight, weight + pitch, exec.workspace + plan.shared_bytes, plan.slot_bytes, plan.values[kBlock],
      pitch, stream};
  const int64_t num_blocks = (p.M + call.block - 1) / call.block;
  const Task task = p.dtype == THALWEG_F32    ? task_of<F32>(p.gate, stream)
                    : p.dtype == THALWEG_BF16 ? task_of<Bf16>(p.gate, stream)
                                              : task_of<F16>(p.gate, stream);
  parallel_tasks(exec, num_blocks, plan.num_slots, task, &call);
  sum_partials(p, args.d_weight, call.partials, pitch, num_blocks, exec);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::gated_rms_norm
