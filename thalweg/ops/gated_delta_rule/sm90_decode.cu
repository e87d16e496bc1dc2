// sm90_decode - gated delta rule, decode: one pass over the state, which is read and written once. The code of
// thalweg/delta_rule/sm90_decode.cuh for this operator's arguments.
//
// Math      S~ = exp(g) S;  x = S~^T k, y = S~^T q in one pass;  u = beta (v - x);  o = y + (q . k) u;  S = S~ + k u^T
//           (scale is in q)
// Shapes    q,k [N,T,H,K]  v,o [N,T,HV,V]  g [N,T,HV]  beta [N,T,HV]  state [M,HV,K,V]
// Takes     state f32 or bf16 with rows at 16 bytes, K or V contiguous; K of 64, 128, 256, V a multiple of 64; T up to
//           8; q, k, v of f32, bf16, f16; the rest of any dtype and stride
// Grid      (slice of V, HV, N). V contiguous: K threads and 128 bytes of V a block; K contiguous: 128 threads
// Tile      8 vectors of 16 bytes of the state in each thread, as floats in registers from the first token to the last
// Smem      the state as it arrives (16 KiB for K = 128), the T tokens, and the warps' sums
// Regs      80 (f32 state) or 128 (bf16), so 6 blocks of 16 KiB a multiprocessor are under way
// Order     V contiguous: x and y over 8 rows in a thread, 4 row groups by halving, then the warps in order;
//           K contiguous: over the vectors of a thread, then a butterfly over 8 lanes
// Numerics  float32; a gate near 0 takes exp(g) - 1 away; a bf16 state is rounded where it is stored, not between the
//           tokens of a call
// Traps     the state is asked for before the tokens are, with asynchronous copies, so that no register waits for it.
//           Up to 1024 sequences every block compares its slots with all others itself; more are counted first
//           (delta_rule/cuda_slots.cuh).
// Measured  not yet
#include "thalweg/delta_rule/sm90_decode.cuh"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule {

void sm90_decode(const Problem& p, const Plan& plan, const thalweg_gated_delta_rule_decode_args& a, const Exec& exec) {
  delta_rule::sm90_decode_of(p, plan, a, exec);
}

}  // namespace thalweg::gated_delta_rule
