// Float64 oracles of block-sparse attention, token by token, from the formulas:
//
//   forward, one query     s_j = scale <q, k_j>,  m = max(s_j, z),  l = sum exp(s_j - m) [+ exp(z - m)]
//                          o = sum exp(s_j - m) / l v_j,  L = m + log l            (z: the sink)
//   backward, one query    delta = <d_o, o>,  P_j = exp(s_j - L) or exp(s_j - m) / l,  dP_j = <d_o, v_j>
//                          dS_j = P_j (dP_j - delta + d_L)
//                          d_q = scale sum dS_j k_j,  d_k_j += scale dS_j q,  d_v_j += P_j d_o
//                          d_z += exp(z - L) (d_L - delta)
//
// Whole heads run side by side, each alone in its memory, so the sums' order is fixed.
#include "thalweg/ops/block_sparse_attention/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "testing/reference.h"
#include "thalweg/core/signature.h"
#include "thalweg/cpu/parallel.h"
#include "thalweg/ops/block_sparse_attention/block_sparse_attention.h"

namespace thalweg::block_sparse_attention {
namespace {

using Fwd = thalweg_block_sparse_attention_fwd_args;
using Bwd = thalweg_block_sparse_attention_bwd_args;

using testing::reference::add_scaled, testing::reference::dot, testing::reference::set_zero;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kFew = 32;  // queries and keys that are taken together

double* at(const thalweg_tensor& t, int64_t i, int64_t j, int64_t k) {
  return static_cast<double*>(t.data) + i * t.stride[0] + j * t.stride[1] + k * t.stride[2];
}

// What both passes know of a call: who sees whom.
template <class Args>
struct Scene {
  const Args& args;
  int64_t B, T, S, H, HK, K, V, N, block_q, block_k;
  double scale;

  explicit Scene(const Args& a) : args(a) {
    B = a.q.shape[0], T = a.q.shape[1], H = a.q.shape[2], K = a.q.shape[3];
    S = a.k.shape[1], HK = a.k.shape[2], V = a.v.shape[3], N = a.block_mask.shape[0];
    block_q = a.block_q ? a.block_q : 128, block_k = a.block_k ? a.block_k : 128;
    scale = a.scale != 0 ? a.scale : 1 / std::sqrt(double(K));
  }

  bool packed() const { return present(args.cu_seqlens); }
  int64_t batch(int64_t n) const { return packed() ? 0 : n; }
  int64_t first_query(int64_t n) const { return packed() ? int_at(args.cu_seqlens, n) : 0; }
  int64_t first_key(int64_t n) const { return packed() ? int_at(args.cu_seqlens_k, n) : 0; }
  int64_t queries(int64_t n) const {
    if (present(args.q_lens)) return int_at(args.q_lens, n);
    return packed() ? int_at(args.cu_seqlens, n + 1) - first_query(n) : T;
  }
  int64_t keys(int64_t n) const {
    if (present(args.k_lens)) return int_at(args.k_lens, n);
    return packed() ? int_at(args.cu_seqlens_k, n + 1) - first_key(n) : S;
  }

