// Table-driven tests of the transaction rules, through the wire: see transaction_harness.h. One row for each behaviour that the
// design states, each on 1 and on 3 shards. What this build does not have has no rows: contributions in the order of ids
// (`--deterministic`), stripes, and teacher rows from another process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <set>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/integration/transactions/transaction_harness.h"

namespace headwater::testing {
namespace {

std::vector<TransactionRow> AllRows() {
  std::vector<TransactionRow> rows;
  for (const auto& table :
       {FormRows(), ReplayRows(), SessionRows(), StepRows(), OwnerRows(), TermRows(), EpochRows(), ShardRows()}) {
    rows.insert(rows.end(), table.begin(), table.end());
  }
  return rows;
}

class TransactionRows : public ::testing::TestWithParam<std::tuple<TransactionRow, int>> {};

TEST_P(TransactionRows, LeaveWhatTheUndisturbedCallsLeave) {
  const auto& [row, shard_count] = GetParam();
  SCOPED_TRACE(row.statement);
  Trial undisturbed(row.setup, shard_count, /*keeps_reference=*/true);
  row.undisturbed(undisturbed);
  undisturbed.CheckReference();
  ASSERT_FALSE(HasFailure()) << "the undisturbed calls do not do what they are to do";

  Trial trial(row.setup, shard_count, /*keeps_reference=*/false);
  row.story(trial);
  EXPECT_EQ(trial.MicroBatches(), row.micro_batches);
  CompareStates(trial, undisturbed);
}

INSTANTIATE_TEST_SUITE_P(Design, TransactionRows, ::testing::Combine(::testing::ValuesIn(AllRows()), ::testing::Values(1, 3)),
                         [](const auto& row_and_shards) {
                           return std::get<0>(row_and_shards.param).name + "On" + std::to_string(std::get<1>(row_and_shards.param));
                         });

TEST(TransactionTable, NamesAndStatementsAreThere) {
  std::set<std::string> names;
  for (const TransactionRow& row : AllRows()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name << " is there twice";
    EXPECT_THAT(row.statement, ::testing::Not(::testing::IsEmpty())) << row.name;
  }
}

class Drains : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Shards, Drains, ::testing::Values(1, 3));

// The server is gone afterwards, so this is no row.
TEST_P(Drains, LetADecidedCommitFinish) {
  Trial t({}, GetParam(), false);
  ASSERT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED");
  t.fault().Hold(ShardPhase::kAct);
  auto commit = std::async(std::launch::async, [&t] { return t.Commit({.id = 0}); });
  t.fault().AwaitHeld();
  auto drained = std::async(std::launch::async, [&t] { return t.server().server().Drain(absl::Seconds(20)); });
  EXPECT_TRUE(Await([&t] { return t.KeepAlive(std::string(32, 'x')) == "DRAINING"; }));
  t.fault().Clear();
  EXPECT_EQ(commit.get(), "OK");
  EXPECT_TRUE(drained.get());
}

TEST_P(Drains, SendWaitingCallsAway) {
  Trial t({}, GetParam(), false);
  t.Head();
  auto early = std::async(std::launch::async, [&t] { return t.Submit({.id = 0, .step = 1}); });
  auto seal = std::async(std::launch::async, [&t] { return t.Seal({.ids = {0}, .wait = true}); });
  ASSERT_TRUE(t.AwaitMetric("headwater_waiting_calls", 2));
  const absl::Time begin = absl::Now();
  EXPECT_TRUE(t.server().server().Drain(absl::Seconds(20)));
  EXPECT_LE(absl::Now() - begin, absl::Seconds(10));
  EXPECT_EQ(early.get(), "DRAINING");
  EXPECT_EQ(seal.get(), "DRAINING");
}

}  // namespace
}  // namespace headwater::testing
