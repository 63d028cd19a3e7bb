#include "tests/bench/transport/local_side.h"

#include <sys/utsname.h>

#include <algorithm>
#include <fstream>
#include <stdexcept>
#include <thread>
#include <utility>

namespace headwater::bench {
namespace {

template <typename T>
T ValueOf(absl::StatusOr<T> value, const char* what) {
  if (!value.ok()) throw std::runtime_error(std::string(what) + ": " + value.status().ToString());
  return *std::move(value);
}

std::string ProcessorName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  utsname names{};
  return uname(&names) == 0 ? names.machine : "unknown";
}

std::unique_ptr<EngineHead> MakeHead(LossEngine& engine, const TransportSettings& settings, const Tensors& tensors,
                                     bool trainable) {
  HeadSpec spec;
  spec.vocab_size = settings.vocab_size;
  spec.hidden_size = settings.hidden_size;
  spec.data_type = DataType::kBFloat16;
  spec.transform.valid_vocab_size = settings.vocab_size;
  spec.trainable = trainable;
  std::unique_ptr<EngineHead> head = ValueOf(engine.CreateHead(spec), "CreateHead");
  const absl::Status written =
      head->WriteTensor(HeadTensor::kWeight, 0, static_cast<int64_t>(tensors.weight.size()), tensors.weight.data());
  if (!written.ok()) throw std::runtime_error("WriteTensor: " + written.ToString());
  return head;
}

class CpuSide final : public LocalSide {
 public:
  CpuSide(std::unique_ptr<LossEngine> engine, const TransportSettings& settings, const Tensors& tensors)
      : settings_(settings), tensors_(tensors), calls_(std::move(engine), settings, tensors), grad_hidden_(tensors.hidden.size()) {}

  std::string machine() const override {
    return ProcessorName() + "; " + std::to_string(std::thread::hardware_concurrency()) + " threads";
  }
  std::string bus_id() const override { return ""; }
  void RunEngine(int count, EngineWork work) override {
    calls_.Run(count, work, {tensors_.hidden.data(), settings_.rows, settings_.hidden_size, DataType::kBFloat16},
               {grad_hidden_.data(), settings_.rows, settings_.hidden_size, DataType::kBFloat16});
  }
  bool has_products() const override { return false; }
  void RunProducts(int) override { throw std::logic_error("the CPU's products are measured by engine_bench_cpu"); }
  void* device_hidden() override { return nullptr; }
  void* device_grad_hidden() override { return nullptr; }
  void CopyOut(void*, const void*, int64_t) override { throw std::logic_error("there is no device memory"); }
  double loss_sum() const override { return calls_.loss_sum(); }
  std::vector<uint16_t> grad_hidden() override { return grad_hidden_; }

 private:
  const TransportSettings& settings_;
  const Tensors& tensors_;
  EngineCalls calls_;
  std::vector<uint16_t> grad_hidden_;
};

}  // namespace

EngineCalls::EngineCalls(std::unique_ptr<LossEngine> engine, const TransportSettings& settings, const Tensors& tensors)
    : tensors_(tensors),
      engine_(std::move(engine)),
      trainable_(MakeHead(*engine_, settings, tensors, /*trainable=*/true)),
      frozen_(MakeHead(*engine_, settings, tensors, /*trainable=*/false)) {}

void EngineCalls::Run(int count, EngineWork work, const RowsView& hidden, const MutableRowsView& grad_hidden) {
  for (int i = 0; i < count; ++i) {
    LossTerm term;
    term.head = work.frozen ? frozen_.get() : trainable_.get();
    term.row_count = hidden.row_count;
    term.targets = tensors_.targets;
    term.gradient_resolution = work.resolution;
    MicroBatch micro_batch;
    micro_batch.hidden = hidden;
    micro_batch.terms = absl::MakeConstSpan(&term, 1);
    micro_batch.backward = true;
    micro_batch.grad_hidden = grad_hidden;
    micro_batch.grad_weight = work.frozen ? GradWeightMode::kNone : GradWeightMode::kAccumulate;
    const MicroBatchResult result = ValueOf(engine_->Compute(micro_batch), "Compute");
    loss_sum_ = result.terms[0].loss_sum;
  }
}

std::unique_ptr<LocalSide> MakeCpuSide(const TransportSettings& settings, const Tensors& tensors) {
  return std::make_unique<CpuSide>(ValueOf(CreateCpuEngine({}), "CreateCpuEngine"), settings, tensors);
}

}  // namespace headwater::bench
