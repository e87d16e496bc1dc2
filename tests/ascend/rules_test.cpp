// Rules of the original work that are no kernel's: what the compiler says of the texts that they warn of.
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "tests/ascend/plans.h"
#include "tests/ascend/tools.h"
#include "thalweg/ascend/lower.h"

namespace thalweg::ascend::tests {
namespace {

#define THALWEG_NEEDS_COMPILER()                                                                                \
  std::string reason;                                                                                           \
  check_tool(*find_target("Ascend910B3"), {}, &reason);                                                         \
  if (std::string why = missing(reason.empty(), reason); !why.empty()) GTEST_SKIP() << why

std::string replaced(std::string text, std::initializer_list<std::pair<const char*, std::string>> changes) {
  for (const auto& [from, to] : changes) {
    EXPECT_NE(text.find(from), std::string::npos) << from;
    for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) text.replace(at, std::string(from).size(), to);
  }
  return text;
}

// How many of the N bytes before each are set, by a matrix of compares: bytes STRIDE apart, the sum along AXIS, in f16.
constexpr char kCount[] = R"(module {
  func.func @mask_count(%lock: memref<?xi8>, %ws: memref<?xi8>, %mask: memref<?xi8>, %count: memref<?xf16>,
      %nx: i32, %ny: i32, %nz: i32, %px: i32, %py: i32, %pz: i32)
      attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local"} {
    %zero = arith.constant 0.0 : f16  %n = arith.constant N : index  %p = arith.index_cast %px : i32 to index
    %row = arith.muli %p, %n : index
    %in = memref.reinterpret_cast %mask to offset: [%PLACE], sizes: [N], strides: [STRIDE]
        : memref<?xi8> to memref<Nxi8, strided<[STRIDE], offset: ?>>
    %buffer = memref.alloc() : memref<Nxi8>
    memref.copy %in, %buffer : memref<Nxi8, strided<[STRIDE], offset: ?>> to memref<Nxi8>
    %bytes = bufferization.to_tensor %buffer restrict writable : memref<Nxi8>
    %set = arith.sitofp %bytes : tensor<Nxi8> to tensor<Nxf16>
    %e = tensor.empty() : tensor<Nxi32>
    %k = linalg.generic {indexing_maps = [affine_map<(a) -> (a)>], iterator_types = ["parallel"]} outs(%e : tensor<Nxi32>) {
    ^bb0(%old: i32):
      %at = linalg.index 0 : index
      %number = arith.index_cast %at : index to i32
      linalg.yield %number : i32
    } -> tensor<Nxi32>
    %ei = tensor.empty() : tensor<NxNxi32>  %ef = tensor.empty() : tensor<NxNxf16>
    %i = linalg.broadcast ins(%k : tensor<Nxi32>) outs(%ei : tensor<NxNxi32>) dimensions = [AXIS]
    %j = linalg.broadcast ins(%k : tensor<Nxi32>) outs(%ei : tensor<NxNxi32>) dimensions = [OTHER]
    %before = arith.cmpi slt, %j, %i : tensor<NxNxi32>
    %all = linalg.broadcast ins(%set : tensor<Nxf16>) outs(%ef : tensor<NxNxf16>) dimensions = [OTHER]
    %zeros = linalg.fill ins(%zero : f16) outs(%ef : tensor<NxNxf16>) -> tensor<NxNxf16>
    %terms = arith.select %before, %all, %zeros : tensor<NxNxi1>, tensor<NxNxf16>
    %e1 = tensor.empty() : tensor<Nxf16>  %start = linalg.fill ins(%zero : f16) outs(%e1 : tensor<Nxf16>) -> tensor<Nxf16>
    %sum = linalg.reduce { arith.addf } ins(%terms : tensor<NxNxf16>) outs(%start : tensor<Nxf16>) dimensions = [AXIS]
    %out = memref.reinterpret_cast %count to offset: [%row], sizes: [N], strides: [1]
        : memref<?xf16> to memref<Nxf16, strided<[1], offset: ?>>
    bufferization.materialize_in_destination %sum in writable %out
        : (tensor<Nxf16>, memref<Nxf16, strided<[1], offset: ?>>) -> ()
    return
  }
}
)";

