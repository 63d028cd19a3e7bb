// The handles of a TeacherJoin: a teacher's stream of rows, and a term's claim on rows. Neither may outlive its TeacherJoin.
#ifndef HEADWATER_SERVER_TRANSPORT_JOIN_HANDLES_H_
#define HEADWATER_SERVER_TRANSPORT_JOIN_HANDLES_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/transport/teacher_join.h"

namespace headwater::transport {

// A teacher's stream of rows, in progress. Destruction without Finish() withdraws its rows. One thread.
class TeacherStream {
 public:
  // Made by TeacherJoin::Open().
  TeacherStream(TeacherJoin& join, std::shared_ptr<TeacherJoin::Set> set, std::vector<std::shared_ptr<TeacherJoin::Slab>> slabs,
                int64_t row_count, const std::vector<int32_t>& row_indices);
  ~TeacherStream();
  TeacherStream(const TeacherStream&) = delete;
  TeacherStream& operator=(const TeacherStream&) = delete;

  int64_t row_count() const { return row_count_; }  // of this stream
  int64_t row_bytes() const { return row_bytes_; }
  // Copies rows [row_start, row_start + count) of this stream, `[count, row_bytes()]`. Rows come in any order. kChunkOutOfRange:
  // outside of the stream, no rows, or rows that came before; kDataLengthMismatch unless `data_bytes` is count x row_bytes().
  // `field` names the chunk in messages.
  absl::Status Add(int64_t row_start, int64_t count, const void* data, int64_t data_bytes, const std::string& field);
  // The teacher has half-closed: publishes the rows to trainers. kProtocolViolation with the first missing row unless every row has
  // come; kSessionNotFound if the owner's session has ended.
  absl::Status Finish();

 private:
  friend class TeacherJoin;

  int64_t IndexOf(int64_t i) const { return row_indices_.empty() ? i : row_indices_[static_cast<size_t>(i)]; }
  const std::shared_ptr<TeacherJoin::Slab>& SlabOf(int64_t i) const {
    return slabs_[static_cast<size_t>(i / TeacherJoin::RowsOfSlab(row_bytes_))];
  }
  bool IsMine(const TeacherJoin::Row& row, int64_t i) const { return row.slab != nullptr && row.slab == SlabOf(i); }
  // Copies into the slabs, which are allocated here. Other threads do not look at these rows yet.
  absl::Status Copy(int64_t row_start, int64_t count, const uint8_t* data);

  TeacherJoin& join_;
  const std::shared_ptr<TeacherJoin::Set> set_;
  std::vector<std::shared_ptr<TeacherJoin::Slab>> slabs_;
  const int64_t row_count_;
  const int64_t row_bytes_;
  const std::vector<int32_t> row_indices_;
  RowRanges arrived_;
  bool finished_ = false;
};

// A term's claim on rows of a set. Its rows stay while it lives, unless their owner's session ends. Thread-safe. It never waits:
// OnChange() reports rows.
class RowClaim {
 public:
  // Made by TeacherJoin::Claim().
  RowClaim(TeacherJoin& join, std::shared_ptr<TeacherJoin::Set> set, int64_t row_count, const std::vector<int32_t>& row_indices,
           const std::string& user);
  ~RowClaim();

  int64_t row_count() const { return row_count_; }  // of the term
  int64_t row_bytes() const { return row_bytes_; }

  // The number of the term's leading rows that have come.
  int64_t ready_rows() const {
    absl::MutexLock lock(&join_.mutex_);
    return CountReady();
  }
  // `wake` is called, with the join's lock held, whenever ready_rows() may have changed. Null: no call.
  void OnChange(std::function<void()> wake) {
    absl::MutexLock lock(&join_.mutex_);
    wake_ = std::move(wake);
  }
  // The time, by the join's clock, at which `max_wait` has passed since the claim was made: then its trainer gives up.
  absl::Time give_up() const { return give_up_; }
  // kJoinIncomplete with `joinKey` and `missingRow` (its index in the set): the answer to a trainer that gives up.
  absl::Status MissingRow() const {
    absl::MutexLock lock(&join_.mutex_);
    return Missing(std::min(CountReady(), row_count_ - 1));
  }
  // Copies rows [row_start, row_start + count) of the term to `out`, `[count, row_bytes()]`. kJoinIncomplete, with `out` undefined,
  // unless all of them have come.
  absl::Status Gather(int64_t row_start, int64_t count, void* out) const;
  // Marks the rows as used: the claim's end then spends them instead of leaving them for the next attempt. The caller calls it
  // after computing the micro-batch, and keeps the claim until the micro-batch is decided.
  void MarkUsed() { used_.store(true); }

 private:
  friend class TeacherJoin;

  // Claims the next of its rows, in their order. With the join's lock, like the next three.
  void ClaimNext();
  int64_t IndexOf(int64_t i) const { return row_indices_.empty() ? i : row_indices_[static_cast<size_t>(i)]; }
  bool IsReady(const TeacherJoin::Row& row) const {
    if (row.state == TeacherJoin::Row::State::kThere) return true;
    return row.state == TeacherJoin::Row::State::kSpent && !user_->empty() && *row.user == *user_;
  }
  int64_t CountReady() const;
  absl::Status Missing(int64_t i) const;

  TeacherJoin& join_;
  const std::shared_ptr<TeacherJoin::Set> set_;
  const int64_t row_count_;
  const int64_t row_bytes_;
  const std::vector<int32_t> row_indices_;
  const std::shared_ptr<const std::string> user_;
  const absl::Time give_up_;
  std::atomic<bool> used_ = false;
  // With the join's lock:
  std::function<void()> wake_;
  int64_t claimed_ = 0;
  mutable int64_t ready_ = 0;
  mutable uint64_t losses_ = 0;  // of the set, when `ready_` was counted
};

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_JOIN_HANDLES_H_
