// N elements of a row at a time, loaded and stored by one instruction: 4, 8 or 16 bytes, at a multiple of as many.
// N is 16 bytes' worth of the widest type of a kernel, so that a warp's accesses to every tensor leave no gaps.
#ifndef THALWEG_CUDA_PACKS_CUH
#define THALWEG_CUDA_PACKS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace thalweg::cuda {

// As they are stored.
template <class E, int N>
struct Pack {
  static constexpr int kWords = N * int(sizeof(E)) / 4;
  uint32_t words[kWords];
};

template <class E, class F>
constexpr int kPackSize = sizeof(E) == 4 || sizeof(F) == 4 ? 4 : 8;

template <class E, int N>
__device__ __forceinline__ Pack<E, N> load_pack(const E* p) {
  Pack<E, N> pack;
  if constexpr (pack.kWords == 4) {
    const uint4 w = *reinterpret_cast<const uint4*>(p);
    pack.words[0] = w.x, pack.words[1] = w.y, pack.words[2] = w.z, pack.words[3] = w.w;
  } else if constexpr (pack.kWords == 2) {
    const uint2 w = *reinterpret_cast<const uint2*>(p);
    pack.words[0] = w.x, pack.words[1] = w.y;
  } else {
    static_assert(pack.kWords == 1);
    pack.words[0] = *reinterpret_cast<const uint32_t*>(p);
  }
  return pack;
}

template <class E, int N>
__device__ __forceinline__ void store_pack(E* p, const Pack<E, N>& pack) {
  if constexpr (pack.kWords == 4)
    *reinterpret_cast<uint4*>(p) = {pack.words[0], pack.words[1], pack.words[2], pack.words[3]};
  else if constexpr (pack.kWords == 2)
    *reinterpret_cast<uint2*>(p) = {pack.words[0], pack.words[1]};
  else
    *reinterpret_cast<uint32_t*>(p) = pack.words[0];
}

template <class E, int N>
__device__ __forceinline__ void widen(const Pack<E, N>& pack, float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < pack.kWords; ++i) {
    const uint32_t word = pack.words[i];
    if constexpr (std::is_same_v<E, float>) {
      x[i] = __uint_as_float(word);
    } else if constexpr (std::is_same_v<E, __nv_bfloat16>) {
      x[2 * i] = __uint_as_float(word << 16);
      x[2 * i + 1] = __uint_as_float(word & 0xffff0000u);
    } else {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }
}

// Rounds to nearest even.
template <class E, int N>
__device__ __forceinline__ Pack<E, N> narrow(const float (&x)[N]) {
  Pack<E, N> pack;
#pragma unroll
  for (int i = 0; i < pack.kWords; ++i) {
    if constexpr (std::is_same_v<E, float>) {
      pack.words[i] = __float_as_uint(x[i]);
    } else if constexpr (std::is_same_v<E, __nv_bfloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      pack.words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
      pack.words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  return pack;
}

}  // namespace thalweg::cuda
#endif
