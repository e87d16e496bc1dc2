#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>

namespace language_model {

ProgressDisplay::ProgressDisplay(const TrainingOptions& options)
    : tokens_a_step_(options.B * options.T), terminal_(isatty(STDOUT_FILENO) == 1) {}

ProgressDisplay::~ProgressDisplay() {
  if (open_) fmt::print("\n");
  std::fflush(stdout);
}

std::string ProgressDisplay::seconds_left(const TrainingState& state, double progress) const {
  double done = progress - first_progress_;
  if (done <= 0) return "";
  int64_t left = int64_t(std::ceil((state.seconds - first_seconds_) / done * (1 - progress)));
  return fmt::format("{}:{:02} left", left / 60, left % 60);
}

void ProgressDisplay::show(const TrainingState& state, double progress, double bits, bool point) {
  if (first_seconds_ < 0) {
    first_seconds_ = state.seconds;
    first_progress_ = progress;
  } else {
    ++steps_;
  }
  smooth_bits_ = smooth_bits_ == 0 ? bits : smooth_bits_ + 0.05 * (bits - smooth_bits_);
  auto now = Clock::now();
  bool due = terminal_ ? point || progress >= 1 || now - last_shown_ > std::chrono::milliseconds(200) : point;
  if (!due) return;
  last_shown_ = now;
  double elapsed = state.seconds - first_seconds_;
  std::string rate = elapsed > 0 ? fmt::format("{:.1f}k tokens/s", double(steps_ * tokens_a_step_) / elapsed / 1000) : "";
  std::string judged;
  if (!state.curve.empty())
    judged = fmt::format("  validation {:.3f}  held-out {:.3f}", state.curve.back().validation, state.curve.back().held_out);
  std::string facts = fmt::format("{:3.0f} %  step {}  loss {:.3f} nats = {:.3f} bits/byte{}  {}  {}", 100 * progress,
                                  state.step, smooth_bits_ * std::log(2.0), smooth_bits_, judged, rate,
                                  seconds_left(state, progress));
  if (terminal_) {
    constexpr int kWidth = 20;
    int full = int(progress * kWidth);
    fmt::print("\r[{:#<{}}{:.<{}}]{}\033[K", "", full, "", kWidth - full, facts);
    open_ = true;
  } else {
    fmt::print("{}\n", facts);
  }
  std::fflush(stdout);
}

}  // namespace language_model
