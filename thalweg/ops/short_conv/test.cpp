// The short convolution's own properties: its oracle against finite differences and closed forms, decode
// against forward and roll-back, values at the edge of silu, what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/slopes.h"
#include "thalweg/core/tensor.h"
#include "thalweg/ops/short_conv/reference.h"
#include "thalweg/ops/short_conv/short_conv.h"

namespace thalweg::short_conv {
namespace {

using Vector = std::vector<double>;
using Floats = std::vector<float>;
using tests::expect_slopes;
using tests::float_normals;
using tests::normals;
double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Which optional inputs there are.
struct Choice {
  bool bias, state, packed, d_y, d_final_state, silu;
  std::string text() const {
    return std::string(bias ? "bias " : "") + (state ? "state " : "") + (packed ? "packed " : "") +
           (d_y ? "d_y " : "") + (d_final_state ? "d_final_state " : "") + (silu ? "silu" : "");
  }
};

// A small float64 problem, its outputs and its gradients. Packed: lengths 2, 0, 5 and a row behind them.
struct Tiny {
  int64_t B = 2, T = 4, D = 3, W, N = 2;
  Choice choice;
  Vector x, weight, bias, initial_state, d_y, d_final_state, y, final_state, d_x, d_weight, d_bias, d_initial_state;
  std::vector<int32_t> cu_seqlens{0, 2, 2, 7};

