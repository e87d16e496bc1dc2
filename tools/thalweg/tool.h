// What the subcommands of the `thalweg` tool share.
#ifndef THALWEG_TOOLS_TOOL_H
#define THALWEG_TOOLS_TOOL_H

#include <CLI/CLI.hpp>
#include <functional>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "thalweg/core/device.h"
#include "thalweg/core/types.h"

namespace thalweg::tool {

using Json = nlohmann::ordered_json;

enum ExitCode : int {
  kOk = 0,
  kNegative = 1,  // the question was answered, with no
  kUsage = 2      // the command or its input is wrong
};

// Wrong use: printed as it is, exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Each adds its options to `app` (its own subcommand) and returns what to do once they are parsed.
using Action = std::function<int()>;
Action add_list(CLI::App& app);
Action add_explain(CLI::App& app);
Action add_verify(CLI::App& app);
Action add_bench(CLI::App& app);
Action add_profile(CLI::App& app);
Action add_compare(CLI::App& app);
Action add_run(CLI::App& app);
Action add_docs(CLI::App& app);
Action add_plan(CLI::App& app);

// The whole tool; main() calls it, and so do tests. Errors go to stderr.
int run_tool(int argc, const char* const* argv);

// "<op>.<pass>", or UsageError with the list of passes.
const thalweg_pass& find_pass(const std::string& name);
std::string pass_name(const thalweg_pass& pass);
// The ISA that a kernel row needs.
Isa kernel_isa(const thalweg_pass& pass, const std::string& kernel);
// The words of a list "a b c".
std::vector<std::string> words(std::string_view text, char separator = ' ');
// Lowers the ISA as THALWEG_ISA does. Before the library's first call.
void lower_isa(const std::string& isa);

// Data caches of one core, in bytes, as the kernel shows them: some C libraries report the sum over a
// host's chips as the last level. Falls back to the library's figures.
// Of the last level; 1 MiB at least.
int64_t last_cache_bytes();
// "12.3 us", "4.56 ms"
std::string time_text(double us);

// What stands in records of results.
Json machine_json();
std::string machine_text();
std::string commit();    // of the tree this tool was built from; "+changes" when it was not clean
std::string utc_date();  // 2026-01-31T12:00:00Z
void keep_command(int argc, const char* const* argv);
const std::string& command();  // as typed

// Infinite and NaN as text, which JSON has no numbers for.
Json number_json(double value);
std::string bytes_text(double bytes);  // "1.5 MiB"
// To `file`, "-" is standard output; UsageError when it cannot be written.
void write_text(const std::string& file, const std::string& text, bool append = false);

// Left-aligned first column, the others right-aligned unless a header starts with '<'.
class Table {
 public:
  explicit Table(std::vector<std::string> headers) : rows_{std::move(headers)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  bool empty() const { return rows_.size() == 1; }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// A bar on stderr, on a terminal only.
class Progress {
 public:
  explicit Progress(int64_t total);
  ~Progress();
  void show(int64_t done, const std::string& what);
  void clear();  // before anything else is printed

 private:
  int64_t total_;
  bool on_, shown_ = false;
};

// Starts this program again with `args` and returns what it printed; stderr passes through.
// UsageError when it could not be started; `exit_code` as a shell has it.
struct RunOptions {
  bool errors = false;  // returns what it printed on stderr too
  double seconds = 0;   // kills it after so long (exit code 137); 0: never
};
std::string run_self(const std::vector<std::string>& args, int* exit_code, const RunOptions& options = {});
// The same for another program found by PATH.
std::string run_program(const std::vector<std::string>& args, int* exit_code, const RunOptions& options = {});

}  // namespace thalweg::tool
#endif
