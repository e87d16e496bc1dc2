// Walks of a row or a column of the block mask, as runs of tokens that stand side by side. In an anonymous namespace,
// since files compiled per instruction set include it.
#ifndef THALWEG_OPS_BLOCK_SPARSE_ATTENTION_WALK_H
#define THALWEG_OPS_BLOCK_SPARSE_ATTENTION_WALK_H

#include "thalweg/ops/block_sparse_attention/problem.h"

namespace thalweg::block_sparse_attention {
namespace {

// One line of the mask: blocks of `block` tokens each, bytes `stride` apart, up to token `end`.
struct Walk {
  const uint8_t* mask;
  int64_t stride, block, end;
  int64_t at = 0;

  bool keeps(int64_t token) const { return mask[token / block * stride] != 0; }

  // The next run of kept tokens, `most` at most; 0 when there are no more. Neighbouring blocks make one run.
  int64_t next(int64_t most, int64_t* begin) {
    for (; at < end; at = (at / block + 1) * block) {
      if (!keeps(at)) continue;
      *begin = at;
      do {
        at = (at / block + 1) * block;
        if (at > end) at = end;
      } while (at < end && at - *begin < most && keeps(at));
      if (at > *begin + most) at = *begin + most;
      return at - *begin;
    }
    return 0;
  }
};

// The mask of sequence n and query head h.
struct HeadMask {
  const uint8_t* data;  // [NQ NK]
  int64_t row, col;
};
inline HeadMask head_mask(const Problem& p, const thalweg_tensor& mask, int64_t n, int64_t h) {
  const int64_t head = p.HM == p.H ? h : p.HM == 1 ? 0 : h / (p.H / p.HK);
  const uint8_t* data = static_cast<const uint8_t*>(mask.data) + n * mask.stride[0] + head * mask.stride[1];
  return {data, mask.stride[2], mask.stride[3]};
}

// One past the last key that query t may see by causality.
inline int64_t causal_end(const Problem& p, const Item& item, int64_t t) {
  const int64_t end = p.causal ? t + item.k_len - item.q_len + 1 : item.k_len;
  return end < 0 ? 0 : end > item.k_len ? item.k_len : end;
}

// The keys that some query of [t, t + rows), which lie in one block, may see.
inline Walk keys_of(const Problem& p, const HeadMask& mask, const Item& item, int64_t t, int64_t rows) {
  return {mask.data + t / p.block_q * mask.row, mask.col, p.block_k, causal_end(p, item, t + rows - 1)};
}

}  // namespace
}  // namespace thalweg::block_sparse_attention
#endif
