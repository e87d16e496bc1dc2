#include "tests/properties.h"

#include "testing/case.h"

namespace thalweg::tests {

namespace tt = thalweg::testing;

void for_each_row(const thalweg_pass& pass, const std::vector<std::string>& sets, double max_flops,
                  const std::function<void(const Case&)>& body) {
  for (const Case& c : pass_cases(pass, sets, max_flops))
    for (const std::string& row : kernel_rows(pass)) {
      Case forced = with_kernel(c, row);
      if (forced.threads == 0) forced.threads = 1;
      if (!takes(forced)) continue;
      SCOPED_TRACE("  thalweg verify " + forced.text());
      body(forced);
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

Case sequence_case(const Case& c, int64_t length) {
  Case one = with(c, {{"-varlen", ""}, {"-cu_seqlens", ""}, {"-chunk_states", ""}});
  one.sizes["B"] = one.sizes["N"] = 1;
  one.sizes["T"] = length;
  return one;
}

std::map<std::string, Values> sequence_inputs(const Problem& packed, int64_t n, int64_t begin, int64_t end) {
  std::map<std::string, Values> inputs;
  const thalweg_pass& pass = *packed.spec_case().pass;
  for (const auto& [name, values] : packed.inputs()) {
    const thalweg_field& field = *tt::find_field(pass, name);
    if (name == "cu_seqlens") continue;
    if (axis_of(field, "N") == 0) inputs[name] = cut(values, 0, n, n + 1);
    else if (axis_of(field, "T") == 1) inputs[name] = cut(values, 1, begin, end);
    else inputs[name] = values;
  }
  return inputs;
}

}  // namespace thalweg::tests
