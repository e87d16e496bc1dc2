// Row-by-row float64 oracle of the gated RMS norm, written from the mathematics, with s = sigmoid(gate):
//
//   r = 1 / sqrt(mean_d(x^2) + eps)    xh = x r    y = xh weight a    a = gate s (silu), s, or 1
//
//   d_gate = d_y xh weight a'          a' = s (1 + gate (1 - s)), or s (1 - s)
//   d_weight = sum over rows of d_y a xh
//   z = d_y a weight                   d_x = r (z - xh mean_d(xh z))
#include "thalweg/ops/gated_rms_norm/reference.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "thalweg/core/signature.h"
#include "thalweg/ops/gated_rms_norm/gated_rms_norm.h"

namespace thalweg::gated_rms_norm {
namespace {

double& at(const thalweg_tensor& t, int64_t i, int64_t j = 0) {
  return static_cast<double*>(t.data)[i * t.stride[0] + (t.rank > 1 ? j * t.stride[1] : 0)];
}

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }

struct Gated {
  double value, slope;  // a and a'; at infinity their limits
};
Gated gated(const thalweg_tensor& gate, int32_t activation, int64_t m, int64_t d) {
  if (!present(gate)) return {1, 0};
  const double g = at(gate, m, d), s = sigmoid(g);
  if (activation == THALWEG_GATE_SIGMOID) return {s, s * (1 - s)};
  if (std::isinf(g)) return {g > 0 ? g : 0, g > 0 ? 1.0 : 0.0};
  return {g * s, s * (1 + g * (1 - s))};
}

double weight_at(const thalweg_tensor& weight, int64_t d) { return present(weight) ? at(weight, d) : 1; }

double reciprocal_rms(const thalweg_tensor& x, double eps, int64_t m) {
  double sum = 0;
  for (int64_t d = 0; d < x.shape[1]; ++d) sum += at(x, m, d) * at(x, m, d);
  return 1 / std::sqrt(sum / double(std::max<int64_t>(1, x.shape[1])) + (eps == 0 ? 1e-6 : eps));
}

}  // namespace

void reference_fwd(const void* pass_args) {
  const auto& args = *static_cast<const thalweg_gated_rms_norm_fwd_args*>(pass_args);
  for (int64_t m = 0; m < args.x.shape[0]; ++m) {
    const double r = reciprocal_rms(args.x, args.eps, m);
    for (int64_t d = 0; d < args.x.shape[1]; ++d)
      at(args.y, m, d) =
          at(args.x, m, d) * r * weight_at(args.weight, d) * gated(args.gate, args.gate_activation, m, d).value;
    if (present(args.rstd)) at(args.rstd, m) = r;
  }
}

void reference_bwd(const void* pass_args) {
  const auto& args = *static_cast<const thalweg_gated_rms_norm_bwd_args*>(pass_args);
  const int64_t M = args.x.shape[0], D = args.x.shape[1];
  for (int64_t d = 0; d < D && present(args.d_weight); ++d) at(args.d_weight, d) = 0;
  std::vector<double> xh(static_cast<size_t>(D)), z(static_cast<size_t>(D));
  for (int64_t m = 0; m < M; ++m) {
    const double r = reciprocal_rms(args.x, args.eps, m);
    double mean = 0;
    for (int64_t d = 0; d < D; ++d) {
      const Gated a = gated(args.gate, args.gate_activation, m, d);
      const double d_y = at(args.d_y, m, d), w = weight_at(args.weight, d);
      xh[size_t(d)] = at(args.x, m, d) * r;
      z[size_t(d)] = d_y * a.value * w;
      mean += xh[size_t(d)] * z[size_t(d)] / double(D);
      if (present(args.d_gate)) at(args.d_gate, m, d) = d_y * xh[size_t(d)] * w * a.slope;
      if (present(args.d_weight)) at(args.d_weight, d) += d_y * a.value * xh[size_t(d)];
    }
    for (int64_t d = 0; d < D && present(args.d_x); ++d) at(args.d_x, m, d) = r * (z[size_t(d)] - xh[size_t(d)] * mean);
  }
}

}  // namespace thalweg::gated_rms_norm
