#include "thalweg/ascend/hivm.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace thalweg::ascend {
namespace {

constexpr std::string_view kBegin = "IR Dump Before ConvertHIVMToStandard";
constexpr int64_t kUnknown = -1;

bool starts_with(std::string_view text, std::string_view with) { return text.substr(0, with.size()) == with; }

std::string_view trimmed(std::string_view text) {
  size_t begin = text.find_first_not_of(" \t"), end = text.find_last_not_of(" \t\r");
  return begin == std::string_view::npos ? std::string_view() : text.substr(begin, end + 1 - begin);
}

// "?" is kUnknown.
bool parse_int(std::string_view text, int64_t* value) {
  text = trimmed(text);
  if (text == "?") return *value = kUnknown, true;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

// memref<64x128xf32, strided<[512, 1], offset: ?>, #hivm.address_space<gm>>
struct Type {
  std::vector<int64_t> sizes, strides;
  int64_t bits = 0;
  std::string space;  // gm, ub, cbuf, cc

  int64_t bytes() const {
    int64_t count = bits;
    for (int64_t size : sizes) count *= size == kUnknown ? 0 : size;
    return (count + 7) / 8;
  }
};

int64_t element_bits(std::string_view name) {
  if (name == "bf16") return 16;
  int64_t bits = 0;
  if (name.size() < 2 || (name[0] != 'f' && name[0] != 'i') || !parse_int(name.substr(1), &bits)) return 0;
  return bits;
}

// The text from "memref<" to its closing bracket; empty when there is none from `from` on.
std::string_view memref_at(std::string_view line, size_t from) {
  size_t begin = line.find("memref<", from);
  if (begin == std::string_view::npos) return {};
  int depth = 0;
  for (size_t i = begin; i < line.size(); ++i) {
    if (line[i] == '<') ++depth;
    if (line[i] == '>' && line[i - 1] != '-' && --depth == 0) return line.substr(begin, i + 1 - begin);
  }
  return {};
}

bool parse_type(std::string_view text, Type* type) {
  if (!starts_with(text, "memref<")) return false;
  *type = {};
  std::string_view body = text.substr(7, text.size() - 8), shape = trimmed(body.substr(0, body.find(',')));
  for (size_t x; (x = shape.find('x')) != std::string_view::npos;) {
    int64_t size;
    if (!parse_int(shape.substr(0, x), &size)) break;
    type->sizes.push_back(size);
    shape.remove_prefix(x + 1);
  }
  if (!(type->bits = element_bits(shape))) return false;
  if (size_t at = body.find("address_space<"); at != std::string_view::npos) {
    at += 14;
    type->space = std::string(body.substr(at, body.find('>', at) - at));
  }
  if (size_t at = body.find("strided<["); at != std::string_view::npos) {
    at += 9;
    std::string_view list = body.substr(at, body.find(']', at) - at);
    while (!list.empty()) {
      size_t comma = std::min(list.find(','), list.size());
      int64_t stride;
      if (!parse_int(list.substr(0, comma), &stride)) return false;
      type->strides.push_back(stride);
      list.remove_prefix(std::min(comma + 1, list.size()));
    }
    if (type->strides.size() != type->sizes.size()) return false;
  } else {
    type->strides.assign(type->sizes.size(), 1);
    for (size_t i = type->sizes.size(); i-- > 1;)
      type->strides[i - 1] = type->sizes[i] == kUnknown || type->strides[i] == kUnknown ? kUnknown : type->strides[i] * type->sizes[i];
  }
  return true;
}

// The longest contiguous suffix is a run; what stands before it counts runs.
void count_bursts(const Type& type, int64_t rows, Transfer* transfer) {
  int64_t run = 1, bursts = 1;
  bool contiguous = true;
  for (size_t i = type.sizes.size(); i-- > 0;) {
    int64_t size = type.sizes[i] == kUnknown ? rows : type.sizes[i];
    if (size == 1) continue;
    contiguous = contiguous && type.strides[i] == run;
    (contiguous ? run : bursts) *= size;
  }
  transfer->bursts = bursts;
  transfer->bytes = bursts * run * type.bits / 8;
}

class DumpParser {
 public:
  DumpParser(std::string_view text, int64_t rows) : text_(text), rows_(rows) {}

  Dump parse() {
    size_t begin = text_.find(kBegin);
    if (begin == std::string_view::npos) throw std::runtime_error("dump: got no '" + std::string(kBegin) + "', expected one");
    number_ = 2 + std::count(text_.begin(), text_.begin() + std::ptrdiff_t(begin), '\n');
    text_.remove_prefix(std::min(text_.find('\n', begin), text_.size()));
    bool closed = false;
    for (; !text_.empty() && !closed; ++number_) {
      text_.remove_prefix(1);  // the line break
      size_t end = std::min(text_.find('\n'), text_.size());
      std::string_view line = trimmed(text_.substr(0, end));
      text_.remove_prefix(end);
      if (starts_with(line, "module")) inside_ = true;
      if (inside_) closed = take(line);
    }
    if (!closed) fail("the end of the text", "the module's closing brace");
    return std::move(dump_);
  }

 private:
  struct Scope {
    bool is_loop = false;
    bool is_function = false;
    int64_t trips = 1;  // kUnknown: data
    bool has_scalar = false;
  };

  [[noreturn]] void fail(std::string_view got, const std::string& expected) const {
    throw std::runtime_error("dump, line " + std::to_string(number_) + ": got '" + std::string(got.substr(0, 120)) + "', expected " + expected);
  }

  // True when the module is closed.
  bool take(std::string_view line) {
    if (starts_with(line, "}")) {
      if (scopes_.empty()) fail(line, "no closing brace here");
      if (scopes_.back().is_loop && scopes_.back().has_scalar) ++function().scalar_loops;
      scopes_.pop_back();
      if (scopes_.empty()) return true;
    }
    if (starts_with(line, "func.func")) open_function(line);
    take_definition(line);
    if (!dump_.functions.empty() && scopes_.size() >= 2) take_operation(line);
    if (!line.empty() && line.back() == '{') {
      Scope scope;
      scope.is_function = starts_with(line, "func.func");
      scope.is_loop = line.find("scf.for ") != std::string_view::npos || line.find("scf.while") != std::string_view::npos;
      if (scope.is_loop) scope.trips = trip_count(line);
      scopes_.push_back(scope);
    }
    return false;
  }

  Function& function() { return dump_.functions.back(); }

  void open_function(std::string_view line) {
    size_t at = line.find('@'), end = line.find('(', at);
    if (at == std::string_view::npos || end == std::string_view::npos) fail(line, "func.func @NAME(");
    Function f;
    f.name = std::string(line.substr(at + 1, end - at - 1));
    f.cube = f.name.ends_with("_mix_aic");
    is_host_ = f.name.ends_with("_function");
    is_workspace_ = f.name.ends_with("_infer_workspace_shape_function");
    constants_.clear();
    sources_.clear();
    if (is_host_)
      host_ = f;
    else
      dump_.functions.push_back(f);
  }

  static std::string_view word_at(std::string_view line, size_t at) {
    at = std::min(at, line.size());
    size_t end = at;
    while (end < line.size() && (std::isalnum(static_cast<unsigned char>(line[end])) || line[end] == '%' || line[end] == '_' || line[end] == '#' || line[end] == '-')) ++end;
    return line.substr(at, end - at);
  }

  // Constants, tiles, what a collapsed view was made of, and the whole tile of which a cut one is the first rows.
  void take_definition(std::string_view line) {
    size_t equals = line.find(" = ");
    if (line.empty() || line[0] != '%' || equals == std::string_view::npos) return;
    std::string name(line.substr(0, equals));
    std::string_view right = line.substr(equals + 3);
    sources_.erase(name);  // of another scope
    if (starts_with(right, "arith.constant ")) {
      int64_t value;
      if (parse_int(word_at(right, 15), &value)) {
        constants_[name] = value;
        if (is_workspace_) dump_.workspace = value;
      }
    } else if (starts_with(right, "memref.collapse_shape ") || starts_with(right, "memref.cast ")) {
      std::string from(word_at(right, right.find('%')));
      Type type;
      auto known = sources_.find(from);
      if (known != sources_.end())
        sources_[name] = known->second;
      else if (parse_type(memref_at(right, 0), &type) && type.space == "gm")
        sources_[name] = type;
    } else if (starts_with(right, "memref.subview ")) {
      Type whole, view;
      if (!parse_type(memref_at(right, 0), &whole)) return;
      if (!parse_type(memref_at(right, right.find(" to ")), &view)) return;
      auto known = sources_.find(std::string(word_at(right, right.find('%'))));
      if (known != sources_.end()) whole = known->second;
      if (view.space != "gm" || view.sizes.size() != whole.sizes.size()) return;
      bool is_cut = false;
      for (size_t i = 0; i < view.sizes.size(); ++i)
        if (view.sizes[i] == kUnknown) view.sizes[i] = whole.sizes[i], is_cut = true;
      if (is_cut) sources_[name] = view;
    } else if (starts_with(right, "hivm.hir.pointer_cast(")) {
      Type type;
      std::string_view text = memref_at(right, 0);
      if (!parse_type(text, &type)) fail(line, "memref<sizes x type, ...>");
      std::string_view list = right.substr(22, right.find(')') - 22);
      while (!list.empty() && !is_host_) {
        size_t comma = std::min(list.find(','), list.size());
        auto offset = constants_.find(std::string(trimmed(list.substr(0, comma))));
        if (offset == constants_.end()) fail(line, "a constant address");
        int64_t& placed = function().placed[type.space];
        placed = std::max(placed, offset->second + type.bytes());
        list.remove_prefix(std::min(comma + 1, list.size()));
      }
    }
  }

  int64_t trip_count(std::string_view line) const {
    auto constant = [&](std::string_view key) -> const int64_t* {
      size_t at = line.find(key);
      if (at == std::string_view::npos) return nullptr;
      auto it = constants_.find(std::string(word_at(line, at + key.size())));
      return it == constants_.end() ? nullptr : &it->second;
    };
    const int64_t *low = constant(" = "), *high = constant(" to "), *step = constant(" step ");
    if (!low || !high || !step || *step <= 0) return kUnknown;
    return std::max<int64_t>(0, (*high - *low + *step - 1) / *step);
  }

  void take_operation(std::string_view line) {
    if (is_host_) return;
    bool in_loop = false;
    for (const Scope& scope : scopes_) in_loop = in_loop || scope.is_loop;
    if (line.find("memref.load ") != std::string_view::npos || starts_with(line, "memref.store ")) {
      if (!in_loop) return;
      ++function().scalar_accesses;
      for (size_t i = scopes_.size(); i-- > 0;)
        if (scopes_[i].is_loop) {
          scopes_[i].has_scalar = true;
          break;
        }
      return;
    }
    if (!starts_with(line, "hivm.hir.")) return;
    std::string_view op = word_at(line, 9);
    if (op == "mmadL1")
      ++function().products;
    else if (op == "load" || op == "store" || op == "nd2nz" || op == "fixpipe")
      take_transfer(line, op);
    else if (op[0] == 'v')
      ++function().vector_ops;
  }

  void take_transfer(std::string_view line, std::string_view op) {
    Transfer transfer;
    transfer.op = std::string(op);
    transfer.out = op == "store" || op == "fixpipe";
    size_t at = line.find(transfer.out ? "outs(" : "ins(");
    if (at == std::string_view::npos) fail(line, transfer.out ? "outs(" : "ins(");
    Type type;
    if (!parse_type(memref_at(line, at), &type)) fail(line, "memref<sizes x type, ...>");
    if (type.space != "gm") return;  // between buffers of the core
    auto source = sources_.find(std::string(word_at(line, line.find('%', at))));
    count_bursts(source == sources_.end() ? type : source->second, rows_, &transfer);
    for (const Scope& scope : scopes_) {
      if (!scope.is_loop) continue;
      if (scope.trips == kUnknown)
        transfer.per_pass = true;
      else
        transfer.times *= scope.trips;
    }
    function().transfers.push_back(transfer);
  }

  std::string_view text_;
  int64_t rows_;
  int64_t number_ = 1;
  bool inside_ = false, is_host_ = false, is_workspace_ = false;
  Dump dump_;
  Function host_;
  std::vector<Scope> scopes_;
  std::map<std::string, int64_t> constants_;
  std::map<std::string, Type> sources_;
};

}  // namespace

Function::Sum Function::sum(bool out) const {
  Sum total;
  for (const Transfer& t : transfers) {
    if (t.out != out) continue;
    total.bursts += t.bursts * t.times;
    total.bytes += t.bytes * t.times;
  }
  return total;
}

const Function* Dump::find(bool cube) const {
  for (const Function& function : functions)
    if (function.cube == cube) return &function;
  return nullptr;
}

Dump parse_dump(std::string_view text, int64_t rows) { return DumpParser(text, rows).parse(); }

std::map<std::string, int64_t> parse_memory(std::string_view text) {
  struct Tile {
    int64_t bytes, first, last;
  };
  std::map<std::string, int64_t> need;
  try {
    nlohmann::json root = nlohmann::json::parse(text);
    for (const auto& record : root.at("Record")) {
      // Aliases of one buffer, by space, first offset and interval.
      std::map<std::string, std::map<std::vector<int64_t>, int64_t>> buffers;
      for (const auto& entry : record.at("memory_info_array")) {
        std::string buffer = entry.at("buffer").get<std::string>();
        size_t at = buffer.find("address_space<");
        if (at == std::string::npos) continue;
        at += 14;
        std::string space = buffer.substr(at, buffer.find('>', at) - at);
        std::vector<int64_t> key{entry.at("offset").at(0).get<int64_t>(), entry.at("life_time_in_ir").at(0).get<int64_t>(),
                                 entry.at("life_time_in_ir").at(1).get<int64_t>()};
        int64_t bytes = (entry.at("extent").get<int64_t>() + 255) / 256 * 32 * int64_t(entry.at("offset").size());
        int64_t& largest = buffers[space][key];
        largest = std::max(largest, bytes);
      }
      for (const auto& [space, tiles] : buffers)
        for (const auto& [at, ignored] : tiles) {
          int64_t alive = 0;  // where a tile begins
          for (const auto& [key, bytes] : tiles)
            if (key[1] <= at[1] && at[1] <= key[2]) alive += bytes;
          need[space] = std::max(need[space], alive);
        }
    }
  } catch (const nlohmann::json::exception& e) {
    throw std::runtime_error(std::string("memory file: ") + e.what());
  }
  return need;
}

}  // namespace thalweg::ascend
