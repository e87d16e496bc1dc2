// Plan of the top-k gradient's dK/dV tile on Ascend (docs/ascend.md): a task is one tile of keys and some of the channels,
// a loop over the groups of queries whose lists name a key of it.
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

// The weights of several queries are repeated for each head, in tiles whose heads are padded to 16. Under double buffering
// the compiler takes such tiles in two halves of the keys, but for cut ones.
void plan_need(Plan& plan, int64_t splits) {
  int64_t BM = plan.tile.BM, BT = plan.tile.BT, K = plan.tile.K, part = plan.tile.V, H = plan.problem.H, R = BM / 2;
  int64_t G = BM / H, padded = round_up(H, 16), times = plan.buffering == Buffering::kVector ? 2 : 1;
  bool off = plan.buffering == Buffering::kOff;
  auto& ub = plan.need.ub;
  if (G == 1 || H == 1) {
    ub = {{"P", 4 * R * BT, times}, {"d_S", 4 * R * BT, times}, {"rows' statistics and scratch", (32 + 4 * times) * R}};
    if (H > 1 && !off && !plan.boundary) ub.push_back({"weights", 4 * R * BT});
  } else {
    bool whole = off || plan.boundary;
    int64_t part_of = whole ? 1 : 2, width = whole ? 2 * BT : round_up(BT, 32);  // halves of 16-bit rows are padded to 32 bytes
    std::vector<Buffer> points = {{"weights of each head", 4 * times / part_of * BM * BT + 2 * G * padded * width + (whole ? 0 : 8 * times * BM)},
                                  {"scores, weights of each head", whole ? 8 * times * BM * BT + 2 * G * padded * BT : 0},
                                  {"P, d_S, rows' statistics and scratch", 8 * times / part_of * BM * BT + (32 + 4 * times * part_of) * BM}};
    ub = {*std::max_element(points.begin(), points.end(), [](const Buffer& a, const Buffer& b) { return a.bytes < b.bytes; })};
  }
  int64_t factor = 2 * BM * BT, rows = 2 * BM * K, columns = 2 * BM * part;
  int64_t copies = plan.buffering == Buffering::kCube ? 2 : 1;
  Buffer keys{"k, v", 2 * BT * K, plan.mode == Mode::kPersistent ? 2 * copies : 2};
  auto& l1 = plan.need.l1;
  if (!off) {  // the loop is unrolled by four
    l1 = {keys, {"q, d_o of the part", columns, 8 * copies}};
    l1.push_back(splits > 1 && rows > 2 * factor ? Buffer{"q or d_o", rows, copies} : Buffer{"P, d_S", factor, 2 * copies});
  } else if (splits == 1) {
    l1 = {keys, {"q, d_o", rows, 2}, {"P, d_S", factor, 2}};
  } else if (rows > 2 * factor + columns) {
    l1 = {keys, {"q or d_o", rows}};
  } else {
    l1 = {keys, {"q or d_o of the part", columns}, {"P, d_S", factor, 2}};
  }
  plan.need.l0c = {{"d_k, d_v", 4 * BT * part, 2}, {"scores", 4 * BM * BT}};
}

// As in the block-sparse tile, where double buffering of full tiles leaves the rows undivided between the two vector cores;
// several queries of several heads are divided in no case, then by halves of the keys.
void plan_moves(Plan& plan, int64_t splits) {
  int64_t BM = plan.tile.BM, BT = plan.tile.BT, K = plan.tile.K, part = plan.tile.V, H = plan.problem.H, G = BM / H;
  bool off = plan.buffering == Buffering::kOff, once = off || plan.boundary, plain = G == 1 || H == 1;
  int64_t rows = once && plain ? BM / 2 : BM, steps = once ? 1 : 2;
  plan.moves.clear();
  auto add = [&](const char* tensor, bool cube, bool out, int64_t bursts, int64_t bytes, bool per_pass) {
    plan.moves.push_back({tensor, cube, out, bursts, bytes, per_pass});
  };
  for (const char* product : {"scores", "d_P"}) add(product, false, false, plain || once ? steps : steps * BM, 4 * rows * BT, true);
  for (const char* row : {"lse", "delta"}) add(row, false, false, plain ? steps : 1, 4 * rows, true);
  add("weights", false, false, H == 1 ? steps : once || G == 1 ? 1 : steps * G, 4 * (H == 1 ? rows : G) * BT, true);
  for (const char* factor : {"P", "d_S"}) add(factor, false, true, steps, 2 * rows * BT, true);
  for (const char* keys : {"k", "v"}) add(keys, true, false, 1, 2 * BT * K, false);
  for (const char* queries : {"q", "d_o"}) add(queries, true, false, 1, 2 * BM * K, true);
  if (splits > 1)
    for (const char* queries : {"q of the part", "d_o of the part"}) add(queries, true, false, BM, 2 * BM * part, true);
  for (const char* factor : {"P", "d_S"}) add(factor, true, false, 1, 2 * BM * BT, true);
  for (const char* product : {"scores", "d_P"}) add(product, true, true, 1, 4 * BM * BT, true);
  for (const char* sum : {"d_k", "d_v"}) add(sum, true, true, splits > 1 ? BT : 1, 2 * BT * part, false);
  plan.workspace = 12 * BM * BT * (off ? 1 : 4);
  plan.scalar_loads = plan.mode == Mode::kPersistent ? 6 : 2;  // of both kinds of core: the group; in a loop also the range
}

