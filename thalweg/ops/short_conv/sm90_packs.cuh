// What the sm90 forward and backward rows of short_conv share: a thread keeps N channels and walks over the tokens of a
// run of the flattened [B*T] axis, sequence by sequence.
#ifndef THALWEG_OPS_SHORT_CONV_SM90_PACKS_CUH
#define THALWEG_OPS_SHORT_CONV_SM90_PACKS_CUH

#include "thalweg/cuda/packs.cuh"
#include "thalweg/cuda/sm90/sigmoid.cuh"
#include "thalweg/ops/short_conv/cuda_sequences.cuh"

namespace thalweg::short_conv {
namespace {

constexpr int N = 2;  // channels of a thread: 4 take too many registers
constexpr int kThreads = 256;

// Threads of a block as lanes, each with a run of tokens, x packs of channels, a power of two of them.
struct Cut {
  int packs, lanes;
  int64_t strips;  // blocks' worth of channels in D
};
inline Cut cut_of(const Problem& p) {
  int packs = 1;
  while (packs < 64 && packs * N < p.D) packs *= 2;
  return {packs, kThreads / packs, cuda::ceil_div(p.D, int64_t(packs) * N)};
}

template <int W>
struct Taps {
  float weight[W][N], bias[N];

  __device__ Taps(const thalweg_tensor& w, const thalweg_tensor& b, int64_t d) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float row[W];
      cuda::load_parameters(w, (d + i) * w.stride[0], w.stride[1], 0.f, row);
#pragma unroll
      for (int j = 0; j < W; ++j) weight[j][i] = row[j];
    }
    cuda::load_parameters(b, d * b.stride[0], b.stride[0], 0.f, bias);
  }
};

// The last W inputs, the newest last.
template <int W>
struct Inputs {
  float x[W][N];

  __device__ __forceinline__ void push(const float (&next)[N]) {
#pragma unroll
    for (int j = 0; j + 1 < W; ++j)
#pragma unroll
      for (int i = 0; i < N; ++i) x[j][i] = x[j + 1][i];
#pragma unroll
    for (int i = 0; i < N; ++i) x[W - 1][i] = next[i];
  }

  // Before token `first` of a sequence.
  template <class E>
  __device__ void start(const Problem& p, const thalweg_tensor& xs, const thalweg_tensor& state, const Sequence& s,
                        int64_t first, int64_t d) {
#pragma unroll 1
    for (int64_t r = first - W; r < first; ++r) {
      float next[N];
      if (r >= s.begin) {
        cuda::widen(cuda::load_pack<E, N>(static_cast<const E*>(xs.data) + token_at(xs, p.T, r) + d), next);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
          next[i] = is_there(state) ? load_at<float>(state, state_at(state, s.n, d + i, W + r - s.begin)) : 0.f;
      }
      push(next);
    }
  }

  __device__ __forceinline__ void convolve(const Taps<W>& taps, float (&pre)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      pre[i] = taps.bias[i];
#pragma unroll
      for (int j = 0; j < W; ++j) pre[i] = fmaf(taps.weight[j][i], x[j][i], pre[i]);
    }
  }
};

// One value to N channels of the tokens first to last.
template <class E>
__device__ void fill_rows(const thalweg_tensor& t, int64_t T, int64_t first, int64_t last, int64_t d, float value) {
  float values[N];
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = value;
  for (int64_t r = first; r < last; ++r)
    cuda::store_pack(static_cast<E*>(t.data) + token_at(t, T, r) + d, cuda::narrow<E>(values));
}

}  // namespace
}  // namespace thalweg::short_conv
#endif
