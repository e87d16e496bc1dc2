// AdamW (Loshchilov and Hutter, 2019) on the flat array of all weights.
#ifndef LANGUAGE_MODEL_ADAMW_H
#define LANGUAGE_MODEL_ADAMW_H

#include <vector>

#include "model.h"
#include "threads.h"

namespace language_model {

struct AdamW {
  float beta1 = 0.9f, beta2 = 0.98f, eps = 1e-8f;
  float weight_decay = 0.1f;   // of matrices, times the learning rate
  float clip = 1.0f;           // largest norm of all gradients together
  std::vector<float> m, v;     // running means of the gradient and of its square

  explicit AdamW(size_t count) : m(count), v(count) {}
  // Step `step` (from 1) of the weights; returns the norm of the gradients before clipping.
  double update(Threads&, const std::vector<Parameter>&, const std::vector<float>& gradients, float learning_rate,
                int64_t step, std::vector<float>& weights);
};

}  // namespace language_model
#endif
