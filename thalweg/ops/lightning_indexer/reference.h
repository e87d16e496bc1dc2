// Float64 oracle of the lightning indexer, for tools and tests.
#ifndef THALWEG_OPS_LIGHTNING_INDEXER_REFERENCE_H
#define THALWEG_OPS_LIGHTNING_INDEXER_REFERENCE_H

#include <cstdint>

#include "thalweg/ops/lightning_indexer/lightning_indexer.h"

namespace thalweg::lightning_indexer {

// `args` is the pass's args struct, valid for the pass, whose float tensors are all f64 with any strides.
void reference_fwd(const void* args);
void reference_loss(const void* args);
void reference_bwd(const void* args);

// The keys that a query sees: positions begin .. end of its sequence, whose key 0 is row `first` of k.
struct VisibleKeys {
  int64_t first, begin, end;  // nothing is visible when begin == end
};
VisibleKeys reference_keys(const thalweg_lightning_indexer_fwd_args& args, int64_t b, int64_t t);

}  // namespace thalweg::lightning_indexer
#endif
