// N elements of a row at a time, loaded and stored by one instruction: 4, 8 or 16 bytes, at a multiple of as many.
// N is 16 bytes' worth of the widest type of a kernel, so that a warp's accesses to every tensor leave no gaps.
#ifndef THALWEG_CUDA_PACKS_CUH
#define THALWEG_CUDA_PACKS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

#include "thalweg/cuda/tensor.cuh"

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

template <class E, int N>
__device__ __forceinline__ bool load_as(const thalweg_tensor& t, int64_t offset, float (&x)[N]) {
  const E* p = static_cast<const E*>(t.data) + offset;
  if (reinterpret_cast<uintptr_t>(p) % (N * sizeof(E) < 16 ? N * sizeof(E) : 16) != 0) return false;
  if constexpr (N * sizeof(E) <= 16) {
    widen(load_pack<E, N>(p), x);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      float part[4];
      widen(load_pack<E, 4>(p + i), part);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i + j] = part[j];
    }
  }
  return true;
}

// N elements of a tensor of any float dtype, `stride` apart; `absent` where there is none. Wide loads where they are
// possible: for parameters that a thread keeps.
template <int N>
__device__ __forceinline__ void load_parameters(const thalweg_tensor& t, int64_t offset, int64_t stride, float absent,
                                                float (&x)[N]) {
  if constexpr (N >= 2 && (N & (N - 1)) == 0) {
    if (stride == 1 && t.dtype == THALWEG_F32 && load_as<float>(t, offset, x)) return;
    if (stride == 1 && t.dtype == THALWEG_BF16 && load_as<__nv_bfloat16>(t, offset, x)) return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = is_there(t) ? load_at<float>(t, offset + i * stride) : absent;
}

}  // namespace thalweg::cuda
#endif
