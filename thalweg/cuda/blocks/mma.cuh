// Warp-level matrix products (mma.sync) and the moves around them: thin wrappers, one instruction each.
//
// Tiles in shared memory are rows of 64 16-bit elements (128 bytes), their 16-byte pieces exchanged by XOR with the row
// modulo 8, so that eight rows of a column of pieces lie in different banks; tile bases are 128-byte aligned. A wider
// matrix is several such tiles beside each other, each kTileBytes(rows) long.
//
// Fragments, g = lane / 4, c = lane % 4:
//   C, D (m16n8)  d[0],d[1]: row g, columns 2c, 2c+1;  d[2],d[3]: row g+8
//   A (m16k16)    a[0]: row g, k 2c,2c+1;  a[1]: row g+8;  a[2],a[3]: the same, k + 8
//   B (k16n8)     b[0]: k 2c,2c+1, column g;  b[1]: k + 8
// so two neighbouring C tiles, rounded and packed, are one A fragment.
#ifndef THALWEG_CUDA_BLOCKS_MMA_CUH
#define THALWEG_CUDA_BLOCKS_MMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace thalweg::cuda {

using bf16 = __nv_bfloat16;
using f16 = __half;

__device__ inline uint32_t smem_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// ---- Pairs of 16-bit elements ----

template <class T>
__device__ uint32_t pack(float low, float high);
template <>
__device__ inline uint32_t pack<bf16>(float low, float high) {
  __nv_bfloat162 p = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&p);
}
template <>
__device__ inline uint32_t pack<f16>(float low, float high) {
  __half2 p = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&p);
}
template <class T>
__device__ float2 unpack(uint32_t pair);
template <>
__device__ inline float2 unpack<bf16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
template <>
__device__ inline float2 unpack<f16>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<__half2*>(&pair));
}

// ---- Products ----

// d [16 8] += a [16 16] b [16 8]
template <class T>
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ inline void mma<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d [16 8] += a [16 8] b [8 8], operands read as tf32: a[0] row g, k c; a[1] row g+8; a[2],a[3] k + 4; b: k c, column g
__device__ inline void mma_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
                 "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// ---- Fragments from and to tiles ----

// Each lane names a row of 16 bytes: lanes 0-7 those of the first 8x8 matrix, and so on.
__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ inline void store_matrices(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3) : "memory");
}
__device__ inline void store_matrices_transposed(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3) : "memory");
}

// ---- Copies ----

// 16 bytes from global to shared memory, zeros where not wanted (`from` must still be an address).
__device__ inline void copy_16(uint32_t to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `left` of this thread's committed groups are under way.
template <int left>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

__device__ inline void init_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// One arrival, of those the barrier was made for, once this thread's copies so far have landed.
__device__ inline void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void wait_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

// Bulk copies: 16-byte aligned, a multiple of 16 bytes; one thread asks.
__device__ inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ inline void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
__device__ inline void commit_bulk_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until this thread's bulk stores have read their sources.
__device__ inline void wait_bulk_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
template <int most = 0>  // groups that may be under way still
__device__ inline void wait_bulk_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(most) : "memory");
}
// Orders this thread's writes to shared memory before bulk stores that read them.
__device__ inline void fence_before_bulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 2^x, to about 2^-22 of it; below 2^-126: 0
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x, as a value that the compiler knows nothing of: what is computed from it is not kept in registers across a loop.
__device__ inline uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Barrier `id` (1 to 15) among `threads` threads.
__device__ inline void sync_threads(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace thalweg::cuda
#endif
