// ProcessRows: a micro-batch's rows, received by one rank of a worker's process and read by all of its ranks.
//
// The first rank of the process reads them from its call, and the others wait for them here. Only one micro-batch is in progress:
// the leader begins the next one when all ranks have answered this one.
#ifndef HEADWATER_SERVER_GROUP_RANKS_PROCESS_ROWS_H_
#define HEADWATER_SERVER_GROUP_RANKS_PROCESS_ROWS_H_

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/group/ranks/rank_codec.h"

namespace headwater::group {

// Thread-safe.
class ProcessRows {
 public:
  // For the first rank. It is part of a group between Open() and Close(). Close() ends all waits.
  void Open();
  void Close(const absl::Status& why);
  // A micro-batch begins: the group's `id`-th that all ranks compute. Its memory stays until the next one begins, or until Close().
  void Begin(uint64_t id, std::shared_ptr<const ReceivedCall> call);
  // The first `rows_here` rows have come.
  void Come(int64_t rows_here);
  // No more rows will come; without effect after an end.
  void End(const absl::Status& why);

  // For the other ranks. Waits until the micro-batch begins; its rows may be read as far as AwaitRows() has waited for them.
  absl::StatusOr<std::shared_ptr<const ReceivedCall>> Await(uint64_t id);
  // Waits until the first `row_end` rows of the micro-batch have come.
  absl::Status AwaitRows(uint64_t id, int64_t row_end);

 private:
  bool IsOver(uint64_t id) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return id_ > id || !closed_.ok(); }
  absl::Status OverError() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  absl::Mutex mutex_;
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
  uint64_t id_ ABSL_GUARDED_BY(mutex_) = 0;  // ascends
  std::shared_ptr<const ReceivedCall> call_ ABSL_GUARDED_BY(mutex_);
  int64_t rows_here_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANKS_PROCESS_ROWS_H_
