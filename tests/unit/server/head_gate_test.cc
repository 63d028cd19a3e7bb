// HeadGate: turns of calls and file calls, without a head.
#include "server/heads/head_gate.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "head_test_util.h"

namespace headwater::heads {
namespace {

using headwater::testing::RunUntilItSleeps;
using scheduler::AsLongAsItTakes;
using scheduler::WaitLimits;

const WaitLimits kDoNotWait = {};

class HeadGateTest : public ::testing::Test {
 protected:
  HeadGate gate_{HeadName{"default", "student"}};
};

TEST_F(HeadGateTest, CallsShareTheHeadAndKeepFileCallsOut) {
  auto first = std::make_unique<HeadGate::Entry>(gate_, kDoNotWait);
  auto second = std::make_unique<HeadGate::Entry>(gate_, kDoNotWait);
  EXPECT_OK(first->status());
  EXPECT_OK(second->status());
  EXPECT_FALSE(HeadGate::FileCall(gate_).status().ok());
  EXPECT_REASON(HeadGate::FileCall(gate_, kDoNotWait).status(), kDeadlineExceeded);
  first.reset();
  EXPECT_FALSE(HeadGate::FileCall(gate_).status().ok());
  second.reset();
  EXPECT_OK(HeadGate::FileCall(gate_).status());
  EXPECT_OK(HeadGate::FileCall(gate_, kDoNotWait).status());
}

TEST_F(HeadGateTest, AFileCallKeepsEveryOtherOut) {
  std::optional<HeadGate::FileCall> files;
  files.emplace(gate_);
  EXPECT_OK(files->status());
  EXPECT_TRUE(gate_.IsTakenByFiles());
  EXPECT_REASON(gate_.AwaitFiles(kDoNotWait), kDeadlineExceeded);
  EXPECT_REASON(gate_.AwaitFiles(testing::CancelledWait()), kCancelled);
  EXPECT_REASON(HeadGate::Entry(gate_, kDoNotWait).status(), kDeadlineExceeded);
  EXPECT_FALSE(HeadGate::FileCall(gate_).status().ok());
  files.reset();
  EXPECT_FALSE(gate_.IsTakenByFiles());
  EXPECT_OK(gate_.AwaitFiles(kDoNotWait));
  EXPECT_OK(HeadGate::Entry(gate_, kDoNotWait).status());
}

TEST_F(HeadGateTest, ARefusedEntryKeepsTheHeadsBeforeTheRefusalUntilItsEnd) {
  HeadGate other(HeadName{"default", "teacher"});
  const HeadGate::FileCall files(other);
  {
    const HeadGate::Entry refused(std::vector<HeadGate*>{&gate_, &other}, kDoNotWait);
    EXPECT_REASON(refused.status(), kDeadlineExceeded);
    EXPECT_FALSE(HeadGate::FileCall(gate_).status().ok());
  }
  EXPECT_OK(HeadGate::FileCall(gate_).status());
}

TEST_F(HeadGateTest, CallsThatWaitedGoBeforeTheNextFileCall) {
  std::vector<int> order;
  absl::Mutex mutex;
  const auto note = [&](int who) {
    absl::MutexLock lock(&mutex);
    order.push_back(who);
  };
  std::optional<HeadGate::FileCall> files;
  files.emplace(gate_);
  std::thread next_files = RunUntilItSleeps([&] {
    const HeadGate::FileCall next(gate_, AsLongAsItTakes());
    EXPECT_OK(next.status());
    note(2);
  });
  std::thread call = RunUntilItSleeps([&] {
    const HeadGate::Entry entry(gate_, AsLongAsItTakes());
    EXPECT_OK(entry.status());
    note(1);
  });
  files.reset();
  call.join();
  next_files.join();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST_F(HeadGateTest, AClosedGateRefusesFileCallsAndCallsBehindThem) {
  std::optional<HeadGate::FileCall> files;
  files.emplace(gate_);
  std::thread call = RunUntilItSleeps([&] { EXPECT_REASON(HeadGate::Entry(gate_, AsLongAsItTakes()).status(), kHeadNotFound); });
  gate_.Close();
  call.join();
  EXPECT_FALSE(gate_.IsTakenByFiles());
  EXPECT_REASON(HeadGate::FileCall(gate_, AsLongAsItTakes()).status(), kHeadNotFound);
  files.reset();
  EXPECT_OK(HeadGate::Entry(gate_, kDoNotWait).status());
  EXPECT_FALSE(HeadGate::FileCall(gate_).status().ok());
}

}  // namespace
}  // namespace headwater::heads
