// cpu_chunk_fwd: gated delta rule, forward, chunked, compiled once per instruction set.
//
// Math     for each chunk of C tokens, S the state that enters it, D_ij = exp(g_{j+1} + ... + g_i),
//          e_i = exp(g_0 + ... + g_i), d_j = D_{C-1,j}:
//            u_i = beta_i (v_i - e_i S^T k_i) - sum_{j<i} beta_i D_ij dot(k_i, k_j) u_j   (substitution)
//            o_i = e_i S^T q_i + sum_{j<=i} D_ij dot(q_i, k_j) u_j                        (q holds the scale)
//            S  <- e_{C-1} S + sum_j k_j (d_j u_j)^T
// Shapes   q,k [B T H K]  v,o [B T HV V]  g,beta [B T HV]  states [N HV K V], chunk_states [R HV K V]
// Takes    q,k,v,o float32, bfloat16 or float16, rows contiguous, any alignment and outer strides; K and V from
//          1 to 512 (padded with 0 in scratch); everything else of the operator. Not float64.
// Threads  as blocks/delta_forward.h says: a task is a sequence and 1, 2 or 4 key heads with all their value heads, or
//          some of the panels of one head's states.
// Vectors  AVX2 6x2 and AVX-512 8x2 tiles (blocks/gemm.h); k and q transposed in scratch, so every broadcast has a
//          constant stride and dot(k_i, k_j), dot(q_i, k_j) are products of the same kind.
// Tile     C = 16; a block of kChunks chunks prepares keys once for all value heads, and a panel of 2 vectors of
//          columns (K x 2 vectors: 16 KiB with AVX-512, 8 KiB with AVX2, K = 128) stays in the L1 for a block.
// Scratch  per task: states of its value heads in panels, one block of keys, values, decays of one key head.
//          K = V = 128, HV = 2H: 631 KiB, of which 512 KiB are states of 4 key heads; 247 KiB with 1.
// Numerics float32 with float32 state. Exponents are sums of neighbouring g, added up from the later end of the
//          pair's earlier token, never differences of a running sum: exact after -1000, no inf - inf, and the
//          error does not grow with the gate. Rows of a tile only read earlier rows (triangles are walked, not
//          masked), so neither a value nor a NaN of a later token reaches an earlier one.
//          dot(k_i, k_j) is rounded about once (gemm_careful): with nearly equal keys and beta near 2 the deltas
//          cancel, and a solve repeats that product's error in each of them.
//          RMS ratio of o and states 1.5e-7 .. 3.5e-7 on random data for every gate from 0 to -inf.
// Traps    - GCC drops calls of a function that only prefetches; simd.h's prefetch is asm for that reason.
//          - A token's row of [B T H K] storage is on a page of its own: with no fetching at all, waiting for rows cost
//            15 %. One walk among products is not hidden (it outlasts the reorder window): fetching a whole row
//            between tiles lost 5 %; walks in bursts, then the rest of the rows between products, won 8 %.
//          - o is streamed where rows are aligned; plain stores lost 3 %.
//          - v and o share a buffer: o replaces v row by row, after the row's u is solved.
//          - The first version computed element addresses inside the copy loops: 12 % of the time.
// Measured 2 cores of an EPYC (Zen 5) under a hypervisor, B1 T4096 H16 HV32 K=V=128, float32, l2norm, gate, beta
//          sigmoid, final state. Share: 16.1 GFLOP in the CPU time of 2 threads (the machine was shared, wall-clock
//          times mean nothing) over the FMA peak of the same process with the same vectors; medians.
//            AVX-512  0.92 (32 ms at 539 GFLOP/s)
//            AVX2     0.97 (61 ms at 271 GFLOP/s)
//          Predicted from counts of products and loads (13.7 GFLOP are done): 1.0. The rest is cache misses and
//          what is left of the page walks.
//          Time over that of the default: bfloat16 0.97 and 0.99, float16 0.97 and 0.99; g,beta as [B HV T] 1.00.
//          q,k,v,o as [B H T K] (fewer pages), paired, 6 processes: 0.97 .. 0.985 and 0.98 .. 0.99; with 2 MiB pages
//          0.975 .. 0.99 and 0.98 .. 0.99.
//          Key heads of a task, against one head whose v and o were touched head by head (that: [B H T K] over
//          default 0.88 .. 0.95 and 0.93 .. 0.95): one page touched once 0.99 and 0.99; 2 heads 0.94 .. 0.98 and
//          0.95 .. 0.98, 4 heads (AVX-512) 2 % less. [B H T K] keeps 1 head: 4 cost it 2 %.
//          t(262144) / t(4096) at H2 HV4 bfloat16: 65 .. 67.
//          Parts, AVX-512: K S, Q S and the solve 54 %, update 28 %, keys 7 %, values and output 7 %, gates 2 %.
//          Lost: blocks of 128 tokens (2 %) and 256 (4 %); 32 tokens and prefetching into the L2 only made no
//          difference; bursts of 4 tokens (1 %), of 32 and 64 none. Not tried: decays kept apart from the state
//          (1 of 17 products of the update).
//
#include "thalweg/cpu/blocks/delta_forward.h"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule {
namespace {

constexpr float kEps = 1e-6f;  // of the l2norm, inside the root

// Chunks follow one another.
struct Scratch {
  float* xk;  // [kChunks Kp C]   normalised keys, transposed
  float* xq;  // [kChunks Kp C]   normalised and scaled queries, transposed
  float* kk;  // [kChunks C C]    dot(k_i, k_j)
  float* qk;  // [kChunks C C]    dot(q_i, k_j)
  float* l;   // [kChunks C C]    -beta_i D_ij dot(k_i, k_j), valid below the diagonal
  float* p;   // [kChunks C C]    D_ij dot(q_i, k_j), valid up to the diagonal
  float* e;   // [kChunks C]      decay from the chunk's start to row i
  float* d;   // [kChunks C]      decay from row j to the chunk's end
  float* g;   // [kBlock]
  float* w;   // [C kPanel]       d_j u_j
};

struct GatedDeltaRule {
  using Problem = gated_delta_rule::Problem;
  using Args = thalweg_gated_delta_rule_fwd_args;
  using Chunk = HeadChunk;
  using Scratch = gated_delta_rule::Scratch;

