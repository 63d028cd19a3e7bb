#include "client_rules.h"

#include <map>
#include <utility>

#include "client/core/call/retry.h"
#include "client/core/link/error.h"
#include "client/core/replay/replay_log.h"

namespace headwater::history {
namespace {

using namespace client::internal;

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

Record RecordOf(const Event& event) {
  if (event.op == Op::kCommit) return Record::kCommit;
  if (event.op == Op::kDiscard) return Record::kDiscard;
  return event.op == Op::kAddGradient ? Record::kGradient : Record::kLoss;
}

}  // namespace

struct RetryRules::Impl {
  RetryState state;
};

RetryRules::RetryRules(bool safe)
    : impl_(new Impl{RetryState(client::RetryPolicy(), Deadline::max(), safe ? Repeat::kSafe : Repeat::kIfNothingWasDone)}) {}
RetryRules::~RetryRules() = default;

bool RetryRules::RepeatsAfter(const std::string& reason) { return impl_->state.AfterFailure(ToStatus(reason)).has_value(); }

struct ClientLog::Impl {
  explicit Impl(int64_t max_bytes)
      : log(max_bytes, /*max_steps=*/0, /*on_open=*/[] {}), head(std::make_shared<HeadState>(v1::Head(), "")) {}

  ReplayLog log;
  std::shared_ptr<HeadState> head;
  std::map<const LoggedCall*, Event> events;  // of what may be in the log
};

ClientLog::ClientLog(int64_t max_bytes) : impl_(new Impl(max_bytes)) {}
ClientLog::~ClientLog() = default;

void ClientLog::Add(const Event& event) {
  LogEntry entry = {.record = RecordOf(event),
                    .heads = {{.state = impl_->head, .step = event.targets[0].step}},
                    .micro_batch = event.micro_batch};
  // Never made again here: who replays asks which event it stands for.
  const auto call = std::make_shared<LoggedCall>();
  call->bytes = event.is_call() ? 100 : 20;
  entry.call = call;
  impl_->events.emplace(call.get(), event);
  impl_->log.StepIsOpen(impl_->head, *event.targets[0].step);
  impl_->log.Add(std::move(entry));
}

void ClientLog::StepIsOpen(int64_t step) { impl_->log.StepIsOpen(impl_->head, step); }

void ClientLog::Forget() {
  impl_->log.Forget(*impl_->head);
  impl_->events.clear();
  impl_->head = std::make_shared<HeadState>(v1::Head(), "");
}

std::vector<Event> ClientLog::Entries() const {
  std::vector<Event> events;
  for (const LogEntry& entry : impl_->log.EntriesOf({{.state = impl_->head}})) events.push_back(impl_->events.at(entry.call.get()));
  return events;
}

bool ClientLog::IsComplete(int64_t step) const { return impl_->head->first_logged_step() <= step; }

}  // namespace headwater::history
