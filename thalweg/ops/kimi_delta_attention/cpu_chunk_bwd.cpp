// cpu_chunk_bwd: Kimi delta attention, backward, chunked, compiled once per instruction set.
//
// Math     for each chunk of C tokens, S the state that enters it, dS the gradient of the state that leaves it,
//          D_ij = exp(g_{j+1} + ... + g_i), E_i = exp(g_0 + ... + g_i), both per key channel, n the chunk's last
//          token, . the product channel by channel, KK_ij = dot(k_i, D_ij . k_j), QK_ij = dot(q_i, D_ij . k_j):
//          forward   r_i = v_i - S^T (E_i . k_i) - sum_{j<i} KK_ij u_j               u_i = beta_i r_i
//                    S  <- diag(E_n) S + sum_j (D_nj . k_j) u_j^T
//          backward  y_i = dS^T (D_ni . k_i) + sum_{l>=i} scale QK_li d_o_l - sum_{l>i} beta_l KK_li y_l
//                    d_v_i = beta_i y_i        d_beta_i = dot(y_i, r_i)
//                    R_ij = scale dot(d_o_i, u_j), i >= j;   W_ij = -dot(d_v_i, u_j), i > j
//                    d_q_i = scale E_i . (S d_o_i) + sum_j R_ij D_ij . k_j
//                    d_k_j = -E_j . (S d_v_j) + sum_{i<j} W_ji D_ji . k_i + R_jj q_j + b_j(j)
//                    b_j(t) = D_nt . (dS u_j) + sum_{i>t} D_it . (R_ij q_i + W_ij k_i)
//                    d_g_t = E_n . rowsum(S . dS) + sum_{i>=t} E_i . (scale q_i . (S d_o_i) - k_i . (S d_v_i))
//                          + sum_{j<t} D_tj . k_j . (b_j(t) + R_tj q_t + W_tj k_t)
//                    dS <- diag(E_n) dS + sum_i (E_i . scale q_i) d_o_i^T - (E_i . k_i) d_v_i^T
// Shapes   q,k,d_q,d_k [B T H K]  v,d_o,d_v [B T HV V]  g,d_g [B T HV K]  beta,d_beta [B T HV]  states [N HV K V]
//          A_log,d_A_log [HV]  dt_bias,d_dt_bias [HV K]
// Takes    q,k,v,d_o,d_q,d_k,d_v float32, bfloat16 or float16, rows contiguous, any alignment and outer strides; g and
//          d_g any dtype and strides; K from 4, V from 1 to 512 (padded with 0 in scratch). Not float64 q.
// Threads  a task is a (block of sequences, key head), its value heads in order, two at a time; at most kMaxBlocks
//          blocks. d_A_log and d_dt_bias: float64 sums per block, added in order after all tasks. The cut depends on
//          the problem's size alone, so no bit depends on the number of threads.
// Vectors  products with S or dS as in the gated delta rule's backward (cpu/blocks/chunk_bwd_*.h), the decays in their
//          rows of keys and queries. What has a token and a channel lies in blocks of 16 channels: lanes are channels,
//          and the pairs of tokens are walked with the decay as a running product, one multiplication a pair.
// Tile     C = 16; 6x2, 5x2 (AVX2) and 8x2 (AVX-512) vectors; a block of 16 channels with its triangle of decayed keys
//          and all that goes with it is 21 KiB
// Scratch  per slot, floats, for T tokens of the longest sequence and h = min(HV/H, 2) heads: deltas h T Vp; gates
//          h T Kp; keys T Kp; products of keys 16 h T; kept states h Kp Vp T/every and those between two kept ones, as
//          in the gated delta rule; d_q and d_k sums 2 T Kp if HV/H > 2. Shared: 64 HV (Kp + 1) float64 at most.
// Numerics float32, float32 state. No exponent is a difference of sums. The decay of a chunk, which states are carried
//          with, and from its start to a token, is exp of a sum; inside a chunk decays are products of at most 15. d_g
//          adds up only products that have token t's decay as a factor: nothing cancels under strong decay. KK is
//          summed in as many parts as a vector has lanes, and dot(d_v_i, u_j) to the last digit: solves with alike
//          keys and beta near 2 repeat their errors. Triangles are walked, so no token's row reaches what does not
//          depend on it, infinities and NaN included. Alike keys (cosine 0.9, 0.99) with beta up to 2: at most 1.8
//          times the error of the float32 recurrence.
// Traps    - The column b_j starts from what the leaving state gives back and is decayed token by token on its way to
//            j; at token t it meets the key as decayed to t. So d_g takes one FMA a pair and no sum that cancels.
//          - Subnormal decays are kept, unlike the gated delta rule's: gradients of states that 16 gates of -6 have
//            decayed are right to the last bit, and a Zen core is not slower; other cores may take assists.
//          - Sub-blocks of 4 tokens with factors of rows and columns would save a third of the pairs' arithmetic, 2 %
//            of the whole, for sums in d_g that must be put together from pieces: not tried.
// Measured AVX2 (2 cores of an EPYC, Zen 3, heavily loaded by others), CPU time of alternating runs in one process, H2
//          HV4 K=V=128 float32, one thread, over the gated delta rule's backward, medians of 7: 1.18 (T4096) and 1.26
//          (T2048); with fused norm, gate and sigmoid 1.28 and 1.27; predicted 1.21. Single pairs spread from 1.0 to
//          1.4 and more. In instructions (T256) 1.14 and 1.19: pairs 6 % of them, decays with the products of keys and
//          queries 9 %, the fused gate 5 %. B1 T4096 H16 HV32 K=V=128: 16.9 MiB a slot. RMS ratio against float64,
//          random data, every gate from 0 to -1000: 6e-8 .. 4e-7. AVX-512: right to the same digits with 16 lanes
//          emulated; not timed.
#include "thalweg/ops/kimi_delta_attention/cpu_chunk_bwd_steps.h"