  static void carve(const Cut& cut, Carver* carver, Scratch* x) {
    x->xk = carver->take(kChunks * cut.Kp * C);
    x->xq = carver->take(kChunks * cut.Kp * C);
    x->kk = carver->take(kChunks * C * C);
    x->qk = carver->take(kChunks * C * C);
    x->l = carver->take(kChunks * C * C);
    x->p = carver->take(kChunks * C * C);
    x->e = carver->take(kChunks * C);
    x->d = carver->take(kChunks * C);
    x->g = carver->take(kBlock);
    x->w = carver->take(C * kPanel);
  }
  static int64_t streams(const Args& a, const thalweg_tensor** tensors) {
    tensors[0] = &a.q, tensors[1] = &a.k, tensors[2] = &a.v, tensors[3] = &a.o;
    return 4;
  }
  template <class S>
  static void load_keys(const Task<GatedDeltaRule>& t, int64_t row, int64_t count);
  static void load_head(const Task<GatedDeltaRule>& t, int64_t hv, int64_t row, int64_t count);
  static void set_chunk(const Task<GatedDeltaRule>& t, int64_t c, Chunk* chunk) {
    const Scratch& x = t.own;
    int64_t keys = c * t.call->cut.Kp * C;
    chunk->k = x.xk + keys, chunk->q = x.xq + keys;
    chunk->l = x.l + c * C * C, chunk->p = x.p + c * C * C;
    chunk->e = x.e + c * C, chunk->d = x.d + c * C;
    chunk->w = x.w;
  }
};

// ---- what the value heads of a key head share ----------------------------------------------------------

// x[k][i] = row i of a chunk, times `scale`, over its norm if asked; rows past `rows` and k past K are 0.
template <class S>
[[gnu::always_inline]] inline void load_transposed(const typename S::Element* p, int64_t row_stride, int64_t rows,
                                                   int64_t K, bool norm, float scale, float* x) {
  vf sum[C / kLanes][2];
  for (int64_t r = 0; r < C / kLanes; ++r) sum[r][0] = sum[r][1] = zero();
  for (int64_t r = 0; r < C / kLanes; ++r) {
    for (int64_t k = 0; k < K; k += kLanes) {
      vf a[kLanes];
      int64_t here = K - k < kLanes ? K - k : kLanes;
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        int64_t row = r * kLanes + i;
        const typename S::Element* at = p + row * row_stride + k;
        a[i] = row >= rows ? zero() : here == kLanes ? S::load(at) : S::load_n(at, here);
      }
      transpose(a);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        sum[r][i & 1] = fma(a[i], a[i], sum[r][i & 1]);
        store(x + (k + i) * C + r * kLanes, a[i]);
      }
    }
  }
  if (!norm && scale == 1.f) return;
  vf factor[C / kLanes];
  for (int64_t r = 0; r < C / kLanes; ++r) {
    factor[r] = set1(scale);
    if (norm) factor[r] = factor[r] / sqrt(sum[r][0] + sum[r][1] + set1(kEps));
  }
  for (int64_t k = 0; k < round_up(K, kLanes); ++k)
    for (int64_t r = 0; r < C / kLanes; ++r)
      store(x + k * C + r * kLanes, factor[r] * load(x + k * C + r * kLanes));
}

