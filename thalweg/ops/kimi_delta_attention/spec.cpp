// Kimi delta attention for tools and tests; what it shares with its sister is in testing/delta_rule.h.
#include <iterator>

#include "testing/delta_rule.h"
#include "thalweg/ops/kimi_delta_attention/reference.h"

namespace thalweg {
namespace {

constexpr testing::Spec spec(const char* pass, void (*reference)(const void* args)) {
  return {"kimi_delta_attention",
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
    spec("fwd", kimi_delta_attention::reference_fwd),
    spec("bwd", kimi_delta_attention::reference_bwd),
    spec("decode", kimi_delta_attention::reference_decode),
};

}  // namespace

const testing::Spec* kimi_delta_attention_spec_at(int i) {
  return i >= 0 && i < int(std::size(kSpecs)) ? &kSpecs[i] : nullptr;
}

}  // namespace thalweg
