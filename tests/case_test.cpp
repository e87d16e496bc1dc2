// The harness itself: case strings, fills, guards, comparison. A test that cannot fail proves nothing, so
// each guard is seen to catch what it guards against.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>

#include "testing/buffer.h"
#include "testing/case.h"
#include "testing/compare.h"
#include "tests/support.h"

namespace thalweg::tests {
namespace {

namespace tt = thalweg::testing;

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const std::string& set : tt::set_names())
    for (const Case& c : tt::find_cases("@" + set)) cases.push_back(c);
  return cases;
}

TEST(Cases, TextParsesBackToAnEqualCase) {
  for (Case c : all_cases()) {
    EXPECT_EQ(tt::parse_case(c.text()), c) << c.text();
    c.kernel = "cpu_generic";
    c.seed = 7;
    c.threads = 3;
    EXPECT_EQ(tt::parse_case(c.text()), c) << c.text();
  }
}

TEST(Cases, SetsByOperatorAndPass) {
  for (const std::string& set : tt::set_names()) {
    std::vector<Case> all = tt::find_cases("@" + set);
    size_t by_pass = 0;
    for (const thalweg_pass* pass : all_passes()) {
      std::vector<Case> some;
      try {
        some = tt::find_cases(tt::pass_name(*pass) + "@" + set);
      } catch (const std::invalid_argument&) {
      }
      for (const Case& c : some) EXPECT_EQ(c.pass, pass);
      by_pass += some.size();
    }
    EXPECT_EQ(by_pass, all.size()) << set;
  }
  EXPECT_THROW(tt::find_cases("@no_such_set"), std::invalid_argument);
}

TEST(Cases, FilesOfCases) {
  std::string path = ::testing::TempDir() + "thalweg_cases.txt";
  std::vector<Case> want = pass_cases(*all_passes()[0], {"smoke"}, 1e12);
  {
    std::ofstream file(path);
    file << "# a comment\n\n";
    for (const Case& c : want) file << "  " << c.text() << "  # why\n";
  }
  EXPECT_EQ(tt::find_cases(path), want);
  std::ofstream(path) << "nonsense:f32\n";
  try {
    tt::find_cases(path);
    FAIL();
  } catch (const std::invalid_argument& e) {
    EXPECT_NE(std::string(e.what()).find(":1: "), std::string::npos) << e.what();
  }
  std::remove(path.c_str());
}

TEST(Cases, BracesStandForEveryWordInThem) {
  std::vector<Case> got = tt::find_cases("gated_rms_norm.fwd:{f32,bf16},M{1,33},D8,{,gate}"), want;
  for (const char* dtype : {"f32", "bf16"})
    for (const char* size : {"M1", "M33"})
      for (const char* gate : {"", ",gate"}) want.push_back(tt::parse_case(std::string("gated_rms_norm.fwd:") + dtype + "," + size + ",D8" + gate));
  EXPECT_EQ(got, want);
  EXPECT_THROW(tt::find_cases("gated_rms_norm.fwd:f32,M{1,2,D8"), std::invalid_argument);
}

