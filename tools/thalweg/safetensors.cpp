#include "tools/thalweg/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

namespace thalweg::files {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeader = 100'000'000;
constexpr int kMaxDepth = 3;  // header, tensor, its lists

// A name from a file, short and printable.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (out.size() > 80) return out + "…\"";
    out += (static_cast<unsigned char>(c) < 32 || c == 127) ? '?' : c;
  }
  return out + "\"";
}
std::string short_dump(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() > 80 ? text.substr(0, 77) + "..." : text;
}

json parse_header(const char* begin, const char* end, const std::string& file) {
  std::vector<std::set<std::string>> names(kMaxDepth + 2);
  auto check = [&](int depth, json::parse_event_t event, json& value) {
    if (depth > kMaxDepth) throw FileError(file + ": header: nested too deep, expected name, then dtype, shape, data_offsets");
    if (event == json::parse_event_t::object_start) names[size_t(depth) + 1].clear();
    if (event == json::parse_event_t::key && !names[size_t(depth)].insert(value.get<std::string>()).second)
      throw FileError(file + ": header: " + quoted(value.get<std::string>()) + " is there twice");
    return true;
  };
  try {
    json header = json::parse(begin, end, check);
    if (!header.is_object()) throw FileError(file + ": header: got " + header.type_name() + ", expected a JSON object");
    return header;
  } catch (const json::exception& e) {
    throw FileError(file + ": header: expected a JSON object, got text that is not (" + e.what() + ")");
  }
}

// A whole number of at most int64.
int64_t whole(const json& value, const std::string& where) {
  bool ok = value.is_number_unsigned() && value.get<uint64_t>() <= uint64_t(INT64_MAX);
  if (!ok) throw FileError(where + ", got " + short_dump(value) + ", expected a whole number of 0 or more");
  return int64_t(value.get<uint64_t>());
}

const json& member(const json& entry, const char* name, const std::string& where) {
  auto it = entry.find(name);
  if (it == entry.end()) throw FileError(where + ": " + name + ": missing");
  return *it;
}

Array parse_entry(const std::string& name, const json& entry, Bytes data, int64_t* begin, const std::string& file) {
  std::string where = file + ": " + quoted(name);
  if (!entry.is_object()) throw FileError(where + ": got " + short_dump(entry) + ", expected an object");
  for (const auto& item : entry.items())
    if (item.key() != "dtype" && item.key() != "shape" && item.key() != "data_offsets")
      throw FileError(where + ": got member " + quoted(item.key()) + ", expected dtype, shape, data_offsets");
  Array array;
  array.name = name;
  const json& dtype = member(entry, "dtype", where);
  const FileDtype* row = dtype.is_string() ? find_safetensors_dtype(dtype.get<std::string>()) : nullptr;
  if (!row)
    throw FileError(where + ": dtype, got " + short_dump(dtype) + ", expected F64 F32 F16 BF16 I64 I32 I8 U8 or BOOL");
  array.dtype = row->dtype;
  const json& shape = member(entry, "shape", where);
  if (!shape.is_array()) throw FileError(where + ": shape, got " + short_dump(shape) + ", expected a list");
  for (const json& axis : shape) array.shape.push_back(whole(axis, where + ": shape"));
  int64_t bytes = 0;
  if (!array_bytes(array.shape, row->bytes, &bytes))
    throw FileError(where + ": shape, got " + shape_text(array.shape) + ", expected fewer than 2^63 bytes");
  const json& offsets = member(entry, "data_offsets", where);
  if (!offsets.is_array() || offsets.size() != 2)
    throw FileError(where + ": data_offsets, got " + short_dump(offsets) + ", expected [begin, end]");
  *begin = whole(offsets[0], where + ": data_offsets");
  int64_t end = whole(offsets[1], where + ": data_offsets");
  if (*begin > end || uint64_t(end) > data.size())
    throw FileError(where + ": data_offsets, got " + short_dump(offsets) + ", expected begin <= end <= " +
                    std::to_string(data.size()) + " (the bytes after the header)");
  if (end - *begin != bytes)
    throw FileError(where + ": data_offsets, got " + std::to_string(end - *begin) + " bytes, expected " +
                    std::to_string(bytes) + " (" + row->safetensors + " " + shape_text(array.shape) + ")");
  array.data = data.subspan(size_t(*begin), size_t(bytes));
  return array;
}

std::map<std::string, std::string> parse_metadata(const json& entry, const std::string& file) {
  std::map<std::string, std::string> out;
  if (!entry.is_object()) throw FileError(file + ": __metadata__, got " + short_dump(entry) + ", expected an object");
  for (const auto& item : entry.items()) {
    if (!item.value().is_string())
      throw FileError(file + ": __metadata__: " + quoted(item.key()) + ", got " + short_dump(item.value()) + ", expected a text");
    out[item.key()] = item.value().get<std::string>();
  }
  return out;
}

struct Placed {
  int64_t begin;
  Array array;
};

