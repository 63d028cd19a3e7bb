// The C ABI: a program in C that links nothing of ours but libheadwater_client.so, against the real server.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "headwater/client/client.h"
#include "headwater/v1/loss_service.pb.h"
#include "tests/e2e/cpp/support/child_process.h"
#include "tests/e2e/cpp/support/placed_call.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;

constexpr int64_t kRows = 96;
constexpr int64_t kHiddenSize = 64;
constexpr int64_t kVocabSize = 50;

TEST(ClientCApi, ProgramInC) {
  const ServerProcess server;
  Client client = server.Connect();
  Head head = CreateHead(client, "h", {.vocab_size = kVocabSize, .hidden_size = kHiddenSize});
  const std::vector<int32_t> targets = RandomTargets(2, kRows, kVocabSize);
  v1::MicroBatchHeader header = CrossEntropyHeader(head, targets);
  header.clear_micro_batch();  // the head is frozen
  header.mutable_terms(0)->mutable_head()->clear_step();

  const TemporaryDirectory directory;
  WriteFile(directory.path() + "/header", header.SerializeAsString());
  const ProgramResult result = RunProgram({CLIENT_C_API_PROGRAM, server.target(), directory.path() + "/header",
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
