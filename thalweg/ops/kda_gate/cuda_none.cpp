// The CUDA rows of kda_gate in a build without CUDA.
#include "thalweg/core/device.h"
#include "thalweg/ops/kda_gate/problem.h"

namespace thalweg::kda_gate {

void cuda_generic_fwd(const Problem&, const Plan&, const thalweg_kda_gate_fwd_args&, const Exec&) { fail_no_cuda(); }
void cuda_generic_bwd(const Problem&, const Plan&, const thalweg_kda_gate_bwd_args&, const Exec&) { fail_no_cuda(); }
void sm90_vec_fwd(const Problem&, const Plan&, const thalweg_kda_gate_fwd_args&, const Exec&) { fail_no_cuda(); }
void sm90_vec_bwd(const Problem&, const Plan&, const thalweg_kda_gate_bwd_args&, const Exec&) { fail_no_cuda(); }

}  // namespace thalweg::kda_gate
