// Every generated text, executed on the host and compared with the float64 reference of its stage. Outputs start as
// NaN, canaries lie around every tensor, inputs must stay as they are.
//
// This checks the mathematics of the text: addresses, strides, masks, formulas. It does not check what the device adds:
// placement in on-chip memory, synchronisation of its cores, transfers, and its own exp, log and order of sums.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/ascend/plans.h"
#include "tests/ascend/tools.h"
#include "thalweg/ascend/execute.h"

namespace thalweg::ascend::tests {
namespace {

// Null: its operator is not built, or it is not executed.
const Kernel* kernel_of(const Plan& plan) {
  const Kernel* kernel = find_kernel(plan.problem.kernel);
  return kernel && kernel->emit && kernel->scene ? kernel : nullptr;
}

// Skips the test where the operator or the tools are missing.
#define THALWEG_NEEDS(plan)                                                     \
  if (!kernel_of(plan)) GTEST_SKIP() << "no text of " << (plan).problem.kernel; \
  if (std::string why = missing(missing_host_tool().empty(), missing_host_tool()); !why.empty()) GTEST_SKIP() << why

std::string text_of(const Executed& x) {
  std::string text = x.error;
  for (const Executed::Output& o : x.outputs)
    text += " " + o.name + " " + std::to_string(o.worst) + " of " + std::to_string(o.limit) + " at " +
            std::to_string(o.worst_at) + (o.guards_intact ? "" : ", written outside");
  return text + (x.inputs_intact ? "" : " an input was written");
}

// One text; the plan may get other sizes afterwards, as long as they are not written into the text.
struct Compiled {
  Plan plan;
  HostProgram program;

  explicit Compiled(const Plan& p) : plan(p), program(kernel_of(p)->emit(p), scene(p)) {}

