#include <fmt/format.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "testing/fields.h"
#include "tools/thalweg/npy.h"
#include "tools/thalweg/run.h"
#include "tools/thalweg/safetensors.h"
#include "tools/thalweg/tool.h"

namespace thalweg::tool {
namespace {

bool ends_with(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// "name=FILE" or "FILE".
struct Target {
  std::string name, file;
  bool npy;
};
Target target_of(const std::string& text, const char* option) {
  size_t equals = text.find('=');
  bool named = equals != std::string::npos && text.find('/') > equals;
  Target t{named ? text.substr(0, equals) : "", named ? text.substr(equals + 1) : text, false};
  t.npy = ends_with(t.file, ".npy");
  if (!t.npy && !ends_with(t.file, ".safetensors"))
    throw UsageError(fmt::format("{}, got {}, expected FILE.safetensors or name=FILE.npy", option, text));
  if (t.npy && t.name.empty()) throw UsageError(fmt::format("{}, got {}, expected name=FILE.npy (a .npy file has no name of its own)", option, text));
  return t;
}

Held hold(const thalweg_field& field, size_t bytes) {
  Held held;
  held.field = &field;
  held.bytes = bytes;
  held.data = {static_cast<char*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64)), std::free};
  if (!held.data) throw std::bad_alloc();
  return held;
}

void place(const thalweg_field& field, const std::vector<int64_t>& shape, const std::vector<int64_t>& stride, thalweg_dtype dtype, Held held,
           Args& args, Tensors& tensors) {
  thalweg_tensor& t = args.tensor(field);
  t.data = held.data.get();
  t.dtype = dtype;
  t.rank = int32_t(shape.size());
  t.device_type = THALWEG_CPU;
  int64_t row_major = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    t.shape[i] = shape[i];
    t.stride[i] = stride.empty() ? row_major : stride[i];
    row_major *= std::max<int64_t>(shape[i], 1);
  }
  tensors.emplace(field.name, std::move(held));
}

void load_one(const std::string& name, const files::Array& array, const std::string& file, Args& args, Tensors& tensors) {
  const thalweg_field& field = input_field(args.pass(), name, file);
  if (tensors.count(name)) throw UsageError(fmt::format("{}: {}, got it twice", file, name));
  size_t rank = testing::words(field.dims).size();
  if (array.shape.size() != rank)
    throw UsageError(fmt::format("{}: {}: shape, got {}, expected [{}]", file, name, files::shape_text(array.shape), field.dims));
  Held held = hold(field, array.data.size());
  std::memcpy(held.data.get(), array.data.data(), array.data.size());
  if (array.dtype == THALWEG_BOOL)
    for (size_t i = 0; i < held.bytes; ++i)
      if (static_cast<unsigned char>(held.data.get()[i]) > 1) throw UsageError(fmt::format("{}: {}: element {}, got a byte that is neither 0 nor 1", file, name, i));
  place(field, array.shape, array.stride, array.dtype, std::move(held), args, tensors);
}

// Elements in row-major order, whatever the strides are.
std::vector<std::byte> packed(const thalweg_tensor& t, size_t element) {
  std::vector<std::byte> out(size_t(testing::count(t)) * element);
  size_t at = 0;
  testing::each_offset(t, [&](int64_t offset) {
    std::memcpy(out.data() + at, static_cast<const char*>(t.data) + offset * int64_t(element), element);
    at += element;
  });
  return out;
}

std::vector<std::string> output_names(const Tensors& tensors) {
  std::vector<std::string> names;
  for (const auto& [name, held] : tensors)
    if (testing::is_output(*held.field)) names.push_back(name);
  return names;
}

std::vector<std::string> names_for(const Target& target, Args& args, const Tensors& tensors) {
  std::vector<std::string> names = output_names(tensors);
  if (target.name.empty()) return names;
  for (const std::string& name : names) {
    if (name != target.name) continue;
    thalweg_dtype dtype = args.tensor(*tensors.at(name).field).dtype;
    const files::FileDtype* row = files::find_dtype(dtype);
    if (target.npy && (!row || !*row->npy)) throw UsageError(fmt::format("--out {}: {}, got {}, expected a dtype that .npy can name (use safetensors)", target.file, name, files::dtype_text(dtype)));
    return {name};
  }
  throw UsageError(fmt::format("--out, got {}, expected one of the outputs: {}", target.name, fmt::join(names, " ")));
}

}  // namespace

