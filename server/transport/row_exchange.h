// RowExchange: where the rows of one micro-batch come together, and where its gradient is handed out.
//
// In:  a stream that has rows of a tensor claims their place, writes them there and delivers them: Claim(), copy, Deliver(). Many
//      streams do so at once, each row exactly once, in any order. The computation waits for the first rows of all tensors.
// Out: the computation says how many rows of the gradient are final; a stream that can send takes the next ones.
//
// Break() ends both: every wait returns its status, and no row is claimed or handed out any more.
//
// Thread-safe. Only AwaitChange() waits.
#ifndef HEADWATER_SERVER_TRANSPORT_ROW_EXCHANGE_H_
#define HEADWATER_SERVER_TRANSPORT_ROW_EXCHANGE_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::transport {

// Disjoint ranges of rows; ranges that touch become one.
class RowRanges {
 public:
  // Whether any of rows [start, start + count) is in it.
  bool Overlaps(int64_t start, int64_t count) const;
  // Adds rows that are not in it.
  void Add(int64_t start, int64_t count);
  // How many rows from 0 on are in it without a gap.
  int64_t prefix() const { return !ends_.empty() && ends_.begin()->first == 0 ? ends_.begin()->second : 0; }
  int64_t row_count() const { return row_count_; }

 private:
  std::map<int64_t, int64_t> ends_;  // by first row
  int64_t row_count_ = 0;
};

// Checks a chunk of `data_bytes` with rows [row_start, row_start + row_count). The tensor has `total_rows` rows of `row_bytes`
// bytes; `come` holds the rows that have come. kChunkOutOfRange (outside the tensor, no rows, or rows that have come),
// kDataLengthMismatch. `field` names the chunk in messages.
absl::Status CheckRows(const std::string& field, int64_t row_start, int64_t row_count, int64_t data_bytes, int64_t total_rows,
                       int64_t row_bytes, const RowRanges& come);

// Gradient rows leave once all of the micro-batch's rows have come: on the wire they can neither be taken back nor computed again.
// No row leaves after the computation was given up, because its repeat may see other weights. Thread-safe.
class GradGate {
 public:
  // Rows [0, row_end) are final. Returns the end of the rows that may leave; 0 while the gate is closed, or shut.
  int64_t Ready(int64_t row_end) {
    absl::MutexLock lock(&mutex_);
    ready_ = std::max(ready_, row_end);
    return state_ == State::kOpen ? ready_ : 0;
  }
  // All rows have come. Returns as Ready() does.
  int64_t Open() {
    absl::MutexLock lock(&mutex_);
    if (state_ == State::kClosed) state_ = State::kOpen;
    return state_ == State::kOpen ? ready_ : 0;
  }
  // The computation is given up: no row leaves. Returns false, without effect, if all rows have come before.
  bool Shut() {
    absl::MutexLock lock(&mutex_);
    if (state_ == State::kOpen) return false;
    state_ = State::kShut;
    return true;
  }
  bool is_shut() const {
    absl::MutexLock lock(&mutex_);
    return state_ == State::kShut;
  }

 private:
  enum class State { kClosed, kOpen, kShut };
  mutable absl::Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kClosed;
  int64_t ready_ ABSL_GUARDED_BY(mutex_) = 0;
};

// A tensor of rows that comes in.
struct RowTensor {
  std::string name;         // in messages
  int64_t row_start = 0;    // the row of the micro-batch that its first row belongs to
  int64_t row_count = 0;    // >= 0
  int64_t row_bytes = 0;    // >= 1
  uint8_t* data = nullptr;  // `[row_count, row_bytes]`, outlives the exchange; null: it is there from the start
  bool by_input = true;     // whether its rows can only come before CloseInput()
};
struct GradRows {
  int64_t row_start = 0;
  int64_t row_count = 0;  // 0: there are none
};

struct RowProgress {
  bool complete = false;   // all rows are there (and the input is closed, if RequireClose() was called)
  int64_t ready_rows = 0;  // the first rows of the micro-batch that are there, in all tensors
  int64_t received_bytes = 0;
  absl::Time last_row_time;
  bool misses_only_others_rows = false;  // rows are missing, and none of them is of a tensor `by_input`
  // OK while every missing row may still come; else the status of Break(), or kProtocolViolation.
  absl::Status input;
};

// A tensor whose rows come in, and which of them have.
struct ExchangedTensor {
  RowTensor tensor;
  RowRanges claimed;
  RowRanges delivered;
};

class RowExchange {
 public:
  // `row_count`: of the micro-batch.
  RowExchange(int64_t row_count, std::vector<RowTensor> tensors);

