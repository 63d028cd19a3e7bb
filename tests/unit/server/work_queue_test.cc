#include "server/scheduler/work_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "head_test_util.h"

namespace headwater::scheduler {
namespace {

bool Never() { return false; }

// Occupies the worker until it is released.
class Blocker {
 public:
  explicit Blocker(WorkQueue& queue)
      : thread_([this, &queue] {
          EXPECT_OK(queue.Run(
              "blocker",
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

TEST(WorkQueueTest, RunsAJobOnAnotherThread) {
  WorkQueue queue(1);
  std::thread::id worker;
  EXPECT_OK(queue.Run(
      "a", [&] { worker = std::this_thread::get_id(); }, Never, absl::InfiniteFuture()));
  EXPECT_NE(worker, std::this_thread::get_id());
  EXPECT_NE(worker, std::thread::id());
  EXPECT_EQ(queue.depth(), 0);
}

TEST(WorkQueueTest, ClientsTakeTurns) {
  WorkQueue queue(100);
  std::vector<std::string> order;  // written by the worker alone
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
  WorkQueue queue(2);
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
  WorkQueue queue(10);
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
  WorkQueue queue(10);
  bool ran = false;
  Blocker blocker(queue);
  const absl::Time start = absl::Now();
  EXPECT_REASON(queue.Run(
                    "a", [&] { ran = true; }, Never, start + absl::Milliseconds(30)),
                kDeadlineExceeded);
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(30));
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
      [&] { return cancelled.load(); }, absl::Now() + absl::Seconds(60)));
  EXPECT_TRUE(finished);
}

TEST(WorkQueueTest, DrainRunsWhatWasAcceptedAndRefusesTheRest) {
  WorkQueue queue(10);
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
  std::atomic<int> ran = 0;
  std::atomic<int> refused = 0;
  {
    WorkQueue queue(4);
    std::vector<std::thread> threads;
    for (int client = 0; client < 8; ++client) {
      threads.emplace_back([&queue, &ran, &refused, client] {
        for (int i = 0; i < 200; ++i) {
          const bool cancel = i % 5 == 0;
          const absl::Status status = queue.Run(
              std::to_string(client % 3), [&ran] { ++ran; }, [cancel] { return cancel; }, absl::InfiniteFuture());
          if (!status.ok()) ++refused;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(queue.depth(), 0);
  }
  EXPECT_EQ(ran + refused, 8 * 200);
  EXPECT_GT(ran, 0);
}

}  // namespace
}  // namespace headwater::scheduler
