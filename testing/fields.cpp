#include "testing/fields.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "thalweg/core/tensor.h"

namespace thalweg::testing {
namespace {

[[noreturn]] void bad_token(const Case& c, const std::string& token, const std::string& text) {
  throw std::invalid_argument(pass_name(*c.pass) + ": '" + token + "': " + text);
}

// Float tensors that models keep in float32 beside half-precision activations (with the states).
bool keeps_f32(const thalweg_field& field) {
  std::string_view name = field.name;
  return is_state(field) || name == "g" || name == "A_log" || name == "dt_bias";
}

// "f32@0132@off1" -> dtype "f32", layouts {"0132", "off1"}; a first piece that is no dtype is a layout.
struct TensorWords {
  thalweg_dtype dtype = THALWEG_NONE;
  std::vector<std::string> layouts;
};
TensorWords tensor_words(const Case& c, const thalweg_field& field) {
  TensorWords result;
  auto it = c.options.find(field.name);
  if (it == c.options.end() || it->second.empty()) return result;
  std::vector<std::string> pieces = split(it->second, '@');
  result.dtype = parse_dtype(pieces[0]);
  if (!pieces[0].empty() && result.dtype == THALWEG_NONE) {
    if (pieces[0] != "pad") bad_token(c, std::string(field.name) + "=" + it->second, "dtype, got " + pieces[0] + ", expected one of f64 f32 bf16 f16 i32 i64");
    result.layouts.push_back("pad");
  }
  for (size_t i = 1; i < pieces.size(); ++i) result.layouts.push_back(pieces[i]);
  return result;
}

int64_t parse_int(const Case& c, const std::string& token, const std::string& text) {
  try {
    size_t used = 0;
    long long value = std::stoll(text, &used);
    if (used == text.size()) return value;
  } catch (const std::logic_error&) {
  }
  bad_token(c, token, "number, got '" + text + "', expected an integer");
}

void set_strides(thalweg_tensor* t, const std::vector<int>& order, int64_t pad) {
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    t->stride[order[i]] = stride;
    stride *= t->shape[order[i]];
    if (i + 1 == order.size()) stride += pad;
  }
}

void apply_layout(const Case& c, const thalweg_field& field, const std::string& layout, thalweg_tensor* t,
                  int64_t* offset) {
  std::string token = std::string(field.name) + "=@" + layout;
  std::vector<int> order(size_t(t->rank));
  for (int i = 0; i < t->rank; ++i) order[size_t(i)] = i;
  if (layout == "pad") return;
  if (layout == "gap") {
    if (t->rank > 1) return set_strides(t, order, 5);
    if (t->rank == 1 && field.layout == THALWEG_ANY) t->stride[0] = 3;
    return;
  }
  if (layout.starts_with("off")) {
    *offset = parse_int(c, token, layout.substr(3));
    return;
  }
  if (layout.starts_with("s")) {
    std::vector<std::string> numbers = split(std::string_view(layout).substr(1), '_');
    if (int64_t(numbers.size()) != t->rank) bad_token(c, token, "strides, got " + std::to_string(numbers.size()) + ", expected " + std::to_string(t->rank));
    for (int i = 0; i < t->rank; ++i) t->stride[i] = parse_int(c, token, numbers[size_t(i)]);
    return;
  }
  std::vector<bool> seen(order.size());
  bool ok = layout.size() == order.size();
  for (size_t i = 0; ok && i < order.size(); ++i) {
    size_t axis = size_t(layout[i] - '0');
    ok = axis < order.size() && !seen[axis];
    if (ok) seen[axis] = true, order[i] = int(axis);
  }
  if (!ok) bad_token(c, token, "layout, got " + layout + ", expected a permutation of " + std::to_string(t->rank) + " axes, gap, s<strides>, off<n> or pad");
  set_strides(t, order, 0);
}

}  // namespace

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> result;
  for (;;) {
    size_t end = text.find(separator);
    result.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) return result;
    text.remove_prefix(end + 1);
  }
}

std::vector<std::string> words(const char* text) {
  std::vector<std::string> result;
  if (!text) return result;
  for (std::string& word : split(text, ' '))
    if (!word.empty()) result.push_back(std::move(word));
  return result;
}

std::string pass_name(const thalweg_pass& pass) { return std::string(pass.op) + "." + pass.name; }

const thalweg_field* find_field(const thalweg_pass& pass, std::string_view name) {
  for (int64_t i = 0; i < pass.num_fields; ++i)
    if (name == pass.fields[i].name) return &pass.fields[i];
  return nullptr;
}