namespace thalweg::kimi_delta_attention {
namespace {

constexpr int64_t kHeads = 2;              // value heads of a group that go through a chunk together
constexpr int64_t kMaxBlocks = 64;         // of sequences; a task is a block and a key head
constexpr int64_t kStateBytes = 4 << 20;   // wanted for the states that a slot keeps
constexpr int64_t kMaxEvery = 256;         // tokens between two of them

// ---- workspace --------------------------------------------------------------------------------------

struct Layout {
  Dims dims;
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
  float* line;            // [max(Kp, panel)] scratch
  float* bias;            // [heads][Kp] dt_bias
  float* dS;              // [heads] panels
  float* states;          // [states kept][heads] panels
  float* between;         // [every - 1][heads] panels: states inside the current segment
  float* keys_kept;       // [chunks] blocks: k, normalised
  float* rstds;           // [chunks][C]
  Strengths* strengths;   // [chunks][heads]
  float* gates;           // [chunks][heads] blocks: g
  float* kk;              // [chunks][heads][C C]
  float* deltas;          // [chunks][heads] panels of [C Vp]
  float* accumulated;     // [chunks][2] blocks: d_q, d_k when the group takes several rounds
};

void carve_keys(Carver& c, const Dims& d, Keys* k) {
  k->q = c.take(kC * d.Kp), k->q_rstd = c.take(kC);
  k->d_q = c.take(kC * d.Kp), k->d_k = c.take(kC * d.Kp);
}
void carve_head(Carver& c, const Dims& d, Head* h) {
  const int64_t blocks = kC * d.Kp, panels = kC * d.Vp;
  h->a = c.take(blocks), h->e = c.take(blocks), h->decay = c.take(d.Kp);
  h->q_in = c.take(blocks), h->minus_k_in = c.take(blocks), h->k_out = c.take(blocks), h->columns = c.take(blocks);
  h->now = c.take(kSquare), h->lanes = c.take(kSquare * kLanes);
  h->minus_L = c.take(kSquare), h->P = c.take(kSquare), h->reads = c.take(kSquare), h->writes = c.take(kSquare);
  h->d_o = c.take(panels), h->d_v = c.take(panels), h->cols = c.take(3 * panels), h->r_dot = c.take(kC * kLanes);
  h->turned = c.take(3 * kSquare), h->triangle = c.take(kC * kSquare);
  h->S_d_o = c.take(blocks), h->S_d_v = c.take(blocks), h->dS_r = c.take(blocks);
  h->row_sums = c.take(d.Kp * kLanes), h->carried = c.take(d.Kp);
  h->d_g = c.take(blocks), h->raw = c.take(blocks);
}

int64_t carve(const Layout& l, char* base, Slot* slot) {
  Carver c{base, 0};
  const Dims& d = l.dims;
  const int64_t state = l.heads * d.Kp * d.Vp;
  carve_keys(c, d, &slot->keys);
  carve_head(c, d, &slot->head);
  slot->line = c.take(most(d.Kp, kPanel));
  slot->bias = c.take(l.heads * d.Kp);
  slot->dS = c.take(state);
  slot->between = c.take(kMaxEvery / kC * state);
  slot->keys_kept = c.take(l.chunks * kC * d.Kp);
  slot->rstds = c.take(l.chunks * kC);
  slot->strengths = reinterpret_cast<Strengths*>(c.take(l.chunks * l.heads * 2 * kC));
  slot->gates = c.take(l.chunks * l.heads * kC * d.Kp);
  slot->kk = c.take(l.chunks * l.heads * kSquare);
  slot->deltas = c.take(l.chunks * l.heads * kC * d.Vp);
  slot->accumulated = c.take(l.group > l.heads ? l.chunks * 2 * d.Kp * kC : 0);
  // Last, and never less than a longer sequence of the same problem would want: it may keep fewer.
  slot->states = c.take(l.every > 1 ? most(l.states, kStateBytes / int64_t(sizeof(float))) : l.states);
  return c.used;
}

// What one block of sequences adds to the gradients of the fused gate: [K] for d_dt_bias, 1 for d_A_log.
int64_t partial_count(const Problem& problem) { return round_up(problem.K, kRows) + 1; }

// ---- one task ---------------------------------------------------------------------------------------

struct Call {
  const Problem& problem;
  const Args& args;
  const Layout& layout;
  char* slots;
  int64_t slot_bytes;
  double* partials;  // [blocks HV Kp+1]
};

// Value heads [first, first + count) of key head h in sequence [begin, end).
struct Work {
  const Problem& problem;
  const Args& args;
  const Layout& layout;
  Slot slot;
  int64_t n, h, begin, end, first, count;
  float scale;
  double* partials;  // [HV Kp+1]
  ChannelGate gates[kHeads];

