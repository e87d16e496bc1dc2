// Element-by-element float64 oracle of the KDA gate, written from the mathematics, with y = x + dt_bias:
//
//   softplus form      g = -exp(A_log + log softplus(y))       dg/dy = -exp(A_log + log sigmoid(y))   dg/dA_log = g
//   lower-bound form   g = lower_bound sigmoid(z), z = e^A_log y
//                      dg/dz = lower_bound s (1 - s)           dg/dy = dg/dz e^A_log        dg/dA_log = dg/dz z
//
// Products with e^A_log are exponentials of sums, so that they are finite wherever they are as a whole.
#include "thalweg/ops/kda_gate/reference.h"

#include <cmath>
#include <cstdint>

#include "testing/reference.h"
#include "thalweg/ops/kda_gate/kda_gate.h"

namespace thalweg::kda_gate {
namespace {

namespace oracle = testing::reference;

double log_softplus(double y) { return y < -40 ? y : std::log(oracle::softplus(y)); }
double log_sigmoid(double y) { return y < 0 ? y - std::log1p(std::exp(y)) : -std::log1p(std::exp(-y)); }

double g_of(double lower_bound, double A_log, double y) {
  if (lower_bound == 0) return -std::exp(A_log + log_softplus(y));
  return lower_bound * std::exp(log_sigmoid(y == 0 ? 0 : std::exp(A_log) * y));
}

struct Slopes {
  double y, A_log;  // dg/dy, dg/dA_log
};
Slopes slopes_of(double lower_bound, double A_log, double y) {
  if (lower_bound == 0) return {-std::exp(A_log + (y > 20 ? 0 : log_sigmoid(y))), g_of(0, A_log, y)};
  const double z = y == 0 ? 0 : std::exp(A_log) * y;
  const double log_slope = log_sigmoid(z) + log_sigmoid(-z), slope = lower_bound * std::exp(log_slope);
  return {lower_bound * std::exp(A_log + log_slope), slope == 0 ? 0 : slope * z};
}

double& at(const thalweg_tensor& t, const int64_t* index) {
  int64_t offset = 0;
  for (int axis = 0; axis < t.rank; ++axis) offset += index[axis] * t.stride[axis];
  return static_cast<double*>(t.data)[offset];
}

// Calls body(index, A_log, y) for every element.
template <class Args, class Body>
void for_each(const Args& args, Body body) {
  const int64_t* n = args.x.shape;
  for (int64_t b = 0; b < n[0]; ++b)
    for (int64_t t = 0; t < n[1]; ++t)
      for (int64_t l = 0; l < n[2]; ++l)
        for (int64_t hv = 0; hv < n[3]; ++hv)
          for (int64_t k = 0; k < n[4]; ++k) {
            const int64_t index[5] = {b, t, l, hv, k};
            const double A_log = present(args.A_log) ? at(args.A_log, index + 3) : 0;
            const double y = at(args.x, index) + (present(args.dt_bias) ? at(args.dt_bias, index + 3) : 0);
            body(index, A_log, y);
          }
}

}  // namespace

void reference_fwd(const void* pass_args) {
  const auto& args = *static_cast<const thalweg_kda_gate_fwd_args*>(pass_args);
  for_each(args, [&](const int64_t* index, double A_log, double y) {
    at(args.g, index) = g_of(args.lower_bound, A_log, y);
  });
}

void reference_bwd(const void* pass_args) {
  const auto& args = *static_cast<const thalweg_kda_gate_bwd_args*>(pass_args);
  oracle::set_zero(args.d_A_log);
  oracle::set_zero(args.d_dt_bias);
  for_each(args, [&](const int64_t* index, double A_log, double y) {
    const double d_g = at(args.d_g, index);
    if (present(args.d_x)) at(args.d_x, index) = 0;
    if (d_g == 0) return;  // of an infinite slope too
    const Slopes slopes = slopes_of(args.lower_bound, A_log, y);
    if (present(args.d_x)) at(args.d_x, index) = d_g * slopes.y;
    if (present(args.d_A_log)) at(args.d_A_log, index + 3) += d_g * slopes.A_log;
    if (present(args.d_dt_bias)) at(args.d_dt_bias, index + 3) += d_g * slopes.y;
  });
}

}  // namespace thalweg::kda_gate
