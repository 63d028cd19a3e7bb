// The CUDA engine, and the bare products of cuda_floor.h, for a benchmark in another process (run, beside this file). That process
// times them in turn with others' computations of the same rows on the same GPU.
//
//   engine_side_cuda FOLDER [--workspace-mib=4096] [--algorithms=FILE]
//
// Reads a command a line from standard input, and answers each with a line: "ok", numbers after it, or "error", and why. Tensors
// are raw files of FOLDER: hidden [rows, width], weight [vocab, width], teacher_hidden, teacher_weight (bf16), targets (int32).
//
// - load ROWS WIDTH VOCAB TEACHER_WIDTH MICRO_BATCHES BETA_PERCENT: reads the files. TEACHER_WIDTH 0: cross entropy; else the
//   divergence at this beta.
// - products COUNT: milliseconds of the products of one micro-batch, COUNT times back to back.
// - add COUNT: those of the first micro-batch, whose grad_weight is added to the accumulator.
// - step COUNT: those of a micro-batch out of COUNT whole steps: the accumulator cleared, every micro-batch, nothing put off left.
// - gradients: the first micro-batch's grad_hidden (bf16) and grad_weight (fp32), into files of these names; the loss's sum.
// - watch: begins to observe the card.
// - seen: clock in MHz, watts, degrees Celsius and NVML's throttle reasons since then.
// - free: gives back the memory of what was loaded.
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "headwater/kernels/engine.h"
#include "tests/bench/common/card_monitor.h"
#include "tests/bench/common/cuda_floor.h"
#include "tests/bench/common/flags.h"
#include "tests/kernels/cuda/cuda_problem.h"

namespace headwater::bench {
namespace {

using testing::Buffer;
using testing::BufferKind;
using testing::CheckCuda;
using testing::CheckStatus;

struct Shape {
  int64_t rows = 0, width = 0, vocab = 0, teacher_width = 0, micro_batches = 1, beta_percent = 50;
  int64_t micro_batch_rows() const { return rows / micro_batches; }
};

// Rows, heads and products of one shape.
class Loaded {
 public:
  Loaded(LossEngine& engine, testing::BlasContext& blas, const std::string& folder, const Shape& shape)
      : engine_(engine), folder_(folder), shape_(shape), blas_(blas) {
    hidden_ = Read("hidden", shape.rows * shape.width * 2);
    weight_ = Read("weight", shape.vocab * shape.width * 2);
    device_targets_ = Read("targets", shape.rows * static_cast<int64_t>(sizeof(int32_t)));
    targets_.resize(static_cast<size_t>(shape.rows));
    testing::CopyMemory(targets_.data(), device_targets_.as<void>(), device_targets_.bytes());
    grad_hidden_ = Buffer(BufferKind::kDevice, hidden_.bytes());
    head_ = testing::MakeHeadOn(engine, testing::BFloat16Head({"", 0, shape.width, shape.vocab}, /*trainable=*/true));
    testing::WriteWeight(*head_, weight_);
    if (shape.teacher_width > 0) {
      teacher_hidden_ = Read("teacher_hidden", shape.rows * shape.teacher_width * 2);
      teacher_weight_ = Read("teacher_weight", shape.vocab * shape.teacher_width * 2);
      teacher_ = testing::MakeHeadOn(engine, testing::BFloat16Head({"", 0, shape.teacher_width, shape.vocab}, /*trainable=*/false));
      testing::WriteWeight(*teacher_, teacher_weight_);
    }
    CheckStatus(head_->ZeroGradient(), "ZeroGradient");
  }

  void Add(int64_t count) {
    for (int64_t i = 0; i < count; ++i) ComputeMicroBatch(0);
    CheckCuda(cudaDeviceSynchronize(), "the engine's last products");
  }

  void Step(int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      CheckStatus(head_->ZeroGradient(), "ZeroGradient");
      for (int64_t number = 0; number < shape_.micro_batches; ++number) ComputeMicroBatch(number);
      float element = 0;  // all of the gradient, if one element is read
      CheckStatus(head_->ReadTensor(HeadTensor::kGradWeight, 0, 1, &element), "ReadTensor");
    }
    CheckCuda(cudaDeviceSynchronize(), "the engine's last products");
  }

