// The dK/dV tile of block-sparse attention as MLIR. One task is one sub-block of BT keys (BT divides block_k) of one
// key/value head: it walks the tiles of BM queries (BM divides block_q) whose block the mask keeps, with both sums on
// the cube. Tensors, in device memory and without gaps:
//
//   q [B T H K]    k d_k [B S HK K]    v d_v [B S HK V]    d_o [B T H V]    lse delta [B H T] f32, delta = <d_o, o>; lse finite where a query sees
//   a key counts [B H NK] i32, lists [B H NK NT] i32: of each block of keys, how many tiles of queries see it, and
//   which; NK = ceil(S / block_k), NT = ceil(T / BM)
//
// then scale f32, and i32: B; T; S; first and count: the launch does sub-blocks first to first + count - 1.
//
//   single      program (px, py) does sub-block first + px of sequence and head py = b HK + hk
//   persistent  program px of nx does tasks px, px + nx, … of count B HK: sub-block first + i / (B HK), py = i % (B HK)
//
// Text without mask code takes T and S that the tiles divide. With it rows that are not there are 0: such a query adds
// nothing to a sum, such a key's sums are not stored. What the mask drops is in no list, so that no score is masked, but in
// causal text: there query t sees key j <= t + S - T, and tiles of queries that see none of a block's keys are in no list.
#include <string>
#include <vector>

#include "thalweg/ascend/mlir.h"
#include "thalweg/ascend/plan.h"

