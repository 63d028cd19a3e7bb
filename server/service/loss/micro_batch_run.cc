// An admitted micro-batch on its way through the engine. It waits for rows and for its place, is submitted to its heads, and sends
// its gradient.
//
// Computing begins when the first useful rows are there, if the others seem to be near: the engine reads rows as they come
// (IncomingRows). If rows then stay away, the run gives its place to others, and waits until all rows are there.
//
// Every wait is on the transfer's RowExchange. It is woken by rows, the end of the call, joined rows, the queue, a deleted head and
// a lost engine.
//
// Used by one thread, except that the engine's threads report the gradient.
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/heads/steps/submit.h"
#include "server/observability/monotonic_clock.h"
#include "server/scheduler/waiting.h"
#include "server/scheduler/work_queue.h"
#include "server/service/loss/micro_batch.h"
#include "server/service/request/canonical_header.h"
#include "server/transport/row_exchange.h"

namespace headwater::service {
namespace {

using observability::MonotonicNow;
using transport::RegionUse;

// Rows that are worth beginning with: the first slice of the CUDA engine.
constexpr int64_t kFirstRows = 1024;
// A micro-batch begins before it is complete if the rest will be there within this, at the pace of what has come.
constexpr absl::Duration kNearlyComplete = absl::Milliseconds(250);
// Places at the engine that a micro-batch takes. It keeps the last one even if it must wait for files there: frequent saves must
// not keep it out forever.
constexpr int kMostPlaces = 4;
// How long after the end of a stream it is known whether it was cut.
constexpr absl::Duration kEndKnown = absl::Milliseconds(50);

class MicroBatchRun final : private heads::IncomingRows {
 public:
  // The limits of its call bound the waits.
  explicit MicroBatchRun(AdmittedMicroBatch& micro_batch)
      : batch_(micro_batch),
        core_(micro_batch.core),
        exchange_(micro_batch.transfer->exchange()),
        limits_(micro_batch.scope.wait_limits()),
        cancelled_([waiter = limits_.waiter] { return waiter->cancelled(); }) {}

  absl::Status Compute() {
    const int64_t row_count = batch_.payload->request.row_count;
    const scheduler::JobSize size = scheduler::JobSizeOf(row_count);
    const auto& sources = batch_.payload->sources;
    heads::Submission& submission = batch_.submission;
    begin_ = MonotonicNow();
    joined_end_ = scheduler::WaitEnd(begin_, limits_.deadline);
    turn_.emplace(core_.queue, batch_.client, size, begin_, [this] { exchange_.Notify(); });
    for (const auto& claim : *batch_.claims) {
      claim->OnChange([transfer = std::weak_ptr<Transfer>(batch_.transfer)] {
        if (const auto call = transfer.lock(); call != nullptr) call->exchange().Notify();
      });
    }
    if (batch_.entry.has_value()) batch_.entry->Open(batch_.transfer);
    AllocateTokenOutputs(batch_);
    HEADWATER_RETURN_IF_ERROR(OpenRegions());
    // The copies run beside the engine, and may wait for an event of the gradient's region, which is released after this.
    const absl::Cleanup copied = [this] { batch_.AwaitCopies().IgnoreError(); };
    if (batch_.copies_early()) HEADWATER_RETURN_IF_ERROR(batch_.StartCopies());

    submission.engine_digests =
        std::any_of(sources.begin(), sources.end(), [](const auto& source) { return source->region() != nullptr; });
    // In deterministic mode none begins early: how rows came must not show in the last bits.
    may_begin_early_ = size == scheduler::JobSize::kLarge && !core_.options.deterministic;
    // Small ones are complete when they begin, so that the engine can compute many of them together.
    submission.incoming = may_begin_early_ ? this : nullptr;
    while (true) {
      HEADWATER_RETURN_IF_ERROR(AwaitStart());
      if (submission.incoming == nullptr && submission.backward) {
        HEADWATER_ASSIGN_OR_RETURN(submission.digest, DigestOfAll());
      }
      if (!exchange_.complete()) core_.metrics.Count(observability::Metric::kEarlyStarts);
      const absl::Status status = Submit();
      if (!status.ok()) return HasReason(status, ErrorReason::kProtocolViolation) ? ExplainEnd(status) : status;
      if (!batch_.outcome->needs_all_rows) break;
      if (stalled()) core_.metrics.Count(observability::Metric::kStalls);
      submission.incoming = nullptr;
      submission.engine_digests = false;
      may_begin_early_ = false;
    }
    batch_.times.last_row = exchange_.Look().last_row_time;
    CountMicroBatch(batch_);
    for (const auto& claim : *batch_.claims) claim->MarkUsed();
    return absl::OkStatus();
  }

