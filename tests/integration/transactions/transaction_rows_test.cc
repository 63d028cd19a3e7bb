// Table-driven tests of the state that calls leave, through the wire: see transaction_harness.h. Each row runs on 1 and on 3
// shards. What a head decides is tested in tests/unit/server and its histories; a row is there for each way into the head and out
// of it.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/integration/transactions/transaction_harness.h"

namespace headwater::testing {
namespace {

std::vector<TransactionRow> AllRows() {
  std::vector<TransactionRow> rows = CallRows();
  for (const TransactionRow& row : HeadRows()) rows.push_back(row);
  return rows;
}

class TransactionRows : public ::testing::TestWithParam<std::tuple<TransactionRow, int>> {};

TEST_P(TransactionRows, LeaveWhatTheUndisturbedCallsLeave) {
  const auto& [row, shard_count] = GetParam();
  SCOPED_TRACE(row.statement);
  Trial undisturbed(row.setup, shard_count);
  row.undisturbed(undisturbed);
  ASSERT_FALSE(HasFailure()) << "the undisturbed calls do not do what they are to do";

  Trial trial(row.setup, shard_count);
  row.story(trial);
  EXPECT_EQ(trial.MicroBatches(), row.micro_batches);
  CompareStates(trial, undisturbed);
}

INSTANTIATE_TEST_SUITE_P(Design, TransactionRows, ::testing::Combine(::testing::ValuesIn(AllRows()), ::testing::Values(1, 3)),
                         [](const auto& row_and_shards) {
                           return std::get<0>(row_and_shards.param).name + "On" + std::to_string(std::get<1>(row_and_shards.param));
                         });

}  // namespace
}  // namespace headwater::testing
