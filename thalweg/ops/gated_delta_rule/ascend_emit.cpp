// The gated delta rule's chunk kernels as MLIR. One task is one chunk of BT tokens of one value head hv; it reads
// query/key head hv / (HV / H). Tensors, all in device memory and without gaps:
//
//   q k [B T H K]    v_new d_o d_v [B T HV V]    d_q d_k d_w [B T HV K]: d_q and d_k of one value head each
//   g [B HV T] or [B T HV] f32     h d_h [B NT HV K V]: the state before a chunk, the gradient of the one behind it
//
// g is the sum of the gates from the chunk's start on (what the cumsum kernel writes), finite. Arguments after the
// tensors: chunks (packed sequences only) [NT 3] i32: first token, tokens, row of h; then scale f32 where there is one,
// and i32: B; T, tokens of a sequence (packed: of all); NT, chunks of a sequence; first and count: the launch does
// chunks first to first + count - 1 of each sequence (packed: rows of `chunks`; B = 1).
//
//   single      program (px, py) does chunk first + px of sequence and head py = b HV + hv
//   persistent  program px of nx does tasks px, px + nx, … of count B HV: chunk first + i / (B HV), py = i % (B HV)
//
// Text without mask code takes full chunks alone, text with it chunks of 1 to BT tokens: rows that are not there are 0,
// and their gate is so low that every decay to them is 0.
#include <map>
#include <string>
#include <vector>

#include "thalweg/ascend/mlir.h"
#include "thalweg/ascend/plan.h"

namespace thalweg::ascend {
namespace {

constexpr double kNoGate = -1e30;  // of a token that is not there

// One task: where it lies.
struct Task {
  Value hv;     // value head
  Value row;    // first token, counted over all sequences
  Value gate;   // its element of g
  Value state;  // row of h
  Rows rows;
};

// A chunk kernel while it is written.
struct ChunkWriter : Writer {
  const Plan& plan;
  const int64_t H, HV, K, V, BT;
  Value chunks, B, T, NT, first, count;  // arguments; indices from write() on
  bool has_states = false;               // h is a tensor of this kernel

  ChunkWriter(const char* name, const Plan& p)
      : Writer(name), plan(p), H(p.problem.H), HV(p.problem.HV), K(p.problem.K), V(p.problem.V), BT(p.tile.BT) {}

  Element type() const { return element_of(plan.problem.dtype); }
  bool has_gate() const { return plan.problem.gate != Gate::kNone; }
  bool heads_first() const { return plan.problem.gate == Gate::kHeadsFirst; }

  void describe_sizes() {
    const Problem& p = plan.problem;
    std::string text = "BT " + std::to_string(BT);
    for (auto [name, size] : {std::pair{"H", p.H}, {"HV", p.HV}, {"K", p.K}, {"V", p.V}})
      text += ", " + std::string(name) + " " + std::to_string(size);
    text += p.gate == Gate::kNone ? "; no gate" : heads_first() ? "; g [HV T], stride 1" : "; g [T HV], stride HV";
    text += p.is_packed ? "; packed sequences" : "; sequences of T tokens";
    describe(text + (plan.boundary ? "; chunks of 1 to BT tokens" : "; full chunks, no mask code"));
  }

  void tail_arguments() {
    B = scalar_argument("B", kI32), T = scalar_argument("T", kI32), NT = scalar_argument("NT", kI32);
    first = scalar_argument("first", kI32), count = scalar_argument("count", kI32);
  }

  // Writes the whole function around `body`, which writes one task.
  template <class Body>
  std::string write(Body body) {
    begin();
    for (Value* v : {&B, &T, &NT, &first, &count}) *v = to_index(*v);
    each_task(plan.mode == Mode::kPersistent, first, count, [&] { return mul("heads", B, index(HV)); }, "chunk", "bh",
              [&](const Value& chunk, const Value& bh) { body(task(chunk, bh)); });
    return end();
  }

