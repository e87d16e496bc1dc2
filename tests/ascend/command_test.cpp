// The exit codes and messages of `thalweg plan`.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "thalweg/ascend/plan.h"
#include "thalweg/ascend/process.h"
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
  EXPECT_EQ(tool({"--target", "ascend910b3", good, "--split"}), 1);
  EXPECT_EQ(tool({"--target", "ascend910b3", good, "--json", "--emit", "-"}), 1);
  for (const char* wrong : {"gated_delta_rule.bwd/dv_local:bf16,T64,H0,K64", "gated_delta_rule.bwd/dv_local:bf16,T64,H1,K0", "gated_delta_rule.bwd/dv_local:bf16,T64,H4,HV6,K64"})
    EXPECT_EQ(tool({"--target", "ascend910b3", wrong}), 1) << wrong;
  EXPECT_EQ(tool({"--target", "ascend910b3", "gated_delta_rule.bwd/dv_local:bf16,T70,H1,K64,g", "--interior", "--execute"}), 1);
  EXPECT_EQ(tool({"--target", "ascend910b3", good, "--emit", "/nonexistent/k.mlir"}), 1);
  EXPECT_EQ(tool({"--target", "ascend910b3", good, "--lower", "--ascend-bin", "/nonexistent"}), 4);
  std::string out = ::testing::internal::GetCapturedStdout(), err = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(out.find("need      UB 26112 (13 %), L1 16384 (3 %), L0C 16384 (12 %)"), std::string::npos) << out;
  EXPECT_NE(out.find("verdict   overflow: UB 225792 of 196608"), std::string::npos) << out;
  EXPECT_NE(err.find("plan: --lower: bishengir-opt not found (--ascend-bin, THALWEG_ASCEND_BIN, PATH)"), std::string::npos) << err;
}

// Stand-ins for the compiler: of another version, and one that dies. Each says so and ends with 4, and leaves nothing here.
TEST(AscendCommand, ToolsThatFail) {
  if (!find_kernel("gated_delta_rule.bwd/dv_local")) GTEST_SKIP() << "this build has no gated_delta_rule";
  const std::pair<const char*, const char*> tools[] = {
      {"echo bishengir-opt 1.1.0", "version, got 'bishengir-opt 1.1.0', expected 'bishengir-opt 1.2.0'"},
      {"[ \"$1\" = --version ] && echo bishengir-opt 1.2.0 || kill -SEGV $$", "bishengir-opt: died of signal 11"},
      {"[ \"$1\" = --version ] && echo bishengir-opt 1.2.0 || exit 3", "bishengir-opt: exit 3: no text on stderr"}};
  Folder here;
  const std::filesystem::path from = std::filesystem::current_path();
  std::filesystem::current_path(here.path());
  for (const auto& [body, message] : tools) {
    Folder bin;
    const std::string path = (bin / "bishengir-opt").string();
    std::ofstream(path) << "#!/bin/sh\n" << body << "\n";
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(tool({"--target", "ascend910b3", "gated_delta_rule.bwd/dv_local:bf16,T2048,H8,K64,g", "--lower", "--ascend-bin", bin.path().c_str()}), 4);
    ::testing::internal::GetCapturedStdout();
    const std::string err = ::testing::internal::GetCapturedStderr();
    EXPECT_NE(err.find(message), std::string::npos) << err;
  }
  EXPECT_TRUE(std::filesystem::is_empty(here.path()));
  std::filesystem::current_path(from);
}

}  // namespace
}  // namespace thalweg::ascend
