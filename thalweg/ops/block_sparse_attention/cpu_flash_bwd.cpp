// cpu_flash_bwd - block_sparse_attention, bwd, tiles of kept keys, five products a tile.
//
// Math      a tile of queries of one mask block walks the keys that its mask row keeps, kKeys at a time, transposed:
//           P = 2^(K Q^T - L),  dS = P o (V dO^T - delta),  dV += P dO,  dK += dS Q,  dQ += dS^T K
//           with L in units of log 2 and delta = <dO, o> - d_lse of each query; scale is multiplied in at the end
// Shapes    q [B T H K]  k [B S HK K]  v [B S HK V]  block_mask [N HM NQ NK]  o, d_o [B T H V]  lse [B T H]
// Takes     f32, bf16, f16; K and V up to 512; any block sizes, mask and strides
// Threads   a task is one key head of one sequence with all its query heads, and owns dK and dV of it. Where a sequence
//           has fewer than kTasks key heads, the query tiles are dealt out to several tasks with sums of their own, which a
//           second phase adds up in order
// Vectors   queries along the lanes of P and dS; K and V along those of the gradients
// Tile      up to 64 queries x 96 keys, keys from any blocks. dK and dV gather straight into the rows of their keys
// Scratch   Q, dO and dQ of the tile, K and V, P and dS: 430 KB at K = V = 128, meant for the L2; dK and dV of the key
//           head as float32, which lie in the L3 or in memory: a tile reads and writes 200 KB of them for 8 MFLOP
// Numerics  float32 throughout. A query that sees nothing has L = +inf, so P = 0 without a branch
// Traps     P = 0 does not silence a NaN: where causality hides a key, and for queries that see nothing, dS is chosen
//           to be 0; tiles across the diagonal with numbers that are not finite go pair by pair
// Measured  one thread of a busy Zen 3, CPU time beside an FMA loop of the same process, K = V = 128: predicted 0.7 of
//           the peak (five products at 0.85, tiles half as high as the forward's). Dense f32, blocks of 128: 0.62.
//           Random blocks of 16 x 16, a quarter kept: 0.31
#include "thalweg/ops/block_sparse_attention/cpu_flash.h"

namespace thalweg::block_sparse_attention {
namespace {

using Args = thalweg_block_sparse_attention_bwd_args;

constexpr int64_t kQueries = 64;
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

struct Scratch {
  float* lines;                // [kLanes][pitch]: rows on their way to columns
  float *q_t, *q;              // Q^T scale log2(e): panels [K][kPanel]; Q: panels [rows][kPanel]
  float *d_o_t, *d_o;          // likewise with V
  float* o_t;                  // panel [V][kPanel]: kLanes columns of O^T
  float *s, *d_s;              // [kKeys][score_row]: scores, then P; V dO^T, then dS
  float *k_rows, *k, *v_rows;  // [kKeys][pitch]; panels [kKeys][kPanel]; [kKeys][pitch]
  float* d_q;                  // [rows][K in panels]
  float *L, *delta;            // [rows]
  int64_t pitch, rows, s_row, q_row;

