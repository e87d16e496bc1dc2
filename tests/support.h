// What the tests share: running a problem, cutting values along named axes, picking cases.
#ifndef THALWEG_TESTS_SUPPORT_H
#define THALWEG_TESTS_SUPPORT_H

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "testing/fields.h"
#include "testing/testing.h"

namespace thalweg::tests {

using thalweg::testing::Case;
using thalweg::testing::Problem;
using thalweg::testing::Random;
using thalweg::testing::Values;
using Outputs = std::map<std::string, Values>;

std::vector<const thalweg_pass*> all_passes();
const thalweg_pass* find_pass(const std::string& name);  // "<op>.<pass>", nullptr when the library lacks it
bool has_pass(const std::string& name);
std::vector<std::string> kernel_rows(const thalweg_pass& pass);  // without CUDA rows where there is no GPU
std::string kernel_isa(const thalweg_pass& pass, const std::string& row);
bool machine_has(const std::string& isa);

// The cases of every set in `sets` for one pass whose work is at most `max_flops`; sets that do not
// exist count as empty.
const std::vector<Case>& pass_cases(const thalweg_pass& pass, const std::vector<std::string>& sets, double max_flops);
// The case with other kernel, or with options set ("name" -> "value") or erased ("-name").
Case with(Case c, const std::map<std::string, std::string>& options);
Case with_kernel(Case c, const std::string& kernel);
Case with_sizes(Case c, const std::map<std::string, int64_t>& sizes);

// Calls; a failure of the call or a written guard is a test failure. `taken` false: the forced kernel
// does not take the problem.
Outputs run(Problem& problem, bool* taken = nullptr);
Outputs run(const Case& c, bool* taken = nullptr);
bool takes(const Case& c);  // whether the forced kernel takes it here

bool same_bits(const Values& a, const Values& b);
// "" or which output differs first, where, and both values.
std::string first_difference(const Outputs& a, const Outputs& b);
// "" or which output lies further than `times` the case's limit from `want`.
std::string out_of_limit(const Case& c, const Outputs& got, const Outputs& want, double times = 1);

// Runs and compares every output with the oracle on the problem's present inputs (set() may have changed
// them), by the case's limits times `times`; where the limit is 0, by 4 times the last row's error.
void expect_oracle(Problem& problem, double times = 1);

// Axis of a size name in a field's dims, -1 without it.
int axis_of(const thalweg_field& field, const std::string& dim);
Values take(const Values& v, int axis, const std::vector<int64_t>& indices);
Values cut(const Values& v, int axis, int64_t begin, int64_t end);
Values join(const Values& a, const Values& b, int axis);
std::vector<int64_t> iota(int64_t begin, int64_t end);
// Sets elements [begin, end) of an axis.
void assign(Values* v, int axis, int64_t begin, int64_t end, const std::function<double(double)>& change);

// One test per pass: TEST_F-like registration for tests that walk the pass table.
void register_per_pass(const char* suite, const char* name, void (*body)(const thalweg_pass&));

// Called by main() before the tests run.
void register_kernel_tests();
void register_bind_tests();
void register_property_tests();
void register_stride_tests();
void register_gradient_tests();

}  // namespace thalweg::tests
#endif
