// The library's own thread pool. It starts at the first parallel call, restarts after fork(), and
// keeps the contract of thalweg_parallel_for.
#ifndef THALWEG_CPU_PARALLEL_H
#define THALWEG_CPU_PARALLEL_H

#include <stddef.h>
#include <stdint.h>

namespace thalweg {

// The default thalweg_parallel_for; `pool` is not used. Nested calls run their bodies one after another.
void pool_parallel_for(void* pool, int64_t n, void (*body)(void* arg, int64_t i), void* arg);

// Memory of the calling thread, at least `bytes`, 64-byte aligned, contents undefined. It is kept when
// the object goes, so that steady state allocates nothing. Objects of one thread go in reverse order, and
// do not share memory: a call made from a body of another call of the same thread gets its own.
class ThreadArena {
 public:
  explicit ThreadArena(size_t bytes);
  ~ThreadArena();
  ThreadArena(const ThreadArena&) = delete;
  void* data() const { return data_; }

 private:
  void* data_;
};

}  // namespace thalweg
#endif
