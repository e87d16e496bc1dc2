// d_weight from the partial sums that a CUDA row left in the workspace (CudaSums).
#ifndef THALWEG_OPS_GATED_RMS_NORM_CUDA_SUMS_CUH
#define THALWEG_OPS_GATED_RMS_NORM_CUDA_SUMS_CUH

#include "thalweg/cuda/column_sums.cuh"
#include "thalweg/cuda/tensor.cuh"
#include "thalweg/ops/gated_rms_norm/problem.h"

namespace thalweg::gated_rms_norm {
namespace {

struct StoreWeight {
  thalweg_tensor d_weight;
  __device__ void operator()(int64_t d, double sum) const { cuda::store_at(d_weight, d * d_weight.stride[0], sum); }
};

inline void store_cuda_sums(const Problem& p, const thalweg_gated_rms_norm_bwd_args& args, const Exec& exec) {
  cuda::column_sums(exec, "gated_rms_norm d_weight", reinterpret_cast<const double*>(exec.workspace),
                    cuda_sums_of(p).num_blocks, p.D, StoreWeight{args.d_weight});
}

}  // namespace
}  // namespace thalweg::gated_rms_norm
#endif
