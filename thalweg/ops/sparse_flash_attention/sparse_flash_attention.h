// Sparse flash attention, the core of DeepSeek Sparse Attention: each query token brings a list of the keys that it
// sees, and all H query heads share one key/value head.
//
// For a query token t with visible multiset V(t), per head, with c the scale:
//
//   s_j = c (<q, k_j> + <q_rope, k_rope_j>)      L = log(exp(sink) + sum_{j in V(t)} exp(s_j))
//   P_j = exp(s_j - L)                           o = sum_{j in V(t)} P_j v_j
//
// V(t): entry e of the list, b = indices[t, e], stands for the positions b W ... b W + W - 1, W = sparse_block_size.
// Position j counts if b >= 0, j is below the sequence's number of keys, and with `causal` (CANN's sparse mode 3; mode
// 0 is without it) j <= t + keys - queries: the last query sees the last key. Every other entry, -1 or any other number
// anywhere in the list, is skipped. An entry that is listed r times counts r times.
//
// One sequence is a row of the batch, cut by q_lens and k_lens where these are given; or, with cu_seqlens and
// cu_seqlens_k, B is 1 and sequences are packed behind one another. Entries of `indices` count from the sequence's own
// first key. Query rows that belong to no sequence are 0 in every output, but for lse, which is -inf, with a sink too;
// keys that no query sees have gradient 0, and what nobody sees is never read into a result, NaN or not.
//
// An empty row (no visible key) has o = 0 and lse = -inf, row_max = row_sum = 0; with a sink lse = row_max = sink and
// row_sum = 1. Logarithms are natural, and statistics are of scaled scores: lse = row_max + log(row_sum).
//
// The value: `v`, or, when it is absent, the first V elements of `k` (the latent of absorbed MLA). Then d_k is the
// gradient of both uses, dK + dV. Give the latent a second time as `v`, the same memory, for separate d_k and d_v.
// Latent and rope part may be two tensors or one: a concatenated [.. 576] row is q and k with K = 576 and V = 512, or two
// views of it with K = 512 and KR = 64.
//
// Formulas: FlashMLA's sparse prefill and CANN's SparseFlashAttention(Grad); DeepSeek-V3.2-Exp, 2025.
#ifndef THALWEG_OPS_SPARSE_FLASH_ATTENTION_H
#define THALWEG_OPS_SPARSE_FLASH_ATTENTION_H

#include "thalweg/core/types.h"

#ifdef __cplusplus
#include "thalweg/core/error.h"
extern "C" {
#endif

// q k v o, rope parts and their gradients share one dtype, f64 f32 bf16 f16. Statistics and p are f32, f64 where q is f64.
typedef struct thalweg_sparse_flash_attention_fwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_sparse_flash_attention_fwd_args));
  thalweg_tensor q;             // [B T H K]
  thalweg_tensor k;             // [B S K]
  thalweg_tensor v;             // [B S V], optional: the first V elements of k
  thalweg_tensor q_rope;        // [B T H KR], optional, together with k_rope
  thalweg_tensor k_rope;        // [B S KR]
  thalweg_tensor indices;       // [B T E] i32 or i64: positions, or blocks of sparse_block_size positions
  thalweg_tensor sink;          // [H], optional: one more term of each head's sum, without a value
  thalweg_tensor cu_seqlens;    // [N+1] i32 or i64, optional: packed queries
  thalweg_tensor cu_seqlens_k;  // [N+1] i32 or i64, together with cu_seqlens: packed keys
  thalweg_tensor q_lens;        // [N] i32 or i64, optional: queries in use of each sequence
  thalweg_tensor k_lens;        // [N] i32 or i64, optional: keys in use of each sequence
  thalweg_tensor o;             // out [B T H V]
  thalweg_tensor lse;           // out [B T H], optional
  thalweg_tensor row_max;       // out [B T H], optional, of the scaled scores
  thalweg_tensor row_sum;       // out [B T H], optional: sum of exp(s - row_max)
  thalweg_tensor p;             // out [B T E], optional: P averaged over heads, summed over an entry's positions
  // Factor of the scores. 0 means 1 / sqrt(K + KR), the width of what is given here: models whose heads were narrower
  // before the projections were absorbed (DeepSeek-V3: 192) must give their own.
  double scale THALWEG_INIT(0);
  int64_t sparse_block_size THALWEG_INIT(0);  // positions of an entry: a power of two up to 128; 0 means 1
  int32_t causal THALWEG_INIT(0);             // 1: t sees j only if j <= t + keys - queries
} thalweg_sparse_flash_attention_fwd_args;

