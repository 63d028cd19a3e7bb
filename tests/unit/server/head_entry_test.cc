// Head: calls that wait for those that take as long as files do, and what they may not keep waiting.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "faulty_file_system.h"
#include "head_test_util.h"
#include "memory_file_system.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/heads/head.h"
#include "server/heads/head_gate.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::heads {
namespace {

using checkpoint::CheckpointStore;
using headwater::testing::FakeEngine;
using headwater::testing::FaultyFileSystem;
using headwater::testing::KeyOf;
using headwater::testing::MakeReadyHead;
using headwater::testing::MemoryFileSystem;
using headwater::testing::MicroBatchCall;
using headwater::testing::Payload;
using headwater::testing::RunUntilItSleeps;
using headwater::testing::SmallSpec;
using observability::MonotonicNow;

const Payload kRow = {{1, 2, 3}, {2}};

class HeadEntryTest : public ::testing::Test {
 protected:
  HeadEntryTest() {
    absl::StatusOr<std::unique_ptr<CheckpointStore>> store = CheckpointStore::Open("/store", files_);
    EXPECT_OK(store);
    store_ = *std::move(store);
  }

  // A contribution that waits for its decision.
  void Stage(int64_t micro_batch, const std::optional<SessionId>& session = std::nullopt) {
    MicroBatchCall call(head_, 0, micro_batch, kRow);
    call.Explicit().submission().session = session;
    EXPECT_OK(call.Run(engine_));
  }
  absl::StatusOr<bool> Commit(int64_t micro_batch, const WaitLimits& limits = AsLongAsItTakes(),
                              const std::optional<SessionId>& session = std::nullopt) {
    return Head::Commit(targets_, micro_batch, 0, CommitArguments(), session, nullptr, limits);
  }
  ContributionState StateOf(int64_t micro_batch) const {
    const auto steps = head_->GetSteps(head_->Describe().epoch);
    EXPECT_OK(steps);
    const auto found = steps->first.micro_batches.find(micro_batch);
    return found == steps->first.micro_batches.end() ? ContributionState::kNone : found->second.state;
  }
  // A save that hangs on the disk until go_on_.
  std::thread BeginSave() {
    files_.OnNextChange([this] {
      hangs_.Notify();
      go_on_.WaitForNotification();
    });
    std::thread saver([this] { EXPECT_OK(head_->Save(key_.epoch, *store_, "x", /*overwrite=*/false)); });
    hangs_.WaitForNotification();
    return saver;
  }
  // A micro-batch that hangs in the engine until go_on_.
  std::thread BeginComputation() {
    engine_.control().during_compute = [this] {
      if (stopped_.exchange(true)) return;
      hangs_.Notify();
      go_on_.WaitForNotification();
    };
    std::thread computes([this] { EXPECT_OK(MicroBatchCall(head_, 0, 100, kRow).Run(engine_)); });
    hangs_.WaitForNotification();
    return computes;
  }
  static WaitLimits For(absl::Duration time) { return {MonotonicNow() + time, nullptr}; }

