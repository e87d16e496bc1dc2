// Sparse flash attention: field tables, checks, kernel tables, entry points.
#include "thalweg/ops/sparse_flash_attention/sparse_flash_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <string>

#include "thalweg/core/kernel.h"
#include "thalweg/ops/sparse_flash_attention/cuda_workspace.h"
#include "thalweg/ops/sparse_flash_attention/problem.h"

namespace thalweg {
namespace sparse_flash_attention {
namespace {

using ll = long long;
using Fwd = thalweg_sparse_flash_attention_fwd_args;
using Bwd = thalweg_sparse_flash_attention_bwd_args;

constexpr const char* kRefused =
    "block_table: paged keys are not read, gather them first; attention_mode: queries come with absorbed projections "
    "(mode 2); sparse_mode: 0 is the default and 3 is causal; return_softmax_lse: ask for lse, or row_max and row_sum; "
    "deterministic: always; attn_mask: the lists are the mask";
constexpr const char* kStatistics = "f32 f64";

// The options that both passes end with.
constexpr thalweg_field scale(size_t offset) {
  return option_field("scale", THALWEG_REAL, offset,
                      "factor of the scores; 0 means 1/sqrt(K + KR): models that were narrower before their projections "
                      "were absorbed give their own");
}
constexpr thalweg_field sparse_block_size(size_t offset) {
  return option_field("sparse_block_size", THALWEG_COUNT, offset,
                      "positions that an entry stands for, a power of two up to 128; 0 means 1");
}
constexpr thalweg_field causal(size_t offset) {
  return option_field("causal", THALWEG_FLAG, offset,
                      "query t sees position j only if j <= t + keys - queries; 0 (sparse mode 0) means all");
}

constexpr thalweg_field kFwdFields[] = {
    tensor_field("q", THALWEG_IN, offsetof(Fwd, q), false, "B T H K", kFloats, THALWEG_ROWS, "queries"),
    tensor_field("k", THALWEG_IN, offsetof(Fwd, k), false, "B S K", "=q", THALWEG_ROWS, "keys, one head for all H"),
    tensor_field("v", THALWEG_IN, offsetof(Fwd, v), true, "B S V", "=q", THALWEG_ROWS,
                 "values; absent: the first V elements of k"),
    tensor_field("q_rope", THALWEG_IN, offsetof(Fwd, q_rope), true, "B T H KR", "=q", THALWEG_ROWS,
                 "second part of the queries; needs k_rope"),
    tensor_field("k_rope", THALWEG_IN, offsetof(Fwd, k_rope), true, "B S KR", "=q", THALWEG_ROWS,
                 "second part of the keys; needs q_rope"),
    tensor_field("indices", THALWEG_IN, offsetof(Fwd, indices), false, "B T E", kInts, THALWEG_ANY,
                 "each query's list of positions (or blocks of them) in its sequence; entries out of range are skipped, "
                 "repeated ones count again"),
    tensor_field("sink", THALWEG_IN, offsetof(Fwd, sink), true, "H", kFloats, THALWEG_ANY,
                 "logit of one more term in each head's sum, without a value"),
    tensor_field("cu_seqlens", THALWEG_IN, offsetof(Fwd, cu_seqlens), true, "N+1", kInts, THALWEG_ANY,
                 "borders of packed sequences of queries; then B = 1"),
    tensor_field("cu_seqlens_k", THALWEG_IN, offsetof(Fwd, cu_seqlens_k), true, "N+1", kInts, THALWEG_ANY,
                 "borders of their keys; needed with cu_seqlens"),
    tensor_field("q_lens", THALWEG_IN, offsetof(Fwd, q_lens), true, "N", kInts, THALWEG_ANY,
                 "queries in use of each sequence; absent: all"),
    tensor_field("k_lens", THALWEG_IN, offsetof(Fwd, k_lens), true, "N", kInts, THALWEG_ANY,
                 "keys in use of each sequence; absent: all"),
    tensor_field("o", THALWEG_OUT, offsetof(Fwd, o), false, "B T H V", "=q", THALWEG_ROWS, "outputs; empty row: 0"),
    tensor_field("lse", THALWEG_OUT, offsetof(Fwd, lse), true, "B T H", kStatistics, THALWEG_ANY,
                 "natural logarithm of the sum of exp(scores), f64 where q is f64, else f32; empty row: -inf"),
    tensor_field("row_max", THALWEG_OUT, offsetof(Fwd, row_max), true, "B T H", kStatistics, THALWEG_ANY,
                 "largest scaled score, f64 where q is f64, else f32; empty row: 0"),
    tensor_field("row_sum", THALWEG_OUT, offsetof(Fwd, row_sum), true, "B T H", kStatistics, THALWEG_ANY,
                 "sum of exp(scores - row_max), f64 where q is f64, else f32; empty row: 0"),
    tensor_field("p", THALWEG_OUT, offsetof(Fwd, p), true, "B T E", kStatistics, THALWEG_ANY,
                 "probability of each entry, averaged over heads, f64 where q is f64, else f32; skipped entry: 0"),
    scale(offsetof(Fwd, scale)),
    sparse_block_size(offsetof(Fwd, sparse_block_size)),
    causal(offsetof(Fwd, causal)),
};

constexpr thalweg_field kBwdFields[] = {
    tensor_field("q", THALWEG_IN, offsetof(Bwd, q), false, "B T H K", kFloats, THALWEG_ROWS, "queries"),
    tensor_field("k", THALWEG_IN, offsetof(Bwd, k), false, "B S K", "=q", THALWEG_ROWS, "keys, one head for all H"),
    tensor_field("v", THALWEG_IN, offsetof(Bwd, v), true, "B S V", "=q", THALWEG_ROWS, "as in fwd"),
    tensor_field("q_rope", THALWEG_IN, offsetof(Bwd, q_rope), true, "B T H KR", "=q", THALWEG_ROWS, "as in fwd"),
    tensor_field("k_rope", THALWEG_IN, offsetof(Bwd, k_rope), true, "B S KR", "=q", THALWEG_ROWS, "as in fwd"),
    tensor_field("indices", THALWEG_IN, offsetof(Bwd, indices), false, "B T E", kInts, THALWEG_ANY, "as in fwd"),
    tensor_field("sink", THALWEG_IN, offsetof(Bwd, sink), true, "H", kFloats, THALWEG_ANY, "as in fwd"),
    tensor_field("cu_seqlens", THALWEG_IN, offsetof(Bwd, cu_seqlens), true, "N+1", kInts, THALWEG_ANY, "as in fwd"),
    tensor_field("cu_seqlens_k", THALWEG_IN, offsetof(Bwd, cu_seqlens_k), true, "N+1", kInts, THALWEG_ANY, "as in fwd"),
    tensor_field("q_lens", THALWEG_IN, offsetof(Bwd, q_lens), true, "N", kInts, THALWEG_ANY, "as in fwd"),
    tensor_field("k_lens", THALWEG_IN, offsetof(Bwd, k_lens), true, "N", kInts, THALWEG_ANY, "as in fwd"),
    tensor_field("o", THALWEG_IN, offsetof(Bwd, o), true, "B T H V", "=q", THALWEG_ROWS,
                 "outputs of fwd; absent: what is needed of them is summed in the kernel, from unrounded terms"),
    tensor_field("lse", THALWEG_IN, offsetof(Bwd, lse), true, "B T H", kStatistics, THALWEG_ANY,
                 "lse of fwd; absent: computed again. A row whose lse is not finite is empty"),
    tensor_field("row_max", THALWEG_IN, offsetof(Bwd, row_max), true, "B T H", kStatistics, THALWEG_ANY,
                 "row_max of fwd, instead of lse; needs row_sum"),
    tensor_field("row_sum", THALWEG_IN, offsetof(Bwd, row_sum), true, "B T H", kStatistics, THALWEG_ANY,
                 "row_sum of fwd, instead of lse; needs row_max. A row whose sum is 0 is empty"),
    tensor_field("d_o", THALWEG_IN, offsetof(Bwd, d_o), false, "B T H V", "=q", THALWEG_ROWS, "gradient of o"),
    tensor_field("d_lse", THALWEG_IN, offsetof(Bwd, d_lse), true, "B T H", kStatistics, THALWEG_ANY, "gradient of lse"),
    tensor_field("d_q", THALWEG_OUT, offsetof(Bwd, d_q), true, "B T H K", "=q", THALWEG_ROWS, "gradient of q"),
    tensor_field("d_k", THALWEG_OUT, offsetof(Bwd, d_k), true, "B S K", "=q", THALWEG_ROWS,
                 "gradient of k: where v is absent, of its use as the value too"),
    tensor_field("d_v", THALWEG_OUT, offsetof(Bwd, d_v), true, "B S V", "=q", THALWEG_ROWS, "gradient of v; needs v"),
    tensor_field("d_q_rope", THALWEG_OUT, offsetof(Bwd, d_q_rope), true, "B T H KR", "=q", THALWEG_ROWS,
                 "gradient of q_rope; needs q_rope"),
    tensor_field("d_k_rope", THALWEG_OUT, offsetof(Bwd, d_k_rope), true, "B S KR", "=q", THALWEG_ROWS,
                 "gradient of k_rope; needs k_rope"),
    tensor_field("d_sink", THALWEG_OUT, offsetof(Bwd, d_sink), true, "H", "=sink", THALWEG_ANY,
                 "gradient of sink; needs sink"),
    tensor_field("p", THALWEG_OUT, offsetof(Bwd, p), true, "B T E", kStatistics, THALWEG_ANY, "as in fwd"),
    scale(offsetof(Bwd, scale)),
    sparse_block_size(offsetof(Bwd, sparse_block_size)),
    causal(offsetof(Bwd, causal)),
};

extern const Pass<Problem, Fwd> kFwd;
extern const Pass<Problem, Bwd> kBwd;

constexpr thalweg_pass kPasses[] = {
    pass_row<kFwd, Fwd>("sparse_flash_attention", "fwd",
                        "attention of each query to the keys that its list names, one key/value head for all query heads",
                        kFwdFields, kRefused),
    pass_row<kBwd, Bwd>("sparse_flash_attention", "bwd", "gradients of queries, keys, values, rope parts and sink",
                        kBwdFields, kRefused),
};

// ---- checks -----------------------------------------------------------------------------------------

void check_dtype(const thalweg_pass& pass, const char* name, const thalweg_tensor& t, thalweg_dtype of_q) {
  const thalweg_dtype expected = of_q == THALWEG_F64 ? THALWEG_F64 : THALWEG_F32;
  if (present(t) && t.dtype != expected)
    fail_field(pass, name, "dtype, got %s, expected %s (from q)", thalweg_dtype_name(t.dtype),
               thalweg_dtype_name(expected));
}

// Two tensors of which neither makes sense alone.
void check_pair(const thalweg_pass& pass, const char* a_name, const thalweg_tensor& a, const char* b_name,
                const thalweg_tensor& b) {
  if (present(a) && !present(b)) fail_field(pass, a_name, "needs %s, got %s without it", b_name, a_name);
  if (present(b) && !present(a)) fail_field(pass, b_name, "needs %s, got %s without it", a_name, b_name);
}

template <class Args>
void check_sizes(const thalweg_pass& pass, const Args& args, const Problem& p) {
  constexpr ll kMost = std::numeric_limits<int32_t>::max();
  if (p.H < 1) fail_field(pass, "q", "H, got %lld, expected at least 1", ll(p.H));
  if (key_width(p) < 1) fail_field(pass, "q", "K, got 0, expected at least 1");
  if (p.E < 1) fail_field(pass, "indices", "E, got %lld, expected at least 1", ll(p.E));
  if (p.E > kMost) fail_field(pass, "indices", "E, got %lld, expected at most %lld", ll(p.E), kMost);
  if (p.S > kMost) fail_field(pass, "k", "S, got %lld, expected at most %lld", ll(p.S), kMost);
  if (p.latent && p.V > p.K)
    fail_field(pass, std::string_view(pass.name) == "fwd" ? "o" : "d_o",
               "V, got %lld, expected at most K = %lld without v (from q)", ll(p.V), ll(p.K));
  const int64_t size = args.sparse_block_size;
  if (size < 0 || size > 128 || (size & (size - 1)) != 0)
    fail_field(pass, "sparse_block_size", "got %lld, expected a power of two up to 128, or 0", ll(size));
}

template <class Args>
Problem check_both(const thalweg_pass& pass, const Args& args, const Sizes& sizes, Binding binding) {
  Problem p{};
  p.B = sizes["B"], p.T = sizes["T"], p.S = sizes["S"], p.H = sizes["H"];
  p.K = sizes["K"], p.KR = sizes["KR"], p.V = sizes["V"], p.E = sizes["E"];
  p.block = args.sparse_block_size == 0 ? 1 : args.sparse_block_size;
  p.dtype = args.q.dtype;
  p.causal = args.causal;
  p.packed = present(args.cu_seqlens);
  p.latent = !present(args.v);
  p.wants_p = present(args.p);
  check_pair(pass, "q_rope", args.q_rope, "k_rope", args.k_rope);
  check_pair(pass, "cu_seqlens", args.cu_seqlens, "cu_seqlens_k", args.cu_seqlens_k);
  check_sizes(pass, args, p);
  p.scale = args.scale == 0 ? 1 / std::sqrt(double(key_width(p))) : args.scale;
  check_dtype(pass, "lse", args.lse, p.dtype);
  check_dtype(pass, "row_max", args.row_max, p.dtype);
  check_dtype(pass, "row_sum", args.row_sum, p.dtype);
  check_dtype(pass, "p", args.p, p.dtype);
  p.N = check_sequences(pass, sizes, args.cu_seqlens, binding);
  if (binding != Binding::kRun) return p;
  if (present(args.cu_seqlens_k)) check_borders(pass, "cu_seqlens_k", args.cu_seqlens_k, "S", sizes);
  check_lengths(pass, "q_lens", args.q_lens, args.cu_seqlens, p.T);
  check_lengths(pass, "k_lens", args.k_lens, args.cu_seqlens_k, p.S);
  return p;
}

Problem check_fwd(const Fwd& args, const Sizes& sizes, Binding binding) {
  return check_both(kPasses[0], args, sizes, binding);
}

Problem check_bwd(const Bwd& args, const Sizes& sizes, Binding binding) {
  const thalweg_pass& pass = kPasses[1];
  Problem p = check_both(pass, args, sizes, binding);
  check_pair(pass, "row_max", args.row_max, "row_sum", args.row_sum);
  if (present(args.lse) && present(args.row_max))
    fail_field(pass, "row_max", "got it beside lse, expected one of them");
  check_dtype(pass, "d_lse", args.d_lse, p.dtype);
  if (present(args.d_v) && p.latent) fail_field(pass, "d_v", "needs v, got d_v without it");
  if (present(args.d_q_rope) && !present(args.q_rope))
    fail_field(pass, "d_q_rope", "needs q_rope, got d_q_rope without it");
  if (present(args.d_k_rope) && !present(args.k_rope))
    fail_field(pass, "d_k_rope", "needs k_rope, got d_k_rope without it");
  p.has_lse = present(args.lse);
  p.has_row_sum = present(args.row_sum);
  p.has_o = present(args.o);
  p.wants_d_q = present(args.d_q) || present(args.d_q_rope);
  p.wants_d_kv = present(args.d_k) || present(args.d_v) || present(args.d_k_rope);
  p.wants_d_sink = present(args.d_sink);
  return p;
}

// ---- kernels ----------------------------------------------------------------------------------------

bool plan_generic(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan_generic_fwd(p, plan);
  return true;
}
bool plan_generic_backward(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan_generic_bwd(p, plan);
  return true;
}

bool takes_flash(const Problem& p, std::string* why) {
  if (p.dtype != THALWEG_F64) return true;
  if (why) *why = "needs q of f32, bf16 or f16, got f64";
  return false;
}

// Bytes of pieces that each start at a 64-byte border.
int64_t pieces(std::initializer_list<int64_t> numbers) {
  int64_t bytes = 0;
  for (int64_t n : numbers) bytes += padded(4 * n, 64);
  return bytes;
}

template <int64_t lanes>
bool plan_flash_fwd(const Problem& p, const Device&, Plan* plan, std::string* why) {
  if (!takes_flash(p, why)) return false;
  const FlashShape x = flash_shape(p, lanes);
  const int64_t queries = group_queries(p), rows = padded(queries * p.H, lanes);
  plan->slot_bytes = pieces({queries * x.capacity, queries * x.capacity, 2 * p.E, rows * x.key, kTileKeys * x.row,
                             kTileKeys * rows, queries * p.H * std::max(x.key, x.value + 16), rows, rows, rows,
                             may_group(p) ? kTileKeys * rows : 0, may_group(p) ? range_capacity(p) : 0});
  return true;
}

bool plan_tile_fwd(const Problem& p, const Device&, Plan* plan, std::string* why) {
  constexpr int64_t kFewHeads = 8;
  if (p.dtype != THALWEG_BF16 || p.H <= kFewHeads || p.wants_p) {
    if (why && p.dtype != THALWEG_BF16) *why = std::string("needs q of bf16, got ") + thalweg_dtype_name(p.dtype);
    else if (why && p.wants_p) *why = "needs no p, got p";
    else if (why) *why = "needs H above " + std::to_string(kFewHeads) + ", got " + std::to_string(p.H);
    return false;
  }
  const FlashShape x = flash_shape(p, 16);
  const int64_t depth = tile_shape(p).depth;
  plan->slot_bytes = pieces({x.capacity, x.capacity, 2 * p.E, x.heads * depth / 2, kListKeys * depth / 2,
                             kListKeys * x.value / 2, x.heads * kListKeys / 2, kListKeys * x.heads,
                             x.heads * (x.value + 16), x.heads, x.heads, x.heads});
  return true;
}

constexpr char kBwdChoices[] = "tokens=1|4|16|64|256";
template <int64_t lanes>
bool plan_flash_bwd(const Problem& p, const Device&, Plan* plan, std::string* why) {
  if (!takes_flash(p, why)) return false;
  constexpr int64_t kKeptBytes = 16 << 20;
  const FlashShape x = flash_shape(p, lanes);
  const FlashBackward y = flash_backward(p, lanes);
  // Whole groups: as many as are asked for or fit, and two a thread, or one of several queries.
  const int64_t groups = std::max(kKeptBytes / y.kept_bytes, (y.queries > 1 ? 1 : 2) * plan->num_slots);
  const int64_t all = std::max<int64_t>(1, p.B * ((p.T + y.queries - 1) / y.queries)) * y.queries;
  if (!decide(&plan->values[kTokens], "tokens", std::min(groups * y.queries, all), 1, all, why)) return false;
  plan->shared_bytes = pieces({y.sums, y.terms}) + kept_groups(*plan, y) * y.kept_bytes;
  const int64_t heads = y.queries * p.H, rows = padded(heads, lanes);
  plan->slot_bytes = pieces({y.queries * x.capacity, y.queries * x.capacity, 2 * p.E,
                             std::max(rows * x.key, y.num_chunks * kChunkWidth), rows * x.value, kTileKeys * x.row,
                             heads * (x.key + 16) + x.value, rows, rows, rows, p.wants_p ? x.capacity : 0,
                             may_group(p) ? kTileKeys * rows : 0});
  return true;
}

template <bool backward>
bool plan_cuda(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan->shared_bytes = lay_out_cuda(p, backward, nullptr).bytes;
  return true;
}

constexpr Kernel<Problem, Fwd> kFwdKernels[] = {
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda<false>, cuda_generic_fwd},
    {"cpu_tile_fwd_amx", THALWEG_CPU, Isa::kAmx, plan_tile_fwd, amx::cpu_tile_fwd},
    {"cpu_flash_fwd_avx512", THALWEG_CPU, Isa::kAvx512, plan_flash_fwd<16>, avx512::cpu_flash_fwd},
    {"cpu_flash_fwd_avx2", THALWEG_CPU, Isa::kAvx2, plan_flash_fwd<8>, avx2::cpu_flash_fwd},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic, cpu_generic_fwd},
};
constexpr Kernel<Problem, Bwd> kBwdKernels[] = {
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda<true>, cuda_generic_bwd},
    {"cpu_flash_bwd_avx512", THALWEG_CPU, Isa::kAvx512, plan_flash_bwd<16>, avx512::cpu_flash_bwd, kBwdChoices},
    {"cpu_flash_bwd_avx2", THALWEG_CPU, Isa::kAvx2, plan_flash_bwd<8>, avx2::cpu_flash_bwd, kBwdChoices},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic_backward, cpu_generic_bwd},
};

