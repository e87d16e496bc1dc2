// Rules on the elements of an output.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "testing/compare.h"
#include "testing/fields.h"

namespace thalweg::testing {
namespace {

double rounded(double value, thalweg_dtype stored) {
  double bits = 0;  // room for any dtype
  store(&bits, stored, 0, value);
  return load(&bits, stored, 0);
}

// Distance of the numbers of a dtype around x.
double unit_in_last_place(double x, thalweg_dtype stored) {
  int digits = 52, lowest = -1022;
  if (stored == THALWEG_F32) digits = 23, lowest = -126;
  if (stored == THALWEG_BF16) digits = 7, lowest = -126;
  if (stored == THALWEG_F16) digits = 10, lowest = -14;
  return std::ldexp(1.0, std::max(x == 0 ? lowest : std::ilogb(x), lowest) - digits);
}

bool is_within(const Rule& rule, double got, double want, thalweg_dtype stored) {
  if (std::fabs(got - want) <= rule.atol + rule.rtol * std::fabs(want)) return true;
  if (rule.ulps == 0) return false;
  double near = rounded(want, stored);
  return std::fabs(got - near) <= rule.ulps * unit_in_last_place(near, stored);
}

}  // namespace

Judgement judge(const Rule& rule, const Values& got, const Values& want, thalweg_dtype stored) {
  if (got.shape != want.shape) throw std::invalid_argument("judge: different shapes");
  Judgement j{rule};
  double sum = 0;
  for (int64_t i = 0; i < want.count(); ++i) {
    double g = got.data[size_t(i)], w = want.data[size_t(i)];
    if (!std::isfinite(g) || !std::isfinite(w) || std::fabs(w) < rule.floor) continue;
    double error = std::fabs(g - w);
    bool outside = !is_within(rule, g, w, stored);
    if (outside ? j.outside == 0 : j.outside == 0 && (error > j.max_error || j.worst_at < 0)) j.worst_at = i;
    ++j.looked_at;
    j.outside += outside;
    sum += error;
    j.max_error = std::max(j.max_error, error);
    if (w != 0) j.max_relative = std::max(j.max_relative, error / std::fabs(w));
  }
  if (j.looked_at) j.mean_error = sum / double(j.looked_at);
  return j;
}

}  // namespace thalweg::testing
