// cpu_tile_fwd - block_sparse_attention, fwd, tiles of kept keys with an online softmax, products of bf16 tiles.
//
// Math      as cpu_flash_fwd: S = K Q^T, P = 2^(scale log2(e) S - m), O = 2^(m - m') O + P^T V, in tile registers
// Shapes    q [B T H K]  k [B S HK K]  v [B S HK V]  block_mask [N HM NQ NK]  o [B T H V]
//           lse, row_max, row_sum [B T H]
// Takes     bf16; K and V up to 512; any block sizes, mask and strides
// Threads   a task is a tile of one head of one sequence; tasks share nothing. A task configures its thread's tiles
//           and releases them
// Vectors   queries along the lanes of scores; V along those of O
// Tile      up to 128 queries x 96 keys; register tiles of 16 x 16, four sums of them at a time
// Scratch   Q^T, K, V and P as bf16 tiles, S and O as float32: 230 KB at K = V = 128, meant for the L2
// Numerics  q, k and v enter the products as they are stored, sums are float32, and the scale multiplies float32
//           scores, so m, l and lse are as exact as cpu_flash_fwd's. P is rounded to bf16 for its product with V alone,
//           by 2^-8 of a weight at most, as the output is: o is off by 2.1e-3 rms where cpu_flash_fwd's is by 1.7e-3,
//           and by 2^-7 in an element of one key and a sink. l sums the unrounded P: with the rounded ones lse, which
//           is float32, would be off by 1e-3, and the weights' errors, which differ, would stay in o. Subnormal
//           operands count as 0. No exponent is above 0
// Traps     as cpu_flash_fwd's. Rows of P and V past the last key are 0, both: they are summed over. Rows of K and
//           columns of Q^T past the last are not: they reach only scores that nobody reads
// Measured  one thread of a Sapphire Rapids, K = V = 128, 2048 queries, tile roof 2500 GFLOP/s: predicted 0.36 of it
//           (products a third of the time, exponentials another). Dense, 8192 keys: 361 GFLOP/s, 0.145; cpu_flash_fwd
//           99. A quarter of blocks of 128: 271 to 100; of 16: 106 to 58. Products take 0.4 of the time, 2.7 times what
//           the roof allows, exponentials 0.2, packing and fetching 0.25. Lost: 32 queries at a time, so that scores
//           stay in the L1: nothing; tiles of 64, 128 and 192 keys: within 5 % either way
#include "thalweg/ops/block_sparse_attention/cpu_flash_fwd.h"
#include "thalweg/ops/block_sparse_attention/cpu_tile.h"

namespace thalweg::block_sparse_attention {
namespace {

struct TileScratch : SoftmaxScratch {
  uint16_t* q;          // right [K, rows]: Q^T
  uint16_t* k;          // left [kKeys, K]
  uint16_t* v;          // right [kKeys, V]
  uint16_t* w;          // left [rows, kKeys]: P^T
  KeyRows *now, *next;  // of the tile at work, and of the one after it

  TileScratch(const Problem& p, const Cut& cut, Carver* carver) : SoftmaxScratch(p, cut, carver) {
    const int64_t wide = round_up(p.K, kTileDepth);
    q = carver->halves(rows * wide);
    k = carver->halves(kKeys * wide);
    v = carver->halves(kKeys * o_row);
    w = carver->halves(rows * kKeys);
    now = reinterpret_cast<KeyRows*>(carver->floats(sizeof(KeyRows) / 4));
    next = reinterpret_cast<KeyRows*>(carver->floats(sizeof(KeyRows) / 4));
  }
};

struct Tile : SoftmaxTile {
  using Scratch = TileScratch;
  const Scratch& own;
  const Tiles registers = {};

  void start(const KeyTile& first) const {
    for (int64_t c = 0; c < columns && first.keys > 0; c += kTileSide) {
      const uint16_t* rows[kTileSide];
      for (int64_t i = 0; i < kTileSide; ++i)
        rows[i] = c + i < queries.rows ? half_row(a.q, item, item.q_begin + queries.t + c + i, h) : nullptr;
      rows_to_right_columns(rows, p.K, own.q, c / kTileSide);
    }
    start_sums();
    own.next->find(first, a.k, a.v, item, hk);
  }

  void step(const KeyTile& tile, const KeyTile& next) const {
    *own.now = *own.next;
    own.next->find(next, a.k, a.v, item, hk);
    for (int64_t row = 0; row < tile.keys; ++row) row_to_left(own.now->k[row], p.K, own.k, row);
    rows_to_right(own.now->v, tile.keys, p.V, own.v);
    RowsAhead ahead(*own.next, blocks_of(tile.keys, columns) + blocks_of(columns, p.V));
    auto fetch = [&](int64_t row) __attribute__((always_inline)) {
      fetch_halves(own.next->k[row], p.K), fetch_halves(own.next->v[row], p.V);
    };
    const vf factor = set1(float(p.scale) * kLog2e);
    multiply_tiles<false>(
        tile.keys, columns, p.K, own.k, own.q, x.s,
        x.s_row, [&](float* s, int64_t rows, int64_t width) __attribute__((always_inline)) {
          ahead.some(fetch);
          scale_block(s, x.s_row, rows, width, factor);
        });
    const bool across = p.causal && hide(tile);
    softmax_step(x.s, x.s_row, tile.keys, columns, x.m, x.l, x.alpha);
    rescale();
    if (across && !all_finite(own.v, tile.keys, p.V))
      return add_seen_values(tile, [&](int64_t row, int64_t c) { return float_of_bf16(own.now->v[row][c]); });
    rows_to_left_columns(x.s, x.s_row, tile.keys, columns, own.w);
    multiply_tiles<true>(
        columns, p.V, tile.keys, own.w, own.v, x.o,
        x.o_row, [&](float*, int64_t, int64_t) __attribute__((always_inline)) { ahead.some(fetch); });
  }
};

}  // namespace

namespace THALWEG_ISA {

void plan_tile_fwd(const Problem& p, Plan* plan) { plan_tiles<Tile>(p, plan); }

void cpu_tile_fwd(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  run_tiles<Tile>(p, plan, args, exec);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::block_sparse_attention
