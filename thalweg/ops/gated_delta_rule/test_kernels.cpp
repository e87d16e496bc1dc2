// What only the gated delta rule promises of its kernels: decode and forward agree, drafts roll back, saved
// states resume, refusals name their argument, extreme gates stay finite.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "testing/testing.h"
#include "thalweg/core/tensor.h"
#include "thalweg/ops/gated_delta_rule/gated_delta_rule.h"

namespace thalweg::gated_delta_rule {
namespace {

using testing::Case;
using testing::Problem;
using testing::Random;
using testing::Values;
using Floats = std::vector<float>;

Floats normals(int64_t n, uint64_t seed, double factor = 1, double shift = 0) {
  Random random(seed);
  Floats x(static_cast<size_t>(n));
  for (float& value : x) value = float(shift + factor * random.normal());
  return x;
}

double rms_ratio(const Floats& got, const Floats& want) {
  double error = 0, square = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(double(got[i]) - want[i], 2);
    square += std::pow(double(want[i]), 2);
  }
  return std::sqrt(error / square);
}

// Rows of a pass that this machine can run.
std::vector<std::string> rows_of(const char* pass_name) {
  std::vector<std::string> rows;
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i) {
    if (std::string(pass->op) != "gated_delta_rule" || std::string(pass->name) != pass_name) continue;
    const char* isa = nullptr;
    const std::string here = thalweg_cpu_isa();
    for (int64_t r = 0; const char* row = pass->kernel_at(r, &isa); ++r)
      if (std::string(isa) != "avx512" || here == "avx512")
        if (std::string(isa) == "portable" || here != "portable") rows.push_back(row);
  }
  return rows;
}

// One sequence of float32 tokens.
struct Stream {
  int64_t T, H = 1, HV = 2, K = 24, V = 20;
  Floats q, k, v, g, beta, o, initial_state, final_state;

  explicit Stream(int64_t tokens) : T(tokens) {
    q = normals(T * H * K, 1, 0.2), k = normals(T * H * K, 2, 0.2), v = normals(T * HV * V, 3);
    g = normals(T * HV, 4, 0.05, -0.2), beta = normals(T * HV, 5, 0.1, 0.5);
    for (float& x : g) x = std::min(x, 0.f);
    initial_state = normals(HV * K * V, 6, 0.3);
    o.resize(v.size()), final_state.resize(initial_state.size());
  }

  // Tokens [begin, end) as the tensors of a pass; decode's N and a forward's B are both 1.
  template <class Args>
  void set(Args& a, int64_t begin, int64_t end, Floats& out) {
    const int64_t n = end - begin;
    a.q = view(q.data() + begin * H * K, {1, n, H, K});
    a.k = view(k.data() + begin * H * K, {1, n, H, K});
    a.v = view(v.data() + begin * HV * V, {1, n, HV, V});
    a.g = view(g.data() + begin * HV, {1, n, HV});
    a.beta = view(beta.data() + begin * HV, {1, n, HV});
    a.o = view(out.data() + begin * HV * V, {1, n, HV, V});
  }

  void forward() {
    gated_delta_rule_fwd_args a{};
    set(a, 0, T, o);
    a.initial_state = view(initial_state.data(), {1, HV, K, V});
    a.final_state = view(final_state.data(), {1, HV, K, V});
    gated_delta_rule_fwd(a);
  }
};

TEST(GatedDeltaRule, ManyDecodeStepsEqualOneForward) {
  for (const std::string& row : rows_of("decode")) {
    SCOPED_TRACE(row);
    Stream s(4096);
    s.forward();
    Floats state = s.initial_state, o(s.o.size());
    thalweg_context ctx{};
    ctx.kernel = row.c_str();
    ctx.num_threads = 1;  // a step this small is not worth waking another
    for (int64_t t = 0; t < s.T; ++t) {
      gated_delta_rule_decode_args a{};
      s.set(a, t, t + 1, o);
      a.state = view(state.data(), {1, s.HV, s.K, s.V});
      gated_delta_rule_decode(a, ctx);
    }
    EXPECT_LT(rms_ratio(o, s.o), 1e-6);
    EXPECT_LT(rms_ratio(state, s.final_state), 1e-6);
  }
}