template <class S>
[[gnu::noinline]] void GatedDeltaRule::load_keys(const Task<GatedDeltaRule>& t, int64_t row, int64_t count) {
  const Problem& pb = t.problem();
  const Args& a = t.args();
  using Element = const typename S::Element*;
  int64_t b = row / pb.T, token = row % pb.T, Kp = t.call->cut.Kp;
  bool norm = a.use_qk_l2norm != 0;
  for (int64_t c = 0; c * C < count; ++c) {
    int64_t rows = count - c * C < C ? count - c * C : C;
    float *xk = t.own.xk + c * Kp * C, *xq = t.own.xq + c * Kp * C;
    load_transposed<S>(reinterpret_cast<Element>(element_at(a.k, b, token + c * C, t.h)), a.k.stride[1], rows, pb.K,
                       norm, 1.f, xk);
    load_transposed<S>(reinterpret_cast<Element>(element_at(a.q, b, token + c * C, t.h)), a.q.stride[1], rows, pb.K,
                       norm, float(pb.scale), xq);
    gemm_careful<C / kLanes>(C, Kp, xk, 1, C, xk, C, t.own.kk + c * C * C, C);  // the solve repeats its error
    gemm(C, C, Kp, xq, 1, C, xk, C, t.own.qk + c * C * C, C);
  }
}

// ---- what one value head needs beside them --------------------------------------------------------------

// g of `count` tokens after its activation; 0 up to the end of the last chunk.
void load_gates(const Task<GatedDeltaRule>& t, int64_t hv, int64_t row, int64_t count) {
  const Problem& pb = t.problem();
  const auto& a = t.args();
  int64_t padded = round_up(count, C);
  float* g = t.own.g;
  for (int64_t i = 0; i < padded; ++i) g[i] = 0.f;
  if (a.g.dtype) read_strided(a.g.dtype, element_at(a.g, row / pb.T, row % pb.T, hv), a.g.stride[1], count, g);
  if (!a.use_gate) return;
  float A_log, dt_bias = 0.f, rate[kLanes];
  read_row(a.A_log.dtype, element_at(a.A_log, hv), 1, &A_log);
  if (a.dt_bias.dtype) read_row(a.dt_bias.dtype, element_at(a.dt_bias, hv), 1, &dt_bias);
  // exp(A_log) in two factors where it would overflow, both finite: softplus may be 0 or tiny.
  bool large = A_log > 88.f;
  store(rate, exp(set1(!large ? A_log : A_log < 176.f ? 0.5f * A_log : 88.f)));
  for (int64_t i = 0; i < padded; i += kLanes) {
    vf x = softplus(load(g + i) + set1(dt_bias)) * set1(-rate[0]);
    store(g + i, large ? x * set1(rate[0]) : x);
  }
  for (int64_t i = count; i < padded; ++i) g[i] = 0.f;
}

// l, p, e and d of a chunk. Every exponent is a sum of the g of neighbouring tokens, taken in order from
// the later end of the pair's earlier token: nothing cancels, and -inf only ever meets -inf.
void load_decays(const Task<GatedDeltaRule>& t, int64_t c) {
  const Scratch& x = t.own;
  const float *g = x.g + c * C, *beta = t.x.beta + c * C, *kk = x.kk + c * C * C, *qk = x.qk + c * C * C;
  float *l = x.l + c * C * C, *p = x.p + c * C * C, *e = x.e + c * C, *d = x.d + c * C;
  constexpr int64_t NV = C / kLanes;
  vf sum[NV];  // lane j: g_{j+1} + ... + g_i
  for (int64_t v = 0; v < NV; ++v) sum[v] = set1(-infinity());
  float from_start = 0.f;
#pragma GCC unroll 16
  for (int64_t i = 0; i < C; ++i) {
    from_start += g[i];
    e[i] = from_start;
    vf gi = set1(g[i]), minus_beta = set1(-beta[i]);
#pragma GCC unroll 4
    for (int64_t v = 0; v < NV; ++v) {
      int64_t before = i - v * kLanes, upto = before + 1;
      before = before < 0 ? 0 : before > kLanes ? kLanes : before;
      upto = upto < 0 ? 0 : upto > kLanes ? kLanes : upto;
      sum[v] = first_n(before, sum[v] + gi, first_n(upto, zero(), set1(-infinity())));
      vf decay = exp(sum[v]);
      store(p + i * C + v * kLanes, decay * load(qk + i * C + v * kLanes));
      store(l + i * C + v * kLanes, minus_beta * (decay * load(kk + i * C + v * kLanes)));
      if (i == C - 1) store(d + v * kLanes, decay);
    }
  }
  for (int64_t v = 0; v < NV; ++v) store(e + v * kLanes, exp(load(e + v * kLanes)));
}

void GatedDeltaRule::load_head(const Task<GatedDeltaRule>& t, int64_t hv, int64_t row, int64_t count) {
  load_gates(t, hv, row, count);
  for (int64_t c = 0; c * C < count; ++c) load_decays(t, c);
}

}  // namespace

namespace THALWEG_ISA {

int64_t cpu_chunk_fwd_slot_bytes(const Problem& problem) { return delta_forward_slot_bytes<GatedDeltaRule>(problem); }

void cpu_chunk_fwd(const Problem& problem, const Plan& plan, const GatedDeltaRule::Args& args, const Exec& exec) {
  delta_forward<GatedDeltaRule>(problem, plan, args, exec);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::gated_delta_rule
