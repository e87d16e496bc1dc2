// Short convolution: depthwise, causal, over W <= 8 tokens, with bias and SiLU.
//
//   pre[t, d] = bias[d] + sum_{j < W} weight[d, j] * xx[t - (W-1) + j, d]
//   y[t, d]   = silu(pre[t, d]), or pre[t, d]
//
// xx[t] is x[t] inside the sequence; before its start it is the state's slot W + t, or 0 without a state.
// A state [N D W] holds the last W inputs of a sequence, oldest first (slot 0 is kept, never read).
// Arithmetic in float32 (float64 for float64). x and y have contiguous channels; states have D or W contiguous.
#ifndef THALWEG_OPS_SHORT_CONV_H
#define THALWEG_OPS_SHORT_CONV_H

#include "thalweg/core/types.h"

#ifdef __cplusplus
#include "thalweg/core/error.h"
extern "C" {
#endif

enum { THALWEG_ACTIVATION_NONE = 0, THALWEG_ACTIVATION_SILU = 1 };

typedef struct thalweg_short_conv_fwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_short_conv_fwd_args));
  thalweg_tensor x;                    // [B T D]
  thalweg_tensor weight;               // [D W], any strides
  thalweg_tensor bias;                 // [D], optional: 0
  thalweg_tensor initial_state;        // [N D W], optional: 0
  thalweg_tensor cu_seqlens;           // [N+1] i32 or i64, optional; then B == 1
  thalweg_tensor y;                    // out [B T D], dtype of x
  thalweg_tensor final_state;          // out [N D W], optional
  int32_t activation THALWEG_INIT(0);  // THALWEG_ACTIVATION_NONE or _SILU
} thalweg_short_conv_fwd_args;

typedef struct thalweg_short_conv_bwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_short_conv_bwd_args));
  thalweg_tensor x;                // [B T D]
  thalweg_tensor weight;           // [D W], any strides
  thalweg_tensor bias;             // [D], optional: 0
  thalweg_tensor initial_state;    // [N D W], optional: 0
  thalweg_tensor cu_seqlens;       // [N+1] i32 or i64, optional; then B == 1
  thalweg_tensor d_y;              // [B T D], dtype of x, optional: 0
  thalweg_tensor d_final_state;    // [N D W], optional: 0
  thalweg_tensor d_x;              // out [B T D], dtype of x, optional
  thalweg_tensor d_weight;         // out [D W], dtype of weight, optional
  thalweg_tensor d_bias;           // out [D], dtype of bias, optional; needs bias
  thalweg_tensor d_initial_state;  // out [N D W], dtype of initial_state, optional; needs initial_state
  int32_t activation THALWEG_INIT(0);
} thalweg_short_conv_bwd_args;

// T more tokens for each of N sequences (T = 1, or the draft tokens), states in a pool.
typedef struct thalweg_short_conv_decode_args {
  size_t size THALWEG_INIT(sizeof(thalweg_short_conv_decode_args));
  thalweg_tensor x;            // [N T D]
  thalweg_tensor weight;       // [D W], any strides
  thalweg_tensor bias;         // [D], optional: 0
  thalweg_tensor state;        // in and out [M D W]: the pool
  thalweg_tensor read_slots;   // [N] i32 or i64, optional: n; -1: padding row, its y is 0, nothing written
  thalweg_tensor write_slots;  // [N T] i32 or i64, optional: the state after token t goes there (-1: not kept);
                               // absent: the state after the last token replaces the slot it was read from
  thalweg_tensor y;            // out [N T D], dtype of x
  int32_t activation THALWEG_INIT(0);
} thalweg_short_conv_decode_args;

// Each returns a status; the text is in thalweg_last_error(). On an error nothing was written.
THALWEG_API thalweg_status thalweg_short_conv_fwd(const thalweg_short_conv_fwd_args* args,
                                                  const thalweg_context* ctx);
THALWEG_API thalweg_status thalweg_short_conv_bwd(const thalweg_short_conv_bwd_args* args,
                                                  const thalweg_context* ctx);
THALWEG_API thalweg_status thalweg_short_conv_decode(const thalweg_short_conv_decode_args* args,
                                                     const thalweg_context* ctx);
// Bytes of ctx->workspace that the call wants; tensors need no data for this.
THALWEG_API thalweg_status thalweg_short_conv_fwd_workspace(const thalweg_short_conv_fwd_args* args,
                                                            const thalweg_context* ctx, size_t* bytes);
THALWEG_API thalweg_status thalweg_short_conv_bwd_workspace(const thalweg_short_conv_bwd_args* args,
                                                            const thalweg_context* ctx, size_t* bytes);
THALWEG_API thalweg_status thalweg_short_conv_decode_workspace(const thalweg_short_conv_decode_args* args,
                                                               const thalweg_context* ctx, size_t* bytes);

#ifdef __cplusplus
}

namespace thalweg {
using short_conv_fwd_args = thalweg_short_conv_fwd_args;
using short_conv_bwd_args = thalweg_short_conv_bwd_args;
using short_conv_decode_args = thalweg_short_conv_decode_args;

// Throw thalweg::Error.
inline void short_conv_fwd(const short_conv_fwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_short_conv_fwd(&args, &ctx));
}
inline void short_conv_bwd(const short_conv_bwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_short_conv_bwd(&args, &ctx));
}
inline void short_conv_decode(const short_conv_decode_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_short_conv_decode(&args, &ctx));
}
}  // namespace thalweg
#endif
#endif
