// Plan of the top-k gradient's dK/dV tile on Ascend (docs/ascend.md): a task is one tile of keys and some of the channels,
// a loop over the groups of queries whose lists name a key of it. No formula was fitted for its needs: the compiler's word
// is the only one.
#include <algorithm>
#include <stdexcept>

#include "testing/case.h"
#include "testing/fields.h"
#include "thalweg/ascend/execute.h"
#include "thalweg/ascend/plan.h"

namespace thalweg::ascend {

std::string emit_topk_dkdv(const Plan&);
Scene topk_dkdv_scene(const Plan&);

namespace {

constexpr int64_t kLargestSum = 65536;  // bytes of the f32 sums [keys, channels] of d_k and d_v together
constexpr int64_t kRows = 32;           // query rows (tokens times heads) of a product, at least

void read(const testing::Case& c, Problem& p) {
  if (p.dtype != THALWEG_BF16 && p.dtype != THALWEG_F16)
    throw std::invalid_argument(p.kernel + ": q: dtype, got " + thalweg_dtype_name(p.dtype) + ", expected bf16 or f16 (no kernel covers it)");
  for (const char* name : {"q_rope", "sink", "q_lens", "k_lens"})
    if (c.has(name)) throw std::invalid_argument(p.kernel + ": " + name + ", got one, expected none (no kernel covers it)");
  if (p.is_packed) throw std::invalid_argument(p.kernel + ": cu_seqlens, got some, expected none (no kernel covers it)");
  if (p.V != p.K) throw std::invalid_argument(p.kernel + ": V, got " + std::to_string(p.V) + ", expected K = " + std::to_string(p.K) + " (no kernel covers it)");
  if (!c.has("v")) throw std::invalid_argument(p.kernel + ": v, got none, expected one (no kernel covers the latent's value)");
  if (c.has("causal") || c.number("sparse_block_size", 1) > 1)
    throw std::invalid_argument(p.kernel + ": causal, sparse_block_size, got one, expected none (no kernel covers it)");
  p.E = c.size("E"), p.HV = 1;
}

// The fewest splits of the channels whose sum fits and that give every core a program; more would only read P again.
int64_t channel_splits(int64_t D, int64_t keys, int64_t programs, int64_t cores) {
  int64_t last = 0;
  for (int64_t n = 1; n <= D / 16; ++n) {
    if (D % n || D / n % 16 || 8 * keys * (D / n) > kLargestSum) continue;
    last = n;
    if (programs * n >= cores) return n;
  }
  return last;
}

int64_t rows_of(int64_t heads) {  // whole queries, a multiple of 16
  int64_t rows = heads;
  while (rows % 16 || rows < kRows) rows += heads;
  return rows;
}

void plan_topk(Plan& plan) {
  const Problem& p = plan.problem;
  plan.refused.clear();
  plan.task = "one tile of keys, some of the channels, a loop over the groups of queries that list it";
  plan.need_is_predicted = false;
  Tile& tile = plan.tile;
  tile.BM = rows_of(p.H);
  if (!tile.BT) tile.BT = tile.BM <= 128 ? 128 : 64;
  int64_t tiles = ceil_div(p.S, tile.BT), splits = channel_splits(p.K, tile.BT, p.B * tiles, plan.target.aic);
  if (!splits) plan.refused = "BT " + std::to_string(tile.BT) + ": no part of K = " + std::to_string(p.K) + " channels in multiples of 16 has sums of at most " + std::to_string(kLargestSum) + " bytes";
  splits = std::max<int64_t>(splits, 1);
  tile.K = p.K, tile.V = p.K / splits;
  plan.boundary = p.S % tile.BT != 0 || p.T % (tile.BM / p.H) != 0;
  split_tasks(plan, tiles * splits, p.B);
  int64_t BT = tile.BT, BM = tile.BM, K = tile.K, part = tile.V;
  plan.moves.clear();
  for (const char* keys : {"k", "v"}) plan.moves.push_back({keys, true, false, 1, 2 * BT * K, false});
  for (const char* queries : {"q", "d_o"}) plan.moves.push_back({queries, true, false, 1, 2 * BM * K, true});
  for (const char* sum : {"d_k", "d_v"}) plan.moves.push_back({sum, true, true, splits > 1 ? BT : 1, 2 * BT * part, false});
  plan.notes = {"the original work's product reads a dense panel of P, written by a kernel of its own, with q and d_o transposed: not reproduced",
                "how often a list names a key is 16-bit there, since 8 bits overflow; here it is the logarithm of a count in f32"};
}

constexpr Kernel kKernels[] = {
    {"sparse_flash_attention.bwd/dkdv", "d_k and d_v of a tile of keys, some of the channels", true, read, plan_topk, emit_topk_dkdv, topk_dkdv_scene},
};

}  // namespace

const Kernel* sparse_flash_attention_ascend_at(int i);
const Kernel* sparse_flash_attention_ascend_at(int i) { return i >= 0 && i < int(std::size(kKernels)) ? &kKernels[i] : nullptr; }

}  // namespace thalweg::ascend
