// Data for the gated delta rule's generated kernels and what they shall compute, by the chunk-level float64 oracle.
#include <algorithm>
#include <cmath>
#include <vector>

#include "testing/testing.h"
#include "thalweg/ascend/execute.h"
#include "thalweg/ops/gated_delta_rule/reference.h"

namespace thalweg::ascend {
namespace {

namespace chunk = gated_delta_rule::chunk;
using Vector = std::vector<double>;

struct Chunk {
  int64_t b, row, tokens, state;  // sequence, first token over all sequences, tokens, row of h
};

// Chunks in the order of a launch: of packed sequences the full ones first.
std::vector<Chunk> chunks_of(const Plan& plan) {
  std::vector<Chunk> full, cut;
  int64_t b = 0, row = 0, state = 0;
  for (int64_t tokens : plan.problem.sequences()) {
    for (int64_t t = 0; t < tokens; t += plan.tile.BT) {
      const Chunk c{b, row + t, std::min(plan.tile.BT, tokens - t), state++};
      (plan.problem.is_packed && c.tokens < plan.tile.BT ? cut : full).push_back(c);
    }
    ++b, row += tokens;
  }
  full.insert(full.end(), cut.begin(), cut.end());
  return full;
}

struct ChunkScene {
  const Plan& plan;
  const Problem& p;
  const Element type;
  const int64_t H, HV, K, V;
  std::vector<Chunk> chunks;  // in the order of a launch
  int64_t tokens = 0, NT = 0;
  double scale;
  testing::Random random;
  Vector raw;   // gates [tokens HV], natural logarithms
  Vector sums;  // of each chunk's gates, from its start on
  Scene scene;

  explicit ChunkScene(const Plan& the_plan)
      : plan(the_plan),
        p(plan.problem),
        type(element_of(p.dtype)),
        H(p.H),
        HV(p.HV),
        K(p.K),
        V(p.V),
        chunks(chunks_of(plan)),
        scale(1 / std::sqrt(double(std::max<int64_t>(p.K, 1)))),
        random(17) {
    for (int64_t n : p.sequences()) tokens += n;
    NT = p.is_packed ? int64_t(chunks.size()) : (p.T + plan.tile.BT - 1) / plan.tile.BT;
    // Heads differ, so that a wrong head shows: from hardly any decay to e^-4 a token, whose inverse over a chunk is
    // far beyond what float32 holds.
    raw.assign(size_t(tokens * HV), 0);
    if (p.gate != Gate::kNone || p.kernel.ends_with("cumsum"))
      for (int64_t i = 0; i < tokens * HV; ++i)
        raw[size_t(i)] = rounded(-random.uniform() * 8 * std::pow(0.3, double(i % HV % 4)), kF32);
    sums = raw;
    for (const Chunk& c : chunks)
      for (int64_t hv = 0; hv < HV; ++hv)
        if (p.reverse) {
          for (int64_t t = c.tokens - 2; t >= 0; --t)
            sums[size_t((c.row + t) * HV + hv)] += sums[size_t((c.row + t + 1) * HV + hv)];
        } else {
          for (int64_t t = 1; t < c.tokens; ++t)
            sums[size_t((c.row + t) * HV + hv)] += sums[size_t((c.row + t - 1) * HV + hv)];
        }
  }

  Vector normals(int64_t count) {
    Vector x(static_cast<size_t>(count));
    for (double& value : x) value = rounded(random.normal(), type);
    return x;
  }

  // [tokens HV] as the kernel's layout has it.
  Vector in_layout(const Vector& by_token) const {
    if (p.gate != Gate::kHeadsFirst) return by_token;
    Vector out(by_token.size());
    const int64_t T = p.is_packed ? tokens : p.T;
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t hv = 0; hv < HV; ++hv) out[size_t((t / T * HV + hv) * T + t % T)] = by_token[size_t(t * HV + hv)];
    return out;
  }

  void add(Argument a) { scene.arguments.push_back(std::move(a)); }

  Scene finish(bool with_scale) {
    if (p.is_packed) {
      Vector table;
      for (const Chunk& c : chunks) table.insert(table.end(), {double(c.row), double(c.tokens), double(c.state)});
      auto at = std::find_if(scene.arguments.begin(), scene.arguments.end(),
                             [](const Argument& a) { return a.kind == Argument::kScalar; });
      scene.arguments.insert(at, input("chunks", kI32, table));
    }
    if (with_scale) add(scalar("scale", kF32, scale));
    add(scalar("B", kI32, double(p.is_packed ? 1 : p.B)));
    add(scalar("T", kI32, double(p.is_packed ? tokens : p.T)));
    add(scalar("NT", kI32, double(NT)));
    scene.tiles = NT;
    scene.heads = (p.is_packed ? 1 : p.B) * HV;
    return std::move(scene);
  }