  int64_t chunks() const { return (end - begin + kC - 1) / kC; }
  int64_t tokens(int64_t c) const { return c < 0 || c >= chunks() ? 0 : least(kC, end - begin - c * kC); }
  Tokens at(const thalweg_tensor& t, int64_t c, int64_t head) const {
    return tokens_at(t, problem.T, begin + c * kC, head);
  }
  GateRows gate_at(const thalweg_tensor& t, int64_t c, int64_t head) const { return gate_rows(at(t, c, head), t); }
  void want(Ahead* ahead, const thalweg_tensor& t, int64_t c, int64_t head, int64_t dim, bool to_write = false) const {
    if (tokens(c) > 0) thalweg::want(ahead, at(t, c, head), tokens(c), dim, to_write);
  }
  void want_gate(Ahead* ahead, const thalweg_tensor& t, int64_t c, int64_t head, bool to_write = false) const {
    if (gate_at(t, 0, head).is_plain()) want(ahead, t, c, head, layout.dims.K, to_write);
  }
  int64_t state_floats() const { return layout.dims.Kp * layout.dims.Vp; }
  float* state(int64_t c, int64_t x) const {  // before chunk c
    const int64_t kept = c / layout.every, inside = c % layout.every;
    float* base = inside ? slot.between + (inside - 1) * layout.heads * state_floats()
                         : slot.states + kept * layout.heads * state_floats();
    return base + x * state_floats();
  }
  float* deltas(int64_t c, int64_t x) const { return slot.deltas + (c * layout.heads + x) * kC * layout.dims.Vp; }

