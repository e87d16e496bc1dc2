// A build without CUDA: no call reaches these.
#include "thalweg/core/device.h"
#include "thalweg/ops/kimi_delta_attention/problem.h"

namespace thalweg::kimi_delta_attention {

void cuda_generic_fwd(const Problem&, const Plan&, const thalweg_kimi_delta_attention_fwd_args&, const Exec&) {
  fail_no_cuda();
}
void cuda_generic_bwd(const Problem&, const Plan&, const thalweg_kimi_delta_attention_bwd_args&, const Exec&) {
  fail_no_cuda();
}
void cuda_generic_decode(const Problem&, const Plan&, const thalweg_kimi_delta_attention_decode_args&, const Exec&) {
  fail_no_cuda();
}
void sm90_decode(const Problem&, const Plan&, const thalweg_kimi_delta_attention_decode_args&, const Exec&) {
  fail_no_cuda();
}

}  // namespace thalweg::kimi_delta_attention
