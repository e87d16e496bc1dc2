// Kinds of faults that only the gated delta rule can have. Skipped where the library lacks it.
#include <cmath>
#include <limits>

#include "tests/properties.h"

namespace thalweg::tests {
namespace {

namespace tt = thalweg::testing;

class GatedDeltaRuleFaults : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_pass("gated_delta_rule.fwd")) GTEST_SKIP() << "built without gated_delta_rule";
  }
};

// Each row that takes the case.
void for_rows(const std::string& text, const std::function<void(const Case&)>& body) {
  Case c = tt::parse_case(text);
  int taken = 0;
  for (const std::string& row : kernel_rows(*c.pass)) {
    Case forced = with_kernel(c, row);
    if (!takes(forced)) continue;
    ++taken;
    SCOPED_TRACE(forced.text());
    body(forced);
  }
  EXPECT_GT(taken, 0) << text;
}

Values filled(const Values& like, const std::function<double(int64_t)>& value) {
  Values v = like;
  for (int64_t i = 0; i < v.count(); ++i) v.data[size_t(i)] = value(i);
  return v;
}

void set_all(Problem& problem, const std::string& name, double value) {
  problem.set(name, filled(problem.inputs().at(name), [=](int64_t) { return value; }));
}

void expect_finite(const Outputs& outputs) {
  for (const auto& [name, values] : outputs)
    for (double x : values.data) ASSERT_TRUE(std::isfinite(x)) << name;
}

// ---- Gates ----

// The error does not grow with the strength of the decay.
TEST_F(GatedDeltaRuleFaults, ErrorIsFlatOverGates) {
  for (const char* pass : {"fwd", "bwd"})
    for (const std::string& row : kernel_rows(*find_pass(std::string("gated_delta_rule.") + pass))) {
      std::map<std::string, double> least, most;
      for (const char* gate : {"-1", "-2", "-3", "-4", "-5"}) {
        Case c = tt::parse_case(std::string("gated_delta_rule.") + pass + ":f32,T300,H1,HV2,K64,V64,g,beta,state,gate=" + gate + ",kernel=" + row);
        if (!takes(c)) continue;
        tt::Verdict verdict = tt::verify(c);
        EXPECT_TRUE(verdict.passed()) << verdict.reason << "\n  thalweg verify " << verdict.case_text;
        for (const auto& out : verdict.outputs) {
          double ratio = out.difference.ratio;
          least[out.name] = least.count(out.name) ? std::min(least[out.name], ratio) : ratio;
          most[out.name] = std::max(most[out.name], ratio);
        }
      }
      for (const auto& [name, worst] : most)
        if (name != "d_g") {
          EXPECT_LE(worst, 5 * least[name] + 5e-8) << row << " " << name;
        }
    }
}

TEST_F(GatedDeltaRuleFaults, ZeroGateIsNoGateAndContinuous) {
  for_rows("gated_delta_rule.fwd:f32,T200,H1,HV2,K32,V48,g,beta,state,gate=0", [](const Case& c) {
    Problem gated(c);
    Outputs with_zero = run(gated);
    Outputs without = run_with(with(c, {{"-g", ""}, {"-gate", ""}}), gated.inputs());
    EXPECT_EQ(out_of_limit(c, with_zero, without), "");
    set_all(gated, "g", -1e-7);
    gated.poison_outputs();
    Outputs near = run(gated);
    EXPECT_EQ(out_of_limit(c, near, with_zero, 20), "");
  });
}

TEST_F(GatedDeltaRuleFaults, OneStrongGateInsideAChunk) {
  for (int token : {0, 1, 15, 16, 60, 61, 63, 64})
    for (const char* value : {"-3", "-1000", "-inf"})
      for (const char* pass : {"fwd", "bwd"})
        for_rows(std::string("gated_delta_rule.") + pass + ":f32,T130,H1,HV1,K32,V32,g,beta,state,gate=0,gate_at=" + std::to_string(token) + ":" + value,
                 [](const Case& c) {
                   tt::Verdict verdict = tt::verify(c);
                   EXPECT_TRUE(verdict.passed()) << verdict.reason << "\n  thalweg verify " << verdict.case_text;
                 });
}

