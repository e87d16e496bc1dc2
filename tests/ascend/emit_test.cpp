// The generators' texts, read as text: no tool is needed. That they compute the right numbers is execute_test.cpp's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "tests/ascend/plans.h"

namespace thalweg::ascend::tests {
namespace {

struct Named {
  std::string name;
  Plan plan;
};

// One or two texts of each kernel; golden/<name>.mlir holds each. THALWEG_WRITE_GOLDEN=1 writes them anew.
std::vector<Named> golden_plans() {
  const ChunkSizes fixed{.B = 2, .T = 256, .H = 4, .HV = 4}, packed{.H = 2, .HV = 4, .lengths = {64, 1, 100}};
  return {
      {"kda_gate_fwd", gate_plan("fwd", {.T = 1000, .HV = 16}, Mode::kSingle, true)},
      {"kda_gate_bwd", gate_plan("bwd", {.T = 1024, .HV = 16, .BT = 32}, Mode::kPersistent, false)},
      {"cumsum_reverse", chunk_plan("cumsum_reverse", packed, Gate::kHeadsFirst, Mode::kSingle, true)},
      {"dv_local_heads_first", chunk_plan("dv_local", fixed, Gate::kHeadsFirst, Mode::kSingle, false)},
      {"dv_local_packed", chunk_plan("dv_local", packed, Gate::kTokensFirst, Mode::kPersistent, true)},
      {"dqkw", chunk_plan("dqkw", fixed, Gate::kTokensFirst, Mode::kSingle, false)},
      {"state", chunk_plan("state", fixed, Gate::kHeadsFirst, Mode::kSingle, false)},
      {"dkdv_split", block_plan({.T = 256, .S = 256, .H = 4, .split = true}, Mode::kSingle, false)},
      {"topk_dkdv",
       topk_plan({.T = 256, .S = 256, .H = 32, .K = 512, .BM = 32, .BT = 64, .part = 128}, Mode::kSingle, false)},
  };
}

// Every kind of text.
std::vector<Named> all_plans() {
  std::vector<Named> list;
  const auto add = [&](const std::string& name, const Plan& plan) {
    list.push_back(
        {name + (plan.mode == Mode::kSingle ? " single" : " persistent") + (plan.boundary ? " boundary" : " interior"),
         plan});
  };
  for (const Mode mode : {Mode::kSingle, Mode::kPersistent})
    for (const bool boundary : {false, true}) {
      for (const char* stage : {"cumsum", "cumsum_reverse", "dv_local", "dqkw", "state"})
        for (const Gate gate : {Gate::kNone, Gate::kHeadsFirst, Gate::kTokensFirst})
          for (const int64_t group : {1, 2})
            for (const bool packed : {false, true}) {
              if (gate == Gate::kNone && std::string(stage).starts_with("cumsum")) continue;
              ChunkSizes sizes{.B = 2, .T = 256, .H = 2, .HV = 2 * group};
              if (packed) sizes = {.H = 2, .HV = 2 * group, .lengths = {128, 64}};
              add(std::string(stage) + " gate " + std::to_string(int(gate)) + " group " + std::to_string(group) +
                      (packed ? " packed" : ""),
                  chunk_plan(stage, sizes, gate, mode, boundary));
            }
      for (const char* pass : {"fwd", "bwd"})
        for (const thalweg_dtype x : {THALWEG_F32, THALWEG_F16})
          for (const thalweg_dtype g : {THALWEG_F32, THALWEG_BF16})
            for (const int optional : {0, 1, 2, 3})
              add(std::string("gate ") + pass + " x " + std::to_string(x) + " g " + std::to_string(g) + " optional " +
                      std::to_string(optional),
                  gate_plan(pass, {.T = 128, .x = x, .g = g, .A_log = (optional & 1) != 0, .dt_bias = optional > 1},
                            mode, boundary));
      for (const char* pass : {"fwd", "bwd"})
        add(std::string("gate with a bound ") + pass, gate_plan(pass, {.T = 128, .lower_bound = -5}, mode, boundary));
      for (const int64_t H : {1, 8})
        for (const int64_t part : {32, 64})
          add("topk_dkdv H " + std::to_string(H) + " part " + std::to_string(part),
              topk_plan({.T = 64, .S = 64, .H = H, .part = part}, mode, boundary));
      add("dkdv causal", block_plan({.T = 64, .S = 64, .causal = true}, mode, boundary));
      add("dkdv V 32", block_plan({.T = 64, .S = 64, .V = 32}, mode, boundary));
      for (const int64_t BM : {16, 128})
        for (const int64_t BT : {16, 64})
          for (const bool split : {false, true})
            for (const int64_t group : {1, 2})
              add("dkdv " + std::to_string(BM) + " " + std::to_string(BT) + (split ? " split" : "") + " group " +
                      std::to_string(group),
                  block_plan({.T = 256,
                              .S = 256,
                              .H = 2 * group,
                              .block_q = 128,
                              .block_k = 128,
                              .BM = BM,
                              .BT = BT,
                              .split = split},
                             mode, boundary));
    }
  return list;
}

// Null: its operator is not built, or it is planned only.
const Kernel* kernel_of(const Plan& plan) {
  const Kernel* kernel = find_kernel(plan.problem.kernel);
  return kernel && kernel->emit ? kernel : nullptr;
}

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string without_comments(const std::string& text) {
  std::string out;
  for (const std::string& line : lines_of(text)) out += line.substr(0, line.find("//")) + "\n";
  return out;
}

TEST(AscendText, IsTheGoldenOne) {
  for (const Named& named : golden_plans()) {
    if (!kernel_of(named.plan)) continue;
    const std::string path = std::string(THALWEG_ASCEND_DATA "/golden/") + named.name + ".mlir";
    const std::string text = kernel_of(named.plan)->emit(named.plan);
    if (std::getenv("THALWEG_WRITE_GOLDEN")) std::ofstream(path, std::ios::binary) << text;
    const std::vector<std::string> got = lines_of(text), want = lines_of(read(path));
    ASSERT_FALSE(want.empty()) << path;
    for (size_t i = 0; i < std::max(got.size(), want.size()); ++i)
      ASSERT_EQ(i < got.size() ? got[i] : "(end)", i < want.size() ? want[i] : "(end)") << path << ":" << i + 1;
  }
}

// Lines fit, every name is given once and before its use (MLIR's scopes are not looked at: no name is given twice at
// all), and only dialects that the host can execute appear.
TEST(AscendText, IsWellFormed) {
  const std::set<std::string> dialects = {"func",   "arith",  "math",   "scf",
                                          "memref", "tensor", "linalg", "bufferization"};
  for (const Named& named : all_plans()) {
    if (!kernel_of(named.plan)) continue;
    SCOPED_TRACE(named.name);
    const std::string text = kernel_of(named.plan)->emit(named.plan);
    for (const std::string& line : lines_of(text)) ASSERT_LE(line.size(), 120u) << line;
    const std::string code = without_comments(text);
    EXPECT_EQ(std::count(code.begin(), code.end(), '{'), std::count(code.begin(), code.end(), '}'));
    std::set<std::string> known;
    const std::regex name("%[A-Za-z_0-9]+"), given("^\\s*((%\\w+(, )?)+) = "),
        operation("(^|= )\\s*([a-z]+)\\.[a-z_]+");
    const auto define = [&](const std::string& n) { ASSERT_TRUE(known.insert(n).second) << n << " is given twice"; };
    for (const std::string& line : lines_of(code)) {
      std::smatch match;
      std::string uses = line;
      std::vector<std::string> defined;
      if (std::regex_search(line, match, given)) {
        const std::string names = match[1];
        for (std::sregex_iterator i(names.begin(), names.end(), name), end; i != end; ++i) defined.push_back(i->str());
        uses = match.suffix();
      }
      if (std::regex_search(line, match, operation)) {
        ASSERT_TRUE(dialects.count(match[2])) << line;
      }
      for (std::sregex_iterator i(uses.begin(), uses.end(), name), end; i != end; ++i) {
        const std::string n = i->str(), after = uses.substr(size_t(i->position() + i->length()));
        if (after.starts_with(":") || after.starts_with(" = ")) {
          define(n);  // an argument, a counter or a value that a loop carries
        } else {
          ASSERT_TRUE(known.count(n)) << n << " is used before it is given: " << line;
        }
      }
      for (const std::string& n : defined) define(n);
    }
  }
}

// Text for full tiles has no branch and no part of a tile; text for boundaries has them.
TEST(AscendText, HasMaskCodeOnlyForBoundaries) {
  for (const Named& named : all_plans()) {
    if (!kernel_of(named.plan)) continue;
    SCOPED_TRACE(named.name);
    const std::string code = without_comments(kernel_of(named.plan)->emit(named.plan));
    for (const char* mask : {"scf.if", "memref.subview", "tensor.extract_slice"})
      EXPECT_EQ(code.find(mask) != std::string::npos, named.plan.boundary) << mask;
  }
}

// Comparisons of vectors are in i32: the device has no vector form of the others.
TEST(AscendText, ComparesNoVectorOfI64) {
  for (const Named& named : all_plans()) {
    if (!kernel_of(named.plan)) continue;
    const std::string code = without_comments(kernel_of(named.plan)->emit(named.plan));
    EXPECT_EQ(code.find("xi64>"), std::string::npos) << named.name;
    EXPECT_EQ(code.find("xindex>"), std::string::npos) << named.name;
  }
}

// The two layouts of the gate differ in where its tile starts and in its stride, and in nothing else.
TEST(AscendText, GateLayoutsDifferInThePlaceOfTheGate) {
  const ChunkSizes sizes{.B = 2, .T = 256, .H = 4, .HV = 8};
  for (const char* stage : {"dv_local", "dqkw"}) {
    Plan plan = chunk_plan(stage, sizes, Gate::kHeadsFirst, Mode::kSingle, false);
    if (!kernel_of(plan)) GTEST_SKIP() << "built without gated_delta_rule";
    const std::string first = kernel_of(plan)->emit(plan);
    plan.problem.gate = Gate::kTokensFirst;
    const std::string second = kernel_of(plan)->emit(plan);
    EXPECT_NE(first.find("sizes: [64], strides: [1]"), std::string::npos);
    EXPECT_NE(second.find("sizes: [64], strides: [8]"), std::string::npos);
    // Without the lines of the gate's place the texts are one.
    const auto rest = [](const std::string& text) {
      std::vector<std::string> out;
      const std::regex number("_\\d+\\b");
      for (const std::string& line : lines_of(without_comments(text)))
        if (line.find("%g_") == std::string::npos && line.find("memref<64xf32, strided") == std::string::npos &&
            line.find("arith.constant") == std::string::npos)
          out.push_back(std::regex_replace(line, number, ""));
      return out;
    };
    const std::vector<std::string> one = rest(first), other = rest(second);
    ASSERT_EQ(one.size(), other.size()) << stage;
    for (size_t i = 0; i < one.size(); ++i) ASSERT_EQ(one[i], other[i]) << stage;
  }
}

// Text order is live range: d_o of dv_local is loaded after the scores are done.
TEST(AscendText, LoadsATileBeforeItsFirstUse) {
  const Plan plan = chunk_plan("dv_local", {.T = 256, .H = 4, .HV = 4}, Gate::kHeadsFirst, Mode::kSingle, false);
  if (!kernel_of(plan)) GTEST_SKIP() << "built without gated_delta_rule";
  const std::string text = kernel_of(plan)->emit(plan);
  EXPECT_GT(text.find("memref.copy %d_o_gm"), text.find("arith.truncf"));
}

}  // namespace
}  // namespace thalweg::ascend::tests
