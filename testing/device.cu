// See device.h.
#include "testing/device.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "thalweg/core/device.h"
#include "thalweg/core/error.h"
#include "thalweg/cuda/check.h"
#include "thalweg/cuda/sm90/ptx.cuh"
#include "thalweg/cuda/sm90/smem.cuh"
#include "thalweg/cuda/sm90/wgmma.cuh"

namespace thalweg::testing {

using cuda::cuda_check;

const std::string& why_no_device() {
  static const std::string why = [] {
    try {
      cuda_device(0);
      return std::string();
    } catch (const Error& e) {
      return std::string(e.what());
    }
  }();
  return why;
}

std::string device_name() {
  cudaDeviceProp p;
  cuda_check(cudaGetDeviceProperties(&p, 0), "reading the device");
  return std::string(p.name) + ", " + std::to_string(p.multiProcessorCount) + " SMs";
}

DeviceMemory::DeviceMemory(size_t bytes) : bytes_(bytes) {
  void* data = nullptr;
  if (bytes && cudaMalloc(&data, bytes) != cudaSuccess) {
    cudaGetLastError();
    throw std::bad_alloc();
  }
  data_ = static_cast<char*>(data);
}
DeviceMemory::~DeviceMemory() { cudaFree(data_); }
DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}
void DeviceMemory::upload(const void* from, size_t bytes) {
  cuda_check(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice), "copying to the device");
}
void DeviceMemory::download(void* to, size_t bytes) const {
  cuda_check(cudaMemcpy(to, data_, bytes, cudaMemcpyDeviceToHost), "copying from the device");
}

void synchronize_device() { cuda_check(cudaDeviceSynchronize(), "waiting for the device"); }

namespace {

struct Stream {
  cudaStream_t stream;
  Stream() { cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream"); }
  ~Stream() { cudaStreamDestroy(stream); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
};

struct Event {
  cudaEvent_t event;
  Event() { cuda_check(cudaEventCreate(&event), "making an event"); }
  ~Event() { cudaEventDestroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) { cuda_check(cudaEventRecord(event, stream), "recording an event"); }
};

double microseconds(const Event& from, const Event& to) {
  float ms = 0;
  cuda_check(cudaEventSynchronize(to.event), "waiting for an event");
  cuda_check(cudaEventElapsedTime(&ms, from.event, to.event), "reading events");
  return double(ms) * 1e3;
}

struct Graph {
  cudaGraphExec_t exec = nullptr;
  Graph(const std::function<void(void*)>& body, cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning a capture");
    try {
      body(stream);
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      if (graph) cudaGraphDestroy(graph);
      throw;
    }
    cuda_check(cudaStreamEndCapture(stream, &graph), "ending a capture");
    cudaError_t made = cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    cuda_check(made, "making a graph");
  }
  ~Graph() { cudaGraphExecDestroy(exec); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
};

// Four warpgroups multiply their rows, which stay in registers, with one tile of 128 columns in shared memory.
constexpr int kProductGroups = 4, kProductRounds = 2048;
constexpr double kProductFlops = 2.0 * 64 * 128 * 64;  // of a round of one group

__global__ void __launch_bounds__(128 * kProductGroups, 1) product_kernel(float* out) {
  __shared__ __align__(1024) uint32_t tile[128 * 32];
  unsigned seed = (threadIdx.x + blockIdx.x * blockDim.x) * 2654435761u;
  auto next = [&] {  // two bf16 of magnitude near 1
    seed = seed * 1664525u + 1013904223u;
    return (seed & 0x807f807fu) | 0x3f003f00u;
  };
  for (int i = threadIdx.x; i < 128 * 32; i += blockDim.x) tile[i] = next();
  uint32_t a[4];
  for (auto& x : a) x = next();
  float d[64] = {};
  cuda::sm90::fence_proxy_async();
  __syncthreads();
  const uint64_t b = cuda::sm90::descriptor(uint32_t(__cvta_generic_to_shared(tile)));
  for (int i = 0; i < kProductRounds; ++i) {
    cuda::sm90::wgmma_fence();
#pragma unroll
    for (uint32_t step = 0; step < 4; ++step)
      cuda::sm90::wgmma_rs_n128<__nv_bfloat16>(d, a, cuda::sm90::advanced(b, 32 * step), true);
    cuda::sm90::wgmma_commit();
    cuda::sm90::wgmma_wait<1>();
  }
  cuda::sm90::wgmma_wait<0>();
  float sum = 0;
  for (float x : d) sum += x;
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// 64 bytes a thread, on their way at once.
__global__ void copy_kernel(uint4* to, const uint4* from) {
  const size_t at = size_t(blockIdx.x) * blockDim.x * 4 + threadIdx.x;
  uint4 x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __ldcs(from + at + size_t(i) * blockDim.x);
#pragma unroll
  for (int i = 0; i < 4; ++i) __stcs(to + at + size_t(i) * blockDim.x, x[i]);
}

double median_of(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + int64_t(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

std::vector<double> time_graph(const std::function<void(void*)>& body, int64_t replays) {
  Stream stream;
  Graph graph(body, stream.stream);
  Event from, to;
  std::vector<double> times;
  for (int64_t i = 0; i < replays; ++i) {
    from.record(stream.stream);
    cuda_check(cudaGraphLaunch(graph.exec, stream.stream), "replaying a graph");
    to.record(stream.stream);
    times.push_back(microseconds(from, to));
  }
  return times;
}

double device_copy_gbs() {
  const size_t bytes = size_t(2) << 30;
  DeviceMemory a(bytes), b(bytes);
  cuda_check(cudaMemset(a.data(), 0x3c, bytes), "filling memory");
  std::vector<double> us = time_graph(
      [&](void* stream) {
        copy_kernel<<<unsigned(bytes / 64 / 256), 256, 0, static_cast<cudaStream_t>(stream)>>>(
            reinterpret_cast<uint4*>(b.data()), reinterpret_cast<const uint4*>(a.data()));
        cuda_check(cudaGetLastError(), "launching a copy");
      },
      9);
  return 2 * double(bytes) / median_of(us) * 1e-3;
}

double device_bf16_gflops() {
  const int blocks = int(cuda_device(0).num_sms) * 2, threads = 128 * kProductGroups;
  DeviceMemory out(size_t(blocks) * threads * sizeof(float));
  std::vector<double> us = time_graph(
      [&](void* stream) {
        product_kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(reinterpret_cast<float*>(out.data()));
        cuda_check(cudaGetLastError(), "launching products");
      },
      9);
  return kProductFlops * kProductRounds * kProductGroups * blocks / median_of(us) * 1e-3;
}

}  // namespace thalweg::testing
