#include "tools/thalweg/sweep.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/thalweg/args.h"
#include "tools/thalweg/tool.h"

namespace thalweg::tool {
namespace {

struct Choice {
  std::string name;
  std::vector<std::string> values;
};

std::vector<Choice> choices_of(const thalweg_pass& pass, const std::string& kernel) {
  std::vector<Choice> out;
  for (int64_t i = 0; const char* name = pass.kernel_at(i, nullptr); ++i) {
    if (kernel != name) continue;
    for (const std::string& word : words(pass.choices_at(i))) {
      const size_t equals = word.find('=');
      out.push_back({word.substr(0, equals), words(word.substr(equals + 1), '|')});
    }
  }
  return out;
}

// "row", then "row/block=1/stream=0" for every combination.
std::vector<std::string> combinations(const std::string& row, const std::vector<Choice>& choices) {
  std::vector<std::string> out{row};
  for (const Choice& choice : choices) {
    std::vector<std::string> longer;
    for (const std::string& each : out)
      for (const std::string& value : choice.values) longer.push_back(each + "/" + choice.name + "=" + value);
    out = std::move(longer);
  }
  out.insert(out.begin(), row);
  return out;
}

std::string choices_text(const std::string& row, const std::string& forced) {
  std::string text = forced.substr(std::min(forced.size(), row.size() + 1));
  std::replace(text.begin(), text.end(), '/', ' ');
  return text.empty() ? "(the row decides)" : text;
}

// What a process printed, as a record: its JSON line, or why there is none.
Json record_of(const std::string& printed, int code) {
  std::string first;
  for (const std::string& line : words(printed, '\n')) {
    if (line.starts_with("{")) return Json::parse(line);
    if (first.empty() || line.find("got") != std::string::npos) first = line;
  }
  Json r;
  r["result"] = code == 137 ? "hung" : code > 128 ? "died" : "failed";
  r["reason"] = code == 137 ? "killed at the limit" : code > 128 ? fmt::format("signal {}", code - 128) : first;
  return r;
}

// What explain says of `row`: "runs, ..." or why it cannot.
std::string line_of(const testing::Case& c, const std::string& row) {
  for (const std::string& line : words(explain_text(c), '\n'))
    if (line.starts_with(row + ": ")) return line.substr(row.size() + 2);
  return "";
}

Json measure(testing::Case c, const std::string& row, const std::string& forced, const Sweep& sweep) {
  c.kernel = forced;
  Json r;
  const std::string plan = line_of(c, row);
  if (plan.starts_with("runs")) {
    std::vector<std::string> args{"bench", c.text(), "--json", "-"};
    args.insert(args.end(), sweep.bench_options.begin(), sweep.bench_options.end());
    int code = 0;
    const std::string printed = run_self(args, &code, {.errors = true, .seconds = sweep.limit});
    r = record_of(printed, code);
    if (!r.contains("result")) r["result"] = "timed";
  } else {
    r["result"] = "not taken";
    r["reason"] = plan;
  }
  r["case"] = c.text();
  r["kernel"] = row;
  r["choices"] = choices_text(row, forced);
  r["plan"] = plan;
  r["commit"] = commit();
  r["machine"] = machine_json();
  r["command"] = command();
  r["date"] = utc_date();
  return r;
}

std::string time_or_reason(const Json& r) {
  if (r["result"] == "timed") return time_text(r["median_us"].get<double>());
  return r["result"].get<std::string>() + ": " + r["reason"].get<std::string>();
}

void print_table(std::vector<Json> records) {
  const auto time = [](const Json& r) { return r["result"] == "timed" ? r["median_us"].get<double>() : INFINITY; };
  std::stable_sort(records.begin(), records.end(), [&](const Json& a, const Json& b) { return time(a) < time(b); });
  Table table({"<choices", "time", "share", "<plan"});
  for (const Json& r : records) {
    const bool timed = r["result"] == "timed";
    const bool share = timed && r["roof_share"].is_number();
    table.add({r["choices"], timed ? time_or_reason(r) : r["result"].get<std::string>(),
               share ? fmt::format("{:.3f}", r["roof_share"].get<double>()) : "-", timed ? r["plan"] : r["reason"]});
  }
  fmt::print("\n{}", table.text());
}

}  // namespace

int run_sweep(const std::vector<testing::Case>& cases, const Sweep& sweep) {
  const bool quiet = sweep.json == "-";
  if (!sweep.json.empty() && !quiet) write_text(sweep.json, "");
  int64_t bad = 0;
  for (const testing::Case& c : cases) {
    const std::string row = running_kernel(explain_text(c));
    const std::vector<Choice> choices = choices_of(*c.pass, row);
    if (choices.empty()) throw UsageError("--sweep: " + c.text() + ": its kernel " + row + " declares no choices");
    const std::vector<std::string> all = combinations(row, choices);
    Progress progress(int64_t(all.size()));
    std::vector<Json> records;
    if (!quiet) fmt::print("{}\n", c.text());
    for (const std::string& forced : all) {
      progress.show(int64_t(records.size()), forced);
      records.push_back(measure(c, row, forced, sweep));
      progress.clear();
      const Json& r = records.back();
      bad += r["result"] != "timed" && r["result"] != "not taken";
      if (!sweep.json.empty()) write_text(sweep.json, r.dump() + "\n", true);
      if (!quiet) fmt::print("  {}: {}\n", r["choices"].get<std::string>(), time_or_reason(r));
    }
    if (!quiet) print_table(std::move(records));
  }
  return bad ? kNegative : kOk;
}

}  // namespace thalweg::tool