// Three drafts of which two are accepted, then three more tokens, against the same tokens one by one:
// no bit may tell that there were drafts.
void check_roll_back(const std::string& row, bool value_first) {
  SCOPED_TRACE(row + (value_first ? ", state [V K]" : ", state [K V]"));
  Stream s(5);
  const int64_t size = s.HV * s.K * s.V, M = 6;
  auto pool_view = [&](Floats& pool) {
    if (!value_first) return view(pool.data(), {M, s.HV, s.K, s.V});
    return view(pool.data(), {M, s.HV, s.K, s.V}, {size, s.K * s.V, 1, s.K}, THALWEG_F32);
  };
  thalweg_context ctx{};
  ctx.kernel = row.c_str();
  Floats drafted(size_t(M * size)), plain, o(s.o.size()), o_plain(s.o.size());
  std::copy(s.initial_state.begin(), s.initial_state.end(), drafted.begin());
  plain = drafted;
  auto decode = [&](Floats& pool, Floats& out, int64_t begin, int64_t end, int32_t read, std::vector<int32_t> write) {
    gated_delta_rule_decode_args a{};
    s.set(a, begin, end, out);
    a.state = pool_view(pool);
    a.read_slots = view(&read, {1});
    a.write_slots = view(write.data(), {1, end - begin});
    gated_delta_rule_decode(a, ctx);
  };
  decode(drafted, o, 0, 3, 0, {1, 2, 3});
  decode(drafted, o, 2, 5, 2, {-1, 4, -1});  // back to the state after token 1
  for (int32_t t = 0; t < 5; ++t) decode(plain, o_plain, t, t + 1, t % 2 ? 1 : 0, {t % 2 ? 0 : 1});
  EXPECT_EQ(o, o_plain);
  // Token 3's state: slot 4 of the one, and where the plain run put it before token 4 took it on.
  Floats again(size_t(M * size)), scratch(s.o.size());
  std::copy(s.initial_state.begin(), s.initial_state.end(), again.begin());
  for (int32_t t = 0; t < 4; ++t) decode(again, scratch, t, t + 1, t % 2 ? 1 : 0, {t % 2 ? 0 : 1});
  EXPECT_TRUE(std::equal(drafted.begin() + 4 * size, drafted.begin() + 5 * size, again.begin()));
  for (int64_t i = 5 * size; i < 6 * size; ++i) ASSERT_EQ(drafted[size_t(i)], 0) << "a slot that nobody named";
}

TEST(GatedDeltaRule, DraftsRollBackToAnyPrefix) {
  for (const std::string& row : rows_of("decode"))
    for (bool value_first : {false, true}) check_roll_back(row, value_first);
}

// The state before token 64 and what follows give the same rest: what a prefix cache relies on.
TEST(GatedDeltaRule, SavedStatesResume) {
  Stream s(150);
  Floats saved(size_t(3 * s.HV * s.K * s.V)), o(s.o.size());
  gated_delta_rule_fwd_args a{};
  s.set(a, 0, s.T, s.o);
  a.initial_state = view(s.initial_state.data(), {1, s.HV, s.K, s.V});
  a.final_state = view(s.final_state.data(), {1, s.HV, s.K, s.V});
  a.chunk_states = view(saved.data(), {3, s.HV, s.K, s.V});
  gated_delta_rule_fwd(a);
  EXPECT_TRUE(std::equal(s.initial_state.begin(), s.initial_state.end(), saved.begin()));
  Floats last(s.final_state.size());
  gated_delta_rule_fwd_args b{};
  s.set(b, 64, s.T, o);
  b.initial_state = view(saved.data() + s.HV * s.K * s.V, {1, s.HV, s.K, s.V});
  b.final_state = view(last.data(), {1, s.HV, s.K, s.V});
  gated_delta_rule_fwd(b);
  EXPECT_LT(rms_ratio(last, s.final_state), 1e-6);
  EXPECT_LT(rms_ratio(Floats(o.begin() + 64 * 40, o.end()), Floats(s.o.begin() + 64 * 40, s.o.end())), 1e-6);
}

