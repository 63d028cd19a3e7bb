// gRPC handlers of headwater.v1.LossService.
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "headwater/v1/loss_service.grpc.pb.h"
#include "server/heads/steps/submit.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/call/stream_io.h"
#include "server/service/loss/transfer.h"
#include "server/service/request/field_check.h"
#include "server/service/request/loss_request.h"
#include "server/service/services.h"
#include "server/transport/teacher_join.h"

namespace headwater::service {

namespace {

// Finds the heads of a decision, within the session, and waits for its step. May be tried again.
absl::StatusOr<std::vector<heads::DecisionTarget>> FindTargets(RpcScope& scope, const DecisionRequest& decision) {
  scope.set_head(decision.heads.front().name.ToString());
  if (scope.heads().empty()) {
    HEADWATER_ASSIGN_OR_RETURN(scope.session(), scope.core().UseSession(decision.session));
    for (const HeadAtStep& head_at_step : decision.heads) {
      HEADWATER_ASSIGN_OR_RETURN(auto head, scope.caller().Find(scope.core().registry, head_at_step.name));
      scope.heads().emplace_back(std::move(head));
    }
  }
  std::vector<heads::DecisionTarget> targets;
  for (size_t i = 0; i < decision.heads.size(); ++i) targets.push_back({scope.heads()[i].head(), decision.heads[i].key});
  for (const heads::DecisionTarget& target : targets) {
    HEADWATER_RETURN_IF_ERROR(target.head->AwaitStep(target.key, scope.wait_limits()));
  }
  if (scope.trace() != nullptr) {
    scope.trace()->AddSpan("wait", "wait for the step", scope.start_time(), observability::MonotonicNow());
  }
  return targets;
}

absl::Status CommitMicroBatch(RpcScope& scope, const v1::CommitMicroBatchRequest& request, v1::CommitMicroBatchResponse* response) {
  ServerCore& core = scope.core();
  HEADWATER_ASSIGN_OR_RETURN(const auto decision, DecodeCommit(request, core.options.limits));
  HEADWATER_ASSIGN_OR_RETURN(const auto targets, FindTargets(scope, decision));
  const absl::Time start = observability::MonotonicNow();
  const auto committed = heads::Commit(targets, decision.micro_batch, decision.attempt, decision.arguments, decision.session,
                                       &core.busy, scope.wait_limits());
  const absl::Time end = observability::MonotonicNow();
  if (scope.trace() != nullptr && !scheduler::IsParked(committed.status())) {
    scope.trace()->AddSpan("commit", committed.ok() ? "commit" : "commit failed", start, end);
  }
  HEADWATER_RETURN_IF_ERROR(committed.status());
  if (*committed) {
    core.metrics.Count(observability::Metric::kCommits);
    core.metrics.Observe(observability::Metric::kCommitSeconds, end - start);
  }
  response->set_replayed(!*committed);
  return absl::OkStatus();
}

absl::Status DiscardMicroBatch(RpcScope& scope, const v1::DiscardMicroBatchRequest& request,
                               v1::DiscardMicroBatchResponse* response) {
  HEADWATER_ASSIGN_OR_RETURN(const auto decision, DecodeDiscard(request, scope.core().options.limits));
  HEADWATER_ASSIGN_OR_RETURN(const auto targets, FindTargets(scope, decision));
  HEADWATER_ASSIGN_OR_RETURN(
      const bool dropped, heads::Discard(targets, decision.micro_batch, decision.attempt, decision.session, scope.wait_limits()));
  if (dropped) scope.core().metrics.CountMicroBatch(observability::MicroBatchOutcome::kDiscarded);
  response->set_dropped(dropped);
  return absl::OkStatus();
}

absl::Status TakeChunk(ServerCore& core, const v1::RowChunk& chunk, transport::TeacherStream& stream) {
  if (chunk.role() == v1::CHUNK_ROLE_UNSPECIFIED) return MissingField("chunk.role", "TEACHER_HIDDEN");
  if (chunk.role() != v1::CHUNK_ROLE_TEACHER_HIDDEN) {
    return InvalidField("chunk.role", "TEACHER_HIDDEN", absl::StrCat(static_cast<int>(chunk.role())));
  }
  HEADWATER_RETURN_IF_ERROR(CheckRange("chunk.term_index", chunk.term_index(), 0, 0));
  const int64_t data_bytes = static_cast<int64_t>(chunk.data().size());
  HEADWATER_RETURN_IF_ERROR(CheckLimit("chunk.data", data_bytes, "max_chunk_bytes", core.options.limits.max_chunk_bytes));
  HEADWATER_RETURN_IF_ERROR(stream.Add(chunk.row_start(), chunk.row_count(), chunk.data().data(), data_bytes, "chunk"));
  core.metrics.Count(observability::Metric::kBytes, data_bytes, observability::Direction::kIn);
  return absl::OkStatus();
}

// StreamTeacher: a teacher's rows, for trainers that join them. When it is answered OK all rows are kept, and trainers can have
// them. A thread of the core's handles each message. The call holds none while it waits for its client.
class StreamTeacherCall final : public grpc::ServerReadReactor<v1::StreamTeacherRequest> {
 public:
  StreamTeacherCall(const Entrance& entrance, grpc::CallbackServerContext& context, v1::StreamTeacherResponse& response)
      : response_(response), scope_(std::in_place, entrance, context, observability::RpcMethod::kStreamTeacher) {}

