#include "thalweg/ascend/plan.h"

namespace thalweg::ascend {

int64_t Need::sum(const std::vector<Buffer>& buffers) {
  int64_t bytes = 0;
  for (const Buffer& buffer : buffers) bytes += buffer.bytes * buffer.copies;
  return bytes;
}

std::vector<int64_t> Problem::sequences() const {
  return is_packed ? lengths : std::vector<int64_t>(size_t(B), T);
}

const Kernel* find_kernel(std::string_view name) {
  for (const Kernel* kernel : kernels())
    if (name == kernel->name) return kernel;
  return nullptr;
}

}  // namespace thalweg::ascend
