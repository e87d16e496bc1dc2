// cpu_flash_bwd - sparse flash attention, backward, gathered keys; gradients of keys by ranges of keys.
//
// Math     queries are taken in blocks. First, per query: the list sorted, each visible key once with its multiplicity r;
//          S = K (c Q)^T, dP = V dO^T, P = r exp(S - L), dS = c P (dP - delta), d_q = dS^T K; P and dS are kept for the
//          block. L and delta = <d_o, o> - d_lse come from what the forward kept, else from a sweep of their own.
//          Then, per range of keys: d_k_j += dS_j Q and d_v_j += P_j dO of the block's queries that see j, in order; where
//          the value is the latent, both into one sum. Five products a (query, key), each computed once
// Shapes   q [B T H K] k [B S K] v [B S V] q_rope [B T H KR] k_rope [B S KR] indices [B T E] o, d_o [B T H V]
// Takes    f32, bf16, f16 of any strides; any H, K, KR, V, E and block
// Threads  one task a query, or a group of neighbouring ones of up to 16 heads (as forward); then one task a range of
//          512 keys and 128 columns. A key's gradient is added up by one task at a time, over queries in order, so the
//          bits depend neither on threads nor on the blocks: a list is sorted, so that a range of it is one slice, and
//          holds a key once, so that no two rows of a register tile are the same row in memory. The sums are float32
//          rows of all keys, O(inputs); nothing is stored per (query, key) beyond a block
// Vectors  scores: heads along the lanes, or the key for few heads (as forward); gradients: along the key's columns
// Tile     64 gathered keys; a range of 512 rows x 128 columns is 256 KiB, meant for the L2
// Scratch  shared: sums of d_k and d_v as float32 in chunks of columns, and of kTokens queries (values[0], in whole
//          groups) Q, dO, P, dS, about 16 MiB, or two queries or one group a thread. A slot: arranged heads, the tile,
//          d_q, the list
// Numerics float32; a row with L = +inf is dead: P and dS are 0 by selection, and its Q and dO are cleared, so that NaN there
//          reaches no key. L from the sweep has a largest score of at most L: no exponent is above 0
//          Queries of a group whose lists name most of their keys (H / (H + 3) of them), where L and o are given, take
//          every key of their range together, with P and dS 0 by selection where a list does not name one
// Traps    a group goes query by query where a row of q or d_o, or its d_q, is not finite: 0 times it would reach
//          others. exp(S - L) of a given L may exceed 1 by L's rounding. A separate `v` that is k's memory is gathered
//          once but has gradients of its own. Clearing dead heads comes after delta was taken, and d_q of a dead head
//          is cleared at the end
// Measured Zen 3, one thread, processor time on a loaded machine, K 512, KR 64, E 2048 of 4096 keys, bf16, lse and o given:
//          41 GFLOP/s with 16 heads (0.45 of the FMA peak); the gradients of keys take 0.34 of it at 47 GFLOP/s.
//          Emerald Rapids, AVX-512, one thread, f16, all of 1024 keys listed by 64 queries of 4 heads: 0.24 of the FMA
//          peak query by query, 0.47 to 0.62 in groups
#include "thalweg/ops/sparse_flash_attention/cpu_flash_group.h"

namespace thalweg::sparse_flash_attention {
namespace {

using Args = thalweg_sparse_flash_attention_bwd_args;

// What is kept of a query of a block, or of several that went together: their heads are its rows.
struct Kept {
  int64_t n, first, b;    // keys, first row of k
  int64_t rows_n, lanes;  // rows, and those in whole vectors
  int32_t* keys;          // [n]
  float *P, *dS;          // [n][lanes]
  float* rows;            // [rows_n][head_row]: q and q_rope, padded; d_o, padded
};
static_assert(sizeof(Kept) <= kKeptHeader);

// What a group of a block keeps.
struct KeptGroup {
  int64_t* count;
  Kept* kept;
};

struct Call {
  const Problem& p;
  const Args& args;
  const Inputs& in;
  FlashShape shape;
  FlashBackward sizes;
  int64_t groups;        // of a batch entry
  int64_t first, count;  // the block: groups, counted over all batch entries
  bool separate;         // values are gathered too
  float *sums, *terms;   // [chunk][B S][kChunkWidth], [B T H]
  char *kept, *slots;
  int64_t slot_bytes;