  // What the value heads share. The keys and their norms stay in the slot, so that the scattered rows of the
  // tensor are walked once.
  void set_chunk(int64_t c) {
    slot.keys.k = slot.keys_kept + c * kC * layout.dims.Kp;
    slot.keys.k_rstd = slot.rstds + c * kC;
  }
  // Of a value head the gates, strengths and products of keys stay.
  void set_head(int64_t c, int64_t x) {
    const int64_t i = c * layout.heads + x;
    slot.head.strengths = slot.strengths + i;
    slot.head.g = slot.gates + i * kC * layout.dims.Kp;
    slot.head.kk = slot.kk + i * kSquare;
  }
};

void load_rows_of(const Work& w, const thalweg_tensor& t, int64_t c, float* to, float* rstd) {
  const Dims& d = w.layout.dims;
  load_rows<blocked>(w.at(t, c, w.h), w.tokens(c), d.K, d.Kp, to);
  if (w.args.use_qk_l2norm) normalise(to, d.Kp, rstd);
}

void load_gates(const Work& w, int64_t c, int64_t x) {
  const Dims& d = w.layout.dims;
  const Head& head = w.slot.head;
  const int64_t hv = w.first + x;
  load_gate_rows(w.gate_at(w.args.g, c, hv), w.tokens(c), d.K, d.Kp, head.g, w.slot.line);
  if (w.args.use_gate) apply_gate(w.gates[x], w.slot.bias + x * d.Kp, w.tokens(c), d.Kp, head.g);
  load_beta(w.at(w.args.beta, c, hv), w.tokens(c), w.args.use_beta_sigmoid, w.args.allow_neg_eigval, head.strengths);
}

// Deltas of every chunk, and the states that are kept; those between are not: one buffer serves for all.
void run_forward(Work& w) {
  const Dims& d = w.layout.dims;
  const Head& head = w.slot.head;
  const Keys& keys = w.slot.keys;
  for (int64_t c = 0; c < w.chunks(); ++c) {
    w.set_chunk(c);
    load_rows_of(w, w.args.k, c, keys.k, keys.k_rstd);
    for (int64_t x = 0; x < w.count; ++x) {
      const bool is_last = x + 1 == w.count;
      const int64_t next_c = is_last ? c + 1 : c, next_hv = w.first + (is_last ? 0 : x + 1);
      Ahead next{};
      next.calls = d.Vp / kPanel * (1 + d.Kp / kRows);
      w.want(&next, w.args.v, next_c, next_hv, d.V);
      w.want_gate(&next, w.args.g, next_c, next_hv);
      if (is_last) w.want(&next, w.args.k, c + 1, w.h, d.K);
      touch(next);
      w.set_head(c, x);
      load_gates(w, c, x);
      load_rows<paneled>(w.at(w.args.v, c, w.first + x), w.tokens(c), d.V, d.Vp, w.deltas(c, x));
      decays(head.g, d.Kp, head.a, head.e);
      pair_products<false>(keys.k, keys.k, head.a, d.Kp, head.now, head.lanes, head.kk);
      entering(head.e, keys.k, -1.f, d.Kp, head.minus_k_in);
      turn_blocks(head.minus_k_in, d.Kp, head.columns);
      const float* S = c % w.layout.every == 0 ? w.state(c, x) : w.state(1, x);
      chunk_deltas(d, head, S, w.deltas(c, x), &next);
      if (c + 1 == w.chunks()) continue;
      float* S_after = (c + 1) % w.layout.every == 0 ? w.state(c + 1, x) : w.state(1, x);
      leaving(head.g, keys.k, head.strengths->beta, d.Kp, head.k_out, head.decay);
      advance_state(d, head, w.deltas(c, x), S, S_after, &next);
    }
  }
}

// The states between the one kept before chunk c and that before chunk c, from the deltas.
void run_again(Work& w, int64_t c) {
  const Dims& d = w.layout.dims;
  const Head& head = w.slot.head;
  Ahead none{};
  none.calls = 1;
  for (int64_t i = c / w.layout.every * w.layout.every; i < c; ++i) {
    w.set_chunk(i);
    for (int64_t x = 0; x < w.count; ++x) {
      w.set_head(i, x);
      leaving(head.g, w.slot.keys.k, head.strengths->beta, d.Kp, head.k_out, head.decay);
      advance_state(d, head, w.deltas(i, x), w.state(i, x), w.state(i + 1, x), &none);
    }
  }
}

// d_beta and d_g of a chunk, through what was fused.
void store_strengths(const Work& w, int64_t c, int64_t x) {
  const Tokens to = w.at(w.args.d_beta, c, w.first + x);
  float d_beta[kC];
  for (int64_t i = 0; i < kC; ++i)
    d_beta[i] = sum_lanes(w.slot.head.r_dot + i * kLanes) * w.slot.head.strengths->beta_slope[i];
  if (to.data) write_strided(to.dtype, to.data, to.step, w.tokens(c), d_beta);
}
void store_gates(const Work& w, int64_t c, int64_t x) {
  const Dims& d = w.layout.dims;
  const Head& head = w.slot.head;
  const int64_t hv = w.first + x;
  if (w.args.use_gate) {
    double* partials = w.partials + hv * partial_count(w.problem);
    load_gate_rows(w.gate_at(w.args.g, c, hv), w.tokens(c), d.K, d.Kp, head.raw, w.slot.line);
    gate_gradients(w.gates[x], w.slot.bias + x * d.Kp, head.raw, w.tokens(c), d.Kp, head.d_g, partials,
                   partials + d.Kp);
  }
  if (is_there(w.args.d_g))
    store_gate_rows(w.gate_at(w.args.d_g, c, hv), w.tokens(c), d.K, d.Kp, head.d_g, w.slot.line);
}

void run_head_backward(Work& w, int64_t c, int64_t x) {
  const Dims& d = w.layout.dims;
  const Keys& keys = w.slot.keys;
  const Head& head = w.slot.head;
  const float *S = w.state(c, x), *r = w.deltas(c, x);
  float* dS = w.slot.dS + x * w.state_floats();
  const int64_t hv = w.first + x;
  const bool is_last = x + 1 == w.count;
  Ahead now{}, next{};
  now.calls = d.Vp / kPanel, next.calls = d.Kp / kRows * (1 + d.Vp / kPanel);
  w.want(&now, w.args.d_v, c, hv, d.V, true);
  w.want(&next, w.args.d_o, is_last ? c - 1 : c, w.first + (is_last ? 0 : x + 1), d.V);
  w.want_gate(&next, w.args.d_g, c, hv, true);
  if (w.args.use_gate) w.want_gate(&next, w.args.g, c, hv);
  if (is_last) {
    w.want(&next, w.args.q, c - 1, w.h, d.K);
    w.want(&next, w.args.d_q, c, w.h, d.K, true);
    w.want(&next, w.args.d_k, c, w.h, d.K, true);
  }
  touch(now);
  touch(next);
  w.set_head(c, x);
  load_rows<paneled>(w.at(w.args.d_o, c, hv), w.tokens(c), d.V, d.Vp, head.d_o);
  decays(head.g, d.Kp, head.a, head.e);
  entering(head.e, keys.q, w.scale, d.Kp, head.q_in);
  entering(head.e, keys.k, -1.f, d.Kp, head.minus_k_in);
  leaving(head.g, keys.k, nullptr, d.Kp, head.k_out, head.decay);
  turn_blocks(head.k_out, d.Kp, head.columns);
  pair_products<true>(keys.q, keys.k, head.a, d.Kp, head.now, head.lanes, head.P);
  for (int64_t i = 0; i < kSquare; i += kLanes) store(head.P + i, set1(w.scale) * load(head.P + i));
  chunk_d_v(d, head, r, dS, &now);
  store_rows<paneled>(w.at(w.args.d_v, c, hv), w.tokens(c), d.V, d.Vp, head.d_v);
  turn_columns(d, head.d_o, head.d_v, r, head.cols);
  state_gradients(d, head, S, dS, &next);
  carry_back(d, head, S, dS, &next);
  token_gradients(d, head, w.scale);
  for (int64_t block = 0; block < d.Kp / kRows; ++block) channel_gradients(keys, head, block, w.scale);
  store_strengths(w, c, x);
  store_gates(w, c, x);
}

// d_q or d_k of a chunk, summed over the group, through the norm where it was fused.
void store_rows_of(const Work& w, const thalweg_tensor& t, int64_t c, const float* rows, const float* rstd, float* d) {
  if (!is_there(t)) return;
  const Dims& dims = w.layout.dims;
  if (w.args.use_qk_l2norm) normalise_gradient(rows, rstd, dims.Kp, d);
  store_rows<blocked>(w.at(t, c, w.h), w.tokens(c), dims.K, dims.Kp, d);
}

void run_backward(Work& w) {
  const Dims& d = w.layout.dims;
  Keys& keys = w.slot.keys;
  const int64_t rows = d.Kp * kC, group_begin = w.h * w.layout.group;
  const bool is_first = w.first == group_begin, is_last = w.first + w.count == group_begin + w.layout.group;
  for (int64_t c = w.chunks() - 1; c >= 0; --c) {
    if (c % w.layout.every == w.layout.every - 1 || c + 1 == w.chunks()) run_again(w, c);
    if (w.layout.group > w.layout.heads) {
      keys.d_q = w.slot.accumulated + 2 * c * rows;
      keys.d_k = keys.d_q + rows;
    }
    if (is_first) {
      memset(keys.d_q, 0, size_t(rows) * sizeof(float));
      memset(keys.d_k, 0, size_t(rows) * sizeof(float));
    }
    w.set_chunk(c);
    load_rows_of(w, w.args.q, c, keys.q, keys.q_rstd);
    for (int64_t x = 0; x < w.count; ++x) run_head_backward(w, c, x);
    if (!is_last) continue;
    store_rows_of(w, w.args.d_q, c, keys.q, keys.q_rstd, keys.d_q);
    store_rows_of(w, w.args.d_k, c, keys.k, keys.k_rstd, keys.d_k);
  }
}

void run_sequence(const Call& call, const Slot& slot, int64_t n, int64_t h, double* partials) {
  const Layout& l = call.layout;
  const Dims& d = l.dims;
  const Span span = sequence_span(call.problem, call.args.cu_seqlens, n);
  for (int64_t first = h * l.group; first < (h + 1) * l.group; first += l.heads) {
    Work w{call.problem, call.args, l, slot, n, h, span.begin, span.end, first,
           least(l.heads, (h + 1) * l.group - first), float(call.problem.scale), partials, {}};
    for (int64_t x = 0; x < w.count; ++x) {
      w.gates[x] = head_gate(call.args, first + x);
      load_bias(call.args, first + x, d.K, d.Kp, slot.bias + x * d.Kp);
      load_state(call.args.d_final_state, n, first + x, d, slot.dS + x * w.state_floats(), slot.line);
      if (w.chunks() > 0) load_state(call.args.initial_state, n, first + x, d, w.state(0, x), slot.line);
    }
    run_forward(w);
    run_backward(w);
    for (int64_t x = 0; x < w.count; ++x)
      store_state(call.args.d_initial_state, n, first + x, d, slot.dS + x * w.state_floats(), slot.line);
  }
}

void zero_tail(const Call& call, const Slot& slot, int64_t h) {
  const Problem& p = call.problem;
  const int64_t group = call.layout.group;
  const int64_t begin = p.N > 0 ? sequence_span(p, call.args.cu_seqlens, p.N - 1).end : 0, end = p.B * p.T;
  zero_rows(call.args.d_q, p.T, begin, end, h);
  zero_rows(call.args.d_k, p.T, begin, end, h);
  for (int64_t hv = h * group; hv < (h + 1) * group; ++hv) {
    zero_rows(call.args.d_v, p.T, begin, end, hv);
    zero_gate_rows(call.args.d_g, p.T, begin, end, hv, p.K, slot.line);
    zero_rows(call.args.d_beta, p.T, begin, end, hv);
  }
}

// Task: block of sequences i / H, key head i % H; one block more zeroes the rows past the last sequence.
void run_task(void* arg, int64_t i, int64_t slot_index) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.problem;
  const Layout& l = call.layout;
  const int64_t block = i / p.H, h = i % p.H, count = partial_count(p);
  Slot slot;
  carve(l, call.slots + slot_index * call.slot_bytes, &slot);
  if (block == l.blocks) return zero_tail(call, slot, h);
  double* partials = call.partials + block * p.HV * count;
  for (int64_t at = h * l.group * count; at < (h + 1) * l.group * count; ++at) partials[at] = 0;
  const int64_t n_begin = p.N * block / l.blocks, n_end = p.N * (block + 1) / l.blocks;
  for (int64_t n = n_begin; n < n_end; ++n) run_sequence(call, slot, n, h, partials);
}

double sum_partials(const Call& call, int64_t hv, int64_t at) {
  const int64_t count = partial_count(call.problem);
  double sum = 0;
  for (int64_t block = 0; block < call.layout.blocks; ++block)
    sum += call.partials[(block * call.problem.HV + hv) * count + at];
  return sum;
}

void store_parameters(const Call& call) {
  const Args& a = call.args;
  const int64_t Kp = call.layout.dims.Kp;
  for (int64_t hv = 0; hv < call.problem.HV; ++hv) {
    if (is_there(a.d_A_log)) store_element(a.d_A_log, sum_partials(call, hv, Kp), hv);
    for (int64_t k = 0; is_there(a.d_dt_bias) && k < call.problem.K; ++k)
      store_element(a.d_dt_bias, sum_partials(call, hv, k), hv, k);
  }
}

}  // namespace

namespace THALWEG_ISA {

int64_t cpu_chunk_bwd_slot_bytes(const Problem& problem) {
  Slot slot;
  return carve(layout_of(problem), nullptr, &slot);
}
int64_t cpu_chunk_bwd_shared_bytes(const Problem& problem) {
  return least(problem.N, kMaxBlocks) * problem.HV * partial_count(problem) * int64_t(sizeof(double));
}

void cpu_chunk_bwd(const Problem& problem, const Plan& plan, const Args& args, const Exec& exec) {
  const Layout layout = layout_of(problem);
  Call call{problem, args, layout, exec.workspace + plan.shared_bytes, plan.slot_bytes,
            reinterpret_cast<double*>(exec.workspace)};
  const bool tail = problem.packed && problem.T > 0;
  parallel_tasks(exec, (layout.blocks + tail) * problem.H, plan.num_slots, run_task, &call);
  store_parameters(call);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::kimi_delta_attention
