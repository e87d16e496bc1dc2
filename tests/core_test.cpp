// Core without operators: number formats, views, DLPack, versions, errors.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "tests/child.h"
#include "thalweg/core/dlpack.h"
#include "thalweg/core/error.h"
#include "thalweg/core/fail.h"
#include "thalweg/core/tensor.h"

namespace thalweg {
namespace {

// The value of a 16-bit pattern by its definition: sign, exponent bits, fraction bits.
double by_definition(uint16_t bits, int exponent_bits, int fraction_bits) {
  int bias = (1 << (exponent_bits - 1)) - 1;
  int exponent = (bits >> fraction_bits) & ((1 << exponent_bits) - 1), fraction = bits & ((1 << fraction_bits) - 1);
  double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return fraction ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(double(fraction), 1 - bias - fraction_bits);
  return sign * std::ldexp(double((1 << fraction_bits) + fraction), exponent - bias - fraction_bits);
}

template <class E>
E from_float(float x) {
  if constexpr (std::is_same_v<E, bf16>) return to_bf16(x);
  else return to_f16(x);
}

// All 65536 patterns: value, way back, and that what lies between two neighbours rounds to the nearer,
// ties to even.
template <class E>
void check_format(int exponent_bits, int fraction_bits) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    E x{uint16_t(bits)};
    double value = by_definition(uint16_t(bits), exponent_bits, fraction_bits);
    float f = to_float(x);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(f)) << bits;
      ASSERT_TRUE(std::isnan(to_float(from_float<E>(f)))) << bits;
      continue;
    }
    ASSERT_EQ(double(f), value) << bits;
    ASSERT_EQ(std::signbit(f), std::signbit(value)) << bits;
    ASSERT_EQ(from_float<E>(f).bits, bits);
    if (std::isinf(value)) continue;
    double next = by_definition(uint16_t(bits + 1), exponent_bits, fraction_bits);
    if (std::isnan(next)) continue;
    // Where the next pattern is infinity, the border is where it would be with one more exponent.
    if (std::isinf(next)) next = std::copysign(std::ldexp(1.0, (1 << (exponent_bits - 1))), value);
    float half = float(value + (next - value) / 2);
    ASSERT_EQ(from_float<E>(half).bits, bits % 2 == 0 ? bits : bits + 1) << bits;
    float below = std::nextafterf(half, f), above = std::nextafterf(half, std::copysign(INFINITY, f));
    ASSERT_EQ(from_float<E>(below).bits, bits);
    ASSERT_EQ(from_float<E>(above).bits, bits + 1);
  }
}

TEST(Formats, EveryBf16Pattern) { check_format<bf16>(8, 7); }
TEST(Formats, EveryF16Pattern) { check_format<f16>(5, 10); }

TEST(Formats, LargeAndTiny) {
  EXPECT_EQ(to_f16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_f16(1e30f).bits, 0x7c00);
  EXPECT_EQ(to_f16(-INFINITY).bits, 0xfc00);
  EXPECT_EQ(to_f16(1e-30f).bits, 0x0000);
  EXPECT_EQ(to_f16(-1e-30f).bits, 0x8000);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_TRUE(std::isnan(to_float(to_bf16(std::bit_cast<float>(0x7f800001u)))));  // low payload must not become infinity
}

TEST(Formats, DtypeNamesAndSizes) {
  struct Row { thalweg_dtype dtype; const char* name; size_t bytes; };
  for (Row row : {Row{THALWEG_F64, "f64", 8}, {THALWEG_F32, "f32", 4}, {THALWEG_BF16, "bf16", 2}, {THALWEG_F16, "f16", 2},
                  {THALWEG_I64, "i64", 8}, {THALWEG_I32, "i32", 4}, {THALWEG_I8, "i8", 1}, {THALWEG_U8, "u8", 1}, {THALWEG_BOOL, "bool", 1}}) {
    EXPECT_STREQ(thalweg_dtype_name(row.dtype), row.name);
    EXPECT_EQ(thalweg_dtype_bytes(row.dtype), row.bytes);
  }
  EXPECT_STREQ(thalweg_dtype_name(THALWEG_NONE), "none");
  EXPECT_STREQ(thalweg_dtype_name(0x99999999u), "unknown");
  EXPECT_EQ(thalweg_dtype_bytes(THALWEG_NONE), 0u);
  EXPECT_EQ(thalweg_dtype_bytes(0x20000u | THALWEG_F32), 0u);  // two lanes
}