void check_places(const std::vector<Placed>& placed, size_t data_bytes, const std::string& file) {
  int64_t at = 0;
  for (const Placed& p : placed) {
    if (p.begin != at)
      throw FileError(file + ": " + quoted(p.array.name) + ": data_offsets, got begin " + std::to_string(p.begin) +
                      ", expected " + std::to_string(at) + (p.begin < at ? " (arrays overlap)" : " (bytes without an array)"));
    at += int64_t(p.array.data.size());
  }
  if (uint64_t(at) != data_bytes)
    throw FileError(file + ": size, got " + std::to_string(data_bytes) + " bytes after the header, expected " + std::to_string(at));
}

}  // namespace

const Array* Safetensors::find(const std::string& name) const {
  for (const Array& a : arrays)
    if (a.name == name) return &a;
  return nullptr;
}

const Array& Safetensors::at(const std::string& name) const {
  if (const Array* a = find(name)) return *a;
  std::string names;
  for (const Array& a : arrays) names += (names.empty() ? "" : " ") + a.name;
  throw FileError(file + ": " + quoted(name) + ": missing, expected among: " + (names.empty() ? "(no arrays)" : names));
}

Safetensors parse_safetensors(Bytes bytes, const std::string& name) {
  if (bytes.size() < 8)
    throw FileError(name + ": size, got " + std::to_string(bytes.size()) + " bytes, expected 8 or more (a safetensors file)");
  uint64_t length = 0;
  for (int i = 0; i < 8; ++i) length |= uint64_t(bytes[size_t(i)]) << (8 * i);
  uint64_t limit = std::min<uint64_t>(bytes.size() - 8, kMaxHeader);
  if (length < 2 || length > limit)
    throw FileError(name + ": header length, got " + std::to_string(length) + ", expected 2 to " + std::to_string(limit) +
                    " (is it a safetensors file, and whole?)");
  const char* text = reinterpret_cast<const char*>(bytes.data()) + 8;
  if (*text != '{') throw FileError(name + ": header: expected a JSON object that starts with {");
  json header = parse_header(text, text + length, name);
  Bytes data = bytes.subspan(size_t(8 + length));
  Safetensors out;
  out.file = name;
  std::vector<Placed> placed;
  for (const auto& item : header.items()) {
    if (item.key() == "__metadata__") {
      out.metadata = parse_metadata(item.value(), name);
      continue;
    }
    Placed p{};
    p.array = parse_entry(item.key(), item.value(), data, &p.begin, name);
    placed.push_back(std::move(p));
  }
  std::stable_sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.array.data.size() < b.array.data.size();  // empty ones first
  });
  check_places(placed, data.size(), name);
  for (Placed& p : placed) out.arrays.push_back(std::move(p.array));
  return out;
}

SafetensorsFile read_safetensors(const std::string& path) {
  SafetensorsFile file;
  file.bytes = read_file(path);
  file.content = parse_safetensors(file.bytes, path);  // moving the vector keeps its bytes in place
  return file;
}

std::vector<std::byte> safetensors_header(std::vector<Array>& arrays, const std::map<std::string, std::string>& metadata) {
  std::stable_sort(arrays.begin(), arrays.end(), [](const Array& a, const Array& b) {
    const FileDtype *da = find_dtype(a.dtype), *db = find_dtype(b.dtype);
    size_t wa = da ? da->bytes : 0, wb = db ? db->bytes : 0;
    return wa != wb ? wa > wb : a.name < b.name;
  });
  json header = json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t at = 0;
  for (const Array& a : arrays) {
    std::string where = quoted(a.name);
    const FileDtype* row = find_dtype(a.dtype);
    if (!row) throw FileError(where + ": dtype, got " + dtype_text(a.dtype) + ", expected one that safetensors has");
    if (a.name == "__metadata__" || header.contains(a.name)) throw FileError(where + ": name, got it twice or reserved");
    if (!a.stride.empty()) throw FileError(where + ": strides, expected a row-major array");
    int64_t bytes = 0;
    if (!array_bytes(a.shape, row->bytes, &bytes) || uint64_t(bytes) != a.data.size())
      throw FileError(where + ": size, got " + std::to_string(a.data.size()) + " bytes, expected " + std::to_string(bytes) +
                      " (" + row->safetensors + " " + shape_text(a.shape) + ")");
    header[a.name] = {{"dtype", row->safetensors}, {"shape", a.shape}, {"data_offsets", {at, at + bytes}}};
    at += bytes;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception& e) {
    throw FileError(std::string("safetensors header: expected names and metadata in UTF-8 (") + e.what() + ")");
  }
  text.append((8 - text.size() % 8) % 8, ' ');
  if (text.size() > kMaxHeader) throw FileError("safetensors header: got " + std::to_string(text.size()) + " bytes, expected at most " + std::to_string(kMaxHeader));
  std::vector<std::byte> out(8 + text.size());
  for (size_t i = 0; i < 8; ++i) out[i] = std::byte(uint64_t(text.size()) >> (8 * i) & 0xff);
  std::memcpy(out.data() + 8, text.data(), text.size());
  return out;
}

void write_safetensors(const std::string& path, std::vector<Array> arrays,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<std::byte> header;
  try {
    header = safetensors_header(arrays, metadata);
  } catch (const FileError& e) {
    throw FileError(path + ": " + e.what());
  }
  std::vector<Bytes> parts{header};
  for (const Array& a : arrays) parts.push_back(a.data);
  write_file(path, parts);
}

}  // namespace thalweg::files
