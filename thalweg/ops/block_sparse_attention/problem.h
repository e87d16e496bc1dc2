// What a block-sparse-attention kernel decides on, and the kernels. Plain data: files compiled per ISA include it.
#ifndef THALWEG_OPS_BLOCK_SPARSE_ATTENTION_PROBLEM_H
#define THALWEG_OPS_BLOCK_SPARSE_ATTENTION_PROBLEM_H

#include "thalweg/core/exec.h"
#include "thalweg/ops/block_sparse_attention/block_sparse_attention.h"

namespace thalweg::block_sparse_attention {

struct Problem {
  int64_t B, T, S, H, HK, K, V;
  int64_t N;                     // sequences
  int64_t HM, NQ, NK;            // the mask's heads, query blocks and key blocks
  int64_t block_q, block_k;      // never 0
  int64_t longest_q, longest_k;  // tokens of the longest sequence (upper bounds, T and S, in a size query)
  double scale;                  // never 0
  thalweg_dtype dtype;           // of q, k, v, o
  bool packed;                   // cu_seqlens is there
  bool causal;
  bool has_d_o;  // bwd: d_o is there
};

// Sequence n: queries [q_begin, q_begin + q_len) and keys [k_begin, k_begin + k_len) of row `batch`.
struct Item {
  int64_t batch, q_begin, q_len, k_begin, k_len;
};
Item item_at(const Problem&, const thalweg_block_sparse_attention_fwd_args&, int64_t n);
Item item_at(const Problem&, const thalweg_block_sparse_attention_bwd_args&, int64_t n);

// Rows that are in use by no sequence, to be written as 0: num_rests() ranges of queries and of keys.
struct Rest {
  int64_t batch, q_begin, q_end, k_begin, k_end;
};
int64_t num_rests(const Problem&);
Rest rest_at(const Problem&, const thalweg_block_sparse_attention_fwd_args&, int64_t i);
Rest rest_at(const Problem&, const thalweg_block_sparse_attention_bwd_args&, int64_t i);

// Any dtype, any strides; query by query.
void cpu_generic_fwd(const Problem&, const Plan&, const thalweg_block_sparse_attention_fwd_args&, const Exec&);
void cpu_generic_bwd(const Problem&, const Plan&, const thalweg_block_sparse_attention_bwd_args&, const Exec&);
void plan_generic_fwd(const Problem&, Plan*);
void plan_generic_bwd(const Problem&, Plan*);
void cuda_generic_fwd(const Problem&, const Plan&, const thalweg_block_sparse_attention_fwd_args&, const Exec&);
void cuda_generic_bwd(const Problem&, const Plan&, const thalweg_block_sparse_attention_bwd_args&, const Exec&);

// The same files, compiled per instruction set (cpu_flash_fwd.cpp, cpu_flash_bwd.cpp). plan_*: the workspace.
namespace avx2 {
void cpu_flash_fwd(const Problem&, const Plan&, const thalweg_block_sparse_attention_fwd_args&, const Exec&);
void cpu_flash_bwd(const Problem&, const Plan&, const thalweg_block_sparse_attention_bwd_args&, const Exec&);
void plan_flash_fwd(const Problem&, Plan*);
void plan_flash_bwd(const Problem&, Plan*);
}  // namespace avx2
namespace avx512 {
void cpu_flash_fwd(const Problem&, const Plan&, const thalweg_block_sparse_attention_fwd_args&, const Exec&);
void cpu_flash_bwd(const Problem&, const Plan&, const thalweg_block_sparse_attention_bwd_args&, const Exec&);
void plan_flash_fwd(const Problem&, Plan*);
void plan_flash_bwd(const Problem&, Plan*);
}  // namespace avx512
// cpu_tile_fwd.cpp, cpu_tile_bwd.cpp
namespace amx {
void cpu_tile_fwd(const Problem&, const Plan&, const thalweg_block_sparse_attention_fwd_args&, const Exec&);
void cpu_tile_bwd(const Problem&, const Plan&, const thalweg_block_sparse_attention_bwd_args&, const Exec&);
void plan_tile_fwd(const Problem&, Plan*);
void plan_tile_bwd(const Problem&, Plan*);
}  // namespace amx

}  // namespace thalweg::block_sparse_attention
#endif
