// cpu_flash_bwd - sparse flash attention, backward, gathered keys; gradients of keys by ranges of keys.
//
// Math     queries are taken in blocks. First, per query: the list sorted, each visible key once with its multiplicity r;
//          S = K (c Q)^T, dP = V dO^T, P = r exp(S - L), dS = c P (dP - delta), d_q = dS^T K; P and dS are kept for the
//          block. L and delta = <d_o, o> - d_lse come from what the forward kept, else from a sweep of their own.
//          Then, per range of keys: d_k_j += dS_j Q and d_v_j += P_j dO of the block's queries that see j, in order; where
//          the value is the latent, both into one sum. Five products a (query, key), each computed once
// Shapes   q [B T H K] k [B S K] v [B S V] q_rope [B T H KR] k_rope [B S KR] indices [B T E] o, d_o [B T H V]
// Takes    f32, bf16, f16 of any strides; any H, K, KR, V, E and block
// Threads  one task a query; then one task a range of 512 keys and 128 columns. A key's gradient is added up by one task
//          at a time, over queries in order, so the bits depend neither on threads nor on the blocks: a list is
//          sorted, so that a range of it is one slice, and holds a key once, so that no two rows of a register tile
//          are the same row in memory. The sums are float32 rows of all keys, O(inputs); nothing is stored per
//          (query, key) beyond a block
// Vectors  scores: heads along the lanes, or the key for few heads (as forward); gradients: along the key's columns
// Tile     64 gathered keys; a range of 512 rows x 128 columns is 256 KiB, meant for the L2
// Scratch  shared: sums of d_k and d_v as float32 in chunks of columns, and of kTokens queries (values[0]) Q, dO, P, dS,
//          about 16 MiB or two queries a thread. A slot: arranged heads, the tile, d_q, the list
// Numerics float32; a row with L = +inf is dead: P and dS are 0 by selection, and its Q and dO are cleared, so that NaN there
//          reaches no key. L from the sweep has a largest score of at most L: no exponent is above 0
// Traps    exp(S - L) of a given L may exceed 1 by L's rounding. A separate `v` that is k's memory is gathered once but has
//          gradients of its own. Clearing dead heads comes after delta was taken, and d_q of a dead head is cleared at the end
// Measured Zen 3, one thread, processor time on a loaded machine, K 512, KR 64, E 2048 of 4096 keys, bf16, lse and o given:
//          41 GFLOP/s with 16 heads (0.45 of the FMA peak); the gradients of keys take 0.34 of it at 47 GFLOP/s
#include "thalweg/ops/sparse_flash_attention/cpu_flash_tiles.h"

namespace thalweg::sparse_flash_attention {
namespace {

using Args = thalweg_sparse_flash_attention_bwd_args;

// What is kept of one query of a block.
struct Kept {
  int64_t* info;  // {n, first row of k, b}
  int32_t* keys;  // [n]
  float *P, *dS;  // [n][heads]
  float* rows;    // [H][head_row]: q and q_rope, padded; d_o, padded
};

struct Call {
  const Problem& p;
  const Args& args;
  const Inputs& in;
  FlashShape shape;
  int64_t head_row;         // of Kept.rows
  int64_t num_chunks;       // of columns of the sums
  int64_t first, count;     // the block: queries, counted over [B T]
  bool separate;            // values are gathered too
  float *sums, *terms;      // [chunk][B S][kChunkWidth], [B T H]
  char *kept, *slots;
  int64_t kept_bytes, slot_bytes;

  Kept kept_of(int64_t i) const {
    Piece piece{kept + i * kept_bytes};
    Kept x;
    x.info = piece.take<int64_t>(8);
    x.keys = piece.take<int32_t>(shape.capacity);
    x.P = piece.take<float>(shape.capacity * shape.heads);
    x.dS = piece.take<float>(shape.capacity * shape.heads);
    x.rows = piece.take<float>(p.H * head_row);
    return x;
  }
  float* sum_row(int64_t chunk, int64_t row) const { return sums + (chunk * p.B * p.S + row) * kChunkWidth; }
};

struct Scratch {
  int32_t *counts, *list;
  float *q, *d_o, *rows, *d_q, *m, *L, *delta, *shares;
  int64_t d_q_row;