// A_log = 90 and more: exp(A_log) is beyond float32.
TEST_F(GatedDeltaRuleFaults, SaturatedGateHasFiniteGradients) {
  for (const char* pass : {"fwd", "bwd"})
    for (double raw : {1000.0, -1000.0, 20.0, 21.0, -17.0, 0.0})
      for_rows(std::string("gated_delta_rule.") + pass + ":f32,T70,H1,HV2,K16,V16,g,beta,A_log,dt_bias,use_gate,state", [&](const Case& c) {
        for (double a_log : {800.0, 200.0, 90.0, 80.0, -90.0, 0.0}) {
          Problem problem(c);
          set_all(problem, "A_log", a_log);
          set_all(problem, "dt_bias", 0);
          problem.set("g", filled(problem.inputs().at("g"), [&](int64_t i) { return i % 3 ? raw : -raw; }));
          problem.poison_outputs();
          SCOPED_TRACE("A_log " + std::to_string(a_log) + ", gate input +-" + std::to_string(raw));
          expect_finite(run(problem));
          problem.poison_outputs();
          if (a_log < 80) expect_oracle(problem);
        }
      });
}

// ---- Precision of beta and of the state ----

// A bf16 logit of 0.5 gives beta = 0.6224593 in float32, not its bf16 neighbour 0.62109375.
TEST_F(GatedDeltaRuleFaults, BetaIsNotRoundedToItsStorage) {
  auto check = [](const Case& c, const char* state) {
    Problem problem(c);
    for (const char* name : {"q", "k"}) problem.set(name, filled(problem.inputs().at(name), [&](int64_t i) { return i % c.size("K") == 0 ? 1.0 : 0.0; }));
    set_all(problem, "v", 1);
    set_all(problem, "beta", 0.5);
    if (problem.inputs().count("state")) set_all(problem, "state", 0);
    problem.poison_outputs();
    Values s = run(problem).at(state);
    EXPECT_NEAR(s.data[0], 0.6224593312018546, 3e-7);
  };
  for_rows("gated_delta_rule.fwd:bf16,T1,H1,K32,beta=bf16,use_beta_sigmoid,final_state", [&](const Case& c) { check(c, "final_state"); });
  for_rows("gated_delta_rule.decode:bf16,N1,H1,K32,beta=bf16,use_beta_sigmoid", [&](const Case& c) { check(c, "state"); });
}

// A decay that bf16 cannot hold: exp(-0.001) = 0.9990005.
TEST_F(GatedDeltaRuleFaults, DecayIsNotRoundedToTheActivationDtype) {
  for_rows("gated_delta_rule.fwd:bf16,T1,H1,K32,g=f32,initial_state,final_state", [](const Case& c) {
    Problem problem(c);
    set_all(problem, "g", -0.001);
    set_all(problem, "k", 0);
    set_all(problem, "initial_state", 1);
    problem.poison_outputs();
    Values state = run(problem).at("final_state");
    for (double x : state.data) ASSERT_NEAR(x, 0.99900049983, 2e-7);
  });
}

// One token at a time through the decode pass; the state stays in its slot.
Values decode_all(const Case& fwd, const Problem& whole, const std::string& row, Values* state) {
  int64_t T = fwd.size("T");
  Case c = tt::parse_case("gated_delta_rule.decode:" + std::string(thalweg_dtype_name(fwd.dtype)) + ",N1,H" + std::to_string(fwd.size("H")) + ",HV" +
                          std::to_string(fwd.size("HV")) + ",K" + std::to_string(fwd.size("K")) + ",V" + std::to_string(fwd.size("V")) + ",g,beta,kernel=" + row);
  Problem step(c);
  *state = filled(step.inputs().at("state"), [](int64_t) { return 0.0; });
  step.set("state", *state);
  Values o;
  for (int64_t t = 0; t < T; ++t) {
    for (const char* name : {"q", "k", "v", "g", "beta"}) step.set(name, cut(whole.inputs().at(name), 1, t, t + 1));
    EXPECT_EQ(step.call(), THALWEG_OK) << thalweg_last_error();
    Values now = step.read("o");
    o = t == 0 ? now : join(o, now, 1);
  }
  *state = step.read("state");
  return o;
}

TEST_F(GatedDeltaRuleFaults, FourThousandDecodeStepsEqualOneForward) {
  Case fwd = tt::parse_case("gated_delta_rule.fwd:bf16,T4096,H1,HV2,K32,V16,g,beta,final_state");
  Problem whole(fwd);
  Outputs want = run(whole), oracle = tt::run_reference(whole);
  for (const std::string& row : kernel_rows(*find_pass("gated_delta_rule.decode"))) {
    if (!machine_has(kernel_isa(*find_pass("gated_delta_rule.decode"), row))) continue;
    Values state, o = decode_all(fwd, whole, row, &state);
    EXPECT_LE(tt::compare(o, oracle.at("o")).ratio, 4e-3) << row;
    EXPECT_LE(tt::compare(state, oracle.at("final_state")).ratio, 4e-6) << row;
    EXPECT_LE(tt::compare(o, want.at("o")).ratio, 4e-3) << row;
  }
}

