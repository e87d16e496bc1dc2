// Tensors of one call of `thalweg run`, from files and for files.
#ifndef THALWEG_TOOLS_RUN_H
#define THALWEG_TOOLS_RUN_H

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tools/thalweg/args.h"
#include "tools/thalweg/file_error.h"

namespace thalweg::tool {

// Memory of one tensor, 64-byte aligned, and its place in the args.
struct Held {
  const thalweg_field* field = nullptr;
  std::unique_ptr<char, void (*)(void*)> data{nullptr, nullptr};
  size_t bytes = 0;
};
using Tensors = std::map<std::string, Held>;

// The field of a tensor, or UsageError: why the pass refuses the name, or the names there are.
const thalweg_field& input_field(const thalweg_pass& pass, const std::string& name, const std::string& from);

// Loads `source` (FILE.safetensors, name=FILE.npy or name=FILE.safetensors) into args and tensors.
void load_inputs(const std::string& source, Args& args, Tensors& tensors);
// Allocates an output of the given shape and dtype, zeroed.
void hold_output(const thalweg_field& field, const std::vector<int64_t>& shape, thalweg_dtype dtype, Args& args, Tensors& tensors);
// Writes the outputs to FILE.safetensors (all), name=FILE.npy or name=FILE.safetensors (one).
// Returns a line per file for people.
std::vector<std::string> save_outputs(const std::vector<std::string>& targets, Args& args, const Tensors& tensors);
// Refuses targets that save_outputs would, and those that are a file of `sources`, before any work is done.
void check_targets(const std::vector<std::string>& targets, const std::vector<std::string>& sources, Args& args, const Tensors& tensors);

}  // namespace thalweg::tool
#endif