  Tiny(int64_t taps, const Choice& c) : W(taps), choice(c) {
    if (c.packed) B = 1, T = 8, N = 3;
    x = normals(B * T * D, 1), weight = normals(D * W, 2), bias = normals(D, 3), initial_state = normals(N * D * W, 4);
    d_y = normals(B * T * D, 5), d_final_state = normals(N * D * W, 6);
    y.resize(x.size()), final_state.resize(initial_state.size());
    d_x.resize(x.size()), d_weight.resize(weight.size()), d_bias.resize(bias.size());
    d_initial_state.resize(initial_state.size());
  }
  template <class Args>
  void set_inputs(Args* args) {
    args->x = view(x.data(), {B, T, D});
    args->weight = view(weight.data(), {D, W});
    if (choice.bias) args->bias = view(bias.data(), {D});
    if (choice.state) args->initial_state = view(initial_state.data(), {N, D, W});
    if (choice.packed) args->cu_seqlens = view(cu_seqlens.data(), {N + 1});
    args->activation = choice.silu;
  }
  void forward() {
    thalweg_short_conv_fwd_args args{};
    set_inputs(&args);
    args.y = view(y.data(), {B, T, D});
    args.final_state = view(final_state.data(), {N, D, W});
    reference_fwd(&args);
  }
  double loss() {
    forward();
    return (choice.d_y ? dot(y, d_y) : 0) + (choice.d_final_state ? dot(final_state, d_final_state) : 0);
  }
  void backward() {
    thalweg_short_conv_bwd_args args{};
    set_inputs(&args);
    if (choice.d_y) args.d_y = view(d_y.data(), {B, T, D});
    if (choice.d_final_state) args.d_final_state = view(d_final_state.data(), {N, D, W});
    args.d_x = view(d_x.data(), {B, T, D});
    args.d_weight = view(d_weight.data(), {D, W});
    if (choice.bias) args.d_bias = view(d_bias.data(), {D});
    if (choice.state) args.d_initial_state = view(d_initial_state.data(), {N, D, W});
    reference_bwd(&args);
  }
  void check_slopes(Vector& input, const Vector& gradient, const char* name) {
    expect_slopes(input, gradient, [this] { return loss(); }, choice.text() + " " + name);
  }
};

TEST(ShortConvReference, GradientsEqualFiniteDifferencesForEveryChoiceOfInputs) {
  for (int bits = 0; bits < 64; ++bits)
    for (int64_t W : {1, 2, 4, 8}) {
      const Choice choice{bool(bits & 1), bool(bits & 2),  bool(bits & 4),
                          bool(bits & 8), bool(bits & 16), bool(bits & 32)};
      Tiny tiny(W, choice);
      tiny.backward();
      tiny.check_slopes(tiny.x, tiny.d_x, "d_x");
      tiny.check_slopes(tiny.weight, tiny.d_weight, "d_weight");
      if (choice.bias) tiny.check_slopes(tiny.bias, tiny.d_bias, "d_bias");
      if (choice.state) tiny.check_slopes(tiny.initial_state, tiny.d_initial_state, "d_initial_state");
      if (HasFatalFailure()) return;
    }
}

TEST(ShortConvReference, AnImpulseGivesTheTapsNewestFirst) {
  Tiny tiny(4, {false, false, false, true, false, false});
  std::fill(tiny.x.begin(), tiny.x.end(), 0);
  for (int64_t d = 0; d < tiny.D; ++d) tiny.x[size_t(d)] = 1;  // token 0 of batch 0
  tiny.forward();
  for (int64_t t = 0; t < tiny.T; ++t)
    for (int64_t d = 0; d < tiny.D; ++d)
      EXPECT_EQ(tiny.y[size_t(t * tiny.D + d)], tiny.weight[size_t(d * 4 + 3 - t)]) << t << " " << d;
}

TEST(ShortConvReference, AnEmptySequenceKeepsItsState) {
  Tiny tiny(4, {true, true, true, true, true, true});
  tiny.forward();
  tiny.backward();
  for (int64_t i = tiny.D * 4; i < 2 * tiny.D * 4; ++i) {  // sequence 1
    EXPECT_EQ(tiny.final_state[size_t(i)], tiny.initial_state[size_t(i)]);
    EXPECT_EQ(tiny.d_initial_state[size_t(i)], tiny.d_final_state[size_t(i)]);
  }
  for (int64_t d = 0; d < tiny.D; ++d) {
    EXPECT_EQ(tiny.y[size_t(7 * tiny.D + d)], 0);
    EXPECT_EQ(tiny.d_x[size_t(7 * tiny.D + d)], 0);
  }
}

TEST(ShortConvReference, TheOldestSlotsGradientReachesItsToken) {
  // T = W: slot 0 of the final state is token 0, which no later token reads through the state.
  Tiny tiny(4, {false, false, false, false, true, true});
  tiny.backward();
  for (int64_t t = 0; t < tiny.T; ++t)
    for (int64_t d = 0; d < tiny.D; ++d)
      EXPECT_EQ(tiny.d_x[size_t(t * tiny.D + d)], tiny.d_final_state[size_t(d * 4 + t)]);
}

// ---- the library --------------------------------------------------------------------------------------

// One channel a value of x, W = 1 with weight 1: y = silu(x), d_x = silu'(x).
void silu_of(const Floats& values, const char* fwd_kernel, const char* bwd_kernel, Floats* y, Floats* d_x) {
  const int64_t D = int64_t(values.size());
  Floats x = values, weight(values.size(), 1.f), d_y(values.size(), 1.f);
  y->assign(values.size(), NAN), d_x->assign(values.size(), NAN);
  thalweg_context ctx{};
  short_conv_fwd_args fwd{};
  fwd.x = view(x.data(), {1, 1, D}), fwd.weight = view(weight.data(), {D, 1}), fwd.y = view(y->data(), {1, 1, D});
  fwd.activation = THALWEG_ACTIVATION_SILU;
  ctx.kernel = fwd_kernel;
  short_conv_fwd(fwd, ctx);
  short_conv_bwd_args bwd{};
  bwd.x = fwd.x, bwd.weight = fwd.weight, bwd.d_y = view(d_y.data(), {1, 1, D}), bwd.d_x = view(d_x->data(), {1, 1, D});
  bwd.activation = THALWEG_ACTIVATION_SILU;
  ctx.kernel = bwd_kernel;
  short_conv_bwd(bwd, ctx);
}

void expect_silu(const char* fwd_kernel, const char* bwd_kernel) {
  const float inf = std::numeric_limits<float>::infinity(), largest = std::numeric_limits<float>::max();
  Floats values = {0,  -0.f, 1e-30f, -1e-30f, 20,  -20,  80,   -80,   87,      -87,
                   88, -88,  89,     -89,     104, -104, 1000, -1000, largest, -largest};
  for (int i = -400; i <= 400; ++i) values.push_back(float(i) / 20);
  values.push_back(inf);
  values.push_back(-inf);
  values.push_back(NAN);
  Floats y, d_x;
  silu_of(values, fwd_kernel, bwd_kernel, &y, &d_x);
  for (size_t i = 0; i + 3 < values.size(); ++i) {
    const double x = double(values[i]), s = 1 / (1 + std::exp(-x)), slope = s * (1 + x * (1 - s));
    EXPECT_NEAR(double(y[i]), x * s, 1e-6 * std::fabs(x * s) + 1e-35) << x;
    EXPECT_NEAR(double(d_x[i]), x < -700 ? 0 : slope, 1e-6) << x;
  }
  const size_t at = values.size() - 3;
  EXPECT_EQ(y[at], inf);
  EXPECT_NEAR(d_x[at], 1.f, 1e-6f);
  EXPECT_EQ(y[at + 1], 0.f);
  EXPECT_EQ(d_x[at + 1], 0.f);
  EXPECT_TRUE(std::isnan(y[at + 2]));
  EXPECT_TRUE(std::isnan(d_x[at + 2]));
}

TEST(ShortConv, SiluAndItsSlopeHoldFromMinusToPlusInfinity) {
  expect_silu(nullptr, nullptr);
  expect_silu("cpu_generic", "cpu_generic");
  if (tests::machine_has("avx512")) expect_silu("cpu_vec_fwd_avx2", "cpu_vec_bwd_avx2");
}

struct Decode {
  int64_t D = 37, W, T;
  Floats x, weight, bias;
  Decode(int64_t taps, int64_t tokens)
      : W(taps),
        T(tokens),
        x(float_normals(tokens * D, 1)),
        weight(float_normals(D * taps, 2)),
        bias(float_normals(D, 3)) {}
  // Tokens [first, first + n) from slot `read` of the pool; keeps the state after each where `write` says.
  Floats step(Floats& pool, int64_t first, int64_t n, int32_t read, std::vector<int32_t> write) {
    Floats y(size_t(n * D), NAN);
    short_conv_decode_args args{};
    args.x = view(x.data() + first * D, {1, n, D});
    args.weight = view(weight.data(), {D, W});
    args.bias = view(bias.data(), {D});
    args.state = view(pool.data(), {int64_t(pool.size()) / (D * W), D, W});
    args.read_slots = view(&read, {1});
    if (!write.empty()) args.write_slots = view(write.data(), {1, n});
    args.y = view(y.data(), {1, n, D});
    args.activation = THALWEG_ACTIVATION_SILU;
    short_conv_decode(args);
    return y;
  }
};

TEST(ShortConv, RollingBackToAnAcceptedPrefixEqualsNeverHavingDrafted) {
  for (int64_t W : {1, 2, 3, 4, 8})
    for (int64_t accepted = 1; accepted <= 4; ++accepted) {
      Decode decode(W, 9);
      Floats pool = float_normals(5 * decode.D * W, 4), plain(pool.begin(), pool.begin() + decode.D * W);
      decode.step(pool, 0, 4, 0, {1, 2, 3, 4});  // four drafts; slot t + 1 has the state after token t
      // The accepted ones one by one, in place; then one more token from both.
      for (int64_t t = 0; t < accepted; ++t) decode.step(plain, t, 1, 0, {});
      EXPECT_EQ(Floats(pool.begin() + accepted * decode.D * W, pool.begin() + (accepted + 1) * decode.D * W), plain);
      EXPECT_EQ(decode.step(pool, 8, 1, int32_t(accepted), {}), decode.step(plain, 8, 1, 0, {}))
          << W << " " << accepted;
    }
}

TEST(ShortConv, DecodeEqualsForwardBitForBit) {
  for (int64_t W : {1, 3, 4, 8}) {
    Decode decode(W, 21);
    Floats pool = float_normals(decode.D * W, 4), initial = pool, y(size_t(21 * decode.D)), final_state(pool.size());
    short_conv_fwd_args args{};
    args.x = view(decode.x.data(), {1, 21, decode.D});
    args.weight = view(decode.weight.data(), {decode.D, W});
    args.bias = view(decode.bias.data(), {decode.D});
    args.initial_state = view(initial.data(), {1, decode.D, W});
    args.y = view(y.data(), {1, 21, decode.D});
    args.final_state = view(final_state.data(), {1, decode.D, W});
    args.activation = THALWEG_ACTIVATION_SILU;
    short_conv_fwd(args);
    Floats steps;
    for (int64_t t = 0; t < 21; ++t)
      for (float value : decode.step(pool, t, 1, 0, {})) steps.push_back(value);
    EXPECT_EQ(pool, final_state) << W;
    EXPECT_EQ(steps, y) << W;  // the same sums in the same order
  }
}

TEST(ShortConv, APaddingRowGivesZerosAndWritesNothing) {
  Decode decode(4, 2);
  Floats pool = float_normals(3 * decode.D * 4, 4), before = pool;
  EXPECT_EQ(decode.step(pool, 0, 2, -1, {0, 2}), Floats(size_t(2 * decode.D), 0.f));
  EXPECT_EQ(pool, before);
}

TEST(ShortConv, ANanStaysInItsSequenceAndWindow) {
  const int64_t D = 20, T = 40, W = 4;
  Floats x = float_normals(T * D, 1), weight = float_normals(D * W, 2), y(x.size());
  for (int64_t d = 0; d < D; ++d) x[size_t(5 * D + d)] = NAN, x[size_t(18 * D + d)] = NAN;
  std::vector<int32_t> cu = {0, 19, 40};
  short_conv_fwd_args args{};
  args.x = view(x.data(), {1, T, D}), args.weight = view(weight.data(), {D, W}), args.y = view(y.data(), {1, T, D});
  args.cu_seqlens = view(cu.data(), {3});
  args.activation = THALWEG_ACTIVATION_SILU;
  short_conv_fwd(args);
  for (int64_t t = 0; t < T; ++t)
    for (int64_t d = 0; d < D; ++d)
      EXPECT_EQ(std::isnan(y[size_t(t * D + d)]), (t >= 5 && t < 9) || t == 18) << t << " " << d;
}

// Text of the error that the call gives, "" when it succeeds.
template <class Args>
std::string refusal(void (*call)(const Args&, const thalweg_context&), const Args& args) {
  try {
    call(args, {});
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(ShortConv, RefusesByName) {
  Floats x(12), y(12), weight(40), d_bias(4), state(40);
  short_conv_fwd_args fwd{};
  fwd.x = view(x.data(), {1, 3, 4}), fwd.y = view(y.data(), {1, 3, 4}), fwd.weight = view(weight.data(), {4, 9});
  EXPECT_NE(refusal(short_conv_fwd, fwd).find("short_conv.fwd: weight: W, got 9, expected 1 to 8"), std::string::npos);
  fwd.weight = view(weight.data(), {4, 0});
  EXPECT_NE(refusal(short_conv_fwd, fwd).find("weight: W, got 0"), std::string::npos);
  short_conv_bwd_args bwd{};
  bwd.x = fwd.x, bwd.weight = view(weight.data(), {4, 4}), bwd.d_y = fwd.x, bwd.d_bias = view(d_bias.data(), {4});
  EXPECT_NE(refusal(short_conv_bwd, bwd).find("d_bias: needs bias"), std::string::npos);
  bwd.d_bias = {};
  bwd.d_initial_state = view(state.data(), {1, 4, 4});
  EXPECT_NE(refusal(short_conv_bwd, bwd).find("d_initial_state: needs initial_state"), std::string::npos);
}

}  // namespace
}  // namespace thalweg::short_conv