std::vector<const thalweg_field*> tensor_fields(const thalweg_pass& pass) {
  std::vector<const thalweg_field*> result;
  for (int64_t i = 0; i < pass.num_fields; ++i)
    if (pass.fields[i].kind == THALWEG_TENSOR) result.push_back(&pass.fields[i]);
  return result;
}

std::vector<std::string> size_names(const thalweg_pass& pass) {
  std::vector<std::string> result;
  for (const thalweg_field* field : tensor_fields(pass))
    for (const std::string& dim : words(field->dims)) {
      std::string name = dim.substr(0, dim.find('+'));
      bool known = false;
      for (const std::string& other : result) known = known || other == name;
      if (!known) result.push_back(name);
    }
  return result;
}

bool is_input(const thalweg_field& f) { return f.kind == THALWEG_TENSOR && (f.role == THALWEG_IN || f.role == THALWEG_INOUT); }
bool is_output(const thalweg_field& f) { return f.kind == THALWEG_TENSOR && (f.role == THALWEG_OUT || f.role == THALWEG_INOUT); }
bool is_integer(thalweg_dtype dtype) { return dtype == THALWEG_I32 || dtype == THALWEG_I64 || dtype == THALWEG_I8 || dtype == THALWEG_U8 || dtype == THALWEG_BOOL; }

thalweg_dtype parse_dtype(std::string_view name) {
  for (thalweg_dtype dtype : {THALWEG_F64, THALWEG_F32, THALWEG_BF16, THALWEG_F16, THALWEG_I64, THALWEG_I32, THALWEG_I8, THALWEG_U8, THALWEG_BOOL})
    if (name == thalweg_dtype_name(dtype)) return dtype;
  return THALWEG_NONE;
}

bool accepts_dtype(const thalweg_pass& pass, const thalweg_field& field, thalweg_dtype dtype) {
  if (field.dtypes[0] == '=') {
    const thalweg_field* other = find_field(pass, field.dtypes + 1);
    return other && accepts_dtype(pass, *other, dtype);
  }
  for (const std::string& word : words(field.dtypes))
    if (parse_dtype(word) == dtype) return true;
  return false;
}

bool is_state(const thalweg_field& field) {
  std::vector<std::string> dims = words(field.dims);
  if (dims.size() < 3 || (dims[0] != "N" && dims[0] != "M" && dims[0] != "R")) return false;
  for (const std::string& dim : dims)
    if (dim == "T") return false;
  return true;
}

bool is_present(const Case& c, const thalweg_field& field) {
  if (field.kind != THALWEG_TENSOR) return false;
  if (!field.optional) return true;
  std::string_view name = field.name;
  if (name == "cu_seqlens" || name == "cu_seqlens_k") return c.has("varlen") || c.has("cu_seqlens");
  return c.has(field.name);
}

thalweg_dtype dtype_in(const Case& c, const thalweg_field& field) {
  thalweg_dtype given = tensor_words(c, field).dtype;
  if (given != THALWEG_NONE) return given;
  if (&field == tensor_fields(*c.pass)[0]) return c.dtype;
  if (field.dtypes[0] == '=') {
    const thalweg_field* other = find_field(*c.pass, field.dtypes + 1);
    if (!other) throw std::logic_error(pass_name(*c.pass) + ": " + field.name + ": dtype of an unknown field");
    return dtype_in(c, *other);
  }
  if (accepts_dtype(*c.pass, field, THALWEG_I32)) return THALWEG_I32;
  thalweg_dtype usual = keeps_f32(field) && c.dtype != THALWEG_F64 ? thalweg_dtype(THALWEG_F32) : c.dtype;
  if (accepts_dtype(*c.pass, field, usual)) return usual;
  if (accepts_dtype(*c.pass, field, THALWEG_F32)) return THALWEG_F32;
  return parse_dtype(words(field.dtypes).at(0));
}

std::vector<int64_t> shape_in(const Case& c, const thalweg_field& field) {
  std::vector<int64_t> shape;
  for (const std::string& dim : words(field.dims)) {
    size_t plus = dim.find('+');
    auto it = c.sizes.find(dim.substr(0, plus));
    if (it == c.sizes.end()) throw std::invalid_argument(pass_name(*c.pass) + ": " + field.name + ": size " + dim.substr(0, plus) + ", got none, expected " + dim.substr(0, plus) + "<number>");
    shape.push_back(it->second + (plus == std::string::npos ? 0 : std::stoll(dim.substr(plus + 1))));
  }
  return shape;
}