namespace thalweg::ascend {
namespace {

// The operands of one value in the cube's type: itself rounded, or with `split` a high and a low half that add up to
// it.
std::vector<Value> halves(Writer& w, const std::string& hint, const Value& x, Element type, bool split) {
  const Value high = w.convert(hint, x, type);
  if (!split) return {high};
  const Value rest = w.combine(hint + "_rest", "arith.subf", x, w.convert(hint + "_high", high, kF32));
  return {high, w.convert(hint + "_low", rest, type)};
}

}  // namespace

// d_v[j] = sum_i P_ij d_o_i, d_k[j] = sum_i dS_ij q_i with P_ij = exp(scale q_i . k_j - lse_i) and
// dS_ij = scale P_ij (d_o_i . v_j - delta_i). Tensors: q, k, v, d_o, lse, delta, counts, lists, d_k, d_v.
std::string emit_dkdv(const Plan& plan) {
  const Problem& p = plan.problem;
  const int64_t BM = plan.tile.BM, BT = plan.tile.BT, K = p.K, V = p.V, H = p.H, HK = p.HV, group = H / HK;
  const int64_t parts = p.block_k / BT;  // sub-blocks of a block of keys
  const Element type = element_of(p.dtype);
  Writer w("dkdv");
  w.describe(
      "Gradients of k and v of block-sparse attention, one sub-block of keys j of one head, over listed queries i:");
  w.describe(
      "  P[i,j] = exp(scale q_i . k_j - lse_i);   dS = scale P (d_o v^T - delta);   d_v = P^T d_o;   d_k = dS^T q.");
  w.describe("Tiles of " + std::to_string(BM) + " queries and " + std::to_string(BT) + " keys, blocks of " +
             std::to_string(p.block_q) + " and " + std::to_string(p.block_k) + "; H " + std::to_string(H) + ", HK " +
             std::to_string(HK) + ", K " + std::to_string(K) + (V == K ? "" : ", V " + std::to_string(V)));
  w.describe(std::string(plan.boundary ? "tiles may be cut short" : "full tiles, no mask code") +
             (p.split ? "; P and dS as high and low halves" : "") + (p.causal ? "; causal" : ""));
  const Value q = w.memref_argument("q", type), k = w.memref_argument("k", type), v = w.memref_argument("v", type);
  const Value d_o = w.memref_argument("d_o", type), lse = w.memref_argument("lse", kF32);
  const Value delta = w.memref_argument("delta", kF32), counts = w.memref_argument("counts", kI32);
  const Value lists = w.memref_argument("lists", kI32);
  const Value d_k = w.memref_argument("d_k", type), d_v = w.memref_argument("d_v", type);
  const Value scale = w.scalar_argument("scale", kF32);
  Value B = w.scalar_argument("B", kI32), T = w.scalar_argument("T", kI32), S = w.scalar_argument("S", kI32);
  Value first = w.scalar_argument("first", kI32), count = w.scalar_argument("count", kI32);
  w.begin();
  for (Value* x : {&B, &T, &S, &first, &count}) *x = w.to_index(*x);

  // ceil(n / size)
  const auto blocks = [&](const std::string& hint, const Value& n, int64_t size) {
    return w.div(hint, w.add(hint, n, w.index(size - 1)), w.index(size));
  };
  const Value NK = blocks("NK", S, p.block_k), NT = blocks("NT", T, BM);

  // What one tile of queries of head `h` adds to the two sums.
  const auto add_tile = [&](const Value& number, const Value& b, const Value& h, const Value& key, const Value& k_tile,
                            const Value& v_tile, std::vector<Value> sums) {
    const Value token = w.mul("token", number, w.index(BM));
    Rows rows;
    if (plan.boundary) {
      const Value left = w.sub("left", T, token);
      rows = w.rows(w.min("n", left, w.index(BM)), BM);
    }
    const Value row = w.add("row", w.mul("row", b, T), token);
    const Value place = w.add("q_at", w.mul("q_at", row, w.index(H)), h), at = w.mul("q_at", place, w.index(K));
    const Value d_o_at = V == K ? at : w.mul("d_o_at", place, w.index(V));
    const Value head = w.add("head", w.mul("head", b, w.index(H)), h);
    const Value stat = w.add("stat_at", w.mul("stat_at", head, T), token);
    const Shape shape = {BM, BT};
    w.comment("P [i j]");
    const Value q_tile = w.load("q", w.tile(q, at, {BM, K}, {H * K, 1}), rows), kT = w.transpose("kT", k_tile);
    const Value lse_row = w.load("lse", w.tile(lse, stat, {BM}, {1}), rows);
    const Value zeros = w.splat("zeros", 0, shape);
    Value P = w.scaled("P", w.matmul("P", q_tile, kT, zeros), scale);
    P = w.combine("P", "arith.subf", P, w.broadcast("lse_i", lse_row, shape, 1));
    P = w.apply("P", "math.exp", P);
    if (p.causal) {
      w.comment("key + j <= token + i + S - T");
      const Value seen = w.add("seen", token, w.sub("ahead", S, T)), shift = w.to_i32(w.sub("shift", seen, key));
      const Value last = w.combine("last", "arith.addi", w.counting("i", BM), w.fill("shifts", shift, {BM}));
      const Value keep = w.compare("keep", "arith.cmpi sle", w.broadcast("column", w.counting("j", BT), shape, 0),
                                   w.broadcast("row", last, shape, 1));
      P = w.choose("P", keep, P, zeros);
    }
    w.comment("dS [i j]");
    const Value d_o_tile = w.load("d_o", w.tile(d_o, d_o_at, {BM, V}, {H * V, 1}), rows), vT = w.transpose("vT", v_tile);
    const Value delta_row = w.load("delta", w.tile(delta, stat, {BM}, {1}), rows);
    Value dS = w.matmul("dP", d_o_tile, vT, zeros);
    dS = w.combine("dS", "arith.subf", dS, w.broadcast("delta_i", delta_row, shape, 1));
    dS = w.scaled("dS", w.combine("dS", "arith.mulf", P, dS), scale);
    w.comment("both sums");
    for (const Value& x : halves(w, "P", P, type, p.split))
      sums[1] = w.matmul("d_v", w.transpose("PT", x), d_o_tile, sums[1]);
    for (const Value& x : halves(w, "dS", dS, type, p.split))
      sums[0] = w.matmul("d_k", w.transpose("dST", x), q_tile, sums[0]);
    return sums;
  };

  const auto task = [&](const Value& sub_block, const Value& bh) {
    w.comment("sequence, key head, and the sub-block's first key");
    const Value b = w.div("b", bh, w.index(HK)), hk = w.rem("hk", bh, w.index(HK));
    const Value key = w.mul("key", sub_block, w.index(BT)), block = w.div("block", sub_block, w.index(parts));
    Rows rows;
    if (plan.boundary) {
      const Value left = w.sub("left", S, key);
      rows = w.rows(w.min("keys", left, w.index(BT)), BT);
    }
    const Value row = w.add("key_row", w.mul("key_row", b, S), key);
    const Value place = w.add("k_at", w.mul("k_at", row, w.index(HK)), hk), at = w.mul("k_at", place, w.index(K));
    const Value v_at = V == K ? at : w.mul("v_at", place, w.index(V));
    const Shape k_shape = {BT, K}, v_shape = {BT, V}, k_strides = {HK * K, 1}, v_strides = {HK * V, 1};
    const Value k_tile = w.load("k", w.tile(k, at, k_shape, k_strides), rows);
    const Value v_tile = w.load("v", w.tile(v, v_at, v_shape, v_strides), rows);
    const Value zeros_k = w.splat("zeros", 0, k_shape), zeros_v = w.splat("zeros", 0, v_shape);
    // Over the listed tiles of one query head.
    const auto over_list = [&](const Value& h, const std::vector<Value>& start) {
      const Value head = w.add("head", w.mul("head", b, w.index(H)), h);
      const Value column = w.add("column", w.mul("column", head, NK), block), list = w.mul("list", column, NT);
      const Value tiles = w.to_index(w.load_scalar("tiles", counts, column));
      const Value zero = w.index(0), one = w.index(1);
      return w.loop("i", zero, tiles, one, start, [&](const Value& i, const std::vector<Value>& sums) {
        const Value entry = w.add("entry", list, i);
        return add_tile(w.to_index(w.load_scalar("tile", lists, entry)), b, h, key, k_tile, v_tile, sums);
      });
    };
    std::vector<Value> sums = {zeros_k, zeros_v};
    if (group == 1) {
      sums = over_list(hk, sums);
    } else {
      w.comment("over the query heads that read this key head");
      const Value from = w.index(0), to = w.index(group), step = w.index(1);
      sums = w.loop("g", from, to, step, sums, [&](const Value& g, const std::vector<Value>& inside) {
        return over_list(w.add("h", w.mul("h", hk, w.index(group)), g), inside);
      });
    }
    const Value dk = w.convert("d_k", sums[0], type);
    w.store(dk, w.tile(d_k, at, k_shape, k_strides), rows);
    const Value dv = w.convert("d_v", sums[1], type);
    w.store(dv, w.tile(d_v, v_at, v_shape, v_strides), rows);
  };

  w.each_task(plan.mode == Mode::kPersistent, first, count, [&] { return w.mul("heads", B, w.index(HK)); }, "sub_block", "bh", task);
  return w.end();
}

}  // namespace thalweg::ascend
