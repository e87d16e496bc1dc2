// cpu_chunk_bwd: gated delta rule, backward, chunked, compiled once per instruction set.
//
// Math     for each chunk of C tokens, S the state that enters it, dS the gradient of the state that leaves it,
//          D_ij = exp(g_{j+1} + ... + g_i), E_i = exp(g_0 + ... + g_i), n the chunk's last token:
//          forward   r_i = v_i - E_i S^T k_i - sum_{j<i} D_ij dot(k_i, k_j) u_j      u_i = beta_i r_i
//                    S  <- E_n S + sum_j k_j (D_nj u_j)^T
//          backward  y_i = D_ni dS^T k_i + sum_{l>=i} scale D_li dot(q_l, k_i) d_o_l
//                          - sum_{l>i} beta_l D_li dot(k_l, k_i) y_l                 d_v_i = beta_i y_i
//                    d_beta_i = dot(y_i, r_i)
//                    R_ij = scale D_ij dot(d_o_i, u_j), i >= j;   W_ij = -D_ij dot(d_v_i, u_j), i > j
//                    d_q_i = scale E_i S d_o_i + sum_j R_ij k_j
//                    d_k_j = D_nj dS u_j - E_j S d_v_j + sum_i R_ij q_i + sum_i (W + W^T)_ij k_i
//                    d_g_t = E_n sum(S * dS) + sum_{j<t} D_nj dot(k_j, dS u_j)
//                          + sum_{i>=t} E_i (scale dot(q_i, S d_o_i) - dot(k_i, S d_v_i))
//                          + sum_{i>=t>j} (R_ij dot(q_i, k_j) + W_ij dot(k_i, k_j))
//                    dS <- E_n dS + sum_i E_i (scale q_i d_o_i^T - k_i d_v_i^T)
// Shapes   q,k,d_q,d_k [B T H K]  v,d_o,d_v [B T HV V]  g,beta,d_g,d_beta [B T HV]  states [N HV K V]
//          A_log,dt_bias and their gradients [HV]
// Takes    q,k,v,d_o,d_q,d_k,d_v float32, bfloat16 or float16, rows contiguous, any alignment and outer strides;
//          K and V from 1 to 512 (padded with 0 in scratch); everything else of the operator. Not float64.
// Threads  a task is a (block of sequences, key head), its value heads in order, two at a time; at most kMaxBlocks
//          blocks. d_A_log and d_dt_bias: one float64 sum per task and head, added in order after all tasks. The
//          cut depends on the problem's size alone, so no bit depends on the number of threads.
// Vectors  tiles of 8x2 (AVX-512) and 6x2, 5x2 (AVX2) vectors (blocks/gemm.h). States are panels of 2 vectors of
//          columns. Products with S or dS against d_o, d_v, r give columns over the chunk's tokens, so d_q and d_k are
//          summed transposed and turned once per key head.
// Tile     C = 16: one vector of AVX-512, two of AVX2
// Scratch  per slot, floats, for T tokens of the longest sequence and h = min(HV/H, 2) heads: deltas h T Vp; keys T Kp;
//          kept states h Kp Vp T/every, where every doubles from 16 to 256 tokens until they need no more than
//          kStateBytes; states between two kept ones 16 h Kp Vp; d_q and d_k sums 2 T Kp if HV/H > 2.
//          B1 T4096 H16 HV32 K=V=128: 12.4 MiB a slot. Slot 0 holds the sums of all tasks as well.
// Numerics float32, float32 state. Exponents are sums of neighbouring gates, never differences of sums. d_g adds
//          up only products that have token t's decay as a factor: nothing cancels under strong decay. No token's
//          row reaches what does not depend on it, infinities and NaN included: d_q of other tokens' q and d_o and
//          of later k, v, g, beta; later tokens' gradients of q and d_o; d_v and what is earlier of v. Triangles are
//          walked or selected, never masked by a product with 0; d_q and d_k, whose products take the zeros along,
//          have a slower form for a chunk whose q or k is not finite (or overflows in their products).
//          RMS ratio against float64, random data, every gate from 0 to -inf: 1e-7 .. 4e-7; d_A_log, d_dt_bias 5e-7.
//          Alike keys with beta near 2 make deltas that alternate in sign and cancel, so dot(k_i, k_j) is summed to
//          the last digit, and so is dot(d_v_i, u_j), which d_g adds up. Cosine 0.9 and 0.99, constant beta 1, 1.9, 2,
//          gate 0 and -0.05, T 150 and 1000, K = V = 64: d_q, d_k, d_v, states 0.4 to 2.6 times the error of the
//          float32 recurrence, d_beta up to 3.0, d_g mostly below 2.5, up to 3.3 by the seed, and 4.1 at K = V = 40;
//          plain sums gave 4 to 7 times.
// Traps    - A token's row of [B T H K] storage is on a page of its own; without asking ahead the rows cost 20 %.
//            Whole rows between tiles lost as much as they won (walks one after the other); walks in bursts, the
//            other lines between products, won 3 % over whole rows in bursts.
//          - GCC drops calls of a function that only prefetches, unless the prefetch is asm.
//          - A state kept every 16 tokens saves the recomputation (10 % of the FLOPs) and is slower: reading the
//            states back from memory doubles the products with S. 4 to 8 MiB of them is best; 2 and 16 lose 3 %.
//          - r, not u, is kept: d_beta needs it where beta is 0.
//          - dot(k_i, k_j) summed in blocks of 8 or 16 without what is lost between them still gave 4 times the
//            recurrence's error; parts of 4 instead of 8 are no better. Keeping it from the forward pass won nothing.
// Measured 2 cores of an EPYC (Zen 5), 4 KiB pages, heavily loaded by others; B1 T4096 H16 HV32 K=V=128 float32, fused
//          norm, gate and sigmoid; 45.1 GFLOP over CPU time, against the FMA peak in CPU time of the same process:
//          AVX-512 0.64 .. 0.68, AVX2 0.80 .. 0.82; careful sums and walked triangles cost 1 % and 2 % of it.
//          Predicted 0.87 from 39 GFLOP done plus 3 recomputed; lost: page walks and cold rows 8 %, state writes
//          5 %, tails of interrupted steps 10 %. bfloat16 0.95 (AVX-512) and 0.98 (AVX2) of the float32 time. H2 HV4
//          bfloat16: T262144 takes 65 times as long as T4096. Per step (AVX-512): products with S and dS for d_q,
//          d_k 23 %, forward and recomputed state updates 20 %, dS 18 %, d_v with its solve 12 %, deltas 8 %, rows
//          in and out 8 %.
#include "thalweg/ops/gated_delta_rule/cpu_chunk_bwd_steps.h"

