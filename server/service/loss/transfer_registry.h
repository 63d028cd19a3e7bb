// TransferRegistry: where the primary stream of a micro-batch and its stripes find each other, in either order, by transfer_id.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_TRANSFER_REGISTRY_H_
#define HEADWATER_SERVER_SERVICE_LOSS_TRANSFER_REGISTRY_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace headwater::service {

class Transfer;

using TransferId = std::array<uint8_t, 16>;

// A stripe that looks for its transfer. Called once, on any thread and without a lock, with the transfer, or why there is none.
using OnTransfer = std::function<void(absl::StatusOr<std::shared_ptr<Transfer>>)>;

// Thread-safe.
class TransferRegistry {
 public:
  // A stripe waits at most `max_wait` for a primary stream that has not been announced.
  explicit TransferRegistry(absl::Duration max_wait) : max_wait_(max_wait) {}

  // A primary stream, from its header to its end. Must not outlive the registry.
  class Entry {
   public:
    Entry() = default;
    Entry(Entry&& other) noexcept : registry_(std::exchange(other.registry_, nullptr)), id_(other.id_) {}
    Entry& operator=(Entry&&) = delete;
    ~Entry();  // stripes that wait, and those that come, get kTransferNotFound
    // The header is accepted: stripes that wait get the transfer, and so do those that come. Once.
    void Open(std::shared_ptr<Transfer> transfer);

   private:
    friend class TransferRegistry;
    Entry(TransferRegistry* registry, const TransferId& id) : registry_(registry), id_(id) {}
    TransferRegistry* registry_ = nullptr;
    TransferId id_{};
  };
  // A primary stream has come; its stripes wait as long as it takes. kInvalidField (`header.transfer_id`) if the id is another's,
  // or was a moment ago.
  absl::StatusOr<Entry> Announce(const TransferId& id);

  // The stripe `stripe` has come: `found` is called now, or later.
  void Find(const TransferId& id, const void* stripe, OnTransfer found);
  // The stripe waits no more; its `found` will not be called, or has been.
  void Leave(const TransferId& id, const void* stripe);

  // Refuses stripes that have waited for too long at `now` (observability::MonotonicNow()). To be called every few milliseconds.
  void Expire(absl::Time now);
  // The server drains: stripes whose primary stream has not come are refused, now and from now on.
  void Drain();

  int64_t waiting() const {
    absl::MutexLock lock(&mutex_);
    int64_t count = 0;
    for (const auto& [id, place] : places_) count += static_cast<int64_t>(place.waiting.size());
    return count;
  }

 private:
  struct Waiting {
    const void* stripe = nullptr;
    absl::Time since;
    OnTransfer found;
  };
  struct Place {
    bool announced = false;
    std::shared_ptr<Transfer> transfer;  // null before Open()
    std::vector<Waiting> waiting;
  };
  void Close(const TransferId& id);
  // Takes out the stripes that have waited since before `since` for a stream that was not announced.
  std::vector<OnTransfer> TakeUnheard(absl::Time since) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const absl::Duration max_wait_;
  mutable absl::Mutex mutex_;
  std::map<TransferId, Place> places_ ABSL_GUARDED_BY(mutex_);
  // The last ids that have ended: their late stripes need not wait.
  std::deque<TransferId> ended_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LOSS_TRANSFER_REGISTRY_H_
