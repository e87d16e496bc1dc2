// Plans of the gated delta rule's chunk kernels on Ascend (docs/ascend.md): a task is one chunk of one value head.
#include <algorithm>
#include <stdexcept>

#include "testing/case.h"
#include "testing/fields.h"
#include "thalweg/ascend/execute.h"
#include "thalweg/ascend/plan.h"

namespace thalweg::ascend {

std::string emit_cumsum(const Plan&);
std::string emit_dv_local(const Plan&);
std::string emit_dqkw(const Plan&);
std::string emit_state(const Plan&);
Scene cumsum_scene(const Plan&);
Scene dv_local_scene(const Plan&);
Scene dqkw_scene(const Plan&);
Scene state_scene(const Plan&);

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
  if (p.HV % p.H) throw std::invalid_argument(where + ": HV, got " + std::to_string(p.HV) + ", expected a multiple of H = " + std::to_string(p.H));
  if (c.has("g")) p.gate = Gate::kHeadsFirst;
  p.reverse = is_cumsum && std::string_view(c.pass->name) == "bwd";
  if (p.is_packed) p.lengths = testing::lengths_of(c), p.B = 1;
}

void prepare(Plan& plan, int64_t K, int64_t V) {
  plan.task = "one chunk of one head";
  if (!plan.tile.BT) plan.tile.BT = kChunk;
  plan.tile.K = K, plan.tile.V = V;
  plan.refused.clear();
  plan.moves.clear();
  plan.scalar_loads = 0;
  plan.need_is_predicted = !plan.target.a5;
  split_chunks(plan, plan.problem.HV);
}

Move in_steps(Move move, int64_t steps) {
  move.bursts *= steps;
  return move;
}

// Rows of a tile are divided between the two vector cores.
void check_rows(Plan& plan, int64_t rows) {
  int64_t multiple = plan.mode == Mode::kPersistent ? 32 : 16;
  if (rows % multiple && plan.refused.empty())
    plan.refused = "BT " + std::to_string(rows) + ", expected a multiple of " + std::to_string(multiple) + ": two vector cores share a tile";
}

// A triangle of ones times the gates, row by row: this compiler has no scan that stays a vector operation.
void plan_cumsum(Plan& plan) {
  prepare(plan, 0, 0);
  const Problem& p = plan.problem;
  int64_t BT = plan.tile.BT;
  bool single = plan.mode == Mode::kSingle;
  plan.need.ub = {{"gates of each row", 4 * BT * BT}, {"row and column numbers", 4 * BT * BT}, {"mask, then sums", 4 * BT * BT}, {"rows and scratch", single ? 36 * BT : 64}};
  add_gate_move(plan, "g");
  add_gate_move(plan, "sums", true);
  plan.scalar_loads = single || !p.is_packed ? 0 : plan.boundary ? 2 : 1;
}

