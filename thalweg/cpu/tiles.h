// Tile registers (AMX) for files that are compiled for them: eight tiles of 16 rows x 64 bytes, and the one product.
// Include simd.h's rules hold: anonymous namespace, no C++ standard header.
//
// Every tile is used whole: what a matrix lacks to multiples of 16 rows and 32 columns of bf16 is 0 in scratch.
//
//   multiply<c, a, b>():  C[16, 16] += A[16, 32] B[32, 16], C float32, A and B bf16
//
// A's rows are rows. Row i of B holds rows 2i and 2i + 1 of the matrix, interleaved: B[2i][0] B[2i+1][0] B[2i][1] ...
// Sums are float32, rounded to nearest even; subnormal operands count as 0, subnormal sums become 0.
#ifndef THALWEG_CPU_TILES_H
#define THALWEG_CPU_TILES_H

#include "thalweg/cpu/simd.h"

namespace thalweg {
namespace {

constexpr int64_t kTileSide = 16;   // also the columns of a float32 tile
constexpr int64_t kTileDepth = 32;  // bf16 of a row

// The tiles of the calling thread while it lives. Not configured is how a thread is found and left, so that the system
// has nothing to save for it.
class Tiles {
 public:
  Tiles() {
    struct Config {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {};
    static_assert(sizeof(Config) == 64);
    config.palette = 1;
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = uint8_t(kTileSide);
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~Tiles() { asm volatile("tilerelease" : : : "memory"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// As asm, since GCC's own wrappers do not tell the compiler that a load reads memory: it may move the stores that fill
// a tile's rows below it.
template <int t>
[[gnu::always_inline]] inline void load_tile(const void* p, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(row_bytes), "i"(t) : "memory");
}
template <int t>
[[gnu::always_inline]] inline void store_tile(void* p, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(row_bytes), "i"(t) : "memory");
}
template <int t>
[[gnu::always_inline]] inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(t));
}
template <int c, int a, int b>
[[gnu::always_inline]] inline void multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

}  // namespace
}  // namespace thalweg
#endif
