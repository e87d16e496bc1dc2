// sm90_chunk_fwd - gated delta rule, forward, chunks of 64 tokens on Hopper's tensor cores.
//
// Math      with A, P and the rows of sm90_chunk_prep.cuh (D(x): columns scaled by x), per chunk and value head:
//             W^T  = V^T - (S^T K^T) D(2^G rk)                       chain
//             V'^T = W^T A^T                                         chain
//             S^T  = 2^G_last S^T + (V'^T D(2^(G_last - G) rk)) K    chain
//             O^T  = (S^T Q^T) D(2^G rq scale) + V'^T P^T            output, S before the chunk
// Shapes    q,k [B,T,H,K]  v,o [B,T,HV,V]  initial,final_state [N,HV,K,V]
// Takes     K = V in {64, 128}, bf16 or f16, any strides of tokens and heads, states of any dtype
// Grid      one block a sequence, value head and 64 kSlices columns of V; of two slices a block a multiprocessor, which
//           goes from one to the next, the longest first (an order that the check of the borders makes). Where these
//           leave multiprocessors free, the blocks that start first make the factors, chunk by chunk, and the others
//           wait for a flag; else a kernel before this one makes them (sm90_chunk_prep.cu). Where they leave three
//           quarters free and sequences are long, one block a piece of a sequence instead: two more kernels before
//           this one find the states before the pieces (sm90_chunk_pieces.cu). Rows past the last packed sequence are
//           zeroed by the factors' kernel, or by one of their own.
// Groups    of 128 threads (sm90_chunk_roles.cuh): loads, a warp each for K and V, A, Q, P, into two rings, keys (K, V,
//           A) and queries (Q, P); one chain group for each 64 columns of V. With one slice a group of its own makes O,
//           as the chain is what the call waits for; with two the chains make it, as then all of the multiprocessor is
// Tile      M = 64 columns of V, everything transposed, so the state stays in the chain group's accumulators (float32)
//           and is operand a of the next products from registers. The output group gets the same registers through
//           shared memory, thread by thread, as 16-bit operands.
// Smem      see Layout: 211 to 225 KiB, one block a multiprocessor
// Regs      setmaxnreg: chain 240, output 152, loads 56 with one slice; 224 (twice), 56 with two; factors 168
// Numerics  operands bf16 or f16, sums and state float32; exponents never positive; mask by selection
// Traps     - Tiles past the sequence's end are zero, so no product sees another sequence's rows: a last chunk with
//             fewer rows is copied, not fetched by TMA.
//           - What plain stores made and bulk copies read needs a proxy fence: for factors the reader's, behind a flag.
//           - Whether a flag is up is asked before there is room for the tile: the answer takes as long as a tile.
//           - ptxas counts a product as in flight over a loop's end, whatever was waited for (C7517): O is rounded
//             before the loop ends, and those registers leave in the next round.
// Measured  H200, h0 and final state, microseconds in all. 1x8192 H16 HV32 K128: 239 with P made by a group of the
//           chain's block (2770 clocks a chunk), 188 with P from the factors, rows of factors in registers before the
//           waits and a warp for each stream of loads, 177 with flags asked first (2160 clocks: 640 of products, the
//           rest their latency, shared memory and the output group's products in between). In records: 177; 1x32768
//           656; 1x8192 H2 HV8 88; packed 4x2048 141, 8x1024 HV64 261, 4x8192 HV64 880 (by a driver 140, 249, 818: 60,
//           92 and 270 of them factors); B2 T2048 H4 HV8 K64 39. g, beta or q, k, v of other strides: the same.
//           Blocks that go from chain to chain, by a driver in the same run: 258 to 249, 838 to 818; packed sequences
//           of 4096 to 64, HV64, 252 to 248, the longest last 301 to 292, and 251 in order of length
//           Lost: O by the chain with one slice (237 against 226); O's first product before the last O leaves (893
//           against 850) or behind the second product (904); with two slices an output group, which the chains waited
//           for (305 against 287 at 8x1024); the next chain taken when the last one's loads begin, so that it waits
//           behind a long chain (packed sequences of 4096 to 64: 264 against 252); one slice with its work looked up by
//           each role, as blocks that go on have it (1x32768: 665 against 650); P made in the block of two slices, by a
//           group that makes all of O too or by the warps that load (the note fwd-chain-block).
#include "thalweg/cuda/sm90/launch_behind.h"
#include "thalweg/ops/gated_delta_rule/sm90_chunk_prep.cuh"
#include "thalweg/ops/gated_delta_rule/sm90_chunk_roles.cuh"

