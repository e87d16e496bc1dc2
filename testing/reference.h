// Small parts that float64 oracles are written with: elements by index, tasks on threads, sequences.
#ifndef THALWEG_TESTING_REFERENCE_H
#define THALWEG_TESTING_REFERENCE_H

#include <cstdint>
#include <functional>
#include <vector>

#include "thalweg/core/signature.h"

namespace thalweg::testing::reference {

using Row = std::vector<double>;

// Element of a float64 tensor of rank 4 or less; indices past its rank are not looked at.
double& at(const thalweg_tensor& t, int64_t i, int64_t j = 0, int64_t l = 0, int64_t m = 0);
// Every element of a tensor that the call writes; nothing when absent.
void set_zero(const thalweg_tensor& t);

double sigmoid(double x);
double softplus(double x);        // x above 20
double softplus_slope(double x);  // of just that function
double dot(const double* a, const double* b, int64_t n);
void add_scaled(double x, const double* a, int64_t n, double* sum);  // sum += x a
// row <- row / sqrt(sum row^2 + 1e-6); returns the factor.
double l2norm(Row& row);

// Threads only where there is work for them: a task of a tiny case takes less than starting one.
void parallel(int64_t tasks, double flops, const std::function<void(int64_t)>& task);

// Sequence n as batch entry and tokens [begin, end).
struct Span {
  int64_t b, begin, end;
};
Span span_of(const thalweg_tensor& cu_seqlens, int64_t T, int64_t n);

// A state of a [N HV K V] tensor, as [K V]; zeros when absent.
void load_state(const thalweg_tensor& t, int64_t n, int64_t hv, Row& S, int64_t K, int64_t V);
void store_state(const thalweg_tensor& t, int64_t n, int64_t hv, const Row& S, int64_t K, int64_t V);

}  // namespace thalweg::testing::reference
#endif