// The sigmoid of a bf16 logit is not rounded to bf16 again.
TEST(GatedDeltaRule, SigmoidOfLowPrecisionLogitsIsFloat32) {
  for (const std::string& row : rows_of("fwd")) {
    float one = 1, o = 0;
    bf16 logit = to_bf16(0.5f);
    gated_delta_rule_fwd_args a{};
    a.q = a.k = a.v = view(&one, {1, 1, 1, 1});
    a.beta = view(&logit, {1, 1, 1});
    a.o = view(&o, {1, 1, 1, 1});
    a.use_beta_sigmoid = 1;
    thalweg_context ctx{};
    ctx.kernel = row.c_str();
    gated_delta_rule_fwd(a, ctx);
    EXPECT_NEAR(o, 0.6224593f, 1e-7f) << row;
  }
}

// ---- Saturated gates ----

void check_saturated(const char* pass) {
  for (const std::string& row : rows_of(pass)) {
    Case c = testing::parse_case(std::string("gated_delta_rule.") + pass +
                                 ":f32,T70,H1,HV2,K16,V16,g,beta,A_log,dt_bias,use_gate,state,gate=1000/-1000/0,kernel=" + row);
    SCOPED_TRACE(c.text());
    Problem problem(c);
    Values A_log = problem.inputs().at("A_log");
    A_log.data = {90, 0};
    problem.set("A_log", A_log);
    ASSERT_EQ(problem.call(), THALWEG_OK) << thalweg_last_error();
    const auto want = testing::run_reference(problem);
    for (const auto& [name, values] : want) {
      const Values got = problem.read(name);
      for (double x : got.data) ASSERT_TRUE(std::isfinite(x)) << name;
      EXPECT_LT(testing::compare(got, values).ratio, 1e-5) << name;
    }
  }
}

TEST(GatedDeltaRule, SaturatedGatesStayFiniteForward) { check_saturated("fwd"); }
TEST(GatedDeltaRule, SaturatedGatesStayFiniteBackward) { check_saturated("bwd"); }
TEST(GatedDeltaRule, SaturatedGatesStayFiniteInDecode) { check_saturated("decode"); }

// ---- Against the plain recurrence ----

