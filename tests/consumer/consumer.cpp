// Uses only what an installed Thalweg offers: built by CMake package and by pkg-config.
#include <cmath>
#include <cstdio>

#include "thalweg/core/tensor.h"
#include "thalweg/thalweg.h"

int main() {
  float x[4] = {3, -3, 1, 1}, y[4];
  thalweg::gated_rms_norm_fwd_args args{};
  args.x = thalweg::view(x, {2, 2});
  args.y = thalweg::view(y, {2, 2});
  thalweg::gated_rms_norm_fwd(args);
  bool ok = std::fabs(y[0] - 1) < 1e-6f && std::fabs(y[1] + 1) < 1e-6f && std::fabs(y[2] - 1) < 1e-6f;
  try {
    args.y.shape[1] = 3;
    thalweg::gated_rms_norm_fwd(args);
    ok = false;
  } catch (const thalweg::Error& e) {
    std::printf("%s\n", e.what());
    ok = ok && e.status == THALWEG_INVALID_ARGUMENT;
  }
  std::printf("thalweg %s, %s\n", thalweg_version(), ok ? "ok" : "failed");
  return ok ? 0 : 1;
}
