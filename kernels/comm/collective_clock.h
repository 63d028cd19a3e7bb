// CollectiveClock: how long a rank's collectives have waited for other ranks, and how long they have moved and added elements.
#ifndef HEADWATER_KERNELS_COMM_COLLECTIVE_CLOCK_H_
#define HEADWATER_KERNELS_COMM_COLLECTIVE_CLOCK_H_

#include <chrono>
#include <mutex>

#include "headwater/kernels/communicator.h"

namespace headwater::comm {

// The clock of one rank, whose collectives come one after the other. times() may be called from any thread, during a collective
// too.
class CollectiveClock {
 public:
  // A collective: it waits until EveryRankIsHere(), and communicates from then on.
  class Collective {
   public:
    explicit Collective(CollectiveClock& clock) : clock_(clock) { clock_.Change(State::kWaiting); }
    ~Collective() { clock_.Change(State::kIdle); }
    Collective(const Collective&) = delete;
    Collective& operator=(const Collective&) = delete;
    void EveryRankIsHere() { clock_.Change(State::kCommunicating); }

   private:
    CollectiveClock& clock_;
  };

  CommunicatorTimes times() const {
    std::lock_guard<std::mutex> lock(mutex_);
    CommunicatorTimes now = times_;
    Add(Clock::now() - since_, &now);
    return now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  enum class State { kIdle, kWaiting, kCommunicating };

  void Change(State state) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Clock::time_point now = Clock::now();
    Add(now - since_, &times_);
    since_ = now;
    state_ = state;
  }

  void Add(Clock::duration passed, CommunicatorTimes* times) const {
    if (state_ == State::kWaiting) times->waiting += passed;
    if (state_ == State::kCommunicating) times->communicating += passed;
  }

  mutable std::mutex mutex_;
  State state_ = State::kIdle;  // guarded by mutex_, like the next
  Clock::time_point since_;     // when it became that
  CommunicatorTimes times_;
};

}  // namespace headwater::comm

#endif  // HEADWATER_KERNELS_COMM_COLLECTIVE_CLOCK_H_
