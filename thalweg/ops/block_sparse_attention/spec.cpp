// Block-sparse attention for tools and tests: usual sizes, masks and inputs, FLOPs and bytes, error limits.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "testing/case.h"
#include "testing/fields.h"
#include "testing/testing.h"
#include "thalweg/ops/block_sparse_attention/block_sparse_attention.h"
#include "thalweg/ops/block_sparse_attention/reference.h"

namespace thalweg {
namespace {

using testing::Case;
using testing::Random;
using testing::Values;
using Fwd = thalweg_block_sparse_attention_fwd_args;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
bool is_bwd(const Case& c) { return std::string_view(c.pass->name) == "bwd"; }
int64_t block_of(const Case& c, const char* option) {
  const int64_t block = int64_t(c.number(option, 0));
  return block > 0 ? block : 128;
}

[[noreturn]] void bad_knob(const Case& c, const std::string& knob, const std::string& expected) {
  throw std::invalid_argument(testing::pass_name(*c.pass) + ": " + knob + ", got " + c.options.at(knob) +
                              ", expected " + expected);
}

// ---- Sizes ----

// "bigbird", or "random:0.25" as name and number.
struct Pattern {
  std::string name;
  double number;
};
Pattern pattern_of(const Case& c) {
  auto it = c.options.find("mask");
  const std::string text = it == c.options.end() ? "dense" : it->second;
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon), rest = colon == std::string::npos ? "" : text.substr(colon + 1);
  char* end = nullptr;
  const double number = std::strtod(rest.c_str(), &end);
  const bool has_number = name == "window" || name == "random" || name == "diagonal";
  const bool known = has_number || name == "dense" || name == "none" || name == "causal" || name == "bigbird";
  if (!known || *end || rest.empty() == has_number || !(number >= 0) || (name != "window" && number > 1))
    bad_knob(c, "mask", "dense, none, causal, bigbird, window:<tokens>, random:<density> or diagonal:<density>");
  return {name, number};
}

// Tokens in use of each sequence: of its queries or of its keys.
std::vector<int64_t> lengths(const Case& c, bool queries) {
  const bool packed = c.has("varlen") || c.has("cu_seqlens");
  const char *knob = queries ? "lens_q" : "lens_k", *tensor = queries ? "q_lens" : "k_lens";
  std::vector<int64_t> tokens(size_t(c.size("N")), c.size(queries ? "T" : "S"));
  if (packed) tokens = queries ? testing::lengths_of(c) : testing::key_lengths_of(c);
  tokens.resize(size_t(c.size("N")));
  if (!c.has(tensor)) return tokens;
  auto it = c.options.find(knob);
  const std::vector<std::string> words =
      it == c.options.end() ? std::vector<std::string>{} : testing::split(it->second, '+');
  for (size_t n = 0; n < tokens.size(); ++n) {
    int64_t wanted = tokens[n] - int64_t(n);  // sequences of different lengths
    if (n < words.size()) {
      char* end = nullptr;
      wanted = std::strtoll(words[n].c_str(), &end, 10);
      if (words[n].empty() || *end || wanted < 0) bad_knob(c, knob, "lengths of 0 or more joined by +");
    }
    tokens[n] = std::clamp<int64_t>(wanted, 0, tokens[n]);
  }
  return tokens;
}

void complete(Case& c) {
  auto& sizes = c.sizes;
  auto need = [&](const char* size) {
    if (!sizes.count(size))
      throw std::invalid_argument(testing::pass_name(*c.pass) + ": " + size + ", got none, expected " + size +
                                  "<number>");
  };
  need("T"), need("H"), need("K");
  sizes.try_emplace("B", 1);
  sizes.try_emplace("N", sizes["B"]);
  sizes.try_emplace("S", sizes["T"]);
  sizes.try_emplace("HK", sizes["H"]);
  sizes.try_emplace("HM", sizes["H"]);
  sizes.try_emplace("V", sizes["K"]);
  sizes.try_emplace("NQ", ceil_div(sizes["T"], block_of(c, "block_q")));
  sizes.try_emplace("NK", ceil_div(sizes["S"], block_of(c, "block_k")));
  if (c.has("lens_q")) c.options.try_emplace("q_lens", "");
  if (c.has("lens_k")) c.options.try_emplace("k_lens", "");
  pattern_of(c);
  lengths(c, true), lengths(c, false);
  if (!std::isfinite(c.number("dscale", 1))) bad_knob(c, "dscale", "a finite number");
  if (!std::isfinite(c.number("amp", 1))) bad_knob(c, "amp", "a finite number");
}

// ---- Masks ----

// Whether block (i, j) of a mask row of queries [r0, r1] and keys [c0, c1] is kept, by the pattern alone.
bool kept(const Pattern& p, int64_t i, int64_t j, int64_t r0, int64_t r1, int64_t c0, int64_t c1, int64_t block_k) {
  if (p.name == "dense") return true;
  if (p.name == "causal") return c0 <= r1;
  if (p.name == "window") return c0 <= r1 + int64_t(p.number) && c1 >= r0 - int64_t(p.number);
  if (p.name == "bigbird") return i == 0 || j == 0 || (c0 <= r1 + block_k && c1 >= r0 - block_k);
  return false;
}

// [N HM NQ NK] of the case, from its seed.
Values make_mask(const Case& c) {
  const int64_t N = c.size("N"), HM = c.size("HM"), NQ = c.size("NQ"), NK = c.size("NK");
  const int64_t T = c.size("T"), S = c.size("S"), bq = block_of(c, "block_q"), bk = block_of(c, "block_k");
  const Pattern p = pattern_of(c);
  const double value = c.number("mask_value", 1);
  Random random(c.seed ^ 0x6d61736bu);
  Values mask{{N, HM, NQ, NK}, std::vector<double>(size_t(N * HM * NQ * NK), 0.0)};
  for (int64_t n = 0, at = 0; n < N * HM; ++n)
    for (int64_t i = 0; i < NQ; ++i, at += NK) {
      double* row = mask.data.data() + at;
      const int64_t r0 = i * bq, r1 = std::max(r0, std::min(T, r0 + bq) - 1);
      for (int64_t j = 0; j < NK; ++j) {
        const int64_t c0 = j * bk, c1 = std::max(c0, std::min(S, c0 + bk) - 1);
        bool keep = kept(p, i, j, r0, r1, c0, c1, bk);
        if (p.name == "random" || p.name == "diagonal") keep = random.uniform() < p.number;
        if (p.name == "diagonal") keep = keep || j == std::min(r0 / bk, NK - 1);
        if (c.has("holes")) keep = keep && i != 1 && j != 0;
        row[j] = keep ? value : 0;
      }
      for (int e = 0; e < 3 && p.name == "bigbird" && NK > 0; ++e) row[random.below(NK)] = value;
    }
  return mask;
}

// ---- Inputs ----

// The value that the case's storage holds.
void round_as_stored(const Case& c, const char* name, Values* v) {
  const thalweg_dtype dtype = testing::dtype_in(c, *testing::find_field(*c.pass, name));
  for (double& x : v->data) {
    double room = 0;
    testing::store(&room, dtype, 0, x);
    x = testing::load(&room, dtype, 0);
  }
}

thalweg_tensor tensor_of(Values& v) {
  thalweg_tensor t{};
  t.data = v.data.data();
  t.dtype = THALWEG_F64;
  t.rank = int32_t(v.shape.size());
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.shape[i] = v.shape[size_t(i)];
    t.stride[i] = stride;
    stride *= t.shape[i];
  }
  return t;
}