  // ---- rows in
  // The place of rows [row_start, row_start + row_count) of tensor `index`, which no other call gets from now on. kChunkOutOfRange
  // (outside the tensor, no rows, or rows that are claimed), kDataLengthMismatch, or the status of Break(). `field` names
  // the chunk in messages.
  absl::StatusOr<uint8_t*> Claim(size_t index, int64_t row_start, int64_t row_count, int64_t data_bytes, const std::string& field);
  // The claimed rows have been written.
  void Deliver(size_t index, int64_t row_start, int64_t row_count);
  // No rows of tensors `by_input` will be claimed any more; a wait for such ends with kProtocolViolation, which names the first
  // missing one.
  void CloseInput() {
    absl::MutexLock lock(&mutex_);
    input_closed_ = true;
    Changed();
  }
  // complete() needs CloseInput() from now on: the last row is not the last word. Before rows come.
  void RequireClose() {
    absl::MutexLock lock(&mutex_);
    close_required_ = true;
  }

  // All times of an exchange are of observability::MonotonicNow().
  RowProgress Look() const;
  bool complete() const {
    absl::MutexLock lock(&mutex_);
    return IsComplete();
  }
  int64_t total_bytes() const { return total_bytes_; }

  // ---- gradient out
  // There is a gradient of `row_count` rows, handed out in pieces of at most `piece_rows` (>= 1). At most once, before GradReady().
  void OpenGrad(int64_t row_count, int64_t piece_rows) {
    absl::MutexLock lock(&mutex_);
    grad_rows_ = row_count;
    grad_piece_rows_ = piece_rows;
  }
  // Rows [0, row_end) are final. Calls no stream.
  void GradReady(int64_t row_end) {
    absl::MutexLock lock(&mutex_);
    if (row_end <= grad_ready_) return;
    grad_ready_ = std::min(row_end, grad_rows_);
    Changed();
  }
  // The next rows, in ascending order; none if there are none yet, or no more, or the exchange is broken.
  GradRows NextGrad() {
    absl::MutexLock lock(&mutex_);
    const GradRows rows = PeekGrad();
    grad_taken_ += rows.row_count;
    if (rows.row_count > 0 && grad_taken_ == grad_rows_) Changed();
    return rows;
  }
  bool has_grad() const {
    absl::MutexLock lock(&mutex_);
    return PeekGrad().row_count > 0;
  }
  // Everything was handed out, or there is no gradient.
  bool grad_taken() const {
    absl::MutexLock lock(&mutex_);
    return grad_taken_ == grad_rows_;
  }

  // ---- its end
  // The first status (not OK) counts.
  void Break(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (broken_.ok()) broken_ = status;
    Changed();
  }
  // The same unless complete(), after which the micro-batch may be committed at any moment. Whether it is what broke the exchange.
  bool BreakIfIncomplete(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (!broken_.ok() || IsComplete()) return false;
    broken_ = status;
    Changed();
    return true;
  }
  // OK, or the status of Break().
  absl::Status status() const {
    absl::MutexLock lock(&mutex_);
    return broken_;
  }

  // Rises with every change of the exchange, and with Notify().
  int64_t version() const {
    absl::MutexLock lock(&mutex_);
    return version_;
  }
  // Waits until version() is not `seen`, or `deadline`.
  void AwaitChange(int64_t seen, absl::Time deadline) {
    absl::MutexLock lock(&mutex_);
    while (version_ == seen) {
      const absl::Duration left = deadline - observability::MonotonicNow();
      if (left <= absl::ZeroDuration()) return;
      changed_.WaitWithTimeout(&mutex_, left);
    }
  }
  // Something else has changed that the thread of AwaitChange() looks at.
  void Notify() {
    absl::MutexLock lock(&mutex_);
    Changed();
  }

 private:
  int64_t ReadyRows() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsComplete() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return missing_rows_ == 0 && (input_closed_ || !close_required_);
  }
  void Changed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    ++version_;
    changed_.SignalAll();
  }
  absl::Status InputStatus() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The rows of the gradient to be handed out next; none if there are none yet, or no more.
  GradRows PeekGrad() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t row_count_;
  int64_t total_bytes_ = 0;
  mutable absl::Mutex mutex_;
  absl::CondVar changed_;
  int64_t version_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<ExchangedTensor> inputs_ ABSL_GUARDED_BY(mutex_);
  int64_t missing_rows_ ABSL_GUARDED_BY(mutex_) = 0;  // of all tensors
  int64_t received_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time last_row_time_ ABSL_GUARDED_BY(mutex_);
  bool input_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool close_required_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
  // The gradient's rows: how many there are, go in one piece, are final, and were handed out.
  int64_t grad_rows_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t grad_piece_rows_ ABSL_GUARDED_BY(mutex_) = 1;
  int64_t grad_ready_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t grad_taken_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_ROW_EXCHANGE_H_
