// What a Kimi-delta-attention kernel decides on, and the kernels. Plain data: files compiled per ISA include it.
#ifndef THALWEG_OPS_KIMI_DELTA_ATTENTION_PROBLEM_H
#define THALWEG_OPS_KIMI_DELTA_ATTENTION_PROBLEM_H

#include "thalweg/core/exec.h"
#include "thalweg/ops/kimi_delta_attention/kimi_delta_attention.h"

namespace thalweg::kimi_delta_attention {

struct Problem {
  int64_t B, T, H, HV, K, V;
  int64_t N;       // sequences
  int64_t M;       // decode: slots of the pool
  int64_t every;   // fwd: tokens between chunk_states, never 0
  int64_t longest; // tokens of the longest sequence (an upper bound, T, in a size query)
  double scale;        // never 0
  double lower_bound;  // 0: the softplus form of the gate
  thalweg_dtype dtype;  // of q, k, v, o
  bool packed;          // cu_seqlens is there
};

// Where sequence n starts and ends, as rows of the flattened [B*T] token axis: token r of the
// flattened axis is element (r / T, r % T) of [B T ...]. Packed sequences have B == 1.
struct Span {
  int64_t begin, end;
};
Span sequence_span(const Problem& problem, const thalweg_tensor& cu_seqlens, int64_t n);

// Any dtype, any strides; token by token.
void cpu_generic_fwd(const Problem&, const Plan&, const thalweg_kimi_delta_attention_fwd_args&, const Exec&);
void cpu_generic_bwd(const Problem&, const Plan&, const thalweg_kimi_delta_attention_bwd_args&, const Exec&);
void cpu_generic_decode(const Problem&, const Plan&, const thalweg_kimi_delta_attention_decode_args&, const Exec&);

// The same files, compiled per instruction set (cpu_chunk_fwd.cpp, cpu_chunk_bwd.cpp, cpu_decode.cpp).
// *_slot_bytes: the workspace that one running task needs.
namespace avx2 {
void cpu_chunk_fwd(const Problem&, const Plan&, const thalweg_kimi_delta_attention_fwd_args&, const Exec&);
void cpu_chunk_bwd(const Problem&, const Plan&, const thalweg_kimi_delta_attention_bwd_args&, const Exec&);
void cpu_decode(const Problem&, const Plan&, const thalweg_kimi_delta_attention_decode_args&, const Exec&);
int64_t cpu_chunk_fwd_slot_bytes(const Problem&);
int64_t cpu_chunk_bwd_slot_bytes(const Problem&);
int64_t cpu_decode_slot_bytes(const Problem&);
}  // namespace avx2
namespace avx512 {
void cpu_chunk_fwd(const Problem&, const Plan&, const thalweg_kimi_delta_attention_fwd_args&, const Exec&);
void cpu_chunk_bwd(const Problem&, const Plan&, const thalweg_kimi_delta_attention_bwd_args&, const Exec&);
void cpu_decode(const Problem&, const Plan&, const thalweg_kimi_delta_attention_decode_args&, const Exec&);
int64_t cpu_chunk_fwd_slot_bytes(const Problem&);
int64_t cpu_chunk_bwd_slot_bytes(const Problem&);
int64_t cpu_decode_slot_bytes(const Problem&);
}  // namespace avx512

}  // namespace thalweg::kimi_delta_attention
#endif
