// What the backward rows share: sums of a key head, the state of a tile of queries, the slope of the softmax, and the
// tasks. For files compiled per instruction set.
#ifndef THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CPU_FLASH_BWD_H
#define THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CPU_FLASH_BWD_H

#include "thalweg/ops/block_sparse_attention/cpu_flash.h"

namespace thalweg::block_sparse_attention {
namespace {

using Args = thalweg_block_sparse_attention_bwd_args;

constexpr int64_t kTasks = 8;     // fewer key heads than this are shared out
constexpr int64_t kSumRows = 64;  // keys of a task that adds up

// How many tasks share a key head; the same for any number of threads and sequences, and in a size query.
int64_t num_shares(const Problem& p, const Cut& cut) {
  const int64_t tiles = ceil_div(p.T, p.block_q) * cut.pieces, shares = ceil_div(kTasks, p.HK);
  return shares < tiles ? shares : tiles > 0 ? tiles : 1;
}

// dK [keys][k_row] and dV [keys][v_row] of a key head.
struct Sums {
  float *d_k, *d_v;
  int64_t k_row, v_row;
  Sums(const Problem& p, Carver* carver) {
    k_row = round_up(p.K, kPanel), v_row = round_up(p.V, kPanel);
    d_k = carver->floats(p.longest_k * k_row);
    d_v = carver->floats(p.longest_k * v_row);
  }
};

// The part of a row's Scratch that is the same in all.
struct SlopeScratch {
  float *s, *d_s;                     // [kKeys][s_row]: scores in units of log 2, then P; V dO^T, then dS
  float* d_q;                         // [rows][q_row]
  float *L, *delta;                   // [rows]
  int64_t rows, s_row, q_row, o_row;  // rows: queries of a tile at most, in whole panels

  SlopeScratch(const Problem& p, const Cut& cut, Carver* carver) {
    rows = round_up(cut.rows, kPanel);
    s_row = score_row(cut.rows);
    q_row = round_up(p.K, kPanel), o_row = round_up(p.V, kPanel);
    s = carver->floats(kKeys * s_row), d_s = carver->floats(kKeys * s_row);
    d_q = carver->floats(rows * q_row);
    L = carver->floats(rows), delta = carver->floats(rows);
  }
};

struct Call {
  const Problem& p;
  const Plan& plan;
  const Args& args;
  const Exec& exec;
  Cut cut;
  int64_t tiles, shares;

  double* sink_parts() const { return reinterpret_cast<double*>(exec.workspace); }  // [N H shares]
  // The sums of a task where several share a key head.
  Sums shared_sums(int64_t task) const {
    Carver count{nullptr};
    Sums(p, &count);
    Carver carver{exec.workspace + round_up(p.N * p.H * shares * 8, 64) + task * count.used};
    return Sums(p, &carver);
  }
};

// One tile of queries of one head.
struct SlopeTile {
  const Call& call;
  const Item& item;
  Queries queries;
  int64_t h, hk;
  const SlopeScratch& x;
  const Sums& sums;
  int64_t columns;  // queries in whole vectors

  // L in units of log 2, +inf where the query sees nothing.
  float log_sum(int64_t t) const {
    const Args& a = call.args;
    auto get = [&](const thalweg_tensor& from) {
      return *reinterpret_cast<float*>(element_at(from, item.batch, t, h));
    };
    double L;
    if (is_there(a.lse)) {
      L = double(get(a.lse));
    } else {
      const double l = double(get(a.row_sum));
      L = l == 0 ? __builtin_inf() : double(get(a.row_max)) + __builtin_log(l);
    }
    return L - L == 0 ? float(L / kLn2) : infinity();
  }
  bool is_dead(int64_t r) const { return x.L[r] == infinity(); }

  void start_logs() const {
    for (int64_t r = 0; r < x.rows; ++r) x.L[r] = r < queries.rows ? log_sum(item.q_begin + queries.t + r) : infinity();
  }

  // Once delta holds <dO, o>: what is left of it, and zeros. Returns the tile's part of d_sink.
  double start_sums() const {
    const Args& a = call.args;
    double d_sink = 0;
    float z = 0;
    if (is_there(a.d_sink)) read_strided(a.sink.dtype, element_at(a.sink, h), 0, 1, &z);
    for (int64_t r = 0; r < queries.rows; ++r) {
      if (is_dead(r)) continue;
      const int64_t t = item.q_begin + queries.t + r;
      if (is_there(a.d_lse)) x.delta[r] -= *reinterpret_cast<float*>(element_at(a.d_lse, item.batch, t, h));
      if (is_there(a.d_sink)) d_sink -= __builtin_exp2(double(z) / kLn2 - double(x.L[r])) * double(x.delta[r]);
    }
    memset(x.d_q, 0, size_t(columns * x.q_row) * 4);
    return d_sink;
  }

