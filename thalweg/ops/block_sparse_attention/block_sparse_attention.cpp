// Block-sparse attention: field tables, what the tables cannot say, kernel tables, entry points.
#include "thalweg/ops/block_sparse_attention/block_sparse_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>

#include "thalweg/core/kernel.h"
#include "thalweg/ops/block_sparse_attention/cuda_workspace.h"
#include "thalweg/ops/block_sparse_attention/problem.h"

namespace thalweg {
namespace block_sparse_attention {
namespace {

using Fwd = thalweg_block_sparse_attention_fwd_args;
using Bwd = thalweg_block_sparse_attention_bwd_args;
using ll = long long;

constexpr int64_t kMaxHeadDim = 512;  // of the fast rows
constexpr int64_t kUsualBlock = 128;

// ---- Field tables ----

constexpr const char* kMasks = "bool u8 i8";
constexpr const char* kDocMask = "not 0 keeps a block of block_q queries x block_k keys; HM is H, HK or 1";
constexpr const char* kDocSink = "a logit per head that joins the softmax and has no value; absent: none";
constexpr const char* kDocCu = "borders of the packed queries of a batch of one; rows past the last are written as 0";
constexpr const char* kDocCuK = "borders of the packed keys, exactly when cu_seqlens is there";
constexpr const char* kDocQLens = "query tokens in use of each sequence; absent: all; rows past them are written as 0";
constexpr const char* kDocKLens = "key tokens in use of each sequence; absent: all";
constexpr const char* kDocScale = "factor of q k; 0: K^-0.5";
constexpr const char* kDocBlockQ = "query tokens of a block; 0: 128";
constexpr const char* kDocBlockK = "key tokens of a block; 0: 128";
constexpr const char* kDocCausal =
    "1: a query sees no key later than itself; the last query and the last key are level";
constexpr const char* kStatistics = "f64 f32";

constexpr const char* kRefused =
    "lse in base 2: it is a natural logarithm; window: leave blocks out of the mask; "
    "dropout: not supported; attention bias: not supported";

constexpr thalweg_field kFwdFields[] = {
    tensor_field("q", THALWEG_IN, offsetof(Fwd, q), false, "B T H K", kFloats, THALWEG_ROWS, "queries"),
    tensor_field("k", THALWEG_IN, offsetof(Fwd, k), false, "B S HK K", "=q", THALWEG_ROWS,
                 "keys; query head h reads key head h / (H / HK)"),
    tensor_field("v", THALWEG_IN, offsetof(Fwd, v), false, "B S HK V", "=q", THALWEG_ROWS, "values"),
    tensor_field("block_mask", THALWEG_IN, offsetof(Fwd, block_mask), false, "N HM NQ NK", kMasks, THALWEG_ANY,
                 kDocMask),
    tensor_field("sink", THALWEG_IN, offsetof(Fwd, sink), true, "H", kFloats, THALWEG_ANY, kDocSink),
    tensor_field("cu_seqlens", THALWEG_IN, offsetof(Fwd, cu_seqlens), true, "N+1", kInts, THALWEG_ROWS, kDocCu),
    tensor_field("cu_seqlens_k", THALWEG_IN, offsetof(Fwd, cu_seqlens_k), true, "N+1", kInts, THALWEG_ROWS, kDocCuK),
    tensor_field("q_lens", THALWEG_IN, offsetof(Fwd, q_lens), true, "N", kInts, THALWEG_ROWS, kDocQLens),
    tensor_field("k_lens", THALWEG_IN, offsetof(Fwd, k_lens), true, "N", kInts, THALWEG_ROWS, kDocKLens),
    tensor_field("o", THALWEG_OUT, offsetof(Fwd, o), false, "B T H V", "=q", THALWEG_ROWS,
                 "outputs; 0 where a query sees no key"),
    tensor_field("lse", THALWEG_OUT, offsetof(Fwd, lse), true, "B T H", kStatistics, THALWEG_ANY,
                 "log of the softmax's sum, natural; -inf where a query sees nothing; f64 where q is"),
    tensor_field("row_max", THALWEG_OUT, offsetof(Fwd, row_max), true, "B T H", kStatistics, THALWEG_ANY,
                 "largest scaled score, the sink among them; 0 where a query sees nothing"),
    tensor_field("row_sum", THALWEG_OUT, offsetof(Fwd, row_sum), true, "B T H", kStatistics, THALWEG_ANY,
                 "sum of exp(score - row_max); 0 where a query sees nothing"),
    option_field("scale", THALWEG_REAL, offsetof(Fwd, scale), kDocScale),
    option_field("block_q", THALWEG_COUNT, offsetof(Fwd, block_q), kDocBlockQ),
    option_field("block_k", THALWEG_COUNT, offsetof(Fwd, block_k), kDocBlockK),
    option_field("causal", THALWEG_FLAG, offsetof(Fwd, causal), kDocCausal),
};

constexpr thalweg_field kBwdFields[] = {
    tensor_field("q", THALWEG_IN, offsetof(Bwd, q), false, "B T H K", kFloats, THALWEG_ROWS, "queries"),
    tensor_field("k", THALWEG_IN, offsetof(Bwd, k), false, "B S HK K", "=q", THALWEG_ROWS, "keys"),
    tensor_field("v", THALWEG_IN, offsetof(Bwd, v), false, "B S HK V", "=q", THALWEG_ROWS, "values"),
    tensor_field("block_mask", THALWEG_IN, offsetof(Bwd, block_mask), false, "N HM NQ NK", kMasks, THALWEG_ANY,
                 kDocMask),
    tensor_field("sink", THALWEG_IN, offsetof(Bwd, sink), true, "H", kFloats, THALWEG_ANY, kDocSink),
    tensor_field("cu_seqlens", THALWEG_IN, offsetof(Bwd, cu_seqlens), true, "N+1", kInts, THALWEG_ROWS, kDocCu),
    tensor_field("cu_seqlens_k", THALWEG_IN, offsetof(Bwd, cu_seqlens_k), true, "N+1", kInts, THALWEG_ROWS, kDocCuK),
    tensor_field("q_lens", THALWEG_IN, offsetof(Bwd, q_lens), true, "N", kInts, THALWEG_ROWS, kDocQLens),
    tensor_field("k_lens", THALWEG_IN, offsetof(Bwd, k_lens), true, "N", kInts, THALWEG_ROWS, kDocKLens),
    tensor_field("o", THALWEG_IN, offsetof(Bwd, o), false, "B T H V", "=q", THALWEG_ROWS, "outputs of fwd"),
    tensor_field("lse", THALWEG_IN, offsetof(Bwd, lse), true, "B T H", kStatistics, THALWEG_ANY,
                 "of fwd; not finite: the query sees nothing; absent: row_max and row_sum instead"),
    tensor_field("row_max", THALWEG_IN, offsetof(Bwd, row_max), true, "B T H", kStatistics, THALWEG_ANY, "of fwd"),
    tensor_field("row_sum", THALWEG_IN, offsetof(Bwd, row_sum), true, "B T H", kStatistics, THALWEG_ANY,
                 "of fwd; 0: the query sees nothing"),
    tensor_field("d_o", THALWEG_IN, offsetof(Bwd, d_o), true, "B T H V", "=q", THALWEG_ROWS,
                 "gradient of o; absent: 0"),
    tensor_field("d_lse", THALWEG_IN, offsetof(Bwd, d_lse), true, "B T H", kStatistics, THALWEG_ANY,
                 "gradient of lse; absent: 0"),
    tensor_field("d_q", THALWEG_OUT, offsetof(Bwd, d_q), true, "B T H K", "=q", THALWEG_ROWS, "gradient of q"),
    tensor_field("d_k", THALWEG_OUT, offsetof(Bwd, d_k), true, "B S HK K", "=q", THALWEG_ROWS,
                 "gradient of k, 0 where no query sees a key"),
    tensor_field("d_v", THALWEG_OUT, offsetof(Bwd, d_v), true, "B S HK V", "=q", THALWEG_ROWS,
                 "gradient of v, 0 where no query sees a key"),
    tensor_field("d_sink", THALWEG_OUT, offsetof(Bwd, d_sink), true, "H", "=sink", THALWEG_ANY,
                 "gradient of sink; needs sink"),
    option_field("scale", THALWEG_REAL, offsetof(Bwd, scale), kDocScale),
    option_field("block_q", THALWEG_COUNT, offsetof(Bwd, block_q), kDocBlockQ),
    option_field("block_k", THALWEG_COUNT, offsetof(Bwd, block_k), kDocBlockK),
    option_field("causal", THALWEG_FLAG, offsetof(Bwd, causal), kDocCausal),
};

extern const Pass<Problem, Fwd> kFwd;
extern const Pass<Problem, Bwd> kBwd;

constexpr thalweg_pass kPasses[] = {
    pass_row<kFwd, Fwd>("block_sparse_attention", "fwd", "softmax attention over the blocks that a mask keeps",
                        kFwdFields, kRefused),
    pass_row<kBwd, Bwd>("block_sparse_attention", "bwd", "gradients of q, k, v and sink", kBwdFields, kRefused),
};

// ---- Checks ----

// The longest of N sequences, by their lengths, else by their borders, else `all`.
int64_t longest(int64_t N, const thalweg_tensor& lengths, const thalweg_tensor& borders, int64_t all) {
  if (!present(lengths) && !present(borders)) return all;
  int64_t most = 0;
  for (int64_t n = 0; n < N; ++n)
    most = std::max(most, present(lengths) ? int_at(lengths, n) : int_at(borders, n + 1) - int_at(borders, n));
  return most;
}

template <class Args>
void check_tokens(const thalweg_pass& pass, const Args& args, const Sizes& sizes, Binding binding, Problem* p) {
  const thalweg_tensor &cu = args.cu_seqlens, &cu_k = args.cu_seqlens_k;
  p->packed = present(cu);
  if (present(cu) != present(cu_k))
    fail_field(pass, present(cu) ? "cu_seqlens_k" : "cu_seqlens", "missing, expected [N+1] beside %s",
               present(cu) ? "cu_seqlens" : "cu_seqlens_k");
  check_sequences(pass, sizes, cu, binding);
  p->longest_q = p->T, p->longest_k = p->S;
  if (binding != Binding::kRun) return;
  if (p->packed) check_borders(pass, "cu_seqlens_k", cu_k, "S", sizes);
  check_lengths(pass, "q_lens", args.q_lens, cu, p->T);
  check_lengths(pass, "k_lens", args.k_lens, cu_k, p->S);
  p->longest_q = longest(p->N, args.q_lens, cu, p->T);
  p->longest_k = longest(p->N, args.k_lens, cu_k, p->S);
}

// The mask's blocks cover every token; `longest` is exact in a run only.
void check_cover(const thalweg_pass& pass, const char* size, int64_t blocks, int64_t block, int64_t longest,
                 const char* what) {
  const int64_t needed = (longest + block - 1) / block;
  if (blocks < needed)
    fail_field(pass, "block_mask", "%s, got %lld, expected at least %lld (%lld %s in blocks of %lld)", size, ll(blocks),
               ll(needed), ll(longest), what, ll(block));
}

void check_statistics(const thalweg_pass& pass, const char* name, const thalweg_tensor& t, thalweg_dtype q) {
  const thalweg_dtype expected = q == THALWEG_F64 ? THALWEG_F64 : THALWEG_F32;
  if (present(t) && t.dtype != expected)
    fail_field(pass, name, "dtype, got %s, expected %s (from q)", thalweg_dtype_name(t.dtype),
               thalweg_dtype_name(expected));
}

int64_t checked_block(const thalweg_pass& pass, const char* name, int64_t block, int64_t tokens) {
  if (block < 0) fail_field(pass, name, "got %lld, expected 1 or more, or 0 for %lld", ll(block), ll(kUsualBlock));
  return std::min(block == 0 ? kUsualBlock : block, std::max<int64_t>(1, tokens));
}

template <class Args>
Problem check_both(const thalweg_pass& pass, const Args& args, const Sizes& sizes, Binding binding) {
  Problem p{};
  p.B = sizes["B"], p.T = sizes["T"], p.S = sizes["S"], p.H = sizes["H"], p.HK = sizes["HK"];
  p.K = sizes["K"], p.V = sizes["V"], p.N = sizes["N"];
  p.HM = sizes["HM"], p.NQ = sizes["NQ"], p.NK = sizes["NK"];
  p.dtype = args.q.dtype;
  p.causal = args.causal != 0;
  for (const char* size : {"H", "HK", "K", "V"})
    if (sizes[size] < 1) fail_field(pass, sizes.find(size)->from, "%s, got 0, expected at least 1", size);
  if (p.H % p.HK != 0)
    fail_field(pass, "q", "H, got %lld, expected a multiple of HK = %lld (from k)", ll(p.H), ll(p.HK));
  if (p.HM != p.H && p.HM != p.HK && p.HM != 1)
    fail_field(pass, "block_mask", "HM, got %lld, expected H = %lld (from q), HK = %lld (from k) or 1", ll(p.HM),
               ll(p.H), ll(p.HK));
  p.block_q = checked_block(pass, "block_q", args.block_q, p.T);
  p.block_k = checked_block(pass, "block_k", args.block_k, p.S);
  p.scale = args.scale == 0 ? 1 / std::sqrt(double(p.K)) : args.scale;
  check_tokens(pass, args, sizes, binding, &p);
  if (binding == Binding::kRun || !p.packed) {
    check_cover(pass, "NQ", p.NQ, p.block_q, p.longest_q, "queries");
    check_cover(pass, "NK", p.NK, p.block_k, p.longest_k, "keys");
  }
  check_statistics(pass, "lse", args.lse, p.dtype);
  check_statistics(pass, "row_max", args.row_max, p.dtype);
  check_statistics(pass, "row_sum", args.row_sum, p.dtype);
  return p;
}

Problem check_fwd(const Fwd& args, const Sizes& sizes, Binding binding) {
  return check_both(kPasses[0], args, sizes, binding);
}

Problem check_bwd(const Bwd& args, const Sizes& sizes, Binding binding) {
  const thalweg_pass& pass = kPasses[1];
  if (present(args.row_max) != present(args.row_sum))
    fail_field(pass, present(args.row_max) ? "row_sum" : "row_max", "missing, expected [B T H] beside %s",
               present(args.row_max) ? "row_max" : "row_sum");
  if (!present(args.lse) && !present(args.row_max))
    fail_field(pass, "lse", "missing, expected [B T H], or row_max and row_sum");
  Problem p = check_both(pass, args, sizes, binding);
  check_statistics(pass, "d_lse", args.d_lse, p.dtype);
  p.has_d_o = present(args.d_o);
  return p;
}

// ---- Kernels ----

bool takes_flash(const Problem& p, std::string* why) {
  if (p.dtype != THALWEG_F64 && p.K <= kMaxHeadDim && p.V <= kMaxHeadDim) return true;
  if (why && p.dtype == THALWEG_F64) *why = "needs q of f32, bf16 or f16, got f64";
  if (why && p.dtype != THALWEG_F64)
    *why = "needs K and V of " + std::to_string(kMaxHeadDim) + " or less, got K = " + std::to_string(p.K) +
           " and V = " + std::to_string(p.V);
  return false;
}

template <void plan_of(const Problem&, Plan*)>
bool plan_any(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan_of(p, plan);
  return true;
}
template <void plan_of(const Problem&, Plan*)>
bool plan_flash(const Problem& p, const Device&, Plan* plan, std::string* why) {
  if (!takes_flash(p, why)) return false;
  plan_of(p, plan);
  return true;
}

template <void plan_of(const Problem&, Plan*)>
bool plan_tile(const Problem& p, const Device&, Plan* plan, std::string* why) {
  if (p.dtype != THALWEG_BF16) {
    if (why) *why = std::string("needs q of bf16, got ") + thalweg_dtype_name(p.dtype);
    return false;
  }
  if (!takes_flash(p, why)) return false;
  plan_of(p, plan);
  return true;
}

template <bool backward>
bool plan_cuda(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan->shared_bytes = lay_out_cuda(p, backward, nullptr).bytes;
  return true;
}

constexpr Kernel<Problem, Fwd> kFwdKernels[] = {
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda<false>, cuda_generic_fwd},
    {"cpu_tile_fwd_amx", THALWEG_CPU, Isa::kAmx, plan_tile<amx::plan_tile_fwd>, amx::cpu_tile_fwd},
    {"cpu_flash_fwd_avx512", THALWEG_CPU, Isa::kAvx512, plan_flash<avx512::plan_flash_fwd>, avx512::cpu_flash_fwd},
    {"cpu_flash_fwd_avx2", THALWEG_CPU, Isa::kAvx2, plan_flash<avx2::plan_flash_fwd>, avx2::cpu_flash_fwd},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_any<plan_generic_fwd>, cpu_generic_fwd},
};
constexpr Kernel<Problem, Bwd> kBwdKernels[] = {
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda<true>, cuda_generic_bwd},
    {"cpu_tile_bwd_amx", THALWEG_CPU, Isa::kAmx, plan_tile<amx::plan_tile_bwd>, amx::cpu_tile_bwd},
    {"cpu_flash_bwd_avx512", THALWEG_CPU, Isa::kAvx512, plan_flash<avx512::plan_flash_bwd>, avx512::cpu_flash_bwd},
    {"cpu_flash_bwd_avx2", THALWEG_CPU, Isa::kAvx2, plan_flash<avx2::plan_flash_bwd>, avx2::cpu_flash_bwd},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_any<plan_generic_bwd>, cpu_generic_bwd},
};