  // What the oracle takes, of one chunk of one head.
  struct Piece {
    Vector q, k, v, g, beta;
    chunk::Inputs in;
    chunk::Local local;
  };
  static Vector rows_of(const Vector& x, int64_t row, int64_t count, int64_t heads, int64_t head, int64_t width) {
    Vector out;
    for (int64_t t = 0; t < count; ++t) {
      const auto at = x.begin() + ((row + t) * heads + head) * width;
      out.insert(out.end(), at, at + width);
    }
    return out;
  }
  void put(const Vector& part, const Chunk& c, int64_t hv, int64_t width, Vector* whole) const {
    for (int64_t t = 0; t < c.tokens; ++t)
      std::copy(part.begin() + t * width, part.begin() + (t + 1) * width,
                whole->begin() + ((c.row + t) * HV + hv) * width);
  }
  Piece piece(const Chunk& c, int64_t hv, const Vector& q, const Vector& k) const {
    Piece x;
    x.q = rows_of(q, c.row, c.tokens, H, hv / (HV / H), K), x.k = rows_of(k, c.row, c.tokens, H, hv / (HV / H), K);
    x.v.assign(size_t(c.tokens * V), 0), x.beta.assign(size_t(c.tokens), 0);  // the stages here read neither
    x.g = rows_of(raw, c.row, c.tokens, HV, hv, 1);
    x.in = {c.tokens, K, V, scale, x.q.data(), x.k.data(), x.v.data(), x.g.data(), x.beta.data()};
    x.local = chunk::local(x.in);
    return x;
  }
};

}  // namespace

Scene cumsum_scene(const Plan& plan) {
  ChunkScene s(plan);
  s.add(input("x", kF32, s.in_layout(s.raw)));
  Argument g = output_of_largest("g", kF32, s.in_layout(s.sums), 1e-6);
  s.add(g);
  return s.finish(false);
}

Scene dv_local_scene(const Plan& plan) {
  ChunkScene s(plan);
  const Vector q = s.normals(s.tokens * s.H * s.K), k = s.normals(s.tokens * s.H * s.K);
  const Vector d_o = s.normals(s.tokens * s.HV * s.V);
  Vector d_v(d_o.size());
  for (const Chunk& c : s.chunks)
    for (int64_t hv = 0; hv < s.HV; ++hv) {
      const ChunkScene::Piece x = s.piece(c, hv, q, k);
      s.put(chunk::dv_local(x.in, x.local, ChunkScene::rows_of(d_o, c.row, c.tokens, s.HV, hv, s.V)), c, hv, s.V, &d_v);
    }
  s.add(input("q", s.type, q)), s.add(input("k", s.type, k)), s.add(input("d_o", s.type, d_o));
  if (plan.problem.gate != Gate::kNone) s.add(input("g", kF32, s.in_layout(s.sums)));
  s.add(output_of_largest("d_v", s.type, d_v, product_limit(s.type)));
  return s.finish(true);
}

Scene dqkw_scene(const Plan& plan) {
  ChunkScene s(plan);
  const int64_t K = s.K, V = s.V, HV = s.HV, states = int64_t(s.chunks.size());
  const Vector q = s.normals(s.tokens * s.H * K), k = s.normals(s.tokens * s.H * K);
  const Vector v_new = s.normals(s.tokens * HV * V), d_o = s.normals(v_new.size()), d_v = s.normals(v_new.size());
  const Vector h = s.normals(states * HV * K * V), d_h = s.normals(states * HV * K * V);
  Vector d_q(size_t(s.tokens * HV * K)), d_k(d_q.size()), d_w(d_q.size());
  for (const Chunk& c : s.chunks)
    for (int64_t hv = 0; hv < HV; ++hv) {
      const ChunkScene::Piece x = s.piece(c, hv, q, k);
      const auto values = [&](const Vector& of) { return ChunkScene::rows_of(of, c.row, c.tokens, HV, hv, V); };
      const auto state = [&](const Vector& of) { return ChunkScene::rows_of(of, c.state, 1, HV, hv, K * V); };
      const chunk::Dqkwg d = chunk::dqkwg(x.in, x.local, state(h), values(v_new), values(d_o), values(d_v), state(d_h));
      s.put(d.dq, c, hv, K, &d_q), s.put(d.dk, c, hv, K, &d_k), s.put(d.dw, c, hv, K, &d_w);
    }
  s.add(input("q", s.type, q)), s.add(input("k", s.type, k));
  s.add(input("v_new", s.type, v_new)), s.add(input("d_o", s.type, d_o)), s.add(input("d_v", s.type, d_v));
  s.add(input("h", s.type, h)), s.add(input("d_h", s.type, d_h));
  if (plan.problem.gate != Gate::kNone) s.add(input("g", kF32, s.in_layout(s.sums)));
  s.add(output_of_largest("d_q", s.type, d_q, product_limit(s.type))),
      s.add(output_of_largest("d_k", s.type, d_k, product_limit(s.type)));
  s.add(output_of_largest("d_w", s.type, d_w, product_limit(s.type)));
  return s.finish(true);
}

