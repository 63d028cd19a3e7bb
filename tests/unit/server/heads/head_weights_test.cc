// Head's weights: set, read, saved, restored.
#include <gtest/gtest.h>

#include <cstring>

#include "head_test_util.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/checkpoint/manifest.h"
#include "server/heads/head.h"
#include "server/model_files/xxh3.h"
#include "tests/unit/server/temporary_directory.h"

namespace headwater::heads {
namespace {

using checkpoint::CheckpointStore;
using headwater::testing::RoundToBFloat16;
using headwater::testing::TemporaryDirectory;

std::string Xxh3(const void* data, size_t bytes) {
  model_files::Xxh3Hasher hasher;
  hasher.Update(data, static_cast<int64_t>(bytes));
  return hasher.Digest();
}

class HeadWeightsTest : public ::testing::Test {
 protected:
  std::shared_ptr<Head> NewHead(const HeadSpec& spec, const std::string& id = "student") {
    absl::StatusOr<std::shared_ptr<Head>> head = Head::Create({kDefaultTenant, id}, spec, engine_, HeadLimits(), TestSequencer());
    EXPECT_OK(head);
    return *head;
  }
  absl::Status Set(Head& head, HeadTensor tensor, const std::vector<float>& values) {
    return head.SetTensor(head.Describe().epoch, tensor, DataType::kFloat32, values.data(), static_cast<int64_t>(values.size() * 4))
        .status();
  }
  absl::Status Submit(const std::shared_ptr<Head>& head, int64_t micro_batch) {
    return MicroBatchCall(head, *head->Describe().open_step, micro_batch, kRowOfToken2).Run(engine_).status();
  }

