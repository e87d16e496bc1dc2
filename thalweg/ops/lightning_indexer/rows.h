// Where rows lie, and integers of either width, for the plainly compiled files.
#ifndef THALWEG_OPS_LIGHTNING_INDEXER_ROWS_H
#define THALWEG_OPS_LIGHTNING_INDEXER_ROWS_H

#include "thalweg/core/signature.h"
#include "thalweg/cpu/rows.h"

namespace thalweg::lightning_indexer {

// Element offset of row r = b T + t of a tensor [B T ...].
inline int64_t row_offset(const thalweg_tensor& t, int64_t r) {
  return r / t.shape[1] * t.stride[0] + r % t.shape[1] * t.stride[1];
}

inline int64_t load_int(const thalweg_tensor& t, int64_t offset) {
  return t.dtype == THALWEG_I64 ? static_cast<const int64_t*>(t.data)[offset]
                                : static_cast<const int32_t*>(t.data)[offset];
}
inline void store_int(const thalweg_tensor& t, int64_t offset, int64_t value) {
  if (t.dtype == THALWEG_I64)
    static_cast<int64_t*>(t.data)[offset] = value;
  else
    static_cast<int32_t*>(t.data)[offset] = int32_t(value);
}

}  // namespace thalweg::lightning_indexer
#endif
