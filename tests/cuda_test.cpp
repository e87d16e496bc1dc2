// What only a call on a GPU can get wrong: values that nobody may look at on the host, workspaces, repeated runs.
// Without a GPU the tests that need one are skipped; what such a machine answers is tested there.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "testing/device.h"
#include "testing/fields.h"
#include "tests/support.h"

namespace thalweg::tests {
namespace {

namespace tt = thalweg::testing;

std::vector<std::string> cuda_rows(const thalweg_pass& pass) {
  std::vector<std::string> rows;
  for (const std::string& row : kernel_rows(pass))
    if (tt::is_cuda_row(pass, row)) rows.push_back(row);
  return rows;
}

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!tt::why_no_device().empty()) GTEST_SKIP() << tt::why_no_device();
  }
};

// Every smoke, ci and edge case of a pass with `field`, on every CUDA row that takes it, `most` of each at most.
void for_cases_with(const char* field, size_t most, const std::function<void(const Case&)>& body) {
  for (const thalweg_pass* pass : all_passes()) {
    if (!tt::find_field(*pass, field)) continue;
    for (const std::string& row : cuda_rows(*pass)) {
      size_t taken = 0;
      for (const Case& base : pass_cases(*pass, {"smoke", "ci"}, 1e8)) {
        if (!tt::is_present(base, *tt::find_field(*pass, field))) continue;
        const Case c = with_kernel(base, row);
        if (taken == most) break;
        if (!takes(c)) continue;
        ++taken;
        body(c);
      }
    }
  }
}

bool has_nan(const Outputs& outputs) {
  for (const auto& [name, values] : outputs)
    if (std::any_of(values.data.begin(), values.data.end(), [](double x) { return std::isnan(x); })) return true;
  return false;
}

bool cpu_refuses(const Case& c, const std::string& field, const Values& values) {
  Problem problem(with_kernel(c, kernel_rows(*c.pass).back()));
  problem.set(field, values);
  return problem.call() == THALWEG_INVALID_ARGUMENT;
}

// Calls with other values of a tensor, which the CPU refuses: nothing outside the outputs is written, the report names
// the tensor.
Outputs run_with(const Case& c, const std::string& field, const Values& values) {
  EXPECT_TRUE(cpu_refuses(c, field, values)) << c.text();
  Problem problem(c);
  problem.set(field, values);
  problem.poison_outputs();
  EXPECT_EQ(problem.call(), THALWEG_OK) << thalweg_last_error() << "\n  " << c.text();
  EXPECT_EQ(problem.check_guards(), "") << c.text();
  EXPECT_NE(problem.report().find(": " + field + ": element "), std::string::npos)
      << problem.report() << "\n  " << c.text();
  Outputs outputs;
  for (const std::string& name : problem.outputs()) outputs[name] = problem.read(name);
  return outputs;
}

TEST_F(Cuda, WrongBordersGiveNaNAndAReport) {
  for (const char* field : {"cu_seqlens", "cu_seqlens_k"})
    for_cases_with(field, 3, [&](const Case& c) {
      const Values right = Problem(c).inputs().at(field);
      const size_t last = right.data.size() - 1;
      if (last < 1 || right.data[last] == 0) return;
      for (double wrong : {right.data[last] + 1e6, -7.0, -1e9}) {
        Values borders = right;
        borders.data[last] = wrong;
        const Outputs got = run_with(c, field, borders);
        // A border below 0 leaves the sequence no rows, so that only its state can tell.
        if (wrong > 0) {
          EXPECT_TRUE(has_nan(got)) << c.text();
        }
      }
      Values first = right;
      first.data[0] = 1;
      run_with(c, field, first);
    });
}

TEST_F(Cuda, SequencesBeforeAWrongBorderKeepTheirNumbers) {
  for_cases_with("cu_seqlens", 3, [&](const Case& c) {
    if (!tt::find_field(*c.pass, "o") && !tt::find_field(*c.pass, "y")) return;
    const std::string name = tt::find_field(*c.pass, "o") ? "o" : "y";
    Problem problem(c);
    Values borders = problem.inputs().at("cu_seqlens");
    if (borders.data.size() < 3 || borders.data[1] == 0) return;
    const Outputs right = run(problem);
    if (!right.count(name)) return;
    const Values& want = right.at(name);
    borders.data.back() = 1e6;
    const Values got = run_with(c, "cu_seqlens", borders).at(name);
    const int axis = axis_of(*tt::find_field(*c.pass, name), "T");
    ASSERT_GE(axis, 0);
    EXPECT_TRUE(same_bits(cut(got, axis, 0, int64_t(borders.data[1])), cut(want, axis, 0, int64_t(borders.data[1]))))
        << c.text();
  });
}

TEST_F(Cuda, WrongSlotsTouchNoState) {
  for_cases_with("read_slots", 3, [&](const Case& c) {
    Problem problem(c);
    Values slots = problem.inputs().at("read_slots");
    if (slots.data.empty()) return;
    for (double wrong : {1e6, -5.0}) {
      slots.data[0] = wrong;
      EXPECT_TRUE(has_nan(run_with(c, "read_slots", slots))) << c.text();
    }
  });
  for_cases_with("write_slots", 3, [&](const Case& c) {
    Problem problem(c);
    Values slots = problem.inputs().at("write_slots");
    if (slots.data.empty()) return;
    slots.data[0] = 1e6;
    EXPECT_TRUE(has_nan(run_with(c, "write_slots", slots))) << c.text();
  });
}

