// Float64 oracle of the lightning indexer, row by row, written from the mathematics:
//
//   u[t, h, s] = scale <q[t, h], k[s]>      I[t, s] = sum_h w[t, h] relu(u[t, h, s])
//
//   fwd    the E largest I[t, s] of the visible s; NaN counts as minus infinity
//   loss   over the visible entries e of a row:  y = softmax_e(I)    loss[t] = sum_e p (ln p - ln y)
//   bwd    dI[t, e] = d_loss[t] ((sum_e p) y - p) + d_scores[t, e]
//          d_w[t, h] = sum_e dI relu(u)
//          d_q[t, h] = scale sum_e dI w[t, h] H(u) k[s_e]         H(u) = 1 where u > 0, else 0
//          d_k[s]   += scale sum_{t, h, e: s_e = s} dI w[t, h] H(u) q[t, h]
#include "thalweg/ops/lightning_indexer/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "thalweg/core/signature.h"

namespace thalweg::lightning_indexer {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double* place(const thalweg_tensor& t, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
  const int64_t index[4] = {i, j, k, l};
  int64_t offset = 0;
  for (int axis = 0; axis < t.rank; ++axis) offset += index[axis] * t.stride[axis];
  return static_cast<double*>(t.data) + offset;
}
double& at(const thalweg_tensor& t, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
  return *place(t, i, j, k, l);
}

int64_t number_at(const thalweg_tensor& t, int64_t i, int64_t j, int64_t l) {
  const int64_t offset = i * t.stride[0] + j * t.stride[1] + l * t.stride[2];
  return t.dtype == THALWEG_I64 ? static_cast<const int64_t*>(t.data)[offset]
                                : static_cast<const int32_t*>(t.data)[offset];
}

void set_number(const thalweg_tensor& t, int64_t i, int64_t j, int64_t l, int64_t value) {
  const int64_t offset = i * t.stride[0] + j * t.stride[1] + l * t.stride[2];
  if (t.dtype == THALWEG_I64)
    static_cast<int64_t*>(t.data)[offset] = value;
  else
    static_cast<int32_t*>(t.data)[offset] = int32_t(value);
}

template <class Args>
double scale_of(const Args& args) {
  return args.scale == 0 ? 1 : args.scale;
}

template <class Args>
VisibleKeys visible_keys(const Args& args, int64_t b, int64_t t) {
  int64_t n = b, query = t, queries = args.q.shape[1], keys = args.k.shape[1], first = 0;
  if (present(args.cu_seqlens)) {
    n = 0;
    const int64_t N = args.cu_seqlens.shape[0] - 1;
    while (n < N && int_at(args.cu_seqlens, n + 1) <= t) ++n;
    if (n == N) return {0, 0, 0};
    query = t - int_at(args.cu_seqlens, n);
    queries = int_at(args.cu_seqlens, n + 1) - int_at(args.cu_seqlens, n);
    first = int_at(args.cu_seqlens_k, n);
    keys = int_at(args.cu_seqlens_k, n + 1) - first;
  }
  if (present(args.q_lens)) queries = int_at(args.q_lens, n);
  if (present(args.k_lens)) keys = int_at(args.k_lens, n);
  int64_t begin = 0, end = query < queries ? keys : 0;
  if (present(args.start)) begin = std::max(begin, int_at(args.start, b, t));
  if (present(args.end)) end = std::min(end, int_at(args.end, b, t));
  if (args.causal) end = std::min(end, query + keys - queries + 1);
  return begin < end ? VisibleKeys{first, begin, end} : VisibleKeys{0, 0, 0};
}

// u[t, h, s] of every head, and the score.
template <class Args>
double score(const Args& args, int64_t b, int64_t t, int64_t key, std::vector<double>* u) {
  const int64_t H = args.q.shape[2], K = args.q.shape[3];
  u->assign(size_t(H), 0);
  double sum = 0;
  for (int64_t h = 0; h < H; ++h) {
    const double *q = place(args.q, b, t, h), *k = place(args.k, b, key);
    const int64_t q_step = args.q.stride[3], k_step = args.k.stride[2];
    double dot = 0;
    for (int64_t i = 0; i < K; ++i) dot += q[i * q_step] * k[i * k_step];
    (*u)[size_t(h)] = scale_of(args) * dot;
    sum += at(args.w, b, t, h) * (dot < 0 ? 0 : scale_of(args) * dot);
  }
  return sum;
}

// The visible entries of a row's list.
struct Entry {
  int64_t e, key;  // place in the list, row of k
  double score, p;
};

template <class Args>
std::vector<Entry> entries_of(const Args& args, int64_t b, int64_t t) {
  const VisibleKeys keys = visible_keys(args, b, t);
  const int64_t E = present(args.indices) ? args.indices.shape[2] : args.k.shape[1];
  std::vector<Entry> entries;
  std::vector<double> u;
  for (int64_t e = 0; e < E; ++e) {
    const int64_t s = present(args.indices) ? number_at(args.indices, b, t, e) : e;
    if (s < keys.begin || s >= keys.end) continue;
    const double p = present(args.p) ? at(args.p, b, t, e) : 0;
    entries.push_back({e, keys.first + s, score(args, b, t, keys.first + s, &u), p});
  }
  return entries;
}

// ln sum_e exp(I)
double log_sum(const std::vector<Entry>& entries) {
  double top = -kInfinity, sum = 0;
  for (const Entry& entry : entries) top = std::max(top, entry.score);
  for (const Entry& entry : entries) sum += std::exp(entry.score - top);
  return top + std::log(sum);
}

void set_to(const thalweg_tensor& t, double value) {
  if (!present(t)) return;
  for (int64_t i = 0; i < t.shape[0]; ++i)
    for (int64_t j = 0; j < t.shape[1]; ++j)
      for (int64_t k = 0; k < (t.rank > 2 ? t.shape[2] : 1); ++k)
        for (int64_t l = 0; l < (t.rank > 3 ? t.shape[3] : 1); ++l) at(t, i, j, k, l) = value;
}

}  // namespace