namespace thalweg::gated_delta_rule {
namespace {

using Args = thalweg_gated_delta_rule_bwd_args;

constexpr int64_t kHeads = 2;              // value heads of a group that go through a chunk together
constexpr int64_t kMaxBlocks = 256;        // of sequences; a task is a block and a key head
constexpr int64_t kStateBytes = 4 << 20;  // wanted for the states that a slot keeps
constexpr int64_t kMaxEvery = 256;         // tokens between two of them

// ---- workspace --------------------------------------------------------------------------------------

struct Layout {
  Dims dims;
  int64_t key_heads;
  int64_t group;    // value heads of a key head
  int64_t heads;    // of them together in a chunk
  int64_t chunks;   // of the longest sequence
  int64_t every;    // chunks between two kept states
  int64_t states;   // floats for them, for all heads
  int64_t blocks;   // of sequences
};

Layout layout_of(const Problem& problem) {
  Layout l{};
  l.dims = {problem.K, problem.V, round_up(problem.K, kRows), round_up(problem.V, kPanel)};
  l.key_heads = problem.H;
  l.group = problem.H > 0 ? problem.HV / problem.H : 0;
  l.heads = least(l.group, kHeads);
  l.chunks = (problem.longest + kC - 1) / kC;
  const int64_t state = l.heads * l.dims.Kp * l.dims.Vp, wanted = kStateBytes / int64_t(sizeof(float));
  l.every = 1;
  while (l.every * kC < kMaxEvery && (l.chunks + l.every - 1) / l.every * state > wanted) l.every *= 2;
  l.states = (l.chunks + l.every - 1) / l.every * state;
  l.blocks = least(problem.N, kMaxBlocks);
  return l;
}

struct Slot {
  Keys keys;
  Head head;
  float* rows;         // [C Kp] scratch: a gradient on its way out, a line of a state
  float* dS;           // [heads] panels
  float* states;       // [states kept][heads] panels
  float* between;      // [every - 1][heads] panels: states inside the current segment
  float* k_rows;       // [chunks] of [C Kp], normalised
  float* k_rstds;      // [chunks][C]
  Scalars* scalars;    // [chunks][heads]
  float* factors;      // [chunks][heads][C] what the deltas enter the next state with
  float* carries;      // [chunks][heads] decay of the state over a chunk
  float* deltas;       // [chunks][heads] panels of [C Vp]
  double* partials;    // [blocks HV 2]: d_A_log, d_dt_bias of each task; slot 0's serve them all
  float* accumulated;  // [chunks][2] of [Kp C]: d_q, d_k when the group takes several rounds
};

void carve_keys(Carver& c, const Dims& d, Keys* k) {
  k->q_rows = c.take(kC * d.Kp);
  k->q_cols = c.take(kC * d.Kp), k->k_cols = c.take(kC * d.Kp);
  k->d_q_cols = c.take(kC * d.Kp), k->d_k_cols = c.take(kC * d.Kp);
  k->qk = c.take(kSquare), k->kk = c.take(kSquare);
  k->reads = c.take(kSquare), k->writes = c.take(kSquare), k->weights = c.take(2 * kSquare);
  k->q_rstd = c.take(kC);
}
void carve_head(Carver& c, const Dims& d, Head* h) {
  h->D = c.take(kSquare), h->minus_L = c.take(kSquare), h->P = c.take(kSquare);
  h->Z = c.take(kSquare), h->products = c.take(kSquare);
  h->E = c.take(kC), h->read_gate = c.take(kC), h->write_gate = c.take(kC), h->r_dot = c.take(kC * kLanes);
  h->d_o = c.take(kC * d.Vp), h->d_v = c.take(kC * d.Vp);
  h->d_o_decayed = c.take(kC * d.Vp), h->d_v_decayed = c.take(kC * d.Vp), h->cols = c.take(3 * kC * d.Vp);
}

int64_t carve(const Layout& l, char* base, Slot* slot) {
  Carver c{base, 0};
  const int64_t state = l.heads * l.dims.Kp * l.dims.Vp;
  carve_keys(c, l.dims, &slot->keys);
  carve_head(c, l.dims, &slot->head);
  slot->rows = c.take(kC * l.dims.Kp);
  slot->dS = c.take(state);
  slot->between = c.take(kMaxEvery / kC * state);
  slot->k_rows = c.take(l.chunks * kC * l.dims.Kp);
  slot->k_rstds = c.take(l.chunks * kC);
  slot->scalars = reinterpret_cast<Scalars*>(c.take(l.chunks * l.heads * int64_t(sizeof(Scalars) / sizeof(float))));
  slot->factors = c.take(l.chunks * l.heads * kC);
  slot->carries = c.take(l.chunks * l.heads);
  slot->deltas = c.take(l.chunks * l.heads * kC * l.dims.Vp);
  slot->accumulated = c.take(l.group > l.heads ? l.chunks * 2 * l.dims.Kp * kC : 0);
  slot->partials = reinterpret_cast<double*>(c.take(l.blocks * l.group * l.key_heads * 4));
  // Last, and never less than a longer sequence of the same problem would want: it may keep fewer.
  slot->states = c.take(l.every > 1 ? most(l.states, kStateBytes / int64_t(sizeof(float))) : l.states);
  return c.used;
}

// ---- one task ---------------------------------------------------------------------------------------

struct Call {
  const Problem& problem;
  const Args& args;
  const Layout& layout;
  char* slots;
  int64_t slot_bytes;
  double* partials;  // [blocks HV 2]
};

// Value heads [first, first + count) of key head h in sequence [begin, end).
struct Work {
  const Problem& problem;
  const Args& args;
  const Layout& layout;
  Slot slot;
  int64_t n, h, begin, end, first, count;
  float scale;
  HeadGate gates[kHeads];
  double sums[kHeads][2];

