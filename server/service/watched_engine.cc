#include "server/service/watched_engine.h"

#include <algorithm>
#include <functional>
#include <list>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/error.h"
#include "server/observability/logging.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/call_label.h"

namespace headwater::service {

using observability::Log;
using observability::LogLevel;

namespace {

absl::Duration SteadyTime() { return observability::MonotonicNow() - absl::UnixEpoch(); }

}  // namespace

// Which calls are in the engine, and since when none of them gets on. Thread-safe.
class EngineMeter {
  struct Entry {
    const char* work;
    std::string method;
    std::string request_id;
    std::string head;
  };

 public:
  EngineMeter(absl::Duration stall_timeout, std::function<absl::Duration()> clock)
      : stall_timeout_(stall_timeout), clock_(std::move(clock)), last_look_(clock_()) {}

  // One call of this thread that is in the engine. `work` is a literal.
  class Work {
   public:
    Work(EngineMeter& meter, const char* work) : meter_(meter) {
      Entry entry{work, CallLabel::Method(), CallLabel::RequestId(), CallLabel::Head()};
      absl::MutexLock lock(&meter_.mutex_);
      entry_ = meter_.calls_.insert(meter_.calls_.end(), std::move(entry));
    }
    ~Work() {
      absl::MutexLock lock(&meter_.mutex_);
      meter_.calls_.erase(entry_);
      ++meter_.events_;
    }
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;

   private:
    EngineMeter& meter_;
    std::list<Entry>::iterator entry_;
  };

  // Something has got on.
  void Tick() {
    absl::MutexLock lock(&mutex_);
    ++events_;
  }

  // kEngineFailed once the engine is stuck. `progress`: the engine's own.
  absl::Status Look(int64_t progress) {
    constexpr absl::Duration kLongestLook = absl::Seconds(1);
    absl::MutexLock lock(&mutex_);
    if (!stuck_.ok()) return stuck_;
    const absl::Duration now = clock_();
    const absl::Duration look = std::min(now - last_look_, kLongestLook);
    last_look_ = now;
    if (calls_.empty() || events_ != seen_events_ || progress != seen_progress_) {
      still_ = absl::ZeroDuration();
      seen_events_ = events_;
      seen_progress_ = progress;
      return stuck_;
    }
    still_ += look;
    if (still_ < stall_timeout_) return stuck_;
    const Entry& oldest = calls_.front();
    Log(LogLevel::kError, "engine_stuck",
        {{"work", oldest.work},
         {"method", oldest.method},
         {"request_id", oldest.request_id},
         {"head", oldest.head},
         {"calls", static_cast<int64_t>(calls_.size())},
         {"stall_timeout_s", absl::ToDoubleSeconds(stall_timeout_)}});
    // No head here: the error goes to every client, of whatever tenant.
    stuck_ = MakeError(ErrorReason::kEngineFailed, absl::StrCat("the engine is stuck: ", oldest.work, " has got no further for ",
                                                                absl::FormatDuration(stall_timeout_), " (engine_stall_timeout)"));
    return stuck_;
  }

 private:
  const absl::Duration stall_timeout_;
  const std::function<absl::Duration()> clock_;
  absl::Mutex mutex_;
  std::list<Entry> calls_ ABSL_GUARDED_BY(mutex_);   // the oldest first
  int64_t events_ ABSL_GUARDED_BY(mutex_) = 0;       // calls that have ended, and ticks
  int64_t seen_events_ ABSL_GUARDED_BY(mutex_) = 0;  // at the last look, like the next two
  int64_t seen_progress_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Duration last_look_ ABSL_GUARDED_BY(mutex_);
  absl::Duration still_ ABSL_GUARDED_BY(mutex_) = absl::ZeroDuration();  // since something got on
  absl::Status stuck_ ABSL_GUARDED_BY(mutex_);
};

namespace {

class WatchedContribution final : public StagedContribution {
 public:
  WatchedContribution(std::shared_ptr<EngineMeter> meter, std::unique_ptr<StagedContribution> contribution)
      : meter_(std::move(meter)), contribution_(std::move(contribution)) {}
  absl::Status Commit(double factor) override {
    const EngineMeter::Work work(*meter_, "Commit");
    return contribution_->Commit(factor);
  }

 private:
  const std::shared_ptr<EngineMeter> meter_;
  const std::unique_ptr<StagedContribution> contribution_;
};

class WatchedHead final : public EngineHead {
 public:
  WatchedHead(std::shared_ptr<EngineMeter> meter, std::unique_ptr<EngineHead> head)
      : meter_(std::move(meter)), head_(std::move(head)) {}
  EngineHead* inner() const { return head_.get(); }

  const HeadSpec& spec() const override { return head_->spec(); }
  const MemoryPlan& plan() const override { return head_->plan(); }
  absl::Span<const VocabShard> shards() const override { return head_->shards(); }
  int64_t ElementCount(HeadTensor tensor) const override { return head_->ElementCount(tensor); }
  DataType TensorDataType(HeadTensor tensor) const override { return head_->TensorDataType(tensor); }
  int32_t FreeStagingSlots() const override { return head_->FreeStagingSlots(); }
  bool StagesConcurrently() const override { return head_->StagesConcurrently(); }

