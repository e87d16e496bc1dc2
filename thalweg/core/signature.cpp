// bind(): one generic check of every args struct, driven by its field table.
#include "thalweg/core/signature.h"

#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "thalweg/cpu/parallel.h"

namespace thalweg {
namespace {

using ll = long long;

constexpr int64_t kMaxBytes = int64_t(1) << 62;

// The next word of a list separated by spaces; false at the end.
bool next_word(const char*& at, const char*& word, size_t& length) {
  while (*at == ' ') ++at;
  word = at;
  while (*at && *at != ' ') ++at;
  length = size_t(at - word);
  return length > 0;
}

int count_words(const char* list) {
  const char* word;
  size_t length;
  int n = 0;
  while (next_word(list, word, length)) ++n;
  return n;
}

// "[2, 3]"; made on failure only, since texts cost more than all the checks.
std::string shape_text(const thalweg_tensor& t) {
  std::string text = "[";
  for (int i = 0; i < t.rank; ++i) text += (i ? ", " : "") + std::to_string(t.shape[i]);
  return text + "]";
}

const thalweg_field* find_field(const thalweg_pass& pass, const char* name) {
  for (int64_t i = 0; i < pass.num_fields; ++i)
    if (!std::strcmp(pass.fields[i].name, name)) return &pass.fields[i];
  return nullptr;
}

void check_dtype(const thalweg_pass& pass, const thalweg_field& field, const void* args, const thalweg_tensor& t) {
  if (field.dtypes[0] == '=') {
    const char* source_name = field.dtypes + 1;
    const thalweg_tensor& source = tensor_at(args, *find_field(pass, source_name));
    if (present(source) && t.dtype != source.dtype)
      fail_field(pass, field.name, "dtype, got %s, expected %s (from %s)", thalweg_dtype_name(t.dtype),
                 thalweg_dtype_name(source.dtype), source_name);
    if (!present(source)) fail_field(pass, field.name, "needs %s, got %s without it", source_name, field.name);
    return;
  }
  const char *at = field.dtypes, *word;
  size_t length;
  const char* got = thalweg_dtype_name(t.dtype);
  while (next_word(at, word, length))
    if (std::strlen(got) == length && !std::strncmp(got, word, length)) return;
  fail_field(pass, field.name, "dtype, got %s, expected one of %s", got, field.dtypes);
}

void check_sizes(const thalweg_pass& pass, const thalweg_field& field, const thalweg_tensor& t, Sizes& sizes) {
  const char *at = field.dims, *word;
  size_t length;
  int64_t bytes = int64_t(thalweg_dtype_bytes(t.dtype));
  for (int axis = 0; next_word(at, word, length); ++axis) {
    int64_t extra = 0;
    if (length > 2 && word[length - 2] == '+') {
      extra = word[length - 1] - '0';
      length -= 2;
    }
    char name[4] = "";
    std::memcpy(name, word, std::min<size_t>(length, 3));
    int64_t got = t.shape[axis];
    if (got < extra)
      fail_field(pass, field.name, "%s%s, got %lld in %s, expected at least %lld", name, extra ? "+1" : "", ll(got),
                 shape_text(t).c_str(), ll(extra));
    if (got > 0 && bytes > kMaxBytes / got)
      fail_field(pass, field.name, "shape, got %s, expected fewer than 2^62 bytes", shape_text(t).c_str());
    if (got > 0) bytes *= got;
    const Sizes::Entry* known = sizes.find(name);
    if (!known)
      sizes.set(name, std::strlen(name), got - extra, field.name);
    else if (known->value != got - extra)
      fail_field(pass, field.name, "%s%s, got %lld in %s, expected %lld (from %s)", name, extra ? "+1" : "", ll(got),
                 shape_text(t).c_str(), ll(known->value + extra), known->from);
  }
}

bool is_empty(const thalweg_tensor& t) {
  for (int i = 0; i < t.rank; ++i)
    if (t.shape[i] == 0) return true;
  return false;
}

// Axes longer than 1, by rising stride; returns how many.
int sorted_axes(const thalweg_tensor& t, int* axes) {
  int n = 0;
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] <= 1) continue;
    int at = n++;
    for (; at > 0 && t.stride[axes[at - 1]] > t.stride[i]; --at) axes[at] = axes[at - 1];
    axes[at] = i;
  }
  return n;
}

