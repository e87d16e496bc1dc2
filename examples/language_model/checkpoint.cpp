#include "checkpoint.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <span>

#include "tools/thalweg/safetensors.h"

namespace language_model {
namespace {

using thalweg::files::Array;

constexpr const char* kFormat = "thalweg language model 1";
constexpr int64_t kCurveColumns = sizeof(CurvePoint) / sizeof(double);

template <class T>
Array array_of(std::string name, thalweg_dtype dtype, std::vector<int64_t> shape, const T* data, int64_t count) {
  return {std::move(name), dtype, std::move(shape), {}, std::as_bytes(std::span(data, size_t(count)))};
}

void add_arrays(std::vector<Array>& arrays, const std::vector<Parameter>& parameters, const char* prefix,
                const std::vector<float>& floats) {
  for (const Parameter& p : parameters)
    arrays.push_back(array_of(prefix + p.name, THALWEG_F32, p.shape, floats.data() + p.offset, p.count));
}

[[noreturn]] void damaged(const std::string& path, const std::string& what) {
  throw UserError(fmt::format("{}: {}; the checkpoint cannot be used: remove it, or start anew with --fresh", path, what));
}

const std::string& text_at(const std::string& path, const std::map<std::string, std::string>& metadata, const char* name) {
  auto it = metadata.find(name);
  if (it == metadata.end()) damaged(path, fmt::format("metadata {}: missing", name));
  return it->second;
}

double number_at(const std::string& path, const std::map<std::string, std::string>& metadata, const char* name) {
  const std::string& text = text_at(path, metadata, name);
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end) damaged(path, fmt::format("metadata {}: got \"{}\", expected a number", name, text));
  return value;
}

void check_identity(const std::string& path, const std::map<std::string, std::string>& metadata,
                    const std::map<std::string, std::string>& identity) {
  if (auto it = metadata.find("format"); it == metadata.end() || it->second != kFormat)
    throw UserError(fmt::format("{}: is not a checkpoint of this program (format \"{}\" expected)", path, kFormat));
  for (const auto& [name, value] : identity)
    if (const std::string& there = text_at(path, metadata, name.c_str()); there != value)
      throw UserError(fmt::format("{}: was made with {} {}, this run has {}: pass what it was made with, or start anew with --fresh",
                                  path, name, there, value));
}

std::vector<float> floats_at(const std::string& path, const thalweg::files::Safetensors& file,
                             const std::vector<Parameter>& parameters, const char* prefix) {
  std::vector<float> floats(size_t(floats_of(parameters)));
  for (const Parameter& p : parameters) {
    const Array* array = file.find(prefix + p.name);
    if (!array) damaged(path, fmt::format("{}{}: missing", prefix, p.name));
    if (array->dtype != THALWEG_F32 || array->shape != p.shape)
      damaged(path, fmt::format("{}{}: got {} {}, expected f32 {}", prefix, p.name, thalweg_dtype_name(array->dtype),
                                thalweg::files::shape_text(array->shape), thalweg::files::shape_text(p.shape)));
    std::memcpy(floats.data() + p.offset, array->data.data(), size_t(p.count) * sizeof(float));
  }
  return floats;
}

std::vector<CurvePoint> curve_at(const std::string& path, const thalweg::files::Safetensors& file) {
  const Array* array = file.find("curve");
  if (!array || array->dtype != THALWEG_F64 || array->shape.size() != 2 || array->shape[1] != kCurveColumns)
    damaged(path, fmt::format("curve: expected f64 [points {}]", kCurveColumns));
  std::vector<CurvePoint> curve(size_t(array->shape[0]));
  if (!curve.empty()) std::memcpy(curve.data(), array->data.data(), array->data.size());
  return curve;
}

}  // namespace

void save_checkpoint(const std::string& path, const Model& model, const TrainingState& state,
                     const std::map<std::string, std::string>& identity) {
  std::map<std::string, std::string> metadata = identity;
  metadata["format"] = kFormat;
  metadata["step"] = std::to_string(state.step);
  metadata["seconds"] = fmt::format("{:.17g}", state.seconds);
  metadata["best_validation"] = fmt::format("{:.17g}", state.best_validation);
  metadata["best_step"] = std::to_string(state.best_step);
  metadata["loss_sum"] = fmt::format("{:.17g}", state.loss_sum);
  metadata["loss_count"] = std::to_string(state.loss_count);

  std::vector<Array> arrays;
  add_arrays(arrays, model.parameters(), "", model.weights());
  add_arrays(arrays, model.parameters(), "adamw.m.", state.optimizer.m);
  add_arrays(arrays, model.parameters(), "adamw.v.", state.optimizer.v);
  add_arrays(arrays, model.parameters(), "average.", state.average);
  if (!state.best_weights.empty()) add_arrays(arrays, model.parameters(), "best.", state.best_weights);
  arrays.push_back(array_of("curve", THALWEG_F64, {int64_t(state.curve.size()), kCurveColumns}, state.curve.data(),
                            int64_t(state.curve.size())));
  try {
    thalweg::files::write_safetensors(path, std::move(arrays), metadata);
  } catch (const thalweg::files::FileError& e) {
    throw UserError(e.what());
  }
}

void load_checkpoint(const std::string& path, const std::map<std::string, std::string>& identity, Model& model,
                     TrainingState& state) {
  thalweg::files::SafetensorsFile file;
  try {
    file = thalweg::files::read_safetensors(path);
  } catch (const thalweg::files::FileError& e) {
    throw UserError(fmt::format("{}; the checkpoint cannot be used: remove it, or start anew with --fresh", e.what()));
  }
  const auto& metadata = file.content.metadata;
  check_identity(path, metadata, identity);
  const auto& parameters = model.parameters();
  TrainingState loaded(model);
  loaded.step = int64_t(number_at(path, metadata, "step"));
  loaded.seconds = number_at(path, metadata, "seconds");
  loaded.best_validation = number_at(path, metadata, "best_validation");
  loaded.best_step = int64_t(number_at(path, metadata, "best_step"));
  loaded.loss_sum = number_at(path, metadata, "loss_sum");
  loaded.loss_count = int64_t(number_at(path, metadata, "loss_count"));
  loaded.optimizer.m = floats_at(path, file.content, parameters, "adamw.m.");
  loaded.optimizer.v = floats_at(path, file.content, parameters, "adamw.v.");
  loaded.average = floats_at(path, file.content, parameters, "average.");
  loaded.curve = curve_at(path, file.content);
  if (std::isfinite(loaded.best_validation)) loaded.best_weights = floats_at(path, file.content, parameters, "best.");
  std::vector<float> weights = floats_at(path, file.content, parameters, "");
  std::copy(weights.begin(), weights.end(), model.weights().begin());
  state = std::move(loaded);
}

}  // namespace language_model
