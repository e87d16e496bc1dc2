// Lightning indexer: field tables, checks, kernel tables, entry points.
#include "thalweg/ops/lightning_indexer/lightning_indexer.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>

#include "thalweg/core/kernel.h"
#include "thalweg/ops/lightning_indexer/cuda_workspace.h"
#include "thalweg/ops/lightning_indexer/problem.h"

namespace thalweg {
namespace lightning_indexer {
namespace {

using Fwd = thalweg_lightning_indexer_fwd_args;
using Loss = thalweg_lightning_indexer_loss_args;
using Bwd = thalweg_lightning_indexer_bwd_args;
using ll = long long;

constexpr const char* kRefused =
    "key heads: one, shared by all heads of q; fp8 inputs with scales: convert, and fold the scales into w; "
    "block tables: gather paged keys before the call";

// ---- fields -----------------------------------------------------------------------------------------

constexpr thalweg_field in(const char* name, size_t offset, const char* dims, const char* dtypes, const char* doc) {
  return tensor_field(name, THALWEG_IN, offset, false, dims, dtypes, THALWEG_ROWS, doc);
}
constexpr thalweg_field optional_in(const char* name, size_t offset, const char* dims, const char* dtypes,
                                    thalweg_layout layout, const char* doc) {
  return tensor_field(name, THALWEG_IN, offset, true, dims, dtypes, layout, doc);
}
constexpr thalweg_field q(size_t offset) { return in("q", offset, "B T H K", kFloats, "queries of the index heads"); }
constexpr thalweg_field k(size_t offset) { return in("k", offset, "B S K", "=q", "keys, one head for all"); }
constexpr thalweg_field w(size_t offset) {
  return in("w", offset, "B T H", kFloats, "weight of each head, of any sign");
}
constexpr thalweg_field list(size_t offset) {
  return optional_in("indices", offset, "B T E", kInts, THALWEG_ROWS,
                     "keys of each query; entries that are not visible count for nothing, repeats count each; absent: "
                     "entry e is key e (dense warm-up), E is S or more");
}
constexpr thalweg_field p(size_t offset) {
  return optional_in("p", offset, "B T E", kFloats, THALWEG_ROWS,
                     "main attention's probabilities of the entries, averaged over its heads; at least 0, any sum");
}
constexpr thalweg_field start(size_t offset) {
  return optional_in("start", offset, "B T", kInts, THALWEG_ANY, "first visible key; absent: 0");
}
constexpr thalweg_field end(size_t offset) {
  return optional_in("end", offset, "B T", kInts, THALWEG_ANY,
                     "one past the last visible key; absent: the number of keys");
}
constexpr thalweg_field q_lens(size_t offset) {
  return optional_in("q_lens", offset, "N", kInts, THALWEG_ANY, "queries of each sequence; the rest is padding");
}
constexpr thalweg_field k_lens(size_t offset) {
  return optional_in("k_lens", offset, "N", kInts, THALWEG_ANY, "keys of each sequence; the rest is padding");
}
constexpr thalweg_field cu_seqlens(size_t offset) {
  return optional_in("cu_seqlens", offset, "N+1", kInts, THALWEG_ANY, "packed: where sequences of queries start, end");
}
constexpr thalweg_field cu_seqlens_k(size_t offset) {
  return optional_in("cu_seqlens_k", offset, "N+1", kInts, THALWEG_ANY, "packed: where their keys start and end");
}
constexpr thalweg_field scale(size_t offset) {
  return option_field("scale", THALWEG_REAL, offset, "factor of <q, k>, above 0; 0 means 1");
}
constexpr thalweg_field causal(size_t offset) {
  return option_field("causal", THALWEG_FLAG, offset,
                      "the last query sees up to the last key, earlier ones as much less");
}

constexpr thalweg_field kFwdFields[] = {
    q(offsetof(Fwd, q)),
    k(offsetof(Fwd, k)),
    w(offsetof(Fwd, w)),
    start(offsetof(Fwd, start)),
    end(offsetof(Fwd, end)),
    q_lens(offsetof(Fwd, q_lens)),
    k_lens(offsetof(Fwd, k_lens)),
    cu_seqlens(offsetof(Fwd, cu_seqlens)),
    cu_seqlens_k(offsetof(Fwd, cu_seqlens_k)),
    tensor_field("indices", THALWEG_OUT, offsetof(Fwd, indices), false, "B T E", kInts, THALWEG_ROWS,
                 "the E best visible keys, counted from the sequence's first; -1 when there are fewer"),
    tensor_field("scores", THALWEG_OUT, offsetof(Fwd, scores), true, "B T E", "f32 f64", THALWEG_ROWS,
                 "score of each index; minus infinity where that is -1"),
    scale(offsetof(Fwd, scale)),
    causal(offsetof(Fwd, causal)),
    option_field("order", THALWEG_CHOICE, offsetof(Fwd, order),
                 "by score descending, at equal scores by index; or the same indices ascending; 0 means score",
                 "score index"),
};

constexpr thalweg_field kLossFields[] = {
    q(offsetof(Loss, q)),
    k(offsetof(Loss, k)),
    w(offsetof(Loss, w)),
    list(offsetof(Loss, indices)),
    p(offsetof(Loss, p)),
    start(offsetof(Loss, start)),
    end(offsetof(Loss, end)),
    q_lens(offsetof(Loss, q_lens)),
    k_lens(offsetof(Loss, k_lens)),
    cu_seqlens(offsetof(Loss, cu_seqlens)),
    cu_seqlens_k(offsetof(Loss, cu_seqlens_k)),
    tensor_field("loss", THALWEG_OUT, offsetof(Loss, loss), true, "B T", "f32 f64", THALWEG_ANY,
                 "KL(p || softmax(scores)) of each query, natural logarithm; needs p"),
    tensor_field("scores", THALWEG_OUT, offsetof(Loss, scores), true, "B T E", "f32 f64", THALWEG_ROWS,
                 "score of each entry; minus infinity where it is not visible"),
    scale(offsetof(Loss, scale)),
    causal(offsetof(Loss, causal)),
};

constexpr thalweg_field kBwdFields[] = {
    q(offsetof(Bwd, q)),
    k(offsetof(Bwd, k)),
    w(offsetof(Bwd, w)),
    list(offsetof(Bwd, indices)),
    p(offsetof(Bwd, p)),
    start(offsetof(Bwd, start)),
    end(offsetof(Bwd, end)),
    q_lens(offsetof(Bwd, q_lens)),
    k_lens(offsetof(Bwd, k_lens)),
    cu_seqlens(offsetof(Bwd, cu_seqlens)),
    cu_seqlens_k(offsetof(Bwd, cu_seqlens_k)),
    optional_in("d_loss", offsetof(Bwd, d_loss), "B T", kFloats, THALWEG_ANY,
                "gradient of each query's loss; absent: 0; needs p"),
    optional_in("d_scores", offsetof(Bwd, d_scores), "B T E", kFloats, THALWEG_ROWS,
                "gradient of the scores; absent: 0; ignored where an entry is not visible"),
    tensor_field("d_q", THALWEG_OUT, offsetof(Bwd, d_q), true, "B T H K", "=q", THALWEG_ROWS, "gradient of q"),
    tensor_field("d_k", THALWEG_OUT, offsetof(Bwd, d_k), true, "B S K", "=k", THALWEG_ROWS, "gradient of k"),
    tensor_field("d_w", THALWEG_OUT, offsetof(Bwd, d_w), true, "B T H", "=w", THALWEG_ROWS, "gradient of w"),
    scale(offsetof(Bwd, scale)),
    causal(offsetof(Bwd, causal)),
};

extern const Pass<Problem, Fwd> kFwd;
extern const Pass<Problem, Loss> kLoss;
extern const Pass<Problem, Bwd> kBwd;

constexpr thalweg_pass kPasses[] = {
    pass_row<kFwd, Fwd>("lightning_indexer", "fwd", "the best visible keys of every query, by index score", kFwdFields,
                        kRefused),
    pass_row<kLoss, Loss>("lightning_indexer", "loss", "KL of the main attention's probabilities and the index scores",
                          kLossFields, kRefused),
    pass_row<kBwd, Bwd>("lightning_indexer", "bwd", "gradients of q, k and w, of the loss and of the scores",
                        kBwdFields, kRefused),
};

// ---- checks -----------------------------------------------------------------------------------------

template <class Args>
Problem check_all(const thalweg_pass& pass, const Args& args, const Sizes& sizes, Binding binding) {
  Problem problem{};
  problem.B = sizes["B"];
  problem.T = sizes["T"];
  problem.S = sizes["S"];
  problem.H = sizes["H"];
  problem.K = sizes["K"];
  problem.E = sizes["E"];
  problem.dtype = args.q.dtype;
  problem.causal = args.causal != 0;
  problem.packed = present(args.cu_seqlens);
  problem.scale = args.scale == 0 ? 1 : args.scale;
  constexpr int64_t kMost = 2147483647;  // positions are 32-bit
  if (problem.S > kMost) fail_field(pass, "k", "S, got %lld, expected at most %lld", ll(problem.S), ll(kMost));
  if (problem.E > kMost) fail_field(pass, "indices", "E, got %lld, expected at most %lld", ll(problem.E), ll(kMost));
  if (args.scale < 0) fail_field(pass, "scale", "got %g, expected 0 or more", args.scale);
  if (present(args.cu_seqlens) != present(args.cu_seqlens_k)) {
    const bool queries = present(args.cu_seqlens);
    fail_field(pass, queries ? "cu_seqlens" : "cu_seqlens_k", "needs %s, got %s without it",
               queries ? "cu_seqlens_k" : "cu_seqlens", queries ? "cu_seqlens" : "cu_seqlens_k");
  }
  problem.N = check_sequences(pass, sizes, args.cu_seqlens, binding);
  if (binding != Binding::kRun) return problem;
  if (present(args.cu_seqlens_k)) check_borders(pass, "cu_seqlens_k", args.cu_seqlens_k, "S", sizes);
  check_lengths(pass, "q_lens", args.q_lens, args.cu_seqlens, problem.T);
  check_lengths(pass, "k_lens", args.k_lens, args.cu_seqlens_k, problem.S);
  return problem;
}

// The list, or every key.
template <class Args>
Problem check_listed(const thalweg_pass& pass, const Args& args, const Sizes& sizes, Binding binding) {
  Problem problem = check_all(pass, args, sizes, binding);
  problem.dense = !present(args.indices);
  if (!problem.dense) return problem;
  const Sizes::Entry* E = sizes.find("E");
  if (!E) problem.E = problem.S;
  if (!present(args.cu_seqlens)) {
    if (problem.E < problem.S)
      fail_field(pass, E->from, "E, got %lld, expected at least S = %lld without indices (from k)", ll(E->value),
                 ll(problem.S));
    return problem;
  }
  for (int64_t n = 0; n < problem.N && binding == Binding::kRun; ++n) {
    const int64_t keys = int_at(args.cu_seqlens_k, n + 1) - int_at(args.cu_seqlens_k, n);
    if (problem.E < keys)
      fail_field(pass, E->from, "E, got %lld, expected at least %lld without indices (the keys of sequence %lld)",
                 ll(problem.E), ll(keys), ll(n));
  }
  return problem;
}

Problem check_fwd(const Fwd& args, const Sizes& sizes, Binding binding) {
  Problem problem = check_all(kPasses[0], args, sizes, binding);
  problem.by_index = args.order == THALWEG_INDEXER_BY_INDEX;
  return problem;
}

Problem check_loss(const Loss& args, const Sizes& sizes, Binding binding) {
  if (present(args.loss) && !present(args.p)) fail_field(kPasses[1], "loss", "needs p, got loss without it");
  return check_listed(kPasses[1], args, sizes, binding);
}

Problem check_bwd(const Bwd& args, const Sizes& sizes, Binding binding) {
  if (present(args.d_loss) && !present(args.p)) fail_field(kPasses[2], "d_loss", "needs p, got d_loss without it");
  Problem problem = check_listed(kPasses[2], args, sizes, binding);
  problem.wants_d_k = present(args.d_k);
  return problem;
}

// ---- kernels ----------------------------------------------------------------------------------------

bool plan_generic_fwd(const Problem& problem, const Device&, Plan* plan, std::string*) {
  plan->slot_bytes = generic_fwd_bytes(problem);
  return true;
}
bool plan_generic_loss(const Problem& problem, const Device&, Plan* plan, std::string*) {
  plan->slot_bytes = generic_list_bytes(problem);
  return true;
}
bool plan_generic_bwd(const Problem& problem, const Device&, Plan* plan, std::string*) {
  plan->shared_bytes = generic_shared_bytes(problem);
  plan->slot_bytes = generic_list_bytes(problem);
  return true;
}

bool takes_vec(const Problem& problem, std::string* why) {
  if (problem.dtype == THALWEG_F64) {
    if (why) *why = "needs q of f32, bf16 or f16, got f64";
    return false;
  }
  if (problem.B * problem.S > 2147483647) {
    if (why) *why = "needs fewer than 2^31 keys in all, got " + std::to_string(problem.B * problem.S);
    return false;
  }
  return true;
}

constexpr char kFwdChoices[] = "rows=1|2|3|4";
template <auto slot_bytes, auto key_bytes>
bool plan_vec_fwd(const Problem& problem, const Device&, Plan* plan, std::string* why) {
  if (!takes_vec(problem, why)) return false;
  plan->shared_bytes = key_bytes(problem);
  plan->slot_bytes = slot_bytes(problem);
  // Four rows share a block of keys; fewer where some threads would have nothing to do.
  const int64_t rows = std::clamp<int64_t>(problem.B * problem.T / (4 * plan->num_slots), 1, kForwardRows);
  return decide(&plan->values[kRows], "rows", rows, 1, kForwardRows, why);
}

template <auto slot_bytes, auto key_bytes>
bool plan_vec_loss(const Problem& problem, const Device&, Plan* plan, std::string* why) {
  if (!takes_vec(problem, why)) return false;
  plan->shared_bytes = key_bytes(problem);
  plan->slot_bytes = slot_bytes(problem);
  return true;
}

template <auto slot_bytes, auto key_bytes, auto sum_bytes, auto chunk_bytes>
bool plan_vec_bwd(const Problem& problem, const Device&, Plan* plan, std::string* why) {
  if (!takes_vec(problem, why)) return false;
  // Chunks of about 8 MiB, so that the second phase finds them in the caches; four rows a thread at least.
  constexpr int64_t kChunkBytes = int64_t(8) << 20;
  const int64_t row = std::max<int64_t>(1, chunk_bytes(problem, 1)), rows = problem.B * problem.T;
  plan->values[kRows] =
      std::clamp<int64_t>(kChunkBytes / row, 4 * plan->num_slots, std::max<int64_t>(4 * plan->num_slots, 512));
  plan->values[kRows] = std::clamp<int64_t>(plan->values[kRows], 1, std::max<int64_t>(1, rows));
  plan->shared_bytes = key_bytes(problem) + sum_bytes(problem) + chunk_bytes(problem, plan->values[kRows]);
  plan->slot_bytes = slot_bytes(problem);
  return true;
}

// values[0]: rows at a time, a few blocks a multiprocessor.
template <CudaPass pass>
bool plan_cuda(const Problem& problem, const Device& device, Plan* plan, std::string*) {
  plan->values[0] = 4 * device.num_sms;
  plan->shared_bytes = lay_out_cuda(problem, pass, plan->values[0], nullptr).bytes;
  return true;
}

constexpr Kernel<Problem, Fwd> kFwdKernels[] = {
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda<CudaPass::kFwd>, cuda_generic_fwd},
    {"cpu_vec_fwd_avx512", THALWEG_CPU, Isa::kAvx512,
     plan_vec_fwd<avx512::cpu_vec_fwd_slot_bytes, avx512::cpu_vec_key_bytes>, avx512::cpu_vec_fwd, kFwdChoices},
    {"cpu_vec_fwd_avx2", THALWEG_CPU, Isa::kAvx2, plan_vec_fwd<avx2::cpu_vec_fwd_slot_bytes, avx2::cpu_vec_key_bytes>,
     avx2::cpu_vec_fwd, kFwdChoices},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic_fwd, cpu_generic_fwd},
};
constexpr Kernel<Problem, Loss> kLossKernels[] = {
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda<CudaPass::kLoss>, cuda_generic_loss},
    {"cpu_vec_loss_avx512", THALWEG_CPU, Isa::kAvx512,
     plan_vec_loss<avx512::cpu_vec_loss_slot_bytes, avx512::cpu_vec_key_bytes>, avx512::cpu_vec_loss},
    {"cpu_vec_loss_avx2", THALWEG_CPU, Isa::kAvx2,
     plan_vec_loss<avx2::cpu_vec_loss_slot_bytes, avx2::cpu_vec_key_bytes>, avx2::cpu_vec_loss},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic_loss, cpu_generic_loss},
};
constexpr Kernel<Problem, Bwd> kBwdKernels[] = {
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda<CudaPass::kBwd>, cuda_generic_bwd},
    {"cpu_vec_bwd_avx512", THALWEG_CPU, Isa::kAvx512,
     plan_vec_bwd<avx512::cpu_vec_bwd_slot_bytes, avx512::cpu_vec_key_bytes, avx512::cpu_vec_sum_bytes,
                  avx512::cpu_vec_bwd_chunk_bytes>,
     avx512::cpu_vec_bwd},
    {"cpu_vec_bwd_avx2", THALWEG_CPU, Isa::kAvx2,
     plan_vec_bwd<avx2::cpu_vec_bwd_slot_bytes, avx2::cpu_vec_key_bytes, avx2::cpu_vec_sum_bytes,
                  avx2::cpu_vec_bwd_chunk_bytes>,
     avx2::cpu_vec_bwd},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic_bwd, cpu_generic_bwd},
};

