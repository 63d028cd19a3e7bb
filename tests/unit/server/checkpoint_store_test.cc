#include "server/checkpoint/checkpoint_store.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "absl/strings/match.h"
#include "faulty_file_system.h"
#include "head_test_util.h"
#include "server/checkpoint/xxh3.h"
#include "temporary_directory.h"

namespace headwater::checkpoint {
namespace {

using headwater::testing::FakeEngine;
using headwater::testing::FaultyFileSystem;
using headwater::testing::ReadFile;
using headwater::testing::SmallSpec;
using headwater::testing::TemporaryDirectory;
using headwater::testing::WriteFile;

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
  std::unique_ptr<CheckpointStore> OpenStore() {
    absl::StatusOr<std::unique_ptr<CheckpointStore>> store = CheckpointStore::Open(root(), files_);
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
  std::string root() const { return directory_.path() + "/deep/root"; }
  std::string head_directory() const { return root() + "/default/student"; }
  // Names in the head's directory.
  std::vector<std::string> Entries() const {
    absl::StatusOr<std::vector<std::string>> names = PosixFileSystem().ListDirectory(head_directory());
    return names.ok() ? *names : std::vector<std::string>();
  }

  std::vector<std::unique_ptr<FakeEngine>> engines_;
  TemporaryDirectory directory_;
  FaultyFileSystem files_;
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
  const std::unique_ptr<CheckpointStore> store = OpenStore();
  const std::unique_ptr<EngineHead> head = NewHead(SmallSpec(), 1, 1);
  EXPECT_REASON(Save(*store, *head, "../x"), kInvalidName);
  EXPECT_REASON(store->Save("..", "student", Info("x", head->spec(), 0), *head, false), kInvalidName);
  EXPECT_REASON(store->Save("default", "a/b", Info("x", head->spec(), 0), *head, false), kInvalidName);
  EXPECT_REASON(store->Read("default", "student", ".."), kInvalidName);
  EXPECT_REASON(store->Load("default", "..", "x", *head), kInvalidName);
  EXPECT_REASON(store->List("default", ""), kInvalidName);
}

TEST_F(CheckpointStoreTest, RoundTripsAcrossShardCounts) {
  const std::unique_ptr<CheckpointStore> store = OpenStore();
  for (const HeadSpec& spec : {FullSpec(), SmallSpec()}) {
    for (const int32_t from : {1, 2, 3, 7}) {
      const std::unique_ptr<EngineHead> saved = NewHead(spec, from, 100 * from);
      const std::string name = "from-" + std::to_string(from);
      const absl::StatusOr<int64_t> bytes = Save(*store, *saved, name, true);
      ASSERT_OK(bytes);
      int64_t on_disk = 0;
      for (const auto& entry : std::filesystem::directory_iterator(head_directory() + "/" + name)) {
        on_disk += static_cast<int64_t>(entry.file_size());
      }
      EXPECT_EQ(*bytes, on_disk);
      for (const int32_t to : {1, 2, 3, 7}) {
        const std::unique_ptr<EngineHead> loaded = NewHead(spec, to, 5);
        const absl::StatusOr<CheckpointInfo> info = store->Load("default", "student", name, *loaded);
        ASSERT_OK(info);
        EXPECT_EQ(info->step, 7);
        EXPECT_EQ(info->update_count, 6);
        EXPECT_EQ(info->spec.optimizer, spec.optimizer);
        EXPECT_EQ(info->total_bytes, on_disk);
        EXPECT_EQ(Contents(*loaded), Contents(*saved)) << from << " to " << to;
      }
    }
  }
}

TEST_F(CheckpointStoreTest, StagingSlotsDoNotMatterOtherFieldsDo) {
  const std::unique_ptr<CheckpointStore> store = OpenStore();
  const std::unique_ptr<EngineHead> saved = NewHead(FullSpec(), 2, 9);
  ASSERT_OK(Save(*store, *saved, "x"));
  HeadSpec spec = FullSpec();
  spec.staging_slots = 5;
  EXPECT_OK(store->Load("default", "student", "x", *NewHead(spec, 1, 3)));
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
    EXPECT_REASON(store->Load("default", "student", "x", *other), kCheckpointSpecMismatch);
    EXPECT_EQ(Contents(*other), before);
  }
}

TEST_F(CheckpointStoreTest, ReadsAndLists) {
  const std::unique_ptr<CheckpointStore> store = OpenStore();
  EXPECT_TRUE(store->List("default", "student")->empty());
  EXPECT_REASON(store->Read("default", "student", "x"), kCheckpointNotFound);
  const std::unique_ptr<EngineHead> head = NewHead(FullSpec(), 2, 9);
  EXPECT_REASON(store->Load("default", "student", "x", *head), kCheckpointNotFound);
  ASSERT_OK(Save(*store, *head, "b", false, 3));
  ASSERT_OK(Save(*store, *head, "a", false, 5));
  WriteFile(head_directory() + "/broken/manifest.json", "{}");
  std::filesystem::create_directories(head_directory() + "/no-manifest");
  const absl::StatusOr<std::vector<CheckpointInfo>> list = store->List("default", "student");
  ASSERT_OK(list);
  ASSERT_EQ(list->size(), 2u);
  EXPECT_EQ((*list)[0].name, "a");
  EXPECT_EQ((*list)[0].step, 5);
  EXPECT_EQ((*list)[0].spec, [] {
    HeadSpec spec = FullSpec();
    spec.staging_slots = 0;  // not part of a checkpoint
    return spec;
  }());
  EXPECT_EQ((*list)[1].name, "b");
  EXPECT_REASON(store->Read("default", "student", "broken"), kFileCorrupt);
  EXPECT_REASON(store->Read("default", "student", "no-manifest"), kCheckpointNotFound);
}

TEST_F(CheckpointStoreTest, ExistingOnesAreReplacedOnlyIfAsked) {
  const std::unique_ptr<CheckpointStore> store = OpenStore();
  const std::unique_ptr<EngineHead> first = NewHead(FullSpec(), 2, 9);
  const std::unique_ptr<EngineHead> second = NewHead(FullSpec(), 3, 99);
  ASSERT_OK(Save(*store, *first, "x"));
  EXPECT_REASON(Save(*store, *second, "x"), kCheckpointAlreadyExists);
  const std::unique_ptr<EngineHead> loaded = NewHead(FullSpec(), 1, 1);
  ASSERT_OK(store->Load("default", "student", "x", *loaded));
  EXPECT_EQ(Contents(*loaded), Contents(*first));
  ASSERT_OK(Save(*store, *second, "x", true));
  ASSERT_OK(store->Load("default", "student", "x", *loaded));
  EXPECT_EQ(Contents(*loaded), Contents(*second));
  files_.DisableExchange();
  ASSERT_OK(Save(*store, *first, "x", true));
  ASSERT_OK(store->Load("default", "student", "x", *loaded));
  EXPECT_EQ(Contents(*loaded), Contents(*first));
  EXPECT_EQ(Entries(), std::vector<std::string>{"x"});
}

TEST_F(CheckpointStoreTest, EverythingIsSyncedBeforeTheRename) {
  const std::unique_ptr<CheckpointStore> store = OpenStore();
  const std::unique_ptr<EngineHead> head = NewHead(FullSpec(), 2, 9);
  files_.Reset();
  ASSERT_OK(Save(*store, *head, "x"));
  std::vector<std::string> order;
  for (const std::string& change : files_.changes()) {
    if (absl::StartsWith(change, "sync") || absl::StartsWith(change, "rename"))
      order.push_back(change.substr(0, change.find(".tmp-")));
  }
  EXPECT_EQ(order, (std::vector<std::string>{"syncdir root", "syncdir default", "sync shard-00000-of-00002.safetensors",
                                             "sync shard-00001-of-00002.safetensors", "sync manifest.json", "syncdir ", "rename ",
                                             "syncdir student"}));
}

TEST_F(CheckpointStoreTest, EveryDamageIsFoundBeforeAnythingIsWritten) {
  const std::unique_ptr<CheckpointStore> store = OpenStore();
  const std::unique_ptr<EngineHead> saved = NewHead(FullSpec(), 2, 9);
  ASSERT_OK(Save(*store, *saved, "x"));
  const std::unique_ptr<EngineHead> head = NewHead(FullSpec(), 3, 55);
  const std::vector<std::string> before = Contents(*head);
  const std::string shard = head_directory() + "/x/shard-00001-of-00002.safetensors";
  const std::string manifest = head_directory() + "/x/manifest.json";
  const auto damaged = [&](const std::string& path, const std::string& bytes) {
    const std::string good = ReadFile(path);
    WriteFile(path, bytes);
    const std::string reason = headwater::testing::ReasonOf(store->Load("default", "student", "x", *head));
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
  EXPECT_REASON(store->Load("default", "student", "x", *head), kFileCorrupt);
  std::filesystem::create_symlink("/etc/passwd", shard);
  EXPECT_REASON(store->Load("default", "student", "x", *head), kFileCorrupt);
  std::filesystem::remove(manifest);
  EXPECT_REASON(store->Load("default", "student", "x", *head), kCheckpointNotFound);
  EXPECT_EQ(Contents(*head), before);
}

TEST_F(CheckpointStoreTest, AnEngineThatFailsIsReportedAsSuch) {
  const std::unique_ptr<CheckpointStore> store = OpenStore();
  const std::unique_ptr<EngineHead> head = NewHead(FullSpec(), 2, 9);
  ASSERT_OK(Save(*store, *head, "x"));
  engines_.back()->control().FailNext("WriteTensor", MakeError(ErrorReason::kEngineFailed, "gone"), 1);
  EXPECT_REASON(store->Load("default", "student", "x", *head), kEngineFailed);
  engines_.back()->control().FailNext("WriteTensor", MakeError(ErrorReason::kInvalidField, "no"), 1);
  EXPECT_REASON(store->Load("default", "student", "x", *head), kInternal);
  engines_.back()->control().FailNext("ReadTensor", MakeError(ErrorReason::kEngineFailed, "gone"), 1);
  EXPECT_REASON(Save(*store, *head, "y"), kEngineFailed);
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
    store_ = OpenStore();
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
  std::unique_ptr<CheckpointStore> store_;
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
    EXPECT_EQ(Entries(), before == "none" ? std::vector<std::string>() : std::vector<std::string>{"x"}) << changes[point];
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, CheckpointCrashTest,
                         ::testing::Values(WayOfSaving{"New", false, true}, WayOfSaving{"Exchange", true, true},
                                           WayOfSaving{"TwoRenames", true, false}),
                         [](const auto& param_info) { return param_info.param.name; });

TEST_F(CheckpointStoreTest, ConcurrentSavesOfOneName) {
  const std::unique_ptr<CheckpointStore> store = *CheckpointStore::Open(root());
  std::vector<std::unique_ptr<EngineHead>> heads;
  for (int i = 0; i < 4; ++i) heads.push_back(NewHead(FullSpec(), i + 1, 10 * i + 1));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int repeat = 0; repeat < 5; ++repeat) EXPECT_OK(Save(*store, *heads[static_cast<size_t>(i)], "x", true));
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::unique_ptr<EngineHead> head = NewHead(FullSpec(), 1, 1000);
  EXPECT_OK(store->Load("default", "student", "x", *head));
  EXPECT_EQ(Entries(), std::vector<std::string>{"x"});
}

TEST(Xxh3HasherTest, IsTheCanonicalForm) {
  // Reference values of xxHash's specification: XXH3-128 of nothing.
  Xxh3Hasher hasher;
  EXPECT_EQ(hasher.HexDigest(), "99aa06d3014798d86001c324468d497f");
  const std::string text(100000, 'a');
  hasher.Update(text.data(), static_cast<int64_t>(text.size()));
  Xxh3Hasher in_parts;
  for (size_t i = 0; i < text.size(); i += 1000) in_parts.Update(text.data() + i, 1000);
  EXPECT_EQ(in_parts.Digest(), hasher.Digest());
  EXPECT_EQ(hasher.Digest().size(), 16u);
}

}  // namespace
}  // namespace headwater::checkpoint
