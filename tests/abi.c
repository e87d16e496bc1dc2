/* The C interface from C11: one pass of each operator through the shared library, and an error. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "thalweg/core/dlpack.h"
#include "thalweg/thalweg.h"

static int failures = 0;

static void check(int ok, const char* what) {
  if (ok) return;
  ++failures;
  printf("failed: %s (last error: %s)\n", what, thalweg_last_error());
}

static thalweg_tensor tensor(void* data, int rank, int64_t a, int64_t b, int64_t c, int64_t d) {
  thalweg_tensor t;
  int64_t shape[4];
  int64_t stride = 1;
  int i;
  memset(&t, 0, sizeof t);
  shape[0] = a, shape[1] = b, shape[2] = c, shape[3] = d;
  t.data = data;
  t.dtype = THALWEG_F32;
  t.rank = rank;
  t.device_type = THALWEG_CPU;
  for (i = rank - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = stride;
    stride *= shape[i];
  }
  return t;
}

static void test_gated_delta_rule(void) {
  /* T = 2, one head, K = V = 2: keys are unit vectors, so each value is read back. */
  float q[4] = {1, 0, 0, 1}, k[4] = {1, 0, 0, 1}, v[4] = {2, 3, 5, 7}, o[4], state[4];
  thalweg_gated_delta_rule_fwd_args args = {.size = sizeof args};
  args.q = tensor(q, 4, 1, 2, 1, 2);
  args.k = tensor(k, 4, 1, 2, 1, 2);
  args.v = tensor(v, 4, 1, 2, 1, 2);
  args.o = tensor(o, 4, 1, 2, 1, 2);
  args.final_state = tensor(state, 4, 1, 1, 2, 2);
  args.scale = 1;
  check(thalweg_gated_delta_rule_fwd(&args, NULL) == THALWEG_OK, "gated_delta_rule.fwd");
  check(memcmp(o, v, sizeof o) == 0 && memcmp(state, v, sizeof state) == 0, "o and final_state equal v");

  args.v.shape[1] = 3;
  check(thalweg_gated_delta_rule_fwd(&args, NULL) == THALWEG_INVALID_ARGUMENT, "a wrong shape is refused");
  check(strcmp(thalweg_last_error(), "gated_delta_rule.fwd: v: T, got 3 in [1, 3, 1, 2], expected 2 (from q)") == 0, "text of the error");
}

static void test_short_conv(void) {
  float x[3] = {1, 2, 3}, weight[2] = {10, 1}, y[3];
  thalweg_short_conv_fwd_args args = {.size = sizeof args};
  size_t bytes = 1;
  args.x = tensor(x, 3, 1, 3, 1, 0);
  args.weight = tensor(weight, 2, 1, 2, 0, 0);
  args.y = tensor(y, 3, 1, 3, 1, 0);
  check(thalweg_short_conv_fwd_workspace(&args, NULL, &bytes) == THALWEG_OK, "short_conv.fwd workspace");
  check(thalweg_short_conv_fwd(&args, NULL) == THALWEG_OK, "short_conv.fwd");
  check(y[0] == 1 && y[1] == 12 && y[2] == 23, "y = x_t + 10 x_(t-1)");
}

static void test_gated_rms_norm(void) {
  float x[2] = {3, -3}, y[2];
  thalweg_gated_rms_norm_fwd_args args = {.size = sizeof args};
  thalweg_context ctx = {.size = sizeof ctx};
  ctx.num_threads = 1;
  args.x = tensor(x, 2, 1, 2, 0, 0);
  args.y = tensor(y, 2, 1, 2, 0, 0);
  check(thalweg_gated_rms_norm_fwd(&args, &ctx) == THALWEG_OK, "gated_rms_norm.fwd");
  check(fabsf(y[0] - 1) < 1e-6f && fabsf(y[1] + 1) < 1e-6f, "y = x / rms(x)");
}

int main(void) {
  thalweg_tensor t = tensor(NULL, 2, 3, 4, 0, 0), back;
  thalweg_dltensor dl;
  int64_t i;
  check(thalweg_abi_version() >= 1, "abi version");
  check(strcmp(thalweg_version(), "0.1.0") == 0, "version");
  check(thalweg_to_dlpack(&t, &dl) == THALWEG_OK && thalweg_from_dlpack(&dl, &back) == THALWEG_OK, "dlpack");
  check(back.rank == 2 && back.shape[1] == 4 && back.stride[0] == 4, "dlpack shape");
  for (i = 0; thalweg_pass_at(i); ++i) check(thalweg_pass_at(i)->args_size > sizeof(size_t), thalweg_pass_at(i)->name);
  check(i >= 8, "eight passes");
  check(thalweg_pass_at(-1) == NULL, "pass -1");
  test_gated_delta_rule();
  test_short_conv();
  test_gated_rms_norm();
  printf("%s\n", failures ? "failed" : "ok");
  return failures != 0;
}
