// GroupFlow: passes a micro-batch's rows and decision from the caller to the first rank and from there to all others.
#ifndef HEADWATER_SERVER_GROUP_GROUP_FLOW_H_
#define HEADWATER_SERVER_GROUP_GROUP_FLOW_H_

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "headwater/kernels/engine.h"

namespace headwater::group {

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

// The flow of the first rank, or of a rank that computes alone. The other ranks have Follower flows, on threads of their own.
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

#endif  // HEADWATER_SERVER_GROUP_GROUP_FLOW_H_
