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
// Vectors  V contiguous: panels of columns down all rows, so that their sums stay in registers; then the update alone,
//          whose u stays in registers, goes back up, so that the rows read last are still in L1. Of several
//          tokens, the update of one and the sums of the next are one pass.
//          K contiguous: row by row, read, summed and updated while in L1.
// Tile     V contiguous: panels of 8 vectors (sums with 16 registers: 4), then of half as many; K contiguous: a row
// Scratch  per slot: two tokens' rows as floats and one state (for f64 states, for 16-bit ones of several tokens, and
//          for drafts whose state is not kept)
// Numerics float32; exp and softplus of simd.h (2 ulp). f32 states are updated in place, and 16-bit ones where a call
//          has one token: between the tokens of a call a state is not rounded.
// Traps    The state after token t may go to another slot than token t+1 is read from: `from` follows the
//          state, never the slot number. A state that nobody keeps is not written at all.
//          Prefetches run 8 rows ahead of the sums, past the end of the state too, where the next head's
//          state usually lies; a prefetch cannot fault. Further ahead they push out what the update will read.
//          Lost: storing one head's state while the next one's is read (the two streams defeat the
//          hardware prefetcher: from memory 2.5 times slower); the next state prefetched whole during the
//          update; the update's rows prefetched; the update from the top (5 % slower); panels whose rows fit L1 (rows
//          512 bytes apart meet in an eighth of its sets, which hold no more of a panel than of the whole);
//          K contiguous with 2 to 8 rows side by side (from memory up to twice slower).
// Measured Emerald Rapids, one thread, 16 heads of K=V=128 f32 (1 MiB, in the L2), in multiples of a scale in place:
//          AVX-512, [K V]: 1.54 (36 us; 1.62 by four rows at a time, sums in L1), [V K]: 1.5; AVX2: 1.72 (1.93), 2.0.
//          From memory (24 states of 16 heads): 1.33, 1.05; 1.40, 1.14.
//          thalweg bench gated_delta_rule.decode@perf
#include "thalweg/delta_rule/cpu_decode.h"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule::THALWEG_ISA {

int64_t cpu_decode_slot_bytes(const Problem& p) { return delta_rule::decode_slot_bytes(p); }

void cpu_decode(const Problem& p, const Plan& plan, const thalweg_gated_delta_rule_decode_args& a, const Exec& exec) {
  delta_rule::decode(p, plan, a, exec);
}

}  // namespace thalweg::gated_delta_rule::THALWEG_ISA
