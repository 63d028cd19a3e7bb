#include "server/service/loss/loss_service.h"

#include <utility>
#include <vector>

#include "server/heads/steps/decide.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/call/rpc_scope.h"
#include "server/service/call/unary_call.h"
#include "server/service/request/field_check.h"
#include "server/service/request/loss_request.h"

namespace headwater::service {

using observability::RpcMethod;

namespace {

// Runs `decide(targets)` for the heads of a decision, within the session and after any wait for the step.
template <typename Decision>
absl::Status Decide(ServerCore& core, RpcScope& scope, const DecisionRequest& decision, Decision&& decide) {
  scope.set_head(decision.heads.front().name.ToString());
  if (scope.heads().empty()) {
    HEADWATER_ASSIGN_OR_RETURN(scope.session(), core.UseSession(decision.session));
    for (const HeadAtStep& head_at_step : decision.heads) {
      HEADWATER_ASSIGN_OR_RETURN(auto head, scope.caller().Find(core.registry, head_at_step.name));
      scope.heads().emplace_back(std::move(head));
    }
  }
  std::vector<heads::DecisionTarget> targets;
  for (size_t i = 0; i < decision.heads.size(); ++i) targets.push_back({scope.heads()[i].head(), decision.heads[i].key});
  for (const heads::DecisionTarget& target : targets) {
    HEADWATER_RETURN_IF_ERROR(target.head->AwaitStep(target.key, scope.wait_limits()));
  }
  if (scope.trace() != nullptr)
    scope.trace()->AddSpan("wait", "wait for the step", scope.start_time(), observability::MonotonicNow());
  return decide(targets);
}

}  // namespace

grpc::ServerUnaryReactor* LossServiceImpl::CommitMicroBatch(grpc::CallbackServerContext* context,
                                                            const v1::CommitMicroBatchRequest* request,
                                                            v1::CommitMicroBatchResponse* response) {
  return UnaryCall::Start(entrance_, context, RpcMethod::kCommitMicroBatch, [=, this](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto decision, DecodeCommit(*request, core_.options.limits));
    return Decide(core_, scope, decision, [&](const std::vector<heads::DecisionTarget>& targets) {
      const absl::Time start = observability::MonotonicNow();
      HEADWATER_ASSIGN_OR_RETURN(auto committed, heads::Commit(targets, decision.micro_batch, decision.attempt, decision.arguments,
                                                               decision.session, &core_.busy, scope.wait_limits()));
      const absl::Time end = observability::MonotonicNow();
      if (scope.trace() != nullptr) scope.trace()->AddSpan("commit", "commit", start, end);
      if (committed) {
        core_.metrics.CountCommit();
        core_.metrics.ObservePhase(observability::Phase::kCommit, end - start);
      }
      response->set_replayed(!committed);
      return absl::OkStatus();
    });
  });
}

grpc::ServerUnaryReactor* LossServiceImpl::DiscardMicroBatch(grpc::CallbackServerContext* context,
                                                             const v1::DiscardMicroBatchRequest* request,
                                                             v1::DiscardMicroBatchResponse* response) {
  return UnaryCall::Start(entrance_, context, RpcMethod::kDiscardMicroBatch, [=, this](RpcScope& scope) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(auto decision, DecodeDiscard(*request, core_.options.limits));
    return Decide(core_, scope, decision, [&](const std::vector<heads::DecisionTarget>& targets) {
      HEADWATER_ASSIGN_OR_RETURN(
          auto dropped, heads::Discard(targets, decision.micro_batch, decision.attempt, decision.session, scope.wait_limits()));
      if (dropped) core_.metrics.CountMicroBatch(observability::MicroBatchOutcome::kDiscarded);
      response->set_dropped(dropped);
      return absl::OkStatus();
    });
  });
}

}  // namespace headwater::service
