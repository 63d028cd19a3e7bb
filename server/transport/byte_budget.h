// Bounds on the bytes that calls hold: ByteBudget for many calls at once, and FairBudget for many clients; GrowingBuffer for one
// call. The budgets are thread-safe, and never wait.
#ifndef HEADWATER_SERVER_TRANSPORT_BYTE_BUDGET_H_
#define HEADWATER_SERVER_TRANSPORT_BYTE_BUDGET_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace headwater::transport {

class ByteBudget {
 public:
  // At most `capacity_bytes` (>= 0) are reserved at any time, except by ReserveAnyway().
  explicit ByteBudget(int64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}

  struct ReturnBytes {
    void operator()(ByteBudget* budget) const { budget->reserved_bytes_.fetch_sub(bytes); }
    int64_t bytes = 0;
  };
  // Reserved bytes. Destruction returns them to the budget, which must outlive the reservation.
  using Reservation = std::unique_ptr<ByteBudget, ReturnBytes>;

  // Reserves `bytes` (>= 0) and returns true, or changes nothing and returns false.
  bool TryReserve(int64_t bytes, Reservation* reservation) {
    int64_t reserved = reserved_bytes_.load();
    do {
      if (bytes > capacity_bytes_ - reserved) return false;
    } while (!reserved_bytes_.compare_exchange_weak(reserved, reserved + bytes));
    *reservation = Reservation(this, {bytes});
    return true;
  }

  // Reserves `bytes` (>= 0) even if they are more than what is free.
  void ReserveAnyway(int64_t bytes, Reservation* reservation) {
    reserved_bytes_.fetch_add(bytes);
    *reservation = Reservation(this, {bytes});
  }

  int64_t capacity_bytes() const { return capacity_bytes_; }
  int64_t reserved_bytes() const { return reserved_bytes_.load(); }
  int64_t available_bytes() const { return std::max<int64_t>(0, capacity_bytes_ - reserved_bytes_.load()); }

 private:
  const int64_t capacity_bytes_;
  std::atomic<int64_t> reserved_bytes_{0};
};

// A ByteBudget in which the client that was refused first is served first. Until it retries, or kPatience passes, others may only
// take what leaves room for it. So neither a client with many calls nor one with small calls can starve another.
class FairBudget : public ByteBudget {
 public:
  // How long room is kept for a refused client after its last try. Clients are asked to retry much sooner.
  static constexpr absl::Duration kPatience = absl::Seconds(1);

  using ByteBudget::ByteBudget;

  // Reserves `bytes` (in [0, capacity]) for `client` and returns true, or returns false and remembers that it was refused. `now` is
  // any clock that does not go back.
  bool TryReserve(const std::string& client, int64_t bytes, absl::Time now, ByteBudget::Reservation* reservation) {
    absl::MutexLock lock(&mutex_);
    std::erase_if(refused_, [&](const auto& entry) { return entry.second.last < now - kPatience; });
    const auto mine = refused_.find(client);
    const int64_t order = mine != refused_.end() ? mine->second.order : next_order_;
    // No sum of these can wrap: each is at most the capacity, and what is kept is at most that.
    int64_t kept = 0;
    for (const auto& [other, refused] : refused_) {
      if (refused.order < order) kept = std::min(kept + refused.bytes, capacity_bytes());
    }
    if ((bytes == 0 || bytes <= available_bytes() - kept) && ByteBudget::TryReserve(bytes, reservation)) {
      if (mine != refused_.end()) refused_.erase(mine);
      return true;
    }
    refused_[client] = {order, std::min(bytes, capacity_bytes()), now};
    if (order == next_order_) ++next_order_;
    return false;
  }

 private:
  struct Refused {
    int64_t order = 0;  // of the first refusal
    int64_t bytes = 0;  // that it wanted last
    absl::Time last;
  };

  absl::Mutex mutex_;
  std::map<std::string, Refused> refused_ ABSL_GUARDED_BY(mutex_);  // by client
  int64_t next_order_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Uninitialised bytes that grow as data comes, so that no length field of a client ever sizes an allocation. Not thread-safe.
class GrowingBuffer {
 public:
  // Never holds more than `limit_bytes` (>= 0). Allocates nothing yet.
  explicit GrowingBuffer(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Appends `byte_count` bytes. Returns false, without a change, above the limit or without memory. Invalidates data().
  bool Append(const void* bytes, int64_t byte_count) {
    if (byte_count < 0 || byte_count > limit_bytes_ - size_) return false;
    if (byte_count == 0) return true;
    const int64_t needed = size_ + byte_count;
    if (needed > capacity_) {
      const int64_t grown = std::min(limit_bytes_, std::max({needed, 2 * size_, std::min(kFirstBytes, limit_bytes_)}));
      // realloc moves large blocks by remapping pages, not by copying them.
      void* const moved = std::realloc(data_.get(), static_cast<size_t>(grown));
      if (moved == nullptr) return false;
      static_cast<void>(data_.release());
      data_.reset(static_cast<uint8_t*>(moved));
      capacity_ = grown;
    }
    std::memcpy(data_.get() + size_, bytes, static_cast<size_t>(byte_count));
    size_ = needed;
    return true;
  }

  // 16-byte aligned; null while empty.
  const uint8_t* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  // Bytes allocated: at most twice size(), or kFirstBytes.
  int64_t capacity() const { return capacity_; }

  // The largest first allocation, if the limit is not lower.
  static constexpr int64_t kFirstBytes = 4 << 20;

 private:
  struct Free {
    void operator()(uint8_t* pointer) const { std::free(pointer); }
  };
  int64_t limit_bytes_;
  int64_t size_ = 0;
  int64_t capacity_ = 0;
  std::unique_ptr<uint8_t, Free> data_;
};

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_BYTE_BUDGET_H_
