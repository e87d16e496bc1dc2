// A build without CUDA: no device, and nobody asks for its memory.
#include <stdexcept>

#include "testing/device.h"

namespace thalweg::testing {

const std::string& why_no_device() {
  static const std::string why = "this program was built without CUDA";
  return why;
}

namespace {
[[noreturn]] void refuse() { throw std::logic_error(why_no_device()); }
}  // namespace

std::string device_name() { return ""; }
DeviceMemory::DeviceMemory(size_t) { refuse(); }
DeviceMemory::~DeviceMemory() = default;
DeviceMemory::DeviceMemory(DeviceMemory&&) noexcept = default;
DeviceMemory& DeviceMemory::operator=(DeviceMemory&&) noexcept = default;
void DeviceMemory::upload(const void*, size_t) { refuse(); }
void DeviceMemory::download(void*, size_t) const { refuse(); }
void synchronize_device() { refuse(); }
std::vector<double> time_graph(const std::function<void(void*)>&, int64_t) { refuse(); }
double device_copy_gbs() { refuse(); }
double device_bf16_gflops() { refuse(); }

}  // namespace thalweg::testing