constexpr Pass<Problem, Fwd> kFwd = {&kPasses[0], check_fwd, kFwdKernels, std::size(kFwdKernels)};
constexpr Pass<Problem, Bwd> kBwd = {&kPasses[1], check_bwd, kBwdKernels, std::size(kBwdKernels)};

// Where sequence n lies, rows that are not in use among them.
template <class Args>
Item place_of(const Problem& p, const Args& args, int64_t n) {
  if (!p.packed) return {n, 0, p.T, 0, p.S};
  const int64_t q = int_at(args.cu_seqlens, n), k = int_at(args.cu_seqlens_k, n);
  return {0, q, int_at(args.cu_seqlens, n + 1) - q, k, int_at(args.cu_seqlens_k, n + 1) - k};
}

template <class Args>
Item item_of(const Problem& p, const Args& args, int64_t n) {
  Item item = place_of(p, args, n);
  if (present(args.q_lens)) item.q_len = int_at(args.q_lens, n);
  if (present(args.k_lens)) item.k_len = int_at(args.k_lens, n);
  return item;
}

template <class Args>
Rest rest_of(const Problem& p, const Args& args, int64_t i) {
  if (i == p.N) return {0, int_at(args.cu_seqlens, p.N), p.T, int_at(args.cu_seqlens_k, p.N), p.S};
  const Item place = place_of(p, args, i), item = item_of(p, args, i);
  return {place.batch, place.q_begin + item.q_len, place.q_begin + place.q_len, place.k_begin + item.k_len,
          place.k_begin + place.k_len};
}

}  // namespace

