// cpu_vec_fwd – gated RMS norm, forward, vectors along a row.
//
// Math     r = 1 / sqrt(mean(x^2) + eps)    y = x r weight a(gate)
// Shapes   x,gate,y [M D]  weight [D]  rstd [M]
// Takes    x of f32, bf16, f16, gate of the same dtype; weight of any float dtype; rows any stride apart
// Threads  one task per block of rows
// Vectors  along a row; two sweeps, the second finds x in L1
// Tile     about 32 K elements a task; the roots of 4 rows are taken before the first is written, so that their
//          latencies overlap
// Scratch  shared: the weight as floats
// Numerics float32; squares in four vector sums; sigmoid.h for the gate; rounded once, to y
// Traps    eps counts as at least the smallest normal float32: a row of zeros stays finite.
// Measured prediction: bound by the traffic of x, gate and y (1.5 copies). Zen 5, M65536 D128 f32, one thread's
//          CPU time with other work beside it: AVX-512 3.0 ms, AVX2 3.0 ms, copy times 1.5 2.3 ms: 0.77 of its
//          rate on one thread (0.64 on AVX2 with exp and a division).
#include "thalweg/ops/gated_rms_norm/vec.h"

namespace thalweg::gated_rms_norm {
namespace {

constexpr int kRows = 4;  // rows whose roots are taken before the first is written

struct Call {
  const Problem& p;
  const thalweg_gated_rms_norm_fwd_args& args;
  const float* weight;  // [D]
  int64_t block;
  bool stream;
};

template <class S, Gate kGate>
[[gnu::always_inline]] inline vf output(vf x, vf gate, vf weight, vf r) {
  return x * r * weight * activate<kGate>(gate);
}

template <class S, Gate kGate, bool kStreams>
void write_row(const typename S::Element* x, const typename S::Element* gate, typename S::Element* y,
               const float* weight, float rstd, int64_t D) {
  const vf r = set1(rstd);
  auto at = [&](int64_t d) {
    return output<S, kGate>(S::load(x + d), kGate == kNoGate ? zero() : S::load(gate + d), load(weight + d), r);
  };
  int64_t d = 0;
  if constexpr (kStreams)
    for (; d + 2 * kLanes <= D; d += 2 * kLanes) S::stream(y + d, at(d), at(d + kLanes));
  for (; d + kLanes <= D; d += kLanes) S::store(y + d, at(d));
  if (d < D) {
    const int64_t n = D - d;
    const vf g = kGate == kNoGate ? zero() : S::load_n(gate + d, n);
    S::store_n(y + d, output<S, kGate>(S::load_n(x + d, n), g, load_n(weight + d, n), r), n);
  }
}

template <class S, Gate kGate, bool kStreams>
void forward_task(void* arg, int64_t i, int64_t) {
  using Element = typename S::Element;
  const Call& call = *static_cast<const Call*>(arg);
  const auto& args = call.args;
  const int64_t D = call.p.D, first = i * call.block;
  const int64_t last = first + call.block < call.p.M ? first + call.block : call.p.M;
  const float eps = float_eps(call.p.eps);
  for (int64_t m = first; m < last; m += kRows) {
    const int64_t rows = last - m < kRows ? last - m : kRows;
    float r[kRows];
    for (int64_t j = 0; j < rows; ++j) r[j] = reciprocal_rms<S>(row_at<const Element>(args.x, m + j), D, eps);
    for (int64_t j = 0; j < rows; ++j) {
      const Element* gate = kGate == kNoGate ? nullptr : row_at<const Element>(args.gate, m + j);
      write_row<S, kGate, kStreams>(row_at<const Element>(args.x, m + j), gate, row_at<Element>(args.y, m + j),
                                    call.weight, r[j], D);
      if (args.rstd.dtype) *row_at<float>(args.rstd, m + j) = r[j];
    }
  }
  if (kStreams) stream_fence();
}

using Task = void (*)(void*, int64_t, int64_t);

template <class S>
Task task_of(Gate gate, bool stream) {
  constexpr Task tasks[3][2] = {
      {forward_task<S, kNoGate, false>, forward_task<S, kNoGate, true>},
      {forward_task<S, kSilu, false>, forward_task<S, kSilu, true>},
      {forward_task<S, kSigmoid, false>, forward_task<S, kSigmoid, true>},
  };
  return tasks[gate][stream];
}

}  // namespace

namespace THALWEG_ISA {

void cpu_vec_fwd(const Problem& p, const Plan& plan, const thalweg_gated_rms_norm_fwd_args& args, const Exec& exec) {
  float* weight = reinterpret_cast<float*>(exec.workspace);
  load_weight(p, args.weight, weight);
  const bool stream = plan.values[kStream] && is_stream_aligned(args.y, element_bytes(p.dtype));
  Call call{p, args, weight, plan.values[kBlock], stream};
  const Task task = p.dtype == THALWEG_F32    ? task_of<F32>(p.gate, stream)
                    : p.dtype == THALWEG_BF16 ? task_of<Bf16>(p.gate, stream)
                                              : task_of<F16>(p.gate, stream);
  parallel_tasks(exec, (p.M + call.block - 1) / call.block, plan.num_slots, task, &call);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::gated_rms_norm
