// Lists turned around: which slots of the queries' lists name an id. Plain C++; inverse.cuh builds them.
#ifndef THALWEG_CUDA_INVERSE_H
#define THALWEG_CUDA_INVERSE_H

#include <stdint.h>

#include "thalweg/cuda/workspace.h"

namespace thalweg::cuda {

// Slots starts[id] .. starts[id + 1] name the id, ascending.
struct Inverse {
  int64_t *starts, *next, *slots;
  int64_t num_ids, num_slots;
};

inline Inverse lay_out_inverse(int64_t num_ids, int64_t num_slots, Cutter* memory) {
  return {memory->take<int64_t>(num_ids + 1), memory->take<int64_t>(num_ids), memory->take<int64_t>(num_slots), num_ids,
          num_slots};
}

}  // namespace thalweg::cuda
#endif
