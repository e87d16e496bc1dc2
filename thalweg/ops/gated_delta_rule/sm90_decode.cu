// sm90_decode - gated delta rule, decode: one pass over the state, which is read and written once. The code of
// thalweg/delta_rule/sm90_decode.cuh for this operator's arguments.
//
// Math      S~ = exp(g) S;  x = S~^T k, y = S~^T q in one pass;  u = beta (v - x);  o = y + (q . k) u;  S = S~ + k u^T
//           (scale is in q)
// Shapes    q,k [N,T,H,K]  v,o [N,T,HV,V]  g [N,T,HV]  beta [N,T,HV]  state [M,HV,K,V]
// Takes     state f32 or bf16 with rows at 16 bytes, K or V contiguous; K of 64, 128, 256, V a multiple of 64; T up to
//           8; q, k, v of f32, bf16, f16; the rest of any dtype and stride
// Grid      (slice of V, HV, N). What a block takes is decode_cut's (delta_rule/cuda_plan.h). K contiguous: two warps
//           with 2048 / K columns. V contiguous: K / 32 warps with 32 columns, of many states twice as many warps with
//           64. A block takes twice the columns, one half after the other, where all blocks then run at once and, V
//           contiguous, of many states. Two more warps have the tokens where all blocks run at once with them
// Tile      32 numbers of the state in a thread, floats in registers from the load to the store. V contiguous: lanes
//           with 16 bytes each have a row, a thread rows in fours; K contiguous: K / 16 lanes a column, a thread two
// Smem      the T tokens and, V contiguous, the warps' sums, twice: 1.2 to 45 KiB
// Regs      120 to 128: 16 warps a multiprocessor
// Order     V contiguous: x and y over the rows of a thread, the row groups of a warp by halving, then the warps in
//           order; K contiguous: over a thread's rows, then a butterfly over the lanes
// Numerics  float32; a gate near 0 takes exp(g) - 1 away; a bf16 state is rounded where it is stored, not between the
//           tokens of a call
// Traps     A warp asks for its tokens, then for its state, and only then uses the tokens: neither waits for the other.
//           Numbers of a dtype known only at run time are loaded as bits and converted later. The grid may start while
//           the one before it ends, and lets the next do so (launch_behind): what comes before grid_wait() may touch no
//           tensor. The number of a named barrier must be a constant. Up to 1024 sequences every block compares its
//           slots with all others itself; more are counted first (delta_rule/cuda_slots.cuh).
// Measured  H200, bf16, K = V = 128, HV = 32, state f32, T = 1. V contiguous: 128 sequences 137.9 us (3.9 TB/s of
//           states read and written), 32 sequences 37.3 us, one 3.7 us. K contiguous: 132.0, 35.2 and 3.1 us. bf16
//           states, several tokens, K of 64 and 256 are not measured. What else was tried: docs/tuning,
//           gated_delta_rule-decode-registers.
#include "thalweg/delta_rule/sm90_decode.cuh"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule {

void sm90_decode(const Problem& p, const Plan& plan, const thalweg_gated_delta_rule_decode_args& a, const Exec& exec) {
  delta_rule::sm90_decode_of(p, plan, a, exec);
}

}  // namespace thalweg::gated_delta_rule
