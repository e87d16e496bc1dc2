// sm90_vec_fwd – KDA gate, forward, a pack of channels a thread.
//
// Math     y = x + dt_bias    g = -exp(A_log) softplus(y), or lower_bound sigmoid(exp(A_log) y)
// Shapes   x,g [B T L HV K]  A_log [HV]  dt_bias [HV K]
// Takes    x and g of f32, bf16, f16, each its own; rows contiguous, at multiples of 16 bytes, K a multiple of 8 up to
//          1024; B, T, L as one axis of tokens, or all but B or L; other strides free; parameters of any float dtype
//          and strides
// Grid     x: heads; y: tiles of tokens, walked with a stride; z: the leading axis that does not join the others
// Tile     256 threads as lanes of tokens x packs of 4 channels (8 where x and g have 16 bits); 32 channels' worth of
//          tokens a thread, loaded at once
// Smem     none
// Regs     64 at most; the test cuda_ptxas prints each
// Order    no sums
// Numerics float32 (sm90_gate.cuh), rounded once, to g
// Traps    a block is one head, so the choice of an unusual head's way is the same for all its threads.
// Measured H200, bf16 in, T2048 H16 K128: float32 out 6.4 us, bf16 out 5.2, FLA's kernel 6.6 and 5.3 in the same run
//          (bench/compare_peers.py). By a driver: T131072 to f32 4.16 TB/s, a copy 4.1 to 4.2
#include "thalweg/ops/kda_gate/sm90_rows.cuh"

namespace thalweg::kda_gate {
namespace {

template <int N>
constexpr int kTokens = 32 / N;  // of a thread, loaded at once

// In turn, the array turning round: indices that are known keep it in registers.
template <bool kSoftplus, int N>
__device__ void unusual_gates(const HeadGate& gate, float (&y)[N]) {
#pragma unroll 1
  for (int i = 0; i < N; ++i) {
    const float g = unusual_gate<kSoftplus>(gate, y[0]).g;
#pragma unroll
    for (int j = 0; j + 1 < N; ++j) y[j] = y[j + 1];
    y[N - 1] = g;
  }
}

// A tensor as planes [tokens HV K], and the strides of what the kernel walks over.
struct Plane {
  void* data;
  int64_t outer, token, hv;
};
// The leading axes of a plane: all three, or all but the first or the last (Problem::planes).
Plane plane_of(const Problem& p, const thalweg_tensor& t) {
  Plane plane{t.data, p.planes == kLAxisApart ? t.stride[2] : t.stride[0], 0, t.stride[3]};
  for (int axis = 2; axis >= 0 && plane.token == 0; --axis) {
    const bool apart = (p.planes == kBAxisApart && axis == 0) || (p.planes == kLAxisApart && axis == 2);
    if (t.shape[axis] > 1 && !apart) plane.token = t.stride[axis];
  }
  return plane;
}

struct Tile {
  int tokens, packs, lanes;
  int inverse;  // of packs, times 2^16: a division of a thread's number
};

template <class X, class G, bool kSoftplus, int kCount>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const Plane x, const Plane g, const thalweg_tensor A_log, const thalweg_tensor dt_bias,
                   const float lower_bound, const Tile tile) {
  constexpr int N = cuda::kPackSize<X, G>;
  const int lane = int(threadIdx.x) * tile.inverse >> 16, k = (int(threadIdx.x) - lane * tile.packs) * N;
  if (lane >= tile.lanes) return;
  const int64_t hv = blockIdx.x, outer = blockIdx.z;
  int token = int(blockIdx.y) * (tile.lanes * kCount) + lane;
  const int step = int(gridDim.y) * (tile.lanes * kCount);
  const X* from = static_cast<const X*>(x.data) + outer * x.outer + token * x.token + hv * x.hv + k;
  G* to = static_cast<G*>(g.data) + outer * g.outer + token * g.token + hv * g.hv + k;
  cuda::Pack<X, N> in[kCount];
  auto load = [&] {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (token + i * tile.lanes < tile.tokens) in[i] = cuda::load_pack<X, N>(from + i * (tile.lanes * x.token));
  };
  load();  // before the parameters are waited for
  float bias[N];
  load_bias(dt_bias, hv, k, bias);
  const HeadGate gate = head_gate<kSoftplus>(A_log, hv, lower_bound);
  while (token < tile.tokens) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (token + i * tile.lanes >= tile.tokens) break;
      float y[N];
      cuda::widen(in[i], y);
#pragma unroll
      for (int j = 0; j < N; ++j) y[j] += bias[j];
      if (gate.usual) {
#pragma unroll
        for (int j = 0; j < N; ++j) y[j] = usual_gate<kSoftplus, kAccuracy<G>>(gate, y[j]);
      } else {
        unusual_gates<kSoftplus>(gate, y);
      }
      cuda::store_pack(to + i * (tile.lanes * g.token), cuda::narrow<G>(y));
    }
    token += step, from += step * x.token, to += step * g.token;
    load();
  }
}

template <class X, class G>
void forward(const Problem& p, const thalweg_kda_gate_fwd_args& args, const Exec& exec) {
  constexpr int N = cuda::kPackSize<X, G>, kCount = kTokens<N>;
  const int64_t outer = p.planes == kBAxisApart ? p.B : p.planes == kLAxisApart ? p.L : 1;
  if (num_tokens(p) == 0) return;
  const int packs = int(p.K / N);
  const Tile tile = {int(num_tokens(p) / outer), packs, kThreads / packs, 65536 / packs + 1};
  const int64_t tiles = cuda::ceil_div(tile.tokens, tile.lanes * kCount);
  const cuda::Grid grid{p.HV, tiles < cuda::kMaxGridYZ ? tiles : cuda::kMaxGridYZ, outer};
  cuda::launch(exec, "kda_gate sm90_vec_fwd",
               p.lower_bound == 0 ? forward_kernel<X, G, true, kCount> : forward_kernel<X, G, false, kCount>, grid,
               kThreads, 0, plane_of(p, args.x), plane_of(p, args.g), args.A_log, args.dt_bias, float(p.lower_bound),
               tile);
}

template <class X>
void forward(const Problem& p, const thalweg_kda_gate_fwd_args& args, const Exec& exec) {
  if (p.g_dtype == THALWEG_F32)
    forward<X, float>(p, args, exec);
  else if (p.g_dtype == THALWEG_BF16)
    forward<X, __nv_bfloat16>(p, args, exec);
  else
    forward<X, __half>(p, args, exec);
}

}  // namespace

void sm90_vec_fwd(const Problem& p, const Plan&, const thalweg_kda_gate_fwd_args& args, const Exec& exec) {
  if (p.dtype == THALWEG_F32)
    forward<float>(p, args, exec);
  else if (p.dtype == THALWEG_BF16)
    forward<__nv_bfloat16>(p, args, exec);
  else
    forward<__half>(p, args, exec);
}

}  // namespace thalweg::kda_gate
