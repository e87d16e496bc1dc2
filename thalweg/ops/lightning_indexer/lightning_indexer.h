// Lightning indexer: scores every visible key with a few cheap heads, keeps the best; with its training loss.
//
//   I[t, s] = sum_h w[t, h] relu(scale <q[t, h], k[s]>)
//
// fwd   indices of the E largest I[t, .], by value descending, at equal values by index ascending
// loss  KL(p || softmax(I)) over the E keys of a row's list, or over all visible keys (the dense warm-up)
// bwd   gradients of q, k and w, from those of the loss and of the scores
//
// B batch, N sequences, T query tokens, S key tokens, H heads, K head dim, E entries of a row's list. One key head is
// shared by all H heads. A key s of its sequence is visible to query t of it when start[t] <= s < end[t], and with
// `causal` when s <= t + keys - queries (the last query sees the last key). Packed: B is 1, and sequence n is
// queries cu_seqlens[n] .. cu_seqlens[n+1] and keys cu_seqlens_k[n] .. cu_seqlens_k[n+1]. Indices, start and end
// count from the sequence's first key. Arithmetic in float32 (float64 where q is float64).
//
// The scores, the list and the loss are those of DeepSeek-V3.2's sparse attention.
#ifndef THALWEG_OPS_LIGHTNING_INDEXER_H
#define THALWEG_OPS_LIGHTNING_INDEXER_H

#include "thalweg/core/types.h"

#ifdef __cplusplus
#include "thalweg/core/error.h"
extern "C" {
#endif

enum { THALWEG_INDEXER_BY_SCORE = 0, THALWEG_INDEXER_BY_INDEX = 1 };

typedef struct thalweg_lightning_indexer_fwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_lightning_indexer_fwd_args));
  thalweg_tensor q;              // [B T H K]
  thalweg_tensor k;              // [B S K], dtype of q
  thalweg_tensor w;              // [B T H]
  thalweg_tensor start;          // [B T] i32 i64, optional: 0
  thalweg_tensor end;            // [B T] i32 i64, optional: the number of keys
  thalweg_tensor q_lens;         // [N] i32 i64, optional: all; a sequence's queries from there on are padding
  thalweg_tensor k_lens;         // [N] i32 i64, optional: all; a sequence's keys from there on are padding
  thalweg_tensor cu_seqlens;     // [N+1] i32 i64, optional: packed queries
  thalweg_tensor cu_seqlens_k;   // [N+1] i32 i64, with cu_seqlens: packed keys
  thalweg_tensor indices;        // out [B T E] i32 i64; -1 after the last visible key
  thalweg_tensor scores;         // out [B T E] f32 f64, optional: I of the indices; minus infinity at -1
  double scale THALWEG_INIT(0);  // of <q, k>, above 0; 0 means 1
  int32_t causal THALWEG_INIT(0);
  int32_t order THALWEG_INIT(0);  // THALWEG_INDEXER_BY_SCORE, or the same indices ascending
} thalweg_lightning_indexer_fwd_args;

typedef struct thalweg_lightning_indexer_loss_args {
  size_t size THALWEG_INIT(sizeof(thalweg_lightning_indexer_loss_args));
  thalweg_tensor q;        // [B T H K]
  thalweg_tensor k;        // [B S K], dtype of q
  thalweg_tensor w;        // [B T H]
  thalweg_tensor indices;  // [B T E] i32 i64, optional: entry e is key e, E is S or more
  thalweg_tensor p;        // [B T E], optional: the main attention's probabilities; needed for loss
  thalweg_tensor start;    // as in fwd, down to cu_seqlens_k
  thalweg_tensor end;
  thalweg_tensor q_lens;
  thalweg_tensor k_lens;
  thalweg_tensor cu_seqlens;
  thalweg_tensor cu_seqlens_k;
  thalweg_tensor loss;           // out [B T] f32 f64, optional: sum_e p (ln p - ln y), y = softmax_e(I)
  thalweg_tensor scores;         // out [B T E] f32 f64, optional: I of each entry; minus infinity where not visible
  double scale THALWEG_INIT(0);  // as in fwd
  int32_t causal THALWEG_INIT(0);
} thalweg_lightning_indexer_loss_args;

typedef struct thalweg_lightning_indexer_bwd_args {
  size_t size THALWEG_INIT(sizeof(thalweg_lightning_indexer_bwd_args));
  thalweg_tensor q;  // as in loss, down to p
  thalweg_tensor k;
  thalweg_tensor w;
  thalweg_tensor indices;
  thalweg_tensor p;
  thalweg_tensor start;  // as in fwd, down to cu_seqlens_k
  thalweg_tensor end;
  thalweg_tensor q_lens;
  thalweg_tensor k_lens;
  thalweg_tensor cu_seqlens;
  thalweg_tensor cu_seqlens_k;
  thalweg_tensor d_loss;         // [B T], optional: 0; needs p
  thalweg_tensor d_scores;       // [B T E], optional: 0; what stands at entries that are not visible is ignored
  thalweg_tensor d_q;            // out [B T H K], dtype of q, optional
  thalweg_tensor d_k;            // out [B S K], dtype of k, optional
  thalweg_tensor d_w;            // out [B T H], dtype of w, optional
  double scale THALWEG_INIT(0);  // as in fwd
  int32_t causal THALWEG_INIT(0);
} thalweg_lightning_indexer_bwd_args;

// Each returns a status; the text is in thalweg_last_error(). On an error nothing was written.
THALWEG_API thalweg_status thalweg_lightning_indexer_fwd(const thalweg_lightning_indexer_fwd_args* args,
                                                         const thalweg_context* ctx);
THALWEG_API thalweg_status thalweg_lightning_indexer_loss(const thalweg_lightning_indexer_loss_args* args,
                                                          const thalweg_context* ctx);
THALWEG_API thalweg_status thalweg_lightning_indexer_bwd(const thalweg_lightning_indexer_bwd_args* args,
                                                         const thalweg_context* ctx);
// Bytes of ctx->workspace that the call wants; tensors need no data for this.
THALWEG_API thalweg_status thalweg_lightning_indexer_fwd_workspace(const thalweg_lightning_indexer_fwd_args* args,
                                                                   const thalweg_context* ctx, size_t* bytes);
THALWEG_API thalweg_status thalweg_lightning_indexer_loss_workspace(const thalweg_lightning_indexer_loss_args* args,
                                                                    const thalweg_context* ctx, size_t* bytes);
THALWEG_API thalweg_status thalweg_lightning_indexer_bwd_workspace(const thalweg_lightning_indexer_bwd_args* args,
                                                                   const thalweg_context* ctx, size_t* bytes);

#ifdef __cplusplus
}

namespace thalweg {
using lightning_indexer_fwd_args = thalweg_lightning_indexer_fwd_args;
using lightning_indexer_loss_args = thalweg_lightning_indexer_loss_args;
using lightning_indexer_bwd_args = thalweg_lightning_indexer_bwd_args;

// Throw thalweg::Error.
inline void lightning_indexer_fwd(const lightning_indexer_fwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_lightning_indexer_fwd(&args, &ctx));
}
inline void lightning_indexer_loss(const lightning_indexer_loss_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_lightning_indexer_loss(&args, &ctx));
}
inline void lightning_indexer_bwd(const lightning_indexer_bwd_args& args, const thalweg_context& ctx = {}) {
  throw_on_error(thalweg_lightning_indexer_bwd(&args, &ctx));
}
}  // namespace thalweg
#endif
#endif
