// Gated delta rule (Gated DeltaNet): forward, backward, decode.
//
// Per sequence and value head, with a state S [K V] that starts at initial_state or 0:
//
//   S <- exp(g_t) S                    decay first
//   u  = beta_t (v_t - S^T k_t)        the delta, measured against the decayed state
//   S <- S + k_t u^T                   rank-1 write
//   o_t = scale S^T q_t                read after the write
//
// (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024.) Value head hv reads query/key head
// hv / (HV / H). g is a natural logarithm, meant to be <= 0. Before the recurrence, where asked:
//
//   use_qk_l2norm     q, k <- x / sqrt(sum x^2 + 1e-6)
//   use_gate          g <- -exp(A_log[hv]) softplus(g + dt_bias[hv])
//   use_beta_sigmoid  beta <- sigmoid(beta), or 2 sigmoid(beta) with allow_neg_eigval
//
// Dtypes: q, k, v, o share one of f64, f32, bf16, f16; every other float tensor may be any of them.
// Arithmetic and state in float32 (float64 where q is float64). K and V up to 512.
// Strides: q, k, v, o and their gradients have a contiguous last axis; states have K or V contiguous, so
// a value-first state [N HV V K] is a view with its last two strides exchanged; g and beta (and
// their gradients) take any strides, the inputs zero ones too.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_H
#define THALWEG_OPS_GATED_DELTA_RULE_H

#include "thalweg/core/types.h"

#ifdef __cplusplus
#include "thalweg/core/error.h"
extern "C" {
#endif

typedef struct thalweg_gated_delta_rule_fwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_gated_delta_rule_fwd_args));
  thalweg_tensor q;                          // [B T H K]
  thalweg_tensor k;                          // [B T H K]
  thalweg_tensor v;                          // [B T HV V]
  thalweg_tensor g;                          // [B T HV], optional: 0 (the plain delta rule)
  thalweg_tensor beta;                       // [B T HV], optional: 1
  thalweg_tensor A_log;                      // [HV], with use_gate
  thalweg_tensor dt_bias;                    // [HV], optional: 0; with use_gate
  thalweg_tensor initial_state;              // [N HV K V], optional: 0
  // [N+1] i32 or i64, optional; then B == 1; rows past cu_seqlens[N] get o = 0
  thalweg_tensor cu_seqlens;
  thalweg_tensor o;                          // out [B T HV V]
  thalweg_tensor final_state;                // out [N HV K V], optional
  // out [R HV K V], optional, R = B*T/every + N: the state before every every-th token. Checkpoint c of
  // sequence n is row start/every + n + c, start = its first token; c = 0 is the initial state; unused rows are 0.
  thalweg_tensor chunk_states;
  double scale THALWEG_INIT(0);              // 0 means K^-0.5
  int64_t every THALWEG_INIT(0);             // tokens between chunk_states; 0 means 64
  int32_t use_qk_l2norm THALWEG_INIT(0);
  int32_t use_gate THALWEG_INIT(0);
  int32_t use_beta_sigmoid THALWEG_INIT(0);
  int32_t allow_neg_eigval THALWEG_INIT(0);  // needs use_beta_sigmoid
} thalweg_gated_delta_rule_fwd_args;

// Takes the forward's inputs and recomputes. An absent gradient output is not computed.
typedef struct thalweg_gated_delta_rule_bwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_gated_delta_rule_bwd_args));
  thalweg_tensor q;                          // [B T H K]
  thalweg_tensor k;                          // [B T H K]
  thalweg_tensor v;                          // [B T HV V]
  thalweg_tensor g;                          // [B T HV], optional: 0
  thalweg_tensor beta;                       // [B T HV], optional: 1
  thalweg_tensor A_log;                      // [HV], with use_gate
  thalweg_tensor dt_bias;                    // [HV], optional: 0; with use_gate
  thalweg_tensor initial_state;              // [N HV K V], optional: 0
  thalweg_tensor cu_seqlens;                 // [N+1] i32 or i64, optional; then B == 1
  thalweg_tensor d_o;                        // [B T HV V], dtype of q, optional: 0
  thalweg_tensor d_final_state;              // [N HV K V], optional: 0
  thalweg_tensor d_q;                        // out [B T H K], dtype of q, optional
  thalweg_tensor d_k;                        // out [B T H K], dtype of q, optional
  thalweg_tensor d_v;                        // out [B T HV V], dtype of q, optional
  thalweg_tensor d_g;                        // out [B T HV], dtype of g, optional: of g as given (raw with use_gate)
  // out [B T HV], dtype of beta, optional: of beta as given (logits with use_beta_sigmoid)
  thalweg_tensor d_beta;
  thalweg_tensor d_A_log;                    // out [HV], dtype of A_log, optional
  thalweg_tensor d_dt_bias;                  // out [HV], dtype of dt_bias, optional
  thalweg_tensor d_initial_state;            // out [N HV K V], any float dtype, optional; initial_state may be absent
  double scale THALWEG_INIT(0);              // 0 means K^-0.5
  int32_t use_qk_l2norm THALWEG_INIT(0);
  int32_t use_gate THALWEG_INIT(0);
  int32_t use_beta_sigmoid THALWEG_INIT(0);
  int32_t allow_neg_eigval THALWEG_INIT(0);  // needs use_beta_sigmoid
} thalweg_gated_delta_rule_bwd_args;

