// The machine's roofs, measured in this process: fp32 FMA, bf16 tile products, non-temporal copy, scale in place, exponentials and logarithms.
#ifndef THALWEG_TOOLS_ROOF_H
#define THALWEG_TOOLS_ROOF_H

#include <stddef.h>
#include <stdint.h>

namespace thalweg::roof {

// Compiled per instruction set (roof_kernels.cpp).
namespace avx2 {
double fma(int64_t rounds, float a, float b);  // returns a sum, so that nothing is left out
int64_t fma_flops_per_round();
void copy(void* to, const void* from, size_t bytes);  // non-temporal stores; 64-byte aligned, bytes % 64 == 0
void scale(void* data, size_t bytes, float factor);   // in place; same
void exp_log(void* to, const void* from, size_t bytes);  // bf16: to = log(1 + exp(from)); as copy
}  // namespace avx2
namespace avx512 {
double fma(int64_t rounds, float a, float b);
int64_t fma_flops_per_round();
void copy(void* to, const void* from, size_t bytes);
void scale(void* data, size_t bytes, float factor);
void exp_log(void* to, const void* from, size_t bytes);
}  // namespace avx512
// roof_tile_kernels.cpp
namespace amx {
void tiles(int64_t rounds);
int64_t tile_flops_per_round();
}  // namespace amx

}  // namespace thalweg::roof
#endif
