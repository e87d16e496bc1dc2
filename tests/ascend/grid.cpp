#include "tests/ascend/grid.h"

#include <algorithm>
#include <atomic>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace thalweg::ascend::tests {
namespace {

using Json = nlohmann::ordered_json;

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> words;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, separator);) words.push_back(word);
  return words;
}

std::string trimmed(const std::string& text) {
  size_t begin = text.find_first_not_of(' '), end = text.find_last_not_of(' ');
  return begin == std::string::npos ? "" : text.substr(begin, end + 1 - begin);
}

void expand(const std::string& text, std::vector<std::string>* all) {
  size_t open = text.find('{'), close = text.find('}', open);
  if (open == std::string::npos || close == std::string::npos) return all->push_back(text);
  for (const std::string& word : split(text.substr(open + 1, close - open - 1) + ",", ','))
    expand(text.substr(0, open) + word + text.substr(close + 1), all);
}

std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(path + ": cannot be read");
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    line = trimmed(line.substr(0, line.find('#')));
    if (!line.empty()) lines.push_back(line);
  }
  return lines;
}

Json bytes_json(const std::map<std::string, int64_t>& bytes) {
  Json json = Json::object();
  for (const auto& [space, count] : bytes) json[space_name(space)] = count;
  return json;
}

std::map<std::string, int64_t> bytes_of(const Json& json) {
  std::map<std::string, int64_t> bytes;
  for (const char* space : {"ub", "cbuf", "cc"})
    if (json.contains(space_name(space))) bytes[space] = json.at(space_name(space)).get<int64_t>();
  return bytes;
}

}  // namespace

Entry parse_entry(const std::string& text) {
  std::vector<std::string> words = split(text, ';');
  Options options;
  const Target* target = find_target("Ascend910B3");
  for (size_t i = 1; i < words.size(); ++i) {
    const std::string& word = words[i];
    auto side = [&](const char* name, int64_t* size) {
      if (word.rfind(name, 0) != 0) return false;
      *size = std::stoll(word.substr(3));
      return true;
    };
    if (word.empty()) continue;
    if (word == "persistent")
      options.mode = Mode::kPersistent;
    else if (word == "tokens")
      options.gate = Gate::kTokensFirst;
    else if (word == "off")
      options.buffering = Buffering::kOff;
    else if (word == "vector")
      options.buffering = Buffering::kVector;
    else if (word == "interior")
      options.interior = true;
    else if (word == "split")
      options.split = true;
    else if (!side("BT=", &options.tile.BT) && !side("BM=", &options.tile.BM) && !side("BV=", &options.tile.V) && !(target = find_target(word)))
      throw std::invalid_argument("grid: '" + text + "': option, got '" + word + "'");
  }
  return {text, make_plan(parse_problem(words.at(0)), *target, options)};
}

std::vector<std::string> read_grid(const std::string& path) {
  std::vector<std::string> entries;
  for (const std::string& line : lines_of(path)) expand(line, &entries);
  for (std::string& entry : entries)  // an empty word leaves its comma behind
    for (size_t i = 0; i < entry.size();)
      if (entry[i] == ',' && (i + 1 == entry.size() || entry[i + 1] == ',' || entry[i + 1] == ';'))
        entry.erase(i, 1);
      else
        ++i;
  std::set<std::string> seen;
  std::erase_if(entries, [&](const std::string& entry) { return !seen.insert(entry).second; });
  return entries;
}

std::vector<Entry> grid_entries() {
  std::vector<Entry> entries;
  for (const std::string& text : read_grid(std::string(THALWEG_ASCEND_DATA) + "/grid.txt")) {
    std::string name = text.substr(0, std::min(text.find(':'), text.size()));
    if (find_kernel(name)) entries.push_back(parse_entry(text));  // operators that this build lacks are left out
  }
  return entries;
}

std::string mlir_of(const Entry& entry) { return find_kernel(entry.plan.problem.kernel)->emit(entry.plan); }

std::string digest_of(const Entry& entry) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : mlir_of(entry)) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  std::ostringstream text;
  text << std::hex << hash;
  return text.str();
}

