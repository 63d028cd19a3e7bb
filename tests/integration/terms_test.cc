// Several loss terms in one micro-batch: several heads over the same rows, several teachers over parts of them; all or nothing.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/transactions/transaction_fixture.h"

namespace headwater::testing {
namespace {

class Terms : public TransactionTest {
 protected:
  std::vector<TestHead> MakeHeads(const std::string& prefix, int count) {
    std::vector<TestHead> heads;
    for (int i = 0; i < count; ++i) {
      heads.push_back(server_->MakeHead(absl::StrCat(prefix, i), SmallSpec(11 + i), static_cast<uint32_t>(10 + i)));
    }
    return heads;
  }
  // One term for each head, every one with targets of its own.
  static v1::MicroBatchHeader HeaderOf(const std::vector<TestHead>& heads, int64_t micro_batch) {
    v1::MicroBatchHeader header = CrossEntropyHeader(heads[0], 0, micro_batch, TargetsOf(0));
    for (size_t i = 1; i < heads.size(); ++i) {
      *header.add_terms() = CrossEntropyHeader(heads[i], 0, micro_batch, TargetsOf(static_cast<int32_t>(i))).terms(0);
    }
    return header;
  }
  static std::vector<int32_t> TargetsOf(int32_t i) { return {i, 9 - i, i + 2}; }
  int64_t BytesIn() const {
    const std::string name = "headwater_bytes_total{direction=\"in\",transport=\"grpc\"}";
    return std::stoll(server_->MetricLine(name).substr(name.size()));
  }
};

INSTANTIATE_TEST_SUITE_P(Shards, Terms, ::testing::Values(1, 3));

TEST_P(Terms, FiveHeadsInOneRequestEqualFiveRequestsAndUploadTheRowsOnce) {
  const std::vector<TestHead> together = MakeHeads("t", 5);
  const std::vector<TestHead> apart = MakeHeads("a", 5);
  const std::string rows = Rows(5);
  int64_t before = BytesIn();
  v1::MicroBatchHeader header = HeaderOf(together, 0);
  header.add_outputs(v1::TOKEN_OUTPUT_LOSS);
  const LossReply reply = server_->MustCompute(header, rows);
  EXPECT_EQ(BytesIn() - before, 60);
  EXPECT_EQ(reply.summary.state(), v1::CONTRIBUTION_STATE_COMMITTED);
  EXPECT_EQ(reply.summary.form(), v1::CONTRIBUTION_FORM_DIRECT);
  ASSERT_EQ(reply.summary.terms_size(), 5);
  before = BytesIn();
  std::vector<float> grad_hidden(15, 0.0F);
  for (int i = 0; i < 5; ++i) {
    SCOPED_TRACE(i);
    const size_t k = static_cast<size_t>(i);
    v1::MicroBatchHeader one = HeaderOf({apart[k]}, 0);
    *one.mutable_terms(0)->mutable_targets() = Int32Tensor(TargetsOf(i));
    one.add_outputs(v1::TOKEN_OUTPUT_LOSS);
    const LossReply single = server_->MustCompute(one, rows);
    EXPECT_DOUBLE_EQ(reply.summary.terms(i).sums().loss_sum(), single.summary.terms(0).sums().loss_sum());
    EXPECT_EQ(reply.summary.terms(i).token_loss().data(), single.summary.terms(0).token_loss().data());
    EXPECT_EQ(reply.summary.terms(i).weight_version(), together[k].head.weight_version());
    const std::vector<float> part = Floats(single.grad_hidden);
    for (size_t j = 0; j < part.size(); ++j) grad_hidden[j] += part[j];
    EXPECT_EQ(server_->Gradient(together[k]), server_->Gradient(apart[k]));
    EXPECT_EQ(server_->Find(together[k], 0).state(), v1::CONTRIBUTION_STATE_COMMITTED);
  }
  EXPECT_EQ(BytesIn() - before, 5 * 60);
  ExpectClose(Floats(reply.grad_hidden), grad_hidden);
}

TEST_P(Terms, AreBounded) {
  ServerSetup setup = MakeSetup();
  setup.options.limits.max_terms = 2;
  setup.options.limits.max_chunk_bytes = 1 << 12;
  setup.options.limits.max_hidden_size = 64;
  setup.options.limits.max_micro_batch_rows = 1 << 12;
  setup.options.limits.max_message_bytes = (1 << 12) * 7 * 4 + (64 << 10);
  Restart(setup);
  const std::vector<TestHead> heads = MakeHeads("h", 3);
  EXPECT_EQ(ReasonOf(server_->Compute(HeaderOf({heads[0], heads[1]}, 0), Rows(5)).status), "OK");  // at the limit
  const WireError error = DecodeError(server_->Compute(HeaderOf(heads, 1), Rows(5)).status);
  EXPECT_EQ(error.reason, "LIMIT_EXCEEDED");
  EXPECT_EQ(error.at("limit"), "max_terms");
  // The outputs of all terms travel in one message.
  const std::vector<int32_t> targets(1 << 12, 1);
  v1::MicroBatchHeader header = CrossEntropyHeader(heads[0], 0, 2, targets);
  *header.add_terms() = CrossEntropyHeader(heads[1], 0, 2, targets).terms(0);
  for (int output = v1::TOKEN_OUTPUT_LOSS; v1::TokenOutput_IsValid(output); ++output) {
    header.add_outputs(static_cast<v1::TokenOutput>(output));
  }
  const WireError outputs = DecodeError(server_->Compute(header, Bytes(Random((1 << 12) * 5, 1, 1))).status);
  EXPECT_EQ(outputs.reason, "LIMIT_EXCEEDED");
  EXPECT_EQ(outputs.at("limit"), "max_message_bytes");
  EXPECT_EQ(outputs.at("field"), "header.outputs");
}

}  // namespace
}  // namespace headwater::testing