void plan_dv_local(Plan& plan) {
  const Problem& p = plan.problem;
  prepare(plan, p.K, p.V);
  check_rows(plan, plan.tile.BT);
  int64_t BT = plan.tile.BT, K = p.K, V = p.V, R = BT / 2;
  bool single = plan.mode == Mode::kSingle, has_gate = p.gate != Gate::kNone;
  plan.need_is_predicted = plan.need_is_predicted && (single || plan.buffering == Buffering::kCube);
  auto& ub = plan.need.ub;
  if (single || (has_gate && plan.boundary))
    ub = {{"scores", 4 * R * BT}, {"decays", 4 * R * BT}, {"indices, then mask", 4 * R * BT}, {"gate", has_gate ? 4 * BT : 0}, {"index row", single ? 4 * BT : 0}, {"broadcast's scratch", 32 * R}};
  else
    ub = {{"scores", 4 * R * BT}, {"decays", 4 * R * BT}, {"rows and scratch", has_gate ? 34 * R + (R % 16 ? 144 : 0) : 8 * R + 64}};
  int64_t copies = single ? 1 : 2;
  if (4 * BT * K >= 2 * BT * BT + 2 * BT * V)
    plan.need.l1 = {{"q", 2 * BT * K, copies}, {"k", 2 * BT * K, copies}};
  else
    plan.need.l1 = {{"A", 2 * BT * BT, copies}, {"d_o", 2 * BT * V, copies}};
  // In a persistent program the compiler halves scores that L0C does not hold whole.
  int64_t parts = !single && 4 * BT * BT > plan.target.l0c ? 2 : 1;
  plan.need.l0c = {{BT / parts >= V ? "A" : "d_v", 4 * BT * std::max(BT / parts, V)}};
  // A persistent program takes its half of the rows in two steps, and reads the gate of each again.
  bool two_steps = !single && !(has_gate && plan.boundary);
  add_gate_move(plan, "g");
  plan.moves.push_back(in_steps(whole_move("scores", false, false, 4 * R * BT), two_steps ? 2 : 1));
  if (two_steps && has_gate)
    plan.moves.push_back({"g of the rows", false, false, p.gate == Gate::kTokensFirst && p.HV > 1 ? R : 2, 4 * R});
  plan.moves.push_back(in_steps(whole_move("A", false, true, 2 * R * BT), two_steps ? 2 : 1));
  plan.moves.push_back(rows_move("q", true, false, BT, K, 2, p.H));
  plan.moves.push_back(rows_move("k", true, false, BT, K, 2, p.H));
  plan.moves.push_back(rows_move("d_o", true, false, BT, V, 2, p.HV));
  plan.moves.push_back(whole_move("A", true, false, 2 * BT * BT));
  plan.moves.push_back(in_steps(whole_move("scores", true, true, 4 * BT * BT), parts));
  plan.moves.push_back(rows_move("d_v", true, true, BT, V, 2, p.HV));
  plan.workspace = 6 * BT * BT * (single ? 1 : 4);
  plan.scalar_loads = single || !p.is_packed ? 0 : (has_gate ? 3 : 2) * (plan.boundary ? 2 : 1);
}