// w and u of real keys, so that states stay bounded: what local() makes of unit keys, values and beta in (0, 1).
Scene state_scene(const Plan& plan) {
  ChunkScene s(plan);
  const Problem& p = plan.problem;
  const int64_t K = s.K, V = s.V, H = s.H, HV = s.HV, N = int64_t(p.sequences().size());
  Vector k = s.normals(s.tokens * H * K), w(size_t(s.tokens * HV * K)), u(size_t(s.tokens * HV * V));
  for (int64_t i = 0; i < s.tokens * H; ++i) {
    double squares = 0;
    for (int64_t j = 0; j < K; ++j) squares += k[size_t(i * K + j)] * k[size_t(i * K + j)];
    for (int64_t j = 0; j < K; ++j) k[size_t(i * K + j)] = rounded(k[size_t(i * K + j)] / std::sqrt(squares), s.type);
  }
  Vector initial(size_t(N * HV * K * V)), final(initial.size()), v_new(u.size());
  for (double& x : initial) x = rounded(s.random.normal(), kF32);
  Vector h(s.chunks.size() * size_t(HV * K * V));
  std::vector<Chunk> in_order = s.chunks;
  std::sort(in_order.begin(), in_order.end(), [](const Chunk& a, const Chunk& b) { return a.state < b.state; });
  for (int64_t hv = 0; hv < HV; ++hv) {
    chunk::Matrix S;
    int64_t sequence = -1;
    for (const Chunk& c : in_order) {
      const auto state_of = [&](Vector& of, int64_t row) { return of.begin() + (row * HV + hv) * K * V; };
      if (c.b != sequence) S.assign(state_of(initial, c.b), state_of(initial, c.b) + K * V), sequence = c.b;
      ChunkScene::Piece x = s.piece(c, hv, k, k);
      for (double& value : x.v) value = s.random.normal();
      for (double& value : x.beta) value = s.random.uniform();
      x.local = chunk::local(x.in);
      for (double& value : x.local.w) value = rounded(value, s.type);
      for (double& value : x.local.u) value = rounded(value, s.type);
      s.put(x.local.w, c, hv, K, &w), s.put(x.local.u, c, hv, V, &u);
      std::copy(S.begin(), S.end(), state_of(h, c.state));
      const chunk::Matrix delta = chunk::v_new(x.in, x.local, S);
      s.put(delta, c, hv, V, &v_new);
      S = chunk::next_state(x.in, x.local, S, delta);
      std::copy(S.begin(), S.end(), state_of(final, c.b));
    }
  }
  s.add(input("k", s.type, k)), s.add(input("w", s.type, w)), s.add(input("u", s.type, u));
  if (p.gate != Gate::kNone) s.add(input("g", kF32, s.in_layout(s.sums)));
  s.add(input("initial_state", kF32, initial));
  s.add(output_of_largest("h", s.type, h, product_limit(s.type))),
      s.add(output_of_largest("v_new", s.type, v_new, product_limit(s.type)));
  s.add(output_of_largest("final_state", kF32, final, product_limit(s.type)));
  Vector sequences;  // rows of the table, which is in order here
  if (p.is_packed) {
    for (int64_t n = 0; n < N; ++n) {
      const auto first = std::find_if(in_order.begin(), in_order.end(), [n](const Chunk& c) { return c.b == n; });
      const int64_t count = std::count_if(in_order.begin(), in_order.end(), [n](const Chunk& c) { return c.b == n; });
      sequences.insert(sequences.end(), {double(first - in_order.begin()), double(count)});
    }
    s.add(input("sequences", kI32, sequences));
    s.chunks = in_order;
  }
  Scene scene = s.finish(false);
  scene["B"].values = {double(N)};
  scene.tiles = V / plan.tile.V, scene.heads = N * HV;
  return scene;
}

}  // namespace thalweg::ascend
