// cpu_flash_fwd - sparse flash attention, forward, gathered keys and an online softmax.
//
// Math     the list sorted, each visible key once with its multiplicity r; per tile of keys, all heads at once:
//          S = K (c Q)^T    m' = max(m, S)    P = r exp(S - m')    l = l exp(m - m') + sum P    O = O exp(m - m') + P^T V
//          o = O / l; p needs a second sweep, with the last m and l
// Shapes   q [B T H K] k [B S K] v [B S V] q_rope [B T H KR] k_rope [B S KR] indices [B T E] o [B T H V]
// Takes    f32, bf16, f16 of any strides; any H, K, KR, V, E and block
// Threads  one task a query, or a group of neighbouring ones of up to 16 heads (32 rows of queries x heads, fewer where
//          there are few); tasks share nothing
// Vectors  scores: heads along the lanes, so that maxima and sums of a row need no shuffles; of up to half a vector of
//          heads along the key instead. Outputs: along the value
// Tile     64 keys, gathered once as float32 for both products and all heads; gemm.h's register tiles. Few heads of 16-bit
//          storage read the keys where they lie, 2 keys x 4 heads for scores, 16 keys x 4 heads x 2 vectors for
//          outputs. Queries of a group whose lists name most of their keys (H / (H + 1) of them) take every key of
//          their range together, and weigh 0 what a list does not name (cpu_flash_group.h)
// Scratch  arranged queries [K + KR][H], the tile [64][row], scores [64][H], O [H][V], the list: for 16 heads of 576 and
//          512 about 260 KiB, meant for the L2
// Numerics float32; the first m is the sink or -inf, an m of -inf counts as 0 in exponents, so that none is above 0 or
//          inf - inf. l = 0 is an empty row
// Traps    no mask for a query alone: a list holds visible keys only. A group also loads keys that a list of its does
//          not name: their scores are -inf by selection, and where an output is not finite the group goes query by
//          query. A query's bits are the same in any group and alone: one of few heads that lists most keys goes by
//          rows of heads even if no other is there, which then costs more than its own way. Lanes past H hold numbers
//          that nobody stores
// Measured Zen 3, one thread, processor time on a loaded machine, K 512, KR 64, E 2048 of 4096 keys, bf16: 52 GFLOP/s with 16
//          heads (0.52 of the FMA peak), 61 with 128 (0.66), 24 with 4 heads of separate f16 values (0.26: a key's two
//          rows are 2 KiB for 8 K FLOPs) while their keys were copied; read where they lie, 0.63 to 0.82 of that time on a
//          loaded machine (float32 rows in place: no gain, since rows 2 KiB apart share their sets of the L1). Rows asked
//          for 6 keys ahead: 36.7 -> 21.8 ms with 16 heads, where the gather, waiting for memory, had taken 0.41 of it.
//          Emerald Rapids, AVX-512, one thread, f16, all of 1024 keys listed by 64 queries of 4 heads: 0.32 of the FMA
//          peak query by query, 0.44 to 0.57 in groups. Lost: 64 rows a group (4 % in the backward, and twice the scratch);
//          scores in two halves of the width, so that a panel of queries fits the L1 (slower)
#include "thalweg/ops/sparse_flash_attention/cpu_flash_fwd.h"
#include "thalweg/ops/sparse_flash_attention/cpu_flash_group.h"

namespace thalweg::sparse_flash_attention {
namespace {

struct Scratch : SoftmaxScratch {
  float *staged, *q, *rows, *weights;
  int32_t* range;