void plan_dqkw(Plan& plan) {
  const Problem& p = plan.problem;
  prepare(plan, p.K, p.V);
  check_rows(plan, plan.tile.BT);
  int64_t BT = plan.tile.BT, K = p.K, V = p.V, R = BT / 2;
  bool single = plan.mode == Mode::kSingle, has_gate = p.gate != Gate::kNone;
  plan.need_is_predicted = plan.need_is_predicted && (single || plan.buffering == Buffering::kCube);
  int64_t gate = has_gate ? 4 * BT : 0;
  auto& ub = plan.need.ub;
  bool cut = plan.boundary;
  if (!single && (!has_gate || cut)) {  // nothing of the last three steps is divided between the two vector cores
    int64_t less = !has_gate && cut ? 8 * BT * K : 0;
    int64_t early = 20 * BT * K - less + 2 * BT * BT, late = 16 * BT * K - less + 6 * BT * BT + (has_gate ? 20 * BT : 64);
    ub = {early >= late ? Buffer{"rows of d_q, d_k and d_w, P", early} : Buffer{"rows of d_q and d_k, scores, P", late}};
  } else {
    int64_t scores = 12 * R * BT + 32 * R + gate + (single ? 4 * BT : 0), rows = 8 * R * K + (single ? 0 : 4 * R * BT) + gate;
    ub = {scores >= rows ? Buffer{"scores, decays, mask, gate", scores} : Buffer{"rows of d_q or d_k, gate", rows}};
  }
  int64_t copies = single ? 1 : 2;
  using Tiles = std::vector<Buffer>;
  Tiles states = {{"h, d_h", 2 * K * V, 2 * copies}, {"d_o", 2 * BT * V, copies}, {"P", 2 * BT * BT, copies}};
  Tiles products = {{"h", 2 * K * V, copies}, {"P", 2 * BT * BT, 2 * copies}, {"d_o", 2 * BT * V, copies}, {"k or d_v", 2 * BT * std::max(K, V), copies}};
  if (!single && (!has_gate || plan.boundary)) {
    states = {{"h, d_h", 2 * K * V, 2 * copies}, {"d_o", 2 * BT * V, copies}};
    products = {{"P", 2 * BT * BT, 2 * copies}, {"k or q", 2 * BT * K, copies}};
    Tiles values = {{"h", 2 * K * V, copies}, {"d_o, d_v", 2 * BT * V, 2 * copies}};
    if (Need::sum(values) > Need::sum(products)) products = values;
  }
  plan.need.l1 = Need::sum(states) >= Need::sum(products) ? states : products;
  plan.need.l0c = {{BT >= K ? "scores" : "rows of d_q, d_k or d_w", 4 * BT * std::max(BT, K)}};

  bool whole = !single && !has_gate && !cut;  // as above
  add_gate_move(plan, "g");
  auto& moves = plan.moves;
  moves.push_back(whole_move("scores", false, false, 4 * R * BT));
  moves.push_back(whole_move("product d_o h", false, false, 4 * (whole ? BT : R) * K));
  moves.push_back(whole_move("product P k", false, false, 4 * R * K));
  for (const char* product : {"product v d_h", "product P q", "product d_v h"})
    moves.push_back(in_steps(whole_move(product, false, false, 4 * R * K), whole ? 2 : 1));
  moves.push_back(whole_move("P", false, true, 2 * R * BT));
  moves.push_back(whole_move("P again", false, true, 2 * R * BT));
  if (has_gate && !plan.boundary) moves.push_back(whole_move("decays", false, true, 4 * R));
  for (const char* result : {"d_q", "d_k", "d_w"}) moves.push_back(rows_move(result, false, true, R, K, 2, p.HV));
  moves.push_back(rows_move("d_o", true, false, BT, V, 2, p.HV));
  moves.push_back(rows_move("v", true, false, BT, V, 2, p.HV));
  moves.push_back(whole_move("P, twice", true, false, 2 * BT * BT));
  moves.back().bursts *= 2, moves.back().bytes *= 2;
  moves.push_back(whole_move("h", true, false, 2 * K * V));
  moves.push_back(whole_move("d_h", true, false, 2 * K * V));
  moves.push_back(rows_move("k", true, false, BT, K, 2, p.H));
  moves.push_back(rows_move("q", true, false, BT, K, 2, p.H));
  moves.push_back(rows_move("d_v", true, false, BT, V, 2, p.HV));
  moves.push_back(whole_move("scores", true, true, 4 * BT * BT));
  moves.push_back(whole_move("products", true, true, 4 * BT * K));
  moves.back().bursts *= 5, moves.back().bytes *= 5;
  int64_t decays = has_gate && !plan.boundary ? 4 * BT : 0;
  plan.workspace = (8 * BT * BT + 20 * BT * K + decays) * (single ? 1 : decays ? 5 : 4);
  if (single)
    plan.scalar_loads = 0;
  else if (p.is_packed)  // the table of chunks is read again in each part of the loop
    plan.scalar_loads = has_gate ? (plan.boundary ? 10 : 4) : (plan.boundary ? 9 : 5);
  else
    plan.scalar_loads = has_gate ? 1 : 0;
}

