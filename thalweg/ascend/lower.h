// Runs the public compiler (the Python package ascendnpu-ir) on a kernel's text and reads its verdict.
#ifndef THALWEG_ASCEND_LOWER_H
#define THALWEG_ASCEND_LOWER_H

#include <map>
#include <string>

#include "thalweg/ascend/hivm.h"
#include "thalweg/ascend/plan.h"

namespace thalweg::ascend {

inline constexpr char kToolVersion[] = "bishengir-opt 1.2.0";

enum class Outcome {
  kFits,      // lowered to the last representation
  kOverflow,  // refused for on-chip memory
  kAbsent,    // no tool
  kVersion,   // a tool of another version
  kCrash,     // it died of a signal
  kTimeOut,   // it was ended after the limit
  kError      // it refused our text, or its answer could not be read: a fault of this project
};

struct Lowered {
  Outcome outcome = Outcome::kError;
  std::string message;  // one line, unless it fits
  // Of the last representation; not on the a5 targets, whose tool prints nothing but what it allocated.
  Dump dump;
  std::map<std::string, int64_t> need;    // by space (ub, cbuf, cc), bytes; from the memory files
  std::map<std::string, int64_t> placed;  // bytes
  std::string space;                      // of an overflow
  int64_t required = 0, available = 0;    // likewise, bytes

  bool has_verdict() const { return outcome == Outcome::kFits || outcome == Outcome::kOverflow; }
};

struct Tools {
  std::string bin;       // folder of the tools; "": THALWEG_ASCEND_BIN, then PATH
  double seconds = 60;   // limit of one run
};

// The path of the tool for a target, or "".
std::string find_tool(const Target&, const Tools&);
// Why a run is not possible (no tool, another version), or "".
Outcome check_tool(const Target&, const Tools&, std::string* message);

// Every run has a fresh folder of its own under the system's temporary one, which is removed afterwards. `rows` as in
// parse_dump. Never throws for what the tool does.
Lowered lower(const std::string& text, const Target&, Buffering, int64_t rows, const Tools& = {});
Lowered lower(const Plan&, const std::string& text, const Tools& = {});

// Where a plan and the compiler's answer differ, each as "UB: planner 26112, compiler 26144"; empty: nowhere. `verdict`
// alone, or also needs, bytes, bursts, workspace and scalar accesses.
std::vector<std::string> verdict_differences(const Plan&, const Lowered&);
std::vector<std::string> differences(const Plan&, const Lowered&);

// The device table's entries as the tool prints them, bits: "UB_SIZE" and so on.
struct Spec {
  Outcome outcome = Outcome::kError;
  std::string message;
  std::map<std::string, int64_t> entries;
};
Spec device_spec(const Target&, const Tools& = {});

// "ub" -> "UB", "cbuf" -> "L1", "cc" -> "L0C".
std::string space_name(const std::string& space);

}  // namespace thalweg::ascend
#endif