// The forward's inputs, and of its outputs what was kept: o and lse, or o with row_max and row_sum, save a recomputation
// of each. A row whose given lse is not finite, or whose row_sum is 0, is an empty row.
typedef struct thalweg_sparse_flash_attention_bwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_sparse_flash_attention_bwd_args));
  thalweg_tensor q;             // [B T H K]
  thalweg_tensor k;             // [B S K]
  thalweg_tensor v;             // [B S V], optional, as in fwd
  thalweg_tensor q_rope;        // [B T H KR], optional
  thalweg_tensor k_rope;        // [B S KR]
  thalweg_tensor indices;       // [B T E]
  thalweg_tensor sink;          // [H], optional
  thalweg_tensor cu_seqlens;    // [N+1], optional
  thalweg_tensor cu_seqlens_k;  // [N+1]
  thalweg_tensor q_lens;        // [N], optional
  thalweg_tensor k_lens;        // [N], optional
  thalweg_tensor o;             // [B T H V], optional: absent, sum_j P_j <d_o, v_j> is taken instead of <d_o, o>
  thalweg_tensor lse;           // [B T H], optional: absent, computed again
  thalweg_tensor row_max;       // [B T H], optional, together with row_sum, instead of lse
  thalweg_tensor row_sum;       // [B T H]
  thalweg_tensor d_o;           // [B T H V]
  thalweg_tensor d_lse;         // [B T H], optional: gradient of lse
  thalweg_tensor d_q;           // out [B T H K], optional
  thalweg_tensor d_k;           // out [B S K], optional: of keys, and of values where v is absent
  thalweg_tensor d_v;           // out [B S V], optional, needs v
  thalweg_tensor d_q_rope;      // out [B T H KR], optional
  thalweg_tensor d_k_rope;      // out [B S KR], optional
  thalweg_tensor d_sink;        // out [H], optional, dtype of sink
  thalweg_tensor p;             // out [B T E], optional, as in fwd
  double scale THALWEG_INIT(0);               // as in fwd
  int64_t sparse_block_size THALWEG_INIT(0);  // as in fwd
  int32_t causal THALWEG_INIT(0);             // as in fwd
} thalweg_sparse_flash_attention_bwd_args;

// Each returns a status; the text is in thalweg_last_error(). On an error nothing was written.
THALWEG_API thalweg_status thalweg_sparse_flash_attention_fwd(const thalweg_sparse_flash_attention_fwd_args* args,
                                                              const thalweg_context* ctx);
THALWEG_API thalweg_status thalweg_sparse_flash_attention_bwd(const thalweg_sparse_flash_attention_bwd_args* args,
                                                              const thalweg_context* ctx);
// Bytes of ctx->workspace that the call wants; tensors need no data for this.
THALWEG_API thalweg_status thalweg_sparse_flash_attention_fwd_workspace(
    const thalweg_sparse_flash_attention_fwd_args* args, const thalweg_context* ctx, size_t* bytes);
THALWEG_API thalweg_status thalweg_sparse_flash_attention_bwd_workspace(
    const thalweg_sparse_flash_attention_bwd_args* args, const thalweg_context* ctx, size_t* bytes);

#ifdef __cplusplus
}

namespace thalweg {
using sparse_flash_attention_fwd_args = thalweg_sparse_flash_attention_fwd_args;
using sparse_flash_attention_bwd_args = thalweg_sparse_flash_attention_bwd_args;

// Throw thalweg::Error.
inline void sparse_flash_attention_fwd(const sparse_flash_attention_fwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_sparse_flash_attention_fwd(&args, &ctx));
}
inline void sparse_flash_attention_bwd(const sparse_flash_attention_bwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_sparse_flash_attention_bwd(&args, &ctx));
}
}  // namespace thalweg
#endif
#endif
