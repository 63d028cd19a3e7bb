#include "server/scheduler/work_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/observability/monotonic_clock.h"
#include "tests/unit/server/heads/head_test_util.h"

namespace headwater::scheduler {
namespace {

// Runs a job as a call does: with one thread, which its turn wakes. `cancelled` is looked at when the turn or Wake() wakes it.
class Job {
 public:
  Job(WorkQueue& queue, const std::string& client, JobSize size = JobSize::kLarge, absl::Time now = absl::UnixEpoch())
      : turn_(queue, client, size, now, [this] { Wake(); }) {}

  absl::Status Run(const std::function<void()>& work, absl::Time deadline = absl::InfiniteFuture()) {
    if (absl::Status status = turn_.Enter(); !status.ok()) return status;
    while (!turn_.admitted()) {
      const absl::Time now = observability::MonotonicNow();
      if (cancelled_ || now >= deadline) {
        turn_.Leave();
        return absl::CancelledError();
      }
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(
                                  +[](int* wakes) { return *wakes > 0; }, &wakes_),
                              deadline - now);
      wakes_ = 0;
    }
    work();
    turn_.Leave(absl::Milliseconds(1));
    return absl::OkStatus();
  }
  void Cancel() {
    cancelled_ = true;
    Wake();
  }
  void Wake() {
    absl::MutexLock lock(&mutex_);
    ++wakes_;
  }
  WorkQueue::Turn& turn() { return turn_; }
  int wakes() {
    absl::MutexLock lock(&mutex_);
    return std::exchange(wakes_, 0);
  }

 private:
  absl::Mutex mutex_;
  int wakes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<bool> cancelled_ = false;
  WorkQueue::Turn turn_;
};

absl::Status RunJob(WorkQueue& queue, const std::string& client, JobSize size, const std::function<void()>& work) {
  return Job(queue, client, size).Run(work);
}

// Takes a place until it is released.
class Blocker {
 public:
  explicit Blocker(WorkQueue& queue, JobSize size = JobSize::kLarge)
      : thread_([this, &queue, size] {
          EXPECT_OK(RunJob(queue, "blocker", size, [this] {
            running_.Notify();
            release_.WaitForNotification();
          }));
        }) {
    running_.WaitForNotification();
  }
  ~Blocker() {
    if (!release_.HasBeenNotified()) release_.Notify();
    thread_.join();
  }
  void Release() { release_.Notify(); }