constexpr Pass<Problem, Fwd> kFwd = {&kPasses[0], check_fwd, kFwdKernels, std::size(kFwdKernels)};
constexpr Pass<Problem, Bwd> kBwd = {&kPasses[1], check_bwd, kBwdKernels, std::size(kBwdKernels)};

}  // namespace
}  // namespace sparse_flash_attention

const thalweg_pass* sparse_flash_attention_pass_at(int i);
const thalweg_pass* sparse_flash_attention_pass_at(int i) {
  return i >= 0 && i < int(std::size(sparse_flash_attention::kPasses)) ? &sparse_flash_attention::kPasses[i] : nullptr;
}

}  // namespace thalweg

// ---- entry points -----------------------------------------------------------------------------------

namespace sparse = thalweg::sparse_flash_attention;

thalweg_status thalweg_sparse_flash_attention_fwd(const thalweg_sparse_flash_attention_fwd_args* args,
                                                  const thalweg_context* ctx) {
  return thalweg::call_pass(sparse::kFwd, args, ctx);
}
thalweg_status thalweg_sparse_flash_attention_bwd(const thalweg_sparse_flash_attention_bwd_args* args,
                                                  const thalweg_context* ctx) {
  return thalweg::call_pass(sparse::kBwd, args, ctx);
}
thalweg_status thalweg_sparse_flash_attention_fwd_workspace(const thalweg_sparse_flash_attention_fwd_args* args,
                                                            const thalweg_context* ctx, size_t* bytes) {
  return thalweg::query_workspace(sparse::kFwd, args, ctx, bytes);
}
thalweg_status thalweg_sparse_flash_attention_bwd_workspace(const thalweg_sparse_flash_attention_bwd_args* args,
                                                            const thalweg_context* ctx, size_t* bytes) {
  return thalweg::query_workspace(sparse::kBwd, args, ctx, bytes);
}