  KeptGroup kept_of(int64_t i) const {
    char* at = kept + i * sizes.kept_bytes;
    return {reinterpret_cast<int64_t*>(at), reinterpret_cast<Kept*>(at + kKeptHeader)};
  }
  float* sum_row(int64_t chunk, int64_t row) const { return sums + (chunk * p.B * p.S + row) * kChunkWidth; }
};

struct Scratch {
  int32_t *lists, *counts, *list;
  float *q, *d_o, *rows, *d_q, *m, *L, *delta, *shares, *weights;
  int64_t d_q_row;

  Scratch(const Call& call, int64_t slot) : d_q_row(call.shape.key + 16) {
    const FlashShape& shape = call.shape;
    const int64_t queries = call.sizes.queries, all = queries * call.p.H, lanes = padded(all, kLanes);
    Piece piece{call.slots + slot * call.slot_bytes};
    lists = piece.take<int32_t>(queries * shape.capacity);
    counts = piece.take<int32_t>(queries * shape.capacity);
    list = piece.take<int32_t>(2 * call.p.E);
    const int64_t arranged = lanes * shape.key, sum_row = call.sizes.num_chunks * kChunkWidth;
    q = piece.take<float>(arranged > sum_row ? arranged : sum_row);
    d_o = piece.take<float>(lanes * shape.value);
    rows = piece.take<float>(kTileKeys * shape.row);
    d_q = piece.take<float>(all * d_q_row + shape.value);
    m = piece.take<float>(lanes);
    L = piece.take<float>(lanes);
    delta = piece.take<float>(lanes);
    shares = piece.take<float>(call.p.wants_p ? shape.capacity : 0);
    weights = piece.take<float>(may_group(call.p) ? kTileKeys * lanes : 0);
  }
};

[[gnu::always_inline]] inline vf unless_dead(vf L, vf x) { return where_greater(L, set1(3e38f), zero(), x); }

// ---- rows: log sums and deltas ----------------------------------------------------------------------

// L of rows whose scores are in P.
[[gnu::noinline]] void sum_scores(const Call& call, const Scratch& x, const Kept& kept, int64_t n) {
  const int64_t heads = kept.lanes;
  for (int64_t h = 0; h < heads; h += kLanes) {
    const vf z = load(x.m + h);  // the sink
    vf m = z;
    for (int64_t i = 0; i < n; ++i) m = max(load(kept.P + i * heads + h), m);
    const vf base = where_greater(m, set1(-infinity()), m, m == m ? zero() : m);
    vf sum = exp(z - base);
    for (int64_t i = 0; i < n; ++i)
      sum += set1(float(x.counts[i])) * exp(load(kept.P + i * heads + h) - base);
    store(x.L + h, sum), store(x.m + h, base);
  }
  for (int64_t h = 0; h < heads; ++h)
    x.L[h] = x.L[h] == 0 || h >= call.p.H ? infinity() : x.m[h] + __builtin_logf(x.L[h]);
}

void load_log_sums(const Call& call, const Scratch& x, int64_t b, int64_t t) {
  const Args& args = call.args;
  for (int64_t h = 0; h < call.p.H; ++h) {
    const float L = call.p.has_lse ? float_at(args.lse, b, t, h)
                                   : float_at(args.row_max, b, t, h) + __builtin_logf(float_at(args.row_sum, b, t, h));
    x.L[h] = L - L == 0 ? L : infinity();
  }
}

// <d_o, o>
void multiply_outputs(const Call& call, const Scratch& x, const Kept& kept, int64_t b, int64_t t) {
  const int64_t value = call.shape.value;
  float* o = x.d_q;
  for (int64_t c = call.p.V; c < value; ++c) o[c] = 0;
  for (int64_t h = 0; h < call.p.H; ++h) {
    read_row(call.p.dtype, element_at(call.args.o, b, t, h), call.p.V, o);
    vf sum[2] = {zero(), zero()};
    const float* d_o = kept.rows + h * call.sizes.head_row + call.shape.key;
    for (int64_t c = 0; c < value; c += kLanes) {
      vf& part = sum[c / kLanes % 2];
      part = fma(load(o + c), load(d_o + c), part);
    }
    x.delta[h] = hsum(sum[0] + sum[1]);
  }
}

// sum P dP, from scores in P and products in dS.
[[gnu::noinline]] void sum_products(const Scratch& x, const Kept& kept, int64_t n) {
  const int64_t heads = kept.lanes;
  for (int64_t h = 0; h < heads; h += kLanes) {
    const vf L = load(x.L + h);
    vf sum = zero();
    for (int64_t i = 0; i < n; ++i) {
      const vf P = set1(float(x.counts[i])) * exp(load(kept.P + i * heads + h) - L);
      sum = fma(P, load(kept.dS + i * heads + h), sum);
    }
    store(x.delta + h, unless_dead(L, sum));
  }
}

// Scores to P, products to dS, of keys [begin, begin + n); weight(i, h): how often key i counts for rows h on.
template <class Weight>
[[gnu::always_inline]] inline void differentiate(const Call& call, const Scratch& x, const Kept& kept, int64_t begin,
                                                 int64_t n, Weight&& weight) {
  const int64_t heads = kept.lanes;
  const vf scale = set1(float(call.p.scale));
  for (int64_t h = 0; h < heads; h += kLanes) {
    const vf L = load(x.L + h), delta = load(x.delta + h);
    for (int64_t i = begin; i < begin + n; ++i) {
      float *P = kept.P + i * heads + h, *dS = kept.dS + i * heads + h;
      const vf times = weight(i, h), probability = times * exp(load(P) - L);
      const vf slope = scale * probability * (load(dS) - delta);
      store(P, unless_dead(L, where_greater(times, zero(), probability, zero())));
      store(dS, unless_dead(L, where_greater(times, zero(), slope, zero())));
    }
  }
}
[[gnu::noinline]] void differentiate(const Call& call, const Scratch& x, const Kept& kept, const int32_t* counts,
                                     int64_t begin, int64_t n) {
  differentiate(call, x, kept, begin, n,
                [&](int64_t i, int64_t) __attribute__((always_inline)) { return set1(float(counts[i])); });
}

// ---- one query --------------------------------------------------------------------------------------

void store_d_q(const Call& call, const Scratch& x, int64_t b, int64_t t) {
  const Problem& p = call.p;
  for (int64_t h = 0; h < p.H; ++h) {
    float* d_q = x.d_q + h * x.d_q_row;
    if (x.L[h] == infinity())
      for (int64_t c = 0; c < call.shape.key; ++c) d_q[c] = 0;
    if (is_there(call.args.d_q)) write_row(p.dtype, element_at(call.args.d_q, b, t, h), p.K, d_q);
    if (is_there(call.args.d_q_rope)) write_row(p.dtype, element_at(call.args.d_q_rope, b, t, h), p.KR, d_q + p.K);
  }
}

void add_d_lse(const Call& call, const Scratch& x, int64_t b, int64_t t) {
  if (!is_there(call.args.d_lse)) return;
  for (int64_t h = 0; h < call.p.H; ++h) x.delta[h] -= float_at(call.args.d_lse, b, t, h);
}

// A dead head reaches no key.
void clear_dead(const Call& call, const Scratch& x, const Kept& kept) {
  for (int64_t h = 0; h < kept.rows_n; ++h)
    if (x.L[h] == infinity())
      for (int64_t c = 0; c < call.shape.key + call.shape.value; ++c) kept.rows[h * call.sizes.head_row + c] = 0;
}

void store_terms(const Call& call, const Scratch& x, int64_t row) {
  const thalweg_tensor& sink = call.in.sink;
  for (int64_t h = 0; h < call.p.H; ++h) {
    const float P = x.L[h] == infinity() ? 0 : __builtin_expf(float_at(sink, h) - x.L[h]);
    call.terms[row * call.p.H + h] = P == 0 ? 0 : -P * x.delta[h];
  }
}

void store_shares(const Call& call, const Scratch& x, const Kept& kept, const Listed& it, int64_t b) {
  for (int64_t i = 0; i < it.n; ++i) {
    vf sum = zero();
    for (int64_t h = 0; h < kept.lanes; h += kLanes) sum += load(kept.P + i * kept.lanes + h);
    x.shares[i] = hsum(sum) / (float(call.p.H) * float(it.counts[i]));
  }
  store_p(call.p, call.in, it.query, b, it.t, kept.keys, it.n, x.shares, call.args.p);
}

// Scores and products of a tile, as they are.
void multiply_tile(const Call& call, Rows these, const Scratch& x, const Tile& tile, const Kept& kept, int64_t begin,
                   int64_t n) {
  const FlashShape& shape = call.shape;
  scores(these, n, tile.rows, shape.row, shape.key, x.q, kept.P + begin * kept.lanes, kept.lanes);
  scores(these, n, tile.values(), shape.row, shape.value, x.d_o, kept.dS + begin * kept.lanes, kept.lanes);
}

// P and dS of all keys, and d_q: in one sweep when L and delta are known, else in two.
void sweep(const Call& call, const Scratch& x, Tile& tile, const Kept& kept, const int32_t* counts, int64_t b,
           int64_t t) {
  const Problem& p = call.p;
  const FlashShape& shape = call.shape;
  const int64_t n = kept.n;
  const bool has_sums = p.has_lse || p.has_row_sum, alone = n == 1 && !is_there(call.in.sink);
  const bool known = has_sums && p.has_o && !alone;
  if (has_sums) load_log_sums(call, x, b, t);
  if (p.has_o) multiply_outputs(call, x, kept, b, t);
  if (!known) {
    for (int64_t begin = 0; begin < n; begin += kTileKeys) {
      const int64_t count = least(kTileKeys, n - begin);
      tile.gather(b, kept.first, kept.keys + begin, count, n - begin);
      multiply_tile(call, rows_of(p), x, tile, kept, begin, count);
    }
    if (!has_sums) sum_scores(call, x, kept, n);
    if (!p.has_o) sum_products(x, kept, n);
    // One key has P = 1 whatever its score: its delta is its dP, so that dS is exactly 0.
    for (int64_t h = 0; h < p.H && alone; ++h) x.delta[h] = kept.dS[h];
  }
  add_d_lse(call, x, b, t);
  for (int64_t i = 0; i < p.H * x.d_q_row; ++i) x.d_q[i] = 0;
  for (int64_t begin = 0; begin < n; begin += kTileKeys) {
    const int64_t count = least(kTileKeys, n - begin);
    if (known || p.wants_d_q) tile.gather(b, kept.first, kept.keys + begin, count, n - begin);
    if (known) multiply_tile(call, rows_of(p), x, tile, kept, begin, count);
    differentiate(call, x, kept, counts, begin, count);
    if (p.wants_d_q)
      add_rows(p.H, count, shape.key, kept.dS + begin * kept.lanes, kept.lanes, tile.rows, shape.row, x.d_q, x.d_q_row);
  }
}

// Memory of a group of a block, from its header on.
struct Keeper {
  const Call& call;
  KeptGroup group;
  Piece piece;
  Keeper(const Call& c, int64_t i) : call(c), group(c.kept_of(i)) {
    *group.count = 0;
    piece.at = reinterpret_cast<char*>(group.count) + padded(kKeptHeader * (c.sizes.queries + 1), 64);
  }
  // For `queries` queries that see n keys, from row `first` of k[b] on. Not kept yet.
  Kept lay_out(int64_t queries, int64_t n, int64_t first, int64_t b) const {
    Piece here = piece;
    Kept x{n, first, b, queries * call.p.H, padded(queries * call.p.H, kLanes), nullptr, nullptr, nullptr, nullptr};
    x.keys = here.take<int32_t>(n);
    x.P = here.take<float>(n * x.lanes);
    x.dS = here.take<float>(n * x.lanes);
    x.rows = here.take<float>(x.rows_n * call.sizes.head_row);
    return x;
  }
  void keep(const Kept& x) {
    group.kept[(*group.count)++] = x;
    piece.at = reinterpret_cast<char*>(x.rows);
    piece.take<float>(x.rows_n * call.sizes.head_row);
  }
};

void read_query(const Call& call, const Kept& kept, int64_t row, int64_t b, int64_t t) {
  const Problem& p = call.p;
  float* rows = kept.rows + row * call.sizes.head_row;
  read_heads(p, call.in.q, &call.in.q_rope, b, t, p.K, call.shape.key, rows, call.sizes.head_row);
  read_heads(p, call.args.d_o, nullptr, b, t, p.V, call.shape.value, rows + call.shape.key, call.sizes.head_row);
}
void arrange_rows(const Call& call, Rows these, const Scratch& x, const Kept& kept) {
  const FlashShape& shape = call.shape;
  const int64_t row = call.sizes.head_row;
  arrange_heads(these, kept.rows, row, shape.key, kept.lanes, float(call.p.scale), x.q);
  arrange_heads(these, kept.rows + shape.key, row, shape.value, kept.lanes, 1, x.d_o);
}

void query_alone(const Call& call, const Scratch& x, Tile& tile, const Listed& it, int64_t b, Keeper& keeper) {
  const Problem& p = call.p;
  const Kept kept = keeper.lay_out(1, it.n, it.query.first, b);
  memcpy(kept.keys, it.keys, size_t(it.n) * sizeof(int32_t));
  for (int64_t h = 0; h < kept.lanes; ++h) {
    x.m[h] = is_there(call.in.sink) && h < p.H ? float_at(call.in.sink, h) : -infinity();
    x.L[h] = infinity(), x.delta[h] = 0;
  }
  for (int64_t i = 0; i < p.H * x.d_q_row; ++i) x.d_q[i] = 0;
  if (it.query.used) {
    read_query(call, kept, 0, b, it.t);
    if (it.n > 0) arrange_rows(call, rows_of(p), x, kept);
    sweep(call, x, tile, kept, it.counts, b, it.t);
    clear_dead(call, x, kept);
  }
  if (p.wants_d_q) store_d_q(call, x, b, it.t);
  if (p.wants_d_sink) store_terms(call, x, b * p.T + it.t);
  if (p.wants_p) store_shares(call, x, kept, it, b);
  keeper.keep(kept);
}

// False when a number is not finite that may reach what does not see it.
bool queries_together(const Call& call, Scratch x, Tile& tile, Group& group, Keeper& keeper) {
  const Problem& p = call.p;
  const FlashShape& shape = call.shape;
  const Kept kept = keeper.lay_out(group.size, group.limit, group.first, group.b);
  const Rows these{kept.rows_n, false};
  for (int64_t h = 0; h < kept.lanes; ++h) x.L[h] = infinity(), x.delta[h] = 0;
  for (int64_t j = 0; j < group.size; ++j) {
    read_query(call, kept, j * p.H, group.b, group.queries[j].t);
    Scratch one = x;
    Kept its = kept;
    one.L += j * p.H, one.delta += j * p.H, its.rows += j * p.H * call.sizes.head_row;
    load_log_sums(call, one, group.b, group.queries[j].t);
    multiply_outputs(call, one, its, group.b, group.queries[j].t);
    add_d_lse(call, one, group.b, group.queries[j].t);
  }
  clear_dead(call, x, kept);
  if (!all_finite(kept.rows, kept.rows_n, call.sizes.head_row, shape.key + shape.value)) return false;
  arrange_rows(call, these, x, kept);
  for (int64_t i = 0; i < group.limit; ++i) kept.keys[i] = int32_t(i);
  for (int64_t i = 0; i < kTileKeys * kept.lanes; ++i) x.weights[i] = 0;
  for (int64_t i = 0; i < kept.rows_n * x.d_q_row; ++i) x.d_q[i] = 0;
  for (int64_t begin = 0; begin < group.limit; begin += kTileKeys) {
    const int64_t n = least(kTileKeys, group.limit - begin);
    tile.gather(group.b, group.first, kept.keys + begin, n, group.limit - begin);
    multiply_tile(call, these, x, tile, kept, begin, n);
    weigh(group, p.H, begin, n, x.weights, kept.lanes);
    differentiate(call, x, kept, begin, n, [&](int64_t i, int64_t h) __attribute__((always_inline)) {
      return load(x.weights + (i - begin) * kept.lanes + h);
    });
    add_rows(these.n, n, shape.key, kept.dS + begin * kept.lanes, kept.lanes, tile.rows, shape.row, x.d_q, x.d_q_row);
  }
  if (!all_finite(x.d_q, kept.rows_n, x.d_q_row, shape.key)) return false;
  for (int64_t j = 0; j < group.size; ++j) {
    const int64_t t = group.queries[j].t;
    if (p.wants_d_q) store_d_q(call, x, group.b, t);
    if (p.wants_d_sink) store_terms(call, x, group.b * p.T + t);
    x.d_q += p.H * x.d_q_row, x.L += p.H, x.delta += p.H;
  }
  keeper.keep(kept);
  return true;
}

void group_task(void* arg, int64_t task, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const int64_t size = call.sizes.queries, group = call.first + task;
  const int64_t b = group / call.groups, t = group % call.groups * size, count = least(size, p.T - t);
  const Scratch x(call, slot);
  Tile tile{p, call.in, call.shape, call.separate, x.rows};
  Keeper keeper(call, task);
  Listed queries[kGroupQueries];
  const bool may = may_group(p) && p.has_o && (p.has_lse || p.has_row_sum);
  for (int64_t i = 0; i < count; ++i) {
    int32_t *keys = x.lists + i * call.shape.capacity, *counts = x.counts + i * call.shape.capacity;
    const Query query = query_at(p, call.in, b, t + i);
    const int64_t n = visible_keys(p, call.in, query, b, t + i, keys, counts, x.list);
    queries[i] = {query, t + i, n, keys, counts, may && names_most(p, n, query.limit, kSpareBackward), false};
  }
  for (int64_t i = 0; i < count; ++i) {
    if (queries[i].done) continue;
    if (!queries[i].most) {
      query_alone(call, x, tile, queries[i], b, keeper);
      continue;
    }
    Group together = take_group(queries, i, count, b);
    if (queries_together(call, x, tile, together, keeper)) continue;
    for (int64_t j = 0; j < together.size; ++j) query_alone(call, x, tile, together.queries[j], b, keeper);
  }
}

// ---- gradients of keys ------------------------------------------------------------------------------

// MR rows of sums, at base + keys[i] kChunkWidth, += the products of two pairs; the second may be absent.
template <int MR, int NV>
[[gnu::always_inline]] inline void add_products(int64_t H, const float* a, const float* b, const float* c,
                                                const float* d, int64_t heads, int64_t row, const int32_t* keys,
                                                float* base) {
  vf acc[MR][NV];
  for (int i = 0; i < MR; ++i)
    for (int v = 0; v < NV; ++v) acc[i][v] = load(base + keys[i] * kChunkWidth + v * kLanes);
  tile_mac(H, a, heads, 1, b, row, acc);
  if (c) tile_mac(H, c, heads, 1, d, row, acc);
  for (int i = 0; i < MR; ++i)
    for (int v = 0; v < NV; ++v) store(base + keys[i] * kChunkWidth + v * kLanes, acc[i][v]);
}

template <int NV>
[[gnu::noinline]] void add_panel(int64_t n, int64_t H, const float* a, const float* b, const float* c, const float* d,
                                 int64_t heads, int64_t row, const int32_t* keys, float* base) {
  int64_t i = 0;
  auto next = [&](int64_t rows) {
    a += rows * heads;
    if (c) c += rows * heads;
    i += rows;
  };
  for (; i + kTileRows <= n; next(kTileRows)) add_products<kTileRows, NV>(H, a, b, c, d, heads, row, keys + i, base);
  for (; i + 4 <= n; next(4)) add_products<4, NV>(H, a, b, c, d, heads, row, keys + i, base);
  for (; i + 2 <= n; next(2)) add_products<2, NV>(H, a, b, c, d, heads, row, keys + i, base);
  for (; i < n; next(1)) add_products<1, NV>(H, a, b, c, d, heads, row, keys + i, base);
}

// First key of an ascending list that is not below `limit`.
int64_t lower_bound(const int32_t* keys, int64_t n, int64_t limit) {
  int64_t low = 0;
  while (n > 0) {
    const int64_t half = n / 2;
    if (keys[low + half] < limit) low += half + 1, n -= half + 1;
    else n = half;
  }
  return low;
}

// What one query adds to rows [begin, end) of k[b], columns [column, column_end) of the sums.
void add_query(const Call& call, const Kept& kept, int64_t begin, int64_t end, int64_t column, int64_t column_end) {
  const Problem& p = call.p;
  const FlashShape& shape = call.shape;
  const int64_t n = kept.n, first = kept.first, b = kept.b;
  const int64_t from = lower_bound(kept.keys, n, begin - first), to = lower_bound(kept.keys, n, end - first);
  if (from == to) return;
  const float *P = kept.P + from * kept.lanes, *dS = kept.dS + from * kept.lanes;
  const int64_t chunk = column / kChunkWidth;
  while (column < column_end) {
    const bool is_key = column < shape.key, has_value = p.latent && column < shape.value;
    const int64_t part_end = has_value ? shape.value : is_key ? shape.key : shape.key + shape.value;
    const int64_t width = least(kPanel, least(part_end, column_end) - column);
    const float *a = is_key ? dS : P, *q = kept.rows + column;
    const float *c = has_value ? P : nullptr, *d_o = kept.rows + shape.key + column;
    float* base = call.sum_row(chunk, b * p.S + first) + column % kChunkWidth;
    (width == kPanel ? add_panel<2> : add_panel<1>)(to - from, kept.rows_n, a, q, c, d_o, kept.lanes,
                                                    call.sizes.head_row, kept.keys + from, base);
    column += width == kPanel ? kPanel : kLanes;
  }
}

int64_t ranges_of(const Problem& p) { return (p.S + kRangeKeys - 1) / kRangeKeys; }
int64_t sum_width(const Call& call) { return call.shape.key + (call.p.latent ? 0 : call.shape.value); }

void key_task(void* arg, int64_t task, int64_t) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const int64_t chunk = task % call.sizes.num_chunks, range = task / call.sizes.num_chunks % ranges_of(p);
  const int64_t b = call.first / call.groups + task / call.sizes.num_chunks / ranges_of(p);
  const int64_t column = chunk * kChunkWidth, column_end = least(column + kChunkWidth, sum_width(call));
  for (int64_t i = 0; i < call.count; ++i) {
    const KeptGroup group = call.kept_of(i);
    for (int64_t j = 0; j < *group.count; ++j)
      if (group.kept[j].b == b)
        add_query(call, group.kept[j], range * kRangeKeys, least((range + 1) * kRangeKeys, p.S), column, column_end);
  }
}

void clear_task(void* arg, int64_t task, int64_t) {
  const Call& call = *static_cast<const Call*>(arg);
  const int64_t begin = task * kRangeKeys, end = least(begin + kRangeKeys, call.p.B * call.p.S);
  for (int64_t chunk = 0; chunk < call.sizes.num_chunks; ++chunk)
    memset(call.sum_row(chunk, begin), 0, size_t(end - begin) * kChunkWidth * sizeof(float));
}

void store_task(void* arg, int64_t task, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const Args& args = call.args;
  float* row = Scratch(call, slot).q;  // as wide as a row, or H times as wide
  for (int64_t i = task * kRangeKeys; i < least((task + 1) * kRangeKeys, p.B * p.S); ++i) {
    const int64_t b = i / p.S, j = i % p.S;
    for (int64_t chunk = 0; chunk < call.sizes.num_chunks; ++chunk)
      memcpy(row + chunk * kChunkWidth, call.sum_row(chunk, i),
             size_t(least(kChunkWidth, sum_width(call) - chunk * kChunkWidth)) * sizeof(float));
    if (is_there(args.d_k)) write_row(p.dtype, element_at(args.d_k, b, j), p.K, row);
    if (is_there(args.d_k_rope)) write_row(p.dtype, element_at(args.d_k_rope, b, j), p.KR, row + p.K);
    if (is_there(args.d_v)) write_row(p.dtype, element_at(args.d_v, b, j), p.V, row + call.shape.key);
  }
}

}  // namespace

