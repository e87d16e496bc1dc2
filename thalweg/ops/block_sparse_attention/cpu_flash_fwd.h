// What the forward rows share: the state of a tile of queries, what causality hides from it, its end, and the tasks.
// For files compiled per instruction set.
#ifndef THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CPU_FLASH_FWD_H
#define THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CPU_FLASH_FWD_H

#include "thalweg/ops/block_sparse_attention/cpu_flash.h"

namespace thalweg::block_sparse_attention {
namespace {

using Args = thalweg_block_sparse_attention_fwd_args;

constexpr int64_t kQueries = 128;

// The part of a row's Scratch that is the same in all.
struct SoftmaxScratch {
  float* s;                    // [kKeys][s_row]: scores in units of log 2, then P
  float* o;                    // [rows][o_row]
  float *m, *l, *alpha;        // [rows]
  float* line;                 // [o_row]: a row of o on its way out
  int64_t rows, o_row, s_row;  // rows: queries of a tile at most, in whole panels

  SoftmaxScratch(const Problem& p, const Cut& cut, Carver* carver) {
    rows = round_up(cut.rows, kPanel);
    o_row = round_up(p.V, kPanel);
    s_row = score_row(cut.rows);
    s = carver->floats(kKeys * s_row);
    o = carver->floats(rows * o_row);
    m = carver->floats(rows), l = carver->floats(rows), alpha = carver->floats(rows);
    line = carver->floats(o_row);
  }
};

// One tile of one head.
struct SoftmaxTile {
  const Problem& p;
  const Args& a;
  const Item& item;
  Queries queries;
  int64_t h, hk;
  const SoftmaxScratch& x;
  int64_t columns;  // queries in whole vectors

  void start_sums() const {
    float z = kLowest;
    if (is_there(a.sink)) {
      read_strided(a.sink.dtype, element_at(a.sink, h), 0, 1, &z);
      z *= kLog2e;
    }
    const float low = z < kLowest ? kLowest : z;
    for (int64_t c = 0; c < columns; c += kLanes) {
      store(x.m + c, set1(low));
      store(x.l + c, set1(is_there(a.sink) && low == z ? 1.f : z != z ? z : 0.f));
    }
    memset(x.o, 0, size_t(columns * x.o_row) * 4);
  }

  // Queries that came before a key get no weight from it. True when there are any.
  bool hide(const KeyTile& tile) const {
    bool any = false;
    tile.each([&](int64_t row, int64_t key) __attribute__((always_inline)) {
      const int64_t blind = blind_queries(p, item, queries, key);
      if (blind == 0) return;
      any = true;
      fill_first(x.s + row * x.s_row, blind, columns, -infinity());
    });
    return any;
  }

  void rescale() const {
    for (int64_t r = 0; r < queries.rows; ++r) {
      const float alpha = x.alpha[r];
      if (alpha == 1.f) continue;
      for (int64_t c = 0; c < x.o_row; c += kLanes)
        store(x.o + r * x.o_row + c, load(x.o + r * x.o_row + c) * set1(alpha));
    }
  }

  // P V for tiles in which a hidden value is not finite; value(row of the tile, c).
  template <class Value>
  [[gnu::always_inline]] void add_seen_values(const KeyTile& tile, Value&& value) const {
    tile.each([&](int64_t row, int64_t key) __attribute__((always_inline)) {
      for (int64_t r = blind_queries(p, item, queries, key); r < queries.rows; ++r)
        for (int64_t c = 0; c < p.V; ++c) x.o[r * x.o_row + c] += x.s[row * x.s_row + r] * value(row, c);
    });
  }

  void finish() const {
    for (int64_t r = 0; r < queries.rows; ++r) {
      const int64_t b = item.batch, t = item.q_begin + queries.t + r;
      const float l = x.l[r], scale = l == 0.f ? 0.f : 1.f / l;
      for (int64_t c = 0; c < p.V; c += kLanes) store(x.line + c, load(x.o + r * x.o_row + c) * set1(scale));
      write_row(a.o.dtype, element_at(a.o, b, t, h), p.V, x.line);
      const double m = double(x.m[r]) * kLn2;
      auto put = [&](const thalweg_tensor& to, float y) {
        if (is_there(to)) *reinterpret_cast<float*>(element_at(to, b, t, h)) = y;
      };
      put(a.lse, l == 0.f ? -infinity() : float(m + __builtin_log(double(l))));
      put(a.row_max, l == 0.f ? 0.f : float(m));
      put(a.row_sum, l);
    }
  }
};

struct Call {
  const Problem& p;
  const Plan& plan;
  const Args& args;
  const Exec& exec;
  Cut cut;
  int64_t tiles;
};

void clear_rest(const Call& call, int64_t i) {
  const Rest r = rest_at(call.p, call.args, i);
  clear_rows(call.args.o, r.batch, r.q_begin, r.q_end);
  clear_elements(call.args.lse, r.batch, r.q_begin, r.q_end, -infinity());
  clear_elements(call.args.row_max, r.batch, r.q_begin, r.q_end, 0.f);
  clear_elements(call.args.row_sum, r.batch, r.q_begin, r.q_end, 0.f);
}

// Tile is a SoftmaxTile with its own Scratch, start() with the first tile of keys, and step() over
// a tile with the next one in sight, which holds no key at the end.
template <class Tile>
void tile_task(void* arg, int64_t index, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  if (index < num_rests(p)) return clear_rest(call, index);
  index -= num_rests(p);
  const int64_t i = index % call.tiles, h = index / call.tiles % p.H, n = index / call.tiles / p.H;
  const Item item = item_at(p, call.args, n);
  const Queries queries = queries_at(p, item, call.cut, i);
  if (queries.rows == 0) return;
  Carver carver{call.exec.workspace + slot * call.plan.slot_bytes};
  const typename Tile::Scratch x(p, call.cut, &carver);
  const Tile tile{{p, call.args, item, queries, h, h / (p.H / p.HK), x, round_up(queries.rows, kLanes)}, x};
  Walk walk = keys_of(p, head_mask(p, call.args.block_mask, n, h), item, queries.t, queries.rows);
  KeyTile keys[2];  // one at work, and the one after it
  keys[0].take(&walk);
  tile.start(keys[0]);
  for (int64_t at = 0; keys[at].keys > 0; at = 1 - at) {
    keys[1 - at].take(&walk);
    tile.step(keys[at], keys[1 - at]);
  }
  tile.finish();
}

template <class Tile>
void run_tiles(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  Call call{p, plan, args, exec, cut_blocks(p, kQueries), 0};
  call.tiles = num_tiles(p, call.cut);
  parallel_tasks(exec, num_rests(p) + p.N * p.H * call.tiles, plan.num_slots, tile_task<Tile>, &call);
}
template <class Tile>
void plan_tiles(const Problem& p, Plan* plan) {
  Carver carver{nullptr};
  typename Tile::Scratch(p, cut_blocks(p, kQueries), &carver);
  plan->slot_bytes = carver.used;
}

}  // namespace
}  // namespace thalweg::block_sparse_attention
#endif
