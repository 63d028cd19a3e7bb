#include "server/group/rank_link.h"

#include <utility>

#include "headwater/kernels/error.h"

namespace headwater::group {

namespace {

// Data that may wait to be sent.
constexpr int64_t kMaxQueuedBytes = int64_t{8} << 20;

int64_t ReplyBytes(const v1::RankReply& reply) { return static_cast<int64_t>(reply.ByteSizeLong()); }

int64_t DataBytes(const v1::JoinResponse& message) { return static_cast<int64_t>(message.data().data().size()); }

}  // namespace

RankLink::RankLink(std::function<bool(const v1::JoinResponse&)> send, std::function<void()> cancel)
    : send_(std::move(send)), cancel_(std::move(cancel)), sender_([this] { SendQueued(); }) {}

RankLink::~RankLink() {
  if (!sender_.joinable()) return;
  {
    absl::MutexLock lock(&mutex_);
    cancel_ = nullptr;  // the call may still be answered
    if (status_.ok()) status_ = MakeError(ErrorReason::kEngineFailed, "the link is gone");
  }
  sender_.join();
}

absl::Status RankLink::Send(v1::JoinResponse message) {
  const auto has_room = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return queued_bytes_ < kMaxQueuedBytes || !status_.ok(); };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&has_room));
  if (!status_.ok()) return status_;
  queued_bytes_ += DataBytes(message);
  queue_.push_back(std::move(message));
  return absl::OkStatus();
}

void RankLink::SendQueued() {
  const auto has_work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !queue_.empty() || !status_.ok(); };
  while (true) {
    v1::JoinResponse message;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_work));
      if (!status_.ok()) return;
      message = std::move(queue_.front());
      queue_.pop_front();
    }
    const bool sent = send_(message);
    if (!sent) return Break(MakeError(ErrorReason::kEngineFailed, "the worker's call has ended"));
    absl::MutexLock lock(&mutex_);
    queued_bytes_ -= DataBytes(message);
  }
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
  sender_.join();
  absl::MutexLock lock(&mutex_);
  cancel_ = nullptr;
}

absl::Status RankLink::status() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

int64_t RankLink::messages() const {
  absl::MutexLock lock(&mutex_);
  return messages_;
}

v1::RankAlive RankLink::alive() const {
  absl::MutexLock lock(&mutex_);
  return alive_;
}

}  // namespace headwater::group
