// cpu_chunk_fwd: Kimi delta attention, forward, chunked, compiled once per instruction set.
//
// Math     for each chunk of C tokens, S the state that enters it, D_ij [K] = exp(g_{j+1} + ... + g_i),
//          e_i [K] = exp(g_0 + ... + g_i), d_j = D_{C-1,j}; products of vectors are by channel:
//            KK_ij = dot(k_i, D_ij k_j), i > j;  QK_ij = dot(q_i, D_ij k_j), i >= j              (q holds the scale)
//            u_i = beta_i (v_i - S^T (e_i k_i)) - sum_{j<i} beta_i KK_ij u_j                    (substitution)
//            o_i = S^T (e_i q_i) + sum_{j<=i} QK_ij u_j
//            S  <- diag(e_{C-1}) S + sum_j (d_j k_j) u_j^T
//          D_ij is split where sub-blocks of kSub tokens meet: row i brings the decay since its sub-block's start,
//          key j, kept up to date, that to the end of the sub-block before; in the end it holds d_j.
// Shapes   q,k [B T H K]  v,o [B T HV V]  g [B T HV K]  beta [B T HV]  states [N HV K V], chunk_states [R HV K V]
// Takes    q,k,v,o float32, bfloat16 or float16, rows contiguous, any alignment and outer strides; K and V from
//          1 to 512 (padded with 0 in scratch); everything else of the operator. Not float64.
// Threads  as blocks/delta_forward.h says: a task is a sequence and 1, 2 or 4 key heads with all their value heads, or
//          some of the panels of one head's states.
// Vectors  the products with states as in the gated delta rule (blocks/delta_chunk.h); decays and dots of keys and
//          queries with channels along the lanes, sums of lanes at the end.
// Tile     C = 16, kSub = 4; dots: kSub rows by kLanes / kSub keys.
// Scratch  per task: states of its value heads in panels; one block of keys and queries of a key head, of decayed keys
//          and queries and values of a value head.
//          K = V = 128, HV = 2H: 731 KiB with AVX2, of which 512 KiB are states of 4 key heads; 347 KiB with 1.
// Numerics float32 with float32 state. Exponents are g, and sums of g over whole sub-blocks: what later chunks get is
//          decayed by exponentials of sums, so that the rounding of a constant small gate does not add up. Within a
//          sub-block decays are products of up to kSub exponentials. Nothing is divided by a decay, and no exponent is
//          a difference: exact after -1000, no inf - inf, and the error does not grow with the gate. A row's decays
//          are of tokens up to it, and rows of a tile only read earlier rows (triangles are walked, not masked), so
//          neither a value nor a NaN of a later token reaches an earlier one.
//          A dot of K channels is kLanes sums of K / kLanes terms, added up pairwise: nearly as good as the careful
//          sum of the gated delta rule. Keys of cosine 0.9 and 0.99, beta 1 to 2, gates 0, -0.01, -0.05 and natural
//          ones: 0.8 to 2.2 times the error of the float32 recurrence, 3.3 at most; without alike keys 0.3 to 1.1.
//          RMS ratio of o and states 3e-8 .. 3.4e-7 on random data for every gate from 0 to -inf.
// Traps    - The last, partial chunk: rows from `rows` on of l, p, ke, qe may be left over from another chunk. They
//            only reach rows that are not stored.
//          - Padding tokens need g = 0: the chunk's decay is that of the sum of all its rows.
// Measured 2 Zen 3 cores (AVX2), 4 KiB pages, 10 to 25 other processes at work on them; time over that of the gated
//          delta rule's forward, calls of the two alternating in one process, HV = 2H, K = V = 128, float32.
//          Predicted 1.15, for the decays' exponentials and products.
//            B1 T64 H8, in cache, the fastest of 400 calls, 9 processes  1.09 .. 1.17
//            B1 T4096 H16, CPU time, median of 9 calls                   1.09 at load 11, 1.23 at load 24
//          1.06 in instructions (T64): products with states and the solve 0.97, update 1.06, decays and dots 1.6 times
//          the keys' part there. Misses counted with the caches of Zen 3, of a chunk and panel: to the L1 336 lines in
//          the solve (there 338) and 138 in the update (there 14: the keys it reads are still in the L1), to the L2 34
//          (34). AVX-512 was not run.
//          Lost: the decays of a sub-block one after the other (1 % more instructions than side by side).
//
#include "thalweg/cpu/blocks/decay.h"
#include "thalweg/cpu/blocks/delta_forward.h"
#include "thalweg/ops/kimi_delta_attention/problem.h"

