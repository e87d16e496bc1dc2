// The GPU under verify and bench: memory, copies, and the time of calls by graph replay. In a build without CUDA
// (no_device.cpp) there is none.
#ifndef THALWEG_TESTING_DEVICE_H
#define THALWEG_TESTING_DEVICE_H

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace thalweg::testing {

// "" when CUDA rows can run here, else why not.
const std::string& why_no_device();
std::string device_name();  // "NVIDIA H200, 132 SMs"

// Device memory, 256-byte aligned. Throws TooLarge's kin std::bad_alloc when there is not enough.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(size_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Copies between the host and the start of this memory; they wait for everything before.
  void upload(const void* from, size_t bytes);
  void download(void* to, size_t bytes) const;

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// Waits for all work on the device; throws what failed in it.
void synchronize_device();

// Microseconds of each of `replays` replays of one graph that holds what `body(stream)` issues.
std::vector<double> time_graph(const std::function<void(void* stream)>& body, int64_t replays);

// Ceilings measured here: a device-to-device copy (read + written), and products of bf16 matrix units on random data.
double device_copy_gbs();
double device_bf16_gflops();

}  // namespace thalweg::testing
#endif
