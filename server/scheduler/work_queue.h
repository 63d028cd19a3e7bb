// WorkQueue: the bounded, fair admission to the engine.
//
//   WorkQueue::Turn turn(queue, client, JobSizeOf(rows), MonotonicNow(), [&] { exchange.Notify(); });
//   ... rows come; a large job may begin before they are complete, at turn.EarlyStart() ...
//   turn.Enter();                   // stands in line
//   ... until turn.admitted() ...   // the turn's `wake` reports each change; the queue itself holds no thread
//   job();
//   turn.Leave(time_of_job);
//
// Clients take turns, so one that submits much cannot starve another; jobs of one client begin in order. Several jobs run at once,
// by size. A large job computes while the next one is ready at the engine. Many small jobs reach the engine together, which may
// compute them as one.
//
// A client with several micro-batches in flight takes their results in order. If a later one began before an earlier one, the
// client would get both results at once, and send the next two together. The engine would be idle until they arrive. So an earlier
// micro-batch has precedence for a while.
#ifndef HEADWATER_SERVER_SCHEDULER_WORK_QUEUE_H_
#define HEADWATER_SERVER_SCHEDULER_WORK_QUEUE_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace headwater::scheduler {

// A job's demand on the engine. Small: one of many that it computes together.
enum class JobSize { kSmall = 0, kLarge = 1 };

// Micro-batches of at most so many rows are small jobs.
inline constexpr int64_t kSmallJobRows = 1024;
inline JobSize JobSizeOf(int64_t row_count) { return row_count <= kSmallJobRows ? JobSize::kSmall : JobSize::kLarge; }

// Jobs of each size that run at once.
struct QueueWidths {
  int64_t small = 128;
  int64_t large = 2;
};

// Thread-safe, and outlives its turns; a Turn has one thread.
class WorkQueue {
 public:
  // For so long a turn has precedence over later ones; after that a slow upload holds up no other job.
  static constexpr absl::Duration kPrecedence = absl::Milliseconds(20);

  // At most `max_depth` (>= 1) jobs wait. The widths are at least 1.
  explicit WorkQueue(int64_t max_depth, const QueueWidths& widths = {});

  // One job on its way: its rows come, it stands in line, it runs.
  class Turn {
   public:
    // `wake` is called with the queue's lock when what this turn waits for may have changed; it must not call the queue. `now`,
    // here and in EarlyStart(), is of any clock that does not go back.
    Turn(WorkQueue& queue, std::string client, JobSize size, absl::Time now, std::function<void()> wake);
    ~Turn();  // leaves

    // The time at which the job may begin before its rows are complete: `now`, or when the precedence of earlier turns ends.
    // InfiniteFuture while a job waits or runs, behind which an early start gains nothing. Unless it is `now`, `wake` follows when
    // that changes.
    absl::Time EarlyStart(absl::Time now);
    // Gives up precedence; Enter() does, too.
    void Yield();
    // Joins its client's line. kQueueFull (with `retryAfterMs` in the metadata) if the queue is full, kDraining after Drain(). Must
    // not be called while in line or admitted.
    absl::Status Enter();
    // Whether its turn has come. Its place at the engine is its own until Leave().
    bool admitted() const { return admitted_.load(); }
    // Leaves the line, or its place at the engine. `taken`: how long its job ran; 0 if it did not.
    void Leave(absl::Duration taken = absl::ZeroDuration());
    // For the running job: whether another job waits, or runs and so may wait at the engine. `wake` follows when that changes.
    bool OthersWait();

   private:
    friend class WorkQueue;
    WorkQueue& queue_;
    const std::string client_;
    const JobSize size_;
    const std::function<void()> wake_;
    std::atomic<bool> admitted_ = false;
    // Guarded by the queue's mutex:
    absl::Time since_;  // InfinitePast: no precedence
    bool in_line_ = false;
    bool watches_ = false;  // to be woken at the next change of the load
    std::list<Turn*>::iterator place_;
  };

  // Wakes every turn, after a change of what calls check besides the queue (their head, the engine's device).
  void WakeAll();
  // Refuses new jobs from now on and waits until the accepted ones have run.
  void Drain();
  // Jobs that wait; those that run are not counted.
  int64_t depth() const;

 private:
  struct Line {
    std::string client;
    std::deque<Turn*> turns;
  };
  using Lines = std::list<Line>;

  int64_t& running(JobSize size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return running_[static_cast<size_t>(size)]; }
  int64_t load() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return waiting_count_ + running_[0] + running_[1]; }
  // Starts jobs as long as one fits: always the next job of the first client in turn whose next job has room. Wakes all of them
  // except `self`, whose thread this is.
  void Admit(const Turn* self = nullptr) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The line of a client, or the end of `lines_`.
  Lines::iterator FindLine(const std::string& client) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes a waiting job out of its client's line.
  void Remove(Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LeaveLocked(Turn* turn, absl::Duration taken) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Wakes the watchers if the load has changed between no, one and several jobs.
  void LoadChanged() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WakeWatchers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Duration RetryAfter() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t max_depth_;
  const std::array<int64_t, 2> widths_;  // by JobSize
  mutable absl::Mutex mutex_;
  std::list<Turn*> turns_ ABSL_GUARDED_BY(mutex_);  // all of them, as they came
  Lines lines_ ABSL_GUARDED_BY(mutex_);             // the next client's first
  int64_t known_load_ ABSL_GUARDED_BY(mutex_) = 0;  // at the watchers' last wake: 0, 1 or 2 (more than one)
  int64_t waiting_count_ ABSL_GUARDED_BY(mutex_) = 0;
  std::array<int64_t, 2> running_ ABSL_GUARDED_BY(mutex_) = {0, 0};  // by JobSize
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Duration typical_job_time_ ABSL_GUARDED_BY(mutex_) = absl::Milliseconds(100);  // moving average, for RetryAfter()
};

// Bounds how long a micro-batch that computes may hold the engine for rows that stay away. If others wait, the bound is the time
// that it has computed. To give up costs them as much, because it is computed again. So they never lose more than twice the cost of
// the best decision, whenever the rows come. One computation's, used by its thread; `now` never goes back.
class StallClock {
 public:
  // Bounds of one wait for rows while others wait; the larger one holds also while no other job waits.
  static constexpr absl::Duration kLeast = absl::Milliseconds(1);
  static constexpr absl::Duration kMost = absl::Milliseconds(20);

  // A wait for rows begins. The first call marks that the computation has the engine.
  void BeginWait(absl::Time now) {
    had_since_ = std::min(had_since_, now);
    wait_begun_ = now;
    others_since_ = absl::InfiniteFuture();
  }
  // The time to give up, as things are. `others_wait`: another job could be computed instead.
  absl::Time GiveUpAt(absl::Time now, bool others_wait) {
    others_since_ = others_wait ? std::min(others_since_, now) : absl::InfiniteFuture();
    const absl::Duration computed = wait_begun_ - had_since_ - waited_;
    return std::min(wait_begun_ + kMost, others_since_ + std::clamp(computed, kLeast, kMost));
  }
  // The rows have come.
  void EndWait(absl::Time now) { waited_ += now - wait_begun_; }

 private:
  absl::Time had_since_ = absl::InfiniteFuture();
  absl::Duration waited_;  // of earlier waits for rows
  absl::Time wait_begun_;
  absl::Time others_since_ = absl::InfiniteFuture();  // during this wait
};

}  // namespace headwater::scheduler

#endif  // HEADWATER_SERVER_SCHEDULER_WORK_QUEUE_H_
