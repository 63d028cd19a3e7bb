// ByteBudget: a bound on the bytes that many calls hold at once. Thread-safe; never waits.
#ifndef HEADWATER_SERVER_TRANSPORT_BYTE_BUDGET_H_
#define HEADWATER_SERVER_TRANSPORT_BYTE_BUDGET_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

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

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_BYTE_BUDGET_H_
