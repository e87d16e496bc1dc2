// The gradient of keys and values of sparse flash attention (top-k lists) as MLIR. One task is one tile of BT keys, and
// K / ND of the channels of its gradients: both sums stay on the cube, so ND parts share what it can hold. It walks the
// groups of G = BM / H queries whose lists name a key of the tile; all H heads of a query are rows of one product, as
// they share the keys. Tensors, in device memory and without gaps:
//
//   q d_o [B T H K]    k v d_k d_v [B S K]    lse delta [B T H] f32, delta = <d_o, o>; lse finite where a query sees a
//   key ranges [B NK 2] i32: of each tile of keys, its first entry and how many it has; NK = ceil(S / BT) groups
//   [entries] i32: which group of queries (of its sequence) an entry is weights [entries G BT] f32: the logarithm of
//   how often query and key meet, -3e38 where they do not
//
// then scale f32, and i32: B; T; S; first and count: the launch does parts first to first + count - 1 of the NK ND
// parts of each sequence, tile of keys first.
//
//   single      program (px, py) does part first + px of sequence py
//   persistent  program px of nx does tasks px, px + nx, … of count B: part first + i / B of sequence i % B
//
// Text without mask code takes T that G divides and S that BT divides. Otherwise rows that are not there are 0 (weights
// -3e38 come with the table), and a key's sums that is not there are not stored.
#include <string>
#include <vector>

#include "thalweg/ascend/mlir.h"
#include "thalweg/ascend/plan.h"

