// A small pool: one job at a time, workers that spin briefly and then sleep. A second caller that
// finds the pool busy, and a call from inside a body, run their bodies themselves, one after another.
// A thread takes the same body, and that the same task, call after call, unless another was there first: what
// a thread wrote in the last call is then in its own cache.
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
    num_shares_ = std::min<int64_t>(job.n, num_workers_ + 1);
    for (int64_t share = 0; share < num_shares_; ++share) taken_[size_t(share)].store(false, std::memory_order_relaxed);
    inside_.fetch_and(~kClosed, std::memory_order_release);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    take_bodies(0);
    // Workers that are late have nothing left to do: only those inside are waited for.
    uint32_t seen = inside_.fetch_or(kClosed, std::memory_order_acquire) | kClosed;
    for (int spin = 0; seen != kClosed; ++spin) {
      if (spin < kSpins) relax();
      else inside_.wait(seen, std::memory_order_acquire);
      seen = inside_.load(std::memory_order_acquire);
    }
    busy_.store(false, std::memory_order_release);
    return true;
  }

  static thread_local bool inside_body;

 private:
  static constexpr int kSpins = 4000;  // some tens of microseconds: the gap between calls of a decode loop
  static constexpr uint32_t kClosed = uint32_t(1) << 31;

  // Never more threads than CPUs: further bodies are taken by those that there are.
  void grow(int64_t wanted) {
    for (; num_workers_ < std::min(wanted, max_workers_); ++num_workers_) {
      uint32_t seen = epoch_.load(std::memory_order_relaxed);
      try {
        std::thread([this, seen, i = num_workers_ + 1] { work(i, seen); }).detach();
      } catch (const std::system_error&) {
        return;  // fewer threads: the caller takes what they would have
      }
    }
  }

  void work(int64_t i, uint32_t seen) {
    for (;;) {
      for (int spin = 0; spin < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++spin) relax();
      epoch_.wait(seen, std::memory_order_acquire);
      seen = epoch_.load(std::memory_order_acquire);
      if (!(inside_.fetch_add(1, std::memory_order_acquire) & kClosed)) take_bodies(i);
      if (inside_.fetch_sub(1, std::memory_order_acq_rel) == kClosed + 1) inside_.notify_one();
    }
  }

  // Thread i: its own share of the bodies, then those that nobody has taken yet.
  void take_bodies(int64_t i) {
    inside_body = true;
    for (int64_t n = 0; n < num_shares_; ++n, ++i) {
      const int64_t share = i % num_shares_;
      if (taken_[size_t(share)].exchange(true, std::memory_order_relaxed)) continue;
      for (int64_t body = share; body < job_.n; body += num_shares_) job_.body(job_.arg, body);
    }
    inside_body = false;
  }

  std::atomic<bool> busy_{false};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<uint32_t> inside_{kClosed};  // workers that may touch the job: no more of them once closed
  Job job_{};
  int64_t num_shares_ = 0;   // of the job: a body for each thread, or more where there are more
  int32_t num_workers_ = 0;  // touched by the caller that is busy_ only
  const int64_t max_workers_ = std::max(cpu_device().num_threads, cpu_device().num_cpus) - 1;
  std::vector<std::atomic<bool>> taken_ = std::vector<std::atomic<bool>>(size_t(max_workers_) + 1);  // by share
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
  std::atomic<int64_t> next;
  int64_t num_tasks;
  void (*task)(void* arg, int64_t i, int64_t slot);
  void* arg;
};

void take_tasks(void* state, int64_t slot) {
  Tasks& tasks = *static_cast<Tasks*>(state);
  tasks.task(tasks.arg, slot, slot);
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
  tasks.next = n;  // the first n have a slot each
  tasks.num_tasks = num_tasks;
  tasks.task = task;
  tasks.arg = arg;
  exec.parallel_for(exec.pool, n, take_tasks, &tasks);
}

ThreadArena::ThreadArena(size_t bytes) : data_(arenas.take(bytes)) {}
ThreadArena::~ThreadArena() { arenas.give_back(); }

}  // namespace thalweg
