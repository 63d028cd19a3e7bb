// Rows on calls: how they wait, who waits for whom, what cancels them, and what nothing interrupts.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "tests/integration/transactions/transaction_harness.h"

namespace headwater::testing {
namespace {

void ApplyFirst(Trial& t) {
  SubmitFirst(t);
  EXPECT_EQ(t.Apply({.ids = {0}}), "OK");
}

void StageAndCommit(Trial& t) {
  EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED");
  EXPECT_EQ(t.Commit({.id = 0}), "OK");
}

TrialSetup MaxStepWait(int milliseconds) {
  return {.adjust = [milliseconds](ServerSetup& setup) { setup.options.limits.max_step_wait = absl::Milliseconds(milliseconds); }};
}

v1::StepState StateOf(Trial& t) { return t.server().Steps(t.Head()).open().state(); }

// The engine is busy with another head's micro-batch, which is gone without a trace afterwards.
class BusyEngine {
 public:
  explicit BusyEngine(Trial& t) : t_(t) {
    t.Head("other");
    t.server().gate().Close();
    call_ = t.Open({.id = 0, .heads = {"other"}, .explicit_commit = true}, 3);
    t.server().gate().AwaitWaiting();
  }
  void End() {
    t_.CancelHeld(*call_);
    t_.server().gate().Open();
    EXPECT_TRUE(t_.NothingInFlight());
  }

