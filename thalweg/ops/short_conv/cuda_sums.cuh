// What the CUDA backward rows of short_conv share: d_weight and d_bias from the partial sums in the workspace
// (CudaLayout), and d_initial_state of sequences that no token touches.
#ifndef THALWEG_OPS_SHORT_CONV_CUDA_SUMS_CUH
#define THALWEG_OPS_SHORT_CONV_CUDA_SUMS_CUH

#include "thalweg/cuda/column_sums.cuh"
#include "thalweg/ops/short_conv/cuda_sequences.cuh"

namespace thalweg::short_conv {
namespace {

struct StoreSums {
  thalweg_tensor d_weight, d_bias;
  int64_t W, D;
  __device__ void operator()(int64_t column, double sum) const {
    const int64_t j = column / D, d = column - j * D;
    if (j < W && is_there(d_weight)) store_at(d_weight, d * d_weight.stride[0] + j * d_weight.stride[1], sum);
    if (j == W && is_there(d_bias)) store_at(d_bias, d * d_bias.stride[0], sum);
  }
};

// Partial sums [blocks][W + 1][D].
template <class A>
void store_cuda_sums(const Problem& p, const thalweg_short_conv_bwd_args& args, const Exec& exec) {
  if (!p.sums) return;
  const CudaLayout at = cuda_layout_of(p);
  cuda::column_sums(exec, "short_conv d_weight", reinterpret_cast<const A*>(exec.workspace + at.partials),
                    at.num_blocks, (p.W + 1) * p.D, StoreSums{args.d_weight, args.d_bias, p.W, p.D});
}

// d_initial_state: of an empty sequence d_final_state, of one with wrong borders NaN; others are their tokens' part.
static __global__ void __launch_bounds__(kChannels)
    empty_sequences_kernel(const Problem p, const thalweg_short_conv_bwd_args args, const cuda::Span* spans,
                           int64_t strips) {
  for (int64_t task = blockIdx.x; task < p.N * strips; task += gridDim.x) {
    const int64_t n = task / strips, d = (task - n * strips) * kChannels + threadIdx.x;
    const Sequence s = sequence_of(p, spans, n);
    if (d >= p.D || (s.valid && s.begin < s.end)) continue;
    for (int64_t j = 0; j < p.W; ++j) {
      double x = s.valid ? 0 : cuda::nan_of<double>();
      if (s.valid && is_there(args.d_final_state))
        x = load_at<double>(args.d_final_state, state_at(args.d_final_state, n, d, j));
      store_at(args.d_initial_state, state_at(args.d_initial_state, n, d, j), x);
    }
  }
}

inline void store_empty_sequences(const Problem& p, const thalweg_short_conv_bwd_args& args, const cuda::Span* spans,
                                  const Exec& exec) {
  if (args.d_initial_state.dtype == THALWEG_NONE || (!p.packed && p.T > 0)) return;
  cuda::launch(exec, "short_conv d_initial_state", empty_sequences_kernel, {cuda::capped_grid(p.N * strips_of(p))},
               kChannels, 0, p, args, spans, strips_of(p));
}

}  // namespace
}  // namespace thalweg::short_conv
#endif
