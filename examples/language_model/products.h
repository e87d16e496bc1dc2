// Dense products of row-major float32 matrices: OpenBLAS with one thread a call, called for tiles of the
// result by the program's threads. Tiles are cut by size alone, so results do not depend on the number of threads.
#ifndef LANGUAGE_MODEL_PRODUCTS_H
#define LANGUAGE_MODEL_PRODUCTS_H

#include "threads.h"

namespace language_model {

enum class Into { kReplace, kAdd };

// c [M N] = a [M K] b [K N]:  a layer's forward, y = x w
void multiply(Threads&, int64_t M, int64_t N, int64_t K, const float* a, const float* b, float* c,
              Into into = Into::kReplace);
// c [M N] = a [M K] b [N K]^T:  the gradient of its input, d_x = d_y w^T; the tied head
void multiply_transposed(Threads&, int64_t M, int64_t N, int64_t K, const float* a, const float* b, float* c,
                         Into into = Into::kReplace);
// c [M N] = a [K M]^T b [K N]:  the gradient of its weight, d_w = x^T d_y
void transposed_multiply(Threads&, int64_t M, int64_t N, int64_t K, const float* a, const float* b, float* c,
                         Into into = Into::kReplace);

// Makes the BLAS use one thread a call; to be called before the first product. Returns what it says of itself,
// e.g. "OpenBLAS 0.3.21 … (Haswell kernels)". OpenBLAS's serial variant must not be called by several threads at
// once (they can be given one buffer): with that one, products run on one thread.
const char* prepare_blas();

}  // namespace language_model
#endif
