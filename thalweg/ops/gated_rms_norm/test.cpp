// The gated RMS norm's own properties: its oracle against finite differences and closed forms, values at
// the edge of the gate, many rows, what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/slopes.h"
#include "thalweg/core/tensor.h"
#include "thalweg/ops/gated_rms_norm/gated_rms_norm.h"
#include "thalweg/ops/gated_rms_norm/reference.h"

namespace thalweg::gated_rms_norm {
namespace {

using Vector = std::vector<double>;
using Floats = std::vector<float>;
using tests::expect_slopes;
using tests::float_normals;
using tests::normals;

struct Choice {
  bool gate, weight, sigmoid;
  double eps;
  std::string text() const {
    return std::string(gate ? "gate " : "") + (weight ? "weight " : "") + (sigmoid ? "sigmoid " : "silu ") +
           std::to_string(eps);
  }
};

struct Tiny {
  int64_t M = 3, D = 5;
  Choice choice;
  Vector x = normals(M * D, 1), gate = normals(M * D, 2), weight = normals(D, 3), d_y = normals(M * D, 4);
  Vector y = Vector(x.size()), rstd = Vector(size_t(M)), d_x = y, d_gate = y, d_weight = Vector(size_t(D));

  explicit Tiny(const Choice& c) : choice(c) {}
  template <class Args>
  void set_inputs(Args* args) {
    args->x = view(x.data(), {M, D});
    if (choice.gate) args->gate = view(gate.data(), {M, D});
    if (choice.weight) args->weight = view(weight.data(), {D});
    args->eps = choice.eps;
    args->gate_activation = choice.sigmoid;
  }
  void forward() {
    thalweg_gated_rms_norm_fwd_args args{};
    set_inputs(&args);
    args.y = view(y.data(), {M, D});
    args.rstd = view(rstd.data(), {M});
    reference_fwd(&args);
  }
  double loss() {
    forward();
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += y[i] * d_y[i];
    return sum;
  }
  void backward() {
    thalweg_gated_rms_norm_bwd_args args{};
    set_inputs(&args);
    args.d_y = view(d_y.data(), {M, D});
    args.d_x = view(d_x.data(), {M, D});
    if (choice.gate) args.d_gate = view(d_gate.data(), {M, D});
    if (choice.weight) args.d_weight = view(d_weight.data(), {D});
    reference_bwd(&args);
  }
  void check_slopes(Vector& input, const Vector& gradient, const char* name) {
    expect_slopes(input, gradient, [this] { return loss(); }, choice.text() + " " + name);
  }
};

TEST(GatedRmsNormReference, GradientsEqualFiniteDifferencesForEveryChoiceOfInputs) {
  for (int bits = 0; bits < 8; ++bits)
    for (double eps : {0.0, 1e-5, 0.5}) {
      Tiny tiny({bool(bits & 1), bool(bits & 2), bool(bits & 4), eps});
      tiny.backward();
      tiny.check_slopes(tiny.x, tiny.d_x, "d_x");
      if (tiny.choice.gate) tiny.check_slopes(tiny.gate, tiny.d_gate, "d_gate");
      if (tiny.choice.weight) tiny.check_slopes(tiny.weight, tiny.d_weight, "d_weight");
      if (HasFatalFailure()) return;
    }
}

TEST(GatedRmsNormReference, ClosedForms) {
  Tiny tiny({true, true, false, 0.25});
  tiny.x = Vector(size_t(tiny.M * tiny.D), 3.0);     // mean of squares 9: r = 1 / sqrt(9.25)
  tiny.gate = Vector(size_t(tiny.M * tiny.D), 0.0);  // silu(0) = 0, silu'(0) = 1/2
  tiny.forward();
  tiny.backward();
  for (double r : tiny.rstd) EXPECT_DOUBLE_EQ(r, 1 / std::sqrt(9.25));
  for (size_t i = 0; i < tiny.y.size(); ++i) {
    EXPECT_EQ(tiny.y[i], 0);
    EXPECT_EQ(tiny.d_x[i], 0);
    EXPECT_NEAR(tiny.d_gate[i], tiny.d_y[i] * 3 / std::sqrt(9.25) * tiny.weight[i % size_t(tiny.D)] / 2, 1e-15);
  }
  tiny.choice.sigmoid = true;  // sigmoid(0) = 1/2
  tiny.forward();
  for (size_t i = 0; i < tiny.y.size(); ++i)
    EXPECT_NEAR(tiny.y[i], 3 / std::sqrt(9.25) * tiny.weight[i % size_t(tiny.D)] / 2, 1e-15);
}

TEST(GatedRmsNormReference, WithoutEpsTheScaleOfARowIsLost) {
  Tiny tiny({true, true, false, 1e-300});
  tiny.forward();
  const Vector y = tiny.y;
  for (double& x : tiny.x) x *= 7;
  tiny.forward();
  for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(tiny.y[i], y[i], 1e-14);
  // So a row's gradient is orthogonal to the row.
  tiny.backward();
  for (int64_t m = 0; m < tiny.M; ++m) {
    double along = 0;
    for (int64_t d = 0; d < tiny.D; ++d) along += tiny.d_x[size_t(m * tiny.D + d)] * tiny.x[size_t(m * tiny.D + d)];
    EXPECT_NEAR(along, 0, 1e-14);
  }
}

// ---- the library --------------------------------------------------------------------------------------

struct Call {
  int64_t M, D;
  Floats x, gate, weight, d_y, y, d_x, d_gate, d_weight, rstd;
  int32_t activation = THALWEG_GATE_SILU;
  double eps = 0;

