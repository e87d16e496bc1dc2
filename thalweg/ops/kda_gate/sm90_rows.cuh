// How the sm90 rows of kda_gate lie on a tensor: a thread keeps N channels of one head and walks over tokens.
#ifndef THALWEG_OPS_KDA_GATE_SM90_ROWS_CUH
#define THALWEG_OPS_KDA_GATE_SM90_ROWS_CUH

#include "thalweg/cuda/launch.h"
#include "thalweg/cuda/packs.cuh"
#include "thalweg/ops/kda_gate/problem.h"
#include "thalweg/ops/kda_gate/sm90_gate.cuh"

namespace thalweg::kda_gate {
namespace {

constexpr int kThreads = 256;

// A tensor [B T L HV K] as rows (token, hv) of K.
struct Rows {
  void* data;
  int64_t b, t, l, hv;  // strides
  int64_t token;        // of the three leading axes as one, or -1 where they are not
};

inline Rows rows_of(const thalweg_tensor& t) {
  Rows r{t.data, t.stride[0], t.stride[1], t.stride[2], t.stride[3], 0};
  // Axes of size 1 are no axes.
  int64_t size = 1;
  for (int axis = 2; axis >= 0 && r.token >= 0; --axis) {
    if (t.shape[axis] <= 1) continue;
    if (size == 1)
      r.token = t.stride[axis];
    else if (t.stride[axis] != r.token * size)
      r.token = -1;
    size *= t.shape[axis];
  }
  return r;
}

// Threads of a block as lanes of tokens x packs of a row; sizes for going from a token to its place.
struct Walk {
  int64_t tokens;
  uint32_t T, L;
  int packs, lanes;
};
inline Walk walk_of(const Problem& p, int pack) {
  const int packs = int(p.K / pack);
  return {num_tokens(p), uint32_t(p.T), uint32_t(p.L), packs, kThreads / packs};
}

template <class E>
__device__ __forceinline__ E* row_at(const Rows& rows, const Walk& walk, int64_t token, int64_t hv) {
  int64_t offset = token * rows.token;
  if (rows.token < 0) {
    const uint32_t i = uint32_t(token), bt = i / walk.L, b = bt / walk.T;
    offset = b * rows.b + (bt - b * walk.T) * rows.t + (i - bt * walk.L) * rows.l;
  }
  return static_cast<E*>(rows.data) + offset + hv * rows.hv;
}

// dt_bias of N channels, or zeros.
template <int N>
__device__ __forceinline__ void load_bias(const thalweg_tensor& dt_bias, int64_t hv, int64_t k, float (&bias)[N]) {
  cuda::load_parameters(dt_bias, hv * dt_bias.stride[0] + k * dt_bias.stride[1], dt_bias.stride[1], 0.f, bias);
}

}  // namespace
}  // namespace thalweg::kda_gate
#endif