namespace THALWEG_ISA {

void cpu_flash_bwd(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  const Inputs in = inputs_of(args);
  const FlashShape shape = flash_shape(p, kLanes);
  const FlashBackward sizes = flash_backward(p, kLanes);
  Piece piece{exec.workspace};
  float* sums = piece.take<float>(sizes.sums);
  float* terms = piece.take<float>(sizes.terms);
  const int64_t groups = (p.T + sizes.queries - 1) / sizes.queries, block = kept_groups(plan, sizes);
  Call call{p, args, in, shape, sizes, groups, 0, 0, Tile::is_separate(p, in), sums, terms, piece.at,
            exec.workspace + plan.shared_bytes, plan.slot_bytes};
  const int64_t key_rows = (p.B * p.S + kRangeKeys - 1) / kRangeKeys;
  if (p.wants_d_kv) parallel_tasks(exec, key_rows, plan.num_slots, clear_task, &call);
  for (int64_t first = 0; first < p.B * groups; first += block) {
    call.first = first, call.count = least(block, p.B * groups - first);
    parallel_tasks(exec, call.count, plan.num_slots, group_task, &call);
    const int64_t items = (first + call.count - 1) / groups - first / groups + 1;
    if (p.wants_d_kv)
      parallel_tasks(exec, items * ranges_of(p) * sizes.num_chunks, plan.num_slots, key_task, &call);
  }
  if (p.wants_d_kv) parallel_tasks(exec, key_rows, plan.num_slots, store_task, &call);
  if (p.wants_d_sink) sum_sink(p, terms, args.d_sink);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::sparse_flash_attention
