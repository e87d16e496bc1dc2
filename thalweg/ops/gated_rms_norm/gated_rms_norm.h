// Gated RMSNorm: y = x * rstd * weight * a(gate), rstd = 1 / sqrt(mean(x^2) + eps), over the last axis.
//
// a is silu (gate * sigmoid(gate)) or sigmoid; without a gate a = 1. Norm first, gate after, the weight
// in between (the order of FLA's FusedRMSNormGated and of Qwen3-Next). Arithmetic in float32 (float64
// for float64). Tensors have a contiguous last axis; rows may be any stride apart.
#ifndef THALWEG_OPS_GATED_RMS_NORM_H
#define THALWEG_OPS_GATED_RMS_NORM_H

#include "thalweg/core/types.h"

#ifdef __cplusplus
#include "thalweg/core/error.h"
extern "C" {
#endif

enum { THALWEG_GATE_SILU = 0, THALWEG_GATE_SIGMOID = 1 };

typedef struct thalweg_gated_rms_norm_fwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_gated_rms_norm_fwd_args));
  thalweg_tensor x;            // [M D]
  thalweg_tensor gate;         // [M D], optional
  thalweg_tensor weight;       // [D], optional: 1
  thalweg_tensor y;            // out [M D], dtype of x
  thalweg_tensor rstd;         // out [M] f32 (f64 for f64), optional
  double eps THALWEG_INIT(0);  // inside the root; 0 means 1e-6
  int32_t gate_activation THALWEG_INIT(0);
} thalweg_gated_rms_norm_fwd_args;

typedef struct thalweg_gated_rms_norm_bwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_gated_rms_norm_bwd_args));
  thalweg_tensor x;            // [M D]
  thalweg_tensor gate;         // [M D], optional
  thalweg_tensor weight;       // [D], optional: 1
  thalweg_tensor d_y;          // [M D], dtype of x
  thalweg_tensor d_x;          // out [M D], dtype of x, optional
  thalweg_tensor d_gate;       // out [M D], dtype of gate, optional
  thalweg_tensor d_weight;     // out [D], dtype of weight, optional
  double eps THALWEG_INIT(0);  // as in fwd
  int32_t gate_activation THALWEG_INIT(0);
} thalweg_gated_rms_norm_bwd_args;

// Each returns a status; the text is in thalweg_last_error(). On an error nothing was written.
THALWEG_API thalweg_status thalweg_gated_rms_norm_fwd(const thalweg_gated_rms_norm_fwd_args* args,
                                                      const thalweg_context* ctx);
THALWEG_API thalweg_status thalweg_gated_rms_norm_bwd(const thalweg_gated_rms_norm_bwd_args* args,
                                                      const thalweg_context* ctx);
// Bytes of ctx->workspace that the call wants; tensors need no data for this.
THALWEG_API thalweg_status thalweg_gated_rms_norm_fwd_workspace(const thalweg_gated_rms_norm_fwd_args* args,
                                                                const thalweg_context* ctx, size_t* bytes);
THALWEG_API thalweg_status thalweg_gated_rms_norm_bwd_workspace(const thalweg_gated_rms_norm_bwd_args* args,
                                                                const thalweg_context* ctx, size_t* bytes);

#ifdef __cplusplus
}

namespace thalweg {
using gated_rms_norm_fwd_args = thalweg_gated_rms_norm_fwd_args;
using gated_rms_norm_bwd_args = thalweg_gated_rms_norm_bwd_args;

// Throw thalweg::Error.
inline void gated_rms_norm_fwd(const gated_rms_norm_fwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_gated_rms_norm_fwd(&args, &ctx));
}
inline void gated_rms_norm_bwd(const gated_rms_norm_bwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_gated_rms_norm_bwd(&args, &ctx));
}
}  // namespace thalweg
#endif
#endif