constexpr Pass<Problem, Fwd> kFwd = {&kPasses[0], check_fwd, kFwdKernels, std::size(kFwdKernels)};
constexpr Pass<Problem, Loss> kLoss = {&kPasses[1], check_loss, kLossKernels, std::size(kLossKernels)};
constexpr Pass<Problem, Bwd> kBwd = {&kPasses[2], check_bwd, kBwdKernels, std::size(kBwdKernels)};

}  // namespace
}  // namespace lightning_indexer

const thalweg_pass* lightning_indexer_pass_at(int i);
const thalweg_pass* lightning_indexer_pass_at(int i) {
  return i >= 0 && i < int(std::size(lightning_indexer::kPasses)) ? &lightning_indexer::kPasses[i] : nullptr;
}

}  // namespace thalweg

// ---- entry points -----------------------------------------------------------------------------------

namespace li = thalweg::lightning_indexer;

thalweg_status thalweg_lightning_indexer_fwd(const thalweg_lightning_indexer_fwd_args* args,
                                             const thalweg_context* ctx) {
  return thalweg::call_pass(li::kFwd, args, ctx);
}
thalweg_status thalweg_lightning_indexer_loss(const thalweg_lightning_indexer_loss_args* args,
                                              const thalweg_context* ctx) {
  return thalweg::call_pass(li::kLoss, args, ctx);
}
thalweg_status thalweg_lightning_indexer_bwd(const thalweg_lightning_indexer_bwd_args* args,
                                             const thalweg_context* ctx) {
  return thalweg::call_pass(li::kBwd, args, ctx);
}
thalweg_status thalweg_lightning_indexer_fwd_workspace(const thalweg_lightning_indexer_fwd_args* args,
                                                       const thalweg_context* ctx, size_t* bytes) {
  return thalweg::query_workspace(li::kFwd, args, ctx, bytes);
}
thalweg_status thalweg_lightning_indexer_loss_workspace(const thalweg_lightning_indexer_loss_args* args,
                                                        const thalweg_context* ctx, size_t* bytes) {
  return thalweg::query_workspace(li::kLoss, args, ctx, bytes);
}
thalweg_status thalweg_lightning_indexer_bwd_workspace(const thalweg_lightning_indexer_bwd_args* args,
                                                       const thalweg_context* ctx, size_t* bytes) {
  return thalweg::query_workspace(li::kBwd, args, ctx, bytes);
}
