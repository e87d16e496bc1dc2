// Float64 oracle of the sparse flash attention, written from the mathematics, query by query and term by term: an
// entry that is listed r times is r terms. With s_j = c (<q, k_j> + <q_rope, k_rope_j>), z the sink, v_j the value:
//
//   m = max(z, max_j s_j)    l = exp(z - m) + sum_j exp(s_j - m)    L = m + log l    P_j = exp(s_j - L)
//   o = sum_j P_j v_j        p_e = mean over heads of the P_j of entry e
//
//   delta = <d_o, o>, or sum_j P_j <d_o, v_j>      dS_j = P_j (<d_o, v_j> - delta + d_lse)
//   d_q = c sum_j dS_j k_j     d_k_j = c sum dS_j q     d_v_j = sum P_j d_o     (sums over queries and heads)
//   d_z = sum over queries of exp(z - L) (d_lse - delta)
//
// where a given lse (or row_max + log row_sum) stands for L. The queries are shared out to threads; each thread adds up
// gradients of keys of its own, so that a large case takes minutes.
#include "thalweg/ops/sparse_flash_attention/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "testing/reference.h"
#include "thalweg/core/signature.h"
#include "thalweg/ops/sparse_flash_attention/sparse_flash_attention.h"

namespace thalweg::sparse_flash_attention {
namespace {

using Fwd = thalweg_sparse_flash_attention_fwd_args;
using Bwd = thalweg_sparse_flash_attention_bwd_args;
using Vector = std::vector<double>;

using testing::reference::add_scaled, testing::reference::dot;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double& at(const thalweg_tensor& t, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
  const int64_t index[] = {i, j, k, l};
  int64_t offset = 0;
  for (int axis = 0; axis < t.rank; ++axis) offset += index[axis] * t.stride[axis];
  return static_cast<double*>(t.data)[offset];
}

int64_t entry_at(const thalweg_tensor& t, int64_t b, int64_t i, int64_t e) {
  const int64_t offset = b * t.stride[0] + i * t.stride[1] + e * t.stride[2];
  return t.dtype == THALWEG_I64 ? static_cast<const int64_t*>(t.data)[offset]
                                : static_cast<const int32_t*>(t.data)[offset];
}

// Row (i, j) or (i, j, k) of a tensor, its last axis in order.
void load_row(const thalweg_tensor& t, double* out, int64_t n, int64_t i, int64_t j, int64_t k = 0) {
  const double* from = &at(t, i, j, k);
  const int64_t stride = t.stride[t.rank - 1];
  for (int64_t d = 0; d < n; ++d) out[d] = from[d * stride];
}

int64_t width(const thalweg_tensor& t) { return present(t) ? t.shape[t.rank - 1] : 0; }

double scale_of(int64_t K, double given) { return given == 0 ? 1 / std::sqrt(double(K)) : given; }

// Both parts of a key, and its value, as one row: [K + KR + V].
template <class Args>
void load_key(const Args& args, int64_t b, int64_t row, int64_t V, double* out) {
  const int64_t K = width(args.k), KR = width(args.k_rope);
  if (K > 0) load_row(args.k, out, K, b, row);
  if (KR > 0) load_row(args.k_rope, out + K, KR, b, row);
  if (V > 0) load_row(present(args.v) ? args.v : args.k, out + K + KR, V, b, row);
}

// One query, all heads.
template <class Args>
struct Row {
  int64_t H, W, V;   // heads, width of a key with its rope part, width of a value
  Visible visible;
  Vector q;     // [H W]
  Vector s;     // [rows H]
  Vector m, l;  // [H]
  Vector key;   // [W + V]

  Row(const Args& args, int64_t b, int64_t t, int64_t V_)
      : H(args.q.shape[2]), W(width(args.q) + width(args.q_rope)), V(V_), visible(visible_rows(args, b, t)) {
    key.resize(size_t(W + V));
    if (!visible.used) return;
    q.resize(size_t(H * W));
    for (int64_t h = 0; h < H; ++h) {
      const int64_t K = width(args.q);
      if (K > 0) load_row(args.q, &q[size_t(h * W)], K, b, t, h);
      if (W > K) load_row(args.q_rope, &q[size_t(h * W + K)], W - K, b, t, h);
    }
    score(args, b);
    normalize(args);
  }
  int64_t size() const { return int64_t(visible.rows.size()); }