  // Whether head h of sequence n keeps block (i, j).
  bool keeps(int64_t n, int64_t h, int64_t i, int64_t j) const {
    const thalweg_tensor& mask = args.block_mask;
    const int64_t HM = mask.shape[1], hm = HM == H ? h : HM == 1 ? 0 : h / (H / HK);
    return static_cast<const uint8_t*>(mask.data)[n * mask.stride[0] + hm * mask.stride[1] + i * mask.stride[2] +
                                                  j * mask.stride[3]] != 0;
  }
  // Calls body(i, j) for every pair of queries [begin, end) and keys that is seen. Keys rise for each query; a few of
  // them are taken by all queries before the next few, which changes no sum's order and keeps them in the cache.
  template <class Body>
  void each_pair(int64_t n, int64_t h, int64_t begin, int64_t end, Body&& body) const {
    const int64_t all = keys(n), offset = all - queries(n);
    for (int64_t j0 = 0, j1; j0 < all; j0 = j1) {
      const int64_t block = j0 / block_k;
      j1 = std::min({all, j0 + kFew, (block + 1) * block_k});
      for (int64_t i = begin; i < end; ++i) {
        if (!keeps(n, h, i / block_q, block)) continue;
        const int64_t last = args.causal ? std::min(j1, i + offset + 1) : j1;
        for (int64_t j = j0; j < last; ++j) body(i, j);
      }
    }
  }
};

template <class Body>
void in_parallel(int64_t n, Body&& body) {
  pool_parallel_for(
      nullptr, n, [](void* arg, int64_t i) { (*static_cast<Body*>(arg))(i); }, &body);
}

// Queries [begin, end) of head h in sequence n.
void forward(const Scene<Fwd>& scene, int64_t n, int64_t h, int64_t begin, int64_t end) {
  const Fwd& a = scene.args;
  const int64_t b = scene.batch(n), hk = h / (scene.H / scene.HK), keys = scene.keys(n);
  const int64_t t0 = scene.first_query(n), first = scene.first_key(n);
  const bool sink = present(a.sink);
  const double z = sink ? static_cast<const double*>(a.sink.data)[h * a.sink.stride[0]] : -kInfinity;
  std::vector<double> s(size_t((end - begin) * keys), -kInfinity), m(size_t(end - begin), z), l(m.size());
  auto score = [&](int64_t i, int64_t j) -> double& { return s[size_t((i - begin) * keys + j)]; };
  std::vector<char> sees(m.size(), sink);
  scene.each_pair(n, h, begin, end, [&](int64_t i, int64_t j) {
    score(i, j) = scene.scale * dot(at(a.q, b, t0 + i, h), at(a.k, b, first + j, hk), scene.K);
    m[size_t(i - begin)] = std::max(m[size_t(i - begin)], score(i, j));
    sees[size_t(i - begin)] = 1;
  });
  for (int64_t i = begin; i < end; ++i) l[size_t(i - begin)] = sink ? std::exp(z - m[size_t(i - begin)]) : 0;
  scene.each_pair(n, h, begin, end, [&](int64_t i, int64_t j) {
    score(i, j) = std::exp(score(i, j) - m[size_t(i - begin)]);
    l[size_t(i - begin)] += score(i, j);
  });
  scene.each_pair(n, h, begin, end, [&](int64_t i, int64_t j) {
    add_scaled(score(i, j) / l[size_t(i - begin)], at(a.v, b, first + j, hk), scene.V, at(a.o, b, t0 + i, h));
  });
  for (int64_t i = begin; i < end; ++i) {
    if (!sees[size_t(i - begin)]) continue;  // the outputs start as those of a query that sees nothing
    const double top = m[size_t(i - begin)], sum = l[size_t(i - begin)];
    if (present(a.lse)) *at(a.lse, b, t0 + i, h) = top + std::log(sum);
    if (present(a.row_max)) *at(a.row_max, b, t0 + i, h) = top;
    if (present(a.row_sum)) *at(a.row_sum, b, t0 + i, h) = sum;
  }
}

// Queries [begin, end) of head h in sequence n: their d_q, their part of d_k and d_v, and of d_sink, which is returned.
double backward(const Scene<Bwd>& scene, int64_t n, int64_t h, int64_t begin, int64_t end) {
  const Bwd& a = scene.args;
  const int64_t b = scene.batch(n), hk = h / (scene.H / scene.HK);
  const int64_t t0 = scene.first_query(n), first = scene.first_key(n);
  const std::vector<double> none(size_t(scene.V), 0.0);
  struct Row {
    bool alive;
    double m, l, L, delta;
    const double* d_o;
  };
  std::vector<Row> rows;
  double d_sink = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t t = t0 + i;
    Row row{};
    row.m = present(a.lse) ? *at(a.lse, b, t, h) : *at(a.row_max, b, t, h);
    row.l = present(a.lse) ? 1 : *at(a.row_sum, b, t, h);
    row.L = row.m + std::log(row.l);
    row.alive = std::isfinite(row.L) && row.l != 0;  // else it sees nothing
    row.d_o = present(a.d_o) ? at(a.d_o, b, t, h) : none.data();
    if (row.alive) {
      row.delta = dot(row.d_o, at(a.o, b, t, h), scene.V) - (present(a.d_lse) ? *at(a.d_lse, b, t, h) : 0);
      if (present(a.sink))
        d_sink -= std::exp(static_cast<const double*>(a.sink.data)[h * a.sink.stride[0]] - row.L) * row.delta;
    }
    rows.push_back(row);
  }
  scene.each_pair(n, h, begin, end, [&](int64_t i, int64_t j) {
    const Row& row = rows[size_t(i - begin)];
    if (!row.alive) return;
    const double *q = at(a.q, b, t0 + i, h), *k = at(a.k, b, first + j, hk);
    const double P = std::exp(scene.scale * dot(q, k, scene.K) - row.m) / row.l;
    const double dS = P * (dot(row.d_o, at(a.v, b, first + j, hk), scene.V) - row.delta);
    if (present(a.d_q)) add_scaled(scene.scale * dS, k, scene.K, at(a.d_q, b, t0 + i, h));
    if (present(a.d_k)) add_scaled(scene.scale * dS, q, scene.K, at(a.d_k, b, first + j, hk));
    if (present(a.d_v)) add_scaled(P, row.d_o, scene.V, at(a.d_v, b, first + j, hk));
  });
  return d_sink;
}

void fill(const thalweg_tensor& t, double x) {
  if (!present(t)) return;
  for (int64_t i = 0; i < t.shape[0]; ++i)
    for (int64_t j = 0; j < t.shape[1]; ++j)
      for (int64_t k = 0; k < t.shape[2]; ++k) *at(t, i, j, k) = x;
}

}  // namespace

void reference_fwd(const void* args) {
  const Scene<Fwd> scene(*static_cast<const Fwd*>(args));
  set_zero(scene.args.o);
  fill(scene.args.lse, -kInfinity);
  set_zero(scene.args.row_max), set_zero(scene.args.row_sum);
  in_parallel(scene.N * scene.H, [&](int64_t i) {
    const int64_t n = i / scene.H, queries = scene.queries(n);
    for (int64_t t = 0; t < queries; t += kFew) forward(scene, n, i % scene.H, t, std::min(queries, t + kFew));
  });
}

void reference_bwd(const void* args) {
  const Scene<Bwd> scene(*static_cast<const Bwd*>(args));
  for (const thalweg_tensor* t : {&scene.args.d_q, &scene.args.d_k, &scene.args.d_v, &scene.args.d_sink}) set_zero(*t);
  std::vector<double> d_sink(size_t(scene.N * scene.H));
  const int64_t G = scene.H / scene.HK;
  in_parallel(scene.N * scene.HK, [&](int64_t i) {
    const int64_t n = i / scene.HK, queries = scene.queries(n);
    for (int64_t g = 0; g < G; ++g)
      for (int64_t t = 0; t < queries; t += kFew)
        d_sink[size_t(i * G + g)] += backward(scene, n, i % scene.HK * G + g, t, std::min(queries, t + kFew));
  });
  if (!present(scene.args.d_sink)) return;
  for (int64_t i = 0; i < scene.N * scene.H; ++i)
    static_cast<double*>(scene.args.d_sink.data)[i % scene.H * scene.args.d_sink.stride[0]] += d_sink[size_t(i)];
}

}  // namespace thalweg::block_sparse_attention
