// The per-channel decay gate of Kimi Delta Attention: from a raw gate to a decay's natural logarithm.
//
// Element by element, with x the raw gate of value head hv and key channel k:
//
//   y = x + dt_bias[hv,k]      a = exp(A_log[hv]); a = 1 without A_log, with and without a lower bound
//   g = -a softplus(y)                    lower_bound = 0; softplus(y) = log(1 + e^y), y itself above 20
//   g = lower_bound / (1 + e^(-a y))      lower_bound < 0: g stays between it and 0
//
// (Kimi Team, "Kimi Linear", 2025; FLA's fused_kda_gate.) g is a natural logarithm, at most 0. Backward:
//
//   d_x = -a d_g sigmoid(y)               d_A_log = sum d_g g               lower_bound = 0
//   d_x = lower_bound a d_g s (1 - s)     d_A_log = sum d_x y               lower_bound < 0, s = sigmoid(a y)
//   d_dt_bias = sum d_x                   sums over all but [HV] or [HV K], in an order that only sizes fix
//
// B, T and L are three leading axes, all alike; where there are fewer, view the others with size 1, wherever they
// stand: [T HV K] is [1 T 1 HV K], [B T HV K] is [B T 1 HV K]. Any strides; fast where K is contiguous.
// Arithmetic in float32, float64 where x is float64; d_dt_bias sums d_x before its rounding.
#ifndef THALWEG_OPS_KDA_GATE_H
#define THALWEG_OPS_KDA_GATE_H

#include "thalweg/core/types.h"

#ifdef __cplusplus
#include "thalweg/core/error.h"
extern "C" {
#endif

typedef struct thalweg_kda_gate_fwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_kda_gate_fwd_args));
  thalweg_tensor x;                    // [B T L HV K]
  thalweg_tensor A_log;                // [HV], optional: 0
  thalweg_tensor dt_bias;              // [HV K], optional: 0
  thalweg_tensor g;                    // out [B T L HV K], any float dtype
  double lower_bound THALWEG_INIT(0);  // 0: the softplus form; otherwise below 0
} thalweg_kda_gate_fwd_args;

// Takes the forward's inputs and recomputes. An absent gradient output is not computed.
typedef struct thalweg_kda_gate_bwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_kda_gate_bwd_args));
  thalweg_tensor x;                    // [B T L HV K]
  thalweg_tensor A_log;                // [HV], optional: 0
  thalweg_tensor dt_bias;              // [HV K], optional: 0
  thalweg_tensor d_g;                  // [B T L HV K], any float dtype
  thalweg_tensor d_x;                  // out [B T L HV K], dtype of x, optional
  thalweg_tensor d_A_log;              // out [HV], dtype of A_log, optional
  thalweg_tensor d_dt_bias;            // out [HV K], dtype of dt_bias, optional
  double lower_bound THALWEG_INIT(0);  // as in fwd
} thalweg_kda_gate_bwd_args;

// Each returns a status; the text is in thalweg_last_error(). On an error nothing was written.
THALWEG_API thalweg_status thalweg_kda_gate_fwd(const thalweg_kda_gate_fwd_args* args, const thalweg_context* ctx);
THALWEG_API thalweg_status thalweg_kda_gate_bwd(const thalweg_kda_gate_bwd_args* args, const thalweg_context* ctx);
// Bytes of ctx->workspace that the call wants; tensors need no data for this.
THALWEG_API thalweg_status thalweg_kda_gate_fwd_workspace(const thalweg_kda_gate_fwd_args* args,
                                                          const thalweg_context* ctx, size_t* bytes);
THALWEG_API thalweg_status thalweg_kda_gate_bwd_workspace(const thalweg_kda_gate_bwd_args* args,
                                                          const thalweg_context* ctx, size_t* bytes);

#ifdef __cplusplus
}

namespace thalweg {
using kda_gate_fwd_args = thalweg_kda_gate_fwd_args;
using kda_gate_bwd_args = thalweg_kda_gate_bwd_args;

// Throw thalweg::Error.
inline void kda_gate_fwd(const kda_gate_fwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_kda_gate_fwd(&args, &ctx));
}
inline void kda_gate_bwd(const kda_gate_bwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_kda_gate_bwd(&args, &ctx));
}
}  // namespace thalweg
#endif
#endif
