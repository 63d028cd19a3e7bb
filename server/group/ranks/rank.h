// Rank: an engine of a group from the leader's view, in this process or in another one.
//
// headwater/kernels/engine.h, "Groups", defines calls on a rank and the ranges of tensors that it takes. The leader makes one call
// of a rank at a time, and calls on all ranks in the group's order.
#ifndef HEADWATER_SERVER_GROUP_RANKS_RANK_H_
#define HEADWATER_SERVER_GROUP_RANKS_RANK_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "headwater/v1/group_service.pb.h"

namespace headwater::group {

// The leader's end of a worker's Join call. The call's handler delivers messages and reports the end; the rank's engine
// (remote_engine.cc) sends commands and takes replies.
class RankLink {
 public:
  // Bounds of waiting replies: their number, and their bytes, which the last one may exceed.
  static constexpr size_t kMaxReplies = 64;
  static constexpr int64_t kMaxReplyBytes = int64_t{8} << 20;

  // `send` returns false once the call has ended, which `cancel` brings about. `cancel` is called once, by the first Break().
  RankLink(std::function<bool(const v1::JoinResponse&)> send, std::function<void()> cancel)
      : send_(std::move(send)), cancel_(std::move(cancel)) {}

  // Waits while the worker takes nothing, but not beyond Break(). The message leaves later, after those before it. kEngineFailed
  // once the link is broken.
  absl::Status Send(v1::JoinResponse message);
  // Waits for the next reply, in the order of arrival. kEngineFailed once the link is broken.
  absl::StatusOr<v1::RankReply> AwaitReply();
  // Ends the call. The first reason stays. Any thread.
  void Break(const absl::Status& reason);

  // For the handler. Waits while too many replies are untaken. So a worker that sends unrequested replies is no longer read, counts
  // as silent, and costs no memory. Any message is a sign of life.
  void Deliver(v1::JoinRequest message);
  // Sends what Send() was given, until the link is broken. A thread of its own: gRPC's write to a worker that hangs waits for TCP,
  // cancelled or not.
  void SendAll();

  // Not OK once broken. Any thread, as the others below.
  absl::Status status() const {
    absl::MutexLock lock(&mutex_);
    return status_;
  }
  // The number of messages that have come.
  int64_t messages() const {
    absl::MutexLock lock(&mutex_);
    return messages_;
  }
  // The worker's last report.
  v1::RankAlive alive() const {
    absl::MutexLock lock(&mutex_);
    return alive_;
  }

