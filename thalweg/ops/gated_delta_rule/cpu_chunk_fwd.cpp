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
// Threads  a task is one sequence and 1, 2 or 4 neighbouring key heads with all their value heads, which take turns
//          block by block: their rows of [B T H K] storage share pages, which are walked once for all. More than 1
//          only where rows share pages, states fit kHeadBytes and 2 tasks a slot are left. Where even 1 leaves fewer
//          than kMinTasks tasks, the panels of a head's states are split over several, by the problem's size alone.
//          Heads and columns of a state do not mix, so neither storage nor slots change a bit. More tasks clear
//          the rows of o past the last sequence.
// Vectors  AVX2 6x2 and AVX-512 8x2 tiles (blocks/gemm.h); k and q transposed in scratch, so every broadcast has a
//          constant stride and dot(k_i, k_j), dot(q_i, k_j) are products of the same kind.
// Tile     C = 16; a block of kChunks chunks prepares keys once for all value heads, and a panel of 2 vectors of
//          columns (K x 2 vectors: 16 KiB with AVX-512, 8 KiB with AVX2, K = 128) stays in the L1 for a block.
// Scratch  per task (Scratch below): states of its value heads in panels, one block of keys, values, decays of one
//          key head. K = V = 128, HV = 2H: 631 KiB, of which 512 KiB are states of 4 key heads; 247 KiB with 1.
// Numerics float32 with float32 state. Exponents are sums of neighbouring g, added up from the later end of the
//          pair's earlier token, never differences of a running sum: exact after -1000, no inf - inf, and the
//          error does not grow with the gate. Rows of a tile only read earlier rows (triangles are walked, not
//          masked), so neither a value nor a NaN of a later token reaches an earlier one. Chunks start at the
//          sequence's start, and also at multiples of `every` when chunk_states is asked for.
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
#include "thalweg/cpu/blocks/gemm.h"
#include "thalweg/cpu/blocks/rows.h"
#include "thalweg/ops/gated_delta_rule/cpu_chunk_fwd_tiles.h"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule {
namespace {

using Args = thalweg_gated_delta_rule_fwd_args;

constexpr int64_t kChunks = 4;      // chunks of a block: keys are prepared and panels loaded once a block
constexpr int64_t kBlock = kChunks * C;
constexpr int64_t kMinTasks = 8;    // below this, the columns of V are split over tasks
constexpr int64_t kMaxHeads = 4;           // key heads of a task, where
constexpr int64_t kHeadBytes = 512 << 10;  // their states are no larger than this (they should fit the L2),
constexpr int64_t kMinGroups = 4;          // as many tasks are left,
constexpr int64_t kTasksPerSlot = 2;       // as many for each slot,
constexpr int64_t kManyPerSlot = 8;        // and equally many for each slot or so many
constexpr int64_t kZeroRows = 1024; // rows of o past the last sequence that one task clears
constexpr float kEps = 1e-6f;       // of the l2norm, inside the root

// How a problem is cut into tasks. A unit is one panel of kPanel columns of one value head's state.
struct Cut {
  int64_t G;       // value heads of a key head
  int64_t Kp;      // K padded to whole vectors
  int64_t panels;  // of one value head
  int64_t parts;   // tasks that share one (sequence, key head)
  int64_t units;   // at most, of one task and key head
  int64_t heads;   // key heads of a task
  int64_t groups;  // of key heads
};

// With `heads` key heads to a task, or fewer where that would leave too few tasks, or slots idle at the end.
Cut cut_of(const Problem& p, int64_t heads, int64_t slots) {
  Cut cut;
  cut.G = p.HV / p.H;
  cut.Kp = round_up(p.K, kLanes);
  cut.panels = round_up(p.V, kPanel) / kPanel;
  int64_t pairs = p.N * p.H, all = cut.G * cut.panels;
  int64_t parts = pairs > 0 ? (kMinTasks + pairs - 1) / pairs : 1;
  cut.parts = parts < all ? parts : all;
  cut.units = (all + cut.parts - 1) / cut.parts;
  int64_t bytes = all * cut.Kp * kPanel * int64_t(sizeof(float));
  if (cut.parts > 1) heads = 1;
  for (; heads > 1; heads /= 2) {
    int64_t tasks = p.N * (p.H / heads);
    bool enough = tasks >= kMinGroups && tasks >= kTasksPerSlot * slots;
    bool even = tasks % slots == 0 || tasks >= kManyPerSlot * slots;
    if (p.H % heads == 0 && heads * bytes <= kHeadBytes && enough && even) break;
  }
  cut.heads = heads;
  cut.groups = p.H / heads;
  return cut;
}

// How many key heads are worth a task: as long as some of their rows share pages.
int64_t heads_of(const Problem& p, const Args& a) {
  int64_t q = a.q.stride[2], v = a.v.stride[2] * (p.HV / p.H), heads = kMaxHeads;
  while (heads > 1 && heads / 2 * (q < v ? q : v) * element_bytes(p.dtype) >= kPageBytes) heads /= 2;
  return heads;
}

// A task's scratch; chunks follow one another, each array 64-byte aligned.
struct Scratch {
  float* xk;    // [kChunks Kp C]   normalised keys, transposed
  float* xq;    // [kChunks Kp C]   normalised and scaled queries, transposed
  float* kk;    // [kChunks C C]    dot(k_i, k_j)
  float* qk;    // [kChunks C C]    dot(q_i, k_j)
  float* l;     // [kChunks C C]    -beta_i D_ij dot(k_i, k_j), valid below the diagonal
  float* p;     // [kChunks C C]    D_ij dot(q_i, k_j), valid up to the diagonal
  float* e;     // [kChunks C]      decay from the chunk's start to row i
  float* d;     // [kChunks C]      decay from row j to the chunk's end
  float* g;     // [kBlock]
  float* beta;  // [kBlock]
  float* vo;    // [panels kBlock kPanel]  v of one value head, then its o
  float* u;     // [C kPanel]       what each token writes
  float* w;     // [C kPanel]       d_j u_j
  float* line;  // [512]
  float* s;     // [heads units Kp kPanel]  states
};

int64_t carve(const Cut& cut, char* base, Scratch* out) {
  int64_t offset = 0;
  auto take = [&](int64_t floats) {
    float* at = reinterpret_cast<float*>(base + offset);
    offset += round_up(floats * 4, 64);
    return at;
  };
  out->xk = take(kChunks * cut.Kp * C);
  out->xq = take(kChunks * cut.Kp * C);
  out->kk = take(kChunks * C * C);
  out->qk = take(kChunks * C * C);
  out->l = take(kChunks * C * C);
  out->p = take(kChunks * C * C);
  out->e = take(kChunks * C);
  out->d = take(kChunks * C);
  out->g = take(kBlock);
  out->beta = take(kBlock);
  out->vo = take(cut.panels * kBlock * kPanel);
  out->u = take(C * kPanel);
  out->w = take(C * kPanel);
  out->line = take(512);
  out->s = take(cut.heads * cut.units * cut.Kp * kPanel);
  return offset;
}

struct Call {
  const Problem* problem;
  const Args* args;
  Cut cut;
  char* slots;
  int64_t slot_bytes;
  int64_t rows_end;  // where the last sequence ends
};

// One task's place: columns `first` .. `last` (in units) of the value heads of each key head from first_head to
// end_head, of which h is worked on.
struct Task {
  const Call* call;
  Scratch x;
  int64_t n, h, first_head, end_head, first, last;
  Span span;
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
[[gnu::noinline]] void load_keys(const Task& t, int64_t row, int64_t count) {
  const Problem& pb = *t.call->problem;
  const Args& a = *t.call->args;
  using Element = const typename S::Element*;
  int64_t b = row / pb.T, token = row % pb.T, Kp = t.call->cut.Kp;
  bool norm = a.use_qk_l2norm != 0;
  for (int64_t c = 0; c * C < count; ++c) {
    int64_t rows = count - c * C < C ? count - c * C : C;
    float *xk = t.x.xk + c * Kp * C, *xq = t.x.xq + c * Kp * C;
    load_transposed<S>(reinterpret_cast<Element>(element_at(a.k, b, token + c * C, t.h)), a.k.stride[1], rows, pb.K,
                       norm, 1.f, xk);
    load_transposed<S>(reinterpret_cast<Element>(element_at(a.q, b, token + c * C, t.h)), a.q.stride[1], rows, pb.K,
                       norm, float(pb.scale), xq);
    gemm_careful<C / kLanes>(C, Kp, xk, 1, C, xk, C, t.x.kk + c * C * C, C);  // the solve repeats its error
    gemm(C, C, Kp, xq, 1, C, xk, C, t.x.qk + c * C * C, C);
  }
}

// ---- what one value head needs beside them --------------------------------------------------------------

// g and beta of `count` tokens after their activations; 0 up to the end of the last chunk.
void load_gates(const Task& t, int64_t hv, int64_t row, int64_t count) {
  const Problem& pb = *t.call->problem;
  const Args& a = *t.call->args;
  int64_t b = row / pb.T, token = row % pb.T, padded = round_up(count, C);
  float *g = t.x.g, *beta = t.x.beta;
  for (int64_t i = 0; i < padded; ++i) g[i] = 0.f, beta[i] = i < count ? 1.f : 0.f;
  if (a.g.dtype) read_strided(a.g.dtype, element_at(a.g, b, token, hv), a.g.stride[1], count, g);
  if (a.beta.dtype) read_strided(a.beta.dtype, element_at(a.beta, b, token, hv), a.beta.stride[1], count, beta);
  if (a.use_gate) {
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
  }
  if (a.use_beta_sigmoid)
    for (int64_t i = 0; i < padded; i += kLanes) {
      vf x = sigmoid(load(beta + i));
      store(beta + i, a.allow_neg_eigval ? x + x : x);
    }
  for (int64_t i = count; i < padded; ++i) g[i] = beta[i] = 0.f;
}

// l, p, e and d of a chunk. Every exponent is a sum of the g of neighbouring tokens, taken in order from
// the later end of the pair's earlier token: nothing cancels, and -inf only ever meets -inf.
void load_decays(const Task& t, int64_t c) {
  const float *g = t.x.g + c * C, *beta = t.x.beta + c * C, *kk = t.x.kk + c * C * C, *qk = t.x.qk + c * C * C;
  float *l = t.x.l + c * C * C, *p = t.x.p + c * C * C, *e = t.x.e + c * C, *d = t.x.d + c * C;
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

// Columns of panels [first, last) of v, to scratch; rows up to the end of the last chunk and columns past V are 0.
template <class S>
[[gnu::noinline]] void load_values(const Task& t, int64_t hv, int64_t row, int64_t count, int64_t first,
                                   int64_t last) {
  using Element = const typename S::Element*;
  const Problem& pb = *t.call->problem;
  const thalweg_tensor& v = t.call->args->v;
  int64_t left = pb.V - first * kPanel, columns = left < (last - first) * kPanel ? left : (last - first) * kPanel;
  auto from = reinterpret_cast<Element>(element_at(v, row / pb.T, row % pb.T, hv, first * kPanel));
  float* out = t.x.vo;
  for (int64_t i = 0; i < count; ++i, from += v.stride[1], out += kPanel) {
    float* at = out;
    int64_t col = 0;
    for (; col + kPanel <= columns; col += kPanel, at += kBlock * kPanel) {
      vf x = S::load(from + col), y = S::load(from + col + kLanes);
      store(at, x);
      store(at + kLanes, y);
    }
    if (col == columns) continue;
    int64_t n = columns - col, n0 = n < kLanes ? n : kLanes;
    store(at, S::load_n(from + col, n0));
    store(at + kLanes, n > kLanes ? S::load_n(from + col + kLanes, n - kLanes) : zero());
  }
  for (int64_t panel = first; panel < last; ++panel)
    memset(t.x.vo + ((panel - first) * kBlock + count) * kPanel, 0,
           size_t((round_up(count, C) - count) * kPanel) * sizeof(float));
}

// The other way: o from scratch to storage.
template <class S>
[[gnu::noinline]] void store_output(const Task& t, int64_t hv, int64_t row, int64_t count, int64_t first,
                                    int64_t last) {
  using Element = typename S::Element*;
  const Problem& pb = *t.call->problem;
  const thalweg_tensor& o = t.call->args->o;
  int64_t left = pb.V - first * kPanel, columns = left < (last - first) * kPanel ? left : (last - first) * kPanel;
  auto to = reinterpret_cast<Element>(element_at(o, row / pb.T, row % pb.T, hv, first * kPanel));
  const float* in = t.x.vo;
  bool aligned = (reinterpret_cast<uintptr_t>(to) | uintptr_t(o.stride[1]) * sizeof(*to)) % kStreamAlign == 0;
  for (int64_t i = 0; i < count; ++i, to += o.stride[1], in += kPanel) {
    const float* at = in;
    int64_t col = 0;
    for (; col + kPanel <= columns; col += kPanel, at += kBlock * kPanel) {
      vf x = load(at), y = load(at + kLanes);
      if (aligned) {
        S::stream(to + col, x, y);
      } else {
        S::store(to + col, x);
        S::store(to + col + kLanes, y);
      }
    }
    if (col == columns) continue;
    int64_t n = columns - col, n0 = n < kLanes ? n : kLanes;
    S::store_n(to + col, load(at), n0);
    if (n > kLanes) S::store_n(to + col + kLanes, load(at + kLanes), n - kLanes);
  }
}

// First value head of key head h that the task works on, and how many.
int64_t first_value_head(const Task& t, int64_t h) { return h * t.call->cut.G + t.first / t.call->cut.panels; }
int64_t value_heads(const Task& t) {
  return (t.last - 1) / t.call->cut.panels - t.first / t.call->cut.panels + 1;
}

// For the block that starts at `row` and follows one of `chunks` chunks.
Touch touch_of(const Task& t, int64_t row, int64_t chunks) {
  const Problem& pb = *t.call->problem;
  const Args& a = *t.call->args;
  int64_t bytes = element_bytes(pb.dtype), left = t.span.end - row, keys = t.end_head - t.first_head;
  Touch f{};
  f.steps = keys * chunks * (t.last - t.first);
  if (left <= 0) return f;
  f.tokens = left < kBlock ? left : kBlock;
  f.bursts = (f.tokens + kBurst - 1) / kBurst;
  f.due = f.steps - f.bursts;  // the first burst comes at once
  int64_t b = row / pb.T, token = row % pb.T;
  const thalweg_tensor* tensors[4] = {&a.q, &a.k, &a.v, &a.o};
  for (int j = 0; j < 4; ++j) {
    f.at[j] = element_at(*tensors[j], b, token, j < 2 ? t.first_head : first_value_head(t, t.first_head));
    f.stride[j] = tensors[j]->stride[1] * bytes;
    f.head_stride[j] = tensors[j]->stride[2] * bytes;
    f.heads[j] = j < 2 ? keys : value_heads(t) + (keys - 1) * t.call->cut.G;
  }
  return f;
}

// For `count` tokens from `row` of key head h, while one of `chunks` chunks is worked on.
Fetch fetch_of(const Task& t, int64_t h, int64_t row, int64_t count, int64_t chunks) {
  const Problem& pb = *t.call->problem;
  const Args& a = *t.call->args;
  const Cut& cut = t.call->cut;
  int64_t bytes = element_bytes(pb.dtype);
  Fetch f{};
  f.steps = chunks * (t.last - t.first) * ((cut.Kp + kUpdateRows - 1) / kUpdateRows);
  if (count <= 0) return f;
  f.heads = value_heads(t);
  f.rows = count * (2 + f.heads);
  int64_t b = row / pb.T, token = row % pb.T;
  const thalweg_tensor* tensors[3] = {&a.q, &a.k, &a.v};
  for (int j = 0; j < 3; ++j) {
    f.at[j] = element_at(*tensors[j], b, token, j < 2 ? h : first_value_head(t, h));
    f.stride[j] = tensors[j]->stride[1] * bytes;
  }
  f.value_stride = a.v.stride[2] * bytes;
  f.k_bytes = pb.K * bytes;
  f.v_bytes = pb.V * bytes;
  return f;
}

// ---- states in storage --------------------------------------------------------------------------------

float* unit_state(const Task& t, int64_t h, int64_t unit) {
  const Cut& cut = t.call->cut;
  return t.x.s + ((h - t.first_head) * cut.units + unit - t.first) * cut.Kp * kPanel;
}

// Columns of a unit of key head h; its value head.
struct Columns {
  int64_t hv, first, count;
};
Columns columns_of(const Task& t, int64_t h, int64_t unit) {
  const Cut& cut = t.call->cut;
  int64_t first = unit % cut.panels * kPanel, left = t.call->problem->V - first;
  return {h * cut.G + unit / cut.panels, first, left < kPanel ? left : kPanel};
}

void clear_scratch_states(const Task& t) {
  const Cut& cut = t.call->cut;
  memset(t.x.s, 0, size_t((t.end_head - t.first_head) * cut.units * cut.Kp * kPanel) * sizeof(float));
}

void read_states(const Task& t) {
  const Problem& pb = *t.call->problem;
  const thalweg_tensor& from = t.call->args->initial_state;
  clear_scratch_states(t);
  if (!from.dtype) return;
  for (int64_t h = t.first_head; h < t.end_head; ++h)
    for (int64_t unit = t.first; unit < t.last; ++unit) {
      Columns c = columns_of(t, h, unit);
      read_state(from.dtype, element_at(from, t.n, c.hv, 0, c.first), from.stride[2], from.stride[3], pb.K, c.count,
                 unit_state(t, h, unit), kPanel, t.x.line);
    }
}

void write_states(const Task& t, const thalweg_tensor& to, int64_t index) {
  if (!to.dtype) return;
  for (int64_t h = t.first_head; h < t.end_head; ++h)
    for (int64_t unit = t.first; unit < t.last; ++unit) {
      Columns c = columns_of(t, h, unit);
      write_state(to.dtype, element_at(to, index, c.hv, 0, c.first), to.stride[2], to.stride[3],
                  t.call->problem->K, c.count, unit_state(t, h, unit), kPanel, t.x.line);
    }
}

// Zeroes the rows of chunk_states between this sequence's last checkpoint and the next sequence's first.
void clear_unused(const Task& t) {
  const Problem& pb = *t.call->problem;
  const thalweg_tensor& to = t.call->args->chunk_states;
  if (!to.dtype) return;
  int64_t length = t.span.end - t.span.begin, used = length > 0 ? (length + pb.every - 1) / pb.every : 1;
  int64_t from = t.span.begin / pb.every + t.n + used;
  int64_t end = t.n + 1 < pb.N ? t.span.end / pb.every + t.n + 1 : to.shape[0];
  if (from >= end) return;
  clear_scratch_states(t);
  for (int64_t r = from; r < end; ++r) write_states(t, to, r);
}

// ---- a task -------------------------------------------------------------------------------------------

template <class S>
void run_head(const Task& t, int64_t row, int64_t count, Ahead* ahead) {
  const Cut& cut = t.call->cut;
  load_keys<S>(t, row, count);
  int64_t chunks = (count + C - 1) / C;
  for (int64_t unit = t.first; unit < t.last;) {
    int64_t hv = t.h * cut.G + unit / cut.panels, first = unit % cut.panels;
    int64_t last = t.last - unit < cut.panels - first ? first + t.last - unit : cut.panels;
    load_gates(t, hv, row, count);
    load_values<S>(t, hv, row, count, first, last);
    for (int64_t c = 0; c < chunks; ++c) load_decays(t, c);
    for (int64_t panel = first; panel < last; ++panel, ++unit) {
      for (int64_t c = 0; c < chunks; ++c) {
        int64_t rows = count - c * C < C ? count - c * C : C;
        const Scratch& x = t.x;
        Chunk chunk{cut.Kp, rows, x.xk + c * cut.Kp * C, x.xq + c * cut.Kp * C, x.l + c * C * C, x.p + c * C * C,
                    x.e + c * C, x.d + c * C, x.beta + c * C, x.vo + ((panel - first) * kBlock + c * C) * kPanel,
                    x.u, x.w, unit_state(t, t.h, unit)};
        touch(ahead);
        chunk_rows(chunk);
        update_state(chunk, &ahead->fetch);
      }
    }
    store_output<S>(t, hv, row, count, first, last);
  }
}

// The heads of a task take turns block by block: a token's rows of neighbouring heads share a page.
template <class S>
void run_block(Task& t, int64_t row, int64_t count) {
  int64_t chunks = (count + C - 1) / C;
  int64_t left = t.span.end - row - count, next = left < kBlock ? left : kBlock;
  Ahead ahead;
  ahead.touch = touch_of(t, row + count, chunks);
  for (t.h = t.first_head; t.h < t.end_head; ++t.h) {
    ahead.next_block = t.h + 1 == t.end_head;
    ahead.fetch = ahead.next_block ? fetch_of(t, t.first_head, row + count, next, chunks)
                                   : fetch_of(t, t.h + 1, row, count, chunks);
    ahead.fetch.limit = ahead.next_block ? ahead.touch.touched : count;
    run_head<S>(t, row, count, &ahead);
  }
}

template <class S>
void run_task(Task& t) {
  const Problem& pb = *t.call->problem;
  const Args& a = *t.call->args;
  read_states(t);
  int64_t length = t.span.end - t.span.begin;
  if (length == 0) write_states(t, a.chunk_states, t.span.begin / pb.every + t.n);
  for (int64_t at = 0; at < length;) {
    int64_t count = length - at < kBlock ? length - at : kBlock;
    if (a.chunk_states.dtype) {
      if (at % pb.every == 0) write_states(t, a.chunk_states, t.span.begin / pb.every + t.n + at / pb.every);
      if (pb.every - at % pb.every < count) count = pb.every - at % pb.every;
    }
    run_block<S>(t, t.span.begin + at, count);
    at += count;
  }
  write_states(t, a.final_state, t.n);
  clear_unused(t);
  stream_fence();
}

// chunk_states of a call without sequences.
void clear_states(const Problem& pb, const thalweg_tensor& to) {
  const float zeros[512] = {};
  for (int64_t r = 0; to.dtype && r < to.shape[0]; ++r)
    for (int64_t hv = 0; hv < pb.HV; ++hv)
      for (int64_t k = 0; k < pb.K; ++k)
        write_strided(to.dtype, element_at(to, r, hv, k), to.stride[3], pb.V, zeros);
}

void clear_rows(const Call& call, int64_t begin, int64_t end) {
  const Problem& pb = *call.problem;
  for (int64_t row = begin; row < end; ++row)
    for (int64_t hv = 0; hv < pb.HV; ++hv)
      memset(element_at(call.args->o, row / pb.T, row % pb.T, hv), 0, size_t(pb.V * element_bytes(pb.dtype)));
}

void task(void* arg, int64_t i, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& pb = *call.problem;
  int64_t parts = call.cut.parts, units = call.cut.G * call.cut.panels;
  int64_t pieces = pb.N * call.cut.groups * parts;
  if (i >= pieces) {
    int64_t begin = call.rows_end + (i - pieces) * kZeroRows, end = pb.B * pb.T;
    clear_rows(call, begin, begin + kZeroRows < end ? begin + kZeroRows : end);
    return;
  }
  Task t;
  t.call = &call;
  carve(call.cut, call.slots + slot * call.slot_bytes, &t.x);
  int64_t part = i % parts;
  t.first_head = i / parts % call.cut.groups * call.cut.heads;
  t.end_head = t.first_head + call.cut.heads;
  t.h = t.first_head;
  t.n = i / parts / call.cut.groups;
  t.first = units * part / parts;
  t.last = units * (part + 1) / parts;
  t.span = sequence_span(pb, call.args->cu_seqlens, t.n);
  if (pb.dtype == THALWEG_F32) run_task<F32>(t);
  if (pb.dtype == THALWEG_BF16) run_task<Bf16>(t);
  if (pb.dtype == THALWEG_F16) run_task<F16>(t);
}

}  // namespace

namespace THALWEG_ISA {

int64_t cpu_chunk_fwd_slot_bytes(const Problem& problem) {
  Scratch unused;
  return carve(cut_of(problem, kMaxHeads, 1), nullptr, &unused);
}

void cpu_chunk_fwd(const Problem& problem, const Plan& plan, const Args& args, const Exec& exec) {
  Cut cut = cut_of(problem, heads_of(problem, args), plan.num_slots);
  Call call{&problem, &args, cut, exec.workspace + plan.shared_bytes, plan.slot_bytes, 0};
  if (!problem.packed) call.rows_end = problem.B * problem.T;
  else if (problem.N == 0) clear_states(problem, args.chunk_states);
  else call.rows_end = sequence_span(problem, args.cu_seqlens, problem.N - 1).end;
  int64_t left = problem.B * problem.T - call.rows_end;
  int64_t tasks = problem.N * call.cut.groups * call.cut.parts + (left + kZeroRows - 1) / kZeroRows;
  parallel_tasks(exec, tasks, plan.num_slots, task, &call);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::gated_delta_rule