TEST(Views, ShapeAndStride) {
  float data[24] = {};
  thalweg_tensor t = view(data, {2, 3, 4});
  EXPECT_EQ(t.rank, 3);
  EXPECT_EQ(t.dtype, thalweg_dtype(THALWEG_F32));
  EXPECT_EQ(t.stride[0], 12);
  EXPECT_EQ(t.stride[1], 4);
  EXPECT_EQ(t.stride[2], 1);
  t = view(data, {4, 2}, {1, 4}, THALWEG_F32);
  EXPECT_EQ(t.stride[0], 1);
  EXPECT_EQ(t.stride[1], 4);
  EXPECT_EQ(view(data, {}, THALWEG_F32).rank, 0);
  EXPECT_THROW(view(data, {1, 1, 1, 1, 1, 1}, THALWEG_F32), std::length_error);
  EXPECT_THROW(view(data, {2, 3}, {1}, THALWEG_F32), std::length_error);
}

// A DLPack tensor as DLPack's header lays it out (0.2 and later), written out here on its own.
struct ForeignTensor {
  void* data;
  struct { int32_t type, id; } device;
  int32_t ndim;
  struct { uint8_t code, bits; uint16_t lanes; } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

TEST(Dlpack, BothWays) {
  static_assert(sizeof(ForeignTensor) == sizeof(thalweg_dltensor));
  float data[64] = {};
  int64_t shape[3] = {2, 3, 4}, strides[3] = {1, 2, 6};
  ForeignTensor foreign{data, {1, 0}, 3, {2, 32, 1}, shape, strides, 8};
  thalweg_tensor t;
  ASSERT_EQ(thalweg_from_dlpack(reinterpret_cast<thalweg_dltensor*>(&foreign), &t), THALWEG_OK) << thalweg_last_error();
  EXPECT_EQ(t.data, data + 2);
  EXPECT_EQ(t.dtype, thalweg_dtype(THALWEG_F32));
  EXPECT_EQ(t.rank, 3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(t.shape[i], shape[i]);
    EXPECT_EQ(t.stride[i], strides[i]);
  }
  ForeignTensor back;
  ASSERT_EQ(thalweg_to_dlpack(&t, reinterpret_cast<thalweg_dltensor*>(&back)), THALWEG_OK);
  EXPECT_EQ(static_cast<char*>(back.data) + back.byte_offset, reinterpret_cast<char*>(data + 2));
  EXPECT_EQ(back.ndim, 3);
  EXPECT_EQ(back.dtype.code, 2);
  EXPECT_EQ(back.dtype.bits, 32);
  EXPECT_EQ(back.dtype.lanes, 1);
  EXPECT_EQ(back.device.type, 1);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(back.shape[i], shape[i]);
    EXPECT_EQ(back.strides[i], strides[i]);
  }

  foreign.strides = nullptr;  // row-major
  ASSERT_EQ(thalweg_from_dlpack(reinterpret_cast<thalweg_dltensor*>(&foreign), &t), THALWEG_OK);
  EXPECT_EQ(t.stride[0], 12);
  EXPECT_EQ(t.stride[1], 4);
  EXPECT_EQ(t.stride[2], 1);
}

TEST(Dlpack, EveryDtype) {
  struct Row { uint8_t code, bits; thalweg_dtype dtype; };
  int64_t shape[1] = {1};
  double data = 0;
  for (Row row : {Row{2, 64, THALWEG_F64}, {2, 32, THALWEG_F32}, {2, 16, THALWEG_F16}, {4, 16, THALWEG_BF16}, {0, 64, THALWEG_I64},
                  {0, 32, THALWEG_I32}, {0, 8, THALWEG_I8}, {1, 8, THALWEG_U8}, {6, 8, THALWEG_BOOL}}) {
    ForeignTensor foreign{&data, {1, 0}, 1, {row.code, row.bits, 1}, shape, nullptr, 0};
    thalweg_tensor t;
    ASSERT_EQ(thalweg_from_dlpack(reinterpret_cast<thalweg_dltensor*>(&foreign), &t), THALWEG_OK);
    EXPECT_EQ(t.dtype, row.dtype);
  }
}

