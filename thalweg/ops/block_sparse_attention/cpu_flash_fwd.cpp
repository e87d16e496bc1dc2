// cpu_flash_fwd - block_sparse_attention, fwd, tiles of kept keys with an online softmax.
//
// Math      a tile of queries of one mask block walks the keys that its mask row keeps, kKeys at a time:
//           S = K Q^T (transposed, in units of log 2),  m' = max(m, max S),  P = 2^(S - m'),  l = 2^(m - m') l + sum P,
//           O = 2^(m - m') O + P V;  at the end o = O / l, lse = log l + m log 2. A sink is m and l to start with
// Shapes    q [B T H K]  k [B S HK K]  v [B S HK V]  block_mask [N HM NQ NK]  o [B T H V]
//           lse, row_max, row_sum [B T H]
// Takes     f32, bf16, f16; K and V up to 512; any block sizes, mask and strides
// Threads   a task is a tile of one head of one sequence; tasks share nothing. Rows of no sequence are tasks too
// Vectors   queries along the lanes of scores, so that maxima and sums go down the rows; V along those of O
// Tile      up to 128 queries x 96 keys. Keys come from any blocks: blocks of 16 fill a tile as blocks of 128 do
// Scratch   Q^T, S, K and V of the tile as float32, O: 270 KB at K = V = 128, meant for the L2
// Numerics  float32 throughout; storage is converted as it is packed. No exponent is above 0
// Traps     the maximum starts at the lowest finite number: a tile in which causality hides every key from a query
//           would give inf - inf otherwise. A hidden key's P is 0, but 0 x NaN is NaN: tiles across the diagonal whose
//           values are not all finite go query by query
// Measured  one thread of a busy Zen 3, CPU time beside an FMA loop of the same process, K = V = 128: predicted 0.8 of
//           the peak (two products at 0.9, exponentials and packing a tenth). Dense f32, blocks of 128: 0.77.
//           Random blocks of 16 x 16, a quarter kept: 0.32, where packing a key costs half of what its 16 queries do.
//           Lost: key tiles of 36 for few queries, so that they stay in the L1: nothing beyond the noise
#include "thalweg/ops/block_sparse_attention/cpu_flash_fwd.h"

namespace thalweg::block_sparse_attention {
namespace {

struct FlashScratch : SoftmaxScratch {
  float* lines;  // [kLanes][pitch]: queries on their way to columns
  float* q;      // panels [K][kPanel]: Q^T scale log2(e)
  float* k;      // [kKeys][pitch]
  float* v;      // panels [kKeys][kPanel]
  int64_t pitch;

  FlashScratch(const Problem& p, const Cut& cut, Carver* carver) : SoftmaxScratch(p, cut, carver) {
    pitch = round_up(p.K, kLanes);
    lines = carver->floats(kLanes * pitch);
    q = carver->floats(rows * p.K);
    k = carver->floats(kKeys * pitch);
    v = carver->floats(kKeys * o_row);
  }
};

struct Tile : SoftmaxTile {
  using Scratch = FlashScratch;
  const Scratch& own;

  void start(const KeyTile& first) const {
    for (int64_t r = 0; r < queries.rows && first.keys > 0; r += kLanes) {
      const int64_t rows = queries.rows - r < kLanes ? queries.rows - r : kLanes;
      read_rows(a.q, item, h, queries.t + r, rows, p.K, own.lines, own.pitch, [](int64_t) { return false; });
      rows_to_columns(own.lines, own.pitch, rows, p.K, float(p.scale) * kLog2e, own.q, r);
    }
    start_sums();
  }

  void pack(const KeyTile& tile) const {
    tile.each([&](int64_t row, int64_t key) __attribute__((always_inline)) {
      read_row(a.k.dtype, element_at(a.k, item.batch, item.k_begin + key, hk), p.K, own.k + row * own.pitch);
      row_to_panels(a.v.dtype, element_at(a.v, item.batch, item.k_begin + key, hk), p.V, own.v + row * kPanel,
                    kKeys * kPanel);
    });
  }

  bool finite_values(int64_t keys) const {
    vf sum = zero();
    for (int64_t n = 0; n < p.V; n += kPanel)
      for (int64_t i = 0; i < keys * kPanel; i += kLanes) {
        if (i % kPanel + n >= p.V) continue;
        const vf y = load(own.v + n * kKeys + i);
        sum += y - y;
      }
    const float total = hsum(sum);
    return total == total;
  }

  void step(const KeyTile& tile, const KeyTile&) const {
    pack(tile);
    gemm_panels<false>(tile.keys, columns, p.K, own.k, own.pitch, 1, own.q, p.K * kPanel, x.s, x.s_row);
    const bool across = p.causal && hide(tile);
    softmax_step(x.s, x.s_row, tile.keys, columns, x.m, x.l, x.alpha);
    rescale();
    if (across && !finite_values(tile.keys))
      return add_seen_values(
          tile, [&](int64_t row, int64_t c) { return own.v[c / kPanel * kKeys * kPanel + row * kPanel + c % kPanel]; });
    gemm_panels<true>(queries.rows, p.V, tile.keys, x.s, 1, x.s_row, own.v, kKeys * kPanel, x.o, x.o_row);
  }
};

}  // namespace

namespace THALWEG_ISA {

void plan_flash_fwd(const Problem& p, Plan* plan) { plan_tiles<Tile>(p, plan); }

void cpu_flash_fwd(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  run_tiles<Tile>(p, plan, args, exec);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::block_sparse_attention
