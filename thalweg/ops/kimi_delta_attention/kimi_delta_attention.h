// Kimi delta attention (KDA): forward, backward, decode. The gated delta rule with a decay per key channel.
//
// Per sequence and value head, with a state S [K V] that starts at initial_state or 0:
//
//   S <- diag(exp(g_t)) S              decay first, each key channel its own
//   u  = beta_t (v_t - S^T k_t)        the delta, measured against the decayed state
//   S <- S + k_t u^T                   rank-1 write
//   o_t = scale S^T q_t                read after the write
//
// (Kimi Team, "Kimi Linear", 2025.) Value head hv reads query/key head hv / (HV / H). g is a natural logarithm,
// <= 0. Before the recurrence, where asked:
//
//   use_qk_l2norm     q, k <- x / sqrt(sum x^2 + 1e-6)
//   use_gate          x = g + dt_bias[hv,k];  g <- -exp(A_log[hv]) softplus(x), or, with lower_bound,
//                     g <- lower_bound sigmoid(exp(A_log[hv]) x)           (A_log absent there: exp(A_log) = 1)
//   use_beta_sigmoid  beta <- sigmoid(beta), or 2 sigmoid(beta) with allow_neg_eigval
//
// Dtypes: q, k, v, o share one of f64, f32, bf16, f16; every other float tensor may be any of them.
// Arithmetic and state in float32 (float64 where q is float64). K and V up to 512.
// Strides: q, k, v, o and their gradients have a contiguous last axis; states have K or V contiguous, so
// a value-first state [N HV V K] is a view with its last two strides exchanged; g and beta (and
// their gradients) take any strides, the inputs zero ones too.
#ifndef THALWEG_OPS_KIMI_DELTA_ATTENTION_H
#define THALWEG_OPS_KIMI_DELTA_ATTENTION_H

#include "thalweg/core/types.h"

#ifdef __cplusplus
#include "thalweg/core/error.h"
extern "C" {
#endif

typedef struct thalweg_kimi_delta_attention_fwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_kimi_delta_attention_fwd_args));
  thalweg_tensor q;                          // [B T H K]
  thalweg_tensor k;                          // [B T H K]
  thalweg_tensor v;                          // [B T HV V]
  thalweg_tensor g;                          // [B T HV K], optional: 0 (the plain delta rule)
  thalweg_tensor beta;                       // [B T HV], optional: 1
  thalweg_tensor A_log;                      // [HV], with use_gate; optional with lower_bound: 0
  thalweg_tensor dt_bias;                    // [HV K], optional: 0; with use_gate
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
  double lower_bound THALWEG_INIT(0);        // with use_gate: 0 means the softplus form, otherwise below 0
  int32_t use_qk_l2norm THALWEG_INIT(0);
  int32_t use_gate THALWEG_INIT(0);
  int32_t use_beta_sigmoid THALWEG_INIT(0);
  int32_t allow_neg_eigval THALWEG_INIT(0);  // needs use_beta_sigmoid
} thalweg_kimi_delta_attention_fwd_args;

// Takes the forward's inputs and recomputes. An absent gradient output is not computed.
typedef struct thalweg_kimi_delta_attention_bwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_kimi_delta_attention_bwd_args));
  thalweg_tensor q;                          // [B T H K]
  thalweg_tensor k;                          // [B T H K]
  thalweg_tensor v;                          // [B T HV V]
  thalweg_tensor g;                          // [B T HV K], optional: 0
  thalweg_tensor beta;                       // [B T HV], optional: 1
  thalweg_tensor A_log;                      // [HV], with use_gate; optional with lower_bound: 0
  thalweg_tensor dt_bias;                    // [HV K], optional: 0; with use_gate
  thalweg_tensor initial_state;              // [N HV K V], optional: 0
  thalweg_tensor cu_seqlens;                 // [N+1] i32 or i64, optional; then B == 1
  thalweg_tensor d_o;                        // [B T HV V], dtype of q, optional: 0
  thalweg_tensor d_final_state;              // [N HV K V], optional: 0
  thalweg_tensor d_q;                        // out [B T H K], dtype of q, optional
  thalweg_tensor d_k;                        // out [B T H K], dtype of q, optional
  thalweg_tensor d_v;                        // out [B T HV V], dtype of q, optional
  thalweg_tensor d_g;                        // out [B T HV K], dtype of g, optional: of g as given (raw with use_gate)
  // out [B T HV], dtype of beta, optional: of beta as given (logits with use_beta_sigmoid)
  thalweg_tensor d_beta;
  thalweg_tensor d_A_log;                    // out [HV], dtype of A_log, optional
  thalweg_tensor d_dt_bias;                  // out [HV K], dtype of dt_bias, optional
  thalweg_tensor d_initial_state;            // out [N HV K V], any float dtype, optional; initial_state may be absent
  double scale THALWEG_INIT(0);              // 0 means K^-0.5
  double lower_bound THALWEG_INIT(0);        // with use_gate: 0 means the softplus form, otherwise below 0
  int32_t use_qk_l2norm THALWEG_INIT(0);
  int32_t use_gate THALWEG_INIT(0);
  int32_t use_beta_sigmoid THALWEG_INIT(0);
  int32_t allow_neg_eigval THALWEG_INIT(0);  // needs use_beta_sigmoid
} thalweg_kimi_delta_attention_bwd_args;

