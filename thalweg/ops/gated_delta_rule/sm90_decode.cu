// sm90_decode - gated delta rule, decode: one pass over the state, which is read and written once. The code of
// thalweg/delta_rule/sm90_decode.cuh for this operator's arguments.
//
// Math      S~ = exp(g) S;  x = S~^T k, y = S~^T q in one pass;  u = beta (v - x);  o = y + (q . k) u;  S = S~ + k u^T
//           (scale is in q)
// Shapes    q,k [N,T,H,K]  v,o [N,T,HV,V]  g [N,T,HV]  beta [N,T,HV]  state [M,HV,K,V]
// Takes     state f32 or bf16 with rows at 16 bytes, K or V contiguous; K of 64, 128, 256, V a multiple of 64; T up to
//           8; q, k, v of f32, bf16, f16; the rest of any dtype and stride
// Grid      (slice of V, HV, N). What a block takes is decode_cut's (delta_rule/cuda_plan.h). Of many states at most 64
//           KiB of one, a warp each 128 bytes of V (K contiguous: 32 columns): all of it for K = V = 128 in f32, by
//           four warps. Of few states 128 bytes of V (32 columns), which up to 8 warps share
// Tile      V contiguous: 4 vectors of 16 bytes a step in each thread, whose 8 lanes have a row of 128 bytes; K
//           contiguous: 8 lanes a column
// Smem      the block's part of the state as it arrives and, of bf16 with several tokens, as floats; the T tokens; the
//           warps' sums, twice. At most 72 KiB with one token, 147 KiB with eight
// Regs      95 to 128
// Order     V contiguous: x and y over the rows of a thread, 4 row groups by halving, then the warps in order;
//           K contiguous: over the vectors of a thread, then a butterfly over 8 lanes
// Numerics  float32; a gate near 0 takes exp(g) - 1 away; a bf16 state is rounded where it is stored, not between the
//           tokens of a call
// Traps     a warp asks for its tokens, then for its state with asynchronous copies, and only then uses the tokens, so
//           that neither waits for the other. A thread reads only vectors that it asked for or wrote itself: the state
//           needs no barrier. The carveout is asked for: else fewer blocks are resident than shared memory allows.
//           Up to 1024 sequences every block compares its slots with all others itself; more are counted first
//           (delta_rule/cuda_slots.cuh).
// Measured  H200, bf16, K = V = 128, HV = 32, state f32, T = 1: 128 sequences 144.1 us (3.7 TB/s of states read and
//           written), 32 sequences 40.2 us, one 4.4 us; K contiguous, by a driver: 128 sequences 169 us. Blocks of 128
//           bytes of V that ask for the state before the tokens were slower; bf16 states, several tokens, K of 64 and
//           256 are not measured.
#include "thalweg/delta_rule/sm90_decode.cuh"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule {

void sm90_decode(const Problem& p, const Plan& plan, const thalweg_gated_delta_rule_decode_args& a, const Exec& exec) {
  delta_rule::sm90_decode_of(p, plan, a, exec);
}

}  // namespace thalweg::gated_delta_rule