  FakeEngine engine_{2};
  const std::vector<float> weight_ = std::vector<float>(15, 1.5f);
  const std::vector<float> bias_ = std::vector<float>(5, 0.25f);
};

TEST_F(HeadWeightsTest, FirstWeightsLeaveWhatTheTakerHasWorkedUnder) {
  const std::vector<Epoch> worked_under = {Epoch{1}, Epoch{2}};
  const std::shared_ptr<Head> head = NewHead(SmallSpec());
  ASSERT_OK(head->Take(std::nullopt, worked_under));
  EXPECT_REASON(head->Take(Epoch{9}, {Epoch{3}}), kEpochFenced);
  ASSERT_OK(Set(*head, HeadTensor::kWeight, weight_));
  EXPECT_EQ(head->Describe().recovers_epochs, worked_under);
  ASSERT_OK(Set(*head, HeadTensor::kWeight, weight_));  // begins another run
  EXPECT_TRUE(head->Describe().recovers_epochs.empty());
}

TEST_F(HeadWeightsTest, LoadingUntilEveryTensorIsThere) {
  const std::shared_ptr<Head> head = NewHead(SpecWith(&HeadSpec::has_bias, true));
  EXPECT_EQ(head->Describe().state, HeadState::kLoading);
  EXPECT_EQ(head->Describe().weight_version, 0);
  EXPECT_TRUE(head->Describe().weight_checksum.empty());
  const Epoch epoch = head->Describe().epoch;
  EXPECT_REASON(Submit(head, 0), kWeightsNotLoaded);
  float value;
  EXPECT_REASON(head->ReadWeights(HeadTensor::kWeight, 0, 1, &value, std::nullopt), kWeightsNotLoaded);
  EXPECT_OK(head->GetSteps(epoch));
  ASSERT_OK(Set(*head, HeadTensor::kBias, bias_));
  EXPECT_ERROR(Submit(head, 0), kWeightsNotLoaded, {"missing", "weight"});
  ASSERT_OK(Set(*head, HeadTensor::kWeight, weight_));
  EXPECT_EQ(head->Describe().state, HeadState::kReady);
  EXPECT_EQ(head->Describe().epoch, epoch);  // nothing was there that could be continued
  EXPECT_EQ(head->Describe().weight_version, 2);
  EXPECT_EQ(head->Describe().weight_checksum, Xxh3(weight_.data(), 60));
  EXPECT_OK(Submit(head, 0));
  EXPECT_OK(head->ReadWeights(HeadTensor::kBias, 4, 1, &value, 2));
  EXPECT_EQ(value, 0.25f);
  EXPECT_REASON(head->ReadWeights(HeadTensor::kBias, 4, 1, &value, 1), kWeightVersionMismatch);
  EXPECT_REASON(head->ReadWeights(HeadTensor::kBias, 4, 2, &value, 2), kChunkOutOfRange);
  EXPECT_REASON(head->ReadWeights(HeadTensor::kGradWeight, 0, 1, &value, 2), kInvalidField);
  EXPECT_OK(head->ReadWeights(HeadTensor::kBias, 4, 1, &value, 2, epoch));
  EXPECT_REASON(head->ReadWeights(HeadTensor::kBias, 4, 1, &value, 2, NewEpoch()), kEpochFenced);
}

TEST_F(HeadWeightsTest, ElementsBesideATensorAreRefused) {
  const std::shared_ptr<Head> head = MakeReadyHead(engine_, SmallSpec());
  std::vector<float> values(15);
  const auto read = [&](int64_t start, int64_t count) {
    return head->ReadWeights(HeadTensor::kWeight, start, count, values.data(), std::nullopt);
  };
  for (const auto& [start, count] :
       std::vector<std::pair<int64_t, int64_t>>{{-1, 1}, {0, -1}, {0, 16}, {15, 1}, {1, 15}, {16, 0}}) {
    EXPECT_REASON(read(start, count), kChunkOutOfRange) << start << " " << count;
  }
  EXPECT_OK(read(0, 15));
  EXPECT_OK(read(15, 0));
}

TEST_F(HeadWeightsTest, IsUnsavedSinceItsFirstChange) {
  const std::shared_ptr<Head> head = MakeReadyHead(engine_, SmallSpec());
  const std::optional<absl::Time> first = head->Describe().unsaved_since;
  ASSERT_TRUE(first.has_value());
  ASSERT_OK(Set(*head, HeadTensor::kWeight, weight_));
  EXPECT_EQ(head->Describe().unsaved_since, first);
}

TEST_F(HeadWeightsTest, WhatSettingRefuses) {
  const std::shared_ptr<Head> head = MakeReadyHead(engine_, SmallSpec());
  const HeadInfo before = head->Describe();
  const auto set = [&](const Epoch& epoch, HeadTensor tensor, DataType type, int64_t bytes) {
    return head->SetTensor(epoch, tensor, type, weight_.data(), bytes);
  };
  EXPECT_REASON(set(NewEpoch(), HeadTensor::kWeight, DataType::kFloat32, 60), kEpochFenced);
  EXPECT_REASON(set(before.epoch, HeadTensor::kWeight, DataType::kFloat32, 56), kDataLengthMismatch);
  EXPECT_REASON(set(before.epoch, HeadTensor::kWeight, DataType::kBFloat16, 30), kDataTypeMismatch);
  EXPECT_REASON(set(before.epoch, HeadTensor::kBias, DataType::kFloat32, 20), kInvalidField);
  EXPECT_REASON(set(before.epoch, HeadTensor::kGradWeight, DataType::kFloat32, 60), kInvalidField);
  EXPECT_REASON(head->SetTensors(before.epoch, {}), kMissingField);
  const TensorUpdate update = {HeadTensor::kWeight, DataType::kFloat32, nullptr};
  EXPECT_REASON(head->SetTensors(before.epoch, {update, update}), kInvalidField);
  EXPECT_EQ(head->Describe().epoch, before.epoch);
  EXPECT_EQ(head->Describe().weight_version, before.weight_version);
}

TEST_F(HeadWeightsTest, Fp32GoesToTheMaster) {
  HeadSpec spec = SpecWith(&HeadSpec::data_type, DataType::kBFloat16);
  const std::vector<float> fine(15, 1.001f);
  const float rounded = RoundToBFloat16(1.001f);
  for (const bool has_optimizer : {true, false}) {
    spec.optimizer = has_optimizer ? OptimizerSpec(SgdSpec()) : OptimizerSpec();
    const std::shared_ptr<Head> head = NewHead(spec);
    ASSERT_OK(Set(*head, HeadTensor::kWeight, fine));
    EXPECT_EQ(ReadWeight(*head), std::vector<float>(15, has_optimizer ? 1.001f : rounded));
    std::vector<uint16_t> stored(15);
    ASSERT_OK(head->ReadWeights(HeadTensor::kWeight, 0, 15, stored.data(), std::nullopt));
    uint32_t bits;
    std::memcpy(&bits, &rounded, 4);
    EXPECT_EQ(stored, std::vector<uint16_t>(15, static_cast<uint16_t>(bits >> 16)));
    // The checksum is of what is stored.
    EXPECT_EQ(head->Describe().weight_checksum, Xxh3(stored.data(), 30));
    // In the storage type it is kept as it is.
    ASSERT_OK(head->SetTensor(head->Describe().epoch, HeadTensor::kWeight, DataType::kBFloat16, stored.data(), 30));
    EXPECT_EQ(ReadWeight(*head), std::vector<float>(15, rounded));
  }
}

TEST_F(HeadWeightsTest, LargeTensorsComeInPieces) {
  const int64_t width = 1 << 12;
  HeadSpec spec = SmallSpec(600, width);  // 9.4 MiB: two pieces
  spec.has_bias = true;
  const std::shared_ptr<Head> head = NewHead(spec);
  int64_t next = 0;
  int pieces = 0;
  TensorUpdate weight = {HeadTensor::kWeight, DataType::kFloat32, [&](int64_t start, int64_t count, void* out) {
                           EXPECT_EQ(start, next % (600 * width));
                           EXPECT_LE(count * 4, checkpoint::kPieceBytes);
                           next += count;
                           ++pieces;
                           for (int64_t i = 0; i < count; ++i) static_cast<float*>(out)[i] = static_cast<float>((start + i) % 1001);
                           return absl::OkStatus();
                         }};
  ASSERT_OK(head->SetTensors(head->Describe().epoch, {Filled(HeadTensor::kBias, 3), weight}));
  EXPECT_EQ(next, 2 * 600 * width);  // read through once before
  EXPECT_EQ(pieces, 4);
  EXPECT_EQ(head->Describe().state, HeadState::kReady);
  EXPECT_EQ(head->Describe().weight_version, 1);
  float value;
  ASSERT_OK(head->ReadWeights(HeadTensor::kWeight, 600 * width - 1, 1, &value, std::nullopt));
  EXPECT_EQ(value, static_cast<float>((600 * width - 1) % 1001));
}

// Whatever of it cannot be read: all of it is read before anything is written.
TEST_F(HeadWeightsTest, ASourceThatFailsLaterLeavesTheHeadAsItWas) {
  HeadSpec spec = SmallSpec(600, 1 << 12);  // two pieces
  spec.has_bias = true;
  const std::shared_ptr<Head> ready = MakeReadyHead(engine_, spec, "ready");
  const std::shared_ptr<Head> loading = NewHead(spec, "loading");
  ASSERT_OK(Set(*loading, HeadTensor::kBias, std::vector<float>(600, 2.0f)));
  const absl::Status corrupt = MakeError(ErrorReason::kFileCorrupt, "the file ends early");
  const TensorUpdate whole = Filled(HeadTensor::kWeight, 3);
  const TensorUpdate ends_early =
      Filled(HeadTensor::kWeight, 3, [&](int64_t start) { return start > 0 ? corrupt : absl::OkStatus(); });
  const TensorUpdate no_bias = Filled(HeadTensor::kBias, 3, [&](int64_t) { return corrupt; });
  const std::vector<float> weight = ReadWeight(*ready);
  const int writes = engine_.control().CountOf("WriteTensor");
  for (const std::shared_ptr<Head>& head : {ready, loading}) {
    const HeadInfo before = head->Describe();
    EXPECT_REASON(head->SetTensors(before.epoch, {ends_early}), kFileCorrupt);
    EXPECT_REASON(head->SetTensors(before.epoch, {whole, no_bias}), kFileCorrupt);
    EXPECT_EQ(head->Describe().state, before.state);
    EXPECT_EQ(head->Describe().epoch, before.epoch);
    EXPECT_EQ(head->Describe().weight_version, before.weight_version);
  }
  EXPECT_EQ(engine_.control().CountOf("WriteTensor"), writes);
  EXPECT_EQ(ReadWeight(*ready), weight);
  // The bias of the one that is LOADING is still there.
  EXPECT_OK(loading->SetTensors(loading->Describe().epoch, {whole}));
  EXPECT_EQ(loading->Describe().state, HeadState::kReady);
}

TEST_F(HeadWeightsTest, AFencedCallReadsNothingAndSetsNothing) {
  const std::shared_ptr<Head> head = MakeReadyHead(engine_, SmallSpec());
  int reads = 0;
  const TensorUpdate taken_meanwhile = Filled(HeadTensor::kWeight, 3, [&](int64_t) {
    ++reads;
    return head->Take(std::nullopt).status();
  });
  const std::vector<float> weight = ReadWeight(*head);
  EXPECT_REASON(head->SetTensors(NewEpoch(), {taken_meanwhile}), kEpochFenced);
  EXPECT_EQ(reads, 0);
  EXPECT_REASON(head->SetTensors(head->Describe().epoch, {taken_meanwhile}), kEpochFenced);
  EXPECT_EQ(reads, 1);
  EXPECT_EQ(ReadWeight(*head), weight);
}

TEST_F(HeadWeightsTest, ASourceThatChangesBehindItsReaderLosesTheHeadAndSaysSo) {
  const HeadSpec spec = SmallSpec(600, 1 << 12);  // two pieces
  const absl::Status corrupt = MakeError(ErrorReason::kFileCorrupt, "the file ends early");
  int begun = 0;
  const TensorUpdate cut_meanwhile = Filled(HeadTensor::kWeight, 3, [&](int64_t start) {
    begun += start == 0;
    return begun == 2 && start > 0 ? corrupt : absl::OkStatus();
  });
  const std::shared_ptr<Head> ready = MakeReadyHead(engine_, spec, "ready");
  const absl::Status lost = ready->SetTensors(ready->Describe().epoch, {cut_meanwhile}).status();
  EXPECT_REASON(lost, kEngineFailed);
  EXPECT_NE(std::string(lost.message()).find("the head is lost"), std::string::npos) << lost;
  EXPECT_NE(std::string(lost.message()).find("the file ends early"), std::string::npos) << lost;
  EXPECT_EQ(ready->Describe().state, HeadState::kLost);
  // One that had no weights yet has none.
  const std::shared_ptr<Head> loading = NewHead(spec, "loading");
  begun = 0;
  EXPECT_REASON(loading->SetTensors(loading->Describe().epoch, {cut_meanwhile}), kFileCorrupt);
  EXPECT_EQ(loading->Describe().state, HeadState::kLoading);
}

TEST_F(HeadWeightsTest, NoStepOfSettingAReadyHeadMayFail) {
  const absl::Status not_ready = MakeError(ErrorReason::kShardNotReady, "a shard could not begin");
  for (const char* call : {"ZeroGradient", "WriteTensor", "ResetOptimizerState", "ReadTensor"}) {
    const std::shared_ptr<Head> head = MakeReadyHead(engine_, SmallSpec());
    engine_.control().FailNext(call, kEngineError);
    const absl::Status lost = Set(*head, HeadTensor::kWeight, weight_);
    EXPECT_REASON(lost, kEngineFailed) << call;
    EXPECT_EQ(lost.message(), kEngineError.message());  // not that its source has failed
    EXPECT_EQ(head->Describe().state, HeadState::kLost) << call;
    ASSERT_OK(Set(*head, HeadTensor::kWeight, weight_));
  }
  // A shard that cannot begin is no harm before the beginning only.
  const std::shared_ptr<Head> head = MakeReadyHead(engine_, SmallSpec());
  engine_.control().FailNext("ZeroGradient", not_ready);
  EXPECT_REASON(Set(*head, HeadTensor::kWeight, weight_), kShardNotReady);
  EXPECT_EQ(head->Describe().state, HeadState::kReady);
  engine_.control().FailNext("WriteTensor", not_ready);
  EXPECT_REASON(Set(*head, HeadTensor::kWeight, weight_), kEngineFailed);
  EXPECT_EQ(head->Describe().state, HeadState::kLost);
}

TEST_F(HeadWeightsTest, WhatFailsWhileAHeadIsLoadedIsMissingAgain) {
  HeadSpec spec = SpecWith(&HeadSpec::has_bias, true);
  const std::vector<std::pair<HeadTensor, HeadTensor>> orders = {{HeadTensor::kBias, HeadTensor::kWeight},
                                                                 {HeadTensor::kWeight, HeadTensor::kBias}};
  for (const auto& [first, second] : orders) {
    const std::shared_ptr<Head> head = NewHead(spec);
    const auto values = [&](HeadTensor tensor) { return tensor == HeadTensor::kBias ? bias_ : weight_; };
    ASSERT_OK(Set(*head, first, values(first)));
    engine_.control().FailNext("WriteTensor", kEngineError);
    EXPECT_REASON(Set(*head, first, values(first)), kEngineFailed);
    EXPECT_EQ(head->Describe().weight_checksum, "");
    ASSERT_OK(Set(*head, second, values(second)));
    EXPECT_EQ(head->Describe().state, HeadState::kLoading);
    ASSERT_OK(Set(*head, first, values(first)));
    EXPECT_EQ(head->Describe().state, HeadState::kReady);
  }
}

class HeadCheckpointTest : public HeadWeightsTest {
 protected:
  TemporaryDirectory directory_;
  std::unique_ptr<CheckpointStore> store_ = *CheckpointStore::Open(directory_.path());
};

TEST_F(HeadCheckpointTest, RestoresWeightsOptimizerAndStep) {
  HeadSpec spec = SmallSpec();
  spec.optimizer = AdamWSpec();
  spec.has_bias = true;
  const std::shared_ptr<Head> head = MakeReadyHead(engine_, spec);
  ASSERT_OK(Submit(head, 0));
  ASSERT_OK(head->Apply(KeyOf(*head), int64_t{1}, Rate(1)));
  const std::vector<float> weight = ReadWeight(*head);
  ASSERT_OK(Submit(head, 0));  // not part of the checkpoint
  EXPECT_REASON(head->Save(std::nullopt, *store_, "a", false), kMissingField);
  EXPECT_REASON(head->Save(NewEpoch(), *store_, "a", false), kEpochFenced);
  ASSERT_OK_AND_ASSIGN(const SavedCheckpoint saved, head->Save(head->Describe().epoch, *store_, "a", false));
  EXPECT_EQ(saved.step, 1);
  EXPECT_GT(saved.total_bytes, 15 * 3 * 4);
  EXPECT_ERROR(head->Seal({head->Describe().epoch, 5}, int64_t{0}), kStepMismatch, {"checkpoints", "a=1"});
  EXPECT_REASON(head->Save(head->Describe().epoch, *store_, "a", false), kCheckpointAlreadyExists);
  EXPECT_EQ(store_->Read("default", "student", "a")->update_count, 1);

  ASSERT_OK(head->Apply(KeyOf(*head), int64_t{1}, Rate(3)));
  ASSERT_OK(Submit(head, 0));
  ASSERT_OK(MicroBatchCall(head, 2, 1, {{1, 2, 3}, {2}}).Explicit().Run(engine_));
  EXPECT_NE(ReadWeight(*head), weight);
  const HeadInfo before = head->Describe();
  EXPECT_REASON(head->Restore(NewEpoch(), *store_, "a"), kEpochFenced);
  EXPECT_REASON(head->Restore(before.epoch, *store_, "b"), kCheckpointNotFound);
  EXPECT_EQ(head->Describe().epoch, before.epoch);
  ASSERT_OK(head->Restore(before.epoch, *store_, "a"));
  const HeadInfo after = head->Describe();
  EXPECT_NE(after.epoch, before.epoch);
  EXPECT_EQ(after.open_step, 1);
  EXPECT_EQ(after.weight_version, before.weight_version + 1);
  EXPECT_EQ(after.weight_checksum, Xxh3(weight.data(), 60));
  EXPECT_EQ(ReadWeight(*head), weight);
  EXPECT_EQ(ReadGradWeight(*head), std::vector<float>(15));
  EXPECT_TRUE(head->GetSteps(after.epoch)->first.micro_batches.empty());
  EXPECT_FALSE(head->GetSteps(after.epoch)->second.has_value());
  EXPECT_REASON(head->Apply({before.epoch, 1}, int64_t{0}, Rate(1)), kEpochFenced);
  // The update count goes on where it was: it is in the next checkpoint.
  ASSERT_OK(Submit(head, 0));
  ASSERT_OK(head->Apply(KeyOf(*head), int64_t{1}, Rate(1)));
  ASSERT_OK(head->Save(head->Describe().epoch, *store_, "b", false));
  EXPECT_EQ(store_->Read("default", "student", "b")->update_count, 2);
}

TEST_F(HeadCheckpointTest, ARestoreThatFailsHalfwayLosesTheHeadAndAnotherOneBringsItBack) {
  const std::shared_ptr<Head> head = MakeReadyHead(engine_, SmallSpec());
  ASSERT_OK(head->Save(head->Describe().epoch, *store_, "a", false));
  const Epoch epoch = head->Describe().epoch;
  for (const char* call : {"WriteTensor", "ZeroGradient", "ReadTensor"}) {
    engine_.control().FailNext(call, kEngineError);
    EXPECT_REASON(head->Restore(head->Describe().epoch, *store_, "a"), kEngineFailed) << call;
    EXPECT_EQ(head->Describe().state, HeadState::kLost) << call;
    EXPECT_REASON(head->Save(head->Describe().epoch, *store_, "b", false), kStepLost);
    ASSERT_OK(head->Restore(head->Describe().epoch, *store_, "a"));
    EXPECT_EQ(head->Describe().state, HeadState::kReady);
  }
  EXPECT_NE(head->Describe().epoch, epoch);
  EXPECT_OK(Submit(head, 0));
}

}  // namespace
}  // namespace headwater::heads