void check_strides(const thalweg_pass& pass, const thalweg_field& field, const thalweg_tensor& t) {
  auto unit = [&](int axis) { return t.rank <= axis || axis < 0 || t.shape[axis] <= 1 || t.stride[axis] == 1; };
  if (is_empty(t)) return;
  if (field.layout == THALWEG_ROWS && !unit(t.rank - 1))
    fail_field(pass, field.name, "stride of the last axis, got %lld, expected 1", ll(t.stride[t.rank - 1]));
  if (field.layout == THALWEG_STATE && !unit(t.rank - 1) && !unit(t.rank - 2))
    fail_field(pass, field.name, "strides of the last two axes, got %lld and %lld, expected a 1",
               ll(t.stride[t.rank - 2]), ll(t.stride[t.rank - 1]));
  for (int i = 0; i < t.rank; ++i) {
    int64_t span = t.shape[i] > 1 ? t.stride[i] : 0;
    if (span > kMaxBytes / 16 / t.shape[i] || span < -(kMaxBytes / 16 / t.shape[i]))
      fail_field(pass, field.name, "stride of axis %d, got %lld, expected offsets below 2^58", i, ll(span));
  }
  if (field.role == THALWEG_IN) return;
  int axes[THALWEG_MAX_RANK];
  int n = sorted_axes(t, axes);
  int64_t reach = 1;  // elements from the first to one past the last of the axes so far
  for (int i = 0; i < n; ++i) {
    int64_t stride = t.stride[axes[i]];
    if (stride < reach)
      fail_field(pass, field.name,
                 "stride of axis %d, got %lld, expected at least %lld (an output must not overlap itself)", axes[i],
                 ll(stride), ll(reach));
    reach = stride * (t.shape[axes[i]] - 1) + reach;
  }
}

void check_data(const thalweg_pass& pass, const thalweg_field& field, const thalweg_tensor& t) {
  if (is_empty(t)) return;
  if (!t.data) fail_field(pass, field.name, "data, got null, expected %s elements", shape_text(t).c_str());
  size_t bytes = thalweg_dtype_bytes(t.dtype);
  if (reinterpret_cast<uintptr_t>(t.data) % bytes != 0)
    fail_field(pass, field.name, "data, got address %p, expected a multiple of %zu", t.data, bytes);
}

struct Range {
  intptr_t begin, end;  // bytes
};

Range byte_range(const thalweg_tensor& t) {
  intptr_t bytes = intptr_t(thalweg_dtype_bytes(t.dtype)), begin = reinterpret_cast<intptr_t>(t.data),
           end = begin + bytes;
  for (int i = 0; i < t.rank; ++i) {
    intptr_t reach = (t.shape[i] - 1) * t.stride[i] * bytes;
    (reach < 0 ? begin : end) += reach;
  }
  return {begin, end};
}

// True when both tensors repeat with a period of `period` bytes and stay apart inside it, as slices
// of one wider buffer do.
bool apart_modulo(const thalweg_tensor& a, const thalweg_tensor& b, intptr_t period) {
  auto inner = [&](const thalweg_tensor& t, Range& r) {
    intptr_t bytes = intptr_t(thalweg_dtype_bytes(t.dtype));
    r.begin = reinterpret_cast<intptr_t>(t.data);
    r.end = r.begin + bytes;
    for (int i = 0; i < t.rank; ++i) {
      intptr_t step = t.stride[i] * bytes;
      if (t.shape[i] <= 1 || step % period == 0) continue;
      intptr_t reach = (t.shape[i] - 1) * step;
      (reach < 0 ? r.begin : r.end) += reach;
    }
    return r.end - r.begin <= period;
  };
  Range ra, rb;
  if (!inner(a, ra) || !inner(b, rb)) return false;
  intptr_t distance = (rb.begin - ra.begin) % period;
  if (distance < 0) distance += period;
  return distance >= ra.end - ra.begin && distance + (rb.end - rb.begin) <= period;
}

