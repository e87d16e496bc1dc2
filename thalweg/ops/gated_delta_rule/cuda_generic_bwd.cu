// cuda_generic_bwd - gated delta rule, backward, token by token: the code of
// thalweg/delta_rule/cuda_generic_bwd.cuh and cuda_bwd_sums.cuh for this operator's arguments.
//
// Math      S~ = exp(g) S and r = v - S~^T k from the state before the token; dS the gradient of the state after
//           it, u = beta r:
//             dS += scale q d_o^T     dq = scale S d_o        du = dS^T k      dv = beta du
//             dk  = dS u - S~ dv      dbeta = du . r          dS~ = dS - k dv^T
//             dg  = sum(dS~ * S~)                  dS <- exp(g) dS~
// Shapes    q,k,d_q,d_k [B,T,H,K]  v,d_o,d_v [B,T,HV,V]  g,d_g [B,T,HV]  beta,d_beta [B,T,HV]
//           states [N,HV,K,V]
// Takes     any dtype, any legal strides, K and V up to 512; any B, T, HV, varlen, empty sequences
// Grid      at most two blocks of 256 threads a multiprocessor take the tasks (sequence, value head, group of slices
//           of V) with a stride; there are as many groups as fill the GPU. Then three small kernels add up: d_q and
//           d_k (a warp a row and key head), d_g and d_beta (a block 32 rows of a value head), d_A_log and d_dt_bias
// Tile      columns of the state never meet in either direction: a column lies in 1 to 32 lanes, 16 rows of K in each.
//           States are kept every 64 tokens on the way up, and of every token of the piece that is gone back over
// Smem      up to 8 tokens (q, k, decays, v, d_o, beta) and the eight warps' sums for them, 96 KiB (116 at the most)
// Regs      dS and the state before the token: 2 x 16 floats (doubles for f64) a thread, 16 more for the sums over V
// Order     sums over K: in a thread, then a butterfly; sums over V (d_q, d_k, d_g, d_beta): the columns of a warp by
//           halving, then the warps, the slices of a group, the groups, the value heads, each in order. No atomics.
// Numerics  float32 arithmetic and states (float64 where q is f64, or f32 and d_A_log is wanted, whose terms may
// cancel);
//           d_A_log and d_dt_bias are added in float64
// Traps     d_A_log multiplies dg by g: 0 where dg is 0, because g may be infinite. The workspace is large: B T HV
//           groups entries of 2 K + channels + 1 (K rounded up to 16 times a power of two), B T / 64 + N states of
//           every value head, 64 states' slices a block.
// Measured  not tuned
#include "thalweg/delta_rule/cuda_generic_bwd.cuh"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule {

void cuda_generic_bwd(const Problem& p, const Plan& plan, const thalweg_gated_delta_rule_bwd_args& a,
                      const Exec& exec) {
  delta_rule::cuda_generic_bwd_of(p, plan, a, exec);
}

}  // namespace thalweg::gated_delta_rule