  absl::Notification hangs_, go_on_;
  std::atomic<bool> stopped_ = false;
  FakeEngine engine_;
  MemoryFileSystem memory_;
  FaultyFileSystem files_{memory_};
  std::unique_ptr<CheckpointStore> store_;
  const std::shared_ptr<Head> head_ = MakeReadyHead(engine_, SmallSpec());
  const StepKey key_ = KeyOf(*head_);
  const std::vector<DecisionTarget> targets_ = {{head_, key_}};
};

TEST_F(HeadEntryTest, EveryCallBehindASaveEndsWithItsLimits) {
  Stage(0);
  const HeadInfo before = head_->Describe();
  std::vector<float> values(15);
  const int64_t byte_count = static_cast<int64_t>(values.size() * sizeof(float));
  GradientPart part;
  part.row_count = 1;
  part.data = values.data();
  ShadowTensor shadow;
  shadow.data = std::shared_ptr<const void>(values.data(), [](const void*) {});
  shadow.byte_count = byte_count;
  MicroBatchCall higher(head_, 0, 0, kRow);
  higher.submission().attempt = 1;
  using Call = std::function<absl::Status(const WaitLimits&)>;
  const std::vector<std::pair<const char*, Call>> calls = {
      {"Commit", [&](const WaitLimits& limits) { return Commit(0, limits).status(); }},
      {"Discard", [&](const WaitLimits& limits) { return Head::Discard(targets_, 0, 0, std::nullopt, limits).status(); }},
      {"Announce", [&](const WaitLimits& limits) { return Head::Announce(higher.submission(), limits); }},
      {"AddGradient",
       [&](const WaitLimits& limits) { return head_->AddGradient(key_, 9, 0, Digest{7}, part, nullptr, limits).status(); }},
      {"Seal", [&](const WaitLimits& limits) { return head_->Seal(key_, int64_t{1}, {}, limits).status(); }},
      {"Apply", [&](const WaitLimits& limits) { return head_->Apply(key_, std::nullopt, ApplyArguments(), limits).status(); }},
      {"DiscardGradient", [&](const WaitLimits& limits) { return head_->DiscardGradient(key_, limits).status(); }},
      {"GradientNorm", [&](const WaitLimits& limits) { return head_->GradientNorm(key_, limits).status(); }},
      {"ReadGradient",
       [&](const WaitLimits& limits) { return head_->ReadGradient(key_, HeadTensor::kGradWeight, 0, 15, values.data(), limits); }},
      {"Take", [&](const WaitLimits& limits) { return head_->Take(std::nullopt, {}, limits).status(); }},
      {"Replace", [&](const WaitLimits& limits) { return head_->Replace(key_, shadow, limits).status(); }},
      {"SetTensor",
       [&](const WaitLimits& limits) {
         return head_->SetTensor(key_.epoch, HeadTensor::kWeight, DataType::kFloat32, values.data(), byte_count, limits).status();
       }},
      {"ReadWeights",
       [&](const WaitLimits& limits) {
         return head_->ReadWeights(HeadTensor::kWeight, 0, 15, values.data(), std::nullopt, std::nullopt, limits);
       }},
      {"Save", [&](const WaitLimits& limits) { return head_->Save(key_.epoch, *store_, "y", false, limits).status(); }},
      {"Restore", [&](const WaitLimits& limits) { return head_->Restore(key_.epoch, *store_, "x", limits).status(); }},
  };
  std::thread saver = BeginSave();
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    EXPECT_REASON(call(For(absl::Milliseconds(1))), kDeadlineExceeded);
    EXPECT_REASON(call(testing::CancelledWait()), kCancelled);
  }
  go_on_.Notify();
  saver.join();
  // Nothing has been changed: the contribution waits for its decision, at its attempt.
  EXPECT_EQ(head_->Describe().epoch, before.epoch);
  EXPECT_EQ(head_->Describe().weight_version, before.weight_version);
  EXPECT_EQ(store_->List("default", "student")->size(), 1u);
  EXPECT_TRUE(*Commit(0));
}

TEST_F(HeadEntryTest, WhoHasWaitedForFilesGoesBeforeTheNext) {
  Stage(0);
  std::thread saver = BeginSave();
  std::thread commits = RunUntilItSleeps([&] { EXPECT_OK(Commit(0)); });
  std::thread sets = RunUntilItSleeps([&] {
    const TensorSource source = [&](int64_t, int64_t element_count, void* out) {
      EXPECT_EQ(StateOf(0), ContributionState::kCommitted);
      std::fill_n(static_cast<float*>(out), element_count, 1.0f);
      return absl::OkStatus();
    };
    EXPECT_OK(head_->SetTensors(key_.epoch, {{HeadTensor::kWeight, DataType::kFloat32, source, /*in_memory=*/true}}));
  });
  go_on_.Notify();
  saver.join();
  commits.join();
  sets.join();
  EXPECT_NE(head_->Describe().epoch, key_.epoch);
}

TEST_F(HeadEntryTest, ASaveThatWaitsIsPassedByNobody) {
  Stage(0);
  Stage(1);
  std::thread computes = BeginComputation();
  std::thread commits = RunUntilItSleeps([&] { EXPECT_OK(Commit(0)); });  // came before the save, and waits for the computation
  std::thread saves = RunUntilItSleeps([&] { EXPECT_OK(head_->Save(key_.epoch, *store_, "x", /*overwrite=*/false)); });
  EXPECT_REASON(Commit(1, For(absl::Milliseconds(1))), kDeadlineExceeded);
  EXPECT_REASON(head_->Save(key_.epoch, *store_, "y", false, For(absl::Milliseconds(1))), kDeadlineExceeded);
  // One that is given up lets the others go on.
  std::thread last = RunUntilItSleeps([&] { EXPECT_OK(Commit(1)); });
  go_on_.Notify();
  for (std::thread* thread : {&computes, &commits, &saves, &last}) thread->join();
  EXPECT_EQ(StateOf(0), ContributionState::kCommitted);
  EXPECT_EQ(StateOf(1), ContributionState::kCommitted);
  EXPECT_EQ(store_->List("default", "student")->size(), 1u);
}

