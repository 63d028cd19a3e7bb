#include "client_rules.h"

#include "client/core/link/error.h"

namespace headwater::history {

using namespace client::internal;

RetryState RetriesOf(bool safe) {
  return RetryState(client::RetryPolicy(), Deadline::max(), safe ? Repeat::kSafe : Repeat::kIfNothingWasDone);
}

absl::Status ToStatus(const std::string& reason) {
  if (reason.empty()) return absl::UnavailableError("the connection broke");
  v1::ErrorReason value = v1::ERROR_REASON_UNSPECIFIED;
  if (!v1::ErrorReason_Parse("ERROR_REASON_" + reason, &value)) return absl::InternalError(reason);
  const bool exhausted = reason == "STAGING_FULL" || reason == "QUOTA_EXCEEDED";
  const bool unavailable = reason == "SHARD_NOT_READY" || reason == "STRIPE_LOST";
  return MakeLocalError(value,
                        exhausted     ? absl::StatusCode::kResourceExhausted
                        : unavailable ? absl::StatusCode::kUnavailable
                                      : absl::StatusCode::kFailedPrecondition,
                        "by the simulated server");
}

void ClientLog::Add(const Event& event) {
  const Record record = event.op == Op::kCommit        ? Record::kCommit
                        : event.op == Op::kDiscard     ? Record::kDiscard
                        : event.op == Op::kAddGradient ? Record::kGradient
                                                       : Record::kLoss;
  const int64_t step = *event.targets[0].step;
  // Never made again here: who replays asks which event it stands for.
  const auto call = std::make_shared<LoggedCall>();
  call->bytes = event.is_call() ? 100 : 20;
  events_.emplace(call.get(), event);
  log_.StepIsOpen(head_, step);
  log_.Add({.record = record, .heads = {{.state = head_, .step = step}}, .micro_batch = event.micro_batch, .call = call});
}

void ClientLog::Forget() {
  log_.Forget(*head_);
  events_.clear();
  head_ = std::make_shared<HeadState>(v1::Head(), "");
}

std::vector<Event> ClientLog::Entries() {
  std::vector<Event> events;
  for (const LogEntry& entry : log_.EntriesOf({{.state = head_}})) events.push_back(events_.at(entry.call.get()));
  return events;
}

}  // namespace headwater::history