 private:
  Trial& t_;
  std::unique_ptr<OpenCall> call_;
};

// An EXPLICIT micro-batch is cancelled while the engine computes it.
void CancelWhileComputing(Trial& t, const Batch& batch) {
  t.Head();
  t.server().gate().Close();
  const auto call = t.Open(batch, 3);
  t.server().gate().AwaitWaiting();
  t.CancelHeld(*call);
  t.server().gate().Open();
  EXPECT_TRUE(t.NothingInFlight());
  EXPECT_EQ(t.MicroBatches(), std::vector<std::string>());
}

// ---- before and while it is computed ---------------------------------------------------------------------------------

std::vector<TransactionRow> CancelledRows() {
  std::vector<TransactionRow> rows;
  rows.push_back({"CancelledWhileUploading", "an aborted micro-batch leaves the accumulator bitwise as it was", [](Trial& t) {
                    SubmitFirst(t);
                    const auto call = t.Open({.id = 1}, 2);
                    EXPECT_TRUE(t.server().AwaitInFlight());
                    t.Cancel(*call);
                    EXPECT_TRUE(t.NothingInFlight());
                  }});
  rows.push_back({"EndedInTheQueue",
                  "DIRECT: before the first product cancellation and deadline abort",
                  [](Trial& t) {
                    SubmitFirst(t);
                    BusyEngine engine(t);
                    const auto queued = t.Open({.id = 1}, 3);
                    EXPECT_TRUE(t.AwaitMetric("headwater_queue_depth", 1));
                    t.Cancel(*queued);
                    EXPECT_TRUE(t.AwaitMetric("headwater_queue_depth", 0));
                    EXPECT_EQ(t.Submit({.id = 1, .deadline_ms = 100}), "DEADLINE_EXCEEDED");
                    EXPECT_TRUE(t.AwaitMetric("headwater_queue_depth", 0));
                    engine.End();
                  },
                  [](Trial& t) {
                    SubmitFirst(t);
                    t.Head("other");
                  },
                  {kEagerLine},
                  // The engine takes one micro-batch at a time: the next one waits in the queue.
                  {.adjust = [](ServerSetup& setup) {
                    setup.options.queue_widths = {1, 1};
                  }}});
  rows.push_back({"CancelledAfterTheFirstProduct",
                  "DIRECT: from the first product on, cancellation no longer aborts; GetStep tells, and a repeat adds nothing",
                  [](Trial& t) {
                    t.Head();
                    t.server().gate().Close();
                    const auto call = t.Open({.id = 0}, 3);
                    t.server().gate().AwaitWaiting();
                    t.CancelHeld(*call);
                    t.server().gate().Open();
                    EXPECT_TRUE(Await([&] { return t.MicroBatch(0) == kEagerLine; }));
                    EXPECT_TRUE(t.NothingInFlight());
                    EXPECT_EQ(t.Submit({.id = 0}), "COMMITTED DIRECT replayed");
                  }});
  rows.push_back({"ExplicitCancelledWhileComputing",
                  "EXPLICIT: cancelled before its answer, nothing of it is left",
                  [](Trial& t) {
                    CancelWhileComputing(t, {.id = 0, .explicit_commit = true});
                    StageAndCommit(t);  // in the only slot
                  },
                  StageAndCommit,
                  {"0 COMMITTED STAGED"}});
  rows.push_back({"HeldCancelledWhileComputing",
                  "HELD: cancelled before its answer, nothing of it is left",
                  [](Trial& t) {
                    CancelWhileComputing(t, {.id = 0, .explicit_commit = true, .late_token_factors = true});
                    EXPECT_TRUE(t.AwaitMetric("headwater_held_bytes", 0));
                  },
                  [](Trial& t) { t.Head(); },
                  {}});
  rows.push_back({"TheSlowUploaderHoldsNobody",
                  "a slow uploader never holds the GPU: work is scheduled when its data is there",
                  [](Trial& t) {
                    const auto slow = t.Open({.id = 0}, 1);
                    EXPECT_TRUE(t.server().AwaitInFlight());
                    EXPECT_EQ(t.Submit({.id = 1}), "COMMITTED DIRECT");
                    EXPECT_EQ(t.Submit({.id = 2, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Commit({.id = 2}), "OK");
                    slow->SendRest();
                    EXPECT_EQ(slow->End(), "COMMITTED DIRECT");
                  },
                  [](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 1}), "COMMITTED DIRECT");
                    EXPECT_EQ(t.Submit({.id = 2, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Commit({.id = 2}), "OK");
                    SubmitFirst(t);
                  },
                  {kEagerLine, "1 COMMITTED DIRECT", "2 COMMITTED STAGED"}});
  return rows;
}

// ---- waiting for the next step, and for what a step still needs ------------------------------------------------------

std::vector<TransactionRow> WaitRows() {
  std::vector<TransactionRow> rows;
  for (const StepCall& step_call : StepCalls()) {
    const auto call = step_call.call;
    const std::string answer = step_call.answer;
    // What the call leaves in the step that it waited for.
    std::vector<std::string> lines;
    if (step_call.name == "ComputeLoss") lines = {kEagerLine};
    if (step_call.name == "AddGradient") lines = {"1 COMMITTED DIRECT"};
    if (step_call.name == "DiscardMicroBatch") lines = {"3 DISCARDED"};
    rows.push_back({"TheNextStepIsAwaitedBy" + step_call.name, "a call for open step + 1 waits",
                    [call, answer](Trial& t) {
                      SubmitFirst(t);
                      auto early = std::async(std::launch::async, [&t, call] { return call(t, "student", 1); });
                      EXPECT_TRUE(t.AwaitMetric("headwater_waiting_calls", 1));
                      if (answer == "COMMITTED DIRECT") {
                        EXPECT_TRUE(t.NothingInFlight());  // it holds no budget
                      }
                      EXPECT_EQ(early.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
                      EXPECT_EQ(t.Apply({.ids = {0}}), "OK");
                      EXPECT_EQ(early.get(), answer);
                    },
                    [call, answer](Trial& t) {
                      ApplyFirst(t);
                      EXPECT_EQ(call(t, "student", 1), answer);
                    },
                    lines});
  }
  rows.push_back({"TheWaitIsBoundedByTheDeadline", "a call for open step + 1 waits, bounded by its deadline and its cancellation",
                  [](Trial& t) {
                    SubmitFirst(t);
                    const int ms = 60;
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1, .deadline_ms = ms}), "DEADLINE_EXCEEDED");
                    EXPECT_EQ(t.Commit({.id = 0, .step = 1, .deadline_ms = ms}), "DEADLINE_EXCEEDED");
                    EXPECT_EQ(t.Discard({.id = 0, .step = 1, .deadline_ms = ms}), "DEADLINE_EXCEEDED");
                    EXPECT_EQ(t.Seal({.step = 1, .deadline_ms = ms}), "DEADLINE_EXCEEDED");
                    EXPECT_EQ(t.Apply({.step = 1, .deadline_ms = ms}), "DEADLINE_EXCEEDED");
                    EXPECT_EQ(t.DiscardGradient({.step = 1, .deadline_ms = ms}), "DEADLINE_EXCEEDED");
                    EXPECT_EQ(t.Norm({.step = 1, .deadline_ms = ms}), "DEADLINE_EXCEEDED");
                    EXPECT_EQ(t.Download({.step = 1, .deadline_ms = ms}), "DEADLINE_EXCEEDED");
                    EXPECT_TRUE(t.AwaitMetric("headwater_waiting_calls", 0));
                    const auto early = t.Open({.id = 0, .step = 1}, 0);
                    EXPECT_TRUE(t.AwaitMetric("headwater_waiting_calls", 1));
                    t.Cancel(*early);
                    EXPECT_TRUE(t.AwaitMetric("headwater_waiting_calls", 0));
                  }});
  rows.push_back({"TheWaitIsBoundedByTheServer",
                  "and by the server's limit, to be answered STEP_MISMATCH with the open step",
                  [](Trial& t) {
                    SubmitFirst(t);
                    for (const StepCall& call : StepCalls()) {
                      EXPECT_EQ(call.call(t, "student", 1), "STEP_MISMATCH") << call.name;
                      EXPECT_EQ(t.last_error().at("openStep"), "0") << call.name;
                    }
                  },
                  SubmitFirst,
                  {kEagerLine},
                  MaxStepWait(30)});
  rows.push_back({"TheSealWaits",
                  "SealStep may wait for what is missing or undecided until its deadline",
                  [](Trial& t) {
                    t.Head();
                    auto seal = std::async(std::launch::async, [&t] { return t.Seal({.ids = {0, 1}, .wait = true}); });
                    EXPECT_TRUE(t.AwaitMetric("headwater_waiting_calls", 1));
                    SubmitFirst(t);
                    EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(seal.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
                    EXPECT_EQ(StateOf(t), v1::STEP_STATE_OPEN);
                    EXPECT_EQ(t.Commit({.id = 1}), "OK");
                    EXPECT_EQ(seal.get(), "OK");
                  },
                  [](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Commit({.id = 1}), "OK");
                    EXPECT_EQ(t.Seal({.ids = {0, 1}}), "OK");
                  },
                  {kEagerLine, "1 COMMITTED STAGED"}});
  rows.push_back(
      {"TheSealWaitsInVain", "a SealStep that waits in vain changes nothing; what cannot come is refused at once", [](Trial& t) {
         SubmitFirst(t);
         // The answer leaves before the deadline; on a machine that is busy it may come too late nevertheless.
         std::string told;
         for (int i = 0; i < 10 && told != "MICRO_BATCH_MISSING"; ++i)
           told = t.Seal({.ids = {0, 1}, .wait = true, .deadline_ms = 400});
         EXPECT_EQ(told, "MICRO_BATCH_MISSING");
         EXPECT_EQ(t.last_error().at("missing"), "1");
         EXPECT_TRUE(t.AwaitMetric("headwater_waiting_calls", 0));
         EXPECT_EQ(t.Seal({.ids = {}, .wait = true}), "MICRO_BATCH_UNEXPECTED");
         EXPECT_EQ(StateOf(t), v1::STEP_STATE_OPEN);
       }});
  rows.push_back({"TheSealWaitsAsLongAsTheServerLets",
                  "and at most the server's limit: then it tells what is missing",
                  [](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Seal({.ids = {0, 1}, .wait = true}), "MICRO_BATCH_MISSING");
                    EXPECT_EQ(t.last_error().at("missing"), "1");
                  },
                  SubmitFirst,
                  {kEagerLine},
                  MaxStepWait(50)});
  return rows;
}

