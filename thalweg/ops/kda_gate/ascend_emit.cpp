// The KDA gate's kernels as MLIR. One task is BT rows (tokens of all sequences) of one value head, y = x + dt_bias:
//
//   fwd   g = -exp(A_log) softplus(y), softplus(y) = y above 20
//   bwd   d_x = -exp(A_log) d_g sigmoid(y), and sums over the tile's rows that the host adds up: of d_x, for d_dt_bias,
//         and of d_g g over rows and channels, for d_A_log
//
// and with lower_bound < 0, s = sigmoid(exp(A_log) y):
//
//   fwd   g = lower_bound s
//   bwd   d_x = lower_bound exp(A_log) d_g s (1 - s), and sums of d_x, and of d_x y
//
// Tensors without gaps: x g d_g d_x [T HV K]; A_log [HV] and dt_bias [HV K] f32, each may be left out; sums f32:
// bias_sums [NT HV K], A_sums [NT HV], of tile first + px each. Then i32: T, all rows; first and count: the launch does
// tiles first to first + count - 1 of NT = ceil(T / BT).
//
//   single      program (px, py) does tile first + px of head py
//   persistent  program px of nx does tasks px, px + nx, … of count HV: tile first + i / HV, head i % HV
//
// Text without mask code takes full tiles alone; with it, the last tile may have fewer rows.
#include <string>
#include <vector>

#include "thalweg/ascend/mlir.h"
#include "thalweg/ascend/plan.h"

namespace thalweg::ascend {
namespace {

struct GateTask {
  Value tile, head;
  Value at;  // of the tile's first element
  Rows rows;
};

struct GateWriter : Writer {
  const Plan& plan;
  const int64_t HV, K, BT;
  Value T, first, count;

  GateWriter(const char* name, const Plan& p)
      : Writer(name), plan(p), HV(p.problem.HV), K(p.problem.K), BT(p.tile.BT) {}

  void describe_sizes() {
    describe("BT " + std::to_string(BT) + ", HV " + std::to_string(HV) + ", K " + std::to_string(K) +
             (plan.boundary ? "; the last tile has 1 to BT rows" : "; full tiles, no mask code"));
  }
  void tail_arguments() {
    T = scalar_argument("T", kI32), first = scalar_argument("first", kI32), count = scalar_argument("count", kI32);
  }

  Value tile_of(const Value& tensor, const GateTask& t) { return tile(tensor, t.at, {BT, K}, {HV * K, 1}); }

  template <class Body>
  std::string write(Body body) {
    begin();
    for (Value* v : {&T, &first, &count}) *v = to_index(*v);
    each_task(plan.mode == Mode::kPersistent, first, count, [&] { return index(HV); }, "tile", "hv",
              [&](const Value& number, const Value& hv) { body(task(number, hv)); });
    return end();
  }

  // x + dt_bias in f32, and -exp(A_log) (-1 without A_log).
  Value raw(const Value& x, const Value& dt_bias, const GateTask& t) {
    const Value y = convert("x", load("x", tile_of(x, t), t.rows), kF32);
    if (dt_bias.name.empty()) return y;
    const Value row = load("bias", tile(dt_bias, mul("bias_at", t.head, index(K)), {K}, {1}));
    return combine("y", "arith.addf", y, broadcast("bias_all", row, {BT, K}, 0));
  }
  Value factor(const Value& A_log, const GateTask& t) {
    if (A_log.name.empty()) return number(-1);
    return negated(exp_scalar("a", load_scalar("A", A_log, t.head)));
  }
  // 1 / (1 + e^-x)
  Value sigmoid(const Value& x) {
    const Value e = apply("e", "math.exp", apply("minus_y", "arith.negf", x)), ones = splat("ones", 1, {BT, K});
    return combine("sigmoid", "arith.divf", ones, combine("e1", "arith.addf", e, ones));
  }
  // exp(A_log) x
  Value rated(const char* hint, const Value& x, const Value& A_log, const GateTask& t) {
    return A_log.name.empty() ? x : scaled(hint, x, exp_scalar("a", load_scalar("A", A_log, t.head)));
  }
  // log(1 + e^y), y above 20.
  Value softplus(const Value& y) {
    const Value limit = splat("limit", 20, {BT, K}), large = compare("large", "arith.cmpf ogt", y, limit);
    const Value e = apply("e", "math.exp", y), ones = splat("ones", 1, {BT, K});
    return choose("softplus", large, y, apply("log", "math.log", combine("e1", "arith.addf", e, ones)));
  }

