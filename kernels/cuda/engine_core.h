// The parts that the heads of a CudaEngine share: the device, its stream, the workspace, the products, and the rule for decided
// work. By that rule work that changes a head is decided once for all its shards.
//
// All shards of an engine are on one device and run in lockstep on one stream. A phase of every shard comes first, then the merge,
// then the next phase. The work mutex gives device, workspace and bounce buffer to one call at a time. A rank of a group has one
// shard, and merges with those of the other ranks (device_group.h).
#ifndef HEADWATER_KERNELS_CUDA_ENGINE_CORE_H_
#define HEADWATER_KERNELS_CUDA_ENGINE_CORE_H_

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "headwater/kernels/engine.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/products/products.h"

namespace headwater::cuda {

class DeviceGroup;
class DeferredGradWeight;
class RowDigester;

class EngineCore {
 public:
  // Page-locked memory through which tensors that are not page-locked are copied, and for the data that a call uploads and
  // downloads beside them.
  static constexpr int64_t kBounceBytes = int64_t{32} << 20;

  // `options` with the defaults filled in that need no device; fills in the others. kFeatureNotBuilt without a usable GPU.
  static absl::StatusOr<std::shared_ptr<EngineCore>> Create(EngineOptions options);
  ~EngineCore();
  EngineCore(const EngineCore&) = delete;
  EngineCore& operator=(const EngineCore&) = delete;

  const EngineOptions& options() const { return options_; }  // with defaults filled in
  const std::string& device_model() const { return device_model_; }
  const std::array<uint8_t, 16>& device_uuid() const { return device_uuid_; }
  // Null for an engine that is alone.
  DeviceGroup* group() const { return group_.get(); }
  // The shards that are here: [first_shard(), first_shard() + held_shards()) of the shard_count that a head is split into.
  int32_t first_shard() const { return options_.group.rank; }
  int32_t held_shards() const { return group_ == nullptr ? options_.shard_count : 1; }
  // True where the kernels for sm_90a may be used.
  bool hopper() const { return hopper_; }

  // --- For the holder of a WorkLock ---------------------------------------------------------------------------------------------
  // Where everything is computed; and beside it callers' rows on their way in, and out.
  cudaStream_t stream() const { return stream_; }
  cudaStream_t upload_stream() const { return upload_stream_; }
  cudaStream_t download_stream() const { return download_stream_; }
  // Later work of `later` begins when the present work of `earlier` is done.
  absl::Status Order(cudaStream_t earlier, cudaStream_t later);
  // Events that the host waits for, each for a purpose.
  cudaEvent_t flag_event() const { return flag_event_; }
  cudaEvent_t sum_event() const { return sum_event_; }
  cudaEvent_t results_event() const { return results_event_; }
  const DeviceMemory& zeros() const { return zeros_; }  // never written
  Products& products() { return *products_; }
  const DeviceMemory& workspace() const { return workspace_; }
  const PinnedMemory& bounce() const { return bounce_; }
  DeferredGradWeight& deferred() { return *deferred_; }  // at the end of the workspace

  // Waits for the streams, a group's too. Every error that ends here or in Check() is looked at: one that the device does not
  // recover from makes health() bad. kEngineFailed if the group is broken, whose work ends without results then.
  absl::Status Synchronize(const char* what);
  // AwaitEvent() waits for an event. SynchronizeTransfers() waits for the streams by which rows come and go, among them a group's
  // sums of gradients.
  absl::Status AwaitEvent(cudaEvent_t event, const char* what);
  absl::Status SynchronizeTransfers(const char* what);
  // `status`; if it is an error, once the call's enqueued work has ended: the next call uses the same memory. For work outside
  // RunDecided() and the like, which do so themselves.
  absl::Status EndIfFailed(absl::Status status);
  // kMemoryBudgetExceeded if there is no workspace.
  absl::Status CheckWorkspace() const;

  // Work that is decided once for all shards. `prepare` does all that may fail on a shard and changes nothing; if it fails anywhere
  // the call fails as kShardNotReady (metadata: shard). Then `act` runs for all shards, and is waited for; it fails as
  // kEngineFailed, and its partial changes are lost then. In a group `prepare` and `act` are about the shard that is here, all
  // ranks decide together, and a failure of `act` breaks the group.
  absl::Status RunDecided(absl::FunctionRef<absl::Status(int32_t rank)> prepare, absl::FunctionRef<absl::Status()> act);
  // RunDecided() with `act` for each local shard, counted from 0, in order.
  absl::Status RunDecidedByShard(absl::FunctionRef<absl::Status(int32_t index)> act);
  // RunDecided() for work without the other ranks of a group, which are not asked: replicas' calls. A single engine uses it for all
  // work.
  absl::Status RunAlone(absl::FunctionRef<absl::Status()> act);
  // RunDecided()'s two halves, for work whose ranks exchange more than whether they are ready. The first runs on this rank alone.
  absl::Status Prepare(absl::FunctionRef<absl::Status(int32_t rank)> prepare);
  absl::Status Act(absl::FunctionRef<absl::Status()> act);
  // Within `act`: the present work on stream() is not waited for when it succeeds. It may only be about the engine's own memory;
  // whatever comes later is behind it on the stream. An error of the device shows then, or in health(). `idle`: a part of the
  // workspace that this work has no use for since results_event().
  void LetWorkGoOn(absl::Span<const std::byte> idle = {}) {
    act_goes_on_ = true;
    next_idle_ = idle;
  }
  // Within `act`, before it enqueues anything about `memory`, a part of the workspace. From now on `later` writes it, once the work
  // enqueued before `act` has no use for it.
  absl::Status OrderForWriting(absl::Span<const std::byte> memory, cudaStream_t later);

