// Chunk-level float64 oracle of the gated delta rule, stage by stage. Stages are plain sums over the rows of
// one chunk, with decays taken from sums of g between two rows, so that g = -inf needs no care.
#include <algorithm>
#include <cmath>

#include "thalweg/ops/gated_delta_rule/reference.h"

namespace thalweg::gated_delta_rule::chunk {
namespace {

Matrix zeros(int64_t rows, int64_t columns) { return Matrix(size_t(rows * columns)); }

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}
// y += a x
void add(double a, const double* x, double* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

// x S [V], x [K], S [K V].
Matrix times_state(const double* x, const Matrix& S, int64_t K, int64_t V) {
  Matrix y = zeros(1, V);
  for (int64_t i = 0; i < K; ++i) add(x[i], &S[size_t(i * V)], y.data(), V);
  return y;
}
// S x [K], x [V].
Matrix state_times(const Matrix& S, const double* x, int64_t K, int64_t V) {
  Matrix y = zeros(1, K);
  for (int64_t i = 0; i < K; ++i) y[size_t(i)] = dot(&S[size_t(i * V)], x, V);
  return y;
}

// Rows of a chunk with fewer brackets.
struct Rows {
  const Inputs& in;
  const double* q(int64_t i) const { return in.q + i * in.K; }
  const double* k(int64_t i) const { return in.k + i * in.K; }
  const double* v(int64_t i) const { return in.v + i * in.V; }
};
const double* row(const Matrix& m, int64_t i, int64_t columns) { return &m[size_t(i * columns)]; }
double* row(Matrix& m, int64_t i, int64_t columns) { return &m[size_t(i * columns)]; }

}  // namespace

Local local(const Inputs& in) {
  const int64_t C = in.C, K = in.K, V = in.V;
  const Rows x{in};
  Local l{zeros(C, 1), zeros(C, C), zeros(C, C), zeros(C, K), zeros(C, V)};
  double sum = 0;
  for (int64_t i = 0; i < C; ++i) l.E[size_t(i)] = std::exp(sum += in.g[i]);
  for (int64_t j = 0; j < C; ++j) {
    double between = 0;
    for (int64_t i = j; i < C; ++i) row(l.D, i, C)[j] = std::exp(between += i > j ? in.g[i] : 0);
  }
  for (int64_t j = 0; j < C; ++j) {
    row(l.A, j, C)[j] = 1;
    for (int64_t i = j + 1; i < C; ++i) {
      double a = 0;
      for (int64_t m = j; m < i; ++m)
        a -= in.beta[i] * dot(x.k(i), x.k(m), K) * row(l.D, i, C)[m] * row(l.A, m, C)[j];
      row(l.A, i, C)[j] = a;
    }
  }
  for (int64_t i = 0; i < C; ++i)
    for (int64_t j = 0; j <= i; ++j) {
      const double a = row(l.A, i, C)[j] * in.beta[j];
      add(a, x.v(j), row(l.u, i, V), V);
      add(a * l.E[size_t(j)], x.k(j), row(l.w, i, K), K);
    }
  return l;
}

Matrix v_new(const Inputs& in, const Local& l, const Matrix& S0) {
  Matrix out = l.u;
  for (int64_t i = 0; i < in.C; ++i)
    add(-1, times_state(row(l.w, i, in.K), S0, in.K, in.V).data(), row(out, i, in.V), in.V);
  return out;
}

Matrix next_state(const Inputs& in, const Local& l, const Matrix& S0, const Matrix& v_new) {
  const int64_t C = in.C, K = in.K, V = in.V;
  const Rows x{in};
  Matrix S1 = zeros(K, V);
  add(l.E[size_t(C - 1)], S0.data(), S1.data(), K * V);
  for (int64_t j = 0; j < C; ++j)
    for (int64_t i = 0; i < K; ++i) add(row(l.D, C - 1, C)[j] * x.k(j)[i], row(v_new, j, V), row(S1, i, V), V);
  return S1;
}

Matrix output(const Inputs& in, const Local& l, const Matrix& S0, const Matrix& v_new) {
  const Rows x{in};
  Matrix o = zeros(in.C, in.V);
  for (int64_t i = 0; i < in.C; ++i) {
    add(in.scale * l.E[size_t(i)], times_state(x.q(i), S0, in.K, in.V).data(), row(o, i, in.V), in.V);
    for (int64_t j = 0; j <= i; ++j)
      add(in.scale * dot(x.q(i), x.k(j), in.K) * row(l.D, i, in.C)[j], row(v_new, j, in.V), row(o, i, in.V), in.V);
  }
  return o;
}

Matrix dv_local(const Inputs& in, const Local& l, const Matrix& d_o) {
  const Rows x{in};
  Matrix dv = zeros(in.C, in.V);
  for (int64_t j = 0; j < in.C; ++j)
    for (int64_t i = j; i < in.C; ++i)
      add(in.scale * dot(x.q(i), x.k(j), in.K) * row(l.D, i, in.C)[j], row(d_o, i, in.V), row(dv, j, in.V), in.V);
  return dv;
}

Matrix dv_new(const Inputs& in, const Local& l, const Matrix& dv_local, const Matrix& dS1) {
  const Rows x{in};
  Matrix dv = dv_local;
  for (int64_t j = 0; j < in.C; ++j)
    add(row(l.D, in.C - 1, in.C)[j], times_state(x.k(j), dS1, in.K, in.V).data(), row(dv, j, in.V), in.V);
  return dv;
}

Matrix previous_state_gradient(const Inputs& in, const Local& l, const Matrix& d_o, const Matrix& dv_new,
                               const Matrix& dS1) {
  const int64_t C = in.C, K = in.K, V = in.V;
  const Rows x{in};
  Matrix dS0 = zeros(K, V);
  add(l.E[size_t(C - 1)], dS1.data(), dS0.data(), K * V);
  for (int64_t t = 0; t < C; ++t)
    for (int64_t i = 0; i < K; ++i) {
      add(in.scale * l.E[size_t(t)] * x.q(t)[i], row(d_o, t, V), row(dS0, i, V), V);
      add(-row(l.w, t, K)[i], row(dv_new, t, V), row(dS0, i, V), V);
    }
  return dS0;
}

Dqkwg dqkwg(const Inputs& in, const Local& l, const Matrix& S0, const Matrix& v_new, const Matrix& d_o,
            const Matrix& dv_new, const Matrix& dS1) {
  const int64_t C = in.C, K = in.K, V = in.V, n = C - 1;
  const Rows x{in};
  Dqkwg d{zeros(C, K), zeros(C, K), zeros(C, K), zeros(C, 1)};
  double last = l.E[size_t(n)] * dot(S0.data(), dS1.data(), K * V);
  for (int64_t i = 0; i < C; ++i) {
    add(in.scale * l.E[size_t(i)], state_times(S0, row(d_o, i, V), K, V).data(), row(d.dq, i, K), K);
    Matrix through_state = state_times(dS1, row(v_new, i, V), K, V);
    add(row(l.D, n, C)[i], through_state.data(), row(d.dk, i, K), K);
    last += row(l.D, n, C)[i] * dot(x.k(i), through_state.data(), K);
    add(-1, state_times(S0, row(dv_new, i, V), K, V).data(), row(d.dw, i, K), K);
  }
  for (int64_t i = 0; i < C; ++i)
    for (int64_t j = 0; j <= i; ++j) {
      const double P = in.scale * row(l.D, i, C)[j] * dot(row(d_o, i, V), row(v_new, j, V), V);
      add(P, x.k(j), row(d.dq, i, K), K);
      add(P, x.q(i), row(d.dk, j, K), K);
    }
  for (int64_t i = 0; i < C; ++i)
    d.dG[size_t(i)] = dot(x.q(i), row(d.dq, i, K), K) - dot(x.k(i), row(d.dk, i, K), K);
  d.dG[size_t(n)] += last;
  return d;
}

namespace {

// dL = -sl(A^T dA A^T) with dA_ij = dw_i . (beta_j E_j k_j) + du_i . (beta_j v_j) for i > j.
Matrix system_gradient(const Inputs& in, const Local& l, const Matrix& dw, const Matrix& du) {
  const int64_t C = in.C;
  const Rows x{in};
  Matrix dA = zeros(C, C), half = zeros(C, C), dL = zeros(C, C);
  for (int64_t i = 0; i < C; ++i)
    for (int64_t j = 0; j < i; ++j)
      row(dA, i, C)[j] = in.beta[j] * (l.E[size_t(j)] * dot(row(dw, i, in.K), x.k(j), in.K) +
                                       dot(row(du, i, in.V), x.v(j), in.V));
  for (int64_t i = 0; i < C; ++i)
    for (int64_t m = 0; m < C; ++m) add(row(l.A, m, C)[i], row(dA, m, C), row(half, i, C), C);
  for (int64_t i = 0; i < C; ++i)
    for (int64_t j = 0; j < i; ++j) row(dL, i, C)[j] = -dot(row(half, i, C), row(l.A, j, C), C);
  return dL;
}

}  // namespace

Wy wy(const Inputs& in, const Local& l, const Matrix& dw, const Matrix& du) {
  const int64_t C = in.C, K = in.K, V = in.V;
  const Rows x{in};
  Wy d{zeros(C, K), zeros(C, V), zeros(C, 1), zeros(C, 1)};
  for (int64_t i = 0; i < C; ++i) {
    Matrix X = zeros(1, K), Y = zeros(1, V);
    for (int64_t m = i; m < C; ++m) {
      add(row(l.A, m, C)[i], row(dw, m, K), X.data(), K);
      add(row(l.A, m, C)[i], row(du, m, V), Y.data(), V);
    }
    const double E = l.E[size_t(i)], Xk = dot(X.data(), x.k(i), K);
    add(in.beta[i], Y.data(), row(d.dv, i, V), V);
    add(in.beta[i] * E, X.data(), row(d.dk, i, K), K);
    d.dbeta[size_t(i)] = E * Xk + dot(Y.data(), x.v(i), V);
    d.dG[size_t(i)] = in.beta[i] * E * Xk;
  }
  const Matrix dL = system_gradient(in, l, dw, du);
  for (int64_t i = 0; i < C; ++i)
    for (int64_t j = 0; j < i; ++j) {
      const double M = row(dL, i, C)[j] * row(l.D, i, C)[j], kk = dot(x.k(i), x.k(j), K);
      d.dbeta[size_t(i)] += M * kk;
      add(in.beta[i] * M, x.k(j), row(d.dk, i, K), K);
      add(in.beta[i] * M, x.k(i), row(d.dk, j, K), K);
      d.dG[size_t(i)] += M * in.beta[i] * kk;
      d.dG[size_t(j)] -= M * in.beta[i] * kk;
    }
  return d;
}

Matrix suffix_sum(const Matrix& dG) {
  Matrix dg = dG;
  for (int64_t t = int64_t(dg.size()) - 2; t >= 0; --t) dg[size_t(t)] += dg[size_t(t + 1)];
  return dg;
}

namespace {

Inputs slice(const Inputs& whole, int64_t begin, int64_t end) {
  Inputs in = whole;
  in.C = end - begin;
  in.q += begin * in.K, in.k += begin * in.K, in.v += begin * in.V, in.g += begin, in.beta += begin;
  return in;
}
Matrix slice(const Matrix& rows, int64_t begin, int64_t end, int64_t columns) {
  return Matrix(rows.begin() + begin * columns, rows.begin() + end * columns);
}
void put(const Matrix& part, int64_t begin, int64_t columns, Matrix& whole) {
  std::copy(part.begin(), part.end(), whole.begin() + begin * columns);
}
Matrix sum(Matrix a, const Matrix& b) {
  add(1, b.data(), a.data(), int64_t(a.size()));
  return a;
}

}  // namespace

Forward forward(const Inputs& whole, int64_t chunk, const Matrix& initial_state) {
  Forward f{zeros(whole.C, whole.V), initial_state, {}};
  for (int64_t begin = 0; begin < whole.C; begin += chunk) {
    const Inputs in = slice(whole, begin, std::min(begin + chunk, whole.C));
    const Local l = local(in);
    f.states.push_back(f.final_state);
    const Matrix delta = v_new(in, l, f.final_state);
    put(output(in, l, f.final_state, delta), begin, in.V, f.o);
    f.final_state = next_state(in, l, f.final_state, delta);
  }
  return f;
}

Backward backward(const Inputs& whole, int64_t chunk, const Forward& forward, const Matrix& d_o,
                  const Matrix& d_final_state) {
  const int64_t T = whole.C, K = whole.K, V = whole.V;
  Backward b{zeros(T, K), zeros(T, K), zeros(T, V), zeros(T, 1), zeros(T, 1), d_final_state};
  Matrix& dS = b.d_initial_state;
  for (int64_t c = int64_t(forward.states.size()) - 1; c >= 0; --c) {
    const int64_t begin = c * chunk, end = std::min(begin + chunk, T);
    const Inputs in = slice(whole, begin, end);
    const Local l = local(in);
    const Matrix& S0 = forward.states[size_t(c)];
    const Matrix delta = v_new(in, l, S0), d_out = slice(d_o, begin, end, V);
    const Matrix du = dv_new(in, l, dv_local(in, l, d_out), dS);
    const Dqkwg d = dqkwg(in, l, S0, delta, d_out, du, dS);
    const Wy w = wy(in, l, d.dw, du);
    put(d.dq, begin, K, b.dq);
    put(sum(d.dk, w.dk), begin, K, b.dk);
    put(w.dv, begin, V, b.dv);
    put(w.dbeta, begin, 1, b.dbeta);
    put(suffix_sum(sum(d.dG, w.dG)), begin, 1, b.dg);
    dS = previous_state_gradient(in, l, d_out, du, dS);
  }
  return b;
}

}  // namespace thalweg::gated_delta_rule::chunk
