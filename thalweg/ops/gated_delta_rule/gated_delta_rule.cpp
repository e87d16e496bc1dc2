// Gated delta rule: kernel tables, entry points. Field tables and checks: thalweg/delta_rule/.
#include "thalweg/ops/gated_delta_rule/gated_delta_rule.h"

#include "thalweg/core/kernel.h"
#include "thalweg/delta_rule/check.h"
#include "thalweg/delta_rule/fields.h"
#include "thalweg/ops/gated_delta_rule/problem.h"
#include "thalweg/ops/gated_delta_rule/sm90_chunk_bwd_plan.h"
#include "thalweg/ops/gated_delta_rule/sm90_chunk_plan.h"

namespace thalweg::gated_delta_rule {
namespace {

using namespace delta_rule;
using Fwd = thalweg_gated_delta_rule_fwd_args;
using Bwd = thalweg_gated_delta_rule_bwd_args;
using Decode = thalweg_gated_delta_rule_decode_args;

// ---- Kernel tables ----

const Kernel<Problem, Fwd> kFwdKernels[] = {
    {"sm90_chunk_fwd", THALWEG_CUDA, Isa::kPortable, sm90::plan_fwd, sm90_chunk_fwd},
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda_generic, cuda_generic_fwd},
    {"cpu_chunk_fwd_avx512", THALWEG_CPU, Isa::kAvx512, plan_value_heads<avx512::cpu_chunk_fwd_slot_bytes>,
     avx512::cpu_chunk_fwd},
    {"cpu_chunk_fwd_avx2", THALWEG_CPU, Isa::kAvx2, plan_value_heads<avx2::cpu_chunk_fwd_slot_bytes>,
     avx2::cpu_chunk_fwd},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic, cpu_generic_fwd},
};
const Kernel<Problem, Bwd> kBwdKernels[] = {
    {"sm90_chunk_bwd", THALWEG_CUDA, Isa::kPortable, plan_chunk_bwd, sm90_chunk_bwd},
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda_generic_bwd, cuda_generic_bwd},
    {"cpu_chunk_bwd_avx512", THALWEG_CPU, Isa::kAvx512, plan_key_heads<avx512::cpu_chunk_bwd_slot_bytes>,
     avx512::cpu_chunk_bwd},
    {"cpu_chunk_bwd_avx2", THALWEG_CPU, Isa::kAvx2, plan_key_heads<avx2::cpu_chunk_bwd_slot_bytes>,
     avx2::cpu_chunk_bwd},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic_bwd, cpu_generic_bwd},
};
const Kernel<Problem, Decode> kDecodeKernels[] = {
    {"sm90_decode", THALWEG_CUDA, Isa::kPortable, plan_sm90_decode, sm90_decode},
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda_generic_decode, cuda_generic_decode},
    {"cpu_decode_avx512", THALWEG_CPU, Isa::kAvx512, plan_value_heads<avx512::cpu_decode_slot_bytes>,
     avx512::cpu_decode},
    {"cpu_decode_avx2", THALWEG_CPU, Isa::kAvx2, plan_value_heads<avx2::cpu_decode_slot_bytes>, avx2::cpu_decode},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic, cpu_generic_decode},
};

// ---- Passes ----

constexpr auto kFwdFields = fwd_fields<Fwd>();
constexpr auto kBwdFields = bwd_fields<Bwd>();
constexpr auto kDecodeFields = decode_fields<Decode>();

constexpr const char* kRefused =
    "gk: a decay per key channel belongs to kimi_delta_attention; "
    "gv: a decay per value channel is not computed; "
    "beta of rank 4: a write strength per channel is not computed; "
    "cp_context: context parallelism is not done, give each rank's states explicitly";

extern const thalweg_pass kFwdInfo, kBwdInfo, kDecodeInfo;

const Pass<Problem, Fwd> kFwd{&kFwdInfo, check_fwd<kFwdInfo, Fwd>, kFwdKernels, std::size(kFwdKernels),
                              refuse_ranks<kFwdInfo, Fwd>};
const Pass<Problem, Bwd> kBwd{&kBwdInfo, check_bwd<kBwdInfo, Bwd>, kBwdKernels, std::size(kBwdKernels),
                              refuse_ranks<kBwdInfo, Bwd>};
const Pass<Problem, Decode> kDecode{&kDecodeInfo, check_decode<kDecodeInfo, Decode>, kDecodeKernels,
                                    std::size(kDecodeKernels), refuse_ranks<kDecodeInfo, Decode>};

constexpr const char* kOp = "gated_delta_rule";

const thalweg_pass kFwdInfo =
    pass_row<kFwd, Fwd>(kOp, "fwd", "Gated DeltaNet over whole sequences: outputs and states", kFwdFields, kRefused);
const thalweg_pass kBwdInfo = pass_row<kBwd, Bwd>(
    kOp, "bwd", "gradients of every input of fwd, from its inputs and d_o, d_final_state", kBwdFields, kRefused);
const thalweg_pass kDecodeInfo = pass_row<kDecode, Decode>(
    kOp, "decode", "one or a few more tokens for each sequence, states in a pool", kDecodeFields, kRefused);

}  // namespace
}  // namespace thalweg::gated_delta_rule

namespace thalweg {

const thalweg_pass* gated_delta_rule_pass_at(int i) {
  using namespace gated_delta_rule;
  const thalweg_pass* passes[] = {&kFwdInfo, &kBwdInfo, &kDecodeInfo};
  return i >= 0 && i < 3 ? passes[i] : nullptr;
}

}  // namespace thalweg

// ---- Entry points ----

using namespace thalweg::gated_delta_rule;

thalweg_status thalweg_gated_delta_rule_fwd(const thalweg_gated_delta_rule_fwd_args* args, const thalweg_context* ctx) {
  return kFwdInfo.call(args, ctx);
}
thalweg_status thalweg_gated_delta_rule_bwd(const thalweg_gated_delta_rule_bwd_args* args, const thalweg_context* ctx) {
  return kBwdInfo.call(args, ctx);
}
thalweg_status thalweg_gated_delta_rule_decode(const thalweg_gated_delta_rule_decode_args* args,
                                               const thalweg_context* ctx) {
  return kDecodeInfo.call(args, ctx);
}
thalweg_status thalweg_gated_delta_rule_fwd_workspace(const thalweg_gated_delta_rule_fwd_args* args,
                                                      const thalweg_context* ctx, size_t* bytes) {
  return kFwdInfo.workspace(args, ctx, bytes);
}
thalweg_status thalweg_gated_delta_rule_bwd_workspace(const thalweg_gated_delta_rule_bwd_args* args,
                                                      const thalweg_context* ctx, size_t* bytes) {
  return kBwdInfo.workspace(args, ctx, bytes);
}
thalweg_status thalweg_gated_delta_rule_decode_workspace(const thalweg_gated_delta_rule_decode_args* args,
                                                         const thalweg_context* ctx, size_t* bytes) {
  return kDecodeInfo.workspace(args, ctx, bytes);
}