// The state's error does not grow over 16384 steps, with hardly any decay.
TEST_F(GatedDeltaRuleFaults, DecodeDoesNotDrift) {
  Case fwd = tt::parse_case("gated_delta_rule.fwd:bf16,T16384,H1,HV1,K16,V16,g,beta,final_state,gate=-0.0001");
  Problem whole(fwd);
  Outputs oracle = tt::run_reference(whole);
  Values state;
  decode_all(fwd, whole, kernel_rows(*find_pass("gated_delta_rule.decode")).back(), &state);
  EXPECT_LE(tt::compare(state, oracle.at("final_state")).ratio, 4e-6);
}

TEST_F(GatedDeltaRuleFaults, SixtyFourThousandTokensDoNotDrift) {
  for_rows("gated_delta_rule.fwd:bf16,T65536,H1,HV1,K32,V32,g,beta,state,gate=-0.0001", [](const Case& c) {
    tt::Verdict verdict = tt::verify(c);
    EXPECT_TRUE(verdict.passed()) << verdict.reason << "\n  thalweg verify " << verdict.case_text;
  });
  for_rows("gated_delta_rule.bwd:bf16,T16384,H1,HV1,K32,V32,g,beta,state,gate=-0.0001", [](const Case& c) {
    tt::Verdict verdict = tt::verify(c);
    EXPECT_TRUE(verdict.passed()) << verdict.reason << "\n  thalweg verify " << verdict.case_text;
  });
}

// ---- Keys ----

// Keys of length 1.3 that point the same way: no worse than 4 times the recurrence.
TEST_F(GatedDeltaRuleFaults, UnnormalisedCorrelatedKeys) {
  for (const char* pass : {"fwd", "bwd"})
    for_rows(std::string("gated_delta_rule.") + pass + ":f32,T200,H1,HV2,K64,V32,g,beta,state,cos=0.99,beta_value=1", [](const Case& c) {
      Problem problem(c);
      problem.set("k", filled(problem.inputs().at("k"), [&](int64_t i) { return 1.3 * problem.inputs().at("k").data[size_t(i)]; }));
      problem.poison_outputs();
      expect_oracle(problem);
    });
}

// ---- States ----

TEST_F(GatedDeltaRuleFaults, InitialStateOfOneRow) {
  for (const char* layout : {"", "=@0132", "=bf16", "=bf16@0132"})
    for (const char* pass : {"fwd", "bwd"})
      for_rows(std::string("gated_delta_rule.") + pass + ":f32,T70,H1,HV2,K24,V40,g,beta,state,initial_state" + layout, [](const Case& c) {
        for (int64_t row : {0, 5, 23}) {
          Problem problem(c);
          problem.set("initial_state", filled(problem.inputs().at("initial_state"), [&](int64_t i) { return i / 40 % 24 == row ? 1.0 + double(i % 40) : 0.0; }));
          problem.poison_outputs();
          expect_oracle(problem);
        }
      });
}

TEST_F(GatedDeltaRuleFaults, LossInTheFinalStateOnly) {
  for_rows("gated_delta_rule.bwd:f32,T130,H1,HV2,K32,V16,g,beta,initial_state,d_final_state,d_q,d_k,d_v,d_g,d_beta,d_initial_state", [](const Case& c) {
    Problem problem(c);
    expect_oracle(problem);
    Values d_q = problem.read("d_q");
    for (double x : d_q.data) ASSERT_EQ(x, 0);
  });
}

// Value heads that share a key head equal heads with keys of their own.
TEST_F(GatedDeltaRuleFaults, SharedKeyHeadsEqualRepeatedOnes) {
  for (const char* pass : {"fwd", "bwd", "decode"}) {
    const char* length = std::string_view(pass) == "decode" ? "N2,T3" : "B2,T100";
    for_rows(std::string("gated_delta_rule.") + pass + ":f32," + length + ",H2,HV6,K32,V16,g,beta" + (std::string_view(pass) == "decode" ? "" : ",state"), [&](const Case& c) {
      Problem problem(c);
      Outputs want = run(problem);
      std::map<std::string, Values> inputs = problem.inputs();
      for (const char* name : {"q", "k"}) inputs[name] = take(inputs[name], 2, {0, 0, 0, 1, 1, 1});
      Outputs got = run_with(with_sizes(c, {{"H", 6}}), inputs);
      for (const char* name : {"d_q", "d_k"}) {
        if (!got.count(name)) continue;
        Values sum = take(got[name], 2, {0, 3}), second = take(got[name], 2, {1, 4}), third = take(got[name], 2, {2, 5});
        for (size_t i = 0; i < sum.data.size(); ++i) sum.data[i] += second.data[i] + third.data[i];
        got[name] = sum;
      }
      EXPECT_EQ(out_of_limit(c, got, want, 2), "");
    });
  }
}

