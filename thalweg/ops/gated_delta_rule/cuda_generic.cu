// cuda_generic - gated delta rule, forward and decode, token by token: the code of
// thalweg/delta_rule/cuda_generic_fwd.cuh for this operator's arguments.
//
// Math      S~ = exp(g) S;  r = v - S~^T k;  S = S~ + beta k r^T;  o = scale S^T q
// Shapes    q,k [B,T,H,K]  v,o [B,T,HV,V]  g [B,T,HV]  beta [B,T,HV]  states [N,HV,K,V]
// Takes     any dtype, any legal strides, K and V up to 512; any B, T, HV, varlen, empty sequences; decode: any pool
// Grid      blocks of 128 threads, one per (sequence, value head, slice of V), walking with a stride beyond 2^20;
//           with packed sequences one sequence more, which zeroes the rows that belong to none
// Tile      columns of the state never meet: a column lies in 1 to 32 lanes (a power of two), 16 rows of K in each, so
//           a slice has 128 / lanes columns (16 for K = 128)
// Smem      up to 16 tokens of a value head at a time (q, k, decays, v, beta), 40 KiB
// Regs      the state: 16 floats (doubles for f64) a thread
// Order     sums over K: 16 rows in a thread, then a butterfly over the lanes of the column; nothing else is summed
// Numerics  float32 arithmetic and state (float64 where q is f64); a gate near 0 takes exp(g) - 1 away
// Traps     cu_seqlens and slots are values on the device: borders come checked (cuda/values.cuh), slots are counted
//           first (delta_rule/cuda_slots.cuh) where the call has any. A wrong sequence gets NaN, and touches no state.
// Measured  not tuned
#include "thalweg/delta_rule/cuda_generic_fwd.cuh"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule {

void cuda_generic_fwd(const Problem& p, const Plan&, const thalweg_gated_delta_rule_fwd_args& a, const Exec& exec) {
  delta_rule::cuda_generic_fwd_of(p, a, exec);
}
void cuda_generic_decode(const Problem& p, const Plan&, const thalweg_gated_delta_rule_decode_args& a,
                         const Exec& exec) {
  delta_rule::cuda_generic_decode_of(p, a, exec);
}

}  // namespace thalweg::gated_delta_rule
