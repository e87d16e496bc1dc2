// Float64 oracles of block-sparse attention, for tools and tests: every float tensor of the args struct is float64.
#ifndef THALWEG_OPS_BLOCK_SPARSE_ATTENTION_REFERENCE_H
#define THALWEG_OPS_BLOCK_SPARSE_ATTENTION_REFERENCE_H

namespace thalweg::block_sparse_attention {

void reference_fwd(const void* args);
void reference_bwd(const void* args);

}  // namespace thalweg::block_sparse_attention
#endif
