// Tests of a delta-rule operator's float64 oracle, for the operators' own test.cpp: finite differences and closed
// forms. An operator is named by a struct Op:
//
//   using Fwd, Bwd                       its args structs
//   static void fwd(const Fwd&), bwd     its oracle
//   static constexpr bool per_channel    a decay per key channel, and then a lower bound of the gate
#ifndef THALWEG_TESTS_DELTA_RULE_REFERENCE_H
#define THALWEG_TESTS_DELTA_RULE_REFERENCE_H

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/slopes.h"
#include "thalweg/core/tensor.h"

namespace thalweg::tests {

using Vector = std::vector<double>;

inline Vector scaled_normals(int64_t n, uint64_t seed, double factor, double shift = 0) {
  Vector x = normals(n, seed);
  for (double& value : x) value = shift + factor * value;
  return x;
}

inline double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

inline void expect_close(const Vector& got, const Vector& want, double tolerance, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < want.size(); ++i)
    ASSERT_NEAR(got[i], want[i], tolerance * (1 + std::fabs(want[i]))) << what << " element " << i;
}

// Which optional inputs a case has.
struct Choice {
  int gate;  // 0 no g, 1 g, 2 with A_log, 3 with dt_bias too; bounded: 4 with both, 5 with dt_bias, 6 with neither
  int beta;  // 0 none, 1 plain, 2 sigmoid, 3 twice a sigmoid
  bool state, l2norm, packed, d_o, d_final_state;

  bool has_A_log() const { return gate >= 2 && gate <= 4; }
  bool has_dt_bias() const { return gate >= 3 && gate <= 5; }
  std::string text() const {
    return "gate " + std::to_string(gate) + " beta " + std::to_string(beta) + (state ? " state" : "") +
           (l2norm ? " l2norm" : "") + (packed ? " packed" : "") + (d_o ? " d_o" : "") +
           (d_final_state ? " d_final_state" : "");
  }
};
template <class Op>
constexpr int kNumGates = Op::per_channel ? 7 : 4;

struct TinySizes {
  int64_t B = 1, T = 5, H = 1, HV = 2, K = 3, V = 2;
};

// A small float64 problem.
template <class Op>
struct Tiny : TinySizes {
  Choice choice;
  int64_t N, channels;
  Vector q, k, v, g, beta, A_log, dt_bias, initial_state, d_o, d_final_state, o, final_state;
  std::vector<int32_t> cu_seqlens;
  double scale = 0;

  explicit Tiny(const Choice& c, const TinySizes& sizes = {}, uint64_t seed = 7) : TinySizes(sizes), choice(c), N(B) {
    channels = Op::per_channel ? K : 1;
    if (c.packed) cu_seqlens = {0, 2, 2, 5}, N = 3;
    q = normals(B * T * H * K, seed), k = scaled_normals(B * T * H * K, seed + 1, 0.7);
    v = normals(B * T * HV * V, seed + 2);
    g = scaled_normals(B * T * HV * channels, seed + 3, 0.5, c.gate == 1 ? -0.7 : 0);
    beta = scaled_normals(B * T * HV, seed + 4, 0.3, 0.5);
    A_log = scaled_normals(HV, seed + 5, 0.5), dt_bias = normals(HV * channels, seed + 6);
    initial_state = normals(N * HV * K * V, seed + 7);
    d_o = normals(B * T * HV * V, seed + 8), d_final_state = normals(N * HV * K * V, seed + 9);
    o.resize(v.size()), final_state.resize(initial_state.size());
  }

  thalweg_tensor gate_view(double* data) const {
    return Op::per_channel ? view(data, {B, T, HV, K}) : view(data, {B, T, HV});
  }
  thalweg_tensor bias_view(double* data) const { return Op::per_channel ? view(data, {HV, K}) : view(data, {HV}); }

  template <class Args>
  void set_inputs(Args& a) {
    a.q = view(q.data(), {B, T, H, K});
    a.k = view(k.data(), {B, T, H, K});
    a.v = view(v.data(), {B, T, HV, V});
    if (choice.gate >= 1) a.g = gate_view(g.data());
    a.use_gate = choice.gate >= 2;
    if (choice.has_A_log()) a.A_log = view(A_log.data(), {HV});
    if (choice.has_dt_bias()) a.dt_bias = bias_view(dt_bias.data());
    if constexpr (Op::per_channel) a.lower_bound = choice.gate >= 4 ? -2 : 0;
    if (choice.beta >= 1) a.beta = view(beta.data(), {B, T, HV});
    a.use_beta_sigmoid = choice.beta >= 2;
    a.allow_neg_eigval = choice.beta >= 3;
    a.use_qk_l2norm = choice.l2norm;
    if (choice.state) a.initial_state = view(initial_state.data(), {N, HV, K, V});
    if (choice.packed) a.cu_seqlens = view(cu_seqlens.data(), {N + 1});
    a.scale = scale;
  }

