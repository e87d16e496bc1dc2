// Block-sparse attention: softmax attention over the blocks of (queries x keys) that a mask keeps.
//
// Query token t of head h sees key token j when block_mask[n, hm, t / block_q, j / block_k] is not 0 (and, with
// causal, j <= t + S - T). Blocks are counted from token 0 of both axes, also where T and S differ. Per query:
//
//   s_j = scale <q, k_j>     L = log(sum_j exp(s_j) [+ exp(sink)])     o = sum_j exp(s_j - L) v_j
//
// All logarithms are natural. A query that sees no key has o = 0 and L = sink, or -inf without one. Query head h
// reads key/value head h / (H / HK), and head h, h / (H / HK) or 0 of the mask, as its HM is H, HK or 1.
//
// Sequences: each of the B rows is one, or B is 1 and cu_seqlens and cu_seqlens_k pack N of them. Of each the first
// q_lens queries and k_lens keys are in use, all without these. T and S of the formulas are the sequence's own numbers
// of tokens in use. Rows that no sequence uses are never read, and are 0 in every output and gradient, but for lse,
// which is -inf there, with a sink too.
//
// Dtypes: q, k, v, o, d_o and their gradients share one of f64, f32, bf16, f16; arithmetic is float32 (float64 where q
// is). Strides: q, k, v, o and their gradients have a contiguous last axis, so [B H T K] memory is a view with two
// strides exchanged; the mask and the statistics take any, the mask zero ones too.
#ifndef THALWEG_OPS_BLOCK_SPARSE_ATTENTION_H
#define THALWEG_OPS_BLOCK_SPARSE_ATTENTION_H

#include "thalweg/core/types.h"

#ifdef __cplusplus
#include "thalweg/core/error.h"
extern "C" {
#endif

typedef struct thalweg_block_sparse_attention_fwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_block_sparse_attention_fwd_args));
  thalweg_tensor q;  // [B T H K]
  thalweg_tensor k;  // [B S HK K]
  thalweg_tensor v;  // [B S HK V]
  // [N HM NQ NK] i8, u8 or bool: not 0 keeps the block; HM is H, HK or 1; NQ block_q covers the longest sequence's
  // queries, NK block_k its keys (more blocks are never read)
  thalweg_tensor block_mask;
  thalweg_tensor sink;              // [H], optional: a logit that joins every softmax of its head and has no value
  thalweg_tensor cu_seqlens;        // [N+1] i32 or i64, optional; then B == 1: borders of the packed queries
  thalweg_tensor cu_seqlens_k;      // [N+1] i32 or i64, exactly when cu_seqlens is: borders of the packed keys
  thalweg_tensor q_lens;            // [N] i32 or i64, optional: query tokens in use of each sequence; absent: all
  thalweg_tensor k_lens;            // [N] i32 or i64, optional: key tokens in use of each sequence; absent: all
  thalweg_tensor o;                 // out [B T H V]
  thalweg_tensor lse;               // out [B T H] f32 (f64 where q is), optional: L
  thalweg_tensor row_max;           // out [B T H], as lse, optional: m = max(s_j, sink); 0 where a query sees nothing
  thalweg_tensor row_sum;           // out [B T H], as lse, optional: sum exp(s_j - m); 0 where a query sees nothing
  double scale THALWEG_INIT(0);     // 0 means K^-0.5
  int64_t block_q THALWEG_INIT(0);  // query tokens of a block; 0 means 128
  int64_t block_k THALWEG_INIT(0);  // key tokens of a block; 0 means 128
  int32_t causal THALWEG_INIT(0);   // 1: besides, j <= t + S - T (the last query sees the last key)
} thalweg_block_sparse_attention_fwd_args;

// Takes the forward's inputs, its output and its statistics. An absent gradient output is not computed.
typedef struct thalweg_block_sparse_attention_bwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_block_sparse_attention_bwd_args));
  thalweg_tensor q;             // [B T H K]
  thalweg_tensor k;             // [B S HK K]
  thalweg_tensor v;             // [B S HK V]
  thalweg_tensor block_mask;    // [N HM NQ NK] i8, u8 or bool
  thalweg_tensor sink;          // [H], optional
  thalweg_tensor cu_seqlens;    // [N+1] i32 or i64, optional; then B == 1
  thalweg_tensor cu_seqlens_k;  // [N+1] i32 or i64, exactly when cu_seqlens is
  thalweg_tensor q_lens;        // [N] i32 or i64, optional
  thalweg_tensor k_lens;        // [N] i32 or i64, optional
  thalweg_tensor o;             // [B T H V]
  // [B T H], optional: L; or row_max and row_sum instead. A query whose L is not finite or whose row_sum is 0 counts as
  // one that sees nothing, so every convention for such queries (-inf, +inf, NaN, (0, 0)) is understood.
  thalweg_tensor lse;
  thalweg_tensor row_max;           // [B T H], optional
  thalweg_tensor row_sum;           // [B T H], exactly when row_max is
  thalweg_tensor d_o;               // [B T H V], dtype of q, optional: 0
  thalweg_tensor d_lse;             // [B T H], optional: 0; the gradient of L
  thalweg_tensor d_q;               // out [B T H K], dtype of q, optional
  thalweg_tensor d_k;               // out [B S HK K], dtype of q, optional: summed over the query heads that read it
  thalweg_tensor d_v;               // out [B S HK V], dtype of q, optional: likewise
  thalweg_tensor d_sink;            // out [H], dtype of sink, optional
  double scale THALWEG_INIT(0);     // 0 means K^-0.5
  int64_t block_q THALWEG_INIT(0);  // 0 means 128
  int64_t block_k THALWEG_INIT(0);  // 0 means 128
  int32_t causal THALWEG_INIT(0);
} thalweg_block_sparse_attention_bwd_args;

// Each returns a status; the text is in thalweg_last_error(). On an error nothing was written.
THALWEG_API thalweg_status thalweg_block_sparse_attention_fwd(const thalweg_block_sparse_attention_fwd_args* args,
                                                              const thalweg_context* ctx);
THALWEG_API thalweg_status thalweg_block_sparse_attention_bwd(const thalweg_block_sparse_attention_bwd_args* args,
                                                              const thalweg_context* ctx);
// Bytes of ctx->workspace that the call wants; tensors need no data for this.
THALWEG_API thalweg_status thalweg_block_sparse_attention_fwd_workspace(
    const thalweg_block_sparse_attention_fwd_args* args, const thalweg_context* ctx, size_t* bytes);
THALWEG_API thalweg_status thalweg_block_sparse_attention_bwd_workspace(
    const thalweg_block_sparse_attention_bwd_args* args, const thalweg_context* ctx, size_t* bytes);

#ifdef __cplusplus
}

namespace thalweg {
using block_sparse_attention_fwd_args = thalweg_block_sparse_attention_fwd_args;
using block_sparse_attention_bwd_args = thalweg_block_sparse_attention_bwd_args;

// Throw thalweg::Error.
inline void block_sparse_attention_fwd(const block_sparse_attention_fwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_block_sparse_attention_fwd(&args, &ctx));
}
inline void block_sparse_attention_bwd(const block_sparse_attention_bwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_block_sparse_attention_bwd(&args, &ctx));
}
}  // namespace thalweg
#endif
#endif
