// The oracles of the gated delta rule: finite differences, closed forms, chunk level against token level.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "testing/testing.h"
#include "thalweg/core/tensor.h"
#include "thalweg/ops/gated_delta_rule/gated_delta_rule.h"
#include "thalweg/ops/gated_delta_rule/reference.h"

namespace thalweg::gated_delta_rule {
namespace {

using Vector = std::vector<double>;
using testing::Random;

Vector normals(int64_t n, uint64_t seed, double factor = 1, double shift = 0) {
  Random random(seed);
  Vector x(static_cast<size_t>(n));
  for (double& value : x) value = shift + factor * random.normal();
  return x;
}

double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void expect_close(const Vector& got, const Vector& want, double tolerance, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < want.size(); ++i)
    ASSERT_NEAR(got[i], want[i], tolerance * (1 + std::fabs(want[i]))) << what << " element " << i;
}

// Which optional inputs a case has.
struct Choice {
  int gate;  // 0 no g, 1 g, 2 with A_log, 3 with dt_bias too
  int beta;  // 0 none, 1 plain, 2 sigmoid, 3 twice a sigmoid
  bool state, l2norm, packed, d_o, d_final_state;

  std::string text() const {
    return "gate " + std::to_string(gate) + " beta " + std::to_string(beta) + (state ? " state" : "") +
           (l2norm ? " l2norm" : "") + (packed ? " packed" : "") + (d_o ? " d_o" : "") +
           (d_final_state ? " d_final_state" : "");
  }
};

// A small float64 problem with its gradients.
struct Tiny {
  int64_t B = 1, T = 5, H = 1, HV = 2, K = 3, V = 2, N = 1;
  Choice choice;
  Vector q, k, v, g, beta, A_log, dt_bias, initial_state, d_o, d_final_state, o, final_state;
  std::vector<int32_t> cu_seqlens;
  double scale = 0;

  explicit Tiny(const Choice& c, uint64_t seed = 7) : choice(c) {
    if (c.packed) cu_seqlens = {0, 2, 2, 5}, N = 3;
    q = normals(B * T * H * K, seed), k = normals(B * T * H * K, seed + 1, 0.7);
    v = normals(B * T * HV * V, seed + 2);
    g = normals(B * T * HV, seed + 3, 0.5, c.gate == 1 ? -0.7 : 0);
    beta = normals(B * T * HV, seed + 4, 0.3, 0.5);
    A_log = normals(HV, seed + 5, 0.5), dt_bias = normals(HV, seed + 6);
    initial_state = normals(N * HV * K * V, seed + 7);
    d_o = normals(B * T * HV * V, seed + 8), d_final_state = normals(N * HV * K * V, seed + 9);
    o.resize(v.size()), final_state.resize(initial_state.size());
  }

  template <class Args>
  void set_inputs(Args& a) {
    a.q = view(q.data(), {B, T, H, K});
    a.k = view(k.data(), {B, T, H, K});
    a.v = view(v.data(), {B, T, HV, V});
    if (choice.gate >= 1) a.g = view(g.data(), {B, T, HV});
    if (choice.gate >= 2) a.A_log = view(A_log.data(), {HV}), a.use_gate = 1;
    if (choice.gate >= 3) a.dt_bias = view(dt_bias.data(), {HV});
    if (choice.beta >= 1) a.beta = view(beta.data(), {B, T, HV});
    a.use_beta_sigmoid = choice.beta >= 2;
    a.allow_neg_eigval = choice.beta >= 3;
    a.use_qk_l2norm = choice.l2norm;
    if (choice.state) a.initial_state = view(initial_state.data(), {N, HV, K, V});
    if (choice.packed) a.cu_seqlens = view(cu_seqlens.data(), {N + 1});
    a.scale = scale;
  }

