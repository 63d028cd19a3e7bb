#include "server/group/ranks/process_rows.h"

#include <utility>

#include "headwater/kernels/error.h"

namespace headwater::group {

void ProcessRows::Open() {
  absl::MutexLock lock(&mutex_);
  closed_ = absl::OkStatus();
  id_ = 0;  // another leader restarts the count
}

void ProcessRows::Close(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  if (closed_.ok()) closed_ = why;
  call_ = nullptr;
}

void ProcessRows::Begin(uint64_t id, std::shared_ptr<const ReceivedCall> call) {
  absl::MutexLock lock(&mutex_);
  id_ = id;
  call_ = std::move(call);
  rows_here_ = 0;
  ended_ = absl::OkStatus();
}

void ProcessRows::Come(int64_t rows_here) {
  absl::MutexLock lock(&mutex_);
  rows_here_ = rows_here;
}

void ProcessRows::End(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  if (ended_.ok()) ended_ = why;
}

absl::Status ProcessRows::OverError() const {
  return closed_.ok() ? MakeError(ErrorReason::kEngineFailed, "the rank that gets the rows has gone on without this one") : closed_;
}

absl::StatusOr<std::shared_ptr<const ReceivedCall>> ProcessRows::Await(uint64_t id) {
  const auto begun = [this, id]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return id_ == id || IsOver(id); };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&begun));
  if (IsOver(id)) return OverError();
  return call_;
}

absl::Status ProcessRows::AwaitRows(uint64_t id, int64_t row_end) {
  const auto told = [this, id, row_end]()
                        ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return rows_here_ >= row_end || !ended_.ok() || IsOver(id); };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&told));
  if (IsOver(id)) return OverError();
  return rows_here_ >= row_end ? absl::OkStatus() : ended_;
}

}  // namespace headwater::group