  void score(const Args& args, int64_t b) {
    const double c = scale_of(W, args.scale);
    s.assign(size_t(size() * H), 0);
    for (int64_t e = 0; e < size(); ++e) {
      load_key(args, b, visible.rows[size_t(e)], V, key.data());
      for (int64_t h = 0; h < H; ++h) s[size_t(e * H + h)] = c * dot(q.data() + h * W, key.data(), W);
    }
  }
  void normalize(const Args& args) {
    m.assign(size_t(H), 0), l.assign(size_t(H), 0);
    for (int64_t h = 0; h < H; ++h) {
      const double z = present(args.sink) ? at(args.sink, h) : -kInfinity;
      double largest = z;
      for (int64_t e = 0; e < size(); ++e) largest = std::max(largest, s[size_t(e * H + h)]);
      if (largest == -kInfinity) largest = 0;
      double sum = present(args.sink) ? std::exp(z - largest) : 0;
      for (int64_t e = 0; e < size(); ++e) sum += std::exp(s[size_t(e * H + h)] - largest);
      m[size_t(h)] = sum == 0 ? 0 : largest, l[size_t(h)] = sum;
    }
  }
  // P of term e; every row with a term that counts has l > 0.
  double probability(int64_t e, int64_t h) const {
    return std::exp(s[size_t(e * H + h)] - m[size_t(h)]) / l[size_t(h)];
  }
};

// Runs work(part) for every part, each on a thread of its own.
template <class Work>
void run_parts(int64_t parts, const Work& work) {
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < parts; ++i) threads.emplace_back([&work, i] { work(i); });
  work(0);
  for (std::thread& thread : threads) thread.join();
}
// Small problems take one part.
template <class Args>
int64_t num_parts(const Args& args) {
  const double terms = double(args.indices.shape[0]) * double(args.indices.shape[1]) * double(args.indices.shape[2]);
  if (terms * double(args.q.shape[2]) * double(width(args.q)) < 1e7) return 1;
  return std::max<int64_t>(1, std::min<int64_t>(16, std::thread::hardware_concurrency()));
}

template <class Args, class Heads>
void store_entries(const Args& args, int64_t b, int64_t t, const Visible& visible, int64_t H, const Heads& probability) {
  if (!present(args.p)) return;
  for (int64_t e = 0; e < args.p.shape[2]; ++e) at(args.p, b, t, e) = 0;
  for (size_t i = 0; i < visible.rows.size(); ++i)
    for (int64_t h = 0; h < H; ++h) at(args.p, b, t, visible.entries[i]) += probability(int64_t(i), h) / double(H);
}

void forward_query(const Fwd& args, int64_t b, int64_t t) {
  const int64_t V = width(args.o);
  const Row<Fwd> row(args, b, t, V);
  Vector o(size_t(row.H * V), 0.0), key(size_t(row.W + V));
  for (int64_t e = 0; e < row.size(); ++e) {
    load_key(args, b, row.visible.rows[size_t(e)], V, key.data());
    for (int64_t h = 0; h < row.H; ++h) {
      if (row.l[size_t(h)] == 0) continue;
      add_scaled(row.probability(e, h), key.data() + row.W, V, o.data() + h * V);
    }
  }
  for (int64_t h = 0; h < row.H; ++h) {
    for (int64_t i = 0; i < V; ++i) at(args.o, b, t, h, i) = o[size_t(h * V + i)];
    const double m = row.visible.used ? row.m[size_t(h)] : 0, l = row.visible.used ? row.l[size_t(h)] : 0;
    if (present(args.lse)) at(args.lse, b, t, h) = m + std::log(l);
    if (present(args.row_max)) at(args.row_max, b, t, h) = m;
    if (present(args.row_sum)) at(args.row_sum, b, t, h) = l;
  }
  store_entries(args, b, t, row.visible, row.H,
                [&](int64_t e, int64_t h) { return row.l[size_t(h)] == 0 ? 0 : row.probability(e, h); });
}

// Gradients of keys, values and sink that one thread adds up: [B S], [K + KR + V] each, and [H].
struct Sums {
  Vector keys, sink;
};

class Backward {
 public:
  explicit Backward(const Bwd& args) : args_(args), V_(width(args.d_o)), W_(width(args.q) + width(args.q_rope)) {}

  Sums zeros() const {
    return {Vector(size_t(args_.k.shape[0] * args_.k.shape[1] * (W_ + V_)), 0.0), Vector(size_t(args_.q.shape[2]), 0.0)};
  }

