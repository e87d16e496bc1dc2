// What a kernel of the sparse flash attention decides on, and the kernels. Plain data: files compiled per ISA include it.
#ifndef THALWEG_OPS_SPARSE_FLASH_ATTENTION_PROBLEM_H
#define THALWEG_OPS_SPARSE_FLASH_ATTENTION_PROBLEM_H

#include "thalweg/core/exec.h"
#include "thalweg/ops/sparse_flash_attention/sparse_flash_attention.h"

namespace thalweg::sparse_flash_attention {

struct Problem {
  int64_t B, T, S, H, K, KR, V, E, N;
  int64_t block;        // positions of an entry of a list
  double scale;         // never 0
  thalweg_dtype dtype;  // of q, k, v, o and their gradients
  bool causal;
  bool packed;  // cu_seqlens is there
  bool latent;  // the value is the first V elements of k
  // fwd and bwd
  bool wants_p;
  // bwd
  bool has_lse, has_row_sum, has_o;           // what was kept of the forward
  bool wants_d_q, wants_d_kv, wants_d_sink;  // d_q or d_q_rope; d_k, d_v or d_k_rope
};

// The tensors that both passes read.
struct Inputs {
  thalweg_tensor q, k, v, q_rope, k_rope, indices, sink, cu_seqlens, cu_seqlens_k, q_lens, k_lens;
};
Inputs inputs_of(const thalweg_sparse_flash_attention_fwd_args& args);
Inputs inputs_of(const thalweg_sparse_flash_attention_bwd_args& args);

// What the query of row (b, t) sees.
struct Query {
  int64_t first;  // its sequence's first row of k[b]
  int64_t limit;  // positions below this are visible, 0: none
  bool used;      // false: a row of no sequence
};
Query query_at(const Problem& problem, const Inputs& inputs, int64_t b, int64_t t);

// The visible keys of a query: positions in ascending order, each once, and how often each counts. Returns how many, at
// most list_capacity(). `scratch` holds 2 E numbers.
int64_t list_capacity(const Problem& problem);
int64_t visible_keys(const Problem& problem, const Inputs& inputs, const Query& query, int64_t b, int64_t t,
                     int32_t* keys, int32_t* counts, int32_t* scratch);

// Row (b, t) of p: `shares` has for each of the n keys the mean over heads of the probability of one entry.
void store_p(const Problem& problem, const Inputs& inputs, const Query& query, int64_t b, int64_t t,
             const int32_t* keys, int64_t n, const float* shares, const thalweg_tensor& p);
void store_p(const Problem& problem, const Inputs& inputs, const Query& query, int64_t b, int64_t t,
             const int32_t* keys, int64_t n, const double* shares, const thalweg_tensor& p);

// d_sink from the terms of each row [B T H], added in order in float64.
void sum_sink(const Problem& problem, const float* terms, const thalweg_tensor& d_sink);
void sum_sink(const Problem& problem, const double* terms, const thalweg_tensor& d_sink);

// Widths of a row: what a score is made of, and what gradients of a key are kept of (with separate values behind them).
static inline int64_t key_width(const Problem& p) { return p.K + p.KR; }
static inline int64_t gradient_width(const Problem& p) { return p.K + p.KR + (p.latent ? 0 : p.V); }

// Any dtype, any strides.
void cpu_generic_fwd(const Problem&, const Plan&, const thalweg_sparse_flash_attention_fwd_args&, const Exec&);
void cpu_generic_bwd(const Problem&, const Plan&, const thalweg_sparse_flash_attention_bwd_args&, const Exec&);
void plan_generic_fwd(const Problem&, Plan*);
void plan_generic_bwd(const Problem&, Plan*);
void cuda_generic_fwd(const Problem&, const Plan&, const thalweg_sparse_flash_attention_fwd_args&, const Exec&);
void cuda_generic_bwd(const Problem&, const Plan&, const thalweg_sparse_flash_attention_bwd_args&, const Exec&);

// ---- cpu_flash_fwd.cpp and cpu_flash_bwd.cpp, compiled per instruction set ----

constexpr int64_t kTileKeys = 64;     // keys that are gathered at a time
constexpr int64_t kRangeKeys = 512;   // keys of a task that adds up their gradients
constexpr int64_t kChunkWidth = 128;  // columns of it
enum { kTokens = 0 };                 // Plan.values, bwd: queries whose probabilities are kept at a time

static inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Sizes in scratch, in numbers: widths padded to vectors. A gathered row is key, rope part, and value where that is not
// the key; 16 numbers more let neighbouring rows start in different sets of the caches.
struct FlashShape {
  int64_t heads;       // H in whole vectors
  int64_t key, value;  // K + KR and V, in multiples of 16
  int64_t row;         // a gathered row
  int64_t capacity;    // of a list
};
static inline FlashShape flash_shape(const Problem& p, int64_t lanes) {
  const int64_t key = padded(key_width(p), 16), value = padded(p.V, 16);
  return {padded(p.H, lanes), key, value, key + (p.latent ? 0 : value) + 16, padded(list_capacity(p), 16)};
}

// Groups of neighbouring queries whose lists name most of their keys (cpu_flash_group.h): queries x heads are the rows
// of one product. Not where p is wanted. A group has a vector of rows where it can, and leaves work for four threads.
constexpr int64_t kGroupRows = 32, kGroupQueries = 32, kFewestKeys = 64;
static inline bool may_group(const Problem& p) { return 2 * p.H <= kGroupRows && !p.wants_p; }
static inline int64_t group_queries(const Problem& p) {
  if (!may_group(p)) return 1;
  const int64_t least = kGroupRows / 2 / p.H, most = kGroupRows / p.H, some = p.B * p.T / 4;
  return some < least ? least : some < most ? some : most;
}
// Whether a list names most of the keys below `limit`, H of H + spare, and how far such a list may reach: the fewer
// heads, the less a key's products cost beside reading it, and the more of them may be for nothing. Not a matter of the
// number of queries, or tokens behind the end would change bits before it.
constexpr int64_t kSpareForward = 1, kSpareBackward = 3;
static inline bool names_most(const Problem& p, int64_t n, int64_t limit, int64_t spare) {
  return n >= kFewestKeys && n * (p.H + spare) >= limit * p.H;
}
static inline int64_t range_capacity(const Problem& p) {
  const int64_t n = list_capacity(p) * (p.H + kSpareBackward) / p.H;
  return padded(n < p.S ? n : p.S, 16);
}

// Of the row of bf16 tiles (cpu_tile_fwd.cpp).
constexpr int64_t kListKeys = 128;  // keys that are gathered at a time
struct TileShape {
  int64_t depth;  // K and KR, each in whole tiles
};
static inline TileShape tile_shape(const Problem& p) { return {padded(p.K, 32) + padded(p.KR, 32)}; }

// Of the backward: sums of gradients, terms of the sink, and what is kept of each group of queries of a block.
constexpr int64_t kGroupBytes = 16 << 20;  // a group of several queries keeps at most this
constexpr int64_t kKeptHeader = 80;        // sizeof(Kept), and a count of them
struct FlashBackward {
  int64_t head_row;     // a head's q, rope part and d_o
  int64_t num_chunks;   // of columns
  int64_t sums, terms;  // numbers
  int64_t queries;      // of a group
  int64_t kept_bytes;   // a group's
};
static inline FlashBackward flash_backward(const Problem& p, int64_t lanes) {
  const FlashShape x = flash_shape(p, lanes);
  FlashBackward y;
  y.head_row = x.key + x.value + 16;
  y.num_chunks = (x.key + (p.latent ? 0 : x.value) + kChunkWidth - 1) / kChunkWidth;
  y.sums = p.wants_d_kv ? y.num_chunks * p.B * p.S * kChunkWidth : 0;
  y.terms = p.wants_d_sink ? p.B * p.T * p.H : 0;
  y.queries = p.has_o && (p.has_lse || p.has_row_sum) ? group_queries(p) : 1;
  const int64_t keys = may_group(p) ? range_capacity(p) : x.capacity;
  const int64_t query = padded(4 * keys, 64) + 2 * padded(4 * keys * x.heads, 64) + padded(4 * p.H * y.head_row, 64);
  if (y.queries > kGroupBytes / query) y.queries = kGroupBytes / query > 1 ? kGroupBytes / query : 1;
  y.kept_bytes = padded(kKeptHeader * (y.queries + 1), 64) + y.queries * query;
  return y;
}
// Groups kept at a time: the choice kTokens, in whole groups.
static inline int64_t kept_groups(const Plan& plan, const FlashBackward& y) {
  return (plan.values[kTokens] + y.queries - 1) / y.queries;
}

namespace avx2 {
void cpu_flash_fwd(const Problem&, const Plan&, const thalweg_sparse_flash_attention_fwd_args&, const Exec&);
void cpu_flash_bwd(const Problem&, const Plan&, const thalweg_sparse_flash_attention_bwd_args&, const Exec&);
}  // namespace avx2
namespace avx512 {
void cpu_flash_fwd(const Problem&, const Plan&, const thalweg_sparse_flash_attention_fwd_args&, const Exec&);
void cpu_flash_bwd(const Problem&, const Plan&, const thalweg_sparse_flash_attention_bwd_args&, const Exec&);
}  // namespace avx512
namespace amx {
void cpu_tile_fwd(const Problem&, const Plan&, const thalweg_sparse_flash_attention_fwd_args&, const Exec&);
}  // namespace amx

}  // namespace thalweg::sparse_flash_attention
#endif
