// ComputeLocks: the compute locks of some heads, and what an engine's failure is.
#ifndef HEADWATER_SERVER_HEADS_COMPUTE_LOCKS_H_
#define HEADWATER_SERVER_HEADS_COMPUTE_LOCKS_H_

#include <functional>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "headwater/kernels/error.h"
#include "server/heads/head.h"

namespace headwater::heads {

// Takes the locks in ascending address, so that two calls with the same heads in other roles cannot wait for each other. The heads
// must outlive it. The analysis of locks cannot follow it: its users switch that off.
class Head::ComputeLocks {
 public:
  explicit ComputeLocks(std::set<Head*, std::less<>> heads) ABSL_NO_THREAD_SAFETY_ANALYSIS : heads_(std::move(heads)) {
    for (Head* head : heads_) head->compute_mutex_.Lock();
  }
  ComputeLocks(const ComputeLocks&) = delete;
  ComputeLocks& operator=(const ComputeLocks&) = delete;
  ~ComputeLocks() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (Head* head : heads_) head->compute_mutex_.Unlock();
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