  void query(int64_t b, int64_t t, Sums* sums) const {
    const Row<Bwd> row(args_, b, t, V_);
    const int64_t H = row.H;
    Vector L(static_cast<size_t>(H)), delta(static_cast<size_t>(H)), d_q(size_t(H * W_), 0.0);
    if (row.visible.used) {
      for (int64_t h = 0; h < H; ++h) L[size_t(h)] = log_sum(row, b, t, h);
      Vector P, dP, d_o(size_t(H * V_));
      for (int64_t h = 0; h < H && V_ > 0; ++h) load_row(args_.d_o, &d_o[size_t(h * V_)], V_, b, t, h);
      probabilities(row, b, d_o, L, &P, &dP);
      for (int64_t h = 0; h < H; ++h) delta[size_t(h)] = delta_of(row.visible, P, dP, b, t, h, H);
      for (size_t i = 0; i < P.size(); ++i) dP[i] = dead(L[i % size_t(H)]) ? 0 : P[i] * (dP[i] - delta[i % size_t(H)]);
      for (int64_t e = 0; e < row.size(); ++e)
        add_term(row, b, e, d_o, L, &P[size_t(e * H)], &dP[size_t(e * H)], d_q.data(), sums);
      for (int64_t h = 0; h < H && present(args_.sink); ++h)
        if (!dead(L[size_t(h)])) sums->sink[size_t(h)] -= std::exp(at(args_.sink, h) - L[size_t(h)]) * delta[size_t(h)];
      store_entries(args_, b, t, row.visible, H, [&](int64_t e, int64_t h) { return P[size_t(e * H + h)]; });
    } else {
      store_entries(args_, b, t, row.visible, H, [](int64_t, int64_t) { return 0.0; });
    }
    const double c = scale_of(W_, args_.scale);
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t i = 0; i < width(args_.d_q); ++i) at(args_.d_q, b, t, h, i) = c * d_q[size_t(h * W_ + i)];
      for (int64_t i = 0; i < width(args_.d_q_rope); ++i)
        at(args_.d_q_rope, b, t, h, i) = c * d_q[size_t(h * W_ + width(args_.q) + i)];
    }
  }

  void store(const Sums& sums) const {
    const int64_t K = width(args_.k), V = present(args_.v) ? 0 : V_;
    const double c = scale_of(W_, args_.scale);
    for (int64_t b = 0; b < args_.k.shape[0]; ++b)
      for (int64_t j = 0; j < args_.k.shape[1]; ++j) {
        const double* row = sums.keys.data() + (b * args_.k.shape[1] + j) * (W_ + V_);
        for (int64_t i = 0; i < width(args_.d_k); ++i) at(args_.d_k, b, j, i) = c * row[i] + (i < V ? row[W_ + i] : 0);
        for (int64_t i = 0; i < width(args_.d_k_rope); ++i) at(args_.d_k_rope, b, j, i) = c * row[K + i];
        for (int64_t i = 0; i < width(args_.d_v); ++i) at(args_.d_v, b, j, i) = row[W_ + i];
      }
    for (int64_t h = 0; h < args_.q.shape[2] && present(args_.d_sink); ++h) at(args_.d_sink, h) = sums.sink[size_t(h)];
  }

 private:
  static bool dead(double L) { return std::isinf(L); }

  // However often it is listed.
  static bool sees_one_key(const Visible& visible) {
    const std::vector<int64_t>& rows = visible.rows;
    return !rows.empty() && std::count(rows.begin(), rows.end(), rows[0]) == int64_t(rows.size());
  }

  // Not finite where given: the row is empty.
  double log_sum(const Row<Bwd>& row, int64_t b, int64_t t, int64_t h) const {
    if (!present(args_.lse) && !present(args_.row_sum)) {
      const double l = row.l[size_t(h)];
      return l == 0 ? kInfinity : row.m[size_t(h)] + std::log(l);
    }
    const double L = present(args_.lse) ? at(args_.lse, b, t, h) : at(args_.row_max, b, t, h) + std::log(at(args_.row_sum, b, t, h));
    return std::isfinite(L) ? L : kInfinity;
  }

  void probabilities(const Row<Bwd>& row, int64_t b, const Vector& d_o, const Vector& L, Vector* P, Vector* dP) const {
    const int64_t H = row.H;
    P->assign(size_t(row.size() * H), 0), dP->assign(size_t(row.size() * H), 0);
    Vector key(size_t(W_ + V_));
    for (int64_t e = 0; e < row.size(); ++e) {
      load_key(args_, b, row.visible.rows[size_t(e)], V_, key.data());
      for (int64_t h = 0; h < H; ++h) {
        const size_t i = size_t(e * H + h);
        (*dP)[i] = dot(d_o.data() + h * V_, key.data() + W_, V_);
        if (!dead(L[size_t(h)])) (*P)[i] = std::exp(row.s[i] - L[size_t(h)]);
      }
    }
  }

  // delta - d_lse
  double delta_of(const Visible& visible, const Vector& P, const Vector& dP, int64_t b, int64_t t, int64_t h, int64_t H) const {
    double sum = 0;
    if (sees_one_key(visible) && !present(args_.sink)) sum = dP[size_t(h)];  // P = 1 whatever the score: dS is 0
    else if (present(args_.o))
      for (int64_t i = 0; i < V_; ++i) sum += at(args_.d_o, b, t, h, i) * at(args_.o, b, t, h, i);
    else
      for (size_t i = size_t(h); i < P.size(); i += size_t(H)) sum += P[i] * dP[i];
    return present(args_.d_lse) ? sum - at(args_.d_lse, b, t, h) : sum;
  }

  void add_term(const Row<Bwd>& row, int64_t b, int64_t e, const Vector& d_o, const Vector& L, const double* P,
                const double* dS, double* d_q, Sums* sums) const {
    const int64_t j = row.visible.rows[size_t(e)];
    Vector key(size_t(W_ + V_));
    load_key(args_, b, j, V_, key.data());
    double* d_key = sums->keys.data() + (b * args_.k.shape[1] + j) * (W_ + V_);
    for (int64_t h = 0; h < row.H; ++h) {
      if (dead(L[size_t(h)])) continue;
      add_scaled(dS[h], key.data(), W_, d_q + h * W_);
      add_scaled(dS[h], row.q.data() + h * W_, W_, d_key);
      add_scaled(P[h], d_o.data() + h * V_, V_, d_key + W_);
    }
  }

  const Bwd& args_;
  int64_t V_, W_;
};

}  // namespace

