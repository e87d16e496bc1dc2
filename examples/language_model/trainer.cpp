#include "trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>

#include "checkpoint.h"
#include "decode.h"
#include "progress.h"
#include "random.h"

namespace language_model {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kEvaluations = 10;  // in a run
constexpr double kWarmUp = 0.03;     // part of a run

volatile std::sig_atomic_t interrupted = 0;

// The first signal asks the loop to save and end; a second one ends the program at once.
extern "C" void on_interrupt(int signal) {
  interrupted = 1;
  std::signal(signal, SIG_DFL);
}

class InterruptGuard {
 public:
  InterruptGuard() : old_int_(std::signal(SIGINT, on_interrupt)), old_term_(std::signal(SIGTERM, on_interrupt)) {}
  ~InterruptGuard() {
    std::signal(SIGINT, old_int_);
    std::signal(SIGTERM, old_term_);
  }

 private:
  void (*old_int_)(int);
  void (*old_term_)(int);
};

double in_bits(double nats) { return nats / std::log(2.0); }

// The mean starts short, so that it does not hold on to the untrained weights.
void update_average(Threads& threads, float decay, int64_t step, const std::vector<float>& weights,
                    std::vector<float>& average) {
  float keep = std::min(decay, float(step) / float(step + 10));
  threads.run_pieces(int64_t(weights.size()), 16384, [&](int64_t begin, int64_t end) {
    for (auto i = size_t(begin); i < size_t(end); ++i) average[i] += (1 - keep) * (weights[i] - average[i]);
  });
}

// Judges the averaged weights; training goes on with the others.
void evaluate(Model& model, Threads& threads, const Corpus& corpus, TrainingState& state) {
  std::vector<float> weights = model.weights();
  std::copy(state.average.begin(), state.average.end(), model.weights().begin());
  CurvePoint point{.step = double(state.step),
                   .seconds = state.seconds,
                   .training = in_bits(state.loss_sum / double(state.loss_count)),
                   .validation = bits_per_byte(model, threads, corpus.validation),
                   .held_out = bits_per_byte(model, threads, corpus.held_out)};
  state.loss_sum = 0;
  state.loss_count = 0;
  state.curve.push_back(point);
  if (point.validation < state.best_validation) {
    state.best_validation = point.validation;
    state.best_weights = state.average;
    state.best_step = state.step;
  }
  std::copy(weights.begin(), weights.end(), model.weights().begin());
}

}  // namespace

TrainingState::TrainingState(const Model& model) : optimizer(model.gradients().size()), average(model.weights()) {}

double progress_of(const TrainingOptions& options, const TrainingState& state) {
  double progress = options.steps > 0 ? double(state.step) / double(options.steps) : state.seconds / (60 * options.minutes);
  return std::min(progress, 1.0);
}

float learning_rate_at(const TrainingOptions& options, double progress) {
  double factor = progress < kWarmUp ? progress / kWarmUp
                                     : 0.5 + 0.5 * std::cos(3.141592653589793 * (progress - kWarmUp) / (1 - kWarmUp));
  return options.learning_rate * float(std::max(factor, 1e-3));
}

Ending train(Model& model, Threads& threads, const Corpus& corpus, const TrainingOptions& options,
             const std::string& checkpoint, const std::map<std::string, std::string>& identity, TrainingState& state) {
  InterruptGuard guard;
  ProgressDisplay display(options);
  Batch batch;
  state.optimizer.weight_decay = options.weight_decay;
  auto last = Clock::now();
  auto count_time = [&] {
    auto now = Clock::now();
    state.seconds += std::chrono::duration<double>(now - last).count();
    last = now;
  };
  double progress = progress_of(options, state);
  int64_t steps_here = 0;
  bool stopped = false;
  while (progress < 1 && !stopped) {
    ++state.step;
    crop(corpus.training, options.B, options.T, options.seed, state.step, batch);
    DropoutPlan dropout{options.dropout, key_of({options.seed, 0xd409, uint64_t(state.step)})};
    double loss = model.train(options.B, options.T, batch.inputs.data(), batch.targets.data(), dropout);
    if (!std::isfinite(loss))
      throw UserError("the loss is no longer a finite number: try a lower --learning-rate; the checkpoint is unharmed");
    state.optimizer.update(threads, model.parameters(), model.gradients(), learning_rate_at(options, progress),
                           state.step, model.weights());
    update_average(threads, options.averaging, state.step, model.weights(), state.average);
    state.loss_sum += loss;
    ++state.loss_count;
    ++steps_here;
    count_time();

    double next = progress_of(options, state);
    bool point = std::floor(next * kEvaluations) > std::floor(progress * kEvaluations);
    progress = next;
    if (point) {
      evaluate(model, threads, corpus, state);
      count_time();
      save_checkpoint(checkpoint, model, state, identity);
      count_time();
    }
    display.show(state, progress, in_bits(loss), point);
    stopped = interrupted || (options.stop_after > 0 && steps_here >= options.stop_after);
  }
  if (stopped && progress < 1) {
    save_checkpoint(checkpoint, model, state, identity);
    return Ending::kInterrupted;
  }
  return Ending::kFinished;
}

}  // namespace language_model
