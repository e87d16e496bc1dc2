// Wrong values inside tensors on the GPU: what an operator must do about them (docs/cuda.md).
#ifndef THALWEG_TESTS_CUDA_FAULTS_H
#define THALWEG_TESTS_CUDA_FAULTS_H

#include <cmath>
#include <string>
#include <vector>

#include "testing/device.h"
#include "tests/support.h"

namespace thalweg::tests {

struct WrongValue {
  std::string field;
  std::vector<double> right, wrong;
  int64_t first, end;  // queries whose sequence it spoils
  std::string report;  // behind the field's name
};

// With the wrong values a call on the GPU still succeeds, its report says which, other queries' rows keep their bits,
// and the spoilt ones are NaN, integers -1. Outputs that have no axis of queries are not looked at.
inline void expect_contained(const std::string& text, const WrongValue& value) {
  const auto& [field, right_values, wrong_values, first, end, report] = value;
  SCOPED_TRACE("  " + text + ", wrong " + field);
  Problem problem(testing::parse_case(text + ",cuda"));
  const std::vector<int64_t> shape = {int64_t(right_values.size())};
  problem.set(field, {shape, right_values});
  problem.poison_outputs();
  const Outputs want = run(problem);
  problem.set(field, {shape, wrong_values});
  problem.poison_outputs();
  ASSERT_EQ(problem.call(), THALWEG_OK) << thalweg_last_error();
  const thalweg_pass& pass = *problem.spec_case().pass;
  EXPECT_EQ(problem.report(), std::string(pass.op) + "." + pass.name + ": " + field + ": " + report);
  for (const auto& [name, right] : want) {
    const thalweg_field& described = *testing::find_field(pass, name);
    const int axis = axis_of(described, "T");
    if (axis < 0) continue;
    const Values got = problem.read(name);
    EXPECT_TRUE(same_bits(cut(got, axis, 0, first), cut(right, axis, 0, first))) << name;
    EXPECT_TRUE(same_bits(cut(got, axis, end, got.shape[size_t(axis)]), cut(right, axis, end, right.shape[size_t(axis)])))
        << name;
    for (double x : cut(got, axis, first, end).data)
      ASSERT_TRUE(std::isnan(x) || (testing::accepts_dtype(pass, described, THALWEG_I64) && x == -1))
          << name << ", got " << x;
  }
}

// Of cases of sequences of 20, 30 and 14 queries, packed, with 30 keys each.
inline void expect_borders_contained(const std::string& text) {
  const std::string borders = ", expected borders from 0, never falling, up to the number of tokens";
  const std::string length = ", expected 0 to the tokens of the sequence";
  expect_contained(text, {"cu_seqlens", {0, 20, 50, 64}, {0, 20, 15, 64}, 20, 64, "element 2, got 15" + borders});
  expect_contained(text, {"cu_seqlens_k", {0, 30, 60, 90}, {0, 30, 91, 90}, 20, 64, "element 2, got 91" + borders});
  expect_contained(text + ",k_lens", {"k_lens", {30, 30, 30}, {30, -5, 30}, 20, 50, "element 1, got -5" + length});
  expect_contained(text + ",q_lens", {"q_lens", {20, 30, 14}, {20, 31, 14}, 20, 50, "element 1, got 31" + length});
}

}  // namespace thalweg::tests
#endif
