// cpu_tile_bwd - block_sparse_attention, bwd, tiles of kept keys, five products of bf16 tiles.
//
// Math      as cpu_flash_bwd: P = 2^(scale log2(e) K Q^T - L),  dS = P o (V dO^T - delta),  dV += P dO,  dK += dS Q,
//           dQ += dS^T K, each product in tile registers; scale is multiplied in at the end
// Shapes    q [B T H K]  k [B S HK K]  v [B S HK V]  block_mask [N HM NQ NK]  o, d_o [B T H V]  lse [B T H]
// Takes     bf16; K and V up to 512; any block sizes, mask and strides
// Threads   as cpu_flash_bwd: a key head of one sequence, or a share of its query tiles
// Vectors   queries along the lanes of P and dS; K and V along those of the gradients
// Tile      up to 128 queries x 96 keys; register tiles of 16 x 16, four sums of them at a time. A tile of keys that is
// one
//           run is added to dK and dV where they lie, another through `part`
// Scratch   Q, dO, K and V as bf16 tiles, both ways round where they are read so; P and dS as float32 and one of them
// as
//           bf16: 460 KB at K = V = 128, meant for the L2; dK and dV of the key head as float32
// Numerics  q, k, v and d_o enter as they are stored, sums are float32, delta and L are float32. P and dS are rounded
// to
//           bf16 for the products with dO, Q and K, by 2^-8 at most. delta is the diagonal of dO O^T, made by the
//           instruction that makes V dO^T: of a query that sees one key, whose o is v, the difference is exactly 0
// Traps     as cpu_flash_bwd's. What is summed over and past the last row is 0 on both sides: rows of K, Q and dO are
// null
//           there, P and dS of such queries are 0 by L = +inf. Rows of P and dS past the last key reach rows of `part`
//           alone
// Measured  as cpu_tile_fwd; predicted 3 times cpu_flash_bwd. Dense, 8192 keys: 396 GFLOP/s, 0.158 of the tile roof, to
//           cpu_flash_bwd's 92; a quarter of blocks of 128: 321 to 91; of 16: 100 to 62
#include "thalweg/ops/block_sparse_attention/cpu_flash_bwd.h"
#include "thalweg/ops/block_sparse_attention/cpu_tile.h"

namespace thalweg::block_sparse_attention {
namespace {

constexpr int64_t kMostQueries = 128;

// Rows of a tile of queries; null where there is none, and of queries that see nothing.
struct QueryRows {
  const uint16_t *q[kMostQueries], *d_o[kMostQueries], *o[kMostQueries];
};

struct TileScratch : SlopeScratch {
  uint16_t *q_t, *q;              // right [K, rows], right [rows, K]
  uint16_t *d_o_t, *d_o;          // right [V, rows], right [rows, V]
  uint16_t *k_left, *k, *v_left;  // left [kKeys, K], right [kKeys, K], left [kKeys, V]
  uint16_t* w;                    // left [kKeys, rows] or [rows, kKeys]: P, dS or dS^T; [16, V]: O
  float* part;                    // [kKeys][part_row]; [16][16]
  QueryRows* rows_of;
  KeyRows *now, *next;  // of the tile at work, and of the one after it
  int64_t part_row;

  TileScratch(const Problem& p, const Cut& cut, Carver* carver) : SlopeScratch(p, cut, carver) {
    const int64_t wide_k = round_up(p.K, kTileDepth), wide_v = round_up(p.V, kTileDepth);
    part_row = wide_k > wide_v ? wide_k : wide_v;
    q_t = carver->halves(rows * wide_k), q = carver->halves(rows * wide_k);
    d_o_t = carver->halves(rows * wide_v), d_o = carver->halves(rows * wide_v);
    k_left = carver->halves(kKeys * wide_k), k = carver->halves(kKeys * wide_k);
    v_left = carver->halves(kKeys * wide_v);
    const int64_t weights = kKeys * rows, outputs = kTileSide * wide_v;
    w = carver->halves(weights > outputs ? weights : outputs);
    part = carver->floats(kKeys * part_row);
    rows_of = reinterpret_cast<QueryRows*>(carver->floats(sizeof(QueryRows) / 4));
    now = reinterpret_cast<KeyRows*>(carver->floats(sizeof(KeyRows) / 4));
    next = reinterpret_cast<KeyRows*>(carver->floats(sizeof(KeyRows) / 4));
  }
};

struct Tile : SlopeTile {
  using Scratch = TileScratch;
  static constexpr int64_t kQueries = kMostQueries;
  const Scratch& own;
  const Tiles registers = {};

  void find_queries() const {
    const Args& a = call.args;
    QueryRows& to = *own.rows_of;
    for (int64_t r = 0; r < x.rows; ++r) {
      to.q[r] = to.d_o[r] = to.o[r] = nullptr;
      if (r >= queries.rows || is_dead(r)) continue;
      const int64_t t = item.q_begin + queries.t + r;
      to.q[r] = half_row(a.q, item, t, h);
      if (!call.p.has_d_o) continue;
      to.d_o[r] = half_row(a.d_o, item, t, h);
      to.o[r] = half_row(a.o, item, t, h);
    }
  }

