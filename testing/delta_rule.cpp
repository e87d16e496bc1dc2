#include "testing/delta_rule.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

#include "testing/fields.h"

namespace thalweg::testing {
namespace {

constexpr double kChunk = 64;  // the chunk that FLOPs are counted for, whatever a kernel uses

bool is_pass(const Case& c, std::string_view name) { return c.pass->name == name; }

// ---- Sizes ----

void need(const Case& c, const char* size) {
  if (!c.sizes.count(size))
    throw std::invalid_argument(pass_name(*c.pass) + ": " + size + ", got none, expected " + size + "<number>");
}

[[noreturn]] void bad_knob(const Case& c, const std::string& knob, const std::string& expected) {
  throw std::invalid_argument(pass_name(*c.pass) + ": " + knob + ", got " + c.options.at(knob) + ", expected " +
                              expected);
}

// Values that fill() could only turn into NaN, or into nothing.
void check_knobs(const Case& c) {
  const double cosine = c.number("cos", 0), most = c.number("beta_max", 1), scale = c.number("dscale", 1);
  if (!(cosine >= 0 && cosine <= 1)) bad_knob(c, "cos", "0 to 1");
  if (!std::isfinite(most)) bad_knob(c, "beta_max", "a finite number");
  if (!std::isfinite(scale)) bad_knob(c, "dscale", "a finite number");
  for (const char* knob : {"gate", "gate_at"})
    if (c.has(knob) && !c.has("g")) bad_knob(c, knob, "it beside g");
  auto at = c.options.find("gate_at");
  if (at == c.options.end()) return;
  char* colon = nullptr;
  char* end = nullptr;
  const long long token = std::strtoll(at->second.c_str(), &colon, 10);
  if (colon != at->second.c_str() && *colon == ':') std::strtod(colon + 1, &end);
  if (!end || end == colon + 1 || *end) bad_knob(c, "gate_at", "<token>:<number>");
  if (token < 0 || token >= c.size("T"))
    bad_knob(c, "gate_at", "a token of 0 to T - 1 = " + std::to_string(c.size("T") - 1));
}

}  // namespace

void complete_delta_rule(Case& c) {
  auto& sizes = c.sizes;
  if (is_pass(c, "decode")) {
    if (sizes.count("B")) sizes.try_emplace("N", sizes["B"]);
    sizes.try_emplace("N", 1);
    sizes.try_emplace("T", 1);
    // Room for every state that a call may keep.
    int64_t kept = c.has("write_slots") ? sizes["T"] : 1;
    sizes.try_emplace("M", sizes["N"] * std::max<int64_t>(1, kept));
  } else {
    need(c, "T");
    sizes.try_emplace("B", 1);
    sizes.try_emplace("N", sizes["B"]);
  }
  need(c, "H");
  need(c, "K");
  sizes.try_emplace("HV", sizes["H"]);
  sizes.try_emplace("V", sizes["K"]);
  if (is_pass(c, "fwd")) {
    int64_t every = int64_t(c.number("every", 0));
    sizes.try_emplace("R", sizes["B"] * sizes["T"] / (every > 0 ? every : 64) + sizes["N"]);
  }
  check_knobs(c);
}

namespace {

// ---- Inputs ----

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

void normalize(double* row, int64_t n, double length) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += row[i] * row[i];
  for (int64_t i = 0; i < n; ++i) row[i] *= length / std::sqrt(sum);
}

// Rows of length 1, or of natural length where the kernel normalises.
void fill_rows(const Case& c, Values& rows) {
  const int64_t K = c.size("K");
  const double length = c.number("use_qk_l2norm", 0) != 0 ? std::sqrt(double(K)) : 1;
  for (int64_t i = 0; i < rows.count(); i += K) normalize(&rows.data[size_t(i)], K, length);
}

// Keys of one head share a direction, so that any two have about this cosine.
void correlate(const Case& c, Values& k, Random& random) {
  const int64_t K = c.size("K"), H = c.size("H");
  const double cosine = c.number("cos", 0);
  std::vector<double> common(size_t(H * K));
  for (double& x : common) x = random.normal();
  for (int64_t h = 0; h < H; ++h) normalize(&common[size_t(h * K)], K, std::sqrt(cosine));
  for (int64_t i = 0; i < k.count(); i += K) {
    normalize(&k.data[size_t(i)], K, std::sqrt(1 - cosine));
    for (int64_t j = 0; j < K; ++j) k.data[size_t(i + j)] += common[size_t(i / K % H * K + j)];
  }
}

// Numbers of a knob joined by '/'; "-inf" is one.
std::vector<double> numbers_of(const Case& c, const std::string& knob) {
  std::vector<double> numbers;
  auto it = c.options.find(knob);
  if (it == c.options.end()) return numbers;
  for (const std::string& word : split(it->second, '/')) {
    char* end = nullptr;
    numbers.push_back(std::strtod(word.c_str(), &end));
    if (word.empty() || *end)
      throw std::invalid_argument(pass_name(*c.pass) + ": '" + knob + "=" + it->second + "': got '" + word +
                                  "', expected a number");
  }
  return numbers;
}

// g is [B T HV] or [B T HV K].
void fill_gate(const Case& c, Values& g, Random& random) {
  const int64_t HV = c.size("HV"), T = c.size("T"), channels = g.shape.size() == 4 ? g.shape[3] : 1;
  if (c.number("use_gate", 0) == 0)  // heads of different memory: means -0.1, -0.2, -0.4
    for (int64_t i = 0; i < g.count(); ++i) {
      double& x = g.data[size_t(i)];
      x = -std::log1p(std::exp(-x)) / double(8 >> (i / channels % HV % 3));
    }
  std::vector<double> constants = numbers_of(c, "gate");
  if (!constants.empty())
    for (double& x : g.data) x = constants[size_t(random.below(int64_t(constants.size())))];
  auto at = c.options.find("gate_at");
  if (at == c.options.end()) return;
  const int64_t token = std::atoll(at->second.c_str());  // check_knobs() saw <token>:<number>
  const double value = std::strtod(at->second.c_str() + at->second.find(':') + 1, nullptr);
  for (int64_t i = 0; i < g.count(); ++i)
    if (i / (channels * HV) % T == token) g.data[size_t(i)] = value;
}

void fill_beta(const Case& c, Values& beta) {
  std::vector<double> constant = numbers_of(c, "beta_value");
  const double most = c.number("beta_max", 1);
  for (double& x : beta.data) {
    if (!constant.empty())
      x = constant[0];
    else if (c.number("use_beta_sigmoid", 0) == 0)
      x = most * sigmoid(x);
  }
}

}  // namespace

