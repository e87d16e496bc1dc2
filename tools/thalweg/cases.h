// Cases named on the command line, and the overrides that apply to all of them.
#ifndef THALWEG_TOOLS_CASES_H
#define THALWEG_TOOLS_CASES_H

#include <string>
#include <vector>

#include "testing/testing.h"
#include "tools/thalweg/tool.h"

namespace thalweg::tool {

struct CaseOptions {
  std::vector<std::string> names;
  std::string isa, kernel;
  int64_t threads = 0;
  bool cuda = false;
};
// Adds the positional CASE|FILE|@set and --isa, --threads, --kernel, --cuda.
void add_case_options(CLI::App& app, CaseOptions& options, bool required = true);
// Throws std::invalid_argument with what was expected.
std::vector<testing::Case> cases_of(const CaseOptions& options);
// Threads that a case runs on.
int64_t threads_of(const testing::Case& c);

}  // namespace thalweg::tool
#endif
