// Tiles of 16-bit elements in shared memory, as wgmma reads them: rows of 64 elements (128 bytes) whose 16-byte
// pieces are exchanged by the row's lowest three bits ("128-byte swizzle"). A wider tile is several of these behind
// each other: columns [64 b, 64 b + 64) of all rows are block b. Blocks start at multiples of 1024 bytes.
#ifndef THALWEG_CUDA_SM90_SMEM_CUH
#define THALWEG_CUDA_SM90_SMEM_CUH

#include <stdint.h>

namespace thalweg::cuda::sm90 {

constexpr uint32_t kRowBytes = 128;
constexpr uint32_t kBlockBytes = 64 * kRowBytes;  // a 64 x 64 block

// Byte of 16-byte piece `piece` (0 to 7) of a row.
__device__ inline uint32_t swizzled(uint32_t row, uint32_t piece) {
  return row * kRowBytes + ((piece ^ (row & 7)) << 4);
}

// wgmma's description of a swizzled block that starts at `address`. The operand's index along which 64 elements lie
// side by side is
//   k  ("K-major", a row for each m or n): a step of 16 in k is 32 bytes further on;
//   m or n ("MN-major", a row for each k): a step of 16 in k is 16 rows = 2048 bytes further on, and
//       `next_block` bytes lead to the next 64 of m or n.
__device__ inline uint64_t descriptor(uint32_t address, uint32_t next_block = 16) {
  constexpr uint64_t kEightRows = 8 * kRowBytes, kSwizzle128 = 1;
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(next_block >> 4) << 16 | (kEightRows >> 4) << 32 |
         kSwizzle128 << 62;
}
// The same block, `bytes` further on.
__device__ inline uint64_t advanced(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

}  // namespace thalweg::cuda::sm90
#endif
