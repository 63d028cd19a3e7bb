// The common parts of programs that run on a GPU: whether there is one, memory on it, engines.
#ifndef HEADWATER_TESTS_KERNELS_CUDA_CUDA_SUPPORT_H_
#define HEADWATER_TESTS_KERNELS_CUDA_CUDA_SUPPORT_H_

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"

namespace headwater::testing {

// Throws std::runtime_error with CUDA's words unless `status` (a cudaError_t) is cudaSuccess.
void CheckCuda(int status, const char* what);

// Why there is no CUDA engine on this machine, or an empty string. Only a machine without a usable GPU has a reason. Where CUDA
// sees one, an engine that does not start is a failure, and the string stays empty.
std::string ReasonForNoGpu();

// Name of the GPU and version of the driver: "NVIDIA H200, driver API 13.0".
std::string GpuName();
// Where the GPU is, as NVML takes it.
std::string GpuBusId();
// 10 * major + minor: 90 is Hopper.
int GpuCapability();

// Memory of the current GPU that is taken, by any process.
int64_t UsedBytes();

// Device memory, or page-locked host memory. Throws std::runtime_error if there is none left.
enum class BufferKind { kDevice, kPinned };
class Buffer {
 public:
  Buffer() = default;
  Buffer(BufferKind kind, int64_t bytes);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }

 private:
  BufferKind kind_ = BufferKind::kDevice;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Copies in whatever direction the pointers say, and waits for it and for everything enqueued before.
void CopyMemory(void* to, const void* from, int64_t bytes);

// CreateCudaEngine(), algorithms not timed, so that every engine runs the same ones; throws std::runtime_error if it fails.
std::unique_ptr<LossEngine> MakeCudaEngine(EngineOptions options);
std::unique_ptr<EngineHead> MakeHeadOn(LossEngine& engine, const HeadSpec& spec);
// Throws std::runtime_error unless it is OK.
void CheckStatus(const absl::Status& status, const char* what);

// A whole tensor of fp32, or of a rank the whole with its own part in place.
std::vector<float> ReadFloats(const EngineHead& head, HeadTensor tensor);

// In the l2 norm, of `actual` from `factor` times `expected`; NaN if anything is not finite.
template <typename Actual, typename Expected>
double RelativeDifference(const Actual& actual, const Expected& expected, double factor = 1) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double value = factor * static_cast<double>(expected[i]), delta = static_cast<double>(actual[i]) - value;
    difference += delta * delta;
    norm += value * value;
  }
  return std::sqrt(difference / norm);
}

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_CUDA_CUDA_SUPPORT_H_
