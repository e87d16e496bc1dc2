// The grid of cases on which planner and compiler are compared, and the committed record of the compiler's answers.
#ifndef THALWEG_TESTS_ASCEND_GRID_H
#define THALWEG_TESTS_ASCEND_GRID_H

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "thalweg/ascend/lower.h"
#include "thalweg/ascend/plan.h"

namespace thalweg::ascend::tests {

// One entry: a case string and options behind semicolons, without spaces:
//   gated_delta_rule.bwd/dv_local:bf16,T2048,H8,K64,g;persistent;tokens;BT=64;BM=64;BV=64;off;vector;interior;split;Ascend950PR_957b
struct Entry {
  std::string text;
  Plan plan;
};
Entry parse_entry(const std::string& text);  // std::invalid_argument

// The entries of grid.txt: '#' opens a comment, braces stand for every word in them: BT={16,32}. Each
// once.
std::vector<std::string> read_grid(const std::string& path);
std::vector<Entry> grid_entries();  // of grid.txt; operators that this build lacks are left out

std::string mlir_of(const Entry& entry);
std::string digest_of(const Entry& entry);  // of the MLIR text that the compiler was asked about

// A line of the record, and back: what differences() needs of it.
nlohmann::ordered_json record_of(const Entry& entry, const Lowered& lowered);
void judge(const Entry& entry, const Lowered& lowered, nlohmann::ordered_json* record);  // its "verified", "differences"
Lowered lowered_of(const nlohmann::ordered_json& record);

// Lowers every entry, on every core.
std::vector<Lowered> lower_all(const std::vector<Entry>& entries);

// known.txt: "entry | difference | reason", a line each.
struct Known {
  std::string entry, difference, reason;
};
std::vector<Known> read_known(const std::string& path);

}  // namespace thalweg::ascend::tests
#endif