// chunk_states[c] is what a split there carries; a prefix cache continues from it.
TEST_F(GatedDeltaRuleFaults, ChunkStatesAreTheCarriedStates) {
  for (int every : {16, 50, 64, 100, 128})
    for_rows("gated_delta_rule.fwd:f32,T300,H1,HV2,K32,V16,g,beta,state,chunk_states,every=" + std::to_string(every), [&](const Case& c) {
      Problem problem(c);
      Outputs whole = run(problem);
      for (int64_t at = 0, row = 0; at < 300; at += every, ++row) {
        Values state = cut(whole.at("chunk_states"), 0, row, row + 1);
        std::map<std::string, Values> inputs;
        for (const auto& [name, values] : problem.inputs()) inputs[name] = is_per_token(*tt::find_field(*c.pass, name)) ? cut(values, 1, 0, at) : values;
        Case head = with_sizes(with(c, {{"-chunk_states", ""}, {"-every", ""}}), {{"T", at}});
        EXPECT_EQ(out_of_limit(c, {{"final_state", state}}, run_with(head, inputs)), "") << "token " << at;
      }
    });
}

// ---- What is refused, by name ----

void refuse(const std::string& text, const std::string& name, const std::string& words) {
  Problem problem(tt::parse_case(text));
  ASSERT_EQ(problem.call(), THALWEG_INVALID_ARGUMENT) << text;
  std::string error = thalweg_last_error();
  EXPECT_NE(error.find(": " + name + ": "), std::string::npos) << error;
  for (const std::string& word : tt::split(words, '|')) EXPECT_NE(error.find(word), std::string::npos) << error;
  EXPECT_EQ(problem.check_untouched(), "");
}

TEST_F(GatedDeltaRuleFaults, UnsupportedInput) {
  refuse("gated_delta_rule.fwd:f32,T4,H2,HV3,K8,V8,g,beta", "v", "HV|3|2");
  refuse("gated_delta_rule.fwd:f32,T4,H4,HV2,K8,V8,g,beta", "v", "HV|2|4");
  refuse("gated_delta_rule.fwd:f32,T4,H1,K513,V8", "q", "K|513|512");
  refuse("gated_delta_rule.bwd:f32,T4,H1,K8,V513", "v", "V|513|512");
  refuse("gated_delta_rule.decode:f32,N1,H1,K8,V600", "v", "V|600|512");
  refuse("gated_delta_rule.fwd:f32,T4,H1,K8,beta,allow_neg_eigval", "allow_neg_eigval", "use_beta_sigmoid");
  refuse("gated_delta_rule.fwd:f32,T4,H1,K8,g,use_gate", "A_log", "missing|use_gate");
  refuse("gated_delta_rule.fwd:f32,T4,H1,K8,g,A_log", "A_log", "use_gate");
  refuse("gated_delta_rule.fwd:f32,T4,H1,K8,use_beta_sigmoid", "use_beta_sigmoid", "beta");
  refuse("gated_delta_rule.bwd:f32,T4,H1,K8,d_g,d_o", "d_g", "g");
  refuse("gated_delta_rule.fwd:f32,T4,H1,K8,chunk_states,every=-3", "every", "-3");
}

// g [B T H] where [B T HV] is asked for; and T = HV does not make [B HV T] acceptable storage order by chance.
TEST_F(GatedDeltaRuleFaults, GateOfTheWrongHeads) {
  Problem problem(tt::parse_case("gated_delta_rule.fwd:f32,T8,H2,HV4,K8,V8,g,beta"));
  problem.tensor("g").shape[2] = 2;
  ASSERT_EQ(problem.call(), THALWEG_INVALID_ARGUMENT);
  EXPECT_STREQ(thalweg_last_error(), "gated_delta_rule.fwd: g: HV, got 2 in [1, 8, 2], expected 4 (from v)");
  Case square = tt::parse_case("gated_delta_rule.fwd:f32,T4,H4,HV4,K8,V8,g,beta");
  Problem rows(square), columns(with(square, {{"g", "@021"}}));
  Outputs want = run(rows);
  EXPECT_EQ(first_difference(run(columns), want), "");  // the same values, stored [B HV T]
}

TEST_F(GatedDeltaRuleFaults, PerChannelGatesAreRefusedByName) {
  for (const char* name : {"g", "beta"}) {
    Problem problem(tt::parse_case("gated_delta_rule.fwd:f32,T4,H1,K8,g,beta"));
    thalweg_tensor& t = problem.tensor(name);
    t = problem.tensor("v");
    ASSERT_EQ(problem.call(), THALWEG_INVALID_ARGUMENT);
    EXPECT_NE(std::string(thalweg_last_error()).find(std::string(": ") + name + ": "), std::string::npos) << thalweg_last_error();
  }
}

}  // namespace
}  // namespace thalweg::tests