  // Reads the queries, L and delta; returns the tile's part of d_sink.
  double start(const KeyTile& first) const {
    const Problem& p = call.p;
    const int64_t deep = tiles_of(p.V, kTileDepth);
    start_logs();
    find_queries();
    const QueryRows& from = *own.rows_of;
    for (int64_t c = 0; c < columns; c += kTileSide) {
      rows_to_right_columns(from.q + c, p.K, own.q_t, c / kTileSide);
      rows_to_right_columns(from.d_o + c, p.V, own.d_o_t, c / kTileSide);
      for (int64_t i = 0; i < kTileSide; ++i) row_to_left(from.o[c + i], p.V, own.w, i);
      multiply_block<1, 1, false>(deep, own.w, own.d_o_t + c / kTileSide * deep * kTile, own.part, kTileSide);
      for (int64_t i = 0; i < kTileSide; ++i) x.delta[c + i] = own.part[i * kTileSide + i];
    }
    rows_to_right(from.q, columns, p.K, own.q);
    rows_to_right(from.d_o, columns, p.V, own.d_o);
    own.next->find(first, call.args.k, call.args.v, item, hk);
    return start_sums();
  }

  bool all_are_finite(int64_t keys) const {
    const Problem& p = call.p;
    return all_finite(own.k, keys, p.K) && all_finite(own.q, columns, p.K) && all_finite(own.d_o, columns, p.V);
  }

  // sum[key] += weights x rows.
  template <class After>
  [[gnu::always_inline]] void add_to_keys(const KeyTile& tile, const uint16_t* rows, int64_t width, float* sum,
                                          int64_t sum_row, After&& after) const {
    auto behind = [&](float*, int64_t, int64_t) __attribute__((always_inline)) { after(); };
    if (tile.num_runs == 1 && tile.keys % kTileSide == 0) {
      float* to = sum + tile.runs[0].key * sum_row;
      return multiply_tiles<true>(tile.keys, width, columns, own.w, rows, to, sum_row, behind);
    }
    multiply_tiles<false>(tile.keys, width, columns, own.w, rows, own.part, own.part_row, behind);
    tile.each([&](int64_t row, int64_t key) __attribute__((always_inline)) {
      float* to = sum + key * sum_row;
      const float* from = own.part + row * own.part_row;
      for (int64_t c = 0; c < width; c += kLanes) store(to + c, load(to + c) + load(from + c));
    });
  }

  void add_seen_pairs(const KeyTile& tile) const {
    auto at = [](const uint16_t* row, int64_t c) { return row ? float_of_bf16(row[c]) : 0.f; };
    add_seen(
        tile, [&](int64_t r, int64_t c) { return at(own.rows_of->q[r], c); },
        [&](int64_t r, int64_t c) { return at(own.rows_of->d_o[r], c); },
        [&](int64_t row, int64_t c) { return at(own.now->k[row], c); });
  }

  void pack(const KeyTile& tile, const KeyTile& next) const {
    const Problem& p = call.p;
    *own.now = *own.next;
    own.next->find(next, call.args.k, call.args.v, item, hk);
    for (int64_t row = 0; row < tile.keys; ++row) row_to_left(own.now->k[row], p.K, own.k_left, row);
    for (int64_t row = 0; row < tile.keys; ++row) row_to_left(own.now->v[row], p.V, own.v_left, row);
    rows_to_right(own.now->k, tile.keys, p.K, own.k);
  }

  void step(const KeyTile& tile, const KeyTile& next) const {
    const Problem& p = call.p;
    const Args& a = call.args;
    pack(tile, next);
    RowsAhead ahead(*own.next, 2 * blocks_of(tile.keys, columns) + blocks_of(tile.keys, p.V));
    auto fetch = [&]() __attribute__((always_inline)) {
      ahead.some([&](int64_t row) __attribute__((always_inline)) {
        fetch_halves(own.next->k[row], p.K), fetch_halves(own.next->v[row], p.V);
        const int64_t key = own.next->key[row];
        for (int64_t c = 0; c < p.K; c += kLanes) prefetch_l2(sums.d_k + key * sums.k_row + c);
        for (int64_t c = 0; c < p.V; c += kLanes) prefetch_l2(sums.d_v + key * sums.v_row + c);
      });
    };
    const vf factor = set1(float(p.scale) * kLog2e);
    multiply_tiles<false>(
        tile.keys, columns, p.K, own.k_left, own.q_t, x.s,
        x.s_row, [&](float* s, int64_t rows, int64_t width) __attribute__((always_inline)) {
          fetch();
          scale_block(s, x.s_row, rows, width, factor);
        });
    multiply_tiles<false>(
        tile.keys, columns, p.V, own.v_left, own.d_o_t, x.d_s,
        x.s_row, [&](float*, int64_t, int64_t) __attribute__((always_inline)) { fetch(); });
    softmax_slope(tile.keys);
    if (p.causal && hide(tile) && !all_are_finite(tile.keys)) return add_seen_pairs(tile);
    if (is_there(a.d_v)) {
      rows_to_left(x.s, x.s_row, tile.keys, columns, own.w);
      add_to_keys(tile, own.d_o, p.V, sums.d_v, sums.v_row, fetch);
    }
    if (is_there(a.d_k)) {
      rows_to_left(x.d_s, x.s_row, tile.keys, columns, own.w);
      add_to_keys(tile, own.q, p.K, sums.d_k, sums.k_row, [] {});
    }
    if (is_there(a.d_q)) {
      rows_to_left_columns(x.d_s, x.s_row, tile.keys, columns, own.w);
      multiply_tiles<true>(columns, p.K, tile.keys, own.w, own.k, x.d_q, x.q_row);
    }
  }
};

}  // namespace

namespace THALWEG_ISA {

void plan_tile_bwd(const Problem& p, Plan* plan) { plan_tiles<Tile>(p, plan); }

void cpu_tile_bwd(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  run_tiles<Tile>(p, plan, args, exec);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::block_sparse_attention
