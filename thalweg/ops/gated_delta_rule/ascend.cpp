// Plans of the gated delta rule's chunk kernels on Ascend (docs/ascend.md): a task is one chunk of one value head.
#include <algorithm>
#include <stdexcept>

#include "testing/case.h"
#include "testing/fields.h"
#include "thalweg/ascend/plan.h"

namespace thalweg::ascend {

std::string emit_cumsum(const Plan&);
std::string emit_dv_local(const Plan&);
std::string emit_dqkw(const Plan&);

namespace {

constexpr int64_t kChunk = 64;  // tokens of a chunk, as in the original work

// The kernel's own tensors (chunk gates summed up, states, w) are not the pass's: of the case only sizes, the dtype,
// the borders and whether there is a gate count.
void read(const testing::Case& c, Problem& p) {
  std::string where = p.kernel;
  bool is_cumsum = where.ends_with("/cumsum");
  if (!is_cumsum && p.dtype != THALWEG_BF16 && p.dtype != THALWEG_F16)
    throw std::invalid_argument(where + ": q: dtype, got " + thalweg_dtype_name(p.dtype) + ", expected bf16 or f16 (no kernel covers it)");
  if (is_cumsum && !c.has("g")) throw std::invalid_argument(where + ": g, got none, expected one (there is nothing to sum)");
  if (c.has("g")) p.gate = Gate::kHeadsFirst;
  p.reverse = is_cumsum && std::string_view(c.pass->name) == "bwd";
  if (p.is_packed) p.lengths = testing::lengths_of(c), p.B = 1;
}

void prepare(Plan& plan, int64_t K, int64_t V) {
  plan.task = "one chunk of one head";
  if (!plan.tile.BT) plan.tile.BT = kChunk;
  plan.tile.K = K, plan.tile.V = V;
  plan.refused.clear();
  split_chunks(plan, plan.problem.HV);
}

// Rows of a tile are divided between the two vector cores.
void check_rows(Plan& plan, int64_t rows, const char* side) {
  int64_t multiple = plan.mode == Mode::kPersistent ? 32 : 16;
  if (rows % multiple && plan.refused.empty())
    plan.refused = std::string(side) + " " + std::to_string(rows) + ", expected a multiple of " + std::to_string(multiple) + ": two vector cores share a tile";
}

void plan_cumsum(Plan& plan) {
  prepare(plan, 0, 0);
  plan.need.ub = {{"g", 4 * plan.tile.BT}, {"sums", 4 * plan.tile.BT}};
  plan.moves.clear();
  add_gate_move(plan, "g");
  add_gate_move(plan, "sums", true);
  plan.need_is_predicted = !plan.target.a5;
}

void plan_dv_local(Plan& plan) {
  const Problem& p = plan.problem;
  prepare(plan, p.K, p.V);
  check_rows(plan, plan.tile.BT, "BT");
  int64_t BT = plan.tile.BT, K = p.K, V = p.V, R = BT / 2;
  bool single = plan.mode == Mode::kSingle;
  if (single)
    plan.need.ub = {{"scores", 4 * R * BT}, {"decays", 4 * R * BT}, {"indices, then mask", 4 * R * BT}, {"gate", 4 * BT}, {"index row", 4 * BT}, {"broadcast's scratch", 32 * R}};
  else
    plan.need.ub = {{"scores", 4 * R * BT}, {"decays", 4 * R * BT}, {"broadcast's scratch", 34 * R}};
  int64_t copies = single ? 1 : 2;
  if (4 * BT * K >= 2 * BT * BT + 2 * BT * V)
    plan.need.l1 = {{"q", 2 * BT * K, copies}, {"k", 2 * BT * K, copies}};
  else
    plan.need.l1 = {{"A", 2 * BT * BT, copies}, {"d_o", 2 * BT * V, copies}};
  plan.need.l0c = {{BT >= V ? "A" : "d_v", 4 * BT * std::max(BT, V)}};
  plan.need_is_predicted = !plan.target.a5;
  plan.moves.clear();
  add_gate_move(plan, "g");
  plan.moves.push_back(whole_move("scores", false, false, 4 * R * BT));
  plan.moves.push_back(whole_move("A", false, true, 2 * R * BT));
  plan.moves.push_back(rows_move("q", true, false, BT, K, 2, p.H));
  plan.moves.push_back(rows_move("k", true, false, BT, K, 2, p.H));
  plan.moves.push_back(rows_move("d_o", true, false, BT, V, 2, p.HV));
  plan.moves.push_back(whole_move("A", true, false, 2 * BT * BT));
  plan.moves.push_back(whole_move("scores", true, true, 4 * BT * BT));
  plan.moves.push_back(rows_move("d_v", true, true, BT, V, 2, p.HV));
  plan.workspace = 6 * BT * BT;
}

void plan_dqkw(Plan& plan) {
  const Problem& p = plan.problem;
  prepare(plan, p.K, p.V);
  check_rows(plan, plan.tile.BT, "BT");
  int64_t BT = plan.tile.BT, K = p.K, V = p.V, R = BT / 2;
  bool single = plan.mode == Mode::kSingle;
  int64_t scores = single ? 12 * R * BT + 8 * BT + 32 * R : 12 * R * BT + 4 * BT + 32 * R;
  int64_t rows = single ? 8 * R * K + 4 * BT : 8 * R * K + 4 * R * BT + 4 * BT;
  plan.need.ub = {scores >= rows ? Buffer{"scores, decays, mask", scores} : Buffer{"rows of d_q or d_k", rows}};
  int64_t copies = single ? 1 : 2;
  plan.need.l1 = {{"q, k", 2 * BT * K, 2 * copies}, {"d_o, v", 2 * BT * V, 2 * copies}, {"state and its gradient", 2 * K * V, 2 * copies}, {"P", 2 * BT * BT, 2 * copies}};
  plan.need.l0c = {{"product", 4 * BT * std::max(BT, K)}};
  plan.need_is_predicted = !plan.target.a5;
  plan.moves.clear();
  add_gate_move(plan, "g");
}

constexpr Kernel kKernels[] = {
    {"gated_delta_rule.fwd/cumsum", "running sums of the gate inside each chunk", false, read, plan_cumsum, emit_cumsum},
    {"gated_delta_rule.bwd/cumsum", "their gradient: sums from the chunk's end", false, read, plan_cumsum, emit_cumsum},
    {"gated_delta_rule.bwd/dv_local", "the part of d_v that stays inside a chunk", true, read, plan_dv_local, emit_dv_local},
    {"gated_delta_rule.bwd/dqkw", "d_q, d_k and d_w of a chunk", true, read, plan_dqkw, emit_dqkw},
};

}  // namespace

const Kernel* gated_delta_rule_ascend_at(int i);
const Kernel* gated_delta_rule_ascend_at(int i) { return i >= 0 && i < int(std::size(kKernels)) ? &kKernels[i] : nullptr; }

}  // namespace thalweg::ascend
