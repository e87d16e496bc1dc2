// cpu_tile_fwd - sparse flash attention, forward, gathered keys, an online softmax, products of bf16 tiles.
//
// Math     as cpu_flash_fwd: the list sorted, per tile of its keys, all heads at once: S = c K Q^T, P = r exp(S - m'),
//          O = O exp(m - m') + P^T V, both products in tile registers
// Shapes   q [B T H K] k [B S K] v [B S V] q_rope [B T H KR] k_rope [B S KR] indices [B T E] o [B T H V]
// Takes    bf16 of any strides, without p; more than 8 heads; any K, KR, V, E and block
// Threads  one task a query; tasks share nothing. A task configures its thread's tiles and releases them
// Vectors  heads along the lanes of scores, the value along those of outputs
// Tile     128 keys, gathered once as both operands: a key's row for the scores, pairs of rows for the outputs.
// Register
//          tiles of 16 keys x 16 heads and of 16 heads x 16 columns, four sums at a time
// Scratch  Q^T, keys, values and P as bf16 tiles, scores and O as float32, the list: for 16 heads of 576 and 512 about
//          420 KiB, meant for the L2
// Numerics q, k, v enter the products as they are stored, sums are float32, and c multiplies float32 scores, so m, l
// and
//          lse are as exact as cpu_flash_fwd's. P, its multiplicity in it, is rounded to bf16 for its product with V,
//          by 2^-8 of itself at most; l sums the unrounded P. Subnormal operands count as 0
// Traps    what is summed over is 0 past the last key on both sides, P and V; other padding reaches only lanes that
// nobody
//          stores. A list holds visible keys only, so a NaN is one that somebody sees
// Measured Sapphire Rapids, one thread, K 512, KR 64, E 2048 of 8192 keys: predicted 4 times cpu_flash_fwd with 16
//          heads (a key is packed in 100 cycles, which its products do not hide) and 6 times with 128. 16 heads: 149
//          GFLOP/s to 70 (0.06 of the tile roof: rows from far memory are most of it), 128 heads: 508 to 116 (0.20)
#include "thalweg/cpu/blocks/tile_gemm.h"
#include "thalweg/ops/sparse_flash_attention/cpu_flash_fwd.h"

namespace thalweg::sparse_flash_attention {
namespace {

struct Scratch : SoftmaxScratch {
  TileShape tiles;
  uint16_t *q, *k, *v, *w;  // right [depth, heads], left [keys, depth], right [keys, V], left [heads, keys]

