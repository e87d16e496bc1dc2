// Rows of a tensor of any float dtype and stride, to and from rows of the arithmetic (float or double): for
// kernels that take anything. Not for files compiled per instruction set (those have blocks/rows.h).
#ifndef THALWEG_CPU_ROWS_H
#define THALWEG_CPU_ROWS_H

#include "thalweg/core/tensor.h"

namespace thalweg {

// Elements offset, offset + stride, ... of t.
template <class A>
void load_row(const thalweg_tensor& t, int64_t offset, int64_t stride, int64_t count, A* out) {
  switch (t.dtype) {
    case THALWEG_F64:
      for (int64_t i = 0; i < count; ++i) out[i] = A(static_cast<const double*>(t.data)[offset + i * stride]);
      break;
    case THALWEG_F32:
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<const float*>(t.data)[offset + i * stride];
      break;
    case THALWEG_BF16:
      for (int64_t i = 0; i < count; ++i) out[i] = to_float(static_cast<const bf16*>(t.data)[offset + i * stride]);
      break;
    default:
      for (int64_t i = 0; i < count; ++i) out[i] = to_float(static_cast<const f16*>(t.data)[offset + i * stride]);
  }
}

template <class A>
void store_row(const thalweg_tensor& t, int64_t offset, int64_t stride, int64_t count, const A* in) {
  switch (t.dtype) {
    case THALWEG_F64:
      for (int64_t i = 0; i < count; ++i) static_cast<double*>(t.data)[offset + i * stride] = in[i];
      break;
    case THALWEG_F32:
      for (int64_t i = 0; i < count; ++i) static_cast<float*>(t.data)[offset + i * stride] = float(in[i]);
      break;
    case THALWEG_BF16:
      for (int64_t i = 0; i < count; ++i) static_cast<bf16*>(t.data)[offset + i * stride] = to_bf16(float(in[i]));
      break;
    default:
      for (int64_t i = 0; i < count; ++i) static_cast<f16*>(t.data)[offset + i * stride] = to_f16(float(in[i]));
  }
}

template <class A>
A load_at(const thalweg_tensor& t, int64_t offset) {
  A x;
  load_row(t, offset, 0, 1, &x);
  return x;
}
template <class A>
void store_at(const thalweg_tensor& t, int64_t offset, A x) {
  store_row(t, offset, 0, 1, &x);
}

}  // namespace thalweg
#endif
