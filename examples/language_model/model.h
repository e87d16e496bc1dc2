// The language model: bytes in, logits of the next byte out.
//
//   x = embedding[byte]
//   N blocks:  x += mix(rms_norm(x));  x += w_down relu(w_up rms_norm(x))^2
//   logits = rms_norm(x) embedding^T            (the head is tied to the embedding)
#ifndef LANGUAGE_MODEL_MODEL_H
#define LANGUAGE_MODEL_MODEL_H

#include <string>
#include <vector>

#include "layers.h"
#include "mixer.h"

namespace language_model {

// One weight tensor inside the flat array of all of them.
struct Parameter {
  std::string name;
  std::vector<int64_t> shape;
  int64_t offset;  // floats from the array's start, a multiple of 16
  int64_t count;
  bool decays;     // weight decay: matrices do, norms and gates do not
};

struct BlockWeights {
  float* norm_mixer;  // [D]
  MixerWeights mixer;
  float* norm_mlp;    // [D]
  float* w_up;        // [D, F]
  float* w_down;      // [F, D]
};

struct Weights {
  float* embedding;  // [256, D]
  std::vector<BlockWeights> blocks;
  float* norm;       // [D]
};

// Every parameter of the model, in the order of the flat array; floats_of() is that array's size.
std::vector<Parameter> parameters_of(const Config&);
int64_t floats_of(const std::vector<Parameter>&);
// Fills `flat` with a fresh model.
void initialise(const Config&, uint64_t seed, std::vector<float>& flat);

// Where a text stands, for each block.
using States = std::vector<MixerState>;
States fresh_states(const Config&);

// Dropout of one training step; rate 0: none, as everywhere but in training.
struct DropoutPlan {
  float rate = 0;
  uint64_t key = 0;  // of the step
};

class Model {
 public:
  Model(const Config&, Threads&);

  const Config& config() const { return config_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  int64_t num_parameters() const;
  // All weights in one array, and their gradients; the model points into them, so never resize them.
  std::vector<float>& weights() { return weights_; }
  const std::vector<float>& weights() const { return weights_; }
  const std::vector<float>& gradients() const { return gradients_; }

  // Logits [B T 256] for bytes [B T]. With `states` (B = 1) the text goes on from them, and they move on.
  const std::vector<float>& forward(Pass, int64_t B, int64_t T, const uint8_t* bytes, States* states,
                                    DropoutPlan = {});
  // Mean loss in nats of predicting targets [B T], and the gradients of every weight.
  double train(int64_t B, int64_t T, const uint8_t* bytes, const uint8_t* targets, DropoutPlan);
  // The mean loss alone.
  double loss(int64_t B, int64_t T, const uint8_t* bytes, const uint8_t* targets, DropoutPlan = {});

 private:
  struct BlockActivations {
    std::vector<float> x;        // [M, D]  the block's input
    std::vector<float> a;        // [M, D]  normed for the mixer
    MixerActivations mixer;
    std::vector<float> x_mlp;    // [M, D]  after the mixer
    std::vector<float> a_mlp;    // [M, D]  normed for the MLP
    std::vector<float> up;       // [M, F]
    std::vector<float> hidden;   // [M, F]
  };
  void resize(int64_t M);
  void resize_scratch(int64_t M);
  Dropout dropout_at(const DropoutPlan&, int64_t place) const;
  void block_forward(size_t i, Pass, int64_t B, int64_t T, MixerState*, const DropoutPlan&, float* x_out);
  void block_backward(size_t i, int64_t B, int64_t T, const DropoutPlan&, float* d_x);

  Config config_;
  Threads& threads_;
  std::vector<Parameter> parameters_;
  std::vector<float> weights_, gradients_;
  Weights w_, d_w_;
  std::vector<BlockActivations> blocks_;
  std::vector<float> x_, a_, branch_, logits_;  // [M, D] after the last block, normed; scratch; [M, 256]
  // Scratch of the backward pass.
  MixerActivations d_mixer_;
  std::vector<float> d_x_, d_a_, d_branch_, d_hidden_, d_logits_;
  int64_t rows_ = 0, scratch_rows_ = 0;
};

}  // namespace language_model
#endif