  // The same for tasks that walk whole sequences: `body` gets first + the program's place, the sequence and the head.
  template <class Body>
  std::string write_sequences(Body body) {
    begin();
    for (Value* v : {&B, &T, &NT, &first, &count}) *v = to_index(*v);
    each_task(plan.mode == Mode::kPersistent, first, count, [&] { return mul("heads", B, index(HV)); }, "tile", "bh",
              [&](const Value& number, const Value& bh) {
                const Value b = div("b", bh, index(HV));
                body(number, b, rem("hv", bh, index(HV)));
              });
    return end();
  }

  // Where chunk `chunk` of sequence b (packed: row `chunk` of the table) lies.
  Task task_of(const Value& chunk, const Value& b, const Value& hv) {
    once_.clear();
    Task t;
    t.hv = hv;
    Value token;  // the chunk's first, of its sequence; packed: of all
    if (plan.problem.is_packed) {
      comment("where the chunk lies");
      const Value at = mul("chunk_at", chunk, index(3));
      t.row = token = to_index(load_scalar("token", chunks, at));
      if (plan.boundary) {
        const Value at_tokens = add("chunk_at", at, index(1));
        t.rows = rows(to_index(load_scalar("tokens", chunks, at_tokens)), BT);
      }
      if (has_states) {
        const Value at_state = add("chunk_at", at, index(2));
        t.state = to_index(load_scalar("state", chunks, at_state));
      }
    } else {
      comment("where the chunk lies");
      token = mul("token", chunk, index(BT));
      const Value start = mul("start", b, T);
      t.row = add("row", start, token);
      if (plan.boundary) {
        const Value left = sub("left", T, token);
        t.rows = rows(min("tokens", left, index(BT)), BT);
      }
      if (has_states) t.state = add("state", mul("state", b, NT), chunk);
    }
    if (!has_gate()) return t;
    if (!heads_first()) {
      t.gate = add("g_at", mul("g_start", t.row, index(HV)), hv);
    } else if (plan.problem.is_packed) {
      t.gate = add("g_at", mul("g_start", hv, T), token);
    } else {
      const Value head = mul("g_head", b, index(HV));
      t.gate = add("g_at", mul("g_start", add("g_head", head, hv), T), token);
    }
    return t;
  }

  // ---- Tiles of a task ----

  // BT rows of q or k, of a [B T HV width] tensor, of h or d_h, of g.
  Value key_tile(const Value& tensor, const Task& t) {
    return tile(tensor, offset(t.row, H, div_once("h", t.hv, HV / H), K), {BT, K}, {H * K, 1});
  }
  Value value_tile(const Value& tensor, const Task& t, int64_t width) {
    return tile(tensor, offset(t.row, HV, t.hv, width), {BT, width}, {HV * width, 1});
  }
  Value state_tile(const Value& tensor, const Task& t) {
    return tile(tensor, offset(t.state, HV, t.hv, K * V), {K, V}, {V, 1});
  }
  Value gate_tile(const Value& g, const Task& t) { return tile(g, t.gate, {BT}, {heads_first() ? 1 : HV}); }
  // The gate of the chunk's last token, from its tile: a second load, of a scalar, would keep the compiler from cutting
  // a loop's tiles in two for the vector cores.
  Value last_gate(const Value& gate, const Task& t) {
    const Value last = t.rows.partial() ? sub("last", t.rows.count, index(1)) : index(BT - 1);
    return element_at("g_L", gate, {last});
  }

  // Row numbers and column numbers of a [BT BT] matrix.
  struct Numbers {
    Value row, column;
  };
  Numbers numbers() {
    const Value n = counting("n", BT);
    const Value column = broadcast("column", n, {BT, BT}, 0), row = broadcast("row", n, {BT, BT}, 1);
    return {row, column};
  }

 private:
  std::map<std::string, Value> once_;  // offsets of the task, by what they are made of

