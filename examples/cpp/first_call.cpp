// One forward call of the gated delta rule: 2 heads, 128 tokens, keys and values of 64.
#include <cstdio>
#include <vector>

#include "thalweg/thalweg.h"

int main() {
  constexpr int64_t B = 1, T = 128, H = 2, K = 64, V = 64;
  std::vector<float> q(B * T * H * K, 0.1f), k(B * T * H * K, 0.1f), v(B * T * H * V, 1.0f);
  std::vector<float> g(B * T * H, -0.01f), beta(B * T * H, 0.5f);  // decay (its logarithm), write strength
  std::vector<float> o(B * T * H * V), state(B * H * K * V);
  try {
    thalweg::gated_delta_rule_fwd({.q = thalweg::view(q.data(), {B, T, H, K}),
                                   .k = thalweg::view(k.data(), {B, T, H, K}),
                                   .v = thalweg::view(v.data(), {B, T, H, V}),
                                   .g = thalweg::view(g.data(), {B, T, H}),
                                   .beta = thalweg::view(beta.data(), {B, T, H}),
                                   .o = thalweg::view(o.data(), {B, T, H, V}),
                                   .final_state = thalweg::view(state.data(), {B, H, K, V}),
                                   .use_qk_l2norm = 1});
  } catch (const thalweg::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  std::printf("o of the first token %.4f, of the last %.4f\n", o.front(), o.back());
}
