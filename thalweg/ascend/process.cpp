#include "thalweg/ascend/process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

extern char** environ;

namespace thalweg::ascend {

namespace fs = std::filesystem;

Folder::Folder() {
  std::error_code error;
  fs::path base = fs::temp_directory_path(error);
  std::string name = ((error ? fs::path("/tmp") : base) / "thalweg-ascend-XXXXXX").string();
  if (!::mkdtemp(name.data())) throw std::runtime_error(name + ": cannot be made: " + std::strerror(errno));
  path_ = name;
}

Folder::~Folder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

Ran run(const std::vector<std::string>& args, const Folder& folder, double seconds) {
  Ran result;
  std::vector<char*> argv;
  for (const std::string& arg : args) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  std::string out = (folder / "stdout").string(), err = (folder / "stderr").string();
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_addchdir_np(&actions, folder.path().c_str());
  pid_t pid = 0;
  int error = ::posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    result.error = args[0] + ": cannot be started: " + std::strerror(error);
    return result;
  }
  auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int status = 0;
  for (;;) {
    pid_t done = ::waitpid(pid, &status, result.timed_out ? 0 : WNOHANG);
    if (done == pid) break;
    if (done < 0 && errno != EINTR) break;
    if (done == 0 && std::chrono::steady_clock::now() > end) {
      result.timed_out = true;
      ::kill(pid, SIGKILL);
    } else if (done == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  result.out = read_file(out);
  result.err = read_file(err);
  return result;
}

bool is_program(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored) && ::access(path.c_str(), X_OK) == 0;
}

std::string find_on_path(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream list(path ? path : "");
  for (std::string folder; std::getline(list, folder, ':');)
    if (is_program(fs::path(folder) / name)) return fs::absolute(fs::path(folder) / name).string();
  return "";
}

std::string first_error(const std::string& text) {
  size_t at = text.find("error: ");
  if (at == std::string::npos) return text.substr(0, text.find('\n'));
  return text.substr(at + 7, text.find('\n', at) - at - 7);
}

}  // namespace thalweg::ascend