Item item_at(const Problem& p, const Fwd& args, int64_t n) { return item_of(p, args, n); }
Item item_at(const Problem& p, const Bwd& args, int64_t n) { return item_of(p, args, n); }
int64_t num_rests(const Problem& p) { return p.N + p.packed; }
Rest rest_at(const Problem& p, const Fwd& args, int64_t i) { return rest_of(p, args, i); }
Rest rest_at(const Problem& p, const Bwd& args, int64_t i) { return rest_of(p, args, i); }

}  // namespace block_sparse_attention

const thalweg_pass* block_sparse_attention_pass_at(int i);
const thalweg_pass* block_sparse_attention_pass_at(int i) {
  using block_sparse_attention::kPasses;
  return i >= 0 && i < int(std::size(kPasses)) ? &kPasses[i] : nullptr;
}

}  // namespace thalweg

// ---- Entry points ----

namespace bsa = thalweg::block_sparse_attention;

thalweg_status thalweg_block_sparse_attention_fwd(const thalweg_block_sparse_attention_fwd_args* args,
                                                  const thalweg_context* ctx) {
  return thalweg::call_pass(bsa::kFwd, args, ctx);
}
thalweg_status thalweg_block_sparse_attention_bwd(const thalweg_block_sparse_attention_bwd_args* args,
                                                  const thalweg_context* ctx) {
  return thalweg::call_pass(bsa::kBwd, args, ctx);
}
thalweg_status thalweg_block_sparse_attention_fwd_workspace(const thalweg_block_sparse_attention_fwd_args* args,
                                                            const thalweg_context* ctx, size_t* bytes) {
  return thalweg::query_workspace(bsa::kFwd, args, ctx, bytes);
}
thalweg_status thalweg_block_sparse_attention_bwd_workspace(const thalweg_block_sparse_attention_bwd_args* args,
                                                            const thalweg_context* ctx, size_t* bytes) {
  return thalweg::query_workspace(bsa::kBwd, args, ctx, bytes);
}