  void forward() {
    gated_delta_rule_fwd_args a{};
    set_inputs(a);
    a.o = view(o.data(), {B, T, HV, V});
    a.final_state = view(final_state.data(), {N, HV, K, V});
    reference_fwd(&a);
  }

  double loss() {
    forward();
    return (choice.d_o ? dot(o, d_o) : 0) + (choice.d_final_state ? dot(final_state, d_final_state) : 0);
  }
};

struct Gradients {
  Vector q, k, v, g, beta, A_log, dt_bias, initial_state;
};

Gradients backward(Tiny& tiny) {
  Gradients d{tiny.q, tiny.k, tiny.v, tiny.g, tiny.beta, tiny.A_log, tiny.dt_bias, tiny.initial_state};
  gated_delta_rule_bwd_args a{};
  tiny.set_inputs(a);
  const int64_t B = tiny.B, T = tiny.T, H = tiny.H, HV = tiny.HV, K = tiny.K, V = tiny.V, N = tiny.N;
  if (tiny.choice.d_o) a.d_o = view(tiny.d_o.data(), {B, T, HV, V});
  if (tiny.choice.d_final_state) a.d_final_state = view(tiny.d_final_state.data(), {N, HV, K, V});
  a.d_q = view(d.q.data(), {B, T, H, K});
  a.d_k = view(d.k.data(), {B, T, H, K});
  a.d_v = view(d.v.data(), {B, T, HV, V});
  if (tiny.choice.gate >= 1) a.d_g = view(d.g.data(), {B, T, HV});
  if (tiny.choice.beta >= 1) a.d_beta = view(d.beta.data(), {B, T, HV});
  if (tiny.choice.gate >= 2) a.d_A_log = view(d.A_log.data(), {HV});
  if (tiny.choice.gate >= 3) a.d_dt_bias = view(d.dt_bias.data(), {HV});
  a.d_initial_state = view(d.initial_state.data(), {N, HV, K, V});
  reference_bwd(&a);
  return d;
}

// Central differences of f in every element of x.
Vector differences(Vector& x, const std::function<double()>& f) {
  const double h = 1e-5;
  Vector slopes;
  for (double& element : x) {
    const double middle = element;
    element = middle + h;
    const double above = f();
    element = middle - h;
    slopes.push_back((above - f()) / (2 * h));
    element = middle;
  }
  return slopes;
}

void check_gradients(const Choice& choice) {
  SCOPED_TRACE(choice.text());
  Tiny tiny(choice);
  const Gradients d = backward(tiny);
  const auto loss = [&] { return tiny.loss(); };
  expect_close(d.q, differences(tiny.q, loss), 1e-7, "d_q");
  expect_close(d.k, differences(tiny.k, loss), 1e-7, "d_k");
  expect_close(d.v, differences(tiny.v, loss), 1e-7, "d_v");
  if (choice.gate >= 1) expect_close(d.g, differences(tiny.g, loss), 1e-7, "d_g");
  if (choice.beta >= 1) expect_close(d.beta, differences(tiny.beta, loss), 1e-7, "d_beta");
  if (choice.gate >= 2) expect_close(d.A_log, differences(tiny.A_log, loss), 1e-7, "d_A_log");
  if (choice.gate >= 3) expect_close(d.dt_bias, differences(tiny.dt_bias, loss), 1e-7, "d_dt_bias");
  if (choice.state) expect_close(d.initial_state, differences(tiny.initial_state, loss), 1e-7, "d_initial_state");
}

TEST(GatedDeltaRuleReference, GradientsEqualFiniteDifferencesForEveryChoiceOfInputs) {
  for (int gate = 0; gate < 4; ++gate)
    for (int beta = 0; beta < 4; ++beta)
      for (int bits = 0; bits < 32; ++bits) {
        Choice choice{gate, beta, bool(bits & 1), bool(bits & 2), bool(bits & 4), bool(bits & 8), bool(bits & 16)};
        check_gradients(choice);
        if (::testing::Test::HasFatalFailure()) return;
      }
}

// The gradient of the initial state exists without an initial state: it is the one at 0.
TEST(GatedDeltaRuleReference, InitialStateGradientWithoutOne) {
  Choice choice{1, 1, true, false, false, true, true};
  Tiny tiny(choice);
  for (double& x : tiny.initial_state) x = 0;
  Vector want = backward(tiny).initial_state;
  tiny.choice.state = false;
  EXPECT_EQ(backward(tiny).initial_state, want);
}

// A sequence of more than one checkpoint, longer than sqrt(T) pieces divide.
TEST(GatedDeltaRuleReference, GradientsEqualFiniteDifferencesOfLongerSequences) {
  Tiny shape(Choice{3, 3, true, true, false, true, true});
  shape.T = 23, shape.H = 2, shape.HV = 4;
  Tiny tiny = shape;
  tiny.q = normals(23 * 2 * 3, 1), tiny.k = normals(23 * 2 * 3, 2), tiny.v = normals(23 * 4 * 2, 3);
  tiny.g = normals(23 * 4, 4), tiny.beta = normals(23 * 4, 5);
  tiny.A_log = normals(4, 6, 0.5), tiny.dt_bias = normals(4, 7);
  tiny.initial_state = normals(4 * 6, 8), tiny.final_state.resize(4 * 6), tiny.d_final_state = normals(4 * 6, 9);
  tiny.o.resize(23 * 4 * 2), tiny.d_o = normals(23 * 4 * 2, 10);
  const Gradients d = backward(tiny);
  const auto loss = [&] { return tiny.loss(); };
  expect_close(d.q, differences(tiny.q, loss), 1e-6, "d_q");
  expect_close(d.k, differences(tiny.k, loss), 1e-6, "d_k");
  expect_close(d.g, differences(tiny.g, loss), 1e-6, "d_g");
  expect_close(d.A_log, differences(tiny.A_log, loss), 1e-6, "d_A_log");
  expect_close(d.initial_state, differences(tiny.initial_state, loss), 1e-6, "d_initial_state");
}

// ---- Closed forms ----

TEST(GatedDeltaRuleReference, OneTokenWithoutStateReadsItsOwnValue) {
  Tiny tiny(Choice{1, 1, false, false, false, true, false});
  tiny.T = 1;
  tiny.scale = 0.5;
  tiny.forward();
  double kq = 0;
  for (size_t i = 0; i < 3; ++i) kq += tiny.k[i] * tiny.q[i];
  for (size_t hv = 0; hv < 2; ++hv)
    for (size_t j = 0; j < 2; ++j)
      EXPECT_NEAR(tiny.o[hv * 2 + j], 0.5 * kq * tiny.beta[hv] * tiny.v[hv * 2 + j], 1e-15);
}

TEST(GatedDeltaRuleReference, ZeroBetaOnlyDecays) {
  Tiny tiny(Choice{1, 1, true, false, false, true, false});
  for (double& x : tiny.beta) x = 0;
  tiny.forward();
  for (size_t hv = 0; hv < 2; ++hv) {
    double sum = 0;
    for (size_t t = 0; t < 5; ++t) sum += tiny.g[t * 2 + hv];
    for (size_t i = 0; i < 6; ++i)
      EXPECT_NEAR(tiny.final_state[hv * 6 + i], std::exp(sum) * tiny.initial_state[hv * 6 + i], 1e-14);
  }
}

TEST(GatedDeltaRuleReference, ZeroGateIsThePlainDeltaRule) {
  Tiny gated(Choice{1, 1, true, false, false, true, false}), plain(Choice{0, 1, true, false, false, true, false});
  for (double& x : gated.g) x = 0;
  gated.forward();
  plain.forward();
  EXPECT_EQ(gated.o, plain.o);
  EXPECT_EQ(gated.final_state, plain.final_state);
}

// Orthonormal keys written with strength 1 are a table: any of them reads back its value.
TEST(GatedDeltaRuleReference, OrthonormalKeysReadBackTheirValues) {
  Tiny tiny(Choice{0, 0, false, false, false, true, false});
  tiny.T = 3;
  tiny.scale = 1;
  for (size_t t = 0; t < 3; ++t)
    for (size_t i = 0; i < 3; ++i) tiny.k[t * 3 + i] = i == t, tiny.q[t * 3 + i] = i == 0;
  tiny.forward();
  for (size_t t = 0; t < 3; ++t)
    for (size_t j = 0; j < 4; ++j) EXPECT_DOUBLE_EQ(tiny.o[t * 4 + j], tiny.v[j]);
}

TEST(GatedDeltaRuleReference, InfiniteGateForgetsEverythingAndHasNoGradient) {
  Tiny tiny(Choice{1, 1, true, false, false, true, true});
  const double inf = std::numeric_limits<double>::infinity();
  tiny.g[2 * 2] = tiny.g[2 * 2 + 1] = -inf;
  for (size_t i = 0; i < 2 * 4; ++i) tiny.d_o[i] = 0;  // only what is after the gate counts
  const Gradients d = backward(tiny);
  for (const Vector* x : {&d.q, &d.k, &d.v, &d.g, &d.beta, &d.initial_state})
    for (double value : *x) EXPECT_TRUE(std::isfinite(value));
  EXPECT_EQ(d.g[4], 0);
  for (double value : d.initial_state) EXPECT_EQ(value, 0);
  tiny.forward();
  Vector o = tiny.o;
  for (double& x : tiny.initial_state) x += 1;
  tiny.forward();
  for (size_t i = 2 * 4; i < o.size(); ++i) EXPECT_EQ(o[i], tiny.o[i]);
}

// ---- Chunk level against token level ----

struct Sequence {
  int64_t T = 37, K = 4, V = 3;
  Vector q = normals(T * K, 1), k = normals(T * K, 2, 0.5), v = normals(T * V, 3);
  Vector g = normals(T, 4, 0.4, -0.5), beta = normals(T, 5, 0.3, 0.6);
  Vector initial_state = normals(K * V, 6), d_o = normals(T * V, 7), d_final_state = normals(K * V, 8);
  double scale = 0.7;

