// Case strings: testing/README.md has the grammar.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <stdexcept>

#include "testing/case.h"
#include "testing/fields.h"

namespace thalweg::testing {
namespace {

[[noreturn]] void bad_token(const std::string& op, const std::string& token, const std::string& what,
                            const std::string& got, const std::string& expected) {
  throw std::invalid_argument(op + ": '" + token + "': " + what + ", got '" + got + "', expected " + expected);
}

bool contains(const std::vector<std::string>& list, std::string_view word) {
  for (const std::string& item : list)
    if (item == word) return true;
  return false;
}

std::string joined(const std::vector<std::string>& list) {
  std::string text;
  for (const std::string& word : list) text += (text.empty() ? "" : " ") + word;
  return text;
}

std::vector<std::string> knob_names(const thalweg_pass& pass) {
  std::vector<std::string> names;
  try {
    for (const std::string& knob : split(spec_of(pass).knobs, ';')) {
      size_t start = knob.find_first_not_of(' ');
      if (start != std::string::npos) names.push_back(knob.substr(start, knob.find(':') - start));
    }
  } catch (const std::out_of_range&) {  // an operator without a spec has no knobs
  }
  return names;
}

bool parse_number(std::string_view text, double* value) {
  std::string copy(text);
  if (copy.empty()) return false;
  char* end = nullptr;
  *value = std::strtod(copy.c_str(), &end);
  return *end == 0;
}

bool parse_integer(std::string_view text, int64_t* value) {
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

// "B12" -> B, 12 when B is a size name of the pass.
bool parse_size(const thalweg_pass& pass, const std::string& token, std::string* name, int64_t* value) {
  size_t digits = token.find_first_of("0123456789");
  if (digits == std::string::npos || digits == 0) return false;
  *name = token.substr(0, digits);
  return contains(size_names(pass), *name) && parse_integer(std::string_view(token).substr(digits), value);
}

bool is_gradient(const thalweg_field& f) { return std::string_view(f.name).starts_with("d_"); }

// Throws unless `value` is one that the option field takes.
void check_option(const std::string& op, const thalweg_field& field, const std::string& token, const std::string& value) {
  double number;
  int64_t integer;
  if (field.kind == THALWEG_REAL && !parse_number(value, &number)) bad_token(op, token, "value", value, "a number");
  if (field.kind == THALWEG_COUNT && !parse_integer(value, &integer)) bad_token(op, token, "value", value, "an integer");
  if (field.kind == THALWEG_FLAG && value != "0" && value != "1") bad_token(op, token, "value", value, "0 or 1");
  if (field.kind == THALWEG_CHOICE && !contains(words(field.choices), value) && !parse_integer(value, &integer))
    bad_token(op, token, "value", value, std::string("one of ") + field.choices);
}

// One token beside dtype and sizes; false when the pass does not know it.
bool take_option(Case* c, const std::string& op, const std::string& token) {
  size_t equals = token.find('=');
  std::string name = token.substr(0, equals);
  std::string value = equals == std::string::npos ? "" : token.substr(equals + 1);
  int64_t number = 0;
  if (name == "kernel") return c->kernel = value, true;
  if (token == "cuda") return c->cuda = true;
  if (name == "seed" || name == "threads") {
    if (!parse_integer(value, &number) || number < 0) bad_token(op, token, "value", value, "an integer >= 0");
    if (name == "seed") c->seed = uint64_t(number);
    if (name == "threads") c->threads = number;
    return true;
  }
  if (name == "guard") {
    if (value != "page" && value != "front") bad_token(op, token, "value", value, "page or front");
    return c->options[name] = value, true;
  }
  if ((name == "varlen" && find_field(*c->pass, "cu_seqlens")) || (name == "varlen_k" && find_field(*c->pass, "cu_seqlens_k"))) {
    for (const std::string& length : split(value, '+'))
      if (!value.empty() && (!parse_integer(length, &number) || number < 0)) bad_token(op, token, "length", length, "an integer >= 0");
    return c->options[name] = value, true;
  }
  if (token == "state") {
    bool any = false;
    for (const thalweg_field* field : tensor_fields(*c->pass))
      if (is_state(*field) && words(field->dims)[0] != "R") {
        any = true;
        if (field->optional) c->options.try_emplace(field->name, "");
      }
    return any;
  }
  if (const thalweg_field* field = find_field(*c->pass, name)) {
    if (field->kind != THALWEG_TENSOR) {
      if (field->kind == THALWEG_FLAG && value.empty()) value = "1";
      check_option(op, *field, token, value);
    }
    return c->options[name] = value, true;
  }
  if (contains(knob_names(*c->pass), name)) return c->options[name] = value.empty() ? "1" : value, true;
  return false;
}

// Which optional gradients are there when the text names none: testing/README.md.
void default_gradients(Case* c, const std::vector<std::string>& named) {
  bool any_required = false, named_in = false, named_out = false;
  for (const thalweg_field* field : tensor_fields(*c->pass)) {
    if (is_output(*field) && !field->optional) any_required = true;
    if (!field->optional || !contains(named, field->name)) continue;
    if (is_output(*field)) named_out = true;
    if (field->role == THALWEG_IN && is_gradient(*field)) named_in = true;
  }
  for (const thalweg_field* field : tensor_fields(*c->pass)) {
    if (!field->optional || is_state(*field) || !is_gradient(*field)) continue;
    const thalweg_field* of = find_field(*c->pass, field->name + 2);
    if (field->role == THALWEG_IN && !named_in && (!of || is_present(*c, *of))) c->options.try_emplace(field->name, "");
    if (field->role == THALWEG_OUT && !any_required && !named_out && of && is_present(*c, *of)) c->options.try_emplace(field->name, "");
  }
}

// A dtype given to the first tensor is the case's.
void take_main_dtype(Case* c) {
  auto it = c->options.find(tensor_fields(*c->pass)[0]->name);
  if (it == c->options.end()) return;
  size_t at = it->second.find('@');
  if (thalweg_dtype dtype = parse_dtype(it->second.substr(0, at))) c->dtype = dtype;
  it->second.erase(0, std::min(at, it->second.size()));
  if (it->second.empty()) c->options.erase(it);
}

// N and T from varlen; then what the operator knows; then N = B.
void complete_sizes(Case* c) {
  std::map<std::string, int64_t>& sizes = c->sizes;
  if (c->has("cu_seqlens") && !c->has("varlen") && !(sizes.count("N") && sizes.count("T")))
    throw std::invalid_argument(pass_name(*c->pass) + ": cu_seqlens, got no lengths, expected varlen=, or N and T");
  if (c->has("varlen")) {
    std::vector<int64_t> lengths = lengths_of(*c);
    int64_t total = 0;
    for (int64_t length : lengths) total += length;
    sizes.try_emplace("B", 1);
    sizes.try_emplace("T", total);
    if (sizes.try_emplace("N", int64_t(lengths.size())).first->second != int64_t(lengths.size()))
      throw std::invalid_argument(pass_name(*c->pass) + ": N, got " + std::to_string(sizes["N"]) + ", expected " + std::to_string(lengths.size()) + " (from varlen)");
    if (sizes["T"] < total)
      throw std::invalid_argument(pass_name(*c->pass) + ": T, got " + std::to_string(sizes["T"]) + ", expected at least " + std::to_string(total) + " (from varlen)");
  }
  if (c->has("varlen_k")) {
    std::vector<int64_t> lengths = key_lengths_of(*c);
    int64_t total = 0;
    for (int64_t length : lengths) total += length;
    if (int64_t(lengths.size()) != sizes["N"])
      throw std::invalid_argument(pass_name(*c->pass) + ": varlen_k, got " + std::to_string(lengths.size()) + " lengths, expected " + std::to_string(sizes["N"]) + " (from varlen)");
    if (sizes.try_emplace("S", total).first->second < total)
      throw std::invalid_argument(pass_name(*c->pass) + ": S, got " + std::to_string(sizes["S"]) + ", expected at least " + std::to_string(total) + " (from varlen_k)");
  }
  try {
    spec_of(*c->pass).complete(*c);
  } catch (const std::out_of_range&) {
  }
  std::vector<std::string> known = size_names(*c->pass);
  if (contains(known, "N") && sizes.count("B")) sizes.try_emplace("N", sizes["B"]);
  for (auto it = sizes.begin(); it != sizes.end();) it = contains(known, it->first) ? std::next(it) : sizes.erase(it);
  for (const thalweg_field* field : tensor_fields(*c->pass)) {
    if (!is_present(*c, *field)) continue;
    double elements = 1;
    for (int64_t n : shape_in(*c, *field)) elements *= double(n);
    if (elements >= 0x1p59)  // bytes of float64 stay below 2^63
      throw std::invalid_argument(pass_name(*c->pass) + ": " + field->name + ": shape, got more than 2^59 elements, expected fewer");
    int64_t offset;
    layout_in(*c, *field, &offset);
  }
}

// A token as the whole operator sees it: does some pass of it know the token?
bool known_elsewhere(const std::string& op, const std::string& token) {
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i) {
    if (op != pass->op) continue;
    Case other;
    other.pass = pass;
    std::string name;
    int64_t number;
    if (parse_size(*pass, token, &name, &number) || take_option(&other, op, token)) return true;
  }
  return false;
}

}  // namespace

// The numbers of option `name`; without it, N lengths that add up to `total`, from the seed.
static std::vector<int64_t> lengths_in(const Case& c, const std::string& name, int64_t total, uint64_t salt) {
  std::vector<int64_t> lengths;
  auto it = c.options.find(name);
  if (it == c.options.end()) {
    Random random(c.seed ^ salt);
    std::vector<int64_t> cuts = {0, total};
    for (int64_t n = 1; n < c.size("N"); ++n) cuts.push_back(random.below(total + 1));
    std::sort(cuts.begin(), cuts.end());
    for (size_t n = 0; n < size_t(c.size("N")); ++n) lengths.push_back(cuts[n + 1] - cuts[n]);
    return lengths;
  }
  if (it->second.empty()) return lengths;
  for (const std::string& length : split(it->second, '+')) lengths.push_back(std::stoll(length));
  return lengths;
}

std::vector<int64_t> lengths_of(const Case& c) { return lengths_in(c, "varlen", c.size("T"), 0x6375u); }
std::vector<int64_t> key_lengths_of(const Case& c) { return lengths_in(c, "varlen_k", c.size("S"), 0x6b63u); }

Case parse_tokens(const thalweg_pass& pass, std::string_view text, bool shared) {
  Case c;
  c.pass = &pass;
  std::string where = pass_name(pass);
  std::vector<std::string> named;
  bool dtype_given = false;
  for (const std::string& token : split(text, ',')) {
    if (token.empty()) continue;
    std::string name;
    int64_t number = 0;
    if (thalweg_dtype dtype = parse_dtype(token)) {
      if (is_integer(dtype)) bad_token(where, token, "dtype", token, "one of f64 f32 bf16 f16");
      if (dtype_given && c.dtype != dtype) bad_token(where, token, "dtype given twice", token, thalweg_dtype_name(c.dtype));
      c.dtype = dtype;
      dtype_given = true;
    } else if (parse_size(pass, token, &name, &number)) {
      if (c.sizes.count(name) && c.sizes[name] != number) bad_token(where, token, "size given twice", std::to_string(number), std::to_string(c.sizes[name]));
      c.sizes[name] = number;
    } else if (take_option(&c, where, token)) {
      named.push_back(token.substr(0, token.find('=')));
    } else if (shared && known_elsewhere(pass.op, token)) {
      if (token[0] == 'B' && parse_integer(std::string_view(token).substr(1), &number)) c.sizes.try_emplace("N", number);
    } else {
      std::vector<std::string> fields;
      for (int64_t i = 0; i < pass.num_fields; ++i) fields.push_back(pass.fields[i].name);
      bad_token(where, token, "unknown", token,
                "a dtype, a size (" + joined(size_names(pass)) + "), a field (" + joined(fields) +
                    "), state, varlen, guard, kernel, seed, threads, cuda" + (knob_names(pass).empty() ? "" : ", or a knob (" + joined(knob_names(pass)) + ")"));
    }
  }
  take_main_dtype(&c);
  default_gradients(&c, named);
  complete_sizes(&c);
  return c;
}

Case parse_case(std::string_view text) {
  size_t colon = text.find(':');
  std::string head(text.substr(0, colon));
  std::string known;
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i) {
    if (pass_name(*pass) == head) return parse_tokens(*pass, colon == std::string_view::npos ? "" : text.substr(colon + 1), false);
    known += (i ? " " : "") + pass_name(*pass);
  }
  throw std::invalid_argument("case '" + std::string(text) + "': pass, got '" + head + "', expected one of " + known);
}

