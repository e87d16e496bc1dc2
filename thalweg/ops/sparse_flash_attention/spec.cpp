// Sparse flash attention for tools and tests: usual sizes, lists of keys, FLOPs and bytes, error limits.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "testing/case.h"
#include "testing/fields.h"
#include "testing/testing.h"
#include "thalweg/core/tensor.h"
#include "thalweg/ops/sparse_flash_attention/reference.h"
#include "thalweg/ops/sparse_flash_attention/sparse_flash_attention.h"

namespace thalweg {
namespace {

using testing::Case;
using testing::Random;
using testing::Values;
using Inputs = std::map<std::string, Values>;
using Fwd = thalweg_sparse_flash_attention_fwd_args;

bool is_backward(const Case& c) { return std::string_view(c.pass->name) == "bwd"; }
int64_t block_of(const Case& c) { return std::max<int64_t>(1, int64_t(c.number("sparse_block_size", 1))); }
bool is_causal(const Case& c) { return c.number("causal", 0) != 0; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::string word(const Case& c, const char* knob, const char* otherwise) {
  auto it = c.options.find(knob);
  return it == c.options.end() ? otherwise : it->second;
}

// ---- Sizes ----

void complete(Case& c) {
  for (const char* size : {"T", "H", "K", "E"})
    if (!c.sizes.count(size))
      throw std::invalid_argument(testing::pass_name(*c.pass) + ": " + size + ", got none, expected " + size +
                                  "<number>");
  c.sizes.try_emplace("B", 1);
  c.sizes.try_emplace("N", c.sizes["B"]);
  c.sizes.try_emplace("S", c.sizes["T"]);
  c.sizes.try_emplace("V", c.sizes["K"]);
  c.sizes.try_emplace("KR", 64);
  for (const auto& [knob, words] : {std::pair{"lists", "unique clamped local any"}, {"order", "shuffled ascending"}}) {
    const std::vector<std::string> known = testing::words(words);
    if (c.has(knob) && std::find(known.begin(), known.end(), c.options.at(knob)) == known.end())
      throw std::invalid_argument(testing::pass_name(*c.pass) + ": " + knob + ", got " + c.options.at(knob) +
                                  ", expected one of " + words);
  }
}

// ---- Sequences ----

struct Sequence {
  int64_t b, first_query, queries, first_key, keys;
  // Positions below this are visible to its query t.
  int64_t limit(int64_t t, bool causal) const { return causal ? std::clamp<int64_t>(t + 1 + keys - queries, 0, keys) : keys; }
};

std::vector<Sequence> sequences_of(const Case& c, const Inputs* inputs) {
  std::vector<Sequence> list;
  const bool packed = testing::is_present(c, *testing::find_field(*c.pass, "cu_seqlens"));
  int64_t query = 0, key = 0;
  const std::vector<int64_t> queries = packed ? testing::lengths_of(c) : std::vector<int64_t>(size_t(c.size("B")), c.size("T"));
  const std::vector<int64_t> keys = packed ? testing::key_lengths_of(c) : std::vector<int64_t>(size_t(c.size("B")), c.size("S"));
  if (queries.size() != keys.size())
    throw std::invalid_argument(testing::pass_name(*c.pass) + ": varlen_k, got " + std::to_string(keys.size()) +
                                " lengths, expected " + std::to_string(queries.size()) + " (from varlen)");
  for (size_t n = 0; n < queries.size(); ++n) {
    Sequence s{packed ? 0 : int64_t(n), query, queries[n], key, keys[n]};
    if (packed) query += queries[n], key += keys[n];
    if (inputs && inputs->count("q_lens")) s.queries = int64_t(inputs->at("q_lens").data.at(n));
    if (inputs && inputs->count("k_lens")) s.keys = int64_t(inputs->at("k_lens").data.at(n));
    list.push_back(s);
  }
  return list;
}

// Whether a call takes what is there together; the oracle is not asked otherwise.
bool is_consistent(const Case& c, const Inputs& inputs) {
  const size_t sequences = sequences_of(c, nullptr).size();
  for (const char* lengths : {"q_lens", "k_lens"})
    if (inputs.count(lengths) && inputs.at(lengths).data.size() != sequences) return false;
  return inputs.count("q_rope") == inputs.count("k_rope") && (inputs.count("v") || c.size("V") <= c.size("K")) &&
         (!inputs.count("cu_seqlens") || c.size("B") == 1);
}

// ---- Lists ----

// `count` different numbers of those left in `pool`, moved to its end.
void draw(std::vector<int64_t>& pool, size_t count, Random& random, std::vector<int64_t>* out) {
  for (size_t i = 0; i < count && !pool.empty(); ++i) {
    std::swap(pool[size_t(random.below(int64_t(pool.size())))], pool.back());
    out->push_back(pool.back());
    pool.pop_back();
  }
}

// The entries of a query that sees `visible` of `all` blocks.
std::vector<int64_t> list_of(const Case& c, int64_t visible, int64_t all, Random& random) {
  const int64_t E = c.size("E");
  const std::string kind = word(c, "lists", "unique");
  std::vector<int64_t> list, pool;
  if (kind == "any" || kind == "clamped") {
    for (int64_t e = 0; e < E && all > 0; ++e) {
      const int64_t block = random.below(all);
      if (kind == "any") list.push_back(block);
      else if (visible > 0) list.push_back(std::min(block, visible - 1));
    }
  } else {
    const int64_t recent = kind == "local" ? std::max<int64_t>(0, visible - 4 * E) : 0;
    pool.resize(size_t(visible - recent));
    std::iota(pool.begin(), pool.end(), recent);
    draw(pool, size_t(kind == "local" ? E * 4 / 5 : E), random, &list);
    if (kind == "local") {
      for (int64_t block = 0; block < recent; ++block) pool.push_back(block);
      draw(pool, size_t(E) - list.size(), random, &list);
    }
  }
  const size_t same = size_t(std::clamp<int64_t>(int64_t(c.number("repeat", 0)), 0, E));
  if (!list.empty()) {
    if (same > list.size()) list.resize(same);
    std::fill_n(list.begin(), same, list[0]);
  }
  if (word(c, "order", "shuffled") == "ascending") std::sort(list.begin(), list.end());
  list.resize(size_t(E), -1);
  return list;
}

// Some entries that stand for nothing, the first among them.
void pierce(const Case& c, std::vector<int64_t>& list, Random& random) {
  const bool padded = testing::padded_slots(c, "indices");
  const double share = c.number("holes", padded ? 0.25 : 0);
  const int64_t all = ceil_div(c.size("S"), block_of(c));
  const int64_t nothing[] = {-1, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max(), all, all + 1, -2};
  for (size_t e = 0; e < list.size(); ++e)
    if (random.uniform() < share || (e == 0 && share > 0)) list[e] = e == 0 ? -1 : nothing[random.below(6)];
}

void fill_lists(const Case& c, Inputs& inputs, Random& random) {
  const int64_t E = c.size("E"), T = c.size("T"), blank = int64_t(c.number("blank", 0));
  if (!is_consistent(c, inputs)) return;
  Values& indices = inputs.at("indices");  // queries of no sequence name key 0
  for (const Sequence& s : sequences_of(c, &inputs))
    for (int64_t t = 0; t < s.queries; ++t) {
      const int64_t block = block_of(c);
      std::vector<int64_t> list = list_of(c, ceil_div(s.limit(t, is_causal(c)), block), ceil_div(s.keys, block), random);
      pierce(c, list, random);
      if (blank > 0 && t % blank == 0) list.assign(list.size(), -1);
      std::copy(list.begin(), list.end(), indices.data.begin() + (s.b * T + s.first_query + t) * E);
    }
}

// ---- Forward's results for the backward, NaN where nobody looks ----

// As the tensor holds it.
void round_to(Values& values, thalweg_dtype dtype) {
  double bits = 0;  // room for any dtype
  for (double& x : values.data) {
    testing::store(&bits, dtype, 0, x);
    x = testing::load(&bits, dtype, 0);
  }
}

thalweg_tensor view_of(Values& v) {
  thalweg_tensor t{};
  t.data = v.data.data();
  t.dtype = THALWEG_F64;
  t.rank = int32_t(v.shape.size());
  t.device_type = THALWEG_CPU;
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.shape[i] = v.shape[size_t(i)];
    t.stride[i] = stride;
    stride *= t.shape[i];
  }
  return t;
}

// A forward on the inputs, in float64, with integers of its own.
struct Forward {
  Fwd args{};
  std::map<std::string, std::vector<int64_t>> integers;

