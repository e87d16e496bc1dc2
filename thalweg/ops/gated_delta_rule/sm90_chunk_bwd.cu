// sm90_chunk_bwd - gated delta rule, backward, chunks of 64 tokens on Hopper's tensor cores.
//
// Math      per chunk and value head, S the state that enters it, dS the gradient of the state that leaves it, G sums
//           of g in log2, D_ij = 2^(G_i - G_j), E_i = 2^G_i, n the last token, matrices of whole chunks in capitals:
//             prep      M = tril(D K K^T, -1)   X = -M (I + diag(beta) M)^-1   P = tril(scale D Q K^T)
//             scans     R = (I + X diag(beta)) (V - E K S)              S  <- E_n S + K^T (D_n beta R)
//                       Y = (I + X^T diag(beta)) (P^T dO + D_n K dS)    dV = beta Y
//                       dS <- E_n dS + Q^T (scale E dO) - K^T (E dV)
//             gradients Rd = tril(scale D (dO R^T) beta_j)   Wr = tril(-D (dV R^T) beta_j, -1)   d_beta = diag(Y R^T)
//                       dQ = scale E (dO S^T) + Rd K
//                       dK = D_n beta (R dS^T) - E (dV S^T) + Rd^T Q + (Wr + Wr^T) K
//                       d_g_t = E_n sum(S dS) + sum_{j<t} D_n k_j.(dS u_j) + sum_{i>=t} E_i (scale q_i.(S d_o_i)
//                               - k_i.(S d_v_i)) + sum_{i>=t>j} (Rd_ij q_i.k_j + Wr_ij k_i.k_j)
//           X, r and y carry no beta outside, so a beta of 0 needs no care: u = beta r, d_v = beta y.
// Shapes    q,k,d_q,d_k [B T H K]  v,d_o,d_v [B T HV V]  g,beta,d_g,d_beta [B T HV]  states [N HV K V]
// Takes     bf16 or f16, K = V in {64, 128}, any strides of tokens and heads (rows that start at 16 bytes are faster),
//           g, beta and states of any dtype and strides, packed sequences. Not the fused norm, gate and sigmoid.
// Grid      prep: a block a chunk and two value heads of a key head. Scans: one grid for both directions, a block a
//           sequence, value head and 64 columns of V. Gradients: a block an SM, which walks over chunks and key heads.
//           Where scans take a quarter of the multiprocessors or less, one grid has both: gradients begin in the middle
//           of the sequences, which both directions pass first, and wait for a count of the scans that have passed.
// Tile      64 tokens x 64 columns of V x K; see the three .cuh
// Smem      K = 128: prep 51 KiB, scans 219 KiB, gradients 214 KiB
// Regs      K = 128: prep 128 of 128 threads, four blocks a multiprocessor; scans setmaxnreg 232 to the group that
//           computes, 136 to those that move (88 beside gradients); gradients 168 to the two groups of columns, 128 to
//           the pairs, 48 to the one that moves
// Workspace per chunk and value head, 16 bits: S, dS [V][K], r [V][64], y [64][V], X, P [64][64] as the kernels' shared
//           memory has them (one bulk copy each), and four rows of float32 scalars: 113 KiB at K = V = 128;
//           per chunk and key head a counter
// Order     value heads of a key head one after another, sums over the chip's halves in a fixed order, atomics on
//           counters alone: bits depend on the problem alone
// Numerics  operands 16-bit, sums and states float32, the inverse float32 with tf32x3 products; exponents are
//           differences of sums of gates, each at least 2^-150, and never positive (g <= 0); masks by selection. d_g
//           adds up only products that token t's decay is a factor of. d_v is beta times y as kept, in 16 bits. bf16,
//           random data: d_q, d_k, d_v 2.3e-3 .. 3.9e-3 RMS (d_v without the rounding of y, 1.7e-3 of its own), d_g,
//           d_beta 1.1e-3 .. 4.2e-3, d_initial_state 2.5e-3; f16 3e-4 .. 4e-4, d_g as in bf16, to which its pairs are
//           rounded. Keys of cosine 0.99 with beta to 2 and no decay: d_q, d_v 1.3e-2.
// Traps     - Rows past the end of a sequence are zero in every tile, and beta and g there, so no product sees another
//             sequence's rows: TMA loads whole chunks only, the last rows of a sequence come by plain copies.
//           - wgmma reads what cp.async wrote only after a fence.proxy.async of the thread that copied.
//           - Shared memory is cast from an aligned array: a base rounded up by hand makes every access generic.
//           - Tensors of any dtype: an element read through its type waits for itself, so 64 of them in a row are 64
//             latencies. States, g and beta of float32 go without.
//           - Which group of columns a warpgroup is goes through __shfl_sync, or ptxas keeps every description of a
//             tile in registers of its own and spills.
// Measured  H200, bf16, K = V = 128, initial_state and d_final_state, microseconds, in records: 1x8192 H16 HV32 461
//           (by a profiler prep 57, scans 241, gradients 162); packed 4x2048 458; 1x32768 1788; 1x8192 H2 HV8 208
//           (scans and gradients one after the other, by a driver: 239, of them 17, 177, 41); B2 T2048 H4 HV8 K = V =
//           64 64. g and beta [B HV T]: 455; q, k, v [B H T K]: 468. At 1x8192 the kernels move 1.5 GB, 360 at the
//           rate of a copy: scans at 70 % and gradients at 77 % of the memory's rate. With 8 value heads the scans
//           are a chain of 128 chunks, 2600 clocks each, where the products take 900. Without d_o tiles do not come
//           by TMA: 1x8192 600.
//           Lost: scans and gradients that start while the kernel before them ends (494 and 2016 for the first and the
//           third); gradients beside the scans as a grid of their own, started early: what the grid before has written
//           is not seen until that grid ends (251); by the thread that stores, which a fence for each chunk holds up
//           (317); with more scans (16 value heads 338 against 325), or K = 64 (67 against 66).
#include "thalweg/ops/gated_delta_rule/problem.h"
#include "thalweg/ops/gated_delta_rule/sm90_chunk_bwd_grad.cuh"
#include "thalweg/ops/gated_delta_rule/sm90_chunk_bwd_prep.cuh"
#include "thalweg/ops/gated_delta_rule/sm90_chunk_bwd_scan.cuh"

