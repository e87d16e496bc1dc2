// Plans for the tests of generated texts, made by hand: the generators take any tile, also those that no search picks.
#ifndef THALWEG_TESTS_ASCEND_PLANS_H
#define THALWEG_TESTS_ASCEND_PLANS_H

#include <numeric>
#include <string>
#include <vector>

#include "thalweg/ascend/plan.h"

namespace thalweg::ascend::tests {

inline Plan plan_of(const std::string& kernel) {
  Plan plan;
  plan.problem.kernel = kernel;
  plan.target = *find_target("Ascend910B3");
  plan.mixed = kernel != "kda_gate.fwd" && kernel != "kda_gate.bwd" && !kernel.ends_with("/cumsum");
  return plan;
}

struct ChunkSizes {
  int64_t B = 1, T = 0, H = 1, HV = 1, K = 64, V = 64, BT = 64;
  std::vector<int64_t> lengths = {};  // packed
  thalweg_dtype dtype = THALWEG_BF16;
};
// A chunk kernel of the gated delta rule; "" + `stage`: "dv_local", "dqkw", "state", "cumsum", "cumsum_reverse".
inline Plan chunk_plan(const std::string& stage, const ChunkSizes& s, Gate gate, Mode mode, bool boundary) {
  const bool reverse = stage == "cumsum_reverse", forward = stage == "cumsum" || stage == "state";
  Plan plan = plan_of(std::string("gated_delta_rule.") + (forward ? "fwd/" : "bwd/") + (reverse ? "cumsum" : stage));
  Problem& p = plan.problem;
  p.B = s.B, p.T = s.T, p.H = s.H, p.HV = s.HV, p.K = s.K, p.V = s.V, p.gate = gate;
  p.dtype = s.dtype, p.reverse = reverse;
  if (!s.lengths.empty()) {
    p.is_packed = true, p.lengths = s.lengths;
    p.T = std::accumulate(s.lengths.begin(), s.lengths.end(), int64_t(0));
  }
  plan.tile = {s.BT, 0, s.K, stage == "state" ? s.V / 2 : s.V};
  plan.mode = mode, plan.boundary = boundary;
  return plan;
}

struct GateSizes {
  int64_t T = 0, HV = 3, K = 128, BT = 64;
  thalweg_dtype x = THALWEG_BF16, g = THALWEG_F32;
  bool A_log = true, dt_bias = true;
  double lower_bound = 0;
};
inline Plan gate_plan(const std::string& pass, const GateSizes& s, Mode mode, bool boundary) {
  Plan plan = plan_of("kda_gate." + pass);
  Problem& p = plan.problem;
  p.dtype = s.x, p.out_dtype = s.g, p.T = s.T, p.HV = s.HV, p.K = s.K;
  p.has_A_log = s.A_log, p.has_dt_bias = s.dt_bias, p.lower_bound = s.lower_bound;
  plan.tile = {s.BT, 0, s.K, 0};
  plan.mode = mode, plan.boundary = boundary;
  return plan;
}

struct BlockSizes {
  int64_t B = 1, T = 0, S = 0, H = 2, HK = 2, K = 64, block_q = 64, block_k = 64, BM = 32, BT = 32;
  thalweg_dtype dtype = THALWEG_BF16;
  bool split = false, sink = false, causal = false;
  int64_t V = 0;  // 0: as K
};
inline Plan block_plan(const BlockSizes& s, Mode mode, bool boundary) {
  Plan plan = plan_of("block_sparse_attention.bwd/dkdv");
  Problem& p = plan.problem;
  p.B = s.B, p.T = s.T, p.S = s.S, p.H = s.H, p.HV = s.HK, p.K = s.K, p.V = s.V ? s.V : s.K;
  p.block_q = s.block_q, p.block_k = s.block_k, p.dtype = s.dtype, p.split = s.split, p.has_sink = s.sink, p.causal = s.causal;
  plan.tile = {s.BT, s.BM, p.K, p.V};
  plan.mode = mode, plan.boundary = boundary;
  return plan;
}

struct TopkSizes {
  int64_t B = 1, T = 0, S = 0, H = 4, K = 64, E = 16, BM = 16, BT = 32, part = 64;
};
inline Plan topk_plan(const TopkSizes& s, Mode mode, bool boundary) {
  Plan plan = plan_of("sparse_flash_attention.bwd/dkdv");
  Problem& p = plan.problem;
  p.B = s.B, p.T = s.T, p.S = s.S, p.H = s.H, p.K = s.K, p.V = s.K, p.E = s.E;
  plan.tile = {s.BT, s.BM, s.K, s.part};
  plan.mode = mode, plan.boundary = boundary;
  return plan;
}

}  // namespace thalweg::ascend::tests

#endif
