// The oracles of the gated delta rule: finite differences, closed forms, chunk level against token level.
#include <functional>

#include "tests/delta_rule_reference.h"
#include "thalweg/ops/gated_delta_rule/gated_delta_rule.h"
#include "thalweg/ops/gated_delta_rule/reference.h"

namespace thalweg::tests {
namespace {

struct GatedDeltaRule {
  using Fwd = gated_delta_rule_fwd_args;
  using Bwd = gated_delta_rule_bwd_args;
  static void fwd(const Fwd& a) { gated_delta_rule::reference_fwd(&a); }
  static void bwd(const Bwd& a) { gated_delta_rule::reference_bwd(&a); }
  static constexpr bool per_channel = false;
};
INSTANTIATE_TYPED_TEST_SUITE_P(GatedDeltaRule, DeltaRuleReference, GatedDeltaRule);

// ---- Chunk level against token level ----

namespace chunk = gated_delta_rule::chunk;

struct Sequence {
  int64_t T = 37, K = 4, V = 3;
  Vector q = normals(T * K, 1), k = scaled_normals(T * K, 2, 0.5), v = normals(T * V, 3);
  Vector g = scaled_normals(T, 4, 0.4, -0.5), beta = scaled_normals(T, 5, 0.3, 0.6);
  Vector initial_state = normals(K * V, 6), d_o = normals(T * V, 7), d_final_state = normals(K * V, 8);
  double scale = 0.7;

  chunk::Inputs inputs() const { return {T, K, V, scale, q.data(), k.data(), v.data(), g.data(), beta.data()}; }
};

void check_chunks(const Sequence& s, int64_t size) {
  SCOPED_TRACE("chunk of " + std::to_string(size));
  const chunk::Forward f = chunk::forward(s.inputs(), size, s.initial_state);
  const chunk::Backward b = chunk::backward(s.inputs(), size, f, s.d_o, s.d_final_state);
  Tiny<GatedDeltaRule> tiny({1, 1, true, false, false, true, true}, {.T = s.T, .HV = 1, .K = s.K, .V = s.V});
  tiny.scale = s.scale;
  tiny.q = s.q, tiny.k = s.k, tiny.v = s.v, tiny.g = s.g, tiny.beta = s.beta;
  tiny.initial_state = s.initial_state, tiny.d_o = s.d_o, tiny.d_final_state = s.d_final_state;
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
}  // namespace thalweg::tests
