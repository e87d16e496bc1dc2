// The program's threads: one pool that runs the dense products, the element-wise loops and, lent
// through thalweg_context, Thalweg's operators. The BLAS is told to use none of its own.
#ifndef LANGUAGE_MODEL_THREADS_H
#define LANGUAGE_MODEL_THREADS_H

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "thalweg/thalweg.h"

namespace language_model {

class Threads {
 public:
  explicit Threads(int64_t count);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int64_t count() const { return int64_t(workers_.size()) + 1; }
  // A context that makes Thalweg run on these threads.
  thalweg_context context();

  // Runs body(i) for every i in [0, n), in any order; returns when all are done. Called from one thread.
  template <class Body>
  void run(int64_t n, const Body& body) {
    run_raw(n, [](void* arg, int64_t i) { (*static_cast<const Body*>(arg))(i); }, const_cast<Body*>(&body));
  }
  // Runs body(begin, end) for the pieces of [0, n) that are `piece` long. Pieces do not depend on
  // the number of threads, so neither do results.
  template <class Body>
  void run_pieces(int64_t n, int64_t piece, const Body& body) {
    run((n + piece - 1) / piece, [&](int64_t i) { body(i * piece, std::min(n, (i + 1) * piece)); });
  }

 private:
  using RawBody = void (*)(void* arg, int64_t i);
  void run_raw(int64_t n, RawBody body, void* arg);
  static void lend(void* pool, int64_t n, RawBody body, void* arg);
  void work();
  void take_tasks(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable start_, done_;
  std::vector<std::thread> workers_;
  RawBody body_ = nullptr;
  void* arg_ = nullptr;
  int64_t next_ = 0, size_ = 0, running_ = 0;  // tasks: first not started, all, started and not finished
  bool stop_ = false;
};

}  // namespace language_model
#endif
