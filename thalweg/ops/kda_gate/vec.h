// Parameters and rows of the KDA gate on float vectors. For files compiled per instruction set only.
#ifndef THALWEG_OPS_KDA_GATE_VEC_H
#define THALWEG_OPS_KDA_GATE_VEC_H

#include "thalweg/cpu/blocks/channel_gate.h"
#include "thalweg/cpu/blocks/rows.h"
#include "thalweg/ops/kda_gate/problem.h"

namespace thalweg::kda_gate {
namespace {

static_assert(sizeof(ChannelGate) <= kVecGateBytes);

struct Parameters {
  const ChannelGate* gates;  // [HV]
  const float* dt_bias;      // [HV][pitch], 0 past K
};

template <class Args>
Parameters load_parameters(const Problem& p, const Args& args, char* workspace) {
  const Shared shared = shared_of(p, kVecGateBytes, kVecBiasBytes, 0);
  ChannelGate* gates = reinterpret_cast<ChannelGate*>(workspace);
  float* dt_bias = reinterpret_cast<float*>(workspace + shared.bias);
  const int64_t pitch = row_pitch(p);
  for (int64_t hv = 0; hv < p.HV; ++hv) {
    float A_log = 0.f;
    if (args.A_log.dtype) read_strided(args.A_log.dtype, element_at(args.A_log, hv), 1, 1, &A_log);
    gates[hv] = channel_gate(args.A_log.dtype != THALWEG_NONE, A_log, float(p.lower_bound));
    float* row = dt_bias + hv * pitch;
    memset(row, 0, size_t(pitch) * sizeof(float));
    if (args.dt_bias.dtype)
      read_strided(args.dt_bias.dtype, element_at(args.dt_bias, hv), args.dt_bias.stride[1], p.K, row);
  }
  return {gates, dt_bias};
}

// Row 0 of a token.
template <class E>
E* token_at(const Problem& p, const thalweg_tensor& t, int64_t token) {
  const int64_t bt = token / p.L, b = bt / p.T;
  return static_cast<E*>(t.data) + b * t.stride[0] + (bt - b * p.T) * t.stride[1] + (token - bt * p.L) * t.stride[2];
}

// True when every row of t starts where streamed stores may.
inline bool is_stream_aligned(const thalweg_tensor& t) {
  const int64_t bytes = element_bytes(t.dtype);
  bool ok = reinterpret_cast<uintptr_t>(t.data) % kStreamAlign == 0;
  for (int axis = 0; axis < 4; ++axis) ok = ok && (t.shape[axis] <= 1 || t.stride[axis] * bytes % kStreamAlign == 0);
  return ok;
}

constexpr int64_t kStep = 4;  // vectors at a time

// kStep vectors to p, past the caches or not.
template <class S>
[[gnu::always_inline]] inline void put(typename S::Element* p, const vf (&x)[kStep], bool stream) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < kStep; i += 2) {
    if (stream) {
      S::stream(p + i * kLanes, x[i], x[i + 1]);
    } else {
      S::store(p + i * kLanes, x[i]);
      S::store(p + (i + 1) * kLanes, x[i + 1]);
    }
  }
}

using Task = void (*)(void*, int64_t, int64_t);

}  // namespace
}  // namespace thalweg::kda_gate
#endif
