// A build without CUDA: no call reaches these.
#include "thalweg/core/device.h"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule {

void cuda_generic_fwd(const Problem&, const Plan&, const thalweg_gated_delta_rule_fwd_args&, const Exec&) {
  fail_no_cuda();
}
void sm90_chunk_fwd(const Problem&, const Plan&, const thalweg_gated_delta_rule_fwd_args&, const Exec&) {
  fail_no_cuda();
}
void cuda_generic_bwd(const Problem&, const Plan&, const thalweg_gated_delta_rule_bwd_args&, const Exec&) {
  fail_no_cuda();
}
void sm90_chunk_bwd(const Problem&, const Plan&, const thalweg_gated_delta_rule_bwd_args&, const Exec&) {
  fail_no_cuda();
}
void cuda_generic_decode(const Problem&, const Plan&, const thalweg_gated_delta_rule_decode_args&, const Exec&) {
  fail_no_cuda();
}
void sm90_decode(const Problem&, const Plan&, const thalweg_gated_delta_rule_decode_args&, const Exec&) {
  fail_no_cuda();
}

}  // namespace thalweg::gated_delta_rule
