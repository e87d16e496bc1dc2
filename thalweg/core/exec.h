// What a kernel's run() gets beside its arguments. Plain data: files compiled per ISA include it.
#ifndef THALWEG_CORE_EXEC_H
#define THALWEG_CORE_EXEC_H

#include <stdint.h>

#include "thalweg/core/types.h"

namespace thalweg {

// A kernel's decisions for one problem, the same for the size query and the run.
struct Plan {
  int64_t shared_bytes;  // workspace that all slots share, first
  int64_t slot_bytes;    // workspace of each slot, a multiple of 64
  int64_t num_slots;     // bodies that run at once, at most Exec.num_threads
  int64_t values[8];     // the kernel's own choices (tiles, pieces), named in its header
};

constexpr int64_t kFree = -1;  // in values[i] before plan(): the row decides

// One call's resources. workspace holds shared_bytes, then num_slots * slot_bytes; 64-byte aligned,
// contents undefined.
struct Exec {
  int64_t num_threads;
  thalweg_parallel_for parallel_for;
  void* pool;
  char* workspace;
  void* stream;     // CUDA: the caller's stream
  int32_t* report;  // CUDA: device i32[4] or null (core/report.h)
};

// Runs task(arg, i, slot) for i in [0, num_tasks), at most num_slots at once; slot is in [0, num_slots)
// and belongs to one running body, so its workspace is private. A slot's first task has its own number, the
// others are taken in ascending order. Which slot runs those is not fixed: results must not depend on it.
void parallel_tasks(const Exec& exec, int64_t num_tasks, int64_t num_slots,
                    void (*task)(void* arg, int64_t i, int64_t slot), void* arg);

}  // namespace thalweg
#endif
