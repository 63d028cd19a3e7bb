// Commit, Apply and all else that changes a head is decided once for its shards, when every shard is ready; after that nothing
// interrupts it, and a shard that fails then makes the head LOST on all of them.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/integration/transactions/transaction_harness.h"

namespace headwater::testing {
namespace {

void SubmitOther(Trial& t) { EXPECT_EQ(t.Submit({.id = 9}), "COMMITTED DIRECT"); }

// Work that changes a head.
struct Change {
  std::string name;
  std::function<void(Trial&)> prepare;
  std::function<std::string(Trial&)> run;
  std::string answer;               // when nothing fails
  std::vector<std::string> before;  // micro-batches of the open step before and after it
  std::vector<std::string> after;
  bool stages = false;  // only puts something beside the accumulators: a failure loses nothing
};

std::vector<Change> Changes() {
  const std::vector<std::string> none = {"9 COMMITTED DIRECT"};
  const auto with = [](const std::string& line) { return std::vector<std::string>{line, "9 COMMITTED DIRECT"}; };
  std::vector<Change> changes;
  changes.push_back({"AnEagerOne", SubmitOther, [](Trial& t) { return t.Submit({.id = 0}); }, "COMMITTED DIRECT", none,
                     with("0 COMMITTED DIRECT")});
  changes.push_back({"AnEagerRefusingOne", SubmitOther, [](Trial& t) { return t.Submit({.id = 0, .refuse_non_finite = true}); },
                     "COMMITTED STAGED", none, with("0 COMMITTED STAGED"), true});
  changes.push_back({"AnExplicitOne", SubmitOther, [](Trial& t) { return t.Submit({.id = 0, .explicit_commit = true}); },
                     "STAGED STAGED", none, with("0 STAGED STAGED"), true});
  changes.push_back({"ACommit",
                     [](Trial& t) {
                       SubmitOther(t);
                       EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED");
                     },
                     [](Trial& t) { return t.Commit({.id = 0, .factor = 0.5}); }, "OK", with("0 STAGED STAGED"),
                     with("0 COMMITTED STAGED")});
  changes.push_back({"ACommitOfTheHeld",
                     [](Trial& t) {
                       SubmitOther(t);
                       EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true, .late_token_factors = true}), "STAGED HELD");
                     },
                     [](Trial& t) {
                       return t.Commit({.id = 0, .factor = 0.5, .token_factors = {1, 2, 3}});
                     },
                     "OK", with("0 STAGED HELD"), with("0 COMMITTED HELD")});
  changes.push_back({"AnAddedGradient", SubmitOther, [](Trial& t) { return t.AddPart({.id = 0, .row_start = 0, .row_count = 13}); },
                     "OK", none, with("0 COMMITTED DIRECT")});
  changes.push_back({"AnApply",
                     [](Trial& t) {
                       SubmitOther(t);
                       EXPECT_EQ(t.Seal({.ids = {9}}), "OK");
                     },
                     [](Trial& t) { return t.Apply({.ids = {9}}); },
                     "OK",
                     none,
                     {}});
  changes.push_back({"ADiscardedGradient", SubmitOther, [](Trial& t) { return t.DiscardGradient({}); }, "OK", none, {}});
  changes.push_back({"ATakeOver", SubmitOther, [](Trial& t) { return t.Take(); }, "OK", none, {}});
  changes.push_back({"AReplacement",
                     [](Trial& t) {
                       SubmitOther(t);
                       EXPECT_EQ(t.Seal({.ids = {9}}), "OK");
                     },
                     [](Trial& t) { return t.Replace({}); },
                     "OK replaced",
                     none,
                     {}});
  changes.push_back({"AnUpload", SubmitOther, [](Trial& t) { return t.SetWeights(3); }, "OK", none, {}});
  return changes;
}

// Of the student and of a head that takes no part.
std::vector<std::string> Snapshots(Trial& t) { return {t.server().Snapshot(t.Head()), t.server().Snapshot(t.Head("bystander"))}; }

void Undisturbed(Trial& t, const Change& change) {
  t.Head("bystander");
  change.prepare(t);
  EXPECT_EQ(change.run(t), change.answer);
}