  chunk::Inputs inputs() const { return {T, K, V, scale, q.data(), k.data(), v.data(), g.data(), beta.data()}; }
};

void check_chunks(const Sequence& s, int64_t size) {
  SCOPED_TRACE("chunk of " + std::to_string(size));
  const chunk::Forward f = chunk::forward(s.inputs(), size, s.initial_state);
  const chunk::Backward b = chunk::backward(s.inputs(), size, f, s.d_o, s.d_final_state);
  Tiny tiny(Choice{1, 1, true, false, false, true, true});
  tiny.T = s.T, tiny.HV = 1, tiny.K = s.K, tiny.V = s.V, tiny.scale = s.scale;
  tiny.q = s.q, tiny.k = s.k, tiny.v = s.v, tiny.g = s.g, tiny.beta = s.beta;
  tiny.initial_state = s.initial_state, tiny.d_o = s.d_o, tiny.d_final_state = s.d_final_state;
  tiny.o.resize(s.d_o.size()), tiny.final_state.resize(s.initial_state.size());
  tiny.forward();
  const Gradients d = backward(tiny);
  expect_close(f.o, tiny.o, 1e-12, "o");
  expect_close(f.final_state, tiny.final_state, 1e-12, "final_state");
  expect_close(b.dq, d.q, 1e-12, "d_q");
  expect_close(b.dk, d.k, 1e-12, "d_k");
  expect_close(b.dv, d.v, 1e-12, "d_v");
  expect_close(b.dg, d.g, 1e-12, "d_g");
  expect_close(b.dbeta, d.beta, 1e-12, "d_beta");
  expect_close(b.d_initial_state, d.initial_state, 1e-12, "d_initial_state");
}

TEST(GatedDeltaRuleChunkReference, EqualsTokenReference) {
  for (int64_t size : {1, 2, 5, 16, 37, 64}) check_chunks(Sequence{}, size);
}

TEST(GatedDeltaRuleChunkReference, EqualsTokenReferenceForExtremeGates) {
  Sequence s;
  for (size_t t = 0; t < s.g.size(); ++t) s.g[t] = t % 7 == 3 ? -1000 : t % 11 == 5 ? 0 : s.g[t];
  for (int64_t size : {1, 5, 16, 64}) check_chunks(s, size);
  s.g[9] = s.g[20] = -std::numeric_limits<double>::infinity();
  for (int64_t size : {1, 5, 16, 64}) check_chunks(s, size);
}

// One chunk, its parts free to move on their own: the loss of the stages' outputs as functions of what
// each stage's gradient is taken of.
struct Stages {
  Sequence s;
  chunk::Local local;
  Vector G;  // cumulated gate
  Vector S0 = normals(12, 21), v_new, d_o, dS1 = normals(12, 22);

