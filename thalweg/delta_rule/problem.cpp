#include "thalweg/delta_rule/problem.h"

#include "thalweg/core/signature.h"

namespace thalweg::delta_rule {

Span sequence_span(const Problem& problem, const thalweg_tensor& cu_seqlens, int64_t n) {
  if (!problem.packed) return {n * problem.T, (n + 1) * problem.T};
  return {int_at(cu_seqlens, n), int_at(cu_seqlens, n + 1)};
}

}  // namespace thalweg::delta_rule
