// d_A_log and d_dt_bias from the partial sums that a CUDA row left in the workspace (CudaSums).
#ifndef THALWEG_OPS_KDA_GATE_CUDA_SUMS_CUH
#define THALWEG_OPS_KDA_GATE_CUDA_SUMS_CUH

#include "thalweg/cuda/column_sums.cuh"
#include "thalweg/cuda/tensor.cuh"
#include "thalweg/ops/kda_gate/problem.h"

namespace thalweg::kda_gate {
namespace {

struct StoreHead {
  thalweg_tensor d_A_log;
  __device__ void operator()(int64_t hv, double sum) const { cuda::store_at(d_A_log, hv * d_A_log.stride[0], sum); }
};
struct StoreChannel {
  thalweg_tensor d_dt_bias;
  int64_t K;
  __device__ void operator()(int64_t column, double sum) const {
    cuda::store_at(d_dt_bias, column / K * d_dt_bias.stride[0] + column % K * d_dt_bias.stride[1], sum);
  }
};

inline void store_cuda_sums(const Problem& p, const thalweg_kda_gate_bwd_args& args, const Exec& exec) {
  const CudaSums at = cuda_sums_of(p);
  const double *channels = reinterpret_cast<const double*>(exec.workspace), *heads = channels + at.heads / 8;
  if (p.channel_sums)
    cuda::column_sums(exec, "kda_gate d_dt_bias", channels, at.num_blocks, p.HV * p.K,
                      StoreChannel{args.d_dt_bias, p.K});
  if (p.head_sums)
    cuda::column_sums(exec, "kda_gate d_A_log", heads, at.num_blocks * at.chunks, p.HV, StoreHead{args.d_A_log});
}

}  // namespace
}  // namespace thalweg::kda_gate
#endif
