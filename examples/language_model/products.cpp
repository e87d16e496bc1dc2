#include "products.h"

#include <cblas.h>

#include <algorithm>
#include <string>

namespace language_model {
namespace {

struct Operand {
  const float* data;
  int64_t stride;  // between rows as stored
  CBLAS_TRANSPOSE transpose;

  // Where row i (or column i, of a right operand) of the product's operand starts.
  const float* row(int64_t i) const { return data + (transpose == CblasNoTrans ? i * stride : i); }
  const float* column(int64_t j) const { return data + (transpose == CblasNoTrans ? j : j * stride); }
};

struct Tile {
  int64_t rows, columns;
};

// 128 rows amortise packing b. Few rows with a long reduction (weight gradients) want smaller tiles, so
// that there are enough of them for all threads.
Tile tile_for(int64_t M) { return M >= 512 ? Tile{128, 1024} : Tile{96, 192}; }

bool may_share() { return openblas_get_parallel() != OPENBLAS_SEQUENTIAL; }

void run_tiles(Threads& threads, int64_t M, int64_t N, int64_t K, Operand a, Operand b, float* c, Into into) {
  Tile tile = tile_for(M);
  int64_t across = (N + tile.columns - 1) / tile.columns, down = (M + tile.rows - 1) / tile.rows;
  auto run_tile = [&](int64_t i) {
    int64_t row = i / across * tile.rows, column = i % across * tile.columns;
    cblas_sgemm(CblasRowMajor, a.transpose, b.transpose, blasint(std::min(tile.rows, M - row)),
                blasint(std::min(tile.columns, N - column)), blasint(K), 1.0f, a.row(row), blasint(a.stride),
                b.column(column), blasint(b.stride), into == Into::kAdd ? 1.0f : 0.0f, c + row * N + column,
                blasint(N));
  };
  if (may_share()) {
    threads.run(down * across, run_tile);
  } else {
    for (int64_t i = 0; i < down * across; ++i) run_tile(i);
  }
}

}  // namespace

void multiply(Threads& threads, int64_t M, int64_t N, int64_t K, const float* a, const float* b, float* c,
              Into into) {
  run_tiles(threads, M, N, K, {a, K, CblasNoTrans}, {b, N, CblasNoTrans}, c, into);
}

void multiply_transposed(Threads& threads, int64_t M, int64_t N, int64_t K, const float* a, const float* b,
                         float* c, Into into) {
  run_tiles(threads, M, N, K, {a, K, CblasNoTrans}, {b, K, CblasTrans}, c, into);
}

void transposed_multiply(Threads& threads, int64_t M, int64_t N, int64_t K, const float* a, const float* b,
                         float* c, Into into) {
  run_tiles(threads, M, N, K, {a, M, CblasTrans}, {b, N, CblasNoTrans}, c, into);
}

const char* prepare_blas() {
  if (may_share()) openblas_set_num_threads(1);
  static const std::string text =
      std::string(openblas_get_config()) + " (" + openblas_get_corename() + " kernels" +
      (may_share() ? ")" : "; a serial variant: products on one thread; libopenblas-pthread-dev is faster)");
  return text.c_str();
}

}  // namespace language_model
