// What a kernel of a delta-rule operator (gated_delta_rule, kimi_delta_attention) decides on. Plain data: files
// compiled per ISA include it.
#ifndef THALWEG_DELTA_RULE_PROBLEM_H
#define THALWEG_DELTA_RULE_PROBLEM_H

#include "thalweg/core/types.h"

namespace thalweg::delta_rule {

struct Problem {
  int64_t B, T, H, HV, K, V;
  int64_t channels;     // decays of a head and token: 1, or K with a decay per key channel
  int64_t N;            // sequences
  int64_t M;            // decode: slots of the pool
  int64_t every;        // fwd: tokens between chunk_states, never 0
  int64_t longest;      // tokens of the longest sequence (an upper bound, T, in a size query)
  double scale;         // never 0
  double lower_bound;   // 0: the softplus form of the gate
  thalweg_dtype dtype;  // of q, k, v, o
  bool packed;          // cu_seqlens is there
  bool fused;           // the norm, the gate or the sigmoid is asked for
  bool rate_sum;        // bwd: d_A_log is wanted
  bool slots;           // decode: read_slots or write_slots are there
  bool k_contiguous;    // decode: of the state, not V
  bool aligned16;       // decode: every row of the state starts at 16 bytes
  thalweg_dtype state;  // decode: of the state
};

// Where sequence n starts and ends, as rows of the flattened [B*T] token axis: token r of the
// flattened axis is element (r / T, r % T) of [B T ...]. Packed sequences have B == 1.
struct Span {
  int64_t begin, end;
};
Span sequence_span(const Problem& problem, const thalweg_tensor& cu_seqlens, int64_t n);

}  // namespace thalweg::delta_rule
#endif
