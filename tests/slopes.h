// Gradients of a float64 oracle against central differences of a loss, and the numbers to try them on.
#ifndef THALWEG_TESTS_SLOPES_H
#define THALWEG_TESTS_SLOPES_H

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "testing/testing.h"

namespace thalweg::tests {

inline std::vector<double> normals(int64_t n, uint64_t seed) {
  testing::Random random(seed);
  std::vector<double> x(static_cast<size_t>(n));
  for (double& value : x) value = random.normal();
  return x;
}
inline std::vector<float> float_normals(int64_t n, uint64_t seed) {
  std::vector<float> x;
  for (double value : normals(n, seed)) x.push_back(float(value));
  return x;
}

// gradient[i] = d loss() / d input[i]; loss() reads input. `what` names the gradient; `tolerance` allows for what
// the third derivative adds to a central difference.
template <class Loss>
void expect_slopes(std::vector<double>& input, const std::vector<double>& gradient, Loss loss,
                   const std::string& what, double tolerance = 2e-8) {
  const double h = 1e-5;
  for (size_t i = 0; i < input.size(); ++i) {
    const double middle = input[i];
    input[i] = middle + h;
    const double above = loss();
    input[i] = middle - h;
    const double below = loss();
    input[i] = middle;
    const double slope = (above - below) / (2 * h);
    ASSERT_NEAR(gradient[i], slope, tolerance * (1 + std::fabs(slope))) << what << " element " << i;
  }
}

}  // namespace thalweg::tests
#endif
