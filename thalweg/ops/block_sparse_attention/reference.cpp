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

#include <cmath>
#include <limits>
#include <vector>

#include "thalweg/core/signature.h"
#include "thalweg/cpu/parallel.h"
#include "thalweg/ops/block_sparse_attention/block_sparse_attention.h"

namespace thalweg::block_sparse_attention {
namespace {

using Fwd = thalweg_block_sparse_attention_fwd_args;
using Bwd = thalweg_block_sparse_attention_bwd_args;

double* at(const thalweg_tensor& t, int64_t i, int64_t j, int64_t k) {
  return static_cast<double*>(t.data) + i * t.stride[0] + j * t.stride[1] + k * t.stride[2];
}

void zero(const thalweg_tensor& t) {
  if (!present(t)) return;
  for (int64_t i = 0; i < t.shape[0]; ++i)
    for (int64_t j = 0; j < (t.rank > 1 ? t.shape[1] : 1); ++j)
      for (int64_t k = 0; k < (t.rank > 2 ? t.shape[2] : 1); ++k)
        for (int64_t l = 0; l < (t.rank > 3 ? t.shape[3] : 1); ++l)
          static_cast<double*>(t.data)[i * t.stride[0] + (t.rank > 1 ? j * t.stride[1] : 0) +
                                       (t.rank > 2 ? k * t.stride[2] : 0) + (t.rank > 3 ? l * t.stride[3] : 0)] = 0;
}

// Eight partial sums, so that the compiler may use vectors.
double dot(const double* a, const double* b, int64_t n) {
  double part[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int l = 0; l < 8; ++l) part[l] += a[i + l] * b[i + l];
  double sum = 0;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (double x : part) sum += x;
  return sum;
}
void axpy(double x, const double* a, int64_t n, double* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x * a[i];
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
    if (packed()) return int_at(args.cu_seqlens, n + 1) - first_query(n);
    return present(args.q_lens) ? int_at(args.q_lens, n) : T;
  }
  int64_t keys(int64_t n) const {
    if (packed()) return int_at(args.cu_seqlens_k, n + 1) - first_key(n);
    return present(args.k_lens) ? int_at(args.k_lens, n) : S;
  }

