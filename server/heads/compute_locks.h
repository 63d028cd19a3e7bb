// ComputeLocks and StateLocks: the locks of several heads at once; and what an engine's failure is.
#ifndef HEADWATER_SERVER_HEADS_COMPUTE_LOCKS_H_
#define HEADWATER_SERVER_HEADS_COMPUTE_LOCKS_H_

#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "headwater/kernels/error.h"
#include "server/heads/head.h"

namespace headwater::heads {

// How a call holds its heads' compute locks. kShared: a computation that stages nothing, beside others of its kind.
enum class ComputeMode { kExclusive, kShared };

// Takes the locks in ascending address, so that two calls with the same heads in other roles cannot wait for each other. The heads
// must outlive it. The analysis of locks cannot follow it: its users switch that off.
class Head::ComputeLocks {
 public:
  explicit ComputeLocks(std::set<Head*, std::less<>> heads,
                        ComputeMode mode = ComputeMode::kExclusive) ABSL_NO_THREAD_SAFETY_ANALYSIS : heads_(std::move(heads)),
                                                                                                     mode_(mode) {
    for (Head* head : heads_) mode_ == ComputeMode::kShared ? head->compute_mutex_.ReaderLock() : head->compute_mutex_.Lock();
  }
  ComputeLocks(const ComputeLocks&) = delete;
  ComputeLocks& operator=(const ComputeLocks&) = delete;
  ~ComputeLocks() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (Head* head : heads_) mode_ == ComputeMode::kShared ? head->compute_mutex_.ReaderUnlock() : head->compute_mutex_.Unlock();
  }

 private:
  const std::set<Head*, std::less<>> heads_;
  const ComputeMode mode_;
};

// The same for the state locks, for a moment: what several ledgers are told together is told at once.
class Head::StateLocks {
 public:
  explicit StateLocks(const std::vector<Head*>& heads) ABSL_NO_THREAD_SAFETY_ANALYSIS : heads_(heads.begin(), heads.end()) {
    for (Head* head : heads_) head->state_mutex_.Lock();
  }
  StateLocks(const StateLocks&) = delete;
  StateLocks& operator=(const StateLocks&) = delete;
  ~StateLocks() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (Head* head : heads_) head->state_mutex_.Unlock();
  }

 private:
  const std::set<Head*, std::less<>> heads_;
};

// After the decision nothing may fail but this: what the head holds is unknown then.
inline bool IsEngineFailure(const absl::Status& status) {
  return HasReason(status, ErrorReason::kEngineFailed) || HasReason(status, ErrorReason::kInternal);
}

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_COMPUTE_LOCKS_H_
