// Waits of calls: lists of those that wait for one thing, and the limits of a wait.
//
// An operation that must wait calls Wait() in a loop, with the lock held under which it has looked:
//
//   while (!is_open_) {
//     if (absl::Status status = Wait(opened_, mutex_, limits, "waited for the step"); !status.ok()) return status;
//   }
//
// A thread stands still in Wait(). A call that holds no thread is parked: Wait() returns at once with a status that IsParked(). The
// operation passes that status to its caller, and is later tried again from its beginning. Exactly one of three things ends a wait:
// the change (WaitList::WakeAll()), the deadline, or Waiter::Cancel().
#ifndef HEADWATER_SERVER_SCHEDULER_WAITING_H_
#define HEADWATER_SERVER_SCHEDULER_WAITING_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace headwater::scheduler {

class Waiter;

// How long an operation may wait.
struct WaitLimits {
  absl::Time deadline = absl::InfinitePast();  // of observability::MonotonicNow(); past: do not wait
  Waiter* waiter = nullptr;                    // the operation that waits; null: this thread, which cannot be cancelled
  // Bounds the waits for a step and its parts further, and ends them when the server drains.
  absl::Time step_deadline = absl::InfiniteFuture();
  bool until_drain = false;

  WaitLimits ForStep() const { return {std::min(deadline, step_deadline), waiter, step_deadline, true}; }
};

// The end of a wait that begins at `now`, in a call with the given `deadline`: kAnswerTime earlier, or a quarter of the time left.
// The answer names what is missing and must arrive before the client's own deadline passes.
inline constexpr absl::Duration kAnswerTime = absl::Milliseconds(50);
inline absl::Time WaitEnd(absl::Time now, absl::Time deadline) {
  return deadline - std::clamp((deadline - now) / 4, absl::ZeroDuration(), kAnswerTime);
}

inline WaitLimits AsLongAsItTakes() { return {absl::InfiniteFuture()}; }

// The operations that wait for one thing, where a thread would use a condition variable. Empty when destroyed. Thread-safe.
class WaitList {
 public:
  WaitList() = default;
  WaitList(const WaitList&) = delete;
  WaitList& operator=(const WaitList&) = delete;
  // Ends all waits, so that the operations look again. Requires the lock with which they called Wait().
  void WakeAll();

 private:
  friend class Waiter;
  std::set<Waiter*> waiters_;  // guarded by the mutex of all waits
};

// The waiting calls of a server. A thread ends the waits of parked ones at their deadlines. Thread-safe.
class WaitingCalls {
 public:
  // At most `max_calls` (>= 0) wait at once, and at most a quarter of `max_threads` of them as threads: other calls need threads
  // too. Any further call is refused with kQueueFull. A call that was parked counts until it is over: after its wait it may need to
  // wait for a thread, and again.
  WaitingCalls(int64_t max_calls, int64_t max_threads);
  // No call may be left.
  ~WaitingCalls();

  // Ends the waits with WaitLimits::until_drain (kDraining), now and from now on.
  void Close();
  // Cancels all waits, now and from now on.
  void CancelAll();
  int64_t size() const;

 private:
  friend class Waiter;
  void EndLateWaits();
  absl::Status CheckRoom(bool is_thread) const;

  // All guarded by the mutex of all waits.
  const int64_t max_calls_;
  const int64_t max_threads_;
  int64_t thread_count_ = 0;  // threads that wait
  int64_t call_count_ = 0;    // others that have waited and are not over
  bool closed_ = false;
  std::atomic<bool> cancelled_{false};
  bool ending_ = false;
  std::multimap<absl::Time, Waiter*> parked_;  // by the deadline
  std::condition_variable earlier_;            // the first deadline has changed
  std::thread timer_;                          // last: it uses the members above
};

// An operation that may wait, one wait at a time. Cancel() may be called from any thread.
class Waiter {
 public:
  // `calls` counts and bounds its waits; null: they are unbounded.
  explicit Waiter(WaitingCalls* calls, bool is_thread = false) : calls_(calls), is_thread_(is_thread) {}
  virtual ~Waiter();

  // Ends its wait, and every later one, with kCancelled.
  void Cancel();
  // Whether its waits have become useless: Cancel() has been called, or a derived class knows of another reason.
  virtual bool cancelled();
  // Runs `action` when the operation is over, to release what it kept between its tries. Called by the operation itself.
  void AtEnd(std::function<void()> action) { at_end_.push_back(std::move(action)); }

 protected:
  // Tries the operation again, on another thread: may be called with locks held.
  virtual void Resume() = 0;
  // To be called after a try that has ended with IsParked(). True: Resume() has been or will be called, and the next try owns the
  // object now. False: the wait is over already, try again at once.
  bool StaysParked();
  void RunAtEnd();

 private:
  friend class WaitList;
  friend class WaitingCalls;
  friend absl::Status Wait(WaitList&, absl::Mutex&, const WaitLimits&, absl::string_view);
  friend class ThreadWaiter;

  virtual absl::Status DoWait(WaitList& list, absl::Mutex& mutex, const WaitLimits& limits, absl::string_view what)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // With the mutex of all waits held. Enter() puts it into the list unless the limits refuse the wait.
  absl::Status Enter(WaitList& list, const WaitLimits& limits, absl::string_view what);
  void Leave();
  void End();

  WaitingCalls* const calls_;
  const bool is_thread_;
  std::vector<std::function<void()>> at_end_;  // used by the operation's thread
  // Guarded by the mutex of all waits.
  WaitList* list_ = nullptr;  // where it waits
  std::multimap<absl::Time, Waiter*>::iterator place_;
  std::atomic<bool> cancelled_{false};
  bool has_waited_ = false;  // it has a place among the calls until it is over; a thread gets one again
  bool suspended_ = false;   // no thread tries it
  bool ended_ = false;       // its wait ended while a thread still tried it
};

// A thread that waits itself. It asks `cancelled` (may be null) every few milliseconds: neither gRPC's blocking API nor the rows of
// a micro-batch report their end.
class ThreadWaiter final : public Waiter {
 public:
  explicit ThreadWaiter(std::function<bool()> cancelled = nullptr, WaitingCalls* calls = nullptr)
      : Waiter(calls, /*is_thread=*/true), asks_(std::move(cancelled)) {}
  bool cancelled() override { return Waiter::cancelled() || (asks_ != nullptr && asks_()); }

 private:
  absl::Status DoWait(WaitList& list, absl::Mutex& mutex, const WaitLimits& limits, absl::string_view what) override;
  void Resume() override { changed_.notify_all(); }

  const std::function<bool()> asks_;
  std::condition_variable changed_;
};

// One turn of a loop that waits for `list` to be woken. OK: look again. kDeadlineExceeded, kCancelled, kDraining, kQueueFull, or a
// status that IsParked(). `what` completes "the call ...", for the message.
absl::Status Wait(WaitList& list, absl::Mutex& mutex, const WaitLimits& limits, absl::string_view what)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

// Whether an operation ended a try because it waits.
bool IsParked(const absl::Status& status);

// kDeadlineExceeded or kCancelled if the limits have ended the operation.
absl::Status CheckInTime(const WaitLimits& limits, absl::string_view what);

}  // namespace headwater::scheduler

#endif  // HEADWATER_SERVER_SCHEDULER_WAITING_H_
