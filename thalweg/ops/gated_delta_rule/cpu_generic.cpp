// cpu_generic – gated delta rule, forward, backward and decode, token by token: the code of
// thalweg/delta_rule/generic_fwd.h and generic_bwd.h for this operator's arguments.
//
// Math     forward and decode: S~ = exp(g) S;  r = v - S~^T k;  S = S~ + beta k r^T;  o = scale S^T q
//          backwards over tokens, dS the gradient of the state after the token, u = beta r:
//            dS += scale q d_o^T     dq = scale S d_o        du = dS^T k      dv = beta du
//            dk  = dS u - S~ dv      dbeta = du . r          dS~ = dS - k dv^T
//            dg  = sum(dS~ * S~)                            dS <- exp(g) dS~
// Shapes   q,k,d_q,d_k [B,T,H,K]  v,o,d_o,d_v [B,T,HV,V]  g,d_g [B,T,HV]  beta,d_beta [B,T,HV]
//          states [N,HV,K,V]
// Takes    any dtype, any legal strides, K and V up to 512; any B, T, HV, varlen, empty sequences
// Threads  forward: one task per (sequence, value head). Backward: one per (sequence, key head), which owns d_q
//          and d_k of its group
// Vectors  none by hand; inner loops run along V and are left to the compiler
// Tile     none; backward: 64 tokens between kept states
// Scratch  per slot, in float (double for f64). Forward: one state and a token's rows. Backward: T/64 states, the
//          65 states of one piece, rows of the piece, and d_q, d_k [T K] of the group. Shared: the sums for
//          d_A_log and d_dt_bias, [N HV 2] in double.
// Numerics float32 arithmetic and state (float64 where q is f64); this is the plain recurrence that the fast rows
//          are judged against. A gate near 0 takes exp(g) - 1 away. dg is the sum of dS~ * S~ itself, so it stays
//          accurate where the gate is strong; g = -inf gives S~ = 0 and dg = 0.
// Traps    exp(g) is taken of each token's own g, never of a sum, so g = -inf needs no care. d_A_log multiplies
//          dg by g: 0 where dg is 0, because g may be infinite. Tokens past cu_seqlens[N] belong to no sequence;
//          the task after the last one zeroes their rows.
// Measured not tuned
#include "thalweg/delta_rule/generic_bwd.h"
#include "thalweg/delta_rule/generic_fwd.h"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule {

void cpu_generic_fwd(const Problem& p, const Plan& plan, const thalweg_gated_delta_rule_fwd_args& a, const Exec& exec) {
  delta_rule::generic_fwd(p, plan, a, exec);
}
void cpu_generic_bwd(const Problem& p, const Plan& plan, const thalweg_gated_delta_rule_bwd_args& a, const Exec& exec) {
  delta_rule::generic_bwd(p, plan, a, exec);
}
void cpu_generic_decode(const Problem& p, const Plan& plan, const thalweg_gated_delta_rule_decode_args& a,
                        const Exec& exec) {
  delta_rule::generic_decode(p, plan, a, exec);
}

}  // namespace thalweg::gated_delta_rule
