#include "testing/reference.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

namespace thalweg::testing::reference {

double& at(const thalweg_tensor& t, int64_t i, int64_t j, int64_t l, int64_t m) {
  const int64_t index[4] = {i, j, l, m};
  int64_t offset = 0;
  for (int axis = 0; axis < t.rank; ++axis) offset += index[axis] * t.stride[axis];
  return static_cast<double*>(t.data)[offset];
}

void set_zero(const thalweg_tensor& t) {
  if (!present(t)) return;
  int64_t n[4] = {1, 1, 1, 1};
  for (int axis = 0; axis < t.rank; ++axis) n[axis] = t.shape[axis];
  for (int64_t i = 0; i < n[0]; ++i)
    for (int64_t j = 0; j < n[1]; ++j)
      for (int64_t l = 0; l < n[2]; ++l)
        for (int64_t m = 0; m < n[3]; ++m) at(t, i, j, l, m) = 0;
}

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }
double softplus_slope(double x) { return x > 20 ? 1 : sigmoid(x); }

// Eight partial sums, so that the compiler may use vectors.
double dot(const double* a, const double* b, int64_t n) {
  double part[8] = {};
  int64_t j = 0;
  for (; j + 8 <= n; j += 8)
    for (int l = 0; l < 8; ++l) part[l] += a[j + l] * b[j + l];
  double sum = 0;
  for (double x : part) sum += x;
  for (; j < n; ++j) sum += a[j] * b[j];
  return sum;
}

void add_scaled(double x, const double* a, int64_t n, double* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x * a[i];
}

double l2norm(Row& row) {
  double rstd = 1 / std::sqrt(dot(row.data(), row.data(), int64_t(row.size())) + 1e-6);
  for (double& x : row) x *= rstd;
  return rstd;
}

void parallel(int64_t tasks, double flops, const std::function<void(int64_t)>& task) {
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t i = next++; i < tasks; i = next++) task(i);
  };
  int64_t threads = flops < 1e5 ? 1 : std::min<int64_t>(tasks, std::thread::hardware_concurrency());
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; ++i) others.emplace_back(work);
  work();
  for (std::thread& thread : others) thread.join();
}

Span span_of(const thalweg_tensor& cu_seqlens, int64_t T, int64_t n) {
  if (!present(cu_seqlens)) return {n, 0, T};
  return {0, int_at(cu_seqlens, n), int_at(cu_seqlens, n + 1)};
}

void load_state(const thalweg_tensor& t, int64_t n, int64_t hv, Row& S, int64_t K, int64_t V) {
  S.assign(size_t(K * V), 0);
  if (!present(t)) return;
  for (int64_t i = 0; i < K; ++i)
    for (int64_t j = 0; j < V; ++j) S[size_t(i * V + j)] = at(t, n, hv, i, j);
}
void store_state(const thalweg_tensor& t, int64_t n, int64_t hv, const Row& S, int64_t K, int64_t V) {
  if (!present(t)) return;
  for (int64_t i = 0; i < K; ++i)
    for (int64_t j = 0; j < V; ++j) at(t, n, hv, i, j) = S[size_t(i * V + j)];
}

}  // namespace thalweg::testing::reference
