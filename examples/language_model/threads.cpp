#include "threads.h"

namespace language_model {

Threads::Threads(int64_t count) {
  for (int64_t i = 1; i < count; ++i) workers_.emplace_back([this] { work(); });
}

Threads::~Threads() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (auto& worker : workers_) worker.join();
}

thalweg_context Threads::context() {
  thalweg_context ctx{};
  ctx.num_threads = count();
  ctx.parallel_for = &Threads::lend;
  ctx.pool = this;
  return ctx;
}

void Threads::lend(void* pool, int64_t n, RawBody body, void* arg) {
  static_cast<Threads*>(pool)->run_raw(n, body, arg);
}

// Starts tasks while there are any; the lock is held except while a task runs.
void Threads::take_tasks(std::unique_lock<std::mutex>& lock) {
  while (next_ < size_) {
    int64_t i = next_++;
    RawBody body = body_;
    void* arg = arg_;
    ++running_;
    lock.unlock();
    body(arg, i);
    lock.lock();
    --running_;
  }
}

void Threads::run_raw(int64_t n, RawBody body, void* arg) {
  if (n <= 1 || workers_.empty()) {
    for (int64_t i = 0; i < n; ++i) body(arg, i);
    return;
  }
  std::unique_lock lock(mutex_);
  body_ = body;
  arg_ = arg;
  next_ = 0;
  size_ = n;
  start_.notify_all();
  take_tasks(lock);
  done_.wait(lock, [this] { return running_ == 0; });
  size_ = next_ = 0;
}

void Threads::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    start_.wait(lock, [this] { return stop_ || next_ < size_; });
    if (stop_) return;
    take_tasks(lock);
    if (running_ == 0) done_.notify_one();
  }
}

}  // namespace language_model
