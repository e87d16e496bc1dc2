// thalweg compare A B: two files of results, case by case.
#include <fmt/format.h>

#include <cmath>
#include <map>
#include <set>

#include "tools/thalweg/file_error.h"
#include "tools/thalweg/tool.h"

namespace thalweg::tool {
namespace {

struct Results {
  std::string file;
  std::vector<std::string> order;       // keys as they appear
  std::map<std::string, Json> records;  // by key, one line each
};

template <class T>
T member(const Json& record, const char* name, const std::string& where, const char* expected) {
  if (!record.contains(name)) throw UsageError(where + ": " + name + ", got none, expected " + expected);
  try {
    return record[name].get<T>();
  } catch (const Json::exception&) {
    throw UsageError(where + ": " + name + ", got " + record[name].dump() + ", expected " + expected);
  }
}

// What makes two records comparable: the problem, on as many threads, from buffers as cold.
std::string key_of(const Json& record, const std::string& where) {
  std::string text = member<std::string>(record, "case", where, "a case string");
  size_t kernel = text.find(",kernel=");  // before and after may be different kernels
  if (kernel != std::string::npos) text.erase(kernel, text.find(',', kernel + 1) - kernel);
  std::string key = fmt::format("{} @{}", text, member<int64_t>(record, "threads", where, "a number"));
  if (record.contains("against")) key += " against " + record["against"].get<std::string>();
  return key + (record.value("buffers", "cold") == "warm" ? " warm" : "");
}

struct Line {
  std::string where, key, kernel;  // "<file>:<line>"
  Json record;
};

std::vector<Line> read_lines(const std::string& file) {
  std::vector<std::byte> bytes = files::read_file(file);
  std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  std::vector<Line> out;
  int64_t number = 0;
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.find('\n', at), text.size());
    std::string line = text.substr(at, end - at), where = fmt::format("{}:{}", file, ++number);
    at = end + 1;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    Json record = Json::parse(line, nullptr, false);
    if (!record.is_object()) throw UsageError(where + ": got a line that is not a JSON object, expected a result of thalweg bench");
    std::string key = key_of(record, where), kernel = record.value("kernel", "");
    double us = member<double>(record, "median_us", where, "a number");
    if (!(us > 0) || !std::isfinite(us)) throw UsageError(fmt::format("{}: median_us, got {}, expected a number above 0", where, us));
    member<bool>(record, "verified", where, "true or false");
    out.push_back({where, key, kernel, std::move(record)});
  }
  if (out.empty()) throw UsageError(file + ": got no results, expected JSON lines of thalweg bench");
  return out;
}

// Cases that a file has with more than one kernel: their lines are told apart by kernel.
std::set<std::string> cases_of_many_kernels(const std::vector<Line>& lines) {
  std::map<std::string, std::string> first;
  std::set<std::string> many;
  for (const Line& line : lines)
    if (first.try_emplace(line.key, line.kernel).first->second != line.kernel) many.insert(line.key);
  return many;
}

Results index_lines(const std::string& file, const std::vector<Line>& lines, const std::set<std::string>& by_kernel) {
  Results out{file, {}, {}};
  for (const Line& line : lines) {
    std::string key = by_kernel.count(line.key) ? line.key + " kernel " + line.kernel : line.key;
    if (!out.records.emplace(key, line.record).second)
      throw UsageError(fmt::format("{}: got a second line of {} with kernel {}, expected one", line.where, line.key, line.kernel));
    out.order.push_back(key);
  }
  return out;
}

bool all_verified(const Results& results) {
  bool ok = true;
  for (const std::string& key : results.order) {
    if (results.records.at(key)["verified"].get<bool>()) continue;
    fmt::print(stderr, "thalweg: {}: not verified: {}\n", results.file, key);
    ok = false;
  }
  return ok;
}

double spread(const Json& r) { return r.contains("spread") && r["spread"].is_number() ? r["spread"].get<double>() : 1.0; }

std::string time_text(const Json& r) {
  return fmt::format("{:.4g} us ±{:.1f} %", r["median_us"].get<double>(), 100 * spread(r));
}

void print_machine(const Results& a, const Results& b) {
  auto text = [](const Results& r) {
    const Json& record = r.records.at(r.order[0]);
    std::string cpu = "unknown machine";
    if (record.contains("machine") && record["machine"].is_object()) cpu = record["machine"].value("cpu", cpu);
    return fmt::format("commit {}, {}", record.value("commit", "unknown"), cpu);
  };
  fmt::print("before  {}  {}\nafter   {}  {}\n", a.file, text(a), b.file, text(b));
  auto cpu = [](const Results& r) { return r.records.at(r.order[0]).value("machine", Json::object()).dump(); };
  if (cpu(a) != cpu(b)) fmt::print("The machines or compilers differ: the ratio is not of the code alone.\n");
}

int compare(const std::string& before, const std::string& after) {
  std::vector<Line> before_lines = read_lines(before), after_lines = read_lines(after);
  std::set<std::string> by_kernel = cases_of_many_kernels(before_lines);
  by_kernel.merge(cases_of_many_kernels(after_lines));
  Results a = index_lines(before, before_lines, by_kernel), b = index_lines(after, after_lines, by_kernel);
  bool verified = all_verified(a);
  if (!all_verified(b) || !verified) {
    fmt::print(stderr, "thalweg: refused to compare times of results that were not verified\n");
    return kNegative;
  }
  Table table({"case @threads", "before", "after", "before/after", "<", "<kernel"});
  for (const std::string& key : a.order) {
    if (!b.records.count(key)) continue;
    const Json &x = a.records.at(key), &y = b.records.at(key);
    double ratio = x["median_us"].get<double>() / y["median_us"].get<double>();
    double noise = spread(x) + spread(y);
    const char* word = ratio > 1 + noise ? "faster" : ratio < 1 / (1 + noise) ? "slower" : "within spread";
    std::string from = x.value("kernel", ""), to = y.value("kernel", "");
    table.add({key, time_text(x), time_text(y), fmt::format("{:.3f}", ratio), word, from == to ? to : from + " -> " + to});
  }
  if (table.empty()) throw UsageError(fmt::format("{} and {}: got no case in common, expected at least one", before, after));
  print_machine(a, b);
  fmt::print("{}", table.text());
  for (const std::string& key : a.order)
    if (!b.records.count(key)) fmt::print("only in {}: {}\n", before, key);
  for (const std::string& key : b.order)
    if (!a.records.count(key)) fmt::print("only in {}: {}\n", after, key);
  return kOk;
}

}  // namespace

Action add_compare(CLI::App& app) {
  auto files = std::make_shared<std::pair<std::string, std::string>>();
  app.add_option("before", files->first, "Results of thalweg bench --json")->required()->type_name("A");
  app.add_option("after", files->second, "The same, later")->required()->type_name("B");
  app.footer("\nExit code 1: a result in either file was not verified.");
  return [files] { return compare(files->first, files->second); };
}

}  // namespace thalweg::tool
