#include "tests/properties.h"

#include "testing/case.h"

namespace thalweg::tests {

namespace tt = thalweg::testing;

void for_each_row(const thalweg_pass& pass, const std::vector<std::string>& sets, double max_flops,
                  const std::function<void(const Case&)>& body) {
  constexpr size_t kMostCases = 80;  // of longer sets evenly a part: they vary sizes and dtypes more than options
  const std::vector<Case>& cases = pass_cases(pass, sets, max_flops);
  const size_t step = (cases.size() + kMostCases - 1) / kMostCases;
  for (size_t i = 0; i < cases.size(); i += step) {
    const Case& c = cases[i];
    if (10 * tt::spec_of(pass).work(c).bytes > max_flops) continue;  // elementwise passes: few FLOPs, many elements
    for (const std::string& row : kernel_rows(pass)) {
      Case forced = with_kernel(c, row);
      if (forced.threads == 0) forced.threads = 1;
      if (!takes(forced)) continue;
      SCOPED_TRACE("  thalweg verify " + forced.text());
      body(forced);
    }
  }
}

bool is_per_token(const thalweg_field& field) {
  std::vector<std::string> dims = tt::words(field.dims);
  return field.kind == THALWEG_TENSOR && dims.size() > 2 && (dims[0] == "B" || dims[0] == "N") && dims[1] == "T";
}

bool is_summed(const thalweg_field& field) {
  return axis_of(field, "B") < 0 && axis_of(field, "N") < 0 && axis_of(field, "M") < 0 && axis_of(field, "R") < 0;
}

bool is_packed(const Case& c) {
  const thalweg_field* field = tt::find_field(*c.pass, "cu_seqlens");
  return field && tt::is_present(c, *field);
}

Outputs run_with(const Case& c, const std::map<std::string, Values>& inputs, bool* taken) {
  Problem problem(c);
  for (const auto& [name, values] : inputs)
    if (problem.inputs().count(name)) problem.set(name, values);
  problem.poison_outputs();
  return run(problem, taken);
}

bool sequence_part(const Problem& problem, const thalweg_field& field, int64_t n, Part* part) {
  *part = {0, n, n + 1};
  if (axis_of(field, "N") == 0 || axis_of(field, "M") == 0) return true;
  if (!is_packed(problem.spec_case())) return axis_of(field, "B") == 0;
  for (const auto& [size, name] : {std::pair{"T", "cu_seqlens"}, {"S", "cu_seqlens_k"}}) {
    if (axis_of(field, "B") != 0 || axis_of(field, size) != 1) continue;
    const Values& borders = problem.inputs().at(name);
    *part = {1, int64_t(borders.data[size_t(n)]), int64_t(borders.data[size_t(n + 1)])};
    return true;
  }
  return false;
}

Case sequence_case(const Problem& packed, int64_t n) {
  Case one = with(packed.spec_case(), {{"-varlen", ""}, {"-varlen_k", ""}, {"-cu_seqlens", ""}, {"-cu_seqlens_k", ""}, {"-chunk_states", ""}});
  one.sizes["B"] = one.sizes["N"] = 1;
  for (const auto& [size, name] : {std::pair{"T", "cu_seqlens"}, {"S", "cu_seqlens_k"}}) {
    if (!packed.inputs().count(name)) continue;
    const Values& borders = packed.inputs().at(name);
    one.sizes[size] = int64_t(borders.data[size_t(n + 1)] - borders.data[size_t(n)]);
  }
  return one;
}

std::map<std::string, Values> sequence_inputs(const Problem& packed, int64_t n) {
  std::map<std::string, Values> inputs;
  Part part;
  for (const auto& [name, values] : packed.inputs()) {
    if (name == "cu_seqlens" || name == "cu_seqlens_k") continue;
    const bool is_cut = sequence_part(packed, *tt::find_field(*packed.spec_case().pass, name), n, &part);
    inputs[name] = is_cut ? cut(values, part.axis, part.begin, part.end) : values;
  }
  return inputs;
}

}  // namespace thalweg::tests