TransactionRow NotReadyRow(const Change& change) {
  return {"AShardIsNotReadyFor" + change.name,
          "decided once, by the leader, when every shard is ready: SHARD_NOT_READY changes nothing, and the same call works later",
          [change](Trial& t) {
            t.Head("bystander");
            change.prepare(t);
            EXPECT_EQ(t.MicroBatches(), change.before);
            const std::vector<std::string> before = Snapshots(t);
            for (const int32_t rank : {0, t.last_rank()}) {
              t.fault().Fail(ShardPhase::kPrepare, rank);
              EXPECT_EQ(change.run(t), "SHARD_NOT_READY");
              EXPECT_EQ(t.last_error().code, grpc::StatusCode::UNAVAILABLE);
              EXPECT_EQ(t.last_error().at("shard"), std::to_string(rank));
              t.fault().Clear();
              EXPECT_EQ(Snapshots(t), before);
            }
            EXPECT_EQ(change.run(t), change.answer);
          },
          [change](Trial& t) { Undisturbed(t, change); }, change.after};
}

TransactionRow LostRow(const Change& change) {
  return {"AShardFailsDuring" + change.name,
          "a shard that fails after the decision makes the head LOST on all shards until it is restored",
          [change](Trial& t) {
            t.Head("bystander");
            change.prepare(t);
            const std::string bystander = t.server().Snapshot(t.Head("bystander"));
            t.fault().Fail(ShardPhase::kAct, t.last_rank());
            EXPECT_EQ(change.run(t), "ENGINE_FAILED");
            EXPECT_EQ(t.last_error().code, grpc::StatusCode::INTERNAL);
            t.fault().Clear();
            EXPECT_EQ(t.server().Get(t.Head().name()).state(), v1::HEAD_STATE_LOST);
            for (const StepCall& call : StepCalls()) EXPECT_EQ(call.call(t, "student", 0), "STEP_LOST") << call.name;
            EXPECT_EQ(t.GetStep(), "STEP_LOST");
            EXPECT_EQ(t.Take(), "STEP_LOST");
            EXPECT_EQ(t.server().Snapshot(t.Head("bystander")), bystander);
            t.Refresh();
            EXPECT_EQ(t.SetWeights(4), "OK");
            EXPECT_EQ(t.Submit({.id = 0}), "COMMITTED DIRECT");
          },
          [](Trial& t) {
            t.Head("bystander");
            EXPECT_EQ(t.SetWeights(4), "OK");
            EXPECT_EQ(t.Submit({.id = 0}), "COMMITTED DIRECT");
          },
          {"0 COMMITTED DIRECT"}};
}

TransactionRow UnharmedRow(const Change& change) {
  return {"AShardFailsDuring" + change.name, "an engine that fails before anything is changed leaves the head as it was",
          [change](Trial& t) {
            t.Head("bystander");
            change.prepare(t);
            const std::vector<std::string> before = Snapshots(t);
            t.fault().Fail(ShardPhase::kAct, t.last_rank());
            EXPECT_EQ(change.run(t), "ENGINE_FAILED");
            t.fault().Clear();
            EXPECT_EQ(Snapshots(t), before);
            EXPECT_EQ(change.run(t), change.answer);
          },
          [change](Trial& t) { Undisturbed(t, change); }, change.after};
}

// The client's deadline passes in the middle of the change; it is carried out nevertheless.
TransactionRow UninterruptedRow(const std::string& name, const std::function<void(Trial&)>& prepare,
                                const std::function<std::string(Trial&, std::optional<int>)>& run, const std::string& repeat,
                                const std::vector<std::string>& lines) {
  return {"NothingInterrupts" + name, "after the decision nothing interrupts it, neither a deadline nor cancellation",
          [prepare, run, repeat](Trial& t) {
            prepare(t);
            t.fault().Hold(ShardPhase::kAct);
            EXPECT_EQ(run(t, 150), "DEADLINE_EXCEEDED");
            t.fault().AwaitHeld();
            t.fault().Clear();
            // The repeat waits for it, or comes after it.
            EXPECT_EQ(run(t, std::nullopt), repeat);
          },
          [prepare, run](Trial& t) {
            prepare(t);
            run(t, std::nullopt);
          },
          lines};
}

}  // namespace

