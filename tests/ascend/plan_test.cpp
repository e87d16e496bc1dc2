// The planner's arithmetic: the original work's rules, splits, grids and refusals.
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "thalweg/ascend/plan.h"

namespace thalweg::ascend {
namespace {

const Target& b3() { return *find_target("Ascend910B3"); }
bool has(const char* kernel) { return find_kernel(kernel) != nullptr; }

Plan plan_of(const std::string& text, Options options = {}) { return make_plan(parse_problem(text), b3(), options); }

std::string message(const std::string& text) {
  try {
    parse_problem(text);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

TEST(AscendPlan, GateRowsFollowTheBudget) {
  if (!has("kda_gate.fwd")) GTEST_SKIP() << "this build has no kda_gate";
  auto rows = [](int64_t T, int64_t D) {
    return plan_of("kda_gate.fwd:bf16,T" + std::to_string(T) + ",HV2,K" + std::to_string(D) + ",A_log").tile.BT;
  };
  EXPECT_EQ(rows(4096, 64), 128);
  EXPECT_EQ(rows(4096, 96), 64);
  EXPECT_EQ(rows(4096, 128), 64);
  EXPECT_EQ(rows(4096, 256), 32);
  EXPECT_EQ(rows(32, 64), 32);
  EXPECT_EQ(rows(33, 64), 64);
  EXPECT_EQ(rows(128, 64), 64);
  EXPECT_EQ(rows(129, 64), 128);
  EXPECT_EQ(rows(4096, 20000), 1);
  Options next;  // the next power of two does not fit
  next.tile.BT = 128;
  EXPECT_EQ(plan_of("kda_gate.fwd:bf16,T4096,HV2,K128,A_log").overflow(), "");
  EXPECT_EQ(plan_of("kda_gate.fwd:bf16,T4096,HV2,K128,A_log", next).overflow(), "UB 262176 of 196608");
}

TEST(AscendPlan, LocalDvIsTheDocumentsExample) {
  if (!has("gated_delta_rule.bwd/dv_local")) GTEST_SKIP() << "this build has no gated_delta_rule";
  Plan plan = plan_of("gated_delta_rule.bwd/dv_local:bf16,B2,T2048,H4,HV8,K64,V64,g");
  EXPECT_EQ(Need::sum(plan.need.ub), 26112);
  EXPECT_EQ(Need::sum(plan.need.l1), 16384);
  EXPECT_EQ(Need::sum(plan.need.l0c), 16384);
  EXPECT_EQ(traffic(plan.moves, false, false).bursts, 2);
  EXPECT_EQ(traffic(plan.other_moves, false, false).bursts, 65);
  EXPECT_EQ(traffic(plan.moves, false, false).bytes, traffic(plan.other_moves, false, false).bytes);
  EXPECT_EQ(traffic(plan.moves, true, false).bursts, 193);
  EXPECT_EQ(traffic(plan.moves, true, true).bursts, 65);
  EXPECT_EQ(plan.workspace, 24576);
  EXPECT_EQ(plan.split.tasks, 512);
  EXPECT_EQ(plan.split.stride_max, 26);
  EXPECT_EQ(plan.split.range_max, 32);
  EXPECT_EQ(plan.split.grid, (std::vector<int64_t>{32, 16}));
  EXPECT_FALSE(plan.boundary);
  EXPECT_TRUE(plan.fits());
  auto refused = std::find_if(plan.larger.begin(), plan.larger.end(), [](const Trial& t) { return !t.refused.empty(); });
  ASSERT_NE(refused, plan.larger.end());
  EXPECT_EQ(refused->tile.BT, 256);
}

TEST(AscendPlan, RaggedBatchesSplitByChunks) {
  if (!has("gated_delta_rule.bwd/dv_local")) GTEST_SKIP() << "this build has no gated_delta_rule";
  Plan plan = plan_of("gated_delta_rule.bwd/dv_local:bf16,H2,K64,V64,g,varlen=1+64+0+65+6400");
  EXPECT_EQ(plan.split.chunks, 1 + 1 + 0 + 2 + 100);
  EXPECT_EQ(plan.split.tasks, 208);
  EXPECT_EQ(plan.split.stride_max, 11);      // of 20 cores
  EXPECT_EQ(plan.split.range_max, 6 * 2);    // 6 chunks of 104, both heads
  EXPECT_TRUE(plan.boundary);
  EXPECT_FALSE(plan_of("gated_delta_rule.bwd/dv_local:bf16,H2,K64,V64,g,varlen=64+128").boundary);
}

TEST(AscendPlan, LaunchesStayWithinTheGridsProduct) {
  if (!has("kda_gate.fwd")) GTEST_SKIP() << "this build has no kda_gate";
  Plan plan = plan_of("kda_gate.fwd:bf16,T4194304,HV7,K128,A_log");  // 65536 tiles of 7 heads
  int64_t at = 0;
  ASSERT_GT(plan.split.segments.size(), 1u);
  for (const auto& segment : plan.split.segments) {
    EXPECT_EQ(segment.offset, at);
    EXPECT_LE(segment.count * 7, kMaxGrid);
    at += segment.count;
  }
  EXPECT_EQ(at, 65536);
  Options persistent;
  persistent.mode = Mode::kPersistent;
  EXPECT_EQ(plan_of("kda_gate.fwd:bf16,T4194304,HV7,K128,A_log", persistent).split.grid, std::vector<int64_t>{40});
  EXPECT_NE(plan_of("kda_gate.fwd:bf16,T8,HV65536,K8").refused, "");
}

TEST(AscendPlan, BlockSparseTilesDivideTheirBlocks) {
  if (!has("block_sparse_attention.bwd/dkdv")) GTEST_SKIP() << "this build has no block_sparse_attention";
  auto tile = [](int64_t block_q, int64_t block_k) {
    return plan_of("block_sparse_attention.bwd/dkdv:bf16,T2048,H8,K128,block_q=" + std::to_string(block_q) + ",block_k=" + std::to_string(block_k));
  };
  const std::pair<int64_t, int64_t> queries[] = {{128, 64}, {96, 48}, {64, 64}, {32, 32}, {16, 16}, {48, 48}, {144, 48}};
  for (auto [block, BM] : queries) EXPECT_EQ(tile(block, 64).tile.BM, BM) << block;
  const std::pair<int64_t, int64_t> keys[] = {{16, 16}, {32, 32}, {48, 48}, {64, 32}, {80, 16}, {96, 32}, {128, 32}};
  for (auto [block, BT] : keys) EXPECT_EQ(tile(64, block).tile.BT, BT) << block;
  EXPECT_NE(tile(40, 64).refused, "");  // none divides 40: never min(block, 64)
  Options sums;
  sums.tile.BM = 64, sums.tile.BT = 128;
  EXPECT_EQ(plan_of("block_sparse_attention.bwd/dkdv:bf16,T2048,H8,K128", sums).overflow(), "L0C 163840 of 131072");
  Options rows;
  rows.tile.BM = 128, rows.tile.BT = 64;
  EXPECT_EQ(plan_of("block_sparse_attention.bwd/dkdv:bf16,T2048,H8,K128", rows).overflow(), "L1 589824 of 524288");
  rows.buffering = Buffering::kOff;
  EXPECT_TRUE(plan_of("block_sparse_attention.bwd/dkdv:bf16,T2048,H8,K128", rows).fits());
}

// Tasks are sub-blocks of keys of the key heads; queries and keys may each be cut.
TEST(AscendPlan, BlockSparseTasksLieAlongTheKeys) {
  if (!has("block_sparse_attention.bwd/dkdv")) GTEST_SKIP() << "this build has no block_sparse_attention";
  auto plan = [](const std::string& sizes) { return plan_of("block_sparse_attention.bwd/dkdv:bf16,B3," + sizes + ",H8,HK2,K64,block_q=64,block_k=64"); };
  EXPECT_EQ(plan("T128,S256").split.grid, (std::vector<int64_t>{8, 6}));
  EXPECT_EQ(plan("T128,S256").split.tasks, 48);
  EXPECT_FALSE(plan("T128,S256").boundary);
  EXPECT_TRUE(plan("T200,S256").boundary);
  EXPECT_TRUE(plan("T128,S250").boundary);
}

TEST(AscendPlan, TopKSplitsChannelsOnlyAsNeeded) {
  if (!has("sparse_flash_attention.bwd/dkdv")) GTEST_SKIP() << "this build has no sparse_flash_attention";
  Plan many = plan_of("sparse_flash_attention.bwd/dkdv:bf16,T8192,H4,K512,V512,E1024,v");
  EXPECT_EQ(many.tile.BT, 128);
  EXPECT_EQ(many.tile.V, 64);  // both sums: 64 KiB
  EXPECT_EQ(many.tile.BM, 32);
  Plan few = plan_of("sparse_flash_attention.bwd/dkdv:bf16,T256,H4,K512,V512,E64,v");
  EXPECT_EQ(few.tile.V, 32);  // two tiles of keys: 16 parts fill 20 cores
  EXPECT_EQ(plan_of("sparse_flash_attention.bwd/dkdv:bf16,T256,H24,K512,V512,E64,v").tile.BM, 48);
}

TEST(AscendPlan, WhatNoKernelCoversIsSaid) {
  if (!has("gated_delta_rule.bwd/dv_local") || !has("kda_gate.fwd")) GTEST_SKIP() << "this build lacks an operator";
  EXPECT_NE(message("gated_delta_rule.bwd:bf16,T8,H1,K8").find("expected one of gated_delta_rule.bwd/cumsum gated_delta_rule.bwd/dv_local"), std::string::npos);
  EXPECT_NE(message("nothing.fwd:bf16").find("kernel, got 'nothing.fwd', expected one of those that are planned"), std::string::npos);
  EXPECT_NE(message("gated_delta_rule.bwd/dv_local:f32,T8,H1,K8").find("dtype, got f32, expected bf16 or f16"), std::string::npos);
  EXPECT_NE(message("kda_gate.fwd:f64,T8,HV1,K8").find("no kernel covers it"), std::string::npos);
  if (has("block_sparse_attention.bwd/dkdv")) {
    EXPECT_NE(message("block_sparse_attention.bwd/dkdv:bf16,T64,H1,K16,q_lens").find("q_lens, got one, expected none"), std::string::npos);
  }
  EXPECT_NE(message("gated_delta_rule.fwd/cumsum:bf16,T8,H1,K8").find("g, got none"), std::string::npos);
  EXPECT_NE(message("kda_gate.fwd:bf16,T8,HV1,K8,nonsense").find("'nonsense'"), std::string::npos);
  EXPECT_NE(message(""), "");
}

// Also with no tokens, one token, and nothing packed.
TEST(AscendPlan, SmallProblemsHavePlans) {
  for (const Kernel* kernel : kernels()) {
    std::string name = kernel->name;
    for (const char* T : {"T0", "T1", "T17"}) {
      std::string text = name + ":bf16," + T + (name.starts_with("kda") ? ",HV1,K8" : ",H1,K16") + (name.find("cumsum") != std::string::npos ? ",g" : "") +
                         (name.starts_with("sparse") ? ",E4,v" : "");
      for (Mode mode : {Mode::kSingle, Mode::kPersistent}) {
        Options options;
        options.mode = mode;
        Plan plan = plan_of(text, options);
        EXPECT_GE(plan.split.tasks, 0) << text;
        EXPECT_LE(plan.split.stride_max * 1, std::max<int64_t>(plan.split.range_max, plan.split.tasks)) << text;
      }
    }
  }
}

}  // namespace
}  // namespace thalweg::ascend