Lowered count(int64_t n, bool column, int axis) {
  const std::string N = std::to_string(n);
  const std::string text = replaced(kCount, {{"STRIDE", column ? "128" : "1"},
                                             {"PLACE", column ? "p" : "row"},
                                             {"AXIS", std::to_string(axis)},
                                             {"OTHER", std::to_string(1 - axis)},
                                             {"constant N", "constant " + N},
                                             {"[N]", "[" + N + "]"},
                                             {"<NxNx", "<" + N + "x" + N + "x"},
                                             {"<Nx", "<" + N + "x"}});
  return lower(text, *find_target("Ascend910B3"), Buffering::kCube, n);
}

// A column of a byte mask that feeds a count along the fast axis, and both cures: along the slow axis, and a row.
TEST(AscendRules, AColumnOfTheMaskOverflowsWhereARowFits) {
  THALWEG_NEEDS_COMPILER();
  EXPECT_EQ(count(64, true, 1).message, "UB 397312 of 196608");
  EXPECT_EQ(count(128, true, 1).message, "UB 1581056 of 196608");
  EXPECT_EQ(count(32, true, 1).outcome, Outcome::kFits);
  for (const int axis : {0, 1}) EXPECT_EQ(count(128, false, axis).outcome, Outcome::kFits) << axis;
  const Lowered row = count(128, false, 0), column = count(128, true, 0);
  ASSERT_EQ(column.outcome, Outcome::kFits) << column.message;
  EXPECT_EQ(row.need.at("ub"), 135936);
  EXPECT_EQ(column.need.at("ub"), 139776);
  EXPECT_EQ(row.dump.find(false)->sum(false).bursts, 1);
  EXPECT_EQ(column.dump.find(false)->sum(false).bursts, 128);
}

// The mask of dv_local by compares of 64 bits: a loop of scalar loads and stores, and more of UB.
TEST(AscendRules, ComparesOf64BitsAreScalarCode) {
  THALWEG_NEEDS_COMPILER();
  const Plan plan = chunk_plan("dv_local", {.T = 256, .H = 8, .HV = 8}, Gate::kHeadsFirst, Mode::kSingle, false);
  const Kernel* kernel = find_kernel(plan.problem.kernel);
  if (!kernel) GTEST_SKIP() << "built without gated_delta_rule";
  const std::string text = kernel->emit(plan);
  const Lowered narrow = lower(plan, text);
  const Lowered wide = lower(plan, replaced(text, {{"64xi32>", "64xi64>"}, {"%old: i32", "%old: i64"}, {"index to i32  //", "index to i64  //"}, {"%number : i32", "%number : i64"}}));
  ASSERT_EQ(narrow.outcome, Outcome::kFits) << narrow.message;
  ASSERT_EQ(wide.outcome, Outcome::kFits) << wide.message;
  EXPECT_EQ(narrow.need.at("ub"), 26112);
  EXPECT_EQ(wide.need.at("ub"), 41472);
  EXPECT_EQ(narrow.dump.find(false)->scalar_loops, 0);
  EXPECT_EQ(wide.dump.find(false)->scalar_loops, 1);
  EXPECT_EQ(wide.dump.find(false)->scalar_accesses, 3);
}

// The original work saw atomics fail on the device; this compiler takes them, so that its word is no proof there.
TEST(AscendRules, AtomicsLowerWithoutComplaint) {
  THALWEG_NEEDS_COMPILER();
  const Lowered lowered = lower(R"(module {
  func.func @add(%lock: memref<?xi8>, %ws: memref<?xi8>, %x: memref<?xf32>, %y: memref<?xf32>,
      %nx: i32, %ny: i32, %nz: i32, %px: i32, %py: i32, %pz: i32)
      attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local"} {
    %c0 = arith.constant 0 : index  %p = arith.index_cast %px : i32 to index
    %from = memref.reinterpret_cast %x to offset: [%p], sizes: [1], strides: [1] : memref<?xf32> to memref<1xf32, strided<[1], offset: ?>>
    %v = memref.load %from[%c0] : memref<1xf32, strided<[1], offset: ?>>
    %to = memref.reinterpret_cast %y to offset: [0], sizes: [1], strides: [1] : memref<?xf32> to memref<1xf32, strided<[1]>>
    %old = memref.atomic_rmw addf %v, %to[%c0] : (f32, memref<1xf32, strided<[1]>>) -> f32
    return
  }
}
)", *find_target("Ascend910B3"), Buffering::kCube, 1);
  EXPECT_EQ(lowered.outcome, Outcome::kFits) << lowered.message;
}

}  // namespace
}  // namespace thalweg::ascend::tests
