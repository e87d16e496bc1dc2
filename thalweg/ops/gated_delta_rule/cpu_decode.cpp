// cpu_decode – gated delta rule, one or a few tokens a call, states in a pool. Compiled once per ISA.
//
// Math     a = exp(g);  s = S^T (a k), z = S^T (a q) in one read of S;  u = beta (v - s);
//          o = scale (z + (k . q) u);  S <- a S + k u^T
//          which is the recurrence with the read-out taken before the write is stored.
// Shapes   q,k [N,T,H,K]  v,o [N,T,HV,V]  g,beta [N,T,HV]  state [M,HV,K,V], K or V contiguous
// Takes    q of f32, bf16, f16; other tensors of any float dtype; K and V up to 512; any slot strides
// Threads  a task is a run of at most 16 neighbouring (sequence, value head) pairs; pairs are independent, so
//          how they are cut into tasks changes no bit. With one task a thread, a thread tends to find the
//          states of its last call in its own cache.
// Vectors  V contiguous: four rows at a time, one vector of columns after the other, the sums kept in L1;
//          then the update alone goes back up, so that the rows read last are still in L1. Of several
//          tokens, the update of one and the sums of the next are one pass.
//          K contiguous: row by row, read, summed and updated while in L1.
// Tile     four rows (V contiguous), one (K contiguous)
// Scratch  per slot: two tokens' rows as floats and one state (for f64 states, for 16-bit ones of several tokens, and
//          for drafts whose state is not kept)
// Numerics float32; exp and softplus of simd.h (2 ulp). f32 states are updated in place, and 16-bit ones where a call
//          has one token: between the tokens of a call a state is not rounded.
// Traps    The state after token t may go to another slot than token t+1 is read from: `from` follows the
//          state, never the slot number. A state that nobody keeps is not written at all.
//          Prefetches run 16 rows ahead of the sums, past the end of the state too, where the next head's
//          state usually lies; a prefetch cannot fault.
//          Lost: storing one head's state while the next one's is read (the two streams defeat the
//          hardware prefetcher: from memory 2.5 times slower); the next state prefetched whole during the
//          update; K contiguous with 2 to 8 rows side by side (from memory up to twice slower).
// Measured Zen 5, one thread of a shared machine, N1 H16 HV32 K=V=128 f32, with the call's checks (5 us there):
//          AVX-512, [K V]: 39 us with the states in L3, 82 us from memory; [V K]: 52 and 62 us. AVX2, [K V]: 47
//          and 91 us; [V K]: 64 and 66 us. Scale in place of the same bytes: 18 and 60 us.
//          thalweg bench gated_delta_rule.decode@perf
#include "thalweg/delta_rule/cpu_decode.h"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule::THALWEG_ISA {

int64_t cpu_decode_slot_bytes(const Problem& p) { return delta_rule::decode_slot_bytes(p); }

void cpu_decode(const Problem& p, const Plan& plan, const thalweg_gated_delta_rule_decode_args& a, const Exec& exec) {
  delta_rule::decode(p, plan, a, exec);
}

}  // namespace thalweg::gated_delta_rule::THALWEG_ISA
