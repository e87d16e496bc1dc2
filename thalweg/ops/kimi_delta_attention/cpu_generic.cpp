// cpu_generic: the recurrences of thalweg/delta_rule/generic_fwd.h and generic_bwd.h, with a decay per key channel.
#include "thalweg/delta_rule/generic_bwd.h"
#include "thalweg/delta_rule/generic_fwd.h"
#include "thalweg/ops/kimi_delta_attention/problem.h"

namespace thalweg::kimi_delta_attention {

void cpu_generic_fwd(const Problem& p, const Plan& plan, const thalweg_kimi_delta_attention_fwd_args& a,
                     const Exec& exec) {
  delta_rule::generic_fwd(p, plan, a, exec);
}
void cpu_generic_bwd(const Problem& p, const Plan& plan, const thalweg_kimi_delta_attention_bwd_args& a,
                     const Exec& exec) {
  delta_rule::generic_bwd(p, plan, a, exec);
}
void cpu_generic_decode(const Problem& p, const Plan& plan, const thalweg_kimi_delta_attention_decode_args& a,
                        const Exec& exec) {
  delta_rule::generic_decode(p, plan, a, exec);
}

}  // namespace thalweg::kimi_delta_attention