bool may_overlap(const thalweg_tensor& a, const thalweg_tensor& b) {
  Range ra = byte_range(a), rb = byte_range(b);
  if (ra.end <= rb.begin || rb.end <= ra.begin) return false;
  intptr_t bytes = intptr_t(thalweg_dtype_bytes(a.dtype));
  for (int i = 0; i < a.rank; ++i)
    if (a.shape[i] > 1 && a.stride[i] > 0 && apart_modulo(a, b, a.stride[i] * bytes)) return false;
  return true;
}

void check_overlap(const thalweg_pass& pass, const void* args) {
  for (int64_t i = 0; i < pass.num_fields; ++i) {
    const thalweg_field& out = pass.fields[i];
    if (out.kind != THALWEG_TENSOR || out.role == THALWEG_IN) continue;
    const thalweg_tensor& a = tensor_at(args, out);
    if (!present(a) || is_empty(a)) continue;
    for (int64_t j = 0; j < pass.num_fields; ++j) {
      const thalweg_field& other = pass.fields[j];
      if (j == i || other.kind != THALWEG_TENSOR || (other.role != THALWEG_IN && j < i)) continue;
      const thalweg_tensor& b = tensor_at(args, other);
      if (present(b) && !is_empty(b) && may_overlap(a, b))
        fail_field(pass, out.name, "memory, got an overlap with %s, expected memory of its own", other.name);
    }
  }
}

std::string place_text(int32_t type, int32_t id) {
  if (type == THALWEG_CPU || type == 0) return "the CPU";
  return type == THALWEG_CUDA ? "cuda:" + std::to_string(id) : "type " + std::to_string(type);
}

void check_place(const thalweg_pass& pass, const thalweg_field& field, const thalweg_tensor& t, const Place& place) {
  const bool on_cpu = t.device_type == 0 || t.device_type == THALWEG_CPU;
  if (!on_cpu && t.device_type != THALWEG_CUDA)
    fail_field(pass, field.name, "device, got type %d, expected the CPU (%d) or CUDA (%d)", t.device_type,
               int(THALWEG_CPU), int(THALWEG_CUDA));
  if (on_cpu ? place.backend == THALWEG_CPU : place.backend == THALWEG_CUDA && t.device_id == place.id) return;
  fail_field(pass, field.name, "device, got %s, expected %s (from %s)", place_text(t.device_type, t.device_id).c_str(),
             place_text(place.backend, place.id).c_str(), place.from);
}

void check_tensor(const thalweg_pass& pass, const thalweg_field& field, const void* args, const Place& place,
                  Sizes& sizes, Binding binding) {
  const thalweg_tensor& t = tensor_at(args, field);
  if (!present(t)) {
    if (!field.optional) fail_field(pass, field.name, "missing, expected [%s]", field.dims);
    return;
  }
  int rank = count_words(field.dims);
  if (t.rank != rank) {
    if (t.rank < 0 || t.rank > THALWEG_MAX_RANK)
      fail_field(pass, field.name, "rank, got %d, expected %d for [%s]", t.rank, rank, field.dims);
    fail_field(pass, field.name, "shape, got %s, expected [%s]", shape_text(t).c_str(), field.dims);
  }
  check_place(pass, field, t, place);
  check_dtype(pass, field, args, t);
  check_sizes(pass, field, t, sizes);
  check_strides(pass, field, t);
  if (binding != Binding::kQuery) check_data(pass, field, t);
}

