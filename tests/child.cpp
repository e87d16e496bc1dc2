#include "tests/child.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <iostream>

#include "tests/support.h"

namespace thalweg::tests {

namespace tt = thalweg::testing;

ChildResult run_command(const std::string& command) {
  ChildResult result;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (!pipe) return result;
  std::array<char, 4096> chunk;
  while (size_t n = fread(chunk.data(), 1, chunk.size(), pipe)) result.output.append(chunk.data(), n);
  int status = pclose(pipe);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

ChildResult run_child(const std::string& scene, const std::map<std::string, std::string>& environment) {
  char path[4096];
  ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  if (length < 0) return {};
  std::string command = "env THALWEG_TESTS_CHILD='" + scene + "'";
  for (const auto& [name, value] : environment) command += " " + name + "='" + value + "'";
  return run_command(command + " '" + std::string(path, size_t(length)) + "'");
}

namespace {

// Prints the instruction set, and which row of each pass runs its first smoke case.
int scene_isa() {
  std::cout << "isa " << thalweg_cpu_isa() << "\n";
  if (std::string(thalweg_cpu_isa()) == "unknown") std::cout << thalweg_last_error() << "\n";
  for (const thalweg_pass* pass : all_passes())
    for (const Case& c : pass_cases(*pass, {"smoke"}, 1e9)) {
      tt::Verdict verdict = tt::verify(c);
      std::cout << tt::pass_name(*pass) << " " << verdict.kernel << " " << verdict.isa << " " << verdict.status << " "
                << verdict.reason << "\n";
    }
  return 0;
}

int scene_call(const std::string& text) {
  Problem problem(tt::parse_case(text));
  thalweg_status status = problem.call();
  if (status != THALWEG_OK) std::cout << thalweg_last_error() << "\n";
  return int(status);
}

int scene_threads() {
  std::cout << thalweg_default_threads() << "\n";
  return 0;
}

}  // namespace

int play(const std::string& scene) {
  if (scene == "isa") return scene_isa();
  if (scene == "threads") return scene_threads();
  if (scene.starts_with("call ")) return scene_call(scene.substr(5));
  std::cerr << "unknown scene " << scene << "\n";
  return 2;
}

}  // namespace thalweg::tests