  static Scene scene(const Plan& p) { return kernel_of(p)->scene(p); }
  // All tiles, in two launches where there is more than one: `first` is not always 0.
  Executed run(const Plan& p) const {
    const Scene s = scene(p);
    const int64_t half = s.tiles / 2;
    return execute(p, s, {{&program, 0, half}, {&program, half, s.tiles - half}});
  }
  void expect_right(const Plan& p, const std::string& what) const {
    const Executed x = run(p);
    EXPECT_TRUE(x.ok()) << p.problem.kernel << " " << what << ":" << text_of(x);
    for (const Executed::Output& o : x.outputs)
      std::printf("  %s %s: %s %.2g of %.2g\n", p.problem.kernel.c_str(), what.c_str(), o.name.c_str(), o.worst,
                  o.limit);
  }
};

Plan with_tokens(Plan plan, int64_t T) {
  plan.problem.T = T;
  return plan;
}

// ---- The KDA gate ----

TEST(AscendExecution, KdaGateForwardOfAnyLength) {
  const Plan plan = gate_plan("fwd", {.T = 1000}, Mode::kSingle, true);
  THALWEG_NEEDS(plan);
  const Compiled code(plan);
  for (const int64_t T : {1, 37, 63, 64, 65, 129, 1000, 2048})
    code.expect_right(with_tokens(plan, T), "T " + std::to_string(T));
}

TEST(AscendExecution, KdaGateForwardOfEveryDtype) {
  const Plan first = gate_plan("fwd", {.T = 256}, Mode::kPersistent, false);
  THALWEG_NEEDS(first);
  const thalweg_dtype dtypes[][2] = {
      {THALWEG_F32, THALWEG_F32}, {THALWEG_F16, THALWEG_BF16}, {THALWEG_BF16, THALWEG_BF16}};  // x, g
  for (const auto& [x, g] : dtypes) {
    const bool optional = x == THALWEG_F32;
    const Plan plan = gate_plan("fwd", {.T = 256, .K = 64, .x = x, .g = g, .A_log = optional, .dt_bias = !optional},
                                Mode::kPersistent, false);
    Compiled(plan).expect_right(plan, "x " + std::to_string(x) + " g " + std::to_string(g));
  }
}

TEST(AscendExecution, KdaGateBackward) {
  const Plan plan = gate_plan("bwd", {.T = 200, .BT = 32}, Mode::kSingle, true);
  THALWEG_NEEDS(plan);
  const Compiled code(plan);
  for (const int64_t T : {1, 32, 95, 200, 2048}) code.expect_right(with_tokens(plan, T), "T " + std::to_string(T));
  for (const bool optional : {false, true}) {
    const Plan other = gate_plan("bwd",
                                 {.T = 128,
                                  .K = 64,
                                  .BT = 32,
                                  .x = optional ? THALWEG_F16 : THALWEG_F32,
                                  .g = THALWEG_BF16,
                                  .A_log = optional,
                                  .dt_bias = !optional},
                                 Mode::kPersistent, false);
    Compiled(other).expect_right(other, optional ? "A_log alone" : "dt_bias alone");
  }
}

// ---- The gated delta rule's chunks ----

// Gates in both layouts and none, sequences of one length and packed ones, HV = H and 2 H, both modes, full chunks and
// cut ones: each value with each other one in some text of each stage. dv_local and dqkw have their 2048 tokens below.
void run_stage(const std::string& stage) {
  struct Row {
    Gate gate;
    bool packed, twice, persistent, boundary;
  };
  std::vector<Row> rows = {{Gate::kHeadsFirst, false, false, false, false},
                           {Gate::kTokensFirst, false, true, true, true},
                           {Gate::kHeadsFirst, true, true, true, true},
                           {Gate::kTokensFirst, true, false, false, false},
                           {Gate::kNone, true, true, false, true}};
  if (stage.starts_with("cumsum")) rows.pop_back();
  if (stage == "cumsum_reverse") rows.resize(2);  // of cumsum it differs in one comparison
  for (const Row& row : rows) {
    ChunkSizes sizes{.B = 2,
                     .T = row.boundary             ? 100
                          : stage.starts_with("d") ? 128
                                                   : 2048,
                     .H = 2,
                     .HV = row.twice ? 4 : 2,
                     .K = 64,
                     .V = 32};
    if (row.packed && !row.boundary) sizes.dtype = THALWEG_F16;
    if (row.packed) sizes.B = 1, sizes.lengths = {64, 128};
    if (row.packed && row.boundary) sizes.lengths = {1, 64, 37, 130};
    const Plan plan =
        chunk_plan(stage, sizes, row.gate, row.persistent ? Mode::kPersistent : Mode::kSingle, row.boundary);
    const std::string gate = row.gate == Gate::kNone ? "no gate" : row.gate == Gate::kHeadsFirst ? "[HV T]" : "[T HV]";
    Compiled(plan).expect_right(plan, stage + " " + gate + (row.packed ? " packed" : "") +
                                          (row.twice ? " HV = 2 H" : "") + (row.persistent ? " persistent" : "") +
                                          (row.boundary ? " boundary" : ""));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(AscendExecution, ChunkStages) {
  for (const char* stage : {"cumsum", "cumsum_reverse", "dv_local", "dqkw", "state"}) {
    const Plan plan = chunk_plan(stage, {.T = 64}, Gate::kHeadsFirst, Mode::kSingle, false);
    THALWEG_NEEDS(plan);
    run_stage(stage);
  }
}

// The text of full chunks for those, the text with mask code for the last of each sequence, in one set of tensors.
TEST(AscendExecution, InteriorAndBoundaryTextsShareASequence) {
  const ChunkSizes sizes{.B = 2, .T = 200, .H = 2, .HV = 4, .K = 32, .V = 64};
  Plan plan = chunk_plan("dqkw", sizes, Gate::kHeadsFirst, Mode::kSingle, false);
  THALWEG_NEEDS(plan);
  const Compiled interior(plan);
  plan.boundary = true;
  const Compiled boundary(plan);
  const Executed x = execute(plan, Compiled::scene(plan), {{&interior.program, 0, 3}, {&boundary.program, 3, 1}});
  EXPECT_TRUE(x.ok()) << text_of(x);
}

// A gate in the other layout than the text expects: over 2048 tokens, as a short sequence hides a wrong stride.
TEST(AscendExecution, TheWrongGateLayoutIsSeen) {
  const ChunkSizes sizes{.T = 2048, .H = 2, .HV = 4, .K = 32, .V = 32};
  for (const char* stage : {"cumsum", "dv_local", "dqkw", "state"}) {
    Plan plan = chunk_plan(stage, sizes, Gate::kHeadsFirst, Mode::kSingle, false), other = plan;
    THALWEG_NEEDS(plan);
    other.problem.gate = Gate::kTokensFirst;
    const Compiled heads_first(plan), tokens_first(other);
    heads_first.expect_right(plan, "[HV T], T 2048");
    tokens_first.expect_right(other, "[T HV], T 2048");
    EXPECT_FALSE(heads_first.run(other).ok()) << stage << ": " << text_of(heads_first.run(other));
    EXPECT_FALSE(tokens_first.run(plan).ok()) << stage << ": " << text_of(tokens_first.run(plan));
  }
}

// ---- Block-sparse attention ----

TEST(AscendExecution, BlockSparseKeysAndValues) {
  const Plan plan =
      block_plan({.B = 2, .T = 200, .S = 250, .block_q = 64, .block_k = 64, .BM = 64, .BT = 32}, Mode::kSingle, true);
  THALWEG_NEEDS(plan);
  const Compiled code(plan);
  code.expect_right(plan, "64/32, T 200, S 250");
  Plan long_plan = plan;
  long_plan.problem.B = 1, long_plan.problem.T = 192, long_plan.problem.S = 2048;
  code.expect_right(long_plan, "64/32, T 192, S 2048");
  const BlockSizes more[] = {
      {.T = 128, .S = 128, .H = 4, .HK = 2, .K = 128, .block_q = 64, .block_k = 64, .BM = 64, .BT = 64},
      {.T = 96, .S = 96, .block_q = 48, .block_k = 96, .BM = 48, .BT = 48, .split = true},
      {.T = 64, .S = 64, .block_q = 16, .block_k = 16, .BM = 16, .BT = 16},
      {.T = 256, .S = 256, .block_q = 128, .block_k = 128, .BM = 64, .BT = 32, .dtype = THALWEG_F16, .split = true},
      {.T = 64, .S = 128, .H = 4, .HK = 2, .sink = true, .V = 32},
      {.T = 192, .S = 256, .block_q = 32, .causal = true}};
  const Plan causal = block_plan({.B = 2, .T = 250, .S = 200, .BT = 16, .sink = true, .causal = true}, Mode::kSingle, true);
  Compiled(causal).expect_right(causal, "causal, T 250, S 200");
  bool persistent = false;
  for (const BlockSizes& sizes : more) {
    const Plan other = block_plan(sizes, (persistent = !persistent) ? Mode::kPersistent : Mode::kSingle, false);
    Compiled(other).expect_right(other, std::to_string(sizes.BM) + "/" + std::to_string(sizes.BT));
  }
}

// ---- Top-k attention ----

TEST(AscendExecution, TopkKeysAndValues) {
  const Plan plan = topk_plan({.B = 2, .T = 50, .S = 150, .H = 4, .part = 32}, Mode::kSingle, true);
  THALWEG_NEEDS(plan);
  Compiled(plan).expect_right(plan, "H 4, two parts, T 50, S 150");
  const Plan other = topk_plan({.T = 2048, .S = 512, .H = 1, .K = 32, .BM = 16, .part = 32}, Mode::kPersistent, false);
  Compiled(other).expect_right(other, "H 1, T 2048, S 512");
}

// ---- By the planner: the texts that `plan --execute` runs ----

TEST(AscendExecution, PlannedTextsOfCutCases) {
  for (const char* text : {"kda_gate.fwd:f16,T77,HV2,K40,A_log", "kda_gate.fwd:bf16,T77,HV2,K40,A_log,dt_bias,lower_bound=-5",
                           "kda_gate.bwd:f32,T77,HV2,K40,A_log,dt_bias,lower_bound=-5", "kda_gate.bwd:f32,T77,HV2,K40,A_log,dt_bias",
                           "gated_delta_rule.fwd/cumsum:bf16,T200,H2,HV4,K64,g", "gated_delta_rule.fwd/state:bf16,T70,H1,HV2,K64,g",
                           "gated_delta_rule.bwd/dv_local:f16,H2,HV4,K64,V32,g,varlen=1+70+64", "gated_delta_rule.bwd/dqkw:bf16,B2,T70,H1,HV2,K64",
                           "block_sparse_attention.bwd/dkdv:bf16,T200,S256,H4,HK2,K64,V32,block_q=64,block_k=64",
                           "block_sparse_attention.bwd/dkdv:bf16,B2,T64,S150,H2,HK2,K64,block_q=32,block_k=48,causal,sink",
                           "sparse_flash_attention.bwd/dkdv:bf16,T50,S200,H4,K64,V64,E16,v"}) {
    if (!find_kernel(std::string(text).substr(0, std::string(text).find(':')))) continue;
    Options options;
    for (const Mode mode : {Mode::kSingle, Mode::kPersistent}) {
      options.mode = mode;
      const Plan plan = make_plan(parse_problem(text), *find_target("Ascend910B3"), options);
      THALWEG_NEEDS(plan);
      EXPECT_TRUE(plan.boundary) << text;
      Compiled(plan).expect_right(plan, text);
    }
  }
}

// ---- That a fault is seen ----

TEST(AscendExecution, AChangedTextIsSeen) {
  const Plan plan =
      chunk_plan("dv_local", {.T = 128, .H = 1, .HV = 1, .K = 32, .V = 32}, Gate::kHeadsFirst, Mode::kSingle, false);
  THALWEG_NEEDS(plan);
  const std::string text = kernel_of(plan)->emit(plan);
  const Scene scene = Compiled::scene(plan);
  const auto run = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    const size_t at = changed.find(from);
    if (at == std::string::npos) throw std::runtime_error("the text lacks " + from);
    const HostProgram program(changed.replace(at, from.size(), to), scene);
    return execute(plan, scene, {{&program, 0, scene.tiles}});
  };
  EXPECT_FALSE(run("arith.cmpi sle", "arith.cmpi slt").ok());      // the diagonal is left out
  EXPECT_FALSE(run("dimensions = [0]", "dimensions = [1]").ok());  // g_i for g_j
}

TEST(AscendExecution, WhatIsNotWrittenIsSeen) {
  const Plan plan = gate_plan("fwd", {.T = 192, .K = 32}, Mode::kSingle, false);
  THALWEG_NEEDS(plan);
  const Compiled code(plan);
  const Executed x = execute(plan, Compiled::scene(plan), {{&code.program, 0, 2}});  // of 3 tiles
  ASSERT_TRUE(x.ran);
  EXPECT_FALSE(x.ok());
  EXPECT_EQ(x.outputs[0].worst, std::numeric_limits<double>::infinity());
}

TEST(AscendExecution, AWriteBehindATensorIsSeen) {
  const Plan plan = gate_plan("fwd", {.T = 15, .HV = 1, .K = 32, .BT = 16}, Mode::kSingle, false);  // 1 row too many
  THALWEG_NEEDS(plan);
  const Compiled code(plan);
  const Executed x = code.run(plan);
  ASSERT_TRUE(x.ran);
  EXPECT_FALSE(x.outputs[0].guards_intact);
}

TEST(AscendExecution, SaysWhyItCannotRun) {
  Plan plan = gate_plan("fwd", {.T = 64}, Mode::kSingle, false);
  THALWEG_NEEDS(plan);
  Executed x = execute(plan, "module { func.func @f() { return %nothing } }");
  EXPECT_FALSE(x.ran);
  EXPECT_EQ(x.error.find("execute: mlir-opt-19: exit 1: "), 0u) << x.error;
  x = execute(plan, "module { }");
  EXPECT_EQ(x.error, "execute: the text has no func.func");
  x = execute(with_tokens(plan, 1 << 30), "module { }");
  EXPECT_EQ(x.error, "execute: a shorter problem has another text: take fewer tokens");
  plan.problem.kernel = "no.such/kernel";
  EXPECT_FALSE(execute(plan, "").ran);
}

TEST(AscendExecute, NamesTheToolThatIsMissing) {
  const Plan plan = gate_plan("fwd", {.T = 64}, Mode::kSingle, false);
  if (!kernel_of(plan)) GTEST_SKIP() << "built without kda_gate";
  const std::string path = std::getenv("PATH") ? std::getenv("PATH") : "";
  ::setenv("PATH", "/nowhere", 1);
  const Executed x = execute(plan, kernel_of(plan)->emit(plan));
  ::setenv("PATH", path.c_str(), 1);
  EXPECT_FALSE(x.ran);
  EXPECT_EQ(x.error,
            "execute: mlir-opt-19 not found (PATH); it comes with the Debian packages mlir-19-tools, llvm-19 and g++");
}

}  // namespace
}  // namespace thalweg::ascend::tests