Json record_of(const Entry& entry, const Lowered& lowered) {
  Json json;
  json["case"] = entry.text;
  json["digest"] = digest_of(entry);
  json["kernel"] = "ascendnpu-ir-1.2.0";
  json["target"] = entry.plan.target.name;
  json["verdict"] = lowered.outcome == Outcome::kFits ? "fits" : lowered.outcome == Outcome::kOverflow ? "overflow" : "none: " + lowered.message;
  if (lowered.outcome == Outcome::kOverflow) json["overflow"] = {{"space", space_name(lowered.space)}, {"required", lowered.required}, {"available", lowered.available}};
  if (!lowered.need.empty()) json["need"] = bytes_json(lowered.need);
  if (!lowered.placed.empty()) json["placed"] = bytes_json(lowered.placed);
  for (const Function& f : lowered.dump.functions) {
    Function::Sum in = f.sum(false), out = f.sum(true);
    json[f.cube ? "AIC" : "AIV"] = {{"bursts_in", in.bursts}, {"bytes_in", in.bytes}, {"bursts_out", out.bursts}, {"bytes_out", out.bytes},
                                    {"vector_ops", f.vector_ops}, {"products", f.products}, {"scalar_loops", f.scalar_loops}, {"scalar_accesses", f.scalar_accesses}};
  }
  if (lowered.dump.workspace) json["workspace"] = lowered.dump.workspace;
  judge(entry, lowered, &json);
  return json;
}

void judge(const Entry& entry, const Lowered& lowered, Json* json) {
  std::vector<std::string> differ = differences(entry.plan, lowered);
  (*json)["verified"] = lowered.has_verdict() && differ.empty();
  json->erase("differences");
  if (!differ.empty()) (*json)["differences"] = differ;
}

Lowered lowered_of(const Json& json) {
  Lowered lowered;
  std::string verdict = json.at("verdict").get<std::string>();
  lowered.outcome = verdict == "fits" ? Outcome::kFits : verdict == "overflow" ? Outcome::kOverflow : Outcome::kError;
  lowered.message = verdict;
  if (lowered.outcome == Outcome::kOverflow) {
    const Json& overflow = json.at("overflow");
    std::string name = overflow.at("space").get<std::string>();
    lowered.space = name == "UB" ? "ub" : name == "L1" ? "cbuf" : "cc";
    lowered.required = overflow.at("required").get<int64_t>(), lowered.available = overflow.at("available").get<int64_t>();
    lowered.message = name + " " + std::to_string(lowered.required) + " of " + std::to_string(lowered.available);
  }
  if (json.contains("need")) lowered.need = bytes_of(json.at("need"));
  if (json.contains("placed")) lowered.placed = bytes_of(json.at("placed"));
  for (const char* core : {"AIC", "AIV"}) {
    if (!json.contains(core)) continue;
    const Json& counts = json.at(core);
    Function f;
    f.cube = std::string(core) == "AIC";
    f.transfers.push_back({"in", false, counts.at("bursts_in").get<int64_t>(), counts.at("bytes_in").get<int64_t>()});
    f.transfers.push_back({"out", true, counts.at("bursts_out").get<int64_t>(), counts.at("bytes_out").get<int64_t>()});
    f.scalar_accesses = counts.at("scalar_accesses").get<int64_t>();
    lowered.dump.functions.push_back(f);
  }
  if (json.contains("workspace")) lowered.dump.workspace = json.at("workspace").get<int64_t>();
  return lowered;
}

std::vector<Lowered> lower_all(const std::vector<Entry>& entries) {
  struct Question {
    const Plan* plan;
    std::string text;
    Lowered answer;
  };
  std::vector<Question> questions;
  std::map<std::string, size_t> known;  // sizes that no text holds make questions alike
  std::vector<size_t> question_of;
  for (const Entry& entry : entries) {
    const Plan& plan = entry.plan;
    const std::string text = mlir_of(entry);
    const std::string key = std::to_string(int(plan.buffering)) + plan.target.name + text;
    const auto [at, is_new] = known.emplace(key, questions.size());
    if (is_new) questions.push_back({&plan, text, {}});
    question_of.push_back(at->second);
  }
  std::atomic<size_t> next{0};
  auto work = [&] {
    for (size_t i; (i = next++) < questions.size();)
      // The compiler may die by chance, as memory happens to lie: then it is asked again.
      for (int tries = 0; tries < 3; ++tries) {
        questions[i].answer = lower(*questions[i].plan, questions[i].text);
        if (questions[i].answer.outcome != Outcome::kCrash) break;
      }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < std::max(2u, std::thread::hardware_concurrency()); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  std::vector<Lowered> all;
  for (size_t question : question_of) all.push_back(questions[question].answer);
  return all;
}

std::vector<Known> read_known(const std::string& path) {
  std::vector<Known> all;
  for (const std::string& line : lines_of(path)) {
    std::vector<std::string> parts = split(line, '|');
    if (parts.size() != 3) throw std::runtime_error(path + ": got '" + line + "', expected entry | difference | reason");
    all.push_back({trimmed(parts[0]), trimmed(parts[1]), trimmed(parts[2])});
  }
  return all;
}

}  // namespace thalweg::ascend::tests
