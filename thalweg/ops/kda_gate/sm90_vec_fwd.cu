// sm90_vec_fwd – KDA gate, forward, a pack of channels a thread.
//
// Math     y = x + dt_bias    g = -exp(A_log) softplus(y), or lower_bound sigmoid(exp(A_log) y)
// Shapes   x,g [B T L HV K]  A_log [HV]  dt_bias [HV K]
// Takes    x and g of f32, bf16, f16, each its own; rows contiguous, at multiples of 16 bytes, K a multiple of 8 up to
//          1024; other strides free; parameters of any float dtype and strides
// Grid     x: heads; y: tiles of tokens, walked with a stride
// Tile     256 threads as lanes of tokens x packs of 4 channels (8 where x and g have 16 bits); 32 channels' worth of
//          tokens a thread, loaded at once
// Smem     none
// Regs     see Measured
// Order    no sums
// Numerics float32 (sm90_gate.cuh), rounded once, to g
// Traps    a block is one head, so the choice of an unusual head's way is the same for all its threads.
#include "thalweg/ops/kda_gate/sm90_rows.cuh"

namespace thalweg::kda_gate {
namespace {

template <int N>
constexpr int kTokens = 32 / N;  // of a thread, loaded at once

// In turn, the array turning round: indices that are known keep it in registers.
template <int N>
__device__ void unusual_gates(const HeadGate& gate, float (&y)[N]) {
#pragma unroll 1
  for (int i = 0; i < N; ++i) {
    const float g = unusual_gate(gate, y[0]).g;
#pragma unroll
    for (int j = 0; j + 1 < N; ++j) y[j] = y[j + 1];
    y[N - 1] = g;
  }
}

template <class X, class G, bool kSoftplus, int kCount>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const Rows x, const Rows g, const thalweg_tensor A_log, const thalweg_tensor dt_bias,
                   const float lower_bound, const Walk walk) {
  constexpr int N = cuda::kPackSize<X, G>;
  const int lane = int(threadIdx.x) / walk.packs, k = (int(threadIdx.x) - lane * walk.packs) * N;
  if (lane >= walk.lanes) return;
  const int64_t hv = blockIdx.x, tile = int64_t(walk.lanes) * kCount, step = gridDim.y * tile;
  int64_t first = blockIdx.y * tile + lane;
  cuda::Pack<X, N> in[kCount];
  auto load = [&] {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int64_t token = first + int64_t(i) * walk.lanes;
      if (token < walk.tokens) in[i] = cuda::load_pack<X, N>(row_at<const X>(x, walk, token, hv) + k);
    }
  };
  load();  // before the parameters are waited for
  float bias[N];
  load_bias(dt_bias, hv, k, bias);
  const HeadGate gate = head_gate(A_log, hv, lower_bound);
  for (; first < walk.tokens; first += step, load()) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int64_t token = first + int64_t(i) * walk.lanes;
      if (token >= walk.tokens) break;
      float y[N];
      cuda::widen(in[i], y);
#pragma unroll
      for (int j = 0; j < N; ++j) y[j] += bias[j];
      if (gate.usual) {
#pragma unroll
        for (int j = 0; j < N; ++j) y[j] = usual_gate<kSoftplus, kAccuracy<G>>(gate, y[j]);
      } else {
        unusual_gates(gate, y);
      }
      cuda::store_pack(row_at<G>(g, walk, token, hv) + k, cuda::narrow<G>(y));
    }
  }
}

template <class X, class G>
void forward(const Problem& p, const thalweg_kda_gate_fwd_args& args, const Exec& exec) {
  constexpr int N = cuda::kPackSize<X, G>, kCount = kTokens<N>;
  const Walk walk = walk_of(p, N);
  const int64_t tiles = cuda::ceil_div(walk.tokens, int64_t(walk.lanes) * kCount);
  const cuda::Grid grid{p.HV, tiles < cuda::kMaxGridYZ ? tiles : cuda::kMaxGridYZ};
  cuda::launch(exec, "kda_gate sm90_vec_fwd",
               p.lower_bound == 0 ? forward_kernel<X, G, true, kCount> : forward_kernel<X, G, false, kCount>, grid,
               kThreads, 0, rows_of(args.x), rows_of(args.g), args.A_log, args.dt_bias, float(p.lower_bound), walk);
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
