// Finite differences: every gradient of every backward, by its forward, in float64, for all pairs of
// optional inputs and of flags. Checked for the oracle and for each kernel row that takes float64.
#include <cmath>

#include "tests/properties.h"

namespace thalweg::tests {
namespace {

namespace tt = thalweg::testing;

// An operator whose forward has a loss of its own (lists of keys have no gradient): that.
const thalweg_pass* forward_of(const thalweg_pass& bwd) {
  if (std::string_view(bwd.name) != "bwd") return nullptr;
  const thalweg_pass* loss = find_pass(std::string(bwd.op) + ".loss");
  return loss ? loss : find_pass(std::string(bwd.op) + ".fwd");
}

// The forward of a backward's case: the same inputs, and each output that the backward has a gradient of.
// A gradient asked of an absent input is that at zero, so the input is there, and zero.
Case forward_case(const Case& bwd, const thalweg_pass& fwd) {
  Case c = bwd;
  c.pass = &fwd;
  c.kernel = "";
  c.threads = 1;
  for (auto it = c.options.begin(); it != c.options.end();) {
    const thalweg_field* field = tt::find_field(fwd, it->first);
    bool keep = (field && !(field->kind == THALWEG_TENSOR && tt::is_output(*field))) || it->first == "varlen" || it->first == "varlen_k";
    it = keep ? std::next(it) : c.options.erase(it);
  }
  for (const thalweg_field* field : tt::tensor_fields(*bwd.pass)) {
    if (!tt::is_present(bwd, *field) || !std::string_view(field->name).starts_with("d_")) continue;
    const thalweg_field* of = tt::find_field(fwd, field->name + 2);
    if (of && of->optional && !tt::is_present(c, *of)) c.options[of->name] = "";
  }
  return c;
}

class Loss {
 public:
  Loss(const Case& c, const Problem& bwd) : problem_(c), inputs_(problem_.inputs()) {
    for (auto& [name, values] : inputs_) {
      auto it = bwd.inputs().find(name);
      if (it != bwd.inputs().end()) values = it->second;
      else
        for (double& x : values.data) x = 0;
      problem_.set(name, values);
    }
    for (const auto& [name, values] : bwd.inputs())
      if (name.starts_with("d_")) weights_[name.substr(2)] = values;
  }

  const Values& input(const std::string& name) const { return inputs_.at(name); }

  long double at(const std::string& name, const Values& values) {
    problem_.set(name, values);
    EXPECT_EQ(problem_.call(), THALWEG_OK) << thalweg_last_error();
    problem_.set(name, inputs_.at(name));
    long double sum = 0;
    for (const auto& [out, weight] : weights_) {
      Values got = problem_.read(out);
      for (size_t i = 0; i < got.data.size(); ++i)
        // Constants: the log of an empty sum; a row of no sequence, whose weight a case may have made NaN.
        if (got.data[i] != -INFINITY && std::isfinite(weight.data[i])) sum += (long double)(got.data[i]) * weight.data[i];
    }
    return sum;
  }