std::string parse_error(const std::string& text) {
  try {
    tt::find_cases(text);
    return "";
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
}

TEST(Cases, WhatCannotBeMeantIsRefused) {
  const std::string rule = "gated_delta_rule.fwd:f32,T5,H1,K8,beta,g";
  EXPECT_EQ(parse_error(rule + ",f32"), "");  // the same twice, as with sizes
  for (auto [text, why] : {std::pair{rule + ",bf16", "'bf16': dtype given twice, got 'bf16', expected f32"},
                           {rule + ",K9", "size given twice"},
                           {"gated_rms_norm.fwd:f32,M9999999999999,D9999999999", "x: shape, got more than 2^59 elements"},
                           {::testing::TempDir(), "got a directory, expected a case"},
                           {rule + ",cos=3", "cos, got 3, expected 0 to 1"},
                           {rule + ",cos=-0.5", "cos, got -0.5"},
                           {rule + ",beta_max=inf", "beta_max, got inf"},
                           {rule + ",gate_at=5:-1", "gate_at, got 5:-1, expected a token of 0 to T - 1 = 4"},
                           {rule + ",gate_at=-1:-1", "gate_at, got -1:-1"},
                           {rule + ",gate_at=2", "gate_at, got 2, expected <token>:<number>"},
                           {rule + ",gate_at=2:", "expected <token>:<number>"},
                           {rule + ",gate_at=2:x", "expected <token>:<number>"},
                           {std::string("gated_delta_rule.fwd:f32,T5,H1,K8,beta,gate=1"), "gate, got 1, expected it beside g"}})
    EXPECT_NE(parse_error(text).find(why), std::string::npos) << text << ": got: " << parse_error(text);
  EXPECT_EQ(parse_error(rule + ",gate_at=4:-inf"), "");
  EXPECT_EQ(parse_error(rule + ",cos=1"), "");
}

// Every operator brings the sets that the tool and the tests count on, and each tensor is in one of them.
TEST(Cases, EveryPassHasItsSets) {
  for (const thalweg_pass* pass : all_passes()) {
    for (const char* set : {"smoke", "ci", "edge", "perf"}) EXPECT_FALSE(pass_cases(*pass, {set}, 1e18).empty()) << tt::pass_name(*pass) << "@" << set;
    for (const thalweg_field* field : tt::tensor_fields(*pass)) {
      bool seen = false;
      for (const Case& c : pass_cases(*pass, {"smoke", "ci"}, 1e18)) seen = seen || tt::is_present(c, *field);
      EXPECT_TRUE(seen) << tt::pass_name(*pass) << ": no case of smoke or ci has " << field->name;
    }
  }
}

TEST(Cases, InputsDependOnSeedAndNameOnly) {
  for (const thalweg_pass* pass : all_passes())
    for (const Case& c : pass_cases(*pass, {"smoke"}, 1e7)) {
      Problem one(c), two(c);
      Case other = c;
      other.seed = 43;
      Problem three(other);
      bool differs = false;
      for (const auto& [name, values] : one.inputs()) {
        EXPECT_TRUE(same_bits(values, two.inputs().at(name)));
        differs = differs || !same_bits(values, three.inputs().at(name));
      }
      EXPECT_TRUE(differs || one.inputs().begin()->second.count() == 0) << c.text();
    }
}

TEST(Fills, NormalNumbersLookNormal) {
  Random random(1);
  double sum = 0, square = 0, fourth = 0;
  const int n = 200000;
  for (int i = 0; i < n; ++i) {
    double x = random.normal();
    sum += x, square += x * x, fourth += x * x * x * x;
  }
  EXPECT_NEAR(sum / n, 0, 0.01);
  EXPECT_NEAR(square / n, 1, 0.01);
  EXPECT_NEAR(fourth / n, 3, 0.25);
  Random first(1);
  EXPECT_EQ(first.bits(), 0x910a2dec89025cc1u);  // SplitMix64 of seed 1: the same on every machine
  for (int i = 0; i < 1000; ++i) {
    EXPECT_LT(first.below(7), 7);
    double u = first.uniform();
    EXPECT_TRUE(u >= 0 && u < 1);
  }
}

TEST(Guards, WritesOutsideAreFound) {
  for (size_t bytes : {size_t(0), size_t(2), size_t(100), size_t(4096)}) {
    tt::Buffer buffer(bytes, 2, tt::Guard::kCanary);
    std::memset(buffer.data(), 0, bytes);
    EXPECT_EQ(buffer.check_outside(), "");
    buffer.data()[bytes] ^= 1;
    EXPECT_EQ(buffer.check_outside(), "byte 0 past its end was written");
    buffer.data()[bytes] ^= 1;
    buffer.data()[-3] ^= 1;
    EXPECT_EQ(buffer.check_outside(), "byte 3 before its start was written");
  }
}

TEST(Guards, PagesEndTheProcess) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  tt::Buffer after(100, 0, tt::Guard::kPageAfter), before(100, 0, tt::Guard::kPageBefore);
  after.data()[99] = 1;
  before.data()[0] = 1;
  volatile char sink = 0;
  EXPECT_DEATH(sink = after.data()[100], "");
  EXPECT_DEATH(sink = before.data()[-1], "");
  (void)sink;
}

TEST(Guards, SurroundingsAreNaNInEveryDtype) {
  char bytes[16];
  for (size_t at = 0; at < 2; ++at) {
    tt::poison(bytes, 16);
    EXPECT_TRUE(std::isnan(tt::load(bytes, THALWEG_F64, 0)));
    EXPECT_TRUE(std::isnan(tt::load(bytes, THALWEG_F32, 1)));
    EXPECT_TRUE(std::isnan(tt::load(bytes, THALWEG_BF16, 3)));
    EXPECT_TRUE(std::isnan(tt::load(bytes, THALWEG_F16, 5)));
    EXPECT_GT(tt::load(bytes, THALWEG_I32, 2), 1e9);
  }
}

