// The CUDA rows of gated_rms_norm in a build without CUDA.
#include "thalweg/core/device.h"
#include "thalweg/ops/gated_rms_norm/problem.h"

namespace thalweg::gated_rms_norm {

void cuda_generic_fwd(const Problem&, const Plan&, const thalweg_gated_rms_norm_fwd_args&, const Exec&) {
  fail_no_cuda();
}
void cuda_generic_bwd(const Problem&, const Plan&, const thalweg_gated_rms_norm_bwd_args&, const Exec&) {
  fail_no_cuda();
}
void sm90_vec_fwd(const Problem&, const Plan&, const thalweg_gated_rms_norm_fwd_args&, const Exec&) { fail_no_cuda(); }
void sm90_vec_bwd(const Problem&, const Plan&, const thalweg_gated_rms_norm_bwd_args&, const Exec&) { fail_no_cuda(); }

}  // namespace thalweg::gated_rms_norm
