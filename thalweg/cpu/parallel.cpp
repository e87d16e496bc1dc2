// A small pool: one job at a time, workers that spin briefly and then sleep. A second caller that
// finds the pool busy, and a call from inside a body, run their bodies themselves, one after another.
#include "thalweg/cpu/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "thalweg/core/device.h"
#include "thalweg/core/exec.h"

namespace thalweg {
namespace {

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

struct Job {
  void (*body)(void* arg, int64_t i);
  void* arg;
  int64_t n;
};

class Pool {
 public:
  // False when the pool is busy with another caller's job.
  bool run(const Job& job) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    grow(job.n - 1);
    job_ = job;
    next_.store(0, std::memory_order_relaxed);
    waiting_for_.store(num_workers_, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    take_bodies();
    for (int spin = 0; waiting_for_.load(std::memory_order_acquire) != 0; ++spin) {
      if (spin < kSpins) {
        relax();
      } else if (int32_t left = waiting_for_.load(std::memory_order_acquire)) {
        waiting_for_.wait(left, std::memory_order_acquire);
      }
    }
    busy_.store(false, std::memory_order_release);
    return true;
  }

  static thread_local bool inside_body;

 private:
  static constexpr int kSpins = 4000;  // some tens of microseconds: the gap between calls of a decode loop

  // Never more threads than CPUs: further bodies are taken by those that there are.
  void grow(int64_t wanted) {
    for (; num_workers_ < std::min(wanted, max_workers_); ++num_workers_) {
      uint32_t seen = epoch_.load(std::memory_order_relaxed);
      try {
        std::thread([this, seen] { work(seen); }).detach();
      } catch (const std::system_error&) {
        return;  // fewer threads: the caller takes what they would have
      }
    }
  }

  void work(uint32_t seen) {
    for (;;) {
      for (int spin = 0; spin < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++spin) relax();
      epoch_.wait(seen, std::memory_order_acquire);
      seen = epoch_.load(std::memory_order_acquire);
      take_bodies();
      if (waiting_for_.fetch_sub(1, std::memory_order_acq_rel) == 1) waiting_for_.notify_one();
    }
  }

  void take_bodies() {
    inside_body = true;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < job_.n;) job_.body(job_.arg, i);
    inside_body = false;
  }

  std::atomic<bool> busy_{false};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int32_t> waiting_for_{0};
  Job job_{};
  int32_t num_workers_ = 0;  // touched by the caller that is busy_ only
  const int64_t max_workers_ = std::max(cpu_device().num_threads, cpu_device().num_cpus) - 1;
};

thread_local bool Pool::inside_body = false;

// Never destroyed: its threads are detached and may outlive static destruction.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
  Pool* p = the_pool.load(std::memory_order_acquire);
  if (p) return *p;
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    the_pool.store(nullptr, std::memory_order_release);  // the child has none of the parent's workers
    Pool::inside_body = false;
  });
  (void)registered;
  Pool* fresh = new Pool;
  if (the_pool.compare_exchange_strong(p, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *p;
}

struct Tasks {
  std::atomic<int64_t> next{0};
  int64_t num_tasks;
  void (*task)(void* arg, int64_t i, int64_t slot);
  void* arg;
};

void take_tasks(void* state, int64_t slot) {
  Tasks& tasks = *static_cast<Tasks*>(state);
  for (int64_t i; (i = tasks.next.fetch_add(1, std::memory_order_relaxed)) < tasks.num_tasks;)
    tasks.task(tasks.arg, i, slot);
}

// A thread's arenas, one for each call that is inside another.
class Arenas {
 public:
  ~Arenas() {
    for (Block& block : blocks_) std::free(block.data);
  }
  void* take(size_t bytes) {
    if (depth_ == blocks_.size()) blocks_.push_back({});
    Block& block = blocks_[depth_];
    if (bytes > block.bytes) {
      size_t rounded = (bytes + 4095) / 4096 * 4096;
      void* data = std::aligned_alloc(4096, rounded);
      if (!data) throw std::bad_alloc();
      std::free(block.data);
      block = {data, rounded};
    }
    ++depth_;
    return block.data;
  }
  void give_back() { --depth_; }

 private:
  struct Block {
    void* data;
    size_t bytes;
  };
  std::vector<Block> blocks_;
  size_t depth_ = 0;
};

thread_local Arenas arenas;

}  // namespace

void pool_parallel_for(void*, int64_t n, void (*body)(void* arg, int64_t i), void* arg) {
  if (n > 1 && !Pool::inside_body && pool().run({body, arg, n})) return;
  for (int64_t i = 0; i < n; ++i) body(arg, i);
}

void parallel_tasks(const Exec& exec, int64_t num_tasks, int64_t num_slots,
                    void (*task)(void* arg, int64_t i, int64_t slot), void* arg) {
  int64_t n = std::min({num_tasks, num_slots, exec.num_threads});
  if (n <= 1) {
    for (int64_t i = 0; i < num_tasks; ++i) task(arg, i, 0);
    return;
  }
  Tasks tasks;
  tasks.num_tasks = num_tasks;
  tasks.task = task;
  tasks.arg = arg;
  exec.parallel_for(exec.pool, n, take_tasks, &tasks);
}

ThreadArena::ThreadArena(size_t bytes) : data_(arenas.take(bytes)) {}
ThreadArena::~ThreadArena() { arenas.give_back(); }

}  // namespace thalweg