TEST_F(HeadEntryTest, ACallThatIsGivenUpBehindAComputationChangesNothing) {
  Stage(0);
  std::atomic<bool> is_given_up = false;
  std::thread computes = BeginComputation();
  std::thread commits = RunUntilItSleeps([&] {
    scheduler::ThreadWaiter waiter([&] { return is_given_up.load(); });
    EXPECT_REASON(Commit(0, {absl::InfiniteFuture(), &waiter}), kCancelled);
  });
  std::thread discards = RunUntilItSleeps(
      [&] { EXPECT_REASON(Head::Discard(targets_, 0, 0, std::nullopt, For(absl::Milliseconds(1))), kDeadlineExceeded); });
  is_given_up = true;
  go_on_.Notify();
  for (std::thread* thread : {&computes, &commits, &discards}) thread->join();
  EXPECT_EQ(StateOf(0), ContributionState::kStaged);
  EXPECT_TRUE(*Commit(0));
}

TEST_F(HeadEntryTest, WhoWaitsForFilesOfADeletedHeadIsTold) {
  Stage(0);
  std::thread saver = BeginSave();
  std::thread commits = RunUntilItSleeps([&] { EXPECT_REASON(Commit(0), kHeadNotFound); });
  std::thread saves = RunUntilItSleeps([&] { EXPECT_REASON(head_->Save(key_.epoch, *store_, "y", false), kHeadNotFound); });
  EXPECT_OK(head_->TryRetire(std::nullopt, /*force=*/true));
  commits.join();
  saves.join();
  EXPECT_REASON(head_->GradientNorm(key_), kHeadNotFound);
  EXPECT_REASON(head_->CheckThere(), kHeadNotFound);
  go_on_.Notify();
  saver.join();
  EXPECT_REASON(head_->GradientNorm(key_), kHeadNotFound);
}

// ---- sessions --------------------------------------------------------------------------------------------------------

TEST_F(HeadEntryTest, TheEndOfASessionWaitsForNoSave) {
  const SessionId session{1}, other{2};
  Stage(0, session);
  Stage(1, other);
  std::thread saver = BeginSave();
  EXPECT_EQ(head_->DropSession(session), 1);
  EXPECT_EQ(StateOf(0), ContributionState::kDiscarded);
  EXPECT_EQ(StateOf(1), ContributionState::kStaged);
  EXPECT_REASON(Commit(0, AsLongAsItTakes(), session), kMicroBatchDiscarded);
  EXPECT_EQ(head_->DropSession(session), 0);
  go_on_.Notify();
  saver.join();
  Stage(2);  // in the slot that is free again
  EXPECT_OK(Commit(1, AsLongAsItTakes(), other));
}

TEST_F(HeadEntryTest, ACommitThatWaitsFindsThatItsSessionHasEnded) {
  const SessionId session{1};
  Stage(0, session);
  std::thread saver = BeginSave();
  std::thread commits = RunUntilItSleeps([&] { EXPECT_REASON(Commit(0, AsLongAsItTakes(), session), kMicroBatchDiscarded); });
  EXPECT_EQ(head_->DropSession(session), 1);
  go_on_.Notify();
  saver.join();
  commits.join();
}

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
      EXPECT_EQ(StateOf(micro_batch), ContributionState::kStaged);
      EXPECT_EQ(head_->DropSession(session), 1);  // as at the end of the call
      EXPECT_EQ(StateOf(micro_batch), ContributionState::kDiscarded);
    } else {
      EXPECT_OK(committed);
      EXPECT_EQ(StateOf(micro_batch), ContributionState::kCommitted);
      EXPECT_EQ(head_->DropSession(session), 0);
    }
  }
}

// ---- steps -----------------------------------------------------------------------------------------------------------

TEST_F(HeadEntryTest, ASealOfASealedStepWaitsForNothing) {
  EXPECT_OK(MicroBatchCall(head_, 0, 0, kRow).Run(engine_));
  EXPECT_TRUE(head_->TakesMicroBatches(key_));
  EXPECT_FALSE(head_->TakesMicroBatches({key_.epoch, 1}));
  EXPECT_FALSE(head_->TakesMicroBatches({NewEpoch(), 0}));
  EXPECT_OK(head_->Seal(key_, int64_t{1}));
  EXPECT_FALSE(head_->TakesMicroBatches(key_));
  const WaitLimits wait = For(absl::Minutes(10));
  EXPECT_REASON(head_->Seal(key_, int64_t{2}, wait), kMicroBatchMissing);
  EXPECT_LT(MonotonicNow(), wait.deadline - absl::Minutes(5));
}

}  // namespace
}  // namespace headwater::heads
