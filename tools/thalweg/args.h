// A pass's args struct, filled by field name.
#ifndef THALWEG_TOOLS_ARGS_H
#define THALWEG_TOOLS_ARGS_H

#include <cstddef>
#include <string>
#include <vector>

#include "testing/testing.h"
#include "thalweg/core/types.h"

namespace thalweg::tool {

class Args {
 public:
  explicit Args(const thalweg_pass& pass);  // everything absent, options 0
  // Shapes, dtypes and strides of a case without data: enough for explain and the workspace query.
  explicit Args(const testing::Case& c);
  const thalweg_pass& pass() const { return *pass_; }
  void* data() { return bytes_.data(); }
  thalweg_tensor& tensor(const thalweg_field& field);
  // UsageError with the option's name, what was got, what was expected.
  void set(const thalweg_field& option, const std::string& text);

 private:
  const thalweg_pass* pass_;
  std::vector<std::max_align_t> bytes_;
};

// What pass.explain says about a case, and the workspace its kernel asks for.
std::string explain_text(const testing::Case& c);
// The row that runs, by such a text.
std::string running_kernel(const std::string& text);
size_t workspace_of(const testing::Case& c);
// "name: reason; name: reason" of pass.refused: the reason, or "".
std::string refusal(const thalweg_pass& pass, const std::string& name);

}  // namespace thalweg::tool
#endif