// Inputs that are integers, kept where the oracle can read them.
template <class E>
struct Integers {
  std::vector<E> data;
  thalweg_tensor view(const Values& v, thalweg_dtype dtype) {
    for (double x : v.data) data.push_back(E(int64_t(x)));
    Values shape_only{v.shape, {}};
    thalweg_tensor t = tensor_of(shape_only);
    t.data = data.data();
    t.dtype = dtype;
    return t;
  }
};

// Whether the library takes these sizes; the oracle, which checks nothing, is not asked otherwise.
bool is_consistent(const Case& c) {
  const int64_t B = c.size("B"), N = c.size("N"), H = c.size("H"), HK = c.size("HK"), HM = c.size("HM");
  const bool packed = testing::is_present(c, *testing::find_field(*c.pass, "cu_seqlens"));
  if (packed ? B != 1 : N != B) return false;
  for (const auto& borders : {testing::lengths_of(c), testing::key_lengths_of(c)})
    if (packed && int64_t(borders.size()) != N) return false;
  const int64_t queries = c.size("NQ") * block_of(c, "block_q"), keys = c.size("NK") * block_of(c, "block_k");
  for (int64_t used : lengths(c, true))
    if (used > queries) return false;
  for (int64_t used : lengths(c, false))
    if (used > keys) return false;
  return HK > 0 && H % HK == 0 && (HM == H || HM == HK || HM == 1);
}