 private:
  using Progress = transport::RowProgress;

  // ---- heads::IncomingRows: rows that may still be on their way

  absl::Status AwaitRows(int64_t row_end) override {
    const absl::Time start = MonotonicNow();
    stall_clock_.BeginWait(start);
    while (true) {
      const int64_t seen = exchange_.version();
      HEADWATER_RETURN_IF_ERROR(PullRows());
      const Progress rows = exchange_.Look();
      HEADWATER_RETURN_IF_ERROR(rows.input);
      const absl::Time now = MonotonicNow();
      if (row_end < batch_.payload->request.row_count ? rows.ready_rows >= row_end : rows.complete) {
        stall_clock_.EndWait(now);
        if (trace() != nullptr) trace()->AddSpan("engine waits", absl::StrCat("for rows to ", row_end), start, now);
        if (exchange_.complete()) Send(gate_.Open());
        return absl::OkStatus();
      }
      const absl::Time give_up = stall_clock_.GiveUpAt(now, turn_->OthersWait());
      // Gradient rows may have been sent because all rows have just come: those cannot be computed again.
      if (now >= give_up && gate_.Shut()) {
        return MakeError(ErrorReason::kCancelled, "the rows stay away for too long to hold the engine for them");
      }
      exchange_.AwaitChange(seen, give_up);
    }
  }

  bool stalled() const override { return gate_.is_shut(); }

  absl::StatusOr<Digest> Finish(const DigestBuilder* rows) override {
    HEADWATER_RETURN_IF_ERROR(exchange_.Look().input);
    if (const absl::Time now = MonotonicNow(); trace() != nullptr) {
      trace()->AddSpan("commit", "decision: all rows are there", now, now);
    }
    Send(gate_.Open());
    const std::string header = CanonicalHeader(batch_.payload->request);
    return rows != nullptr ? rows->Finish(header) : batch_.transfer->Digested().Finish(header);
  }

  // Looks itself whether all rows have come: if nothing is added, the engine asks only at its end.
  void GradHiddenReady(int64_t row_end) override {
    if (trace() != nullptr) trace()->AddRows("engine: grad_hidden", row_end, batch_.times.engine_start);
    const int64_t may_leave = gate_.Ready(row_end);
    Send(may_leave == 0 && exchange_.complete() ? gate_.Open() : may_leave);
  }

  void Send(int64_t row_end) {
    if (row_end > 0 && batch_.sends_grad) batch_.transfer->GradReady(row_end, /*here=*/false);
  }

  observability::CallTrace* trace() const { return batch_.scope.trace().get(); }

  // ---- waits

  // Lets rows in regions be read and written.
  absl::Status OpenRegions() {
    heads::Submission& submission = batch_.submission;
    for (const auto& source : batch_.payload->sources) {
      HEADWATER_RETURN_IF_ERROR(source->Open(core_.metrics));
      if (source->region() != nullptr) HEADWATER_RETURN_IF_ERROR(AddEvent(*source->region(), source->rows().row_bytes));
    }
    MutableRowsView& grad_hidden = submission.grad_hidden;
    if (!batch_.grad_region.has_value() || grad_hidden.row_count == 0) return absl::OkStatus();
    HEADWATER_RETURN_IF_ERROR(batch_.grad_region->Prepare());
    grad_hidden.data = batch_.grad_region->data();
    grad_hidden.memory = batch_.grad_region->memory();
    return AddEvent(*batch_.grad_region, grad_hidden.column_count * ElementBytes(grad_hidden.data_type));
  }

  absl::Status AddEvent(const RegionUse& region, int64_t row_bytes) {
    const DeviceEvent*& after = batch_.submission.after;
    const DeviceEvent* const event = region.after();
    if (event == nullptr || event == after || region.bytes() == 0) return absl::OkStatus();
    if (after == nullptr) {
      after = event;
      return absl::OkStatus();
    }
    // The engine waits for one event only; another one is over once a row behind it has been read.
    DigestBuilder unused;
    const RowsView row = {region.data(), 1, row_bytes / int64_t{sizeof(float)}, DataType::kFloat32, MemorySpace::kDevice};
    return core_.engine->DigestRows({&row, 1}, event, &unused);
  }

  absl::Status PullRows() {
    const auto& sources = batch_.payload->sources;
    for (size_t i = 0; i < sources.size(); ++i) HEADWATER_RETURN_IF_ERROR(sources[i]->Pull(*batch_.transfer, i));
    return absl::OkStatus();
  }

