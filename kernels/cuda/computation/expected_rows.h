// For how long the first of several small calls waits for the others with which it can be computed (CudaEngine).
//
// Callers that were computed together have their results at the same time, and come again one after the other. The first one must
// not take the device alone. Its rows would be a chunk of their own, for which the weights are read once more, and those of the
// others a second one. While the device is still busy with products of grad_weight, waiting costs nothing. The engine then waits
// for as many rows as there were the last time.
#ifndef HEADWATER_KERNELS_CUDA_COMPUTATION_EXPECTED_ROWS_H_
#define HEADWATER_KERNELS_CUDA_COMPUTATION_EXPECTED_ROWS_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "absl/functional/function_ref.h"

namespace headwater::cuda {

// Any thread.
class ExpectedRows {
 public:
  // How often the device is asked whether it is busy: no longer than it takes to enqueue a micro-batch.
  static constexpr std::chrono::microseconds kAskEvery{50};

  // No more than `most` rows are waited for.
  explicit ExpectedRows(int64_t most) : most_(most) {}
  ExpectedRows(const ExpectedRows&) = delete;
  ExpectedRows& operator=(const ExpectedRows&) = delete;

  // A call with so many rows waits from now on.
  void Come(int64_t rows);
  // So many calls with so many rows together wait no more; they are expected again, with all that still wait. After a single call,
  // none are expected.
  void Go(int64_t calls, int64_t rows);
  // Returns when as many rows wait as are expected, or when `is_busy` says that the device is not. For one thread at a time.
  void Await(absl::FunctionRef<bool()> is_busy);

 private:
  const int64_t most_;
  std::mutex mutex_;
  std::condition_variable came_;
  int64_t waiting_ = 0;
  int64_t expected_ = 0;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_COMPUTATION_EXPECTED_ROWS_H_
