#include "tests/support.h"

#include <bit>
#include <cstring>
#include <tuple>

#include "testing/device.h"

namespace thalweg::tests {

namespace tt = thalweg::testing;

std::vector<const thalweg_pass*> all_passes() {
  std::vector<const thalweg_pass*> list;
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i) list.push_back(pass);
  return list;
}

const thalweg_pass* find_pass(const std::string& name) {
  for (const thalweg_pass* pass : all_passes())
    if (tt::pass_name(*pass) == name) return pass;
  return nullptr;
}

bool has_pass(const std::string& name) { return find_pass(name) != nullptr; }

std::vector<std::string> kernel_rows(const thalweg_pass& pass) {
  std::vector<std::string> rows;
  for (int64_t i = 0; const char* row = pass.kernel_at(i, nullptr); ++i)
    if (!tt::is_cuda_row(pass, row) || tt::why_no_device().empty()) rows.push_back(row);
  return rows;
}

std::string kernel_isa(const thalweg_pass& pass, const std::string& row) {
  const char* isa = nullptr;
  for (int64_t i = 0; const char* name = pass.kernel_at(i, &isa); ++i)
    if (row == name) return isa;
  return "";
}

bool machine_has(const std::string& isa) {
  auto rank = [](const std::string& name) { return name == "amx" ? 3 : name == "avx512" ? 2 : name == "avx2" ? 1 : 0; };
  return rank(thalweg_cpu_isa()) >= rank(isa);
}

const std::vector<Case>& pass_cases(const thalweg_pass& pass, const std::vector<std::string>& sets, double max_flops) {
  // Reading a set and counting the work of its cases costs more than many a test that asks for them.
  static std::map<std::tuple<const thalweg_pass*, std::vector<std::string>, double>, std::vector<Case>> seen;
  auto [place, is_new] = seen.try_emplace({&pass, sets, max_flops});
  std::vector<Case>& cases = place->second;
  if (!is_new) return cases;
  std::vector<std::string> known = tt::set_names();
  for (const std::string& set : sets) {
    if (std::find(known.begin(), known.end(), set) == known.end()) continue;
    std::vector<Case> found;
    try {
      found = tt::find_cases(tt::pass_name(pass) + "@" + set);
    } catch (const std::invalid_argument&) {  // the operator has no such set
      continue;
    }
    for (const Case& c : found)
      if (tt::spec_of(pass).work(c).flops <= max_flops) cases.push_back(c);
  }
  return cases;
}

Case with(Case c, const std::map<std::string, std::string>& options) {
  for (const auto& [name, value] : options) {
    if (name[0] == '-') c.options.erase(name.substr(1));
    else c.options[name] = value;
  }
  return c;
}

Case with_kernel(Case c, const std::string& kernel) {
  c.kernel = kernel;
  return c;
}

Case with_sizes(Case c, const std::map<std::string, int64_t>& sizes) {
  for (const auto& [name, value] : sizes) c.sizes[name] = value;
  return c;
}

Outputs run(Problem& problem, bool* taken) {
  std::string text = problem.spec_case().text();
  thalweg_status status = problem.call();
  if (taken) *taken = status != THALWEG_UNSUPPORTED;
  if (taken && status == THALWEG_UNSUPPORTED) return {};
  EXPECT_EQ(status, THALWEG_OK) << thalweg_last_error() << "\n  thalweg verify " << text;
  EXPECT_EQ(problem.check_guards(), "") << "  thalweg verify " << text;
  Outputs outputs;
  for (const std::string& name : problem.outputs()) outputs[name] = problem.read(name);
  return outputs;
}

Outputs run(const Case& c, bool* taken) {
  Problem problem(c);
  return run(problem, taken);
}

bool takes(const Case& c) {
  Problem problem(c);
  size_t bytes;
  return c.pass->workspace(tt::on_cuda(c) ? problem.device_args() : problem.args(), &problem.context(), &bytes) == THALWEG_OK;
}

bool same_bits(const Values& a, const Values& b) {
  return a.shape == b.shape && (a.data.empty() || std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(double)) == 0);
}

std::string first_difference(const Outputs& a, const Outputs& b) {
  for (const auto& [name, va] : a) {
    auto it = b.find(name);
    if (it == b.end()) continue;
    const Values& vb = it->second;
    if (va.shape != vb.shape) return name + ": shapes differ";
    for (size_t i = 0; i < va.data.size(); ++i)
      if (std::bit_cast<uint64_t>(va.data[i]) != std::bit_cast<uint64_t>(vb.data[i]))
        return name + ": element " + std::to_string(i) + ": " + std::to_string(va.data[i]) + " and " + std::to_string(vb.data[i]);
  }
  return "";
}

