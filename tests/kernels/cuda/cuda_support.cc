#include "tests/kernels/cuda/cuda_support.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <utility>

#include "headwater/kernels/error.h"

namespace headwater::testing {
namespace {

// GPUs that CUDA sees; 0 also where there is no driver.
int DeviceCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace

void CheckCuda(int status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(static_cast<cudaError_t>(status)));
}

std::string ReasonForNoGpu() {
  const absl::StatusOr<std::unique_ptr<LossEngine>> engine = CreateCudaEngine(EngineOptions{.workspace_bytes = int64_t{256} << 20});
  if (engine.ok() || !HasReason(engine.status(), ErrorReason::kFeatureNotBuilt)) return "";
  // These tests are there to find a module that cannot be loaded beside a GPU that works.
  if (DeviceCount() > 0 && GpuCapability() >= 80) return "";
  return engine.status().ToString();
}

std::string GpuName() {
  cudaDeviceProp properties;
  int driver = 0;
  CheckCuda(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  CheckCuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  return std::string(properties.name) + ", driver API " + std::to_string(driver / 1000) + "." + std::to_string(driver % 1000 / 10);
}

std::string GpuBusId() {
  char bus[32] = "";
  CheckCuda(cudaDeviceGetPCIBusId(bus, sizeof(bus), 0), "cudaDeviceGetPCIBusId");
  return bus;
}

int GpuCapability() {
  int major = 0;
  int minor = 0;
  CheckCuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "cudaDeviceGetAttribute");
  CheckCuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "cudaDeviceGetAttribute");
  return 10 * major + minor;
}

Buffer::Buffer(BufferKind kind, int64_t bytes) : kind_(kind), bytes_(bytes) {
  if (bytes == 0) return;
  const size_t size = static_cast<size_t>(bytes);
  CheckCuda(kind == BufferKind::kDevice ? cudaMalloc(&data_, size) : cudaMallocHost(&data_, size), "allocating a buffer");
}

int64_t UsedBytes() {
  size_t free_bytes = 0, total_bytes = 0;
  CheckCuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  return static_cast<int64_t>(total_bytes - free_bytes);
}

Buffer::Buffer(Buffer&& other) noexcept
    : kind_(other.kind_), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(kind_, other.kind_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  if (kind_ == BufferKind::kDevice) {
    cudaFree(data_);
  } else {
    cudaFreeHost(data_);
  }
}

void CopyMemory(void* to, const void* from, int64_t bytes) {
  CheckCuda(cudaDeviceSynchronize(), "work before a copy");
  CheckCuda(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault), "cudaMemcpy");
  CheckCuda(cudaDeviceSynchronize(), "a copy");
}

std::unique_ptr<LossEngine> MakeCudaEngine(EngineOptions options) {
  options.timed_search = false;
  absl::StatusOr<std::unique_ptr<LossEngine>> engine = CreateCudaEngine(options);
  CheckStatus(engine.status(), "CreateCudaEngine");
  return *std::move(engine);
}

std::unique_ptr<EngineHead> MakeHeadOn(LossEngine& engine, const HeadSpec& spec) {
  absl::StatusOr<std::unique_ptr<EngineHead>> head = engine.CreateHead(spec);
  CheckStatus(head.status(), "CreateHead");
  return *std::move(head);
}

void CheckStatus(const absl::Status& status, const char* what) {
  if (!status.ok()) throw std::runtime_error(std::string(what) + ": " + status.ToString());
}

std::vector<float> ReadFloats(const EngineHead& head, HeadTensor tensor) {
  std::vector<float> values(static_cast<size_t>(head.ElementCount(tensor)));
  if (!values.empty()) CheckStatus(head.ReadTensor(tensor, 0, static_cast<int64_t>(values.size()), values.data()), "ReadTensor");
  return values;
}

}  // namespace headwater::testing
