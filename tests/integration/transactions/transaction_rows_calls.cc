// Rows on calls: how they wait, who waits for whom, what cancels them, and what nothing interrupts.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
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
                    // The engine is busy with another head's micro-batch, which is gone without a trace afterwards.
                    t.Head("other");
                    t.server().gate().Close();
                    const auto busy = t.Open({.id = 0, .head = "other", .explicit_commit = true}, 3);
                    t.server().gate().AwaitWaiting();
                    const auto queued = t.Open({.id = 1}, 3);
                    EXPECT_TRUE(t.AwaitMetric("headwater_queue_depth", 1));
                    t.Cancel(*queued);
                    EXPECT_TRUE(t.AwaitMetric("headwater_queue_depth", 0));
                    t.deadline_ms = 100;
                    EXPECT_EQ(t.Submit({.id = 1}), "DEADLINE_EXCEEDED");
                    EXPECT_TRUE(t.AwaitMetric("headwater_queue_depth", 0));
                    t.CancelHeld(*busy);
                    t.server().gate().Open();
                    EXPECT_TRUE(t.NothingInFlight());
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
                      auto early = std::async(std::launch::async, [&t, call] { return call(t, 1); });
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
                      EXPECT_EQ(call(t, 1), answer);
                    },
                    lines});
  }
  rows.push_back({"TheWaitIsBoundedByTheDeadline", "a call for open step + 1 waits, bounded by its deadline and its cancellation",
                  [](Trial& t) {
                    SubmitFirst(t);
                    t.deadline_ms = 60;
                    for (const StepCall& call : StepCalls()) {
                      if (call.name == "AddGradient" || call.name == "UploadWeights") continue;  // have none
                      EXPECT_EQ(call.call(t, 1), "DEADLINE_EXCEEDED") << call.name;
                    }
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
                      EXPECT_EQ(call.call(t, 1), "STEP_MISMATCH") << call.name;
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
         t.deadline_ms = 400;
         for (int i = 0; i < 10 && told != "MICRO_BATCH_MISSING"; ++i) told = t.Seal({.ids = {0, 1}, .wait = true});
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
                                const std::function<std::string(Trial&)>& run, const std::vector<std::string>& lines) {
  return {"NothingInterrupts" + name, "after the decision nothing interrupts it, neither a deadline nor cancellation",
          [prepare, run](Trial& t) {
            prepare(t);
            t.fault().Hold(ShardPhase::kAct);
            t.deadline_ms = 150;
            EXPECT_EQ(run(t), "DEADLINE_EXCEEDED");
            t.deadline_ms = Trial::kDeadlineMs;
            t.fault().AwaitHeld();
            t.fault().Clear();
            EXPECT_EQ(run(t), "OK replayed");  // it waits for the first, or comes after it
          },
          [prepare, run](Trial& t) {
            prepare(t);
            run(t);
          },
          lines};
}

// A shard that fails after the decision makes the head LOST on all shards, and no other.
std::vector<TransactionRow> ShardRows() {
  std::vector<TransactionRow> rows;
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
      [](Trial& t) { return t.Commit({.id = 0, .factor = 0.5}); }, {"0 COMMITTED STAGED"}));
  rows.push_back(UninterruptedRow("AnApply", SubmitFirst, [](Trial& t) { return t.Apply({.ids = {0}}); }, {}));
  rows.push_back(UninterruptedRow("ADiscardedGradient", SubmitFirst, [](Trial& t) { return t.DiscardGradient(); }, {}));
  return rows;
}

}  // namespace

std::vector<TransactionRow> CallRows() {
  std::vector<TransactionRow> rows = CancelledRows();
  for (const auto& more : {WaitRows(), ShardRows()}) rows.insert(rows.end(), more.begin(), more.end());
  return rows;
}

}  // namespace headwater::testing