thalweg_tensor layout_in(const Case& c, const thalweg_field& field, int64_t* offset) {
  thalweg_tensor t{};
  std::vector<int64_t> shape = shape_in(c, field);
  t.dtype = dtype_in(c, field);
  t.rank = int32_t(shape.size());
  t.device_type = THALWEG_CPU;
  std::vector<int> order;
  for (int i = 0; i < t.rank; ++i) t.shape[i] = shape[size_t(i)], order.push_back(i);
  set_strides(&t, order, 0);
  *offset = 0;
  for (const std::string& layout : tensor_words(c, field).layouts) apply_layout(c, field, layout, &t, offset);
  return t;
}

bool padded_slots(const Case& c, const std::string& name) {
  const thalweg_field* field = find_field(*c.pass, name);
  if (!field || !c.has(name)) return false;
  for (const std::string& layout : tensor_words(c, *field).layouts)
    if (layout == "pad") return true;
  return false;
}

int64_t count(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t size : shape) n *= size;
  return n;
}

int64_t count(const thalweg_tensor& t) {
  int64_t n = 1;
  for (int i = 0; i < t.rank; ++i) n *= t.shape[i];
  return n;
}

void extent(const thalweg_tensor& t, int64_t* low, int64_t* high) {
  *low = *high = 0;
  if (count(t) == 0) return;
  for (int i = 0; i < t.rank; ++i) (t.stride[i] < 0 ? *low : *high) += (t.shape[i] - 1) * t.stride[i];
  ++*high;
}

double load(const void* data, thalweg_dtype dtype, int64_t at) {
  switch (dtype) {
    case THALWEG_F64: return static_cast<const double*>(data)[at];
    case THALWEG_F32: return double(static_cast<const float*>(data)[at]);
    case THALWEG_BF16: return double(to_float(static_cast<const bf16*>(data)[at]));
    case THALWEG_F16: return double(to_float(static_cast<const f16*>(data)[at]));
    case THALWEG_I64: return double(static_cast<const int64_t*>(data)[at]);
    case THALWEG_I32: return double(static_cast<const int32_t*>(data)[at]);
    case THALWEG_I8: return double(static_cast<const int8_t*>(data)[at]);
    case THALWEG_U8: return double(static_cast<const uint8_t*>(data)[at]);
    case THALWEG_BOOL: return double(static_cast<const uint8_t*>(data)[at] != 0);
    default: throw std::invalid_argument("load: unknown dtype");
  }
}

// A float that rounds to the same 16-bit number as `value` does: to odd, so that rounding twice is rounding once.
static float odd_float(double value) {
  float f = float(value);
  if (double(f) == value || std::isnan(value) || std::isinf(f)) return f;
  uint32_t bits = std::bit_cast<uint32_t>(f);
  if (bits & 1u) return f;
  return std::nextafterf(f, value > double(f) ? INFINITY : -INFINITY);
}

void store(void* data, thalweg_dtype dtype, int64_t at, double value) {
  switch (dtype) {
    case THALWEG_F64: static_cast<double*>(data)[at] = value; return;
    case THALWEG_F32: static_cast<float*>(data)[at] = float(value); return;
    case THALWEG_BF16: static_cast<bf16*>(data)[at] = to_bf16(odd_float(value)); return;
    case THALWEG_F16: static_cast<f16*>(data)[at] = to_f16(odd_float(value)); return;
    case THALWEG_I64: static_cast<int64_t*>(data)[at] = int64_t(value); return;
    case THALWEG_I32: static_cast<int32_t*>(data)[at] = int32_t(value); return;
    case THALWEG_I8: static_cast<int8_t*>(data)[at] = int8_t(value); return;
    case THALWEG_U8: static_cast<uint8_t*>(data)[at] = uint8_t(value); return;
    case THALWEG_BOOL: static_cast<uint8_t*>(data)[at] = value != 0; return;
    default: throw std::invalid_argument("store: unknown dtype");
  }
}

Values read_values(const thalweg_tensor& t) {
  Values v;
  v.shape.assign(t.shape, t.shape + t.rank);
  v.data.reserve(size_t(count(t)));
  each_offset(t, [&](int64_t at) { v.data.push_back(load(t.data, t.dtype, at)); });
  return v;
}

void write_values(const thalweg_tensor& t, const Values& values) {
  if (values.count() != count(t)) throw std::invalid_argument("write_values: " + std::to_string(values.count()) + " values for " + std::to_string(count(t)) + " elements");
  size_t i = 0;
  each_offset(t, [&](int64_t at) { store(t.data, t.dtype, at, values.data[i++]); });
}

}  // namespace thalweg::testing
