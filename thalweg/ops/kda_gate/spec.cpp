// KDA gate for tools and tests: usual sizes, natural inputs, FLOPs and bytes, error limits, rules on elements.
#include <cmath>
#include <iterator>
#include <stdexcept>

#include "testing/fields.h"
#include "testing/testing.h"
#include "thalweg/ops/kda_gate/reference.h"

namespace thalweg {
namespace {

using testing::Case;
using testing::Random;
using testing::Values;

void complete(Case& c) {
  c.sizes.try_emplace("B", 1);
  c.sizes.try_emplace("L", 1);
  for (const char* size : {"T", "HV", "K"})
    if (!c.sizes.count(size))
      throw std::invalid_argument(testing::pass_name(*c.pass) + ": " + size + ", got none, expected " + size +
                                  "<number>");
}

// As models start: A_log the logarithm of 1 to 16, dt_bias the inverse softplus of 0.001 to 0.1.
void fill(const Case& c, std::map<std::string, Values>& inputs, Random& random) {
  for (auto& [name, values] : inputs)
    for (double& v : values.data) {
      if (name == "A_log") v = c.has("A_log_value") ? c.number("A_log_value", 0) : std::log(1 + 15 * random.uniform());
      if (name == "dt_bias") v = std::log(std::expm1(std::exp(std::log(1e-3) + std::log(100.0) * random.uniform())));
      if (name == "x") {
        v = v * c.number("x_scale", 1) + c.number("x_shift", 0);
        if (c.has("x_value")) v = random.below(2) ? c.number("x_value", 0) : -c.number("x_value", 0);
      }
    }
}

// An exponential, a logarithm or a division, and what is around them, as 30 operations; the slope 6 more.
testing::Work work(const Case& c) {
  testing::Work w;
  w.flops = 30;
  if (std::string_view(c.pass->name) == "bwd") w.flops += 6;
  for (const char* size : {"B", "T", "L", "HV", "K"}) w.flops *= double(c.size(size));
  for (const thalweg_field* field : testing::tensor_fields(*c.pass))
    if (testing::is_present(c, *field))
      w.bytes += double(testing::count(testing::shape_in(c, *field))) *
                 double(thalweg_dtype_bytes(testing::dtype_in(c, *field)));
  // In float32 a copy bounds it; 16 bits in and out, the functions do.
  const thalweg_field* output = testing::find_field(*c.pass, "g");
  const bool half = output && thalweg_dtype_bytes(testing::dtype_in(c, *output)) == 2 && thalweg_dtype_bytes(c.dtype) == 2;
  w.roof = half ? "exp_log" : "copy";
  return w;
}

thalweg_dtype stored(const Case& c, const std::string& output) {
  return testing::dtype_in(c, *testing::find_field(*c.pass, output));
}

// Arithmetic is float32 whatever the storage, so an output's own dtype sets the limit: a rounding to 16 bits
// costs 1.7e-3 (bf16) or 2.1e-4 (f16). Far from 0, e^y magnifies the rounding of y by |y| (and of a y by |a y|): there
// the limits are those of the rule 'relative'. Sums may cancel.
double limit(const Case& c, const std::string& output) {
  const thalweg_dtype dtype = stored(c, output);
  const bool far = c.has("x_value") || c.has("x_shift") || c.has("x_scale");
  if (dtype == THALWEG_BF16) return 4e-3;
  if (dtype == THALWEG_F16) return 8e-4;
  if (dtype == THALWEG_F64 && c.dtype == THALWEG_F64) return 1e-13;
  if (far) return c.number("lower_bound", 0) == 0 ? 1e-5 : 2e-5;
  return output == "d_A_log" || output == "d_dt_bias" ? 5e-6 : 1e-6;
}

// The original's criterion, and the relative error that float32 promises of g down to 1e-30.
std::vector<testing::Rule> rules(const Case& c, const std::string& output) {
  if (output != "g" && output != "d_x") return {};
  std::vector<testing::Rule> list = {{.name = "close", .atol = 1e-3, .rtol = c.number("rtol", 1e-3), .ulps = 1}};
  const bool bounded = c.number("lower_bound", 0) != 0;
  if (output == "g" && stored(c, "g") == THALWEG_F32)
    list.push_back({.name = "relative", .rtol = bounded ? 2e-5 : 1e-5, .floor = 1e-30});
  return list;
}

constexpr const char* kKnobs =
    "x_scale: factor of x, which is normal otherwise; x_shift: added to x; x_value: every x is this or its negative; "
    "A_log_value: every A_log; rtol: of the rule 'close', 1e-3 unless given";

const testing::Spec kSpecs[] = {
    {"kda_gate", "fwd", complete, fill, kda_gate::reference_fwd, work, limit, kKnobs, "", rules},
    {"kda_gate", "bwd", complete, fill, kda_gate::reference_bwd, work, limit, kKnobs, "", rules},
};

}  // namespace

const testing::Spec* kda_gate_spec_at(int i);
const testing::Spec* kda_gate_spec_at(int i) {
  return i >= 0 && i < int(std::size(kSpecs)) ? &kSpecs[i] : nullptr;
}

}  // namespace thalweg
