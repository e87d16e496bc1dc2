#include "model.h"

#include <cmath>
#include <functional>
#include <numeric>

#include "products.h"
#include "random.h"

namespace language_model {
namespace {

// How a parameter starts.
enum class Start { kNormal, kSmallNormal, kOnes, kALog, kDtBias };

// Visits the parameters in order: the one place that knows their names, shapes and starts.
class Walk {
 public:
  struct Item {
    Parameter parameter;
    Start start;
  };

  explicit Walk(float* flat) : flat_(flat) {}
  float* take(std::string name, std::vector<int64_t> shape, Start start) {
    int64_t count = std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<>());
    bool decays = start == Start::kNormal || start == Start::kSmallNormal;
    items_.push_back({{std::move(name), std::move(shape), next_, count, decays}, start});
    float* at = flat_ ? flat_ + next_ : nullptr;
    next_ += (count + 15) / 16 * 16;
    return at;
  }
  const std::vector<Item>& items() const { return items_; }

 private:
  float* flat_;
  int64_t next_ = 0;
  std::vector<Item> items_;
};

Weights walk(const Config& c, Walk& walk) {
  Weights w;
  w.embedding = walk.take("embedding", {kBytes, c.D}, Start::kNormal);
  for (int64_t i = 0; i < c.layers; ++i) {
    std::string block = "blocks." + std::to_string(i) + ".", mixer = block + "mixer.";
    w.blocks.push_back({
        .norm_mixer = walk.take(block + "norm_mixer", {c.D}, Start::kOnes),
        .mixer = {.w_qkv = walk.take(mixer + "w_qkv", {c.D, c.qkv()}, Start::kNormal),
                  .w_gate = walk.take(mixer + "w_gate", {c.D, c.o()}, Start::kNormal),
                  .w_decay_beta = walk.take(mixer + "w_decay_beta", {c.D, c.decay_beta()}, Start::kNormal),
                  .conv = walk.take(mixer + "conv", {c.qkv(), c.W}, Start::kNormal),
                  .A_log = walk.take(mixer + "A_log", {c.H}, Start::kALog),
                  .dt_bias = walk.take(mixer + "dt_bias", {c.decays()}, Start::kDtBias),
                  .norm = walk.take(mixer + "norm", {c.V}, Start::kOnes),
                  .w_out = walk.take(mixer + "w_out", {c.o(), c.D}, Start::kSmallNormal)},
        .norm_mlp = walk.take(block + "norm_mlp", {c.D}, Start::kOnes),
        .w_up = walk.take(block + "w_up", {c.D, c.F}, Start::kNormal),
        .w_down = walk.take(block + "w_down", {c.F, c.D}, Start::kSmallNormal),
    });
  }
  w.norm = walk.take("norm", {c.D}, Start::kOnes);
  return w;
}

// Standard deviation of a fresh matrix: keeps the size of what it is multiplied with; what is added to the
// residual stream starts smaller, the more so the more layers add. The embedding is also the head.
double deviation(const Config& c, const Parameter& p, Start start) {
  if (p.name == "embedding") return 0.05;
  bool conv = p.shape[1] == c.W && p.shape[0] == c.qkv();
  double fan_in = double(conv ? c.W : p.shape[0]);
  double small = start == Start::kSmallNormal ? std::sqrt(0.5 / double(c.layers)) : 1;
  return small / std::sqrt(fan_in);
}

}  // namespace

std::vector<Parameter> parameters_of(const Config& config) {
  Walk visit(nullptr);
  walk(config, visit);
  std::vector<Parameter> list;
  for (const auto& item : visit.items()) list.push_back(item.parameter);
  return list;
}

int64_t floats_of(const std::vector<Parameter>& parameters) {
  const Parameter& last = parameters.back();
  return (last.offset + last.count + 15) / 16 * 16;
}

