// cpu_flash_fwd - sparse flash attention, forward, gathered keys and an online softmax.
//
// Math     the list sorted, each visible key once with its multiplicity r; per tile of keys, all heads at once:
//          S = K (c Q)^T    m' = max(m, S)    P = r exp(S - m')    l = l exp(m - m') + sum P    O = O exp(m - m') + P^T V
//          o = O / l; p needs a second sweep, with the last m and l
// Shapes   q [B T H K] k [B S K] v [B S V] q_rope [B T H KR] k_rope [B S KR] indices [B T E] o [B T H V]
// Takes    f32, bf16, f16 of any strides; any H, K, KR, V, E and block
// Threads  one task a query; tasks share nothing
// Vectors  scores: heads along the lanes, so that maxima and sums of a row need no shuffles; of up to half a vector of
//          heads along the key instead. Outputs: along the value
// Tile     64 keys, gathered once as float32 for both products and all heads; gemm.h's register tiles
// Scratch  arranged queries [K + KR][H], the tile [64][row], scores [64][H], O [H][V], the list: for 16 heads of 576 and
//          512 about 260 KiB, meant for the L2
// Numerics float32; the first m is the sink or -inf, an m of -inf counts as 0 in exponents, so that none is above 0 or
//          inf - inf. l = 0 is an empty row
// Traps    no mask: a list holds visible keys only, and rows that are not in it are never loaded, NaN or not. Lanes past H
//          hold numbers that nobody stores
// Measured Zen 3, one thread, processor time on a loaded machine, K 512, KR 64, E 2048 of 4096 keys, bf16: 52 GFLOP/s with 16
//          heads (0.52 of the FMA peak), 61 with 128 (0.66), 24 with 4 heads of separate f16 values (0.26: a key's two
//          rows are 2 KiB for 8 K FLOPs). Rows asked for 6 keys ahead: 36.7 -> 21.8 ms with 16 heads, where the gather,
//          waiting for memory, had taken 0.41 of the time
#include "thalweg/ops/sparse_flash_attention/cpu_flash_tiles.h"

namespace thalweg::sparse_flash_attention {
namespace {

using Args = thalweg_sparse_flash_attention_fwd_args;

struct Call {
  const Problem& p;
  const Plan& plan;
  const Args& args;
  const Inputs& in;
  const Exec& exec;
};

struct Scratch {
  FlashShape shape;
  int64_t o_row;
  int32_t *keys, *counts, *list;
  float *staged, *q, *rows, *s, *o, *m, *l, *shrink;

