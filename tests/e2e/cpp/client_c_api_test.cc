// The C ABI: a program in C that links nothing of ours but libheadwater_client.so, against the real server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "headwater/client/client.h"
#include "headwater/v1/loss_service.pb.h"
#include "tests/e2e/cpp/child_process.h"
#include "tests/e2e/cpp/server_process.h"
#include "tests/e2e/cpp/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;

constexpr int64_t kRows = 96;
constexpr int64_t kHiddenSize = 64;
constexpr int64_t kVocabSize = 50;

v1::MicroBatchHeader MakeHeader(const std::string& head, const std::vector<int32_t>& targets) {
  v1::MicroBatchHeader header;
  header.set_compute_mode(v1::COMPUTE_MODE_FORWARD_BACKWARD);
  header.set_row_count(kRows);
  header.set_hidden_size(kHiddenSize);
  header.set_data_type(v1::DATA_TYPE_FLOAT32);
  v1::LossTerm* term = header.add_terms();
  term->mutable_head()->set_head(head);
  term->mutable_cross_entropy();
  term->mutable_targets()->set_data_type(v1::DATA_TYPE_INT32);
  term->mutable_targets()->add_shape(kRows);
  term->mutable_targets()->set_data(targets.data(), targets.size() * sizeof(int32_t));
  return header;
}

TEST(ClientCApi, ProgramInC) {
  const ServerProcess server;
  Client client = server.Connect();
  HeadSpec spec;
  spec.vocab_size = kVocabSize;
  spec.hidden_size = kHiddenSize;
  Head head = Value(client.CreateHead("h", spec));
  const std::vector<float> weight = RandomFloats(1, kVocabSize * kHiddenSize, 1.0F);
  Value(head.UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight)));
  const std::vector<int32_t> targets = RandomTargets(2, kRows, kVocabSize);
  v1::MicroBatchHeader header = MakeHeader(head.name(), targets);
  header.mutable_terms(0)->mutable_head()->set_head_epoch(head.epoch());

  const TemporaryDirectory directory;
  WriteFile(directory.path() + "/header", header.SerializeAsString());
  WriteFile(directory.path() + "/other", MakeHeader("tenants/default/heads/none", targets).SerializeAsString());
  const ProgramResult result =
      RunProgram({CLIENT_C_API_PROGRAM, server.target(), directory.path() + "/header", directory.path() + "/other",
                  std::to_string(kRows), std::to_string(kHiddenSize), directory.path() + "/summary"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");

  v1::MicroBatchSummary summary;
  ASSERT_TRUE(summary.ParseFromString(ReadFile(directory.path() + "/summary")));
  std::vector<float> hidden(kRows * kHiddenSize);
  for (size_t i = 0; i < hidden.size(); ++i) hidden[i] = static_cast<float>(i % 13) / 13.0F - 0.4F;
  const LossResult expected = Value(head.CrossEntropy(RowsView::Float32(hidden, kHiddenSize), targets, {}, {}).Get());
  ASSERT_EQ(summary.terms_size(), 1);
  EXPECT_EQ(summary.terms(0).sums().loss_sum(), expected.loss_sum);
  EXPECT_EQ(summary.terms(0).sums().valid_token_count(), kRows);
}

}  // namespace
}  // namespace headwater::e2e
