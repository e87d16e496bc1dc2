// A build without CUDA has the rows' names, and no call reaches them.
#include "thalweg/core/device.h"
#include "thalweg/ops/lightning_indexer/problem.h"

namespace thalweg::lightning_indexer {

void cuda_generic_fwd(const Problem&, const Plan&, const thalweg_lightning_indexer_fwd_args&, const Exec&) {
  fail_no_cuda();
}
void cuda_generic_loss(const Problem&, const Plan&, const thalweg_lightning_indexer_loss_args&, const Exec&) {
  fail_no_cuda();
}
void cuda_generic_bwd(const Problem&, const Plan&, const thalweg_lightning_indexer_bwd_args&, const Exec&) {
  fail_no_cuda();
}

}  // namespace thalweg::lightning_indexer