// ---- after the decision ----------------------------------------------------------------------------------------------

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

// A shard that fails after the decision makes the head LOST on all shards, and no other.
std::vector<TransactionRow> ShardRows() {
  std::vector<TransactionRow> rows;
  rows.push_back({"AShardIsNotReadyForACommit",
                  "decided once, when every shard is ready: SHARD_NOT_READY changes nothing, and the same call works later",
                  [](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED");
                    const std::string before = t.server().Snapshot(t.Head());
                    for (const int32_t rank : {0, t.last_rank()}) {
                      t.fault().Fail(ShardPhase::kPrepare, rank);
                      EXPECT_EQ(t.Commit({.id = 0}), "SHARD_NOT_READY");
                      EXPECT_EQ(t.last_error().at("shard"), std::to_string(rank));
                      t.fault().Clear();
                      EXPECT_EQ(t.server().Snapshot(t.Head()), before);
                    }
                    EXPECT_EQ(t.Commit({.id = 0}), "OK");
                  },
                  StageAndCommit,
                  {"0 COMMITTED STAGED"}});
  rows.push_back({"AShardFailsDuringACommitOfTwoHeads",
                  "a failure after the decision makes all heads of the micro-batch LOST until their weights are set",
                  [](Trial& t) {
                    const std::vector<std::string> both = {"student", "aux"};
                    t.Head("bystander");
                    EXPECT_EQ(t.Submit({.id = 0, .heads = both, .explicit_commit = true}), "STAGED STAGED");
                    const std::string bystander = t.server().Snapshot(t.Head("bystander"));
                    t.fault().Fail(ShardPhase::kAct, t.last_rank());
                    EXPECT_EQ(t.Commit({.id = 0, .heads = both}), "ENGINE_FAILED");
                    t.fault().Clear();
                    EXPECT_EQ(t.server().Snapshot(t.Head("bystander")), bystander);
                    for (const std::string& id : both) {
                      EXPECT_EQ(t.server().Get(t.Head(id).name()).state(), v1::HEAD_STATE_LOST);
                      for (const StepCall& call : StepCalls()) EXPECT_EQ(call.call(t, id, 0), "STEP_LOST") << call.name;
                      EXPECT_EQ(t.GetStep(id), "STEP_LOST");
                      EXPECT_EQ(t.Take(id), "STEP_LOST");
                      t.Refresh(id);
                      EXPECT_EQ(t.SetWeights(4, id), "OK");
                    }
                  },
                  [](Trial& t) {
                    t.Head("bystander");
                    for (const char* id : {"student", "aux"}) EXPECT_EQ(t.SetWeights(4, id), "OK");
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
                  SubmitFirst,
                  {"0 COMMITTED DIRECT"},
                  {.checkpoints = true}});
  rows.push_back(UninterruptedRow(
      "ACommit", [](Trial& t) { EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED"); },
      [](Trial& t, std::optional<int> deadline_ms) { return t.Commit({.id = 0, .factor = 0.5, .deadline_ms = deadline_ms}); },
      "OK replayed", {"0 COMMITTED STAGED"}));
  rows.push_back(
      UninterruptedRow("AnApply", SubmitFirst,
                       [](Trial& t, std::optional<int> deadline_ms) { return t.Apply({.ids = {0}, .deadline_ms = deadline_ms}); },
                       "OK replayed", {}));
  rows.push_back(UninterruptedRow(
      "ADiscardedGradient", SubmitFirst,
      [](Trial& t, std::optional<int> deadline_ms) { return t.DiscardGradient({.deadline_ms = deadline_ms}); }, "OK replayed", {}));
  return rows;
}

}  // namespace

std::vector<TransactionRow> CallRows() {
  std::vector<TransactionRow> rows = CancelledRows();
  for (const auto& more : {WaitRows(), ShardRows()}) rows.insert(rows.end(), more.begin(), more.end());
  return rows;
}

}  // namespace headwater::testing