std::string row_of(const std::string& kernel) { return kernel.substr(0, kernel.find('/')); }

bool is_cuda_row(const thalweg_pass& pass, const std::string& kernel) {
  const char* isa = "";
  for (int64_t i = 0; const char* row = pass.kernel_at(i, &isa); ++i)
    if (row_of(kernel) == row) return std::string_view(isa) == "sm_90a";
  return false;
}

bool on_cuda(const Case& c) { return c.cuda || is_cuda_row(*c.pass, c.kernel); }

double Case::number(const std::string& option, double otherwise) const {
  auto it = options.find(option);
  if (it == options.end()) return otherwise;
  double value;
  if (!parse_number(it->second, &value)) bad_token(pass_name(*pass), option + "=" + it->second, "value", it->second, "a number");
  return value;
}

int64_t Case::size(const std::string& name) const {
  auto it = sizes.find(name);
  return it == sizes.end() ? 0 : it->second;
}

std::string Case::text() const {
  std::string text = pass_name(*pass) + ":" + thalweg_dtype_name(dtype);
  for (const std::string& name : size_names(*pass))
    if (sizes.count(name)) text += "," + name + std::to_string(sizes.at(name));
  std::map<std::string, std::string> rest = options;
  for (int64_t i = 0; i < pass->num_fields; ++i) {
    auto it = rest.find(pass->fields[i].name);
    if (it == rest.end()) continue;
    text += "," + it->first;
    if (!it->second.empty() && !(pass->fields[i].kind == THALWEG_FLAG && it->second == "1")) text += "=" + it->second;
    rest.erase(it);
  }
  for (const auto& [name, value] : rest) text += "," + name + "=" + value;
  if (!kernel.empty()) text += ",kernel=" + kernel;
  if (seed != 42) text += ",seed=" + std::to_string(seed);
  if (threads != 0) text += ",threads=" + std::to_string(threads);
  if (cuda) text += ",cuda";
  return text;
}

}  // namespace thalweg::testing
