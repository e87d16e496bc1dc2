// What a lightning-indexer kernel decides on, and the kernels. Plain data: files compiled per ISA include it.
#ifndef THALWEG_OPS_LIGHTNING_INDEXER_PROBLEM_H
#define THALWEG_OPS_LIGHTNING_INDEXER_PROBLEM_H

#include "thalweg/core/exec.h"
#include "thalweg/ops/lightning_indexer/lightning_indexer.h"

namespace thalweg::lightning_indexer {

struct Problem {
  int64_t B, T, S, N, H, K, E;
  double scale;         // never 0
  thalweg_dtype dtype;  // of q, k
  bool causal;
  bool by_index;  // fwd: the list in order of index
  bool dense;     // loss, bwd: no list; entry e is key e
  bool packed;    // cu_seqlens is there
  bool wants_d_k;
};

// The tensors that say which keys a query sees; absent ones as in the args.
struct Mask {
  const thalweg_tensor &start, &end, &q_lens, &k_lens, &cu_seqlens, &cu_seqlens_k;
};
Mask mask_of(const thalweg_lightning_indexer_fwd_args& args);
Mask mask_of(const thalweg_lightning_indexer_loss_args& args);
Mask mask_of(const thalweg_lightning_indexer_bwd_args& args);

// The keys that query row r = b T + t sees: positions begin .. end of its sequence, whose key 0 is row `first` of
// k seen as [B S][K].
struct Keys {
  int64_t first, begin, end;  // nothing is visible when begin == end
};
Keys visible_keys(const Problem& problem, const Mask& mask, int64_t r);

// The entries of row r's list that are visible, in order: their places in the list, and their keys as rows of
// [B S][K]. Returns how many; both arrays have room for E.
int64_t visible_entries(const Problem& problem, const Mask& mask, const thalweg_tensor& indices, int64_t r,
                        int32_t* entries, int64_t* keys);

// Rows of d_k that one task sums, so that no two tasks write one row: by size alone.
int64_t key_range(const Problem& problem);

// Any dtype, any strides.
void cpu_generic_fwd(const Problem&, const Plan&, const thalweg_lightning_indexer_fwd_args&, const Exec&);
void cpu_generic_loss(const Problem&, const Plan&, const thalweg_lightning_indexer_loss_args&, const Exec&);
void cpu_generic_bwd(const Problem&, const Plan&, const thalweg_lightning_indexer_bwd_args&, const Exec&);
void cuda_generic_fwd(const Problem&, const Plan&, const thalweg_lightning_indexer_fwd_args&, const Exec&);
void cuda_generic_loss(const Problem&, const Plan&, const thalweg_lightning_indexer_loss_args&, const Exec&);
void cuda_generic_bwd(const Problem&, const Plan&, const thalweg_lightning_indexer_bwd_args&, const Exec&);
// Workspace of the CPU's generic rows: of a slot; bwd: shared.
int64_t generic_fwd_bytes(const Problem& problem);
int64_t generic_list_bytes(const Problem& problem);
int64_t generic_shared_bytes(const Problem& problem);

// Plan.values of the vector rows.
enum { kRows = 0 };                  // query rows of a task (fwd), of a chunk (bwd)
constexpr int64_t kForwardRows = 4;  // at most
constexpr int64_t kPitchPad = 16;    // floats behind a key in scratch

// cpu_vec_fwd.cpp, cpu_vec_loss.cpp and cpu_vec_bwd.cpp, compiled per instruction set; their workspace: of a slot,
// and shared for the keys, the sums of d_k, and what a chunk of rows leaves to the second phase.
namespace avx2 {
void cpu_vec_fwd(const Problem&, const Plan&, const thalweg_lightning_indexer_fwd_args&, const Exec&);
void cpu_vec_loss(const Problem&, const Plan&, const thalweg_lightning_indexer_loss_args&, const Exec&);
void cpu_vec_bwd(const Problem&, const Plan&, const thalweg_lightning_indexer_bwd_args&, const Exec&);
int64_t cpu_vec_fwd_slot_bytes(const Problem& problem);
int64_t cpu_vec_loss_slot_bytes(const Problem& problem);
int64_t cpu_vec_bwd_slot_bytes(const Problem& problem);
int64_t cpu_vec_key_bytes(const Problem& problem);
int64_t cpu_vec_sum_bytes(const Problem& problem);
int64_t cpu_vec_bwd_chunk_bytes(const Problem& problem, int64_t rows);
}  // namespace avx2
namespace avx512 {
void cpu_vec_fwd(const Problem&, const Plan&, const thalweg_lightning_indexer_fwd_args&, const Exec&);
void cpu_vec_loss(const Problem&, const Plan&, const thalweg_lightning_indexer_loss_args&, const Exec&);
void cpu_vec_bwd(const Problem&, const Plan&, const thalweg_lightning_indexer_bwd_args&, const Exec&);
int64_t cpu_vec_fwd_slot_bytes(const Problem& problem);
int64_t cpu_vec_loss_slot_bytes(const Problem& problem);
int64_t cpu_vec_bwd_slot_bytes(const Problem& problem);
int64_t cpu_vec_key_bytes(const Problem& problem);
int64_t cpu_vec_sum_bytes(const Problem& problem);
int64_t cpu_vec_bwd_chunk_bytes(const Problem& problem, int64_t rows);
}  // namespace avx512

}  // namespace thalweg::lightning_indexer
#endif
