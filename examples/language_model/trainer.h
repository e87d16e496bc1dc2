// The training loop: schedule, evaluations, checkpoints, interruption.
#ifndef LANGUAGE_MODEL_TRAINER_H
#define LANGUAGE_MODEL_TRAINER_H

#include <limits>
#include <map>
#include <string>
#include <vector>

#include "adamw.h"
#include "data.h"
#include "model.h"

namespace language_model {

struct TrainingOptions {
  double minutes = 3;       // how long to train, unless `steps` is given
  int64_t steps = 0;
  int64_t stop_after = 0;   // save and stop after this many steps, as an interrupt would; 0: do not
  int64_t B = 8, T = 512;   // crops a step and bytes a crop
  float learning_rate = 4e-3f;
  float weight_decay = 1.0f;
  float dropout = 0.15f;
  float averaging = 0.98f;  // decay of the running mean of the weights, which is what is judged and kept
  uint64_t seed = 1;
};

// One evaluation. Losses in bits per byte.
struct CurvePoint {
  double step, seconds;
  double training;    // mean over the steps since the last point, with dropout
  double validation, held_out;
};

// All that changes while training, beside the model's weights; what a checkpoint holds.
struct TrainingState {
  explicit TrainingState(const Model& model);
  int64_t step = 0;
  double seconds = 0;
  AdamW optimizer;
  double best_validation = std::numeric_limits<double>::infinity();
  std::vector<float> average;       // running mean of the weights
  std::vector<float> best_weights;  // the average at the point with the lowest validation loss
  int64_t best_step = 0;
  double loss_sum = 0;              // since the last point, in nats
  int64_t loss_count = 0;
  std::vector<CurvePoint> curve;
};

// How far a run is, 0 to 1.
double progress_of(const TrainingOptions&, const TrainingState&);
// Linear warm-up, then a cosine down to 0.
float learning_rate_at(const TrainingOptions&, double progress);

enum class Ending { kFinished, kInterrupted };

// Trains until the budget is used up, an interrupt (SIGINT, SIGTERM) or stop_after. Saves to `checkpoint` at
// every evaluation and at the end. `identity` is what a run must share to go on from the file.
Ending train(Model&, Threads&, const Corpus&, const TrainingOptions&, const std::string& checkpoint,
             const std::map<std::string, std::string>& identity, TrainingState&);

}  // namespace language_model
#endif