  void Multiply(int64_t count) {
    if (floor_ == nullptr) {
      FloorInputs inputs = {.rows = shape_.micro_batch_rows(),
                            .width = shape_.width,
                            .vocab = shape_.vocab,
                            .hidden = &hidden_,
                            .weight = &weight_,
                            .targets = &device_targets_,
                            .teacher_width = shape_.teacher_width,
                            .teacher_hidden = &teacher_hidden_,
                            .teacher_weight = &teacher_weight_};
      floor_ = std::make_unique<Floor>(blas_, inputs);
    }
    for (int64_t i = 0; i < count; ++i) floor_->Enqueue(nullptr);
    CheckCuda(cudaDeviceSynchronize(), "the products");
  }

  double WriteGradients() {
    CheckStatus(head_->ZeroGradient(), "ZeroGradient");
    const double loss = ComputeMicroBatch(0);
    std::vector<uint8_t> rows(static_cast<size_t>(shape_.micro_batch_rows() * shape_.width * 2));
    testing::CopyMemory(rows.data(), grad_hidden_.as<void>(), static_cast<int64_t>(rows.size()));
    Write("grad_hidden", rows.data(), rows.size());
    std::vector<float> gradient(static_cast<size_t>(shape_.vocab * shape_.width));
    CheckStatus(head_->ReadTensor(HeadTensor::kGradWeight, 0, shape_.vocab * shape_.width, gradient.data()), "ReadTensor");
    Write("grad_weight", gradient.data(), gradient.size() * sizeof(float));
    return loss;
  }

  int64_t micro_batches() const { return shape_.micro_batches; }
  void set_resolution(double tau) { resolution_ = tau; }

 private:
  Buffer Read(const std::string& name, int64_t bytes) const {
    std::ifstream file(folder_ + "/" + name, std::ios::binary);
    std::vector<char> values(static_cast<size_t>(bytes));
    if (!file.read(values.data(), bytes)) throw std::runtime_error(name + " cannot be read, or has fewer bytes than the shape");
    Buffer buffer(BufferKind::kDevice, bytes);
    testing::CopyMemory(buffer.as<void>(), values.data(), bytes);
    return buffer;
  }

  void Write(const std::string& name, const void* data, size_t bytes) const {
    std::ofstream file(folder_ + "/" + name, std::ios::binary);
    file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
    if (!file.flush()) throw std::runtime_error(name + " cannot be written");
  }

  // Returns the loss's sum over the rows.
  double ComputeMicroBatch(int64_t number) {
    const int64_t rows = shape_.micro_batch_rows();
    const int64_t start = number * rows;
    LossTerm term;
    term.head = head_.get();
    term.row_count = rows;
    term.gradient_resolution = resolution_;
    term.dither_seed = ++seed_;
    term.targets = absl::MakeConstSpan(targets_).subspan(static_cast<size_t>(start), static_cast<size_t>(rows));
    if (teacher_ != nullptr) {
      JsdSpec spec = {.beta = static_cast<double>(shape_.beta_percent) / 100};
      term.loss = spec;
      term.teacher_head = teacher_.get();
      term.teacher_hidden = {teacher_hidden_.as<uint8_t>() + start * shape_.teacher_width * 2, rows, shape_.teacher_width,
                             DataType::kBFloat16, MemorySpace::kDevice};
    }
    MicroBatch micro_batch = {
        .hidden = {hidden_.as<uint8_t>() + start * shape_.width * 2, rows, shape_.width, DataType::kBFloat16, MemorySpace::kDevice},
        .terms = absl::MakeConstSpan(&term, 1),
        .backward = true,
        .grad_hidden = {grad_hidden_.as<uint8_t>() + start * shape_.width * 2, rows, shape_.width, DataType::kBFloat16,
                        MemorySpace::kDevice},
        .grad_weight = GradWeightMode::kAccumulate};
    const absl::StatusOr<MicroBatchResult> result = engine_.Compute(micro_batch);
    CheckStatus(result.status(), "Compute");
    const LossSums& sums = result->terms[0];
    if (!(sums.loss_sum > 0) || sums.non_finite_row_count != 0) throw std::runtime_error("the engine computed nonsense");
    return sums.loss_sum;
  }

