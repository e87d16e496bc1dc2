// What only the delta-rule operators promise, and the kinds of faults that only they can have. Every test runs for
// each of the operators; those that the library lacks are skipped.
#include <cmath>
#include <limits>

#include "tests/properties.h"

namespace thalweg::tests {
namespace {

namespace tt = thalweg::testing;

// The parameter is the operator's name.
class DeltaRule : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!has_pass(op() + ".fwd")) GTEST_SKIP() << "built without " << op();
  }
  const std::string& op() const { return GetParam(); }
  bool per_channel() const { return op() == "kimi_delta_attention"; }

  const thalweg_pass& pass(const std::string& name) const { return *find_pass(op() + "." + name); }
  Case parse(const std::string& pass_name, const std::string& rest) const {
    return tt::parse_case(op() + "." + pass_name + ":" + rest);
  }

  // Each row that takes the case.
  void for_rows(const std::string& pass_name, const std::string& rest, const std::function<void(const Case&)>& body) {
    Case c = parse(pass_name, rest);
    int taken = 0;
    for (const std::string& row : kernel_rows(*c.pass)) {
      Case forced = with_kernel(c, row);
      if (!takes(forced)) continue;
      ++taken;
      SCOPED_TRACE(forced.text());
      body(forced);
    }
    EXPECT_GT(taken, 0) << c.text();
  }

  // The case is refused with a text that begins with the argument's name and has the words joined by '|'.
  void expect_refused(const std::string& pass_name, const std::string& rest, const std::string& argument,
                      const std::string& words, const std::function<void(Problem&)>& change = nullptr) {
    Problem problem(parse(pass_name, rest));
    if (change) change(problem);
    ASSERT_EQ(problem.call(), THALWEG_INVALID_ARGUMENT) << pass_name << " " << rest << ": " << argument;
    const std::string error = thalweg_last_error(), start = op() + "." + pass_name + ": " + argument + ": ";
    EXPECT_EQ(error.substr(0, start.size()), start) << error;
    for (const std::string& word : tt::split(words, '|')) EXPECT_NE(error.find(word), std::string::npos) << error;
    EXPECT_EQ(problem.check_untouched(), "");
  }
};
class DeltaRuleFaults : public DeltaRule {};

std::string name_of(const ::testing::TestParamInfo<std::string>& info) { return info.param; }
INSTANTIATE_TEST_SUITE_P(Op, DeltaRule, ::testing::Values("gated_delta_rule", "kimi_delta_attention"), name_of);
INSTANTIATE_TEST_SUITE_P(Op, DeltaRuleFaults, ::testing::Values("gated_delta_rule", "kimi_delta_attention"), name_of);

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

void expect_verified(const Case& c) {
  tt::Verdict verdict = tt::verify(c);
  EXPECT_TRUE(verdict.passed()) << verdict.reason << "\n  thalweg verify " << verdict.case_text;
}

// ---- Against the plain recurrence ----

// No row's float32 error may exceed four times that of the plain recurrence on the same case, which counts
// as one unit in the last place where it happens to be smaller.
TEST_P(DeltaRule, NeverFarWorseThanTheRecurrence) {
  for (const char* set : {"@ci", "@edge"})
    for (const Case& c : tt::find_cases(op() + set)) {
      if (c.dtype != THALWEG_F32) continue;
      const auto verdicts = tt::verify_all_kernels(c);
      const auto& plain = verdicts.back();
      ASSERT_EQ(plain.kernel, "cpu_generic");
      for (const auto& verdict : verdicts) {
        if (verdict.status == "skipped") continue;
        ASSERT_EQ(verdict.outputs.size(), plain.outputs.size()) << verdict.case_text << ": " << verdict.reason;
        for (size_t i = 0; i < plain.outputs.size(); ++i)
          EXPECT_LE(verdict.outputs[i].difference.ratio, 4 * std::max(plain.outputs[i].difference.ratio, 1.2e-7))
              << verdict.case_text << ": " << plain.outputs[i].name;
      }
    }
}

