// Steps: who waits for the next one, how one is sealed and closed, and what the trainer does when it owns the optimizer.
#include <gtest/gtest.h>

#include <chrono>
#include <future>

#include "tests/integration/transactions/transaction_harness.h"

namespace headwater::testing {
namespace {

void SealFirst(Trial& t) {
  SubmitFirst(t);
  EXPECT_EQ(t.Seal({.ids = {0}}), "OK");
}

void ApplyFirst(Trial& t) {
  SubmitFirst(t);
  EXPECT_EQ(t.Apply({.ids = {0}}), "OK");
}

void ReplaceFirst(Trial& t) {
  SealFirst(t);
  EXPECT_EQ(t.Replace({}), "OK replaced");
}

TrialSetup MaxStepWait(int milliseconds) {
  return {.adjust = [milliseconds](ServerSetup& setup) { setup.options.limits.max_step_wait = absl::Milliseconds(milliseconds); }};
}

TrialSetup WithBias() {
  v1::HeadSpec spec = SmallSpec();
  spec.set_has_bias(true);
  return {.specs = {{"student", spec}}};
}

TrialSetup InitialStep(int64_t step) {
  v1::HeadSpec spec = SmallSpec();
  spec.set_initial_step(step);
  return {.specs = {{"student", spec}}};
}

v1::StepState StateOf(Trial& t) { return t.server().Steps(t.Head()).open().state(); }

// ---- waiting for the next step ---------------------------------------------------------------------------------------

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
  rows.push_back({"TheNextStepComesByDiscard",
                  "a call for open step + 1 waits, however the step is closed",
                  [](Trial& t) {
                    auto early = std::async(std::launch::async, [&t] { return t.Submit({.id = 0, .step = 1}); });
                    EXPECT_TRUE(t.AwaitMetric("headwater_waiting_calls", 1));
                    EXPECT_EQ(t.DiscardGradient({}), "OK");
                    EXPECT_EQ(early.get(), "COMMITTED DIRECT");
                  },
                  [](Trial& t) {
                    EXPECT_EQ(t.DiscardGradient({}), "OK");
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
                  },
                  {kEagerLine}});
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
  rows.push_back({"OtherStepsMismatch",
                  "any other step is FAILED_PRECONDITION / STEP_MISMATCH with the open step in the metadata",
                  [](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 9, .step = 5}), "COMMITTED DIRECT");
                    for (const int64_t step : {0, 4, 7, 1000000}) {
                      for (const StepCall& call : StepCalls()) {
                        EXPECT_EQ(call.call(t, "student", step), "STEP_MISMATCH") << call.name << " of step " << step;
                        EXPECT_EQ(t.last_error().code, grpc::StatusCode::FAILED_PRECONDITION) << call.name;
                        EXPECT_EQ(t.last_error().at("openStep"), "5") << call.name;
                      }
                    }
                  },
                  [](Trial& t) { EXPECT_EQ(t.Submit({.id = 9, .step = 5}), "COMMITTED DIRECT"); },
                  {"9 COMMITTED DIRECT"},
                  InitialStep(5)});
  rows.push_back({"WaitingCallsAreBounded",
                  "calls that wait are bounded by a named limit: QUEUE_FULL",
                  [](Trial& t) {
                    SubmitFirst(t);
                    auto early = std::async(std::launch::async, [&t] { return t.Submit({.id = 0, .step = 1}); });
                    EXPECT_TRUE(t.AwaitMetric("headwater_waiting_calls", 1));
                    EXPECT_EQ(t.Discard({.id = 3, .step = 1}), "QUEUE_FULL");
                    EXPECT_TRUE(t.last_error().retry_ms.has_value());
                    EXPECT_EQ(t.last_error().at("limit"), "max_waiting_calls");
                    EXPECT_EQ(t.Apply({.ids = {0}}), "OK");
                    EXPECT_EQ(early.get(), "COMMITTED DIRECT");
                  },
                  [](Trial& t) {
                    ApplyFirst(t);
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
                  },
                  {kEagerLine},
                  {.adjust = [](ServerSetup& setup) { setup.options.limits.max_waiting_calls = 1; }}});
  rows.push_back({"AWaitingCallIsFenced",
                  "a call that waits when another run takes over is EPOCH_FENCED",
                  [](Trial& t) {
                    const v1::MicroBatchHeader header = t.HeaderOf({.id = 0, .step = 1});
                    OpenCall early(t.server(), header, Trial::RowsOf({.id = 0}), 3);
                    EXPECT_TRUE(t.AwaitMetric("headwater_waiting_calls", 1));
                    EXPECT_EQ(t.Take(), "OK");
                    EXPECT_EQ(early.End(), "EPOCH_FENCED");
                  },
                  [](Trial& t) { t.Head(); },
                  {}});
  rows.push_back({"OneRankApplies",
                  "ids are global in a step (k * world_size + rank); one rank applies",
                  [](Trial& t) {
                    t.Head();
                    std::vector<std::future<std::string>> ranks;
                    for (int64_t rank = 0; rank < 2; ++rank) {
                      ranks.push_back(std::async(std::launch::async, [&t, rank]() -> std::string {
                        // The fast rank is at the next step while the slow one is still in this one.
                        for (int64_t k = 0; k < 2; ++k) {
                          const std::string answer = t.Submit({.id = k * 2 + rank, .explicit_commit = true, .allow_held = true});
                          if (answer != "STAGED STAGED" && answer != "STAGED HELD") return answer;
                        }
                        return t.Submit({.id = rank, .step = 1, .explicit_commit = true, .allow_held = true});
                      }));
                    }
                    EXPECT_TRUE(t.AwaitMetric("headwater_waiting_calls", 2));
                    for (int64_t id = 0; id < 4; ++id) EXPECT_EQ(t.Discard({.id = id}), "OK dropped");
                    for (int64_t id = 0; id < 4; ++id) EXPECT_EQ(t.Submit({.id = id, .attempt = 1}), "COMMITTED DIRECT");
                    EXPECT_EQ(t.Apply({.ids = {0, 1, 2, 3}}), "OK");
                    EXPECT_EQ(t.Apply({.ids = {0, 1, 2, 3}}), "OK replayed");
                    for (auto& rank : ranks) EXPECT_EQ(rank.get().substr(0, 6), "STAGED");
                    EXPECT_EQ(t.Discard({.id = 0, .step = 1}), "OK dropped");
                    EXPECT_EQ(t.Discard({.id = 1, .step = 1}), "OK dropped");
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1, .attempt = 1}), "COMMITTED DIRECT");
                    EXPECT_EQ(t.Submit({.id = 1, .step = 1, .attempt = 1}), "COMMITTED DIRECT");
                  },
                  [](Trial& t) {
                    for (int64_t id = 0; id < 4; ++id) EXPECT_EQ(t.Submit({.id = id}), "COMMITTED DIRECT");
                    EXPECT_EQ(t.Apply({.ids = {0, 1, 2, 3}}), "OK");
                    for (int64_t id = 0; id < 2; ++id) EXPECT_EQ(t.Submit({.id = id, .step = 1}), "COMMITTED DIRECT");
                  },
                  {"0 COMMITTED DIRECT @1", "1 COMMITTED DIRECT @1"}});
  return rows;
}