  // Waits until the micro-batch may be submitted: all rows are there, or enough to begin with.
  absl::Status AwaitStart() {
    while (true) {
      const int64_t seen = exchange_.version();
      HEADWATER_RETURN_IF_ERROR(PullRows());
      const Progress rows = exchange_.Look();
      if (!rows.input.ok()) return ExplainEnd(rows.input);
      if (rows.complete) return absl::OkStatus();
      const absl::Time now = MonotonicNow();
      absl::Time end = EarlyStart(rows, now);
      if (end <= now) return absl::OkStatus();
      HEADWATER_RETURN_IF_ERROR(CheckWait(rows, now, &end));
      exchange_.AwaitChange(seen, end);
    }
  }

  // When it may be submitted even if rows are missing.
  absl::Time EarlyStart(const Progress& rows, absl::Time now) {
    if (!may_begin_early_ || rows.ready_rows < std::min(kFirstRows, batch_.payload->request.row_count) ||
        rows.received_bytes == 0) {
      return absl::InfiniteFuture();
    }
    // The more time passes the later the rest seems to come: only rows change that.
    const double missing = static_cast<double>(exchange_.total_bytes() - rows.received_bytes);
    if ((now - begin_) * (missing / static_cast<double>(rows.received_bytes)) > kNearlyComplete) return absl::InfiniteFuture();
    return turn_->EarlyStart(now);
  }

  // Why the wait for rows is over at `now`; OK if it is not, and `end` is lowered to when it will be.
  absl::Status CheckWait(const Progress& rows, absl::Time now, absl::Time* end) const {
    if (rows.misses_only_others_rows) {
      const transport::RowClaim* missing = nullptr;
      for (const auto& source : batch_.payload->sources) missing = missing != nullptr ? missing : source->awaited();
      const absl::Time give_up = std::min(joined_end_, missing->give_up());
      if (now >= give_up) return missing->MissingRow();
      *end = std::min(*end, give_up);
    } else {
      const absl::Duration idle = core_.options.stream_idle_timeout;
      const absl::Time idle_end = rows.last_row_time + idle;
      if (now >= idle_end) {
        return MakeError(ErrorReason::kCancelled, absl::StrCat("the client has sent no rows for ", absl::FormatDuration(idle),
                                                               " (stream_idle_timeout); nothing was added"));
      }
      *end = std::min(*end, idle_end);
      if (const int32_t joined = batch_.transfer->joined(); joined < batch_.transfer->stripe_count()) {
        const absl::Duration stripe_wait = core_.options.limits.max_stripe_wait;
        if (now >= begin_ + stripe_wait) {
          return MakeError(ErrorReason::kStripeLost,
                           absl::StrCat(joined, " of ", batch_.transfer->stripe_count(), " streams have come within ",
                                        absl::FormatDuration(stripe_wait), " (max_stripe_wait), and rows are missing"));
        }
        *end = std::min(*end, begin_ + stripe_wait);
      }
    }
    *end = std::min(*end, limits_.deadline);
    for (const heads::HeadUse& use : batch_.scope.heads()) {
      HEADWATER_RETURN_IF_ERROR(use->CheckEpoch(std::nullopt));  // a deleted one keeps its memory as long as this call is there
    }
    return CheckInTime(now, "its rows came");
  }

  // `doing` is what the call waits for, for the message.
  absl::Status CheckInTime(absl::Time now, const char* doing) const {
    if (cancelled_()) {
      return MakeError(ErrorReason::kCancelled, absl::StrCat("the call was cancelled while ", doing, "; nothing was added"));
    }
    if (now < limits_.deadline) return absl::OkStatus();
    return MakeError(ErrorReason::kDeadlineExceeded,
                     absl::StrCat("the call's deadline passed while ", doing, "; nothing was added"));
  }

  // Why rows are missing once their streams have ended. A cancellation is known only a moment after that.
  absl::Status ExplainEnd(const absl::Status& status) {
    const absl::Time known = MonotonicNow() + kEndKnown;
    while (exchange_.status().ok() && MonotonicNow() < known) exchange_.AwaitChange(exchange_.version(), known);
    const absl::Status broken = exchange_.status();
    return broken.ok() ? status : broken;
  }