// What a forward of these inputs hands to the backward: o, and the statistics.
void fill_forward(const Case& c, std::map<std::string, Values>& inputs) {
  Fwd args{};
  Values o{inputs.at("o").shape, std::vector<double>(inputs.at("o").data.size())};
  const std::vector<int64_t> rows(o.shape.begin(), o.shape.end() - 1);
  const size_t count = size_t(testing::count(rows));
  Values lse{rows, std::vector<double>(count)}, row_max = lse, row_sum = lse;
  for (const char* name : {"q", "k", "v", "sink"})
    if (inputs.count(name)) round_as_stored(c, name, &inputs.at(name));
  args.q = tensor_of(inputs.at("q")), args.k = tensor_of(inputs.at("k")), args.v = tensor_of(inputs.at("v"));
  if (inputs.count("sink")) args.sink = tensor_of(inputs.at("sink"));
  Integers<uint8_t> mask;
  args.block_mask = mask.view(inputs.at("block_mask"), THALWEG_U8);
  Integers<int64_t> cu, cu_k, q_lens, k_lens;
  if (inputs.count("cu_seqlens")) args.cu_seqlens = cu.view(inputs.at("cu_seqlens"), THALWEG_I64);
  if (inputs.count("cu_seqlens_k")) args.cu_seqlens_k = cu_k.view(inputs.at("cu_seqlens_k"), THALWEG_I64);
  if (inputs.count("q_lens")) args.q_lens = q_lens.view(inputs.at("q_lens"), THALWEG_I64);
  if (inputs.count("k_lens")) args.k_lens = k_lens.view(inputs.at("k_lens"), THALWEG_I64);
  args.o = tensor_of(o), args.lse = tensor_of(lse);
  args.row_max = tensor_of(row_max), args.row_sum = tensor_of(row_sum);
  args.scale = c.number("scale", 0);
  args.block_q = int64_t(c.number("block_q", 0)), args.block_k = int64_t(c.number("block_k", 0));
  args.causal = int32_t(c.number("causal", 0));
  block_sparse_attention::reference_fwd(&args);
  auto dead = c.options.find("dead");  // how queries that see nothing are marked
  if (dead != c.options.end())
    for (double& x : lse.data)
      if (std::isinf(x)) x = std::strtod(dead->second.c_str(), nullptr);
  inputs.at("o") = std::move(o);
  if (inputs.count("lse")) inputs.at("lse") = std::move(lse);
  if (inputs.count("row_max")) inputs.at("row_max") = std::move(row_max);
  if (inputs.count("row_sum")) inputs.at("row_sum") = std::move(row_sum);
}

void fill(const Case& c, std::map<std::string, Values>& inputs, Random& random) {
  const double amp = c.number("amp", 1), dscale = c.number("dscale", 1);
  for (auto& [name, values] : inputs) {
    const bool gradient = name == "d_o" || name == "d_lse";
    if (!gradient && name != "q" && name != "k" && name != "v") continue;
    for (double& x : values.data) {
      if (c.has("uniform")) x = 2 * random.uniform() - 1;
      x *= gradient ? dscale : amp;
    }
  }
  inputs.at("block_mask") = make_mask(c);
  for (bool queries : {true, false}) {
    auto it = inputs.find(queries ? "q_lens" : "k_lens");
    const std::vector<int64_t> used = lengths(c, queries);
    if (it != inputs.end()) it->second.data.assign(used.begin(), used.end());
  }
  if (is_bwd(c) && is_consistent(c)) fill_forward(c, inputs);
}

// ---- Work ----

