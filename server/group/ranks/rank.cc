#include "server/group/ranks/rank.h"

#include "headwater/kernels/communicator.h"
#include "headwater/kernels/error.h"
#include "server/observability/busy_clock.h"

namespace headwater::group {
namespace {

int64_t ReplyBytes(const v1::RankReply& reply) { return static_cast<int64_t>(reply.ByteSizeLong()); }

// For how long an engine has calls, and for how long they are in their callers' flows.
class RankClock final : public EngineObserver {
 public:
  uint64_t BeginCall(const char*) override {
    calls_.Begin();
    return 0;
  }
  void EndCall(uint64_t) override { calls_.End(); }
  void EnterFlow() override { flows_.Begin(); }
  void LeaveFlow() override { flows_.End(); }

  RankTimes times(const Communicator* communicator) const {
    RankTimes times;
    times.waiting = flows_.total();
    if (communicator != nullptr) {
      const CommunicatorTimes collectives = communicator->times();
      times.waiting += absl::FromChrono(collectives.waiting);
      times.communicating = absl::FromChrono(collectives.communicating);
    }
    // Read last, so that it is never less than its parts.
    times.computing = calls_.total() - times.waiting - times.communicating;
    return times;
  }

 private:
  observability::BusyClock calls_;
  observability::BusyClock flows_;
};

}  // namespace

absl::Status RankLink::Send(const v1::JoinResponse& message) {
  absl::MutexLock sending(&send_mutex_);
  if (absl::Status status = this->status(); !status.ok()) return status;
  if (!send_(message)) Break(MakeError(ErrorReason::kEngineFailed, "the worker's call has ended"));
  return status();
}

absl::StatusOr<v1::RankReply> RankLink::AwaitReply() {
  const auto come = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !replies_.empty() || !status_.ok(); };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&come));
  if (!status_.ok()) return status_;
  v1::RankReply reply = std::move(replies_.front());
  replies_.pop_front();
  reply_bytes_ -= ReplyBytes(reply);
  return reply;
}

void RankLink::Break(const absl::Status& reason) {
  absl::MutexLock lock(&mutex_);
  if (status_.ok()) status_ = reason;
  if (cancel_) cancel_();
}

void RankLink::Deliver(v1::JoinRequest message) {
  const auto has_room = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return (replies_.size() < kMaxReplies && reply_bytes_ < kMaxReplyBytes) || !status_.ok();
  };
  absl::MutexLock lock(&mutex_);
  if (!status_.ok()) return;
  ++messages_;
  if (message.has_alive()) alive_ = message.alive();
  if (!message.has_reply()) return;
  mutex_.Await(absl::Condition(&has_room));
  if (!status_.ok()) return;
  reply_bytes_ += ReplyBytes(message.reply());
  replies_.push_back(std::move(*message.mutable_reply()));
}

void RankLink::Close(const absl::Status& reason) {
  Break(reason);
  absl::MutexLock sending(&send_mutex_);
  absl::MutexLock lock(&mutex_);
  cancel_ = nullptr;
}

Rank MakeLocalRank(std::unique_ptr<LossEngine> engine) {
  const auto clock = std::make_shared<RankClock>();
  engine->Observe(clock);
  const std::shared_ptr<Communicator> communicator = engine->options().group.communicator;
  Rank rank;
  rank.engine = std::move(engine);
  rank.abort = [communicator](const absl::Status& reason) {
    if (communicator != nullptr) communicator->Abort(reason);
  };
  rank.times = [communicator, clock] { return clock->times(communicator.get()); };
  return rank;
}

}  // namespace headwater::group
