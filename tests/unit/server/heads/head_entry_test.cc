// Head: which calls wait for which, and how their waits end.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "head_test_util.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/heads/head.h"
#include "server/observability/monotonic_clock.h"
#include "tests/unit/server/faulty_file_system.h"
#include "tests/unit/server/memory_file_system.h"

namespace headwater::heads {
namespace {

using checkpoint::CheckpointStore;
using headwater::testing::FaultyFileSystem;
using headwater::testing::MemoryFileSystem;
using observability::MonotonicNow;

class HeadEntryTest : public ::testing::Test {
 protected:
  HeadEntryTest() {
    absl::StatusOr<std::unique_ptr<CheckpointStore>> store = CheckpointStore::Open("/store", files_);
    EXPECT_OK(store);
    store_ = *std::move(store);
  }

  // A contribution that waits for its decision.
  void Stage(int64_t micro_batch, const std::optional<SessionId>& session = std::nullopt) {
    EXPECT_OK(MicroBatchCall(head_, 0, micro_batch, kRowOfToken2).Explicit().Session(session).Run(engine_));
  }
  absl::StatusOr<bool> Commit(int64_t micro_batch, const WaitLimits& limits = AsLongAsItTakes(),
                              const std::optional<SessionId>& session = std::nullopt) {
    return heads::Commit(targets_, micro_batch, 0, CommitArguments(), session, nullptr, limits);
  }
  // A save that hangs on the disk until the gate opens.
  std::thread BeginSave() {
    files_.OnNextChange([this] { gate_.Stop(); });
    std::thread saver([this] { EXPECT_OK(head_->Save(key_.epoch, *store_, "x", /*overwrite=*/false)); });
    gate_.AwaitStopped();
    return saver;
  }
  // A call that sets the weights, and hangs in it until the gate opens.
  std::thread BeginSet() {
    std::thread setter([this] { SetSlowly(*head_, gate_); });
    gate_.AwaitStopped();
    return setter;
  }
  static WaitLimits For(absl::Duration time) { return {MonotonicNow() + time}; }

  // Every call that may wait for a head, by name.
  using Call = std::function<absl::Status(const WaitLimits&)>;
  std::vector<std::pair<std::string, Call>> Calls() {
    const int64_t byte_count = static_cast<int64_t>(values_.size() * sizeof(float));
    ShadowTensor shadow;
    shadow.data = std::shared_ptr<const void>(values_.data(), [](const void*) {});
    shadow.byte_count = byte_count;
    higher_.Attempt(1);
    return {
        {"Commit", [=, this](const WaitLimits& limits) { return Commit(0, limits).status(); }},
        {"GradientNorm", [=, this](const WaitLimits& limits) { return head_->GradientNorm(key_, limits).status(); }},
        {"ReadGradient",
         [=, this](const WaitLimits& limits) {
           return head_->ReadGradient(key_, HeadTensor::kGradWeight, 0, 15, values_.data(), limits);
         }},
        {"AddGradient",
         [=, this](const WaitLimits& limits) {
           return head_->AddGradient(key_, 9, 0, Digest{7}, GradientPart{.row_count = 1, .data = values_.data()}, nullptr, limits)
               .status();
         }},
        {"Announce", [=, this](const WaitLimits& limits) { return Announce(higher_.submission(), limits); }},
        {"Discard", [=, this](const WaitLimits& limits) { return Discard(targets_, 1, 1, std::nullopt, limits).status(); }},
        {"ReadWeights",
         [=, this](const WaitLimits& limits) {
           return head_->ReadWeights(HeadTensor::kWeight, 0, 15, values_.data(), std::nullopt, std::nullopt, limits);
         }},
        {"Seal",
         [=, this](const WaitLimits& limits) {
           return head_->Seal(key_, std::vector<int64_t>{0, 9}, {}, limits).status();
         }},
        {"DiscardGradient", [=, this](const WaitLimits& limits) { return head_->DiscardGradient(key_, limits).status(); }},
        {"Take", [=, this](const WaitLimits& limits) { return head_->Take(std::nullopt, {}, limits).status(); }},
        // These change the weights, or save them.
        {"Save", [=, this](const WaitLimits& limits) { return head_->Save(key_.epoch, *store_, "y", false, limits).status(); }},
        {"Apply",
         [=, this](const WaitLimits& limits) { return head_->Apply(key_, std::nullopt, ApplyArguments(), limits).status(); }},
        {"Replace", [=, this](const WaitLimits& limits) { return head_->Replace(key_, shadow, limits).status(); }},
        {"SetTensor",
         [=, this](const WaitLimits& limits) {
           return head_->SetTensor(key_.epoch, HeadTensor::kWeight, DataType::kFloat32, values_.data(), byte_count, limits)
               .status();
         }},
        {"Restore", [=, this](const WaitLimits& limits) { return head_->Restore(key_.epoch, *store_, "x", limits).status(); }},
    };
  }
  static constexpr size_t kWriters = 5;  // the last of Calls()