  Scratch(const Problem& p, char* memory) {
    const int64_t queries = group_queries(p), all = queries * p.H, lanes = padded(all, kLanes);
    shape = flash_shape(p, kLanes), o_row = shape.value + 16;
    Piece piece{memory};
    keys = piece.take<int32_t>(queries * shape.capacity);
    counts = piece.take<int32_t>(queries * shape.capacity);
    list = piece.take<int32_t>(2 * p.E);
    q = piece.take<float>(lanes * shape.key);
    rows = piece.take<float>(kTileKeys * shape.row);
    s = piece.take<float>(kTileKeys * lanes);
    o = piece.take<float>(all * (shape.key > o_row ? shape.key : o_row));
    m = piece.take<float>(lanes);
    l = piece.take<float>(lanes);
    shrink = piece.take<float>(lanes);
    weights = piece.take<float>(may_group(p) ? kTileKeys * lanes : 0);
    range = piece.take<int32_t>(may_group(p) ? range_capacity(p) : 0);
    staged = o;  // queries before they are arranged
  }
};

// ---- few heads: keys read where they lie -------------------------------------------------------------
//
// A key of few heads has little arithmetic: a copy of it as float32 would cost as much. Rows of 16-bit storage and of
// whole vectors are converted as they are loaded, once for the scores and once for the outputs.

bool is_direct(const Problem& p) {
  const bool whole = p.K % kLanes == 0 && p.KR % kLanes == 0 && p.V % kLanes == 0;
  return few_heads(p) && whole && p.dtype != THALWEG_F32;
}

struct Sources {
  const char *k[kTileKeys], *rope[kTileKeys], *v[kTileKeys];
};

template <class S, int KEYS, int HEADS>
[[gnu::always_inline]] inline void direct_scores(const Problem& p, const Sources& at, int64_t i, const float* q,
                                                 int64_t width, float* s, int64_t heads) {
  using Row = const typename S::Element*;
  vf acc[KEYS][HEADS];
  tile_zero(acc);
  Row rows[KEYS];
  for (int j = 0; j < KEYS; ++j) rows[j] = reinterpret_cast<Row>(at.k[i + j]);
  few_products<S>(rows, p.K, q, width, acc);
  if (p.KR > 0) {
    for (int j = 0; j < KEYS; ++j) rows[j] = reinterpret_cast<Row>(at.rope[i + j]);
    few_products<S>(rows, p.KR, q + p.K, width, acc);
  }
  store_few(acc, s + i * heads, heads);
}

template <class S, int KEYS>
[[gnu::always_inline]] inline void direct_scores(const Problem& p, const Sources& at, int64_t i, const Scratch& x) {
  const int64_t width = x.shape.key, heads = x.shape.heads;
  int64_t h = 0;
  for (; h + 4 <= p.H; h += 4) direct_scores<S, KEYS, 4>(p, at, i, x.q + h * width, width, x.s + h, heads);
  if (p.H - h == 3) direct_scores<S, KEYS, 3>(p, at, i, x.q + h * width, width, x.s + h, heads);
  if (p.H - h == 2) direct_scores<S, KEYS, 2>(p, at, i, x.q + h * width, width, x.s + h, heads);
  if (p.H - h == 1) direct_scores<S, KEYS, 1>(p, at, i, x.q + h * width, width, x.s + h, heads);
}

// Finds the keys of a tile, of a list that goes on to `all`, and scores them, asking for rows some keys ahead.
template <class S>
[[gnu::noinline]] void score_in_place(const Problem& p, const Scratch& x, const Tile& tile, int64_t b, int64_t first,
                                      const int32_t* keys, int64_t n, int64_t all, Sources* at) {
  for (int64_t i = 0; i < n; ++i) {
    at->k[i] = element_at(tile.in.k, b, first + keys[i]);
    if (p.KR > 0) at->rope[i] = element_at(tile.in.k_rope, b, first + keys[i]);
    at->v[i] = tile.separate ? element_at(tile.in.v, b, first + keys[i]) : at->k[i];
  }
  int64_t i = 0;
  for (; i + kFewKeys <= n; i += kFewKeys) {
    for (int64_t j = i + Tile::kAhead; j < i + Tile::kAhead + kFewKeys && j < all; ++j) tile.fetch(b, first + keys[j]);
    direct_scores<S, kFewKeys>(p, *at, i, x);
  }
  for (; i < n; ++i) direct_scores<S, 1>(p, *at, i, x);
}

template <class S, int HEADS, int NV>
[[gnu::always_inline]] inline void add_columns(const Sources& at, int64_t begin, int64_t end, int64_t c, const float* s,
                                               int64_t heads, float* o, int64_t o_row) {
  vf acc[HEADS][NV];
  for (int h = 0; h < HEADS; ++h)
    for (int v = 0; v < NV; ++v) acc[h][v] = load(o + h * o_row + c + v * kLanes);
  for (int64_t i = begin; i < end; ++i) {
    const auto* row = reinterpret_cast<const typename S::Element*>(at.v[i]) + c;
    vf y[NV];
    for (int v = 0; v < NV; ++v) y[v] = S::load(row + v * kLanes);
    for (int h = 0; h < HEADS; ++h) {
      const vf P = set1(s[i * heads + h]);
      for (int v = 0; v < NV; ++v) acc[h][v] = fma(P, y[v], acc[h][v]);
    }
  }
  for (int h = 0; h < HEADS; ++h)
    for (int v = 0; v < NV; ++v) store(o + h * o_row + c + v * kLanes, acc[h][v]);
}

template <class S, int HEADS>
[[gnu::noinline]] void add_heads(const Problem& p, const Sources& at, int64_t n, const float* s, int64_t heads, float* o,
                                 int64_t o_row) {
  constexpr int64_t kRows = 16;  // stay in the L1 while all columns pass
  for (int64_t i = 0; i < n; i += kRows) {
    const int64_t end = least(i + kRows, n);
    int64_t c = 0;
    for (; c + kPanel <= p.V; c += kPanel) add_columns<S, HEADS, 2>(at, i, end, c, s, heads, o, o_row);
    if (c < p.V) add_columns<S, HEADS, 1>(at, i, end, c, s, heads, o, o_row);
  }
}

template <class S>
void add_in_place(const Problem& p, const Scratch& x, const Sources& at, int64_t n) {
  const int64_t heads = x.shape.heads, row = x.o_row;
  int64_t h = 0;
  for (; h + 4 <= p.H; h += 4) add_heads<S, 4>(p, at, n, x.s + h, heads, x.o + h * row, row);
  if (p.H - h == 3) add_heads<S, 3>(p, at, n, x.s + h, heads, x.o + h * row, row);
  if (p.H - h == 2) add_heads<S, 2>(p, at, n, x.s + h, heads, x.o + h * row, row);
  if (p.H - h == 1) add_heads<S, 1>(p, at, n, x.s + h, heads, x.o + h * row, row);
}

template <class S>
void attend_in_place(const Problem& p, const Scratch& x, const Tile& tile, int64_t b, int64_t first, int64_t n) {
  Sources at;
  for (int64_t begin = 0; begin < n; begin += kTileKeys) {
    const int64_t count = least(kTileKeys, n - begin);
    score_in_place<S>(p, x, tile, b, first, x.keys + begin, count, n - begin, &at);
    soften(x, x.counts + begin, count);
    shrink_outputs(p.H, x);
    add_in_place<S>(p, x, at, count);
  }
}

// ---- one query ----------------------------------------------------------------------------------------

// p, from scores that are computed once more. The list's memory of multiplicities takes the shares.
void store_shares(const Call& call, const Scratch& x, Tile& tile, const Query& query, int64_t b, int64_t t, int64_t n) {
  const Problem& p = call.p;
  float* shares = reinterpret_cast<float*>(x.counts);
  for (int64_t h = 0; h < x.shape.heads; ++h) x.shrink[h] = h < p.H && x.l[h] != 0 ? 1 / (x.l[h] * float(p.H)) : 0;
  for (int64_t begin = 0; begin < n; begin += kTileKeys) {
    const int64_t count = least(kTileKeys, n - begin);
    tile.gather(b, query.first, x.keys + begin, count, n - begin);
    scores(rows_of(p), count, tile.rows, x.shape.row, x.shape.key, x.q, x.s, x.shape.heads);
    for (int64_t i = 0; i < count; ++i) {
      float share = 0;
      for (int64_t h = 0; h < x.shape.heads; h += kLanes) {
        const vf m = load(x.m + h), s = load(x.s + i * x.shape.heads + h);
        const vf P = exp(s - where_greater(m, set1(-infinity()), m, zero())) * load(x.shrink + h);
        share += hsum(first_n(least(kLanes, p.H - h), P, zero()));
      }
      shares[begin + i] = share;
    }
  }
  store_p(p, call.in, query, b, t, x.keys, n, shares, call.args.p);
}

// Keys copied as float32, a tile at a time.
void attend(const Problem& p, const Scratch& x, Tile& tile, int64_t b, int64_t first, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += kTileKeys) {
    const int64_t count = least(kTileKeys, n - begin);
    tile.gather(b, first, x.keys + begin, count, n - begin);
    scores(rows_of(p), count, tile.rows, x.shape.row, x.shape.key, x.q, x.s, x.shape.heads);
    soften(x, x.counts + begin, count);
    shrink_outputs(p.H, x);
    add_rows(p.H, count, x.shape.value, x.s, x.shape.heads, tile.values(), x.shape.row, x.o, x.o_row);
  }
}

void attend_alone(const Call& call, Scratch x, Tile& tile, const Listed& it, int64_t b) {
  const Problem& p = call.p;
  x.keys = it.keys, x.counts = it.counts;
  if (it.n > 0) {
    read_heads(p, call.in.q, &call.in.q_rope, b, it.t, p.K, x.shape.key, x.staged, x.shape.key);
    arrange_heads(rows_of(p), x.staged, x.shape.key, x.shape.key, x.shape.heads, float(p.scale), x.q);
  }
  start(p, call.in, x);
  if (!is_direct(p)) attend(p, x, tile, b, it.query.first, it.n);
  else if (p.dtype == THALWEG_BF16) attend_in_place<Bf16>(p, x, tile, b, it.query.first, it.n);
  else attend_in_place<F16>(p, x, tile, b, it.query.first, it.n);
  store_outputs(call, x, b, it.t, it.query.used);
  if (p.wants_p) store_shares(call, x, tile, it.query, b, it.t, it.n);
}

// False when a number is not finite: a key that a list does not name may have made it so.
bool attend_together(const Call& call, Scratch x, Tile& tile, Group& group) {
  const Problem& p = call.p;
  const Rows these{group.size * p.H, false};
  x.shape.heads = padded(these.n, kLanes);
  const int64_t heads = x.shape.heads;
  for (int64_t j = 0; j < group.size; ++j)
    read_heads(p, call.in.q, &call.in.q_rope, group.b, group.queries[j].t, p.K, x.shape.key,
               x.staged + j * p.H * x.shape.key, x.shape.key);
  arrange_heads(these, x.staged, x.shape.key, x.shape.key, heads, float(p.scale), x.q);
  start(p, call.in, x, group.size);
  for (int64_t i = 0; i < group.limit; ++i) x.range[i] = int32_t(i);
  for (int64_t i = 0; i < kTileKeys * heads; ++i) x.weights[i] = 0;
  for (int64_t begin = 0; begin < group.limit; begin += kTileKeys) {
    const int64_t n = least(kTileKeys, group.limit - begin);
    tile.gather(group.b, group.first, x.range + begin, n, group.limit - begin);
    scores(these, n, tile.rows, x.shape.row, x.shape.key, x.q, x.s, heads);
    weigh(group, p.H, begin, n, x.weights, heads);
    for (int64_t i = 0; i < n * heads; i += kLanes)
      store(x.s + i, where_greater(load(x.weights + i), zero(), load(x.s + i), set1(-infinity())));
    soften(x, n, [&](int64_t i, int64_t h) __attribute__((always_inline)) { return load(x.weights + i * heads + h); });
    shrink_outputs(these.n, x);
    add_rows(these.n, n, x.shape.value, x.s, heads, tile.values(), x.shape.row, x.o, x.o_row);
  }
  if (!all_finite(x.o, these.n, x.o_row, x.shape.value)) return false;
  for (int64_t j = 0; j < group.size; ++j) {
    store_outputs(call, x, group.b, group.queries[j].t, true);
    x.o += p.H * x.o_row, x.m += p.H, x.l += p.H;
  }
  return true;
}

void group_task(void* arg, int64_t task, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const int64_t size = group_queries(p), groups = (p.T + size - 1) / size, b = task / groups, t = task % groups * size;
  const Scratch x(p, call.exec.workspace + slot * call.plan.slot_bytes);
  Tile tile{p, call.in, x.shape, Tile::is_separate(p, call.in), x.rows};
  Listed queries[kGroupQueries];
  const int64_t count = least(size, p.T - t);
  for (int64_t i = 0; i < count; ++i) {
    int32_t *keys = x.keys + i * x.shape.capacity, *counts = x.counts + i * x.shape.capacity;
    const Query query = query_at(p, call.in, b, t + i);
    const int64_t n = visible_keys(p, call.in, query, b, t + i, keys, counts, x.list);
    queries[i] = {query, t + i, n, keys, counts, may_group(p) && names_most(p, n, query.limit, kSpareForward), false};
  }
  for (int64_t i = 0; i < count; ++i) {
    if (queries[i].done) continue;
    if (!queries[i].most) {
      attend_alone(call, x, tile, queries[i], b);
      continue;
    }
    Group group = take_group(queries, i, count, b);
    if (attend_together(call, x, tile, group)) continue;
    for (int64_t j = 0; j < group.size; ++j) attend_alone(call, x, tile, group.queries[j], b);
  }
}

}  // namespace

namespace THALWEG_ISA {

void cpu_flash_fwd(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  const Inputs in = inputs_of(args);
  Call call{p, plan, args, in, exec};
  const int64_t size = group_queries(p);
  parallel_tasks(exec, p.B * ((p.T + size - 1) / size), plan.num_slots, group_task, &call);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::sparse_flash_attention
