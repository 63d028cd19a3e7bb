// Table-driven tests of the state that calls leave, through the wire: see transaction_harness.h. Each row runs on 1 and on 3
// shards. What a head decides is tested in tests/unit/server and its histories; a row is there for each way into the head and out
// of it: on calls, how they wait, who waits for whom, what cancels them, and what nothing interrupts; on what heads keep,
// contributions and their attempts, sessions, steps, epochs, and what comes back after a restart.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/escaping.h"
#include "tests/integration/transactions/transaction_harness.h"

namespace headwater::testing {
namespace {

TrialSetup MaxStepWait(int milliseconds) {
  return {.server = WithLimit(&service::Limits::max_step_wait, absl::Milliseconds(milliseconds))};
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
  EXPECT_TRUE(t.server().AwaitNothingInFlight());
  EXPECT_EQ(t.MicroBatches(), std::vector<std::string>());
}

void StageAndCommitHalf(Trial& t) {
  StageFirst(t);
  EXPECT_EQ(t.Commit({.id = 0, .factor = 0.5}), "OK");
}

void SealFirst(Trial& t) {
  SubmitFirst(t);
  EXPECT_EQ(t.Seal({.ids = {0}}), "OK");
}

void ApplyFirstAndSubmit(Trial& t) {
  ApplyFirst(t);
  EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
}

// A call that carries no step and no micro-batch.
void MakeForwardOnly(v1::MicroBatchHeader& header) {
  header.set_compute_mode(v1::COMPUTE_MODE_FORWARD_ONLY);
  header.clear_micro_batch();
  header.mutable_terms(0)->mutable_head()->clear_step();
  header.mutable_terms(0)->mutable_head()->clear_head_epoch();
}

void Sleep(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

const TrialSetup kWithCheckpoints = {.checkpoints = true};

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

// A call for the next step waits until that step is open.
TransactionRow AwaitedRow(const StepCall& step_call) {
  const auto call = step_call.call;
  const std::string answer = step_call.answer;
  return {"TheNextStepIsAwaitedBy" + step_call.name, "a call for open step + 1 waits",
          [call, answer](Trial& t) {
            SubmitFirst(t);
            auto early = std::async(std::launch::async, [&t, call] { return call(t, 1); });
            EXPECT_TRUE(t.AwaitMetric("headwater_waiting_calls", 1));
            if (answer == "COMMITTED DIRECT") {
              EXPECT_TRUE(t.server().AwaitNothingInFlight());  // it holds no budget
            }
            EXPECT_EQ(early.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
            EXPECT_EQ(t.Apply({.ids = {0}}), "OK");
            EXPECT_EQ(early.get(), answer);
          },
          [call, answer](Trial& t) {
            ApplyFirst(t);
            EXPECT_EQ(call(t, 1), answer);
          },
          step_call.micro_batches};
}

std::vector<TransactionRow> AllRows() {
  std::vector<TransactionRow> rows = {
      // ---- before and while it is computed
      {"CancelledWhileUploading", "an aborted micro-batch leaves the accumulator bitwise as it was",
       [](Trial& t) {
         SubmitFirst(t);
         const auto call = t.Open({.id = 1}, 2);
         EXPECT_TRUE(t.server().AwaitInFlight());
         t.Cancel(*call);
         EXPECT_TRUE(t.server().AwaitNothingInFlight());
       }},
      {"EndedInTheQueue",
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
         EXPECT_TRUE(t.server().AwaitNothingInFlight());
       },
       [](Trial& t) {
         SubmitFirst(t);
         t.Head("other");
       },
       {kEagerLine},
       // The engine takes one micro-batch at a time: the next one waits in the queue.
       {.server = WithOption(&service::ServerOptions::queue_widths, {1, 1})}},
      {"ExplicitCancelledWhileComputing",
       "EXPLICIT: cancelled before its answer, nothing of it is left",
       [](Trial& t) {
         CancelWhileComputing(t, {.id = 0, .explicit_commit = true});
         StageAndCommitFirst(t);  // in the only slot
       },
       StageAndCommitFirst,
       {"0 COMMITTED STAGED"}},
      {"HeldCancelledWhileComputing",
       "HELD: cancelled before its answer, nothing of it is left",
       [](Trial& t) {
         CancelWhileComputing(t, {.id = 0, .explicit_commit = true, .late_token_factors = true});
         EXPECT_TRUE(t.AwaitMetric("headwater_held_bytes", 0));
       },
       [](Trial& t) { t.Head(); },
       {}},
      // ---- waiting for the next step, and for what a step still needs
      {"TheWaitIsBoundedByTheDeadline", "a call for open step + 1 waits, bounded by its deadline and its cancellation",
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
       }},
      {"TheWaitIsBoundedByTheServer",
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
       MaxStepWait(30)},
      {"TheSealWaits",
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
       {kEagerLine, "1 COMMITTED STAGED"}},
      {"TheSealWaitsInVain", "a SealStep that waits in vain changes nothing; what cannot come is refused at once",
       [](Trial& t) {
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
       }},
      {"TheSealWaitsAsLongAsTheServerLets",
       "and at most the server's limit: then it tells what is missing",
       [](Trial& t) {
         SubmitFirst(t);
         EXPECT_EQ(t.Seal({.ids = {0, 1}, .wait = true}), "MICRO_BATCH_MISSING");
         EXPECT_EQ(t.last_error().at("missing"), "1");
       },
       SubmitFirst,
       {kEagerLine},
       MaxStepWait(50)},
      // ---- after the decision
      // A shard that fails after the decision makes the head LOST on all shards, and no other.
      {"ALostHeadIsRestored",
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
       {.checkpoints = true}},
      UninterruptedRow("ACommit", StageFirst, [](Trial& t) { return t.Commit({.id = 0, .factor = 0.5}); }, {"0 COMMITTED STAGED"}),
      UninterruptedRow("AnApply", SubmitFirst, [](Trial& t) { return t.Apply({.ids = {0}}); }, {}),
      UninterruptedRow("ADiscardedGradient", SubmitFirst, [](Trial& t) { return t.DiscardGradient(); }, {}),
      // ---- contributions
      {"ExplicitIsStaged",
       "STAGED: EXPLICIT; what the products need is kept until the commit, which brings a factor",
       [](Trial& t) {
         const std::string before = t.Gradient();
         StageFirst(t);
         EXPECT_EQ(t.MicroBatch(0), "0 STAGED STAGED");
         EXPECT_EQ(t.Gradient(), before);
         EXPECT_EQ(t.server().Steps(t.Head()).open().totals().micro_batch_count(), 0);
         EXPECT_EQ(t.Commit({.id = 0, .factor = 0.5}), "OK");
         EXPECT_EQ(t.Commit({.id = 0, .factor = 0.5}), "OK replayed");
         EXPECT_EQ(t.Commit({.id = 0, .factor = 0.25}), "MICRO_BATCH_CONFLICT");
         EXPECT_EQ(t.Discard({.id = 0}), "MICRO_BATCH_CONFLICT");
         EXPECT_EQ(t.server().Find(t.Head(), 0).factor(), 0.5);
       },
       StageAndCommitHalf,
       {"0 COMMITTED STAGED"}},
      {"NoSlotButAllowed",
       "HELD: no slot free and the request allows it: the products run at commit",
       [](Trial& t) {
         const std::string before = t.Gradient();
         EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true, .allow_held = true}), "STAGED STAGED");
         const LossReply held = t.Compute({.id = 1, .explicit_commit = true, .allow_held = true});
         EXPECT_EQ(held.summary.form(), v1::CONTRIBUTION_FORM_HELD);
         EXPECT_EQ(held.grad_hidden.size(), 60U);
         EXPECT_EQ(held.summary.terms_size(), 1);
         for (const auto& term : held.summary.terms()) EXPECT_GT(term.sums().loss_sum(), 0);
         EXPECT_EQ(t.MicroBatch(1), "1 STAGED HELD");
         EXPECT_TRUE(t.AwaitMetric("headwater_micro_batches_total{outcome=\"held\"}", 1));
         EXPECT_EQ(t.Gradient(), before);
         EXPECT_EQ(t.Commit({.id = 1}), "OK");
         EXPECT_EQ(t.Commit({.id = 1}), "OK replayed");
         EXPECT_EQ(t.Commit({.id = 0, .factor = 0.5}), "OK");
         EXPECT_TRUE(t.AwaitMetric("headwater_held_bytes", 0));
       },
       [](Trial& t) {
         EXPECT_EQ(t.Submit({.id = 1}), "COMMITTED DIRECT");
         StageAndCommitHalf(t);
       },
       {"0 COMMITTED STAGED", "1 COMMITTED HELD"}},
      {"SameDigest", "same key, same digest: the answer is computed again, nothing is added, replayed = true",
       [](Trial& t) {
         const LossReply first = t.Compute({.id = 0});
         const LossReply second = t.Compute({.id = 0});
         EXPECT_TRUE(second.summary.replayed());
         EXPECT_EQ(second.grad_hidden, first.grad_hidden);
         EXPECT_EQ(second.summary.digest(), first.summary.digest());
         EXPECT_EQ(second.summary.terms(0).sums().SerializeAsString(), first.summary.terms(0).sums().SerializeAsString());
       }},
      {"FirstWins", "other digest with FIRST_WINS: computed and answered, nothing added, payload_differs = true",
       [](Trial& t) {
         SubmitFirst(t);
         const LossReply reply = t.Compute({.id = 0, .seed = 7, .first_wins = true});
         EXPECT_TRUE(reply.summary.payload_differs());
         EXPECT_FALSE(reply.summary.replayed());
         EXPECT_EQ(reply.grad_hidden.size(), 60U);
         EXPECT_EQ(t.Submit({.id = 0, .first_wins = true}), "COMMITTED DIRECT replayed");
       }},
      {"ItsHeaderIsEnough",
       "a higher attempt takes effect once its header is accepted, though its rows never come",
       [](Trial& t) {
         StageFirst(t);
         const auto call = t.Open({.id = 0, .attempt = 2, .explicit_commit = true}, 1);
         EXPECT_TRUE(Await([&] { return t.MicroBatch(0) == "0 UNSPECIFIED @2"; })) << t.MicroBatch(0);
         EXPECT_EQ(t.Commit({.id = 0}), "ATTEMPT_SUPERSEDED");
         EXPECT_EQ(t.Commit({.id = 0, .attempt = 2}), "MICRO_BATCH_NOT_FOUND");
         EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true}), "STAGED STAGED");  // the slot is free
         EXPECT_EQ(t.Discard({.id = 1}), "OK dropped");
         t.Cancel(*call);
         EXPECT_TRUE(t.server().AwaitNothingInFlight());
         EXPECT_EQ(t.Submit({.id = 0, .attempt = 1, .explicit_commit = true}), "ATTEMPT_SUPERSEDED");
         EXPECT_EQ(t.last_error().at("knownAttempt"), "2");
         EXPECT_TRUE(t.AwaitMetric("headwater_micro_batches_total{outcome=\"superseded\"}", 1));
         EXPECT_EQ(t.Submit({.id = 0, .attempt = 2, .explicit_commit = true}), "STAGED STAGED");
         EXPECT_EQ(t.Commit({.id = 0, .attempt = 2}), "OK");
       },
       StageAndCommitFirst,
       {"0 COMMITTED STAGED @2", "1 DISCARDED STAGED"}},
      {"AddGradientIsAContribution",
       "AddGradient adds a trainer's own part as a contribution: once",
       [](Trial& t) {
         SubmitFirst(t);
         EXPECT_EQ(t.AddPart({.id = 5, .factor = 0.5}), "OK");
         EXPECT_EQ(t.AddPart({.id = 5, .factor = 0.5}), "OK replayed");
         EXPECT_EQ(t.AddPart({.id = 5, .factor = 0.5, .attempt = 3}), "OK replayed");
         EXPECT_EQ(t.AddPart({.id = 5, .factor = 0.25}), "MICRO_BATCH_CONFLICT");
         EXPECT_EQ(t.AddPart({.id = 5, .row_start = 1, .factor = 0.5}), "MICRO_BATCH_CONFLICT");
         EXPECT_EQ(t.AddPart({.id = 5, .seed = 3, .factor = 0.5}), "MICRO_BATCH_CONFLICT");
         EXPECT_EQ(t.AddPart({.id = 0}), "MICRO_BATCH_CONFLICT");
         EXPECT_EQ(t.Submit({.id = 5}), "MICRO_BATCH_CONFLICT");
         EXPECT_EQ(t.Seal({.ids = {0}}), "MICRO_BATCH_UNEXPECTED");
         EXPECT_EQ(t.Discard({.id = 5}), "MICRO_BATCH_CONFLICT");
         EXPECT_EQ(t.Seal({.ids = {0, 5}}), "OK");
         EXPECT_EQ(t.AddPart({.id = 5, .factor = 0.5}), "OK replayed");
       },
       [](Trial& t) {
         SubmitFirst(t);
         EXPECT_EQ(t.AddPart({.id = 5, .factor = 0.5}), "OK");
         EXPECT_EQ(t.Seal({.ids = {0, 5}}), "OK");
       },
       {kEagerLine, "5 COMMITTED DIRECT"}},
      {"GetStepTellsTheLastClosed",
       "GetStep: open and last closed step, each micro-batch's attempt, state, digest, counts",
       [](Trial& t) {
         const LossReply reply = t.Compute({.id = 0, .attempt = 2});
         EXPECT_EQ(t.Discard({.id = 1}), "OK");
         EXPECT_EQ(t.Apply({.ids = {0}}), "OK");
         const v1::GetStepResponse steps = t.server().Steps(t.Head());
         EXPECT_EQ(steps.open().step(), 1);
         EXPECT_EQ(steps.open().micro_batches_size(), 0);
         const v1::Step& closed = steps.last_closed();
         EXPECT_EQ(closed.step(), 0);
         EXPECT_EQ(closed.state(), v1::STEP_STATE_APPLIED);
         EXPECT_EQ(closed.totals().micro_batch_count(), 1);
         EXPECT_EQ(closed.totals().valid_token_count(), 3);
         EXPECT_EQ(closed.totals().loss_sum(), reply.summary.terms(0).sums().loss_sum());
         EXPECT_EQ(closed.totals().token_weight_sum(), 3);
         EXPECT_EQ(closed.micro_batches_size(), 2);
         if (closed.micro_batches_size() != 2) return;
         EXPECT_EQ(closed.micro_batches(0).attempt(), 2);
         EXPECT_EQ(closed.micro_batches(0).state(), v1::CONTRIBUTION_STATE_COMMITTED);
         EXPECT_EQ(closed.micro_batches(0).digest(), reply.summary.digest());
         EXPECT_EQ(closed.micro_batches(0).valid_token_count(), 3);
         EXPECT_EQ(closed.micro_batches(0).factor(), 1);
         EXPECT_EQ(closed.micro_batches(1).state(), v1::CONTRIBUTION_STATE_DISCARDED);
       },
       ApplyFirst,
       {}},
      // ---- sessions
      {"TheLeaseEnds",
       "when the lease ends its uncommitted contributions go (committed ones stay)",
       [](Trial& t) {
         const std::string session = t.OpenSession(1500);
         EXPECT_EQ(t.Submit({.id = 0, .session = session}), "COMMITTED DIRECT");
         EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true, .session = session}), "STAGED STAGED");
         EXPECT_EQ(t.Submit({.id = 2, .explicit_commit = true, .late_token_factors = true, .session = session}), "STAGED HELD");
         EXPECT_TRUE(Await([&] { return t.MicroBatch(2) == "2 DISCARDED HELD"; })) << t.MicroBatch(2);
         EXPECT_EQ(t.MicroBatch(1), "1 DISCARDED STAGED");
         EXPECT_TRUE(t.AwaitMetric("headwater_held_bytes", 0));
         EXPECT_TRUE(t.AwaitMetric("headwater_sessions_ended_total{how=\"expired\"}", 1));
         EXPECT_TRUE(t.AwaitMetric("headwater_session_discards_total{how=\"expired\"}", 2));
         EXPECT_EQ(t.KeepAlive(session), "SESSION_NOT_FOUND");
         EXPECT_EQ(t.Commit({.id = 1, .session = session}), "SESSION_NOT_FOUND");
         EXPECT_EQ(t.Commit({.id = 1}), "MICRO_BATCH_DISCARDED");
         EXPECT_EQ(t.Submit({.id = 1}), "MICRO_BATCH_DISCARDED");
         EXPECT_EQ(t.Submit({.id = 1, .attempt = 1}), "COMMITTED DIRECT");
       },
       [](Trial& t) {
         SubmitFirst(t);
         EXPECT_EQ(t.Submit({.id = 1}), "COMMITTED DIRECT");
       },
       {kEagerLine, "1 COMMITTED DIRECT @1", "2 DISCARDED HELD"}},
      {"TheLeaseIsRenewed",
       "a lease is renewed by any call or KeepAlive",
       [](Trial& t) {
         const std::string kept = t.OpenSession(3000), busy = t.OpenSession(3000);
         const Batch held = {.id = 1, .explicit_commit = true, .late_token_factors = true, .session = busy};
         EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true, .session = kept}), "STAGED STAGED");
         EXPECT_EQ(t.Submit(held), "STAGED HELD");
         Sleep(1600);
         EXPECT_EQ(t.KeepAlive(kept), "OK");
         EXPECT_EQ(t.Submit(held), "STAGED HELD replayed");
         Sleep(1600);
         EXPECT_EQ(t.Commit({.id = 0, .session = kept}), "OK");
         EXPECT_EQ(t.Commit({.id = 1, .session = busy}), "OK");
       },
       [](Trial& t) {
         StageAndCommitFirst(t);
         EXPECT_EQ(t.Submit({.id = 1}), "COMMITTED DIRECT");
       },
       {"0 COMMITTED STAGED", "1 COMMITTED HELD"}},
      {"NoLeaseEndsWhileACallRuns",
       "a session never ends while one of its calls runs; if it is closed meanwhile, what the call leaves goes",
       [](Trial& t) {
         const std::string session = t.OpenSession(1200);
         t.Head();
         t.server().gate().Close();
         const auto call = t.Open({.id = 0, .explicit_commit = true, .session = session}, 3);
         t.server().gate().AwaitWaiting();
         Sleep(1500);
         t.server().gate().Open();
         EXPECT_EQ(call->Answer(), "STAGED STAGED");
         EXPECT_EQ(t.Commit({.id = 0, .session = session}), "OK");
         t.server().gate().Close();
         const auto last = t.Open({.id = 1, .explicit_commit = true, .session = session}, 3);
         t.server().gate().AwaitWaiting();
         auto close = std::async(std::launch::async, [&] { return t.CloseSession(session); });
         EXPECT_TRUE(Await([&] { return t.KeepAlive(session) == "SESSION_NOT_FOUND"; }));
         t.server().gate().Open();
         last->Answer();
         EXPECT_EQ(close.get(), "OK");
         EXPECT_TRUE(Await([&] { return t.MicroBatch(1) == "1 DISCARDED STAGED"; })) << t.MicroBatch(1);
       },
       StageAndCommitFirst,
       {"0 COMMITTED STAGED", "1 DISCARDED STAGED"}},
      {"TheSessionIsClosed",
       "a closed session's uncommitted contributions go; closing again is no error",
       [](Trial& t) {
         const std::string session = t.OpenSession();
         const std::string other = t.OpenSession();
         EXPECT_EQ(t.Submit({.id = 0, .session = session}), "COMMITTED DIRECT");
         EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true, .session = session}), "STAGED STAGED");
         EXPECT_EQ(t.CloseSession(other), "OK");
         EXPECT_EQ(t.MicroBatch(1), "1 STAGED STAGED");
         EXPECT_EQ(t.CloseSession(session), "OK");
         EXPECT_EQ(t.CloseSession(session), "OK");
         EXPECT_EQ(t.MicroBatch(1), "1 DISCARDED STAGED");
         EXPECT_TRUE(t.AwaitMetric("headwater_session_discards_total{how=\"closed\"}", 1));
         EXPECT_TRUE(t.AwaitMetric("headwater_session_discards_total{how=\"expired\"}", 0));
         EXPECT_EQ(t.Submit({.id = 2, .session = session}), "SESSION_NOT_FOUND");
         EXPECT_EQ(t.KeepAlive(session), "SESSION_NOT_FOUND");
       },
       SubmitFirst,
       {kEagerLine, "1 DISCARDED STAGED"}},
      // ---- new weights, take-over, restart
      {"NewWeightsCloseTheStep",
       "UploadWeights{closes_step}: swapped in whole, the epoch stays, step + 1 is open",
       [](Trial& t) {
         SealFirst(t);
         const int64_t version = t.server().Get(t.Head().name()).weight_version();
         EXPECT_EQ(t.Replace(), "OK replaced");
         EXPECT_EQ(t.server().Steps(t.Head()).last_closed().state(), v1::STEP_STATE_REPLACED);
         EXPECT_EQ(t.server().Get(t.Head().name()).weight_version(), version + 1);
         EXPECT_EQ(t.Replace(), "OK replaced");
         EXPECT_EQ(t.server().Get(t.Head().name()).weight_version(), version + 1);
         EXPECT_EQ(t.server().Weights(t.Head()), Bytes(Random(65, 77, 1)));
         EXPECT_TRUE(t.AwaitMetric("headwater_steps_total{how=\"replaced\"}", 1));
         EXPECT_TRUE(t.AwaitMetric("headwater_upload_bytes", 0));
         EXPECT_EQ(t.Replace(0, 78), "STEP_CONFLICT");
         EXPECT_EQ(t.Replace(7), "STEP_MISMATCH");
         EXPECT_EQ(t.Apply({.ids = {0}}), "STEP_CONFLICT");
         EXPECT_EQ(t.DiscardGradient(), "STEP_CONFLICT");
         EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
       },
       [](Trial& t) {
         SealFirst(t);
         EXPECT_EQ(t.Replace(), "OK replaced");
         EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
       },
       {kEagerLine}},
      {"TakeHeadFencesTheZombie",
       "a zombie trainer cannot touch the new run; bad_values_table.cc has each call",
       [](Trial& t) {
         ApplyFirstAndSubmit(t);
         EXPECT_EQ(t.Submit({.id = 1, .step = 1, .explicit_commit = true}), "STAGED STAGED");
         const v1::Head before = t.server().Get(t.Head().name());
         EXPECT_EQ(t.Take(), "OK");
         const v1::Head after = t.Head().head;
         EXPECT_NE(after.epoch(), before.epoch());
         EXPECT_EQ(after.open_step(), 1);
         EXPECT_EQ(after.weight_version(), before.weight_version());
         EXPECT_EQ(t.Gradient(), Bytes(std::vector<float>(65, 0.0F)));
         EXPECT_EQ(t.MicroBatches(), std::vector<std::string>());
         EXPECT_EQ(t.Submit({.id = 0, .step = 1, .seed = 7}), "COMMITTED DIRECT");
         t.Head().head = before;
         EXPECT_EQ(t.Submit({.id = 2, .step = 1}), "EPOCH_FENCED");
         EXPECT_EQ(t.last_error().at("headEpoch"), absl::BytesToHexString(after.epoch()));
         EXPECT_EQ(t.last_error().at("openStep"), "1");
         t.Head().head = after;
         EXPECT_EQ(t.Submit({.id = 1, .step = 1, .explicit_commit = true}), "STAGED STAGED");  // the slot is free
         EXPECT_EQ(t.Discard({.id = 1, .step = 1}), "OK dropped");
       },
       [](Trial& t) {
         ApplyFirst(t);
         EXPECT_EQ(t.Submit({.id = 0, .step = 1, .seed = 7}), "COMMITTED DIRECT");
       },
       {kEagerLine, "1 DISCARDED STAGED"},
       kWithCheckpoints},
      {"ARestartLosesTheStep",
       "a head comes back at its newest checkpoint, under a new epoch, and answers STEP_LOST {restored_step, "
       "checkpoint} until a trainer takes it; the client replays the open step from its log",
       [](Trial& t) {
         EXPECT_EQ(t.Save("s0"), "OK");
         ApplyFirst(t);
         EXPECT_EQ(t.Save("s1"), "OK");
         EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
         EXPECT_EQ(t.Submit({.id = 1, .step = 1, .explicit_commit = true}), "STAGED STAGED");
         t.Restart();
         for (const StepCall& call : StepCalls()) EXPECT_EQ(call.call(t, 1), "STEP_LOST") << call.name;
         EXPECT_EQ(t.GetStep(), "STEP_LOST");
         EXPECT_EQ(t.Save("by-a-zombie"), "STEP_LOST");
         const v1::Head described = t.server().Get(t.Head().name());
         EXPECT_EQ(t.Commit({.id = 1, .step = 1}), "STEP_LOST");
         EXPECT_EQ(t.last_error().code, grpc::StatusCode::ABORTED);
         EXPECT_EQ(t.last_error().at("restoredStep"), "1");
         EXPECT_EQ(t.last_error().at("openStep"), "1");
         EXPECT_EQ(t.last_error().at("checkpoint"), "s1");
         EXPECT_EQ(t.last_error().at("headEpoch"), absl::BytesToHexString(described.epoch()));
         EXPECT_EQ(t.Take(), "OK");
         EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
         EXPECT_EQ(t.Submit({.id = 1, .step = 1, .explicit_commit = true}), "STAGED STAGED");
         EXPECT_EQ(t.Commit({.id = 1, .step = 1, .factor = 0.5}), "OK");
       },
       [](Trial& t) {
         ApplyFirstAndSubmit(t);
         EXPECT_EQ(t.Submit({.id = 1, .step = 1, .explicit_commit = true}), "STAGED STAGED");
         EXPECT_EQ(t.Commit({.id = 1, .step = 1, .factor = 0.5}), "OK");
       },
       {kEagerLine, "1 COMMITTED STAGED"},
       kWithCheckpoints},
      {"ARestoredHeadCanBeRead",
       "calls that name no step work on a restored head",
       [](Trial& t) {
         EXPECT_EQ(t.Save("s0"), "OK");
         t.Restart();
         const v1::Head described = t.server().Get(t.Head().name());
         EXPECT_EQ(described.state(), v1::HEAD_STATE_RESTORED);
         EXPECT_EQ(described.restored_checkpoint(), "s0");
         EXPECT_EQ(described.open_step(), 0);
         EXPECT_EQ(t.server().Weights(t.Head()), Bytes(t.Head().weight));
         EXPECT_EQ(t.Submit({.id = 0}, MakeForwardOnly), "UNSPECIFIED");
         // Who takes it names the epochs that it has worked under; others see them.
         const std::vector<std::string> worked_under(16, t.Head().head.epoch());
         EXPECT_EQ(ReasonOf(t.server().Take(&t.Head(), described.epoch(), worked_under)), "OK");
         const v1::Head taken = t.server().Get(t.Head().name());
         EXPECT_THAT(taken.recovers_epochs(), ::testing::ElementsAreArray(worked_under));
         EXPECT_TRUE(taken.restored_checkpoint().empty());
       },
       [](Trial& t) { t.Head(); },
       {},
       kWithCheckpoints},
      {"RestoringCanBeSwitchedOff",
       "a server without restore_heads brings no head back",
       [](Trial& t) {
         EXPECT_EQ(t.Save("s0"), "OK");
         t.Restart();
         EXPECT_EQ(t.GetStep(), "HEAD_NOT_FOUND");
         t.Forget("student");
         t.Head();
       },
       [](Trial& t) { t.Head(); },
       {},
       {.server = WithOption(&service::ServerOptions::restore_heads, false), .checkpoints = true}},
  };
  for (const StepCall& call : StepCalls()) rows.push_back(AwaitedRow(call));
  return rows;
}

