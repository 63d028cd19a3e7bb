// The place where engines compute: GPUs (cuda_backend.cc), or the processor (cpu_backend.cc). A program is linked with one of the
// two. Functions throw std::runtime_error for what fails.
#ifndef HEADWATER_TESTS_BENCH_COMMON_BACKEND_H_
#define HEADWATER_TESTS_BENCH_COMMON_BACKEND_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "headwater/kernels/engine.h"

namespace headwater::bench {

// The first GPU's address and name, or "-" and what the processor multiplies with.
std::string DescribeMachine();

// How a view names memory of Allocate().
extern const MemorySpace kMemorySpace;
using Memory = std::shared_ptr<uint8_t>;
// `on_host`: page-locked beside a GPU.
Memory Allocate(int64_t bytes, bool on_host = false);
// Copies in whatever direction the pointers say, after everything that was enqueued.
void Copy(void* to, const void* from, int64_t bytes);
void Synchronize();
// Normally distributed values, the same for the same seed; on a GPU bf16.
Memory MakeNormal(DataType type, int64_t count, uint64_t seed, double deviation);

// An engine for each device; several devices also make up a group, of which each holds a rank.
class Engines {
 public:
  virtual ~Engines() = default;
  virtual LossEngine& alone(int32_t rank) = 0;
  virtual LossEngine& grouped(int32_t rank) = 0;
  // Calls work(rank) for all devices at the same time, each with its device current, and waits for all.
  virtual void Run(const std::function<void(int32_t rank)>& work) = 0;
};
std::unique_ptr<Engines> MakeEngines(int32_t device_count, const EngineOptions& options);

// The floor of a micro-batch's time: the bare matrix products of forward and backward, by the fastest way of this machine.
class Products {
 public:
  virtual ~Products() = default;
  // So many times, one after the other.
  virtual void Run(int64_t count) = 0;
};
// The memory is the caller's, and must outlive the products; the processor's products take values of their own.
struct ProductInputs {
  DataType type = DataType::kBFloat16;
  int64_t rows = 0, width = 0, vocab = 0;
  const uint8_t* hidden = nullptr;          // [rows, width]
  const uint8_t* weight = nullptr;          // [vocab, width]
  const uint8_t* targets = nullptr;         // int32 [rows], all valid
  int64_t teacher_width = 0;                // of a divergence; 0: cross entropy
  const uint8_t* teacher_hidden = nullptr;  // [rows, teacher_width]
  const uint8_t* teacher_weight = nullptr;  // [vocab, teacher_width]
};
std::unique_ptr<Products> MakeProducts(const ProductInputs& inputs);

}  // namespace headwater::bench

#endif  // HEADWATER_TESTS_BENCH_COMMON_BACKEND_H_