// (query, key) pairs that are seen, over all heads.
double count_pairs(const Case& c) {
  const int64_t N = c.size("N"), HM = c.size("HM"), NQ = c.size("NQ"), NK = c.size("NK");
  const int64_t bq = block_of(c, "block_q"), bk = block_of(c, "block_k");
  const bool causal = c.number("causal", 0) != 0;
  const std::vector<int64_t> q = lengths(c, true), k = lengths(c, false);
  const Values mask = make_mask(c);
  double pairs = 0;
  for (int64_t n = 0; n < N; ++n)
    for (int64_t line = 0; line < HM * NQ; ++line) {
      const int64_t r0 = line % NQ * bq, r1 = std::min(r0 + bq, q[size_t(n)]), off = k[size_t(n)] - q[size_t(n)];
      for (int64_t j = 0; j < NK && r0 < r1; ++j) {
        if (mask.data[size_t((n * HM * NQ + line) * NK + j)] == 0) continue;
        const int64_t c0 = j * bk, c1 = std::min(c0 + bk, k[size_t(n)]);
        if (c0 >= c1) continue;
        if (!causal) pairs += double(r1 - r0) * double(c1 - c0);
        for (int64_t t = r0; t < r1 && causal; ++t) pairs += double(std::clamp<int64_t>(t + off + 1 - c0, 0, c1 - c0));
      }
    }
  return pairs * double(c.size("H")) / double(std::max<int64_t>(1, HM));
}

// Products of pairs only, each once: two forward, five backward.
testing::Work work(const Case& c) {
  const double K = double(c.size("K")), V = double(c.size("V")), pairs = count_pairs(c);
  testing::Work w;
  w.flops = pairs * (is_bwd(c) ? 6 * K + 4 * V : 2 * K + 2 * V);
  for (const thalweg_field* field : testing::tensor_fields(*c.pass))
    if (testing::is_present(c, *field))
      w.bytes += double(testing::count(testing::shape_in(c, *field))) *
                 double(thalweg_dtype_bytes(testing::dtype_in(c, *field)));
  w.roof = "fma";
  return w;
}

// ---- Limits ----

double limit(const Case& c, const std::string& output) {
  if (c.has("amp")) return 0;  // peaky: rounding of scores grows with them
  if (c.dtype == THALWEG_F64) return 2e-14;
  // Rows of bf16 products round weights and slopes to bf16, which costs what rounding the output costs, and more where
  // the sums of all of a few elements happen to cancel. Statistics are as of other rows.
  const thalweg_field& field = *testing::find_field(*c.pass, output);
  if (c.kernel.starts_with("cpu_tile") && output != "d_sink" && testing::dtype_in(c, field) == THALWEG_BF16)
    return testing::count(testing::shape_in(c, field)) < 128 ? 2.4e-2 : 8e-3;
  switch (testing::dtype_in(c, field)) {
    case THALWEG_BF16:
      return 4e-3;
    case THALWEG_F16:
      return 8e-4;
    default:
      return output == "d_sink" ? 5e-6 : 2e-6;
  }
}

// Of the 16-bit outputs: 99 of 100 elements within a mixed tolerance, and every one within a cap.
std::vector<testing::Rule> rules(const Case& c, const std::string& output) {
  const thalweg_dtype dtype = testing::dtype_in(c, *testing::find_field(*c.pass, output));
  if (output == "d_sink" || (dtype != THALWEG_F16 && dtype != THALWEG_BF16)) return {};
  const double tolerance = dtype == THALWEG_F16 ? 0x1p-9 : 0x1p-6, cap = dtype == THALWEG_F16 ? 0.1 : 1;
  return {{.name = "matched", .atol = tolerance, .rtol = tolerance, .share = 0.99},
          {.name = "cap", .atol = cap, .ulps = 32}};
}

constexpr const char* kKnobs =
    "mask: dense (default), none, causal, bigbird, window:<tokens>, random:<density>, or diagonal:<density> (random "
    "with one block of every row kept); "
    "holes: the second row and the first column of every mask are emptied; "
    "mask_value: the byte of a kept block; "
    "lens_q: query tokens in use of each sequence, joined by +; "
    "lens_k: key tokens likewise; "
    "uniform: inputs uniform in (-1, 1) instead of normal; "
    "amp: factor of q, k and v; "
    "dscale: factor of d_o and d_lse; "
    "dead: lse of queries that see nothing: inf, -inf or nan";

const testing::Spec kSpecs[] = {
    {"block_sparse_attention", "fwd", complete, fill, block_sparse_attention::reference_fwd, work, limit, kKnobs,
     "HK H HM", rules},
    {"block_sparse_attention", "bwd", complete, fill, block_sparse_attention::reference_bwd, work, limit, kKnobs,
     "HK H HM", rules},
};

}  // namespace

const testing::Spec* block_sparse_attention_spec_at(int i);
const testing::Spec* block_sparse_attention_spec_at(int i) {
  return i >= 0 && i < int(std::size(kSpecs)) ? &kSpecs[i] : nullptr;
}

}  // namespace thalweg
