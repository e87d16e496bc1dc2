// The oracles and every float64 kernel row against files made elsewhere: by tests/golden/make.py, which states the
// recurrences on its own and differentiates them by complex step, and by tests/golden/make_fla.py from PyTorch and the
// reference functions of flash-linear-attention.
#include <cstring>
#include <fstream>
#include <sstream>

#include "tests/support.h"

namespace thalweg::tests {
namespace {

namespace tt = thalweg::testing;

struct Record {
  std::string case_text;
  std::map<std::string, Values> inputs, outputs;
};

void read_records(const std::string& stem, std::vector<Record>& list) {
  std::ifstream numbers(stem + ".bin", std::ios::binary);
  std::ostringstream bytes;
  bytes << numbers.rdbuf();
  std::string data = bytes.str();
  std::ifstream manifest(stem + ".txt");
  for (std::string line; std::getline(manifest, line);) {
    std::istringstream words(line);
    std::string role, name;
    words >> role;
    if (role == "generator") continue;
    if (role == "case") {
      list.emplace_back();
      words >> list.back().case_text;
      continue;
    }
    size_t offset;
    words >> name >> offset;
    Values v;
    for (int64_t size; words >> size;) v.shape.push_back(size);
    v.data.resize(size_t(tt::count(v.shape)));
    if ((offset + v.data.size()) * 8 > data.size()) throw std::runtime_error(stem + ".bin ends before " + line);
    if (!v.data.empty()) std::memcpy(v.data.data(), data.data() + offset * 8, v.data.size() * 8);
    (role == "in" ? list.back().inputs : list.back().outputs)[name] = v;
  }
}

std::vector<Record> records() {
  std::vector<Record> list;
  for (const char* stem : {"numpy", "fla"}) read_records(std::string(THALWEG_GOLDEN "/") + stem, list);
  return list;
}

void expect_golden(const Outputs& got, const Outputs& want, const std::string& who) {
  for (const auto& [name, values] : want) {
    ASSERT_TRUE(got.count(name)) << name;
    tt::Difference d = tt::compare(got.at(name), values);
    EXPECT_TRUE(d.ratio < 1e-12 || d.worst < 1e-14) << who << ": " << name << ": RMS ratio " << d.ratio << ", worst " << d.worst << " at " << d.worst_at;
  }
}

TEST(Golden, OraclesAndFloat64Rows) {
  std::vector<Record> all = records();
  EXPECT_GE(all.size(), 60u);
  int checked = 0;
  for (const Record& record : all) {
    SCOPED_TRACE(record.case_text);
    if (!has_pass(record.case_text.substr(0, record.case_text.find(':')))) continue;  // built without the operator
    Case c = tt::parse_case(record.case_text);
    for (const std::string& row : kernel_rows(*c.pass)) {
      Case forced = with_kernel(c, row);
      if (!takes(forced)) continue;
      Problem problem(forced);
      ASSERT_EQ(problem.inputs().size(), record.inputs.size() + (problem.inputs().count("cu_seqlens") ? 1 : 0));
      for (const auto& [name, values] : record.inputs) problem.set(name, values);
      problem.poison_outputs();
      expect_golden(run(problem), record.outputs, row);
      expect_golden(tt::run_reference(problem), record.outputs, "oracle");
      ++checked;
    }
  }
  EXPECT_GT(checked, 0);
}

// The same values in the layout that flash-linear-attention's layers use: states V-first.
TEST(Golden, ValueFirstStates) {
  for (const Record& record : records()) {
    if (!has_pass(record.case_text.substr(0, record.case_text.find(':')))) continue;
    Case c = tt::parse_case(record.case_text);
    bool any = false;
    for (const thalweg_field* field : tt::tensor_fields(*c.pass)) {
      if (!tt::is_state(*field) || field->layout != THALWEG_STATE || !tt::is_present(c, *field)) continue;
      any = true;
      c.options[field->name] = tt::words(field->dims).size() == 4 ? "@0132" : "@021";
    }
    if (!any) continue;
    Problem problem(c);
    for (const auto& [name, values] : record.inputs) problem.set(name, values);
    problem.poison_outputs();
    SCOPED_TRACE(c.text());
    expect_golden(run(problem), record.outputs, "V-first");
  }
}

}  // namespace
}  // namespace thalweg::tests
