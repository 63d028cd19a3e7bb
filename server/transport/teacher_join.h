// TeacherJoin: where the rows of a teacher's process and the micro-batches of the trainers that need them meet, in either order.
//
// A set of rows has a name (tenant and join_key), a number of rows and a shape, which whoever comes first declares. Teachers'
// streams bring disjoint rows of it, each row once; they can be had when their stream has ended well, so that one that breaks can
// begin anew. Trainers' terms claim rows of it. A row goes when it is spent: when the last micro-batch that had claimed it was
// decided. What is spent is kept for a while nevertheless, for a repeat of the very micro-batch that used it (its answer may have
// been lost on the way); to all others it is as if it were not there. When all rows of a set have been used the key is free again.
// Spent rows go first when memory is needed.
//
// Thread-safe, but for a TeacherStream, which has one thread. Knows no gRPC and no heads.
#ifndef HEADWATER_SERVER_TRANSPORT_TEACHER_JOIN_H_
#define HEADWATER_SERVER_TRANSPORT_TEACHER_JOIN_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "headwater/kernels/types.h"

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

// A term's claim on rows of a set. While it lives its rows stay. Thread-safe; must not outlive the TeacherJoin.
class JoinedRows {
 public:
  virtual ~JoinedRows() = default;
  virtual int64_t row_count() const = 0;  // of the term
  virtual int64_t row_bytes() const = 0;

  // So many of the term's first rows are there now.
  virtual int64_t ready_rows() const = 0;
  // Returns once rows [0, row_end) of the term are there; once they are, they stay, unless their owner's session ends.
  // kJoinIncomplete with `joinKey` and `missingRow` (its index in the set) in the metadata shortly before `deadline`, the
  // call's (answer_time.h), or when `max_wait` has passed since the claim was made, both by the join's clock; kCancelled as soon
  // as `cancelled` (may be null; polled every few milliseconds) is true.
  virtual absl::Status Await(int64_t row_end, absl::Time deadline, const std::function<bool()>& cancelled) = 0;
  // Copies rows [row_start, row_start + count) of the term to `out`, `[count, row_bytes()]`. kJoinIncomplete, with nothing useful
  // in `out`, unless all of them are there.
  virtual absl::Status Gather(int64_t row_start, int64_t count, void* out) const = 0;

  // To be called when the claim's micro-batch has been computed, and so holds on to the claim until it is decided: its end spends
  // the rows then. The end of a claim without it leaves them for the next attempt.
  virtual void MarkUsed() = 0;
};

// A teacher's stream of rows, in progress. Its end without Finish() takes back what it has brought. One thread.
class TeacherStream {
 public:
  virtual ~TeacherStream() = default;
  virtual int64_t row_count() const = 0;  // of this stream
  virtual int64_t row_bytes() const = 0;
  // Copies rows [row_start, row_start + count) of this stream, `[count, row_bytes()]`. Rows come in any order. kChunkOutOfRange:
  // outside of the stream, no rows, or rows that came before; kDataLengthMismatch unless `data_bytes` is count x row_bytes().
  // `field` names the chunk in messages.
  virtual absl::Status Add(int64_t row_start, int64_t count, const void* data, int64_t data_bytes, const std::string& field) = 0;
  // The teacher has half-closed: kProtocolViolation with the first missing row unless every row has come; kSessionNotFound if their
  // session has ended. Then trainers can have them.
  virtual absl::Status Finish() = 0;
};

class TeacherJoin {
 public:
  // What a row takes of `max_bytes` beside its data.
  static constexpr int64_t kRowOverheadBytes = 128;

  // `clock` tells how long things wait, and when the deadlines of waits are; it does not go back. Called with the lock held.
  TeacherJoin(const JoinLimits& limits, std::function<absl::Time()> clock);
  ~TeacherJoin();
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
  absl::StatusOr<std::shared_ptr<JoinedRows>> Claim(const JoinedSet& set, int64_t row_count,
                                                    const std::vector<int32_t>& row_indices, const std::string& user);

  // Drops what belongs to a session that has ended; whoever waits for it goes on waiting.
  void DropOwner(const JoinOwner& owner);
  // Drops what nobody has asked for during `max_wait`, and what was spent so long ago. To be called now and then.
  void Expire();

  int64_t reserved_bytes() const;  // of limits.max_bytes
  int64_t set_count() const;

 private:
  class State;
  const std::shared_ptr<State> state_;
};

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_TEACHER_JOIN_H_