  Call(int64_t rows, int64_t columns)
      : M(rows),
        D(columns),
        x(float_normals(rows * columns, 1)),
        gate(float_normals(rows * columns, 2)),
        weight(size_t(columns), 1.f),
        d_y(float_normals(rows * columns, 4)),
        y(x.size(), NAN),
        d_x(y),
        d_gate(y),
        d_weight(size_t(columns), NAN),
        rstd(size_t(rows), NAN) {}
  void run(const char* fwd_kernel = nullptr, const char* bwd_kernel = nullptr) {
    thalweg_context ctx{};
    gated_rms_norm_fwd_args fwd{};
    fwd.x = view(x.data(), {M, D}), fwd.gate = view(gate.data(), {M, D}), fwd.weight = view(weight.data(), {D});
    fwd.y = view(y.data(), {M, D}), fwd.rstd = view(rstd.data(), {M}), fwd.eps = eps, fwd.gate_activation = activation;
    ctx.kernel = fwd_kernel;
    gated_rms_norm_fwd(fwd, ctx);
    gated_rms_norm_bwd_args bwd{};
    bwd.x = fwd.x, bwd.gate = fwd.gate, bwd.weight = fwd.weight, bwd.d_y = view(d_y.data(), {M, D});
    bwd.d_x = view(d_x.data(), {M, D}), bwd.d_gate = view(d_gate.data(), {M, D}),
    bwd.d_weight = view(d_weight.data(), {D});
    bwd.eps = eps, bwd.gate_activation = activation;
    ctx.kernel = bwd_kernel;
    gated_rms_norm_bwd(bwd, ctx);
  }
};

struct Rows {
  const char *fwd, *bwd;
};
std::vector<Rows> rows() {
  std::vector<Rows> all = {{nullptr, nullptr}, {"cpu_generic", "cpu_generic"}};
  if (tests::machine_has("avx512")) all.push_back({"cpu_vec_fwd_avx2", "cpu_vec_bwd_avx2"});
  return all;
}

TEST(GatedRmsNorm, SaturatedGatesGiveTheirLimits) {
  const float inf = std::numeric_limits<float>::infinity(), largest = std::numeric_limits<float>::max();
  const Floats gates = {1000, -1000, 88, -88, 104, -104, 1e30f, -1e30f, largest, -largest, inf, -inf};
  for (const Rows& row : rows())
    for (int32_t activation : {THALWEG_GATE_SILU, THALWEG_GATE_SIGMOID}) {
      Call call(1, int64_t(gates.size()));
      call.gate = gates;
      call.activation = activation;
      for (float& x : call.x) x = 0.5f;
      for (float& d : call.d_y) d = 1e-30f;
      call.run(row.fwd, row.bwd);
      const bool silu = activation == THALWEG_GATE_SILU;
      for (size_t i = 0; i < gates.size(); ++i) {
        const float a = gates[i] > 0 ? (silu ? gates[i] : 1.f) : 0.f;
        const float xh = 0.5f * call.rstd[0];
        if (std::isinf(a)) {
          EXPECT_EQ(call.y[i], inf);
        } else {
          EXPECT_NEAR(call.y[i], a * xh, 1e-6f * a + 1e-30f) << gates[i];
        }
        EXPECT_NEAR(call.d_gate[i] / 1e-30f, gates[i] > 0 && silu ? xh : 0.f, 1e-6f) << gates[i];
      }
    }
}

TEST(GatedRmsNorm, ARowOfZerosIsFinite) {
  for (const Rows& row : rows())
    for (double eps : {0.0, 1e-5, 1e-60}) {
      Call call(3, 20);
      call.eps = eps;
      std::fill(call.x.begin() + 20, call.x.begin() + 40, 0.f);
      call.run(row.fwd, row.bwd);
      for (int64_t i = 20; i < 40; ++i) {
        EXPECT_EQ(call.y[size_t(i)], 0.f);
        EXPECT_EQ(call.d_gate[size_t(i)], 0.f);
        EXPECT_TRUE(std::isfinite(call.d_x[size_t(i)]));
      }
      for (float d : call.d_weight) EXPECT_TRUE(std::isfinite(d));
      if (eps == 0) {
        EXPECT_FLOAT_EQ(call.rstd[1], 1000.f);
      }
    }
}

TEST(GatedRmsNorm, ANanStaysInItsRow) {
  for (const Rows& row : rows()) {
    Call call(5, 33);
    call.x[size_t(2 * 33 + 7)] = NAN;
    call.run(row.fwd, row.bwd);
    for (int64_t i = 0; i < 5 * 33; ++i) {
      EXPECT_EQ(std::isnan(call.y[size_t(i)]), i / 33 == 2);
      EXPECT_EQ(std::isnan(call.d_x[size_t(i)]), i / 33 == 2);
    }
  }
}

TEST(GatedRmsNorm, TheSumOverManyRowsDoesNotDrift) {
  // x = 1 everywhere: every row adds the same term, 1 / sqrt(1 + eps) / 2, which float32 added up plainly
  // would lose at 2^24 rows.
  const int64_t M = 1 << 20;
  for (const Rows& row : rows()) {
    Call call(M, 2);
    call.activation = THALWEG_GATE_SIGMOID;
    std::fill(call.x.begin(), call.x.end(), 1.f);
    std::fill(call.gate.begin(), call.gate.end(), 0.f);
    std::fill(call.d_y.begin(), call.d_y.end(), 1.f);
    call.run(row.fwd, row.bwd);
    const double want = double(M) / 2 / std::sqrt(1 + 1e-6);
    for (float d : call.d_weight) EXPECT_NEAR(double(d) / want, 1, 5e-7);
  }
}

TEST(GatedRmsNorm, RefusesByName) {
  Floats x(12), y(12), d_weight(4);
  gated_rms_norm_fwd_args fwd{};
  fwd.x = view(x.data(), {3, 4}), fwd.y = view(y.data(), {3, 4});
  auto text = [](auto call) -> std::string {
    try {
      call();
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  fwd.eps = -1;
  EXPECT_NE(text([&] { gated_rms_norm_fwd(fwd); }).find("gated_rms_norm.fwd: eps: got -1, expected 0 or more"),
            std::string::npos);
  fwd.eps = 0;
  Vector rstd(3);
  fwd.rstd = view(rstd.data(), {3});
  EXPECT_NE(text([&] { gated_rms_norm_fwd(fwd); }).find("rstd: dtype, got f64, expected f32 (from x)"),
            std::string::npos);
  gated_rms_norm_bwd_args bwd{};
  bwd.x = fwd.x, bwd.d_y = fwd.x, bwd.d_weight = view(d_weight.data(), {4});
  EXPECT_NE(text([&] { gated_rms_norm_bwd(bwd); }).find("d_weight: needs weight"), std::string::npos);
}

}  // namespace
}  // namespace thalweg::gated_rms_norm
