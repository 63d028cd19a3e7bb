// TeacherJoin: joins rows from teachers' processes with the trainers' micro-batches that need them, in either order.
//
// A set of rows has a name (tenant and join_key), a number of rows and a shape, declared by the first teacher or trainer. Teachers'
// streams bring disjoint rows, each once. Rows become available when their stream ends well, so that a broken stream can be
// repeated. Trainers' terms claim rows. A row is spent when the last micro-batch that had claimed it is decided. Spent rows are
// kept for a while, only for a repeat of the micro-batch that used them (its answer may have been lost). When all rows of a set
// have been used the key is free again. Spent rows are dropped first when memory is needed.
//
// Thread-safe. Knows no gRPC and no heads.
#ifndef HEADWATER_SERVER_TRANSPORT_TEACHER_JOIN_H_
#define HEADWATER_SERVER_TRANSPORT_TEACHER_JOIN_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/planned_bytes.h"
#include "headwater/kernels/types.h"
#include "server/transport/byte_budget.h"
#include "server/transport/row_exchange.h"

namespace headwater::transport {

// A teacher's or trainer's declaration of the set that it joins.
struct JoinedSet {
  std::string tenant;
  std::string join_key;
  int64_t total_row_count = 0;  // >= 1
  int64_t hidden_size = 0;      // >= 1
  DataType data_type = DataType::kFloat32;
};

// The session that rows belong to; heads::SessionId.
using JoinOwner = std::array<uint8_t, 32>;

struct JoinLimits {
  int64_t max_bytes = int64_t{4} << 30;         // of rows that wait or are kept, with kRowOverheadBytes for each
  absl::Duration max_wait = absl::Seconds(60);  // of a claim for its rows, and of rows for a claim
};

class RowClaim;
class TeacherStream;

// The store of sets: their rows, their share of a budget, and their expiry. Its handles bring and take rows, and do not outlive it.
class TeacherJoin {
 public:
  // Bytes of `max_bytes` that a row takes beside its data.
  static constexpr int64_t kRowOverheadBytes = 128;

  // `clock` measures how long things wait; it does not go back. Called with the lock held.
  TeacherJoin(const JoinLimits& limits, std::function<absl::Time()> clock)
      : limits_(limits), clock_(std::move(clock)), budget_(limits.max_bytes) {}

  // A teacher's stream that brings rows `row_indices` of the set, each once and in [0, total_row_count); empty: all rows in order.
  // The rows belong to `owner`, if given. Errors: kChunkOutOfRange (a row that has come, or that another stream brings),
  // kJoinIncomplete (the set was declared otherwise), kLimitExceeded (more rows than fit into an empty `max_bytes`),
  // kInFlightBytesExceeded with `retryAfterMs` (no room now).
  absl::StatusOr<std::unique_ptr<TeacherStream>> Open(const JoinedSet& set, const std::vector<int32_t>& row_indices,
                                                      const std::optional<JoinOwner>& owner);

  // A term's claim: row i of its `row_count` is row row_indices[i] of the set, or row i without indices. `user` names the
  // micro-batch in all its attempts: a repeat gets the rows that it had used, while they are kept. Empty: never repeated.
  // kJoinIncomplete if the set was declared otherwise.
  absl::StatusOr<std::shared_ptr<RowClaim>> Claim(const JoinedSet& set, int64_t row_count, const std::vector<int32_t>& row_indices,
                                                  const std::string& user);

  // Drops the rows of a session that has ended; claims on them continue to wait.
  void DropOwner(const JoinOwner& owner);
  // Drops rows that were not claimed during `max_wait`, and rows spent so long ago. To be called now and then.
  void Expire();

  int64_t reserved_bytes() const { return budget_.reserved_bytes(); }  // of limits.max_bytes
  int64_t set_count() const {
    absl::MutexLock lock(&mutex_);
    return static_cast<int64_t>(sets_.size());
  }

 private:
  friend class JoinHandle;
  friend class RowClaim;
  friend class TeacherStream;

