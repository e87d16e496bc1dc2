// Running the tools: without a shell, in a folder of their own, with a time limit.
#ifndef THALWEG_ASCEND_PROCESS_H
#define THALWEG_ASCEND_PROCESS_H

#include <filesystem>
#include <string>
#include <vector>

namespace thalweg::ascend {

// A fresh folder under the system's temporary one, removed with all that lies in it.
class Folder {
 public:
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::filesystem::path operator/(const char* name) const { return path_ / name; }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

std::string read_file(const std::filesystem::path& path);

struct Ran {
  std::string error;  // it was not started
  bool timed_out = false;
  int code = 0, signal = 0;
  std::string out, err;
};
// Runs args[0], a path, in `folder`. stdout and stderr go to files there, since a failed run prints a whole function.
Ran run(const std::vector<std::string>& args, const Folder& folder, double seconds);

bool is_program(const std::filesystem::path& path);
// The program of that name in a folder of PATH, or "".
std::string find_on_path(const std::string& name);

// The first line with "error:", from there on; otherwise the first line.
std::string first_error(const std::string& text);

}  // namespace thalweg::ascend
#endif
