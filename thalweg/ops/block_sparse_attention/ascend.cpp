// Plan of block-sparse attention's dK/dV tile on Ascend (docs/ascend.md): a task is one sub-block of keys of one head, a
// loop over the query tiles that the mask keeps.
#include <algorithm>
#include <stdexcept>

#include "testing/case.h"
#include "testing/fields.h"
#include "thalweg/ascend/execute.h"
#include "thalweg/ascend/plan.h"

namespace thalweg::ascend {

std::string emit_dkdv(const Plan&);
Scene dkdv_scene(const Plan&);

namespace {

void read(const testing::Case& c, Problem& p) {
  if (p.dtype != THALWEG_BF16 && p.dtype != THALWEG_F16)
    throw std::invalid_argument(p.kernel + ": q: dtype, got " + thalweg_dtype_name(p.dtype) + ", expected bf16 or f16 (no kernel covers it)");
  p.has_sink = c.has("sink"), p.causal = c.has("causal");
  for (const char* name : {"q_lens", "k_lens"})
    if (c.has(name)) throw std::invalid_argument(p.kernel + ": " + name + ", got one, expected none (no kernel covers it)");
  if (p.is_packed) throw std::invalid_argument(p.kernel + ": cu_seqlens, got some, expected none (no kernel covers it)");
  p.block_q = int64_t(c.number("block_q", 128)), p.block_k = int64_t(c.number("block_k", 128));
  if (!p.block_q) p.block_q = 128;
  if (!p.block_k) p.block_k = 128;
  p.HV = c.size("HK");  // key/value heads
  if (p.H % p.HV) throw std::invalid_argument(p.kernel + ": HK, got " + std::to_string(p.HV) + ", expected a divisor of H = " + std::to_string(p.H));
}

// Rules of the original work.
int64_t seed_BM(int64_t block_q) {
  for (int64_t size : {64, 48, 32, 16})
    if (block_q % size == 0) return size;
  return 0;
}
int64_t seed_BT(int64_t block_k) { return block_k <= 32 ? block_k : block_k % 32 == 0 ? 32 : block_k % 48 == 0 ? 48 : 16; }

// Whether each vector core does half of the rows. Not with double buffering of full tiles: there each does all, in two
// steps, and one stores; but for causal text whose rows and columns are numbered alike.
bool is_divided(const Plan& plan) {
  const Tile& tile = plan.tile;
  return plan.buffering == Buffering::kOff || plan.boundary || (plan.problem.causal && tile.BM == tile.BT);
}

void plan_need(Plan& plan) {
  const Problem& p = plan.problem;
  int64_t BM = plan.tile.BM, BT = plan.tile.BT, K = plan.tile.K, V = plan.tile.V, R = BM / 2;
  bool persistent = plan.mode == Mode::kPersistent, off = plan.buffering == Buffering::kOff;
  int64_t factor = 2 * BM * BT, halves = p.split ? 2 : 1;
  switch (plan.buffering) {
    case Buffering::kCube:  // the compiler unrolls the loop by four, and has each of the four loads twice
      plan.need.l1 = {{"k, v", 2 * BT * (K + V), persistent ? 2 : 1}, {"q, d_o", 2 * BM * (K + V), 8}, {"P, d_S", factor, 2 * halves}};
      break;
    case Buffering::kVector:
      plan.need.l1 = {{"k, v", 2 * BT * (K + V)}, {"q, d_o", 2 * BM * (K + V), 4}, {"P or d_S", factor, halves}};
      break;
    case Buffering::kOff:
      plan.need.l1 = {{"k, v", 2 * BT * (K + V)}, {"q, d_o", 2 * BM * (K + V)}, {"P or d_S", factor, halves}};
  }
  int64_t copies = plan.buffering == Buffering::kVector ? 2 : 1;
  plan.need.ub = {{"P", 4 * R * BT, copies}, {"d_S", 4 * R * BT, copies}, {"rows' statistics and scratch", (32 + 4 * copies) * R}};
  if (p.split) {  // P, d_S and their halves; in two steps not all of them are alive at once
    int64_t bytes = copies == 1 ? (off || plan.boundary ? 14 : 10) : !plan.boundary ? 20 : persistent ? 28 : 24;
    if (bytes * R * BT > Need::sum(plan.need.ub)) plan.need.ub = {{"P, d_S and their halves", bytes * R * BT}};
  }
  if (p.causal) {  // the numbers of rows and columns stay
    int64_t numbers = BM == BT ? 4 * BT : 4 * BT + (off || plan.boundary ? 4 * R : 4 * BM), scores = 4 * R * BT;
    if (off || plan.boundary)
      plan.need.ub = {{"P, d_S, mask", scores, 3}, {"numbers", numbers}, {"rows' statistics and scratch", 36 * R}};
    else
      plan.need.ub = {{"P, d_S, mask", BM == BT ? scores / 2 : scores, 3}, {"numbers and scratch", 64 + numbers}};
  }
  plan.need.l0c = {{"d_k, d_v", 4 * BT * (K + V)}, {"scores", 4 * BM * BT}};
}

void plan_moves(Plan& plan) {
  const Problem& p = plan.problem;
  int64_t BM = plan.tile.BM, BT = plan.tile.BT, K = plan.tile.K, V = plan.tile.V, group = p.H / p.HV, halves = p.split ? 2 : 1;
  bool off = plan.buffering == Buffering::kOff;
  int64_t steps = off || plan.boundary ? 1 : 2, rows = is_divided(plan) ? BM / 2 : BM;
  plan.moves.clear();
  auto add = [&](const char* tensor, bool cube, bool out, int64_t bursts, int64_t bytes, bool per_pass) {
    int64_t times = per_pass ? group : 1;  // query heads of the key/value head
    plan.moves.push_back({tensor, cube, out, bursts * times, bytes * times, per_pass});
  };
  for (const char* product : {"scores", "d_P"}) add(product, false, false, steps, 4 * rows * BT, true);
  for (const char* row : {"lse", "delta"}) add(row, false, false, steps, 4 * rows, true);
  for (const char* of : {"P", "d_S"}) add(of, false, true, steps * halves, 2 * rows * BT * halves, true);
  const std::pair<const char*, int64_t> keys[] = {{"k", K}, {"v", V}}, queries[] = {{"q", K}, {"d_o", V}}, sums[] = {{"d_k", K}, {"d_v", V}};
  for (const auto& [of, width] : keys) add(of, true, false, p.HV == 1 ? 1 : BT, 2 * BT * width, false);
  for (const auto& [of, width] : queries) add(of, true, false, p.H == 1 ? 1 : BM, 2 * BM * width, true);
  for (const char* of : {"P", "d_S"}) add(of, true, false, halves, 2 * BM * BT * halves, true);
  for (const char* product : {"scores", "d_P"}) add(product, true, true, 1, 4 * BM * BT, true);
  for (const auto& [of, width] : sums) add(of, true, true, p.HV == 1 ? 1 : BT, 2 * BT * width, false);
  plan.workspace = (8 + 4 * halves) * BM * BT * (off ? 1 : 4);
  plan.scalar_loads = group > 1 || plan.mode == Mode::kPersistent ? 4 : 2;  // of both kinds of core: the list, and the count inside a loop
}

void plan_dkdv(Plan& plan) {
  const Problem& p = plan.problem;
  plan.task = "one sub-block of keys of one head, a loop over its query tiles";
  plan.refused.clear();
  Tile& tile = plan.tile;
  if (!tile.BM) tile.BM = seed_BM(p.block_q);
  if (!tile.BT) tile.BT = seed_BT(p.block_k);
  tile.K = p.K, tile.V = p.V;
  if (!tile.BM || p.block_q % tile.BM)
    plan.refused = "BM " + std::to_string(tile.BM) + ": none of 64, 48, 32, 16 divides block_q = " + std::to_string(p.block_q);
  else if (p.block_k % tile.BT)
    plan.refused = "BT " + std::to_string(tile.BT) + ", expected a divisor of block_k = " + std::to_string(p.block_k);
  else if (tile.BT % 16)
    plan.refused = "BT " + std::to_string(tile.BT) + ", expected a multiple of 16";
  if (!tile.BM) tile.BM = 16;
  plan.boundary = p.T % tile.BM != 0 || p.S % tile.BT != 0;
  split_tasks(plan, ceil_div(p.S, tile.BT), p.B * p.HV);
  plan_need(plan);
  plan_moves(plan);
  plan.need_is_predicted = !plan.target.a5 && !(p.causal && (p.split || plan.buffering == Buffering::kVector));
  plan.notes = {"BM the first of 64, 48, 32, 16 that divides block_q, BT by block_k: this compiler takes other tiles too",
                "224 KB of UB for a tile of 64/64/64: here the sums stay in L0C, and UB needs 17,536 bytes"};
}

constexpr Kernel kKernels[] = {
    {"block_sparse_attention.bwd/dkdv", "d_k and d_v of a sub-block of keys", true, read, plan_dkdv, emit_dkdv, dkdv_scene, true},
};

}  // namespace

const Kernel* block_sparse_attention_ascend_at(int i);
const Kernel* block_sparse_attention_ascend_at(int i) { return i >= 0 && i < int(std::size(kKernels)) ? &kKernels[i] : nullptr; }

}  // namespace thalweg::ascend