const thalweg_field& input_field(const thalweg_pass& pass, const std::string& name, const std::string& from) {
  const thalweg_field* field = testing::find_field(pass, name);
  if (field && testing::is_input(*field)) return *field;
  if (std::string reason = refusal(pass, name); !reason.empty())
    throw UsageError(fmt::format("{}: {}: {}: {}", from, pass_name(pass), name, reason));
  std::string names;
  for (const thalweg_field* each : testing::tensor_fields(pass))
    if (testing::is_input(*each)) names += std::string(" ") + each->name + (each->optional ? "?" : "");
  throw UsageError(fmt::format("{}: {}: got {} {}, expected among:{} (? may be absent)", from, pass_name(pass), field ? "an output's name" : "unknown name", name, names));
}

void load_inputs(const std::string& source, Args& args, Tensors& tensors) {
  Target t = target_of(source, "--in");
  if (t.npy) {
    files::NpyFile file = files::read_npy(t.file);
    load_one(t.name, file.array, t.file, args, tensors);
    return;
  }
  files::SafetensorsFile file = files::read_safetensors(t.file);
  if (!t.name.empty()) {
    load_one(t.name, file.content.at(t.name), t.file, args, tensors);
    return;
  }
  for (const files::Array& array : file.content.arrays) load_one(array.name, array, t.file, args, tensors);
}

void hold_output(const thalweg_field& field, const std::vector<int64_t>& shape, thalweg_dtype dtype, Args& args, Tensors& tensors) {
  int64_t bytes = 0;
  if (!files::array_bytes(shape, thalweg_dtype_bytes(dtype), &bytes))
    throw UsageError(fmt::format("{}: {}: shape, got {}, expected fewer than 2^63 bytes", pass_name(args.pass()), field.name, files::shape_text(shape)));
  Held held = hold(field, size_t(bytes));
  std::memset(held.data.get(), 0, size_t(bytes));
  place(field, shape, {}, dtype, std::move(held), args, tensors);
}

void check_targets(const std::vector<std::string>& targets, const std::vector<std::string>& sources, Args& args, const Tensors& tensors) {
  for (const std::string& text : targets) {
    Target target = target_of(text, "--out");
    names_for(target, args, tensors);
    for (const std::string& source : sources) {
      std::error_code absent;  // links count as what they lead to
      std::string in = target_of(source, "--in").file;
      if (std::filesystem::equivalent(target.file, in, absent))
        throw UsageError(fmt::format("--out, got {}, expected another file than {} of --in", target.file, in));
    }
  }
}

std::vector<std::string> save_outputs(const std::vector<std::string>& targets, Args& args, const Tensors& tensors) {
  std::vector<std::string> lines;
  for (const std::string& text : targets) {
    Target target = target_of(text, "--out");
    std::vector<std::vector<std::byte>> kept;
    std::vector<files::Array> arrays;
    std::string line = target.file + ":";
    for (const std::string& name : names_for(target, args, tensors)) {
      const thalweg_tensor& t = args.tensor(*tensors.at(name).field);
      kept.push_back(packed(t, thalweg_dtype_bytes(t.dtype)));
      std::vector<int64_t> shape(t.shape, t.shape + t.rank);
      arrays.push_back({name, t.dtype, shape, {}, kept.back()});
      line += fmt::format(" {} {} {}", name, files::dtype_text(t.dtype), files::shape_text(shape));
    }
    if (target.npy) {
      files::write_npy(target.file, arrays.at(0));
    } else {
      files::write_safetensors(target.file, arrays, {{"thalweg", pass_name(args.pass())}, {"version", thalweg_version()}});
    }
    lines.push_back(line);
  }
  return lines;
}

}  // namespace thalweg::tool
