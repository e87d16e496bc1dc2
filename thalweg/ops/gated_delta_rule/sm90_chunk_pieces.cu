// sm90_chunk_pieces - gated delta rule, forward: the states before the pieces of a long sequence, so that row
// sm90_chunk_fwd can run all pieces at once. Exact: nothing is cut off.
//
// Math      a piece turns the state before it into  S' = M S + N.  N is what it makes of 0 (the first piece: of the
//           initial state), M [K K] what it makes, with v = 0, of the identity, column by column. Then
//             S_1 = N_0      S_(p+1) = M_p S_p + N_p
// Shapes    k [B,T,H,K]  v [B,T,HV,V]  initial_state [N,HV,K,V]  factors as sm90_chunk_prep.cu made them
//           out: starts [N,HV,pieces,V,K], float32, from piece 1 on
// Takes     what sm90_chunk_fwd takes, K = V, where sequences, heads and blocks of 64 columns leave at least
//           kFewestPieces multiprocessors to each, and a piece has kFewestPieceChunks chunks; of packed sequences one
// Grid      summary: one block a head, piece but the last, and 64 columns of N or of M; the chain group of
//           sm90_chunk_roles.cuh alone, two blocks a multiprocessor. Fix-up: one block of 4 K threads a head and 8
//           columns of V, piece after piece
// Tile      fix-up: thread (k, quarter of the sum) has row k of 8 columns; M comes column by column, coalesced
// Smem      summary: 3 stages of keys (K = 64: 4), 98 KiB (99); fix-up: the state's 8 columns and the quarters' sums
// Regs      summary: setmaxnreg 200 for the chain, 56 for loads: together half of a multiprocessor's; fix-up 64
// Workspace float32: starts, and N and M of every piece but the last (sm90_chunk_plan.h)
// Order     fix-up: quarters of the sum over c in ascending order, then added in order. How many pieces there are
//           follows from the sizes and the device, not from borders or values
// Numerics  M and N as the chain makes them (16-bit operands, float32 sums); the fix-up in float32. With g <= 0 and
//           beta |k|^2 <= 2 no column of M is longer than 1, and its errors are what the chain adds to a state anyway:
//           with these roundings emulated, o and final_state are as far from float64 as in one piece. T2048 in 4
//           pieces, bf16, o: 3.7e-3 with usual gates, 4.6e-3 with none, 8e-3 with keys of cosine 0.99, beta to 2 and no
//           gate; f16: 4.3e-4, 5.8e-4, 9.9e-4
// Traps     - Under usual gates M is nearly 0 after a few chunks: only cases of hardly any decay and small beta, keys
//             of one direction, or beta near 2, can tell whether it is right.
//           - A longer T may be cut elsewhere: earlier rows may then differ in their last bits.
//           - The first piece's M is neither made nor read; a sequence that ends early has fewer pieces than the grid.
//           - An identity's block loads no tile of V, and its barrier expects none.
// Measured  H200, bf16, microseconds of the whole forward: 1x8192 H2 HV8 K128 91 in 8 pieces; B2 T2048 H4
//           HV8 K64 36 in pieces of 8 chunks
#include "thalweg/cuda/sm90/launch_behind.h"
#include "thalweg/ops/gated_delta_rule/sm90_chunk_roles.cuh"

