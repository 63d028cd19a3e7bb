#include <cblas.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <random>
#include <utility>
#include <vector>

#include "headwater/kernels/communicator.h"
#include "headwater/kernels/machine_limits.h"
#include "headwater/kernels/product_rate.h"
#include "kernels/cpu/products/bfloat16_products.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/reference/storage.h"
#include "tests/bench/common/backend.h"
#include "tests/bench/common/serve.h"

namespace headwater::bench {
namespace {

// Each "device" of several is a part of the cores.
class CpuEngines final : public Engines {
 public:
  CpuEngines(int32_t device_count, const EngineOptions& options)
      : options_(options), alone_(static_cast<size_t>(device_count)), grouped_(alone_.size()) {
    if (device_count == 1) return;
    options_.thread_count = 1;
    EngineOptions own = options_;
    own.shard_count = own.group.world_size = device_count;
    for (auto& communicator : MakeInProcessCommunicators(device_count)) {
      own.group.rank = communicator->rank();
      own.group.communicator = std::move(communicator);
      grouped_[static_cast<size_t>(own.group.rank)] = Require(CreateCpuEngine(own));
    }
  }

  // Made at its first use: its memory is part of what is measured.
  LossEngine& alone(int32_t rank) override {
    std::unique_ptr<LossEngine>& engine = alone_[static_cast<size_t>(rank)];
    if (engine == nullptr) engine = Require(CreateCpuEngine(options_));
    return *engine;
  }
  LossEngine& grouped(int32_t rank) override { return *grouped_[static_cast<size_t>(rank)]; }
  void Run(const std::function<void(int32_t rank)>& work) override {
    if (alone_.size() == 1) return work(0);
    std::vector<std::future<void>> ranks;
    for (size_t rank = 0; rank < alone_.size(); ++rank) {
      ranks.push_back(std::async(std::launch::async, work, static_cast<int32_t>(rank)));
    }
    for (std::future<void>& rank : ranks) rank.get();
  }

 private:
  EngineOptions options_;
  std::vector<std::unique_ptr<LossEngine>> alone_, grouped_;
};

// In fp32 on all cores.
class OpenBlasProducts final : public Products {
 public:
  explicit OpenBlasProducts(const ProductInputs& inputs)
      : n_(static_cast<int>(inputs.rows)),
        h_(static_cast<int>(inputs.width)),
        v_(static_cast<int>(inputs.vocab)),
        hidden_(MakeNormal(DataType::kFloat32, inputs.rows * inputs.width, 2, 1)),
        weight_(MakeNormal(DataType::kFloat32, inputs.vocab * inputs.width, 1, 0.05)),
        logits_(static_cast<size_t>(inputs.rows * inputs.vocab)),
        grad_hidden_(static_cast<size_t>(inputs.rows * inputs.width)),
        grad_weight_(static_cast<size_t>(inputs.vocab * inputs.width)) {}

  // logits = hidden . weight^T, grad_hidden = grad_logits . weight, grad_weight = grad_logits^T . hidden.
  void Run(int64_t count) override {
    // The engine may have set another number for its own calls.
    const int before = openblas_get_num_threads();
    openblas_set_num_threads(ComputeThreads());
    const auto* hidden = reinterpret_cast<const float*>(hidden_.get());
    const auto* weight = reinterpret_cast<const float*>(weight_.get());
    for (int64_t i = 0; i < count; ++i) {
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n_, v_, h_, 1, hidden, h_, weight, h_, 0, logits_.data(), v_);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n_, h_, v_, 1, logits_.data(), v_, weight, h_, 0, grad_hidden_.data(),
                  h_);
      cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, v_, h_, n_, 1, logits_.data(), v_, hidden, h_, 0, grad_weight_.data(),
                  h_);
    }
    openblas_set_num_threads(before);
  }

 private:
  const int n_, h_, v_;
  const Memory hidden_, weight_;
  std::vector<float> logits_, grad_hidden_, grad_weight_;
};

// By oneDNN, of bf16 operands into fp32: each core has its columns of the vocabulary, or of grad_hidden.
class OneDnnProducts final : public Products {
 public:
  explicit OneDnnProducts(const ProductInputs& inputs)
      : n_(inputs.rows),
        h_(inputs.width),
        v_(inputs.vocab),
        hidden_(static_cast<size_t>(n_ * h_), 0x3F80),
        weight_(static_cast<size_t>(v_ * h_), 0x3D4D),
        gradient_(static_cast<size_t>(n_ * v_), 0x3A03),
        logits_(static_cast<size_t>(n_ * v_)),
        grad_hidden_(hidden_.size()),
        grad_weight_(weight_.size()) {}

  void Run(int64_t count) override {
    const auto part = [&](int64_t columns, int32_t index) { return columns * index / pool_.thread_count(); };
    for (int64_t i = 0; i < count; ++i) {
      pool_.Run(pool_.thread_count(), [&](int32_t index) {
        const int64_t start = part(v_, index);
        const int64_t columns = part(v_, index + 1) - start;
        cpu::MultiplyTransposed(n_, columns, h_, {hidden_.data(), h_}, {weight_.data() + start * h_, h_},
                                {logits_.data() + start, v_});
        cpu::MultiplyFirstTransposed(columns, h_, n_, 1, {gradient_.data() + start, v_}, {hidden_.data(), h_}, 1,
                                     {grad_weight_.data() + start * h_, h_});
      });
      pool_.Run(pool_.thread_count(), [&](int32_t index) {
        const int64_t start = part(h_, index);
        cpu::Multiply(n_, part(h_, index + 1) - start, v_, {gradient_.data(), v_}, {weight_.data() + start, h_}, 0,
                      {grad_hidden_.data() + start, h_});
      });
    }
  }

 private:
  const int64_t n_, h_, v_;
  cpu::ThreadPool pool_{ComputeThreads()};
  const std::vector<uint16_t> hidden_, weight_, gradient_;
  std::vector<float> logits_, grad_hidden_, grad_weight_;
};

}  // namespace

const MemorySpace kMemorySpace = MemorySpace::kHost;

std::string DescribeMachine() { return "- " + DescribeCpuProducts(ChooseBfloat16Products({})); }

Memory Allocate(int64_t bytes, bool /*on_host*/) {
  return Memory(new uint8_t[static_cast<size_t>(bytes)](), std::default_delete<uint8_t[]>());
}

void Copy(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, static_cast<size_t>(bytes)); }

void Synchronize() {}

Memory MakeNormal(DataType type, int64_t count, uint64_t seed, double deviation) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, deviation);
  Memory values = Allocate(count * ElementBytes(type));
  std::vector<double> block(4096);
  for (int64_t start = 0; start < count; start += static_cast<int64_t>(block.size())) {
    block.resize(static_cast<size_t>(std::min<int64_t>(count - start, 4096)));
    for (double& value : block) value = normal(random);
    const std::vector<uint8_t> bytes = reference::Encode(type, block);
    std::memcpy(values.get() + start * ElementBytes(type), bytes.data(), bytes.size());
  }
  return values;
}

std::unique_ptr<Engines> MakeEngines(int32_t device_count, const EngineOptions& options) {
  cpu::GetBfloat16Library();  // its code is no part of an engine's memory, as little as PyTorch's is
  return std::make_unique<CpuEngines>(device_count, options);
}

std::unique_ptr<Products> MakeProducts(const ProductInputs& inputs) {
  if (inputs.type == DataType::kBFloat16 && cpu::GetBfloat16Library().is_usable) return std::make_unique<OneDnnProducts>(inputs);
  return std::make_unique<OpenBlasProducts>(inputs);
}

}  // namespace headwater::bench
