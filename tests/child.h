// Scenes that need a process of their own: environment variables are read once per process.
#ifndef THALWEG_TESTS_CHILD_H
#define THALWEG_TESTS_CHILD_H

#include <map>
#include <string>

namespace thalweg::tests {

struct ChildResult {
  int status = -1;     // exit status; 128 + signal
  std::string output;  // standard output and error
};
// Runs this test program again with THALWEG_TESTS_CHILD=scene and the given environment.
ChildResult run_child(const std::string& scene, const std::map<std::string, std::string>& environment);
ChildResult run_command(const std::string& command);  // by the shell

int play(const std::string& scene);

}  // namespace thalweg::tests
#endif