  // Scores become P, V dO^T becomes dS.
  void softmax_slope(int64_t keys) const {
    for (int64_t c = 0; c < columns; c += kLanes) {
      const vf L = load(x.L + c), delta = load(x.delta + c);
      for (int64_t j = 0; j < keys; ++j) {
        float *s = x.s + j * x.s_row + c, *d_s = x.d_s + j * x.s_row + c;
        const vf p = exp2_nonpositive(min(set1(128.f), load(s) - L));  // above 0 only for an L of other inputs
        const vf slope = p * (load(d_s) - delta);
        store(s, where_greater(set1(infinity()), L, p, zero()));
        store(d_s, where_greater(set1(infinity()), L, slope, zero()));
      }
    }
  }

  // Queries before a key give it nothing. True when there are any.
  bool hide(const KeyTile& tile) const {
    bool any = false;
    tile.each([&](int64_t row, int64_t key) __attribute__((always_inline)) {
      const int64_t blind = blind_queries(call.p, item, queries, key);
      if (blind == 0) return;
      any = true;
      fill_first(x.s + row * x.s_row, blind, columns, 0.f);
      fill_first(x.d_s + row * x.s_row, blind, columns, 0.f);
    });
    return any;
  }

  // The three sums over the pairs that are seen, where something hidden is not finite: q(r, c), d_o(r, c), k(row, c).
  template <class Query, class Gradient, class Key>
  [[gnu::always_inline]] void add_seen(const KeyTile& tile, Query&& q, Gradient&& d_o, Key&& k) const {
    const Problem& p = call.p;
    tile.each([&](int64_t row, int64_t key) __attribute__((always_inline)) {
      for (int64_t r = blind_queries(p, item, queries, key); r < queries.rows; ++r) {
        const float P = x.s[row * x.s_row + r], d_s = x.d_s[row * x.s_row + r];
        for (int64_t c = 0; c < p.V; ++c) sums.d_v[key * sums.v_row + c] += P * d_o(r, c);
        for (int64_t c = 0; c < p.K; ++c) sums.d_k[key * sums.k_row + c] += d_s * q(r, c);
        for (int64_t c = 0; c < p.K; ++c) x.d_q[r * x.q_row + c] += d_s * k(row, c);
      }
    });
  }

