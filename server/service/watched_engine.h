// WatchedEngine: an engine around another one, which tells when that one is stuck.
//
// The engine is stuck when a call is in it and for `stall_timeout` none has ended, no rows have been asked for or handed out
// (RowFlow), and LossEngine::progress() has not risen. From then on health() fails as if the device were lost. Time is counted in
// looks of at most a second each (health() is called every 50 ms): a process that was stopped for an hour has not been stuck.
#ifndef HEADWATER_SERVER_SERVICE_WATCHED_ENGINE_H_
#define HEADWATER_SERVER_SERVICE_WATCHED_ENGINE_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "headwater/kernels/engine.h"

namespace headwater::service {

class EngineMeter;

class WatchedEngine final : public LossEngine {
 public:
  // `stall_timeout` > 0. `clock` never goes back; null: the steady one.
  WatchedEngine(std::unique_ptr<LossEngine> engine, absl::Duration stall_timeout, std::function<absl::Duration()> clock = nullptr);
  ~WatchedEngine() override;

  std::string name() const override { return engine_->name(); }
  std::vector<EngineDevice> devices() const override { return engine_->devices(); }
  const EngineOptions& options() const override { return engine_->options(); }
  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) const override { return engine_->PlanHead(spec); }
  absl::StatusOr<std::unique_ptr<EngineHead>> CreateHead(const HeadSpec& spec) override;
  int64_t planned_bytes() const override { return engine_->planned_bytes(); }
  // The engine's own, else kEngineFailed once it is stuck, which stays; that moment is logged, with the head and the call.
  absl::Status health() const override;
  int64_t progress() const override { return engine_->progress(); }
  // Only of heads that CreateHead() of this engine made.
  absl::StatusOr<MicroBatchResult> Compute(const MicroBatch& micro_batch) override;
  absl::Status DigestRows(absl::Span<const RowsView> streams, const DeviceEvent* after, DigestBuilder* digest) override;
  absl::Status CopyRows(const RowsView& rows, const DeviceEvent* after, void* out) override;
  absl::StatusOr<std::unique_ptr<HostMemory>> AllocateHostMemory(int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<HostMemory>> RegisterHostMemory(void* data, int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<DeviceRegion>> OpenDeviceMemory(const DeviceHandle& handle, int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<DeviceEvent>> OpenDeviceEvent(const DeviceHandle& handle) override;

 private:
  const std::shared_ptr<EngineMeter> meter_;  // heads and contributions have it too
  const std::unique_ptr<LossEngine> engine_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_WATCHED_ENGINE_H_
