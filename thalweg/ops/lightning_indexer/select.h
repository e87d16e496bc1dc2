// The best of a row of scores, by radix selection; compiled plainly, once for all kernels.
#ifndef THALWEG_OPS_LIGHTNING_INDEXER_SELECT_H
#define THALWEG_OPS_LIGHTNING_INDEXER_SELECT_H

#include <stdint.h>

namespace thalweg::lightning_indexer {

// Writes the positions of the `E` largest of scores[0, n) (all of them when n < E) and returns how many: by value
// descending and at equal values by position ascending, or, with `by_position`, the same ones ascending. NaN
// counts as minus infinity, -0 as 0. `positions` has room for E, `scratch` has select_bytes() bytes.
int64_t select_largest(const float* scores, int64_t n, int64_t E, bool by_position, void* scratch, int32_t* positions);
int64_t select_largest(const double* scores, int64_t n, int64_t E, bool by_position, void* scratch, int32_t* positions);

int64_t select_bytes(int64_t n, int64_t E, int64_t score_bytes);

}  // namespace thalweg::lightning_indexer
#endif
