// Lists of keys: which positions a query sees, in a form that all kernels share.
#include <algorithm>
#include <limits>

#include "thalweg/core/signature.h"
#include "thalweg/cpu/rows.h"
#include "thalweg/ops/sparse_flash_attention/problem.h"

namespace thalweg::sparse_flash_attention {
namespace {

template <class Args>
Inputs common(const Args& a) {
  return {a.q, a.k, a.v, a.q_rope, a.k_rope, a.indices, a.sink, a.cu_seqlens, a.cu_seqlens_k, a.q_lens, a.k_lens};
}

struct Entries {
  const char* data;
  int64_t stride;
  bool wide;
  int64_t operator[](int64_t e) const {
    return wide ? reinterpret_cast<const int64_t*>(data)[e * stride] : reinterpret_cast<const int32_t*>(data)[e * stride];
  }
};
Entries entries_at(const thalweg_tensor& indices, int64_t b, int64_t t) {
  const bool wide = indices.dtype == THALWEG_I64;
  const int64_t offset = b * indices.stride[0] + t * indices.stride[1];
  return {static_cast<const char*>(indices.data) + offset * (wide ? 8 : 4), indices.stride[2], wide};
}

// Whether the entry has a visible position; tested before it is multiplied.
bool is_visible(const Problem& p, const Query& query, int64_t entry) {
  return entry >= 0 && query.limit > 0 && entry <= (query.limit - 1) / p.block;
}

// Sorts numbers of 0 to `largest`; `other` is scratch of the same length.
void radix_sort(int32_t* numbers, int32_t* other, int64_t n, int64_t largest) {
  int32_t *from = numbers, *to = other;
  for (int shift = 0; (largest >> shift) > 0; shift += 8) {
    int64_t at[256] = {};
    for (int64_t i = 0; i < n; ++i) ++at[(from[i] >> shift) & 255];
    int64_t sum = 0;
    for (int64_t& count : at) {
      const int64_t here = count;
      count = sum;
      sum += here;
    }
    for (int64_t i = 0; i < n; ++i) to[at[(from[i] >> shift) & 255]++] = from[i];
    std::swap(from, to);
  }
  if (from != numbers) std::copy_n(from, n, numbers);
}

template <class A>
void spread(const Problem& p, const Inputs& inputs, const Query& query, int64_t b, int64_t t, const int32_t* keys,
            int64_t n, const A* shares, const thalweg_tensor& out) {
  const Entries entries = entries_at(inputs.indices, b, t);
  for (int64_t e = 0; e < p.E; ++e) {
    A sum = 0;
    if (is_visible(p, query, entries[e])) {
      const int64_t begin = entries[e] * p.block, end = std::min(begin + p.block, query.limit);
      const int64_t at = std::lower_bound(keys, keys + n, int32_t(begin)) - keys;  // its positions lie side by side
      for (int64_t i = 0; i < end - begin; ++i) sum += shares[at + i];
    }
    store_at(out, b * out.stride[0] + t * out.stride[1] + e * out.stride[2], sum);
  }
}

template <class A>
void add_terms(const Problem& p, const A* terms, const thalweg_tensor& d_sink) {
  for (int64_t h = 0; h < p.H; ++h) {
    double sum = 0;
    for (int64_t row = 0; row < p.B * p.T; ++row) sum += double(terms[row * p.H + h]);
    store_at(d_sink, h * d_sink.stride[0], sum);
  }
}

}  // namespace

Inputs inputs_of(const thalweg_sparse_flash_attention_fwd_args& args) { return common(args); }
Inputs inputs_of(const thalweg_sparse_flash_attention_bwd_args& args) { return common(args); }

Query query_at(const Problem& p, const Inputs& inputs, int64_t b, int64_t t) {
  int64_t n = b, start = 0, queries = p.T, first = 0, keys = p.S;
  if (present(inputs.cu_seqlens)) {
    int64_t low = 0, high = p.N;  // the last border that is at or before t
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (int_at(inputs.cu_seqlens, middle) <= t ? low : high) = middle;
    }
    if (p.N == 0 || t >= int_at(inputs.cu_seqlens, low + 1)) return {0, 0, false};
    n = low;
    start = int_at(inputs.cu_seqlens, n);
    queries = int_at(inputs.cu_seqlens, n + 1) - start;
    first = int_at(inputs.cu_seqlens_k, n);
    keys = int_at(inputs.cu_seqlens_k, n + 1) - first;
  }
  if (present(inputs.q_lens)) queries = int_at(inputs.q_lens, n);
  if (present(inputs.k_lens)) keys = int_at(inputs.k_lens, n);
  if (t - start >= queries) return {0, 0, false};
  const int64_t limit = p.causal ? std::min(keys, t - start + 1 + keys - queries) : keys;
  return {first, std::max<int64_t>(0, limit), true};
}

int64_t list_capacity(const Problem& p) { return p.E > p.S / p.block ? p.S : std::min(p.S, p.E * p.block); }

int64_t visible_keys(const Problem& p, const Inputs& inputs, const Query& query, int64_t b, int64_t t, int32_t* keys,
                     int32_t* counts, int32_t* scratch) {
  if (!query.used || query.limit <= 0) return 0;
  const Entries entries = entries_at(inputs.indices, b, t);
  int64_t n = 0, largest = 0;
  bool sorted = true;
  for (int64_t e = 0; e < p.E; ++e) {
    const int64_t entry = entries[e];
    if (!is_visible(p, query, entry)) continue;
    sorted = sorted && entry >= largest;
    largest = std::max(largest, entry);
    scratch[n++] = int32_t(entry);
  }
  if (!sorted) radix_sort(scratch, scratch + p.E, n, largest);
  int64_t out = 0;
  for (int64_t i = 0; i < n;) {
    const int64_t entry = scratch[i], same = i;
    while (i < n && scratch[i] == entry) ++i;
    const int64_t end = std::min((entry + 1) * p.block, query.limit);
    for (int64_t j = entry * p.block; j < end; ++j) {
      keys[out] = int32_t(j);
      counts[out++] = int32_t(i - same);
    }
  }
  return out;
}

void store_p(const Problem& p, const Inputs& inputs, const Query& query, int64_t b, int64_t t, const int32_t* keys,
             int64_t n, const float* shares, const thalweg_tensor& out) {
  spread(p, inputs, query, b, t, keys, n, shares, out);
}
void store_p(const Problem& p, const Inputs& inputs, const Query& query, int64_t b, int64_t t, const int32_t* keys,
             int64_t n, const double* shares, const thalweg_tensor& out) {
  spread(p, inputs, query, b, t, keys, n, shares, out);
}

void sum_sink(const Problem& p, const float* terms, const thalweg_tensor& d_sink) { add_terms(p, terms, d_sink); }
void sum_sink(const Problem& p, const double* terms, const thalweg_tensor& d_sink) { add_terms(p, terms, d_sink); }

}  // namespace thalweg::sparse_flash_attention
