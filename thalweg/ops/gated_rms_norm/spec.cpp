// Gated RMS norm for tools and tests: usual sizes, natural inputs, FLOPs and bytes, error limits.
#include <iterator>
#include <stdexcept>

#include "testing/fields.h"
#include "testing/testing.h"
#include "thalweg/ops/gated_rms_norm/reference.h"

namespace thalweg {
namespace {

using testing::Case;
using testing::Random;
using testing::Values;

bool is_backward(const Case& c) { return std::string_view(c.pass->name) == "bwd"; }

void complete(Case& c) {
  for (const char* size : {"M", "D"})
    if (!c.sizes.count(size))
      throw std::invalid_argument(testing::pass_name(*c.pass) + ": " + size + ", got none, expected " + size +
                                  "<number>");
}

void fill(const Case& c, std::map<std::string, Values>& inputs, Random& random) {
  const int64_t D = c.size("D");
  for (auto& [name, values] : inputs) {
    if (name == "weight")
      for (double& w : values.data) w = 1 + 0.2 * w;
    if (name == "x")
      for (double& x : values.data) x *= c.number("x_scale", 1);
    if (name == "x" && c.number("zero_rows", 0) != 0)
      for (int64_t i = 0; i < values.count(); ++i)
        if (i / D % 2 == 0) values.data[size_t(i)] = 0;
    if (name == "gate")
      for (double& g : values.data) {
        g *= c.number("gate_scale", 1);
        if (c.has("gate_value")) g = random.below(2) ? c.number("gate_value", 0) : -c.number("gate_value", 0);
      }
  }
}

// Multiplies and adds of a row's elements; the activation is not counted.
testing::Work work(const Case& c) {
  testing::Work w;
  w.flops = double(c.size("M")) * double(c.size("D")) * (is_backward(c) ? 14 : 5);
  for (const thalweg_field* field : testing::tensor_fields(*c.pass))
    if (testing::is_present(c, *field))
      w.bytes += double(testing::count(testing::shape_in(c, *field))) *
                 double(thalweg_dtype_bytes(testing::dtype_in(c, *field)));
  w.roof = "copy";
  return w;
}

// Arithmetic is float32 whatever the storage, so an output's own dtype sets the limit: a rounding to 16 bits
// costs 1.7e-3 (bf16) or 2.1e-4 (f16).
double limit(const Case& c, const std::string& output) {
  // A single element times its own r is +-1 but for eps: d_x is what cancellation leaves, and is judged
  // against the plain row.
  if (output == "d_x" && c.size("D") == 1) return 0;
  const thalweg_dtype stored = testing::dtype_in(c, *testing::find_field(*c.pass, output));
  if (stored == THALWEG_BF16) return 4e-3;
  if (stored == THALWEG_F16) return 8e-4;
  if (stored == THALWEG_F64 && c.dtype == THALWEG_F64) return 1e-13;
  return output == "d_weight" ? 5e-6 : 2e-6;
}

constexpr const char* kKnobs =
    "x_scale: factor of x, which is normal otherwise; zero_rows: every second row of x is 0; "
    "gate_scale: factor of gate; gate_value: every gate is this or its negative";

const testing::Spec kSpecs[] = {
    {"gated_rms_norm", "fwd", complete, fill, gated_rms_norm::reference_fwd, work, limit, kKnobs, "M"},
    {"gated_rms_norm", "bwd", complete, fill, gated_rms_norm::reference_bwd, work, limit, kKnobs, ""},
};

}  // namespace

const testing::Spec* gated_rms_norm_spec_at(int i);
const testing::Spec* gated_rms_norm_spec_at(int i) {
  return i >= 0 && i < int(std::size(kSpecs)) ? &kSpecs[i] : nullptr;
}

}  // namespace thalweg
