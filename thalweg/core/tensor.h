// C++ helpers on thalweg_tensor: element types bf16 and f16 and their conversions, and views.
#ifndef THALWEG_CORE_TENSOR_H
#define THALWEG_CORE_TENSOR_H

#include <bit>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <type_traits>

#include "thalweg/core/types.h"

namespace thalweg {

// Storage of a bfloat16 / float16 number. Arithmetic is done in float.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline float to_float(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

// Round to nearest even; NaN stays NaN.
inline bf16 to_bf16(float x) {
  uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {uint16_t((u >> 16) | 0x40u)};
  return {uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

inline float to_float(f16 x) {
  uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest >= 0x400u) return std::bit_cast<float>(sign | ((rest << 13) + 0x38000000u));
  float small = float(rest) * 0x1p-24f;  // subnormal
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(small));
}

// Round to nearest even; overflow goes to infinity, NaN stays NaN.
inline f16 to_f16(float x) {
  uint32_t u = std::bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
  if (rest > 0x7f800000u) return {uint16_t(sign | 0x7e00u)};
  if (rest >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};
  if (rest < 0x38800000u) {  // result is subnormal: let the adder round at 2^-24
    float shifted = std::bit_cast<float>(rest) + 0.5f;
    return {uint16_t(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  return {uint16_t(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13))};
}

template <class E>
constexpr thalweg_dtype dtype_of() {
  using T = std::remove_cv_t<E>;
  if constexpr (std::is_same_v<T, double>) return THALWEG_F64;
  if constexpr (std::is_same_v<T, float>) return THALWEG_F32;
  if constexpr (std::is_same_v<T, bf16>) return THALWEG_BF16;
  if constexpr (std::is_same_v<T, f16>) return THALWEG_F16;
  if constexpr (std::is_same_v<T, int64_t>) return THALWEG_I64;
  if constexpr (std::is_same_v<T, int32_t>) return THALWEG_I32;
  if constexpr (std::is_same_v<T, int8_t>) return THALWEG_I8;
  if constexpr (std::is_same_v<T, uint8_t>) return THALWEG_U8;
  if constexpr (std::is_same_v<T, bool>) return THALWEG_BOOL;
  return THALWEG_NONE;
}

// A row-major view of `data`.
inline thalweg_tensor view(const void* data, std::initializer_list<int64_t> shape, thalweg_dtype dtype) {
  if (shape.size() > THALWEG_MAX_RANK) throw std::length_error("thalweg::view: more than 5 axes");
  thalweg_tensor t{};
  t.data = const_cast<void*>(data);
  t.dtype = dtype;
  t.rank = int32_t(shape.size());
  t.device_type = THALWEG_CPU;
  int axis = 0;
  for (int64_t n : shape) t.shape[axis++] = n;
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.stride[i] = stride;
    stride *= t.shape[i];
  }
  return t;
}

// The same with explicit strides, counted in elements.
inline thalweg_tensor view(const void* data, std::initializer_list<int64_t> shape,
                           std::initializer_list<int64_t> stride, thalweg_dtype dtype) {
  if (shape.size() != stride.size()) throw std::length_error("thalweg::view: one stride an axis");
  thalweg_tensor t = view(data, shape, dtype);
  int axis = 0;
  for (int64_t s : stride) t.stride[axis++] = s;
  return t;
}

template <class E>
thalweg_tensor view(E* data, std::initializer_list<int64_t> shape) {
  static_assert(dtype_of<E>() != THALWEG_NONE, "element type has no dtype");
  return view(data, shape, dtype_of<E>());
}

}  // namespace thalweg
#endif