std::string out_of_limit(const Case& c, const Outputs& got, const Outputs& want, double times) {
  for (const auto& [name, w] : want) {
    auto it = got.find(name);
    if (it == got.end()) continue;
    double limit = tt::limit_of(c, name) * times, ratio = tt::compare(it->second, w).ratio;
    if (!(ratio <= limit)) return name + ": RMS ratio " + std::to_string(ratio) + " above " + std::to_string(limit);
  }
  return "";
}

void expect_oracle(Problem& problem, double times) {
  const Case& c = problem.spec_case();
  Outputs got = run(problem), want = tt::run_reference(problem);
  tt::settle(problem, &want);
  Case named = c.kernel.empty() ? with_kernel(c, problem.kernel()) : c;
  Outputs plain;
  for (const auto& [name, w] : want) {
    double limit = tt::limit_of(named, name) * times;
    if (limit == 0 && !tt::is_integer(tt::dtype_in(c, *tt::find_field(*c.pass, name)))) {
      if (plain.empty()) {
        Problem last(with_kernel(c, kernel_rows(*c.pass).back()));
        for (const auto& [input, values] : problem.inputs()) last.set(input, values);
        last.poison_outputs();
        plain = run(last);
      }
      limit = 4 * tt::compare(plain.at(name), w).ratio;
    }
    tt::Difference d = tt::compare(got.at(name), w);
    EXPECT_LE(d.ratio, limit) << name << ": worst " << d.worst << " at " << d.worst_at << "\n  " << named.text() << ", inputs changed by the test";
  }
}

int axis_of(const thalweg_field& field, const std::string& dim) {
  std::vector<std::string> dims = tt::words(field.dims);
  for (size_t i = 0; i < dims.size(); ++i)
    if (dims[i] == dim) return int(i);
  return -1;
}

Values take(const Values& v, int axis, const std::vector<int64_t>& indices) {
  int64_t outer = 1, inner = 1, size = v.shape[size_t(axis)];
  for (int i = 0; i < axis; ++i) outer *= v.shape[size_t(i)];
  for (size_t i = size_t(axis) + 1; i < v.shape.size(); ++i) inner *= v.shape[i];
  Values result;
  result.shape = v.shape;
  result.shape[size_t(axis)] = int64_t(indices.size());
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t index : indices) {
      auto from = v.data.begin() + (o * size + index) * inner;
      result.data.insert(result.data.end(), from, from + inner);
    }
  return result;
}

std::vector<int64_t> iota(int64_t begin, int64_t end) {
  std::vector<int64_t> list;
  for (int64_t i = begin; i < end; ++i) list.push_back(i);
  return list;
}

Values cut(const Values& v, int axis, int64_t begin, int64_t end) { return take(v, axis, iota(begin, end)); }

Values join(const Values& a, const Values& b, int axis) {
  int64_t outer = 1, inner = 1, na = a.shape[size_t(axis)], nb = b.shape[size_t(axis)];
  for (int i = 0; i < axis; ++i) outer *= a.shape[size_t(i)];
  for (size_t i = size_t(axis) + 1; i < a.shape.size(); ++i) inner *= a.shape[i];
  Values result;
  result.shape = a.shape;
  result.shape[size_t(axis)] = na + nb;
  for (int64_t o = 0; o < outer; ++o) {
    result.data.insert(result.data.end(), a.data.begin() + o * na * inner, a.data.begin() + (o + 1) * na * inner);
    result.data.insert(result.data.end(), b.data.begin() + o * nb * inner, b.data.begin() + (o + 1) * nb * inner);
  }
  return result;
}

void assign(Values* v, int axis, int64_t begin, int64_t end, const std::function<double(double)>& change) {
  int64_t inner = 1, size = v->shape[size_t(axis)];
  for (size_t i = size_t(axis) + 1; i < v->shape.size(); ++i) inner *= v->shape[i];
  for (int64_t i = 0; i < v->count(); ++i) {
    int64_t at = i / inner % size;
    if (at >= begin && at < end) v->data[size_t(i)] = change(v->data[size_t(i)]);
  }
}

namespace {

class PassTest : public ::testing::Test {
 public:
  PassTest(const thalweg_pass* pass, void (*body)(const thalweg_pass&)) : pass_(pass), body_(body) {}
  void TestBody() override { body_(*pass_); }

 private:
  const thalweg_pass* pass_;
  void (*body_)(const thalweg_pass&);
};

}  // namespace

void register_per_pass(const char* suite, const char* name, void (*body)(const thalweg_pass&)) {
  for (const thalweg_pass* pass : all_passes()) {
    std::string full = std::string(name) + "/" + tt::pass_name(*pass);
    ::testing::RegisterTest(suite, full.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                            [=]() -> ::testing::Test* { return new PassTest(pass, body); });
  }
}

}  // namespace thalweg::tests