VisibleKeys reference_keys(const thalweg_lightning_indexer_fwd_args& args, int64_t b, int64_t t) {
  return visible_keys(args, b, t);
}

void reference_fwd(const void* pass_args) {
  const auto& args = *static_cast<const thalweg_lightning_indexer_fwd_args*>(pass_args);
  const int64_t E = args.indices.shape[2];
  struct Scored {
    double score;
    int64_t s;
  };
  std::vector<double> u;
  set_to(args.scores, -kInfinity);
  for (int64_t b = 0; b < args.q.shape[0]; ++b)
    for (int64_t t = 0; t < args.q.shape[1]; ++t) {
      const VisibleKeys keys = visible_keys(args, b, t);
      std::vector<Scored> row;
      for (int64_t s = keys.begin; s < keys.end; ++s) {
        const double value = score(args, b, t, keys.first + s, &u);
        row.push_back({std::isnan(value) ? -kInfinity : value, s});
      }
      std::stable_sort(row.begin(), row.end(), [](const Scored& x, const Scored& y) { return x.score > y.score; });
      row.resize(std::min(row.size(), size_t(E)));
      if (args.order == THALWEG_INDEXER_BY_INDEX)
        std::sort(row.begin(), row.end(), [](const Scored& x, const Scored& y) { return x.s < y.s; });
      for (int64_t e = 0; e < E; ++e) {
        const bool valid = e < int64_t(row.size());
        set_number(args.indices, b, t, e, valid ? row[size_t(e)].s : -1);
        if (valid && present(args.scores)) at(args.scores, b, t, e) = row[size_t(e)].score;
      }
    }
}

void reference_loss(const void* pass_args) {
  const auto& args = *static_cast<const thalweg_lightning_indexer_loss_args*>(pass_args);
  set_to(args.scores, -kInfinity);
  set_to(args.loss, 0);
  for (int64_t b = 0; b < args.q.shape[0]; ++b)
    for (int64_t t = 0; t < args.q.shape[1]; ++t) {
      const std::vector<Entry> entries = entries_of(args, b, t);
      const double lse = log_sum(entries);
      for (const Entry& entry : entries) {
        if (present(args.scores)) at(args.scores, b, t, entry.e) = entry.score;
        if (present(args.loss) && entry.p != 0)
          at(args.loss, b, t) += entry.p * (std::log(entry.p) - (entry.score - lse));
      }
    }
}

void reference_bwd(const void* pass_args) {
  const auto& args = *static_cast<const thalweg_lightning_indexer_bwd_args*>(pass_args);
  const int64_t H = args.q.shape[2], K = args.q.shape[3];
  const double scale = scale_of(args);
  std::vector<double> u;
  for (const thalweg_tensor* gradient : {&args.d_q, &args.d_k, &args.d_w}) set_to(*gradient, 0);
  for (int64_t b = 0; b < args.q.shape[0]; ++b)
    for (int64_t t = 0; t < args.q.shape[1]; ++t) {
      const std::vector<Entry> entries = entries_of(args, b, t);
      const double lse = log_sum(entries), d_loss = present(args.d_loss) ? at(args.d_loss, b, t) : 0;
      double total = 0;
      for (const Entry& entry : entries) total += entry.p;
      for (const Entry& entry : entries) {
        double dI = present(args.d_loss) ? d_loss * (total * std::exp(entry.score - lse) - entry.p) : 0;
        if (present(args.d_scores)) dI += at(args.d_scores, b, t, entry.e);
        score(args, b, t, entry.key, &u);
        for (int64_t h = 0; h < H; ++h) {
          if (u[size_t(h)] <= 0) continue;
          if (present(args.d_w)) at(args.d_w, b, t, h) += dI * u[size_t(h)];
          const double du = scale * dI * at(args.w, b, t, h);
          for (int64_t i = 0; i < K; ++i) {
            if (present(args.d_q)) at(args.d_q, b, t, h, i) += du * at(args.k, b, entry.key, i);
            if (present(args.d_k)) at(args.d_k, b, entry.key, i) += du * at(args.q, b, t, h, i);
          }
        }
      }
    }
}

}  // namespace thalweg::lightning_indexer
