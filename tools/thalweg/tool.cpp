// Shared by the subcommands: passes by name, tables, the progress bar, other processes.
#include "tools/thalweg/tool.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>

#include "testing/testing.h"

extern char** environ;

namespace thalweg::tool {

std::string pass_name(const thalweg_pass& pass) { return std::string(pass.op) + "." + pass.name; }

const thalweg_pass& find_pass(const std::string& name) {
  std::string names;
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i) {
    if (pass_name(*pass) == name) return *pass;
    names += " " + pass_name(*pass);
  }
  throw UsageError("pass, got " + name + ", expected one of:" + names);
}

Isa kernel_isa(const thalweg_pass& pass, const std::string& kernel) {
  const char* isa = nullptr;
  for (int64_t i = 0; const char* name = pass.kernel_at(i, &isa); ++i) {
    if (testing::row_of(kernel) != name) continue;
    for (Isa each : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAmx})
      if (std::string_view(isa) == isa_name(each)) return each;
  }
  return Isa::kPortable;
}

std::vector<std::string> words(std::string_view text, char separator) {
  std::vector<std::string> out;
  while (!text.empty()) {
    size_t end = std::min(text.find(separator), text.size());
    std::string_view word = text.substr(0, end);
    while (!word.empty() && word.front() == ' ') word.remove_prefix(1);
    while (!word.empty() && word.back() == ' ') word.remove_suffix(1);
    if (!word.empty()) out.emplace_back(word);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

void lower_isa(const std::string& isa) {
  if (!isa.empty()) ::setenv("THALWEG_ISA", isa.c_str(), 1);
}

Json number_json(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

std::string bytes_text(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  for (; bytes >= 1024 && unit < 4; ++unit) bytes /= 1024;
  return unit ? fmt::format("{:.1f} {}", bytes, units[unit]) : fmt::format("{:.0f} B", bytes);
}

std::string time_text(double us) {
  if (us < 1e3) return fmt::format("{:.1f} us", us);
  if (us < 1e6) return fmt::format("{:.2f} ms", us * 1e-3);
  return fmt::format("{:.2f} s", us * 1e-6);
}

void write_text(const std::string& file, const std::string& text, bool append) {
  if (file == "-") {
    std::cout << text << std::flush;
    return;
  }
  std::ofstream out(file, append ? std::ios::app : std::ios::trunc);
  out << text;
  out.close();
  if (!out) throw UsageError(file + ": cannot be written: " + std::strerror(errno));
}

namespace {

// Letters on a terminal, not bytes.
size_t width_of(const std::string& text) {
  size_t n = 0;
  for (char c : text) n += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  return n;
}

}  // namespace

std::string Table::text() const {
  std::vector<bool> left(rows_[0].size());
  std::vector<size_t> width(rows_[0].size());
  std::vector<std::string> headers = rows_[0];
  for (size_t c = 0; c < headers.size(); ++c) {
    left[c] = c == 0 || (!headers[c].empty() && headers[c][0] == '<');
    if (!headers[c].empty() && headers[c][0] == '<') headers[c].erase(0, 1);
  }
  for (size_t r = 0; r < rows_.size(); ++r)
    for (size_t c = 0; c < width.size() && c < rows_[r].size(); ++c)
      width[c] = std::max(width[c], width_of(r ? rows_[r][c] : headers[c]));
  std::string out;
  for (size_t r = 0; r < rows_.size(); ++r) {
    const auto& row = r ? rows_[r] : headers;
    std::string line;
    for (size_t c = 0; c < width.size(); ++c) {
      std::string cell = c < row.size() ? row[c] : "";
      std::string pad(width[c] - width_of(cell), ' ');
      line += (c ? "  " : "") + (left[c] ? cell + pad : pad + cell);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

Progress::Progress(int64_t total) : total_(total), on_(total > 1 && ::isatty(2)) {}
Progress::~Progress() { clear(); }

void Progress::show(int64_t done, const std::string& what) {
  if (!on_) return;
  winsize size{};
  size_t columns = ::ioctl(2, TIOCGWINSZ, &size) == 0 && size.ws_col > 20 ? size.ws_col : 80;
  constexpr int kCells = 20;
  int full = int(kCells * done / total_);
  std::string bar;
  for (int i = 0; i < kCells; ++i) bar += i < full ? "#" : ".";
  std::string line = fmt::format("[{}] {}/{} {}", bar, done, total_, what);
  if (line.size() >= columns) line.resize(columns - 1);
  std::fprintf(stderr, "\r\x1b[K%s", line.c_str());
  std::fflush(stderr);
  shown_ = true;
}

void Progress::clear() {
  if (!shown_) return;
  std::fprintf(stderr, "\r\x1b[K");
  std::fflush(stderr);
  shown_ = false;
}

std::string run_program(const std::vector<std::string>& args, int* exit_code, const RunOptions& options) {
  std::vector<char*> argv;
  for (const auto& a : args) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw UsageError(std::string("pipe: ") + std::strerror(errno));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  if (options.errors) posix_spawn_file_actions_adddup2(&actions, ends[1], 2);
  pid_t pid = 0;
  int error = ::posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  std::string out;
  if (error == 0) {
    char buffer[4096];
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(options.seconds);
    for (;;) {
      const double left = std::chrono::duration<double>(end - std::chrono::steady_clock::now()).count();
      pollfd ready{ends[0], POLLIN, 0};
      const int events = ::poll(&ready, 1, options.seconds > 0 ? std::max(0, int(std::min(left, 1e6) * 1000)) : -1);
      if (events == 0) {
        ::kill(pid, SIGKILL);
        break;
      }
      const ssize_t n = events < 0 ? -1 : ::read(ends[0], buffer, sizeof buffer);
      if (n > 0) out.append(buffer, size_t(n));
      else if (n == 0 || errno != EINTR) break;
    }
  }
  ::close(ends[0]);
  if (error != 0) throw UsageError(args[0] + ": cannot be started: " + std::strerror(error));
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  *exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return out;
}

std::string run_self(const std::vector<std::string>& args, int* exit_code, const RunOptions& options) {
  std::vector<std::string> full{"/proc/self/exe"};
  full.insert(full.end(), args.begin(), args.end());
  // The link is resolved here: in the child it would mean the child.
  char path[4096];
  ssize_t n = ::readlink("/proc/self/exe", path, sizeof path - 1);
  if (n > 0) full[0] = std::string(path, size_t(n));
  return run_program(full, exit_code, options);
}

}  // namespace thalweg::tool
