// What is shown while training: a bar on a terminal, otherwise a line an evaluation.
#ifndef LANGUAGE_MODEL_PROGRESS_H
#define LANGUAGE_MODEL_PROGRESS_H

#include <chrono>
#include <string>

#include "trainer.h"

namespace language_model {

class ProgressDisplay {
 public:
  explicit ProgressDisplay(const TrainingOptions&);
  ~ProgressDisplay();  // ends the bar's line
  // After every step. `bits`: the step's loss; `point`: an evaluation was just made.
  void show(const TrainingState&, double progress, double bits, bool point);

 private:
  using Clock = std::chrono::steady_clock;
  std::string seconds_left(const TrainingState&, double progress) const;

  int64_t tokens_a_step_;
  bool terminal_;
  bool open_ = false;             // a bar is on the line
  double smooth_bits_ = 0;
  int64_t steps_ = 0;
  double first_seconds_ = -1;     // trained when the first step shown ended
  double first_progress_ = 0;
  Clock::time_point last_shown_{};
};

}  // namespace language_model
#endif
