// Plan of the top-k gradient's dK/dV tile on Ascend (docs/ascend.md): rules of the original work and our own arithmetic;
// no text is generated for it, so no compiler has judged it.
#include <algorithm>
#include <stdexcept>

#include "testing/case.h"
#include "testing/fields.h"
#include "thalweg/ascend/plan.h"

namespace thalweg::ascend {
namespace {

constexpr int64_t kLargestSum = 65536;  // bytes of one f32 sum [keys, channels]
constexpr int64_t kRows = 64;           // query rows (tokens times heads) of a product

void read(const testing::Case& c, Problem& p) {
  if (p.dtype != THALWEG_BF16 && p.dtype != THALWEG_F16)
    throw std::invalid_argument(p.kernel + ": q: dtype, got " + thalweg_dtype_name(p.dtype) + ", expected bf16 or f16 (no kernel covers it)");
  for (const char* name : {"q_rope", "sink", "q_lens", "k_lens"})
    if (c.has(name)) throw std::invalid_argument(p.kernel + ": " + name + ", got one, expected none (no kernel covers it)");
  if (p.is_packed) throw std::invalid_argument(p.kernel + ": cu_seqlens, got some, expected none (no kernel covers it)");
  p.E = c.size("E"), p.HV = 1;
}

// The fewest splits of the channels whose sum fits and that give every core a program; more would only read P again.
int64_t channel_splits(int64_t D, int64_t keys, int64_t programs, int64_t cores) {
  int64_t last = 0;
  for (int64_t n = 1; n <= D / 16; ++n) {
    if (D % n || D / n % 16 || 4 * keys * (D / n) > kLargestSum) continue;
    last = n;
    if (programs * n >= cores) return n;
  }
  return last;
}

void plan_topk(Plan& plan) {
  const Problem& p = plan.problem;
  plan.refused.clear();
  plan.task = "one tile of keys, some of the channels, a loop over the query rows";
  Tile& tile = plan.tile;
  int64_t group = std::max(p.H, kRows);  // rows of the heads of one token, or of several tokens
  if (!tile.BT) tile.BT = group <= 128 ? 128 : 64;
  tile.BM = kRows;
  int64_t tiles = p.B * ceil_div(p.S, tile.BT), splits = channel_splits(p.K, tile.BT, tiles, plan.target.aic);
  if (!splits) plan.refused = "BT " + std::to_string(tile.BT) + ": no part of K = " + std::to_string(p.K) + " channels in multiples of 16 has a sum of at most " + std::to_string(kLargestSum) + " bytes";
  tile.K = p.K / std::max<int64_t>(splits, 1);
  int64_t BT = tile.BT, BM = tile.BM, D = tile.K;
  plan.boundary = p.S % BT != 0 || p.T * p.H % BM != 0;
  split_tasks(plan, ceil_div(p.S, BT) * std::max<int64_t>(splits, 1), p.B);
  plan.need.ub = {};
  plan.need.l1 = {{"q or d_o, transposed", 2 * BM * D, 2}, {"P or d_S", 2 * BM * BT, 2}};
  plan.need.l0c = {{"d_k or d_v", 4 * BT * D}};
  plan.moves = {{"P or d_S", true, false, 1, 2 * BM * BT, true}, {"q or d_o, transposed", true, false, 1, 2 * BM * D, true}, {"d_k or d_v", true, true, splits > 1 ? BT : 1, 2 * BT * D, false}};
  plan.notes = {"planned only: no text is generated for this kernel, and no compiler has judged it",
                "P as [B][key tile][m][j], q and d_o transposed as [B][m / BKM][d][j]: both factors are contiguous (the original work's layouts, not reproduced)",
                "tiles of the transposing kernel: BKTQ " + std::to_string(kRows) + " <= BKM " + std::to_string(kRows) + ", which divides the key tile",
                "how often a list names a key is counted in int16: uint8 overflows; with 32 heads a row's offset is not divided by their number (the original work's compiler got it wrong)"};
}

constexpr Kernel kKernels[] = {
    {"sparse_flash_attention.bwd/dkdv", "d_k or d_v of a tile of keys, from the dense panel of P", true, read, plan_topk, nullptr},
};

}  // namespace

const Kernel* sparse_flash_attention_ascend_at(int i);
const Kernel* sparse_flash_attention_ascend_at(int i) { return i >= 0 && i < int(std::size(kKernels)) ? &kKernels[i] : nullptr; }

}  // namespace thalweg::ascend
