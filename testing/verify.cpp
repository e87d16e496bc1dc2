// One case, or every kernel row that takes it, against the oracle.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <stdexcept>

#include "testing/case.h"
#include "testing/compare.h"
#include "testing/device.h"
#include "testing/fields.h"

namespace thalweg::testing {
namespace {

constexpr double kTimesRecurrence = 4;  // allowed over the last row's error where the limit is 0

struct Oracle {
  std::vector<int64_t> groups;
  std::map<std::string, Values> outputs;
  std::map<std::string, double> recurrence;  // error of the last row, by output
};

std::string last_row(const thalweg_pass& pass) {
  std::string name;
  for (int64_t i = 0; const char* row = pass.kernel_at(i, nullptr); ++i) name = row;
  return name;
}

std::string isa_of(const thalweg_pass& pass, const std::string& kernel) {
  const char* isa = "";
  for (int64_t i = 0; const char* row = pass.kernel_at(i, &isa); ++i)
    if (row_of(kernel) == row) return isa;
  return "";
}

std::string format(const char* text, double a, double b) {
  char out[200];
  std::snprintf(out, sizeof out, text, a, b);
  return out;
}

std::string position(const Values& v, int64_t at) {
  std::string text;
  for (size_t i = v.shape.size(); i-- > 0;) {
    text = std::to_string(at % v.shape[i]) + (text.empty() ? "" : ", ") + text;
    at /= v.shape[i];
  }
  return "[" + text + "]";
}

void fill_oracle(Problem& problem, Oracle* oracle) {
  if (!oracle->outputs.empty()) return;
  oracle->groups = oracle_groups(problem.spec_case());
  oracle->outputs = run_reference(problem, oracle->groups);
}

// The last row's error of every output on this case.
void fill_recurrence(const Case& c, Oracle* oracle) {
  if (!oracle->recurrence.empty()) return;
  Case plain = c;
  plain.kernel = last_row(*c.pass);
  plain.cuda = false;
  Problem problem(plain);
  bool ok = problem.call() == THALWEG_OK;
  for (const auto& [name, want] : oracle->outputs)
    oracle->recurrence[name] = ok ? compare_output(c, name, take_groups(c, name, problem.read(name), oracle->groups), want).ratio : 0;
}

// Heads that the oracle left out are not compared, but where it found numbers only, they must hold numbers.
bool has_unwritten(const Values& all, const Values& want) {
  auto is_nan = [](double x) { return std::isnan(x); };
  return std::none_of(want.data.begin(), want.data.end(), is_nan) && std::any_of(all.data.begin(), all.data.end(), is_nan);
}

std::vector<Rule> rules_of(const Case& c, const std::string& output) {
  const Spec& spec = spec_of(*c.pass);
  return spec.rules ? spec.rules(c, output) : std::vector<Rule>{};
}

// Where an output is furthest off: "; worst at [0, 3] got 1.5, expected 1.25".
std::string place(const Oracle& oracle, const Values& got, const Values& want, int64_t at) {
  if (at < 0) return "";
  return "; worst at " + position(want, at) + (oracle.groups.empty() ? "" : " of the heads compared") +
         format(", got %.9g, expected %.9g", got.data[size_t(at)], want.data[size_t(at)]);
}

std::string broken_rule(const std::string& output, const Judgement& j) {
  char out[300];
  std::snprintf(out, sizeof out, "%s: rule %s (atol %.3g, rtol %.3g, %.3g ulp), got %.6f of %lld elements within, expected %.6f",
                output.c_str(), j.rule.name, j.rule.atol, j.rule.rtol, j.rule.ulps, j.share(), static_cast<long long>(j.looked_at),
                j.rule.share);
  return out;
}

void compare_outputs(Problem& problem, const Case& c, Oracle* oracle, Verdict* verdict) {
  std::map<std::string, Values> settled = oracle->outputs;
  settle(problem, &settled);
  for (const auto& [name, want] : settled) {
    Values all = problem.read(name), got = take_groups(c, name, all, oracle->groups);
    Verdict::Output out{name, compare_output(c, name, got, want), limit_of(c, name), true};
    if (!oracle->groups.empty() && has_unwritten(all, want)) {
      out.ok = false;
      verdict->reason = name + ": NaN in a head that was not compared, expected numbers";
    }
    const bool exact = is_integer(dtype_in(c, *find_field(*c.pass, name)));
    if (out.limit == 0 && want.count() > 0 && !exact) {
      fill_recurrence(c, oracle);
      out.limit = kTimesRecurrence * oracle->recurrence.at(name);
    }
    if (spec_of(*c.pass).limit(c, name) < 0 && out.difference.ratio > out.limit && row_of(c.kernel) != last_row(*c.pass)) {
      fill_recurrence(c, oracle);
      out.limit = std::max(out.limit, kTimesRecurrence * oracle->recurrence.at(name));
    }
    out.ok = out.ok && out.difference.ratio <= out.limit;
    if (!out.ok && verdict->reason.empty()) {
      verdict->reason = name + format(": RMS ratio, got %.3g, expected at most %.3g", out.difference.ratio, out.limit) +
                        place(*oracle, got, want, out.difference.worst_at);
    }
    for (const Rule& rule : rules_of(c, name)) {
      const Judgement& j = out.rules.emplace_back(judge(rule, got, want, dtype_in(c, *find_field(*c.pass, name))));
      if (!j.ok() && verdict->reason.empty()) verdict->reason = broken_rule(name, j) + place(*oracle, got, want, j.worst_at);
      out.ok = out.ok && j.ok();
    }
    verdict->outputs.push_back(out);
  }
}

// Whether the oracle has elements, and none of them is a number: equal masks of NaN say nothing of a kernel.
bool nothing_to_compare(const Case& c, const Oracle& oracle) {
  int64_t elements = 0, finite = 0;
  for (const auto& [name, want] : oracle.outputs) {
    elements += want.count();
    finite += count_finite(want, dtype_in(c, *find_field(*c.pass, name)));
  }
  return elements > 0 && finite == 0;
}

Verdict verify_with(Case c, Oracle* oracle) {
  Verdict verdict;
  verdict.case_text = c.text();
  verdict.kernel = c.kernel;
  verdict.status = "failed";
  auto start = std::chrono::steady_clock::now();
  if (on_cuda(c) && !why_no_device().empty()) {
    verdict.status = "skipped";
    verdict.isa = isa_of(*c.pass, c.kernel);
    verdict.reason = c.kernel + ": needs a GPU: " + why_no_device();
    return verdict;
  }
  try {
    Problem problem(c);
    if (c.kernel.empty()) c.kernel = verdict.kernel = problem.kernel();
    verdict.isa = isa_of(*c.pass, c.kernel);
    thalweg_status status = problem.call();
    if (status != THALWEG_OK) {
      verdict.reason = thalweg_last_error();
      if (status == THALWEG_UNSUPPORTED) verdict.status = "skipped";
      return verdict;
    }
    verdict.reason = problem.check_guards();
    if (verdict.reason.empty()) verdict.reason = problem.report();
    fill_oracle(problem, oracle);
    compare_outputs(problem, c, oracle, &verdict);
    if (verdict.reason.empty() && nothing_to_compare(c, *oracle))
      verdict.reason = "nothing to compare: no element of the reference is a finite number";
    if (verdict.reason.empty()) verdict.status = "passed";
  } catch (const TooLarge&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw TooLarge(c.text() + ": memory, got none for the tensors and the reference of this case");
  } catch (const std::exception& e) {
    verdict.reason = e.what();
  }
  verdict.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return verdict;
}

}  // namespace

double limit_of(const Case& c, const std::string& output) {
  double limit = std::fabs(spec_of(*c.pass).limit(c, output)), storage = 0;
  thalweg_dtype dtype = dtype_in(c, *find_field(*c.pass, output));
  if (thalweg_dtype_bytes(dtype) < thalweg_dtype_bytes(c.dtype))
    storage = dtype == THALWEG_BF16 ? 0x1p-8 : dtype == THALWEG_F16 ? 0x1p-11 : 0x1p-23;
  return limit == 0 ? 0 : std::max(limit, storage);
}

Verdict verify(const Case& c) {
  Oracle oracle;
  return verify_with(c, &oracle);
}

std::vector<Verdict> verify_all_kernels(const Case& c) {
  if (!c.kernel.empty()) return {verify(c)};
  std::vector<Verdict> verdicts;
  Oracle oracle;
  for (int64_t i = 0; const char* row = c.pass->kernel_at(i, nullptr); ++i) {
    if (c.cuda && !is_cuda_row(*c.pass, row)) continue;
    Case forced = c;
    forced.kernel = row;
    verdicts.push_back(verify_with(forced, &oracle));
  }
  return verdicts;
}

}  // namespace thalweg::testing