 private:
  Problem problem_;
  std::map<std::string, Values> inputs_, weights_;
};

// d loss / d values, element by element.
Values differences(Loss& loss, const std::string& name) {
  const double h = 1e-5;
  Values x = loss.input(name), gradient = x;
  for (size_t i = 0; i < x.data.size(); ++i) {
    double middle = x.data[i];
    x.data[i] = middle + h;
    long double above = loss.at(name, x);
    x.data[i] = middle - h;
    long double below = loss.at(name, x);
    x.data[i] = middle;
    gradient.data[i] = double((above - below) / (2 * h));
  }
  return gradient;
}

double rms(const Values& v) {
  double sum = 0;
  for (double x : v.data) sum += x * x;
  return std::sqrt(sum / double(std::max<int64_t>(1, v.count())));
}

// Ratio with a floor: a gradient that is exactly zero is known to about 1e-8 by differences.
void expect_close(const Values& got, const Values& want, const std::string& what, double limit) {
  double worst = 0;
  for (size_t i = 0; i < want.data.size(); ++i) worst = std::max(worst, std::fabs(got.data[i] - want.data[i]));
  EXPECT_LE(worst, limit * (rms(want) + 0.01)) << what;
}

// Compares every requested gradient. False when the case is refused.
bool check_case(const Case& bwd_case, const thalweg_pass& fwd) {
  Problem problem(bwd_case);
  if (problem.call() == THALWEG_INVALID_ARGUMENT) return false;
  SCOPED_TRACE("  thalweg verify " + bwd_case.text());
  Outputs oracle = tt::run_reference(problem);
  Loss loss(forward_case(bwd_case, fwd), problem);
  std::map<std::string, Values> want;
  for (const auto& [name, values] : oracle) {
    if (!name.starts_with("d_")) continue;  // no gradient
    want[name] = differences(loss, name.substr(2));
    expect_close(values, want[name], "oracle: " + name, 2e-7);
  }
  for (const std::string& row : kernel_rows(*bwd_case.pass)) {
    Case forced = with_kernel(bwd_case, row);
    if (!takes(forced)) continue;
    Outputs got = run(forced);
    for (const auto& [name, values] : got)
      if (name.starts_with("d_")) expect_close(values, want[name], row + ": " + name, 2e-7);
  }
  return true;
}

// Differences need steps that no storage rounds away: every tensor in float64, contiguous.
Case all_float64(Case c) {
  c.dtype = THALWEG_F64;
  for (auto& [name, value] : c.options) {
    const thalweg_field* field = tt::find_field(*c.pass, name);
    if (field && field->kind == THALWEG_TENSOR && !tt::is_integer(tt::dtype_in(c, *field))) value = "";
  }
  return c;
}

// Float64 cases cut to a few tokens.
std::vector<Case> tiny_cases(const thalweg_pass& pass) {
  std::vector<Case> cases;
  for (Case c : pass_cases(pass, {"smoke", "ci"}, 1e8)) {
    if (c.dtype != THALWEG_F64 || is_packed(c)) continue;
    c = all_float64(c);
    for (const char* size : {"T", "M"})
      if (c.sizes.count(size)) c.sizes[size] = std::min<int64_t>(c.sizes[size], 4);
    for (const char* size : {"K", "V", "D"})
      if (c.sizes.count(size)) c.sizes[size] = std::min<int64_t>(c.sizes[size], size[0] == 'K' ? 4 : 3);
    cases.push_back(c);
    c.sizes.count("T") ? c.sizes["T"] = 2 : c.sizes["M"] = 1;  // shorter than a convolution's window
    cases.push_back(c);
  }
  return cases;
}

void every_gradient(const thalweg_pass& bwd) {
  const thalweg_pass* fwd = forward_of(bwd);
  if (!fwd) return;
  std::vector<Case> cases = tiny_cases(bwd);
  EXPECT_FALSE(cases.empty()) << "no float64 case in smoke or ci";
  for (const Case& c : cases) EXPECT_TRUE(check_case(c, *fwd)) << thalweg_last_error();
}

// All pairs of optional tensors taken away, all pairs of flags and choices turned.
void every_pair(const thalweg_pass& bwd) {
  const thalweg_pass* fwd = forward_of(bwd);
  if (!fwd) return;
  int checked = 0;
  std::vector<Case> cases = tiny_cases(bwd);
  for (size_t i = 0; i < cases.size(); i += 2) {
    const Case& c = cases[i];
    std::vector<std::map<std::string, std::string>> changes = {{}};
    for (const thalweg_field* field : tt::tensor_fields(bwd)) {
      if (!field->optional) continue;
      changes.push_back(c.has(field->name) ? std::map<std::string, std::string>{{std::string("-") + field->name, ""}, {std::string("-d_") + field->name, ""}}
                                           : std::map<std::string, std::string>{{field->name, ""}});
    }
    for (int64_t f = 0; f < bwd.num_fields; ++f) {
      const thalweg_field& field = bwd.fields[f];
      if (field.kind == THALWEG_FLAG) changes.push_back({{field.name, c.number(field.name, 0) != 0 ? "0" : "1"}});
      if (field.kind == THALWEG_CHOICE)
        for (const std::string& word : tt::words(field.choices)) changes.push_back({{field.name, word}});
    }
    for (size_t a = 0; a < changes.size(); ++a)
      for (size_t b = 0; b <= a; ++b) checked += check_case(with(with(c, changes[a]), changes[b]), *fwd);
  }
  EXPECT_GT(checked, 10);
}

// <d_out, J dx> = <J^T d_out, dx> along random directions, on cases of several chunks and packed ones.
void adjoint(const thalweg_pass& bwd) {
  const thalweg_pass* fwd = forward_of(bwd);
  if (!fwd) return;
  for (Case c : pass_cases(bwd, {"smoke", "ci"}, 3e7)) {
    if (tt::count(tt::shape_in(c, *tt::tensor_fields(bwd)[0])) == 0) continue;
    c = all_float64(c);
    c.threads = 1;
    Problem problem(c);
    Outputs gradients = run(problem);
    Loss loss(forward_case(c, *fwd), problem);
    Random random(3);
    for (const auto& [name, gradient] : gradients) {
      if (!name.starts_with("d_")) continue;
      Values up = loss.input(name.substr(2)), down = up;
      long double along = 0;
      double size = 0;
      const double h = 1e-6;
      for (size_t i = 0; i < up.data.size(); ++i) {
        double dx = random.normal(), step = h * dx;
        up.data[i] += step;
        down.data[i] -= step;
        along += (long double)(gradient.data[i]) * dx;
        size += gradient.data[i] * gradient.data[i];
      }
      long double slope = (loss.at(name.substr(2), up) - loss.at(name.substr(2), down)) / (2 * h);
      EXPECT_NEAR(double(slope), double(along), 1e-6 * (std::sqrt(size) + 0.01)) << name << "  thalweg verify " << c.text();
    }
  }
}

}  // namespace

void register_gradient_tests() {
  register_per_pass("gradients", "every_gradient", every_gradient);
  register_per_pass("gradients", "every_pair", every_pair);
  register_per_pass("gradients", "adjoint", adjoint);
}

}  // namespace thalweg::tests
