// final_state of the CUDA forward rows.
#ifndef THALWEG_OPS_SHORT_CONV_CUDA_FINAL_STATE_CUH
#define THALWEG_OPS_SHORT_CONV_CUDA_FINAL_STATE_CUH

#include "thalweg/ops/short_conv/cuda_sequences.cuh"

namespace thalweg::short_conv {
namespace {

// A copy of inputs, through float64, which holds every other dtype; NaN where borders are wrong. Sequences of `done`
// tokens or more are left alone.
static __global__ void __launch_bounds__(kChannels, 8)
    final_state_kernel(const Problem p, const thalweg_short_conv_fwd_args args, const cuda::Span* spans, int64_t strips,
                       int64_t done) {
  for (int64_t task = blockIdx.x; task < p.N * strips; task += gridDim.x) {
    const int64_t n = task / strips, d = (task - n * strips) * kChannels + threadIdx.x;
    const Sequence s = sequence_of(p, spans, n);
    if (d >= p.D || (s.valid && s.end - s.begin >= done)) continue;
    for (int64_t j = 0; j < p.W; ++j) {
      double x = cuda::nan_of<double>();
      if (s.valid) x = input_at<double>(p, args.x, args.initial_state, s, s.end - p.W + j, d);
      store_at(args.final_state, state_at(args.final_state, n, d, j), x);
    }
  }
}

inline void store_final_states(const Problem& p, const thalweg_short_conv_fwd_args& args, const cuda::Span* spans,
                               int64_t done, const Exec& exec) {
  if (args.final_state.dtype == THALWEG_NONE) return;
  cuda::launch(exec, "short_conv final_state", final_state_kernel, {cuda::capped_grid(p.N * strips_of(p))}, kChannels,
               0, p, args, spans, strips_of(p), done);
}

}  // namespace
}  // namespace thalweg::short_conv
#endif
