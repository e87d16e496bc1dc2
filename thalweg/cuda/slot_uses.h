// Workspace of the check of a pool's slots (slots.cuh). Plain C++, for plans.
#ifndef THALWEG_CUDA_SLOT_USES_H
#define THALWEG_CUDA_SLOT_USES_H

#include <stdint.h>

namespace thalweg::cuda {

struct SlotUse {
  int32_t writes;       // how many
  int32_t first, last;  // lowest and highest sequence that reads or writes it
};
// Never 0: a table that is there says that slots are to be looked at, of a pool without any too.
inline int64_t slot_uses_bytes(int64_t M) { return ((M > 0 ? M : 1) * int64_t(sizeof(SlotUse)) + 63) / 64 * 64; }

// Whether blocks compare sequences themselves rather than look into a table.
inline bool has_few_slots(int64_t N, int64_t T) { return N * (T + 1) <= 1024 && T <= 16; }

}  // namespace thalweg::cuda
#endif
