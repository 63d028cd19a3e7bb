// GroupFlow: passes a micro-batch's rows and decision from the caller to the first rank and from there to all others.
#ifndef HEADWATER_SERVER_GROUP_GROUP_FLOW_H_
#define HEADWATER_SERVER_GROUP_GROUP_FLOW_H_

#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/engine.h"

namespace headwater::group {

// The first rank's flow. The other ranks have Follower flows, on threads of their own.
class GroupFlow final : public RowFlow {
 public:
  // `flow` is the caller's; its first `rows_here` rows have been awaited already.
  GroupFlow(RowFlow& flow, int64_t rows_here) : flow_(flow), rows_(rows_here), awaited_(rows_here) {}

  absl::Status AwaitRows(int64_t row_end) override {
    absl::Status status;
    if (row_end > awaited_) {
      awaited_ = row_end;
      status = flow_.AwaitRows(row_end);
    }
    absl::MutexLock lock(&mutex_);
    if (status.ok()) {
      rows_ = awaited_;
    } else {
      rows_status_ = status;
    }
    return status;
  }

  absl::Status Decide(const DigestBuilder* rows) override {
    absl::Status status = flow_.Decide(rows);
    absl::MutexLock lock(&mutex_);
    decision_ = status;
    return status;
  }

  void GradHiddenReady(int64_t row_end) override { flow_.GradHiddenReady(row_end); }

  // The first rank has ended: waits for further rows, or for a decision, fail with `reason` (not OK).
  void End(const absl::Status& reason) {
    absl::MutexLock lock(&mutex_);
    if (rows_status_.ok()) rows_status_ = reason;
    if (!decision_.has_value()) decision_ = reason;
  }

  // Waits for the first rank's rows and decision.
  class Follower final : public RowFlow {
   public:
    explicit Follower(GroupFlow& first) : first_(first) {}
    absl::Status AwaitRows(int64_t row_end) override { return first_.FollowRows(row_end); }
    // Waits for rows beyond the first `have`; returns how many have come.
    absl::StatusOr<int64_t> AwaitMore(int64_t have) {
      if (absl::Status status = first_.FollowRows(have + 1); !status.ok()) return status;
      absl::MutexLock lock(&first_.mutex_);
      return first_.rows_;
    }
    absl::Status Decide(const DigestBuilder*) override { return first_.FollowDecision(); }
    void GradHiddenReady(int64_t) override {}

   private:
    GroupFlow& first_;
  };

 private:
  absl::Status FollowRows(int64_t row_end) {
    const auto told = [this, row_end]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return rows_ >= row_end || !rows_status_.ok(); };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&told));
    return rows_ >= row_end ? absl::OkStatus() : rows_status_;
  }

  absl::Status FollowDecision() {
    const auto told = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return decision_.has_value(); };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&told));
    return *decision_;
  }

  RowFlow& flow_;
  absl::Mutex mutex_;
  int64_t rows_ ABSL_GUARDED_BY(mutex_);
  absl::Status rows_status_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> decision_ ABSL_GUARDED_BY(mutex_);
  int64_t awaited_;  // by the first rank's thread
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_GROUP_FLOW_H_