  Forward(const Case& c, Inputs& inputs) {
    for (const auto& [name, tensor] :
         {std::pair{"q", &args.q}, {"k", &args.k}, {"v", &args.v}, {"q_rope", &args.q_rope}, {"k_rope", &args.k_rope}, {"sink", &args.sink}})
      if (inputs.count(name)) *tensor = view_of(inputs.at(name));
    for (const auto& [name, tensor] : {std::pair{"indices", &args.indices}, {"cu_seqlens", &args.cu_seqlens},
                                       {"cu_seqlens_k", &args.cu_seqlens_k}, {"q_lens", &args.q_lens}, {"k_lens", &args.k_lens}}) {
      if (!inputs.count(name)) continue;
      std::vector<int64_t>& list = integers[name];
      for (double x : inputs.at(name).data) list.push_back(int64_t(x));
      *tensor = view_of(inputs.at(name));
      tensor->data = list.data();
      tensor->dtype = THALWEG_I64;
    }
    args.scale = c.number("scale", 0);
    args.sparse_block_size = int64_t(c.number("sparse_block_size", 0));
    args.causal = is_causal(c);
  }
};

void fill_results(const Case& c, Inputs& inputs) {
  bool any = false;
  for (const char* name : {"o", "lse", "row_max", "row_sum"}) any = any || inputs.count(name);
  if (!any || !is_consistent(c, inputs)) return;
  for (auto& [name, values] : inputs) round_to(values, testing::dtype_in(c, *testing::find_field(*c.pass, name)));
  Forward forward(c, inputs);
  const std::vector<int64_t> rows = {c.size("B"), c.size("T"), c.size("H")};
  Values o{{rows[0], rows[1], rows[2], c.size("V")}, {}};
  o.data.resize(size_t(testing::count(o.shape)));
  forward.args.o = view_of(o);
  for (const auto& [name, tensor] : {std::pair{"lse", &forward.args.lse}, {"row_max", &forward.args.row_max}, {"row_sum", &forward.args.row_sum}})
    if (inputs.count(name)) *tensor = view_of(inputs.at(name));
  sparse_flash_attention::reference_fwd(&forward.args);
  if (inputs.count("o")) inputs.at("o") = std::move(o);
}

// NaN and infinity in every row of keys that no query sees, and in every query that sees nothing.
void poison(const Case& c, Inputs& inputs) {
  Forward forward(c, inputs);
  const int64_t S = c.size("S"), T = c.size("T");
  std::vector<bool> seen(size_t(c.size("B") * S));
  auto spoil = [&](const char* name, int64_t row, int64_t rows) {
    if (!inputs.count(name)) return;
    Values& v = inputs.at(name);
    const int64_t width = v.count() / std::max<int64_t>(1, rows);
    for (int64_t i = 0; i < width; ++i)
      v.data[size_t(row * width + i)] = i % 2 ? std::numeric_limits<double>::infinity() : std::nan("");
  };
  for (int64_t row = 0; row < c.size("B") * T; ++row) {
    const auto visible = sparse_flash_attention::visible_rows(forward.args, row / T, row % T);
    for (int64_t j : visible.rows) seen[size_t(row / T * S + j)] = true;
    if (visible.rows.empty() && (!visible.used || !inputs.count("sink")))
      for (const char* name : {"q", "q_rope", "o", "d_o"}) spoil(name, row, c.size("B") * T);
  }
  for (int64_t row = 0; row < c.size("B") * S; ++row)
    if (!seen[size_t(row)])
      for (const char* name : {"k", "k_rope", "v"}) spoil(name, row, c.size("B") * S);
}

void fill(const Case& c, Inputs& inputs, Random& random) {
  const double x_scale = c.number("x_scale", 1), d_scale = c.number("d_scale", 1);
  for (auto& [name, values] : inputs) {
    if (testing::is_integer(testing::dtype_in(c, *testing::find_field(*c.pass, name)))) continue;
    const double factor = name == "q" || name == "k" ? x_scale : name == "d_o" ? d_scale : 1;
    for (double& x : values.data) x = factor * (c.number("uniform", 0) != 0 ? 2 * random.uniform() - 1 : x);
  }
  fill_lists(c, inputs, random);
  fill_results(c, inputs);
  if (c.number("poison", 0) != 0 && is_consistent(c, inputs)) poison(c, inputs);
}

// ---- Work and limits ----

// Terms of all lists, as the fill makes them when nothing is cut by lengths or holes.
double pairs_of(const Case& c) {
  const bool repeats = word(c, "lists", "unique") == "clamped" || word(c, "lists", "unique") == "any";
  const double most = double(c.size("E")) * double(block_of(c));
  double pairs = 0;
  for (const Sequence& s : sequences_of(c, nullptr))
    for (int64_t t = 0; t < s.queries; ++t) {
      const double limit = double(s.limit(t, is_causal(c)));
      pairs += limit == 0 ? 0 : repeats ? most : std::min(most, limit);
    }
  return pairs;
}

testing::Work work(const Case& c) {
  const bool rope = testing::is_present(c, *testing::find_field(*c.pass, "q_rope"));
  const double W = double(c.size("K") + (rope ? c.size("KR") : 0)), V = double(c.size("V"));
  testing::Work w;
  w.flops = 2 * pairs_of(c) * double(c.size("H")) * (is_backward(c) ? 3 * W + 2 * V : W + V);
  for (const thalweg_field* field : testing::tensor_fields(*c.pass))
    if (testing::is_present(c, *field))
      w.bytes += double(testing::count(testing::shape_in(c, *field))) *
                 double(thalweg_dtype_bytes(testing::dtype_in(c, *field)));
  w.roof = "fma";
  return w;
}

double limit(const Case& c, const std::string& output) {
  const thalweg_field& field = *testing::find_field(*c.pass, output);
  const thalweg_dtype stored = testing::dtype_in(c, field);
  // A row of bf16 products rounds weights to bf16, which costs what rounding the output costs, and more where the sums of
  // all of a few elements happen to cancel. Statistics are as of other rows.
  if (stored == THALWEG_BF16 && c.kernel.starts_with("cpu_tile"))
    return testing::count(testing::shape_in(c, field)) < 128 ? 2.4e-2 : 8e-3;
  if (stored == THALWEG_BF16) return 4e-3;
  // Scores of a hundred are known to 1e-5 in float32, and P with them: judged against the plain row.
  if (stored == THALWEG_F32 && c.number("x_scale", 1) > 2) return 0;
  if (stored == THALWEG_F16) return 8e-4;
  if (stored == THALWEG_F64 && c.dtype == THALWEG_F64) return 1e-12;
  return 4e-6;
}

// The gates that half-precision outputs were published with; the RMS limits above are the second gate, and tighter
// than its 1e-3 (f16) and 8e-3 (bf16).
std::vector<testing::Rule> rules(const Case& c, const std::string& output) {
  const thalweg_dtype stored = testing::dtype_in(c, *testing::find_field(*c.pass, output));
  if (stored == THALWEG_F16)
    return {{.name = "matched", .atol = 0x1p-9, .rtol = 0x1p-9, .share = 0.99}, {.name = "cap", .atol = 0.1, .ulps = 32}};
  if (stored == THALWEG_BF16)
    return {{.name = "matched", .atol = 0x1p-6, .rtol = 0x1p-6, .share = 0.99}, {.name = "cap", .atol = 1, .ulps = 32}};
  return {};
}

constexpr const char* kKnobs =
    "lists: unique (the default: a random part of what a query sees, then -1), clamped (random keys, those beyond what "
    "it sees moved to the last that it sees), local (four fifths near the end of what it sees), any (random keys, seen or "
    "not); order: shuffled or ascending; holes: share of entries that stand for nothing; repeat: this many entries name "
    "the same key; blank: every n-th query names nothing; poison: NaN in rows that no query sees and in queries that see "
    "nothing; x_scale: factor of q and k; d_scale: factor of d_o; uniform: numbers of -1 to 1 instead of normal ones";

const testing::Spec kSpecs[] = {
    {"sparse_flash_attention", "fwd", complete, fill, sparse_flash_attention::reference_fwd, work, limit, kKnobs, "", rules},
    {"sparse_flash_attention", "bwd", complete, fill, sparse_flash_attention::reference_bwd, work, limit, kKnobs, "", rules},
};

}  // namespace

const testing::Spec* sparse_flash_attention_spec_at(int i);
const testing::Spec* sparse_flash_attention_spec_at(int i) {
  return i >= 0 && i < int(std::size(kSpecs)) ? &kSpecs[i] : nullptr;
}

}  // namespace thalweg
