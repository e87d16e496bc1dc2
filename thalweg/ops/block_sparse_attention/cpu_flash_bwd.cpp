// cpu_flash_bwd - block_sparse_attention, bwd, tiles of kept keys, five products a tile.
//
// Math      a tile of queries of one mask block walks the keys that its mask row keeps, kKeys at a time, transposed:
//           P = 2^(K Q^T - L),  dS = P o (V dO^T - delta),  dV += P dO,  dK += dS Q,  dQ += dS^T K
//           with L in units of log 2 and delta = <dO, o> - d_lse of each query; scale is multiplied in at the end
// Shapes    q [B T H K]  k [B S HK K]  v [B S HK V]  block_mask [N HM NQ NK]  o, d_o [B T H V]  lse [B T H]
// Takes     f32, bf16, f16; K and V up to 512; any block sizes, mask and strides
// Threads   a task is one key head of one sequence with all its query heads, and owns dK and dV of it. Where a sequence
//           has fewer than kTasks key heads, the query tiles are dealt out to several tasks with sums of their own,
//           which a second phase adds up in order
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
#include "thalweg/ops/block_sparse_attention/cpu_flash_bwd.h"

namespace thalweg::block_sparse_attention {
namespace {

struct FlashScratch : SlopeScratch {
  float* lines;                // [kLanes][pitch]: rows on their way to columns
  float *q_t, *q;              // Q^T scale log2(e): panels [K][kPanel]; Q: panels [rows][kPanel]
  float *d_o_t, *d_o;          // likewise with V
  float* o_t;                  // panel [V][kPanel]: kLanes columns of O^T
  float *k_rows, *k, *v_rows;  // [kKeys][pitch]; panels [kKeys][kPanel]; [kKeys][pitch]
  int64_t pitch;

  FlashScratch(const Problem& p, const Cut& cut, Carver* carver) : SlopeScratch(p, cut, carver) {
    pitch = round_up(p.K > p.V ? p.K : p.V, kLanes);
    lines = carver->floats(kLanes * pitch);
    q_t = carver->floats(rows * p.K), q = carver->floats(rows * q_row);
    d_o_t = carver->floats(rows * p.V), d_o = carver->floats(rows * o_row);
    o_t = carver->floats(kPanel * p.V);
    k_rows = carver->floats(kKeys * pitch), k = carver->floats(kKeys * q_row), v_rows = carver->floats(kKeys * pitch);
  }
};

bool is_finite(const float* x, int64_t n) {
  vf sum = zero();
  for (int64_t i = 0; i < n; i += kLanes) sum += load(x + i) - load(x + i);
  const float total = hsum(sum);
  return total == total;
}

struct Tile : SlopeTile {
  using Scratch = FlashScratch;
  static constexpr int64_t kQueries = 64;
  const Scratch& own;

  // Queries [r, r + kLanes) of a tensor as columns of `panels`; those that see nothing are 0.
  void columns_of(const thalweg_tensor& t, int64_t r, int64_t width, float factor, float* panels, int64_t column,
                  bool there) const {
    const int64_t rows = queries.rows - r < kLanes ? queries.rows - r : kLanes;
    read_rows(t, item, h, queries.t + r, rows, width, own.lines, own.pitch,
              [&](int64_t i) { return !there || is_dead(i - queries.t); });
    rows_to_columns(own.lines, own.pitch, rows, width, factor, panels, column);
  }
  // The rows that columns_of() read, as rows of panels.
  void rows_of(int64_t r, int64_t width, float* panels) const {
    for (int64_t i = 0; i < kLanes && r + i < queries.rows; ++i)
      row_to_panels_of<F32>(own.lines + i * own.pitch, width, panels + (r + i) * kPanel, x.rows * kPanel);
  }

