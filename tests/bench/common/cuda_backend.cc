#include <cuda_runtime_api.h>

#include <chrono>
#include <stdexcept>
#include <vector>

#include "tests/bench/common/backend.h"
#include "tests/bench/common/serve.h"
#include "tests/kernels/cuda/cuda_fp64.h"
#include "tests/kernels/cuda/cuda_group.h"
#include "tests/kernels/cuda/cuda_support.h"
#include "tests/kernels/support/blas_product.h"

namespace headwater::bench {
namespace {

using testing::BlasKind;
using testing::BlasProduct;
using testing::BlasTypes;
using testing::Buffer;
using testing::BufferKind;
using testing::CheckCuda;

class CudaEngines final : public Engines {
 public:
  CudaEngines(int32_t device_count, EngineOptions options) {
    for (options.device_index = 0; options.device_index < device_count; ++options.device_index) {
      alone_.push_back(Require(CreateCudaEngine(options)));
    }
    if (device_count > 1) group_ = std::make_unique<testing::CudaGroup>(device_count, options, std::chrono::seconds(300));
  }

  LossEngine& alone(int32_t rank) override { return *alone_[static_cast<size_t>(rank)]; }
  LossEngine& grouped(int32_t rank) override { return group_->engine(rank); }
  void Run(const std::function<void(int32_t rank)>& work) override {
    if (group_ == nullptr) {
      work(0);
    } else {
      group_->Run(work);
    }
  }

 private:
  std::vector<std::unique_ptr<LossEngine>> alone_;
  std::unique_ptr<testing::CudaGroup> group_;
};

// By cuBLASLt, on the engine's own operand values, each by the algorithm that is fastest here; grad_weight is added in fp32.
class CudaProducts final : public Products {
 public:
  explicit CudaProducts(const ProductInputs& inputs)
      : inputs_(inputs),
        logits_(BufferKind::kDevice, inputs.rows * inputs.vocab * 2),
        operand_(BufferKind::kDevice, inputs.rows * inputs.vocab * 2),
        grad_hidden_(BufferKind::kDevice, inputs.rows * inputs.width * 2),
        grad_weight_(BufferKind::kDevice, inputs.vocab * inputs.width * 4) {
    CheckCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    CheckCuda(cudaMemset(grad_weight_.as<void>(), 0, static_cast<size_t>(grad_weight_.bytes())), "cudaMemset");
    // The operand of the gradient products. Cross entropy: exponentials, with the factors of the rows in hidden. Divergence: the
    // derivative of the logits.
    const void* grad_weight_hidden = inputs.hidden;
    if (inputs.teacher_width > 0) {
      // Both sides' logits are needed at once; later runs of this product overwrite its own results only.
      const Buffer teacher_logits(BufferKind::kDevice, logits_.bytes());
      AddLogits(inputs.teacher_width, inputs.teacher_hidden, inputs.teacher_weight, teacher_logits);
      AddLogits(inputs.width, inputs.hidden, inputs.weight, logits_);
      for (const auto& product : products_) product->Enqueue(nullptr);
      CheckCuda(testing::DivergenceOperand(logits_.as<uint16_t>(), teacher_logits.as<uint16_t>(), inputs.rows, inputs.vocab,
                                           operand_.as<uint16_t>()),
                "DivergenceOperand");
      Synchronize();
      products_.erase(products_.begin());
      AddLogits(inputs.teacher_width, inputs.teacher_hidden, inputs.teacher_weight, logits_);
    } else {
      scaled_hidden_ = Buffer(BufferKind::kDevice, inputs.rows * inputs.width * 2);
      grad_weight_hidden = scaled_hidden_.as<void>();
      AddLogits(inputs.width, inputs.hidden, inputs.weight, logits_);
      products_[0]->Enqueue(nullptr);
      CheckCuda(testing::ExponentialOperand(logits_.as<uint16_t>(), inputs.rows, inputs.vocab,
                                            reinterpret_cast<const int32_t*>(inputs.targets), operand_.as<uint16_t>(),
                                            reinterpret_cast<const uint16_t*>(inputs.hidden), inputs.width,
                                            0.37 / static_cast<double>(inputs.rows), scaled_hidden_.as<uint16_t>()),
                "ExponentialOperand");
      Synchronize();
    }
    Add(BlasKind::kGradHidden, BlasTypes::kBFloat16ToBFloat16, inputs.width, operand_.as<void>(), inputs.weight, grad_hidden_);
    Add(BlasKind::kGradWeight, BlasTypes::kBFloat16ToFloat32, inputs.width, operand_.as<void>(), grad_weight_hidden, grad_weight_);
    for (const auto& product : products_) product->Search(nullptr);
  }
  CudaProducts(const CudaProducts&) = delete;
  CudaProducts& operator=(const CudaProducts&) = delete;
  ~CudaProducts() override { cudaStreamDestroy(stream_); }

  void Run(int64_t count) override {
    for (int64_t i = 0; i < count; ++i) {
      for (const auto& product : products_) product->Enqueue(stream_);
    }
    CheckCuda(cudaStreamSynchronize(stream_), "the products");
  }

 private:
  void AddLogits(int64_t width, const void* hidden, const void* weight, const Buffer& logits) {
    Add(BlasKind::kLogits, BlasTypes::kBFloat16ToBFloat16, width, hidden, weight, logits);
  }

  void Add(BlasKind kind, BlasTypes types, int64_t width, const void* a, const void* b, const Buffer& out) {
    // The algorithms that it has found serve all problems of the process. Never destroyed: CUDA may be gone by then.
    static testing::BlasContext& context = *new testing::BlasContext;
    const testing::BlasShape shape = {kind, types, inputs_.rows, width, inputs_.vocab, kind == BlasKind::kGradWeight};
    products_.push_back(std::make_unique<BlasProduct>(context, shape, a, b, out.as<void>()));
  }

  const ProductInputs inputs_;
  Buffer logits_, operand_, scaled_hidden_, grad_hidden_, grad_weight_;
  std::vector<std::unique_ptr<BlasProduct>> products_;  // three, or four with a teacher's
  cudaStream_t stream_ = nullptr;
};

}  // namespace

const MemorySpace kMemorySpace = MemorySpace::kDevice;

std::string DescribeMachine() { return testing::GpuBusId() + " " + testing::GpuName(); }

Memory Allocate(int64_t bytes, bool on_host) {
  const auto buffer = std::make_shared<Buffer>(on_host ? BufferKind::kPinned : BufferKind::kDevice, bytes);
  return Memory(buffer, buffer->as<uint8_t>());
}

void Copy(void* to, const void* from, int64_t bytes) { testing::CopyMemory(to, from, bytes); }

void Synchronize() { CheckCuda(cudaDeviceSynchronize(), "what was enqueued"); }

Memory MakeNormal(DataType /*type*/, int64_t count, uint64_t seed, double deviation) {
  Memory values = Allocate(count * 2);
  CheckCuda(testing::FillNormal(reinterpret_cast<uint16_t*>(values.get()), count, seed, deviation), "FillNormal");
  Synchronize();
  return values;
}

std::unique_ptr<Engines> MakeEngines(int32_t device_count, const EngineOptions& options) {
  std::string reason = testing::ReasonForNoGpu();
  if (reason.empty() && device_count > 1) reason = testing::ReasonForNoGroup(device_count);
  if (!reason.empty()) throw std::runtime_error(reason);
  return std::make_unique<CudaEngines>(device_count, options);
}

std::unique_ptr<Products> MakeProducts(const ProductInputs& inputs) { return std::make_unique<CudaProducts>(inputs); }

}  // namespace headwater::bench