void fill_delta_rule(const Case& c, std::map<std::string, Values>& inputs, Random& random) {
  if (c.has("cos")) correlate(c, inputs.at("k"), random);
  fill_rows(c, inputs.at("q"));
  fill_rows(c, inputs.at("k"));
  for (auto& [name, values] : inputs) {
    if (name == "g") fill_gate(c, values, random);
    if (name == "beta") fill_beta(c, values);
    if (name == "A_log")
      for (double& x : values.data) x = std::log(1e-3 + 16 * random.uniform());
    if (name == "dt_bias")
      for (double& x : values.data) {
        double dt = std::exp(std::log(1e-3) + random.uniform() * std::log(1e2));
        x = dt + std::log(-std::expm1(-dt));
      }
    if (name == "initial_state" || name == "state")
      for (double& x : values.data) x *= 0.3;
    if (name == "d_o" || name == "d_final_state")
      for (double& x : values.data) x *= c.number("dscale", 1);
  }
}

// ---- Work ----

namespace {

double bytes_of(const Case& c) {
  double bytes = 0;
  for (const thalweg_field* field : tensor_fields(*c.pass)) {
    if (!is_present(c, *field)) continue;
    double elements = double(count(shape_in(c, *field)));
    if (std::string_view(field->name) == "state") {
      double kept = c.has("write_slots") ? double(c.size("T")) : 1;
      elements = elements / double(std::max<int64_t>(1, c.size("M"))) * double(c.size("N")) * (1 + kept);
    }
    bytes += elements * double(thalweg_dtype_bytes(dtype_in(c, *field)));
  }
  return bytes;
}

}  // namespace

// One FMA is two. Chunkwise with triangles counted once, as docs/benchmarking.md says.
Work work_of_delta_rule(const Case& c) {
  const double K = double(c.size("K")), V = double(c.size("V")), G = double(c.size("HV")) / double(c.size("H"));
  const double C = kChunk, heads = double(c.size("HV")) * double(c.size("T"));
  Work w;
  w.bytes = bytes_of(c);
  w.roof = is_pass(c, "decode") ? "scale" : "fma";
  if (is_pass(c, "fwd")) w.flops = double(c.size("B")) * heads * (6 * K * V + 2 * C * V + 2 * C * K / G);
  if (is_pass(c, "bwd")) w.flops = double(c.size("B")) * heads * (16 * K * V + 5 * C * V + 4 * C * K + 2 * C * K / G);
  if (is_pass(c, "decode")) w.flops = double(c.size("N")) * heads * 7 * K * V;
  return w;
}

// ---- Limits ----

namespace {

// d_g and its kin sum products of many terms that cancel.
bool is_scalar_gradient(const std::string& output) {
  return output == "d_g" || output == "d_beta" || output == "d_A_log" || output == "d_dt_bias";
}

// Rows whose matrix products take 16-bit operands: what rounding them costs shows in every output, in float32 ones too.
// With nearly parallel keys and strong writes it grows as the problem's condition does (measured in bf16: o 1.1e-2, states
// 1.4e-2, gradients 1.3e-2).
double limit_of_products(const Case& c, const std::string& output) {
  const bool hard = c.has("cos") || c.number("beta_max", 1) > 1, gradient = output.starts_with("d_");
  const double bf16 = hard ? 2e-2 : gradient ? 8e-3 : 5e-3;
  return c.dtype == THALWEG_F16 ? bf16 / 5 : bf16;
}

}  // namespace

// Arithmetic is float32 whatever the storage, so an output's own dtype sets the limit: a rounding to 16 bits
// costs 1.7e-3 (bf16) or 2.1e-4 (f16).
double limit_of_delta_rule(const Case& c, const std::string& output) {
  if (c.kernel.starts_with("sm90_chunk")) return limit_of_products(c, output);
  // Here rounding grows with the problem's own condition: at most 4 times the plain recurrence's error.
  if (c.has("cos") || c.number("beta_max", 1) > 1) return 0;
  const bool scalar = is_scalar_gradient(output);
  if (c.dtype == THALWEG_F64) {
    // With a decay per key channel the sum for A_log has K times as many terms.
    const bool per_channel = output == "d_A_log" && words(find_field(*c.pass, "g")->dims).size() == 4;
    return per_channel ? 3e-14 : scalar ? 6e-15 : 2e-15;
  }
  switch (dtype_in(c, *find_field(*c.pass, output))) {
    case THALWEG_BF16:
      return output == "o" || output == "final_state" || output == "state" ? 4e-3 : 6e-3;
    case THALWEG_F16:
      return 8e-4;
    default:
      // A sum over all tokens and channels, which may nearly cancel.
      if (output == "d_A_log") return -5e-6;
      return scalar ? 5e-6 : 2e-6;
  }
}

}  // namespace thalweg::testing
