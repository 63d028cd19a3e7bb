// Sequencer: turns, and the fair queue for the use of records, without a head.
#include "server/scheduler/sequencer.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "tests/unit/server/heads/head_test_util.h"

namespace headwater::scheduler {
namespace {

using headwater::heads::RunUntilItSleeps;

constexpr Uses kRead = {Use::kShared, Use::kNone};
constexpr Uses kShare = {Use::kShared, Use::kShared};
constexpr Uses kChange = {Use::kShared, Use::kExclusive};
constexpr Uses kWrite = {Use::kExclusive, Use::kExclusive};
const WaitLimits kDoNotWait = {};

class SequencerTest : public ::testing::Test {
 protected:
  absl::StatusOr<Admission> Acquire(const Needs& needs, const WaitLimits& limits = kDoNotWait) {
    return sequencer_.Acquire([&needs] { return needs; }, limits, "waits");
  }
  bool MayEnter(const Needs& needs) { return Acquire(needs).ok(); }
  bool IsWritten(const Record& record) {
    const Turn turn(sequencer_);
    return Sequencer::IsWritten(record);
  }
  // An operation that notes its number when it has been granted its needs.
  std::thread Wait(int number, const Needs& needs) {
    return RunUntilItSleeps([this, number, needs] {
      const absl::StatusOr<Admission> admission = Acquire(needs, AsLongAsItTakes());
      EXPECT_OK(admission);
      const Turn turn(sequencer_);
      order_.push_back(number);
    });
  }

  Sequencer sequencer_;
  const std::shared_ptr<Record> a_ = std::make_shared<Record>(), b_ = std::make_shared<Record>();
  std::vector<int> order_;
};

TEST_F(SequencerTest, AnOperationGetsAllOfItsNeedsOrNone) {
  std::optional<absl::StatusOr<Admission>> user = Acquire({{b_, kWrite}});
  EXPECT_REASON(Acquire({{a_, kWrite}, {b_, kRead}}), kDeadlineExceeded);
  EXPECT_TRUE(MayEnter({{a_, kWrite}}));
  std::thread both = Wait(1, {{a_, kWrite}, {b_, kRead}});
  // It uses neither, and nobody passes it on one of them who would keep it waiting.
  EXPECT_TRUE(IsWritten(*a_));
  EXPECT_FALSE(MayEnter({{a_, kRead}}));
  std::thread late = Wait(2, {{a_, kRead}});
  user.reset();
  both.join();
  late.join();
  EXPECT_EQ(order_, (std::vector<int>{1, 2}));
}

TEST_F(SequencerTest, AnOperationPassesOnlyThoseWithWhichItDoesNotConflict) {
  std::optional<absl::StatusOr<Admission>> user = Acquire({{a_, kShare}});
  std::thread changes = Wait(1, {{a_, kChange}});
  EXPECT_FALSE(MayEnter({{a_, kShare}}));  // it came later
  EXPECT_TRUE(MayEnter({{a_, kRead}}));
  std::thread writes = Wait(2, {{a_, kWrite}});
  EXPECT_FALSE(MayEnter({{a_, kRead}}));
  std::thread shares = Wait(3, {{a_, kShare}});
  user.reset();
  changes.join();
  writes.join();
  shares.join();
  EXPECT_EQ(order_, (std::vector<int>{1, 2, 3}));
}

TEST_F(SequencerTest, AnOperationComputesItsNeedsAgainWhenItMayGo) {
  std::optional<absl::StatusOr<Admission>> user = Acquire({{a_, kWrite}}), other = Acquire({{b_, kWrite}});
  Needs needs = {{a_, kWrite}};
  std::thread moves = RunUntilItSleeps([&] {
    const absl::StatusOr<Admission> admission = sequencer_.Acquire([&] { return needs; }, AsLongAsItTakes(), "waits");
    EXPECT_OK(admission);
    EXPECT_TRUE(MayEnter({{a_, kWrite}}));
    EXPECT_FALSE(MayEnter({{b_, kRead}}));
  });
  {
    const Turn turn(sequencer_);
    needs = {{b_, kWrite}};
  }
  user.reset();
  other.reset();
  moves.join();
}

TEST_F(SequencerTest, AParkedOperationKeepsItsPlaceUntilItIsOver) {
  class Call : public Waiter {
   public:
    Call() : Waiter(nullptr) {}
    void Over() { RunAtEnd(); }

   private:
    void Resume() override {}
  };
  std::optional<absl::StatusOr<Admission>> user = Acquire({{a_, kRead}});
  for (const bool comes_back : {true, false}) {
    Call call;
    const WaitLimits limits = {absl::InfiniteFuture(), &call};
    EXPECT_TRUE(IsParked(Acquire({{a_, kWrite}}, limits).status()));
    EXPECT_FALSE(MayEnter({{a_, kRead}}));
    if (comes_back) {
      user.reset();
      EXPECT_FALSE(MayEnter({{a_, kRead}}));
      EXPECT_OK(Acquire({{a_, kWrite}}, limits));
      EXPECT_TRUE(MayEnter({{a_, kWrite}}));
      user.emplace(Acquire({{a_, kRead}}));
    }
    call.Over();
    EXPECT_TRUE(MayEnter({{a_, kRead}}));
  }
}

TEST_F(SequencerTest, WhatATurnFreesGoesWhenItIsOver) {
  bool freed = false;
  const auto memory = [&] {
    return std::shared_ptr<const void>(&freed, [this](const void* flag) {
      const Turn turn(sequencer_);  // as a head's end takes one
      *static_cast<bool*>(const_cast<void*>(flag)) = true;
    });
  };
  {
    const Turn turn(sequencer_);
    const Turn inner(sequencer_);
    Turn::Free(memory());
    EXPECT_FALSE(freed);
  }
  EXPECT_TRUE(std::exchange(freed, false));
  Turn::Free(memory());
  EXPECT_TRUE(freed);
}

}  // namespace
}  // namespace headwater::scheduler
