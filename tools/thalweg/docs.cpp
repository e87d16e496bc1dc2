// thalweg docs: the tables of the operators' READMEs, from the tables in the code.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "testing/testing.h"
#include "tools/thalweg/tool.h"

namespace thalweg::tool {
namespace {

constexpr char kEnd[] = "<!-- end -->";

std::string escaped(std::string text) {
  for (size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, "\\");
  return text;
}

std::string strides_of(const thalweg_field& f) {
  if (f.kind != THALWEG_TENSOR) return "";
  return f.layout == THALWEG_ROWS ? "last axis contiguous" : f.layout == THALWEG_STATE ? "one of the last two axes contiguous" : "any";
}

std::string type_of(const thalweg_field& f) {
  switch (f.kind) {
    case THALWEG_TENSOR: return f.dtypes[0] == '=' ? fmt::format("as {}", f.dtypes + 1) : f.dtypes;
    case THALWEG_FLAG: return "flag";
    case THALWEG_COUNT: return "count";
    case THALWEG_REAL: return "real";
    case THALWEG_CHOICE: return f.choices;
  }
  return "";
}

std::string arguments(const thalweg_pass& pass) {
  std::string out = fmt::format("### {}\n\n{}\n\n| argument | role | shape | type | strides | meaning |\n|---|---|---|---|---|---|\n", pass.name, pass.doc);
  const char* roles[] = {"in", "out", "in and out", "option"};
  for (int64_t i = 0; i < pass.num_fields; ++i) {
    const thalweg_field& f = pass.fields[i];
    std::string role = std::string(roles[f.role]) + (f.kind == THALWEG_TENSOR && f.optional ? ", optional" : "");
    out += fmt::format("| `{}` | {} | {} | {} | {} | {} |\n", f.name, role, f.kind == THALWEG_TENSOR ? fmt::format("[{}]", f.dims) : "", escaped(type_of(f)), strides_of(f), escaped(f.doc));
  }
  if (pass.refused && *pass.refused) {
    out += "\nRefused by name:\n\n";
    for (const std::string& entry : words(pass.refused, ';')) out += fmt::format("- `{}`{}\n", entry.substr(0, entry.find(':')), entry.find(':') == std::string::npos ? "" : entry.substr(entry.find(':')));
  }
  return out;
}

std::string kernels(const thalweg_pass& pass) {
  std::string out = fmt::format("### {}\n\n| kernel, best first | backend | instruction set |\n|---|---|---|\n", pass.name);
  const char* isa = nullptr;
  for (int64_t i = 0; const char* name = pass.kernel_at(i, &isa); ++i) out += fmt::format("| `{}` | {} | {} |\n", name, testing::is_cuda_row(pass, name) ? "cuda" : "cpu", isa);
  return out;
}

std::string block(const std::string& op, std::string (*part)(const thalweg_pass&)) {
  std::string out;
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i)
    if (op == pass->op) out += "\n" + part(*pass);
  return out + "\n";
}

// `text` with the block between its two marks replaced.
std::string filled(const std::string& text, const std::string& name, const std::string& content, const std::string& file) {
  std::string mark = "<!-- generated: " + name + " -->";
  size_t begin = text.find(mark);
  if (begin == std::string::npos) throw UsageError(fmt::format("{}: got no line '{}', expected it, and '{}' after it", file, mark, kEnd));
  begin += mark.size();
  size_t end = text.find(kEnd, begin);
  if (end == std::string::npos) throw UsageError(fmt::format("{}: got no '{}' after '{}', expected it", file, kEnd, mark));
  return text.substr(0, begin) + "\n" + content + text.substr(end);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

// A difference line by line, from the longest common subsequence; runs that agree are left out.
void print_difference(const std::string& file, const std::string& is, const std::string& should) {
  std::vector<std::string> a = lines_of(is), b = lines_of(should);
  std::vector<std::vector<int>> common(a.size() + 1, std::vector<int>(b.size() + 1));
  for (size_t i = a.size(); i-- > 0;)
    for (size_t j = b.size(); j-- > 0;) common[i][j] = a[i] == b[j] ? common[i + 1][j + 1] + 1 : std::max(common[i + 1][j], common[i][j + 1]);
  fmt::print("--- {}\n+++ as the code has it\n", file);
  bool together = false;
  for (size_t i = 0, j = 0; i < a.size() || j < b.size();) {
    if (i < a.size() && j < b.size() && a[i] == b[j]) {
      ++i, ++j;
      together = false;
      continue;
    }
    if (!together) fmt::print("@@ line {} @@\n", i + 1);
    together = true;
    if (i < a.size() && (j == b.size() || common[i + 1][j] >= common[i][j + 1])) {
      fmt::print("-{}\n", a[i++]);
    } else {
      fmt::print("+{}\n", b[j++]);
    }
  }
}

std::vector<std::string> operators() {
  std::vector<std::string> out;
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i)
    if (out.empty() || out.back() != pass->op) out.push_back(pass->op);
  return out;
}

int docs(const std::string& root, bool check) {
  namespace fs = std::filesystem;
  if (!fs::is_directory(fs::path(root) / "thalweg/ops")) throw UsageError(fmt::format("--root, got {}, expected the repository's root (with thalweg/ops)", root));
  int differing = 0;
  for (const std::string& op : operators()) {
    std::string file = (fs::path(root) / "thalweg/ops" / op / "README.md").string();
    std::ifstream in(file);
    if (!in) throw UsageError(fmt::format("{}: cannot be opened, expected the operator's README", file));
    std::stringstream buffer;
    buffer << in.rdbuf();
    std::string text = buffer.str();
    std::string should = filled(filled(text, "arguments", block(op, arguments), file), "kernels", block(op, kernels), file);
    if (text == should) continue;
    ++differing;
    if (check) {
      print_difference(file, text, should);
    } else {
      write_text(file, should);
      fmt::print("wrote {}\n", file);
    }
  }
  if (check && differing) fmt::print(stderr, "thalweg: {} READMEs differ from the code; thalweg docs writes them\n", differing);
  return check && differing ? kNegative : kOk;
}

}  // namespace

Action add_docs(CLI::App& app) {
  auto root = std::make_shared<std::string>(".");
  auto check = std::make_shared<bool>(false);
  app.add_option("--root", *root, "The repository (default: the current folder)")->type_name("FOLDER");
  app.add_flag("--check", *check, "Write nothing; exit code 1 and the difference when a table is not as in the code");
  return [=] { return docs(*root, *check); };
}

}  // namespace thalweg::tool