// Step, step state, totals, accumulator and weights of every head are the same, bitwise.
void CompareStates(Trial& actual, Trial& expected) {
  ASSERT_EQ(actual.HeadIds(), expected.HeadIds());
  for (const std::string& id : actual.HeadIds()) {
    SCOPED_TRACE(id);
    const TestHead& ours = actual.Head(id);
    const TestHead& theirs = expected.Head(id);
    const v1::Head described = actual.server().Get(ours.name());
    EXPECT_EQ(described.epoch(), ours.head.epoch());
    EXPECT_EQ(described.state(), v1::HEAD_STATE_READY);
    EXPECT_TRUE(actual.server().Weights(ours) == expected.server().Weights(theirs)) << "other weights";
    if (!described.spec().trainable()) continue;
    const v1::Step step = actual.server().Steps(ours).open();
    const v1::Step wanted = expected.server().Steps(theirs).open();
    EXPECT_EQ(step.step(), wanted.step());
    EXPECT_EQ(step.state(), wanted.state());
    EXPECT_EQ(step.totals().SerializeAsString(), wanted.totals().SerializeAsString())
        << step.totals().ShortDebugString() << " instead of " << wanted.totals().ShortDebugString();
    EXPECT_TRUE(actual.Gradient(id) == expected.Gradient(id)) << "another gradient";
  }
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