// T more tokens for each of N sequences (T = 1, or the draft tokens), states in a pool.
typedef struct thalweg_gated_delta_rule_decode_args {
  size_t size THALWEG_INIT(sizeof(thalweg_gated_delta_rule_decode_args));
  thalweg_tensor q;                          // [N T H K]
  thalweg_tensor k;                          // [N T H K]
  thalweg_tensor v;                          // [N T HV V]
  thalweg_tensor g;                          // [N T HV], optional: 0
  thalweg_tensor beta;                       // [N T HV], optional: 1
  thalweg_tensor A_log;                      // [HV], with use_gate
  thalweg_tensor dt_bias;                    // [HV], optional: 0; with use_gate
  thalweg_tensor state;                      // in and out [M HV K V]: the pool
  // [N] i32 or i64, optional: n; -1: padding row, its o is 0, nothing written
  thalweg_tensor read_slots;
  // [N T] i32 or i64, optional: the state after token t goes there (-1: not kept); absent: the state after the
  // last token replaces the slot it was read from
  thalweg_tensor write_slots;
  thalweg_tensor o;                          // out [N T HV V]
  double scale THALWEG_INIT(0);              // 0 means K^-0.5
  int32_t use_qk_l2norm THALWEG_INIT(0);
  int32_t use_gate THALWEG_INIT(0);
  int32_t use_beta_sigmoid THALWEG_INIT(0);
  int32_t allow_neg_eigval THALWEG_INIT(0);  // needs use_beta_sigmoid
} thalweg_gated_delta_rule_decode_args;

// Each returns a status; the text is in thalweg_last_error(). On an error nothing was written.
THALWEG_API thalweg_status thalweg_gated_delta_rule_fwd(const thalweg_gated_delta_rule_fwd_args* args,
                                                        const thalweg_context* ctx);
THALWEG_API thalweg_status thalweg_gated_delta_rule_bwd(const thalweg_gated_delta_rule_bwd_args* args,
                                                        const thalweg_context* ctx);
THALWEG_API thalweg_status thalweg_gated_delta_rule_decode(const thalweg_gated_delta_rule_decode_args* args,
                                                           const thalweg_context* ctx);
// Bytes of ctx->workspace that the call wants; tensors need no data for this.
THALWEG_API thalweg_status thalweg_gated_delta_rule_fwd_workspace(
    const thalweg_gated_delta_rule_fwd_args* args, const thalweg_context* ctx, size_t* bytes);
THALWEG_API thalweg_status thalweg_gated_delta_rule_bwd_workspace(
    const thalweg_gated_delta_rule_bwd_args* args, const thalweg_context* ctx, size_t* bytes);
THALWEG_API thalweg_status thalweg_gated_delta_rule_decode_workspace(
    const thalweg_gated_delta_rule_decode_args* args, const thalweg_context* ctx, size_t* bytes);

#ifdef __cplusplus
}

namespace thalweg {
using gated_delta_rule_fwd_args = thalweg_gated_delta_rule_fwd_args;
using gated_delta_rule_bwd_args = thalweg_gated_delta_rule_bwd_args;
using gated_delta_rule_decode_args = thalweg_gated_delta_rule_decode_args;

// Throw thalweg::Error.
inline void gated_delta_rule_fwd(const gated_delta_rule_fwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_gated_delta_rule_fwd(&args, &ctx));
}
inline void gated_delta_rule_bwd(const gated_delta_rule_bwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_gated_delta_rule_bwd(&args, &ctx));
}
inline void gated_delta_rule_decode(const gated_delta_rule_decode_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_gated_delta_rule_decode(&args, &ctx));
}
}  // namespace thalweg
#endif
#endif
