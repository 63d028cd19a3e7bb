// Heads that are deleted, that nobody uses, and that come back when the server starts again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "head_test_util.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/heads/head_registry.h"
#include "server/observability/monotonic_clock.h"
#include "tests/unit/server/faulty_file_system.h"
#include "tests/unit/server/memory_file_system.h"

namespace headwater::heads {
namespace {

using checkpoint::CheckpointStore;
using headwater::testing::FaultyFileSystem;
using headwater::testing::MemoryFileSystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kRoot[] = "/store";
const HeadName kName = {"default", "a"};

class HeadComebackTest : public ::testing::Test {
 protected:
  HeadComebackTest() { Start(); }

  // Another process on the same files.
  void Start(const RegistryLimits& limits = {}) {
    registry_.reset();
    files_.Reset();
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<CheckpointStore> store, CheckpointStore::Open(kRoot, files_));
    store_ = std::move(store);
    registry_ = std::make_unique<HeadRegistry>(engine_, limits, HeadLimits(), [this] { return now_; });
  }
  // What came back: "a newest", and what there is to say of it: "a newest: checkpoint b cannot be loaded", "a : no memory".
  std::vector<std::string> Restart(const RegistryLimits& limits = {}) {
    Start(limits);
    return RestoreAll();
  }
  std::vector<std::string> RestoreAll() {
    comebacks_ = registry_->RestoreAll(*store_);
    std::vector<std::string> all;
    for (const HeadRegistry::Comeback& one : comebacks_) {
      all.push_back(absl::StrCat(one.name.head, " ", one.checkpoint, one.note.empty() ? "" : absl::StrCat(": ", one.note)));
    }
    return all;
  }
  std::shared_ptr<Head> NewHead(const HeadName& name = kName, const HeadSpec& spec = SmallSpec(), float weight = 1) {
    const absl::StatusOr<HeadRegistry::Created> created = registry_->Create(name, spec, IfExists::kFail, store_.get());
    EXPECT_OK(created);
    EXPECT_OK(SetWeights(*created->head, std::vector<float>(15, weight)));
    return created->head;
  }
  void Save(const std::shared_ptr<Head>& head, const std::string& checkpoint_name, bool overwrite = false) {
    EXPECT_OK(head->Save(head->Describe().epoch, *store_, checkpoint_name, overwrite));
  }
  // Adds a micro-batch of gradient 1, 2, 3 for row 2 and applies it.
  void DoStep(const std::shared_ptr<Head>& head) {
    const StepKey key = KeyOf(*head);
    MicroBatchCall call(head, key.step, 0, kRowOfToken2);
    EXPECT_OK(call.Run(engine_));
    EXPECT_OK(head->Apply(key, int64_t{1}, Rate(1)));
  }
  std::string PathOf(const std::string& checkpoint_name, const std::string& file) const {
    return absl::StrCat(kRoot, "/default/a/", checkpoint_name, "/", file);
  }
  void Damage(const std::string& path) {
    std::string bytes = memory_.Contents(path);
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
    memory_.SetContents(path, bytes);
  }
  bool IsLive() const { return !store_->LiveHeads()->empty(); }

