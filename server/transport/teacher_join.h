// TeacherJoin: where the rows of a teacher's process and the micro-batches of the trainers that need them meet, in either order.
//
// A set of rows has a name (tenant and join_key), a number of rows and a shape, which whoever comes first declares. Teachers'
// streams bring disjoint rows of it, each row once; they can be had when their stream has ended well, so that one that breaks can
// begin anew. Trainers' terms claim rows of it. A row goes when it is spent: when the last micro-batch that had claimed it was
// decided. What is spent is kept for a while nevertheless, for a repeat of the very micro-batch that used it (its answer may have
// been lost on the way); to all others it is as if it were not there. When all rows of a set have been used the key is free again.
// Spent rows go first when memory is needed.
//
// Thread-safe. Knows no gRPC and no heads.
#ifndef HEADWATER_SERVER_TRANSPORT_TEACHER_JOIN_H_
#define HEADWATER_SERVER_TRANSPORT_TEACHER_JOIN_H_

#include <algorithm>
#include <array>
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
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/planned_bytes.h"
#include "headwater/kernels/types.h"
#include "server/transport/byte_budget.h"
#include "server/transport/row_ranges.h"

namespace headwater::transport {

// What a teacher or a trainer declares of the set that it joins.
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

// The store of sets: their rows, what they take of a budget, and when they go. Its handles (join_handles.h) bring and take rows.
class TeacherJoin {
 public:
  // What a row takes of `max_bytes` beside its data.
  static constexpr int64_t kRowOverheadBytes = 128;

  // `clock` measures how long things wait; it does not go back. Called with the lock held.
  TeacherJoin(const JoinLimits& limits, std::function<absl::Time()> clock)
      : limits_(limits), clock_(std::move(clock)), budget_(limits.max_bytes) {}
  // No handle may be left.
  ~TeacherJoin() = default;
  TeacherJoin(const TeacherJoin&) = delete;
  TeacherJoin& operator=(const TeacherJoin&) = delete;

  // A teacher's stream that brings rows `row_indices` of the set, each once and in [0, total_row_count), or all rows in order if
  // there are none. They belong to `owner`, if there is one. kChunkOutOfRange for a row that is there, or that another stream is
  // bringing; kJoinIncomplete if the set was declared otherwise; kLimitExceeded if the rows are more than `max_bytes`, whatever
  // goes; kInFlightBytesExceeded, with `retryAfterMs`, if there is no room now.
  absl::StatusOr<std::unique_ptr<TeacherStream>> Open(const JoinedSet& set, const std::vector<int32_t>& row_indices,
                                                      const std::optional<JoinOwner>& owner);

  // A term's claim: row i of its `row_count` is row row_indices[i] of the set, or row i if there are no indices. `user` names the
  // micro-batch, whatever its attempt: a repeat of it gets the rows that it had used, as long as they are kept; empty: it is never
  // repeated. kJoinIncomplete if the set was declared otherwise.
  absl::StatusOr<std::shared_ptr<RowClaim>> Claim(const JoinedSet& set, int64_t row_count, const std::vector<int32_t>& row_indices,
                                                  const std::string& user);

  // Drops what belongs to a session that has ended; whoever waits for it goes on waiting.
  void DropOwner(const JoinOwner& owner);
  // Drops what nobody has asked for during `max_wait`, and what was spent so long ago. To be called now and then.
  void Expire();

  int64_t reserved_bytes() const { return budget_.reserved_bytes(); }  // of limits.max_bytes
  int64_t set_count() const;

 private:
  friend class RowClaim;
  friend class TeacherStream;

  // Neighbouring rows of one stream. Its place in the budget goes with it, when the last of its rows has gone and nobody reads it.
  struct Slab {
    ByteBudget::Reservation reservation;
    std::optional<JoinOwner> owner;
    PlannedBytes data;  // the stream's alone to set, before the first row is published
  };
  struct Row {
    // kAbsent: only claimed. kComing: of a stream that has not ended. kSpent: there, for a repeat of `user` alone.
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
    uint64_t losses = 0;                    // counts when rows go that were there
    std::set<RowClaim*> claims;
  };
  // Rows that nobody has claimed any more since a time.
  struct Idle {
    absl::Time since;
    uint64_t serial = 0;
    std::shared_ptr<Set> set;
    std::vector<int64_t> rows;
  };
  using Rows = std::unordered_map<int64_t, Row>;

  // The set of that name, as declared; made if there is none. kJoinIncomplete if it was declared otherwise and is in use.
  absl::StatusOr<std::shared_ptr<Set>> Declare(const JoinedSet& wanted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Slabs for `row_count` rows; spent rows of others go if they must.
  absl::StatusOr<std::vector<std::shared_ptr<Slab>>> Reserve(const Set& set, int64_t row_count,
                                                             const std::optional<JoinOwner>& owner)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes a row's data away. Returns the next one.
  Rows::iterator Drop(Set& set, Rows::iterator row) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Spent rows that nobody reads, the oldest first, until `bytes` are free.
  void DropSpent(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops those rows of `idle` that are idle since then, or only those of them that are spent. True if some are left.
  bool DropIdle(const Idle& idle, bool only_spent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteIdle(const std::shared_ptr<Set>& set, std::vector<int64_t> rows) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetIfEmpty(const Set& set) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  static void WakeClaims(const Set& set);
  // Rows are allocated in pieces of about 1 MiB, so that memory follows the rows that come and that go.
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

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_TEACHER_JOIN_H_