// ---- sealing and closing ---------------------------------------------------------------------------------------------

std::vector<TransactionRow> SealRows() {
  std::vector<TransactionRow> rows;
  rows.push_back({"TheSealNamesItsMicroBatches",
                  "SealStep fails unchanged if one is missing, uncommitted, or not expected",
                  [](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Seal({.ids = {0, 1, 2}}), "MICRO_BATCH_MISSING");
                    EXPECT_EQ(t.last_error().at("missing"), "2");
                    EXPECT_EQ(t.Seal({.ids = {0, 1}}), "MICRO_BATCH_UNCOMMITTED");
                    EXPECT_EQ(t.last_error().at("uncommitted"), "1");
                    EXPECT_EQ(t.Discard({.id = 1}), "OK dropped");
                    EXPECT_EQ(t.Seal({.ids = {0, 1}}), "MICRO_BATCH_MISSING");
                    EXPECT_EQ(t.Seal({}), "MICRO_BATCH_UNEXPECTED");
                    EXPECT_EQ(t.last_error().at("unexpected"), "0");
                    EXPECT_EQ(StateOf(t), v1::STEP_STATE_OPEN);
                  },
                  SubmitFirst,
                  {kEagerLine, "1 DISCARDED STAGED"}});
  rows.push_back({"ASealedStepTakesNothing",
                  "SealStep refuses further work, and is idempotent",
                  [](Trial& t) {
                    SealFirst(t);
                    EXPECT_EQ(t.Seal({.ids = {0}}), "OK replayed");
                    EXPECT_EQ(t.Seal({.ids = {0, 1}}), "MICRO_BATCH_MISSING");
                    const auto begin = std::chrono::steady_clock::now();
                    EXPECT_EQ(t.Seal({.ids = {0, 1}, .wait = true}), "MICRO_BATCH_MISSING");  // at once
                    EXPECT_LE(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
                    EXPECT_EQ(t.Seal({.ids = {0}, .wait = true}), "OK replayed");
                    EXPECT_EQ(t.Submit({.id = 1}), "STEP_SEALED");
                    EXPECT_EQ(t.AddPart({.id = 1}), "STEP_SEALED");
                    EXPECT_EQ(t.Discard({.id = 1}), "OK");
                    EXPECT_EQ(t.Norm({}), "OK");
                  },
                  SealFirst,
                  {kEagerLine}});
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
  rows.push_back({"ApplySealsFirst",
                  "ApplyOptimizerStep seals an open step first; the same arguments again get the stored reply",
                  [](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Apply({.ids = {0, 1}}), "MICRO_BATCH_MISSING");
                    EXPECT_EQ(StateOf(t), v1::STEP_STATE_OPEN);
                    EXPECT_EQ(t.Apply({.ids = {0}}), "OK");
                    EXPECT_EQ(t.Apply({.ids = {0}}), "OK replayed");
                    EXPECT_EQ(t.Apply({.ids = {0}, .learning_rate = 0.02}), "STEP_CONFLICT");
                    EXPECT_EQ(t.DiscardGradient({}), "STEP_CONFLICT");
                    EXPECT_EQ(t.Replace({}), "STEP_CONFLICT");
                    EXPECT_EQ(t.Seal({.ids = {0}}), "STEP_MISMATCH");
                    EXPECT_EQ(t.Submit({.id = 0}), "STEP_MISMATCH");
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
                  },
                  [](Trial& t) {
                    ApplyFirst(t);
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
                  },
                  {kEagerLine}});
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
                  ApplyFirst,
                  {}});
  rows.push_back({"DiscardGradientClosesTheStep",
                  "DiscardGradient closes the step, weights unchanged; what is undecided goes",
                  [](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.DiscardGradient({}), "OK");
                    EXPECT_EQ(t.DiscardGradient({}), "OK replayed");
                    EXPECT_EQ(t.Apply({.ids = {0}}), "STEP_CONFLICT");
                    EXPECT_EQ(t.Commit({.id = 1}), "STEP_MISMATCH");
                    const v1::Step closed = t.server().Steps(t.Head()).last_closed();
                    EXPECT_EQ(closed.state(), v1::STEP_STATE_DISCARDED);
                    EXPECT_EQ(closed.micro_batches(1).state(), v1::CONTRIBUTION_STATE_DISCARDED);
                    EXPECT_EQ(t.Submit({.id = 1, .step = 1, .explicit_commit = true}), "STAGED STAGED");  // the slot is free
                    EXPECT_EQ(t.Discard({.id = 1, .step = 1}), "OK dropped");
                  },
                  [](Trial& t) { EXPECT_EQ(t.DiscardGradient({}), "OK"); },
                  {"1 DISCARDED STAGED"}});
  rows.push_back({"ANonFiniteGradientChangesNothing",
                  "ApplyOptimizerStep: a non-finite gradient changes nothing",
                  [](Trial& t) {
                    const LossReply reply = t.Compute({.id = 0, .has_nan = true});
                    EXPECT_EQ(reply.summary.form(), v1::CONTRIBUTION_FORM_DIRECT);
                    for (const auto& term : reply.summary.terms()) EXPECT_EQ(term.non_finite_row_count(), 1);
                    v1::SealStepResponse sealed;
                    EXPECT_EQ(ReasonOf(t.server().Seal(t.Head(), 0, {0}, &sealed)), "OK");
                    EXPECT_GT(sealed.non_finite_count(), 0);
                    EXPECT_EQ(sealed.totals().non_finite_row_count(), 1);
                    EXPECT_EQ(t.Apply({.ids = {0}}), "NON_FINITE_GRADIENT");
                    EXPECT_EQ(t.Apply({.ids = {0}}), "NON_FINITE_GRADIENT");
                    EXPECT_EQ(StateOf(t), v1::STEP_STATE_SEALED);
                    EXPECT_EQ(t.DiscardGradient({}), "OK");
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
                  },
                  [](Trial& t) {
                    EXPECT_EQ(t.DiscardGradient({}), "OK");
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
                  },
                  {kEagerLine}});
  rows.push_back({"ForwardOnlyAddsNothing",
                  "FORWARD_ONLY calls carry no step and no micro-batch, work in any state, add nothing",
                  [](Trial& t) {
                    EXPECT_EQ(t.SubmitEdited({.id = 0}, MakeForwardOnly), "UNSPECIFIED UNSPECIFIED");
                    SealFirst(t);
                    EXPECT_EQ(t.SubmitEdited({.id = 0}, MakeForwardOnly), "UNSPECIFIED UNSPECIFIED");
                  },
                  SealFirst,
                  {kEagerLine}});
  return rows;
}

