// Errors of the real server as the C++ client reports them, and its health. transport_fault_test.cc has faults while rows travel.
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <vector>

#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;
using std::chrono::seconds;

constexpr int64_t kVocabSize = 97;
constexpr int64_t kHiddenSize = 64;

MicroBatchOptions Submission(int64_t step, int64_t micro_batch) { return {.step = step, .micro_batch = micro_batch}; }

class Fault : public testing::Test {
 protected:
  Fault() : client_(server_.Connect({.connect_timeout = seconds(20)})) {
    HeadSpec spec = {.vocab_size = kVocabSize, .hidden_size = kHiddenSize, .trainable = true, .optimizer = AdamW()};
    head_.emplace(Value(client_.CreateHead("student", spec)));
    weight_ = RandomFloats(1, kVocabSize * kHiddenSize, 0.3F);
    Value(head_->UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight_)));
    rows_ = RandomFloats(2, 5 * kHiddenSize, 1.0F);
  }

  RowsView Rows() const { return RowsView::Float32(rows_, kHiddenSize); }

  ServerProcess server_;
  Client client_;
  std::optional<Head> head_;
  std::vector<float> weight_;
  std::vector<float> rows_;
  const std::vector<int32_t> targets_ = {0, 1, 2, 3, 4};
};

TEST_F(Fault, ErrorsCarryReasonAndMetadata) {
  const absl::Status missing = client_.OpenHead("nobody").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ErrorReason(missing), "HEAD_NOT_FOUND");

  const absl::Status twice = client_.CreateHead("student", head_->spec()).status();
  EXPECT_EQ(ErrorReason(twice), "HEAD_ALREADY_EXISTS");

  const absl::Status target = head_->CrossEntropy(Rows(), {0, 1, 2, 3, kVocabSize}, {}, Submission(0, 0)).Get().status();
  EXPECT_EQ(target.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorReason(target), "TARGET_OUT_OF_VOCAB");
  EXPECT_FALSE(ErrorMetadata(target).empty());

  const absl::Status shape = head_->CrossEntropy(Rows(), {0, 1, 2}, {}, Submission(0, 0)).Get().status();
  EXPECT_EQ(ErrorReason(shape), "SHAPE_MISMATCH");

  const absl::Status step = head_->CrossEntropy(Rows(), targets_, {}, Submission(7, 0)).Get().status();
  EXPECT_EQ(step.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrorReason(step), "STEP_MISMATCH");
  EXPECT_EQ(ErrorMetadata(step)["openStep"], "0");

  const absl::Status field = head_->CrossEntropy(Rows(), targets_, {.label_smoothing = 2.0}, Submission(0, 0)).Get().status();
  EXPECT_EQ(ErrorReason(field), "INVALID_FIELD");

  const absl::Status uncommitted = head_->Commit(0, 5).Get().status();
  EXPECT_EQ(ErrorReason(uncommitted), "MICRO_BATCH_NOT_FOUND");

  const absl::Status seal = head_->Seal(0, 2).status();
  EXPECT_EQ(ErrorReason(seal), "MICRO_BATCH_MISSING");
}

TEST_F(Fault, HealthOfServicesIsReported) {
  EXPECT_EQ(Value(client_.CheckHealth()), HealthStatus::kServing);
  EXPECT_EQ(Value(client_.CheckHealth("headwater.v1.LossService")), HealthStatus::kServing);
  EXPECT_EQ(Value(client_.CheckHealth("headwater.v1.Nonsense")), HealthStatus::kServiceUnknown);
}

}  // namespace
}  // namespace headwater::e2e