void check_option(const thalweg_pass& pass, const thalweg_field& field, const void* args) {
  double value = option_at(args, field);
  if (field.kind == THALWEG_FLAG && value != 0 && value != 1)
    fail_field(pass, field.name, "got %g, expected 0 or 1", value);
  if (field.kind == THALWEG_CHOICE && (value < 0 || value >= count_words(field.choices)))
    fail_field(pass, field.name, "got %g, expected 0 to %d (%s)", value, count_words(field.choices) - 1, field.choices);
  if (field.kind == THALWEG_REAL && !(value - value == 0))
    fail_field(pass, field.name, "got %g, expected a finite number", value);
}

bool is_row_major(const thalweg_tensor& t) {
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    if (t.shape[i] > 1 && t.stride[i] != stride) return false;
    stride *= t.shape[i];
  }
  return true;
}

std::string tensor_token(const thalweg_field& field, const thalweg_tensor& t, thalweg_dtype main) {
  bool free_float = field.dtypes[0] != '=' && field.dtypes[0] != 'i';
  bool name_dtype = free_float && (t.dtype != main || main == THALWEG_BF16 || main == THALWEG_F16);
  std::string value = name_dtype || t.dtype == THALWEG_I64 ? thalweg_dtype_name(t.dtype) : "";
  if (!is_row_major(t) && !is_empty(t)) {
    value += "@s";
    for (int i = 0; i < t.rank; ++i) value += (i ? "_" : "") + std::to_string(t.stride[i]);
  }
  return value.empty() ? "" : "=" + value;
}

// "3+5" of borders 0, 3, 8.
std::string sequence_lengths(const thalweg_tensor& cu_seqlens) {
  std::string text;
  for (int64_t n = 0; n + 1 < cu_seqlens.shape[0]; ++n)
    text += (n ? "+" : "") + std::to_string(int_at(cu_seqlens, n + 1) - int_at(cu_seqlens, n));
  return text;
}

struct SlotUse {
  int64_t slot;
  int64_t sequence;
  bool writes;
};

}  // namespace

int64_t Sizes::operator[](const char* name) const {
  const Entry* entry = find(name);
  return entry ? entry->value : 0;
}

const Sizes::Entry* Sizes::find(const char* name) const {
  char key[4] = "";  // compared as one word: bind() looks up every axis of every call
  for (int i = 0; i < 4 && name[i]; ++i) key[i] = name[i];
  for (int i = 0; i < count_; ++i)
    if (std::bit_cast<uint32_t>(entries_[i].name) == std::bit_cast<uint32_t>(key)) return &entries_[i];
  return nullptr;
}

void Sizes::set(const char* name, size_t length, int64_t value, const char* from) {
  if (count_ == 16 || length > 3) fail(THALWEG_INTERNAL, "field table: more than 16 sizes, or a name longer than 3");
  Entry& entry = entries_[count_++];
  std::memset(entry.name, 0, sizeof entry.name);
  std::memcpy(entry.name, name, length);
  entry.value = value;
  entry.from = from;
}

double option_at(const void* args, const thalweg_field& field) {
  const char* at = static_cast<const char*>(args) + field.offset;
  if (field.kind == THALWEG_REAL) return *reinterpret_cast<const double*>(at);
  if (field.kind == THALWEG_COUNT) return double(*reinterpret_cast<const int64_t*>(at));
  return double(*reinterpret_cast<const int32_t*>(at));
}

void fail_field(const thalweg_pass& pass, const char* name, const char* format, ...) {
  char text[2048];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  fail_argument("%s.%s: %s: %s", pass.op, pass.name, name, text);
}

Sizes bind(const thalweg_pass& pass, const void* args, Binding binding) {
  Sizes sizes;
  const Place place = place_of(pass, args);
  for (int64_t i = 0; i < pass.num_fields; ++i) {
    const thalweg_field& field = pass.fields[i];
    if (field.kind == THALWEG_TENSOR)
      check_tensor(pass, field, args, place, sizes, binding);
    else
      check_option(pass, field, args);
  }
  if (binding != Binding::kQuery) check_overlap(pass, args);
  return sizes;
}