  absl::Status ReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const override {
    const EngineMeter::Work work(*meter_, "ReadTensor");
    return head_->ReadTensor(tensor, element_start, element_count, out);
  }
  absl::Status WriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) override {
    const EngineMeter::Work work(*meter_, "WriteTensor");
    return head_->WriteTensor(tensor, element_start, element_count, in);
  }
  absl::Status ZeroGradient() override {
    const EngineMeter::Work work(*meter_, "ZeroGradient");
    return head_->ZeroGradient();
  }
  absl::Status AddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                             const float* in) override {
    const EngineMeter::Work work(*meter_, "AddToGradient");
    return head_->AddToGradient(tensor, element_start, element_count, factor, in);
  }
  absl::Status ReduceGradient() override {
    const EngineMeter::Work work(*meter_, "ReduceGradient");
    return head_->ReduceGradient();
  }
  absl::Status ResetOptimizerState() override {
    const EngineMeter::Work work(*meter_, "ResetOptimizerState");
    return head_->ResetOptimizerState();
  }
  absl::StatusOr<GradientStats> ComputeGradientStats() const override {
    const EngineMeter::Work work(*meter_, "ComputeGradientStats");
    return head_->ComputeGradientStats();
  }
  absl::Status ApplyOptimizer(const OptimizerStep& step) override {
    const EngineMeter::Work work(*meter_, "ApplyOptimizer");
    return head_->ApplyOptimizer(step);
  }

 private:
  const std::shared_ptr<EngineMeter> meter_;
  const std::unique_ptr<EngineHead> head_;
};

EngineHead* InnerOf(EngineHead* head) {
  auto* const watched = dynamic_cast<WatchedHead*>(head);
  return watched == nullptr ? head : watched->inner();
}

class WatchedFlow final : public RowFlow {
 public:
  WatchedFlow(EngineMeter& meter, RowFlow& flow) : meter_(meter), flow_(flow) {}
  absl::Status AwaitRows(int64_t row_end) override {
    absl::Status status = flow_.AwaitRows(row_end);
    meter_.Tick();
    return status;
  }
  absl::Status Decide(const DigestBuilder* rows) override {
    absl::Status status = flow_.Decide(rows);
    meter_.Tick();
    return status;
  }
  void GradHiddenReady(int64_t row_end) override {
    meter_.Tick();
    flow_.GradHiddenReady(row_end);
  }

 private:
  EngineMeter& meter_;
  RowFlow& flow_;
};

}  // namespace

WatchedEngine::WatchedEngine(std::unique_ptr<LossEngine> engine, absl::Duration stall_timeout,
                             std::function<absl::Duration()> clock)
    : meter_(std::make_shared<EngineMeter>(stall_timeout, clock ? std::move(clock) : SteadyTime)), engine_(std::move(engine)) {}

WatchedEngine::~WatchedEngine() = default;

absl::Status WatchedEngine::health() const {
  absl::Status health = engine_->health();
  return health.ok() ? meter_->Look(engine_->progress()) : health;
}

absl::StatusOr<std::unique_ptr<EngineHead>> WatchedEngine::CreateHead(const HeadSpec& spec) {
  const EngineMeter::Work work(*meter_, "CreateHead");
  auto head = engine_->CreateHead(spec);
  if (!head.ok()) return head.status();
  return std::make_unique<WatchedHead>(meter_, *std::move(head));
}

absl::StatusOr<MicroBatchResult> WatchedEngine::Compute(const MicroBatch& micro_batch) {
  std::vector<LossTerm> terms(micro_batch.terms.begin(), micro_batch.terms.end());
  for (LossTerm& term : terms) {
    term.head = InnerOf(term.head);
    term.teacher_head = InnerOf(term.teacher_head);
  }
  MicroBatch inner = micro_batch;
  inner.terms = terms;
  std::optional<WatchedFlow> flow;
  if (inner.flow != nullptr) inner.flow = &flow.emplace(*meter_, *micro_batch.flow);
  const EngineMeter::Work work(*meter_, "Compute");
  auto result = engine_->Compute(inner);
  if (result.ok() && result->staged != nullptr) {
    result->staged = std::make_unique<WatchedContribution>(meter_, std::move(result->staged));
  }
  return result;
}

absl::Status WatchedEngine::DigestRows(absl::Span<const RowsView> streams, const DeviceEvent* after, DigestBuilder* digest) {
  const EngineMeter::Work work(*meter_, "DigestRows");
  return engine_->DigestRows(streams, after, digest);
}

absl::Status WatchedEngine::CopyRows(const RowsView& rows, const DeviceEvent* after, void* out) {
  const EngineMeter::Work work(*meter_, "CopyRows");
  return engine_->CopyRows(rows, after, out);
}

absl::StatusOr<std::unique_ptr<HostMemory>> WatchedEngine::AllocateHostMemory(int64_t bytes) {
  const EngineMeter::Work work(*meter_, "AllocateHostMemory");
  return engine_->AllocateHostMemory(bytes);
}

absl::StatusOr<std::unique_ptr<HostMemory>> WatchedEngine::RegisterHostMemory(void* data, int64_t bytes) {
  const EngineMeter::Work work(*meter_, "RegisterHostMemory");
  return engine_->RegisterHostMemory(data, bytes);
}

absl::StatusOr<std::unique_ptr<DeviceRegion>> WatchedEngine::OpenDeviceMemory(const DeviceHandle& handle, int64_t bytes) {
  const EngineMeter::Work work(*meter_, "OpenDeviceMemory");
  return engine_->OpenDeviceMemory(handle, bytes);
}

absl::StatusOr<std::unique_ptr<DeviceEvent>> WatchedEngine::OpenDeviceEvent(const DeviceHandle& handle) {
  const EngineMeter::Work work(*meter_, "OpenDeviceEvent");
  return engine_->OpenDeviceEvent(handle);
}

}  // namespace headwater::service