  // --- Any thread ---------------------------------------------------------------------------------------------------------------
  absl::Status health() const;
  // Whether stream() has something to do. With the engine's device current.
  bool is_busy() const { return cudaStreamQuery(stream_) == cudaErrorNotReady; }
  // Synchronize()'s treatment of an error.
  absl::Status Check(cudaError_t error, const char* what) const;
  // Makes the engine's device this thread's; a WorkLock has done it. Without it a call would be about the first one, and take
  // memory there.
  void MakeCurrent() const { static_cast<void>(cudaSetDevice(options_.device_index)); }
  RowDigester& digester() { return *digester_; }
  // Memory of other processes that may be another GPU's, as long as it is open: noted once for each time that it is opened.
  void NoteForeign(const void* data, int64_t bytes);
  void ForgetForeign(const void* data);
  bool IsForeign(const void* data) const;

  // Admits a head whose own tensors take `own_bytes` and that needs `workspace_bytes` of the shared workspace, cuBLASLt's part
  // (Products::kWorkspaceBytes) included. Enlarges the workspace if need be. kMemoryBudgetExceeded (`plan_text` is part of the
  // message) if the budget does not have it.
  absl::Status Admit(int64_t own_bytes, int64_t workspace_bytes, const std::string& plan_text);
  // Takes an admission back; the workspace goes with the last head.
  void Release(int64_t own_bytes);
  int64_t planned_bytes() const;

 private:
  friend class WorkLock;
  struct Foreign {
    int64_t bytes = 0;
    int64_t openings = 0;
  };
  explicit EngineCore(EngineOptions options);
  absl::Status Open();
  // kInvalidCombination on all ranks of a group whose GPUs are not alike: they would compute by different forms.
  absl::Status CheckAlike() const;
  absl::Status SynchronizeAll(std::initializer_list<cudaStream_t> streams, const char* what);
  absl::Status ResizeWorkspace(int64_t bytes);
  absl::Status CallProbe(ShardPhase phase, int32_t rank) const;
  absl::Status TryAct(absl::FunctionRef<absl::Status()> act);

  EngineOptions options_;
  std::string device_model_;
  std::array<uint8_t, 16> device_uuid_{};
  bool hopper_ = false;

  std::mutex work_mutex_;
  cudaStream_t stream_ = nullptr;
  cudaStream_t upload_stream_ = nullptr;
  cudaStream_t download_stream_ = nullptr;
  cudaEvent_t order_event_ = nullptr;
  cudaEvent_t flag_event_ = nullptr;
  cudaEvent_t sum_event_ = nullptr;
  cudaEvent_t results_event_ = nullptr;
  bool act_goes_on_ = false;
  absl::Span<const std::byte> idle_;               // while an Act() runs: the memory that the one before has left idle
  absl::Span<const std::byte> next_idle_;          // for the next one
  mutable std::atomic<bool> work_goes_on_{false};  // since the last Act(): it has not been waited for
  DeviceMemory zeros_;
  DeviceMemory products_workspace_;
  DeviceMemory workspace_;
  PinnedMemory bounce_;
  std::unique_ptr<Products> products_;
  std::unique_ptr<DeferredGradWeight> deferred_;
  std::unique_ptr<RowDigester> digester_;
  std::unique_ptr<DeviceGroup> group_;

  mutable std::mutex plan_mutex_;
  int64_t own_bytes_ = 0;
  int64_t workspace_bytes_ = 0;
  int64_t head_count_ = 0;

  mutable std::mutex foreign_mutex_;
  std::map<uintptr_t, Foreign> foreign_;  // by first byte

  mutable std::mutex health_mutex_;
  mutable absl::Status health_;
};

// Holds the work mutex, with the engine's device current on this thread.
class WorkLock {
 public:
  explicit WorkLock(EngineCore& core) : lock_(core.work_mutex_) { core.MakeCurrent(); }

 private:
  std::lock_guard<std::mutex> lock_;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_ENGINE_CORE_H_
