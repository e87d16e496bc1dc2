// The command line.
#ifndef LANGUAGE_MODEL_OPTIONS_H
#define LANGUAGE_MODEL_OPTIONS_H

#include <map>
#include <optional>
#include <string>

#include "mixer.h"
#include "trainer.h"

namespace language_model {

struct Options {
  Config model;
  TrainingOptions training;
  std::string text;                    // "": the licenses
  std::string out = "build/demo";
  std::string checkpoint;              // "": <out>/checkpoint.safetensors
  bool resume = false, fresh = false;
  int64_t threads = 0;
  std::string prompt = "This License ";
  int64_t generate = 600;
  double temperature = 0.6;
  bool check_gradients = false;
};

// No options: the program is to end now with `status` (help was printed, or the command line is wrong).
std::optional<Options> parse_options(int argc, char** argv, int* status);

// What a run must share with a checkpoint to go on from it.
std::map<std::string, std::string> identity_of(const Options&, const Corpus&);

}  // namespace language_model
#endif
