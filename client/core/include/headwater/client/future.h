// Future: the result of a call that is under way.
//
// Unlike std::future, destroying a Future cancels the call and waits until the library has released the caller's memory. Spans that
// were passed in may be freed as soon as the future is gone.
#ifndef HEADWATER_CLIENT_FUTURE_H_
#define HEADWATER_CLIENT_FUTURE_H_

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"

namespace headwater::client {
namespace internal {

// A year stands for forever, and is far from the overflow of a clock.
constexpr std::chrono::hours kLongestTimeout{24 * 365};

// The state that a call and its future share. Thread-safe. Not for users.
//
// It keeps the call, and so the connection, until the caller's side takes the result. gRPC's threads must never drop the last
// reference to a connection, because its end waits for them.
template <typename T>
class FutureState {
 public:
  // Before the call starts: the call, and how to cancel it.
  void Keep(std::shared_ptr<void> call, std::function<void()> cancel) {
    call_ = std::move(call);
    cancel_ = std::move(cancel);
  }

  // Called once, by the call, which shares this, after its last access to the caller's memory and to itself.
  void Set(absl::StatusOr<T> value) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      value_.emplace(std::move(value));
    }
    ready_.notify_all();  // without the lock, which a thread that waits takes at once
  }

  // By the caller's side, and not after Take().
  void Cancel() {
    if (cancel_) cancel_();
  }

  bool WaitFor(std::chrono::nanoseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    return ready_.wait_for(lock, std::min<std::chrono::nanoseconds>(timeout, kLongestTimeout),
                           [this] { return value_.has_value(); });
  }

  // Waits for the result and releases the call. By the caller's side, exactly once.
  absl::StatusOr<T> Take() {
    std::unique_lock<std::mutex> lock(mutex_);
    ready_.wait(lock, [this] { return value_.has_value(); });
    absl::StatusOr<T> value = *std::move(value_);
    lock.unlock();
    cancel_ = nullptr;
    call_.reset();
    return value;
  }

 private:
  // The caller's side alone, once the call has started.
  std::shared_ptr<void> call_;
  std::function<void()> cancel_;

  std::mutex mutex_;
  std::condition_variable ready_;
  std::optional<absl::StatusOr<T>> value_;
};

}  // namespace internal

// The result of one call. Move-only. Different futures may be used from different threads, one future from one thread at a time.
//
// Memory that was passed to the call must stay valid and unchanged until Ready() is true, Get() has returned, or the future is
// destroyed. A call always ends, at its deadline at the latest.
template <typename T>
class [[nodiscard]] Future {
 public:
  // Used by the library.
  explicit Future(std::shared_ptr<internal::FutureState<T>> state) : state_(std::move(state)) {}

  Future(Future&& other) noexcept = default;
  Future& operator=(Future&& other) noexcept {
    if (this != &other) {
      Abandon();
      state_ = std::move(other.state_);
    }
    return *this;
  }
  // Cancels a call that is under way and waits until the caller's memory is free: milliseconds; with shared memory 10 s at most. A
  // micro-batch whose commit had begun on the server is committed all the same; Head::GetStep() shows it.
  ~Future() { Abandon(); }

  // True once Get() would not block. REQUIRES: Get() has not been called.
  bool Ready() const { return state_->WaitFor(std::chrono::nanoseconds(0)); }

  // Waits at most `timeout`; true if the result is there. REQUIRES: Get() has not been called.
  bool WaitFor(std::chrono::nanoseconds timeout) const { return state_->WaitFor(timeout); }

  // Asks the call to end with CANCELLED. Returns at once; the result, whichever it is, comes by Get().
  void Cancel() {
    if (state_ != nullptr) state_->Cancel();
  }

  // Blocks until the call has ended and hands out its result. REQUIRES: called at most once.
  absl::StatusOr<T> Get() {
    const std::shared_ptr<internal::FutureState<T>> state = std::move(state_);
    return state->Take();
  }

 private:
  void Abandon() {
    if (state_ == nullptr) return;
    state_->Cancel();
    state_->Take().IgnoreError();
    state_.reset();
  }

  std::shared_ptr<internal::FutureState<T>> state_;  // null after Get() or a move
};

}  // namespace headwater::client

#endif  // HEADWATER_CLIENT_FUTURE_H_