  Scratch(const Problem& p, const Cut& cut, Carver* carver) {
    pitch = round_up(p.K > p.V ? p.K : p.V, kLanes);
    rows = round_up(cut.rows, kPanel);
    s_row = score_row(cut.rows);
    q_row = round_up(p.K, kPanel);
    const int64_t o_row = round_up(p.V, kPanel);
    lines = carver->floats(kLanes * pitch);
    q_t = carver->floats(rows * p.K), q = carver->floats(rows * q_row);
    d_o_t = carver->floats(rows * p.V), d_o = carver->floats(rows * o_row);
    o_t = carver->floats(kPanel * p.V);
    s = carver->floats(kKeys * s_row), d_s = carver->floats(kKeys * s_row);
    k_rows = carver->floats(kKeys * pitch), k = carver->floats(kKeys * q_row), v_rows = carver->floats(kKeys * pitch);
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

bool is_finite(const float* x, int64_t n) {
  vf sum = zero();
  for (int64_t i = 0; i < n; i += kLanes) sum += load(x + i) - load(x + i);
  const float total = hsum(sum);
  return total == total;
}

// One tile of queries of one head.
struct Tile {
  const Call& call;
  const Item& item;
  Queries queries;
  int64_t h, hk;
  const Scratch& x;
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

  // Queries [r, r + kLanes) of a tensor as columns of `panels`; those that see nothing are 0.
  void columns_of(const thalweg_tensor& t, int64_t r, int64_t width, float factor, float* panels, int64_t column,
                  bool there) const {
    const int64_t rows = queries.rows - r < kLanes ? queries.rows - r : kLanes;
    read_rows(t, item, h, queries.t + r, rows, width, x.lines, x.pitch,
              [&](int64_t i) { return !there || is_dead(i - queries.t); });
    rows_to_columns(x.lines, x.pitch, rows, width, factor, panels, column);
  }
  // The rows that columns_of() read, as rows of panels.
  void rows_of(int64_t r, int64_t width, float* panels) const {
    for (int64_t i = 0; i < kLanes && r + i < queries.rows; ++i)
      row_to_panels_of<F32>(x.lines + i * x.pitch, width, panels + (r + i) * kPanel, x.rows * kPanel);
  }

  // Reads the queries, L and delta; returns the tile's part of d_sink.
  double start() const {
    const Problem& p = call.p;
    const Args& a = call.args;
    double d_sink = 0;
    float z = 0;
    if (is_there(a.d_sink)) read_strided(a.sink.dtype, element_at(a.sink, h), 0, 1, &z);
    for (int64_t r = 0; r < x.rows; ++r) x.L[r] = r < queries.rows ? log_sum(item.q_begin + queries.t + r) : infinity();
    for (int64_t r = 0; r < columns; r += kLanes) {
      columns_of(a.q, r, p.K, float(p.scale) * kLog2e, x.q_t, r, true);
      rows_of(r, p.K, x.q);
      columns_of(a.d_o, r, p.V, 1.f, x.d_o_t, r, p.has_d_o);
      rows_of(r, p.V, x.d_o);
      columns_of(a.o, r, p.V, 1.f, x.o_t, 0, p.has_d_o);
      // In the order of the product V dO^T: of a query that sees one key, whose o is v, the difference is exactly 0.
      const float* d_o = x.d_o_t + r / kPanel * p.V * kPanel + r % kPanel;
      vf delta = zero();
      for (int64_t c = 0; c < p.V; ++c) delta = fma(load(x.o_t + c * kPanel), load(d_o + c * kPanel), delta);
      store(x.delta + r, delta);
    }
    for (int64_t r = 0; r < queries.rows; ++r) {
      if (is_dead(r)) continue;
      const int64_t t = item.q_begin + queries.t + r;
      if (is_there(a.d_lse)) x.delta[r] -= *reinterpret_cast<float*>(element_at(a.d_lse, item.batch, t, h));
      if (is_there(a.d_sink)) d_sink -= __builtin_exp2(double(z) / kLn2 - double(x.L[r])) * double(x.delta[r]);
    }
    memset(x.d_q, 0, size_t(queries.rows * x.q_row) * 4);
    return d_sink;
  }

  void pack(const KeyTile& tile) const {
    const Problem& p = call.p;
    const Args& a = call.args;
    tile.each([&](int64_t row, int64_t key) __attribute__((always_inline)) {
      float* k = x.k_rows + row * x.pitch;
      for (int64_t i = p.K / kLanes * kLanes; i < p.K; i += kLanes) store(k + i, zero());
      read_row(a.k.dtype, element_at(a.k, item.batch, item.k_begin + key, hk), p.K, k);
      row_to_panels_of<F32>(k, p.K, x.k + row * kPanel, kKeys * kPanel);
      read_row(a.v.dtype, element_at(a.v, item.batch, item.k_begin + key, hk), p.V, x.v_rows + row * x.pitch);
    });
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

  // sum[key] += weights x rows, run by run: the rows of a run's keys lie side by side.
  [[gnu::always_inline]] void add_to_keys(const KeyTile& tile, const float* weights, const float* rows, int64_t width,
                                          float* sum, int64_t sum_row) const {
    for (int64_t i = 0; i < tile.num_runs; ++i) {
      const KeyTile::Run& run = tile.runs[i];
      gemm_panels<true>(run.count, width, queries.rows, weights + run.first * x.s_row, x.s_row, 1, rows,
                        x.rows * kPanel, sum + run.key * sum_row, sum_row);
    }
  }

  bool all_finite(int64_t keys) const {
    const Problem& p = call.p;
    for (int64_t j = 0; j < keys; ++j)
      if (!is_finite(x.k_rows + j * x.pitch, p.K)) return false;
    for (int64_t n = 0; n < p.K; n += kLanes)
      for (int64_t r = 0; r < queries.rows; ++r)
        if (!is_finite(x.q + n / kPanel * x.rows * kPanel + r * kPanel + n % kPanel, 1)) return false;
    for (int64_t n = 0; n < p.V; n += kLanes)
      for (int64_t r = 0; r < queries.rows; ++r)
        if (!is_finite(x.d_o + n / kPanel * x.rows * kPanel + r * kPanel + n % kPanel, 1)) return false;
    return true;
  }

  // The three sums over the pairs that are seen, where something hidden is not finite.
  void add_seen(const KeyTile& tile) const {
    const Problem& p = call.p;
    auto at = [](const float* panels, int64_t rows, int64_t row, int64_t c) {
      return panels[c / kPanel * rows * kPanel + row * kPanel + c % kPanel];
    };
    tile.each([&](int64_t row, int64_t key) {
      for (int64_t r = blind_queries(p, item, queries, key); r < queries.rows; ++r) {
        const float P = x.s[row * x.s_row + r], d_s = x.d_s[row * x.s_row + r];
        for (int64_t c = 0; c < p.V; ++c) sums.d_v[key * sums.v_row + c] += P * at(x.d_o, x.rows, r, c);
        for (int64_t c = 0; c < p.K; ++c) sums.d_k[key * sums.k_row + c] += d_s * at(x.q, x.rows, r, c);
        for (int64_t c = 0; c < p.K; ++c) x.d_q[r * x.q_row + c] += d_s * x.k_rows[row * x.pitch + c];
      }
    });
  }

  void step(const KeyTile& tile) const {
    const Problem& p = call.p;
    const Args& a = call.args;
    pack(tile);
    gemm_panels<false>(tile.keys, columns, p.K, x.k_rows, x.pitch, 1, x.q_t, p.K * kPanel, x.s, x.s_row);
    gemm_panels<false>(tile.keys, columns, p.V, x.v_rows, x.pitch, 1, x.d_o_t, p.V * kPanel, x.d_s, x.s_row);
    softmax_slope(tile.keys);
    if (p.causal && hide(tile) && !all_finite(tile.keys)) return add_seen(tile);
    if (is_there(a.d_v)) add_to_keys(tile, x.s, x.d_o, p.V, sums.d_v, sums.v_row);
    if (is_there(a.d_k)) add_to_keys(tile, x.d_s, x.q, p.K, sums.d_k, sums.k_row);
    if (is_there(a.d_q))
      gemm_panels<true>(queries.rows, p.K, tile.keys, x.d_s, 1, x.s_row, x.k, kKeys * kPanel, x.d_q, x.q_row);
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

void head_task(void* arg, int64_t index, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const int64_t share = index % call.shares, hk = index / call.shares % p.HK, n = index / call.shares / p.HK;
  const int64_t G = p.H / p.HK;
  const Item item = item_at(p, call.args, n);
  Carver carver{call.exec.workspace + call.plan.shared_bytes + slot * call.plan.slot_bytes};
  const Scratch x(p, call.cut, &carver);
  const Sums sums = call.shares > 1 ? call.shared_sums(index) : Sums(p, &carver);
  memset(sums.d_k, 0, size_t(item.k_len * sums.k_row) * 4);
  memset(sums.d_v, 0, size_t(item.k_len * sums.v_row) * 4);
  for (int64_t h = hk * G; h < (hk + 1) * G; ++h) {
    const HeadMask mask = head_mask(p, call.args.block_mask, n, h);
    double d_sink = 0;
    for (int64_t i = share; i < call.tiles; i += call.shares) {
      const Queries queries = queries_at(p, item, call.cut, i);
      if (queries.rows == 0) continue;
      const Tile tile{call, item, queries, h, hk, x, sums, round_up(queries.rows, kLanes)};
      Walk walk = keys_of(p, mask, item, queries.t, queries.rows);
      KeyTile keys;
      d_sink += tile.start();
      while (keys.take(&walk)) tile.step(keys);
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

}  // namespace

namespace THALWEG_ISA {

void plan_flash_bwd(const Problem& p, Plan* plan) {
  const Cut cut = cut_blocks(p, kQueries);
  const int64_t shares = num_shares(p, cut);
  Carver slot{nullptr}, sums{nullptr};
  Scratch(p, cut, &slot);
  Sums(p, &sums);
  plan->shared_bytes = round_up(p.N * p.H * shares * 8, 64) + (shares > 1 ? p.N * p.HK * shares * sums.used : 0);
  plan->slot_bytes = slot.used + (shares > 1 ? 0 : sums.used);
  const int64_t tasks = p.N * p.HK * shares;
  if (plan->num_slots > tasks) plan->num_slots = tasks > 0 ? tasks : 1;
}

void cpu_flash_bwd(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  const Cut cut = cut_blocks(p, kQueries);
  Call call{p, plan, args, exec, cut, num_tiles(p, cut), num_shares(p, cut)};
  const int64_t slots = plan.num_slots, heads = p.N * p.HK;
  parallel_tasks(exec, num_rests(p), slots, rest_task, &call);
  parallel_tasks(exec, heads * call.shares, slots, head_task, &call);
  if (call.shares > 1) parallel_tasks(exec, heads * ceil_div(p.longest_k, kSumRows), slots, sum_task, &call);
  write_sink(call);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::block_sparse_attention