  LossEngine& engine_;
  const std::string folder_;
  const Shape shape_;
  testing::BlasContext& blas_;
  Buffer hidden_, weight_, teacher_hidden_, teacher_weight_, grad_hidden_, device_targets_;
  std::vector<int32_t> targets_;
  double resolution_ = 0;
  uint64_t seed_ = 0;  // each call has other draws
  std::unique_ptr<EngineHead> head_, teacher_;
  std::unique_ptr<Floor> floor_;
};

class Side {
 public:
  Side(std::string folder, const EngineOptions& options) : folder_(std::move(folder)) {
    absl::StatusOr<std::unique_ptr<LossEngine>> engine = CreateCudaEngine(options);
    CheckStatus(engine.status(), "CreateCudaEngine");
    engine_ = *std::move(engine);
  }

  // The numbers of the answer.
  std::string Answer(const std::string& line) {
    std::istringstream words(line);
    std::string command;
    words >> command;
    std::ostringstream answer;
    if (command == "load") {
      loaded_.reset();
      Shape shape;
      words >> shape.rows >> shape.width >> shape.vocab >> shape.teacher_width >> shape.micro_batches >> shape.beta_percent;
      if (!words || shape.micro_batches < 1 || shape.rows % shape.micro_batches != 0) throw std::runtime_error("not a shape");
      loaded_ = std::make_unique<Loaded>(*engine_, blas_, folder_, shape);
    } else if (command == "free") {
      loaded_.reset();
    } else if (command == "watch") {
      monitor_.Begin();
    } else if (command == "seen") {
      const CardState card = monitor_.End();
      answer << " " << card.sm_mhz << " " << card.watts << " " << card.celsius << " " << card.throttle_reasons;
    } else if (loaded_ == nullptr) {
      throw std::runtime_error("nothing is loaded");
    } else if (command == "resolution") {
      double tau = 0;
      if (!(words >> tau)) throw std::runtime_error("not a resolution");
      loaded_->set_resolution(tau);
    } else if (command == "gradients") {
      answer.precision(17);
      answer << " " << loaded_->WriteGradients();
    } else {
      int64_t count = 0;
      if (!(words >> count) || count < 1) throw std::runtime_error("not a count");
      answer.precision(9);
      answer << " " << Milliseconds(command, count);
    }
    return answer.str();
  }

 private:
  double Milliseconds(const std::string& command, int64_t count) {
    const auto start = std::chrono::steady_clock::now();
    int64_t micro_batches = count;
    if (command == "products") {
      loaded_->Multiply(count);
    } else if (command == "add") {
      loaded_->Add(count);
    } else if (command == "step") {
      loaded_->Step(count);
      micro_batches *= loaded_->micro_batches();
    } else {
      throw std::runtime_error("no such command");
    }
    const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
    return taken.count() / static_cast<double>(micro_batches);
  }

  const std::string folder_;
  std::unique_ptr<LossEngine> engine_;
  testing::BlasContext blas_;
  CardMonitor monitor_{testing::GpuBusId()};
  std::unique_ptr<Loaded> loaded_;
};

int Serve(int argc, char** argv) {
  int64_t workspace_mib = 4096;
  EngineOptions options;
  Flags flags;
  flags.Number("--workspace-mib", 1, 1 << 20, &workspace_mib);
  flags.Text("--algorithms", &options.algorithm_cache_path);
  flags.Parse(argc - 1, argv + 1);
  options.workspace_bytes = workspace_mib << 20;
  if (argc < 2) throw std::runtime_error("engine_side_cuda FOLDER [--workspace-mib=N] [--algorithms=FILE]");
  Side side(argv[1], options);
  for (std::string line; std::getline(std::cin, line);) {
    try {
      std::cout << "ok" << side.Answer(line) << std::endl;
    } catch (const std::exception& error) {
      std::cout << "error " << error.what() << std::endl;
    }
  }
  return 0;
}

}  // namespace
}  // namespace headwater::bench

int main(int argc, char** argv) {
  return headwater::bench::RunUnless(headwater::testing::ReasonForNoGpu(), [&] { return headwater::bench::Serve(argc, argv); });
}