 private:
  GateTask task(const Value& number, const Value& head) {
    const Value row = mul("row", number, index(BT)), start = mul("start", row, index(HV * K));
    GateTask t{number, head, add("at", start, mul("head_at", head, index(K))), {}};
    if (plan.boundary) {
      const Value left = sub("left", T, row);
      t.rows = rows(min("n", left, index(BT)), BT);
    }
    return t;
  }
};

}  // namespace

// Tensors: x, A_log, dt_bias, g.
std::string emit_kda_gate_fwd(const Plan& plan) {
  GateWriter w("kda_gate_fwd", plan);
  w.describe(plan.problem.lower_bound < 0 ? "KDA gate, one tile of rows of one value head: g = lower_bound sigmoid(exp(A_log) (x + dt_bias))."
                                          : "KDA gate, one tile of rows of one value head: g = -exp(A_log) softplus(x + dt_bias).");
  w.describe_sizes();
  const Value x = w.memref_argument("x", element_of(plan.problem.dtype));
  Value A_log, dt_bias;
  if (plan.problem.has_A_log) A_log = w.memref_argument("A_log", kF32);
  if (plan.problem.has_dt_bias) dt_bias = w.memref_argument("dt_bias", kF32);
  const Value g = w.memref_argument("g", element_of(plan.problem.out_dtype));
  w.tail_arguments();
  return w.write([&](const GateTask& t) {
    const Value y = w.raw(x, dt_bias, t);
    const double bound = plan.problem.lower_bound;
    const Value s = bound < 0 ? w.sigmoid(w.rated("a_y", y, A_log, t)) : w.softplus(y);
    const Value result = w.convert("g", w.scaled("g", s, bound < 0 ? w.number(bound) : w.factor(A_log, t)), g.element);
    w.store(result, w.tile_of(g, t), t.rows);
  });
}

// Tensors: x, A_log, dt_bias, d_g, d_x, A_sums (with A_log), bias_sums (with dt_bias).
std::string emit_kda_gate_bwd(const Plan& plan) {
  GateWriter w("kda_gate_bwd", plan);
  w.describe("KDA gate backward, one tile of rows of one value head, y = x + dt_bias:");
  w.describe(plan.problem.lower_bound < 0 ? "  d_x = lower_bound exp(A_log) d_g s (1 - s), s = sigmoid(exp(A_log) y);   A_sums = sum d_x y;   bias_sums = sum d_x."
                                          : "  d_x = -exp(A_log) d_g sigmoid(y);   A_sums = sum -exp(A_log) d_g softplus(y);   bias_sums = sum d_x.");
  w.describe_sizes();
  const Element type = element_of(plan.problem.dtype);
  const Value x = w.memref_argument("x", type);
  Value A_log, dt_bias, A_sums, bias_sums;
  if (plan.problem.has_A_log) A_log = w.memref_argument("A_log", kF32);
  if (plan.problem.has_dt_bias) dt_bias = w.memref_argument("dt_bias", kF32);
  const Value d_g = w.memref_argument("d_g", element_of(plan.problem.out_dtype));
  const Value d_x = w.memref_argument("d_x", type);
  if (plan.problem.has_A_log) A_sums = w.memref_argument("A_sums", kF32);
  if (plan.problem.has_dt_bias) bias_sums = w.memref_argument("bias_sums", kF32);
  w.tail_arguments();
  const Shape shape = {w.BT, w.K};
  return w.write([&](const GateTask& t) {
    const double bound = plan.problem.lower_bound;
    const Value y = w.raw(x, dt_bias, t), a = bound < 0 ? w.number(bound) : w.factor(A_log, t);
    w.comment("d_g; rows that are not there are 0 and add nothing to the sums");
    const Value slope = w.convert("d_g", w.load("d_g", w.tile_of(d_g, t), t.rows), kF32);
    const Value scaled = w.scaled("a_d_g", slope, a);
    const Value sum_at = w.add("sum_at", w.mul("sum_at", t.tile, w.index(w.HV)), t.head);
    const auto add_A_sum = [&](const Value& left, const Value& right) {
      if (!plan.problem.has_A_log) return;
      const Value terms = w.combine("terms", "arith.mulf", left, right);
      const Value sum = w.sum_over("A_sum", w.sum_over("A_row", terms, 0), 0);
      w.store_scalar(w.element_at("A_sum", sum, {}), A_sums, sum_at);
    };
    Value dx;
    if (bound < 0) {
      const Value s = w.sigmoid(w.rated("a_y", y, A_log, t)), ones = w.splat("ones", 1, shape);
      const Value steep = w.combine("steep", "arith.mulf", s, w.combine("rest", "arith.subf", ones, s));
      dx = w.rated("d_x", w.combine("d_x", "arith.mulf", scaled, steep), A_log, t);
      add_A_sum(dx, y);
    } else {
      if (plan.problem.has_A_log) add_A_sum(scaled, w.softplus(y));
      w.comment("1 / (1 + e^-y)");
      dx = w.combine("d_x", "arith.mulf", scaled, w.sigmoid(y));
    }
    if (plan.problem.has_dt_bias) {
      const Value sum = w.sum_over("bias_sum", dx, 0);
      w.store(sum, w.tile(bias_sums, w.mul("bias_at", sum_at, w.index(w.K)), {w.K}, {1}));
    }
    const Value result = w.convert("d_x", dx, type);
    w.store(result, w.tile_of(d_x, t), t.rows);
  });
}

}  // namespace thalweg::ascend