TEST(Guards, ProblemFindsChangedInputsAndWrittenGaps) {
  for (const thalweg_pass* pass : all_passes()) {
    std::vector<Case> cases = pass_cases(*pass, {"smoke"}, 1e7);
    ASSERT_FALSE(cases.empty());
    const thalweg_field* input = tt::tensor_fields(*pass)[0];
    const thalweg_field* output = nullptr;
    for (const thalweg_field* field : tt::tensor_fields(*pass))
      if (field->role == THALWEG_OUT && tt::is_present(cases[0], *field) && tt::words(field->dims).size() > 1) output = field;
    ASSERT_NE(output, nullptr);
    Problem problem(with(cases[0], {{output->name, "@gap"}}));
    EXPECT_EQ(problem.check_untouched(), "");
    thalweg_tensor& in = problem.tensor(input->name);
    static_cast<char*>(in.data)[0] ^= 1;
    EXPECT_EQ(problem.check_guards(), std::string(input->name) + ": an input was changed");
    static_cast<char*>(in.data)[0] ^= 1;
    thalweg_tensor& out = problem.tensor(output->name);
    if (tt::count(out) < 2 * out.shape[out.rank - 1]) continue;
    tt::store(out.data, out.dtype, 0, 1);
    EXPECT_EQ(problem.check_guards(), "");
    EXPECT_EQ(problem.check_untouched(), std::string(output->name) + ": was written");
    tt::store(out.data, out.dtype, out.shape[out.rank - 1], 1);
    EXPECT_EQ(problem.check_guards(), std::string(output->name) + ": a gap between its rows was written");
  }
}

TEST(Compare, RatioMasksAndWorst) {
  const double nan = std::nan(""), inf = INFINITY;
  auto values = [](std::vector<double> data) { return Values{{int64_t(data.size())}, data}; };
  tt::Difference d = tt::compare(values({1, 2, 3}), values({1, 2, 4}));
  EXPECT_NEAR(d.ratio, 1 / std::sqrt(21.0), 1e-15);
  EXPECT_EQ(d.worst, 1);
  EXPECT_EQ(d.worst_at, 2);
  EXPECT_EQ(tt::compare(values({nan, inf, 1}), values({nan, inf, 1})).ratio, 0);
  for (auto [got, want] : {std::pair{values({nan, 1}), values({1, 1})}, {values({1, 1}), values({nan, 1})}, {values({inf}), values({-inf})},
                           {values({inf}), values({1e30})}, {values({1e-30}), values({0})}})
    EXPECT_EQ(tt::compare(got, want).ratio, std::numeric_limits<double>::infinity());
  EXPECT_EQ(tt::compare(values({0, 0}), values({0, 0})).ratio, 0);
  EXPECT_EQ(tt::compare(values({}), values({})).ratio, 0);
}

// What the storage cannot hold is judged as such, and nothing else is.
TEST(Compare, ByWhatTheStorageHolds) {
  const double inf = INFINITY, tiny = 0x1p-126;
  auto ratio = [](double got, double want, thalweg_dtype stored) {
    return tt::compare_stored(Values{{2}, {got, 1}}, Values{{2}, {want, 1}}, stored).ratio;
  };
  EXPECT_EQ(ratio(inf, 75376, THALWEG_F16), 0);
  EXPECT_EQ(ratio(-inf, -75376, THALWEG_F16), 0);
  EXPECT_EQ(ratio(inf, 65520, THALWEG_F16), 0);    // rounds to infinity
  EXPECT_EQ(ratio(inf, 65519, THALWEG_F16), inf);  // rounds to 65504
  EXPECT_EQ(ratio(65504, 75376, THALWEG_F16), inf);
  EXPECT_EQ(ratio(-inf, 75376, THALWEG_F16), inf);
  EXPECT_EQ(ratio(inf, 75376, THALWEG_BF16), inf);
  EXPECT_EQ(ratio(inf, 1e39, THALWEG_F32), 0);
  EXPECT_EQ(ratio(inf, 1e39, THALWEG_F64), inf);
  EXPECT_EQ(tt::count_finite(Values{{4}, {75376, 65504, inf, std::nan("")}}, THALWEG_F16), 1);

  auto one = [](double got, double want, thalweg_dtype stored) { return tt::compare_stored(Values{{1}, {got}}, Values{{1}, {want}}, stored).ratio; };
  EXPECT_LT(one(0, 1e-77, THALWEG_F32), 1e-30);
  EXPECT_LT(one(0, 1e-21, THALWEG_F16), 1e-16);
  EXPECT_EQ(one(0, 1e-77, THALWEG_F64), 1);
  EXPECT_EQ(one(0, 1e-21, THALWEG_F32), 1);
  EXPECT_EQ(one(0, tiny, THALWEG_F32), 1);      // the smallest normal number is held
  EXPECT_EQ(one(0, tiny / 2, THALWEG_F32), 0.5);  // and subnormal ones are not free
  EXPECT_EQ(one(1e-3, 0, THALWEG_F16), inf);
}

