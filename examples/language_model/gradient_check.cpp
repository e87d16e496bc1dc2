// For every weight tensor w with gradient g, and unit directions u (g's own and random ones), compares
//
//   <g, u>   with   D(h) = (L(w + h u) - L(w - h u)) / 2h,   extrapolated: (4 D(h) - D(2h)) / 3
//
// The loss L is a mean of float32 computations and repeats to about kLossNoise (a few roundings of 2^-24 of a
// loss near 5, averaged over the tokens), which D sees divided by h. A right gradient therefore agrees within
// kLossNoise / h, plus the float32 error of g itself, taken as kRelative of |g|, once h is small enough for the
// extrapolation's error (h^4) to vanish. How small differs: RMSNorm of a head's output bends sharply where the
// output is near 0, as it is for some first tokens. So h starts at 2 % of |w| and shrinks until both agree or
// the noise would hide a gradient that is wrong by kTooWeak |g|; a wrong factor, sign, index or forgotten term
// is off by 0.1 |g| to 2 |g|, at every h.
#include "gradient_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "model.h"
#include "random.h"

namespace language_model {
namespace {

constexpr double kLossNoise = 2e-7, kRelative = 1e-3, kTooWeak = 0.03;
constexpr double kLargestStep = 0.02, kLossChange = 3e-3;

double norm(const std::vector<double>& x) {
  double sum = 0;
  for (double value : x) sum += value * value;
  return std::sqrt(sum);
}

class Checker {
 public:
  Checker(Threads& threads, Mixer mixer, uint64_t seed) : model_(config(mixer), threads), random_(seed) {
    initialise(config(mixer), seed, model_.weights());
    // Norm weights start at 1 and gates small: move everything, so that no gradient is special.
    for (float& w : model_.weights()) w += 0.05f * float(random_.normal());
    for (uint8_t& byte : inputs_) byte = uint8_t(random_.bits() % 64);
    for (uint8_t& byte : targets_) byte = uint8_t(random_.bits() % 64);
    model_.train(kB, kT, inputs_.data(), targets_.data(), dropout_);
    gradients_ = model_.gradients();
  }

  bool run() {
    bool ok = true;
    fmt::print("{:<30} {:>10} {:>24}\n", "parameter", "|gradient|", "difference / allowed");
    for (const Parameter& p : model_.parameters()) ok = check(p) && ok;
    // The check itself must be able to fail: a gradient that is a tenth too large.
    const Parameter& control = model_.parameters()[1];
    for (int64_t i = 0; i < control.count; ++i) gradients_[size_t(control.offset + i)] *= 1.1f;
    fmt::print("the same with the second gradient made a tenth too large, which must be found wrong:\n");
    return !check(control) && ok;
  }

 private:
  static constexpr int64_t kB = 2, kT = 100;
  static Config config(Mixer mixer) { return {.mixer = mixer, .layers = 2, .D = 32, .H = 2, .K = 16, .V = 16, .W = 4, .F = 48}; }

  double loss_at(const Parameter& p, const std::vector<float>& w, const std::vector<double>& u, double h) {
    for (size_t i = 0; i < w.size(); ++i) model_.weights()[size_t(p.offset) + i] = float(double(w[i]) + h * u[i]);
    return model_.loss(kB, kT, inputs_.data(), targets_.data(), dropout_);
  }

  // |<g, u> - D| for a step of h along u.
  double difference_at(const Parameter& p, const std::vector<float>& w, const std::vector<double>& u, double slope,
                       double h) {
    double near = (loss_at(p, w, u, h) - loss_at(p, w, u, -h)) / (2 * h);
    double far = (loss_at(p, w, u, 2 * h) - loss_at(p, w, u, -2 * h)) / (4 * h);
    return std::abs((4 * near - far) / 3 - slope);
  }

  bool check(const Parameter& p) {
    auto at = model_.weights().begin() + p.offset;
    std::vector<float> w(at, at + p.count);
    std::vector<double> g(gradients_.begin() + p.offset, gradients_.begin() + p.offset + p.count);
    double size = norm(g), first = std::min(kLargestStep * norm({w.begin(), w.end()}), kLossChange / size);
    double worst = 0;  // of the directions: difference / allowed
    for (int direction = 0; direction < 3; ++direction) {
      std::vector<double> u = g;
      if (direction > 0)
        for (double& value : u) value = random_.normal();
      double length = norm(u), slope = 0, best = INFINITY;
      for (size_t i = 0; i < u.size(); ++i) slope += g[i] * (u[i] /= length);
      for (double h = first; kLossNoise / h < kTooWeak * size && !(best <= 1); h /= 3)
        best = std::min(best, difference_at(p, w, u, slope, h) / (kLossNoise / h + kRelative * size));
      worst = std::max(worst, best);
    }
    std::copy(w.begin(), w.end(), model_.weights().begin() + p.offset);
    fmt::print("{:<30} {:>10.3e} {:>24.2f}{}\n", p.name, size, worst, worst <= 1 ? "" : "  WRONG");
    return worst <= 1;
  }

  Model model_;
  Random random_;
  std::vector<uint8_t> inputs_ = std::vector<uint8_t>(kB * kT), targets_ = inputs_;
  DropoutPlan dropout_{0.2f, 7};
  std::vector<float> gradients_;
};

}  // namespace

bool check_gradients(Threads& threads, Mixer mixer, uint64_t seed) {
  bool ok = Checker(threads, mixer, seed).run();
  fmt::print("{}\n", ok ? "every gradient agrees with finite differences" : "some gradients are wrong");
  return ok;
}

}  // namespace language_model
