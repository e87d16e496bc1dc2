// Token mixing by the gated delta rule, as in Gated DeltaNet, or by Kimi delta attention: the part of the model
// that Thalweg computes.
//
//   qkv     = a w_qkv                              then a causal convolution over W tokens and SiLU
//   o       = the delta rule of q, k, v, with decay and beta from a w_decay_beta: one beta a head, and one decay
//             a head (gdn) or a decay for each key channel of a head (kda)
//   y       = RMSNorm(o) * silu(a w_gate)          per head
//   branch  = y w_out
//
// The three Thalweg calls take views into these buffers: q, k and v are columns of one matrix, and so
// are decay and beta. L2 norms of q and k, the decay gate and beta's sigmoid are fused into the operator.
#ifndef LANGUAGE_MODEL_MIXER_H
#define LANGUAGE_MODEL_MIXER_H

#include <vector>

#include "threads.h"

namespace language_model {

enum class Mixer { kGdn, kKda };

struct Config {
  Mixer mixer = Mixer::kGdn;
  int64_t layers = 3;
  int64_t D = 192;        // width of the residual stream
  int64_t H = 6;          // heads
  int64_t K = 32, V = 32; // key and value size of a head
  int64_t W = 4;          // width of the convolution
  int64_t F = 576;        // hidden size of the MLP

  int64_t qkv() const { return H * (2 * K + V); }  // channels of the convolution
  int64_t o() const { return H * V; }
  int64_t decays() const { return mixer == Mixer::kGdn ? H : H * K; }
  int64_t decay_beta() const { return decays() + H; }
};

struct MixerWeights {
  float* w_qkv;         // [D, H K + H K + H V]
  float* w_gate;        // [D, H V]
  float* w_decay_beta;  // [D, decays + H]
  float* conv;          // [H (2 K + V), W]
  float* A_log;         // [H]
  float* dt_bias;       // [decays]
  float* norm;          // [V]
  float* w_out;         // [H V, D]
};

// What the backward pass needs of the forward one; buffers of M = B T rows.
struct MixerActivations {
  std::vector<float> qkv;         // [M, H (2 K + V)]
  std::vector<float> gate;        // [M, H V]
  std::vector<float> decay_beta;  // [M, decays + H]
  std::vector<float> conv;        // [M, H (2 K + V)]  qkv after the convolution
  std::vector<float> o;           // [M, H V]
  std::vector<float> y;           // [M, H V]
  void resize(const Config&, int64_t M);
};

// What a layer remembers of a text: the last W inputs of the convolution and the delta rule's state.
struct MixerState {
  std::vector<float> conv;   // [1, H (2 K + V), W]
  std::vector<float> delta;  // [1, H, K, V]
  explicit MixerState(const Config&);
};

// kChunked: many tokens at once, as in training. kDecode: token after token, states in place.
enum class Pass { kChunked, kDecode };

// branch [B T D] of a [B T D]. `state` (B = 1) is where the text goes on, and is updated; none: texts start
// here.
void mix(Threads&, const Config&, Pass, int64_t B, int64_t T, const MixerWeights&, const float* a, MixerState* state,
         MixerActivations&, float* branch);

// d_a [B T D] of d_branch [B T D], and the gradients of the weights. `d` is scratch of the activations' sizes.
void mix_backward(Threads&, const Config&, int64_t B, int64_t T, const MixerWeights&, const float* a,
                  const MixerActivations&, const float* d_branch, MixerActivations& d, float* d_a,
                  const MixerWeights& d_weights);

}  // namespace language_model
#endif
