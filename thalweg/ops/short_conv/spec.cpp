// Short convolution for tools and tests: usual sizes, natural inputs, FLOPs and bytes, error limits.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <stdexcept>

#include "testing/fields.h"
#include "testing/testing.h"
#include "thalweg/ops/short_conv/reference.h"

namespace thalweg {
namespace {

using testing::Case;
using testing::Random;
using testing::Values;

bool is_pass(const Case& c, std::string_view name) { return c.pass->name == name; }

void need(const Case& c, const char* size) {
  if (!c.sizes.count(size))
    throw std::invalid_argument(testing::pass_name(*c.pass) + ": " + size + ", got none, expected " + size +
                                "<number>");
}

void complete(Case& c) {
  auto& sizes = c.sizes;
  need(c, "D");
  sizes.try_emplace("W", 4);
  if (!is_pass(c, "decode")) {
    need(c, "T");
    sizes.try_emplace("B", 1);
    sizes.try_emplace("N", sizes["B"]);
    return;
  }
  if (sizes.count("B")) sizes.try_emplace("N", sizes["B"]);
  sizes.try_emplace("N", 1);
  sizes.try_emplace("T", 1);
  const int64_t kept = c.has("write_slots") ? std::max<int64_t>(1, sizes["T"]) : 1;
  sizes.try_emplace("M", sizes["N"] * kept);
}

void fill(const Case& c, std::map<std::string, Values>& inputs, Random&) {
  const double root = std::sqrt(double(std::max<int64_t>(1, c.size("W"))));
  for (auto& [name, values] : inputs) {
    double factor = 1;
    if (name == "x") factor = c.number("x_scale", 1);
    if (name == "weight") factor = 1 / root;
    if (name == "bias") factor = 0.3;
    if (factor != 1)
      for (double& x : values.data) x *= factor;
  }
}

double bytes_of(const Case& c) {
  double bytes = 0;
  for (const thalweg_field* field : testing::tensor_fields(*c.pass)) {
    if (!testing::is_present(c, *field)) continue;
    double count = double(testing::count(testing::shape_in(c, *field)));
    if (std::string_view(field->name) == "state") {  // read once, kept once or after every token
      const double kept = c.has("write_slots") ? double(c.size("T")) : 1;
      count *= double(c.size("N")) * (1 + kept) / double(std::max<int64_t>(1, c.size("M")));
    }
    bytes += count * double(thalweg_dtype_bytes(testing::dtype_in(c, *field)));
  }
  return bytes;
}

// The taps' multiply-adds; a SiLU is not counted.
testing::Work work(const Case& c) {
  testing::Work w;
  const double rows = double(is_pass(c, "decode") ? c.size("N") : c.size("B")) * double(c.size("T"));
  w.flops = rows * double(c.size("D")) * double(c.size("W")) * (is_pass(c, "bwd") ? 6 : 2);
  w.bytes = bytes_of(c);
  w.roof = is_pass(c, "decode") ? "scale" : "copy";
  return w;
}

// Arithmetic is float32 whatever the storage, so an output's own dtype sets the limit: a rounding to 16 bits
// costs 1.7e-3 (bf16) or 2.1e-4 (f16).
double limit(const Case& c, const std::string& output) {
  const thalweg_dtype stored = testing::dtype_in(c, *testing::find_field(*c.pass, output));
  if (stored == THALWEG_BF16) return 4e-3;
  if (stored == THALWEG_F16) return 8e-4;
  if (stored == THALWEG_F64 && c.dtype == THALWEG_F64) return 1e-13;
  return output == "d_weight" || output == "d_bias" ? 5e-6 : 2e-6;
}

constexpr const char* kKnobs = "x_scale: factor of x, which is normal otherwise";

const testing::Spec kSpecs[] = {
    {"short_conv", "fwd", complete, fill, short_conv::reference_fwd, work, limit, kKnobs, "D"},
    {"short_conv", "bwd", complete, fill, short_conv::reference_bwd, work, limit, kKnobs, "D"},
    {"short_conv", "decode", complete, fill, short_conv::reference_decode, work, limit, kKnobs, "D"},
};

}  // namespace

const testing::Spec* short_conv_spec_at(int i);
const testing::Spec* short_conv_spec_at(int i) { return i >= 0 && i < int(std::size(kSpecs)) ? &kSpecs[i] : nullptr; }

}  // namespace thalweg