TEST(Compare, RulesOnSingleElements) {
  auto values = [](std::vector<double> data) { return Values{{int64_t(data.size())}, data}; };
  auto share = [&](tt::Rule rule, std::vector<double> got, std::vector<double> want, thalweg_dtype stored = THALWEG_F32) {
    return tt::judge(rule, values(got), values(want), stored).share();
  };
  EXPECT_EQ(share({.name = "", .atol = 0.5}, {1, 2, 3, 4}, {1.5, 2.25, 3.75, 4}), 0.75);
  EXPECT_EQ(share({.name = "", .rtol = 0.1}, {11, -11, 12, 0.1}, {10, -10, 10, 0}), 0.5);
  EXPECT_EQ(share({.name = "", .rtol = 0.1, .floor = 1}, {12, 0.1}, {10, 0}), 0);
  EXPECT_EQ(share({.name = "", .rtol = 0.1, .floor = 20}, {12, 0.1}, {10, 0}), 1);  // nothing looked at
  // Units in the last place, of the wanted value as its storage has it: 2^-7 around 1 in bf16, 2^-10 in f16.
  EXPECT_EQ(share({.name = "", .ulps = 1}, {1 + 0x1p-7, 1 + 0x1p-6, 1 - 0x1p-7}, {1, 1, 1}, THALWEG_BF16), 2.0 / 3);
  EXPECT_EQ(share({.name = "", .ulps = 1}, {1 + 0x1p-7}, {1 - 0x1p-10}, THALWEG_BF16), 1);  // wanted is stored as 1
  EXPECT_EQ(share({.name = "", .ulps = 32}, {1056, 1057}, {1024, 1024}, THALWEG_F16), 0.5);
  EXPECT_EQ(share({.name = "", .ulps = 1}, {0x1p-24, 0x1p-23}, {0, 0}, THALWEG_F16), 0.5);
  EXPECT_EQ(share({.name = "", .ulps = 1}, {INFINITY, std::nan("")}, {INFINITY, std::nan("")}), 1);  // masks are compared before
  tt::Judgement j = tt::judge({.name = "name", .atol = 1, .share = 0.5}, values({1, 5, 3}), values({1, 2, 4}), THALWEG_F32);
  EXPECT_EQ(j.looked_at, 3);
  EXPECT_EQ(j.outside, 1);
  EXPECT_EQ(j.worst_at, 1);
  EXPECT_EQ(j.max_error, 3);
  EXPECT_DOUBLE_EQ(j.mean_error, 4.0 / 3);
  EXPECT_EQ(j.max_relative, 1.5);
  EXPECT_TRUE(j.ok());
  j.rule.share = 0.99;
  EXPECT_FALSE(j.ok());
}

TEST(Compare, RoundingToStorageHappensOnce) {
  // 1 + 2^-9 + 2^-40 is above the middle of two bf16 numbers, but float would round it onto the middle.
  uint16_t bits;
  tt::store(&bits, THALWEG_BF16, 0, 1 + 0x1p-8 + 0x1p-40);
  EXPECT_EQ(bits, 0x3f81);
  tt::store(&bits, THALWEG_BF16, 0, 1 + 0x1p-8);
  EXPECT_EQ(bits, 0x3f80);
  tt::store(&bits, THALWEG_F16, 0, 1 + 0x1p-11 + 0x1p-40);
  EXPECT_EQ(bits, 0x3c01);
  tt::store(&bits, THALWEG_F16, 0, 1e9);
  EXPECT_EQ(bits, 0x7c00);
}