  // Neighbouring rows of one stream. It returns its reservation when the last of its rows is dropped and no reader is left.
  struct Slab {
    ByteBudget::Reservation reservation;
    std::optional<JoinOwner> owner;
    PlannedBytes data;  // the stream's alone to set, before the first row is published
  };
  struct Row {
    // kAbsent: only claimed. kComing: of a stream that has not ended. kSpent: kept for a repeat by `user` alone.
    enum class State { kAbsent, kComing, kThere, kSpent };
    State state = State::kAbsent;
    int64_t claim_count = 0;
    std::shared_ptr<Slab> slab;               // unless absent
    const uint8_t* data = nullptr;            // in the slab; kThere and kSpent
    std::shared_ptr<const std::string> user;  // that has used it, if any has
    bool wanted_anew = false;                 // kSpent: another micro-batch waits for the row
    uint64_t idle_since = 0;                  // serial of the last Idle that names it
  };
  struct Set {
    JoinedSet declared;
    int64_t row_bytes = 0;
    std::unordered_map<int64_t, Row> rows;  // by index in the set; absent ones only while they are claimed
    RowRanges used;                         // rows that some decided micro-batch had; empty again when that is all of them
    int64_t stream_count = 0;               // in progress
    uint64_t losses = 0;                    // counts drops of rows that had come
    std::set<RowClaim*> claims;
  };
  // Rows that have been unclaimed since a time.
  struct Idle {
    absl::Time since;
    uint64_t serial = 0;
    std::shared_ptr<Set> set;
    std::vector<int64_t> rows;
  };
  using Rows = std::unordered_map<int64_t, Row>;

