// Which kernel runs: explain, forcing, THALWEG_ISA, THALWEG_NUM_THREADS, THALWEG_VERBOSE.
#include <algorithm>
#include <cstring>
#include <regex>

#include "tests/child.h"
#include "tests/support.h"

namespace thalweg::tests {
namespace {

namespace tt = thalweg::testing;

std::string explained(Problem& problem, const char* kernel) {
  std::vector<char> text(1 << 16);
  thalweg_context ctx{};
  ctx.kernel = kernel;
  EXPECT_EQ(problem.spec_case().pass->explain(problem.args(), &ctx, text.data(), text.size()), THALWEG_OK) << thalweg_last_error();
  return text.data();
}

TEST(Select, ExplainNamesEveryRowOnceAndOneRuns) {
  for (const thalweg_pass* pass : all_passes())
    for (const Case& c : pass_cases(*pass, {"smoke"}, 1e9)) {
      Problem problem(c);
      std::string text = explained(problem, nullptr);
      int runs = 0;
      std::vector<std::string> lines = tt::split(text, '\n');
      for (const std::string& row : kernel_rows(*pass)) {
        int seen = 0;
        for (const std::string& line : lines)
          if (line.starts_with(row + ": ")) ++seen, runs += line.starts_with(row + ": runs");
        EXPECT_EQ(seen, 1) << row << "\n" << text;
      }
      EXPECT_EQ(runs, 1) << text;
      EXPECT_NE(problem.kernel(), "");
    }
}

// "row/choice=value": what a caller decides, the row does, with the same numbers; nonsense is refused by name.
TEST(Select, ChoicesOfARowAreTheCallers) {
  int decided = 0;
  for (const thalweg_pass* pass : all_passes())
    for (const std::string& row : kernel_rows(*pass)) {
      std::string choices;
      for (int64_t i = 0; const char* name = pass->kernel_at(i, nullptr); ++i)
        if (row == name) choices = pass->choices_at(i);
      if (choices.empty()) continue;
      for (const std::string& word : tt::split(choices, ' ')) {
        const std::string name = word.substr(0, word.find('='));
        std::vector<std::string> values = tt::split(word.substr(name.size() + 1), '|');
        for (const std::string& value : values)
          for (Case c : pass_cases(*pass, {"smoke"}, 1e9)) {
            c.kernel = row + "/" + name + "=" + value;
            const tt::Verdict verdict = tt::verify(c);
            EXPECT_TRUE(verdict.passed() || verdict.status == "skipped") << c.text() << ": " << verdict.reason;
            if (verdict.status == "skipped") continue;
            ++decided;
            Problem problem(c);
            const std::string text = explained(problem, c.kernel.c_str());
            EXPECT_NE(text.find(", " + name + " " + value), std::string::npos) << text;
          }
        std::vector<Case> cases = pass_cases(*pass, {"smoke"}, 1e9);
        Problem problem(cases.at(0));
        std::string text(4096, ' ');
        thalweg_context ctx{};
        for (const std::string& wrong : {name + "s=1", name, name + "=", name + "=-1", name + "=1.5", std::string("")}) {
          const std::string forced = row + "/" + wrong;
          ctx.kernel = forced.c_str();
          EXPECT_EQ(pass->explain(problem.args(), &ctx, text.data(), text.size()), THALWEG_INVALID_ARGUMENT) << forced;
          EXPECT_NE(std::string(thalweg_last_error()).find("kernel: "), std::string::npos) << thalweg_last_error();
        }
      }
    }
  EXPECT_GT(decided, 0);
}

TEST(Select, ExplainFitsAnyCapacity) {
  for (const thalweg_pass* pass : all_passes()) {
    std::vector<Case> cases = pass_cases(*pass, {"smoke"}, 1e9);
    ASSERT_FALSE(cases.empty()) << tt::pass_name(*pass);
    Problem problem(cases[0]);
    std::string whole = explained(problem, nullptr);
    for (size_t capacity : {size_t(0), size_t(1), size_t(2), size_t(20), whole.size(), whole.size() + 1}) {
      std::vector<char> out(capacity + 1, 'z');
      thalweg_context ctx{};
      ASSERT_EQ(pass->explain(problem.args(), &ctx, out.data(), capacity), THALWEG_OK);
      EXPECT_EQ(out[capacity], 'z');
      if (capacity) {
        EXPECT_EQ(std::string(out.data()), whole.substr(0, capacity - 1));
      }
    }
  }
}

TEST(Select, TablesEndWithARowForEveryMachine) {
  for (const thalweg_pass* pass : all_passes()) {
    std::vector<std::string> rows = kernel_rows(*pass);
    ASSERT_FALSE(rows.empty());
    EXPECT_EQ(kernel_isa(*pass, rows.back()), "portable") << tt::pass_name(*pass);
    EXPECT_EQ(pass->kernel_at(-1, nullptr), nullptr);
    int64_t all = 0;
    while (pass->kernel_at(all, nullptr)) ++all;
    EXPECT_EQ(pass->kernel_at(all + 1, nullptr), nullptr);
    EXPECT_GE(all, int64_t(rows.size()));
    for (size_t i = 0; i < rows.size(); ++i)
      for (size_t j = 0; j < i; ++j) EXPECT_NE(rows[i], rows[j]);
  }
}

// No row of this machine is declined by every case: a kernel that nothing reaches is not tested.
TEST(Select, EveryRowOfThisMachineTakesSomeCase) {
  for (const thalweg_pass* pass : all_passes())
    for (const std::string& row : kernel_rows(*pass)) {
      if (!machine_has(kernel_isa(*pass, row))) continue;
      const std::vector<Case>& cases = pass_cases(*pass, {"smoke", "ci"}, 1e9);
      EXPECT_TRUE(std::any_of(cases.begin(), cases.end(), [&](const Case& c) { return takes(with_kernel(c, row)); }))
          << tt::pass_name(*pass) << " " << row;
    }
}

TEST(Select, ForcedRowThatDeclinesSaysWhy) {
  int declined = 0;
  for (const thalweg_pass* pass : all_passes())
    for (const std::string& row : kernel_rows(*pass))
      for (const Case& c : pass_cases(*pass, {"smoke", "edge"}, 1e9)) {
        if (takes(with_kernel(c, row))) continue;
        Problem problem(with_kernel(c, row));
        ASSERT_EQ(problem.call(), THALWEG_UNSUPPORTED) << problem.spec_case().text();
        ++declined;
        std::string text = thalweg_last_error();
        EXPECT_TRUE(text.starts_with(tt::pass_name(*pass) + ": no kernel for this problem (forced " + row + ")\n  " + row + ": ")) << text;
        EXPECT_GT(text.size(), text.rfind(": ") + 4) << text;
        EXPECT_EQ(problem.check_untouched(), "");
      }
  RecordProperty("declined", declined);
}

TEST(Environment, IsaIsLowered) {
  for (const char* isa : {"portable", "avx2", "avx512", "amx"}) {
    if (!machine_has(isa)) continue;
    ChildResult child = run_child("isa", {{"THALWEG_ISA", isa}});
    EXPECT_EQ(child.status, 0) << child.output;
    EXPECT_TRUE(child.output.starts_with(std::string("isa ") + isa + "\n")) << child.output;
    EXPECT_EQ(child.output.find("failed"), std::string::npos) << child.output;
    const std::string all[] = {"portable", "avx2", "avx512", "amx"};
    for (const std::string* above = std::find(std::begin(all), std::end(all), isa) + 1; above < std::end(all); ++above)
      EXPECT_EQ(child.output.find(" " + *above + " "), std::string::npos) << child.output;
  }
}

TEST(Environment, UnknownIsaIsAnErrorThatNamesIt) {
  std::vector<Case> cases = pass_cases(*all_passes().at(0), {"smoke"}, 1e9);
  ASSERT_FALSE(cases.empty());
  ChildResult child = run_child("call " + cases[0].text(), {{"THALWEG_ISA", "sse9"}});
  EXPECT_NE(child.status, 0);
  EXPECT_NE(child.output.find("sse9"), std::string::npos) << child.output;
  EXPECT_NE(child.output.find("THALWEG_ISA"), std::string::npos) << child.output;
}

TEST(Environment, NumberOfThreads) {
  EXPECT_EQ(run_child("threads", {{"THALWEG_NUM_THREADS", "3"}}).output, "3\n");
  EXPECT_EQ(run_child("threads", {{"OMP_NUM_THREADS", "5"}}).output, "5\n");
  EXPECT_EQ(run_child("threads", {{"THALWEG_NUM_THREADS", "2"}, {"OMP_NUM_THREADS", "5"}}).output, "2\n");
  EXPECT_EQ(run_child("threads", {{"THALWEG_NUM_THREADS", ""}, {"OMP_NUM_THREADS", "5,2"}}).output, "5\n");
  EXPECT_EQ(run_child("threads", {{"THALWEG_NUM_THREADS", "1024"}}).output, "1024\n");
}

TEST(Environment, WrongNumberOfThreadsIsAnErrorThatNamesIt) {
  std::vector<Case> cases = pass_cases(*all_passes().at(0), {"smoke"}, 1e9);
  ASSERT_FALSE(cases.empty());
  for (const char* text : {"abc", "0", "-3", "5x", "2.5", " 2", "1025", "99999999999999999999"}) {
    ChildResult child = run_child("call " + cases[0].text(), {{"THALWEG_NUM_THREADS", text}, {"OMP_NUM_THREADS", "2"}});
    EXPECT_EQ(child.status, THALWEG_INVALID_ARGUMENT) << text << ": " << child.output;
    EXPECT_NE(child.output.find(std::string("THALWEG_NUM_THREADS: got ") + text + ", expected 1 to 1024"), std::string::npos) << child.output;
    EXPECT_EQ(run_child("threads", {{"THALWEG_NUM_THREADS", text}}).output, "0\n") << text;
  }
}

// One line per call, whose case string is a case again and is the same problem.
TEST(Environment, VerboseLine) {
  std::regex line("thalweg: (\\S+) \\| (\\w+) \\| (portable|avx2|avx512|amx) \\| [0-9]+ threads \\| [0-9.]+ ms\n");
  for (const thalweg_pass* pass : all_passes())
    for (const Case& c : pass_cases(*pass, {"smoke"}, 1e8)) {
      ChildResult child = run_child("call " + c.text(), {{"THALWEG_VERBOSE", "1"}});
      ASSERT_EQ(child.status, 0) << child.output;
      std::smatch match;
      ASSERT_TRUE(std::regex_match(child.output, match, line)) << child.output;
      Case again = tt::parse_case(match[1].str());
      EXPECT_EQ(again.pass, c.pass);
      EXPECT_EQ(again.dtype, c.dtype);
      for (const thalweg_field* field : tt::tensor_fields(*pass)) {
        EXPECT_EQ(tt::is_present(again, *field), tt::is_present(c, *field)) << field->name << " in " << match[1];
        if (!tt::is_present(c, *field) || !tt::is_present(again, *field)) continue;
        EXPECT_EQ(tt::shape_in(again, *field), tt::shape_in(c, *field)) << field->name << " in " << match[1];
        EXPECT_EQ(tt::dtype_in(again, *field), tt::dtype_in(c, *field)) << field->name << " in " << match[1];
      }
      for (int64_t i = 0; i < pass->num_fields; ++i)
        if (pass->fields[i].kind == THALWEG_FLAG || pass->fields[i].kind == THALWEG_REAL) {
          EXPECT_EQ(again.number(pass->fields[i].name, 0), c.number(pass->fields[i].name, 0)) << match[1];
        }
    }
  std::vector<Case> cases = pass_cases(*all_passes().at(0), {"smoke"}, 1e9);
  EXPECT_EQ(run_child("call " + cases.at(0).text(), {}).output, "");
}

}  // namespace
}  // namespace thalweg::tests
