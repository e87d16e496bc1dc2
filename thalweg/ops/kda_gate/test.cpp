// Properties of the KDA gate alone: its mathematics, saturation, sums, sizes.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support.h"
#include "thalweg/core/tensor.h"
#include "thalweg/ops/kda_gate/kda_gate.h"
#include "thalweg/ops/kda_gate/reference.h"

namespace thalweg::kda_gate {
namespace {

using Vector = std::vector<double>;
using Floats = std::vector<float>;
constexpr float kInf = std::numeric_limits<float>::infinity();

// One head, one row of K; the reference on float64, or a row of the library on float32.
template <class E>
struct Row {
  std::vector<E> x, A_log, dt_bias, d_g, g, d_x, d_A_log, d_dt_bias;
  double lower_bound = 0;
  bool with_A_log = true;

  Row(std::vector<E> raw, E rate, double bound)
      : x(std::move(raw)),
        A_log(1, rate),
        dt_bias(x.size(), E(0)),
        d_g(x.size(), E(1)),
        g(x.size(), E(NAN)),
        d_x(g),
        d_A_log(1, E(NAN)),
        d_dt_bias(g),
        lower_bound(bound) {}
  thalweg_tensor values(std::vector<E>& v) { return view(v.data(), {1, 1, 1, 1, int64_t(v.size())}); }
  kda_gate_fwd_args fwd() {
    kda_gate_fwd_args args{};
    args.x = values(x), args.dt_bias = view(dt_bias.data(), {1, int64_t(x.size())}), args.g = values(g);
    if (with_A_log) args.A_log = view(A_log.data(), {1});
    args.lower_bound = lower_bound;
    return args;
  }
  kda_gate_bwd_args bwd() {
    kda_gate_bwd_args args{};
    args.x = values(x), args.dt_bias = view(dt_bias.data(), {1, int64_t(x.size())}), args.d_g = values(d_g);
    args.d_x = values(d_x), args.d_dt_bias = view(d_dt_bias.data(), {1, int64_t(x.size())});
    if (with_A_log) args.A_log = view(A_log.data(), {1}), args.d_A_log = view(d_A_log.data(), {1});
    args.lower_bound = lower_bound;
    return args;
  }
  void reference() {
    const auto forward = fwd();
    const auto backward = bwd();
    reference_fwd(&forward), reference_bwd(&backward);
  }
  void run(const std::string& fwd_row, const std::string& bwd_row) {
    thalweg_context ctx{};
    ctx.kernel = fwd_row.c_str();
    kda_gate_fwd(fwd(), ctx);
    ctx.kernel = bwd_row.c_str();
    kda_gate_bwd(bwd(), ctx);
  }
};

// Runs body(fwd row, bwd row) for every pair that this machine has.
template <class Body>
void for_each_row(Body body) {
  for (auto [fwd, bwd] : {std::pair{"cpu_vec_fwd_avx512", "cpu_vec_bwd_avx512"}, {"cpu_vec_fwd_avx2", "cpu_vec_bwd_avx2"},
                          {"cpu_generic", "cpu_generic"}}) {
    if (!tests::machine_has(tests::kernel_isa(*tests::find_pass("kda_gate.fwd"), fwd))) continue;
    SCOPED_TRACE(fwd);
    body(fwd, bwd);
  }
}

TEST(KdaGateReference, ClosedForms) {
  Row<double> soft({0, 30, -50, 21, 20}, std::log(2.0), 0);
  soft.reference();
  EXPECT_DOUBLE_EQ(soft.g[0], -2 * std::log(2.0));
  EXPECT_DOUBLE_EQ(soft.g[1], -60);
  EXPECT_NEAR(soft.g[2] / (-2 * std::exp(-50.0)), 1, 1e-14);  // an exponential of a sum of 49
  EXPECT_DOUBLE_EQ(soft.g[3], -42);  // linear above 20
  EXPECT_DOUBLE_EQ(soft.g[4], -2 * (20 + std::log1p(std::exp(-20.0))));
  EXPECT_DOUBLE_EQ(soft.d_x[0], -1);
  EXPECT_DOUBLE_EQ(soft.d_x[1], -2);
  EXPECT_DOUBLE_EQ(soft.d_A_log[0], soft.g[0] + soft.g[1] + soft.g[2] + soft.g[3] + soft.g[4]);
  Row<double> bounded({0, 100, -100}, 0, -5);
  bounded.reference();
  EXPECT_DOUBLE_EQ(bounded.g[0], -2.5);
  EXPECT_DOUBLE_EQ(bounded.g[1], -5);
  EXPECT_NEAR(bounded.g[2] / (-5 * std::exp(-100.0)), 1, 1e-14);
  EXPECT_DOUBLE_EQ(bounded.d_x[0], -1.25);
}

TEST(KdaGateReference, WithoutA_logTheRateIsOne) {
  for (double bound : {0.0, -5.0}) {
    Row<double> with({-3, 0.5, 2}, 0, bound), without = with;
    without.with_A_log = false;
    with.reference(), without.reference();
    EXPECT_EQ(with.g, without.g);
    EXPECT_EQ(with.d_x, without.d_x);
  }
}

TEST(KdaGateReference, ProductsStayFiniteWhereTheyAre) {
  Row<double> row({-1000, -999}, 1000, 0);  // e^1000 e^-1000
  row.reference();
  EXPECT_NEAR(row.g[0], -1, 1e-12);
  EXPECT_NEAR(row.g[1] / std::exp(1.0), -1, 1e-12);
  EXPECT_NEAR(row.d_x[0], -1, 1e-12);
}

TEST(KdaGateFaults, SaturatedGatesGiveTheirLimitsAndNoGradient) {
  const Floats raw = {1000, -1000, 1e30f, -1e30f, kInf, -kInf};
  for_each_row([&](const char* fwd, const char* bwd) {
    for (float A_log : {0.f, 2.5f, 90.f}) {
      Row<float> row(raw, A_log, -5);
      row.run(fwd, bwd);
      for (size_t i = 0; i < raw.size(); ++i) {
        EXPECT_NEAR(row.g[i], raw[i] > 0 ? -5 : 0, 1e-6) << A_log << " " << raw[i];
        EXPECT_EQ(row.d_x[i], 0) << A_log << " " << raw[i];
        EXPECT_EQ(row.d_dt_bias[i], 0) << A_log << " " << raw[i];
      }
      EXPECT_EQ(row.d_A_log[0], 0) << A_log;
    }
    Row<float> soft({-1000, -1e30f, -kInf}, 90, 0);
    soft.run(fwd, bwd);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(soft.g[i], 0);
      EXPECT_EQ(soft.d_x[i], 0);
    }
    EXPECT_EQ(soft.d_A_log[0], 0);
  });
}

TEST(KdaGateFaults, ARateBeyondFloat32TimesATinySoftplusIsFinite) {
  for_each_row([&](const char* fwd, const char* bwd) {
    Row<float> row({-90, -95, -120, -60}, 90, 0);  // e^90 is 1.2e39
    row.d_g[3] = 0;
    row.run(fwd, bwd);
    for (size_t i = 0; i < 3; ++i) {
      const double want = -std::exp(90 + double(row.x[i]));
      EXPECT_NEAR(double(row.g[i]) / want, 1, 1e-6);
      EXPECT_NEAR(double(row.d_x[i]) / want, 1, 1e-6);
    }
    Row<float> small({0, 1}, 90, 0);  // the slope is beyond float32, its product with d_g is not
    small.d_g = {1e-5f, 0};
    small.run(fwd, bwd);
    EXPECT_NEAR(double(small.d_x[0]) / (-1e-5 * std::exp(90.0) / 2), 1, 1e-6);
    EXPECT_EQ(small.d_x[1], 0);
    EXPECT_TRUE(std::isfinite(small.d_A_log[0]));
  });
}

TEST(KdaGateFaults, SoftplusKeepsItsRelativeErrorDownTo1em30) {
  Floats raw;
  for (int i = 0; i <= 4000; ++i) raw.push_back(25 - 94 * float(i) / 4000);
  for_each_row([&](const char* fwd, const char* bwd) {
    Row<float> row(raw, 0, 0);
    row.run(fwd, bwd);
    double worst = 0;
    for (size_t i = 0; i < raw.size(); ++i) {
      const double y = double(raw[i]), want = y > 20 ? y : std::log1p(std::exp(y));
      worst = std::max(worst, std::fabs(-double(row.g[i]) / want - 1));
    }
    EXPECT_LT(worst, 2e-6);
    EXPECT_GT(worst, 0);
  });
}

TEST(KdaGate, NaNStaysInItsElement) {
  const float nans[] = {NAN, -NAN, std::bit_cast<float>(0x7fff7fffu), std::bit_cast<float>(0xffc00001u)};
  for_each_row([&](const char* fwd, const char* bwd) {
    for (float nan : nans)
      for (float A_log : {0.f, 90.f})
        for (double bound : {0.0, -5.0}) {
          Row<float> row(Floats(37, -0.5f), A_log, bound);
          row.x[5] = row.x[36] = nan;
          row.run(fwd, bwd);
          for (size_t i = 0; i < 37; ++i) {
            EXPECT_EQ(std::isnan(row.g[i]), i == 5 || i == 36) << i << " " << bound;
            EXPECT_EQ(std::isnan(row.d_x[i]), i == 5 || i == 36) << i << " " << bound;
          }
          EXPECT_TRUE(std::isnan(row.d_A_log[0]));
        }
  });
}

TEST(KdaGate, SumsOverManyTokensDoNotDrift) {
  // Every element adds the same term, which float32 added up plainly would lose at 2^24.
  const int64_t T = 1 << 20;
  for_each_row([&](const char* fwd, const char* bwd) {
    (void)fwd;
    Floats x(size_t(T) * 2, 0.f), d_g(x.size(), 1.f), A_log(1, 0.f), dt_bias(2, 0.f), d_A_log(1, NAN), d_dt_bias(2, NAN);
    kda_gate_bwd_args args{};
    args.x = view(x.data(), {1, T, 1, 1, 2}), args.d_g = view(d_g.data(), {1, T, 1, 1, 2});
    args.A_log = view(A_log.data(), {1}), args.dt_bias = view(dt_bias.data(), {1, 2});
    args.d_A_log = view(d_A_log.data(), {1}), args.d_dt_bias = view(d_dt_bias.data(), {1, 2});
    thalweg_context ctx{};
    ctx.kernel = bwd;
    kda_gate_bwd(args, ctx);
    EXPECT_NEAR(double(d_A_log[0]) / (-2 * double(T) * std::log(2.0)), 1, 5e-7);
    for (float d : d_dt_bias) EXPECT_NEAR(double(d) / (-0.5 * double(T)), 1, 5e-7);
  });
}

TEST(KdaGate, LeadingAxesAreAlike) {
  Floats x(size_t(2 * 3 * 4 * 2 * 20)), A_log = {0.5f, 1.5f}, want(x.size()), got(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(i % 97) / 20 - 2;
  for_each_row([&](const char* fwd, const char*) {
    thalweg_context ctx{};
    ctx.kernel = fwd;
    auto run = [&](std::initializer_list<int64_t> shape, Floats& g) {
      kda_gate_fwd_args args{};
      args.x = view(x.data(), shape), args.A_log = view(A_log.data(), {2}), args.g = view(g.data(), shape);
      kda_gate_fwd(args, ctx);
    };
    run({1, 24, 1, 2, 20}, want);
    run({2, 3, 4, 2, 20}, got);
    EXPECT_EQ(got, want);
    run({24, 1, 1, 2, 20}, got);
    EXPECT_EQ(got, want);
    run({1, 1, 24, 2, 20}, got);
    EXPECT_EQ(got, want);
  });
}

TEST(KdaGate, RefusesByName) {
  Row<float> row({1, 2}, 0, 0);
  auto text = [](auto call) -> std::string {
    try {
      call();
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  kda_gate_fwd_args fwd = row.fwd();
  fwd.lower_bound = 5;
  EXPECT_NE(text([&] { kda_gate_fwd(fwd); }).find("kda_gate.fwd: lower_bound: got 5, expected 0 or less"), std::string::npos);
  fwd.lower_bound = -1e-40;
  EXPECT_NE(text([&] { kda_gate_fwd(fwd); }).find("lower_bound: got -1e-40, expected 0, or -1e30 to -1e-30"), std::string::npos);
  kda_gate_bwd_args bwd = row.bwd();
  bwd.A_log = {};
  EXPECT_NE(text([&] { kda_gate_bwd(bwd); }).find("d_A_log: needs A_log"), std::string::npos);
  bwd = row.bwd();
  bwd.dt_bias = {};
  EXPECT_NE(text([&] { kda_gate_bwd(bwd); }).find("d_dt_bias: needs dt_bias"), std::string::npos);
  fwd = row.fwd();
  fwd.x.rank = 4;  // [T H K] must be viewed with its other axes, not guessed
  EXPECT_NE(text([&] { kda_gate_fwd(fwd); }).find("x: shape, got [1, 1, 1, 1], expected [B T L HV K]"), std::string::npos);
}

}  // namespace
}  // namespace thalweg::kda_gate