  absl::StatusOr<Digest> DigestOfAll() {
    DigestBuilder digest = batch_.transfer->Digested();
    // Rows in regions have not been looked at yet.
    std::vector<RowsView> streams(batch_.submission.terms.size() + 1);
    bool any = false;
    for (const auto& source : batch_.payload->sources) {
      if (source->region() == nullptr) continue;
      streams[static_cast<size_t>(source->rows().digest_stream)] = *source->rows().view;
      any = true;
    }
    if (any) HEADWATER_RETURN_IF_ERROR(core_.engine->DigestRows(streams, batch_.submission.after, &digest));
    return digest.Finish(CanonicalHeader(batch_.payload->request));
  }

  // heads::AwaitFiles(), which the end of the transfer ends too.
  absl::Status AwaitFiles() {
    if (!heads::IsBehindFiles(batch_.submission)) return absl::OkStatus();
    turn_->Yield();
    scheduler::ThreadWaiter waiter([this] { return !exchange_.status().ok() || cancelled_(); });  // not counted: its rows are here
    const absl::Status status = heads::AwaitFiles(batch_.submission, {limits_.deadline, &waiter});
    return !status.ok() && !exchange_.status().ok() ? exchange_.status() : status;
  }

  absl::Status AwaitPlace() {
    HEADWATER_RETURN_IF_ERROR(CheckInTime(MonotonicNow(), "it waited in the queue"));
    HEADWATER_RETURN_IF_ERROR(turn_->Enter());
    while (true) {
      const int64_t seen = exchange_.version();
      if (turn_->admitted()) return absl::OkStatus();
      if (absl::Status status = CheckInTime(MonotonicNow(), "it waited in the queue"); !status.ok()) {
        turn_->Leave();
        return status;
      }
      exchange_.AwaitChange(seen, limits_.deadline);
    }
  }

  absl::Status Submit() {
    for (int places_left = kMostPlaces;; --places_left) {
      HEADWATER_RETURN_IF_ERROR(AwaitFiles());
      HEADWATER_RETURN_IF_ERROR(AwaitPlace());
      // A write from files may have come first while this waited for its place: others take the place.
      if (places_left == 1 || !heads::IsBehindFiles(batch_.submission)) break;
      turn_->Leave();
    }
    MicroBatchTimes& times = batch_.times;
    absl::StatusOr<heads::SubmissionOutcome> outcome;
    {
      const observability::BusyClock::Work work(core_.busy);
      times.engine_start = MonotonicNow();
      outcome = heads::Submit(batch_.submission, *core_.engine, cancelled_);
      times.engine_end = MonotonicNow();
    }
    turn_->Leave(times.engine_end - times.engine_start);
    // Observed whatever the outcome: an engine that only refuses would look stuck otherwise.
    core_.metrics.Observe(observability::Metric::kComputeSeconds, times.engine_end - times.engine_start);
    if (!outcome.ok()) return outcome.status();
    batch_.outcome = *std::move(outcome);
    return absl::OkStatus();
  }

  AdmittedMicroBatch& batch_;
  ServerCore& core_;
  transport::RowExchange& exchange_;
  const scheduler::WaitLimits limits_;
  const std::function<bool()> cancelled_;
  bool may_begin_early_ = false;
  absl::Time begin_;       // of observability::MonotonicNow()
  absl::Time joined_end_;  // when the call gives up waiting for joined rows alone
  std::optional<scheduler::WorkQueue::Turn> turn_;
  scheduler::StallClock stall_clock_;  // of AwaitRows()
  transport::GradGate gate_;
};

}  // namespace

absl::Status ComputeMicroBatch(AdmittedMicroBatch& batch) { return MicroBatchRun(batch).Compute(); }

absl::Status DeliverGrad(AdmittedMicroBatch& batch) {
  transport::RowExchange& exchange = batch.transfer->exchange();
  if (batch.grad_region.has_value() && batch.submission.grad_hidden.row_count > 0) {
    batch.core.metrics.Count(observability::Metric::kBytes, batch.grad_region->bytes(), observability::Direction::kOut,
                             PathOf(&*batch.grad_region));
    HEADWATER_RETURN_IF_ERROR(batch.grad_region->Finish());
  }
  if (!batch.sends_grad) return absl::OkStatus();
  batch.transfer->GradReady(batch.payload->request.row_count, /*here=*/true);
  while (true) {
    const int64_t seen = exchange.version();
    HEADWATER_RETURN_IF_ERROR(exchange.status());
    if (batch.transfer->grad_sent()) return absl::OkStatus();
    exchange.AwaitChange(seen, absl::InfiniteFuture());  // each stream's client is watched while it should take something
  }
}

}  // namespace headwater::service