// T more tokens for each of N sequences (T = 1, or the draft tokens), states in a pool.
typedef struct thalweg_kimi_delta_attention_decode_args {
  size_t size THALWEG_INIT(sizeof(thalweg_kimi_delta_attention_decode_args));
  thalweg_tensor q;                          // [N T H K]
  thalweg_tensor k;                          // [N T H K]
  thalweg_tensor v;                          // [N T HV V]
  thalweg_tensor g;                          // [N T HV K], optional: 0
  thalweg_tensor beta;                       // [N T HV], optional: 1
  thalweg_tensor A_log;                      // [HV], with use_gate; optional with lower_bound: 0
  thalweg_tensor dt_bias;                    // [HV K], optional: 0; with use_gate
  thalweg_tensor state;                      // in and out [M HV K V]: the pool
  // [N] i32 or i64, optional: n; -1: padding row, its o is 0, nothing written
  thalweg_tensor read_slots;
  // [N T] i32 or i64, optional: the state after token t goes there (-1: not kept); absent: the state after the
  // last token replaces the slot it was read from
  thalweg_tensor write_slots;
  thalweg_tensor o;                          // out [N T HV V]
  double scale THALWEG_INIT(0);              // 0 means K^-0.5
  double lower_bound THALWEG_INIT(0);        // with use_gate: 0 means the softplus form, otherwise below 0
  int32_t use_qk_l2norm THALWEG_INIT(0);
  int32_t use_gate THALWEG_INIT(0);
  int32_t use_beta_sigmoid THALWEG_INIT(0);
  int32_t allow_neg_eigval THALWEG_INIT(0);  // needs use_beta_sigmoid
} thalweg_kimi_delta_attention_decode_args;

// Each returns a status; the text is in thalweg_last_error(). On an error nothing was written.
THALWEG_API thalweg_status thalweg_kimi_delta_attention_fwd(const thalweg_kimi_delta_attention_fwd_args* args,
                                                        const thalweg_context* ctx);
THALWEG_API thalweg_status thalweg_kimi_delta_attention_bwd(const thalweg_kimi_delta_attention_bwd_args* args,
                                                        const thalweg_context* ctx);
THALWEG_API thalweg_status thalweg_kimi_delta_attention_decode(const thalweg_kimi_delta_attention_decode_args* args,
                                                           const thalweg_context* ctx);
// Bytes of ctx->workspace that the call wants; tensors need no data for this.
THALWEG_API thalweg_status thalweg_kimi_delta_attention_fwd_workspace(
    const thalweg_kimi_delta_attention_fwd_args* args, const thalweg_context* ctx, size_t* bytes);
THALWEG_API thalweg_status thalweg_kimi_delta_attention_bwd_workspace(
    const thalweg_kimi_delta_attention_bwd_args* args, const thalweg_context* ctx, size_t* bytes);
THALWEG_API thalweg_status thalweg_kimi_delta_attention_decode_workspace(
    const thalweg_kimi_delta_attention_decode_args* args, const thalweg_context* ctx, size_t* bytes);

#ifdef __cplusplus
}

namespace thalweg {
using kimi_delta_attention_fwd_args = thalweg_kimi_delta_attention_fwd_args;
using kimi_delta_attention_bwd_args = thalweg_kimi_delta_attention_bwd_args;
using kimi_delta_attention_decode_args = thalweg_kimi_delta_attention_decode_args;

// Throw thalweg::Error.
inline void kimi_delta_attention_fwd(const kimi_delta_attention_fwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_kimi_delta_attention_fwd(&args, &ctx));
}
inline void kimi_delta_attention_bwd(const kimi_delta_attention_bwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_kimi_delta_attention_bwd(&args, &ctx));
}
inline void kimi_delta_attention_decode(const kimi_delta_attention_decode_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_kimi_delta_attention_decode(&args, &ctx));
}
}  // namespace thalweg
#endif
#endif
