// Rows of any float dtype and stride to and from rows of the arithmetic. Not for files compiled per ISA.
#ifndef THALWEG_OPS_GATED_RMS_NORM_ROWS_H
#define THALWEG_OPS_GATED_RMS_NORM_ROWS_H

#include "thalweg/core/tensor.h"

namespace thalweg::gated_rms_norm {

template <class E>
double value_of(E x) {
  if constexpr (sizeof(E) == 2)
    return to_float(x);
  else
    return x;
}

template <class E>
E value_as(double x) {
  if constexpr (std::is_same_v<E, bf16>)
    return to_bf16(float(x));
  else if constexpr (std::is_same_v<E, f16>)
    return to_f16(float(x));
  else
    return E(x);
}

// Calls body with a null pointer to the element type of a float dtype.
template <class Body>
void with_element(thalweg_dtype dtype, Body body) {
  if (dtype == THALWEG_F64) return body(static_cast<double*>(nullptr));
  if (dtype == THALWEG_F32) return body(static_cast<float*>(nullptr));
  if (dtype == THALWEG_BF16) return body(static_cast<bf16*>(nullptr));
  return body(static_cast<f16*>(nullptr));
}

// `count` elements of t from element `offset`, `stride` apart.
template <class A>
void load_row(const thalweg_tensor& t, int64_t offset, int64_t stride, int64_t count, A* out) {
  with_element(t.dtype, [&](auto* type) {
    const auto* in = static_cast<const std::remove_reference_t<decltype(*type)>*>(t.data) + offset;
    for (int64_t i = 0; i < count; ++i) out[i] = A(value_of(in[i * stride]));
  });
}

template <class A>
void store_row(const A* row, const thalweg_tensor& t, int64_t offset, int64_t stride, int64_t count) {
  with_element(t.dtype, [&](auto* type) {
    using E = std::remove_reference_t<decltype(*type)>;
    E* out = static_cast<E*>(t.data) + offset;
    for (int64_t i = 0; i < count; ++i) out[i * stride] = value_as<E>(double(row[i]));
  });
}

}  // namespace thalweg::gated_rms_norm
#endif
