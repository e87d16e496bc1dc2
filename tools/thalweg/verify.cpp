// thalweg verify CASE|FILE|@set
#include <fmt/format.h>

#include <iostream>
#include <map>

#include "testing/device.h"
#include "tools/thalweg/cases.h"

namespace thalweg::tool {
namespace {

using testing::Verdict;

constexpr char kCriterion[] =
    "each output on poisoned, guarded memory against the float64 token-by-token reference on the same rounded inputs: equal "
    "masks of NaN and infinity, rms(got - want) / rms(want) at most the limit, the operator's rules on single elements, nothing "
    "written outside the outputs; "
    "of cases of more than 3e9 FLOP some head groups, first and last among them, four at least";

struct Options {
  CaseOptions cases;
  std::string out;
  bool details = false;
};

Json rule_json(const testing::Judgement& j) {
  return {{"name", j.rule.name}, {"atol", j.rule.atol}, {"rtol", j.rule.rtol}, {"ulps", j.rule.ulps}, {"floor", j.rule.floor},
          {"share_limit", j.rule.share}, {"share", j.share()}, {"elements", j.looked_at}, {"outside", j.outside},
          {"max_error", j.max_error}, {"mean_error", j.mean_error}, {"max_relative_error", j.max_relative}, {"ok", j.ok()}};
}

Json verdict_json(const Verdict& v) {
  Json out{{"case", v.case_text}, {"kernel", v.kernel}, {"isa", v.isa}, {"status", v.status}};
  if (!v.reason.empty()) out["reason"] = v.reason;
  out["seconds"] = v.seconds;
  out["outputs"] = Json::array();
  for (const auto& o : v.outputs) {
    Json output{{"name", o.name}, {"rms_ratio", number_json(o.difference.ratio)}, {"limit", o.limit},
                {"worst", number_json(o.difference.worst)}, {"worst_at", o.difference.worst_at},
                {"want_rms", number_json(o.difference.want_rms)}, {"ok", o.ok}};
    for (const auto& j : o.rules) output["rules"].push_back(rule_json(j));
    out["outputs"].push_back(std::move(output));
  }
  return out;
}

void print_details(const Verdict& v) {
  Table table({"  output", "rms ratio", "limit", "worst |got-want|", "at element", "want rms", "<"});
  for (const auto& o : v.outputs)
    table.add({"  " + o.name, fmt::format("{:.2e}", o.difference.ratio), fmt::format("{:.1e}", o.limit),
               fmt::format("{:.2e}", o.difference.worst), o.difference.worst_at < 0 ? "-" : std::to_string(o.difference.worst_at),
               fmt::format("{:.2e}", o.difference.want_rms), o.ok ? "ok" : "FAILED"});
  if (!table.empty()) fmt::print("{}", table.text());
  Table rules({"  output", "<rule", "within", "expected", "max error", "mean error", "max relative", "<"});
  for (const auto& o : v.outputs)
    for (const auto& j : o.rules)
      rules.add({"  " + o.name, j.rule.name, fmt::format("{:.6f} of {}", j.share(), j.looked_at), fmt::format("{}", j.rule.share),
                 fmt::format("{:.2e}", j.max_error), fmt::format("{:.2e}", j.mean_error), fmt::format("{:.2e}", j.max_relative),
                 j.ok() ? "ok" : "FAILED"});
  if (!rules.empty()) fmt::print("{}", rules.text());
}

// The rules of a case in short: "; elementwise max 1e-3 mean 2e-5 relative 3e-4".
std::string rules_text(const Verdict& v) {
  std::string text;
  for (const auto& o : v.outputs)
    for (const auto& j : o.rules)
      text += fmt::format("; {} {}: max {:.1e} mean {:.1e} relative {:.1e}", o.name, j.rule.name, j.max_error, j.mean_error, j.max_relative);
  return text;
}

// The output nearest to its limit, or over it.
std::string nearest(const Verdict& v) {
  const Verdict::Output* worst = nullptr;
  for (const auto& o : v.outputs)
    if (!worst || o.difference.ratio * worst->limit > worst->difference.ratio * o.limit) worst = &o;
  return worst ? fmt::format("{} {:.1e} of {:.1e}", worst->name, worst->difference.ratio, worst->limit) : "no outputs";
}

// The case that repeats it: with its kernel named, whichever row was chosen.
std::string repro(const Verdict& v) {
  bool named = v.case_text.find(",kernel=") != std::string::npos || v.kernel.empty();
  return "thalweg verify '" + v.case_text + (named ? "" : ",kernel=" + v.kernel) + "'";
}

// The library's text is "…: no kernel …\n  <row>: <why>".
std::string skip_reason(const Verdict& v) {
  size_t at = v.reason.rfind(v.kernel + ": ");
  return at == std::string::npos ? v.reason : v.reason.substr(at + v.kernel.size() + 2);
}

std::string without_kernel(std::string text) {
  size_t at = text.find(",kernel=");
  return at == std::string::npos ? text : text.erase(at, text.find(',', at + 1) - at);
}

void print_verdict(const Verdict& v, bool details) {
  if (v.status == "skipped") {
    if (details) fmt::print("skipped  {}  {}: {}\n", without_kernel(v.case_text), v.kernel, skip_reason(v));
    return;
  }
  fmt::print("{}   {}  {}  {}{}  {:.1f} s\n", v.status, without_kernel(v.case_text), v.kernel, nearest(v), details ? "" : rules_text(v), v.seconds);
  if (details || !v.passed()) print_details(v);
  if (v.passed()) return;
  if (!v.reason.empty()) fmt::print("  {}\n", v.reason);
  fmt::print("  again: {}\n", repro(v));
}

int64_t count(const std::vector<Verdict>& verdicts, const char* status) {
  int64_t n = 0;
  for (const auto& v : verdicts) n += v.status == status;
  return n;
}

void write_verdict(const std::string& file, const std::vector<Verdict>& verdicts, bool passed) {
  Json out;
  out["verdict"] = passed ? "passed" : "failed";
  out["criterion"] = kCriterion;
  out["passed"] = count(verdicts, "passed");
  out["failed"] = count(verdicts, "failed");
  out["skipped"] = count(verdicts, "skipped");
  out["commit"] = commit();
  out["machine"] = machine_json();
  out["isa"] = thalweg_cpu_isa();
  out["command"] = command();
  out["date"] = utc_date();
  out["cases"] = Json::array();
  for (const auto& v : verdicts) out["cases"].push_back(verdict_json(v));
  write_text(file, out.dump(1) + "\n");
}

// Rows that could not run for want of an instruction set, by name; the others declined the case.
struct Skips {
  std::map<std::string, int64_t> lacking;  // "cpu_chunk_avx512: needs avx512, got avx2"
  int64_t declined = 0;
  void add(const testing::Case& c, const Verdict& v) {
    if (v.status != "skipped") return;
    const bool no_gpu = testing::is_cuda_row(*c.pass, v.kernel) && !testing::why_no_device().empty();
    if (no_gpu || kernel_isa(*c.pass, v.kernel) > cpu_device().isa) {
      ++lacking[pass_name(*c.pass) + " " + v.kernel + ": " + skip_reason(v)];
    } else {
      ++declined;
    }
  }
  void print() const {
    for (const auto& [row, n] : lacking) fmt::print("skipped  {} ({} cases)\n", row, n);
    if (declined) fmt::print("{} times a row does not take the case (thalweg explain CASE says why)\n", declined);
  }
};

int verify(const Options& options) {
  std::vector<testing::Case> cases = cases_of(options.cases);
  if (!options.out.empty() && options.out != "-") write_text(options.out, "");  // fails now, not after the work
  std::vector<Verdict> verdicts;
  Skips skips;
  Progress progress(int64_t(cases.size()));
  bool details = options.details || cases.size() == 1;
  for (size_t i = 0; i < cases.size(); ++i) {
    progress.show(int64_t(i), cases[i].text());
    std::vector<Verdict> some = cases[i].kernel.empty() ? testing::verify_all_kernels(cases[i]) : std::vector{testing::verify(cases[i])};
    progress.clear();
    for (Verdict& v : some) {
      if (options.out != "-") print_verdict(v, details);
      skips.add(cases[i], v);
      verdicts.push_back(std::move(v));
    }
    std::cout << std::flush;
  }
  int64_t passed = count(verdicts, "passed"), failed = count(verdicts, "failed"), skipped = count(verdicts, "skipped");
  bool ok = failed == 0 && passed > 0;
  if (!options.out.empty()) write_verdict(options.out, verdicts, ok);
  if (options.out != "-" && !details) skips.print();
  if (options.out != "-")
    fmt::print("{} cases, {} kernel runs passed, {} failed, {} skipped{}\n", cases.size(), passed, failed, skipped,
               passed + failed ? "" : ": nothing was verified");
  return ok ? kOk : kNegative;
}

std::string knobs_text() {
  std::string out = "\nFill knobs of the operators (name=value in a case):\n", last;
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i) {
    try {
      const char* knobs = testing::spec_of(*pass).knobs;
      if (!knobs || last == knobs) continue;
      last = knobs;
      for (const std::string& knob : words(knobs, ';')) out += "  " + std::string(pass->op) + "  " + knob + "\n";
    } catch (const std::out_of_range&) {  // an operator without a spec
    }
  }
  out += "Sets:";
  for (const std::string& set : testing::set_names()) out += " @" + set;
  return out + "\nExit code 1: a case failed, or nothing could be verified.";
}

}  // namespace

Action add_verify(CLI::App& app) {
  auto options = std::make_shared<Options>();
  add_case_options(app, options->cases);
  app.add_option("--out", options->out, "Write the verdict as JSON: criterion, figures per output, commit, machine (- is standard output)")->type_name("FILE");
  app.add_flag("--details", options->details, "A table of every output, also for many cases that passed");
  app.footer(knobs_text);
  return [options] { return verify(*options); };
}

}  // namespace thalweg::tool