  ThreadGate gate_;
  FakeEngine engine_;
  MemoryFileSystem memory_;
  FaultyFileSystem files_{memory_};
  std::unique_ptr<CheckpointStore> store_;
  const std::shared_ptr<Head> head_ = MakeReadyHead(engine_, SmallSpec());
  const StepKey key_ = KeyOf(*head_);
  const std::vector<DecisionTarget> targets_ = {{head_, key_}};
  MicroBatchCall higher_{head_, 0, 1, kRowOfToken2};
  std::vector<float> values_ = std::vector<float>(15);
};

TEST_F(HeadEntryTest, EveryCallBehindAChangeOfTheWeightsEndsWithItsLimits) {
  Stage(0);
  Stage(1);
  const HeadInfo before = head_->Describe();
  std::thread setter = BeginSet();
  for (const auto& [name, call] : Calls()) {
    SCOPED_TRACE(name);
    EXPECT_REASON(call(For(absl::Milliseconds(1))), kDeadlineExceeded);
    EXPECT_REASON(call(CancelledWait()), kCancelled);
  }
  // Nothing has been changed: the contributions wait for their decision, at their attempts.
  EXPECT_EQ(head_->Describe().epoch, before.epoch);
  EXPECT_EQ(StateOf(*head_, 0), ContributionState::kStaged);
  EXPECT_EQ(StateOf(*head_, 1), ContributionState::kStaged);
  gate_.Open();
  setter.join();
  EXPECT_EQ(head_->Describe().weight_version, before.weight_version + 1);
  EXPECT_TRUE(store_->ListNewestFirst("default", "student")->newest_first.empty());
}

TEST_F(HeadEntryTest, OnlyChangesOfTheWeightsAndOtherSavesWaitForASave) {
  Stage(0);
  Stage(1);
  const HeadInfo before = head_->Describe();
  std::thread saver = BeginSave();
  const auto calls = Calls();
  for (size_t i = calls.size() - kWriters; i < calls.size(); ++i) {
    SCOPED_TRACE(calls[i].first);
    EXPECT_REASON(calls[i].second(For(absl::Milliseconds(1))), kDeadlineExceeded);
  }
  EXPECT_OK(MicroBatchCall(head_, 0, 100, kRowOfToken2).Run(engine_));
  for (size_t i = 0; i < calls.size() - kWriters; ++i) {
    SCOPED_TRACE(calls[i].first);
    const absl::Status status = calls[i].second(For(absl::Minutes(10)));
    if (calls[i].first == "Seal") {
      EXPECT_REASON(status, kMicroBatchUnexpected);  // 100
    } else {
      EXPECT_OK(status);
    }
  }
  EXPECT_NE(head_->Describe().epoch, before.epoch);
  EXPECT_EQ(head_->Describe().weight_version, before.weight_version);
  gate_.Open();
  saver.join();
  EXPECT_EQ(store_->ListNewestFirst("default", "student")->newest_first.size(), 1u);
  // The step that the checkpoint has open is not the head's any more.
  EXPECT_TRUE(*head_->SaveIfChanged(*store_, "z", absl::InfiniteFuture(), /*waits=*/false));
  EXPECT_FALSE(*head_->SaveIfChanged(*store_, "z", absl::InfiniteFuture(), /*waits=*/false));
}

TEST_F(HeadEntryTest, AHeadThatIsSavedMeanwhileIsNotSavedAgain) {
  std::thread saver = BeginSave();
  std::thread waits =
      RunUntilItSleeps([this] { EXPECT_FALSE(*head_->SaveIfChanged(*store_, "y", absl::InfiniteFuture(), /*waits=*/true)); });
  gate_.Open();
  saver.join();
  waits.join();
}

TEST_F(HeadEntryTest, EveryCallThatWaitsForADeletedHeadIsToldAtOnce) {
  Stage(0);
  std::thread setter = BeginSet();
  std::thread commits = RunUntilItSleeps([&] { EXPECT_REASON(Commit(0), kHeadNotFound); });
  std::thread saves = RunUntilItSleeps([&] { EXPECT_REASON(head_->Save(key_.epoch, *store_, "y", false), kHeadNotFound); });
  std::thread submits =
      RunUntilItSleeps([&] { EXPECT_REASON(MicroBatchCall(head_, 0, 7, kRowOfToken2).Run(engine_), kHeadNotFound); });
  std::thread seals = RunUntilItSleeps([&] { EXPECT_REASON(head_->Seal(key_, int64_t{9}, AsLongAsItTakes()), kHeadNotFound); });
  std::thread steps = RunUntilItSleeps([&] { EXPECT_OK(head_->AwaitStep({key_.epoch, 1}, AsLongAsItTakes())); });
  EXPECT_OK(head_->TryRetire(std::nullopt, /*force=*/true));
  seals.join();
  steps.join();
  commits.join();
  saves.join();
  submits.join();
  EXPECT_REASON(head_->GradientNorm(key_), kHeadNotFound);
  EXPECT_REASON(head_->CheckEpoch(std::nullopt), kHeadNotFound);
  gate_.Open();
  setter.join();
  EXPECT_REASON(head_->GradientNorm(key_), kHeadNotFound);
}

// ---- sessions --------------------------------------------------------------------------------------------------------

TEST_F(HeadEntryTest, TheEndOfASessionLeavesWhatIsBeingCommittedAlone) {
  const SessionId session{1};
  const absl::Status not_ready = MakeError(ErrorReason::kShardNotReady, "a shard could not begin");
  for (const bool fails : {false, true}) {
    const int64_t micro_batch = fails ? 1 : 0;
    Stage(micro_batch, session);
    int64_t dropped = -1;
    engine_.control().on_call = [&] {
      if (dropped < 0) dropped = head_->DropSession(session);
    };
    if (fails) engine_.control().FailNext("Commit", not_ready);
    const absl::StatusOr<bool> committed = Commit(micro_batch, AsLongAsItTakes(), session);
    engine_.control().on_call = nullptr;
    EXPECT_EQ(dropped, 0);
    if (fails) {
      EXPECT_REASON(committed, kShardNotReady);
      EXPECT_EQ(StateOf(*head_, micro_batch), ContributionState::kStaged);
      EXPECT_EQ(head_->DropSession(session), 1);  // as at the end of the call
      EXPECT_EQ(StateOf(*head_, micro_batch), ContributionState::kDiscarded);
    } else {
      EXPECT_OK(committed);
      EXPECT_EQ(StateOf(*head_, micro_batch), ContributionState::kCommitted);
      EXPECT_EQ(head_->DropSession(session), 0);
    }
  }
}

}  // namespace
}  // namespace headwater::heads