namespace thalweg::kimi_delta_attention {
namespace {

constexpr float kEps = 1e-6f;  // of the l2norm, inside the root
constexpr int64_t kSub = 4;    // tokens of a sub-block

// Rows of a block's tokens have Kp floats.
struct Scratch {
  float* k;       // [kBlock Kp]  normalised keys of one key head
  float* q;       // [kBlock Kp]  normalised and scaled queries
  float* ke;      // [kBlock Kp]  keys of one value head, decayed since the chunk's start
  float* qe;      // [kBlock Kp]  queries, likewise
  float* kd;      // [kBlock Kp]  keys, decayed up to the chunk's end
  float* last;    // [kChunks Kp]   decay of the whole chunk
  float* l;       // [kChunks C C]  -beta_i KK_ij, valid below the diagonal
  float* p;       // [kChunks C C]  QK_ij, valid up to the diagonal
  float* g;       // [C Kp]         gates of a chunk
  float* bias;    // [Kp]           dt_bias
  float* rows;    // [2 kSub Kp]    keys and queries of a sub-block, decayed since its start
  float* before;  // [Kp]           decay from the chunk's start to a sub-block's
  float* total;   // [Kp]           sum of a sub-block's gates
  float* sum;     // [Kp]           sum of gates from the chunk's start to a sub-block's end
};

struct KimiDeltaAttention {
  using Problem = kimi_delta_attention::Problem;
  using Args = thalweg_kimi_delta_attention_fwd_args;
  using Chunk = ChannelChunk;
  using Scratch = kimi_delta_attention::Scratch;