  void finish() const {
    const Problem& p = call.p;
    const Args& a = call.args;
    const vf scale = set1(float(p.scale));
    for (int64_t r = 0; r < queries.rows && is_there(a.d_q); ++r) {
      float* row = x.d_q + r * x.q_row;
      for (int64_t c = 0; c < p.K; c += kLanes) store(row + c, is_dead(r) ? zero() : load(row + c) * scale);
      write_row(a.d_q.dtype, element_at(a.d_q, item.batch, item.q_begin + queries.t + r, h), p.K, row);
    }
  }
};

// Keys [begin, end) of the gradient of k or v, from the sums of `shares` tasks `share` floats apart.
void write_keys(const thalweg_tensor& t, const Item& item, int64_t hk, int64_t begin, int64_t end, int64_t width,
                float factor, float* sum, int64_t sum_row, int64_t shares, int64_t share) {
  if (!is_there(t)) return;
  for (int64_t key = begin; key < end; ++key) {
    float* row = sum + key * sum_row;
    for (int64_t c = 0; c < width; c += kLanes) {
      vf total = load(row + c);
      for (int64_t i = 1; i < shares; ++i) total += load(row + i * share + c);
      store(row + c, total * set1(factor));
    }
    write_row(t.dtype, element_at(t, item.batch, item.k_begin + key, hk), width, row);
  }
}
void write_keys(const Call& call, const Item& item, int64_t hk, int64_t begin, int64_t end, const Sums& sums,
                int64_t share) {
  const Problem& p = call.p;
  write_keys(call.args.d_k, item, hk, begin, end, p.K, float(p.scale), sums.d_k, sums.k_row, call.shares, share);
  write_keys(call.args.d_v, item, hk, begin, end, p.V, 1.f, sums.d_v, sums.v_row, call.shares, share);
}

// Tile is a SlopeTile with its own Scratch, start() with the first tile of keys, and step() over a tile with the next
// one in sight, which holds no key at the end.
template <class Tile>
void head_task(void* arg, int64_t index, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const int64_t share = index % call.shares, hk = index / call.shares % p.HK, n = index / call.shares / p.HK;
  const int64_t G = p.H / p.HK;
  const Item item = item_at(p, call.args, n);
  Carver carver{call.exec.workspace + call.plan.shared_bytes + slot * call.plan.slot_bytes};
  const typename Tile::Scratch x(p, call.cut, &carver);
  const Sums sums = call.shares > 1 ? call.shared_sums(index) : Sums(p, &carver);
  memset(sums.d_k, 0, size_t(item.k_len * sums.k_row) * 4);
  memset(sums.d_v, 0, size_t(item.k_len * sums.v_row) * 4);
  for (int64_t h = hk * G; h < (hk + 1) * G; ++h) {
    const HeadMask mask = head_mask(p, call.args.block_mask, n, h);
    double d_sink = 0;
    for (int64_t i = share; i < call.tiles; i += call.shares) {
      const Queries queries = queries_at(p, item, call.cut, i);
      if (queries.rows == 0) continue;
      const Tile tile{{call, item, queries, h, hk, x, sums, round_up(queries.rows, kLanes)}, x};
      Walk walk = keys_of(p, mask, item, queries.t, queries.rows);
      KeyTile keys[2];  // one at work, and the one after it
      keys[0].take(&walk);
      d_sink += tile.start(keys[0]);
      for (int64_t at = 0; keys[at].keys > 0; at = 1 - at) {
        keys[1 - at].take(&walk);
        tile.step(keys[at], keys[1 - at]);
      }
      tile.finish();
    }
    call.sink_parts()[(n * p.H + h) * call.shares + share] = d_sink;
  }
  if (call.shares == 1) write_keys(call, item, hk, 0, item.k_len, sums, 0);
}

// Adds up kSumRows keys of a head that several tasks shared.
void sum_task(void* arg, int64_t index, int64_t) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const int64_t chunks = ceil_div(p.longest_k, kSumRows), begin = index % chunks * kSumRows, head = index / chunks;
  const Item item = item_at(p, call.args, head / p.HK);
  const Sums sums = call.shared_sums(head * call.shares), next = call.shared_sums(head * call.shares + 1);
  const int64_t end = begin + kSumRows < item.k_len ? begin + kSumRows : item.k_len;
  write_keys(call, item, head % p.HK, begin, end, sums, next.d_k - sums.d_k);
}

void rest_task(void* arg, int64_t i, int64_t) {
  const Call& call = *static_cast<const Call*>(arg);
  const Rest r = rest_at(call.p, call.args, i);
  clear_rows(call.args.d_q, r.batch, r.q_begin, r.q_end);
  clear_rows(call.args.d_k, r.batch, r.k_begin, r.k_end);
  clear_rows(call.args.d_v, r.batch, r.k_begin, r.k_end);
}

void write_sink(const Call& call) {
  const thalweg_tensor& t = call.args.d_sink;
  const int64_t H = call.p.H, N = call.p.N;
  for (int64_t h = 0; h < H && is_there(t); ++h) {
    double sum = 0;
    for (int64_t n = 0; n < N; ++n)
      for (int64_t i = 0; i < call.shares; ++i) sum += call.sink_parts()[(n * H + h) * call.shares + i];
    const float rounded = float(sum);
    write_strided(t.dtype, element_at(t, h), 0, 1, &rounded);
  }
}

template <class Tile>
void plan_tiles(const Problem& p, Plan* plan) {
  const Cut cut = cut_blocks(p, Tile::kQueries);
  const int64_t shares = num_shares(p, cut);
  Carver slot{nullptr}, sums{nullptr};
  typename Tile::Scratch(p, cut, &slot);
  Sums(p, &sums);
  plan->shared_bytes = round_up(p.N * p.H * shares * 8, 64) + (shares > 1 ? p.N * p.HK * shares * sums.used : 0);
  plan->slot_bytes = slot.used + (shares > 1 ? 0 : sums.used);
  const int64_t tasks = p.N * p.HK * shares;
  if (plan->num_slots > tasks) plan->num_slots = tasks > 0 ? tasks : 1;
}

template <class Tile>
void run_tiles(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  const Cut cut = cut_blocks(p, Tile::kQueries);
  Call call{p, plan, args, exec, cut, num_tiles(p, cut), num_shares(p, cut)};
  const int64_t slots = plan.num_slots, heads = p.N * p.HK;
  parallel_tasks(exec, num_rests(p), slots, rest_task, &call);
  parallel_tasks(exec, heads * call.shares, slots, head_task<Tile>, &call);
  if (call.shares > 1) parallel_tasks(exec, heads * ceil_div(p.longest_k, kSumRows), slots, sum_task, &call);
  write_sink(call);
}

}  // namespace
}  // namespace thalweg::block_sparse_attention
#endif