namespace thalweg::gated_delta_rule {
namespace sm90 {
namespace {

using namespace cuda::sm90;

// A block that makes factors, its warpgroups on their own: first those of all first chunks, as the chains need them.
template <class E, int KD>
__device__ void run_prep(const ChunkArgs& a, const Maps& maps, char* bytes, int block) {
  const int group = threadIdx.x / kGroup, thread = threadIdx.x % kGroup, barrier = 1 + group;
  const unsigned heads = unsigned(a.N * a.H);
  const int per_key = int(a.HV / a.H);
  make_factors<E, KD>(
      a, maps, reinterpret_cast<PrepSmem<KD>*>(bytes)[group], block + group * a.prep_blocks,
      kPrepGroups * a.prep_blocks, (a.T + kChunk - 1) / kChunk * heads, thread, barrier,
      [&](int64_t i) -> PrepItem {
        const unsigned c = unsigned(i) / heads, rest = unsigned(i) % heads, n = rest / unsigned(a.H);
        const cuda::Span span = span_of(a, n);
        const int64_t row = span.begin + int64_t(c) * kChunk, left = span.end - row;
        if (left <= 0 || !span.valid) return {};
        const Place place{a.spans ? 0 : int64_t(n), a.spans ? row : int64_t(c) * kChunk,
                          int(min(left, int64_t(kChunk)))};
        return {place, int(rest % unsigned(a.H)), first_slot(span.begin, n) + c};
      },
      [&](const char* factors) {
        named_barrier(barrier, kGroup);
        if (thread >= per_key) return;
        __threadfence();  // of what the others wrote too
        int* const flags = a.tickets + kTicketInts + (factors - a.factors) / kFactorBytes;
        for (int j = thread; j < per_key; j += kGroup) store_release(flags + j, 1);
      });
}

// From what a block of so many threads starts with.
template <int threads, int registers>
__device__ void set_registers() {
  constexpr int kStart = 65536 / threads / 8 * 8;
  if constexpr (registers > kStart) setmaxnreg_inc<registers>();
  if constexpr (registers < kStart) setmaxnreg_dec<registers>();
}

template <class E, int KD, int slices, Output output>
__global__ void __launch_bounds__(Layout<KD, slices, output>::kThreads, 1)
    chunk_fwd(const __grid_constant__ ChunkArgs a, const __grid_constant__ Maps maps) {
  using L = Layout<KD, slices, output>;
  extern __shared__ __align__(1024) char bytes[];
  int job = blockIdx.x;
  if (slices == 1 && a.tickets) {
    // Blocks take their part in the order in which they start, so a chain never waits for one that has not.
    int* ticket = reinterpret_cast<int*>(bytes);
    if (threadIdx.x == 0) *ticket = atomicAdd(a.tickets, 1);
    __syncthreads();
    job = *ticket - a.prep_blocks;
    __syncthreads();
    if constexpr (slices == 1)
      if (job < 0) return run_prep<E, KD>(a, maps, bytes, job + a.prep_blocks);
  }
  const uint32_t smem = smem_address(bytes);
  const int group = threadIdx.x / kGroup;
  if constexpr (L::kGoesOn) {
    if (threadIdx.x == 0) L::init_barriers(smem);
    __syncthreads();
    const auto roles_of = [&](const Work<E>& work) { return Roles<E, KD, slices, output>{a, maps, work, smem, bytes}; };
    if (group == 0) {
      set_registers<L::kThreads, L::kLoadRegs>();
      each_work<E, L, true>(a, smem, bytes, [&](const auto& work) { roles_of(work).run_loads(); });
    } else {
      set_registers<L::kThreads, L::kChainRegs>();
      each_work<E, L, false>(a, smem, bytes,
                             [&](const auto& work) { roles_of(work).run_chain_with_output(group - 1); });
    }
  } else {
    Work<E> work;
    if (!find_work<E, L>(a, job, work)) return grid_wait();
    const Roles<E, KD, slices, output> roles{a, maps, work, smem, bytes};
    if (!work.valid) {
      if (group >= 2) roles.fill_nan(group - 2);
      return grid_wait();
    }
    if (threadIdx.x == 0) L::init_barriers(smem);
    __syncthreads();
    if (group == 0) {
      set_registers<L::kThreads, L::kLoadRegs>();
      roles.run_loads();
    } else if (group == 1) {
      set_registers<L::kThreads, L::kOutRegs>();
      roles.run_output();
    } else {
      set_registers<L::kThreads, L::kChainRegs>();
      roles.run_chain(group - 2);
    }
  }
}

// For calls without sm90_chunk_prep, which does it too. Not in chunk_fwd: its one slice is 10 % slower then.
template <class E>
__global__ void zero_rest_kernel(const __grid_constant__ ChunkArgs a) {
  zero_rest<E>(a, blockIdx.x, gridDim.x);
}

// Rows of chunk_states that belong to no checkpoint, and those of a sequence whose borders are wrong. A block a
// sequence and head.
__global__ void fill_checkpoints(const __grid_constant__ ChunkArgs a) {
  const thalweg_tensor& t = a.chunk_states;
  const int64_t n = blockIdx.x / a.HV, hv = blockIdx.x % a.HV, size = a.K * a.V;
  int64_t begin = 0, end = a.N > 0 ? t.shape[0] : a.B * a.T / a.every;
  float x = 0;
  if (n < a.N) {
    const cuda::Span span = span_of(a, n);
    begin = first_checkpoint(a, span.begin, n);
    if (n + 1 < a.N) end = first_checkpoint(a, span_of(a, n + 1).begin, n + 1);
    if (span.valid)
      begin += max(int64_t(1), (span.end - span.begin + a.every - 1) / a.every);
    else
      x = cuda::nan_of<float>();
  }
  for (int64_t row = begin; row < end; ++row)
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x)
      cuda::store_at<float>(t, row * t.stride[0] + hv * t.stride[1] + i / a.V * t.stride[2] + i % a.V * t.stride[3], x);
}

template <class E, int KD, int slices, Output output>
void launch_fwd(const Problem& p, const ChunkArgs& a, const Maps& maps, const Exec& exec) {
  using L = Layout<KD, slices, output>;
  constexpr int64_t kPrepBytes = slices == 1 ? kPrepGroups * sizeof(PrepSmem<KD>) : 0;
  constexpr int64_t kBytes = L::kBytes > kPrepBytes ? L::kBytes : kPrepBytes;
  static_assert(kBytes <= 227 * 1024 && (slices > 1 || L::kThreads == kPrepThreads));
  const int64_t blocks = a.prep_blocks + (L::kGoesOn && a.jobs > a.num_sms ? a.num_sms : a.jobs);
  if (a.tickets)
    cuda::launch(exec, "sm90_chunk_fwd", chunk_fwd<E, KD, slices, output>, {blocks}, L::kThreads, kBytes, a, maps);
  else
    launch_behind(exec, "sm90_chunk_fwd", chunk_fwd<E, KD, slices, output>, {blocks}, L::kThreads, kBytes, a, maps);
}

template <class E>
void run_dtype(const Problem& p, const Plan& plan, const ChunkArgs& a, const Maps& maps, const Exec& exec) {
  if (cuda::is_there(a.chunk_states))
    cuda::launch(exec, "sm90_chunk_checkpoints", fill_checkpoints, {(p.N > 0 ? p.N : 1) * p.HV}, 256, 0, a);
  if (a.tickets) {
    if (a.spans) cuda::launch(exec, "sm90_chunk_zero", zero_rest_kernel<E>, {p.T < 1024 ? p.T : 1024}, 256, 0, a);
    cuda::cuda_check(cudaMemsetAsync(a.tickets, 0, flags_bytes(p), static_cast<cudaStream_t>(exec.stream)),
                     "clearing the flags of sm90_chunk_fwd");
  } else {
    launch_prep(p, a, maps, exec);
  }
  if (a.pieces) launch_pieces(p, a, maps, exec);
  if (p.K == 64)
    launch_fwd<E, 64, 1, Output::kGroup>(p, a, maps, exec);
  else if (plan.values[kColumnBlocks] == 2)
    launch_fwd<E, 128, 2, Output::kChains>(p, a, maps, exec);
  else
    launch_fwd<E, 128, 1, Output::kGroup>(p, a, maps, exec);
}

bool rows_aligned(const thalweg_tensor& t) {
  bool ok = reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  for (int axis = 0; axis < 3; ++axis) ok = ok && (t.stride[axis] % 8 == 0 || t.shape[axis] <= 1);
  return ok;
}

// Four value heads of a token, from a multiple of four on, in one copy of 16 bytes.
bool heads_together(const thalweg_tensor& t) {
  bool ok = t.dtype == THALWEG_F32 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  for (int axis = 0; axis < 2; ++axis) ok = ok && (t.stride[axis] % 4 == 0 || t.shape[axis] <= 1);
  return ok && t.stride[2] == 1;
}

}  // namespace
}  // namespace sm90

