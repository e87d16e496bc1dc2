// Every text of grid.txt, executed on the host: by the committed record everywhere, and some of them again where the
// tools are.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "tests/ascend/grid.h"
#include "tests/ascend/tools.h"
#include "thalweg/ascend/execute.h"

namespace thalweg::ascend::tests {
namespace {

using Json = nlohmann::ordered_json;

const std::string kRecord = std::string(THALWEG_ASCEND_DATA) + "/../../bench/results/ascend/host.jsonl";

// One entry of each text: many differ in sizes that no text holds.
std::map<std::string, Entry> texts() {
  std::map<std::string, Entry> all;
  for (const Entry& entry : grid_entries()) all.emplace(digest_of(entry), entry);
  return all;
}

std::map<std::string, Json> host_record() {  // by digest
  std::map<std::string, Json> all;
  std::ifstream file(kRecord);
  for (std::string line; std::getline(file, line);) {
    Json json = Json::parse(line);
    all[json.at("digest").get<std::string>()] = json;
  }
  return all;
}

Json executed_json(const Entry& entry) {
  const Executed x = execute(entry.plan, mlir_of(entry));
  Json json;
  json["case"] = entry.text, json["digest"] = digest_of(entry);
  if (!x.sizes.empty()) json["with"] = x.sizes;
  if (!x.ran) json["error"] = x.error;
  for (const Executed::Output& out : x.outputs)
    json["error_of_limit"][out.name] = std::round(1e4 * out.worst / out.limit) / 1e4;  // null where NaN is left
  json["verified"] = x.ok();
  return json;
}

TEST(AscendGrid, EveryTextWasExecuted) {
  const std::map<std::string, Json> record = host_record();
  int64_t count = 0;
  for (const auto& [digest, entry] : texts()) {
    const auto at = record.find(digest);
    ASSERT_NE(at, record.end()) << entry.text << ": its text was not executed (thalweg_ascend_tests --execute)";
    EXPECT_EQ(at->second.at("verified"), true) << at->second;
    ++count;
  }
  EXPECT_GT(count, 0);
}

TEST(AscendExecution, TextsOfTheGridAgain) {
  if (std::string why = missing(missing_host_tool().empty(), missing_host_tool()); !why.empty()) GTEST_SKIP() << why;
  for (const auto& [digest, entry] : texts()) {
    if (std::stoull(digest, nullptr, 16) % 64) continue;  // as their digests fall
    const Json json = executed_json(entry);
    EXPECT_EQ(json.at("verified"), true) << json;
  }
}

}  // namespace

// Executes texts that the record has not, and keeps the lines of those that the grid still has.
int write_host_record() {
  const std::map<std::string, Json> before = host_record();
  std::vector<Entry> entries;
  std::map<std::string, Json> after;
  for (const auto& [digest, entry] : texts())
    if (auto at = before.find(digest); at != before.end() && at->second.at("verified") == true)
      after.insert(*at);
    else
      entries.push_back(entry);
  std::mutex mutex;
  std::atomic<size_t> next{0};
  bool verified = true;
  const auto save = [&] {
    std::vector<Json> lines;
    for (const auto& [digest, json] : after) lines.push_back(json);
    std::sort(lines.begin(), lines.end(), [](const Json& a, const Json& b) { return a.at("case") < b.at("case"); });
    std::ofstream file(kRecord);
    for (const Json& json : lines) file << json.dump() << "\n";
  };
  const auto run = [&] {
    for (size_t i; (i = next++) < entries.size();) {
      const Json json = executed_json(entries[i]);
      const std::lock_guard lock(mutex);
      after[json.at("digest").get<std::string>()] = json;
      verified = verified && json.at("verified") == true;
      save();
    }
  };
  std::thread other(run);
  run();
  other.join();
  save();
  return verified ? 0 : 1;
}

}  // namespace thalweg::ascend::tests
