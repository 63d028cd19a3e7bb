// UploadStore: whose room an upload gets that finds none, and who is told to come again.
#include "server/service/head/upload_store.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "headwater/kernels/error.h"
#include "tests/unit/server/heads/head_test_util.h"

namespace headwater::service {
namespace {

using headwater::heads::KeyOf;
using headwater::heads::MakeReadyHead;
using headwater::heads::SpecWith;
using headwater::testing::FakeEngine;

constexpr int64_t kWeightBytes = 60;  // of SmallSpec(): 5 x 3 in fp32
constexpr int64_t kBiasBytes = 20;

class UploadStoreTest : public ::testing::Test {
 protected:
  // A head with a bias, whose step 0 is sealed.
  std::shared_ptr<heads::Head> SealedHead(const std::string& id) {
    const std::shared_ptr<heads::Head> head = MakeReadyHead(engine_, SpecWith(&HeadSpec::has_bias, true), id);
    EXPECT_OK(head->Seal(KeyOf(*head), int64_t{0}));
    return head;
  }
  // Of new weights that close step 0.
  static UploadRequest Request(const heads::Head& head, const std::string& upload_id, HeadTensor tensor = HeadTensor::kWeight) {
    UploadRequest request;
    request.name = head.name();
    request.epoch = head.Describe().epoch;
    request.upload_id = upload_id;
    request.tensor = tensor;
    request.total_bytes = tensor == HeadTensor::kWeight ? kWeightBytes : kBiasBytes;
    request.closes_step = 0;
    return request;
  }
  // All of an upload. True if that closed the step, false if the tensor waits for the other one.
  bool Replace(const std::shared_ptr<heads::Head>& head, const UploadRequest& request) {
    absl::StatusOr<UploadStore::Lease> lease = store_.Open(head, request);
    EXPECT_OK(lease);
    if (!lease.ok()) return false;
    EXPECT_OK(lease->Append(0, std::string(static_cast<size_t>(request.total_bytes), '\0')));
    absl::StatusOr<std::shared_ptr<const uint8_t>> bytes = lease->Complete();
    EXPECT_OK(bytes);
    if (!bytes.ok()) return false;
    const absl::StatusOr<heads::ReplaceReply> reply =
        head->Replace({request.epoch, *request.closes_step},
                      heads::ShadowTensor{request.tensor, request.data_type, *std::move(bytes), request.total_bytes});
    EXPECT_OK(reply);
    lease->Drop();
    return reply.ok() && reply->closed;
  }

