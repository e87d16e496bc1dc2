// The oracle of Kimi delta attention: finite differences, closed forms.
#include "tests/delta_rule_reference.h"
#include "thalweg/ops/kimi_delta_attention/kimi_delta_attention.h"
#include "thalweg/ops/kimi_delta_attention/reference.h"

namespace thalweg::tests {
namespace {

struct KimiDeltaAttention {
  using Fwd = kimi_delta_attention_fwd_args;
  using Bwd = kimi_delta_attention_bwd_args;
  static void fwd(const Fwd& a) { kimi_delta_attention::reference_fwd(&a); }
  static void bwd(const Bwd& a) { kimi_delta_attention::reference_bwd(&a); }
  static constexpr bool per_channel = true;
};
INSTANTIATE_TYPED_TEST_SUITE_P(KimiDeltaAttention, DeltaRuleReference, KimiDeltaAttention);

using Kda = Tiny<KimiDeltaAttention>;

// Channels are rows of the state that meet only in k and q: with one key and query channel at a time, each
// row lives alone.
TEST(KimiDeltaAttentionReference, EveryChannelHasItsOwnDecay) {
  Kda tiny({1, 0, true, false, false, true, false});
  for (double& x : tiny.k) x = 0;  // nothing is written: the state only decays
  for (size_t t = 0; t < 5; ++t)
    for (size_t i = 0; i < 3; ++i) tiny.q[t * 3 + i] = i == t % 3;
  tiny.scale = 1;
  tiny.forward();
  for (size_t hv = 0; hv < 2; ++hv)
    for (size_t t = 0; t < 5; ++t) {
      const size_t i = t % 3;
      double sum = 0;
      for (size_t s = 0; s <= t; ++s) sum += tiny.g[(s * 2 + hv) * 3 + i];
      for (size_t j = 0; j < 2; ++j)
        EXPECT_NEAR(tiny.o[(t * 2 + hv) * 2 + j], std::exp(sum) * tiny.initial_state[(hv * 3 + i) * 2 + j], 1e-14);
    }
}

// A channel of -inf forgets its row of the state, and the others keep theirs.
TEST(KimiDeltaAttentionReference, OneInfiniteChannelForgetsOneRow) {
  Kda tiny({1, 1, true, false, false, false, true}, {.T = 1});
  for (double& x : tiny.beta) x = 0;
  for (size_t hv = 0; hv < 2; ++hv) tiny.g[hv * 3 + 1] = -std::numeric_limits<double>::infinity();
  tiny.forward();
  const Gradients d = backward(tiny);
  for (size_t i = 0; i < tiny.final_state.size(); ++i) {
    const bool forgotten = i / 2 % 3 == 1;
    EXPECT_EQ(tiny.final_state[i] == 0, forgotten);
    EXPECT_EQ(d.initial_state[i] == 0, forgotten);
  }
  for (size_t i = 0; i < d.g.size(); ++i) EXPECT_EQ(d.g[i] == 0, i % 3 == 1);
}

// The bounded gate runs from 0 to its bound, half of it at 0.
TEST(KimiDeltaAttentionReference, BoundedGate) {
  for (double x : {0.0, 1000.0, -1000.0}) {
    Kda tiny({6, 1, true, false, false, false, true}, {.T = 1});
    for (double& value : tiny.beta) value = 0;
    for (double& value : tiny.g) value = x;
    tiny.forward();
    const double g = x == 0 ? -1 : x > 0 ? -2 : 0;  // the bound is -2
    for (size_t i = 0; i < tiny.final_state.size(); ++i)
      EXPECT_NEAR(tiny.final_state[i], std::exp(g) * tiny.initial_state[i], 1e-14);
    for (double slope : backward(tiny).g) EXPECT_EQ(slope == 0, x != 0);
  }
}

}  // namespace
}  // namespace thalweg::tests