  Stages() {
    s.T = 9;
    local = chunk::local(s.inputs());
    double sum = 0;
    for (int64_t t = 0; t < s.T; ++t) G.push_back(sum += s.g[size_t(t)]);
    v_new = chunk::v_new(s.inputs(), local, S0);
    d_o.assign(s.d_o.begin(), s.d_o.begin() + s.T * s.V);
  }
  // With E and D from G, and v_new as it stands.
  double loss() {
    for (int64_t i = 0; i < s.T; ++i) {
      local.E[size_t(i)] = std::exp(G[size_t(i)]);
      for (int64_t j = 0; j <= i; ++j) local.D[size_t(i * s.T + j)] = std::exp(G[size_t(i)] - G[size_t(j)]);
    }
    return dot(chunk::output(s.inputs(), local, S0, v_new), d_o) +
           dot(chunk::next_state(s.inputs(), local, S0, v_new), dS1);
  }
};

TEST(GatedDeltaRuleChunkReference, LocalDvIsTheGradientOfTheOutputStage) {
  Stages x;
  Vector want = differences(x.v_new, [&] { return dot(chunk::output(x.s.inputs(), x.local, x.S0, x.v_new), x.d_o); });
  expect_close(chunk::dv_local(x.s.inputs(), x.local, x.d_o), want, 1e-8, "local dv");
}

TEST(GatedDeltaRuleChunkReference, DqkwgAreTheGradientsOfTheStatePassAndTheOutputStage) {
  Stages x;
  const Vector du = chunk::dv_new(x.s.inputs(), x.local, chunk::dv_local(x.s.inputs(), x.local, x.d_o), x.dS1);
  expect_close(du, differences(x.v_new, [&] { return x.loss(); }), 1e-8, "dv");
  const chunk::Dqkwg d = chunk::dqkwg(x.s.inputs(), x.local, x.S0, x.v_new, x.d_o, du, x.dS1);
  Vector dq = differences(x.s.q, [&] { return x.loss(); }), dk = differences(x.s.k, [&] { return x.loss(); });
  dq.resize(d.dq.size()), dk.resize(d.dk.size());  // the sequence is longer than the chunk
  expect_close(d.dq, dq, 1e-8, "dq");
  expect_close(d.dk, dk, 1e-8, "dk");
  expect_close(d.dG, differences(x.G, [&] { return x.loss(); }), 1e-8, "dG");
  const Vector dw = differences(x.local.w, [&] {
    x.v_new = chunk::v_new(x.s.inputs(), x.local, x.S0);
    return x.loss();
  });
  expect_close(d.dw, dw, 1e-8, "dw");
}

}  // namespace
}  // namespace thalweg::gated_delta_rule
