// d_A_log and d_dt_bias from the partial sums that a CUDA row left in the workspace (CudaSums).
#ifndef THALWEG_OPS_KDA_GATE_CUDA_SUMS_CUH
#define THALWEG_OPS_KDA_GATE_CUDA_SUMS_CUH

#include "thalweg/cuda/column_sums.cuh"
#include "thalweg/cuda/tensor.cuh"
#include "thalweg/ops/kda_gate/problem.h"

namespace thalweg::kda_gate {
namespace {

struct StoreSums {
  thalweg_tensor d_A_log, d_dt_bias;
  int64_t K;
  __device__ void operator()(int64_t column, double sum) const {
    const int64_t hv = column / (K + 1), k = column - hv * (K + 1);
    if (k == K && cuda::is_there(d_A_log)) cuda::store_at(d_A_log, hv * d_A_log.stride[0], sum);
    if (k < K && cuda::is_there(d_dt_bias))
      cuda::store_at(d_dt_bias, hv * d_dt_bias.stride[0] + k * d_dt_bias.stride[1], sum);
  }
};

// The partial sums, or null where no sums are wanted or there is nothing to add up.
inline double* partials_of(const Problem& p, const Exec& exec) {
  return p.head_sums || p.channel_sums ? reinterpret_cast<double*>(exec.workspace) : nullptr;
}

// Without tokens there are no partial sums and no workspace; the sums are 0.
inline void store_cuda_sums(const Problem& p, const thalweg_kda_gate_bwd_args& args, const Exec& exec) {
  if (!p.head_sums && !p.channel_sums) return;
  cuda::column_sums(exec, "kda_gate sums", static_cast<const double*>(partials_of(p, exec)), cuda_sums_of(p).num_blocks,
                    p.HV * (p.K + 1), StoreSums{args.d_A_log, args.d_dt_bias, p.K});
}

}  // namespace
}  // namespace thalweg::kda_gate
#endif
