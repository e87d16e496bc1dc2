// Data for the generated top-k gradient kernel and what it shall compute, by the float64 oracle.
#include <algorithm>
#include <cmath>
#include <vector>

#include "testing/testing.h"
#include "thalweg/ascend/execute.h"
#include "thalweg/core/tensor.h"
#include "thalweg/ops/sparse_flash_attention/reference.h"
#include "thalweg/ops/sparse_flash_attention/sparse_flash_attention.h"

namespace thalweg::ascend {

Scene topk_dkdv_scene(const Plan& plan) {
  using Vector = std::vector<double>;
  const Problem& p = plan.problem;
  const Element type = element_of(p.dtype);
  const int64_t B = p.B, T = p.T, S = p.S, H = p.H, K = p.K, E = p.E, BT = plan.tile.BT, G = plan.tile.BM / H;
  const int64_t NK = (S + BT - 1) / BT, NG = (T + G - 1) / G;
  testing::Random random(31);
  const auto normals = [&](int64_t count) {
    Vector x(static_cast<size_t>(count));
    for (double& value : x) value = rounded(random.normal(), type);
    return x;
  };
  const Vector q = normals(B * T * H * K), k = normals(B * S * K), v = normals(B * S * K), d_o = normals(q.size());
  // Near keys of the first three quarters, so that some tiles are in few lists and some in none; one key twice, one
  // entry empty.
  std::vector<int32_t> indices(size_t(B * T * E));
  for (int64_t t = 0; t < B * T; ++t) {
    int32_t* list = &indices[size_t(t * E)];
    const int64_t span = std::max<int64_t>(1, S * 3 / 4), start = random.below(span);
    for (int64_t e = 0; e < E; ++e) list[e] = int32_t((start + e * 3) % span);
    if (E > 2) list[E - 1] = list[0], list[E - 2] = -1;
  }
  const double scale = 1 / std::sqrt(double(K));
  Vector o(q.size()), lse(size_t(B * T * H)), d_k(k.size()), d_v(v.size());
  thalweg_sparse_flash_attention_fwd_args fwd{};
  fwd.q = view(q.data(), {B, T, H, K}), fwd.k = view(k.data(), {B, S, K}), fwd.v = view(v.data(), {B, S, K});
  fwd.indices = view(indices.data(), {B, T, E});
  fwd.o = view(o.data(), {B, T, H, K}), fwd.lse = view(lse.data(), {B, T, H});
  fwd.scale = scale;
  sparse_flash_attention::reference_fwd(&fwd);
  thalweg_sparse_flash_attention_bwd_args bwd{};
  bwd.q = fwd.q, bwd.k = fwd.k, bwd.v = fwd.v, bwd.indices = fwd.indices, bwd.o = fwd.o, bwd.lse = fwd.lse;
  bwd.d_o = view(d_o.data(), {B, T, H, K});
  bwd.d_k = view(d_k.data(), {B, S, K}), bwd.d_v = view(d_v.data(), {B, S, K});
  bwd.scale = scale;
  sparse_flash_attention::reference_bwd(&bwd);

  Vector delta(lse.size()), ranges, groups, weights;
  for (size_t i = 0; i < delta.size(); ++i)
    for (size_t c = 0; c < size_t(K); ++c) delta[i] += d_o[i * size_t(K) + c] * o[i * size_t(K) + c];
  for (int64_t b = 0; b < B; ++b)
    for (int64_t tile = 0; tile < NK; ++tile) {
      const double before = double(groups.size());
      for (int64_t group = 0; group < NG; ++group) {
        Vector times(size_t(G * BT));
        bool any = false;
        for (int64_t t = group * G; t < std::min(T, group * G + G); ++t)
          for (int64_t e = 0; e < E; ++e) {
            const int64_t j = indices[size_t((b * T + t) * E + e)];
            if (j < 0 || j / BT != tile) continue;
            times[size_t((t - group * G) * BT + j % BT)] += 1, any = true;
          }
        if (!any) continue;
        groups.push_back(double(group));
        for (double n : times) weights.push_back(n > 0 ? std::log(n) : -3e38);
      }
      ranges.insert(ranges.end(), {before, double(groups.size()) - before});
    }
  Scene scene;
  scene.arguments = {input("q", type, q),
                     input("k", type, k),
                     input("v", type, v),
                     input("d_o", type, d_o),
                     input("lse", kF32, lse),
                     input("delta", kF32, delta),
                     input("ranges", kI32, ranges),
                     input("groups", kI32, groups),
                     input("weights", kF32, weights),
                     output_of_largest("d_k", type, d_k, product_limit(type)),
                     output_of_largest("d_v", type, d_v, product_limit(type)),
                     scalar("scale", kF32, scale),
                     scalar("B", kI32, double(B)),
                     scalar("T", kI32, double(T)),
                     scalar("S", kI32, double(S))};
  scene.tiles = NK * (K / plan.tile.V);
  scene.heads = B;
  return scene;
}

}  // namespace thalweg::ascend
