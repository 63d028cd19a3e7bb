#include "server/checkpoint/checkpoint_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "faulty_file_system.h"
#include "server/model_files/xxh3.h"
#include "temporary_directory.h"
#include "tests/unit/server/heads/head_test_util.h"

namespace headwater::checkpoint {
namespace {

using headwater::testing::FakeEngine;
using headwater::testing::FaultyFileSystem;
using headwater::testing::ReadFile;
using headwater::testing::SmallSpec;
using headwater::testing::TemporaryDirectory;
using headwater::testing::WriteFile;

using LiveNames = std::vector<std::pair<std::string, std::string>>;

constexpr HeadTensor kTensors[] = {HeadTensor::kWeight,        HeadTensor::kBias,          HeadTensor::kMasterWeight,
                                   HeadTensor::kMasterBias,    HeadTensor::kMoment1Weight, HeadTensor::kMoment1Bias,
                                   HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias};

HeadSpec FullSpec() {
  HeadSpec spec = SmallSpec(11, 3);
  spec.data_type = DataType::kBFloat16;
  spec.has_bias = true;
  spec.transform.softcap = 30.25;
  spec.optimizer = AdamWSpec{.beta1 = 0.91, .weight_decay = 0.1};
  spec.initial_step = 4;
  return spec;
}

// Bytes of every tensor of a head.
std::vector<std::string> Contents(const EngineHead& head) {
  std::vector<std::string> contents;
  for (const HeadTensor tensor : kTensors) {
    const int64_t count = head.ElementCount(tensor);
    std::string& bytes = contents.emplace_back(static_cast<size_t>(count * ElementBytes(head.TensorDataType(tensor))), '\0');
    if (count > 0) EXPECT_OK(head.ReadTensor(tensor, 0, count, bytes.data()));
  }
  return contents;
}

// Sets every fp32 tensor to numbers that depend on `seed`; the stored weights follow from the masters.
void Fill(EngineHead& head, int seed) {
  for (const HeadTensor tensor : {HeadTensor::kMasterWeight, HeadTensor::kMasterBias, HeadTensor::kMoment1Weight,
                                  HeadTensor::kMoment1Bias, HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias}) {
    std::vector<float> values(static_cast<size_t>(head.ElementCount(tensor)));
    for (size_t i = 0; i < values.size(); ++i) values[i] = 1.001f * static_cast<float>(seed + 17 * static_cast<int>(i));
    if (!values.empty()) EXPECT_OK(head.WriteTensor(tensor, 0, static_cast<int64_t>(values.size()), values.data()));
    seed += 1000;
  }
}

class CheckpointStoreTest : public ::testing::Test {
 protected:
  std::unique_ptr<EngineHead> NewHead(const HeadSpec& spec, int32_t shards, int seed) {
    std::unique_ptr<FakeEngine>& engine = engines_.emplace_back(std::make_unique<FakeEngine>(shards));
    std::unique_ptr<EngineHead> head = *engine->CreateHead(spec);
    if (seed != 0) Fill(*head, seed);
    return head;
  }
  std::unique_ptr<CheckpointStore> OpenStore(int64_t keep = 0) {
    absl::StatusOr<std::unique_ptr<CheckpointStore>> store = CheckpointStore::Open(root(), files_, keep);
    EXPECT_OK(store);
    return *std::move(store);
  }
  static CheckpointInfo Info(const std::string& name, const HeadSpec& spec, int64_t step) {
    CheckpointInfo info;
    info.name = name;
    info.spec = spec;
    info.step = step;
    info.update_count = step - 1;
    return info;
  }
  absl::StatusOr<int64_t> Save(CheckpointStore& store, const EngineHead& head, const std::string& name, bool overwrite = false,
                               int64_t step = 7) {
    return store.Save("default", "student", Info(name, head.spec(), step), head, overwrite);
  }
  absl::StatusOr<int64_t> Save(const std::string& name, bool overwrite = false, int64_t step = 7) {
    return Save(*store_, *head_, name, overwrite, step);
  }
  // Saves five times from each of four threads, under the name that `name_of(thread, repeat)` gives.
  void SaveFromManyThreads(CheckpointStore& store, const std::function<std::string(int, int)>& name_of) {
    std::vector<std::unique_ptr<EngineHead>> heads;
    for (int i = 0; i < 4; ++i) heads.push_back(NewHead(FullSpec(), i + 1, 10 * i + 1));
    headwater::testing::RunThreads(4, [&](int64_t i) {
      for (int repeat = 0; repeat < 5; ++repeat) {
        EXPECT_OK(Save(store, *heads[static_cast<size_t>(i)], name_of(i, repeat), true));
      }
    });
  }
  // Changes a checkpoint's manifest, checksum and all.
  void RewriteManifest(const std::string& checkpoint, const std::function<void(nlohmann::json&)>& change) {
    const std::string path = head_directory() + "/" + checkpoint + "/manifest.json";
    nlohmann::json document = nlohmann::json::parse(ReadFile(path));
    change(document["manifest"]);
    const std::string text = document["manifest"].dump();
    model_files::Xxh3Hasher hasher;
    hasher.Update(text.data(), static_cast<int64_t>(text.size()));
    document["checksum"] = hasher.HexDigest();
    WriteFile(path, document.dump());
  }
  std::string root() const { return directory_.path() + "/deep/root"; }
  std::string head_directory() const { return root() + "/default/student"; }
  // Names in the head's directory, but for the mark of a live head.
  std::vector<std::string> Entries() const {
    absl::StatusOr<std::vector<std::string>> names = PosixFileSystem().ListDirectory(head_directory());
    if (!names.ok()) return {};
    std::erase(*names, ".live");
    return *names;
  }
  static bool IsLive(const CheckpointStore& store) {
    const auto heads = store.LiveHeads();
    EXPECT_OK(heads);
    return heads.ok() && *heads == LiveNames{{"default", "student"}};
  }
  // Names of the checkpoints that the head may come back from.
  static std::vector<std::string> Comebacks(const CheckpointStore& store) {
    const auto comebacks = store.FindComebacks("default", "student");
    EXPECT_OK(comebacks);
    std::vector<std::string> names;
    if (comebacks.ok()) {
      for (const CheckpointInfo& info : comebacks->newest_first) names.push_back(info.name);
    }
    return names;
  }

