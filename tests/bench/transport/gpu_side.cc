// The GPU's part of local_side.h, where the program is built with CUDA.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/bench/common/cuda_floor.h"
#include "tests/bench/transport/local_side.h"
#include "tests/kernels/cuda/cuda_support.h"

namespace headwater::bench {
namespace {

using testing::Buffer;
using testing::BufferKind;
using testing::CheckCuda;

Buffer OnDevice(const void* data, size_t bytes) {
  Buffer buffer(BufferKind::kDevice, static_cast<int64_t>(bytes));
  testing::CopyMemory(buffer.as<void>(), data, buffer.bytes());
  return buffer;
}

std::unique_ptr<LossEngine> MakeEngine(const std::string& algorithms) {
  EngineOptions options;
  options.algorithm_cache_path = algorithms;
  absl::StatusOr<std::unique_ptr<LossEngine>> engine = CreateCudaEngine(options);
  testing::CheckStatus(engine.status(), "CreateCudaEngine");
  return *std::move(engine);
}

class GpuSide final : public LocalSide {
 public:
  GpuSide(const TransportSettings& settings, const Tensors& tensors, const std::string& algorithms)
      : rows_(settings.rows),
        width_(settings.hidden_size),
        vocab_(settings.vocab_size),
        weight_(OnDevice(tensors.weight.data(), tensors.weight.size() * 2)),
        targets_(OnDevice(tensors.targets.data(), tensors.targets.size() * 4)),
        hidden_(OnDevice(tensors.hidden.data(), tensors.hidden.size() * 2)),
        grad_hidden_(BufferKind::kDevice, hidden_.bytes()),
        client_grad_hidden_(BufferKind::kDevice, hidden_.bytes() * kDeviceSlots),
        calls_(MakeEngine(algorithms), settings, tensors) {
    CheckCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  GpuSide(const GpuSide&) = delete;
  GpuSide& operator=(const GpuSide&) = delete;
  ~GpuSide() override { cudaStreamDestroy(stream_); }

  std::string machine() const override { return testing::GpuName(); }
  std::string bus_id() const override { return testing::GpuBusId(); }
  void RunEngine(int count, EngineWork work) override {
    calls_.Run(count, work, {hidden_.as<void>(), rows_, width_, DataType::kBFloat16, MemorySpace::kDevice},
               {grad_hidden_.as<void>(), rows_, width_, DataType::kBFloat16, MemorySpace::kDevice});
    CheckCuda(cudaDeviceSynchronize(), "the engine's last products");
  }
  bool has_products() const override { return true; }
  void RunProducts(int count) override {
    if (floor_ == nullptr) {
      FloorInputs inputs = {
          .rows = rows_, .width = width_, .vocab = vocab_, .hidden = &hidden_, .weight = &weight_, .targets = &targets_};
      floor_ = std::make_unique<Floor>(blas_, inputs);
    }
    for (int i = 0; i < count; ++i) floor_->Enqueue(stream_);
    CheckCuda(cudaStreamSynchronize(stream_), "the products");
  }
  void* device_hidden() override { return hidden_.as<void>(); }
  void* device_grad_hidden() override { return client_grad_hidden_.as<void>(); }
  void CopyOut(void* to, const void* from, int64_t bytes) override { testing::CopyMemory(to, from, bytes); }
  double loss_sum() const override { return calls_.loss_sum(); }
  std::vector<uint16_t> grad_hidden() override {
    std::vector<uint16_t> bits(static_cast<size_t>(rows_ * width_));
    testing::CopyMemory(bits.data(), grad_hidden_.as<void>(), grad_hidden_.bytes());
    return bits;
  }

 private:
  const int64_t rows_, width_, vocab_;
  Buffer weight_, targets_, hidden_, grad_hidden_, client_grad_hidden_;
  EngineCalls calls_;
  testing::BlasContext blas_;
  std::unique_ptr<Floor> floor_;  // made at its first use: it searches algorithms
  cudaStream_t stream_ = nullptr;
};

}  // namespace

std::unique_ptr<LocalSide> MakeGpuSide(const TransportSettings& settings, const Tensors& tensors, const std::string& algorithms) {
  const std::string reason = testing::ReasonForNoGpu();
  if (!reason.empty()) throw std::runtime_error("no GPU: " + reason);
  return std::make_unique<GpuSide>(settings, tensors, algorithms);
}

}  // namespace headwater::bench
