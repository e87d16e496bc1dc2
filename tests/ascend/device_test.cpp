// The table of devices: names, and every number against the tool that knows them.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "tests/ascend/tools.h"
#include "thalweg/ascend/lower.h"

namespace thalweg::ascend {
namespace {

TEST(AscendDevice, NamesAreFoundInAnyCase) {
  ASSERT_NE(find_target("ascend910b3"), nullptr);
  EXPECT_EQ(find_target("ascend910b3")->aic, 20);
  EXPECT_EQ(find_target("ASCEND910B1")->aiv, 48);
  EXPECT_EQ(find_target("ascend910b"), nullptr);
  EXPECT_EQ(find_target(""), nullptr);
  std::set<std::string> names;
  for (const Target& target : targets()) EXPECT_TRUE(names.insert(target.name).second) << target.name;
}

TEST(AscendDevice, TableIsTheTools) {
  std::string reason;
  check_tool(*find_target("Ascend910B3"), {}, &reason);
  if (reason.empty()) check_tool(*find_target("Ascend950PR_957b"), {}, &reason);
  if (std::string why = missing(reason.empty(), reason); !why.empty()) GTEST_SKIP() << why;
  for (const Target& target : targets()) {
    Spec spec = device_spec(target);
    ASSERT_EQ(spec.outcome, Outcome::kFits) << target.name << ": " << spec.message;
    auto bytes = [&](const char* entry) { return spec.entries[entry] / 8; };
    EXPECT_EQ(target.aic, spec.entries["CUBE_CORE_COUNT"]) << target.name;
    EXPECT_EQ(target.aiv, spec.entries["VECTOR_CORE_COUNT"]) << target.name;
    EXPECT_EQ(target.ub, bytes("UB_SIZE")) << target.name;
    EXPECT_EQ(target.l1, bytes("L1_SIZE")) << target.name;
    EXPECT_EQ(target.l0a, bytes("L0A_SIZE")) << target.name;
    EXPECT_EQ(target.l0b, bytes("L0B_SIZE")) << target.name;
    EXPECT_EQ(target.l0c, bytes("L0C_SIZE")) << target.name;
    EXPECT_EQ(kAlign, bytes("UB_ALIGN_SIZE")) << target.name;
    EXPECT_EQ(kAlign, bytes("L1_ALIGN_SIZE")) << target.name;
    EXPECT_EQ(kAlignL0c, bytes("L0C_ALIGN_SIZE")) << target.name;
  }
}

}  // namespace
}  // namespace thalweg::ascend
