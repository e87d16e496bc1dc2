// What kernels write to ctx.report about values inside device tensors: [fault, offset of the argument in the args
// struct, position (flattened), value].
#ifndef THALWEG_CORE_REPORT_H
#define THALWEG_CORE_REPORT_H

#include <stdint.h>

namespace thalweg {

enum class Fault : int32_t {
  kNone = 0,
  kBorder = 1,     // cu_seqlens: does not start at 0, falls, or passes the tokens
  kSlot = 2,       // a slot outside the pool
  kSlotTwice = 3,  // a slot written twice, or read by one sequence and written by another
  kIndex = 4,      // an index outside the keys
  kLength = 5,     // a length below 0 or above the tokens
};

}  // namespace thalweg
#endif