  Scratch(const Problem& p, char* memory) : shape(flash_shape(p, kLanes)), o_row(shape.value + 16) {
    Piece piece{memory};
    keys = piece.take<int32_t>(shape.capacity);
    counts = piece.take<int32_t>(shape.capacity);
    list = piece.take<int32_t>(2 * p.E);
    q = piece.take<float>(shape.heads * shape.key);
    rows = piece.take<float>(kTileKeys * shape.row);
    s = piece.take<float>(kTileKeys * shape.heads);
    o = piece.take<float>(p.H * (shape.key > o_row ? shape.key : o_row));
    m = piece.take<float>(shape.heads);
    l = piece.take<float>(shape.heads);
    shrink = piece.take<float>(shape.heads);
    staged = o;  // queries before they are arranged
  }
};

// The row of no key yet: m and l of the sink alone.
void start(const Problem& p, const Inputs& in, Scratch& x) {
  for (int64_t h = 0; h < x.shape.heads; ++h) {
    x.m[h] = is_there(in.sink) && h < p.H ? float_at(in.sink, h) : -infinity();
    x.l[h] = x.m[h] == -infinity() ? 0.f : 1.f;
  }
  for (int64_t i = 0; i < p.H * x.o_row; ++i) x.o[i] = 0;
}

// Scores to probabilities of the tile, relative to the maxima so far.
[[gnu::noinline]] void soften(const Scratch& x, const int32_t* counts, int64_t n) {
  const int64_t heads = x.shape.heads;
  for (int64_t h = 0; h < heads; h += kLanes) {
    const vf old = load(x.m + h);
    vf m = old;
    for (int64_t i = 0; i < n; ++i) m = max(load(x.s + i * heads + h), m);
    const vf base = where_greater(m, set1(-infinity()), m, m == m ? zero() : m);
    const vf shrink = exp(old - base);
    vf sum = load(x.l + h) * shrink;
    for (int64_t i = 0; i < n; ++i) {
      const vf P = set1(float(counts[i])) * exp(load(x.s + i * heads + h) - base);
      store(x.s + i * heads + h, P);
      sum += P;
    }
    store(x.m + h, m), store(x.l + h, sum), store(x.shrink + h, shrink);
  }
}

void shrink_outputs(const Problem& p, const Scratch& x) {
  for (int64_t h = 0; h < p.H; ++h) {
    if (x.shrink[h] == 1) continue;
    const vf factor = set1(x.shrink[h]);
    for (int64_t c = 0; c < x.shape.value; c += kLanes) store(x.o + h * x.o_row + c, factor * load(x.o + h * x.o_row + c));
  }
}

void store_outputs(const Call& call, const Scratch& x, int64_t b, int64_t t, bool used) {
  const Problem& p = call.p;
  const Args& args = call.args;
  for (int64_t h = 0; h < p.H; ++h) {
    const float l = used ? x.l[h] : 0, m = l == 0 ? 0 : x.m[h];
    float* o = x.o + h * x.o_row;
    const vf factor = set1(l == 0 ? 0.f : 1 / l);
    for (int64_t c = 0; c < x.shape.value; c += kLanes) store(o + c, factor * load(o + c));
    write_row(p.dtype, element_at(args.o, b, t, h), p.V, o);
    put_statistic(args.lse, b, t, h, l == 0 ? -infinity() : m + __builtin_logf(l));
    put_statistic(args.row_max, b, t, h, m);
    put_statistic(args.row_sum, b, t, h, l);
  }
}

// p, from scores that are computed once more. The list's memory of multiplicities takes the shares.
void store_shares(const Call& call, const Scratch& x, Tile& tile, const Query& query, int64_t b, int64_t t, int64_t n) {
  const Problem& p = call.p;
  float* shares = reinterpret_cast<float*>(x.counts);
  for (int64_t h = 0; h < x.shape.heads; ++h) x.shrink[h] = h < p.H && x.l[h] != 0 ? 1 / (x.l[h] * float(p.H)) : 0;
  for (int64_t begin = 0; begin < n; begin += kTileKeys) {
    const int64_t count = least(kTileKeys, n - begin);
    tile.gather(b, query.first, x.keys + begin, count, n - begin);
    scores(p, count, tile.rows, x.shape.row, x.shape.key, x.q, x.s, x.shape.heads);
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

void query_task(void* arg, int64_t task, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const int64_t b = task / p.T, t = task % p.T;
  Scratch x(p, call.exec.workspace + slot * call.plan.slot_bytes);
  Tile tile{p, call.in, x.shape, Tile::is_separate(p, call.in), x.rows};
  const Query query = query_at(p, call.in, b, t);
  const int64_t n = visible_keys(p, call.in, query, b, t, x.keys, x.counts, x.list);
  if (n > 0) {
    read_heads(p, call.in.q, &call.in.q_rope, b, t, p.K, x.shape.key, x.staged, x.shape.key);
    arrange_heads(p, x.staged, x.shape.key, x.shape.key, x.shape.heads, float(p.scale), x.q);
  }
  start(p, call.in, x);
  for (int64_t begin = 0; begin < n; begin += kTileKeys) {
    const int64_t count = least(kTileKeys, n - begin);
    tile.gather(b, query.first, x.keys + begin, count, n - begin);
    scores(p, count, tile.rows, x.shape.row, x.shape.key, x.q, x.s, x.shape.heads);
    soften(x, x.counts + begin, count);
    shrink_outputs(p, x);
    add_rows(p.H, count, x.shape.value, x.s, x.shape.heads, tile.values(), x.shape.row, x.o, x.o_row);
  }
  store_outputs(call, x, b, t, query.used);
  if (p.wants_p) store_shares(call, x, tile, query, b, t, n);
}

}  // namespace

namespace THALWEG_ISA {

void cpu_flash_fwd(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  const Inputs in = inputs_of(args);
  Call call{p, plan, args, in, exec};
  parallel_tasks(exec, p.B * p.T, plan.num_slots, query_task, &call);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::sparse_flash_attention
