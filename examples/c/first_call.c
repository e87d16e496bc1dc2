/* One forward call of the gated delta rule: 2 heads, 128 tokens, keys and values of 64. */
#include <stdio.h>

#include "thalweg/thalweg.h"

enum { B = 1, T = 128, H = 2, K = 64, V = 64 };
static float q[B * T * H * K], k[B * T * H * K], v[B * T * H * V], o[B * T * H * V];

/* A row-major float32 view of rank 4. */
static thalweg_tensor view(float* data, int64_t heads, int64_t size) {
  thalweg_tensor t = {.data = data, .dtype = THALWEG_F32, .rank = 4, .device_type = THALWEG_CPU,
                      .shape = {B, T, heads, size}, .stride = {T * heads * size, heads * size, size, 1}};
  return t;
}

int main(void) {
  for (int i = 0; i < B * T * H * K; ++i) q[i] = k[i] = 0.1f;
  for (int i = 0; i < B * T * H * V; ++i) v[i] = 1.0f;
  thalweg_gated_delta_rule_fwd_args args = {.size = sizeof args, .q = view(q, H, K), .k = view(k, H, K),
                                            .v = view(v, H, V), .o = view(o, H, V), .use_qk_l2norm = 1};
  if (thalweg_gated_delta_rule_fwd(&args, NULL) != THALWEG_OK) { /* NULL: the default context */
    fprintf(stderr, "%s\n", thalweg_last_error());
    return 1;
  }
  printf("o of the first token %.4f, of the last %.4f\n", o[0], o[B * T * H * V - 1]);
  return 0;
}
