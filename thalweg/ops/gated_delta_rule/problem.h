// The kernels of the gated delta rule. Plain data: files compiled per ISA include it.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_PROBLEM_H
#define THALWEG_OPS_GATED_DELTA_RULE_PROBLEM_H

#include "thalweg/core/exec.h"
#include "thalweg/delta_rule/problem.h"
#include "thalweg/ops/gated_delta_rule/gated_delta_rule.h"

namespace thalweg::gated_delta_rule {

using delta_rule::Problem;
using delta_rule::sequence_span;
using delta_rule::Span;

// Any dtype, any strides; token by token.
void cpu_generic_fwd(const Problem&, const Plan&, const thalweg_gated_delta_rule_fwd_args&, const Exec&);
void cpu_generic_bwd(const Problem&, const Plan&, const thalweg_gated_delta_rule_bwd_args&, const Exec&);
void cpu_generic_decode(const Problem&, const Plan&, const thalweg_gated_delta_rule_decode_args&, const Exec&);

// On a CUDA device: any dtype, any strides, and the fast rows (cuda_none.cpp in a build without CUDA).
void cuda_generic_fwd(const Problem&, const Plan&, const thalweg_gated_delta_rule_fwd_args&, const Exec&);
void cuda_generic_bwd(const Problem&, const Plan&, const thalweg_gated_delta_rule_bwd_args&, const Exec&);
void cuda_generic_decode(const Problem&, const Plan&, const thalweg_gated_delta_rule_decode_args&, const Exec&);
void sm90_chunk_fwd(const Problem&, const Plan&, const thalweg_gated_delta_rule_fwd_args&, const Exec&);
void sm90_chunk_bwd(const Problem&, const Plan&, const thalweg_gated_delta_rule_bwd_args&, const Exec&);
void sm90_decode(const Problem&, const Plan&, const thalweg_gated_delta_rule_decode_args&, const Exec&);

// The same files, compiled per instruction set (cpu_chunk_fwd.cpp, cpu_chunk_bwd.cpp, cpu_decode.cpp).
// *_slot_bytes: the workspace that one running task needs.
namespace avx2 {
void cpu_chunk_fwd(const Problem&, const Plan&, const thalweg_gated_delta_rule_fwd_args&, const Exec&);
void cpu_chunk_bwd(const Problem&, const Plan&, const thalweg_gated_delta_rule_bwd_args&, const Exec&);
void cpu_decode(const Problem&, const Plan&, const thalweg_gated_delta_rule_decode_args&, const Exec&);
int64_t cpu_chunk_fwd_slot_bytes(const Problem&);
int64_t cpu_chunk_bwd_slot_bytes(const Problem&);
int64_t cpu_decode_slot_bytes(const Problem&);
}  // namespace avx2
namespace avx512 {
void cpu_chunk_fwd(const Problem&, const Plan&, const thalweg_gated_delta_rule_fwd_args&, const Exec&);
void cpu_chunk_bwd(const Problem&, const Plan&, const thalweg_gated_delta_rule_bwd_args&, const Exec&);
void cpu_decode(const Problem&, const Plan&, const thalweg_gated_delta_rule_decode_args&, const Exec&);
int64_t cpu_chunk_fwd_slot_bytes(const Problem&);
int64_t cpu_chunk_bwd_slot_bytes(const Problem&);
int64_t cpu_decode_slot_bytes(const Problem&);
}  // namespace avx512

}  // namespace thalweg::gated_delta_rule
#endif
