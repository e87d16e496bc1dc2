// Reading the field tables for one case: shapes, dtypes, strides, and elements as float64.
#ifndef THALWEG_TESTING_FIELDS_H
#define THALWEG_TESTING_FIELDS_H

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "testing/testing.h"
#include "thalweg/core/types.h"

namespace thalweg::testing {

std::vector<std::string> words(const char* text);  // split at spaces
std::vector<std::string> split(std::string_view text, char separator);
std::string pass_name(const thalweg_pass& pass);  // "<op>.<pass>"

const thalweg_field* find_field(const thalweg_pass& pass, std::string_view name);  // nullptr when there is none
std::vector<const thalweg_field*> tensor_fields(const thalweg_pass& pass);
// Size names in order of first appearance ("N+1" names N).
std::vector<std::string> size_names(const thalweg_pass& pass);

bool is_input(const thalweg_field& field);   // in and inout tensors
bool is_output(const thalweg_field& field);  // out and inout tensors
bool is_integer(thalweg_dtype dtype);
thalweg_dtype parse_dtype(std::string_view name);  // THALWEG_NONE when it is no dtype's name
bool accepts_dtype(const thalweg_pass& pass, const thalweg_field& field, thalweg_dtype dtype);
// A recurrent state: three axes or more, the first N, M or R.
bool is_state(const thalweg_field& field);

bool is_present(const Case& c, const thalweg_field& field);
thalweg_dtype dtype_in(const Case& c, const thalweg_field& field);  // given, or the default of testing/README.md
std::vector<int64_t> shape_in(const Case& c, const thalweg_field& field);
// A tensor without data, strides as the case's layout says; `offset` gets the elements of @off.
thalweg_tensor layout_in(const Case& c, const thalweg_field& field, int64_t* offset);
bool padded_slots(const Case& c, const std::string& name);  // @pad

int64_t count(const thalweg_tensor& t);  // elements
int64_t count(const std::vector<int64_t>& shape);
// Lowest and one past the highest element offset from `data`; 0, 0 when there are no elements.
void extent(const thalweg_tensor& t, int64_t* low, int64_t* high);
// Calls fn(offset) for every element in row-major order.
template <class Fn>
void each_offset(const thalweg_tensor& t, Fn&& fn) {
  if (count(t) == 0) return;
  int64_t index[THALWEG_MAX_RANK] = {}, at = 0;
  int last = t.rank - 1;
  for (;;) {
    if (last < 0) return fn(int64_t(0));
    for (int64_t i = 0; i < t.shape[last]; ++i) fn(at + i * t.stride[last]);
    int axis = last - 1;
    for (; axis >= 0; --axis) {
      at += t.stride[axis];
      if (++index[axis] < t.shape[axis]) break;
      at -= index[axis] * t.stride[axis];
      index[axis] = 0;
    }
    if (axis < 0) return;
  }
}

double load(const void* data, thalweg_dtype dtype, int64_t at);
void store(void* data, thalweg_dtype dtype, int64_t at, double value);  // rounds to nearest even, once
Values read_values(const thalweg_tensor& t);
void write_values(const thalweg_tensor& t, const Values& values);

}  // namespace thalweg::testing
#endif
