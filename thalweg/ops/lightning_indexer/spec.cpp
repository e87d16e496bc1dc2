// Lightning indexer for tools and tests: usual sizes, natural inputs, FLOPs and bytes, error limits.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "testing/case.h"
#include "testing/fields.h"
#include "testing/testing.h"
#include "thalweg/ops/lightning_indexer/reference.h"

namespace thalweg {
namespace {

using lightning_indexer::VisibleKeys;
using testing::Case;
using testing::Random;
using testing::Values;
using Inputs = std::map<std::string, Values>;
using Args = thalweg_lightning_indexer_fwd_args;

bool is_pass(const Case& c, std::string_view name) { return c.pass->name == name; }
bool is_dense(const Case& c) { return !is_pass(c, "fwd") && !c.has("indices"); }

void need(const Case& c, const char* size) {
  if (!c.sizes.count(size))
    throw std::invalid_argument(testing::pass_name(*c.pass) + ": " + size + ", got none, expected " + size +
                                "<number>");
}

void complete(Case& c) {
  for (const char* size : {"T", "H", "K"}) need(c, size);
  c.sizes.try_emplace("B", 1);
  c.sizes.try_emplace("S", c.size("T"));
  if (is_dense(c)) c.sizes.try_emplace("E", c.size("S"));
  need(c, "E");
}

// ---- inputs -----------------------------------------------------------------------------------------

// The tensors that decide what is visible, as args: q and k for their shapes, the integer ones with data.
class MaskArgs {
 public:
  MaskArgs(const Case& c, const Inputs& inputs) {
    args_.causal = c.number("causal", 0) != 0;
    args_.scale = c.number("scale", 0);
    for (const auto& [name, values] : inputs) {
      const thalweg_field* field = testing::find_field(*thalweg_fwd(c), name);
      if (!field || testing::is_output(*field)) continue;
      const bool integer = testing::accepts_dtype(*thalweg_fwd(c), *field, THALWEG_I64);
      auto& tensor = *reinterpret_cast<thalweg_tensor*>(reinterpret_cast<char*>(&args_) + field->offset);
      tensor.dtype = integer ? THALWEG_I64 : THALWEG_F64;
      tensor.rank = int32_t(values.shape.size());
      int64_t stride = 1;
      for (int i = tensor.rank - 1; i >= 0; --i) {
        tensor.shape[i] = values.shape[size_t(i)];
        tensor.stride[i] = stride;
        stride *= tensor.shape[i];
      }
      if (integer) {
        integers_[name].assign(values.data.begin(), values.data.end());
        tensor.data = integers_[name].data();
      } else {
        tensor.data = const_cast<double*>(values.data.data());
      }
    }
  }
  VisibleKeys keys(int64_t b, int64_t t) const { return lightning_indexer::reference_keys(args_, b, t); }