  static void carve(const Cut& cut, Carver* carver, Scratch* x) {
    float** rows[] = {&x->k, &x->q, &x->ke, &x->qe, &x->kd};
    for (float** at : rows) *at = carver->take(kBlock * cut.Kp);
    x->last = carver->take(kChunks * cut.Kp);
    x->l = carver->take(kChunks * C * C);
    x->p = carver->take(kChunks * C * C);
    x->g = carver->take(C * cut.Kp);
    x->rows = carver->take(2 * kSub * cut.Kp);
    float** lines[] = {&x->bias, &x->before, &x->total, &x->sum};
    for (float** at : lines) *at = carver->take(cut.Kp);
  }
  static int64_t streams(const Args& a, const thalweg_tensor** tensors) {
    tensors[0] = &a.q, tensors[1] = &a.k, tensors[2] = &a.v;
    bool rows = a.g.dtype && a.g.stride[3] == 1;
    if (rows) tensors[3] = &a.g;
    tensors[3 + rows] = &a.o;
    return 4 + rows;
  }
  template <class S>
  static void load_keys(const Task<KimiDeltaAttention>& t, int64_t row, int64_t count);
  static void load_head(const Task<KimiDeltaAttention>& t, int64_t hv, int64_t row, int64_t count);
  static void set_chunk(const Task<KimiDeltaAttention>& t, int64_t c, Chunk* chunk) {
    const Scratch& x = t.own;
    int64_t Kp = t.call->cut.Kp, at = c * C * Kp;
    chunk->k = x.ke + at, chunk->q = x.qe + at, chunk->kd = x.kd + at;
    chunk->l = x.l + c * C * C, chunk->p = x.p + c * C * C;
    chunk->last = x.last + c * Kp;
  }
};

// ---- what the value heads of a key head share ----------------------------------------------------------

// out[Kp] = x[K] times `scale`, over its norm if asked, and 0 from K on.
template <class S>
[[gnu::always_inline]] inline void load_key(const typename S::Element* x, int64_t K, bool norm, float scale,
                                            float* out) {
  vf sum[2] = {zero(), zero()};
  for (int64_t d = 0; d < K; d += kLanes) {
    vf a = K - d < kLanes ? S::load_n(x + d, K - d) : S::load(x + d);
    sum[d / kLanes & 1] = fma(a, a, sum[d / kLanes & 1]);
    store(out + d, a);
  }
  vf factor = set1(scale);
  if (norm) factor = factor / sqrt(set1(hsum(sum[0] + sum[1]) + kEps));
  else if (scale == 1.f) return;
  for (int64_t d = 0; d < K; d += kLanes) store(out + d, factor * load(out + d));
}

template <class S>
[[gnu::noinline]] void KimiDeltaAttention::load_keys(const Task<KimiDeltaAttention>& t, int64_t row, int64_t count) {
  using Element = const typename S::Element*;
  const Problem& pb = t.problem();
  const Args& a = t.args();
  int64_t b = row / pb.T, token = row % pb.T, Kp = t.call->cut.Kp;
  auto k = reinterpret_cast<Element>(element_at(a.k, b, token, t.h));
  auto q = reinterpret_cast<Element>(element_at(a.q, b, token, t.h));
  for (int64_t i = 0; i < count; ++i, k += a.k.stride[1], q += a.q.stride[1]) {
    load_key<S>(k, pb.K, a.use_qk_l2norm != 0, 1.f, t.own.k + i * Kp);
    load_key<S>(q, pb.K, a.use_qk_l2norm != 0, float(pb.scale), t.own.q + i * Kp);
  }
  size_t rest = size_t((round_up(count, C) - count) * Kp) * sizeof(float);
  memset(t.own.k + count * Kp, 0, rest);
  memset(t.own.q + count * Kp, 0, rest);
}

// ---- what one value head needs beside them -------------------------------------------------------------

// The fused gate of one value head, its dt_bias in scratch; without it nothing.
ChannelGate load_gate(const Task<KimiDeltaAttention>& t, int64_t hv) {
  const auto& a = t.args();
  float A_log = 0.f;
  if (!a.use_gate) return {};
  memset(t.own.bias, 0, size_t(t.call->cut.Kp) * sizeof(float));
  if (a.A_log.dtype) read_row(a.A_log.dtype, element_at(a.A_log, hv), 1, &A_log);
  if (a.dt_bias.dtype) read_row(a.dt_bias.dtype, element_at(a.dt_bias, hv), t.problem().K, t.own.bias);
  return channel_gate(a.A_log.dtype != THALWEG_NONE, A_log, float(a.lower_bound));
}

// g of a chunk's `rows` tokens from `row` on, after its activation; 0 for the others.
[[gnu::noinline]] void load_gates(const Task<KimiDeltaAttention>& t, const ChannelGate& gate, int64_t hv, int64_t row,
                                  int64_t rows) {
  const Problem& pb = t.problem();
  const auto& a = t.args();
  int64_t Kp = t.call->cut.Kp;
  if (rows < C || pb.K < Kp || !a.g.dtype) memset(t.own.g, 0, size_t(C * Kp) * sizeof(float));
  if (!a.g.dtype) return;
  for (int64_t i = 0; i < rows; ++i) {
    float* g = t.own.g + i * Kp;
    const char* from = element_at(a.g, (row + i) / pb.T, (row + i) % pb.T, hv);
    if (a.g.stride[3] == 1) read_row(a.g.dtype, from, pb.K, g);
    else read_strided(a.g.dtype, from, a.g.stride[3], pb.K, g);
    if (!a.use_gate) continue;
    for (int64_t d = 0; d < Kp; d += kLanes) store(g + d, gate_of(gate, load(g + d) + load(t.own.bias + d)));
  }
}

// kLanes sums of a vector's lanes.
[[gnu::always_inline]] inline vf sums_of(vf (&x)[kLanes]) {
  transpose(x);
#pragma GCC unroll 16
  for (int64_t n = kLanes / 2; n > 0; n /= 2)
#pragma GCC unroll 16
    for (int64_t i = 0; i < n; ++i) x[i] = x[i] + x[i + n];
  return x[0];
}

// A chunk's sub-block b: its keys and queries decayed since its start (rows) and up to its end (kd), its part of the
// diagonal of l and p.
[[gnu::noinline]] void diagonal_block(const Scratch& x, int64_t Kp, int64_t c, int64_t b) {
  const int64_t at = (c * C + b * kSub) * Kp;
  const float *g = x.g + b * kSub * Kp, *keys = x.k + at, *queries = x.q + at;
  float *ke = x.ke + at, *qe = x.qe + at, *kd = x.kd + at;
  constexpr int kPairs = kSub * (kSub - 1) / 2, kSums = kSub * kSub;  // pairs of keys; and of a query and a key
  vf sum[kSums];
#pragma GCC unroll 16
  for (vf& s : sum) s = zero();
  for (int64_t d = 0; d < Kp; d += kLanes) {
    vf a[kSub], k[kSub], q[kSub], total = zero();
#pragma GCC unroll 4
    for (int64_t i = 0; i < kSub; ++i) a[i] = load(g + i * Kp + d), total = total + a[i];
    store(x.total + d, total);
    exp_decay(a);
    vf in = a[0], before = b ? load(x.before + d) : set1(1.f);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kSub; ++i) {
      if (i > 0) in = in * a[i];
      k[i] = load(keys + i * Kp + d), q[i] = load(queries + i * Kp + d);
      vf kin = k[i] * in, qin = q[i] * in;
      store(x.rows + i * Kp + d, kin);
      store(x.rows + (kSub + i) * Kp + d, qin);
      store(ke + i * Kp + d, kin * before);
      store(qe + i * Kp + d, qin * before);
    }
    int n = 0;
#pragma GCC unroll 4
    for (int64_t j = 0; j < kSub; ++j) {
      vf t = k[j];  // decayed up to row i
      sum[kPairs + j] = fma(q[j], t, sum[kPairs + j]);
#pragma GCC unroll 4
      for (int64_t i = j + 1; i < kSub; ++i, ++n) {
        t = t * a[i];
        sum[n] = fma(k[i], t, sum[n]);
        sum[kPairs + kSub + n] = fma(q[i], t, sum[kPairs + kSub + n]);
      }
      store(kd + j * Kp + d, t);
    }
  }
  float sums[kSums];
  for (int64_t i = 0; i < kSums; i += kLanes) store(sums + i, sums_of(*reinterpret_cast<vf(*)[kLanes]>(sum + i)));
  float *l = x.l + c * C * C + b * kSub * (C + 1), *p = x.p + c * C * C + b * kSub * (C + 1);
  int n = 0;
  for (int64_t j = 0; j < kSub; ++j) {
    p[j * C + j] = sums[kPairs + j];
    for (int64_t i = j + 1; i < kSub; ++i, ++n) l[i * C + j] = sums[n], p[i * C + j] = sums[kPairs + kSub + n];
  }
}

// out[i][j] = dot(row i of a, row j of b), kSub rows of a, the first n rows of b, n a multiple of kSub.
[[gnu::always_inline]] inline void dots(const float* a, const float* b, int64_t Kp, int64_t n, float* out) {
  constexpr int64_t kCols = kLanes / kSub;
  for (int64_t j = 0; j < n; j += kCols) {
    vf sum[kLanes];
#pragma GCC unroll 16
    for (vf& s : sum) s = zero();
    for (int64_t d = 0; d < Kp; d += kLanes) {
      vf y[kCols];
#pragma GCC unroll 4
      for (int64_t m = 0; m < kCols; ++m) y[m] = load(b + (j + m) * Kp + d);
#pragma GCC unroll 4
      for (int64_t i = 0; i < kSub; ++i) {
        vf x = load(a + i * Kp + d);
#pragma GCC unroll 4
        for (int64_t m = 0; m < kCols; ++m) sum[i * kCols + m] = fma(x, y[m], sum[i * kCols + m]);
      }
    }
    float sums[kLanes];
    store(sums, sums_of(sum));
    for (int64_t i = 0; i < kSub; ++i) memcpy(out + i * C + j, sums + i * kCols, kCols * sizeof(float));
  }
}

// l, p, ke, qe, kd and last of chunk c.
[[gnu::noinline]] void load_chunk(const Scratch& x, const float* beta, int64_t Kp, int64_t c, int64_t rows) {
  float *l = x.l + c * C * C, *p = x.p + c * C * C, *kd = x.kd + c * C * Kp;
  for (int64_t b = 0; b * kSub < rows; ++b) {
    diagonal_block(x, Kp, c, b);
    const int64_t n = b * kSub;
    dots(x.rows, kd, Kp, n, l + n * C);
    dots(x.rows + kSub * Kp, kd, Kp, n, p + n * C);
    for (int64_t d = 0; d < Kp; d += kLanes) {
      vf decay[2] = {load(x.total + d), zero()};  // of the sub-block; from the chunk's start to its end
      decay[1] = b ? load(x.sum + d) + decay[0] : decay[0];
      store(x.sum + d, decay[1]);
      exp_decay(decay);
      store(x.before + d, decay[1]);
      for (int64_t j = 0; j < n; ++j) store(kd + j * Kp + d, load(kd + j * Kp + d) * decay[0]);
    }
  }
  memcpy(x.last + c * Kp, x.before, size_t(Kp) * sizeof(float));
  for (int64_t i = 0; i < C; ++i)
    for (int64_t j = 0; j < C; j += kLanes) store(l + i * C + j, set1(-beta[i]) * load(l + i * C + j));
}

void KimiDeltaAttention::load_head(const Task<KimiDeltaAttention>& t, int64_t hv, int64_t row, int64_t count) {
  ChannelGate gate = load_gate(t, hv);
  for (int64_t c = 0; c * C < count; ++c) {
    int64_t rows = count - c * C < C ? count - c * C : C;
    load_gates(t, gate, hv, row + c * C, rows);
    load_chunk(t.own, t.x.beta + c * C, t.call->cut.Kp, c, rows);
  }
}

}  // namespace

namespace THALWEG_ISA {

int64_t cpu_chunk_fwd_slot_bytes(const Problem& problem) {
  return delta_forward_slot_bytes<KimiDeltaAttention>(problem);
}

void cpu_chunk_fwd(const Problem& problem, const Plan& plan, const KimiDeltaAttention::Args& args, const Exec& exec) {
  delta_forward<KimiDeltaAttention>(problem, plan, args, exec);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::kimi_delta_attention
