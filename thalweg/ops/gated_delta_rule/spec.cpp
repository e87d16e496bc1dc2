// Gated delta rule for tools and tests; what it shares with its sister is in testing/delta_rule.h.
#include <iterator>

#include "testing/delta_rule.h"
#include "thalweg/ops/gated_delta_rule/reference.h"

namespace thalweg {
namespace {

constexpr testing::Spec spec(const char* pass, void (*reference)(const void* args)) {
  return {"gated_delta_rule",
          pass,
          testing::complete_delta_rule,
          testing::fill_delta_rule,
          reference,
          testing::work_of_delta_rule,
          testing::limit_of_delta_rule,
          testing::kDeltaRuleKnobs,
          "H HV"};
}

const testing::Spec kSpecs[] = {
    spec("fwd", gated_delta_rule::reference_fwd),
    spec("bwd", gated_delta_rule::reference_bwd),
    spec("decode", gated_delta_rule::reference_decode),
};

}  // namespace

const testing::Spec* gated_delta_rule_spec_at(int i) {
  return i >= 0 && i < int(std::size(kSpecs)) ? &kSpecs[i] : nullptr;
}

}  // namespace thalweg