  Scratch(const Problem& p, char* memory) {
    shape = flash_shape(p, kLanes), o_row = shape.value + 16, tiles = tile_shape(p);
    Piece piece{memory};
    keys = piece.take<int32_t>(shape.capacity);
    counts = piece.take<int32_t>(shape.capacity);
    list = piece.take<int32_t>(2 * p.E);
    q = piece.take<uint16_t>(shape.heads * tiles.depth);
    k = piece.take<uint16_t>(kListKeys * tiles.depth);
    v = piece.take<uint16_t>(kListKeys * shape.value);
    w = piece.take<uint16_t>(shape.heads * kListKeys);
    s = piece.take<float>(kListKeys * shape.heads);
    o = piece.take<float>(shape.heads * o_row);
    m = piece.take<float>(shape.heads);
    l = piece.take<float>(shape.heads);
    shrink = piece.take<float>(shape.heads);
  }
};

inline const uint16_t* half_row(const thalweg_tensor& t, int64_t b, int64_t row, int64_t head = 0) {
  return reinterpret_cast<const uint16_t*>(element_at(t, b, row, head));
}

// Sixteen heads at a time as columns: of q, and below them of q_rope.
void pack_queries(const Problem& p, const Inputs& in, const Scratch& x, int64_t b, int64_t t) {
  uint16_t* to = x.q;
  for (int64_t h = 0; h < x.shape.heads; h += kTileSide, to += kTileSide * x.tiles.depth) {
    const uint16_t *rows[kTileSide], *ropes[kTileSide];
    for (int64_t i = 0; i < kTileSide; ++i) {
      rows[i] = h + i < p.H ? half_row(in.q, b, t, h + i) : nullptr;
      ropes[i] = h + i < p.H && p.KR > 0 ? half_row(in.q_rope, b, t, h + i) : nullptr;
    }
    rows_to_right_columns(rows, p.K, to, 0);
    rows_to_right_columns(ropes, p.KR, to + tiles_of(p.K, kTileDepth) * kTile, 0);
  }
}

// Keys [0, n) of a list that goes on to `all`, asking for rows some keys ahead, those of the next tile too.
void pack_keys(const Problem& p, const Inputs& in, const Scratch& x, const Tile& tile, int64_t b, int64_t first,
               const int32_t* keys, int64_t n, int64_t all) {
  const int64_t rope = tiles_of(p.K, kTileDepth) * kTile, deep = tiles_of(n, kTileDepth);
  const thalweg_tensor& values = tile.separate ? in.v : in.k;
  for (int64_t i = 0; i < n; ++i) {
    if (i + Tile::kAhead < all) tile.fetch(b, first + keys[i + Tile::kAhead]);
    uint16_t* to = x.k + i / kTileSide * kTileSide * x.tiles.depth;
    row_to_left(half_row(in.k, b, first + keys[i]), p.K, to, i % kTileSide);
    if (p.KR > 0) row_to_left(half_row(in.k_rope, b, first + keys[i]), p.KR, to + rope, i % kTileSide);
    if (i % 2 == 1)
      rows_to_right(half_row(values, b, first + keys[i - 1]), half_row(values, b, first + keys[i]), p.V, deep, x.v,
                    i - 1);
  }
  for (int64_t i = n / 2 * 2; i < deep * kTileDepth; i += 2)
    rows_to_right(i < n ? half_row(values, b, first + keys[i]) : nullptr, nullptr, p.V, deep, x.v, i);
}

void attend(const Problem& p, const Inputs& in, const Scratch& x, const Tile& tile, int64_t b, int64_t first,
            int64_t n) {
  const int64_t heads = x.shape.heads;
  const vf factor = set1(float(p.scale));
  for (int64_t begin = 0; begin < n; begin += kListKeys) {
    const int64_t count = least(kListKeys, n - begin);
    pack_keys(p, in, x, tile, b, first, x.keys + begin, count, n - begin);
    multiply_tiles<false>(
        count, heads, x.tiles.depth, x.k, x.q, x.s,
        heads, [&](float* s, int64_t rows, int64_t width) __attribute__((always_inline)) {
          scale_block(s, heads, rows, width, factor);
        });
    soften(x, x.counts + begin, count);
    shrink_outputs(p.H, x);
    rows_to_left_columns(x.s, heads, count, heads, x.w);
    multiply_tiles<true>(heads, p.V, count, x.w, x.v, x.o, x.o_row);
  }
}

void query_task(void* arg, int64_t task, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const int64_t b = task / p.T, t = task % p.T;
  const Tiles registers;
  Scratch x(p, call.exec.workspace + slot * call.plan.slot_bytes);
  const Tile tile{p, call.in, x.shape, Tile::is_separate(p, call.in), nullptr};
  const Query query = query_at(p, call.in, b, t);
  const int64_t n = visible_keys(p, call.in, query, b, t, x.keys, x.counts, x.list);
  if (n > 0) pack_queries(p, call.in, x, b, t);
  start(p, call.in, x);
  attend(p, call.in, x, tile, b, query.first, n);
  store_outputs(call, x, b, t, query.used);
}

}  // namespace

namespace THALWEG_ISA {

void cpu_tile_fwd(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  const Inputs in = inputs_of(args);
  Call call{p, plan, args, in, exec};
  parallel_tasks(exec, p.B * p.T, plan.num_slots, query_task, &call);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::sparse_flash_attention