void plan_tile(Plan& plan) {
  const Problem& p = plan.problem;
  plan.refused.clear();
  plan.task = "one tile of keys, some of the channels, a loop over the groups of queries that list it";
  plan.need_is_predicted = !plan.target.a5;
  Tile& tile = plan.tile;
  if (!tile.BM) tile.BM = rows_of(p.H);
  if (!tile.BT) tile.BT = tile.BM <= 128 ? 128 : 64;
  int64_t tiles = ceil_div(p.S, tile.BT), splits = tile.V ? p.K / tile.V : channel_splits(p.K, tile.BT, p.B * tiles, plan.target.aic);
  if (tile.V && (p.K % tile.V || tile.V % 16))
    plan.refused = "V " + std::to_string(tile.V) + ", expected a multiple of 16 that divides K = " + std::to_string(p.K);
  else if (tile.BM % p.H || tile.BM % 16)
    plan.refused = "BM " + std::to_string(tile.BM) + ", expected a multiple of 16 and of H = " + std::to_string(p.H), tile.BM = rows_of(p.H);
  else if (tile.BT % 16)
    plan.refused = "BT " + std::to_string(tile.BT) + ", expected a multiple of 16";
  else if (!splits)
    plan.refused = "BT " + std::to_string(tile.BT) + ": no part of K = " + std::to_string(p.K) + " channels in multiples of 16 has sums of at most " + std::to_string(kLargestSum) + " bytes";
  splits = std::max<int64_t>(splits, 1);
  tile.K = p.K, tile.V = p.K / splits;
  plan.boundary = p.S % tile.BT != 0 || p.T % (tile.BM / p.H) != 0;
  split_tasks(plan, tiles * splits, p.B);
  plan_need(plan, splits);
  plan_moves(plan, splits);
  plan.notes = {"the fewest parts of the channels whose sums are within 64 KiB and that fill the cores: counted, not timed",
                "a dense panel of P, written by a kernel of its own, and q and d_o transposed: here one kernel does both sums",
                "how often a list names a key in 16 bits, as 8 overflow: here the logarithm of a count in f32"};
}

// Where the rule's tile does not fit: the most keys that do, of these the most channels.
void plan_topk(Plan& plan) {
  Tile asked = plan.tile;
  plan_tile(plan);
  if (asked.BT || asked.V || plan.fits()) return;
  Plan smaller = plan;
  for (int64_t BT = plan.tile.BT; BT >= 16; BT /= 2)
    for (int64_t part = plan.tile.V; part >= 16; part -= 16) {
      smaller.tile = {BT, asked.BM, 0, part};
      plan_tile(smaller);
      if (!smaller.fits()) continue;
      smaller.notes.push_back("BT " + std::to_string(plan.tile.BT) + ", V " + std::to_string(plan.tile.V) + ": does not fit here, " + plan.overflow());
      plan = smaller;
      return;
    }
}

constexpr Kernel kKernels[] = {
    {"sparse_flash_attention.bwd/dkdv", "d_k and d_v of a tile of keys, some of the channels", true, read, plan_topk, emit_topk_dkdv, topk_dkdv_scene},
};

}  // namespace

const Kernel* sparse_flash_attention_ascend_at(int i);
const Kernel* sparse_flash_attention_ascend_at(int i) { return i >= 0 && i < int(std::size(kKernels)) ? &kKernels[i] : nullptr; }

}  // namespace thalweg::ascend
