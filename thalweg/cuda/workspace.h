// How CUDA rows lay out their workspace; plain C++, since plans need it too.
#ifndef THALWEG_CUDA_WORKSPACE_H
#define THALWEG_CUDA_WORKSPACE_H

#include <stdint.h>

namespace thalweg::cuda {

// Cuts pieces at 64-byte borders. On a null base the pointers mean nothing and used() is the size to ask for, so one
// function that lays a workspace out serves the plan and the run.
class Cutter {
 public:
  explicit Cutter(char* base) : base_(base) {}
  template <class E>
  E* take(int64_t count) {
    E* piece = base_ ? reinterpret_cast<E*>(base_ + used_) : nullptr;
    used_ += (count * int64_t(sizeof(E)) + 63) / 64 * 64;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace thalweg::cuda
#endif
