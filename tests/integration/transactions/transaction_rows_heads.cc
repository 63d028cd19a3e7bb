// Rows on what heads keep: contributions and their attempts, sessions, steps, epochs, and what comes back after a restart.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"
#include "tests/integration/transactions/transaction_harness.h"

namespace headwater::testing {
namespace {

void StageFirst(Trial& t) { EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED"); }

void StageAndCommitFirst(Trial& t) {
  StageFirst(t);
  EXPECT_EQ(t.Commit({.id = 0}), "OK");
}

void StageAndCommitHalf(Trial& t) {
  EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED");
  EXPECT_EQ(t.Commit({.id = 0, .factor = 0.5}), "OK");
}

void SealFirst(Trial& t) {
  SubmitFirst(t);
  EXPECT_EQ(t.Seal({.ids = {0}}), "OK");
}

void ApplyOneStep(Trial& t) {
  SubmitFirst(t);
  EXPECT_EQ(t.Apply({.ids = {0}}), "OK");
}

void ApplyOneStepAndSubmit(Trial& t) {
  ApplyOneStep(t);
  EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
}

void SpellOutDefaults(v1::MicroBatchHeader& header) {
  header.mutable_terms(0)->set_loss_scale(1);
  header.mutable_terms(0)->set_ignore_index(-100);
  header.mutable_terms(0)->set_row_count(3);
  header.set_grad_hidden_data_type(v1::DATA_TYPE_FLOAT32);
  header.set_return_grad_hidden(true);
  header.set_commit_mode(v1::COMMIT_MODE_EAGER);
}

void Sleep(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

const TrialSetup kWithCheckpoints = {.checkpoints = true};

// ---- contributions ---------------------------------------------------------------------------------------------------

std::vector<TransactionRow> ContributionRows() {
  std::vector<TransactionRow> rows;
  rows.push_back({"ExplicitIsStaged",
                  "STAGED: EXPLICIT; what the products need is kept until the commit, which brings a factor",
                  [](Trial& t) {
                    const std::string before = t.Gradient();
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED");
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
                  {"0 COMMITTED STAGED"}});
  rows.push_back({"NoSlotButAllowed",
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
                  {"0 COMMITTED STAGED", "1 COMMITTED HELD"}});
  rows.push_back(
      {"SameDigest", "same key, same digest: the answer is computed again, nothing is added, replayed = true", [](Trial& t) {
         const LossReply first = t.Compute({.id = 0});
         const LossReply second = t.Compute({.id = 0});
         EXPECT_TRUE(second.summary.replayed());
         EXPECT_EQ(second.grad_hidden, first.grad_hidden);
         EXPECT_EQ(second.summary.digest(), first.summary.digest());
         EXPECT_EQ(second.summary.terms(0).sums().SerializeAsString(), first.summary.terms(0).sums().SerializeAsString());
         EXPECT_EQ(t.Submit({.id = 0, .first_wins = true}), "COMMITTED DIRECT replayed");
       }});
  rows.push_back(
      {"DigestCoversNotTransport", "the digest covers the canonical header and the rows, not transport or attempt", [](Trial& t) {
         SubmitFirst(t);
         EXPECT_TRUE(t.Compute({.id = 0}, {.chunk_rows = 1, .reversed = true}).summary.replayed());
         EXPECT_EQ(t.Submit({.id = 0, .attempt = 3}), "COMMITTED DIRECT replayed");
         EXPECT_EQ(t.SubmitEdited({.id = 0}, SpellOutDefaults), "COMMITTED DIRECT replayed");
         EXPECT_EQ(t.Submit({.id = 0}), "COMMITTED DIRECT replayed");
       }});
  rows.push_back(
      {"FirstWins", "other digest with FIRST_WINS: computed and answered, nothing added, payload_differs = true", [](Trial& t) {
         SubmitFirst(t);
         const LossReply reply = t.Compute({.id = 0, .seed = 7, .first_wins = true});
         EXPECT_TRUE(reply.summary.payload_differs());
         EXPECT_FALSE(reply.summary.replayed());
         EXPECT_EQ(reply.grad_hidden.size(), 60U);
       }});
  rows.push_back({"ItsHeaderIsEnough",
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
                    EXPECT_TRUE(t.NothingInFlight());
                    EXPECT_EQ(t.Submit({.id = 0, .attempt = 1, .explicit_commit = true}), "ATTEMPT_SUPERSEDED");
                    EXPECT_EQ(t.last_error().at("knownAttempt"), "2");
                    EXPECT_TRUE(t.AwaitMetric("headwater_micro_batches_total{outcome=\"superseded\"}", 1));
                    EXPECT_EQ(t.Submit({.id = 0, .attempt = 2, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Commit({.id = 0, .attempt = 2}), "OK");
                  },
                  StageAndCommitFirst,
                  {"0 COMMITTED STAGED @2", "1 DISCARDED STAGED"}});
  rows.push_back({"AddGradientIsAContribution",
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
                  {kEagerLine, "5 COMMITTED DIRECT"}});
  rows.push_back({"GetStepTellsTheLastClosed",
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
                  ApplyOneStep,
                  {}});
  return rows;
}

// ---- sessions --------------------------------------------------------------------------------------------------------

std::vector<TransactionRow> SessionRows() {
  std::vector<TransactionRow> rows;
  rows.push_back({"TheLeaseEnds",
                  "when the lease ends its uncommitted contributions go (committed ones stay)",
                  [](Trial& t) {
                    const std::string session = t.OpenSession(1500);
                    EXPECT_EQ(t.Submit({.id = 0, .session = session}), "COMMITTED DIRECT");
                    EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true, .session = session}), "STAGED STAGED");
                    EXPECT_EQ(t.Submit({.id = 2, .explicit_commit = true, .late_token_factors = true, .session = session}),
                              "STAGED HELD");
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
                  {kEagerLine, "1 COMMITTED DIRECT @1", "2 DISCARDED HELD"}});
  rows.push_back({"TheLeaseIsRenewed",
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
                  {"0 COMMITTED STAGED", "1 COMMITTED HELD"}});
  rows.push_back({"NoLeaseEndsWhileACallRuns",
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
                  {"0 COMMITTED STAGED", "1 DISCARDED STAGED"}});
  rows.push_back({"TheSessionIsClosed",
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
                  {kEagerLine, "1 DISCARDED STAGED"}});
  return rows;
}

// ---- new weights, take-over, restart ---------------------------------------------------------------------------------

std::vector<TransactionRow> EpochRows() {
  std::vector<TransactionRow> rows;
  rows.push_back({"NewWeightsCloseTheStep",
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
                  {kEagerLine}});
  rows.push_back({"TakeHeadFencesTheZombie",
                  "a zombie trainer cannot touch the new run; bad_values_*.cc has each call",
                  [](Trial& t) {
                    ApplyOneStepAndSubmit(t);
                    EXPECT_EQ(t.Submit({.id = 1, .step = 1, .explicit_commit = true}), "STAGED STAGED");
                    const v1::Head before = t.server().Get(t.Head().name());
                    EXPECT_EQ(t.Take(), "OK");
                    const v1::Head after = t.Head().head;
                    EXPECT_NE(after.epoch(), before.epoch());
                    EXPECT_EQ(after.open_step(), 1);
                    EXPECT_EQ(after.weight_version(), before.weight_version());
                    EXPECT_EQ(Floats(t.Gradient()), std::vector<float>(65, 0.0F));
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
                    ApplyOneStep(t);
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1, .seed = 7}), "COMMITTED DIRECT");
                  },
                  {kEagerLine, "1 DISCARDED STAGED"},
                  kWithCheckpoints});
  rows.push_back({"ARestartLosesTheStep",
                  "a head comes back at its newest checkpoint, under a new epoch, and answers STEP_LOST {restored_step, "
                  "checkpoint} until a trainer takes it; the client replays the open step from its log",
                  [](Trial& t) {
                    EXPECT_EQ(t.Save("s0"), "OK");
                    ApplyOneStep(t);
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
                    ApplyOneStepAndSubmit(t);
                    EXPECT_EQ(t.Submit({.id = 1, .step = 1, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Commit({.id = 1, .step = 1, .factor = 0.5}), "OK");
                  },
                  {kEagerLine, "1 COMMITTED STAGED"},
                  kWithCheckpoints});
  rows.push_back({"ARestoredHeadCanBeRead",
                  "calls that name no step work on a restored head",
                  [](Trial& t) {
                    EXPECT_EQ(t.Save("s0"), "OK");
                    t.Restart();
                    const v1::Head described = t.server().Get(t.Head().name());
                    EXPECT_EQ(described.state(), v1::HEAD_STATE_RESTORED);
                    EXPECT_EQ(described.restored_checkpoint(), "s0");
                    EXPECT_EQ(described.open_step(), 0);
                    EXPECT_EQ(t.server().Weights(t.Head()), Bytes(t.Head().weight));
                    EXPECT_EQ(t.SubmitEdited({.id = 0}, MakeForwardOnly), "UNSPECIFIED UNSPECIFIED");
                    // Who takes it names the epochs that it has worked under; others see them.
                    const std::vector<std::string> worked_under(16, t.Head().head.epoch());
                    EXPECT_EQ(ReasonOf(t.server().Take(&t.Head(), described.epoch(), worked_under)), "OK");
                    const v1::Head taken = t.server().Get(t.Head().name());
                    EXPECT_THAT(taken.recovers_epochs(), ::testing::ElementsAreArray(worked_under));
                    EXPECT_TRUE(taken.restored_checkpoint().empty());
                  },
                  [](Trial& t) { t.Head(); },
                  {},
                  kWithCheckpoints});
  rows.push_back({"RestoringCanBeSwitchedOff",
                  "a server that is told not to brings no head back",
                  [](Trial& t) {
                    EXPECT_EQ(t.Save("s0"), "OK");
                    t.Restart();
                    EXPECT_EQ(t.GetStep(), "HEAD_NOT_FOUND");
                    t.Forget("student");
                    t.Head();
                  },
                  [](Trial& t) { t.Head(); },
                  {},
                  {.adjust = [](ServerSetup& setup) { setup.options.restore_heads = false; }, .checkpoints = true}});
  return rows;
}

}  // namespace

std::vector<TransactionRow> HeadRows() {
  std::vector<TransactionRow> rows = ContributionRows();
  for (const auto& more : {SessionRows(), EpochRows()}) rows.insert(rows.end(), more.begin(), more.end());
  return rows;
}

}  // namespace headwater::testing
