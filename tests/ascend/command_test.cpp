// The exit codes and messages of `thalweg plan`.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "thalweg/ascend/plan.h"
#include "tools/thalweg/tool.h"

namespace thalweg::ascend {
namespace {

int tool(std::vector<const char*> args) {
  args.insert(args.begin(), {"thalweg", "plan"});
  return tool::run_tool(int(args.size()), args.data());
}

TEST(AscendCommand, ExitCodes) {
  if (!find_kernel("gated_delta_rule.bwd/dv_local")) GTEST_SKIP() << "this build has no gated_delta_rule";
  const char* good = "gated_delta_rule.bwd/dv_local:bf16,T2048,H8,K64,g";
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(tool({"--target", "ascend910b3", good}), 0);
  EXPECT_EQ(tool({"--target", "ascend910b3", good, "--json"}), 0);
  EXPECT_EQ(tool({"--target", "ascend910b9", good}), 1);
  EXPECT_EQ(tool({"--target", "ascend910b3", "gated_delta_rule.bwd:bf16"}), 1);
  EXPECT_EQ(tool({"--target", "ascend910b3", good, "--mode", "fast"}), 1);
  EXPECT_EQ(tool({"--target", "ascend910b3", good, "--tile", "BT=x"}), 1);
  EXPECT_EQ(tool({"--target", "ascend910b3", good, "--no-such"}), 1);
  EXPECT_EQ(tool({good}), 1);
  EXPECT_EQ(tool({"--target", "ascend910b3", good, "--tile", "BT=192"}), 2);
  EXPECT_EQ(tool({"--target", "ascend910b3", good, "--tile", "BT=24"}), 2);
  EXPECT_EQ(tool({"--target", "ascend910b3", good, "--lower", "--ascend-bin", "/nonexistent"}), 4);
  std::string out = ::testing::internal::GetCapturedStdout(), err = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(out.find("need      UB 26112 (13 %), L1 16384 (3 %), L0C 16384 (12 %)"), std::string::npos) << out;
  EXPECT_NE(out.find("verdict   overflow: UB 225792 of 196608"), std::string::npos) << out;
  EXPECT_NE(err.find("plan: --lower: bishengir-opt not found (--ascend-bin, THALWEG_ASCEND_BIN, PATH)"), std::string::npos) << err;
}

}  // namespace
}  // namespace thalweg::ascend