  // The set of that name, as declared; made if absent. kJoinIncomplete if it was declared otherwise and is in use.
  absl::StatusOr<std::shared_ptr<Set>> Declare(const JoinedSet& wanted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Slabs for `row_count` rows; spent rows of others are dropped if necessary.
  absl::StatusOr<std::vector<std::shared_ptr<Slab>>> Reserve(const Set& set, int64_t row_count,
                                                             const std::optional<JoinOwner>& owner)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes a row's data away. Returns the next one.
  Rows::iterator Drop(Set& set, Rows::iterator row) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops spent rows without readers, the oldest first, until `bytes` are free.
  void DropSpent(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops those rows of `idle` that are idle since then, or only the spent ones. True if some are left.
  bool DropIdle(const Idle& idle, bool only_spent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteIdle(const std::shared_ptr<Set>& set, std::vector<int64_t> rows) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetIfEmpty(const Set& set) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  static void WakeClaims(const Set& set);
  // Rows are allocated in pieces of about 1 MiB, so that memory follows the rows kept.
  static int64_t RowsOfSlab(int64_t row_bytes) { return std::max<int64_t>(1, (1 << 20) / row_bytes); }

  const JoinLimits limits_;
  const std::function<absl::Time()> clock_;
  ByteBudget budget_;  // before what holds its reservations
  mutable absl::Mutex mutex_;
  std::map<std::pair<std::string, std::string>, std::shared_ptr<Set>> sets_ ABSL_GUARDED_BY(mutex_);  // by tenant and key
  std::deque<Idle> idle_ ABSL_GUARDED_BY(mutex_);                                                     // oldest first
  std::set<JoinOwner> owners_ ABSL_GUARDED_BY(mutex_);  // of rows that came, until they end
  uint64_t next_serial_ ABSL_GUARDED_BY(mutex_) = 1;
};

// Some rows of a set: those that a stream brings, or that a term claims. Must not outlive its TeacherJoin.
class JoinHandle {
 public:
  JoinHandle(const JoinHandle&) = delete;
  JoinHandle& operator=(const JoinHandle&) = delete;
  int64_t row_count() const { return row_count_; }
  int64_t row_bytes() const { return row_bytes_; }

 protected:
  JoinHandle(TeacherJoin& join, std::shared_ptr<TeacherJoin::Set> set, int64_t row_count, const std::vector<int32_t>& row_indices)
      : join_(join), set_(std::move(set)), row_count_(row_count), row_bytes_(set_->row_bytes), row_indices_(row_indices) {}
  // The index in the set of row i.
  int64_t IndexOf(int64_t i) const { return row_indices_.empty() ? i : row_indices_[static_cast<size_t>(i)]; }

  TeacherJoin& join_;
  const std::shared_ptr<TeacherJoin::Set> set_;
  const int64_t row_count_;
  const int64_t row_bytes_;
  const std::vector<int32_t> row_indices_;
};

// A teacher's stream of rows, in progress. Destruction without Finish() withdraws its rows. One thread.
class TeacherStream : public JoinHandle {
 public:
  // Made by TeacherJoin::Open().
  TeacherStream(TeacherJoin& join, std::shared_ptr<TeacherJoin::Set> set, std::vector<std::shared_ptr<TeacherJoin::Slab>> slabs,
                int64_t row_count, const std::vector<int32_t>& row_indices)
      : JoinHandle(join, std::move(set), row_count, row_indices), slabs_(std::move(slabs)) {}
  ~TeacherStream();

  // Copies rows [row_start, row_start + count) of this stream, `[count, row_bytes()]`. Rows come in any order. kChunkOutOfRange:
  // outside of the stream, no rows, or rows that came before; kDataLengthMismatch unless `data_bytes` is count x row_bytes().
  // `field` names the chunk in messages.
  absl::Status Add(int64_t row_start, int64_t count, const void* data, int64_t data_bytes, const std::string& field);
  // The teacher has half-closed: publishes the rows to trainers. kProtocolViolation with the first missing row unless every row has
  // come; kSessionNotFound if the owner's session has ended.
  absl::Status Finish();

 private:
  friend class TeacherJoin;

  const std::shared_ptr<TeacherJoin::Slab>& SlabOf(int64_t i) const {
    return slabs_[static_cast<size_t>(i / TeacherJoin::RowsOfSlab(row_bytes_))];
  }
  bool IsMine(const TeacherJoin::Row& row, int64_t i) const { return row.slab != nullptr && row.slab == SlabOf(i); }
  // Copies into the slabs, which are allocated here. Other threads do not look at these rows yet.
  absl::Status Copy(int64_t row_start, int64_t count, const uint8_t* data);

  std::vector<std::shared_ptr<TeacherJoin::Slab>> slabs_;
  RowRanges arrived_;
  bool finished_ = false;
};

// A term's claim on rows of a set. Its rows stay while it lives, unless their owner's session ends. Thread-safe. It never waits:
// OnChange() reports rows.
class RowClaim : public JoinHandle {
 public:
  // Made by TeacherJoin::Claim().
  RowClaim(TeacherJoin& join, std::shared_ptr<TeacherJoin::Set> set, int64_t row_count, const std::vector<int32_t>& row_indices,
           const std::string& user)
      : JoinHandle(join, std::move(set), row_count, row_indices),
        user_(std::make_shared<const std::string>(user)),
        give_up_(join_.clock_() + join_.limits_.max_wait) {}
  ~RowClaim();

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

  // Claims row i. With the join's lock, like the next three.
  void Claim(int64_t i);
  bool IsReady(const TeacherJoin::Row& row) const {
    if (row.state == TeacherJoin::Row::State::kThere) return true;
    return row.state == TeacherJoin::Row::State::kSpent && !user_->empty() && *row.user == *user_;
  }
  int64_t CountReady() const;
  absl::Status Missing(int64_t i) const;

  const std::shared_ptr<const std::string> user_;
  const absl::Time give_up_;
  std::atomic<bool> used_ = false;
  // With the join's lock:
  std::function<void()> wake_;
  mutable int64_t ready_ = 0;
  mutable uint64_t losses_ = 0;  // of the set, when `ready_` was counted
};

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_TEACHER_JOIN_H_