 private:
  absl::Notification running_, release_;
  std::thread thread_;
};

void WaitForDepth(const WorkQueue& queue, int64_t depth) {
  const absl::Time give_up = absl::Now() + absl::Seconds(30);
  while (queue.depth() != depth && absl::Now() < give_up) absl::SleepFor(absl::Milliseconds(1));
  ASSERT_EQ(queue.depth(), depth);
}

// One job at a time.
constexpr QueueWidths kOneByOne = {.small = 1, .large = 1};

TEST(WorkQueueTest, SizesFollowFromRows) {
  EXPECT_EQ(JobSizeOf(0), JobSize::kSmall);
  EXPECT_EQ(JobSizeOf(kSmallJobRows), JobSize::kSmall);
  EXPECT_EQ(JobSizeOf(kSmallJobRows + 1), JobSize::kLarge);
}

TEST(WorkQueueTest, TwoLargeJobsRunAtOnceAndManySmallOnes) {
  WorkQueue queue(10, {.small = 3, .large = 2});
  auto large = std::make_unique<Blocker>(queue);
  Blocker second(queue);
  std::vector<std::unique_ptr<Blocker>> small;
  for (int i = 0; i < 3; ++i) small.push_back(std::make_unique<Blocker>(queue, JobSize::kSmall));
  std::atomic<bool> large_ran = false, small_ran = false;
  std::thread third([&] { EXPECT_OK(RunJob(queue, "c", JobSize::kLarge, [&] { large_ran = true; })); });
  WaitForDepth(queue, 1);
  std::thread fourth([&] { EXPECT_OK(RunJob(queue, "d", JobSize::kSmall, [&] { small_ran = true; })); });
  WaitForDepth(queue, 2);
  EXPECT_FALSE(large_ran || small_ran);
  // A place among the small ones is no place for the large one that came first.
  small.clear();
  fourth.join();
  EXPECT_TRUE(small_ran);
  EXPECT_FALSE(large_ran);
  EXPECT_EQ(queue.depth(), 1);
  large.reset();
  third.join();
  EXPECT_TRUE(large_ran);
}

TEST(WorkQueueTest, ARunningJobLearnsThatOthersWait) {
  WorkQueue queue(10);
  Job job(queue, "a"), other(queue, "b"), small(queue, "c", JobSize::kSmall);
  ASSERT_OK(job.turn().Enter());
  EXPECT_TRUE(job.turn().admitted());
  EXPECT_FALSE(job.turn().OthersWait());
  job.wakes();
  ASSERT_OK(other.turn().Enter());
  EXPECT_EQ(job.wakes(), 1);
  EXPECT_TRUE(job.turn().OthersWait());
  ASSERT_OK(small.turn().Enter());
  EXPECT_EQ(job.wakes(), 0);  // it knows
  small.turn().Leave();
  EXPECT_EQ(job.wakes(), 0);
  other.turn().Leave();
  EXPECT_EQ(job.wakes(), 1);
  EXPECT_FALSE(job.turn().OthersWait());
}

TEST(WorkQueueTest, JobsOfOneClientBeginInOrderWhateverTheirSize) {
  WorkQueue queue(10, kOneByOne);
  Blocker blocker(queue);
  std::atomic<bool> small_ran = false;
  Job first(queue, "a");
  std::thread large([&] { EXPECT_FALSE(first.Run([] {}).ok()); });
  WaitForDepth(queue, 1);
  std::thread small([&] { EXPECT_OK(RunJob(queue, "a", JobSize::kSmall, [&] { small_ran = true; })); });
  WaitForDepth(queue, 2);
  // Another client's small job passes both.
  EXPECT_OK(RunJob(queue, "b", JobSize::kSmall, [] {}));
  EXPECT_FALSE(small_ran);
  first.Cancel();
  large.join();
  small.join();
  EXPECT_TRUE(small_ran);
}

TEST(WorkQueueTest, ClientsTakeTurns) {
  WorkQueue queue(100, kOneByOne);
  std::vector<std::string> order;  // written by one job at a time
  std::vector<std::thread> threads;
  {
    Blocker blocker(queue);
    int64_t depth = 0;
    // Client a is first with five jobs, then b with two, then c with one.
    for (const std::string name : {"a0", "a1", "a2", "a3", "a4", "b0", "b1", "c0"}) {
      threads.emplace_back([&queue, &order, name] {
        EXPECT_OK(RunJob(queue, name.substr(0, 1), JobSize::kLarge, [&order, name] { order.push_back(name); }));
      });
      WaitForDepth(queue, ++depth);
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(order, (std::vector<std::string>{"a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"}));
}

TEST(WorkQueueTest, TheBoundIsTheNumberOfWaitingJobs) {
  WorkQueue queue(2, kOneByOne);
  Job running(queue, "a"), first(queue, "a"), second(queue, "a"), third(queue, "b");
  for (Job* job : {&running, &first, &second}) ASSERT_OK(job->turn().Enter());
  EXPECT_TRUE(running.turn().admitted());
  EXPECT_ERROR(third.turn().Enter(), kQueueFull, {"maximum", "2"}, {"actual", "3"}, {"retryAfterMs", "100"});
  EXPECT_EQ(queue.depth(), 2);
  running.turn().Leave();
  EXPECT_TRUE(first.turn().admitted());
  EXPECT_OK(third.turn().Enter());
  EXPECT_EQ(queue.depth(), 2);
  // The hint follows the time of jobs.
  first.turn().Leave(absl::Seconds(1));
  EXPECT_OK(running.turn().Enter());
  EXPECT_EQ(GetErrorMetadata(first.turn().Enter()).at("retryAfterMs"), "280");
}

TEST(WorkQueueTest, CancellationTakesAJobOut) {
  WorkQueue queue(10, kOneByOne);
  bool ran = false;
  Blocker blocker(queue);
  Job job(queue, "a");
  std::thread waiter([&] { EXPECT_FALSE(job.Run([&] { ran = true; }).ok()); });
  WaitForDepth(queue, 1);
  job.Cancel();
  waiter.join();
  EXPECT_EQ(queue.depth(), 0);
  blocker.Release();
  EXPECT_OK(RunJob(queue, "a", JobSize::kLarge, [] {}));
  EXPECT_FALSE(ran);
}

TEST(WorkQueueTest, ATurnThatEndsGivesItsPlaceBack) {
  WorkQueue queue(10, kOneByOne);
  Job next(queue, "b");
  {
    Job running(queue, "a"), waiting(queue, "a");
    ASSERT_OK(running.turn().Enter());
    ASSERT_OK(waiting.turn().Enter());
    ASSERT_OK(next.turn().Enter());
    EXPECT_FALSE(next.turn().admitted());
  }
  EXPECT_TRUE(next.turn().admitted());
  EXPECT_EQ(queue.depth(), 0);
}

TEST(WorkQueueTest, DrainRunsWhatWasAcceptedAndRefusesTheRest) {
  WorkQueue queue(10, kOneByOne);
  std::atomic<int> ran = 0;
  std::vector<std::thread> threads;
  auto blocker = std::make_unique<Blocker>(queue);
  for (int64_t i = 1; i <= 3; ++i) {
    threads.emplace_back([&] { EXPECT_OK(RunJob(queue, "a", JobSize::kLarge, [&] { ++ran; })); });
    WaitForDepth(queue, i);
  }
  std::thread drainer([&] {
    queue.Drain();
    EXPECT_EQ(ran, 3);
  });
  // Refused as soon as draining has begun.
  const absl::Time give_up = absl::Now() + absl::Seconds(30);
  absl::Status status;
  while (status.ok() && absl::Now() < give_up) {
    Job late(queue, "late");
    status = late.turn().Enter();
  }
  EXPECT_REASON(status, kDraining);
  blocker.reset();
  drainer.join();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ran, 3);
}

TEST(WorkQueueTest, ManyClientsAtOnce) {
  std::atomic<int> ran = 0, running = 0, most = 0, refused = 0;
  WorkQueue queue(4, {.small = 2, .large = 2});
  headwater::testing::RunThreads(8, [&](int64_t client) {
    for (int i = 0; i < 200; ++i) {
      Job job(queue, std::to_string(client % 3), i % 2 == 0 ? JobSize::kSmall : JobSize::kLarge);
      if (i % 5 == 0) job.Cancel();
      const absl::Status status = job.Run([&] {
        ++ran;
        most = std::max(most.load(), ++running);
        --running;
      });
      if (!status.ok()) ++refused;
    }
  });
  EXPECT_EQ(queue.depth(), 0);
  EXPECT_EQ(ran + refused, 8 * 200);
  EXPECT_GT(ran, 0);
  EXPECT_LE(most, 4);
}

// ---- early starts ----------------------------------------------------------------------------------------------------

constexpr absl::Time kStart = absl::UnixEpoch();

TEST(WorkQueueTest, AnEarlierTurnBeginsFirst) {
  WorkQueue queue(10);
  Job first(queue, "a", JobSize::kLarge, kStart), second(queue, "a", JobSize::kLarge, kStart);
  EXPECT_EQ(first.turn().EarlyStart(kStart), kStart);
  EXPECT_EQ(second.turn().EarlyStart(kStart), kStart + WorkQueue::kPrecedence);
  EXPECT_EQ(second.wakes(), 0);
  first.turn().Yield();
  EXPECT_EQ(second.wakes(), 1);
  EXPECT_EQ(second.turn().EarlyStart(kStart), kStart);
}

TEST(WorkQueueTest, ATurnThatEndsHasNoPrecedence) {
  WorkQueue queue(10);
  auto first = std::make_unique<Job>(queue, "a", JobSize::kLarge, kStart);
  Job second(queue, "a", JobSize::kLarge, kStart);
  EXPECT_GT(second.turn().EarlyStart(kStart), kStart);
  first.reset();
  EXPECT_EQ(second.wakes(), 1);
  EXPECT_EQ(second.turn().EarlyStart(kStart), kStart);
}

TEST(WorkQueueTest, PrecedenceIsOverForOneThatTakesLong) {
  WorkQueue queue(10);
  const absl::Time later = kStart + absl::Milliseconds(15), end = kStart + WorkQueue::kPrecedence;
  Job slow(queue, "a", JobSize::kLarge, kStart), job(queue, "a", JobSize::kLarge, later);
  EXPECT_EQ(job.turn().EarlyStart(later), end);
  EXPECT_EQ(job.turn().EarlyStart(end), end);
  // Everyone who came before counts, not only the first.
  Job last(queue, "a", JobSize::kLarge, later);
  EXPECT_EQ(last.turn().EarlyStart(end), later + WorkQueue::kPrecedence);
}

TEST(WorkQueueTest, NothingBeginsEarlyBehindOthers) {
  WorkQueue queue(10);
  Job job(queue, "a"), running(queue, "b");
  ASSERT_OK(running.turn().Enter());
  EXPECT_EQ(job.turn().EarlyStart(kStart), absl::InfiniteFuture());
  EXPECT_EQ(job.wakes(), 0);
  running.turn().Leave();
  EXPECT_EQ(job.wakes(), 1);
  EXPECT_EQ(job.turn().EarlyStart(kStart), kStart);
}

TEST(WorkQueueTest, WakeAllWakesEveryTurn) {
  WorkQueue queue(10, kOneByOne);
  Job coming(queue, "a"), running(queue, "b"), waiting(queue, "b");
  ASSERT_OK(running.turn().Enter());
  ASSERT_OK(waiting.turn().Enter());
  running.wakes();
  queue.WakeAll();
  for (Job* job : {&coming, &running, &waiting}) EXPECT_EQ(job->wakes(), 1);
}

absl::Time At(double milliseconds) { return absl::UnixEpoch() + absl::Milliseconds(milliseconds); }

TEST(StallClock, WaitsLongWhileNobodyElseDoes) {
  StallClock clock;
  clock.BeginWait(At(0));
  EXPECT_EQ(clock.GiveUpAt(At(0), false), At(20));
  EXPECT_EQ(clock.GiveUpAt(At(15), false), At(20));
}

TEST(StallClock, GivesUpSoonWhereLittleHasBeenComputed) {
  StallClock clock;
  clock.BeginWait(At(0));
  EXPECT_EQ(clock.GiveUpAt(At(0), true), At(1));
  EXPECT_EQ(clock.GiveUpAt(At(0.5), true), At(1));
}

TEST(StallClock, WaitsForAsLongAsItHasBeenComputing) {
  StallClock clock;
  clock.BeginWait(At(0));
  clock.EndWait(At(4));
  clock.BeginWait(At(10));  // 6 ms of them computing
  EXPECT_EQ(clock.GiveUpAt(At(10), true), At(16));
  clock.EndWait(At(12));
  clock.BeginWait(At(100));
  EXPECT_EQ(clock.GiveUpAt(At(100), true), At(120));
}

TEST(StallClock, CountsFromWhenOthersCame) {
  StallClock clock;
  clock.BeginWait(At(0));
  clock.EndWait(At(0));
  clock.BeginWait(At(5));
  EXPECT_EQ(clock.GiveUpAt(At(5), false), At(25));
  EXPECT_EQ(clock.GiveUpAt(At(14), true), At(19));
  EXPECT_EQ(clock.GiveUpAt(At(16), true), At(19));
  EXPECT_EQ(clock.GiveUpAt(At(17), false), At(25));  // they have gone elsewhere
  EXPECT_EQ(clock.GiveUpAt(At(18), true), At(23));
  EXPECT_EQ(clock.GiveUpAt(At(24), true), At(23));
}

TEST(StallClock, NeverWaitsLongerThanAlone) {
  StallClock clock;
  clock.BeginWait(At(0));
  clock.EndWait(At(0));
  clock.BeginWait(At(50));
  EXPECT_EQ(clock.GiveUpAt(At(65), true), At(70));
}

}  // namespace
}  // namespace headwater::scheduler