void sm90_chunk_fwd(const Problem& p, const Plan& plan, const thalweg_gated_delta_rule_fwd_args& a, const Exec& exec) {
  using namespace sm90;
  cuda::Span* spans = nullptr;
  int32_t* order = nullptr;
  if (p.packed) {
    spans = reinterpret_cast<cuda::Span*>(exec.workspace);
    order = reinterpret_cast<int32_t*>(exec.workspace + order_at(p));
    cuda::check_borders(exec, a.cu_seqlens, p.N, p.T, spans, offsetof(thalweg_gated_delta_rule_fwd_args, cu_seqlens),
                        order);
  }
  ChunkArgs args{};
  args.q = a.q, args.k = a.k, args.v = a.v, args.o = a.o, args.g = a.g, args.beta = a.beta;
  args.A_log = a.A_log, args.dt_bias = a.dt_bias;
  args.initial_state = a.initial_state, args.final_state = a.final_state, args.chunk_states = a.chunk_states;
  args.spans = spans, args.order = order, args.factors = exec.workspace + factors_at(p);
  args.prep_blocks = int(plan.values[kPrepBlocks]), args.num_sms = int(plan.values[kNumSms]);
  if (args.prep_blocks) args.tickets = reinterpret_cast<int*>(exec.workspace + flags_at(p));
  args.pieces = int(plan.values[kPieces]);
  if (args.pieces) {
    args.piece_chunks = int(piece_chunks(p, args.pieces));
    args.starts = reinterpret_cast<float*>(exec.workspace + starts_at(p));
    args.sums = reinterpret_cast<float*>(exec.workspace + sums_at(p, args.pieces));
  }
  const int64_t jobs = p.N * p.HV * (p.V / 64 / plan.values[kColumnBlocks]) * (args.pieces ? args.pieces : 1);
  if (jobs > INT32_MAX)
    fail(THALWEG_INTERNAL, "sm90_chunk_fwd: chains, got %lld, expected at most 2^31 - 1", static_cast<long long>(jobs));
  args.jobs = int(jobs), args.next_job = reinterpret_cast<int*>(exec.workspace + flags_at(p));
  args.N = p.N, args.B = p.B, args.T = p.T, args.H = p.H, args.HV = p.HV, args.K = p.K, args.V = p.V;
  args.every = p.every, args.scale = float(p.scale);
  args.l2norm = a.use_qk_l2norm, args.gate = a.use_gate, args.sigmoid = a.use_beta_sigmoid;
  args.neg_eigval = a.allow_neg_eigval;
  args.aligned = rows_aligned(a.q) && rows_aligned(a.k) && rows_aligned(a.v) && rows_aligned(a.o);
  args.wide_gates = heads_together(a.g) && heads_together(a.beta);
  Maps maps;
  args.tma = make_token_map(a.q, int(p.K / 64), &maps.q) && make_token_map(a.k, int(p.K / 64), &maps.k) &&
             make_token_map(a.v, int(plan.values[kColumnBlocks]), &maps.v);
  if (p.dtype == THALWEG_F16)
    run_dtype<__half>(p, plan, args, maps, exec);
  else
    run_dtype<__nv_bfloat16>(p, plan, args, maps, exec);
}

}  // namespace thalweg::gated_delta_rule
