#include "layers.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "random.h"

namespace language_model {
namespace {

// The factor of element `index`: 0 or 1 / (1 - rate).
class Mask {
 public:
  explicit Mask(Dropout dropout)
      : key_(dropout.key), below_(uint32_t(double(dropout.rate) * 4294967296.0)), grow_(1 / (1 - dropout.rate)) {}
  float operator()(int64_t index) const {
    return element_bits(key_, uint32_t(index)) < below_ ? 0.0f : grow_;
  }

 private:
  uint32_t key_, below_;
  float grow_;
};

}  // namespace

void embed(Threads& threads, int64_t M, int64_t D, const uint8_t* bytes, const float* embedding, Dropout dropout,
           float* x) {
  Mask mask(dropout);
  threads.run_pieces(M, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const float* row = embedding + bytes[m] * D;
      for (int64_t d = 0; d < D; ++d) x[m * D + d] = row[d] * mask(m * D + d);
    }
  });
}

// Tasks own columns, not tokens: each sums its columns over the tokens in order.
void embed_backward(Threads& threads, int64_t M, int64_t D, const uint8_t* bytes, const float* d_x,
                    Dropout dropout, float* d_embedding) {
  Mask mask(dropout);
  threads.run_pieces(D, 32, [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < M; ++m) {
      float* row = d_embedding + bytes[m] * D;
      for (int64_t d = begin; d < end; ++d) row[d] += d_x[m * D + d] * mask(m * D + d);
    }
  });
}

void rms_norm(Threads& threads, int64_t M, int64_t D, const float* x, const float* weight, float* y) {
  thalweg::gated_rms_norm_fwd({.x = thalweg::view(x, {M, D}),  //
                               .weight = thalweg::view(weight, {D}),
                               .y = thalweg::view(y, {M, D})},
                              threads.context());
}

void rms_norm_backward(Threads& threads, int64_t M, int64_t D, const float* x, const float* weight,
                       const float* d_y, float* d_x, float* d_weight) {
  thalweg::gated_rms_norm_bwd({.x = thalweg::view(x, {M, D}),
                               .weight = thalweg::view(weight, {D}),
                               .d_y = thalweg::view(d_y, {M, D}),
                               .d_x = thalweg::view(d_x, {M, D}),
                               .d_weight = thalweg::view(d_weight, {D})},
                              threads.context());
}

void squared_relu(Threads& threads, int64_t M, int64_t F, const float* x, float* y) {
  threads.run_pieces(M, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * F; i < end * F; ++i) {
      float positive = std::max(x[i], 0.0f);
      y[i] = positive * positive;
    }
  });
}

void squared_relu_backward(Threads& threads, int64_t M, int64_t F, const float* x, float* d) {
  threads.run_pieces(M, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * F; i < end * F; ++i) d[i] *= 2 * std::max(x[i], 0.0f);
  });
}

void add_branch(Threads& threads, int64_t M, int64_t D, const float* x, const float* branch, Dropout dropout,
                float* y) {
  Mask mask(dropout);
  threads.run_pieces(M, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * D; i < end * D; ++i) y[i] = x[i] + branch[i] * mask(i);
  });
}

void add_branch_backward(Threads& threads, int64_t M, int64_t D, const float* d_y, Dropout dropout,
                         float* d_branch) {
  Mask mask(dropout);
  threads.run_pieces(M, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * D; i < end * D; ++i) d_branch[i] = d_y[i] * mask(i);
  });
}

void add(Threads& threads, int64_t M, int64_t D, const float* x, float* y) {
  threads.run_pieces(M, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * D; i < end * D; ++i) y[i] += x[i];
  });
}

double cross_entropy(Threads& threads, int64_t M, const float* logits, const uint8_t* targets, float* d_logits) {
  std::vector<double> losses(size_t((M + kPiece - 1) / kPiece));
  threads.run_pieces(M, kPiece, [&](int64_t begin, int64_t end) {
    double loss = 0;
    for (int64_t m = begin; m < end; ++m) {
      const float* row = logits + m * kBytes;
      float largest = *std::max_element(row, row + kBytes);
      float e[kBytes], sum = 0;
      for (int64_t c = 0; c < kBytes; ++c) {
        e[c] = std::exp(row[c] - largest);
        sum += e[c];
      }
      loss += std::log(double(sum)) - double(row[targets[m]] - largest);
      if (!d_logits) continue;
      float* d_row = d_logits + m * kBytes;
      float factor = 1 / (sum * float(M));
      for (int64_t c = 0; c < kBytes; ++c) d_row[c] = e[c] * factor;
      d_row[targets[m]] -= 1 / float(M);
    }
    losses[size_t(begin / kPiece)] = loss;
  });
  double total = 0;
  for (double loss : losses) total += loss;
  return total;
}

}  // namespace language_model