// A wrong kernel fails: the verdict of a tampered output.
TEST(Verify, FindsAWrongElement) {
  for (const thalweg_pass* pass : all_passes()) {
    std::vector<Case> cases = pass_cases(*pass, {"smoke"}, 1e7);
    ASSERT_FALSE(cases.empty());
    Problem problem(cases[0]);
    Outputs got = run(problem), want = tt::run_reference(problem);
    EXPECT_EQ(out_of_limit(cases[0], got, want), "");
    for (auto& [name, values] : got) {
      if (values.count() == 0) continue;
      Outputs wrong = got;
      wrong[name].data.back() += 1e-2 + std::fabs(wrong[name].data.back());
      EXPECT_NE(out_of_limit(cases[0], wrong, want), "") << name;
      wrong[name].data.back() = std::nan("");
      EXPECT_NE(out_of_limit(cases[0], wrong, want), "") << name;
    }
  }
}

// Overflow that the storage asks for passes in every row, and underflow too.
TEST(Verify, RangeOfTheStorage) {
  int infinite = 0;
  for (const tt::Verdict& v : tt::verify_all_kernels(tt::parse_case("short_conv.fwd:f16,T200,D8,W4,x_scale=60000"))) {
    if (v.status == "skipped") continue;
    EXPECT_TRUE(v.passed()) << v.kernel << ": " << v.reason;
    Case c = tt::parse_case(v.case_text);
    const auto outputs = run(c);
    for (double y : outputs.at("y").data) infinite += std::isinf(y);
  }
  EXPECT_GT(infinite, 0);
  for (const tt::Verdict& v : tt::verify_all_kernels(tt::parse_case("gated_delta_rule.bwd:f32,T70,H1,K64,HV2,V1,g,beta,A_log,d_final_state,d_q,d_initial_state,use_gate,seed=9749")))
    if (v.status != "skipped") {
      EXPECT_TRUE(v.passed()) << v.kernel << ": " << v.reason;
    }
}

TEST(Verify, NothingToCompareIsNoPass) {
  for (const tt::Verdict& v : tt::verify_all_kernels(tt::parse_case("gated_delta_rule.fwd:f32,T5,H1,K8,g,beta,gate=nan"))) {
    if (v.status == "skipped") continue;
    EXPECT_EQ(v.status, "failed") << v.kernel;
    EXPECT_NE(v.reason.find("nothing to compare"), std::string::npos) << v.reason;
  }
  EXPECT_TRUE(tt::verify(tt::parse_case("gated_delta_rule.fwd:f32,B0,T5,H1,K8,g,beta")).passed());
}

TEST(Verify, WhatMemoryCannotHoldIsNoVerdict) {
  for (const thalweg_pass* pass : all_passes()) {
    std::vector<Case> cases = pass_cases(*pass, {"smoke"}, 1e7);
    ASSERT_FALSE(cases.empty());
    Case c = cases[0];
    for (const char* size : {"B", "N", "M"})
      if (c.sizes.count(size)) c.sizes[size] = int64_t(1) << 40;
    EXPECT_THROW(tt::verify(c), tt::TooLarge) << c.text();
    EXPECT_THROW(tt::verify_all_kernels(c), tt::TooLarge) << c.text();
  }
}

// The oracle of some heads is those heads of the whole oracle.
TEST(Verify, GroupsAreWholeHeads) {
  for (const thalweg_pass* pass : all_passes()) {
    std::vector<std::string> heads = tt::words(tt::spec_of(*pass).head_sizes);
    if (heads.empty()) continue;
    int tried = 0;
    for (const Case& c : pass_cases(*pass, {"smoke", "ci"}, 1e7)) {
      int64_t n = c.size(heads[0]);
      if (n < 2) continue;
      ++tried;
      Problem problem(c);
      Outputs all = tt::run_reference(problem), some = tt::run_reference(problem, {0, n - 1});
      for (const auto& [name, values] : all) EXPECT_TRUE(same_bits(some.at(name), tt::take_groups(c, name, values, {0, n - 1}))) << name << " " << c.text();
    }
    EXPECT_GT(tried, 0);
  }
}

}  // namespace
}  // namespace thalweg::tests