 private:
  const std::function<bool(const v1::JoinResponse&)> send_;
  mutable absl::Mutex mutex_;
  std::function<void()> cancel_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::JoinResponse> unsent_ ABSL_GUARDED_BY(mutex_);
  std::deque<v1::RankReply> replies_ ABSL_GUARDED_BY(mutex_);
  int64_t reply_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  int64_t messages_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::RankAlive alive_ ABSL_GUARDED_BY(mutex_);
};

// A rank's times in calls so far. The first rank's waiting includes waiting for the caller's rows and decision; the others'
// includes waiting for the leader's.
struct RankTimes {
  absl::Duration computing;
  absl::Duration waiting;        // for other ranks to come to a collective, for rows, for a decision
  absl::Duration communicating;  // in collectives, once all ranks were there
};

struct Rank {
  std::unique_ptr<LossEngine> engine;
  bool is_remote = false;  // in another process: writes only its own memory, unless it computes alone
  // Makes the call in progress, and all later ones, fail. Idempotent. Any thread, like the next.
  std::function<void(const absl::Status& reason)> abort;
  // The times as known here; approximate while a call is in progress.
  std::function<RankTimes()> times;
};

// A rank of this process. `engine` was made with EngineOptions::group, and has no observer yet. Waiting for a device counts as
// computing: times are exact for engines whose ranks meet by the communicator alone.
Rank MakeLocalRank(std::unique_ptr<LossEngine> engine);

// The rank of a worker that is ready. `options`: the worker's engine's. health() fails after `silence_timeout` without a message.
// Silence is counted in looks of at most a second each: a leader that was stopped for a while has not heard its workers either.
// `shares_rows`: rows of micro-batches that all ranks compute reach the worker by another rank of its process.
Rank MakeRemoteRank(EngineOptions options, EngineDevice device, std::shared_ptr<RankLink> link, absl::Duration silence_timeout,
                    bool shares_rows);

// ---- rows and decisions on their way from the caller to the ranks

// How many rows of a micro-batch have come, for threads that wait for them. Thread-safe.
class RowsHere {
 public:
  explicit RowsHere(int64_t rows) : rows_(rows) {}
  // The first `rows` have come.
  void Come(int64_t rows) {
    absl::MutexLock lock(&mutex_);
    rows_ = rows;
  }
  // No more rows will come: waits for them fail with the first reason.
  void End(const absl::Status& why) {
    absl::MutexLock lock(&mutex_);
    ended_.Update(why);
  }
  // Waits until the first `row_end` rows have come; returns how many have.
  absl::StatusOr<int64_t> Await(int64_t row_end) {
    const auto is_over = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return rows_ >= row_end || !ended_.ok(); };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&is_over));
    if (rows_ < row_end) return ended_;
    return rows_;
  }

 private:
  absl::Mutex mutex_;
  int64_t rows_ ABSL_GUARDED_BY(mutex_);
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
};

// Passes a micro-batch's rows and decision from the caller to the first rank, or to one that computes alone. The other ranks have
// Follower flows, on threads of their own.
class GroupFlow final : public RowFlow {
 public:
  // `flow` is the caller's; its first `rows_here` rows have been awaited already. `digest`: the rows' sum for the caller's
  // decision; null: the first rank has it.
  GroupFlow(RowFlow& flow, int64_t rows_here, const DigestBuilder* digest = nullptr)
      : flow_(flow), digest_(digest), awaited_(rows_here), rows_(rows_here) {}

  absl::Status AwaitRows(int64_t row_end) override {
    if (row_end <= awaited_) return absl::OkStatus();
    absl::Status status = flow_.AwaitRows(row_end);
    if (!status.ok()) {
      rows_.End(status);
      return status;
    }
    awaited_ = row_end;
    rows_.Come(row_end);
    return status;
  }

  absl::Status Decide(const DigestBuilder* rows) override {
    decision_ = flow_.Decide(digest_ != nullptr ? digest_ : rows);
    decided_.Notify();
    return decision_;
  }

  void GradHiddenReady(int64_t row_end) override { flow_.GradHiddenReady(row_end); }

  // The first rank has ended: waits for further rows, or for a decision, fail with `reason` (not OK).
  void End(const absl::Status& reason) {
    rows_.End(reason);
    if (decided_.HasBeenNotified()) return;
    decision_ = reason;
    decided_.Notify();
  }

  // Waits for the first rank's rows and decision.
  class Follower final : public RowFlow {
   public:
    explicit Follower(GroupFlow& first) : first_(first) {}
    absl::Status AwaitRows(int64_t row_end) override { return first_.rows_.Await(row_end).status(); }
    // Waits for rows beyond the first `have`; returns how many have come.
    absl::StatusOr<int64_t> AwaitMore(int64_t have) { return first_.rows_.Await(have + 1); }
    absl::Status Decide(const DigestBuilder*) override {
      first_.decided_.WaitForNotification();
      return first_.decision_;
    }
    void GradHiddenReady(int64_t) override {}

   private:
    GroupFlow& first_;
  };

 private:
  RowFlow& flow_;
  const DigestBuilder* const digest_;
  int64_t awaited_;  // by the first rank's thread
  RowsHere rows_;
  absl::Status decision_;  // set before the notification
  absl::Notification decided_;
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANKS_RANK_H_
