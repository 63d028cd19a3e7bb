// FairBudget: a bound on the bytes that the calls of many clients hold at once. Thread-safe. Never waits: a refused client retries.
//
// The client that was refused first is served first. Until it retries, or kPatience passes, others may only take what leaves room
// for it. So neither a client with many calls nor one with small calls can starve another.
#ifndef HEADWATER_SERVER_TRANSPORT_FAIR_BUDGET_H_
#define HEADWATER_SERVER_TRANSPORT_FAIR_BUDGET_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/transport/byte_budget.h"

namespace headwater::transport {

class FairBudget {
 public:
  // How long room is kept for a refused client after its last try. Clients are asked to retry much sooner.
  static constexpr absl::Duration kPatience = absl::Seconds(1);

  // At most `capacity_bytes` (>= 0) are reserved at any time.
  explicit FairBudget(int64_t capacity_bytes) : budget_(capacity_bytes) {}

  // Reserves `bytes` (in [0, capacity]) for `client` and returns true, or returns false and remembers that it was refused. `now` is
  // any clock that does not go back.
  bool TryReserve(const std::string& client, int64_t bytes, absl::Time now, ByteBudget::Reservation* reservation);

  int64_t capacity_bytes() const { return budget_.capacity_bytes(); }
  int64_t reserved_bytes() const { return budget_.reserved_bytes(); }
  int64_t available_bytes() const { return budget_.available_bytes(); }
  // Bytes that are kept for clients that were refused.
  int64_t awaited_bytes(absl::Time now) const;

 private:
  struct Refused {
    int64_t order = 0;  // of the first refusal
    int64_t bytes = 0;  // that it wanted last
    absl::Time last;
  };

  ByteBudget budget_;
  mutable absl::Mutex mutex_;
  std::map<std::string, Refused> refused_ ABSL_GUARDED_BY(mutex_);  // by client
  int64_t next_order_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_FAIR_BUDGET_H_