  FakeEngine engine_;
  absl::Time now_ = absl::UnixEpoch();
  UploadStore store_{100, [this] { return now_; }};
  std::shared_ptr<heads::Head> head_ = SealedHead("head");
  const std::shared_ptr<heads::Head> other_ = SealedHead("other");
};

TEST_F(UploadStoreTest, AShadowThatHasWaitedLongGivesWayToAnotherHead) {
  EXPECT_FALSE(Replace(head_, Request(*head_, "weight")));  // its trainer dies before the bias
  EXPECT_EQ(store_.reserved_bytes(), kWeightBytes);
  now_ += UploadStore::kShadowTime - absl::Seconds(1);
  EXPECT_ERROR(store_.Open(other_, Request(*other_, "weight")), kInFlightBytesExceeded, {"limit", "max_upload_bytes"},
               {"maximum", "100"}, {"requestedBytes", "60"}, {"availableBytes", "40"}, {"retryAfterMs", "1000"});
  EXPECT_EQ(store_.reserved_bytes(), kWeightBytes);

  now_ += absl::Seconds(1);
  EXPECT_FALSE(Replace(other_, Request(*other_, "weight")));
  EXPECT_EQ(store_.reserved_bytes(), kWeightBytes);
  EXPECT_TRUE(Replace(other_, Request(*other_, "bias", HeadTensor::kBias)));
  EXPECT_EQ(other_->Describe().open_step, 1);
  EXPECT_EQ(store_.reserved_bytes(), 0);
  // The step of the one that gave way needs all tensors again.
  EXPECT_EQ(head_->Describe().open_step, 0);
  EXPECT_FALSE(Replace(head_, Request(*head_, "late-bias", HeadTensor::kBias)));
  EXPECT_TRUE(Replace(head_, Request(*head_, "weight-again")));
  EXPECT_EQ(head_->Describe().open_step, 1);
  EXPECT_EQ(store_.reserved_bytes(), 0);
}

TEST_F(UploadStoreTest, AShadowStaysWhereThereIsRoom) {
  EXPECT_FALSE(Replace(head_, Request(*head_, "weight")));
  now_ += absl::Hours(1);
  EXPECT_FALSE(Replace(other_, Request(*other_, "bias", HeadTensor::kBias)));
  EXPECT_EQ(store_.reserved_bytes(), kWeightBytes + kBiasBytes);
  EXPECT_TRUE(Replace(head_, Request(*head_, "bias", HeadTensor::kBias)));
  EXPECT_EQ(store_.reserved_bytes(), kBiasBytes);
}

TEST_F(UploadStoreTest, AShadowStaysWhileAStreamBringsItsHeadTheOtherTensor) {
  EXPECT_FALSE(Replace(head_, Request(*head_, "weight")));
  now_ += absl::Hours(1);
  {
    ASSERT_OK_AND_ASSIGN(const UploadStore::Lease bias, store_.Open(head_, Request(*head_, "bias", HeadTensor::kBias)));
    EXPECT_REASON(store_.Open(other_, Request(*other_, "weight")), kInFlightBytesExceeded);
    EXPECT_EQ(store_.reserved_bytes(), kWeightBytes + kBiasBytes);
  }
  // The stream was cut: first its upload gives way, then the shadow.
  EXPECT_OK(store_.Open(other_, Request(*other_, "weight")));
  EXPECT_EQ(store_.reserved_bytes(), kWeightBytes);
  EXPECT_FALSE(Replace(head_, Request(*head_, "bias", HeadTensor::kBias)));
}

TEST_F(UploadStoreTest, AShadowDoesNotGiveWayToItsOwnHead) {
  EXPECT_FALSE(Replace(head_, Request(*head_, "weight")));
  now_ += absl::Hours(1);
  {
    const absl::StatusOr<UploadStore::Lease> first = store_.Open(other_, Request(*other_, "1", HeadTensor::kBias));
    const absl::StatusOr<UploadStore::Lease> second = store_.Open(other_, Request(*other_, "2", HeadTensor::kBias));
    ASSERT_OK(first);
    ASSERT_OK(second);
    EXPECT_REASON(store_.Open(head_, Request(*head_, "bias", HeadTensor::kBias)), kInFlightBytesExceeded);
  }
  EXPECT_TRUE(Replace(head_, Request(*head_, "bias", HeadTensor::kBias)));
}

TEST_F(UploadStoreTest, WhatMayBeRepeatedLeavesTheShadowAfterAWhileToo) {
  EXPECT_FALSE(Replace(head_, Request(*head_, "weight")));
  {
    const UploadRequest request = Request(*head_, "bias", HeadTensor::kBias);
    ASSERT_OK_AND_ASSIGN(UploadStore::Lease lease, store_.Open(head_, request));
    EXPECT_OK(lease.Append(0, std::string(kBiasBytes, '\0')));
    ASSERT_OK_AND_ASSIGN(std::shared_ptr<const uint8_t> bytes, lease.Complete());
    engine_.control().FailNext("ZeroGradient", MakeError(ErrorReason::kShardNotReady, "a shard could not begin"));
    EXPECT_REASON(head_->Replace({request.epoch, *request.closes_step},
                                 heads::ShadowTensor{request.tensor, request.data_type, std::move(bytes), request.total_bytes}),
                  kShardNotReady);
  }
  now_ += absl::Hours(1);
  ASSERT_OK_AND_ASSIGN(const UploadStore::Lease weight, store_.Open(other_, Request(*other_, "weight")));
  EXPECT_EQ(store_.reserved_bytes(), kWeightBytes + kBiasBytes);  // its own, and the bias in the shadow
  ASSERT_OK_AND_ASSIGN(const UploadStore::Lease bias, store_.Open(other_, Request(*other_, "bias", HeadTensor::kBias)));
  EXPECT_REASON(store_.Open(other_, Request(*other_, "more", HeadTensor::kBias)), kInFlightBytesExceeded);
  now_ += UploadStore::kShadowTime;
  EXPECT_OK(store_.Open(other_, Request(*other_, "more", HeadTensor::kBias)));
  EXPECT_EQ(store_.reserved_bytes(), kWeightBytes + 2 * kBiasBytes);
}

TEST_F(UploadStoreTest, WhatNeverFitsIsNotToBeTriedAgain) {
  UploadStore small(kWeightBytes - 1);
  const absl::Status refused = small.Open(head_, Request(*head_, "weight")).status();
  EXPECT_REASON(refused, kMemoryBudgetExceeded);
  EXPECT_EQ(GetErrorMetadata(refused).count("retryAfterMs"), 0U);
  UploadStore enough(kWeightBytes);
  EXPECT_OK(enough.Open(head_, Request(*head_, "weight")));
}

TEST_F(UploadStoreTest, AHeadThatIsGoneTakesItsShadowAlong) {
  EXPECT_FALSE(Replace(head_, Request(*head_, "weight")));
  head_.reset();
  EXPECT_EQ(store_.reserved_bytes(), 0);
  EXPECT_OK(store_.Open(other_, Request(*other_, "weight")));
}

}  // namespace
}  // namespace headwater::service
