// A build without CUDA has the rows' names, and no call reaches them.
#include "thalweg/core/device.h"
#include "thalweg/ops/block_sparse_attention/problem.h"

namespace thalweg::block_sparse_attention {

void cuda_generic_fwd(const Problem&, const Plan&, const thalweg_block_sparse_attention_fwd_args&, const Exec&) {
  fail_no_cuda();
}
void cuda_generic_bwd(const Problem&, const Plan&, const thalweg_block_sparse_attention_bwd_args&, const Exec&) {
  fail_no_cuda();
}

}  // namespace thalweg::block_sparse_attention
