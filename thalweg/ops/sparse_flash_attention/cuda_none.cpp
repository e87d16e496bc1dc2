// A build without CUDA has the rows' names, and no call reaches them.
#include "thalweg/core/device.h"
#include "thalweg/ops/sparse_flash_attention/problem.h"

namespace thalweg::sparse_flash_attention {

void cuda_generic_fwd(const Problem&, const Plan&, const thalweg_sparse_flash_attention_fwd_args&, const Exec&) {
  fail_no_cuda();
}
void cuda_generic_bwd(const Problem&, const Plan&, const thalweg_sparse_flash_attention_bwd_args&, const Exec&) {
  fail_no_cuda();
}

}  // namespace thalweg::sparse_flash_attention
