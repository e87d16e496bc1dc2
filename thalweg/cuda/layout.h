// What plans ask of a tensor's layout. Plain C++.
#ifndef THALWEG_CUDA_LAYOUT_H
#define THALWEG_CUDA_LAYOUT_H

#include <stdint.h>

#include "thalweg/core/types.h"

namespace thalweg::cuda {

// Whether every row of t (its last axis) is contiguous, made of whole eights of elements and starts at a multiple of 16
// bytes; also when t is absent. In a workspace query, where data is null, as if that were aligned.
inline bool has_wide_rows(const thalweg_tensor& t) {
  if (t.dtype == THALWEG_NONE) return true;
  const int last = t.rank - 1;
  const int64_t bytes = int64_t(t.dtype >> 8 & 0xff) / 8;  // DLPack's bits
  bool wide = reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.shape[last] % 8 == 0;
  wide = wide && (t.shape[last] <= 1 || t.stride[last] == 1);
  for (int axis = 0; axis < last; ++axis) wide = wide && (t.shape[axis] <= 1 || t.stride[axis] * bytes % 16 == 0);
  return wide;
}

}  // namespace thalweg::cuda
#endif