  void forward() {
    typename Op::Fwd a{};
    set_inputs(a);
    a.o = view(o.data(), {B, T, HV, V});
    a.final_state = view(final_state.data(), {N, HV, K, V});
    Op::fwd(a);
  }

  double loss() {
    forward();
    return (choice.d_o ? dot(o, d_o) : 0) + (choice.d_final_state ? dot(final_state, d_final_state) : 0);
  }
};

struct Gradients {
  Vector q, k, v, g, beta, A_log, dt_bias, initial_state;
};

template <class Op>
Gradients backward(Tiny<Op>& tiny) {
  Gradients d{tiny.q, tiny.k, tiny.v, tiny.g, tiny.beta, tiny.A_log, tiny.dt_bias, tiny.initial_state};
  typename Op::Bwd a{};
  tiny.set_inputs(a);
  const int64_t B = tiny.B, T = tiny.T, H = tiny.H, HV = tiny.HV, K = tiny.K, V = tiny.V, N = tiny.N;
  if (tiny.choice.d_o) a.d_o = view(tiny.d_o.data(), {B, T, HV, V});
  if (tiny.choice.d_final_state) a.d_final_state = view(tiny.d_final_state.data(), {N, HV, K, V});
  a.d_q = view(d.q.data(), {B, T, H, K});
  a.d_k = view(d.k.data(), {B, T, H, K});
  a.d_v = view(d.v.data(), {B, T, HV, V});
  if (tiny.choice.gate >= 1) a.d_g = tiny.gate_view(d.g.data());
  if (tiny.choice.beta >= 1) a.d_beta = view(d.beta.data(), {B, T, HV});
  if (tiny.choice.has_A_log()) a.d_A_log = view(d.A_log.data(), {HV});
  if (tiny.choice.has_dt_bias()) a.d_dt_bias = tiny.bias_view(d.dt_bias.data());
  a.d_initial_state = view(d.initial_state.data(), {N, HV, K, V});
  Op::bwd(a);
  return d;
}

template <class Op>
void check_gradients(const Choice& choice, const TinySizes& sizes, double tolerance) {
  SCOPED_TRACE(choice.text());
  Tiny<Op> tiny(choice, sizes);
  const Gradients d = backward(tiny);
  auto check = [&](Vector& input, const Vector& gradient, const char* what) {
    expect_slopes(input, gradient, [&] { return tiny.loss(); }, what, tolerance);
  };
  check(tiny.q, d.q, "d_q");
  check(tiny.k, d.k, "d_k");
  check(tiny.v, d.v, "d_v");
  if (choice.gate >= 1) check(tiny.g, d.g, "d_g");
  if (choice.beta >= 1) check(tiny.beta, d.beta, "d_beta");
  if (choice.has_A_log()) check(tiny.A_log, d.A_log, "d_A_log");
  if (choice.has_dt_bias()) check(tiny.dt_bias, d.dt_bias, "d_dt_bias");
  if (choice.state) check(tiny.initial_state, d.initial_state, "d_initial_state");
}

template <class Op>
class DeltaRuleReference : public ::testing::Test {};
TYPED_TEST_SUITE_P(DeltaRuleReference);

TYPED_TEST_P(DeltaRuleReference, GradientsEqualFiniteDifferencesForEveryChoiceOfInputs) {
  for (int gate = 0; gate < kNumGates<TypeParam>; ++gate)
    for (int beta = 0; beta < 4; ++beta)
      for (int bits = 0; bits < 32; ++bits) {
        Choice choice{gate, beta, bool(bits & 1), bool(bits & 2), bool(bits & 4), bool(bits & 8), bool(bits & 16)};
        check_gradients<TypeParam>(choice, {}, 1e-7);
        if (::testing::Test::HasFatalFailure()) return;
      }
}

// More than one checkpoint, not a multiple of the piece; key heads with two value heads each.
TYPED_TEST_P(DeltaRuleReference, GradientsEqualFiniteDifferencesOfLongerSequences) {
  for (int gate = 3; gate < kNumGates<TypeParam>; ++gate)
    check_gradients<TypeParam>({gate, 3, true, true, false, true, true}, {.T = 23, .H = 2, .HV = 4}, 1e-6);
}

