// GatedEngine: a CpuEngine whose Compute() can be held up, so that tests can look at a call while it waits or computes, or can be
// made to fail, or can lose its device.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_GATED_ENGINE_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_GATED_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/engine.h"
#include "tests/unit/forwarding_engine.h"

namespace headwater::testing {

// Shared by the test and the engine, which the server owns.
class Gate {
 public:
  // From now on Compute() waits when it is entered.
  void Close() { Set(&Gate::open_, false); }
  void Open() { Set(&Gate::open_, true); }
  // Waits until a call stands at the closed gate.
  void AwaitWaiting() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](int* waiting) { return *waiting > 0; }, &waiting_));
  }
  // The next Compute() fails with this.
  void FailNext(const absl::Status& failure) { Set(&Gate::failure_, failure); }
  // The device is lost: every Compute() that passes from now on fails with this, and so says health().
  void Lose(const absl::Status& health) { Set(&Gate::health_, health); }
  absl::Status health() {
    absl::MutexLock lock(&mutex_);
    return health_;
  }
  // As if a computation had got on.
  void GetOn() { ++progress_; }
  int64_t progress() const { return progress_; }
  absl::Status Pass() {
    absl::MutexLock lock(&mutex_);
    ++waiting_;
    mutex_.Await(absl::Condition(&open_));
    --waiting_;
    if (!health_.ok()) return health_;
    return std::exchange(failure_, absl::OkStatus());
  }

 private:
  template <typename T>
  void Set(T Gate::*member, const T& value) {
    absl::MutexLock lock(&mutex_);
    this->*member = value;
  }

  absl::Mutex mutex_;
  bool open_ ABSL_GUARDED_BY(mutex_) = true;
  int waiting_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<int64_t> progress_ = 0;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  absl::Status health_ ABSL_GUARDED_BY(mutex_);
};

class GatedEngine final : public ForwardingEngine {
 public:
  GatedEngine(std::unique_ptr<LossEngine> engine, std::shared_ptr<Gate> gate)
      : ForwardingEngine(std::move(engine)), gate_(std::move(gate)) {}

  absl::Status DoHealth() const override { return gate_->health(); }
  int64_t progress() const override { return ForwardingEngine::progress() + gate_->progress(); }
  absl::StatusOr<MicroBatchResult> DoCompute(const MicroBatch& micro_batch) override {
    if (absl::Status status = gate_->Pass(); !status.ok()) return status;
    return ForwardingEngine::DoCompute(micro_batch);
  }

 private:
  const std::shared_ptr<Gate> gate_;
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_GATED_ENGINE_H_
