// What the specs of the delta-rule operators (gated_delta_rule, kimi_delta_attention) share: usual sizes, natural
// inputs, FLOPs and bytes, error limits, as Spec in testing/testing.h asks for them.
#ifndef THALWEG_TESTING_DELTA_RULE_H
#define THALWEG_TESTING_DELTA_RULE_H

#include <map>
#include <string>

#include "testing/testing.h"

namespace thalweg::testing {

void complete_delta_rule(Case& c);
void fill_delta_rule(const Case& c, std::map<std::string, Values>& inputs, Random& random);
Work work_of_delta_rule(const Case& c);
double limit_of_delta_rule(const Case& c, const std::string& output);

inline constexpr const char* kDeltaRuleKnobs =
    "gate: every g is one of these numbers joined by '/', e.g. 0/-20 or -inf; "
    "gate_at: <token>:<value>, g of that token; "
    "cos: cosine of any two keys of a head, 0 to 1; "
    "beta_max: beta is this times a sigmoid; "
    "beta_value: every beta; "
    "dscale: factor of d_o and d_final_state";

}  // namespace thalweg::testing
#endif
