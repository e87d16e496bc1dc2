// Data for the generated dK/dV kernel and what it shall compute, by the float64 oracle.
#include <algorithm>
#include <cmath>
#include <vector>

#include "testing/testing.h"
#include "thalweg/ascend/execute.h"
#include "thalweg/core/tensor.h"
#include "thalweg/ops/block_sparse_attention/block_sparse_attention.h"
#include "thalweg/ops/block_sparse_attention/reference.h"

namespace thalweg::ascend {

Scene dkdv_scene(const Plan& plan) {
  using Vector = std::vector<double>;
  const Problem& p = plan.problem;
  const Element type = element_of(p.dtype);
  const int64_t B = p.B, T = p.T, S = p.S, H = p.H, HK = p.HV, K = p.K, V = p.V;
  const int64_t NQ = (T + p.block_q - 1) / p.block_q, NK = (S + p.block_k - 1) / p.block_k;
  const int64_t BM = plan.tile.BM, NT = (T + BM - 1) / BM;
  testing::Random random(29);
  const auto normals = [&](int64_t count) {
    Vector x(static_cast<size_t>(count));
    for (double& value : x) value = rounded(random.normal(), type);
    return x;
  };
  const Vector q = normals(B * T * H * K), k = normals(B * S * HK * K), v = normals(B * S * HK * V);
  const Vector d_o = normals(B * T * H * V), sink = normals(H);
  // Half of the blocks, the first of each query so that each sees something, and no query the last block of keys
  // where there are more.
  std::vector<uint8_t> mask(size_t(B * H * NQ * NK));
  for (int64_t i = 0; i < B * H * NQ; ++i)
    for (int64_t j = 0; j < NK; ++j)
      mask[size_t(i * NK + j)] = j == i % std::max<int64_t>(1, NK - 1) || (j + 1 < NK && random.uniform() < 0.5);

  Vector o(d_o.size()), lse(size_t(B * T * H)), d_k(k.size()), d_v(v.size());
  thalweg_block_sparse_attention_fwd_args fwd{};
  fwd.q = view(q.data(), {B, T, H, K}), fwd.k = view(k.data(), {B, S, HK, K}), fwd.v = view(v.data(), {B, S, HK, V});
  fwd.block_mask = view(mask.data(), {B, H, NQ, NK});
  if (p.has_sink) fwd.sink = view(sink.data(), {H});
  fwd.o = view(o.data(), {B, T, H, V}), fwd.lse = view(lse.data(), {B, T, H});
  fwd.block_q = p.block_q, fwd.block_k = p.block_k, fwd.causal = p.causal;
  block_sparse_attention::reference_fwd(&fwd);
  thalweg_block_sparse_attention_bwd_args bwd{};
  bwd.q = fwd.q, bwd.k = fwd.k, bwd.v = fwd.v, bwd.block_mask = fwd.block_mask, bwd.o = fwd.o, bwd.lse = fwd.lse, bwd.sink = fwd.sink;
  bwd.d_o = view(d_o.data(), {B, T, H, V});
  bwd.d_k = view(d_k.data(), {B, S, HK, K}), bwd.d_v = view(d_v.data(), {B, S, HK, V});
  bwd.block_q = p.block_q, bwd.block_k = p.block_k, bwd.causal = p.causal;
  block_sparse_attention::reference_bwd(&bwd);

  // Per head: statistics in a row, and the lists of tiles.
  Vector stats(size_t(B * H * T)), delta(stats.size()), counts(size_t(B * H * NK)), lists(size_t(B * H * NK * NT));
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t t = 0; t < T; ++t) {
        const int64_t from = (b * T + t) * H + h, to = (b * H + h) * T + t;
        stats[size_t(to)] = lse[size_t(from)];
        for (int64_t i = 0; i < V; ++i) delta[size_t(to)] += d_o[size_t(from * V + i)] * o[size_t(from * V + i)];
      }
      for (int64_t j = 0; j < NK; ++j) {
        const int64_t column = (b * H + h) * NK + j;
        for (int64_t i = p.causal ? std::max<int64_t>(0, (j * p.block_k - S + T) / BM) : 0; i < NT; ++i)
          if (mask[size_t(((b * H + h) * NQ + i / (p.block_q / BM)) * NK + j)])
            lists[size_t(column * NT + int64_t(counts[size_t(column)]++))] = double(i);
      }
    }
  Scene scene;
  scene.arguments = {input("q", type, q),
                     input("k", type, k),
                     input("v", type, v),
                     input("d_o", type, d_o),
                     input("lse", kF32, stats),
                     input("delta", kF32, delta),
                     input("counts", kI32, counts),
                     input("lists", kI32, lists),
                     output_of_largest("d_k", type, d_k, product_limit(type)),
                     output_of_largest("d_v", type, d_v, product_limit(type)),
                     scalar("scale", kF32, 1 / std::sqrt(double(K))),
                     scalar("B", kI32, double(B)),
                     scalar("T", kI32, double(T)),
                     scalar("S", kI32, double(S))};
  scene.tiles = (S + plan.tile.BT - 1) / plan.tile.BT;
  scene.heads = B * HK;
  return scene;
}

}  // namespace thalweg::ascend
