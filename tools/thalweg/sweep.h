// thalweg bench --sweep
#ifndef THALWEG_TOOLS_SWEEP_H
#define THALWEG_TOOLS_SWEEP_H

#include <string>
#include <vector>

#include "testing/testing.h"

namespace thalweg::tool {

struct Sweep {
  std::string json;                        // file for the records, "-" is standard output, "" none
  double limit;                            // seconds of one combination
  std::vector<std::string> bench_options;  // of the process that times it
};

// Times every combination of the choices that each case's kernel declares, the row's own decision first. One that the
// row does not take, that fails to verify, dies or outlasts the limit is recorded as such, and the sweep goes on.
// Exit code: kNegative when any was taken but not timed.
int run_sweep(const std::vector<testing::Case>& cases, const Sweep& sweep);

}  // namespace thalweg::tool
#endif