Place place_of(const thalweg_pass& pass, const void* args) {
  for (int64_t i = 0; i < pass.num_fields; ++i) {
    const thalweg_field& field = pass.fields[i];
    if (field.kind != THALWEG_TENSOR || !present(tensor_at(args, field))) continue;
    const thalweg_tensor& t = tensor_at(args, field);
    return {t.device_type == THALWEG_CUDA ? THALWEG_CUDA : THALWEG_CPU, t.device_id, field.name};
  }
  return {THALWEG_CPU, 0, ""};
}

void full_args(const thalweg_pass& pass, const void* args, void* full) {
  if (!args) fail_field(pass, "args", "got null, expected a struct");
  size_t size;
  std::memcpy(&size, args, sizeof size);
  if (size < sizeof size)
    fail_field(pass, "args", "size, got %zu, expected sizeof the struct = %zu", size, pass.args_size);
  std::memset(full, 0, pass.args_size);
  std::memcpy(full, args, std::min(size, pass.args_size));
  std::memcpy(full, &pass.args_size, sizeof size);
  const char* bytes = static_cast<const char*>(args);
  for (size_t i = pass.args_size; i < size; ++i)  // a newer caller's fields, which this library does not know
    if (bytes[i])
      fail_field(pass, "args", "size, got %zu with a field set past %zu, expected a library as new as the header", size,
                 pass.args_size);
}

std::string case_text(const thalweg_pass& pass, const void* args, const Sizes& sizes) {
  thalweg_dtype main = tensor_at(args, pass.fields[0]).dtype;
  std::string text = std::string(pass.op) + "." + pass.name + ":" + thalweg_dtype_name(main);
  for (int i = 0; i < sizes.count(); ++i)
    text += std::string(",") + sizes.at(i).name + std::to_string(sizes.at(i).value);
  for (int64_t i = 0; i < pass.num_fields; ++i) {
    const thalweg_field& field = pass.fields[i];
    char number[40];
    if (field.kind != THALWEG_TENSOR) {
      double value = option_at(args, field);
      std::snprintf(number, sizeof number, "%.17g", value);
      if (value != 0) text += std::string(",") + field.name + "=" + number;
      continue;
    }
    const thalweg_tensor& t = tensor_at(args, field);
    if (!present(t)) continue;
    std::string value = tensor_token(field, t, main);
    if (field.optional || !value.empty()) text += std::string(",") + field.name + value;
    const bool queries = !std::strcmp(field.name, "cu_seqlens"), keys = !std::strcmp(field.name, "cu_seqlens_k");
    if ((queries || keys) && t.data && t.shape[0] <= 17)
      text += (queries ? ",varlen=" : ",varlen_k=") + sequence_lengths(t);
  }
  return text;
}

void check_borders(const thalweg_pass& pass, const char* name, const thalweg_tensor& borders, const char* size,
                   const Sizes& sizes) {
  if (int_at(borders, 0) != 0) fail_field(pass, name, "element 0, got %lld, expected 0", ll(int_at(borders, 0)));
  const int64_t N = borders.shape[0] - 1;
  for (int64_t n = 0; n < N; ++n)
    if (int_at(borders, n + 1) < int_at(borders, n))
      fail_field(pass, name, "element %lld, got %lld, expected at least %lld (element %lld)", ll(n + 1),
                 ll(int_at(borders, n + 1)), ll(int_at(borders, n)), ll(n));
  if (int_at(borders, N) > sizes[size])
    fail_field(pass, name, "element %lld, got %lld, expected at most %s = %lld (from %s)", ll(N), ll(int_at(borders, N)),
               size, ll(sizes[size]), sizes.find(size)->from);
}