// The gradient of the initial state exists without an initial state: it is the one at 0.
TYPED_TEST_P(DeltaRuleReference, InitialStateGradientWithoutOne) {
  Tiny<TypeParam> tiny({1, 1, true, false, false, true, true});
  for (double& x : tiny.initial_state) x = 0;
  Vector want = backward(tiny).initial_state;
  tiny.choice.state = false;
  EXPECT_EQ(backward(tiny).initial_state, want);
}

// ---- Closed forms ----

TYPED_TEST_P(DeltaRuleReference, OneTokenWithoutStateReadsItsOwnValue) {
  Tiny<TypeParam> tiny({1, 1, false, false, false, true, false}, {.T = 1});
  tiny.scale = 0.5;
  tiny.forward();
  double kq = 0;
  for (size_t i = 0; i < 3; ++i) kq += tiny.k[i] * tiny.q[i];
  for (size_t hv = 0; hv < 2; ++hv)
    for (size_t j = 0; j < 2; ++j)
      EXPECT_NEAR(tiny.o[hv * 2 + j], 0.5 * kq * tiny.beta[hv] * tiny.v[hv * 2 + j], 1e-15);
}

TYPED_TEST_P(DeltaRuleReference, ZeroBetaOnlyDecays) {
  Tiny<TypeParam> tiny({1, 1, true, false, false, true, false});
  for (double& x : tiny.beta) x = 0;
  tiny.forward();
  for (size_t i = 0; i < tiny.final_state.size(); ++i) {  // [HV K V]
    const size_t channel = tiny.channels == 1 ? i / 6 : i / 2;  // of the [HV channels] of a token
    double sum = 0;
    for (size_t t = 0; t < 5; ++t) sum += tiny.g[t * 2 * size_t(tiny.channels) + channel];
    EXPECT_NEAR(tiny.final_state[i], std::exp(sum) * tiny.initial_state[i], 1e-14);
  }
}

TYPED_TEST_P(DeltaRuleReference, ZeroGateIsThePlainDeltaRule) {
  Tiny<TypeParam> gated({1, 1, true, false, false, true, false}), plain({0, 1, true, false, false, true, false});
  for (double& x : gated.g) x = 0;
  gated.forward();
  plain.forward();
  EXPECT_EQ(gated.o, plain.o);
  EXPECT_EQ(gated.final_state, plain.final_state);
}

// Orthonormal keys written with strength 1 are a table: any of them reads back its value.
TYPED_TEST_P(DeltaRuleReference, OrthonormalKeysReadBackTheirValues) {
  Tiny<TypeParam> tiny({0, 0, false, false, false, true, false}, {.T = 3});
  tiny.scale = 1;
  for (size_t t = 0; t < 3; ++t)
    for (size_t i = 0; i < 3; ++i) tiny.k[t * 3 + i] = i == t, tiny.q[t * 3 + i] = i == 0;
  tiny.forward();
  for (size_t t = 0; t < 3; ++t)
    for (size_t j = 0; j < 4; ++j) EXPECT_DOUBLE_EQ(tiny.o[t * 4 + j], tiny.v[j]);
}

TYPED_TEST_P(DeltaRuleReference, InfiniteGateForgetsEverythingAndHasNoGradient) {
  Tiny<TypeParam> tiny({1, 1, true, false, false, true, true});
  const size_t row = size_t(2 * tiny.channels);  // g of one token
  for (size_t i = 2 * row; i < 3 * row; ++i) tiny.g[i] = -std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < 2 * 4; ++i) tiny.d_o[i] = 0;  // only what is after the gate counts
  const Gradients d = backward(tiny);
  for (const Vector* x : {&d.q, &d.k, &d.v, &d.g, &d.beta, &d.initial_state})
    for (double value : *x) EXPECT_TRUE(std::isfinite(value));
  for (size_t i = 2 * row; i < 3 * row; ++i) EXPECT_EQ(d.g[i], 0);
  for (double value : d.initial_state) EXPECT_EQ(value, 0);
  tiny.forward();
  Vector o = tiny.o;
  for (double& x : tiny.initial_state) x += 1;
  tiny.forward();
  for (size_t i = 2 * 4; i < o.size(); ++i) EXPECT_EQ(o[i], tiny.o[i]);
}

REGISTER_TYPED_TEST_SUITE_P(DeltaRuleReference, GradientsEqualFiniteDifferencesForEveryChoiceOfInputs,
                            GradientsEqualFiniteDifferencesOfLongerSequences, InitialStateGradientWithoutOne,
                            OneTokenWithoutStateReadsItsOwnValue, ZeroBetaOnlyDecays, ZeroGateIsThePlainDeltaRule,
                            OrthonormalKeysReadBackTheirValues, InfiniteGateForgetsEverythingAndHasNoGradient);

}  // namespace thalweg::tests
#endif