template <class Args>
Visible visible_rows(const Args& args, int64_t b, int64_t t) {
  const bool packed = present(args.cu_seqlens);
  const int64_t N = packed ? args.cu_seqlens.shape[0] - 1 : args.q.shape[0];
  int64_t n = b, start = 0, queries = args.q.shape[1], first = 0, keys = args.k.shape[1];
  if (packed) {
    for (n = 0; n < N && t >= int_at(args.cu_seqlens, n + 1);) ++n;
    if (n == N) return {};
    start = int_at(args.cu_seqlens, n), queries = int_at(args.cu_seqlens, n + 1) - start;
    first = int_at(args.cu_seqlens_k, n), keys = int_at(args.cu_seqlens_k, n + 1) - first;
  }
  if (present(args.q_lens)) queries = int_at(args.q_lens, n);
  if (present(args.k_lens)) keys = int_at(args.k_lens, n);
  if (t - start >= queries) return {};
  Visible visible;
  visible.used = true;
  const int64_t block = args.sparse_block_size == 0 ? 1 : args.sparse_block_size;
  for (int64_t e = 0; e < args.indices.shape[2]; ++e) {
    const int64_t entry = entry_at(args.indices, b, t, e);
    if (entry < 0 || entry > keys / block) continue;
    for (int64_t j = entry * block; j < (entry + 1) * block; ++j)
      if (j < keys && (!args.causal || j <= t - start + keys - queries)) {
        visible.rows.push_back(first + j);
        visible.entries.push_back(e);
      }
  }
  return visible;
}
template Visible visible_rows(const Fwd&, int64_t, int64_t);
template Visible visible_rows(const Bwd&, int64_t, int64_t);

void reference_fwd(const void* pass_args) {
  const auto& args = *static_cast<const Fwd*>(pass_args);
  const int64_t T = args.q.shape[1], rows = args.q.shape[0] * T, parts = num_parts(args);
  run_parts(parts, [&](int64_t part) {
    for (int64_t row = part; row < rows; row += parts) forward_query(args, row / T, row % T);
  });
}

void reference_bwd(const void* pass_args) {
  const auto& args = *static_cast<const Bwd*>(pass_args);
  const int64_t T = args.q.shape[1], rows = args.q.shape[0] * T, parts = num_parts(args);
  const Backward backward(args);
  std::vector<Sums> sums(static_cast<size_t>(parts));
  run_parts(parts, [&](int64_t part) {
    sums[size_t(part)] = backward.zeros();
    for (int64_t row = part; row < rows; row += parts) backward.query(row / T, row % T, &sums[size_t(part)]);
  });
  for (size_t part = 1; part < sums.size(); ++part) {
    for (size_t i = 0; i < sums[0].keys.size(); ++i) sums[0].keys[i] += sums[part].keys[i];
    for (size_t i = 0; i < sums[0].sink.size(); ++i) sums[0].sink[i] += sums[part].sink[i];
  }
  backward.store(sums[0]);
}

}  // namespace thalweg::sparse_flash_attention