  std::vector<std::unique_ptr<FakeEngine>> engines_;
  TemporaryDirectory directory_;
  FaultyFileSystem files_;
  std::unique_ptr<CheckpointStore> store_ = OpenStore();
  const std::unique_ptr<EngineHead> head_ = NewHead(FullSpec(), 2, 9);
};

TEST(CheckpointNameTest, NamesCannotLeaveTheirPlace) {
  for (const std::string name : {"a", "step-1", "A.b_c-9", "x..y"}) EXPECT_TRUE(IsValidCheckpointName(name)) << name;
  EXPECT_TRUE(IsValidCheckpointName(std::string(128, 'a')));
  for (const std::string name : {"", ".", "..", ".tmp-1", "a/b", "/a", "a.", "-a", "a b", "a\n", "\xc3\xa9"}) {
    EXPECT_FALSE(IsValidCheckpointName(name)) << name;
  }
  EXPECT_FALSE(IsValidCheckpointName(std::string(129, 'a')));
  EXPECT_FALSE(IsValidCheckpointName(std::string("a\0b", 3)));
}

TEST_F(CheckpointStoreTest, WrongNamesAreRefusedEverywhere) {
  EXPECT_REASON(Save("../x"), kInvalidName);
  EXPECT_REASON(store_->Save("..", "student", Info("x", head_->spec(), 0), *head_, false), kInvalidName);
  EXPECT_REASON(store_->Save("default", "a/b", Info("x", head_->spec(), 0), *head_, false), kInvalidName);
  EXPECT_REASON(store_->Read("default", "student", ".."), kInvalidName);
  EXPECT_REASON(store_->Load("default", "..", "x", *head_), kInvalidName);
  EXPECT_REASON(store_->ListNewestFirst("default", ""), kInvalidName);
  EXPECT_REASON(store_->FindComebacks("default", "../student"), kInvalidName);
  EXPECT_REASON(store_->Forget("..", "student"), kInvalidName);
}

TEST_F(CheckpointStoreTest, RoundTripsAcrossShardCounts) {
  for (const HeadSpec& spec : {FullSpec(), SmallSpec()}) {
    for (const int32_t from : {1, 2, 3, 7}) {
      const std::unique_ptr<EngineHead> saved = NewHead(spec, from, 100 * from);
      const std::string name = "from-" + std::to_string(from);
      ASSERT_OK_AND_ASSIGN(const int64_t bytes, Save(*store_, *saved, name, true));
      int64_t on_disk = 0;
      for (const auto& entry : std::filesystem::directory_iterator(head_directory() + "/" + name)) {
        on_disk += static_cast<int64_t>(entry.file_size());
      }
      EXPECT_EQ(bytes, on_disk);
      for (const int32_t to : {1, 2, 3, 7}) {
        const std::unique_ptr<EngineHead> loaded = NewHead(spec, to, 5);
        ASSERT_OK_AND_ASSIGN(const CheckpointInfo info, store_->Load("default", "student", name, *loaded));
        EXPECT_EQ(info.step, 7);
        EXPECT_EQ(info.update_count, 6);
        EXPECT_EQ(info.spec.optimizer, spec.optimizer);
        EXPECT_EQ(info.total_bytes, on_disk);
        EXPECT_EQ(Contents(*loaded), Contents(*saved)) << from << " to " << to;
      }
    }
  }
}

TEST_F(CheckpointStoreTest, StagingSlotsAndInitialStepDoNotMatterOtherFieldsDo) {
  ASSERT_OK(Save("x"));
  HeadSpec spec = FullSpec();
  spec.staging_slots = 5;
  spec.initial_step = 900;
  EXPECT_OK(store_->Load("default", "student", "x", *NewHead(spec, 1, 3)));
  const std::function<void(HeadSpec&)> changes[] = {
      [](HeadSpec& s) { s.vocab_size = 12; },
      [](HeadSpec& s) { s.hidden_size = 4; },
      [](HeadSpec& s) { s.has_bias = false; },
      [](HeadSpec& s) { s.data_type = DataType::kFloat32; },
      [](HeadSpec& s) { s.optimizer = SgdSpec(); },
      [](HeadSpec& s) { s.optimizer = AdamWSpec(); },
      [](HeadSpec& s) { s.transform.softcap.reset(); },
      [](HeadSpec& s) { s.transform.logit_scale = 2; },
      [](HeadSpec& s) { s.transform.valid_vocab_size = 3; },
  };
  for (const auto& change : changes) {
    spec = FullSpec();
    change(spec);
    const std::unique_ptr<EngineHead> other = NewHead(spec, 1, 3);
    const std::vector<std::string> before = Contents(*other);
    EXPECT_REASON(store_->Load("default", "student", "x", *other), kCheckpointSpecMismatch);
    EXPECT_EQ(Contents(*other), before);
  }
}

TEST_F(CheckpointStoreTest, ReadsAndLists) {
  EXPECT_TRUE(store_->ListNewestFirst("default", "student")->newest_first.empty());
  EXPECT_REASON(store_->Read("default", "student", "x"), kCheckpointNotFound);
  EXPECT_REASON(store_->Load("default", "student", "x", *head_), kCheckpointNotFound);
  ASSERT_OK(Save("b", false, 3));
  ASSERT_OK(Save("a", false, 5));
  WriteFile(head_directory() + "/broken/manifest.json", "{}");
  std::filesystem::create_directories(head_directory() + "/no-manifest");
  ASSERT_OK_AND_ASSIGN(const CheckpointStore::Catalogue list, store_->ListNewestFirst("default", "student"));
  ASSERT_EQ(list.newest_first.size(), 2u);
  EXPECT_EQ(list.newest_first[0].name, "a");
  EXPECT_EQ(list.newest_first[0].step, 5);
  EXPECT_EQ(list.newest_first[0].spec, FullSpec());
  EXPECT_EQ(list.newest_first[0].sequence, 2);
  EXPECT_EQ(list.newest_first[1].name, "b");
  EXPECT_EQ(list.newest_first[1].sequence, 1);
  WriteFile(head_directory() + "/a-file", "is not a checkpoint");
  EXPECT_EQ(store_->ListNewestFirst("default", "student")->newest_first.size(), 2u);
  EXPECT_EQ(store_->ListNewestFirst("default", "student")->damaged, (std::vector<std::string>{"broken", "no-manifest"}));
  EXPECT_REASON(store_->Read("default", "student", "broken"), kFileCorrupt);
  EXPECT_REASON(store_->Read("default", "student", "no-manifest"), kCheckpointNotFound);
}

TEST_F(CheckpointStoreTest, ExistingOnesAreReplacedOnlyIfAsked) {
  const std::unique_ptr<EngineHead> second = NewHead(FullSpec(), 3, 99);
  ASSERT_OK(Save("x"));
  EXPECT_REASON(Save(*store_, *second, "x"), kCheckpointAlreadyExists);
  const std::unique_ptr<EngineHead> loaded = NewHead(FullSpec(), 1, 1);
  ASSERT_OK(store_->Load("default", "student", "x", *loaded));
  EXPECT_EQ(Contents(*loaded), Contents(*head_));
  ASSERT_OK(Save(*store_, *second, "x", true));
  ASSERT_OK(store_->Load("default", "student", "x", *loaded));
  EXPECT_EQ(Contents(*loaded), Contents(*second));
  files_.DisableExchange();
  ASSERT_OK(Save("x", true));
  ASSERT_OK(store_->Load("default", "student", "x", *loaded));
  EXPECT_EQ(Contents(*loaded), Contents(*head_));
  EXPECT_EQ(Entries(), std::vector<std::string>{"x"});
}

TEST_F(CheckpointStoreTest, EverythingIsSyncedBeforeTheRename) {
  files_.Reset();
  ASSERT_OK(Save("x"));
  std::vector<std::string> order;
  for (const std::string& change : files_.changes()) {
    if (absl::StartsWith(change, "sync") || absl::StartsWith(change, "rename"))
      order.push_back(change.substr(0, change.find(".tmp-")));
  }
  EXPECT_EQ(order, (std::vector<std::string>{"syncdir root", "syncdir default", "sync shard-00000-of-00002.safetensors",
                                             "sync shard-00001-of-00002.safetensors", "sync manifest.json", "syncdir ",
                                             // the mark of a live head, then the checkpoint
                                             "sync ", "rename ", "syncdir student", "rename ", "syncdir student"}));
  files_.Reset();
  ASSERT_OK(Save("y"));  // the mark is there
  EXPECT_EQ(std::count(files_.changes().begin(), files_.changes().end(), "syncdir student"), 1);
}

TEST_F(CheckpointStoreTest, EveryDamageIsFoundBeforeAnythingIsWritten) {
  ASSERT_OK(Save("x"));
  const std::unique_ptr<EngineHead> head = NewHead(FullSpec(), 3, 55);
  const std::vector<std::string> before = Contents(*head);
  const std::string shard = head_directory() + "/x/shard-00001-of-00002.safetensors";
  const std::string manifest = head_directory() + "/x/manifest.json";
  const auto damaged = [&](const std::string& path, const std::string& bytes) {
    const std::string good = ReadFile(path);
    WriteFile(path, bytes);
    const std::string reason = headwater::testing::ReasonOf(store_->Load("default", "student", "x", *head));
    EXPECT_EQ(Contents(*head), before);
    WriteFile(path, good);
    return reason;
  };
  const std::string shard_bytes = ReadFile(shard);
  for (size_t i = 0; i < shard_bytes.size(); i += 7) {
    std::string flipped = shard_bytes;
    flipped[i] = static_cast<char>(flipped[i] ^ 0x10);
    EXPECT_EQ(damaged(shard, flipped), "CHECKSUM_MISMATCH") << i;
  }
  for (const size_t length : {size_t{0}, size_t{5}, shard_bytes.size() - 1}) {
    EXPECT_EQ(damaged(shard, shard_bytes.substr(0, length)), "FILE_CORRUPT");
  }
  EXPECT_EQ(damaged(shard, shard_bytes + "x"), "FILE_CORRUPT");
  const std::string manifest_bytes = ReadFile(manifest);
  for (size_t i = 0; i < manifest_bytes.size(); ++i) {
    std::string flipped = manifest_bytes;
    flipped[i] = static_cast<char>(flipped[i] ^ 0x01);
    const std::string reason = damaged(manifest, flipped);
    // A blank that becomes another character is an error; nothing that is read differently passes.
    EXPECT_EQ(reason, "FILE_CORRUPT") << i;
  }
  for (size_t length = 0; length + 1 < manifest_bytes.size(); length += 11) {
    EXPECT_EQ(damaged(manifest, manifest_bytes.substr(0, length)), "FILE_CORRUPT") << length;
  }
  std::filesystem::remove(shard);
  EXPECT_REASON(store_->Load("default", "student", "x", *head), kFileCorrupt);
  std::filesystem::create_symlink("/etc/passwd", shard);
  EXPECT_REASON(store_->Load("default", "student", "x", *head), kFileCorrupt);
  std::filesystem::remove(manifest);
  EXPECT_REASON(store_->Load("default", "student", "x", *head), kCheckpointNotFound);
  EXPECT_EQ(Contents(*head), before);
}

TEST_F(CheckpointStoreTest, AnEngineThatFailsIsReportedAsSuch) {
  ASSERT_OK(Save("x"));
  engines_.back()->control().FailNext("WriteTensor", MakeError(ErrorReason::kEngineFailed, "gone"), 1);
  EXPECT_REASON(store_->Load("default", "student", "x", *head_), kEngineFailed);
  engines_.back()->control().FailNext("WriteTensor", MakeError(ErrorReason::kInvalidField, "no"), 1);
  EXPECT_REASON(store_->Load("default", "student", "x", *head_), kInternal);
  engines_.back()->control().FailNext("ReadTensor", MakeError(ErrorReason::kEngineFailed, "gone"), 1);
  EXPECT_REASON(Save("y"), kEngineFailed);
  EXPECT_EQ(Entries(), std::vector<std::string>{"x"});
}

// Whether a new checkpoint is written (or an old one replaced) with or without an atomic exchange.
struct WayOfSaving {
  const char* name;
  bool replaces;
  bool exchanges;
};

class CheckpointCrashTest : public CheckpointStoreTest, public ::testing::WithParamInterface<WayOfSaving> {
 protected:
  void SetUp() override {
    if (!GetParam().exchanges) files_.DisableExchange();
    old_ = NewHead(FullSpec(), 2, 9);
    new_ = NewHead(FullSpec(), 3, 99);
    Begin();
  }
  // What there is before the save that fails.
  void Begin() {
    files_.Reset();
    std::filesystem::remove_all(root() + "/default");
    if (GetParam().replaces) {
      ASSERT_OK(Save(*store_, *old_, "x"));
    }
    files_.Reset();
  }
  absl::StatusOr<int64_t> SaveNew() { return Save(*store_, *new_, "x", true); }
  // "old", "new", "none": which version is there, whole.
  std::string Version() {
    const std::unique_ptr<EngineHead> head = NewHead(FullSpec(), 1, 1);
    const absl::StatusOr<CheckpointInfo> info = store_->Load("default", "student", "x", *head);
    if (!info.ok()) return headwater::testing::ReasonOf(info) == "CHECKPOINT_NOT_FOUND" ? "none" : "damaged";
    return Contents(*head) == Contents(*old_) ? "old" : Contents(*head) == Contents(*new_) ? "new" : "mixed";
  }