  absl::Time now_ = absl::UnixEpoch();
  FakeEngine engine_;
  MemoryFileSystem memory_;
  FaultyFileSystem files_{memory_};
  std::unique_ptr<CheckpointStore> store_;
  std::unique_ptr<HeadRegistry> registry_;
  std::vector<HeadRegistry::Comeback> comebacks_;  // of the last start
};

// A comeback of the head from the checkpoint, of which this is said.
template <typename... Texts>
auto Says(const std::string& comeback, const Texts&... texts) {
  return AllOf(StartsWith(comeback + ": "), HasSubstr(texts)...);
}

// ---- coming back -----------------------------------------------------------------------------------------------------

TEST_F(HeadComebackTest, HeadsComeBackFromTheirNewestCheckpoint) {
  HeadSpec spec = SmallSpec();
  spec.initial_step = 4;
  spec.staging_slots = 1;
  const std::shared_ptr<Head> student = NewHead(kName, spec);
  NewHead({"default", "never-saved"});
  Save(student, "zz-first");
  DoStep(student);
  Save(student, "newest");
  const std::vector<float> weight = ReadWeight(*student);
  DoStep(student);
  EXPECT_NE(ReadWeight(*student), weight);
  Save(NewHead({"other", "teacher"}, FrozenSpec(), 3), "only");
  const Epoch old_epoch = student->Describe().epoch;

  EXPECT_THAT(Restart(), ElementsAre("a newest", "teacher only"));
  EXPECT_EQ(comebacks_.back().name.ToString(), "tenants/other/heads/teacher");
  EXPECT_EQ(registry_->size(), 2);

  const std::shared_ptr<Head> back = *registry_->Find(kName);
  const HeadInfo info = back->Describe();
  EXPECT_EQ(info.state, HeadState::kRestored);
  EXPECT_EQ(info.spec, spec);
  EXPECT_EQ(info.open_step, 5);
  EXPECT_EQ(info.restored_checkpoint, "newest");
  EXPECT_NE(info.epoch, old_epoch);
  EXPECT_TRUE(info.recovers_epochs.empty());
  EXPECT_ERROR(back->AddGradient({old_epoch, 6}, 0, 0, {}, {}, nullptr), kStepLost, {"restoredStep", "5"}, {"checkpoint", "newest"},
               {"checkpoints", "newest=5,zz-first=4"});
  float value = 0;
  EXPECT_REASON(back->ReadWeights(HeadTensor::kWeight, 0, 1, &value, std::nullopt, old_epoch), kStepLost);
  EXPECT_OK(back->ReadWeights(HeadTensor::kWeight, 0, 1, &value, std::nullopt, info.epoch));
  // The restarted trainer's own creation attaches.
  spec.initial_step = 0;
  ASSERT_OK_AND_ASSIGN(const HeadRegistry::Created attached, registry_->Create(kName, spec, IfExists::kAttachIfSameSpec));
  EXPECT_EQ(attached.head, back);
  EXPECT_OK(back->Take(info.epoch, {old_epoch}));
  EXPECT_EQ(back->Describe().recovers_epochs, std::vector<Epoch>{old_epoch});
  EXPECT_ERROR(back->Seal({back->Describe().epoch, 9}, int64_t{0}), kStepMismatch, {"openStep", "5"}, {"step", "9"},
               {"checkpoints", "newest=5,zz-first=4"});
  EXPECT_EQ(GetErrorMetadata(back->CheckEpoch(old_epoch)).at("checkpoints"), "newest=5,zz-first=4");
  EXPECT_EQ(ReadWeight(*back), weight);
  DoStep(back);

  const std::shared_ptr<Head> teacher = *registry_->Find({"other", "teacher"});
  EXPECT_EQ(teacher->Describe().state, HeadState::kReady);
  EXPECT_EQ(ReadWeight(*teacher), std::vector<float>(15, 3.0f));
}

TEST_F(HeadComebackTest, ADamagedCheckpointGivesWayToTheNextOlderOne) {
  const std::shared_ptr<Head> head = NewHead();
  for (const char* name : {"c", "a", "b"}) {
    Save(head, name);
    DoStep(head);
  }
  Damage(PathOf("b", "shard-00000-of-00001.safetensors"));
  EXPECT_THAT(Restart(), ElementsAre(Says("a a", "checkpoint b cannot be loaded")));
  ASSERT_EQ(comebacks_[0].skipped.size(), 1u);
  EXPECT_EQ(comebacks_[0].skipped[0].first, "b");
  EXPECT_EQ((*registry_->Find(kName))->Describe().open_step, 1);

  Damage(PathOf("a", "manifest.json"));
  EXPECT_THAT(Restart(), ElementsAre(Says("a c", "the manifest of checkpoint a is damaged", "checkpoint b cannot be loaded")));
  EXPECT_EQ((*registry_->Find(kName))->Describe().open_step, 0);

  ASSERT_OK(memory_.RemoveTree(PathOf("c", "shard-00000-of-00001.safetensors")));
  EXPECT_THAT(Restart(), ElementsAre(Says("a ", "there is no whole checkpoint")));
  EXPECT_REASON(registry_->Find(kName), kHeadNotFound);
  EXPECT_EQ(registry_->size(), 0);

  // The name is free, and a head that was left out can be forgotten.
  EXPECT_OK(registry_->Create(kName, SmallSpec()));
  EXPECT_TRUE(IsLive());
  EXPECT_OK(registry_->Delete(kName, std::nullopt, false, store_.get()));
  EXPECT_TRUE(Restart().empty());
}

TEST_F(HeadComebackTest, DamagedManifestsAloneAreReported) {
  Save(NewHead(), "x");
  Damage(PathOf("x", "manifest.json"));
  EXPECT_THAT(Restart({.max_tenant_memory_bytes = 1 << 20}),
              ElementsAre(Says("a ", "x is damaged", "there is no whole checkpoint")));
  EXPECT_EQ(comebacks_[0].skipped.size(), 1u);
  EXPECT_EQ(registry_->size(), 0);
}

TEST_F(HeadComebackTest, WhatCannotBeCreatedIsLeftOut) {
  for (const char* id : {"a", "b", "c"}) Save(NewHead({"default", id}), "x");
  EXPECT_THAT(Restart({.max_heads = 2}), ElementsAre("a x", "b x", Says("c ", "the maximum is 2")));
  EXPECT_EQ(registry_->size(), 2);
  engine_.control().FailNext("CreateHead", MakeError(ErrorReason::kMemoryBudgetExceeded, "no memory"), 1);
  EXPECT_THAT(Restart(), ElementsAre("a x", Says("b ", "no memory"), "c x"));
  EXPECT_EQ(registry_->size(), 2);
  // An engine that fails while it loads: the head is not left behind half full.
  engine_.control().FailNext("WriteTensor", MakeError(ErrorReason::kEngineFailed, "gone"));
  EXPECT_THAT(Restart(), ElementsAre(Says("a ", "gone"), "b x", "c x"));
  EXPECT_EQ(registry_->size(), 2);
}

TEST_F(HeadComebackTest, HeadsThatAreThereStay) {
  const std::shared_ptr<Head> head = NewHead();
  Save(head, "x");
  DoStep(head);
  EXPECT_THAT(RestoreAll(), ElementsAre(Says("a ", "there already")));
  EXPECT_EQ(*registry_->Find(kName), head);
  EXPECT_EQ(head->Describe().open_step, 1);
  Damage(PathOf("x", "manifest.json"));
  registry_->RestoreAll(*store_);
  EXPECT_EQ(*registry_->Find(kName), head);
}

TEST_F(HeadComebackTest, RestoringStopsWhenItIsCancelled) {
  Save(NewHead(kName), "x");
  Save(NewHead({"default", "other"}), "x");
  Start();
  EXPECT_TRUE(registry_->RestoreAll(*store_, [] { return true; }).empty());
  EXPECT_EQ(registry_->size(), 0);
  int asked = 0;
  EXPECT_EQ(registry_->RestoreAll(*store_, [&] { return ++asked > 1; }).size(), 1u);
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(registry_->size(), 1);
}

TEST_F(HeadComebackTest, DirectoriesThatAreNoHeadsAreReported) {
  Save(NewHead(), "x");
  ASSERT_OK(memory_.Rename(absl::StrCat(kRoot, "/default/a"), absl::StrCat(kRoot, "/default/Upper")));
  EXPECT_THAT(Restart(), ElementsAre(Says("Upper ", "directory must be")));
  EXPECT_EQ(registry_->size(), 0);
  ASSERT_OK(memory_.RemoveTree(kRoot));
  EXPECT_THAT(RestoreAll(), ElementsAre(HasSubstr("cannot be listed")));
}

// ---- new heads under the names of former ones that did not come back -------------------------------------------------

TEST_F(HeadComebackTest, NoHeadIsMadeWhereAFormerOneCannotBeForgotten) {
  Save(NewHead(), "old");
  Start();  // without restoring
  files_.Reset();
  files_.FailAt(0, MakeError(ErrorReason::kInternal, "the disk is gone"));
  EXPECT_REASON(registry_->Create(kName, SmallSpec(), IfExists::kFail, store_.get()), kInternal);
  EXPECT_REASON(registry_->Find(kName), kHeadNotFound);
  EXPECT_EQ(registry_->size(), 0);
  EXPECT_TRUE(IsLive());
  EXPECT_OK(registry_->Create(kName, SmallSpec(), IfExists::kFail, store_.get()));
  EXPECT_FALSE(IsLive());
}

// ---- deleting --------------------------------------------------------------------------------------------------------

TEST_F(HeadComebackTest, AMissingHeadIsDeletedFromTheStore) {
  EXPECT_REASON(registry_->Delete(kName, std::nullopt, true, store_.get()), kHeadNotFound);
  Save(NewHead(), "x");
  Start();  // without restoring
  EXPECT_REASON(registry_->Delete(kName, NewEpoch(), true, store_.get()), kHeadNotFound);
  EXPECT_REASON(registry_->Delete(kName, std::nullopt, true, nullptr), kHeadNotFound);
  EXPECT_TRUE(IsLive());
  files_.OnNextChange([&] {  // a new head of that name waits for it
    EXPECT_REASON(registry_->Create(kName, SmallSpec(), IfExists::kFail, nullptr, CancelledWait()), kCancelled);
  });
  EXPECT_OK(registry_->Delete(kName, std::nullopt, false, store_.get()));
  EXPECT_FALSE(IsLive());
  EXPECT_REASON(registry_->Delete(kName, std::nullopt, false, store_.get()), kHeadNotFound);
  EXPECT_EQ(registry_->size(), 0);
}

TEST_F(HeadComebackTest, DeletingBreaksWhatKeepsTheHeadAlive) {
  std::weak_ptr<Head> gone;
  bool held = false;
  {
    const std::shared_ptr<Head> head = NewHead();
    gone = head;
    MicroBatchCall call(head, 0, 0, kRowOfToken2);
    call.Held([&held] {
      held = true;
      return std::shared_ptr<const void>(&held, [&held](const void*) { held = false; });
    });
    EXPECT_OK(call.Run(engine_));
    EXPECT_TRUE(held);
  }
  EXPECT_FALSE(gone.expired());
  EXPECT_OK(registry_->Delete(kName, std::nullopt, true, store_.get()));
  EXPECT_FALSE(held);
  EXPECT_TRUE(gone.expired());
}

TEST_F(HeadComebackTest, ASaveThatRunsWhileTheHeadIsDeletedDoesNotBringItBack) {
  const std::shared_ptr<Head> head = NewHead();
  ThreadGate gate;
  engine_.control().during_compute = [&] { gate.Stop(); };
  std::thread computer([&] {
    MicroBatchCall call(head, 0, 0, kRowOfToken2);
    EXPECT_OK(call.ForwardOnly().Run(engine_));
  });
  gate.AwaitStopped();
  // Waits for the computation; finds the head retired or not.
  std::thread saver([&] { head->Save(head->Describe().epoch, *store_, "late", false).IgnoreError(); });
  std::atomic<bool> deleted = false;
  std::atomic<bool> created_anew = false;
  std::thread deleter([&] {
    EXPECT_OK(registry_->Delete(kName, std::nullopt, true, store_.get()));
    deleted = true;
  });
  while (registry_->Find(kName).ok()) std::this_thread::yield();  // decided at once
  // The name is not free yet: a creation waits.
  std::thread creator([&] {
    const absl::StatusOr<HeadRegistry::Created> created = registry_->Create(kName, SmallSpec());
    EXPECT_OK(created);
    EXPECT_NE(created->head, head);
    created_anew = true;
  });
  absl::SleepFor(absl::Milliseconds(10));
  EXPECT_FALSE(deleted);
  EXPECT_FALSE(created_anew);
  EXPECT_REASON(registry_->Find(kName), kHeadNotFound);
  EXPECT_REASON(registry_->Delete(kName, std::nullopt, true, store_.get()), kHeadNotFound);
  gate.Open();
  for (std::thread* thread : {&computer, &saver, &deleter, &creator}) thread->join();
  EXPECT_FALSE(IsLive());
  EXPECT_EQ(registry_->size(), 1);
}

// ---- idle heads ------------------------------------------------------------------------------------------------------

TEST_F(HeadComebackTest, UnusedHeadsExpire) {
  NewHead({"default", "a"});
  NewHead({"default", "b"});
  NewHead({"default", "c"});
  now_ += absl::Seconds(9);
  EXPECT_TRUE(registry_->ExpireIdle(absl::Seconds(10), nullptr, false).empty());
  EXPECT_OK(registry_->Find({"default", "b"}));
  EXPECT_OK(registry_->Create({"default", "c"}, SmallSpec(), IfExists::kAttachIfSameSpec));
  now_ += absl::Seconds(1);
  registry_->ListAll();  // is no use
  registry_->List("default", "", 10);
  const std::vector<HeadName> expired = registry_->ExpireIdle(absl::Seconds(10), nullptr, false);
  ASSERT_EQ(expired.size(), 1u);
  EXPECT_EQ(expired[0].ToString(), "tenants/default/heads/a");
  EXPECT_EQ(registry_->size(), 2);
  now_ += absl::Seconds(9);
  EXPECT_EQ(registry_->ExpireIdle(absl::Seconds(10), nullptr, false).size(), 2u);
  EXPECT_EQ(registry_->size(), 0);
}

TEST_F(HeadComebackTest, IdleHeadsAreSavedFirstIfAsked) {
  const std::shared_ptr<Head> head = NewHead();
  DoStep(head);
  Save(head, "idle-1");  // is replaced
  const std::vector<float> weight = ReadWeight(*head);
  NewHead({"default", "teacher"}, FrozenSpec(), 2);
  now_ += absl::Hours(1);
  EXPECT_EQ(registry_->ExpireIdle(absl::Hours(1), store_.get(), true).size(), 2u);
  EXPECT_FALSE(IsLive());
  const std::shared_ptr<Head> again = NewHead();
  EXPECT_OK(again->Restore(again->Describe().epoch, *store_, "idle-1"));
  EXPECT_EQ(ReadWeight(*again), weight);
  EXPECT_EQ(store_->Read("default", "a", "idle-1")->sequence, 2);
  EXPECT_OK(store_->Read("default", "teacher", "idle-0"));
}

TEST_F(HeadComebackTest, HeadsThatHaveChangedAreSaved) {
  const std::shared_ptr<Head> saved = NewHead();
  Save(saved, "x");
  const std::shared_ptr<Head> changed = NewHead({"default", "b"});
  Save(changed, "x");
  DoStep(changed);
  NewHead({"default", "teacher"}, FrozenSpec(), 2);
  EXPECT_OK(registry_->Create({"default", "loading"}, SmallSpec()));
  const auto names = [&](absl::Time deadline) {
    std::vector<std::string> all;
    for (const auto& [name, status] : registry_->SaveChanged(*store_, "drain", deadline)) {
      all.push_back(absl::StrCat(name.head, status.ok() ? "" : absl::StrCat(" ", ReasonOf(status))));
    }
    return all;
  };
  const absl::Time later = absl::InfiniteFuture();
  EXPECT_EQ(names(absl::InfinitePast()), (std::vector<std::string>{"b DEADLINE_EXCEEDED", "teacher DEADLINE_EXCEEDED"}));
  memory_.set_capacity_bytes(1);
  EXPECT_EQ(names(later), (std::vector<std::string>{"b DISK_FULL", "teacher DISK_FULL"}));
  memory_.set_capacity_bytes(INT64_MAX);
  EXPECT_EQ(names(later), (std::vector<std::string>{"b", "teacher"}));
  EXPECT_TRUE(names(later).empty());
  // A step that is closed changes a head even if its weights stay; so does what a trainer restores.
  EXPECT_OK(changed->DiscardGradient(KeyOf(*changed)));
  EXPECT_OK(saved->Take(std::nullopt, {saved->Describe().epoch}));
  EXPECT_OK(saved->Restore(saved->Describe().epoch, *store_, "x"));
  EXPECT_TRUE(saved->Describe().recovers_epochs.empty());
  EXPECT_EQ(names(later), (std::vector<std::string>{"a", "b"}));
  // A head is saved anew if one of its checkpoints was deleted: it may have been the one that has it.
  ASSERT_TRUE(*store_->Remove("default", "b", "drain"));
  changed->CheckpointRemoved(*store_);
  EXPECT_EQ(names(later), (std::vector<std::string>{"b"}));

  EXPECT_THAT(Restart(), ElementsAre("a drain", "b drain", "teacher drain"));
  EXPECT_EQ((*registry_->Find({"default", "b"}))->Describe().open_step, 2);
  // Brought back, and taken: that is what the checkpoint is.
  const std::shared_ptr<Head> back = *registry_->Find(kName);
  EXPECT_TRUE(names(later).empty());
  EXPECT_OK(back->Take(back->Describe().epoch));
  EXPECT_TRUE(names(later).empty());
}

TEST_F(HeadComebackTest, AHeadThatIsBeingSetCostsNoOtherItsSave) {
  const std::shared_ptr<Head> busy = NewHead();
  NewHead({"default", "b"});
  NewHead({"default", "c"});
  ThreadGate gate;
  std::thread setter([&] { SetSlowly(*busy, gate); });
  gate.AwaitStopped();
  const auto outcomes = registry_->SaveChanged(*store_, "drain", observability::MonotonicNow() + absl::Milliseconds(200));
  ASSERT_EQ(outcomes.size(), 3u);
  EXPECT_EQ(outcomes[0].first.head, "b");
  EXPECT_OK(outcomes[0].second);
  EXPECT_EQ(outcomes[1].first.head, "c");
  EXPECT_OK(outcomes[1].second);
  EXPECT_EQ(outcomes[2].first.head, "a");
  EXPECT_REASON(outcomes[2].second, kDeadlineExceeded);
  std::thread freer([&] {
    absl::SleepFor(absl::Milliseconds(30));
    gate.Open();
  });
  // One that becomes free in time is saved, too.
  const auto rest = registry_->SaveChanged(*store_, "drain", absl::InfiniteFuture());
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_EQ(rest[0].first.head, "a");
  EXPECT_OK(rest[0].second);
  freer.join();
  setter.join();
}

TEST_F(HeadComebackTest, AMicroBatchCanWaitForWeightsBeforeItIsSubmitted) {
  const std::shared_ptr<Head> head = NewHead();
  const std::shared_ptr<Head> other = NewHead({"default", "b"});
  MicroBatchCall call(head, 0, 0, kRowOfToken2);
  call.ForwardOnly().term().head_epoch.reset();  // allowed in any epoch
  EXPECT_FALSE(IsBehindFiles(call.submission()));
  EXPECT_OK(AwaitFiles(call.submission(), {}));
  ThreadGate gate;
  std::thread setter([&] { SetSlowly(*head, gate); });
  gate.AwaitStopped();
  EXPECT_TRUE(IsBehindFiles(call.submission()));
  EXPECT_FALSE(IsBehindFiles(MicroBatchCall(other, 0, 0, kRowOfToken2).submission()));
  const WaitLimits short_wait = {observability::MonotonicNow() + absl::Milliseconds(1)};
  EXPECT_REASON(AwaitFiles(call.submission(), short_wait), kDeadlineExceeded);
  EXPECT_REASON(AwaitFiles(call.submission(), CancelledWait()), kCancelled);
  // What is refused anyway does not wait.
  MicroBatchCall wrong(head, 5, 0, kRowOfToken2);
  EXPECT_REASON(AwaitFiles(wrong.submission(), AsLongAsItTakes()), kStepMismatch);
  std::atomic<bool> has_waited = false;
  std::thread waiter([&] {
    EXPECT_OK(AwaitFiles(call.submission(), AsLongAsItTakes()));
    has_waited = true;
  });
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_FALSE(has_waited);
  gate.Open();
  setter.join();
  waiter.join();
  EXPECT_FALSE(IsBehindFiles(call.submission()));
  EXPECT_OK(call.Run(engine_));
}

TEST_F(HeadComebackTest, RestoringReportsThatSumsMayDiffer) {
  Save(NewHead(), "x");
  EXPECT_THAT(Restart(), ElementsAre("a x"));
  FakeEngine other(2);
  registry_ = std::make_unique<HeadRegistry>(other, RegistryLimits(), HeadLimits());
  EXPECT_THAT(RestoreAll(), ElementsAre(Says("a x", "sums may differ")));
  registry_.reset();  // before its engine
}

TEST_F(HeadComebackTest, AHeadsMemoryIsFreeBeforeItsNameIs) {
  std::weak_ptr<Head> gone;
  {
    const std::shared_ptr<Head> head = NewHead();
    Save(head, "x");
    gone = head;
  }
  bool has_looked = false;
  files_.OnNextChange([&] {
    has_looked = true;
    EXPECT_TRUE(gone.expired());
  });
  EXPECT_OK(registry_->Delete(kName, std::nullopt, true, store_.get()));
  EXPECT_TRUE(has_looked);
}

TEST_F(HeadComebackTest, AHeadThatIsUsedOrChangesWhileItIsSavedStays) {
  // The changes are made by calls that have named it long ago.
  const std::shared_ptr<Head> head = NewHead();
  const std::function<void()> uses[] = {[&] { EXPECT_OK(registry_->Find(kName)); },
                                        [&] { EXPECT_OK(head->DiscardGradient(KeyOf(*head))); },
                                        [&] { EXPECT_OK(head->Take(std::nullopt)); }};
  for (const auto& use : uses) {
    now_ += absl::Hours(1);
    files_.OnNextChange(use);
    EXPECT_TRUE(registry_->ExpireIdle(absl::Hours(1), store_.get(), true).empty());
    EXPECT_OK(head->CheckEpoch(head->Describe().epoch));
  }
  EXPECT_OK(store_->Read("default", "a", "idle-0"));
  EXPECT_EQ(*registry_->Find(kName), head);
}

TEST_F(HeadComebackTest, AHeadThatIsDeletedWhileItIsSavedIsDroppedOnce) {
  NewHead();
  now_ += absl::Hours(1);
  std::thread deleter;
  files_.OnNextChange([&] {
    deleter = std::thread([&] { EXPECT_OK(registry_->Delete(kName, std::nullopt, true, store_.get())); });
    while (registry_->Find(kName).ok()) std::this_thread::yield();
  });
  EXPECT_TRUE(registry_->ExpireIdle(absl::Hours(1), store_.get(), true).empty());
  deleter.join();
  EXPECT_EQ(registry_->size(), 0);
  EXPECT_FALSE(IsLive());
}

}  // namespace
}  // namespace headwater::heads
