// What the tests of transactions share: a server with some shards, and micro-batches of three rows.
#ifndef HEADWATER_TESTS_INTEGRATION_TRANSACTIONS_TRANSACTION_FIXTURE_H_
#define HEADWATER_TESTS_INTEGRATION_TRANSACTIONS_TRANSACTION_FIXTURE_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/support/open_stream.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {

inline constexpr int64_t kRows = 3;
inline constexpr int64_t kColumns = 5;  // of SmallSpec()

inline std::string Rows(uint32_t seed) { return Bytes(Random(kRows * kColumns, seed, 1)); }

// An EXPLICIT cross entropy over three rows.
inline v1::MicroBatchHeader ExplicitHeader(const TestHead& head, int64_t step, int64_t micro_batch) {
  v1::MicroBatchHeader header = CrossEntropyHeader(head, step, micro_batch, {1, 2, 3});
  header.set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
  return header;
}

inline void ExpectClose(const std::vector<float>& actual, const std::vector<float>& expected, float tolerance = 2e-6F) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_LE(std::abs(actual[i] - expected[i]), tolerance) << i;
}

// On 1 and on 3 shards.
class TransactionTest : public ::testing::TestWithParam<int> {
 protected:
  static ServerSetup MakeSetup() {
    ServerSetup setup;
    setup.engine.shard_count = GetParam();
    return setup;
  }
  v1::CommitMicroBatchRequest CommitOf(const TestHead& head, int64_t step, int64_t micro_batch, int64_t attempt = 0,
                                       const std::string& session = "") {
    return DecisionOf<v1::CommitMicroBatchRequest>(head, step, micro_batch, attempt, session);
  }
  v1::DiscardMicroBatchRequest DiscardOf(const TestHead& head, int64_t step, int64_t micro_batch, int64_t attempt = 0,
                                         const std::string& session = "") {
    return DecisionOf<v1::DiscardMicroBatchRequest>(head, step, micro_batch, attempt, session);
  }
  v1::ApplyOptimizerStepRequest ApplyOf(const TestHead& head, int64_t step, int64_t count) {
    v1::ApplyOptimizerStepRequest request;
    *request.mutable_head() = server_->At(head, step);
    request.mutable_expected()->set_count(count);
    request.set_learning_rate(0.01);
    return request;
  }
  // Waits until a metric without labels, or with these, has a value.
  bool AwaitMetric(const std::string& name, int64_t value) {
    return Await([&] { return server_->MetricLine(name) == absl::StrCat(name, " ", value); });
  }
  // Starts the server anew with other options.
  void Restart(const ServerSetup& setup) {
    server_.reset();
    server_ = std::make_unique<WireServer>(setup);
  }

  std::unique_ptr<WireServer> server_ = std::make_unique<WireServer>(MakeSetup());

 private:
  template <typename Request>
  Request DecisionOf(const TestHead& head, int64_t step, int64_t micro_batch, int64_t attempt, const std::string& session) {
    Request request;
    *request.add_heads() = server_->At(head, step);
    request.set_micro_batch(micro_batch);
    request.set_attempt(attempt);
    request.set_session_id(session);
    return request;
  }
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_TRANSACTIONS_TRANSACTION_FIXTURE_H_
