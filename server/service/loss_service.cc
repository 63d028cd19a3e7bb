#include "server/service/loss_service.h"

#include <utility>
#include <vector>

#include "server/observability/monotonic_clock.h"
#include "server/service/compute_loss_stream.h"
#include "server/service/field_check.h"
#include "server/service/loss_request.h"
#include "server/service/rpc_scope.h"
#include "server/service/stream_io.h"
#include "server/service/stream_teacher_call.h"
#include "server/service/transfer_rows_stream.h"

namespace headwater::service {

using observability::RpcMethod;

namespace {

// Runs `decide(targets)` for the heads of a decision, within the session and after any wait for the step.
template <typename Decision>
absl::Status Decide(ServerCore& core, RpcScope& scope, const DecisionRequest& decision, Decision&& decide) {
  scope.set_head(decision.heads.front().name.ToString());
  const auto use = core.UseSession(decision.session);
  if (!use.ok()) return use.status();
  std::vector<heads::DecisionTarget> targets;
  std::vector<heads::HeadUse> uses;
  for (const HeadAtStep& head_at_step : decision.heads) {
    auto head = scope.caller().Find(core.registry, head_at_step.name);
    if (!head.ok()) return head.status();
    uses.emplace_back(*head);
    targets.push_back({*std::move(head), head_at_step.key});
  }
  const absl::Time start = observability::MonotonicNow();
  for (const heads::DecisionTarget& target : targets) {
    HEADWATER_RETURN_IF_ERROR(core.waiting.AwaitStep(*target.head, target.key, scope.wait_limits()));
  }
  if (scope.trace() != nullptr) scope.trace()->AddSpan("wait", "wait for the step", start, observability::MonotonicNow());
  return decide(targets);
}

}  // namespace

RawReactor* LossServiceImpl::ComputeLoss(grpc::CallbackServerContext* context) { return StartComputeLoss(core_, *context); }

RawReactor* LossServiceImpl::TransferRows(grpc::CallbackServerContext* context) {
  return TransferRowsStream::Start(core_, *context);
}

grpc::Status LossServiceImpl::StreamTeacher(grpc::ServerContext* context, grpc::ServerReader<v1::StreamTeacherRequest>* reader,
                                            v1::StreamTeacherResponse* response) {
  return RunRpc(entrance_, *context, RpcMethod::kStreamTeacher,
                [&](RpcScope& scope) { return service::StreamTeacher(core_, *context, scope, *reader, response); });
}

grpc::Status LossServiceImpl::CommitMicroBatch(grpc::ServerContext* context, const v1::CommitMicroBatchRequest* request,
                                               v1::CommitMicroBatchResponse* response) {
  return RunRpc(entrance_, *context, RpcMethod::kCommitMicroBatch, [&](RpcScope& scope) -> absl::Status {
    auto decision = DecodeCommit(*request, core_.options.limits);
    if (!decision.ok()) return decision.status();
    return Decide(core_, scope, *decision, [&](const std::vector<heads::DecisionTarget>& targets) {
      const absl::Time start = observability::MonotonicNow();
      auto committed = heads::Head::Commit(targets, decision->micro_batch, decision->attempt, decision->arguments,
                                           decision->session, &core_.busy, core_.waiting.BehindFiles(scope.wait_limits()));
      if (!committed.ok()) return committed.status();
      const absl::Time end = observability::MonotonicNow();
      if (scope.trace() != nullptr) scope.trace()->AddSpan("commit", "commit", start, end);
      if (*committed) {
        core_.metrics.CountCommit();
        core_.metrics.ObservePhase(observability::Phase::kCommit, end - start);
      }
      response->set_replayed(!*committed);
      return absl::OkStatus();
    });
  });
}

grpc::Status LossServiceImpl::DiscardMicroBatch(grpc::ServerContext* context, const v1::DiscardMicroBatchRequest* request,
                                                v1::DiscardMicroBatchResponse* response) {
  return RunRpc(entrance_, *context, RpcMethod::kDiscardMicroBatch, [&](RpcScope& scope) -> absl::Status {
    auto decision = DecodeDiscard(*request, core_.options.limits);
    if (!decision.ok()) return decision.status();
    return Decide(core_, scope, *decision, [&](const std::vector<heads::DecisionTarget>& targets) {
      auto dropped = heads::Head::Discard(targets, decision->micro_batch, decision->attempt, decision->session,
                                          core_.waiting.BehindFiles(scope.wait_limits()));
      if (!dropped.ok()) return dropped.status();
      if (*dropped) core_.metrics.CountMicroBatch(observability::MicroBatchOutcome::kDiscarded);
      response->set_dropped(*dropped);
      return absl::OkStatus();
    });
  });
}

}  // namespace headwater::service