namespace thalweg::gated_delta_rule::sm90 {
namespace {

constexpr int kColumns = 8, kQuarters = 4;

template <class E, int KD>
__global__ void __launch_bounds__(Layout<KD, 1, Output::kNone>::kThreads, 2)
    chunk_summary(const __grid_constant__ ChunkArgs a, const __grid_constant__ Maps maps) {
  using L = Layout<KD, 1, Output::kNone>;
  extern __shared__ __align__(1024) char bytes[];
  grid_let_next_start();
  constexpr int kParts = 2 * KD / 64;  // 64 columns of N (V = K), then of M
  const int part = blockIdx.x % kParts, piece = blockIdx.x / kParts % (a.pieces - 1);
  const int64_t head = blockIdx.x / kParts / (a.pieces - 1), n = head / a.HV, hv = head % a.HV;
  const bool is_M = part >= kParts / 2;
  if (is_M && piece == 0) return grid_wait();
  const int column = part % (kParts / 2) * 64;
  const cuda::Span span = span_of(a, n);
  Work<E> work;
  if (!span.valid || !make_work(a, span, n, hv, column, a.pieces, piece, work) || work.last) return grid_wait();
  work.given_piece = false;
  if (piece > 0) work.start = is_M ? Start::kIdentity : Start::kZero;
  work.final = (((head * (a.pieces - 1) + piece) * 2 + is_M) * KD + column) * KD;
  const Roles<E, KD, 1, Output::kNone> roles{a, maps, work, smem_address(bytes), bytes};
  if (threadIdx.x == 0) L::init_barriers(roles.smem);
  __syncthreads();
  if (threadIdx.x < kGroup) {
    setmaxnreg_inc<L::kChainRegs>();
    roles.run_chain(0);
  } else {
    setmaxnreg_dec<L::kLoadRegs>();
    if (threadIdx.x < kGroup + 64) roles.run_loads();  // the warps that load keys
  }
}

template <int KD>
__global__ void __launch_bounds__(kQuarters* KD) piece_states(const __grid_constant__ ChunkArgs a) {
  __shared__ float state[KD][kColumns], sums[kQuarters][KD][kColumns];
  grid_let_next_start();
  grid_wait();
  const int k = threadIdx.x % KD, quarter = threadIdx.x / KD, blocks = int(a.V) / kColumns;
  const int64_t head = blockIdx.x / blocks, column = blockIdx.x % blocks * kColumns;
  const cuda::Span span = span_of(a, head / a.HV);
  const int chunks = int((span.end - span.begin + kChunk - 1) / kChunk);
  constexpr int kMine = KD / kQuarters, kEach = kColumns / kQuarters;  // of the sum; columns whose sums it finishes
  for (int piece = 0; span.valid && chunks > (piece + 1) * a.piece_chunks; ++piece) {
    const float* N = a.sums + (head * (a.pieces - 1) + piece) * 2 * KD * KD;
    const float* M = N + KD * KD;
    float sum[kColumns] = {}, add[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) add[i] = N[(column + kEach * quarter + i) * KD + k];
    if (piece > 0) {
      float m[kMine];
#pragma unroll
      for (int c = 0; c < kMine; ++c) m[c] = M[(kMine * quarter + c) * KD + k];
      __syncthreads();  // the state is there
#pragma unroll
      for (int c = 0; c < kMine; ++c)
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sum[i] += m[c] * state[kMine * quarter + c][i];
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sums[quarter][k][i] = sum[i];
    __syncthreads();
    float* to = a.starts + ((head * a.pieces + piece + 1) * a.V + column) * KD;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int j = kEach * quarter + i;
      float x = sums[0][k][j];
#pragma unroll
      for (int other = 1; other < kQuarters; ++other) x += sums[other][k][j];
      x += add[i];
      state[k][j] = x;
      to[j * KD + k] = x;
    }
  }
}

template <class E, int KD>
void launch_of(const Problem& p, const ChunkArgs& a, const Maps& maps, const Exec& exec) {
  using L = Layout<KD, 1, Output::kNone>;
  static_assert(2 * (L::kBytes + 1024) <= 228 * 1024);  // two blocks, each with what the system takes
  const int64_t heads = p.N * p.HV;
  launch_behind(exec, "sm90_chunk_summary", chunk_summary<E, KD>, {heads * (a.pieces - 1) * (2 * KD / 64)}, L::kThreads,
                L::kBytes, a, maps);
  launch_behind(exec, "sm90_chunk_pieces", piece_states<KD>, {heads * (p.V / kColumns)}, kQuarters * KD, 0, a);
}

}  // namespace

void launch_pieces(const Problem& p, const ChunkArgs& a, const Maps& maps, const Exec& exec) {
  const bool half = p.dtype == THALWEG_F16;
  if (p.K == 128)
    return half ? launch_of<__half, 128>(p, a, maps, exec) : launch_of<__nv_bfloat16, 128>(p, a, maps, exec);
  return half ? launch_of<__half, 64>(p, a, maps, exec) : launch_of<__nv_bfloat16, 64>(p, a, maps, exec);
}

}  // namespace thalweg::gated_delta_rule::sm90
