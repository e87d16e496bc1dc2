#include "thalweg/ascend/lower.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>

#include "thalweg/ascend/process.h"

namespace thalweg::ascend {
namespace {

namespace fs = std::filesystem;

constexpr char kPackage[] = "it comes with the Python package ascendnpu-ir==1.2.0";

std::string tool_name(const Target& target) { return target.a5 ? "bishengir-opt-a5" : "bishengir-opt"; }

// "ub overflow, requires 1573120 bits while 1572864 bits available!"
bool parse_overflow(const std::string& text, Lowered* result) {
  size_t at = text.find(" overflow, requires ");
  if (at == std::string::npos) return false;
  size_t begin = text.find_last_of(" \n", at - 1) + 1;
  long long required = 0, available = 0;
  if (std::sscanf(text.c_str() + at, " overflow, requires %lld bits while %lld bits available", &required, &available) != 2) return false;
  result->space = text.substr(begin, at - begin);
  result->required = required / 8;
  result->available = available / 8;
  return true;
}

std::string seconds_text(double seconds) {
  std::ostringstream text;
  text << seconds << " s";
  return text.str();
}

// What every run may end with: not started, too long, a signal.
bool failed(const Ran& ran, const std::string& tool, const Tools& tools, Outcome* outcome, std::string* message) {
  if (!ran.error.empty())
    *outcome = Outcome::kAbsent, *message = ran.error;
  else if (ran.timed_out)
    *outcome = Outcome::kTimeOut, *message = tool + ": ended after the limit of " + seconds_text(tools.seconds);
  else if (ran.signal)
    *outcome = Outcome::kCrash, *message = tool + ": died of signal " + std::to_string(ran.signal) + " (" + ::strsignal(ran.signal) + "): " + first_error(ran.err);
  else
    return false;
  return true;
}

std::vector<std::string> arguments(const std::string& path, const Target& target, Buffering buffering) {
  std::string name = target.name, triton = "enable-triton-kernel-compile=true";
  std::vector<std::string> args{path, "k.mlir", "--hacc-append-device-spec=target=" + name};
  if (target.a5) {
    args.push_back("--lower-hfusion-pipeline=" + triton + " target=" + name);
    args.push_back("--convert-to-hivm-pipeline=" + triton);
    args.push_back("--lower-hivm-pipeline=" + triton + " enable-auto-multi-buffer=" + (buffering == Buffering::kOff ? "false" : "true") +
                   " enable-print-memory-allocated-size=true target=" + name);
  } else {
    args.push_back("--lower-hfusion-pipeline=" + triton);
    args.push_back("--convert-to-hivm-pipeline=" + triton);
    std::string multi = buffering == Buffering::kOff ? "false" : "true";
    if (buffering == Buffering::kVector) multi += " limit-auto-multi-buffer-buffer=only-vector";
    args.push_back("--optimize-hivm-pipeline=" + triton + " enable-auto-multi-buffer=" + multi + " enable-memory-display=true");
    args.push_back("--mlir-disable-threading");
    args.push_back("--mlir-print-ir-before=convert-hivm-to-std");
  }
  args.push_back("-o");
  args.push_back("k.hivm.mlir");
  return args;
}

void read_results(const Folder& folder, const Ran& ran, const Target& target, int64_t rows, Lowered* result) {
  if (target.a5) {
    constexpr char kAllocated[] = "Allocated UB size = ";
    for (size_t at = 0; (at = ran.out.find(kAllocated, at)) != std::string::npos; ++at)
      result->placed["ub"] = std::max<int64_t>(result->placed["ub"], std::atoll(ran.out.c_str() + at + sizeof kAllocated - 1) / 8);
    return;
  }
  for (const char* name : {"memory_info_aic.json", "memory_info_aiv.json"}) {
    if (!fs::exists(folder / name)) continue;
    for (const auto& [space, bytes] : parse_memory(read_file(folder / name)))
      result->need[space] = std::max(result->need[space], bytes);
  }
  if (result->outcome != Outcome::kFits) return;
  result->dump = parse_dump(ran.err, rows);
  for (const Function& function : result->dump.functions)
    for (const auto& [space, bytes] : function.placed) result->placed[space] = std::max(result->placed[space], bytes);
}

}  // namespace

std::string space_name(const std::string& space) {
  return space == "ub" ? "UB" : space == "cbuf" ? "L1" : space == "cc" ? "L0C" : space;
}

std::string find_tool(const Target& target, const Tools& tools) {
  std::string name = tool_name(target), folders = tools.bin;
  if (folders.empty())
    if (const char* bin = std::getenv("THALWEG_ASCEND_BIN"); bin && *bin) folders = bin;
  if (!folders.empty()) {
    fs::path path = fs::absolute(fs::path(folders) / name);
    return is_program(path) ? path.string() : "";
  }
  return find_on_path(name);
}

Outcome check_tool(const Target& target, const Tools& tools, std::string* message) {
  std::string name = tool_name(target), path = find_tool(target, tools);
  if (path.empty()) {
    *message = name + " not found (--ascend-bin, THALWEG_ASCEND_BIN, PATH); " + kPackage;
    return Outcome::kAbsent;
  }
  static std::mutex mutex;
  static std::set<std::string> right;  // of the right version, by path
  if (std::lock_guard lock(mutex); right.count(path)) return Outcome::kFits;
  Folder folder;
  Ran ran = run({path, "--version"}, folder, tools.seconds);
  Outcome outcome = Outcome::kFits;
  if (failed(ran, name, tools, &outcome, message)) return outcome;
  size_t begin = ran.out.find_first_not_of(" \n");
  std::string got = begin == std::string::npos ? "" : ran.out.substr(begin, ran.out.find('\n', begin) - begin);
  got = got.substr(0, got.find(" ("));
  if (ran.code != 0 || got != kToolVersion) {
    *message = path + ": version, got '" + got + "', expected '" + kToolVersion + "'; " + kPackage;
    return Outcome::kVersion;
  }
  std::lock_guard lock(mutex);
  right.insert(path);
  return Outcome::kFits;
}

Lowered lower(const std::string& text, const Target& target, Buffering buffering, int64_t rows, const Tools& tools) {
  Lowered result;
  try {
    result.outcome = check_tool(target, tools, &result.message);
    if (result.outcome != Outcome::kFits) return result;
    Folder folder;
    std::ofstream(folder / "k.mlir", std::ios::binary) << text;
    std::string name = tool_name(target);
    Ran ran = run(arguments(find_tool(target, tools), target, buffering), folder, tools.seconds);
    if (failed(ran, name, tools, &result.outcome, &result.message)) return result;
    bool written = fs::exists(folder / "k.hivm.mlir");
    if (ran.code == 0 && written) {
      result.outcome = Outcome::kFits;
    } else if (ran.code == 1 && parse_overflow(ran.err, &result)) {
      result.outcome = Outcome::kOverflow;
      result.message = space_name(result.space) + " " + std::to_string(result.required) + " of " + std::to_string(result.available);
    } else {
      result.outcome = Outcome::kError;
      std::string line = first_error(ran.err);
      result.message = name + ": exit " + std::to_string(ran.code) + ": " + (line.empty() ? "no text on stderr" : line);
      return result;
    }
    read_results(folder, ran, target, rows, &result);
  } catch (const std::exception& e) {
    result.outcome = Outcome::kError;
    result.message = e.what();
  }
  return result;
}

Lowered lower(const Plan& plan, const std::string& text, const Tools& tools) {
  return lower(text, plan.target, plan.buffering, plan.tile.BT, tools);
}

std::vector<std::string> verdict_differences(const Plan& plan, const Lowered& lowered) {
  if (!plan.need_is_predicted || !lowered.has_verdict()) return {};
  bool fits = plan.overflow().empty();
  if (fits == (lowered.outcome == Outcome::kFits)) return {};
  return {"verdict: planner " + (fits ? "fits" : plan.overflow()) + ", compiler " + (fits ? lowered.message : "fits")};
}

std::vector<std::string> differences(const Plan& plan, const Lowered& lowered) {
  std::vector<std::string> list = verdict_differences(plan, lowered);
  if (!lowered.has_verdict() || plan.target.a5 || !plan.need_is_predicted) return list;
  auto expect = [&](const std::string& what, int64_t planner, int64_t compiler) {
    if (planner != compiler) list.push_back(what + ": planner " + std::to_string(planner) + ", compiler " + std::to_string(compiler));
  };
  auto need = [&](const std::string& space) {
    return Need::sum(space == "ub" ? plan.need.ub : space == "cbuf" ? plan.need.l1 : plan.need.l0c);
  };
  if (lowered.outcome == Outcome::kOverflow) {
    // "requires" is the end of the last tile, more than what is alive where packing leaves holes.
    auto it = lowered.need.find(lowered.space);
    if (need(lowered.space) != lowered.required) expect(space_name(lowered.space), need(lowered.space), it == lowered.need.end() ? lowered.required : it->second);
    return list;
  }
  for (const char* space : {"ub", "cbuf", "cc"}) {
    auto it = lowered.need.find(space);
    expect(space_name(space), need(space), it == lowered.need.end() ? 0 : it->second);
  }
  int64_t scalars = 0;
  for (bool cube : {false, true}) {
    if (cube && !plan.mixed) continue;
    const Function* function = lowered.dump.find(cube);
    if (!function) {
      list.push_back(std::string(cube ? "AIC" : "AIV") + ": planner has one, the compiler's program none");
      continue;
    }
    scalars += function->scalar_accesses;
    for (bool out : {false, true}) {
      Traffic planned = traffic(plan.moves, cube, out);
      Function::Sum found = function->sum(out);
      std::string where = std::string(cube ? "AIC" : "AIV") + (out ? " out" : " in");
      expect(where + ", bursts", planned.bursts, found.bursts);
      expect(where + ", bytes", planned.bytes, found.bytes);
    }
  }
  expect("scalar accesses in loops", plan.scalar_loads, scalars);
  expect("workspace", plan.workspace, lowered.dump.workspace);
  return list;
}

Spec device_spec(const Target& target, const Tools& tools) {
  Spec spec;
  try {
    spec.outcome = check_tool(target, tools, &spec.message);
    if (spec.outcome != Outcome::kFits) return spec;
    Folder folder;
    std::ofstream(folder / "m.mlir") << "module {\n}\n";
    std::string name = tool_name(target);
    Ran ran = run({find_tool(target, tools), "m.mlir", std::string("--hacc-append-device-spec=target=") + target.name}, folder, tools.seconds);
    if (failed(ran, name, tools, &spec.outcome, &spec.message)) return spec;
    if (ran.code != 0) {
      spec.outcome = Outcome::kError;
      spec.message = name + ": exit " + std::to_string(ran.code) + ": " + first_error(ran.err);
      return spec;
    }
    constexpr char kEntry[] = "#dlti.dl_entry<\"";
    for (size_t at = 0; (at = ran.out.find(kEntry, at)) != std::string::npos;) {
      at += sizeof kEntry - 1;
      size_t quote = ran.out.find('"', at);
      spec.entries[ran.out.substr(at, quote - at)] = std::atoll(ran.out.c_str() + quote + 2);
    }
  } catch (const std::exception& e) {
    spec.outcome = Outcome::kError;
    spec.message = e.what();
  }
  return spec;
}

}  // namespace thalweg::ascend
