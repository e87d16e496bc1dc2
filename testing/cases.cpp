// Sets of cases: each operator's cases.txt, and files named on a command line.
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "testing/case.h"
#include "testing/fields.h"
#include "testing/tables.h"

namespace thalweg::testing {
namespace {

std::string trimmed(std::string_view line) {
  line = line.substr(0, line.find('#'));
  size_t first = line.find_first_not_of(" \t\r"), last = line.find_last_not_of(" \t\r");
  return first == std::string_view::npos ? "" : std::string(line.substr(first, last - first + 1));
}

// "T{1,2},K{8,9}" -> "T1,K8", "T1,K9", "T2,K8", "T2,K9": every choice of a word from each pair of braces.
std::vector<std::string> expanded(const std::string& line) {
  size_t open = line.find('{'), close = line.find('}', open);
  if (open == std::string::npos) return {line};
  if (close == std::string::npos) throw std::invalid_argument("'" + line.substr(open) + "': got a {, expected its }");
  std::vector<std::string> lines;
  for (const std::string& word : split(line.substr(open + 1, close - open - 1), ','))
    for (const std::string& rest : expanded(line.substr(close + 1))) lines.push_back(line.substr(0, open) + word + rest);
  return lines;
}

// One line of a set or file: a case, or one for every pass of an operator. `only` is "" or a pass name.
void add_case(const std::string& line, const std::string& only, std::vector<Case>* cases) {
  size_t colon = line.find(':');
  std::string head = line.substr(0, colon), tokens = colon == std::string::npos ? "" : line.substr(colon + 1);
  bool known = false;
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i) {
    bool shared = head == pass->op;
    if (!shared && head != pass_name(*pass)) continue;
    known = true;
    if (!only.empty() && only != pass->op && only != pass_name(*pass)) continue;
    cases->push_back(parse_tokens(*pass, tokens, shared));
  }
  if (!known) parse_case(line);  // throws, and says what there is
}

void add_line(const std::string& line, const std::string& only, std::vector<Case>* cases) {
  for (const std::string& one : expanded(line)) add_case(one, only, cases);
}

std::vector<Case> cases_of_set(const std::string& only, const std::string& set) {
  std::vector<Case> cases;
  bool found = false;
  for (const CaseFile& file : case_files()) {
    if (!only.empty() && only.substr(0, only.find('.')) != file.op) continue;
    std::istringstream lines(file.text);
    std::string here;
    for (std::string line; std::getline(lines, line);) {
      line = trimmed(line);
      if (line.empty()) continue;
      if (line[0] == '[') {
        here = line.substr(1, line.find(']') - 1);
        found = found || here == set;
      } else if (here == set) {
        try {
          add_line(line, only, &cases);
        } catch (const std::invalid_argument& e) {
          throw std::invalid_argument(std::string(file.op) + "/cases.txt: " + line + ": " + e.what());
        }
      }
    }
  }
  if (!found) {
    std::string known;
    for (const std::string& name : set_names()) known += " " + name;
    throw std::invalid_argument("set '" + only + "@" + set + "', got none of that name, expected one of" + known);
  }
  return cases;
}

}  // namespace

std::vector<Case> find_cases(const std::string& name) {
  size_t at = name.find('@');
  if (at != std::string::npos && name.find(':') == std::string::npos) return cases_of_set(name.substr(0, at), name.substr(at + 1));
  std::vector<Case> cases;
  std::error_code ignored;
  if (std::filesystem::is_directory(name, ignored))
    throw std::invalid_argument(name + ": got a directory, expected a case, a file of cases or @set");
  if (std::ifstream file(name); file) {
    int64_t number = 0;
    for (std::string line; std::getline(file, line);) {
      ++number;
      line = trimmed(line);
      if (line.empty() || line[0] == '[') continue;
      try {
        add_line(line, "", &cases);
      } catch (const std::invalid_argument& e) {
        throw std::invalid_argument(name + ":" + std::to_string(number) + ": " + e.what());
      }
    }
    return cases;
  }
  add_line(name, "", &cases);
  return cases;
}

std::vector<std::string> set_names() {
  std::vector<std::string> names;
  for (const CaseFile& file : case_files()) {
    std::istringstream lines(file.text);
    for (std::string line; std::getline(lines, line);) {
      line = trimmed(line);
      if (line.empty() || line[0] != '[') continue;
      std::string set = line.substr(1, line.find(']') - 1);
      bool known = false;
      for (const std::string& other : names) known = known || other == set;
      if (!known) names.push_back(set);
    }
  }
  return names;
}

const Spec& spec_of(const thalweg_pass& pass) {
  for (const Spec* spec : specs())
    if (std::string_view(spec->op) == pass.op && std::string_view(spec->pass) == pass.name) return *spec;
  throw std::out_of_range(pass_name(pass) + ": no spec");
}

}  // namespace thalweg::testing
