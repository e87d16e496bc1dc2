// Checks an args struct against its field table: presence, rank, sizes by name, dtypes, strides,
// device, pointers, overlap of outputs. Everything it refuses, it refuses by the argument's name.
#ifndef THALWEG_CORE_SIGNATURE_H
#define THALWEG_CORE_SIGNATURE_H

#include <string>

#include "thalweg/core/fail.h"
#include "thalweg/core/types.h"

namespace thalweg {

// Sizes bound to names, in order of first appearance.
class Sizes {
 public:
  struct Entry {
    char name[4];  // at most 3 letters, filled with 0
    int64_t value;
    const char* from;  // the argument that set it
  };
  // 0 when the name is not bound (only absent tensors have it).
  int64_t operator[](const char* name) const;
  const Entry* find(const char* name) const;
  void set(const char* name, size_t length, int64_t value, const char* from);
  int count() const { return count_; }
  const Entry& at(int i) const { return entries_[i]; }

 private:
  Entry entries_[16];
  int count_ = 0;
};

// Rows of field tables.
constexpr thalweg_field tensor_field(const char* name, thalweg_role role, size_t offset, bool optional, const char* dims,
                                     const char* dtypes, thalweg_layout layout, const char* doc) {
  return {name, THALWEG_TENSOR, role, uint32_t(offset), optional, dims, dtypes, layout, nullptr, doc};
}
constexpr thalweg_field option_field(const char* name, thalweg_kind kind, size_t offset, const char* doc,
                                     const char* choices = nullptr) {
  return {name, kind, THALWEG_OPTION, uint32_t(offset), 1, nullptr, nullptr, THALWEG_ANY, choices, doc};
}
inline constexpr const char* kFloats = "f64 f32 bf16 f16";
inline constexpr const char* kInts = "i32 i64";

inline const thalweg_tensor& tensor_at(const void* args, const thalweg_field& field) {
  return *reinterpret_cast<const thalweg_tensor*>(static_cast<const char*>(args) + field.offset);
}
// The value of an option as a number.
double option_at(const void* args, const thalweg_field& field);

inline bool present(const thalweg_tensor& t) { return t.dtype != THALWEG_NONE; }

// What bind() and check() may look at: kRun everything; kDevice pointers, not the values behind them, which the kernels
// check (cuda/values.cuh); kQuery neither.
enum class Binding { kRun, kDevice, kQuery };

// Where the tensors of a call are: the place of the first that is present. bind() refuses any other elsewhere.
struct Place {
  thalweg_backend backend;
  int32_t id;
  const char* from;  // the argument that said so
};
Place place_of(const thalweg_pass& pass, const void* args);

// Throws Error; `args` is a full struct (see full_args).
Sizes bind(const thalweg_pass& pass, const void* args, Binding binding);

// Copies the caller's struct, which may be older and shorter, into `full` of pass.args_size bytes.
void full_args(const thalweg_pass& pass, const void* args, void* full);

// "<op>.<pass>:<dtype>,<sizes>,<optional tensors>,<options>": the case string of a call, which the
// tool takes back (docs/conventions.md has the grammar). `args` may have null data.
std::string case_text(const thalweg_pass& pass, const void* args, const Sizes& sizes);

// fail_argument with "<op>.<pass>: <name>: " in front.
[[noreturn]] void fail_field(const thalweg_pass& pass, const char* name, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

// Checks shared by operators (see docs/conventions.md). The values are looked at for kRun only.

// cu_seqlens starts at 0, does not fall, ends at T or before; B is 1. Returns the number of sequences:
// cu_seqlens' N, or B without it; `state` (the first of these that is present) must agree.
int64_t check_sequences(const thalweg_pass& pass, const Sizes& sizes, const thalweg_tensor& cu_seqlens,
                        Binding binding);
// Borders of packed sequences: from 0, never falling, to `size` or before. For cu_seqlens, check_sequences() does it.
void check_borders(const thalweg_pass& pass, const char* name, const thalweg_tensor& borders, const char* size,
                   const Sizes& sizes);
// Lengths in use [N], may be absent: 0 to the tokens that the sequence has by its borders, or `all` without borders.
void check_lengths(const thalweg_pass& pass, const char* name, const thalweg_tensor& lengths,
                   const thalweg_tensor& borders, int64_t all);
// Slots of a state pool of M states: -1 or in range; nothing written twice, nothing read by one
// sequence and written by another. Slots absent: sequence n reads and writes slot n.
void check_slots(const thalweg_pass& pass, int64_t N, int64_t T, int64_t M, const thalweg_tensor& read_slots,
                 const thalweg_tensor& write_slots, Binding binding);

// Element i of an i32 or i64 tensor of rank 1, or (i, j) of rank 2.
inline int64_t int_at(const thalweg_tensor& t, int64_t i, int64_t j = 0) {
  int64_t at = i * t.stride[0] + (t.rank > 1 ? j * t.stride[1] : 0);
  return t.dtype == THALWEG_I64 ? static_cast<const int64_t*>(t.data)[at] : static_cast<const int32_t*>(t.data)[at];
}

}  // namespace thalweg
#endif
