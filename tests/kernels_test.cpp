// Every kernel row x every case of the sets, against the float64 oracle. One test per row and case; a
// failure prints the line that repeats it.
#include <iostream>

#include "tests/support.h"

namespace thalweg::tests {
namespace {

namespace tt = thalweg::testing;

class KernelTest : public ::testing::Test {
 public:
  KernelTest(Case c, std::string row) : case_(std::move(c)), row_(std::move(row)) {}

  void TestBody() override {
    if (!machine_has(kernel_isa(*case_.pass, row_))) GTEST_SKIP() << row_ << ": this machine lacks " << kernel_isa(*case_.pass, row_);
    Case c = with_kernel(case_, row_);
    tt::Verdict verdict = tt::verify(c);
    if (verdict.status == "skipped") GTEST_SKIP() << verdict.reason;
    EXPECT_TRUE(verdict.passed()) << verdict.reason << "\n  thalweg verify " << verdict.case_text;
    for (const tt::Verdict::Output& out : verdict.outputs)
      if (out.limit > 0) RecordProperty(out.name, std::to_string(out.difference.ratio / out.limit));
  }

 private:
  Case case_;
  std::string row_;
};

class BrokenSet : public ::testing::Test {
 public:
  explicit BrokenSet(std::string text) : text_(std::move(text)) {}
  void TestBody() override { FAIL() << text_; }

 private:
  std::string text_;
};

// A model's case with the heads of the last tensor-parallel rank only: the groups are independent, and
// `thalweg verify @models` checks whole ones.
Case fewer_heads(Case c) {
  std::vector<std::string> names = tt::words(tt::spec_of(*c.pass).head_sizes);
  if (names.empty() || c.size(names[0]) <= 2) return c;
  int64_t all = c.size(names[0]), keep = names.size() > 1 ? 2 : std::min<int64_t>(all, 256);
  for (const std::string& name : names) c.sizes[name] = c.size(name) / all * keep;
  return c;
}

// gtest filters by ':' and '-', so neither may stand in a name.
std::string test_name(const std::string& text, const std::string& row) {
  std::string name = text + "/" + row;
  for (char& c : name)
    if (c == ':' || c == '-') c = c == ':' ? '/' : '~';
  return name;
}

}  // namespace

void register_kernel_tests() {
  for (const std::string& set : tt::set_names()) {
    if (set == "perf" || set == "long") continue;  // bench verifies those
    if (set == "grid" || set == "original") continue;  // large: for `thalweg verify`; ci has a thinned part
    std::string suite = "kernels_" + set;
    std::vector<Case> cases;
    try {
      cases = tt::find_cases("@" + set);
    } catch (const std::exception& e) {
      std::string text = e.what();
      ::testing::RegisterTest(suite.c_str(), "parses", nullptr, nullptr, __FILE__, __LINE__, [=]() -> ::testing::Test* { return new BrokenSet(text); });
      continue;
    }
    for (Case c : cases) {
      if (set == "models") c = fewer_heads(c);
      for (const std::string& row : kernel_rows(*c.pass)) {
        std::string name = test_name(c.text(), row);
        ::testing::RegisterTest(suite.c_str(), name.c_str(), nullptr, nullptr, __FILE__, __LINE__, [=]() -> ::testing::Test* { return new KernelTest(c, row); });
      }
    }
  }
}

}  // namespace thalweg::tests
