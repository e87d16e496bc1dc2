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
#include "thalweg/ops/block_sparse_attention/cpu_flash.h"

namespace thalweg::block_sparse_attention {
namespace {

using Args = thalweg_block_sparse_attention_fwd_args;

constexpr int64_t kQueries = 128;

struct Scratch {
  float* lines;          // [kLanes][K]: queries on their way to columns; a row of o
  float* q;              // panels [K][kPanel]: Q^T scale log2(e)
  float* s;              // [kKeys][score_row]: scores, then P
  float* k;              // [kKeys][K rounded up]
  float* v;              // panels [kKeys][kPanel]
  float* o;              // [kQueries][V rounded up]
  float *m, *l, *alpha;  // [kQueries]
  int64_t pitch, o_row, s_row;

  Scratch(const Problem& p, const Cut& cut, Carver* carver) {
    pitch = round_up(p.K > p.V ? p.K : p.V, kLanes);
    o_row = round_up(p.V, kPanel);
    s_row = score_row(cut.rows);
    const int64_t rows = round_up(cut.rows, kPanel);
    lines = carver->floats(kLanes * pitch);
    q = carver->floats(rows * p.K);
    s = carver->floats(kKeys * s_row);
    k = carver->floats(kKeys * pitch);
    v = carver->floats(kKeys * o_row);
    o = carver->floats(rows * o_row);
    m = carver->floats(rows), l = carver->floats(rows), alpha = carver->floats(rows);
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

// One tile of one head.
struct Tile {
  const Problem& p;
  const Args& a;
  const Item& item;
  Queries queries;
  int64_t h, hk;
  const Scratch& x;
  int64_t columns;  // queries in whole vectors

  void start() const {
    for (int64_t r = 0; r < queries.rows; r += kLanes) {
      const int64_t rows = queries.rows - r < kLanes ? queries.rows - r : kLanes;
      read_rows(a.q, item, h, queries.t + r, rows, p.K, x.lines, x.pitch, [](int64_t) { return false; });
      rows_to_columns(x.lines, x.pitch, rows, p.K, float(p.scale) * kLog2e, x.q, r);
    }
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
    memset(x.o, 0, size_t(queries.rows * x.o_row) * 4);
  }

  void pack(const KeyTile& tile) const {
    tile.each([&](int64_t row, int64_t key) __attribute__((always_inline)) {
      read_row(a.k.dtype, element_at(a.k, item.batch, item.k_begin + key, hk), p.K, x.k + row * x.pitch);
      row_to_panels(a.v.dtype, element_at(a.v, item.batch, item.k_begin + key, hk), p.V, x.v + row * kPanel,
                    kKeys * kPanel);
    });
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

  bool finite_values(int64_t keys) const {
    vf sum = zero();
    for (int64_t n = 0; n < p.V; n += kPanel)
      for (int64_t i = 0; i < keys * kPanel; i += kLanes) {
        if (i % kPanel + n >= p.V) continue;
        const vf y = load(x.v + n * kKeys + i);
        sum += y - y;
      }
    const float total = hsum(sum);
    return total == total;
  }

  // P V for tiles in which a hidden value is not finite.
  void add_seen_values(const KeyTile& tile) const {
    tile.each([&](int64_t row, int64_t key) {
      for (int64_t r = blind_queries(p, item, queries, key); r < queries.rows; ++r)
        for (int64_t c = 0; c < p.V; ++c)
          x.o[r * x.o_row + c] += x.s[row * x.s_row + r] * x.v[c / kPanel * kKeys * kPanel + row * kPanel + c % kPanel];
    });
  }

  void step(const KeyTile& tile) const {
    pack(tile);
    gemm_panels<false>(tile.keys, columns, p.K, x.k, x.pitch, 1, x.q, p.K * kPanel, x.s, x.s_row);
    const bool across = p.causal && hide(tile);
    softmax_step(x.s, x.s_row, tile.keys, columns, x.m, x.l, x.alpha);
    rescale();
    if (across && !finite_values(tile.keys)) return add_seen_values(tile);
    gemm_panels<true>(queries.rows, p.V, tile.keys, x.s, 1, x.s_row, x.v, kKeys * kPanel, x.o, x.o_row);
  }

  void finish() const {
    for (int64_t r = 0; r < queries.rows; ++r) {
      const int64_t b = item.batch, t = item.q_begin + queries.t + r;
      const float l = x.l[r], scale = l == 0.f ? 0.f : 1.f / l;
      for (int64_t c = 0; c < p.V; c += kLanes) store(x.lines + c, load(x.o + r * x.o_row + c) * set1(scale));
      write_row(a.o.dtype, element_at(a.o, b, t, h), p.V, x.lines);
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

void clear_rest(const Call& call, int64_t i) {
  const Rest r = rest_at(call.p, call.args, i);
  clear_rows(call.args.o, r.batch, r.q_begin, r.q_end);
  clear_elements(call.args.lse, r.batch, r.q_begin, r.q_end, -infinity());
  clear_elements(call.args.row_max, r.batch, r.q_begin, r.q_end, 0.f);
  clear_elements(call.args.row_sum, r.batch, r.q_begin, r.q_end, 0.f);
}

void task(void* arg, int64_t index, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  if (index < num_rests(p)) return clear_rest(call, index);
  index -= num_rests(p);
  const int64_t i = index % call.tiles, h = index / call.tiles % p.H, n = index / call.tiles / p.H;
  const Item item = item_at(p, call.args, n);
  const Queries queries = queries_at(p, item, call.cut, i);
  if (queries.rows == 0) return;
  Carver carver{call.exec.workspace + slot * call.plan.slot_bytes};
  const Scratch x(p, call.cut, &carver);
  const Tile tile{p, call.args, item, queries, h, h / (p.H / p.HK), x, round_up(queries.rows, kLanes)};
  Walk walk = keys_of(p, head_mask(p, call.args.block_mask, n, h), item, queries.t, queries.rows);
  KeyTile keys;
  tile.start();
  while (keys.take(&walk)) tile.step(keys);
  tile.finish();
}

}  // namespace

namespace THALWEG_ISA {

void plan_flash_fwd(const Problem& p, Plan* plan) {
  Carver carver{nullptr};
  Scratch(p, cut_blocks(p, kQueries), &carver);
  plan->slot_bytes = carver.used;
}

void cpu_flash_fwd(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  Call call{p, plan, args, exec, cut_blocks(p, kQueries), 0};
  call.tiles = num_tiles(p, call.cut);
  parallel_tasks(exec, num_rests(p) + p.N * p.H * call.tiles, plan.num_slots, task, &call);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::block_sparse_attention