// The decay gate starts as in Mamba 2 and Gated DeltaNet: exp(A_log) uniform in [1, 16], and
// softplus(dt_bias) log-uniform in [0.001, 0.1], so that heads forget after between 1 and 1000 tokens.
void initialise(const Config& config, uint64_t seed, std::vector<float>& flat) {
  Walk visit(nullptr);
  walk(config, visit);
  for (const auto& [p, start] : visit.items()) {
    Random random(key_of({seed, 0x1a17, uint64_t(p.offset)}));
    double sigma = p.shape.size() == 2 ? deviation(config, p, start) : 0;
    for (int64_t i = 0; i < p.count; ++i) {
      double value = 1;
      if (p.decays) value = sigma * random.normal();
      if (start == Start::kALog) value = std::log(1 + 15 * random.uniform());
      if (start == Start::kDtBias) {
        double dt = std::exp(std::log(0.001) + random.uniform() * std::log(100.0));
        value = dt + std::log(-std::expm1(-dt));  // the inverse of softplus
      }
      flat[size_t(p.offset + i)] = float(value);
    }
  }
}

States fresh_states(const Config& config) { return States(size_t(config.layers), MixerState(config)); }

Model::Model(const Config& config, Threads& threads)
    : config_(config), threads_(threads), parameters_(parameters_of(config)),
      weights_(size_t(floats_of(parameters_))), gradients_(weights_.size()), blocks_(size_t(config.layers)) {
  Walk weights(weights_.data()), gradients(gradients_.data());
  w_ = walk(config, weights);
  d_w_ = walk(config, gradients);
}

int64_t Model::num_parameters() const {
  int64_t sum = 0;
  for (const auto& p : parameters_) sum += p.count;
  return sum;
}

void Model::resize(int64_t M) {
  if (M == rows_) return;
  rows_ = M;
  size_t wide = size_t(M * config_.D), hidden = size_t(M * config_.F);
  for (auto& block : blocks_) {
    for (auto* buffer : {&block.x, &block.a, &block.x_mlp, &block.a_mlp}) buffer->resize(wide);
    block.mixer.resize(config_, M);
    block.up.resize(hidden);
    block.hidden.resize(hidden);
  }
  for (auto* buffer : {&x_, &a_, &branch_}) buffer->resize(wide);
  logits_.resize(size_t(M * kBytes));
}

void Model::resize_scratch(int64_t M) {
  if (M == scratch_rows_) return;
  scratch_rows_ = M;
  for (auto* buffer : {&d_x_, &d_a_, &d_branch_}) buffer->resize(size_t(M * config_.D));
  d_mixer_.resize(config_, M);
  d_hidden_.resize(size_t(M * config_.F));
  d_logits_.resize(size_t(M * kBytes));
}

// Place 0 is the embedding, 2 i + 1 and 2 i + 2 are block i's branches.
Dropout Model::dropout_at(const DropoutPlan& plan, int64_t place) const {
  return {plan.rate, uint32_t(key_of({plan.key, uint64_t(place)}))};
}

void Model::block_forward(size_t i, Pass pass, int64_t B, int64_t T, MixerState* state, const DropoutPlan& dropout,
                          float* x_out) {
  int64_t M = B * T, D = config_.D, F = config_.F, place = 2 * int64_t(i) + 1;
  BlockActivations& s = blocks_[i];
  const BlockWeights& w = w_.blocks[i];
  rms_norm(threads_, M, D, s.x.data(), w.norm_mixer, s.a.data());
  mix(threads_, config_, pass, B, T, w.mixer, s.a.data(), state, s.mixer, branch_.data());
  add_branch(threads_, M, D, s.x.data(), branch_.data(), dropout_at(dropout, place), s.x_mlp.data());

  rms_norm(threads_, M, D, s.x_mlp.data(), w.norm_mlp, s.a_mlp.data());
  multiply(threads_, M, F, D, s.a_mlp.data(), w.w_up, s.up.data());
  squared_relu(threads_, M, F, s.up.data(), s.hidden.data());
  multiply(threads_, M, D, F, s.hidden.data(), w.w_down, branch_.data());
  add_branch(threads_, M, D, s.x_mlp.data(), branch_.data(), dropout_at(dropout, place + 1), x_out);
}