  // The keys that query t of head h in sequence n sees.
  void visible(int64_t n, int64_t h, int64_t t, std::vector<int64_t>* list) const {
    const thalweg_tensor& mask = args.block_mask;
    const int64_t HM = mask.shape[1], hm = HM == H ? h : HM == 1 ? 0 : h / (H / HK);
    const auto* row = static_cast<const uint8_t*>(mask.data) + n * mask.stride[0] + hm * mask.stride[1] +
                      t / block_q * mask.stride[2];
    list->clear();
    for (int64_t j = 0; j < keys(n); ++j) {
      if (row[j / block_k * mask.stride[3]] == 0) continue;
      if (args.causal && j > t + keys(n) - queries(n)) continue;
      list->push_back(j);
    }
  }
};

template <class Body>
void in_parallel(int64_t n, Body&& body) {
  pool_parallel_for(nullptr, n, [](void* arg, int64_t i) { (*static_cast<Body*>(arg))(i); }, &body);
}

void forward_head(const Scene<Fwd>& scene, int64_t n, int64_t h) {
  const Fwd& a = scene.args;
  const int64_t b = scene.batch(n), hk = h / (scene.H / scene.HK);
  std::vector<int64_t> list;
  std::vector<double> s;
  for (int64_t i = 0; i < scene.queries(n); ++i) {
    const int64_t t = scene.first_query(n) + i, first = scene.first_key(n);
    scene.visible(n, h, i, &list);
    const bool sink = present(a.sink);
    const double z = sink ? static_cast<const double*>(a.sink.data)[h * a.sink.stride[0]] : 0;
    double m = sink ? z : -std::numeric_limits<double>::infinity();
    s.clear();
    for (int64_t j : list) s.push_back(scene.scale * dot(at(a.q, b, t, h), at(a.k, b, first + j, hk), scene.K));
    for (double x : s) m = std::max(m, x);
    double l = sink ? std::exp(z - m) : 0;
    for (double& x : s) l += x = std::exp(x - m);
    const bool sees = sink || !list.empty();
    double* o = at(a.o, b, t, h);
    for (size_t e = 0; e < list.size(); ++e) axpy(s[e] / l, at(a.v, b, first + list[e], hk), scene.V, o);
    if (present(a.lse)) *at(a.lse, b, t, h) = sees ? m + std::log(l) : -std::numeric_limits<double>::infinity();
    if (present(a.row_max)) *at(a.row_max, b, t, h) = sees ? m : 0;
    if (present(a.row_sum)) *at(a.row_sum, b, t, h) = sees ? l : 0;
  }
}

// Query head h of sequence n: its d_q, its part of d_k and d_v, and of d_sink, which is returned.
double backward_head(const Scene<Bwd>& scene, int64_t n, int64_t h) {
  const Bwd& a = scene.args;
  const int64_t b = scene.batch(n), hk = h / (scene.H / scene.HK);
  std::vector<int64_t> list;
  const std::vector<double> none(size_t(scene.V), 0.0);
  double d_sink = 0;
  for (int64_t i = 0; i < scene.queries(n); ++i) {
    const int64_t t = scene.first_query(n) + i, first = scene.first_key(n);
    const bool has_l = present(a.lse);
    const double m = has_l ? 0 : *at(a.row_max, b, t, h), l = has_l ? 1 : *at(a.row_sum, b, t, h);
    const double L = has_l ? *at(a.lse, b, t, h) : m + std::log(l);
    if (!std::isfinite(L) || l == 0) continue;  // sees nothing
    const double* d_o = present(a.d_o) ? at(a.d_o, b, t, h) : none.data();
    const double delta = dot(d_o, at(a.o, b, t, h), scene.V);
    const double d_lse = present(a.d_lse) ? *at(a.d_lse, b, t, h) : 0;
    scene.visible(n, h, i, &list);
    for (int64_t j : list) {
      const double *q = at(a.q, b, t, h), *k = at(a.k, b, first + j, hk);
      const double s = scene.scale * dot(q, k, scene.K);
      const double P = has_l ? std::exp(s - L) : std::exp(s - m) / l;
      const double dS = P * (dot(d_o, at(a.v, b, first + j, hk), scene.V) - delta + d_lse);
      if (present(a.d_q)) axpy(scene.scale * dS, k, scene.K, at(a.d_q, b, t, h));
      if (present(a.d_k)) axpy(scene.scale * dS, q, scene.K, at(a.d_k, b, first + j, hk));
      if (present(a.d_v)) axpy(P, d_o, scene.V, at(a.d_v, b, first + j, hk));
    }
    if (present(a.sink))
      d_sink += std::exp(static_cast<const double*>(a.sink.data)[h * a.sink.stride[0]] - L) * (d_lse - delta);
  }
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
  zero(scene.args.o);
  fill(scene.args.lse, -std::numeric_limits<double>::infinity());
  zero(scene.args.row_max), zero(scene.args.row_sum);
  in_parallel(scene.N * scene.H, [&](int64_t i) { forward_head(scene, i / scene.H, i % scene.H); });
}

void reference_bwd(const void* args) {
  const Scene<Bwd> scene(*static_cast<const Bwd*>(args));
  for (const thalweg_tensor* t : {&scene.args.d_q, &scene.args.d_k, &scene.args.d_v, &scene.args.d_sink}) zero(*t);
  std::vector<double> d_sink(size_t(scene.N * scene.H));
  const int64_t G = scene.H / scene.HK;
  in_parallel(scene.N * scene.HK, [&](int64_t i) {
    for (int64_t g = 0; g < G; ++g) d_sink[size_t(i * G + g)] = backward_head(scene, i / scene.HK, i % scene.HK * G + g);
  });
  if (!present(scene.args.d_sink)) return;
  for (int64_t i = 0; i < scene.N * scene.H; ++i)
    static_cast<double*>(scene.args.d_sink.data)[i % scene.H * scene.args.d_sink.stride[0]] += d_sink[size_t(i)];
}

}  // namespace thalweg::block_sparse_attention
