// Which keys a query sees, for every kernel of the lightning indexer.
#include "thalweg/ops/lightning_indexer/rows.h"

#include <algorithm>

#include "thalweg/ops/lightning_indexer/problem.h"

namespace thalweg::lightning_indexer {
namespace {

template <class Args>
Mask make_mask(const Args& args) {
  return {args.start, args.end, args.q_lens, args.k_lens, args.cu_seqlens, args.cu_seqlens_k};
}

// The packed sequence that query t belongs to; N past the last.
int64_t sequence_of(const thalweg_tensor& cu_seqlens, int64_t N, int64_t t) {
  int64_t low = 0, high = N;  // the first n with cu_seqlens[n + 1] > t
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (int_at(cu_seqlens, middle + 1) > t)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

}  // namespace

Mask mask_of(const thalweg_lightning_indexer_fwd_args& args) { return make_mask(args); }
Mask mask_of(const thalweg_lightning_indexer_loss_args& args) { return make_mask(args); }
Mask mask_of(const thalweg_lightning_indexer_bwd_args& args) { return make_mask(args); }

Keys visible_keys(const Problem& p, const Mask& mask, int64_t r) {
  const int64_t b = r / p.T, t = r % p.T;
  int64_t n = b, query = t, queries = p.T, keys = p.S, first = 0;
  if (present(mask.cu_seqlens)) {
    n = sequence_of(mask.cu_seqlens, p.N, t);
    if (n == p.N) return {0, 0, 0};
    query = t - int_at(mask.cu_seqlens, n);
    queries = int_at(mask.cu_seqlens, n + 1) - int_at(mask.cu_seqlens, n);
    first = int_at(mask.cu_seqlens_k, n);
    keys = int_at(mask.cu_seqlens_k, n + 1) - first;
  }
  if (present(mask.q_lens)) queries = int_at(mask.q_lens, n);
  if (present(mask.k_lens)) keys = int_at(mask.k_lens, n);
  int64_t begin = 0, end = query < queries ? keys : 0;
  if (present(mask.start)) begin = std::max(begin, int_at(mask.start, b, t));
  if (present(mask.end)) end = std::min(end, int_at(mask.end, b, t));
  if (p.causal) end = std::min(end, query + keys - queries + 1);
  return begin < end ? Keys{b * p.S + first, begin, end} : Keys{0, 0, 0};
}

int64_t visible_entries(const Problem& p, const Mask& mask, const thalweg_tensor& indices, int64_t r, int32_t* entries,
                        int64_t* keys) {
  const Keys visible = visible_keys(p, mask, r);
  int64_t n = 0;
  if (p.dense) {
    for (int64_t s = visible.begin; s < visible.end; ++s, ++n) {
      entries[n] = int32_t(s);
      keys[n] = visible.first + s;
    }
    return n;
  }
  if (visible.begin == visible.end) return 0;
  const int64_t offset = row_offset(indices, r);
  for (int64_t e = 0; e < p.E; ++e) {
    const int64_t s = load_int(indices, offset + e * indices.stride[2]);
    if (s < visible.begin || s >= visible.end) continue;
    entries[n] = int32_t(e);
    keys[n++] = visible.first + s;
  }
  return n;
}

// At most 64 ranges: a list of 2048 entries then has 32 in one, a few tiles' worth.
int64_t key_range(const Problem& p) { return std::max<int64_t>(128, (p.B * p.S + 63) / 64); }

}  // namespace thalweg::lightning_indexer
