// roof_tile_kernels – the loop whose rate is the roof of bf16 tile products.
//
// Math     c <- c + a b in four independent tiles, all operands in registers
// Shapes   16 x 32 and 32 x 16, bf16, into 16 x 16, float32
// Takes    any count
// Threads  one caller per thread
// Vectors  tiles of 16 rows x 64 bytes
// Tile     four sums: a product takes 16 cycles and its sum can be added to again after 52
// Scratch  none
// Numerics the operands are 0, and stay so
// Traps    the tiles are left unconfigured, as they were found
// Measured printed by every `thalweg bench` of a row for amx
#include "thalweg/cpu/tiles.h"
#include "tools/thalweg/roof.h"

namespace thalweg::roof::THALWEG_ISA {

int64_t tile_flops_per_round() { return 4 * 2 * kTileSide * kTileSide * kTileDepth; }

void tiles(int64_t rounds) {
  const Tiles configured;
  clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
  clear_tile<4>(), clear_tile<5>(), clear_tile<6>(), clear_tile<7>();
  for (int64_t r = 0; r < rounds; ++r) {
    multiply<0, 4, 6>();
    multiply<1, 4, 7>();
    multiply<2, 5, 6>();
    multiply<3, 5, 7>();
  }
}

}  // namespace thalweg::roof::THALWEG_ISA