const std::vector<float>& Model::forward(Pass pass, int64_t B, int64_t T, const uint8_t* bytes, States* states,
                                         DropoutPlan dropout) {
  int64_t M = B * T, D = config_.D;
  resize(M);
  auto input_of = [&](size_t i) { return i < blocks_.size() ? blocks_[i].x.data() : x_.data(); };
  embed(threads_, M, D, bytes, w_.embedding, dropout_at(dropout, 0), input_of(0));
  for (size_t i = 0; i < blocks_.size(); ++i)
    block_forward(i, pass, B, T, states ? &(*states)[i] : nullptr, dropout, input_of(i + 1));
  rms_norm(threads_, M, D, x_.data(), w_.norm, a_.data());
  multiply_transposed(threads_, M, kBytes, D, a_.data(), w_.embedding, logits_.data());
  return logits_;
}

// d_x holds the gradient of the block's output on entry, of its input on return.
void Model::block_backward(size_t i, int64_t B, int64_t T, const DropoutPlan& dropout, float* d_x) {
  int64_t M = B * T, D = config_.D, F = config_.F, place = 2 * int64_t(i) + 1;
  const BlockActivations& s = blocks_[i];
  const BlockWeights &w = w_.blocks[i], &d_w = d_w_.blocks[i];
  add_branch_backward(threads_, M, D, d_x, dropout_at(dropout, place + 1), d_branch_.data());
  transposed_multiply(threads_, F, D, M, s.hidden.data(), d_branch_.data(), d_w.w_down);
  multiply_transposed(threads_, M, F, D, d_branch_.data(), w.w_down, d_hidden_.data());
  squared_relu_backward(threads_, M, F, s.up.data(), d_hidden_.data());
  transposed_multiply(threads_, D, F, M, s.a_mlp.data(), d_hidden_.data(), d_w.w_up);
  multiply_transposed(threads_, M, D, F, d_hidden_.data(), w.w_up, d_a_.data());
  rms_norm_backward(threads_, M, D, s.x_mlp.data(), w.norm_mlp, d_a_.data(), d_branch_.data(), d_w.norm_mlp);
  add(threads_, M, D, d_branch_.data(), d_x);

  add_branch_backward(threads_, M, D, d_x, dropout_at(dropout, place), d_branch_.data());
  mix_backward(threads_, config_, B, T, w.mixer, s.a.data(), s.mixer, d_branch_.data(), d_mixer_, d_a_.data(),
               d_w.mixer);
  rms_norm_backward(threads_, M, D, s.x.data(), w.norm_mixer, d_a_.data(), d_branch_.data(), d_w.norm_mixer);
  add(threads_, M, D, d_branch_.data(), d_x);
}

double Model::train(int64_t B, int64_t T, const uint8_t* bytes, const uint8_t* targets, DropoutPlan dropout) {
  int64_t M = B * T, D = config_.D;
  forward(Pass::kChunked, B, T, bytes, nullptr, dropout);
  resize_scratch(M);
  double loss = cross_entropy(threads_, M, logits_.data(), targets, d_logits_.data()) / double(M);

  transposed_multiply(threads_, kBytes, D, M, d_logits_.data(), a_.data(), d_w_.embedding);
  multiply(threads_, M, D, kBytes, d_logits_.data(), w_.embedding, d_a_.data());
  rms_norm_backward(threads_, M, D, x_.data(), w_.norm, d_a_.data(), d_x_.data(), d_w_.norm);
  for (size_t i = blocks_.size(); i-- > 0;) block_backward(i, B, T, dropout, d_x_.data());
  embed_backward(threads_, M, D, bytes, d_x_.data(), dropout_at(dropout, 0), d_w_.embedding);
  return loss;
}

double Model::loss(int64_t B, int64_t T, const uint8_t* bytes, const uint8_t* targets, DropoutPlan dropout) {
  forward(Pass::kChunked, B, T, bytes, nullptr, dropout);
  return cross_entropy(threads_, B * T, logits_.data(), targets, nullptr) / double(B * T);
}

}  // namespace language_model
