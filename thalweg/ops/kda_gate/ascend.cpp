// Plans of the KDA gate on Ascend (docs/ascend.md): vector cores alone, a task is a tile of rows of one head.
#include <algorithm>
#include <stdexcept>

#include "testing/fields.h"
#include "thalweg/ascend/execute.h"
#include "thalweg/ascend/plan.h"

namespace thalweg::ascend {

std::string emit_kda_gate_fwd(const Plan&);
std::string emit_kda_gate_bwd(const Plan&);
Scene kda_gate_fwd_scene(const Plan&);
Scene kda_gate_bwd_scene(const Plan&);

namespace {

bool takes(thalweg_dtype dtype) { return dtype == THALWEG_F32 || dtype == THALWEG_BF16 || dtype == THALWEG_F16; }

void read(const testing::Case& c, Problem& p) {
  std::string where = testing::pass_name(*c.pass);
  bool forward = std::string_view(c.pass->name) == "fwd";
  const char* second = forward ? "g" : "d_g";
  p.out_dtype = testing::dtype_in(c, *testing::find_field(*c.pass, second));
  if (!takes(p.dtype)) throw std::invalid_argument(where + ": x: dtype, got f64, expected f32, bf16 or f16 (no kernel covers it)");
  if (!takes(p.out_dtype))
    throw std::invalid_argument(where + ": " + second + ": dtype, got f64, expected f32, bf16 or f16 (no kernel covers it)");
  p.lower_bound = c.number("lower_bound", 0);
  p.has_A_log = c.has("A_log"), p.has_dt_bias = c.has("dt_bias");
  p.T *= p.B * (c.sizes.count("L") ? c.size("L") : 1);  // rows of a head
  p.B = 1, p.H = p.HV;
}

// The original work's rule: a budget of elements, and short tiles for short sequences.
int64_t seed_rows(int64_t T, int64_t D) {
  int64_t hint = T <= 32 ? 32 : T <= 64 * 2 ? 64 : 128;
  return std::max<int64_t>(1, std::min(hint, floor_pow2(std::max<int64_t>(1, 8192 / next_pow2(D)))));
}

void prepare(Plan& plan) {
  Problem& p = plan.problem;
  plan.task = "one tile of rows of one head";
  if (!plan.tile.BT) plan.tile.BT = seed_rows(p.T, p.K);
  plan.tile.K = p.K;
  plan.scalar_loads = 0;
  plan.notes = {"32 rows up to T = 32, 64 up to 128, else 128, within 8192 elements: this compiler takes more rows"};
  split_chunks(plan, p.HV);
}

// Rows of 16-bit numbers are padded to 32 bytes on the chip.
bool is_padded(const Problem& p) { return p.HV > 1 && p.K % 16; }

void plan_fwd(Plan& plan) {
  prepare(plan);
  const Problem& p = plan.problem;
  int64_t BT = plan.tile.BT, D = plan.tile.K, n = BT * round_up(D, 8);
  int64_t x = int64_t(thalweg_dtype_bytes(p.dtype)), y = int64_t(thalweg_dtype_bytes(p.out_dtype));
  if (plan.target.a5) {
    plan.need.ub = {{"tiles", 6 * n}, {"bias", p.has_dt_bias ? 4 * D : 0}};
    plan.need_is_predicted = plan.mode == Mode::kSingle && p.lower_bound == 0;
  } else if (p.lower_bound < 0) {
    plan.need.ub = {{"y", 4 * n}, {"sigmoid, result", 4 * n}};
    plan.need_is_predicted = plan.mode == Mode::kSingle;
  } else if (plan.mode == Mode::kSingle) {
    plan.need.ub = {{"x", 4 * n}, {"limit, then mask", 4 * n}, {"logarithm", 4 * n}, {"result", 4 * n}, {"select's scratch", 32}};
  } else {
    plan.need.ub = {{"x", 4 * n, x == 4 ? 2 : 1}, {"limit", 4 * n}, {"mask", D % 8 ? BT * round_up(round_up(D, 8) / 8, 32) : round_up(n / 8, 32)}, {"logarithm", 4 * n}, {"result", 4 * n, y == 2 && is_padded(p) ? 1 : 2}, {"select's scratch", 32}};
    plan.scalar_loads = p.has_A_log ? 3 : 0;
    plan.need_is_predicted = plan.buffering != Buffering::kOff;
  }
  plan.moves = {rows_move("x", false, false, BT, D, x, p.HV)};
  if (p.has_dt_bias) plan.moves.push_back(whole_move("dt_bias", false, false, 4 * D));
  plan.moves.push_back(rows_move("g", false, true, BT, D, y, p.HV));
}

// Without A_log there is no sum to form, and less is alive at once.
void plan_bwd(Plan& plan) {
  prepare(plan);
  const Problem& p = plan.problem;
  int64_t BT = plan.tile.BT, D = plan.tile.K, width = round_up(D, 8), n = BT * width;
  int64_t x = int64_t(thalweg_dtype_bytes(p.dtype)), dg = int64_t(thalweg_dtype_bytes(p.out_dtype));
  bool one = p.HV == 1;  // the tile is one run
  int64_t x_bytes = one ? round_up(BT * x * D, 32) : BT * round_up(x * D, 32);
  int64_t dg_bytes = one ? round_up(BT * dg * D, 32) : BT * round_up(dg * D, 32);
  auto& ub = plan.need.ub;
  if (p.lower_bound < 0) {
    ub = {{"y", 4 * n, p.has_A_log ? 2 : 1}, {"sigmoid", 4 * n}, {"d_g", 4 * n}};
  } else if (plan.mode == Mode::kSingle) {
    if (p.has_A_log)
      ub = {{"y", 4 * n}, {"softplus", 4 * n}, {"sigmoid", 4 * n}, {"d_g", 4 * n}, {"limit, then mask", 4 * n}, {"select's scratch", 32}};
    else if (dg == 4)
      ub = {{"y, then sigmoid", 4 * n}, {"d_g", 4 * n}, {"bias", p.has_dt_bias ? 4 * width : 0}};
    else
      ub = {{"y, then sigmoid", 4 * n}, {"d_g", 4 * n}, {"d_g as stored", dg_bytes}};
  } else {
    bool wide = x == 4, narrow = x == 2 && dg == 2, bias = p.has_dt_bias, padded = is_padded(p);
    int64_t tile = 4 * n;
    if (p.has_A_log)
      ub = {{"y, softplus, sigmoid, d_g, mask, result", tile, 6 + (wide && (dg == 4 || (bias && !one) || plan.boundary)) + (x == 2 && dg == 4 && one) - (narrow && padded)},
            {"x as stored", 4 * BT * D}};
    else if (narrow && padded)
      ub = {{"x as stored", x_bytes, 2}, {"y", tile}, {"d_g", tile}};
    else if (dg == 2)
      ub = {{"x as stored", x_bytes, 2}, {"d_g as stored", dg_bytes, 2}, {"y, d_g", tile, wide && (plan.boundary ? !one || !bias : bias && D % 8) ? 1 : 2}};
    else if (x == 2 && bias)
      ub = {{"x as stored", padded && !plan.boundary ? 2 * n : x_bytes, 2}, {"d_g as stored", dg_bytes, 2}, {"y, or bias", padded ? 0 : plan.boundary || one ? 8 * D : tile}};
    else
      ub = {{"x as stored", x_bytes, 2}, {"d_g as stored", dg_bytes, 2}};
    plan.scalar_loads = p.has_A_log ? 5 : 0;
  }
  plan.need_is_predicted = !plan.target.a5 && (plan.mode == Mode::kSingle || (p.lower_bound == 0 && plan.buffering != Buffering::kOff));
  plan.moves = {rows_move("x", false, false, BT, D, x, p.HV), rows_move("d_g", false, false, BT, D, dg, p.HV)};
  if (p.has_dt_bias) plan.moves.push_back(whole_move("dt_bias", false, false, 4 * D));
  plan.moves.push_back(rows_move("d_x", false, true, BT, D, x, p.HV));
  if (p.has_dt_bias) plan.moves.push_back(whole_move("d_dt_bias of the tile", false, true, 4 * D));
}

constexpr Kernel kKernels[] = {
    {"kda_gate.fwd", "the gate's logarithm, softplus form", false, read, plan_fwd, emit_kda_gate_fwd, kda_gate_fwd_scene},
    {"kda_gate.bwd", "its gradients", false, read, plan_bwd, emit_kda_gate_bwd, kda_gate_bwd_scene},
};

}  // namespace

const Kernel* kda_gate_ascend_at(int i);
const Kernel* kda_gate_ascend_at(int i) { return i >= 0 && i < int(std::size(kKernels)) ? &kKernels[i] : nullptr; }

}  // namespace thalweg::ascend
