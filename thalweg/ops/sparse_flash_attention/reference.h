// Float64 oracle of the sparse flash attention, for tools and tests.
#ifndef THALWEG_OPS_SPARSE_FLASH_ATTENTION_REFERENCE_H
#define THALWEG_OPS_SPARSE_FLASH_ATTENTION_REFERENCE_H

#include <cstdint>
#include <vector>

#include "thalweg/core/types.h"

namespace thalweg::sparse_flash_attention {

// `args` is the pass's args struct, valid for the pass, whose float tensors are all f64 with any strides.
void reference_fwd(const void* args);
void reference_bwd(const void* args);

// Rows of k[b] that query (b, t) sees, one for each time an entry names it, in the list's order. `seen` is false for a
// query of no sequence. Args of either pass; only indices, borders, lengths and options are read.
struct Visible {
  std::vector<int64_t> rows;    // of k[b]
  std::vector<int64_t> entries; // which entry each comes from
  bool used = false;
};
template <class Args>
Visible visible_rows(const Args& args, int64_t b, int64_t t);

}  // namespace thalweg::sparse_flash_attention
#endif