TEST_F(Cuda, SlotsUsedTwiceGiveNaNAndAReport) {
  for_cases_with("read_slots", 8, [&](const Case& c) {
    Values slots = Problem(c).inputs().at("read_slots");
    if (c.has("write_slots") || slots.data.size() < 2 || slots.data[0] < 0) return;
    slots.data[1] = slots.data[0];  // both sequences write where they read
    EXPECT_TRUE(has_nan(run_with(c, "read_slots", slots))) << c.text();
  });
  for_cases_with("write_slots", 3, [&](const Case& c) {
    Problem problem(c);
    Values slots = problem.inputs().at("write_slots");
    if (c.size("T") < 2) return;
    slots.data[1] = slots.data[0];                      // two tokens of one sequence
    if (!cpu_refuses(c, "write_slots", slots)) return;  // neither is kept
    EXPECT_TRUE(has_nan(run_with(c, "write_slots", slots))) << c.text();
  });
}

TEST_F(Cuda, WrongIndicesGiveNaNAndAReport) {
  for_cases_with("indices", 3, [&](const Case& c) {
    if (tt::find_field(*c.pass, "indices")->role != THALWEG_IN) return;
    Problem problem(c);
    Values indices = problem.inputs().at("indices");
    if (indices.data.empty()) return;
    for (double wrong : {1e6, -9.0}) {
      indices.data[0] = wrong;
      if (!cpu_refuses(c, "indices", indices)) continue;  // an entry that is not visible is nobody's fault
      EXPECT_TRUE(has_nan(run_with(c, "indices", indices))) << c.text();
    }
  });
}

TEST_F(Cuda, RunsAreEqualBitForBit) {
  for (const thalweg_pass* pass : all_passes())
    for (const std::string& row : cuda_rows(*pass)) {
      size_t taken = 0;
      for (const Case& base : pass_cases(*pass, {"ci"}, 3e8)) {
        const Case c = with_kernel(base, row);
        if (taken == 2) break;
        if (!takes(c)) continue;
        ++taken;
        Problem problem(c);
        const Outputs first = run(problem);
        for (int i = 0; i < 20; ++i) {
          problem.poison_outputs();
          ASSERT_EQ(first_difference(first, run(problem)), "") << c.text();
        }
      }
    }
}

TEST_F(Cuda, AWorkspaceIsAskedForByItsSize) {
  for (const thalweg_pass* pass : all_passes())
    for (const std::string& row : cuda_rows(*pass))
      for (const Case& base : pass_cases(*pass, {"smoke"}, 1e8)) {
        const Case c = with_kernel(base, row);
        if (!takes(c)) continue;
        Problem problem(c);
        void* args = problem.device_args();
        thalweg_context ctx = problem.context();
        size_t bytes = 0;
        ASSERT_EQ(pass->workspace(args, &ctx, &bytes), THALWEG_OK);
        if (bytes == 0) continue;
        EXPECT_EQ(pass->call(args, &ctx), THALWEG_INVALID_ARGUMENT);
        EXPECT_NE(std::string(thalweg_last_error()).find("workspace: got none, expected " + std::to_string(bytes)),
                  std::string::npos)
            << thalweg_last_error();
        break;
      }
}

TEST_F(Cuda, PrepareLoadsEveryKernel) {
  EXPECT_EQ(thalweg_prepare(0), THALWEG_OK) << thalweg_last_error();
  EXPECT_EQ(thalweg_prepare(0), THALWEG_OK) << thalweg_last_error();
  EXPECT_EQ(thalweg_prepare(-1), THALWEG_DEVICE_ERROR);
  EXPECT_EQ(thalweg_prepare(1000), THALWEG_DEVICE_ERROR);
}

TEST(NoCuda, TensorsOnAGpuAreRefusedWithTheReason) {
  if (tt::why_no_device().empty()) GTEST_SKIP() << "this machine has a GPU";
  for (const thalweg_pass* pass : all_passes()) {
    const std::vector<Case>& cases = pass_cases(*pass, {"smoke"}, 1e8);
    ASSERT_FALSE(cases.empty());
    Problem problem(cases[0]);
    for (const thalweg_field* field : tt::tensor_fields(*pass))
      if (tt::is_present(cases[0], *field)) problem.tensor(field->name).device_type = THALWEG_CUDA;
    EXPECT_EQ(problem.call(), THALWEG_DEVICE_ERROR);
    EXPECT_TRUE(std::string(thalweg_last_error()).starts_with("cuda: ")) << thalweg_last_error();
    EXPECT_EQ(problem.check_untouched(), "");
    size_t bytes = 0;
    EXPECT_EQ(pass->workspace(problem.args(), nullptr, &bytes), THALWEG_DEVICE_ERROR);
  }
  EXPECT_EQ(thalweg_prepare(0), THALWEG_DEVICE_ERROR);
}

TEST(NoCuda, ReportsAreWords) {
  for (const thalweg_pass* pass : all_passes()) {
    const int32_t none[4] = {};
    char text[200] = "x";
    ASSERT_EQ(thalweg_report_text(pass, none, text, sizeof text), THALWEG_OK);
    EXPECT_STREQ(text, "");
    const thalweg_field& first = *tt::tensor_fields(*pass)[0];
    const int32_t border[4] = {1, int32_t(first.offset), 3, 90};
    ASSERT_EQ(thalweg_report_text(pass, border, text, sizeof text), THALWEG_OK);
    EXPECT_EQ(std::string(text),
              tt::pass_name(*pass) + ": " + first.name +
                  ": element 3, got 90, expected borders from 0, never falling, up to the number of tokens");
    EXPECT_EQ(thalweg_report_text(pass, nullptr, text, sizeof text), THALWEG_INVALID_ARGUMENT);
    ASSERT_EQ(thalweg_report_text(pass, border, text, 5), THALWEG_OK);
    EXPECT_EQ(std::strlen(text), 4u);
  }
}

}  // namespace
}  // namespace thalweg::tests
