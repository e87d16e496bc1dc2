// Pieces of cpu_chunk_bwd.cpp: the gate and the write strength of a chunk's tokens.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_CPU_CHUNK_BWD_IO_H
#define THALWEG_OPS_GATED_DELTA_RULE_CPU_CHUNK_BWD_IO_H

#include "thalweg/cpu/blocks/chunk_bwd_io.h"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule {
namespace {

// What a value head multiplies its raw gate with.
struct HeadGate {
  float rate;     // exp(A_log), kept finite: infinity times a softplus of 0 would be NaN
  float dt_bias;
};

// The scalars of a chunk's tokens for one value head, effective; 0 past the last token.
struct alignas(64) Scalars : Strengths {
  float g[kC], g_slope[kC];  // g_slope: d g / d(raw gate)
};

inline HeadGate head_gate(const thalweg_gated_delta_rule_bwd_args& a, int64_t hv) {
  HeadGate gate{1.f, 0.f};
  if (!a.use_gate) return gate;
  gate.rate = min(exp(set1(load_element(a.A_log, hv))), set1(3.402823466e38f))[0];
  if (is_there(a.dt_bias)) gate.dt_bias = load_element(a.dt_bias, hv);
  return gate;
}

inline void load_scalars(const thalweg_gated_delta_rule_bwd_args& a, const HeadGate& gate, const Tokens& g,
                         const Tokens& beta, int64_t count, Scalars* s) {
  const vf one = set1(1.f);
  for (int64_t i = 0; i < kC; ++i) s->g[i] = 0.f;
  if (g.data) read_strided(g.dtype, g.data, g.step, count, s->g);
  for (int64_t i = 0; i < kC; i += kLanes) {
    const int64_t left = count - i < 0 ? 0 : count - i > kLanes ? kLanes : count - i;
    vf x = load(s->g + i), g_slope = one;
    if (a.use_gate) {
      x = x + set1(gate.dt_bias);
      vf slope = where_greater(x, set1(20.f), one, sigmoid(x));
      g_slope = set1(-gate.rate) * slope;
      x = first_n(left, set1(-gate.rate) * softplus(x), zero());
    }
    store(s->g + i, x);
    store(s->g_slope + i, g_slope);
  }
  load_beta(beta, count, a.use_beta_sigmoid, a.allow_neg_eigval, s);
}

}  // namespace
}  // namespace thalweg::gated_delta_rule
#endif
