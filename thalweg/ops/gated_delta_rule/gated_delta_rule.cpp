// Gated delta rule: kernel tables, entry points. Field tables and checks: thalweg/delta_rule/.
#include "thalweg/ops/gated_delta_rule/gated_delta_rule.h"

#include <algorithm>

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

// ---- sm90_chunk_fwd ----

constexpr char kSm90Choices[] = "columns=1|2 pieces=0|2|4|8|16 prep=0|32|64";

bool takes_sm90_chunk(const Problem& p, std::string* why) {
  std::string reason;
  if (p.dtype != THALWEG_BF16 && p.dtype != THALWEG_F16)
    reason = std::string("needs q of bf16 or f16, got ") + thalweg_dtype_name(p.dtype);
  else if (p.K != p.V || (p.K != 64 && p.K != 128))
    reason = "needs K = V of 64 or 128, got K = " + std::to_string(p.K) + ", V = " + std::to_string(p.V);
  else if (p.every % sm90::kChunk != 0)
    reason = "needs every of a multiple of 64, got " + std::to_string(p.every);
  if (why && !reason.empty()) *why = reason;
  return reason.empty();
}

bool plan_sm90_chunk_fwd(const Problem& p, const Device& device, Plan* plan, std::string* why) {
  if (!takes_sm90_chunk(p, why)) return false;
  int64_t* values = plan->values;
  // Two blocks of columns share the tiles; apart, they use twice the multiprocessors.
  const int64_t columns = p.K == 128 && 2 * p.N * p.HV > device.num_sms ? 2 : 1;
  if (!decide(&values[sm90::kColumnBlocks], "columns", columns, 1, p.K / 64, why)) return false;
  const int64_t chains = p.N * p.HV * (p.V / 64) / values[sm90::kColumnBlocks];
  // Only blocks of one block of columns make pieces, or wait for factors made beside them.
  const bool fits = values[sm90::kColumnBlocks] == 1 && chains > 0 && p.T < int64_t(1) << 30;
  // Pieces of one sequence fill the device; packed ones have lengths that only the device knows.
  const int64_t chunks = p.T / sm90::kChunk, free = fits ? device.num_sms / chains : 0;
  int64_t pieces = std::min({free, chunks / sm90::kFewestPieceChunks, sm90::kMostPieces});
  if (pieces < sm90::kFewestPieces || (p.packed && p.N != 1)) pieces = 0;
  const int64_t most = fits ? std::min(chunks, sm90::kMostPieces) : 0;
  if (!decide(&values[sm90::kPieces], "pieces", pieces, 0, most, why)) return false;
  if (values[sm90::kPieces] == 1) values[sm90::kPieces] = 0;
  const int64_t spare = fits && values[sm90::kPieces] == 0 ? std::max<int64_t>(0, device.num_sms - chains) : 0;
  const int64_t prep = spare >= sm90::kFewestPrepBlocks ? spare : 0;
  if (!decide(&values[sm90::kPrepBlocks], "prep", prep, 0, spare, why)) return false;
  values[sm90::kNumSms] = device.num_sms;
  plan->shared_bytes = values[sm90::kPieces]       ? sm90::sums_end(p, values[sm90::kPieces])
                       : values[sm90::kPrepBlocks] ? sm90::flags_at(p) + sm90::flags_bytes(p)
                                                   : sm90::flags_at(p) + sm90::kTicketInts * 4;
  return true;
}

// ---- Kernel tables ----

const Kernel<Problem, Fwd> kFwdKernels[] = {
    {"sm90_chunk_fwd", THALWEG_CUDA, Isa::kPortable, plan_sm90_chunk_fwd, sm90_chunk_fwd, kSm90Choices},
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
