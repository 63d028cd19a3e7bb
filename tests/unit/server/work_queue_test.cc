#include "server/scheduler/work_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "head_test_util.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::scheduler {
namespace {

bool Never() { return false; }

// Takes a place until it is released.
class Blocker {
 public:
  explicit Blocker(WorkQueue& queue, JobSize size = JobSize::kLarge)
      : thread_([this, &queue, size] {
          EXPECT_OK(queue.Run(
              "blocker", size,
              [this] {
                running_.Notify();
                release_.WaitForNotification();
              },
              Never, absl::InfiniteFuture()));
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

TEST(WorkQueueTest, RunsAJobOnItsSubmittersThread) {
  WorkQueue queue(1);
  std::thread::id worker;
  EXPECT_OK(queue.Run(
      "a", [&] { worker = std::this_thread::get_id(); }, nullptr, absl::InfiniteFuture()));
  EXPECT_EQ(worker, std::this_thread::get_id());
  EXPECT_EQ(queue.depth(), 0);
}

TEST(WorkQueueTest, SizesFollowFromRows) {
  EXPECT_EQ(JobSizeOf(0), JobSize::kSmall);
  EXPECT_EQ(JobSizeOf(kSmallJobRows), JobSize::kSmall);
  EXPECT_EQ(JobSizeOf(kSmallJobRows + 1), JobSize::kLarge);
}

TEST(WorkQueueTest, TwoLargeJobsRunAtOnceAndManySmallOnes) {
  WorkQueue queue(10, {.small = 3, .large = 2});
  EXPECT_FALSE(queue.others_wait());
  EXPECT_TRUE(queue.idle());
  auto large = std::make_unique<Blocker>(queue);
  EXPECT_FALSE(queue.idle());
  EXPECT_FALSE(queue.others_wait());  // asked by the one that runs
  Blocker second(queue);
  EXPECT_TRUE(queue.others_wait());
  std::vector<std::unique_ptr<Blocker>> small;
  for (int i = 0; i < 3; ++i) small.push_back(std::make_unique<Blocker>(queue, JobSize::kSmall));
  std::atomic<bool> large_ran = false, small_ran = false;
  std::thread third([&] {
    EXPECT_OK(queue.Run(
        "c", JobSize::kLarge, [&] { large_ran = true; }, Never, absl::InfiniteFuture()));
  });
  WaitForDepth(queue, 1);
  std::thread fourth([&] {
    EXPECT_OK(queue.Run(
        "d", JobSize::kSmall, [&] { small_ran = true; }, Never, absl::InfiniteFuture()));
  });
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

TEST(WorkQueueTest, JobsOfOneClientBeginInOrderWhateverTheirSize) {
  WorkQueue queue(10, kOneByOne);
  Blocker blocker(queue);
  std::atomic<bool> cancelled = false, small_ran = false;
  std::thread large([&] {
    EXPECT_REASON(queue.Run(
                      "a", JobSize::kLarge, [] {}, [&] { return cancelled.load(); }, absl::InfiniteFuture()),
                  kCancelled);
  });
  WaitForDepth(queue, 1);
  std::thread small([&] {
    EXPECT_OK(queue.Run(
        "a", JobSize::kSmall, [&] { small_ran = true; }, Never, absl::InfiniteFuture()));
  });
  WaitForDepth(queue, 2);
  EXPECT_FALSE(small_ran);
  // Another client's small job passes both.
  EXPECT_OK(queue.Run(
      "b", JobSize::kSmall, [] {}, Never, absl::InfiniteFuture()));
  EXPECT_FALSE(small_ran);
  cancelled = true;
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
        EXPECT_OK(queue.Run(
            name.substr(0, 1), [&order, name] { order.push_back(name); }, Never, absl::InfiniteFuture()));
      });
      WaitForDepth(queue, ++depth);
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(order, (std::vector<std::string>{"a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"}));
}

TEST(WorkQueueTest, TheBoundIsTheNumberOfWaitingJobs) {
  WorkQueue queue(2, kOneByOne);
  std::vector<std::thread> threads;
  std::atomic<int> ran = 0;
  {
    Blocker blocker(queue);
    for (int64_t i = 1; i <= 2; ++i) {
      threads.emplace_back([&] {
        EXPECT_OK(queue.Run(
            "a", [&] { ++ran; }, Never, absl::InfiniteFuture()));
      });
      WaitForDepth(queue, i);
    }
    const absl::Status refused = queue.Run(
        "b", [&] { ++ran; }, Never, absl::InfiniteFuture());
    EXPECT_REASON(refused, kQueueFull);
    EXPECT_EQ(GetErrorMetadata(refused).at("maximum"), "2");
    EXPECT_GE(std::stoi(GetErrorMetadata(refused).at("retryAfterMs")), 10);
    EXPECT_EQ(queue.depth(), 2);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ran, 2);
  EXPECT_OK(queue.Run(
      "b", [&] { ++ran; }, Never, absl::InfiniteFuture()));
  EXPECT_EQ(ran, 3);
}

TEST(WorkQueueTest, CancellationTakesAJobOut) {
  WorkQueue queue(10, kOneByOne);
  bool ran = false;
  std::atomic<bool> cancelled = false;
  Blocker blocker(queue);
  std::thread waiter([&] {
    EXPECT_REASON(queue.Run(
                      "a", [&] { ran = true; }, [&] { return cancelled.load(); }, absl::InfiniteFuture()),
                  kCancelled);
  });
  WaitForDepth(queue, 1);
  cancelled = true;
  waiter.join();
  EXPECT_EQ(queue.depth(), 0);
  blocker.Release();
  EXPECT_OK(queue.Run(
      "a", [] {}, Never, absl::InfiniteFuture()));
  EXPECT_FALSE(ran);
}

TEST(WorkQueueTest, TheDeadlineTakesAJobOut) {
  WorkQueue queue(10, kOneByOne);
  bool ran = false;
  Blocker blocker(queue);
  const absl::Time start = observability::MonotonicNow();
  EXPECT_REASON(queue.Run(
                    "a", [&] { ran = true; }, Never, start + absl::Milliseconds(30)),
                kDeadlineExceeded);
  EXPECT_GE(observability::MonotonicNow() - start, absl::Milliseconds(30));
  EXPECT_EQ(queue.depth(), 0);
  EXPECT_FALSE(ran);
}

TEST(WorkQueueTest, AJobThatHasBegunIsWaitedFor) {
  WorkQueue queue(10);
  std::atomic<bool> cancelled = false;
  bool finished = false;
  EXPECT_OK(queue.Run(
      "a",
      [&] {
        cancelled = true;
        absl::SleepFor(absl::Milliseconds(50));
        finished = true;
      },
      [&] { return cancelled.load(); }, observability::MonotonicNow() + absl::Seconds(60)));
  EXPECT_TRUE(finished);
}

TEST(WorkQueueTest, DrainRunsWhatWasAcceptedAndRefusesTheRest) {
  WorkQueue queue(10, kOneByOne);
  std::atomic<int> ran = 0;
  std::vector<std::thread> threads;
  auto blocker = std::make_unique<Blocker>(queue);
  for (int64_t i = 1; i <= 3; ++i) {
    threads.emplace_back([&] {
      EXPECT_OK(queue.Run(
          "a", [&] { ++ran; }, Never, absl::InfiniteFuture()));
    });
    WaitForDepth(queue, i);
  }
  std::thread drainer([&] {
    queue.Drain();
    EXPECT_EQ(ran, 3);
  });
  // Refused as soon as draining has begun.
  const absl::Time give_up = absl::Now() + absl::Seconds(30);
  absl::Status status;
  while (absl::Now() < give_up) {
    status = queue.Run(
        "late", [] {}, [] { return true; }, absl::InfiniteFuture());
    if (HasReason(status, ErrorReason::kDraining)) break;
  }
  EXPECT_REASON(status, kDraining);
  blocker.reset();
  drainer.join();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ran, 3);
  EXPECT_REASON(queue.Run(
                    "a", [] {}, Never, absl::InfiniteFuture()),
                kDraining);
}

TEST(WorkQueueTest, ManyClientsAtOnce) {
  std::atomic<int> ran = 0, running = 0, most = 0;
  std::atomic<int> refused = 0;
  {
    WorkQueue queue(4, {.small = 2, .large = 2});
    std::vector<std::thread> threads;
    for (int client = 0; client < 8; ++client) {
      threads.emplace_back([&, client] {
        for (int i = 0; i < 200; ++i) {
          const bool cancel = i % 5 == 0;
          const absl::Status status = queue.Run(
              std::to_string(client % 3), i % 2 == 0 ? JobSize::kSmall : JobSize::kLarge,
              [&] {
                ++ran;
                most = std::max(most.load(), ++running);
                --running;
              },
              [cancel] { return cancel; }, absl::InfiniteFuture());
          if (!status.ok()) ++refused;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(queue.depth(), 0);
  }
  EXPECT_EQ(ran + refused, 8 * 200);
  EXPECT_GT(ran, 0);
  EXPECT_LE(most, 4);
}

}  // namespace
}  // namespace headwater::scheduler