  Scratch(const Call& call, int64_t slot) : d_q_row(call.shape.key + 16) {
    const FlashShape& shape = call.shape;
    Piece piece{call.slots + slot * call.slot_bytes};
    counts = piece.take<int32_t>(shape.capacity);
    list = piece.take<int32_t>(2 * call.p.E);
    const int64_t arranged = shape.heads * shape.key, sum_row = call.num_chunks * kChunkWidth;
    q = piece.take<float>(arranged > sum_row ? arranged : sum_row);
    d_o = piece.take<float>(shape.heads * shape.value);
    rows = piece.take<float>(kTileKeys * shape.row);
    d_q = piece.take<float>(call.p.H * d_q_row + shape.value);
    m = piece.take<float>(shape.heads);
    L = piece.take<float>(shape.heads);
    delta = piece.take<float>(shape.heads);
    shares = piece.take<float>(call.p.wants_p ? shape.capacity : 0);
  }
};

[[gnu::always_inline]] inline vf unless_dead(vf L, vf x) { return where_greater(L, set1(3e38f), zero(), x); }

// ---- rows: log sums and deltas ----------------------------------------------------------------------

// L of rows whose scores are in P.
[[gnu::noinline]] void sum_scores(const Call& call, const Scratch& x, const Kept& kept, int64_t n) {
  const int64_t heads = call.shape.heads;
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
    const float* d_o = kept.rows + h * call.head_row + call.shape.key;
    for (int64_t c = 0; c < value; c += kLanes) {
      vf& part = sum[c / kLanes % 2];
      part = fma(load(o + c), load(d_o + c), part);
    }
    x.delta[h] = hsum(sum[0] + sum[1]);
  }
}

// sum P dP, from scores in P and products in dS.
[[gnu::noinline]] void sum_products(const Call& call, const Scratch& x, const Kept& kept, int64_t n) {
  const int64_t heads = call.shape.heads;
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

// Scores to P, products to dS, of keys [begin, begin + n).
[[gnu::noinline]] void differentiate(const Call& call, const Scratch& x, const Kept& kept, int64_t begin, int64_t n) {
  const int64_t heads = call.shape.heads;
  const vf scale = set1(float(call.p.scale));
  for (int64_t h = 0; h < heads; h += kLanes) {
    const vf L = load(x.L + h), delta = load(x.delta + h);
    for (int64_t i = begin; i < begin + n; ++i) {
      float *P = kept.P + i * heads + h, *dS = kept.dS + i * heads + h;
      const vf probability = set1(float(x.counts[i])) * exp(load(P) - L);
      store(P, unless_dead(L, probability));
      store(dS, unless_dead(L, scale * probability * (load(dS) - delta)));
    }
  }
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

// A dead head reaches no key.
void clear_dead(const Call& call, const Scratch& x, const Kept& kept) {
  for (int64_t h = 0; h < call.p.H; ++h)
    if (x.L[h] == infinity())
      for (int64_t c = 0; c < call.shape.key + call.shape.value; ++c) kept.rows[h * call.head_row + c] = 0;
}

void store_terms(const Call& call, const Scratch& x, int64_t row) {
  const thalweg_tensor& sink = call.in.sink;
  for (int64_t h = 0; h < call.p.H; ++h) {
    const float P = x.L[h] == infinity() ? 0 : __builtin_expf(float_at(sink, h) - x.L[h]);
    call.terms[row * call.p.H + h] = P == 0 ? 0 : -P * x.delta[h];
  }
}

void store_shares(const Call& call, const Scratch& x, const Kept& kept, const Query& query, int64_t b, int64_t t,
                  int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    vf sum = zero();
    for (int64_t h = 0; h < call.shape.heads; h += kLanes) sum += load(kept.P + i * call.shape.heads + h);
    x.shares[i] = hsum(sum) / (float(call.p.H) * float(x.counts[i]));
  }
  store_p(call.p, call.in, query, b, t, kept.keys, n, x.shares, call.args.p);
}

// Scores and products of a tile, as they are.
void multiply_tile(const Call& call, const Scratch& x, const Tile& tile, const Kept& kept, int64_t begin, int64_t n) {
  const FlashShape& shape = call.shape;
  scores(call.p, n, tile.rows, shape.row, shape.key, x.q, kept.P + begin * shape.heads, shape.heads);
  scores(call.p, n, tile.values(), shape.row, shape.value, x.d_o, kept.dS + begin * shape.heads, shape.heads);
}

// P and dS of all keys, and d_q: in one sweep when L and delta are known, else in two.
void sweep(const Call& call, const Scratch& x, Tile& tile, const Kept& kept, const Query& query, int64_t b, int64_t t) {
  const Problem& p = call.p;
  const FlashShape& shape = call.shape;
  const int64_t n = kept.info[0];
  const bool has_sums = p.has_lse || p.has_row_sum, alone = n == 1 && !is_there(call.in.sink);
  const bool known = has_sums && p.has_o && !alone;
  if (has_sums) load_log_sums(call, x, b, t);
  if (p.has_o) multiply_outputs(call, x, kept, b, t);
  if (!known) {
    for (int64_t begin = 0; begin < n; begin += kTileKeys) {
      const int64_t count = least(kTileKeys, n - begin);
      tile.gather(b, query.first, kept.keys + begin, count, n - begin);
      multiply_tile(call, x, tile, kept, begin, count);
    }
    if (!has_sums) sum_scores(call, x, kept, n);
    if (!p.has_o) sum_products(call, x, kept, n);
    // One key has P = 1 whatever its score: its delta is its dP, so that dS is exactly 0.
    for (int64_t h = 0; h < p.H && alone; ++h) x.delta[h] = kept.dS[h];
  }
  if (is_there(call.args.d_lse))
    for (int64_t h = 0; h < p.H; ++h) x.delta[h] -= float_at(call.args.d_lse, b, t, h);
  for (int64_t i = 0; i < p.H * x.d_q_row; ++i) x.d_q[i] = 0;
  for (int64_t begin = 0; begin < n; begin += kTileKeys) {
    const int64_t count = least(kTileKeys, n - begin);
    if (known || p.wants_d_q) tile.gather(b, query.first, kept.keys + begin, count, n - begin);
    if (known) multiply_tile(call, x, tile, kept, begin, count);
    differentiate(call, x, kept, begin, count);
    if (p.wants_d_q)
      add_rows(p.H, count, shape.key, kept.dS + begin * shape.heads, shape.heads, tile.rows, shape.row, x.d_q, x.d_q_row);
  }
}

void query_task(void* arg, int64_t task, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const FlashShape& shape = call.shape;
  const int64_t row = call.first + task, b = row / p.T, t = row % p.T;
  const Scratch x(call, slot);
  const Kept kept = call.kept_of(task);
  Tile tile{p, call.in, shape, call.separate, x.rows};
  const Query query = query_at(p, call.in, b, t);
  const int64_t n = visible_keys(p, call.in, query, b, t, kept.keys, x.counts, x.list);
  kept.info[0] = n, kept.info[1] = query.first, kept.info[2] = b;
  for (int64_t h = 0; h < shape.heads; ++h) {
    x.m[h] = is_there(call.in.sink) && h < p.H ? float_at(call.in.sink, h) : -infinity();
    x.L[h] = infinity(), x.delta[h] = 0;
  }
  for (int64_t i = 0; i < p.H * x.d_q_row; ++i) x.d_q[i] = 0;
  if (query.used) {
    read_heads(p, call.in.q, &call.in.q_rope, b, t, p.K, shape.key, kept.rows, call.head_row);
    read_heads(p, call.args.d_o, nullptr, b, t, p.V, shape.value, kept.rows + shape.key, call.head_row);
    if (n > 0) {
      arrange_heads(p, kept.rows, call.head_row, shape.key, shape.heads, float(p.scale), x.q);
      arrange_heads(p, kept.rows + shape.key, call.head_row, shape.value, shape.heads, 1, x.d_o);
    }
    sweep(call, x, tile, kept, query, b, t);
    clear_dead(call, x, kept);
  }
  if (p.wants_d_q) store_d_q(call, x, b, t);
  if (p.wants_d_sink) store_terms(call, x, row);
  if (p.wants_p) store_shares(call, x, kept, query, b, t, n);
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
  const int64_t n = kept.info[0], first = kept.info[1], b = kept.info[2];
  const int64_t from = lower_bound(kept.keys, n, begin - first), to = lower_bound(kept.keys, n, end - first);
  if (from == to) return;
  const float *P = kept.P + from * shape.heads, *dS = kept.dS + from * shape.heads;
  const int64_t chunk = column / kChunkWidth;
  while (column < column_end) {
    const bool is_key = column < shape.key, has_value = p.latent && column < shape.value;
    const int64_t part_end = has_value ? shape.value : is_key ? shape.key : shape.key + shape.value;
    const int64_t width = least(kPanel, least(part_end, column_end) - column);
    const float *a = is_key ? dS : P, *q = kept.rows + column;
    const float *c = has_value ? P : nullptr, *d_o = kept.rows + shape.key + column;
    float* base = call.sum_row(chunk, b * p.S + first) + column % kChunkWidth;
    (width == kPanel ? add_panel<2> : add_panel<1>)(to - from, p.H, a, q, c, d_o, shape.heads, call.head_row,
                                                    kept.keys + from, base);
    column += width == kPanel ? kPanel : kLanes;
  }
}

int64_t ranges_of(const Problem& p) { return (p.S + kRangeKeys - 1) / kRangeKeys; }
int64_t sum_width(const Call& call) { return call.shape.key + (call.p.latent ? 0 : call.shape.value); }

void key_task(void* arg, int64_t task, int64_t) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const int64_t chunk = task % call.num_chunks, range = task / call.num_chunks % ranges_of(p);
  const int64_t b = call.first / p.T + task / call.num_chunks / ranges_of(p);
  const int64_t column = chunk * kChunkWidth, column_end = least(column + kChunkWidth, sum_width(call));
  for (int64_t i = 0; i < call.count; ++i) {
    const Kept kept = call.kept_of(i);
    if (kept.info[2] == b)
      add_query(call, kept, range * kRangeKeys, least((range + 1) * kRangeKeys, p.S), column, column_end);
  }
}

void clear_task(void* arg, int64_t task, int64_t) {
  const Call& call = *static_cast<const Call*>(arg);
  const int64_t begin = task * kRangeKeys, end = least(begin + kRangeKeys, call.p.B * call.p.S);
  for (int64_t chunk = 0; chunk < call.num_chunks; ++chunk)
    memset(call.sum_row(chunk, begin), 0, size_t(end - begin) * kChunkWidth * sizeof(float));
}

void store_task(void* arg, int64_t task, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const Args& args = call.args;
  float* row = Scratch(call, slot).q;  // as wide as a row, or H times as wide
  for (int64_t i = task * kRangeKeys; i < least((task + 1) * kRangeKeys, p.B * p.S); ++i) {
    const int64_t b = i / p.S, j = i % p.S;
    for (int64_t chunk = 0; chunk < call.num_chunks; ++chunk)
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
  Call call{p, args, in, shape, sizes.head_row, sizes.num_chunks, 0, 0, Tile::is_separate(p, in), sums, terms,
            piece.at, exec.workspace + plan.shared_bytes, sizes.kept_bytes, plan.slot_bytes};
  const int64_t key_rows = (p.B * p.S + kRangeKeys - 1) / kRangeKeys;
  if (p.wants_d_kv) parallel_tasks(exec, key_rows, plan.num_slots, clear_task, &call);
  for (int64_t first = 0; first < p.B * p.T; first += plan.values[kTokens]) {
    call.first = first, call.count = least(plan.values[kTokens], p.B * p.T - first);
    parallel_tasks(exec, call.count, plan.num_slots, query_task, &call);
    const int64_t items = (first + call.count - 1) / p.T - first / p.T + 1;
    if (p.wants_d_kv)
      parallel_tasks(exec, items * ranges_of(p) * call.num_chunks, plan.num_slots, key_task, &call);
  }
  if (p.wants_d_kv) parallel_tasks(exec, key_rows, plan.num_slots, store_task, &call);
  if (p.wants_d_sink) sum_sink(p, terms, args.d_sink);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::sparse_flash_attention
