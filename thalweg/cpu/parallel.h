// The library's own thread pool. It starts at the first parallel call, restarts after fork(), and
// keeps the contract of thalweg_parallel_for.
#ifndef THALWEG_CPU_PARALLEL_H
#define THALWEG_CPU_PARALLEL_H

#include <stddef.h>
#include <stdint.h>

namespace thalweg {

// The default thalweg_parallel_for; `pool` is not used. Nested calls run their bodies one after another.
void pool_parallel_for(void* pool, int64_t n, void (*body)(void* arg, int64_t i), void* arg);

// At least `bytes` of 64-byte aligned memory that belongs to the calling thread until its next call
// of this function; grows and is then kept, so that steady state allocates nothing.
void* thread_arena(size_t bytes);

}  // namespace thalweg
#endif