namespace thalweg::ascend {

// d_v[j] = sum_i P_ij d_o_i, d_k[j] = sum_i dS_ij q_i with P_ij = exp(scale q_i . k_j + weight_ij - lse_i) and
// dS_ij = scale P_ij (d_o_i . v_j - delta_i). Tensors: q, k, v, d_o, lse, delta, ranges, groups, weights, d_k, d_v.
std::string emit_topk_dkdv(const Plan& plan) {
  const Problem& p = plan.problem;
  const int64_t H = p.H, K = p.K, BT = plan.tile.BT, BM = plan.tile.BM, G = BM / H, part = plan.tile.V, ND = K / part;
  const Element type = element_of(p.dtype);
  Writer w("topk_dkdv");
  w.describe(
      "Gradients of keys j and values of top-k attention, one tile of keys, over the groups of queries that list it:");
  w.describe("  P[i,j] = exp(scale q_i . k_j + weight - lse_i);   dS = scale P (d_o v^T - delta);   d_v = P^T d_o;");
  w.describe("  d_k = dS^T q, " + std::to_string(part) + " of the channels of both.");
  w.describe("BT " + std::to_string(BT) + " keys; BM " + std::to_string(BM) + " rows: " + std::to_string(G) +
             " queries of H " + std::to_string(H) + " heads; K " + std::to_string(K) + ", ND " + std::to_string(ND) +
             (plan.boundary ? "; tiles may be cut short" : "; full tiles, no mask code"));
  const Value q = w.memref_argument("q", type), k = w.memref_argument("k", type), v = w.memref_argument("v", type);
  const Value d_o = w.memref_argument("d_o", type), lse = w.memref_argument("lse", kF32);
  const Value delta = w.memref_argument("delta", kF32), ranges = w.memref_argument("ranges", kI32);
  const Value groups = w.memref_argument("groups", kI32), weights = w.memref_argument("weights", kF32);
  const Value d_k = w.memref_argument("d_k", type), d_v = w.memref_argument("d_v", type);
  const Value scale = w.scalar_argument("scale", kF32);
  Value B = w.scalar_argument("B", kI32), T = w.scalar_argument("T", kI32), S = w.scalar_argument("S", kI32);
  Value first = w.scalar_argument("first", kI32), count = w.scalar_argument("count", kI32);
  w.begin();
  for (Value* x : {&B, &T, &S, &first, &count}) *x = w.to_index(*x);
  const Value NK = w.div("NK", w.add("NK", S, w.index(BT - 1)), w.index(BT));
  const Shape shape = {BM, BT};

  // What the group of queries of one entry adds to the two sums.
  const auto add_group = [&](const Value& entry, const Value& b, const Value& channel, const Value& k_tile,
                             const Value& v_tile, const std::vector<Value>& sums) {
    const Value group = w.to_index(w.load_scalar("group", groups, entry)), token = w.mul("token", group, w.index(G));
    const Value row = w.mul("row", w.add("row", w.mul("row", b, T), token), w.index(H));
    Rows rows;
    if (plan.boundary) {
      const Value left = w.mul("left", w.sub("left", T, token), w.index(H));
      rows = w.rows(w.min("n", left, w.index(BM)), BM);
    }
    const Value at = w.mul("q_at", row, w.index(K)), part_at = w.add("part_at", at, channel);
    w.comment("P [i j]");
    const Value q_tile = w.load("q", w.tile(q, at, {BM, K}, {K, 1}), rows), kT = w.transpose("kT", k_tile);
    const Value lse_row = w.load("lse", w.tile(lse, row, {BM}, {1}), rows);
    const Value zeros = w.splat("zeros", 0, shape);
    Value P = w.scaled("P", w.matmul("P", q_tile, kT, zeros), scale);
    P = w.combine("P", "arith.subf", P, w.broadcast("lse_i", lse_row, shape, 1));
    w.comment("how often the pair meets, for all heads of a query");
    const Value weight_at = w.mul("weight_at", entry, w.index(G * BT));
    const Value weight = w.load("weight", w.tile(weights, weight_at, {G, BT}, {BT, 1}));
    P = w.combine("P", "arith.addf", P, w.repeat_rows("weights", weight, H));
    P = w.apply("P", "math.exp", P);
    w.comment("dS [i j]");
    const Value d_o_tile = w.load("d_o", w.tile(d_o, at, {BM, K}, {K, 1}), rows), vT = w.transpose("vT", v_tile);
    const Value delta_row = w.load("delta", w.tile(delta, row, {BM}, {1}), rows);
    Value dS = w.matmul("dP", d_o_tile, vT, zeros);
    dS = w.combine("dS", "arith.subf", dS, w.broadcast("delta_i", delta_row, shape, 1));
    dS = w.scaled("dS", w.combine("dS", "arith.mulf", P, dS), scale);
    w.comment("both sums, of this part's channels");
    const Value PT = w.transpose("PT", w.convert("P", P, type)), dST = w.transpose("dST", w.convert("dS", dS, type));
    const Value d_o_part = ND == 1 ? d_o_tile : w.load("d_o", w.tile(d_o, part_at, {BM, part}, {K, 1}), rows);
    const Value dv = w.matmul("d_v", PT, d_o_part, sums[1]);
    const Value q_part = ND == 1 ? q_tile : w.load("q", w.tile(q, part_at, {BM, part}, {K, 1}), rows);
    return std::vector<Value>{w.matmul("d_k", dST, q_part, sums[0]), dv};
  };

  const auto task = [&](const Value& number, const Value& b) {
    w.comment("the tile's first key, and the part's first channel");
    const Value tile = w.div("tile", number, w.index(ND)), key = w.mul("key", tile, w.index(BT));
    const Value channel = w.mul("channel", w.rem("part", number, w.index(ND)), w.index(part));
    Rows rows;
    if (plan.boundary) {
      const Value left = w.sub("left", S, key);
      rows = w.rows(w.min("keys", left, w.index(BT)), BT);
    }
    const Value at = w.mul("k_at", w.add("k_at", w.mul("k_at", b, S), key), w.index(K));
    const Value k_tile = w.load("k", w.tile(k, at, {BT, K}, {K, 1}), rows);
    const Value v_tile = w.load("v", w.tile(v, at, {BT, K}, {K, 1}), rows);
    const Value range = w.mul("range", w.add("range", w.mul("range", b, NK), tile), w.index(2));
    const Value from = w.to_index(w.load_scalar("from", ranges, range)), range_1 = w.add("range", range, w.index(1));
    const Value to = w.add("to", from, w.to_index(w.load_scalar("entries", ranges, range_1)));
    const Value zeros_k = w.splat("zeros", 0, {BT, part}), zeros_v = w.splat("zeros", 0, {BT, part});
    const Value one = w.index(1);
    const auto sums = w.loop("e", from, to, one, {zeros_k, zeros_v}, [&](const Value& e, const std::vector<Value>& s) {
      return add_group(e, b, channel, k_tile, v_tile, s);
    });
    const Value out = w.add("out", at, channel);
    const Value dk = w.convert("d_k", sums[0], type);
    w.store(dk, w.tile(d_k, out, {BT, part}, {K, 1}), rows);
    const Value dv = w.convert("d_v", sums[1], type);
    w.store(dv, w.tile(d_v, out, {BT, part}, {K, 1}), rows);
  };

  w.each_task(plan.mode == Mode::kPersistent, first, count, [&] { return B; }, "number", "b", task);
  return w.end();
}

}  // namespace thalweg::ascend
