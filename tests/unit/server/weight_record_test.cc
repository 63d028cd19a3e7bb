// WeightRecord: the bookkeeping of a head's weights.
#include <gtest/gtest.h>

#include <memory>
#include <optional>

#include "server/heads/weights/weight_tensors.h"

namespace headwater::heads {
namespace {

ShadowTensor TensorAt(HeadTensor tensor, const void* data) {
  ShadowTensor shadow;
  shadow.tensor = tensor;
  shadow.data = std::shared_ptr<const void>(data, [](const void*) {});
  return shadow;
}

TEST(WeightRecordTest, AHeadWithABiasNeedsBothTensors) {
  WeightRecord plain(/*has_bias=*/false), biased(/*has_bias=*/true);
  for (WeightRecord* record : {&plain, &biased}) {
    EXPECT_FALSE(record->HasAllTensors());
    record->MarkSet(HeadTensor::kWeight);
    EXPECT_TRUE(record->has_weight());
  }
  EXPECT_TRUE(plain.HasAllTensors());
  EXPECT_FALSE(biased.HasAllTensors());
  biased.MarkSet(HeadTensor::kBias);
  EXPECT_TRUE(biased.HasAllTensors());
}

TEST(WeightRecordTest, TheChecksumGoesWithTheWeightAlone) {
  WeightRecord record(/*has_bias=*/true);
  record.MarkSet(HeadTensor::kWeight);
  record.SetChecksum("sum");
  record.MarkUnset(HeadTensor::kBias);
  EXPECT_EQ(record.checksum(), "sum");
  record.MarkUnset(HeadTensor::kWeight);
  EXPECT_EQ(record.checksum(), "");
  EXPECT_FALSE(record.has_weight());
}

TEST(WeightRecordTest, ACheckpointIsOfOneVersionAndOneStep) {
  WeightRecord record(/*has_bias=*/false);
  EXPECT_EQ(record.NextVersion(), 1);
  const std::optional<absl::Time> since = record.unsaved_since();
  EXPECT_TRUE(since.has_value());
  EXPECT_EQ(record.NextVersion(), 2);
  EXPECT_EQ(record.unsaved_since(), since);  // of the oldest change
  EXPECT_FALSE(record.IsSaved(7));
  record.MarkSaved(2, 7);
  EXPECT_TRUE(record.IsSaved(7));
  EXPECT_FALSE(record.IsSaved(8));
  EXPECT_FALSE(record.unsaved_since().has_value());
  record.ForgetSaved();
  EXPECT_FALSE(record.IsSaved(7));
  record.MarkSaved(2, 7);
  record.NextVersion();
  EXPECT_FALSE(record.IsSaved(7));
}

TEST(WeightRecordTest, ShadowsAreCompleteWithEachTensorOnce) {
  const int first = 0, second = 0;
  WeightRecord record(/*has_bias=*/true);
  EXPECT_FALSE(record.AddShadow(TensorAt(HeadTensor::kWeight, &first), "a"));
  EXPECT_FALSE(record.AddShadow(TensorAt(HeadTensor::kWeight, &second), "b"));
  EXPECT_EQ(record.shadows().at(HeadTensor::kWeight).checksum, "b");
  EXPECT_FALSE(record.DropShadow(&first));
  EXPECT_TRUE(record.DropShadow(&second));
  EXPECT_FALSE(record.AddShadow(TensorAt(HeadTensor::kBias, &first), "c"));
  EXPECT_TRUE(record.AddShadow(TensorAt(HeadTensor::kWeight, &second), "d"));
  WeightRecord plain(/*has_bias=*/false);
  EXPECT_TRUE(plain.AddShadow(TensorAt(HeadTensor::kWeight, &first), "a"));
}

TEST(WeightRecordTest, TheEndOfAStepForgetsShadowsAndReplacement) {
  const int data = 0;
  WeightRecord record(/*has_bias=*/true);
  record.AddShadow(TensorAt(HeadTensor::kWeight, &data), "a");
  record.EndStep(/*replaced=*/true);
  EXPECT_TRUE(record.shadows().empty());
  EXPECT_TRUE(record.WasReplacedBy(HeadTensor::kWeight, "a"));
  EXPECT_FALSE(record.WasReplacedBy(HeadTensor::kWeight, "b"));
  EXPECT_FALSE(record.WasReplacedBy(HeadTensor::kBias, "a"));
  record.AddShadow(TensorAt(HeadTensor::kWeight, &data), "a");
  record.EndStep(/*replaced=*/false);
  EXPECT_TRUE(record.shadows().empty());
  EXPECT_FALSE(record.WasReplacedBy(HeadTensor::kWeight, "a"));
}

TEST(WeightRecordTest, ALostHeadKeepsItsVersionAlone) {
  const int data = 0;
  WeightRecord record(/*has_bias=*/true);
  record.MarkSet(HeadTensor::kWeight);
  record.MarkSet(HeadTensor::kBias);
  record.SetChecksum("sum");
  record.NextVersion();
  record.AddShadow(TensorAt(HeadTensor::kWeight, &data), "a");
  record.Forget();
  EXPECT_FALSE(record.has_weight());
  EXPECT_FALSE(record.HasAllTensors());
  record.MarkSet(HeadTensor::kWeight);
  EXPECT_FALSE(record.HasAllTensors());
  EXPECT_EQ(record.checksum(), "");
  EXPECT_TRUE(record.shadows().empty());
  EXPECT_EQ(record.version(), 1);
}

}  // namespace
}  // namespace headwater::heads