// The state pass: V channels [BV] of one head, from a sequence's first chunk to its last.
void plan_state(Plan& plan) {
  const Problem& p = plan.problem;
  int64_t BV = plan.tile.V;
  prepare(plan, p.K, BV);
  if (!BV) {  // the original work's rule: 128 channels instead of 64 wherever they fit
    for (int64_t width : {128, 64, 32}) {
      BV = std::min(width, p.V);
      if (p.V % BV || BV % 16) continue;
      plan.tile.V = BV;
      plan_state(plan);
      if (plan.fits()) return;
    }
    plan.tile.V = BV = std::min<int64_t>(p.V, 32);
  }
  if (p.V % BV) plan.refused = "BV " + std::to_string(BV) + ", expected a divisor of V = " + std::to_string(p.V);
  plan.task = "BV channels of one head of one sequence, chunk after chunk";
  plan.notes = {"128 channels rather than 64 wherever they fit: counted, not timed"};
  check_rows(plan, plan.tile.BT);
  plan.need_is_predicted = plan.need_is_predicted && plan.buffering != Buffering::kVector;
  int64_t BT = plan.tile.BT, K = p.K;
  bool has_gate = p.gate != Gate::kNone;
  // With a gate the compiler does not divide the rows between the two vector cores: each does all, and one stores.
  int64_t share = has_gate ? 1 : 2, S = K * BV, D = BT * BV, W = BT * K;
  std::vector<Buffer> update = {{"state, decayed state, k^T v_new", 4 * S / share, has_gate ? 3 : 2}};
  std::vector<Buffer> deltas = {{"state", 4 * S / share}, {"w S, u, v_new", 10 * D / share}};
  plan.need.ub = Need::sum(update) >= Need::sum(deltas) ? update : deltas;
  int64_t copies = plan.buffering == Buffering::kCube ? 2 : 1;
  plan.need.l1 = {{"w or k", 2 * W, copies}, {S >= D ? "state" : "v_new", 2 * std::max(S, D), copies}};
  plan.need.l0c = {{S >= D ? "k^T v_new" : "w S", 4 * std::max(S, D)}};
  int64_t state_rows = BV == p.V ? 1 : K, heads = p.HV * (p.V / std::max<int64_t>(BV, 1));
  auto add = [&](const char* tensor, bool cube, bool out, int64_t bursts, int64_t bytes, bool per_pass) {
    int64_t part = cube ? 1 : share;
    plan.moves.push_back({tensor, cube, out, bursts > 1 ? bursts / part : 1, bytes / part, per_pass});
  };
  int64_t rows = heads == 1 ? 1 : BT;
  add("initial_state", false, false, state_rows, 4 * S, false);
  add("w S", false, false, 1, 4 * D, true);
  add("u", false, false, rows, 2 * D, true);
  add_gate_move(plan, "g");
  add("k^T v_new", false, false, 1, 4 * S, true);
  add("h", false, true, state_rows, 2 * S, true);
  add("state", false, true, 1, 2 * S, true);
  add("v_new", false, true, rows, 2 * D, true);
  add("v_new, decayed", false, true, 1, 2 * D, true);
  if (has_gate && !plan.boundary) add("decays", false, true, 1, 4 * BT, true);
  if (has_gate) add("decay of the chunk", false, true, 1, 4, true);
  add("final_state", false, true, state_rows, 4 * S, false);
  add("state", true, false, 1, 2 * S, true);
  add("w", true, false, p.HV == 1 ? 1 : BT, 2 * W, true);
  add("v_new, decayed", true, false, 1, 2 * D, true);
  add("k", true, false, p.H == 1 ? 1 : BT, 2 * W, true);
  add("w S", true, true, 1, 4 * D, true);
  add("k^T v_new", true, true, 1, 4 * S, true);
  plan.workspace = 6 * S + 6 * D + (has_gate ? (plan.boundary ? 32 : 4 * BT + 32) : 0);
  plan.scalar_loads = (has_gate ? 3 : 0) + (!p.is_packed ? 0 : plan.mode == Mode::kSingle ? (plan.boundary ? 5 : 3) : (plan.boundary ? 9 : 7));
  split_tasks(plan, ceil_div(p.V, BV), p.HV * int64_t(p.sequences().size()));
}

constexpr Kernel kKernels[] = {
    {"gated_delta_rule.fwd/cumsum", "running sums of the gate inside each chunk", false, read, plan_cumsum, emit_cumsum, cumsum_scene},
    {"gated_delta_rule.bwd/cumsum", "their gradient: sums from the chunk's end", false, read, plan_cumsum, emit_cumsum, cumsum_scene},
    {"gated_delta_rule.bwd/dv_local", "the part of d_v that stays inside a chunk", true, read, plan_dv_local, emit_dv_local, dv_local_scene},
    {"gated_delta_rule.bwd/dqkw", "d_q, d_k and d_w of a chunk", true, read, plan_dqkw, emit_dqkw, dqkw_scene},
    {"gated_delta_rule.fwd/state", "the states before each chunk", true, read, plan_state, emit_state, state_scene},
};

}  // namespace

const Kernel* gated_delta_rule_ascend_at(int i);
const Kernel* gated_delta_rule_ascend_at(int i) { return i >= 0 && i < int(std::size(kKernels)) ? &kKernels[i] : nullptr; }

}  // namespace thalweg::ascend