  int64_t chunks() const { return (end - begin + kC - 1) / kC; }
  int64_t tokens(int64_t c) const { return c < 0 || c >= chunks() ? 0 : least(kC, end - begin - c * kC); }
  Tokens at(const thalweg_tensor& t, int64_t c, int64_t head) const {
    return tokens_at(t, problem.T, begin + c * kC, head);
  }
  void want(Ahead* ahead, const thalweg_tensor& t, int64_t c, int64_t head, int64_t dim, bool to_write = false) const {
    if (tokens(c) > 0) thalweg::want(ahead, at(t, c, head), tokens(c), dim, to_write);
  }
  int64_t state_floats() const { return layout.dims.Kp * layout.dims.Vp; }
  float* state(int64_t c, int64_t x) const {  // before chunk c
    const int64_t kept = c / layout.every, inside = c % layout.every;
    float* base = inside ? slot.between + (inside - 1) * layout.heads * state_floats()
                         : slot.states + kept * layout.heads * state_floats();
    return base + x * state_floats();
  }
  float* deltas(int64_t c, int64_t x) const {
    return slot.deltas + (c * layout.heads + x) * kC * layout.dims.Vp;
  }
};

// What the value heads share. The keys' rows and norms stay in the slot, so that the scattered rows of the
// tensor are walked once.
void set_chunk(Work& w, int64_t c) {
  w.slot.keys.k_rows = w.slot.k_rows + c * kC * w.layout.dims.Kp;
  w.slot.keys.k_rstd = w.slot.k_rstds + c * kC;
}

void load_keys(const Work& w, int64_t c) {
  const Dims& d = w.layout.dims;
  const Keys& keys = w.slot.keys;
  load_rows<flat>(w.at(w.args.k, c, w.h), w.tokens(c), d.K, d.Kp, keys.k_rows);
  transpose(keys.k_rows, d.Kp, kC, d.Kp, keys.k_cols, kC);
  if (w.args.use_qk_l2norm) {
    normalise_columns(keys.k_cols, d.Kp, keys.k_rstd);
    scale_rows(keys.k_rows, d.Kp, keys.k_rstd);
  }
  key_products(keys.k_cols, d.Kp, keys.kk);
}

void load_queries(const Work& w, int64_t c) {
  const Dims& d = w.layout.dims;
  const Keys& keys = w.slot.keys;
  transpose(keys.k_rows, d.Kp, kC, d.Kp, keys.k_cols, kC);
  key_products(keys.k_cols, d.Kp, keys.kk);
  load_rows<flat>(w.at(w.args.q, c, w.h), w.tokens(c), d.K, d.Kp, keys.q_rows);
  transpose(keys.q_rows, d.Kp, kC, d.Kp, keys.q_cols, kC);
  if (w.args.use_qk_l2norm) {
    normalise_columns(keys.q_cols, d.Kp, keys.q_rstd);
    scale_rows(keys.q_rows, d.Kp, keys.q_rstd);
  }
  token_products(keys.q_cols, keys.k_cols, d.Kp, keys.qk);
}

// Deltas of every chunk, and the states that are kept; those between are not: one buffer serves for all.
void run_forward(Work& w) {
  const Dims& d = w.layout.dims;
  for (int64_t c = 0; c < w.chunks(); ++c) {
    set_chunk(w, c);
    load_keys(w, c);
    for (int64_t x = 0; x < w.count; ++x) {
      const bool is_last = x + 1 == w.count;
      Ahead next{};
      next.calls = d.Vp / kPanel * (1 + d.Kp / kRows);
      w.want(&next, w.args.v, is_last ? c + 1 : c, w.first + (is_last ? 0 : x + 1), d.V);
      if (is_last) w.want(&next, w.args.k, c + 1, w.h, d.K);
      touch(next);
      const int64_t hv = w.first + x, at = c * w.layout.heads + x;
      w.slot.head.scalars = w.slot.scalars + at;
      load_scalars(w.args, w.gates[x], w.at(w.args.g, c, hv), w.at(w.args.beta, c, hv), w.tokens(c),
                   w.slot.head.scalars);
      decays(w.slot.head.scalars->g, w.slot.head.D, w.slot.head.E);
      load_rows<paneled>(w.at(w.args.v, c, w.first + x), w.tokens(c), d.V, d.Vp, w.deltas(c, x));
      const float* S = c % w.layout.every == 0 ? w.state(c, x) : w.state(1, x);
      chunk_deltas(d, w.slot.keys, w.slot.head, S, w.deltas(c, x), &next);
      if (c + 1 == w.chunks()) continue;
      float* S_after = (c + 1) % w.layout.every == 0 ? w.state(c + 1, x) : w.state(1, x);
      write_factors(w.slot.head, w.slot.factors + at * kC);
      w.slot.carries[at] = w.slot.head.E[kC - 1];
      advance_state(d, w.slot.keys.k_rows, w.slot.factors + at * kC, w.slot.carries[at], w.deltas(c, x),
                    w.slot.head.d_v_decayed, S, S_after, &next);
    }
  }
}

// The states between the one kept before chunk c and that before chunk c, from the deltas.
void run_again(const Work& w, int64_t c) {
  const Dims& d = w.layout.dims;
  Ahead none{};
  none.calls = 1;
  for (int64_t i = c / w.layout.every * w.layout.every; i < c; ++i) {
    for (int64_t x = 0; x < w.count; ++x) {
      const int64_t at = i * w.layout.heads + x;
      advance_state(d, w.slot.k_rows + i * kC * d.Kp, w.slot.factors + at * kC, w.slot.carries[at], w.deltas(i, x),
                    w.slot.head.d_v_decayed, w.state(i, x), w.state(i + 1, x), &none);
    }
  }
}

// d_g and d_beta of a chunk, through what was fused.
void store_scalars(Work& w, int64_t c, int64_t x, const float* d_g) {
  const Scalars& s = *w.slot.head.scalars;
  const Tokens to_g = w.at(w.args.d_g, c, w.first + x), to_beta = w.at(w.args.d_beta, c, w.first + x);
  float raw[kC] = {}, d_beta[kC] = {};
  for (int64_t i = 0; i < w.tokens(c); ++i) {
    raw[i] = d_g[i] * s.g_slope[i];
    d_beta[i] = sum_lanes(w.slot.head.r_dot + i * kLanes) * s.beta_slope[i];
    if (!w.args.use_gate) continue;
    w.sums[x][0] += d_g[i] == 0 ? 0 : double(d_g[i]) * s.g[i];
    w.sums[x][1] += raw[i];
  }
  if (to_g.data) write_strided(to_g.dtype, to_g.data, to_g.step, w.tokens(c), raw);
  if (to_beta.data) write_strided(to_beta.dtype, to_beta.data, to_beta.step, w.tokens(c), d_beta);
}

void run_head_backward(Work& w, int64_t c, int64_t x) {
  const Dims& d = w.layout.dims;
  const Keys& keys = w.slot.keys;
  Head& head = w.slot.head;
  const float *S = w.state(c, x), *r = w.deltas(c, x);
  float* dS = w.slot.dS + x * w.state_floats();
  head.scalars = w.slot.scalars + c * w.layout.heads + x;
  decays(head.scalars->g, head.D, head.E);
  const bool is_last = x + 1 == w.count;
  Ahead now{}, next{};
  now.calls = d.Vp / kPanel, next.calls = d.Kp / kRows * (1 + d.Vp / kPanel);
  w.want(&now, w.args.d_v, c, w.first + x, d.V, true);
  w.want(&next, w.args.d_o, is_last ? c - 1 : c, w.first + (is_last ? 0 : x + 1), d.V);
  if (is_last) {
    w.want(&next, w.args.q, c - 1, w.h, d.K);
    w.want(&next, w.args.d_q, c, w.h, d.K, true);
    w.want(&next, w.args.d_k, c, w.h, d.K, true);
  }
  touch(now);
  touch(next);
  load_rows<paneled>(w.at(w.args.d_o, c, w.first + x), w.tokens(c), d.V, d.Vp, head.d_o);
  backward_factors(keys, head, w.scale);
  chunk_d_v(d, keys, head, r, dS, w.scale, &now);
  store_rows<paneled>(w.at(w.args.d_v, c, w.first + x), w.tokens(c), d.V, d.Vp, head.d_v);
  turn_columns(d, head.d_o, head.d_v, r, head.cols);
  state_gradients(d, keys, head, S, dS, w.scale, &next);
  const float state_product = carry_back(d, keys, head, S, dS, &next);
  token_gradients(d, keys, head, w.scale);
  alignas(64) float d_g[kC];
  gate_gradient(head, state_product, d_g);
  store_scalars(w, c, x, d_g);
}

// d_q or d_k of a chunk, summed over the group, through the norm where it was fused.
void store_rows_of(const Work& w, const thalweg_tensor& t, int64_t c, const float* cols, const float* rows,
                   const float* rstd) {
  if (!is_there(t)) return;
  const Dims& d = w.layout.dims;
  transpose(cols, kC, d.Kp, kC, w.slot.rows, d.Kp);
  if (w.args.use_qk_l2norm) normalise_gradient(rows, rstd, d.Kp, w.slot.rows);
  store_rows<flat>(w.at(t, c, w.h), w.tokens(c), d.K, d.Kp, w.slot.rows);
}

void run_backward(Work& w) {
  const Dims& d = w.layout.dims;
  Keys& keys = w.slot.keys;
  const int64_t columns = d.Kp * kC, group_begin = w.h * w.layout.group;
  const bool is_first = w.first == group_begin, is_last = w.first + w.count == group_begin + w.layout.group;
  for (int64_t c = w.chunks() - 1; c >= 0; --c) {
    if (c % w.layout.every == w.layout.every - 1 || c + 1 == w.chunks()) run_again(w, c);
    if (w.layout.group > w.layout.heads) {
      keys.d_q_cols = w.slot.accumulated + 2 * c * columns;
      keys.d_k_cols = keys.d_q_cols + columns;
    }
    if (is_first) {
      memset(keys.d_q_cols, 0, size_t(columns) * sizeof(float));
      memset(keys.d_k_cols, 0, size_t(columns) * sizeof(float));
    }
    set_chunk(w, c);
    load_queries(w, c);
    memset(keys.reads, 0, kSquare * sizeof(float));
    memset(keys.writes, 0, kSquare * sizeof(float));
    for (int64_t x = 0; x < w.count; ++x) run_head_backward(w, c, x);
    pair_gradients(d, keys);
    if (!is_last) continue;
    store_rows_of(w, w.args.d_q, c, keys.d_q_cols, keys.q_rows, keys.q_rstd);
    store_rows_of(w, w.args.d_k, c, keys.d_k_cols, keys.k_rows, keys.k_rstd);
  }
}

void run_sequence(const Call& call, const Slot& slot, int64_t n, int64_t h, double* partials) {
  const Layout& l = call.layout;
  const Dims& d = l.dims;
  const Span span = sequence_span(call.problem, call.args.cu_seqlens, n);
  for (int64_t first = h * l.group; first < (h + 1) * l.group; first += l.heads) {
    Work w{call.problem, call.args, l, slot, n, h, span.begin, span.end, first,
           least(l.heads, (h + 1) * l.group - first), float(call.problem.scale), {}, {}};
    for (int64_t x = 0; x < w.count; ++x) {
      w.gates[x] = head_gate(call.args, first + x);
      load_state(call.args.d_final_state, n, first + x, d, slot.dS + x * w.state_floats(), slot.rows);
      if (w.chunks() > 0) load_state(call.args.initial_state, n, first + x, d, w.state(0, x), slot.rows);
    }
    run_forward(w);
    run_backward(w);
    for (int64_t x = 0; x < w.count; ++x) {
      store_state(call.args.d_initial_state, n, first + x, d, slot.dS + x * w.state_floats(), slot.rows);
      partials[2 * (first + x)] += w.sums[x][0];
      partials[2 * (first + x) + 1] += w.sums[x][1];
    }
  }
}

void zero_tail(const Call& call, int64_t h) {
  const Problem& p = call.problem;
  const int64_t group = call.layout.group;
  const int64_t begin = p.N > 0 ? sequence_span(p, call.args.cu_seqlens, p.N - 1).end : 0, end = p.B * p.T;
  zero_rows(call.args.d_q, p.T, begin, end, h);
  zero_rows(call.args.d_k, p.T, begin, end, h);
  for (int64_t hv = h * group; hv < (h + 1) * group; ++hv) {
    zero_rows(call.args.d_v, p.T, begin, end, hv);
    zero_rows(call.args.d_g, p.T, begin, end, hv);
    zero_rows(call.args.d_beta, p.T, begin, end, hv);
  }
}

// Task: block of sequences i / H, key head i % H; one block more zeroes the rows past the last sequence.
void run_task(void* arg, int64_t i, int64_t slot_index) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.problem;
  const Layout& l = call.layout;
  const int64_t block = i / p.H, h = i % p.H;
  if (block == l.blocks) return zero_tail(call, h);
  Slot slot;
  carve(l, call.slots + slot_index * call.slot_bytes, &slot);
  double* partials = call.partials + 2 * block * p.HV;
  for (int64_t hv = h * l.group; hv < (h + 1) * l.group; ++hv) partials[2 * hv] = partials[2 * hv + 1] = 0;
  const int64_t n_begin = p.N * block / l.blocks, n_end = p.N * (block + 1) / l.blocks;
  for (int64_t n = n_begin; n < n_end; ++n) run_sequence(call, slot, n, h, partials);
}

void sum_partials(const Call& call, const thalweg_tensor& t, int64_t which) {
  if (!is_there(t)) return;
  for (int64_t hv = 0; hv < call.problem.HV; ++hv) {
    double sum = 0;
    for (int64_t block = 0; block < call.layout.blocks; ++block)
      sum += call.partials[2 * (block * call.problem.HV + hv) + which];
    store_element(t, sum, hv);
  }
}

}  // namespace

namespace THALWEG_ISA {

int64_t cpu_chunk_bwd_slot_bytes(const Problem& problem) {
  Slot slot;
  return carve(layout_of(problem), nullptr, &slot);
}

void cpu_chunk_bwd(const Problem& problem, const Plan& plan, const thalweg_gated_delta_rule_bwd_args& args,
                   const Exec& exec) {
  const Layout layout = layout_of(problem);
  char* slots = exec.workspace + plan.shared_bytes;
  Slot first;
  carve(layout, slots, &first);
  Call call{problem, args, layout, slots, plan.slot_bytes, first.partials};
  const bool tail = problem.packed && problem.T > 0;
  parallel_tasks(exec, (layout.blocks + tail) * problem.H, plan.num_slots, run_task, &call);
  sum_partials(call, args.d_A_log, 0);
  sum_partials(call, args.d_dt_bias, 1);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::gated_delta_rule
