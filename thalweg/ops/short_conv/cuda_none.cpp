// The CUDA rows of short_conv in a build without CUDA.
#include "thalweg/core/device.h"
#include "thalweg/ops/short_conv/problem.h"

namespace thalweg::short_conv {

void cuda_generic_fwd(const Problem&, const Plan&, const thalweg_short_conv_fwd_args&, const Exec&) { fail_no_cuda(); }
void cuda_generic_bwd(const Problem&, const Plan&, const thalweg_short_conv_bwd_args&, const Exec&) { fail_no_cuda(); }
void cuda_generic_decode(const Problem&, const Plan&, const thalweg_short_conv_decode_args&, const Exec&) {
  fail_no_cuda();
}
void sm90_vec_fwd(const Problem&, const Plan&, const thalweg_short_conv_fwd_args&, const Exec&) { fail_no_cuda(); }
void sm90_vec_bwd(const Problem&, const Plan&, const thalweg_short_conv_bwd_args&, const Exec&) { fail_no_cuda(); }
void sm90_decode(const Problem&, const Plan&, const thalweg_short_conv_decode_args&, const Exec&) { fail_no_cuda(); }

}  // namespace thalweg::short_conv
