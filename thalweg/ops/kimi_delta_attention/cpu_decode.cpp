// cpu_decode – Kimi delta attention, one or a few tokens a call, states in a pool. Compiled once per ISA.
//
// Math     a [K] = exp(g);  s = S^T (a k), z = S^T (a q) in one read of S;  u = beta (v - s);
//          o = scale (z + (k . q) u);  S <- diag(a) S + k u^T
//          which is the recurrence with the read-out taken before the write is stored.
// Shapes   q,k [N,T,H,K]  v,o [N,T,HV,V]  g [N,T,HV,K]  beta [N,T,HV]  state [M,HV,K,V], K or V contiguous
// Takes    as the gated delta rule's cpu_decode, which it shares all but the decays with (delta_rule/cpu_decode.h)
// Threads  as there
// Vectors  as there; the decays with channels along the lanes
// Tile     as there
// Scratch  as there
// Numerics float32; a to 2 ulp. A decay of 0 wipes its row of S.
// Traps    as there
// Measured 2 Zen 3 cores, AVX2, 48 states of K = V = 128, HV = 32, from memory: 13.2 ms, 1.68 times a scale in place;
//          the gated delta rule 12.6 ms in the same run.
#include "thalweg/delta_rule/cpu_decode.h"
#include "thalweg/ops/kimi_delta_attention/problem.h"

namespace thalweg::kimi_delta_attention::THALWEG_ISA {

int64_t cpu_decode_slot_bytes(const Problem& p) { return delta_rule::decode_slot_bytes(p); }

void cpu_decode(const Problem& p, const Plan& plan, const thalweg_kimi_delta_attention_decode_args& a,
                const Exec& exec) {
  delta_rule::decode(p, plan, a, exec);
}

}  // namespace thalweg::kimi_delta_attention::THALWEG_ISA
