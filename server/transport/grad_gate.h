// GradGate: decides when gradient rows may leave while the micro-batch's rows still come.
//
// Rows leave once all rows have come: rows on the wire can neither be taken back nor computed again. No row leaves after the
// computation was given up for missing rows: its repeat may see other weights.
#ifndef HEADWATER_SERVER_TRANSPORT_GRAD_GATE_H_
#define HEADWATER_SERVER_TRANSPORT_GRAD_GATE_H_

#include <algorithm>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace headwater::transport {

// Thread-safe.
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

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_GRAD_GATE_H_
