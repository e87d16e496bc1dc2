// Planner and compiler on every case of grid.txt: against the committed record everywhere, against the compiler itself
// where it is installed.
#include <gtest/gtest.h>

#include <fstream>
#include <iostream>
#include <set>

#include "tests/ascend/grid.h"
#include "tests/ascend/tools.h"

namespace thalweg::ascend::tests {
namespace {

using Json = nlohmann::ordered_json;

const std::string kData = THALWEG_ASCEND_DATA;
const std::string kRecord = kData + "/../../bench/results/ascend/ascendnpu-ir-1.2.0.jsonl";

std::map<std::string, Json> record() {
  std::map<std::string, Json> all;
  std::ifstream file(kRecord);
  for (std::string line; std::getline(file, line);)
    if (!line.empty()) {
      Json json = Json::parse(line);
      all[json.at("case").get<std::string>()] = json;
    }
  return all;
}

std::string compiler_missing() {
  std::string message;
  for (const char* name : {"Ascend910B3", "Ascend950PR_957b"})
    if (check_tool(*find_target(name), {}, &message) != Outcome::kFits) return message;
  return "";
}

TEST(AscendGrid, PlannerIsTheRecordButForKnownDifferences) {
  std::map<std::string, Json> all = record();
  std::vector<Known> known = read_known(kData + "/known.txt");
  std::set<size_t> seen;
  int64_t predicted = 0, equal = 0, same_verdict = 0, fits = 0, overflows = 0;
  std::vector<Entry> entries = grid_entries();
  ASSERT_FALSE(entries.empty());
  for (const Entry& entry : entries) {
    ASSERT_TRUE(all.count(entry.text)) << entry.text << ": got no record, expected one (thalweg_ascend_tests --record)";
    EXPECT_EQ(all[entry.text].at("digest"), digest_of(entry)) << entry.text << ": the record is of another text (thalweg_ascend_tests --record)";
    Lowered lowered = lowered_of(all[entry.text]);
    ASSERT_TRUE(lowered.has_verdict()) << entry.text << ": " << lowered.message;
    (lowered.outcome == Outcome::kFits ? fits : overflows)++;
    std::vector<std::string> differ = differences(entry.plan, lowered);
    if (entry.plan.need_is_predicted) {
      ++predicted;
      equal += differ.empty();
      same_verdict += verdict_differences(entry.plan, lowered).empty();
    }
    for (const std::string& difference : differ) {
      bool is_known = false;
      for (size_t i = 0; i < known.size(); ++i)
        if (known[i].entry == entry.text && known[i].difference == difference) is_known = true, seen.insert(i);
      EXPECT_TRUE(is_known) << entry.text << " | " << difference << " | not in known.txt";
    }
  }
  for (size_t i = 0; i < known.size(); ++i) {
    if (!find_kernel(known[i].entry.substr(0, known[i].entry.find(':')))) continue;
    EXPECT_TRUE(seen.count(i)) << "known.txt: " << known[i].entry << " | " << known[i].difference << ": does not occur any more";
    EXPECT_FALSE(known[i].reason.empty()) << known[i].entry;
  }
  EXPECT_GT(fits, 0);
  EXPECT_GT(overflows, 0);
  std::cout << "planner and compiler: the same verdict in " << same_verdict << " of " << predicted << " cases (" << fits << " fit, " << overflows
            << " do not), everything equal in " << equal << "\n";
}

TEST(AscendGrid, CompilerIsTheRecord) {
  std::string reason = compiler_missing();
  if (std::string why = missing(reason.empty(), reason); !why.empty()) GTEST_SKIP() << why;
  std::vector<Entry> entries = grid_entries();
  std::map<std::string, Json> all = record();
  std::vector<Lowered> lowered = lower_all(entries);
  for (size_t i = 0; i < entries.size(); ++i) {
    ASSERT_TRUE(all.count(entries[i].text)) << entries[i].text;
    EXPECT_EQ(record_of(entries[i], lowered[i]), all[entries[i].text]) << entries[i].text;
  }
}

}  // namespace

// Writes the record; main() calls it. `again`: what the compiler said stays, the planner is compared anew.
int write_record(bool again) {
  std::vector<Entry> entries = grid_entries();
  std::map<std::string, Json> all = record();
  if (!again) {
    std::vector<Lowered> lowered = lower_all(entries);
    for (size_t i = 0; i < entries.size(); ++i) all[entries[i].text] = record_of(entries[i], lowered[i]);
  }
  std::ofstream file(kRecord);
  for (const Entry& entry : entries) {
    Json json = all[entry.text];
    if (again && !json.is_null()) judge(entry, lowered_of(json), &json);
    if (!json.is_null()) file << json.dump() << "\n";
  }
  return file ? 0 : 1;
}

}  // namespace thalweg::ascend::tests
