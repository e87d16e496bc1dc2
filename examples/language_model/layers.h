// The layers around the attention: embedding, RMSNorm (Thalweg's), squared ReLU, dropout, cross-entropy.
// Backward passes are written by hand; d_x is the gradient of the loss by x.
#ifndef LANGUAGE_MODEL_LAYERS_H
#define LANGUAGE_MODEL_LAYERS_H

#include "threads.h"

namespace language_model {

inline constexpr int64_t kBytes = 256;  // the vocabulary
inline constexpr int64_t kPiece = 64;   // rows per task of the row-wise loops

// Dropout of one tensor: an element is zeroed with probability `rate`, the others grow by 1 / (1 - rate).
// The mask comes from `key` again in the backward pass; nothing is stored. rate 0: the identity.
struct Dropout {
  float rate = 0;
  uint32_t key = 0;
};

// x [M D] = rows of embedding [256 D], then dropout
void embed(Threads&, int64_t M, int64_t D, const uint8_t* bytes, const float* embedding, Dropout, float* x);
// d_embedding [256 D] += rows of d_x [M D]
void embed_backward(Threads&, int64_t M, int64_t D, const uint8_t* bytes, const float* d_x, Dropout,
                    float* d_embedding);

// y [M D] = x / rms(x) * weight [D]
void rms_norm(Threads&, int64_t M, int64_t D, const float* x, const float* weight, float* y);
void rms_norm_backward(Threads&, int64_t M, int64_t D, const float* x, const float* weight, const float* d_y,
                       float* d_x, float* d_weight);

// y [M F] = max(x, 0)^2
void squared_relu(Threads&, int64_t M, int64_t F, const float* x, float* y);
// d [M F]: d_y on entry, d_x on return
void squared_relu_backward(Threads&, int64_t M, int64_t F, const float* x, float* d);

// y [M D] = x + dropout(branch): the end of a residual branch
void add_branch(Threads&, int64_t M, int64_t D, const float* x, const float* branch, Dropout, float* y);
// d_branch [M D] = dropout's gradient of d_y
void add_branch_backward(Threads&, int64_t M, int64_t D, const float* d_y, Dropout, float* d_branch);
// y [M D] += x
void add(Threads&, int64_t M, int64_t D, const float* x, float* y);

// The sum over rows of -log softmax(logits [M 256])[target], in nats. Where `d_logits` is given it gets
// the gradient of the mean over rows.
double cross_entropy(Threads&, int64_t M, const float* logits, const uint8_t* targets, float* d_logits);

}  // namespace language_model
#endif