int64_t check_sequences(const thalweg_pass& pass, const Sizes& sizes, const thalweg_tensor& cu_seqlens,
                        Binding binding) {
  int64_t B = sizes["B"];
  if (!present(cu_seqlens)) {
    const Sizes::Entry* N = sizes.find("N");
    if (N && N->value != B)
      fail_field(pass, N->from, "N, got %lld, expected %lld (from %s: B)", ll(N->value), ll(B), sizes.find("B")->from);
    return B;
  }
  if (B != 1)
    fail_field(pass, "cu_seqlens", "got packed sequences with B = %lld, expected B = 1 (from %s)", ll(B),
               sizes.find("B")->from);
  if (binding == Binding::kRun) check_borders(pass, "cu_seqlens", cu_seqlens, "T", sizes);
  return cu_seqlens.shape[0] - 1;
}

void check_lengths(const thalweg_pass& pass, const char* name, const thalweg_tensor& lengths,
                   const thalweg_tensor& borders, int64_t all) {
  for (int64_t n = 0; present(lengths) && n < lengths.shape[0]; ++n) {
    const int64_t got = int_at(lengths, n), most = present(borders) ? int_at(borders, n + 1) - int_at(borders, n) : all;
    if (got < 0 || got > most)
      fail_field(pass, name, "element %lld, got %lld, expected 0 to %lld (tokens of the sequence)", ll(n), ll(got),
                 ll(most));
  }
}

void check_slots(const thalweg_pass& pass, int64_t N, int64_t T, int64_t M, const thalweg_tensor& read_slots,
                 const thalweg_tensor& write_slots, Binding binding) {
  if (!present(read_slots) && N > M)
    fail_field(pass, "state", "M, got %lld, expected at least N = %lld without read_slots", ll(M), ll(N));
  if (binding != Binding::kRun || (!present(read_slots) && !present(write_slots)) || N == 0) return;
  ThreadArena arena(size_t(N) * size_t(T + 2) * sizeof(SlotUse));
  auto* uses = static_cast<SlotUse*>(arena.data());
  int64_t count = 0;
  for (int64_t n = 0; n < N; ++n) {
    int64_t read = present(read_slots) ? int_at(read_slots, n) : n;
    if (read < -1 || read >= M)
      fail_field(pass, "read_slots", "element %lld, got %lld, expected -1 to %lld (from state)", ll(n), ll(read),
                 ll(M - 1));
    for (int64_t t = 0; t < T && present(write_slots); ++t) {
      int64_t write = int_at(write_slots, n, t);
      if (write < -1 || write >= M)
        fail_field(pass, "write_slots", "element (%lld, %lld), got %lld, expected -1 to %lld (from state)", ll(n),
                   ll(t), ll(write), ll(M - 1));
      if (read >= 0 && write >= 0) uses[count++] = {write, n, true};
    }
    if (read < 0) continue;
    uses[count++] = {read, n, false};
    if (!present(write_slots) && T > 0) uses[count++] = {read, n, true};
  }
  std::sort(uses, uses + count, [](const SlotUse& a, const SlotUse& b) {
    return a.slot != b.slot ? a.slot < b.slot : a.writes != b.writes ? a.writes : a.sequence < b.sequence;
  });
  const char* name = present(write_slots) ? "write_slots" : "read_slots";
  for (int64_t i = 0; i < count; ++i) {
    if (!uses[i].writes) continue;
    for (int64_t j = i + 1; j < count && uses[j].slot == uses[i].slot; ++j) {
      if (uses[j].writes)
        fail_field(pass, name, "slot %lld, got two writes (sequences %lld and %lld), expected one", ll(uses[i].slot),
                   ll(uses[i].sequence), ll(uses[j].sequence));
      if (uses[j].sequence != uses[i].sequence)
        fail_field(pass, name,
                   "slot %lld, got a write by sequence %lld and a read by sequence %lld, expected the same sequence",
                   ll(uses[i].slot), ll(uses[i].sequence), ll(uses[j].sequence));
    }
  }
}

}  // namespace thalweg