  Value div_once(const std::string& hint, const Value& a, int64_t b) {
    Value& v = once_[a.name + "/" + std::to_string(b)];
    if (v.name.empty()) v = div(hint, a, index(b));
    return v;
  }
  // ((row * heads) + head) * width
  Value offset(const Value& row, int64_t heads, const Value& head, int64_t width) {
    Value& at = once_[row.name + " " + std::to_string(heads) + head.name];
    if (at.name.empty()) {
      const Value start = mul("at", row, index(heads));
      at = add("at", start, head);
    }
    Value& v = once_[at.name + " " + std::to_string(width)];
    if (v.name.empty()) v = mul("at", at, index(width));
    return v;
  }

  Task task(const Value& chunk, const Value& bh) {
    if (plan.problem.is_packed) return task_of(chunk, bh, bh);
    comment("sequence and value head");
    const Value b = div("b", bh, index(HV));
    return task_of(chunk, b, rem("hv", bh, index(HV)));
  }
};

}  // namespace

// g[i] = sum of the raw gates x[j], j <= i (reverse: j >= i), of a chunk. Tensors: x, g, both in one layout.
std::string emit_cumsum(const Plan& plan) {
  ChunkWriter w("cumsum", plan);
  const bool reverse = plan.problem.reverse;
  w.describe(std::string("Sums of the gates of a chunk, one value head: g[i] = sum of x[j], ") +
             (reverse ? "j >= i." : "j <= i."));
  w.describe_sizes();
  const Value x = w.memref_argument("x", kF32), g = w.memref_argument("g", kF32);
  if (plan.problem.is_packed) w.chunks = w.memref_argument("chunks", kI32);
  w.tail_arguments();
  const int64_t BT = w.BT;
  return w.write([&](const Task& t) {
    const Value raw = w.load("x", w.gate_tile(x, t), t.rows);
    w.comment("[i j]: x[j] where it counts for i, then sums of rows");
    const Value across = w.broadcast("x_j", raw, {BT, BT}, 0), zeros = w.splat("zeros", 0, {BT, BT});
    const auto [row, column] = w.numbers();
    const Value counts = w.compare("counts", reverse ? "arith.cmpi sle" : "arith.cmpi sge", row, column);
    const Value sums = w.sum_over("sums", w.choose("terms", counts, across, zeros), 1);
    w.store(sums, w.gate_tile(g, t), t.rows);
  });
}

// d_v[j] = sum over i >= j of scale (q_i . k_j) exp(g_i - g_j) d_o_i. Tensors: q, k, d_o, g (with a gate), d_v.
std::string emit_dv_local(const Plan& plan) {
  ChunkWriter w("dv_local", plan);
  w.describe("Local part of the gradient of the deltas, one chunk of one value head:");
  w.describe("  A[j,i] = scale (k_j . q_i) exp(g_i - g_j) for j <= i, else 0;   d_v = A d_o.");
  w.describe_sizes();
  const Element type = w.type();
  const Value q = w.memref_argument("q", type), k = w.memref_argument("k", type), d_o = w.memref_argument("d_o", type);
  Value g;
  if (w.has_gate()) g = w.memref_argument("g", kF32);
  const Value d_v = w.memref_argument("d_v", type);
  if (plan.problem.is_packed) w.chunks = w.memref_argument("chunks", kI32);
  const Value scale = w.scalar_argument("scale", kF32);
  w.tail_arguments();
  const Shape square = {w.BT, w.BT};
  return w.write([&](const Task& t) {
    w.comment("scores [j i]");
    Value gate;
    if (w.has_gate()) gate = w.load("gate", w.gate_tile(g, t), t.rows, kNoGate);
    const Value q_tile = w.load("q", w.key_tile(q, t), t.rows), k_tile = w.load("k", w.key_tile(k, t), t.rows);
    const Value zeros = w.splat("zeros", 0, square), qT = w.transpose("qT", q_tile);
    Value A = w.matmul("S", k_tile, qT, zeros);
    A = w.scaled("A", A, scale);
    if (w.has_gate()) {
      w.comment("times the decay from j to i");
      const Value g_i = w.broadcast("g_i", gate, square, 0), g_j = w.broadcast("g_j", gate, square, 1);
      const Value decay = w.apply("decay", "math.exp", w.combine("difference", "arith.subf", g_i, g_j));
      A = w.combine("A", "arith.mulf", A, decay);
    }
    w.comment("of j <= i");
    const auto [row, column] = w.numbers();
    const Value keep = w.compare("keep", "arith.cmpi sle", row, column);
    A = w.convert("A", w.choose("A", keep, A, zeros), type);
    w.comment("d_v = A d_o");
    const Value d_o_tile = w.load("d_o", w.value_tile(d_o, t, w.V), t.rows);
    const Value sum = w.V == w.BT ? zeros : w.splat("zeros", 0, {w.BT, w.V});
    const Value result = w.convert("d_v", w.matmul("d_v", A, d_o_tile, sum), type);
    w.store(result, w.value_tile(d_v, t, w.V), t.rows);
  });
}

// The gradients of q, k and w that do not go through the triangular system, with the state h before the chunk and the
// gradient d_h of the state behind it; G is the gate's sum, L the last token of the chunk:
//
//   P[i,j] = scale (d_o_i . v_new_j) exp(G_i - G_j) for j <= i, else 0
//   d_q = scale exp(G) (d_o h^T) + P k     d_k = exp(G_L - G) (v_new d_h^T) + P^T q     d_w = -d_v h^T
//
// Tensors: q, k, v_new, d_o, d_v (the whole gradient of v_new), h, d_h, g (with a gate), d_q, d_k, d_w.
std::string emit_dqkw(const Plan& plan) {
  ChunkWriter w("dqkw", plan);
  w.has_states = true;
  w.describe("Gradients of q, k and w around the state, one chunk of one value head; L is its last token:");
  w.describe("  P[i,j] = scale (d_o_i . v_new_j) exp(g_i - g_j) for j <= i, else 0");
  w.describe("  d_q = scale exp(g) (d_o h^T) + P k;  d_k = exp(g_L - g) (v_new d_h^T) + P^T q;  d_w = -d_v h^T.");
  w.describe_sizes();
  const Element type = w.type();
  const Value q = w.memref_argument("q", type), k = w.memref_argument("k", type);
  const Value v_new = w.memref_argument("v_new", type), d_o = w.memref_argument("d_o", type);
  const Value d_v = w.memref_argument("d_v", type), h = w.memref_argument("h", type);
  const Value d_h = w.memref_argument("d_h", type);
  Value g;
  if (w.has_gate()) g = w.memref_argument("g", kF32);
  const Value d_q = w.memref_argument("d_q", type), d_k = w.memref_argument("d_k", type);
  const Value d_w = w.memref_argument("d_w", type);
  if (plan.problem.is_packed) w.chunks = w.memref_argument("chunks", kI32);
  const Value scale = w.scalar_argument("scale", kF32);
  w.tail_arguments();
  const Shape square = {w.BT, w.BT}, wide = {w.BT, w.K};
  // On these the compiler's pass cv-pipelining dies of a signal where products share their zeros.
  const bool apart = plan.mode == Mode::kPersistent && plan.boundary && !w.has_gate();
  return w.write([&](const Task& t) {
    w.comment("P [i j]");
    Value gate;
    if (w.has_gate()) gate = w.load("gate", w.gate_tile(g, t), t.rows, kNoGate);
    const Value d_o_tile = w.load("d_o", w.value_tile(d_o, t, w.V), t.rows);
    const Value v_tile = w.load("v_new", w.value_tile(v_new, t, w.V), t.rows);
    const Value zeros = w.splat("zeros", 0, square), vT = w.transpose("vT", v_tile);
    Value P = w.matmul("P", d_o_tile, vT, apart ? w.splat_apart("zeros", 0, square) : zeros);
    P = w.scaled("P", P, scale);
    if (w.has_gate()) {
      const Value g_i = w.broadcast("g_i", gate, square, 1), g_j = w.broadcast("g_j", gate, square, 0);
      const Value decay = w.apply("decay", "math.exp", w.combine("difference", "arith.subf", g_i, g_j));
      P = w.combine("P", "arith.mulf", P, decay);
    }
    const auto [row, column] = w.numbers();
    const Value keep = w.compare("keep", "arith.cmpi sge", row, column);
    P = w.convert("P", w.choose("P", keep, P, zeros), type);
    const Value shared = w.K == w.BT ? zeros : w.splat("zeros", 0, wide);
    const auto sum = [&] { return apart ? w.splat_apart("zeros", 0, wide) : shared; };
    w.comment("d_q: through the state, then inside the chunk");
    const Value h_tile = w.load("h", w.state_tile(h, t)), hT = w.transpose("hT", h_tile);
    Value dq = w.scaled("dq", w.matmul("dq", d_o_tile, hT, sum()), scale);
    if (w.has_gate()) {
      const Value decay = w.apply("decay", "math.exp", gate);
      dq = w.combine("dq", "arith.mulf", dq, w.broadcast("decay_i", decay, wide, 1));
    }
    const Value k_tile = w.load("k", w.key_tile(k, t), t.rows), Pk = w.matmul("Pk", P, k_tile, sum());
    const Value dq_out = w.convert("dq", w.combine("dq", "arith.addf", dq, Pk), type);
    w.store(dq_out, w.value_tile(d_q, t, w.K), t.rows);
    w.comment("d_k: through the state, then inside the chunk");
    const Value d_h_tile = w.load("d_h", w.state_tile(d_h, t)), d_hT = w.transpose("d_hT", d_h_tile);
    Value dk = w.matmul("dk", v_tile, d_hT, sum());
    if (w.has_gate()) {
      const Value last = w.fill("g_L_all", w.last_gate(gate, t), {w.BT});
      const Value decay = w.apply("decay", "math.exp", w.combine("rest", "arith.subf", last, gate));
      dk = w.combine("dk", "arith.mulf", dk, w.broadcast("decay_i", decay, wide, 1));
    }
    const Value q_tile = w.load("q", w.key_tile(q, t), t.rows), PT = w.transpose("PT", P);
    const Value Pq = w.matmul("Pq", PT, q_tile, sum());
    const Value dk_out = w.convert("dk", w.combine("dk", "arith.addf", dk, Pq), type);
    w.store(dk_out, w.value_tile(d_k, t, w.K), t.rows);
    w.comment("d_w");
    const Value d_v_tile = w.load("d_v", w.value_tile(d_v, t, w.V), t.rows);
    const Value dw = w.apply("dw", "arith.negf", w.matmul("dw", d_v_tile, hT, sum()));
    const Value dw_out = w.convert("dw", dw, type);
    w.store(dw_out, w.value_tile(d_w, t, w.K), t.rows);
  });
}

// The state pass of the forward: chunk by chunk of one sequence, V channels [first + px] BV of one value head,
//
//   h_c = S     v_new = u - w S     S <- exp(g_L) S + k^T (exp(g_L - g) v_new)     g_L: the chunk's last
//
// Tensors: k, w [B T HV K], u [B T HV V], g (with a gate), initial_state [B HV K V] f32, h, v_new, final_state
// [B HV K V] f32, sequences (packed only, then B counts them) [B 2] i32: first row of `chunks`, rows. Here a "tile" of
// a launch is one of V / BV, and there is no scale.
std::string emit_state(const Plan& plan) {
  ChunkWriter w("state", plan);
  w.has_states = true;
  const int64_t BT = w.BT, K = w.K, V = w.V, HV = w.HV, BV = plan.tile.V;
  w.describe(
      "The states before each chunk, and the deltas, of BV channels of one value head, one chunk after another:");
  w.describe("  h = S;   v_new = u - w S;   S <- exp(g_L) S + k^T (exp(g_L - g) v_new), L the chunk's last token.");
  w.describe("BV " + std::to_string(BV));
  w.describe_sizes();
  const Element type = w.type();
  const Value k = w.memref_argument("k", type), wy = w.memref_argument("w", type), u = w.memref_argument("u", type);
  Value g, sequences;
  if (w.has_gate()) g = w.memref_argument("g", kF32);
  const Value initial = w.memref_argument("initial_state", kF32), h = w.memref_argument("h", type);
  const Value v_new = w.memref_argument("v_new", type), final = w.memref_argument("final_state", kF32);
  if (plan.problem.is_packed) {
    sequences = w.memref_argument("sequences", kI32), w.chunks = w.memref_argument("chunks", kI32);
  }
  w.tail_arguments();
  return w.write_sequences([&](const Value& v_tile, const Value& n, const Value& hv) {
    const Value column = w.mul("column", v_tile, w.index(BV));
    const Value state_at =
        w.add("state_at", w.mul("state_at", w.add("state_at", w.mul("state_at", n, w.index(HV)), hv), w.index(K * V)),
              column);
    const Shape state_shape = {K, BV};
    const Value start = w.load("S", w.tile(initial, state_at, state_shape, {V, 1}));
    Value from = w.index(0), chunks = w.NT;
    if (plan.problem.is_packed) {
      const Value at = w.mul("sequence_at", n, w.index(2));
      from = w.to_index(w.load_scalar("from", sequences, at));
      const Value at_count = w.add("sequence_at", at, w.index(1));
      chunks = w.add("end", from, w.to_index(w.load_scalar("rows", sequences, at_count)));
    }
    const Value one = w.index(1);
    const auto last = w.loop("c", from, chunks, one, {start}, [&](const Value& c, const std::vector<Value>& carried) {
      const Task t = w.task_of(c, n, hv);
      // BV columns of a [tokens HV V] tensor.
      const auto columns = [&](const Value& tensor) {
        const Value row = w.add("at", w.mul("at", t.row, w.index(HV)), hv);
        return w.tile(tensor, w.add("at", w.mul("at", row, w.index(V)), column), {BT, BV}, {HV * V, 1});
      };
      w.comment("the state before the chunk");
      const Value S = carried[0], S_16 = w.convert("S", S, type);
      const Value row = w.add("at", w.mul("at", t.state, w.index(HV)), hv);
      w.store(S_16, w.tile(h, w.add("at", w.mul("at", row, w.index(K * V)), column), state_shape, {V, 1}));
      w.comment("v_new");
      const Value w_tile = w.load("w", w.value_tile(wy, t, K), t.rows);
      const Value zeros = w.splat("zeros", 0, {BT, BV}), wS = w.matmul("wS", w_tile, S_16, zeros);
      const Value u_tile = w.convert("u", w.load("u", columns(u), t.rows), kF32);
      Value delta = w.combine("v_new", "arith.subf", u_tile, wS);
      const Value delta_16 = w.convert("v_new", delta, type);
      w.store(delta_16, columns(v_new), t.rows);
      w.comment("the state behind it");
      Value decayed = S, written = delta_16;
      if (w.has_gate()) {
        const Value gate = w.load("gate", w.gate_tile(g, t), t.rows, -kNoGate);  // nothing is added for such a token
        const Value g_L = w.last_gate(gate, t), g_L_all = w.fill("g_L_all", g_L, {BT});
        const Value decay = w.apply("decay", "math.exp", w.combine("rest", "arith.subf", g_L_all, gate));
        delta = w.combine("written", "arith.mulf", delta, w.broadcast("decay_i", decay, {BT, BV}, 1));
        written = w.convert("written", delta, type);
        decayed = w.scaled("decayed", S, w.exp_scalar("e_L", g_L));
      }
      const Value k_tile = w.load("k", w.key_tile(k, t), t.rows), kT = w.transpose("kT", k_tile);
      const Value nothing = w.splat("zeros", 0, state_shape), add = w.matmul("kv", kT, written, nothing);
      return std::vector<Value>{w.combine("S", "arith.addf", decayed, add)};
    });
    w.store(last[0], w.tile(final, state_at, state_shape, {V, 1}));
  });
}

}  // namespace thalweg::ascend