// No row's float32 error may exceed four times that of the plain recurrence on the same case, which counts
// as one unit in the last place where it happens to be smaller.
TEST(GatedDeltaRule, NeverFarWorseThanTheRecurrence) {
  for (const char* set : {"gated_delta_rule@ci", "gated_delta_rule@edge"})
    for (const Case& c : testing::find_cases(set)) {
      if (c.dtype != THALWEG_F32) continue;
      const auto verdicts = testing::verify_all_kernels(c);
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

// ---- Refusals ----

// Expects the pass to refuse what `change` does, with a text that begins with the argument's name.
template <class Change>
void expect_refused(const std::string& text, const std::string& argument, Change change) {
  const Case c = testing::parse_case(text);
  Problem problem(c);
  change(problem.args());
  size_t bytes = 0;
  thalweg_status status = c.pass->workspace(problem.args(), nullptr, &bytes);
  EXPECT_EQ(status, THALWEG_INVALID_ARGUMENT) << argument;
  const std::string start = std::string(c.pass->op) + "." + c.pass->name + ": " + argument + ": ";
  EXPECT_EQ(std::string(thalweg_last_error()).substr(0, start.size()), start) << thalweg_last_error();
}

const std::string kFwdCase = "gated_delta_rule.fwd:f32,T5,H2,HV4,K8,V6,g,beta,state,chunk_states";
const std::string kBwdCase = "gated_delta_rule.bwd:f32,T5,H2,HV4,K8,V6,g,beta,state";

void refuse_fwd(const std::string& argument, void (*change)(gated_delta_rule_fwd_args&)) {
  expect_refused(kFwdCase, argument, [&](void* a) { change(*static_cast<gated_delta_rule_fwd_args*>(a)); });
}
void refuse_bwd(const std::string& argument, void (*change)(gated_delta_rule_bwd_args&)) {
  expect_refused(kBwdCase, argument, [&](void* a) { change(*static_cast<gated_delta_rule_bwd_args*>(a)); });
}

TEST(GatedDeltaRule, RefusesByNameInForward) {
  refuse_fwd("g", [](auto& a) { a.g = view(nullptr, {1, 5, 4, 8}, THALWEG_F32); });       // gk
  refuse_fwd("beta", [](auto& a) { a.beta = view(nullptr, {1, 5, 4, 6}, THALWEG_F32); });  // per channel
  refuse_fwd("g", [](auto& a) { a.g = view(nullptr, {1, 5, 2}, THALWEG_F32); });           // H, not HV
  refuse_fwd("k", [](auto& a) { a.k = view(nullptr, {1, 5, 1, 8}, THALWEG_F32); });
  refuse_fwd("k", [](auto& a) { a.k.dtype = THALWEG_BF16; });
  refuse_fwd("A_log", [](auto& a) { a.use_gate = 1; });
  refuse_fwd("A_log", [](auto& a) { a.A_log = view(nullptr, {4}, THALWEG_F32); });
  refuse_fwd("dt_bias", [](auto& a) { a.dt_bias = view(nullptr, {4}, THALWEG_F32); });
  refuse_fwd("use_gate", [](auto& a) { a.use_gate = 1, a.g = {}; });
  refuse_fwd("use_beta_sigmoid", [](auto& a) { a.use_beta_sigmoid = 1, a.beta = {}; });
  refuse_fwd("allow_neg_eigval", [](auto& a) { a.allow_neg_eigval = 1; });
  refuse_fwd("every", [](auto& a) { a.every = -1; });
  refuse_fwd("chunk_states", [](auto& a) { a.every = 1; });
  refuse_fwd("scale", [](auto& a) { a.scale = std::nan(""); });
  refuse_fwd("initial_state", [](auto& a) { a.initial_state = a.final_state = view(nullptr, {2, 4, 8, 6}, THALWEG_F32); });
  refuse_fwd("initial_state", [](auto& a) { a.initial_state = view(nullptr, {1, 4, 8, 6}, {400, 100, 12, 2}, THALWEG_F32); });
  // HV = 3 is no multiple of H = 2; K = 513 is past the limit.
  refuse_fwd("v", [](auto& a) {
    a.v = a.o = view(nullptr, {1, 5, 3, 6}, THALWEG_F32);
    a.g = a.beta = view(nullptr, {1, 5, 3}, THALWEG_F32);
    a.initial_state = a.final_state = a.chunk_states = {};
  });
  refuse_fwd("q", [](auto& a) {
    a.q = a.k = view(nullptr, {1, 5, 2, 513}, THALWEG_F32);
    a.initial_state = a.final_state = a.chunk_states = {};
  });
}

TEST(GatedDeltaRule, RefusesByNameInBackward) {
  refuse_bwd("d_g", [](auto& a) { a.g = {}; });
  refuse_bwd("d_beta", [](auto& a) { a.beta = {}; });
  refuse_bwd("d_A_log", [](auto& a) { a.d_A_log = view(nullptr, {4}, THALWEG_F32); });
  refuse_bwd("d_dt_bias", [](auto& a) { a.d_dt_bias = view(nullptr, {4}, THALWEG_F32); });
  refuse_bwd("d_q", [](auto& a) { a.d_q.dtype = THALWEG_BF16; });
}

TEST(GatedDeltaRule, SaysWhatItDoesNotDo) {
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i) {
    if (std::string(pass->op) != "gated_delta_rule") continue;
    for (const char* word : {"gk:", "gv:", "beta of rank 4:", "cp_context:"})
      EXPECT_NE(std::string(pass->refused).find(word), std::string::npos) << word;
  }
}

// T = H is not taken for another layout: tokens stay on axis 1.
TEST(GatedDeltaRule, AsManyTokensAsHeads) {
  for (const char* text : {"gated_delta_rule.fwd:f32,B2,T4,H4,HV4,K8,V8,g,beta,state",
                           "gated_delta_rule.bwd:f32,B2,T4,H4,HV4,K8,V8,g,beta,state"})
    for (const auto& verdict : testing::verify_all_kernels(testing::parse_case(text)))
      EXPECT_NE(verdict.status, "failed") << verdict.case_text << ": " << verdict.reason;
}

}  // namespace
}  // namespace thalweg::gated_delta_rule
