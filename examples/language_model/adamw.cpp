#include "adamw.h"

#include <algorithm>
#include <cmath>

namespace language_model {
namespace {

constexpr int64_t kBlock = 16384;  // elements per task; a multiple of 16

double norm_of(Threads& threads, const std::vector<float>& x) {
  int64_t n = int64_t(x.size());
  std::vector<double> sums(size_t((n + kBlock - 1) / kBlock));
  threads.run_pieces(n, kBlock, [&](int64_t begin, int64_t end) {
    double sum = 0;
    for (int64_t i = begin; i < end; ++i) sum += double(x[size_t(i)]) * double(x[size_t(i)]);
    sums[size_t(begin / kBlock)] = sum;
  });
  double total = 0;
  for (double sum : sums) total += sum;
  return std::sqrt(total);
}

}  // namespace

double AdamW::update(Threads& threads, const std::vector<Parameter>& parameters, const std::vector<float>& gradients,
                     float learning_rate, int64_t step, std::vector<float>& weights) {
  double norm = norm_of(threads, gradients);
  float factor = norm > double(clip) ? float(double(clip) / norm) : 1.0f;
  // Both means start at 0; dividing by 1 - beta^step corrects for it.
  float correct1 = float(1 / (1 - std::pow(double(beta1), double(step))));
  float correct2 = float(1 / (1 - std::pow(double(beta2), double(step))));
  for (const Parameter& p : parameters) {
    float keep = p.decays ? 1 - learning_rate * weight_decay : 1.0f;
    const float* g = gradients.data() + p.offset;
    float *w = weights.data() + p.offset, *mean = m.data() + p.offset, *square = v.data() + p.offset;
    threads.run_pieces(p.count, kBlock, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        float gradient = g[i] * factor;
        mean[i] += (1 - beta1) * (gradient - mean[i]);
        square[i] += (1 - beta2) * (gradient * gradient - square[i]);
        w[i] = w[i] * keep - learning_rate * (mean[i] * correct1) / (std::sqrt(square[i] * correct2) + eps);
      }
    });
  }
  return norm;
}

}  // namespace language_model
