// ProcessRows: a micro-batch's rows, received by one rank of a worker's process and read by all of its ranks.
//
// The first rank of the process reads them from its call, and the others wait for them here. Only one micro-batch is in progress:
// the leader begins the next one when all ranks have answered this one.
#ifndef HEADWATER_SERVER_GROUP_RANKS_PROCESS_ROWS_H_
#define HEADWATER_SERVER_GROUP_RANKS_PROCESS_ROWS_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/error.h"
#include "server/group/group_flow.h"
#include "server/group/ranks/rank_codec.h"

namespace headwater::group {

// A micro-batch of a process.
struct SharedCall {
  explicit SharedCall(std::shared_ptr<const ReceivedCall> received) : call(std::move(received)), rows(call->rows_here()) {}
  const std::shared_ptr<const ReceivedCall> call;
  RowsHere rows;  // those that may be read
};

// Thread-safe.
class ProcessRows {
 public:
  // For the first rank. It is part of a group between Open() and Close(). Close() ends all waits.
  void Open() {
    absl::MutexLock lock(&mutex_);
    closed_ = absl::OkStatus();
    id_ = 0;  // another leader restarts the count
  }
  void Close(const absl::Status& why) {
    absl::MutexLock lock(&mutex_);
    closed_.Update(why);
    shared_ = nullptr;
  }
  // A micro-batch begins: the group's `id`-th that all ranks compute. The caller ends its rows.
  void Begin(uint64_t id, std::shared_ptr<SharedCall> shared) {
    absl::MutexLock lock(&mutex_);
    id_ = id;
    shared_ = std::move(shared);
  }

  // For the other ranks: waits until the micro-batch begins.
  absl::StatusOr<std::shared_ptr<SharedCall>> Await(uint64_t id) {
    const auto has_begun = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return id_ >= id || !closed_.ok(); };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&has_begun));
    if (!closed_.ok()) return closed_;
    if (id_ == id) return shared_;
    return MakeError(ErrorReason::kEngineFailed, "the rank that gets the rows has gone on without this one");
  }

 private:
  absl::Mutex mutex_;
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
  uint64_t id_ ABSL_GUARDED_BY(mutex_) = 0;  // ascends
  std::shared_ptr<SharedCall> shared_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANKS_PROCESS_ROWS_H_