// ---- the trainer's optimizer -----------------------------------------------------------------------------------------

// An upload into the shadow that ends before its last byte.
void CutReplacement(Trial& t, uint32_t seed) {
  const v1::Head& head = t.Head().head;
  grpc::ClientContext context;
  const auto stream = t.server().heads().UploadWeights(&context);
  v1::UploadWeightsRequest request;
  v1::UploadWeightsHeader* const header = request.mutable_header();
  header->set_name(head.name());
  header->set_epoch(head.epoch());
  header->set_upload_id("cut");
  header->set_tensor(v1::HEAD_TENSOR_WEIGHT);
  header->set_data_type(v1::DATA_TYPE_FLOAT32);
  header->set_total_bytes(260);
  header->set_closes_step(0);
  v1::UploadWeightsResponse response;
  stream->Write(request);
  stream->Read(&response);
  request.mutable_chunk()->set_data(Bytes(Random(65, seed, 1)).substr(0, 128));
  stream->Write(request);
  context.TryCancel();
  stream->Finish();
}

std::vector<TransactionRow> ReplaceRows() {
  std::vector<TransactionRow> rows;
  rows.push_back({"NewWeightsCloseTheStep",
                  "UploadWeights{closes_step}: swapped in whole, the epoch stays, step + 1 is open",
                  [](Trial& t) {
                    SealFirst(t);
                    const int64_t version = t.server().Get(t.Head().name()).weight_version();
                    EXPECT_EQ(t.Replace({}), "OK replaced");
                    EXPECT_EQ(t.server().Steps(t.Head()).last_closed().state(), v1::STEP_STATE_REPLACED);
                    EXPECT_EQ(t.server().Get(t.Head().name()).weight_version(), version + 1);
                    EXPECT_EQ(t.Replace({}), "OK replaced");
                    EXPECT_EQ(t.server().Get(t.Head().name()).weight_version(), version + 1);
                    EXPECT_EQ(t.server().Weights(t.Head()), Bytes(Random(65, 77, 1)));
                    EXPECT_TRUE(t.AwaitMetric("headwater_steps_total{how=\"replaced\"}", 1));
                    EXPECT_TRUE(t.AwaitMetric("headwater_upload_bytes", 0));
                    EXPECT_EQ(t.Replace({.seed = 78}), "STEP_CONFLICT");
                    EXPECT_EQ(t.Replace({.step = 7}), "STEP_MISMATCH");
                    EXPECT_EQ(t.Apply({.ids = {0}}), "STEP_CONFLICT");
                    EXPECT_EQ(t.DiscardGradient({}), "STEP_CONFLICT");
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
                  },
                  [](Trial& t) {
                    ReplaceFirst(t);
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
                  },
                  {kEagerLine}});
  rows.push_back({"NewWeightsNeedASealedStep", "UploadWeights{closes_step} of an open step: STEP_NOT_SEALED", [](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Replace({}), "STEP_NOT_SEALED");
                    EXPECT_EQ(StateOf(t), v1::STEP_STATE_OPEN);
                  }});
  rows.push_back({"ACutUploadLeavesTheSealedStep",
                  "a cut leaves the sealed step as it was",
                  [](Trial& t) {
                    SealFirst(t);
                    const std::string before = t.server().Snapshot(t.Head());
                    CutReplacement(t, 5);
                    EXPECT_EQ(t.server().Snapshot(t.Head()), before);
                    EXPECT_EQ(t.Replace({}), "OK replaced");
                  },
                  ReplaceFirst,
                  {}});
  rows.push_back({"WeightAndBiasAreSwappedTogether",
                  "until every tensor is there, the sealed step is as it was",
                  [](Trial& t) {
                    SealFirst(t);
                    const std::string before = t.server().Snapshot(t.Head());
                    EXPECT_EQ(t.Replace({.seed = 5}), "OK");
                    EXPECT_EQ(t.server().Snapshot(t.Head()), before);
                    EXPECT_EQ(t.Replace({.seed = 78}), "OK");  // the later one counts
                    EXPECT_EQ(t.server().Snapshot(t.Head()), before);
                    EXPECT_EQ(t.Replace({.tensor = v1::HEAD_TENSOR_BIAS}), "OK replaced");
                    EXPECT_EQ(t.Replace({.tensor = v1::HEAD_TENSOR_BIAS}), "OK replaced");
                  },
                  [](Trial& t) {
                    SealFirst(t);
                    EXPECT_EQ(t.Replace({.tensor = v1::HEAD_TENSOR_BIAS}), "OK");
                    EXPECT_EQ(t.Replace({.seed = 78}), "OK replaced");
                  },
                  {},
                  WithBias()});
  rows.push_back({"ADiscardedStepDropsTheShadow",
                  "what was uploaded for a step that is closed otherwise is not used for the next",
                  [](Trial& t) {
                    SealFirst(t);
                    EXPECT_EQ(t.Replace({.seed = 5}), "OK");
                    EXPECT_EQ(t.DiscardGradient({}), "OK");
                    EXPECT_EQ(t.Seal({.step = 1}), "OK");
                    EXPECT_EQ(t.Replace({.step = 1, .tensor = v1::HEAD_TENSOR_BIAS}), "OK");
                  },
                  [](Trial& t) {
                    EXPECT_EQ(t.DiscardGradient({}), "OK");
                    EXPECT_EQ(t.Seal({.step = 1}), "OK");
                  },
                  {},
                  WithBias()});
  return rows;
}

