// The driver of the compiler: every way that it can fail, by stand-ins that are shell scripts; and one case that does not fit.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "tests/ascend/tools.h"
#include "thalweg/ascend/lower.h"
#include "thalweg/ascend/process.h"

namespace thalweg::ascend {
namespace {

namespace fs = std::filesystem;

// A stand-in for bishengir-opt: `version` is what it says of itself, `body` what it does with a text.
Lowered with_tool(const std::string& version, const std::string& body, double seconds = 60) {
  Folder folder;
  std::string path = (folder / "bishengir-opt").string();
  std::ofstream(path) << "#!/bin/sh\nif [ \"$1\" = --version ]; then echo '" << version << "'; exit 0; fi\n" << body << "\n";
  ::chmod(path.c_str(), 0700);
  return lower("module {\n}\n", *find_target("Ascend910B3"), Buffering::kCube, 64, {folder.path(), seconds});
}

constexpr char kGood[] = "bishengir-opt 1.2.0 (somewhere 8796a8ac1508)";

int64_t files_in(const fs::path& folder) { return std::distance(fs::directory_iterator(folder), fs::directory_iterator()); }

TEST(AscendLower, EveryFailureHasItsOwnMessage) {
  Folder here;
  fs::path from = fs::current_path();
  fs::current_path(here.path());
  Folder empty;
  Lowered absent = lower("", *find_target("Ascend910B3"), Buffering::kCube, 64, {empty.path()});
  EXPECT_EQ(absent.outcome, Outcome::kAbsent);
  EXPECT_EQ(absent.message, "bishengir-opt not found (--ascend-bin, THALWEG_ASCEND_BIN, PATH); it comes with the Python package ascendnpu-ir==1.2.0");

  Lowered old = with_tool("bishengir-opt 1.1.0 (x)", "exit 0");
  EXPECT_EQ(old.outcome, Outcome::kVersion);
  EXPECT_NE(old.message.find("version, got 'bishengir-opt 1.1.0', expected 'bishengir-opt 1.2.0'"), std::string::npos) << old.message;
  EXPECT_EQ(with_tool("bishengir-opt 1.2.01", "exit 0").outcome, Outcome::kVersion);

  Lowered crash = with_tool(kGood, "kill -ABRT $$");
  EXPECT_EQ(crash.outcome, Outcome::kCrash);
  EXPECT_NE(crash.message.find("died of signal 6"), std::string::npos) << crash.message;

  Lowered slow = with_tool(kGood, "exec sleep 30", 1);
  EXPECT_EQ(slow.outcome, Outcome::kTimeOut);
  EXPECT_NE(slow.message.find("ended after the limit of 1 s"), std::string::npos) << slow.message;

  Lowered wrong = with_tool(kGood, "echo \"k.mlir:3:1: error: something else\" >&2; exit 1");
  EXPECT_EQ(wrong.outcome, Outcome::kError);
  EXPECT_EQ(wrong.message, "bishengir-opt: exit 1: something else");
  EXPECT_NE(with_tool(kGood, "exit 1").message.find("no text on stderr"), std::string::npos);
  EXPECT_EQ(with_tool(kGood, "exit 0").outcome, Outcome::kError);  // no output file

  Lowered unreadable = with_tool(kGood, "echo > k.hivm.mlir");
  EXPECT_EQ(unreadable.outcome, Outcome::kError);
  EXPECT_NE(unreadable.message.find("dump: got no"), std::string::npos) << unreadable.message;

  Lowered overflow = with_tool(kGood, "echo 'k.mlir:1:1: error: cbuf overflow, requires 4718592 bits while 4194304 bits available! (possible' >&2; exit 1");
  EXPECT_EQ(overflow.outcome, Outcome::kOverflow);
  EXPECT_EQ(overflow.message, "L1 589824 of 524288");
  EXPECT_EQ(files_in(here.path()), 0);  // nothing is left behind
  fs::current_path(from);
}

// The largest gate tile of 64 channels, and one more row, by the compiler itself.
TEST(AscendLower, OneRowTooManyOverflows) {
  const Target& target = *find_target("Ascend910B3");
  std::string reason;
  check_tool(target, {}, &reason);
  if (std::string why = missing(reason.empty(), reason); !why.empty()) GTEST_SKIP() << why;
  if (!find_kernel("kda_gate.fwd")) GTEST_SKIP() << "this build has no kda_gate";
  for (int64_t BT : {191, 192}) {
    Options options;
    options.tile.BT = BT;
    Plan plan = make_plan(parse_problem("kda_gate.fwd:bf16,T2000,HV16,K64,A_log"), target, options);
    Lowered lowered = lower(plan, find_kernel("kda_gate.fwd")->emit(plan));
    EXPECT_EQ(lowered.outcome, BT == 191 ? Outcome::kFits : Outcome::kOverflow) << lowered.message;
    EXPECT_EQ(plan.fits(), BT == 191);
    if (BT == 192) {
      EXPECT_EQ(lowered.message, "UB 196640 of 196608");
      EXPECT_EQ(plan.overflow(), lowered.message);
    }
  }
}

}  // namespace
}  // namespace thalweg::ascend