  std::unique_ptr<EngineHead> old_, new_;
};

TEST_P(CheckpointCrashTest, OneWholeVersionSurvivesACrashAtEveryPoint) {
  ASSERT_OK(SaveNew());
  const int change_count = static_cast<int>(files_.changes().size());
  ASSERT_GT(change_count, 20);
  const std::string before = GetParam().replaces ? "old" : "none";
  int with_new = 0;
  for (int point = 0; point < change_count; ++point) {
    Begin();
    files_.CrashAt(point);
    const absl::StatusOr<int64_t> saved = SaveNew();
    const std::string at = point < static_cast<int>(files_.changes().size()) ? files_.changes()[static_cast<size_t>(point)] : "";
    files_.Reset();
    store_ = OpenStore();  // as the next process does
    const std::string version = Version();
    EXPECT_TRUE(version == before || version == "new") << version << " after a crash at " << point << ": " << at;
    if (saved.ok()) {
      EXPECT_EQ(version, "new") << at;
    }
    if (version == "new") ++with_new;
    const std::vector<std::string> entries = Entries();
    EXPECT_EQ(entries, version == "none" ? std::vector<std::string>() : std::vector<std::string>{"x"}) << at;
    // What is there brings its head back; a head without it does not come back.
    EXPECT_EQ(IsLive(*store_), version != "none") << at;
    EXPECT_EQ(Comebacks(*store_), entries) << at;
    // And it can be saved again.
    EXPECT_OK(SaveNew());
    EXPECT_EQ(Version(), "new");
  }
  EXPECT_GT(with_new, 0);
}

TEST_P(CheckpointCrashTest, AFullDiskLeavesWhatWasThere) {
  ASSERT_OK(SaveNew());
  const std::vector<std::string> changes = files_.changes();
  const std::string before = GetParam().replaces ? "old" : "none";
  const absl::Status full = MakeError(ErrorReason::kDiskFull, "no space left");
  for (size_t point = 0; point < changes.size(); ++point) {
    if (absl::StartsWith(changes[point], "remove")) continue;  // needs no space
    Begin();
    files_.FailAt(static_cast<int>(point), full);
    EXPECT_REASON(SaveNew(), kDiskFull) << changes[point];
    files_.Reset();
    if (!GetParam().exchanges && GetParam().replaces && changes[point] == "syncdir student") {
      store_ = OpenStore();  // both versions are whole there; the next start decides
      EXPECT_EQ(Version(), "new");
      continue;
    }
    EXPECT_EQ(Version(), before) << changes[point];
    EXPECT_EQ(IsLive(*store_), before != "none") << changes[point];
    EXPECT_EQ(Entries(), before == "none" ? std::vector<std::string>() : std::vector<std::string>{"x"}) << changes[point];
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, CheckpointCrashTest,
                         ::testing::Values(WayOfSaving{"New", false, true}, WayOfSaving{"Exchange", true, true},
                                           WayOfSaving{"TwoRenames", true, false}),
                         [](const auto& param_info) { return param_info.param.name; });

// ---- removing --------------------------------------------------------------------------------------------------------

TEST_F(CheckpointStoreTest, TheNewestOfASeriesStay) {
  for (const char* name : {"step-1", "step-2", "step-3"}) ASSERT_OK(Save(name));
  EXPECT_EQ(Entries().size(), 3u);  // without a bound all stay

  store_ = OpenStore(2);
  for (const char* name : {"best", "4", "run-7.final", "step", "other-1"}) ASSERT_OK(Save(name));
  EXPECT_EQ(Entries().size(), 8u);  // each is of another series
  ASSERT_OK(Save("step-4"));
  EXPECT_EQ(Entries(), (std::vector<std::string>{"4", "best", "other-1", "run-7.final", "step", "step-3", "step-4"}));
  // By age, not by number; one that is replaced is new again.
  ASSERT_OK(Save("step-3", true, 3));
  ASSERT_OK(Save("step-1", false, 1));
  EXPECT_EQ(Entries(), (std::vector<std::string>{"4", "best", "other-1", "run-7.final", "step", "step-1", "step-3"}));
  const std::string steps = store_->Steps("default", "student");
  EXPECT_TRUE(absl::StartsWith(steps, "step-1=1,step-3=3,other-1=7,")) << steps;
  EXPECT_EQ(store_->Steps("default", "nobody"), "");
  // Whole entries, and not more than an error can carry.
  for (const char letter : {'a', 'b', 'c', 'd', 'e'})
    ASSERT_OK(store_->Save("a", "long", Info(std::string(128, letter), head_->spec(), 7), *head_, false));
  EXPECT_EQ(store_->Steps("a", "long"),
            absl::StrCat(std::string(128, 'e'), "=7,", std::string(128, 'd'), "=7,", std::string(128, 'c'), "=7"));
  EXPECT_ERROR(store_->Load("default", "student", "step-4", *head_), kCheckpointNotFound, {"checkpoints", steps});
}

TEST_F(CheckpointStoreTest, OtherHeadsAndFormerOnesKeepTheirs) {
  store_ = OpenStore(1);
  ASSERT_OK(store_->Save("default", "other", Info("step-1", head_->spec(), 1), *head_, false));
  ASSERT_OK(Save("step-1"));
  EXPECT_OK(store_->Forget("default", "student"));
  ASSERT_OK(Save("step-2"));
  ASSERT_OK(Save("step-3"));
  EXPECT_EQ(Entries(), (std::vector<std::string>{"step-1", "step-3"}));
  EXPECT_EQ(store_->ListNewestFirst("default", "other")->newest_first.size(), 1u);
}

TEST_F(CheckpointStoreTest, ASaveStaysThoughAnotherServerHasNumberedHigher) {
  store_ = OpenStore(1);
  ASSERT_OK(Save("step-1"));
  const std::unique_ptr<CheckpointStore> other = OpenStore(1);
  for (const char* name : {"step-2", "step-3", "step-4"}) ASSERT_OK(Save(*other, *head_, name));
  ASSERT_OK(Save("step-5"));
  EXPECT_THAT(Entries(), ::testing::Contains("step-5"));
}

TEST_F(CheckpointStoreTest, WhatIsBeyondTheNumberToKeepGoesBeforeAnotherOneIsWritten) {
  const std::unique_ptr<EngineHead> head = NewHead(FullSpec(), 1, 9);
  for (const char* name : {"best", "step-1", "step-2", "step-3", "step-4"}) ASSERT_OK(Save(*store_, *head, name));
  store_ = OpenStore(2);
  files_.Reset();
  ASSERT_OK(Save(*store_, *head, "step-5"));
  EXPECT_EQ(Entries(), (std::vector<std::string>{"best", "step-4", "step-5"}));
  std::vector<std::string> order;
  for (const std::string& change : files_.changes()) {
    if (absl::StartsWith(change, "rename step-")) order.push_back(change.substr(0, change.find(" .tmp-")));
    if (absl::StartsWith(change, "create shard")) order.push_back("write");
  }
  EXPECT_EQ(order, (std::vector<std::string>{"rename step-2", "rename step-1", "write", "rename step-3"}));
}

TEST_F(CheckpointStoreTest, AMarkThatIsDamagedSparesFormerHeads) {
  store_ = OpenStore(1);
  ASSERT_OK(Save("step-1"));
  ASSERT_OK(store_->Forget("default", "student"));
  ASSERT_OK(Save("step-2"));
  WriteFile(head_directory() + "/.live", "{");
  store_ = OpenStore(1);
  ASSERT_OK(Save("step-3"));
  EXPECT_EQ(Entries(), (std::vector<std::string>{"step-1", "step-3"}));
  EXPECT_EQ(store_->Read("default", "student", "step-3")->first_sequence, 2);
}

// The new one is durable before an old one goes; an old one is whole or gone.
TEST_F(CheckpointStoreTest, RemovingSurvivesACrashAndAFullDiskAtEveryPoint) {
  const auto begin = [&] {
    files_.Reset();
    std::filesystem::remove_all(root() + "/default");
    store_ = OpenStore(2);
    for (const char* name : {"step-1", "step-2"}) EXPECT_OK(Save(name));
    files_.Reset();
  };
  begin();
  ASSERT_OK(Save("step-3"));
  const std::vector<std::string> changes = files_.changes();
  int removed = 0;
  int kept_three = 0;
  for (const bool crashes : {true, false}) {
    for (int point = 0; point < static_cast<int>(changes.size()); ++point) {
      SCOPED_TRACE(absl::StrCat(crashes ? "crash at " : "disk full at ", point, ": ", changes[static_cast<size_t>(point)]));
      begin();
      if (crashes) {
        files_.CrashAt(point);
      } else {
        files_.FailAt(point, MakeError(ErrorReason::kDiskFull, "no space left"));
      }
      const absl::StatusOr<int64_t> saved = Save("step-3");
      files_.Reset();
      store_ = OpenStore(2);
      const std::vector<std::string> names = Comebacks(*store_);
      EXPECT_EQ(names.size(), Entries().size());
      for (const std::string& name : names) EXPECT_OK(store_->Load("default", "student", name, *head_));
      EXPECT_NE(std::find(names.begin(), names.end(), "step-2"), names.end());
      const bool has_new = names.front() == "step-3";
      if (saved.ok()) {
        EXPECT_TRUE(has_new);
      } else {
        EXPECT_EQ(names.size(), has_new ? 3u : 2u);
      }
      if (!has_new) {
        EXPECT_EQ(names, (std::vector<std::string>{"step-2", "step-1"}));
      }
      removed += names.size() == 2 && has_new;
      kept_three += names.size() == 3;
      // What stayed because it could not be removed goes with the next one.
      ASSERT_OK(Save("step-4"));
      EXPECT_EQ(Comebacks(*store_).size(), 2u);
    }
  }
  EXPECT_GT(removed, 0);
  EXPECT_GT(kept_three, 0);
}

// ---- heads that come back --------------------------------------------------------------------------------------------

TEST_F(CheckpointStoreTest, CheckpointsAreNumberedInTheOrderOfSaving) {
  for (const char* name : {"c", "a", "b"}) ASSERT_OK(Save(name));
  EXPECT_EQ(Comebacks(*store_), (std::vector<std::string>{"b", "a", "c"}));
  store_ = OpenStore();  // numbers go on
  ASSERT_OK(Save("a", true));
  EXPECT_EQ(Comebacks(*store_), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(store_->Read("default", "student", "a")->sequence, 4);
  // Checkpoints that are removed by hand: the next one still counts as the head's own.
  for (const char* name : {"a", "b", "c"}) std::filesystem::remove_all(head_directory() + "/" + name);
  EXPECT_FALSE(IsLive(*store_));
  store_ = OpenStore();
  ASSERT_OK(Save("d"));
  EXPECT_EQ(Comebacks(*store_), std::vector<std::string>{"d"});
}

TEST_F(CheckpointStoreTest, SavedHeadsAreLiveUntilTheyAreForgotten) {
  EXPECT_TRUE(store_->LiveHeads()->empty());
  EXPECT_OK(store_->Forget("default", "student"));  // of which nothing is known
  ASSERT_OK(store_->Save("b", "x", Info("1", head_->spec(), 1), *head_, false));
  ASSERT_OK(store_->Save("a", "y", Info("1", head_->spec(), 1), *head_, false));
  ASSERT_OK(store_->Save("a", "x", Info("1", head_->spec(), 1), *head_, false));
  EXPECT_EQ(*store_->LiveHeads(), (LiveNames{{"a", "x"}, {"a", "y"}, {"b", "x"}}));
  EXPECT_OK(store_->Forget("a", "x"));
  EXPECT_OK(store_->Forget("a", "x"));
  EXPECT_EQ(*OpenStore()->LiveHeads(), (LiveNames{{"a", "y"}, {"b", "x"}}));
  EXPECT_EQ(store_->ListNewestFirst("a", "x")->newest_first.size(), 1u);  // stays
  EXPECT_TRUE(store_->FindComebacks("a", "x")->empty());
  ASSERT_OK(store_->Save("a", "x", Info("2", head_->spec(), 1), *head_, false));
  EXPECT_EQ(*OpenStore()->LiveHeads(), (LiveNames{{"a", "x"}, {"a", "y"}, {"b", "x"}}));
}

TEST_F(CheckpointStoreTest, AHeadDoesNotComeBackFromWhatAnEarlierOneLeft) {
  ASSERT_OK(Save("old-1"));
  ASSERT_OK(Save("old-2"));
  EXPECT_OK(store_->Forget("default", "student"));
  for (const bool restart : {false, true}) {
    if (restart) store_ = OpenStore();
    ASSERT_OK(Save("new", true));
    EXPECT_EQ(Comebacks(*store_), std::vector<std::string>{"new"}) << restart;
    EXPECT_TRUE(IsLive(*store_));
    EXPECT_OK(store_->Forget("default", "student"));
    EXPECT_FALSE(IsLive(*store_));
    EXPECT_FALSE(IsLive(*OpenStore()));
  }
  // A head whose first save fails leaves a mark without a checkpoint of its own.
  files_.Reset();
  ASSERT_OK(Save("probe"));
  const size_t changes = files_.changes().size();
  EXPECT_OK(store_->Forget("default", "student"));
  int marks = 0;
  for (size_t point = 0; point < changes; ++point) {
    files_.Reset();
    files_.FailAt(static_cast<int>(point), MakeError(ErrorReason::kDiskFull, "no space left"));
    if (Save("failed").ok()) std::filesystem::remove_all(head_directory() + "/failed");  // a removal that may fail
    const bool has_mark = std::filesystem::exists(head_directory() + "/.live");
    EXPECT_FALSE(IsLive(*store_)) << point;
    files_.Reset();
    if (has_mark && marks++ == 0) {
      EXPECT_TRUE(store_->Continue("default", "student", *store_->Read("default", "student", "old-2")));
      EXPECT_EQ(Comebacks(*store_), (std::vector<std::string>{"old-2", "old-1"}));
      ASSERT_OK(Save("newest"));
      EXPECT_EQ(Comebacks(*OpenStore()), (std::vector<std::string>{"newest", "old-2", "old-1"}));
    }
    EXPECT_OK(store_->Forget("default", "student"));
  }
  EXPECT_GT(marks, 0);
}

TEST_F(CheckpointStoreTest, ADamagedMarkStillCounts) {
  ASSERT_OK(Save("x"));
  EXPECT_EQ(ReadFile(head_directory() + "/.live"), "{\"first_sequence\":1}");
  for (const std::string& bytes :
       {std::string(), std::string("{"), std::string("{}"), std::string("{\"first_sequence\":-1}"), std::string(10000, '{')}) {
    WriteFile(head_directory() + "/.live", bytes);
    store_ = OpenStore();
    EXPECT_EQ(Comebacks(*store_), std::vector<std::string>{"x"}) << bytes.substr(0, 30);
    ASSERT_OK(Save("y", true));
    EXPECT_EQ(Comebacks(*store_), (std::vector<std::string>{"y", "x"}));
    std::filesystem::remove_all(head_directory() + "/y");
  }
  // One that claims to be in the far future leaves nothing to come back from, and does not overflow.
  WriteFile(head_directory() + "/.live", "{\"first_sequence\":9223372036854775807}");
  store_ = OpenStore();
  EXPECT_FALSE(IsLive(*store_));
  for (int i = 0; i < 2; ++i) {
    ASSERT_OK(Save("y", true));
    EXPECT_EQ(Comebacks(*store_), std::vector<std::string>{"y"});
  }
}

TEST_F(CheckpointStoreTest, ManifestsOfOlderVersionsAreRead) {
  ASSERT_OK(Save("x"));
  const auto rewrite = [this](const std::function<void(nlohmann::json&)>& change) { RewriteManifest("x", change); };
  EXPECT_EQ(store_->Read("default", "student", "x")->spec.staging_slots, 2);
  rewrite([](nlohmann::json& manifest) { manifest["int8_teacher"] = true; });
  EXPECT_TRUE(store_->Read("default", "student", "x")->spec.int8_teacher);
  for (const nlohmann::json& wrong : {nlohmann::json(-1), nlohmann::json("1"), nlohmann::json(int64_t{1} << 31)}) {
    rewrite([&](nlohmann::json& manifest) { manifest["staging_slots"] = wrong; });
    EXPECT_REASON(store_->Read("default", "student", "x"), kFileCorrupt) << wrong;
  }
  rewrite([](nlohmann::json& manifest) {
    EXPECT_EQ(manifest.erase("int8_teacher"), 1u);
    EXPECT_EQ(manifest.erase("staging_slots"), 1u);
    EXPECT_EQ(manifest.erase("sequence"), 1u);
    EXPECT_EQ(manifest.erase("first_sequence"), 1u);
  });
  ASSERT_OK_AND_ASSIGN(const CheckpointInfo info, store_->Read("default", "student", "x"));
  EXPECT_EQ(info.sequence, 0);
  EXPECT_EQ(info.first_sequence, 0);
  EXPECT_FALSE(store_->Continue("default", "student", info));
  EXPECT_EQ(info.spec.staging_slots, 0);
  const std::unique_ptr<EngineHead> loaded = NewHead(FullSpec(), 1, 3);
  ASSERT_OK(store_->Load("default", "student", "x", *loaded));
  EXPECT_EQ(Contents(*loaded), Contents(*head_));
}

TEST_F(CheckpointStoreTest, CheckpointsOfOlderVersionsBelongToARunByTheirNumbers) {
  ASSERT_OK(Save("step-1"));
  ASSERT_OK(store_->Forget("default", "student"));
  for (const char* name : {"step-2", "step-3"}) ASSERT_OK(Save(name));
  for (const char* name : {"step-1", "step-2", "step-3"}) {
    RewriteManifest(name, [](nlohmann::json& manifest) { manifest.erase("first_sequence"); });
  }
  store_ = OpenStore(2);
  EXPECT_EQ(Comebacks(*store_), (std::vector<std::string>{"step-3", "step-2"}));
  ASSERT_OK(Save("step-4"));
  EXPECT_EQ(Entries(), (std::vector<std::string>{"step-1", "step-3", "step-4"}));
  EXPECT_EQ(Comebacks(*store_), (std::vector<std::string>{"step-4", "step-3"}));
}

TEST_F(CheckpointStoreTest, ForgettingSurvivesACrashAtEveryPoint) {
  ASSERT_OK(Save("x"));
  files_.Reset();
  ASSERT_OK(store_->Forget("default", "student"));
  const int change_count = static_cast<int>(files_.changes().size());
  EXPECT_EQ(files_.changes(), (std::vector<std::string>{"remove .live", "syncdir student"}));
  for (int point = 0; point <= change_count; ++point) {
    files_.Reset();
    ASSERT_OK(Save("x", true));
    EXPECT_TRUE(IsLive(*store_));
    files_.Reset();
    files_.CrashAt(point);
    const absl::Status forgotten = store_->Forget("default", "student");
    EXPECT_EQ(forgotten.ok(), point == change_count);
    files_.Reset();
    store_ = OpenStore();
    if (forgotten.ok()) {
      EXPECT_FALSE(IsLive(*store_));
    }
    EXPECT_EQ(Entries(), std::vector<std::string>{"x"});
    EXPECT_OK(store_->Forget("default", "student"));
    EXPECT_FALSE(IsLive(*store_));
  }
}

TEST_F(CheckpointStoreTest, ADirectoryThatCannotBeMadeIsNamed) {
  const std::string file = directory_.path() + "/file";
  ASSERT_OK_AND_ASSIGN(auto opened, PosixFileSystem().CreateFile(file));
  ASSERT_OK(opened->SyncAndClose());
  const auto store = CheckpointStore::Open(file + "/root/deep");
  ASSERT_FALSE(store.ok());
  const std::string message(store.status().message());
  EXPECT_NE(message.find(file + "/root: making a directory failed"), std::string::npos) << message;
}

TEST_F(CheckpointStoreTest, WhatLooksLeftOverStaysWhileAnotherHasTheDirectoryOpen) {
  const auto open = [this] {
    absl::StatusOr<std::unique_ptr<CheckpointStore>> store = CheckpointStore::Open(root());
    EXPECT_OK(store);
    return *std::move(store);
  };
  std::unique_ptr<CheckpointStore> first = open();
  ASSERT_OK(Save(*first, *head_, "step-1"));
  // As in the middle of a save, and between the two renames of a replacement.
  ASSERT_OK(PosixFileSystem().CreateDirectory(head_directory() + "/.tmp-1"));
  ASSERT_OK(PosixFileSystem().CreateDirectory(head_directory() + "/.old-step-2"));
  const std::vector<std::string> entries = {".old-step-2", ".tmp-1", "step-1"};
  ASSERT_EQ(Entries(), entries);
  const std::unique_ptr<CheckpointStore> second = open();
  EXPECT_EQ(Entries(), entries);
  EXPECT_EQ(Comebacks(*second), std::vector<std::string>{"step-1"});
  // The one who has it may go in any order; then it is the next one's.
  first.reset();
  const std::unique_ptr<CheckpointStore> third = open();
  EXPECT_EQ(Entries(), (std::vector<std::string>{"step-1", "step-2"}));
}

TEST_F(CheckpointStoreTest, ADirectoryThatCannotBeHeldServesNevertheless) {
  const std::string other = directory_.path() + "/other";
  ASSERT_OK(PosixFileSystem().CreateDirectory(other));
  ASSERT_OK(PosixFileSystem().CreateDirectory(other + "/.lock"));  // which no file can take the place of
  ASSERT_OK_AND_ASSIGN(store_, CheckpointStore::Open(other));
  EXPECT_OK(Save("step-1"));
}

TEST_F(CheckpointStoreTest, ConcurrentSavesOfManyNames) {
  const std::unique_ptr<CheckpointStore> store = *CheckpointStore::Open(root());
  SaveFromManyThreads(*store, [](int thread, int repeat) { return absl::StrCat(thread, "-", repeat); });
  // All count, and no two have one number.
  ASSERT_OK_AND_ASSIGN(const auto comebacks, store->FindComebacks("default", "student"));
  ASSERT_EQ(comebacks.newest_first.size(), 20u);
  for (size_t i = 0; i < 20; ++i) EXPECT_EQ(comebacks.newest_first[i].sequence, 20 - static_cast<int64_t>(i));
}

TEST_F(CheckpointStoreTest, ConcurrentSavesOfOneName) {
  const std::unique_ptr<CheckpointStore> store = *CheckpointStore::Open(root());
  SaveFromManyThreads(*store, [](int, int) { return "x"; });
  const std::unique_ptr<EngineHead> head = NewHead(FullSpec(), 1, 1000);
  EXPECT_OK(store->Load("default", "student", "x", *head));
  EXPECT_EQ(Entries(), std::vector<std::string>{"x"});
}

TEST(Xxh3HasherTest, IsTheCanonicalForm) {
  // Reference values of xxHash's specification: XXH3-128 of nothing.
  model_files::Xxh3Hasher hasher;
  EXPECT_EQ(hasher.HexDigest(), "99aa06d3014798d86001c324468d497f");
  const std::string text(100000, 'a');
  hasher.Update(text.data(), static_cast<int64_t>(text.size()));
  model_files::Xxh3Hasher in_parts;
  for (size_t i = 0; i < text.size(); i += 1000) in_parts.Update(text.data() + i, 1000);
  EXPECT_EQ(in_parts.Digest(), hasher.Digest());
  EXPECT_EQ(hasher.Digest().size(), 16u);
}

}  // namespace
}  // namespace headwater::checkpoint