std::vector<TransactionRow> PartRows() {
  std::vector<TransactionRow> rows;
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
  rows.push_back({"AddGradientInParts",
                  "a gradient may come as several contributions of consecutive rows, over all shards",
                  [](Trial& t) {
                    EXPECT_EQ(t.AddPart({.id = 2, .row_start = 7, .row_count = 6}), "OK");
                    EXPECT_EQ(t.AddPart({.id = 1, .row_start = 0, .row_count = 7}), "OK");
                    EXPECT_EQ(t.AddPart({.id = 3, .row_start = 7, .row_count = 7}), "INVALID_FIELD");
                    EXPECT_EQ(t.AddPart({.id = 3, .row_start = -1}), "INVALID_FIELD");
                  },
                  [](Trial& t) {
                    EXPECT_EQ(t.AddPart({.id = 1, .row_start = 0, .row_count = 7}), "OK");
                    EXPECT_EQ(t.AddPart({.id = 2, .row_start = 7, .row_count = 6}), "OK");
                  },
                  {"1 COMMITTED DIRECT", "2 COMMITTED DIRECT"}});
  rows.push_back({"AddGradientHasAttempts",
                  "attempts and tombstones hold for AddGradient as for ComputeLoss",
                  [](Trial& t) {
                    EXPECT_EQ(t.Discard({.id = 5, .attempt = 1}), "OK");
                    EXPECT_EQ(t.AddPart({.id = 5, .attempt = 1}), "MICRO_BATCH_DISCARDED");
                    EXPECT_EQ(t.AddPart({.id = 5, .attempt = 2}), "OK");
                    EXPECT_EQ(t.Submit({.id = 6, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.AddPart({.id = 6, .attempt = 1}), "OK");
                    EXPECT_EQ(t.Commit({.id = 6}), "ATTEMPT_SUPERSEDED");
                  },
                  [](Trial& t) {
                    EXPECT_EQ(t.AddPart({.id = 5}), "OK");
                    EXPECT_EQ(t.AddPart({.id = 6}), "OK");
                  },
                  {"5 COMMITTED DIRECT @2", "6 COMMITTED DIRECT @1"}});
  return rows;
}

// JSD against the frozen head "teacher", whose hidden size is the student's.
void MakeJsd(Trial& t, v1::MicroBatchHeader& header, std::optional<int64_t> expected_version) {
  v1::LossTerm* const term = header.mutable_terms(0);
  term->clear_targets();
  term->mutable_jensen_shannon();
  term->mutable_teacher_hidden()->set_head(t.Head("teacher").name());
  term->mutable_teacher_hidden()->set_data_type(v1::DATA_TYPE_FLOAT32);
  if (expected_version.has_value()) term->mutable_teacher_hidden()->set_expected_weight_version(*expected_version);
}

std::string SubmitJsd(Trial& t, const Batch& batch, std::optional<int64_t> expected_version = std::nullopt) {
  v1::MicroBatchHeader header = t.HeaderOf(batch);
  MakeJsd(t, header, expected_version);
  const LossReply reply = t.server().Compute(header, Trial::RowsOf(batch), Bytes(Random(15, 9, 1)), {.deadline_ms = 25000});
  if (!reply.status.ok()) return ReasonOf(reply.status);
  return v1::ContributionForm_Name(reply.summary.form());
}

TrialSetup WithTeacher() {
  v1::HeadSpec spec = SmallSpec();
  spec.set_trainable(false);
  spec.clear_optimizer();
  return {.specs = {{"teacher", spec}}};
}

std::vector<TransactionRow> VersionRows() {
  std::vector<TransactionRow> rows;
  rows.push_back({"AnExpectedVersionHolds",
                  "weight_version rises with every change; a call may say which it expects",
                  [](Trial& t) {
                    const auto expect = [](int64_t version) {
                      return [version](v1::MicroBatchHeader& header) {
                        header.mutable_terms(0)->set_expected_weight_version(version);
                      };
                    };
                    ApplyFirst(t);
                    EXPECT_EQ(t.SubmitEdited({.id = 0, .step = 1}, expect(1)), "WEIGHT_VERSION_MISMATCH");
                    EXPECT_EQ(t.last_error().at("actual"), "2");
                    EXPECT_EQ(t.SubmitEdited({.id = 0, .step = 1}, expect(2)), "COMMITTED DIRECT");
                  },
                  [](Trial& t) {
                    ApplyFirst(t);
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1}), "COMMITTED DIRECT");
                  },
                  {kEagerLine}});
  rows.push_back({"HeldIsOfOneVersion",
                  "one call sees one version: HELD whose teacher has changed since is refused at commit",
                  [](Trial& t) {
                    EXPECT_EQ(SubmitJsd(t, {.id = 0, .explicit_commit = true, .late_token_factors = true}, 1),
                              "CONTRIBUTION_FORM_HELD");
                    EXPECT_EQ(t.SetWeights(3, "teacher"), "OK");
                    EXPECT_EQ(SubmitJsd(t, {.id = 1}, 1), "WEIGHT_VERSION_MISMATCH");
                    EXPECT_EQ(t.Commit({.id = 0}), "WEIGHT_VERSION_MISMATCH");
                    EXPECT_EQ(t.last_error().code, grpc::StatusCode::FAILED_PRECONDITION);
                    EXPECT_EQ(t.MicroBatch(0), "0 STAGED HELD");
                    EXPECT_EQ(t.Discard({.id = 0}), "OK dropped");
                  },
                  [](Trial& t) {
                    t.Head();
                    EXPECT_EQ(t.SetWeights(3, "teacher"), "OK");
                  },
                  {"0 DISCARDED HELD"},
                  WithTeacher()});
  rows.push_back({"AFrozenHeadHasNoSteps",
                  "calls on a frozen head carry no step and no micro-batch",
                  [](Trial& t) {
                    SubmitFirst(t);
                    t.Head("teacher");
                    for (const StepCall& call : StepCalls()) {
                      const std::string answer = call.call(t, "teacher", 0);
                      EXPECT_EQ(answer, call.name == "ComputeLoss" ? "INVALID_COMBINATION" : "HEAD_NOT_TRAINABLE") << call.name;
                    }
                    EXPECT_EQ(t.Take("teacher"), "HEAD_NOT_TRAINABLE");
                  },
                  [](Trial& t) {
                    SubmitFirst(t);
                    t.Head("teacher");
                  },
                  {kEagerLine},
                  WithTeacher()});
  return rows;
}

}  // namespace

std::vector<TransactionRow> StepRows() {
  std::vector<TransactionRow> rows = WaitRows();
  for (TransactionRow& row : SealRows()) rows.push_back(row);
  return rows;
}

std::vector<TransactionRow> OwnerRows() {
  std::vector<TransactionRow> rows = ReplaceRows();
  for (const auto& more : {PartRows(), VersionRows()}) rows.insert(rows.end(), more.begin(), more.end());
  return rows;
}

}  // namespace headwater::testing
