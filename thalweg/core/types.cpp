// The small C functions: versions, dtypes, DLPack.
#include "thalweg/core/types.h"

#include "thalweg/core/device.h"
#include "thalweg/core/dlpack.h"
#include "thalweg/core/fail.h"

namespace {

struct DtypeRow {
  thalweg_dtype dtype;
  const char* name;
  size_t bytes;
};
constexpr DtypeRow kDtypes[] = {
    {THALWEG_F64, "f64", 8}, {THALWEG_F32, "f32", 4}, {THALWEG_BF16, "bf16", 2}, {THALWEG_F16, "f16", 2},
    {THALWEG_I64, "i64", 8}, {THALWEG_I32, "i32", 4}, {THALWEG_I8, "i8", 1},     {THALWEG_U8, "u8", 1},
    {THALWEG_BOOL, "bool", 1},
};

const DtypeRow* find_dtype(thalweg_dtype dtype) {
  for (const DtypeRow& row : kDtypes)
    if (row.dtype == dtype) return &row;
  return nullptr;
}

}  // namespace

extern "C" {

const char* thalweg_dtype_name(thalweg_dtype dtype) {
  if (dtype == THALWEG_NONE) return "none";
  const DtypeRow* row = find_dtype(dtype);
  return row ? row->name : "unknown";
}

size_t thalweg_dtype_bytes(thalweg_dtype dtype) {
  const DtypeRow* row = find_dtype(dtype);
  return row ? row->bytes : 0;
}

int32_t thalweg_abi_version(void) { return 1; }

const char* thalweg_version(void) { return THALWEG_VERSION_TEXT; }

const char* thalweg_cpu_isa(void) {
  const char* name = "";
  thalweg::guard([&] { name = thalweg::isa_name(thalweg::cpu_device().isa); });
  return name;
}

int64_t thalweg_default_threads(void) {
  int64_t threads = 0;
  thalweg::guard([&] { threads = thalweg::cpu_device().num_threads; });
  return threads;
}

thalweg_status thalweg_from_dlpack(const thalweg_dltensor* source, thalweg_tensor* out) {
  return thalweg::guard([&] {
    if (!source || !out) thalweg::fail_argument("thalweg_from_dlpack: got a null pointer, expected two structs");
    if (source->ndim < 0 || source->ndim > THALWEG_MAX_RANK)
      thalweg::fail_argument("thalweg_from_dlpack: ndim, got %d, expected 0 to %d", source->ndim, THALWEG_MAX_RANK);
    if (!find_dtype(source->dtype))
      thalweg::fail_argument("thalweg_from_dlpack: dtype, got code %u bits %u lanes %u, expected f64 f32 bf16 f16 i64 i32 i8 u8 bool",
                             source->dtype & 0xffu, (source->dtype >> 8) & 0xffu, source->dtype >> 16);
    if (source->ndim > 0 && !source->shape) thalweg::fail_argument("thalweg_from_dlpack: shape, got null, expected %d sizes", source->ndim);
    thalweg_tensor t{};
    t.data = source->data ? static_cast<char*>(source->data) + source->byte_offset : nullptr;
    t.dtype = source->dtype;
    t.rank = source->ndim;
    t.device_type = source->device_type;
    t.device_id = source->device_id;
    int64_t stride = 1;
    for (int32_t i = t.rank - 1; i >= 0; --i) {
      t.shape[i] = source->shape[i];
      t.stride[i] = source->strides ? source->strides[i] : stride;
      stride *= source->shape[i];
    }
    *out = t;
  });
}

thalweg_status thalweg_to_dlpack(thalweg_tensor* source, thalweg_dltensor* out) {
  return thalweg::guard([&] {
    if (!source || !out) thalweg::fail_argument("thalweg_to_dlpack: got a null pointer, expected two structs");
    if (!find_dtype(source->dtype))
      thalweg::fail_argument("thalweg_to_dlpack: dtype, got %s, expected a present tensor", thalweg_dtype_name(source->dtype));
    if (source->rank < 0 || source->rank > THALWEG_MAX_RANK)
      thalweg::fail_argument("thalweg_to_dlpack: rank, got %d, expected 0 to %d", source->rank, THALWEG_MAX_RANK);
    int32_t device_type = source->device_type ? source->device_type : int32_t(THALWEG_CPU);
    *out = {source->data, device_type, source->device_id, source->rank, source->dtype, source->shape, source->stride, 0};
  });
}

}  // extern "C"