  void Start() {
    if (absl::Status status = scope_->Begin(); !status.ok()) return End(std::move(status));
    watch_.emplace(*scope_);
    Read();
  }

 private:
  void Read() {
    watch_->Begin();
    StartRead(&message_);
  }

  void OnReadDone(bool ok) noexcept override {
    watch_->End();
    scope_->core().operations.Post([this, ok] { Next(ok); });
  }
  void OnDone() noexcept override { delete this; }

  // An exception ends the process.
  void Next(bool ok) noexcept {
    absl::Status status = ok ? Take() : Complete();
    if (!ok || !status.ok()) return End(std::move(status));
    message_ = v1::StreamTeacherRequest();  // a call that waits holds no chunk
    Read();
  }

  absl::Status Take() {
    HEADWATER_RETURN_IF_ERROR(scope_->core().lost());
    if (stream_ == nullptr) return Open();
    HEADWATER_RETURN_IF_ERROR(CheckNextChunk(message_));
    return TakeChunk(scope_->core(), message_.chunk(), *stream_);
  }

  absl::Status Open() {
    ServerCore& core = scope_->core();
    HEADWATER_RETURN_IF_ERROR(CheckHeaderFirst(message_));
    HEADWATER_ASSIGN_OR_RETURN(const StreamTeacherRequest request,
                               DecodeStreamTeacherHeader(message_.header(), core.options.limits));
    HEADWATER_RETURN_IF_ERROR(scope_->caller().CheckTenant(request.set.tenant));
    HEADWATER_ASSIGN_OR_RETURN(scope_->session(), core.UseSession(request.session));
    HEADWATER_ASSIGN_OR_RETURN(stream_, core.join.Open(request.set, request.row_indices, request.session));
    return absl::OkStatus();
  }

  // There are no more messages: the client has half-closed, or the stream was cut.
  absl::Status Complete() {
    HEADWATER_RETURN_IF_ERROR(watch_->why());
    if (scope_->Cancelled()) return scope_->CancelledError();
    if (stream_ == nullptr) return NoHeader();
    HEADWATER_RETURN_IF_ERROR(stream_->Finish());
    response_.set_row_count(stream_->row_count());
    return absl::OkStatus();
  }

  void End(absl::Status status) {
    // Before the client has its answer: what the call has held is free then.
    watch_.reset();
    stream_.reset();
    grpc::Status answer = scope_->Finish(std::move(status));
    scope_.reset();
    Finish(std::move(answer));
  }

  v1::StreamTeacherRequest message_;
  v1::StreamTeacherResponse& response_;
  std::optional<RpcScope> scope_;  // until the call is answered, like those below
  std::optional<ClientWatch> watch_;
  std::unique_ptr<transport::TeacherStream> stream_;  // once the header was accepted
};

// ComputeLoss and TransferRows move tensors, so they get their messages as raw bytes; the others may wait. All come by callbacks.
using LossServiceBase = v1::LossService::WithRawCallbackMethod_ComputeLoss<v1::LossService::WithRawCallbackMethod_TransferRows<
    v1::LossService::WithCallbackMethod_StreamTeacher<v1::LossService::WithCallbackMethod_CommitMicroBatch<
        v1::LossService::WithCallbackMethod_DiscardMicroBatch<v1::LossService::Service>>>>>;

class LossServiceImpl final : public LossServiceBase {
 public:
  explicit LossServiceImpl(const Entrance& entrance) : entrance_(entrance) {}

 private:
  RawReactor* ComputeLoss(grpc::CallbackServerContext* context) noexcept override {
    return StartComputeLoss(entrance_.core, *context);
  }
  RawReactor* TransferRows(grpc::CallbackServerContext* context) noexcept override {
    return StartTransferRows(entrance_.core, *context);
  }
  grpc::ServerReadReactor<v1::StreamTeacherRequest>* StreamTeacher(grpc::CallbackServerContext* context,
                                                                   v1::StreamTeacherResponse* response) noexcept override {
    auto* const call = new StreamTeacherCall(entrance_, *context, *response);
    call->Start();
    return call;
  }
  HEADWATER_WAITING_CALL(CommitMicroBatch, v1::CommitMicroBatchRequest, v1::CommitMicroBatchResponse)
  HEADWATER_WAITING_CALL(DiscardMicroBatch, v1::DiscardMicroBatchRequest, v1::DiscardMicroBatchResponse)

  const Entrance entrance_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeLossService(const Entrance& entrance) { return std::make_unique<LossServiceImpl>(entrance); }

}  // namespace headwater::service