std::vector<TransactionRow> ShardRows() {
  std::vector<TransactionRow> rows;
  for (const Change& change : Changes()) {
    rows.push_back(NotReadyRow(change));
    rows.push_back(change.stages ? UnharmedRow(change) : LostRow(change));
  }
  const std::vector<std::string> both = {"student", "aux"};
  rows.push_back({"AShardFailsDuringACommitOfTwoHeads",
                  "a failure after the decision makes all heads of the micro-batch LOST",
                  [both](Trial& t) {
                    t.Head("bystander");
                    EXPECT_EQ(t.Submit({.id = 0, .heads = both, .explicit_commit = true}), "STAGED STAGED");
                    const std::string bystander = t.server().Snapshot(t.Head("bystander"));
                    t.fault().Fail(ShardPhase::kAct, t.last_rank());
                    EXPECT_EQ(t.Commit({.id = 0, .heads = both}), "ENGINE_FAILED");
                    t.fault().Clear();
                    EXPECT_EQ(t.server().Snapshot(t.Head("bystander")), bystander);
                    for (const std::string& id : both) {
                      EXPECT_EQ(t.server().Get(t.Head(id).name()).state(), v1::HEAD_STATE_LOST);
                      EXPECT_EQ(t.GetStep(id), "STEP_LOST");
                      t.Refresh(id);
                      EXPECT_EQ(t.SetWeights(4, id), "OK");
                    }
                  },
                  [both](Trial& t) {
                    t.Head("bystander");
                    for (const std::string& id : both) EXPECT_EQ(t.SetWeights(4, id), "OK");
                  },
                  {}});
  rows.push_back({"ALostHeadIsRestored",
                  "a LOST head comes back by RestoreCheckpoint",
                  [](Trial& t) {
                    EXPECT_EQ(t.Save("s0"), "OK");
                    t.fault().Fail(ShardPhase::kAct, 0);
                    EXPECT_EQ(t.Submit({.id = 0}), "ENGINE_FAILED");
                    t.Refresh();
                    // A restore that fails half-way leaves it LOST, and says so.
                    for (const ShardPhase phase : {ShardPhase::kPrepare, ShardPhase::kAct}) {
                      t.fault().Fail(phase, t.last_rank());
                      EXPECT_EQ(t.Restore("s0"), "ENGINE_FAILED");
                      EXPECT_EQ(t.server().Get(t.Head().name()).state(), v1::HEAD_STATE_LOST);
                    }
                    t.fault().Clear();
                    EXPECT_EQ(t.Restore("s0"), "OK");
                    EXPECT_EQ(t.Submit({.id = 0}), "COMMITTED DIRECT");
                  },
                  [](Trial& t) { EXPECT_EQ(t.Submit({.id = 0}), "COMMITTED DIRECT"); },
                  {"0 COMMITTED DIRECT"},
                  {.checkpoints = true}});
  rows.push_back({"ALostHeadLosesItsShareEverywhere",
                  "what a LOST head had undecided with others is dropped in all",
                  [both](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 0, .heads = both, .explicit_commit = true}), "STAGED STAGED");
                    t.fault().Fail(ShardPhase::kAct, 0);
                    EXPECT_EQ(t.Submit({.id = 1, .heads = {"aux"}}), "ENGINE_FAILED");
                    t.fault().Clear();
                    EXPECT_EQ(t.MicroBatch(0), "0 DISCARDED STAGED");
                    EXPECT_EQ(t.Commit({.id = 0}), "MICRO_BATCH_DISCARDED");
                    t.Refresh("aux");
                    EXPECT_EQ(t.SetWeights(4, "aux"), "OK");
                  },
                  [](Trial& t) {
                    t.Head();
                    EXPECT_EQ(t.SetWeights(4, "aux"), "OK");
                  },
                  {"0 DISCARDED STAGED"}});
  rows.push_back(UninterruptedRow(
      "ACommit", [](Trial& t) { EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED"); },
      [](Trial& t, std::optional<int> deadline_ms) { return t.Commit({.id = 0, .factor = 0.5, .deadline_ms = deadline_ms}); },
      "OK replayed", {"0 COMMITTED STAGED"}));
  rows.push_back(
      UninterruptedRow("AnApply", SubmitOther,
                       [](Trial& t, std::optional<int> deadline_ms) { return t.Apply({.ids = {9}, .deadline_ms = deadline_ms}); },
                       "OK replayed", {}));
  rows.push_back(UninterruptedRow(
      "ADiscardedGradient", SubmitOther,
      [](Trial& t, std::optional<int> deadline_ms) { return t.DiscardGradient({.deadline_ms = deadline_ms}); }, "OK replayed", {}));
  return rows;
}

}  // namespace headwater::testing