  // Reads the queries, L and delta; returns the tile's part of d_sink.
  double start(const KeyTile&) const {
    const Problem& p = call.p;
    const Args& a = call.args;
    start_logs();
    for (int64_t r = 0; r < columns; r += kLanes) {
      columns_of(a.q, r, p.K, float(p.scale) * kLog2e, own.q_t, r, true);
      rows_of(r, p.K, own.q);
      columns_of(a.d_o, r, p.V, 1.f, own.d_o_t, r, p.has_d_o);
      rows_of(r, p.V, own.d_o);
      columns_of(a.o, r, p.V, 1.f, own.o_t, 0, p.has_d_o);
      // In the order of the product V dO^T: of a query that sees one key, whose o is v, the difference is exactly 0.
      const float* d_o = own.d_o_t + r / kPanel * p.V * kPanel + r % kPanel;
      vf delta = zero();
      for (int64_t c = 0; c < p.V; ++c) delta = fma(load(own.o_t + c * kPanel), load(d_o + c * kPanel), delta);
      store(x.delta + r, delta);
    }
    return start_sums();
  }

  void pack(const KeyTile& tile) const {
    const Problem& p = call.p;
    const Args& a = call.args;
    tile.each([&](int64_t row, int64_t key) __attribute__((always_inline)) {
      float* k = own.k_rows + row * own.pitch;
      for (int64_t i = p.K / kLanes * kLanes; i < p.K; i += kLanes) store(k + i, zero());
      read_row(a.k.dtype, element_at(a.k, item.batch, item.k_begin + key, hk), p.K, k);
      row_to_panels_of<F32>(k, p.K, own.k + row * kPanel, kKeys * kPanel);
      read_row(a.v.dtype, element_at(a.v, item.batch, item.k_begin + key, hk), p.V, own.v_rows + row * own.pitch);
    });
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
      if (!is_finite(own.k_rows + j * own.pitch, p.K)) return false;
    for (int64_t n = 0; n < p.K; n += kLanes)
      for (int64_t r = 0; r < queries.rows; ++r)
        if (!is_finite(own.q + n / kPanel * x.rows * kPanel + r * kPanel + n % kPanel, 1)) return false;
    for (int64_t n = 0; n < p.V; n += kLanes)
      for (int64_t r = 0; r < queries.rows; ++r)
        if (!is_finite(own.d_o + n / kPanel * x.rows * kPanel + r * kPanel + n % kPanel, 1)) return false;
    return true;
  }

  void step(const KeyTile& tile, const KeyTile&) const {
    const Problem& p = call.p;
    const Args& a = call.args;
    pack(tile);
    gemm_panels<false>(tile.keys, columns, p.K, own.k_rows, own.pitch, 1, own.q_t, p.K * kPanel, x.s, x.s_row);
    gemm_panels<false>(tile.keys, columns, p.V, own.v_rows, own.pitch, 1, own.d_o_t, p.V * kPanel, x.d_s, x.s_row);
    softmax_slope(tile.keys);
    if (p.causal && hide(tile) && !all_finite(tile.keys)) {
      auto at = [&](const float* panels, int64_t row, int64_t c) {
        return panels[c / kPanel * x.rows * kPanel + row * kPanel + c % kPanel];
      };
      return add_seen(
          tile, [&](int64_t r, int64_t c) { return at(own.q, r, c); },
          [&](int64_t r, int64_t c) { return at(own.d_o, r, c); },
          [&](int64_t row, int64_t c) { return own.k_rows[row * own.pitch + c]; });
    }
    if (is_there(a.d_v)) add_to_keys(tile, x.s, own.d_o, p.V, sums.d_v, sums.v_row);
    if (is_there(a.d_k)) add_to_keys(tile, x.d_s, own.q, p.K, sums.d_k, sums.k_row);
    if (is_there(a.d_q))
      gemm_panels<true>(queries.rows, p.K, tile.keys, x.d_s, 1, x.s_row, own.k, kKeys * kPanel, x.d_q, x.q_row);
  }
};

}  // namespace

namespace THALWEG_ISA {

void plan_flash_bwd(const Problem& p, Plan* plan) { plan_tiles<Tile>(p, plan); }

void cpu_flash_bwd(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  run_tiles<Tile>(p, plan, args, exec);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::block_sparse_attention
