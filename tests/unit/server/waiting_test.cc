#include "server/scheduler/waiting.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "headwater/kernels/error.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::scheduler {
namespace {

using observability::MonotonicNow;

std::string ReasonOf(const absl::Status& status) {
  return status.ok() ? "OK" : IsParked(status) ? "parked" : ErrorReasonName(GetErrorReason(status));
}

// A door that operations wait for.
struct Door {
  absl::Mutex mutex;
  bool open ABSL_GUARDED_BY(mutex) = false;
  WaitList opened;

  absl::Status Pass(const WaitLimits& limits) {
    absl::MutexLock lock(&mutex);
    while (!open) {
      if (absl::Status status = Wait(opened, mutex, limits, "waited for the door"); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
  void Close() {
    absl::MutexLock lock(&mutex);
    open = false;
  }
  void Open() {
    absl::MutexLock lock(&mutex);
    open = true;
    opened.WakeAll();
  }
};

// A call as the server's are, but for its thread: Resume() is only counted.
class Call : public Waiter {
 public:
  explicit Call(WaitingCalls& calls) : Waiter(&calls) {}
  // One try, as UnaryCall makes it.
  std::string Try(Door& door, const WaitLimits& limits) {
    WaitLimits own = limits;
    own.waiter = this;
    absl::Status status = door.Pass(own);
    while (IsParked(status)) {
      if (StaysParked()) return "parked";
      status = door.Pass(own);
    }
    return ReasonOf(status);
  }
  bool Stays() { return StaysParked(); }
  void Over() { RunAtEnd(); }
  int resumed() const { return resumed_.load(); }
  void AwaitResume() const {
    while (resumed_ == 0) std::this_thread::yield();
  }

 private:
  void Resume() override { ++resumed_; }
  std::atomic<int> resumed_{0};
};

class WaitingTest : public ::testing::Test {
 protected:
  WaitingCalls calls_{2, 8};
  Door door_;
};

TEST_F(WaitingTest, TheChangeEndsAWaitOnce) {
  Call call(calls_);
  EXPECT_EQ(call.Try(door_, AsLongAsItTakes()), "parked");
  EXPECT_EQ(calls_.size(), 1);
  door_.Open();
  call.Cancel();
  calls_.CancelAll();
  EXPECT_EQ(call.resumed(), 1);
  EXPECT_EQ(calls_.size(), 0);
  EXPECT_EQ(call.Try(door_, AsLongAsItTakes()), "OK");
}

TEST_F(WaitingTest, TheDeadlineEndsAWait) {
  Call late(calls_), other(calls_);
  EXPECT_EQ(other.Try(door_, AsLongAsItTakes()), "parked");
  const WaitLimits limits = {MonotonicNow() + absl::Milliseconds(20)};
  EXPECT_EQ(late.Try(door_, limits), "parked");
  late.AwaitResume();
  EXPECT_EQ(late.Try(door_, limits), "DEADLINE_EXCEEDED");
  late.Over();
  Call next(calls_);
  EXPECT_EQ(next.Try(door_, {MonotonicNow() + absl::Milliseconds(20)}), "parked");
  next.AwaitResume();
  EXPECT_EQ(other.resumed(), 0);
  door_.Open();
  EXPECT_EQ(late.resumed(), 1);
  EXPECT_EQ(other.resumed(), 1);
}

TEST_F(WaitingTest, ACancelledCallNeverWaitsAgain) {
  Call call(calls_);
  EXPECT_EQ(call.Try(door_, AsLongAsItTakes()), "parked");
  call.Cancel();
  EXPECT_EQ(call.resumed(), 1);
  EXPECT_EQ(call.Try(door_, AsLongAsItTakes()), "CANCELLED");
  Call early(calls_);
  early.Cancel();
  EXPECT_EQ(early.Try(door_, AsLongAsItTakes()), "CANCELLED");
  EXPECT_EQ(early.resumed(), 0);
}

TEST_F(WaitingTest, AWaitThatEndsDuringItsTryIsTriedAgainThere) {
  Call call(calls_);
  WaitLimits limits = AsLongAsItTakes();
  limits.waiter = &call;
  for (const int resumed : {0, 1}) {
    EXPECT_EQ(ReasonOf(door_.Pass(limits)), "parked");
    door_.Open();  // before the try has ended
    EXPECT_FALSE(call.Stays());
    EXPECT_EQ(call.resumed(), resumed);
    EXPECT_EQ(call.Try(door_, AsLongAsItTakes()), "OK");
    door_.Close();
    EXPECT_EQ(call.Try(door_, AsLongAsItTakes()), "parked");
    door_.Open();
    EXPECT_EQ(call.resumed(), resumed + 1);
    door_.Close();
  }
}

TEST_F(WaitingTest, AWaitEndsWithItsOperation) {
  Call call(calls_);
  WaitLimits limits = AsLongAsItTakes();
  limits.waiter = &call;
  EXPECT_EQ(ReasonOf(door_.Pass(limits)), "parked");
  call.Over();  // the try that has parked it ended with another result
  EXPECT_EQ(calls_.size(), 0);
  EXPECT_EQ(call.Try(door_, AsLongAsItTakes()), "parked");
  door_.Open();
  EXPECT_EQ(call.resumed(), 1);
}

TEST_F(WaitingTest, ACallMayBeCancelledWhileItIsAsked) {
  ThreadWaiter* self = nullptr;
  ThreadWaiter thread([&self] {
    self->Cancel();
    return false;
  });
  self = &thread;
  EXPECT_EQ(ReasonOf(door_.Pass({absl::InfiniteFuture(), &thread})), "CANCELLED");
}

TEST_F(WaitingTest, AtMostSoManyWait) {
  Call first(calls_), second(calls_), third(calls_);
  EXPECT_EQ(first.Try(door_, AsLongAsItTakes()), "parked");
  EXPECT_EQ(second.Try(door_, AsLongAsItTakes()), "parked");
  EXPECT_EQ(third.Try(door_, AsLongAsItTakes()), "QUEUE_FULL");
  // A call that has waited keeps its place until it is over.
  {
    absl::MutexLock lock(&door_.mutex);
    door_.opened.WakeAll();
  }
  EXPECT_EQ(third.Try(door_, AsLongAsItTakes()), "QUEUE_FULL");
  EXPECT_EQ(first.Try(door_, AsLongAsItTakes()), "parked");
  EXPECT_EQ(second.Try(door_, AsLongAsItTakes()), "parked");
  first.Over();
  EXPECT_EQ(third.Try(door_, AsLongAsItTakes()), "parked");
  door_.Open();
  EXPECT_EQ(second.resumed(), 2);
}

TEST_F(WaitingTest, ThreadsWaitInFewerPlacesAndEndAlike) {
  std::atomic<bool> gone{false};
  ThreadWaiter thread([&gone] { return gone.load(); }, &calls_);
  WaitingCalls few(8, 4);  // one of them a thread
  ThreadWaiter one(nullptr, &few), another(nullptr, &few);
  std::thread waits([&] { EXPECT_EQ(ReasonOf(door_.Pass({absl::InfiniteFuture(), &thread})), "CANCELLED"); });
  std::thread holds([&] { EXPECT_EQ(ReasonOf(door_.Pass({absl::InfiniteFuture(), &one})), "OK"); });
  std::thread counted_by_nobody([&] { EXPECT_EQ(ReasonOf(door_.Pass(AsLongAsItTakes())), "OK"); });
  while (few.size() + calls_.size() < 2) std::this_thread::yield();
  EXPECT_EQ(ReasonOf(door_.Pass({absl::InfiniteFuture(), &another})), "QUEUE_FULL");
  EXPECT_EQ(ReasonOf(door_.Pass({MonotonicNow() + absl::Milliseconds(1)})), "DEADLINE_EXCEEDED");
  gone = true;
  waits.join();
  door_.Open();
  holds.join();
  counted_by_nobody.join();
  door_.Close();
  EXPECT_EQ(ReasonOf(door_.Pass({MonotonicNow() + absl::Milliseconds(1), &another})), "DEADLINE_EXCEEDED");
}

TEST_F(WaitingTest, TheDrainSendsAwayWhoWaitsForAStep) {
  Call step(calls_), head(calls_);
  EXPECT_EQ(step.Try(door_, AsLongAsItTakes().ForStep()), "parked");
  EXPECT_EQ(head.Try(door_, AsLongAsItTakes()), "parked");
  calls_.Close();
  EXPECT_EQ(step.Try(door_, AsLongAsItTakes().ForStep()), "DRAINING");
  EXPECT_EQ(head.Try(door_, AsLongAsItTakes()), "parked");
  calls_.CancelAll();
  EXPECT_EQ(head.resumed(), 2);
  EXPECT_EQ(head.Try(door_, AsLongAsItTakes()), "CANCELLED");
}

TEST_F(WaitingTest, EveryCallIsResumedOnceForEachWait) {
  WaitingCalls calls(1000, 8);
  std::vector<std::unique_ptr<Call>> all;
  for (int i = 0; i < 200; ++i) {
    auto call = std::make_unique<Call>(calls);
    // Of some the time is up before they wait.
    if (call->Try(door_, {MonotonicNow() + absl::Milliseconds(i % 5)}) == "parked") all.push_back(std::move(call));
  }
  std::thread cancels([&] {
    for (const auto& call : all) call->Cancel();
  });
  door_.Open();
  cancels.join();
  for (const auto& call : all) call->AwaitResume();
  EXPECT_EQ(calls.size(), 0);
  for (const auto& call : all) EXPECT_EQ(call->resumed(), 1);
}

TEST_F(WaitingTest, WhatWasKeptForAnOperationGoesWithIt) {
  int ends = 0;
  {
    Call call(calls_);
    call.AtEnd([&ends] { ++ends; });
    EXPECT_EQ(call.Try(door_, AsLongAsItTakes()), "parked");
    EXPECT_EQ(ends, 0);
    door_.Open();
  }
  EXPECT_EQ(ends, 1);
}

}  // namespace
}  // namespace headwater::scheduler
