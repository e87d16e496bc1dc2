// The command line: subcommands, help, exit codes.
#include <fmt/format.h>

#include <cstdio>
#include <iostream>

#include "thalweg/core/error.h"
#include "tools/thalweg/file_error.h"
#include "tools/thalweg/tool.h"

namespace thalweg::tool {
namespace {

constexpr char kFooter[] = R"(
Cases are one-line strings: pass, then dtype, sizes, optional tensors, options.
  gated_delta_rule.fwd:bf16,B2,T513,H4,HV8,K128,V128,state,varlen=7+506,kernel=cpu_generic
@set names a set of cases of every operator, op@set or op.pass@set one of them; a file has one case a line.

Examples
  thalweg list                                            what is there, and what this machine runs
  thalweg explain gated_delta_rule.fwd:f32,B1,T4096,H16,HV32,K128,V128
  thalweg verify @smoke                                   every kernel against the float64 reference
  thalweg bench gated_rms_norm@perf --json results.jsonl  verifies, then times
  thalweg compare before.jsonl after.jsonl
  thalweg run gated_rms_norm.fwd --in x.safetensors --out y.safetensors --eps 1e-6
  thalweg run gated_rms_norm.fwd --help                   its tensors and options

Exit codes: 0 yes or done, 1 the answer is no (a case failed or was not verified, a table differs), 2 wrong command or input.
Environment: THALWEG_ISA (portable, avx2, avx512, amx) lowers the instruction set, THALWEG_NUM_THREADS,
THALWEG_VERBOSE=1 prints a line per call.)";

struct Subcommand {
  const char* name;
  const char* doc;
  Action (*add)(CLI::App&);
};
constexpr Subcommand kSubcommands[] = {
    {"list", "Operators, passes, kernels, and what this machine runs", add_list},
    {"explain", "Which kernel takes a case and why not the others; plan, workspace, FLOPs, bytes, floor", add_explain},
    {"verify", "Compare kernels with the float64 reference", add_verify},
    {"bench", "Time cases, after they verified, against roofs measured in the same process", add_bench},
    {"profile", "Run a case under perf: time, instructions, where it waits", add_profile},
    {"compare", "Two files of results, before and after", add_compare},
    {"run", "Run a pass on tensors from files", add_run},
    {"plan", "Tile, memory, transfers and split of a kernel on an Ascend device", add_plan},
    {"docs", "Write the generated tables of the operators' READMEs, or check them", add_docs},
};

int fail_with(const std::string& text, int code) {
  std::cout << std::flush;
  std::cerr << "thalweg: " << text << std::endl;
  return code;
}

// What CLI11 only calls a missing subcommand: a name that is none, of a subcommand or of `run`'s pass; or "".
std::string wrong_name(int argc, const char* const* argv) {
  if (argc < 2 || argv[1][0] == '-') return "";
  std::string names;
  for (const auto& sub : kSubcommands) names += std::string(" ") + sub.name;
  if ((names + " ").find(" " + std::string(argv[1]) + " ") == std::string::npos)
    return fmt::format("subcommand, got {}, expected one of:{}", argv[1], names);
  if (std::string_view(argv[1]) != "run" || argc < 3 || argv[2][0] == '-') return "";
  try {
    find_pass(argv[2]);
    return "";
  } catch (const UsageError& e) {
    return std::string("run: ") + e.what();
  }
}

}  // namespace

int run_tool(int argc, const char* const* argv) {
  keep_command(argc, argv);
  CLI::App app("Thalweg: linear-attention operators; this tool verifies, times and explains every kernel.", "thalweg");
  app.require_subcommand(1);
  app.set_version_flag("--version", [] {
    return fmt::format("thalweg {} (commit {}, ABI {})", thalweg_version(), commit(), thalweg_abi_version());
  });
  app.get_formatter()->column_width(34);
  std::vector<std::pair<CLI::App*, Action>> actions;
  for (const auto& sub : kSubcommands) {
    CLI::App* one = app.add_subcommand(sub.name, sub.doc);
    actions.emplace_back(one, sub.add(*one));
  }
  app.footer(kFooter);  // after the subcommands, which would inherit it
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    app.exit(e);
    return kOk;
  } catch (const CLI::Error& e) {
    if (std::string text = wrong_name(argc, argv); !text.empty()) return fail_with(text, kUsage);
    bool is_plan = argc > 1 && std::string_view(argv[1]) == "plan";  // its 2 says that a kernel does not fit
    return fail_with(std::string(e.what()) + "\nRun with --help for more.", is_plan ? int(kNegative) : int(kUsage));
  }
  try {
    for (auto& [one, action] : actions)
      if (one->parsed()) return action();
  } catch (const UsageError& e) {
    return fail_with(e.what(), kUsage);
  } catch (const files::FileError& e) {
    return fail_with(e.what(), kUsage);
  } catch (const std::invalid_argument& e) {  // a case that does not parse
    return fail_with(e.what(), kUsage);
  } catch (const Error& e) {
    return fail_with(e.what(), e.status == THALWEG_INVALID_ARGUMENT || e.status == THALWEG_UNSUPPORTED ? kUsage : kNegative);
  } catch (const std::bad_alloc&) {
    return fail_with("out of memory", kNegative);
  } catch (const std::exception& e) {
    return fail_with(e.what(), kNegative);
  }
  return kUsage;
}

}  // namespace thalweg::tool