// The terms of d_A_log cancel to a hundredth: every row stays within the limit. Not a case of the sets, where it would be
// judged by the plain recurrence too, which is right here by luck: one number a head.
TEST(KimiDeltaAttention, SumsThatCancelKeepTheirLimit) {
  const Case c = tt::parse_case(
      "kimi_delta_attention.bwd:f32,T15,H1,HV2,K16,V8,g,beta,A_log,dt_bias,use_gate,lower_bound=-5,state");
  for (const auto& verdict : tt::verify_all_kernels(c))
    EXPECT_TRUE(verdict.passed() || verdict.status == "skipped")
        << verdict.reason << "\n  thalweg verify " << verdict.case_text;
}

// T = H is not taken for another layout: tokens stay on axis 1.
TEST_P(DeltaRule, AsManyTokensAsHeads) {
  for (const char* pass_name : {"fwd", "bwd"})
    for (const auto& verdict : tt::verify_all_kernels(parse(pass_name, "f32,B2,T4,H4,HV4,K8,V8,g,beta,state")))
      EXPECT_NE(verdict.status, "failed") << verdict.case_text << ": " << verdict.reason;
}

// ---- Gates ----

// The error does not grow with the strength of the decay.
TEST_P(DeltaRuleFaults, ErrorIsFlatOverGates) {
  for (const char* pass_name : {"fwd", "bwd"})
    for (const std::string& row : kernel_rows(pass(pass_name))) {
      std::map<std::string, double> least, most;
      for (const char* gate : {"-1", "-2", "-3", "-4", "-5"}) {
        Case c = parse(pass_name, std::string("f32,T300,H1,HV2,K64,V64,g,beta,state,gate=") + gate + ",kernel=" + row);
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

TEST_P(DeltaRuleFaults, ZeroGateIsNoGateAndContinuous) {
  for_rows("fwd", "f32,T200,H1,HV2,K32,V48,g,beta,state,gate=0", [](const Case& c) {
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

TEST_P(DeltaRuleFaults, OneStrongGateInsideAChunk) {
  for (int token : {0, 1, 15, 16, 60, 61, 63, 64})
    for (const char* value : {"-3", "-1000", "-inf"})
      for (const char* pass_name : {"fwd", "bwd"})
        for_rows(pass_name,
                 "f32,T130,H1,HV1,K32,V32,g,beta,state,gate=0,gate_at=" + std::to_string(token) + ":" + value,
                 expect_verified);
}

// The same in a few channels only; the others do not decay.
TEST_P(DeltaRuleFaults, OneStrongChannelInsideAChunk) {
  if (!per_channel()) GTEST_SKIP() << "one decay a head";
  for (int64_t token : {0, 15, 16, 61, 64})
    for (double value : {-3.0, -1000.0, -std::numeric_limits<double>::infinity()})
      for (const char* pass_name : {"fwd", "bwd"})
        for_rows(pass_name, "f32,T130,H1,HV1,K32,V32,g,beta,state,gate=0", [&](const Case& c) {
          Problem problem(c);
          problem.set("g", filled(problem.inputs().at("g"),
                                  [&](int64_t i) { return i / 32 == token && i % 32 % 9 == 4 ? value : 0.0; }));
          problem.poison_outputs();
          expect_oracle(problem);
        });
}

// A_log = 90 and more: exp(A_log) is beyond float32.
TEST_P(DeltaRuleFaults, SaturatedGateHasFiniteGradients) {
  for (const char* pass_name : {"fwd", "bwd", "decode"})
    for (const char* bound : {"", ",lower_bound=-5"}) {
      if (*bound && !per_channel()) continue;
      const char* state = std::string_view(pass_name) == "decode" ? "" : ",state";
      for_rows(pass_name, std::string("f32,T70,H1,HV2,K16,V16,g,beta,A_log,dt_bias,use_gate") + state + bound,
               [&](const Case& c) {
                 for (double raw : {1000.0, 20.0, 21.0, 17.0, 0.0})
                   for (double a_log : {800.0, 200.0, 90.0, 80.0, -80.0, -90.0, 0.0}) {
                     // There the bounded gate is as steep as exp(A_log): its gradient is beyond float32.
                     if (*bound && raw == 0 && a_log >= 80) continue;
                     Problem problem(c);
                     set_all(problem, "A_log", a_log);
                     set_all(problem, "dt_bias", 0);
                     problem.set("g", filled(problem.inputs().at("g"), [&](int64_t i) { return i % 3 ? raw : -raw; }));
                     problem.poison_outputs();
                     SCOPED_TRACE("A_log " + std::to_string(a_log) + ", gate input +-" + std::to_string(raw));
                     expect_finite(run(problem));
                     problem.poison_outputs();
                     // Below e^-87 the bounded gate's gradients are subnormal: float32 has few digits of them.
                     if (a_log < 80 && !(*bound && a_log == -90)) expect_oracle(problem);
                   }
               });
    }
}

// Saturated one way or the other, the bounded gate has no slope.
TEST_P(DeltaRuleFaults, SaturatedBoundedGateHasNoSlope) {
  if (!per_channel()) GTEST_SKIP() << "no bounded gate";
  for_rows("bwd", "f32,T70,H1,HV2,K16,V16,g,beta,A_log,dt_bias,use_gate,lower_bound=-5,state", [&](const Case& c) {
    Problem problem(c);
    set_all(problem, "A_log", 90);
    set_all(problem, "dt_bias", 0);
    problem.set("g", filled(problem.inputs().at("g"), [&](int64_t i) { return i % 3 ? 1000.0 : -1000.0; }));
    problem.poison_outputs();
    Outputs got = run(problem);
    for (const char* name : {"d_g", "d_A_log", "d_dt_bias"})
      for (double x : got.at(name).data) ASSERT_EQ(x, 0) << name;
  });
}

// The fused gate is the gate computed apart.
TEST_P(DeltaRuleFaults, FusedGateEqualsTheGateGiven) {
  auto softplus = [](double x) { return x > 20 ? x : std::log1p(std::exp(x)); };
  for (double bound : {0.0, -5.0}) {
    if (bound != 0 && !per_channel()) continue;
    const std::string rest = "f32,T90,H1,HV2,K16,V16,g=f64,beta,A_log=f64,dt_bias=f64,use_gate,state";
    for_rows("fwd", rest + (bound != 0 ? ",lower_bound=-5" : ""), [&](const Case& c) {
      Problem fused(c);
      Outputs want = run(fused);
      std::map<std::string, Values> inputs = fused.inputs();
      const std::vector<double> A_log = inputs.at("A_log").data, dt_bias = inputs.at("dt_bias").data;
      const int64_t channels = inputs.at("g").count() / (90 * 2);
      inputs["g"] = filled(inputs.at("g"), [&](int64_t i) {
        const int64_t head_channel = i % (2 * channels);
        const double x = fused.inputs().at("g").data[size_t(i)] + dt_bias[size_t(head_channel)];
        const double a = std::exp(A_log[size_t(head_channel / channels)]);
        return bound == 0 ? -a * softplus(x) : bound / (1 + std::exp(-a * x));
      });
      inputs.erase("A_log"), inputs.erase("dt_bias");
      Case given = with(c, {{"-use_gate", ""}, {"-A_log", ""}, {"-dt_bias", ""}, {"-lower_bound", ""}});
      EXPECT_EQ(out_of_limit(c, run_with(given, inputs), want), "");
    });
  }
}

// ---- Precision of beta and of the state ----

// A bf16 logit of 0.5 gives beta = 0.6224593 in float32, not its bf16 neighbour 0.62109375.
TEST_P(DeltaRuleFaults, BetaIsNotRoundedToItsStorage) {
  auto check = [](const Case& c, const char* state) {
    Problem problem(c);
    for (const char* name : {"q", "k"})
      problem.set(name, filled(problem.inputs().at(name), [&](int64_t i) { return i % c.size("K") == 0 ? 1.0 : 0.0; }));
    set_all(problem, "v", 1);
    set_all(problem, "beta", 0.5);
    if (problem.inputs().count("state")) set_all(problem, "state", 0);
    problem.poison_outputs();
    Values s = run(problem).at(state);
    EXPECT_NEAR(s.data[0], 0.6224593312018546, 3e-7);
  };
  for_rows("fwd", "bf16,T1,H1,K32,beta=bf16,use_beta_sigmoid,final_state", [&](const Case& c) { check(c, "final_state"); });
  for_rows("decode", "bf16,N1,H1,K32,beta=bf16,use_beta_sigmoid", [&](const Case& c) { check(c, "state"); });
}

// A decay that bf16 cannot hold: exp(-0.001) = 0.9990005.
TEST_P(DeltaRuleFaults, DecayIsNotRoundedToTheActivationDtype) {
  for_rows("fwd", "bf16,T1,H1,K32,g=f32,initial_state,final_state", [](const Case& c) {
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
  std::string text = std::string(fwd.pass->op) + ".decode:" + thalweg_dtype_name(fwd.dtype) + ",N1";
  for (const char* size : {"H", "HV", "K", "V"}) text += "," + std::string(size) + std::to_string(fwd.size(size));
  Problem step(tt::parse_case(text + ",g,beta,threads=1,kernel=" + row));
  *state = filled(step.inputs().at("state"), [](int64_t) { return 0.0; });
  step.set("state", *state);
  Values o;
  for (int64_t t = 0; t < fwd.size("T"); ++t) {
    for (const char* name : {"q", "k", "v", "g", "beta"}) step.set(name, cut(whole.inputs().at(name), 1, t, t + 1));
    EXPECT_EQ(step.call(), THALWEG_OK) << thalweg_last_error();
    Values now = step.read("o");
    if (t == 0) o = now, o.shape[1] = fwd.size("T");
    else o.data.insert(o.data.end(), now.data.begin(), now.data.end());
  }
  *state = step.read("state");
  return o;
}

TEST_P(DeltaRuleFaults, FourThousandDecodeStepsEqualOneForward) {
  struct Limits {
    const char* dtype;
    double o, state;
  };
  for (const Limits& limits : {Limits{"bf16", 4e-3, 4e-6}, Limits{"f32", 1e-6, 1e-6}}) {
    Case fwd = parse("fwd", limits.dtype + std::string(",T4096,H1,HV2,K32,V16,g,beta,final_state"));
    Problem whole(fwd);
    Outputs want = run(whole), oracle = tt::run_reference(whole);
    for (const std::string& row : kernel_rows(pass("decode"))) {
      if (!machine_has(kernel_isa(pass("decode"), row))) continue;
      if (tt::is_cuda_row(pass("decode"), row) && row != "cuda_generic") continue;  // K64 at least; @models has them
      Values state, o = decode_all(fwd, whole, row, &state);
      EXPECT_LE(tt::compare(o, oracle.at("o")).ratio, limits.o) << row;
      EXPECT_LE(tt::compare(state, oracle.at("final_state")).ratio, limits.state) << row;
      EXPECT_LE(tt::compare(o, want.at("o")).ratio, limits.o) << row;
    }
  }
}

// The state's error does not grow over 16384 steps, with hardly any decay.
TEST_P(DeltaRuleFaults, DecodeDoesNotDrift) {
  Case fwd = parse("fwd", "bf16,T16384,H1,HV1,K16,V16,g,beta,final_state,gate=-0.0001");
  Problem whole(fwd);
  Outputs oracle = tt::run_reference(whole);
  Values state;
  decode_all(fwd, whole, kernel_rows(pass("decode")).back(), &state);
  EXPECT_LE(tt::compare(state, oracle.at("final_state")).ratio, 4e-6);
}

TEST_P(DeltaRuleFaults, SixtyFourThousandTokensDoNotDrift) {
  for_rows("fwd", "bf16,T65536,H1,HV1,K32,V32,g,beta,state,gate=-0.0001", expect_verified);
  for_rows("bwd", "bf16,T16384,H1,HV1,K32,V32,g,beta,state,gate=-0.0001", expect_verified);
}

// ---- Keys ----

// Keys of length 1.3 that point the same way: no worse than 4 times the recurrence.
TEST_P(DeltaRuleFaults, UnnormalisedCorrelatedKeys) {
  for (const char* pass_name : {"fwd", "bwd"})
    for_rows(pass_name, "f32,T200,H1,HV2,K64,V32,g,beta,state,cos=0.99,beta_value=1", [](const Case& c) {
      Problem problem(c);
      const Values k = problem.inputs().at("k");
      problem.set("k", filled(k, [&](int64_t i) { return 1.3 * k.data[size_t(i)]; }));
      problem.poison_outputs();
      expect_oracle(problem);
    });
}

// Value heads that share a key head equal heads with keys of their own.
TEST_P(DeltaRuleFaults, SharedKeyHeadsEqualRepeatedOnes) {
  for (const std::string pass_name : {"fwd", "bwd", "decode"}) {
    const std::string rest = pass_name == "decode" ? "f32,N2,T3,H2,HV6,K32,V16,g,beta" : "f32,B2,T100,H2,HV6,K32,V16,g,beta,state";
    for_rows(pass_name, rest, [&](const Case& c) {
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

// ---- States ----

TEST_P(DeltaRuleFaults, InitialStateOfOneRow) {
  for (const char* layout : {"", "=@0132", "=bf16", "=bf16@0132"})
    for (const char* pass_name : {"fwd", "bwd"})
      for_rows(pass_name, std::string("f32,T70,H1,HV2,K24,V40,g,beta,state,initial_state") + layout, [](const Case& c) {
        for (int64_t row : {0, 5, 23}) {
          Problem problem(c);
          problem.set("initial_state", filled(problem.inputs().at("initial_state"), [&](int64_t i) {
                        return i / 40 % 24 == row ? 1.0 + double(i % 40) : 0.0;
                      }));
          problem.poison_outputs();
          expect_oracle(problem);
        }
      });
}

TEST_P(DeltaRuleFaults, LossInTheFinalStateOnly) {
  for_rows("bwd", "f32,T130,H1,HV2,K32,V16,g,beta,initial_state,d_final_state,d_q,d_k,d_v,d_g,d_beta,d_initial_state",
           [](const Case& c) {
             Problem problem(c);
             expect_oracle(problem);
             Values d_q = problem.read("d_q");
             for (double x : d_q.data) ASSERT_EQ(x, 0);
           });
}

// chunk_states[c] is what a split there carries; a prefix cache continues from it.
TEST_P(DeltaRuleFaults, ChunkStatesAreTheCarriedStates) {
  for (int every : {16, 50, 64, 100, 128})
    for_rows("fwd", "f32,T300,H1,HV2,K32,V16,g,beta,state,chunk_states,every=" + std::to_string(every), [&](const Case& c) {
      Problem problem(c);
      Outputs whole = run(problem);
      for (int64_t at = 0, row = 0; at < 300; at += every, ++row) {
        const Values state = cut(whole.at("chunk_states"), 0, row, row + 1);
        std::map<std::string, Values> before, after;
        for (const auto& [name, values] : problem.inputs()) {
          const bool tokens = is_per_token(*tt::find_field(*c.pass, name));
          before[name] = tokens ? cut(values, 1, 0, at) : values;
          after[name] = tokens ? cut(values, 1, at, 300) : values;
        }
        after["initial_state"] = state;
        const Case part = with(c, {{"-chunk_states", ""}, {"-every", ""}});
        EXPECT_EQ(out_of_limit(c, {{"final_state", state}}, run_with(with_sizes(part, {{"T", at}}), before)), "")
            << "token " << at;
        Outputs rest = run_with(with_sizes(part, {{"T", 300 - at}}), after);
        EXPECT_EQ(out_of_limit(c, rest, {{"o", cut(whole.at("o"), 1, at, 300)}, {"final_state", whole.at("final_state")}}), "")
            << "resumed at token " << at;
      }
    });
}

// Three drafts of which two are accepted, then three more tokens, against the same tokens one by one: no bit may
// tell that there were drafts.
TEST_P(DeltaRuleFaults, DraftsRollBackToAnyPrefix) {
  for (const char* layout : {"", ",state=@0132"}) {
    const std::string rest = std::string(",H1,HV2,K24,V20,M6,g,beta,read_slots,write_slots") + layout;
    for_rows("decode", "f32,N1,T5" + rest, [&](const Case& c) {
      Problem all(c);
      const Values start = all.inputs().at("state");
      Values drafted = start, plain = start, o, o_plain;
      auto decode = [&](Values* pool, int64_t begin, int64_t end, double read, std::vector<double> write) {
        Problem part(with_sizes(c, {{"T", end - begin}}));
        for (const char* name : {"q", "k", "v", "g", "beta"}) part.set(name, cut(all.inputs().at(name), 1, begin, end));
        part.set("state", *pool);
        part.set("read_slots", {{1}, {read}});
        part.set("write_slots", {{1, end - begin}, std::move(write)});
        part.poison_outputs();
        Outputs got = run(part);
        *pool = got.at("state");
        return got.at("o");
      };
      const Values first = decode(&drafted, 0, 3, 0, {1, 2, 3});
      const Values second = decode(&drafted, 2, 5, 2, {-1, 4, -1});  // back to the state after token 1
      o = join(cut(first, 1, 0, 2), second, 1);
      for (int64_t t = 0; t < 5; ++t) {
        Values now = decode(&plain, t, t + 1, t % 2 ? 1 : 0, {t % 2 ? 0.0 : 1.0});
        o_plain = t == 0 ? now : join(o_plain, now, 1);
        if (t == 3) {
          EXPECT_TRUE(same_bits(cut(drafted, 0, 4, 5), cut(plain, 0, 0, 1))) << "the state after token 3";
        }
      }
      EXPECT_TRUE(same_bits(o, o_plain));
      EXPECT_TRUE(same_bits(cut(drafted, 0, 5, 6), cut(start, 0, 5, 6))) << "a slot that nobody named";
    });
  }
}

// ---- What is refused, by name ----

TEST_P(DeltaRuleFaults, UnsupportedInput) {
  expect_refused("fwd", "f32,T4,H2,HV3,K8,V8,g,beta", "v", "HV|3|2");
  expect_refused("fwd", "f32,T4,H4,HV2,K8,V8,g,beta", "v", "HV|2|4");
  expect_refused("fwd", "f32,T4,H1,K513,V8", "q", "K|513|512");
  expect_refused("bwd", "f32,T4,H1,K8,V513", "v", "V|513|512");
  expect_refused("decode", "f32,N1,H1,K8,V600", "v", "V|600|512");
  expect_refused("fwd", "f32,T4,H1,K8,beta,allow_neg_eigval", "allow_neg_eigval", "use_beta_sigmoid");
  expect_refused("fwd", "f32,T4,H1,K8,g,use_gate", "A_log", "missing|use_gate");
  expect_refused("fwd", "f32,T4,H1,K8,g,A_log", "A_log", "use_gate");
  expect_refused("fwd", "f32,T4,H1,K8,g,dt_bias", "dt_bias", "use_gate");
  expect_refused("fwd", "f32,T4,H1,K8,A_log,use_gate", "use_gate", "g");
  expect_refused("fwd", "f32,T4,H1,K8,use_beta_sigmoid", "use_beta_sigmoid", "beta");
  expect_refused("bwd", "f32,T4,H1,K8,d_g,d_o", "d_g", "g");
  expect_refused("bwd", "f32,T4,H1,K8,d_beta,d_o", "d_beta", "beta");
  expect_refused("bwd", "f32,T4,H1,K8,g,d_A_log,d_o", "d_A_log", "A_log");
  expect_refused("bwd", "f32,T4,H1,K8,g,d_dt_bias,d_o", "d_dt_bias", "dt_bias");
  expect_refused("fwd", "f32,T4,H1,K8,chunk_states,every=-3", "every", "-3");
}

TEST_P(DeltaRuleFaults, UnsupportedBounds) {
  if (!per_channel()) GTEST_SKIP() << "no bounded gate";
  for (const char* pass_name : {"fwd", "bwd", "decode"}) {
    const std::string rest = std::string_view(pass_name) == "decode" ? "f32,N1,H1,K8,g" : "f32,T4,H1,K8,g";
    expect_refused(pass_name, rest + ",use_gate,lower_bound=1", "lower_bound", "got 1|0 or less");
    expect_refused(pass_name, rest + ",lower_bound=-5", "lower_bound", "got -5|use_gate");
    expect_refused(pass_name, rest + ",use_gate", "A_log", "missing|lower_bound");
    expect_refused(pass_name, rest + ",use_gate,lower_bound=-inf", "lower_bound", "-inf|finite");
    expect_refused(pass_name, rest + ",use_gate,lower_bound=nan", "lower_bound", "nan|finite");
  }
}

TEST_P(DeltaRuleFaults, TamperedArguments) {
  const std::string fwd = "f32,T5,H2,HV4,K8,V6,g,beta,state,chunk_states", bwd = "f32,T5,H2,HV4,K8,V6,g,beta,state";
  expect_refused("fwd", fwd, "k", "H|1|2", [](Problem& p) { p.tensor("k").shape[2] = 1; });
  expect_refused("fwd", fwd, "k", "bf16|f32", [](Problem& p) { p.tensor("k").dtype = THALWEG_BF16; });
  expect_refused("fwd", fwd, "chunk_states", "R|2", [](Problem& p) { p.tensor("chunk_states").shape[0] = 2; });
  expect_refused("fwd", fwd, "final_state", "N|2|1", [](Problem& p) { p.tensor("final_state").shape[0] = 2; });
  expect_refused("fwd", fwd, "initial_state", "strides|12|2", [](Problem& p) {
    p.tensor("initial_state").stride[2] = 12, p.tensor("initial_state").stride[3] = 2;
  });
  expect_refused("fwd", fwd + ",scale=nan", "scale", "nan|finite");
  expect_refused("bwd", bwd, "d_q", "bf16|f32", [](Problem& p) { p.tensor("d_q").dtype = THALWEG_BF16; });
}

// g [B T H] where [B T HV] is asked for; and T = HV does not make [B HV T] acceptable storage order by chance.
TEST_P(DeltaRuleFaults, GateOfTheWrongHeads) {
  expect_refused("fwd", "f32,T8,H2,HV4,K8,V8,g,beta", "g",
                 per_channel() ? "HV, got 2 in [1, 8, 2, 8], expected 4 (from v)" : "HV, got 2 in [1, 8, 2], expected 4 (from v)",
                 [](Problem& p) { p.tensor("g").shape[2] = 2; });
  Case square = parse("fwd", "f32,T4,H4,HV4,K8,V8,g,beta");
  Problem rows(square), columns(with(square, {{"g", per_channel() ? "@0213" : "@021"}}));
  Outputs want = run(rows);
  EXPECT_EQ(first_difference(run(columns), want), "");  // the same values, stored [B HV T]
}

TEST_P(DeltaRuleFaults, OtherRanksAreRefusedByName) {
  for (const char* pass_name : {"fwd", "bwd", "decode"}) {
    const std::string rest = std::string_view(pass_name) == "decode" ? "f32,N1,H1,K8,g,beta" : "f32,T4,H1,K8,g,beta";
    if (per_channel())
      expect_refused(pass_name, rest, "g", "shape, got [1, |HV K]|gated_delta_rule",
                     [](Problem& p) { p.tensor("g") = p.tensor("beta"); });
    else
      expect_refused(pass_name, rest, "g", "shape, got [1, |T HV]|channel",
                     [](Problem& p) { p.tensor("g") = p.tensor("v"); });
    expect_refused(pass_name, rest, "beta", "shape, got [1, |T HV]|channel",
                   [](Problem& p) { p.tensor("beta") = p.tensor("v"); });
  }
}

TEST_P(DeltaRuleFaults, SaysWhatItDoesNotDo) {
  for (const char* pass_name : {"fwd", "bwd", "decode"})
    for (const char* word : {per_channel() ? "g of rank 3:" : "gk:", "gv:", "beta of rank 4:", "cp_context:"})
      EXPECT_NE(std::string(pass(pass_name).refused).find(word), std::string::npos) << word;
}

// ---- One operator against the other ----

// With all channels of g equal, Kimi delta attention is the gated delta rule.
void expect_equal_channels(const std::string& pass_name, const std::string& rest) {
  const Case head = tt::parse_case("gated_delta_rule." + pass_name + ":" + rest);
  const Case channels = tt::parse_case("kimi_delta_attention." + pass_name + ":" + rest);
  SCOPED_TRACE(channels.text());
  Problem problem(head);
  const Outputs want = run(problem);
  const int64_t K = head.size("K");
  auto repeated = [&](const Values& of_heads) {
    Values all = of_heads;
    all.shape.push_back(K), all.data.clear();
    for (double x : of_heads.data) all.data.insert(all.data.end(), size_t(K), x);
    return all;
  };
  std::map<std::string, Values> inputs = problem.inputs();
  for (const char* name : {"g", "dt_bias"})
    if (inputs.count(name)) inputs[name] = repeated(inputs[name]);
  for (const std::string& row : kernel_rows(*channels.pass)) {
    const Case forced = with_kernel(channels, row);
    if (!takes(forced)) continue;
    Outputs got = run_with(forced, inputs);
    for (const char* name : {"d_g", "d_dt_bias"}) {
      if (!got.count(name)) continue;
      Values sum = got[name];
      sum.shape.pop_back(), sum.data.assign(size_t(sum.count() / K), 0);
      for (int64_t i = 0; i < got[name].count(); ++i) sum.data[size_t(i / K)] += got[name].data[size_t(i)];
      got[name] = sum;
    }
    EXPECT_EQ(out_of_limit(head, got, want, 2), "") << row;  // either has its own error
  }
}

TEST(DeltaRuleOperators, EqualChannelsAreTheGatedDeltaRule) {
  if (!has_pass("gated_delta_rule.fwd") || !has_pass("kimi_delta_attention.fwd")) GTEST_SKIP() << "needs both operators";
  for (const char* dtype : {"f64", "f32", "bf16"})
    for (const char* gate : {"g,beta", "g,beta,A_log,dt_bias,use_gate,use_beta_sigmoid,use_qk_l2norm"}) {
      const std::string rest = std::string(",H2,HV4,K24,V20,") + gate;
      expect_equal_channels("fwd", dtype + std::string(",B2,T150") + rest + ",state,chunk_states");
      expect_equal_channels("bwd", dtype + std::string(",B2,T150") + rest + ",state");
      expect_equal_channels("fwd", dtype + rest + ",state,varlen=70+0+33");
      expect_equal_channels("bwd", dtype + rest + ",state,varlen=70+0+33");
      expect_equal_channels("decode", dtype + std::string(",N2,T3") + rest);
    }
}

// A decay per head is a g whose last stride is 0: the same bits as its copies.
TEST(DeltaRuleOperators, ADecayPerHeadIsBroadcast) {
  if (!has_pass("kimi_delta_attention.fwd")) GTEST_SKIP() << "built without kimi_delta_attention";
  for (const char* pass_name : {"fwd", "bwd"}) {
    const Case c = tt::parse_case(std::string("kimi_delta_attention.") + pass_name + ":f32,T100,H1,HV2,K16,V16,g=@s200_2_1_0,beta,state");
    Problem broadcast(c);
    Outputs want = run(broadcast);
    EXPECT_EQ(first_difference(run_with(with(c, {{"g", ""}}), broadcast.inputs()), want), "");
  }
}

}  // namespace
}  // namespace thalweg::tests
