// The measurements in the benchmark's own process, beside the server: the engine called directly, and the bare products.
#ifndef HEADWATER_TESTS_BENCH_TRANSPORT_LOCAL_SIDE_H_
#define HEADWATER_TESTS_BENCH_TRANSPORT_LOCAL_SIDE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "headwater/kernels/engine.h"
#include "tests/bench/transport/settings.h"

namespace headwater::bench {

struct EngineWork {
  bool frozen = false;    // the head, which has no grad_weight then
  double resolution = 0;  // gradient_resolution
};

// The engine's own work on one micro-batch: forward, backward, grad_hidden, and grad_weight unless the head is frozen. Functions
// throw std::runtime_error for what fails. One thread.
class LocalSide {
 public:
  virtual ~LocalSide() = default;

  // Processor or GPU, for the figures.
  virtual std::string machine() const = 0;
  // For CardMonitor; empty without a GPU.
  virtual std::string bus_id() const = 0;
  // Calls the engine so many times in a row; rows and grad_hidden lie where the engine has them at hand.
  virtual void RunEngine(int count, EngineWork work) = 0;
  // Whether there are bare products to run; and they, so many times in a row.
  virtual bool has_products() const = 0;
  virtual void RunProducts(int count) = 0;

  // The hidden states in device memory, [rows, hidden_size], and room for `slots` gradients of them one behind the other; null
  // without a GPU.
  virtual void* device_hidden() = 0;
  virtual void* device_grad_hidden() = 0;
  // Copies bytes out of device memory.
  virtual void CopyOut(void* to, const void* from, int64_t bytes) = 0;

  // The result of the last RunEngine(), for comparison.
  virtual double loss_sum() const = 0;
  // bf16 [rows, hidden_size].
  virtual std::vector<uint16_t> grad_hidden() = 0;

  static constexpr int kDeviceSlots = 2;
};

// A trainable and a frozen head with the same weight on one engine.
class EngineCalls {
 public:
  EngineCalls(std::unique_ptr<LossEngine> engine, const TransportSettings& settings, const Tensors& tensors);

  void Run(int count, EngineWork work, const RowsView& hidden, const MutableRowsView& grad_hidden);
  double loss_sum() const { return loss_sum_; }
  LossEngine& engine() { return *engine_; }

 private:
  const Tensors& tensors_;
  std::unique_ptr<LossEngine> engine_;
  std::unique_ptr<EngineHead> trainable_, frozen_;
  double loss_sum_ = 0;
};

// `tensors` must outlive the result. `algorithms` is the engine's cache file.
std::unique_ptr<LocalSide> MakeCpuSide(const TransportSettings& settings, const Tensors& tensors);
// Throws where this program was built without CUDA.
std::unique_ptr<LocalSide> MakeGpuSide(const TransportSettings& settings, const Tensors& tensors, const std::string& algorithms);

}  // namespace headwater::bench

#endif  // HEADWATER_TESTS_BENCH_TRANSPORT_LOCAL_SIDE_H_