TEST(Dlpack, Refusals) {
  int64_t shape[6] = {1, 1, 1, 1, 1, 1};
  double data = 0;
  thalweg_tensor t;
  auto refused = [&](ForeignTensor foreign, const char* got) {
    EXPECT_EQ(thalweg_from_dlpack(reinterpret_cast<thalweg_dltensor*>(&foreign), &t), THALWEG_INVALID_ARGUMENT);
    EXPECT_NE(std::strstr(thalweg_last_error(), got), nullptr) << thalweg_last_error();
    EXPECT_NE(std::strstr(thalweg_last_error(), "expected"), nullptr) << thalweg_last_error();
  };
  refused({&data, {1, 0}, 6, {2, 32, 1}, shape, nullptr, 0}, "6");
  refused({&data, {1, 0}, -1, {2, 32, 1}, shape, nullptr, 0}, "-1");
  refused({&data, {1, 0}, 1, {2, 32, 4}, shape, nullptr, 0}, "dtype");   // four lanes
  refused({&data, {1, 0}, 1, {5, 64, 1}, shape, nullptr, 0}, "dtype");   // complex
  EXPECT_EQ(thalweg_from_dlpack(nullptr, &t), THALWEG_INVALID_ARGUMENT);
  EXPECT_EQ(thalweg_to_dlpack(nullptr, nullptr), THALWEG_INVALID_ARGUMENT);
}

TEST(Errors, GuardTurnsEverythingIntoAStatus) {
  EXPECT_EQ(guard([] {}), THALWEG_OK);
  EXPECT_EQ(guard([] { fail_argument("x: got %d", 3); }), THALWEG_INVALID_ARGUMENT);
  EXPECT_STREQ(thalweg_last_error(), "x: got 3");
  EXPECT_EQ(guard([] { throw std::bad_alloc(); }), THALWEG_OUT_OF_MEMORY);
  EXPECT_EQ(guard([] { throw std::runtime_error("odd"); }), THALWEG_INTERNAL);
  EXPECT_STREQ(thalweg_last_error(), "odd");
  EXPECT_EQ(guard([] { throw 7; }), THALWEG_INTERNAL);
  EXPECT_EQ(guard([] { fail(THALWEG_DEVICE_ERROR, "%s", std::string(100000, 'x').c_str()); }), THALWEG_DEVICE_ERROR);
  EXPECT_LT(std::strlen(thalweg_last_error()), 100000u);
}

TEST(Errors, LastErrorBelongsToTheThread) {
  set_last_error(THALWEG_INTERNAL, "mine");
  const char* before = thalweg_last_error();
  std::thread([] {
    set_last_error(THALWEG_INTERNAL, "other");
    EXPECT_STREQ(thalweg_last_error(), "other");
  }).join();
  EXPECT_STREQ(thalweg_last_error(), "mine");
  EXPECT_EQ(before, thalweg_last_error());  // a fixed buffer
}

TEST(Errors, ThrowOnErrorCarriesStatusAndText) {
  set_last_error(THALWEG_UNSUPPORTED, "text");
  try {
    throw_on_error(THALWEG_UNSUPPORTED);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.status, THALWEG_UNSUPPORTED);
    EXPECT_STREQ(e.what(), "text");
  }
  throw_on_error(THALWEG_OK);
}

TEST(Version, TextAndAbi) {
  char text[32];
  std::snprintf(text, sizeof text, "%d.%d.%d", THALWEG_VERSION_MAJOR, THALWEG_VERSION_MINOR, THALWEG_VERSION_PATCH);
  EXPECT_STREQ(thalweg_version(), text);
  EXPECT_GE(thalweg_abi_version(), 1);
  EXPECT_GE(thalweg_default_threads(), 1);
}

}  // namespace
}  // namespace thalweg