namespace thalweg::gated_delta_rule {
namespace {

using cuda::sm90::make_token_map;
using delta_rule::Problem;

// Rows of packed tensors that belong to no sequence: zero.
template <class T>
__global__ void zero_tail_kernel(const __grid_constant__ Call call, int64_t K, int64_t V) {
  const int64_t begin = call.N > 0 ? span_at(call.spans, call.N - 1).end : 0;
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, step = int64_t(gridDim.x) * blockDim.x;
  const auto clear = [&](const thalweg_tensor& t, int64_t heads, int64_t dim) {
    if (!cuda::is_there(t)) return;
    for (int64_t i = begin * heads * dim + at; i < call.T * heads * dim; i += step)
      *(row_of<T>(t, 0, i / (heads * dim), i / dim % heads) + i % dim) = T(0.f);
  };
  const auto clear_scalars = [&](const thalweg_tensor& t) {
    if (!cuda::is_there(t)) return;
    for (int64_t i = begin * call.HV + at; i < call.T * call.HV; i += step)
      cuda::store_at(t, i / call.HV * t.stride[1] + i % call.HV * t.stride[2], 0.f);
  };
  clear(call.args.d_q, call.H, K), clear(call.args.d_k, call.H, K), clear(call.args.d_v, call.HV, V);
  clear_scalars(call.args.d_g), clear_scalars(call.args.d_beta);
}

// K = 128: scans and, on the multiprocessors that they leave, gradients of the chunks that both directions have passed.
// Blocks take their part in the order in which they start, so that gradients never wait for a scan that has not.
template <class T>
__global__ void __launch_bounds__(kGradThreads<128>, 1)
    scan_and_gradient_kernel(const __grid_constant__ Call call, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char raw[];
  int* const ticket = reinterpret_cast<int*>(raw);
  if (threadIdx.x == 0) *ticket = atomicAdd(call.ready(call.at.chunks, 0), 1);
  __syncthreads();
  const int block = *ticket, scans = int(2 * call.N * call.HV * call.VS);
  __syncthreads();
  if (block < scans)
    scan_block<T, 128, true>(call, maps, raw, block);
  else
    gradient_block<T, 128, true>(call, maps, raw, block - scans, gridDim.x - scans);
}

template <class T, int K>
void launch_all(const Call& call, const Maps& maps, const Exec& exec, int64_t gradient_blocks) {
  const int64_t per_key = call.at.chunks * call.H, scans = 2 * call.N * call.HV * call.VS;
  const int64_t rounds = (call.HV / call.H + kPrepHeads - 1) / kPrepHeads;
  const int64_t blocks = per_key < gradient_blocks ? per_key : gradient_blocks;
  constexpr int64_t kScanBytes = sizeof(ScanSmem<K>), kGradBytes = sizeof(GradSmem<K>);
  cuda::launch(exec, "sm90_chunk_bwd prep", prep_kernel<T, K>, {per_key * rounds}, kPrepThreads, sizeof(PrepSmem<K>),
               call, maps);
  if (call.beside) {
    cuda::launch(exec, "sm90_chunk_bwd scan and gradients", scan_and_gradient_kernel<T>, {scans + blocks},
                 kGradThreads<K>, kScanBytes > kGradBytes ? kScanBytes : kGradBytes, call, maps);
  } else {
    cuda::launch(exec, "sm90_chunk_bwd scan", scan_kernel<T, K>, {scans}, kScanThreads, kScanBytes, call, maps);
    cuda::launch(exec, "sm90_chunk_bwd gradients", gradient_kernel<T, K>, {blocks}, kGradThreads<K>, kGradBytes, call,
                 maps);
  }
  if (call.spans)
    cuda::launch(exec, "sm90_chunk_bwd tail", zero_tail_kernel<T>, {264}, 256, 0, call, int64_t(K), 64 * call.VS);
}

bool rows_aligned(const Args& a) {
  for (const thalweg_tensor* t : {&a.q, &a.k, &a.v, &a.d_o, &a.d_q, &a.d_k, &a.d_v}) {
    if (!cuda::is_there(*t)) continue;
    if (reinterpret_cast<uintptr_t>(t->data) % 16 != 0) return false;
    for (int axis = 0; axis < 3; ++axis)
      if (t->shape[axis] > 1 && t->stride[axis] % 8 != 0) return false;
  }
  return true;
}

}  // namespace

void sm90_chunk_bwd(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  Call call{args, chunk_bwd_layout(p), exec.workspace, nullptr, p.B, p.T, p.H, p.HV, p.N, p.V / 64, float(p.scale)};
  call.aligned = rows_aligned(args), call.beside = plan.values[1] != 0;
  Maps maps{};
  call.tma = make_token_map(args.q, 1, &maps.q) && make_token_map(args.k, 1, &maps.k) &&
             make_token_map(args.v, 1, &maps.v) &&
             (!cuda::is_there(args.d_o) || make_token_map(args.d_o, 1, &maps.d_o));
  if (p.packed) {
    auto* spans = reinterpret_cast<cuda::Span*>(exec.workspace + call.at.spans);
    cuda::check_borders(exec, args.cu_seqlens, p.N, p.T, spans, offsetof(Args, cu_seqlens));
    call.spans = spans;
  }
  const bool wide = p.K == 128;
  const auto launch = p.dtype == THALWEG_BF16 ? (wide ? launch_all<cuda::bf16, 128> : launch_all<cuda::bf16, 64>)
                                              : (wide ? launch_all<cuda::f16, 128> : launch_all<cuda::f16, 64>);
  launch(call, maps, exec, call.beside ? plan.values[1] : plan.values[0]);
}

}  // namespace thalweg::gated_delta_rule