 private:
  // The fwd pass of the same operator: its fields have the names of all passes' inputs, but for the list's.
  static const thalweg_pass* thalweg_fwd(const Case& c) {
    for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i)
      if (std::string_view(pass->op) == c.pass->op && std::string_view(pass->name) == "fwd") return pass;
    return c.pass;
  }
  Args args_;
  std::map<std::string, std::vector<int64_t>> integers_;
};

void fill_intervals(const Case& c, Inputs& inputs, Random& random) {
  const int64_t S = c.size("S");
  for (auto& [name, values] : inputs) {
    if (name == "start")  // some before the first key, some rows empty
      for (double& s : values.data) s = double(random.below(S / 2 + 3) - 2);
    if (name == "end")
      for (double& s : values.data) s = double(S / 3 + random.below(S - S / 3 + 3));
  }
}

// Scores of about unit size: w carries 1 / sqrt(H K), as models fold it in.
void fill_numbers(const Case& c, Inputs& inputs, Random& random) {
  const double heads = std::max<double>(1, double(c.size("H"))), width = std::max<double>(1, double(c.size("K")));
  const double scale = c.number("scale", 0) == 0 ? 1 : c.number("scale", 0);
  const int64_t K = c.size("K");
  for (auto& [name, values] : inputs) {
    const bool vector = name == "q" || name == "k";
    if (!vector && name != "w") continue;
    for (double& x : values.data) {
      if (c.has("integers"))
        x = vector ? double(random.below(5) - 2) : double(random.below(9) - 4) / 4;
      else if (!vector)
        x *= c.number("w_scale", 1) / (std::sqrt(heads * width) * scale);
      if (c.has("equal")) x = vector ? 1 : 0.5;
    }
    // Finite differences must not step over the kink of relu: products of q and k are odd multiples of 1/256.
    if (vector && c.dtype == THALWEG_F64 && !is_pass(c, "fwd") && !c.has("integers") && !c.has("equal"))
      for (int64_t i = 0; i < values.count(); ++i) {
        double& x = values.data[size_t(i)];
        x = i % K == K - 1 ? (2 * std::floor(8 * x) + 1) / 16
            : name == "q"  ? std::round(8 * x) / 8
                           : std::round(16 * x) / 16;
      }
  }
}

// Distinct visible keys in random order, then -1; `wild`: with entries that must be skipped and repeats.
void fill_list(const Case& c, const MaskArgs& mask, Values* list, Random& random) {
  const int64_t T = c.size("T"), S = c.size("S"), E = c.size("E");
  const double wild[] = {-1, double(S), double(S + 1), -2147483648.0, 2147483647.0, -2};
  std::vector<int64_t> order;
  for (int64_t r = 0; r < c.size("B") * T; ++r) {
    const VisibleKeys keys = mask.keys(r / T, r % T);
    order.resize(size_t(keys.end - keys.begin));
    std::iota(order.begin(), order.end(), keys.begin);
    const int64_t n = int64_t(order.size());
    for (int64_t e = 0; e < E; ++e) {
      double& entry = list->data[size_t(r * E + e)];
      entry = -1;
      if (e < n) {
        std::swap(order[size_t(e)], order[size_t(e + random.below(n - e))]);
        entry = double(order[size_t(e)]);
      }
      if (c.has("wild") && random.below(3) == 0) entry = wild[random.below(6)];
      if (c.has("wild") && random.below(4) == 0) entry = double(random.below(S + 1));
      if (c.has("wild") && random.below(3) == 0 && e > 0) entry = list->data[size_t(r * E + e - 1)];
      if (c.has("copies")) entry = double(keys.begin);
    }
  }
}

// A distribution over the visible entries; elsewhere numbers that must not count.
void fill_teacher(const Case& c, const MaskArgs& mask, const Values* list, Values* p, Random& random) {
  const int64_t T = c.size("T"), E = c.size("E");
  for (int64_t r = 0; r < c.size("B") * T; ++r) {
    const VisibleKeys keys = mask.keys(r / T, r % T);
    double sum = 0;
    std::vector<bool> counts(static_cast<size_t>(E));
    for (int64_t e = 0; e < E; ++e) {
      double& x = p->data[size_t(r * E + e)];
      x = std::exp(1.5 * x);
      if (c.has("p_zeros") && random.below(2) == 0) x = 0;
      const double s = list ? list->data[size_t(r * E + e)] : double(e);
      counts[size_t(e)] = s >= double(keys.begin) && s < double(keys.end);
      if (counts[size_t(e)]) sum += x;
    }
    for (int64_t e = 0; e < E; ++e) {
      double& x = p->data[size_t(r * E + e)];
      if (counts[size_t(e)] && sum > 0) x *= c.number("p_sum", 1) / sum;
      if (c.dtype != THALWEG_F64) x = double(float(x));  // what is lost below float32 is not the kernel's error
    }
  }
}

void fill(const Case& c, Inputs& inputs, Random& random) {
  fill_intervals(c, inputs, random);
  fill_numbers(c, inputs, random);
  const MaskArgs mask(c, inputs);
  const auto list = inputs.find("indices"), p = inputs.find("p"), d_scores = inputs.find("d_scores");
  if (list != inputs.end()) fill_list(c, mask, &list->second, random);
  if (p != inputs.end()) fill_teacher(c, mask, list == inputs.end() ? nullptr : &list->second, &p->second, random);
  if (d_scores != inputs.end())  // about as large as what comes from the loss
    for (double& x : d_scores->second.data) x /= double(c.size("E"));
}

// ---- more than one right list -----------------------------------------------------------------------

// Scores of one row in float64, and how far a sum of products rounded at every step may lie from them.
struct RowScores {
  std::vector<double> score, error;  // by position from keys.begin
};

RowScores scores_of(const Case& c, const Inputs& inputs, int64_t r, const VisibleKeys& keys) {
  const int64_t T = c.size("T"), S = c.size("S"), H = c.size("H"), K = c.size("K");
  const double* q = inputs.at("q").data.data() + r * H * K;
  const double* w = inputs.at("w").data.data() + r * H;
  const double unit = (c.dtype == THALWEG_F64 ? 0x1p-53 : 0x1p-24) * double(K + H + 4);
  const double scale = c.number("scale", 0) == 0 ? 1 : c.number("scale", 0);
  RowScores row;
  for (int64_t s = keys.begin; s < keys.end; ++s) {
    const double* k = inputs.at("k").data.data() + (r / T * S + keys.first + s) * K;
    double sum = 0, size = 0;
    for (int64_t h = 0; h < H; ++h) {
      double dot = 0, reach = 0;
      for (int64_t i = 0; i < K; ++i) {
        dot += q[h * K + i] * k[i];
        reach += std::fabs(q[h * K + i] * k[i]);
      }
      sum += w[h] * (dot < 0 ? 0 : scale * dot);
      size += std::fabs(w[h]) * scale * reach;
    }
    row.score.push_back(std::isnan(sum) ? -std::numeric_limits<double>::infinity() : sum);
    row.error.push_back(std::isfinite(size) && std::isfinite(sum) ? unit * size : 0);
  }
  return row;
}

// Whether `list` [E] is the right list for some scores no further from `row` than its errors.
bool is_right(const RowScores& row, const VisibleKeys& keys, const double* list, int64_t E, bool by_index) {
  const int64_t n = keys.end - keys.begin;
  std::vector<bool> chosen(row.score.size());
  double cap = std::numeric_limits<double>::infinity();  // the last score, as large as it may be
  for (int64_t e = 0; e < E; ++e) {
    if (e >= n) {
      if (list[e] != -1) return false;
      continue;
    }
    const int64_t s = int64_t(list[e]) - keys.begin;
    if (s < 0 || s >= n || chosen[size_t(s)]) return false;
    if (by_index && e > 0 && list[e] <= list[e - 1]) return false;
    chosen[size_t(s)] = true;
    if (!by_index && row.score[size_t(s)] - row.error[size_t(s)] > cap) return false;
    cap = std::min(cap, row.score[size_t(s)] + row.error[size_t(s)]);
  }
  for (size_t s = 0; s < row.score.size(); ++s)
    if (!chosen[s] && row.score[s] - row.error[s] > cap) return false;
  return true;
}

// A row's list is also right where scores closer than float32 arithmetic tells apart took each other's places.
// With `integers` that arithmetic is exact, and there is one list.
void settle(const Case& c, const Inputs& inputs, const Inputs& got, Inputs* want) {
  if (c.has("integers") || c.has("equal")) return;
  const int64_t T = c.size("T"), E = c.size("E");
  const auto order = c.options.find("order");
  const bool by_index = order != c.options.end() && order->second != "score" && order->second != "0";
  const MaskArgs mask(c, inputs);
  for (int64_t r = 0; r < c.size("B") * T; ++r) {
    const double* list = got.at("indices").data.data() + r * E;
    double* right = want->at("indices").data.data() + r * E;
    if (std::equal(list, list + E, right)) continue;
    const VisibleKeys keys = mask.keys(r / T, r % T);
    const RowScores row = scores_of(c, inputs, r, keys);
    if (!is_right(row, keys, list, E, by_index)) continue;
    std::copy(list, list + E, right);
    if (!want->count("scores")) continue;
    for (int64_t e = 0; e < std::min(E, keys.end - keys.begin); ++e)
      want->at("scores").data[size_t(r * E + e)] = row.score[size_t(int64_t(list[e]) - keys.begin)];
  }
}

// ---- work and limits --------------------------------------------------------------------------------

// (query, key) pairs, by lengths and causality; start and end are not looked at.
double num_pairs(const Case& c) {
  std::vector<std::pair<int64_t, int64_t>> sequences(size_t(c.size("B")), {c.size("T"), c.size("S")});
  if (testing::is_present(c, *testing::find_field(*c.pass, "cu_seqlens"))) {
    const std::vector<int64_t> queries = testing::lengths_of(c), keys = testing::key_lengths_of(c);
    sequences.clear();
    for (size_t n = 0; n < queries.size(); ++n) sequences.push_back({queries[n], keys[n]});
  }
  double pairs = 0;
  for (auto [queries, keys] : sequences)
    for (int64_t t = 0; t < queries; ++t)
      pairs += double(c.number("causal", 0) != 0 ? std::clamp<int64_t>(t + keys - queries + 1, 0, keys) : keys);
  return pairs;
}

// Products of heads and keys: 2 flops each; bwd has three, of the listed pairs.
testing::Work work(const Case& c) {
  testing::Work w;
  const double all = num_pairs(c), listed = double(c.size("B")) * double(c.size("T")) * double(c.size("E"));
  w.flops = 2 * double(c.size("H")) * double(c.size("K")) * (is_pass(c, "fwd") ? all : std::min(all, listed));
  if (is_pass(c, "bwd")) w.flops *= 3;
  for (const thalweg_field* field : testing::tensor_fields(*c.pass))
    if (testing::is_present(c, *field))
      w.bytes += double(testing::count(testing::shape_in(c, *field))) *
                 double(thalweg_dtype_bytes(testing::dtype_in(c, *field)));
  w.roof = "fma";
  return w;
}

double limit(const Case& c, const std::string& output) {
  if (output == "indices") return 0;  // exact, but for settle()
  const thalweg_dtype stored = testing::dtype_in(c, *testing::find_field(*c.pass, output));
  if (stored == THALWEG_BF16) return 4e-3;
  if (stored == THALWEG_F16) return 8e-4;
  if (stored == THALWEG_F64 && c.dtype == THALWEG_F64) return 1e-12;
  return 2e-6;
}

constexpr const char* kKnobs =
    "integers: small integers, so that scores are exact and many are equal; equal: all scores are the same; "
    "w_scale: factor of w; wild: the list has entries to skip and repeats; copies: the list is one key; "
    "p_sum: sum of p, 1 otherwise; p_zeros: about half of p is 0";

const testing::Spec kSpecs[] = {
    {"lightning_indexer", "fwd", complete, fill, lightning_indexer::reference_fwd, work, limit, kKnobs, "", nullptr,
     settle},
    {"lightning_indexer", "loss", complete, fill, lightning_indexer::reference_loss, work, limit, kKnobs, ""},
    {"lightning_indexer", "bwd", complete, fill, lightning_indexer::reference_bwd, work, limit, kKnobs, ""},
};

}  // namespace

const testing::Spec* lightning_indexer_spec_at(int i);
const testing::Spec* lightning_indexer_spec_at(int i) {
  return i >= 0 && i < int(std::size(kSpecs)) ? &kSpecs[i] : nullptr;
}

}  // namespace thalweg
