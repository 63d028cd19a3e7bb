// How a contribution is held until it is decided, what cancels it, and who waits for whom.
#include <gtest/gtest.h>

#include <future>

#include "tests/integration/transactions/transaction_harness.h"

namespace headwater::testing {
namespace {

// The engine takes one micro-batch at a time: the next one waits in the queue.
TrialSetup OneAtATime() {
  return {.adjust = [](ServerSetup& setup) { setup.options.queue_widths = {1, 1}; }};
}

bool AwaitUpload(Trial& t) {
  return Await([&] { return t.server().MetricLine("headwater_in_flight_bytes") != "headwater_in_flight_bytes 0"; });
}

void SubmitFirstBesideAnother(Trial& t) {
  SubmitFirst(t);
  t.Head("other");
}

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

void StageAndCommitHalf(Trial& t) {
  EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED");
  EXPECT_EQ(t.Commit({.id = 0, .factor = 0.5}), "OK");
}

void NoCalls(Trial& t) { t.Head(); }

TrialSetup WithSlots(int slots) {
  v1::HeadSpec spec = SmallSpec();
  spec.set_staging_slots(slots);
  return {.specs = {{"student", spec}}};
}

std::vector<TransactionRow> DirectRows() {
  std::vector<TransactionRow> rows;
  rows.push_back({"EagerIsDirect",
                  "DIRECT: EAGER, policy REPORT: products add to the accumulator in place",
                  [](Trial& t) {
                    const LossReply reply = t.Compute({.id = 0});
                    EXPECT_EQ(ReasonOf(reply.status), "OK");
                    EXPECT_EQ(reply.summary.form(), v1::CONTRIBUTION_FORM_DIRECT);
                    EXPECT_EQ(reply.summary.state(), v1::CONTRIBUTION_STATE_COMMITTED);
                    EXPECT_EQ(reply.summary.step(), 0);
                    EXPECT_EQ(reply.grad_hidden.size(), 60U);
                    EXPECT_EQ(t.Submit({.id = 1, .loss_scale = 0.25}), "COMMITTED DIRECT");
                  },
                  [](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Submit({.id = 1, .loss_scale = 0.25}), "COMMITTED DIRECT");
                  },
                  {kEagerLine, "1 COMMITTED DIRECT"}});
  rows.push_back({"DirectWaitsForItsLastRow", "DIRECT: all rows have arrived before the first grad_weight product", [](Trial& t) {
                    const std::string before = t.Gradient();
                    const auto call = t.Open({.id = 0}, 2);
                    EXPECT_TRUE(AwaitUpload(t));
                    EXPECT_EQ(t.Gradient(), before);
                    EXPECT_EQ(t.MicroBatches(), std::vector<std::string>());
                    call->SendRest();
                    EXPECT_EQ(call->End(), "COMMITTED DIRECT");
                  }});
  rows.push_back({"CancelledWhileUploading", "an aborted micro-batch leaves the accumulator bitwise as it was", [](Trial& t) {
                    SubmitFirst(t);
                    const auto call = t.Open({.id = 1}, 2);
                    EXPECT_TRUE(AwaitUpload(t));
                    t.Cancel(*call);
                    EXPECT_TRUE(t.NothingInFlight());
                  }});
  rows.push_back({"CancelledInTheQueue",
                  "DIRECT: before the first product a cancellation aborts",
                  [](Trial& t) {
                    SubmitFirst(t);
                    BusyEngine engine(t);
                    const auto queued = t.Open({.id = 1}, 3);
                    EXPECT_TRUE(t.AwaitMetric("headwater_queue_depth", 1));
                    t.Cancel(*queued);
                    EXPECT_TRUE(t.AwaitMetric("headwater_queue_depth", 0));
                    engine.End();
                  },
                  SubmitFirstBesideAnother,
                  {kEagerLine},
                  OneAtATime()});
  rows.push_back({"DeadlineInTheQueue",
                  "DIRECT: before the first product the deadline aborts",
                  [](Trial& t) {
                    SubmitFirst(t);
                    BusyEngine engine(t);
                    EXPECT_EQ(t.Submit({.id = 1, .deadline_ms = 100}), "DEADLINE_EXCEEDED");
                    EXPECT_TRUE(t.AwaitMetric("headwater_queue_depth", 0));
                    engine.End();
                  },
                  SubmitFirstBesideAnother,
                  {kEagerLine},
                  OneAtATime()});
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
  rows.push_back({"DeadlineAfterTheFirstProduct", "DIRECT: from the first product on, a deadline no longer aborts", [](Trial& t) {
                    t.Head();
                    t.server().gate().Close();
                    auto call = std::async(std::launch::async, [&] { return t.Submit({.id = 0, .deadline_ms = 500}); });
                    t.server().gate().AwaitWaiting();
                    EXPECT_EQ(call.get(), "DEADLINE_EXCEEDED");
                    t.server().gate().Open();
                    EXPECT_TRUE(Await([&] { return t.MicroBatch(0) == kEagerLine; }));
                    EXPECT_TRUE(t.NothingInFlight());
                  }});
  rows.push_back({"TheSlowUploaderHoldsNobody",
                  "a slow uploader never holds the GPU: work is scheduled when its data is there",
                  [](Trial& t) {
                    const auto slow = t.Open({.id = 0}, 1);
                    EXPECT_TRUE(AwaitUpload(t));
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
  rows.push_back({"TheSlowUploaderFindsItsStepClosed",
                  "a slow uploader never holds the step either",
                  [](Trial& t) {
                    const auto slow = t.Open({.id = 1}, 1);
                    EXPECT_TRUE(AwaitUpload(t));
                    SubmitFirst(t);
                    EXPECT_EQ(t.Apply({.ids = {0}}), "OK");
                    slow->SendRest();
                    EXPECT_EQ(slow->End(), "STEP_MISMATCH");
                  },
                  [](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Apply({.ids = {0}}), "OK");
                  },
                  {}});
  return rows;
}

std::vector<TransactionRow> StagedRows() {
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
  rows.push_back({"ExplicitIsDropped",
                  "EXPLICIT and discarded: the accumulator is bitwise as it was, the slot is free",
                  [](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Discard({.id = 1}), "OK dropped");
                    EXPECT_EQ(t.Discard({.id = 1}), "OK");
                    EXPECT_EQ(t.Submit({.id = 2, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Discard({.id = 2}), "OK dropped");
                  },
                  SubmitFirst,
                  {kEagerLine, "1 DISCARDED STAGED", "2 DISCARDED STAGED"}});
  rows.push_back({"ExplicitCancelledWhileComputing",
                  "EXPLICIT: cancelled before its answer, nothing of it is left",
                  [](Trial& t) {
                    CancelWhileComputing(t, {.id = 0, .explicit_commit = true});
                    StageAndCommitHalf(t);  // in the only slot
                  },
                  StageAndCommitHalf,
                  {"0 COMMITTED STAGED"}});
  rows.push_back({"RefuseIsStaged",
                  "policy REFUSE: nothing is added before it is known to be finite",
                  [](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 0, .refuse_non_finite = true}), "COMMITTED STAGED");
                    EXPECT_EQ(t.Submit({.id = 1, .refuse_non_finite = true, .has_nan = true}), "NON_FINITE_VALUES");
                    EXPECT_EQ(t.Submit({.id = 1, .refuse_non_finite = true}), "COMMITTED STAGED");
                  },
                  [](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 0, .refuse_non_finite = true}), "COMMITTED STAGED");
                    EXPECT_EQ(t.Submit({.id = 1, .refuse_non_finite = true}), "COMMITTED STAGED");
                  },
                  {"0 COMMITTED STAGED", "1 COMMITTED STAGED"}});
  rows.push_back({"NoSlotAndNotAllowed",
                  "no slot and HELD not allowed: RESOURCE_EXHAUSTED / STAGING_FULL",
                  [](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true}), "STAGING_FULL");
                    EXPECT_EQ(t.last_error().code, grpc::StatusCode::RESOURCE_EXHAUSTED);
                    EXPECT_EQ(t.Submit({.id = 1, .refuse_non_finite = true}), "STAGING_FULL");
                    EXPECT_EQ(t.MicroBatches(), std::vector<std::string>{"0 STAGED STAGED"});
                    EXPECT_EQ(t.Submit({.id = 2}), "COMMITTED DIRECT");  // needs none
                    EXPECT_EQ(t.Commit({.id = 0, .factor = 0.5}), "OK");
                  },
                  [](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 2}), "COMMITTED DIRECT");
                    StageAndCommitHalf(t);
                  },
                  {"0 COMMITTED STAGED", "2 COMMITTED DIRECT"}});
  rows.push_back({"NoSlotIsPlanned",
                  "a head without slots refuses what needs one, and can hold it",
                  [](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGING_FULL");
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true, .allow_held = true}), "STAGED HELD");
                    EXPECT_EQ(t.Commit({.id = 0}), "OK");
                    EXPECT_EQ(t.Submit({.id = 1, .allow_held = true, .refuse_non_finite = true, .has_nan = true}),
                              "NON_FINITE_VALUES");
                    EXPECT_EQ(t.Submit({.id = 1, .allow_held = true, .refuse_non_finite = true}), "COMMITTED HELD");
                  },
                  [](Trial& t) {  // what was held is added as if it were eager
                    SubmitFirst(t);
                    EXPECT_EQ(t.Submit({.id = 1}), "COMMITTED DIRECT");
                  },
                  {"0 COMMITTED HELD", "1 COMMITTED HELD"},
                  WithSlots(0)});
  return rows;
}

std::vector<TransactionRow> HeldRows() {
  std::vector<TransactionRow> rows;
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
  const std::vector<float> factors = {2.0F, -1.0F, 0.25F};
  rows.push_back({"LateTokenFactors",
                  "HELD: EXPLICIT with late token_factors, though slots are free",
                  [factors](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true, .late_token_factors = true}), "STAGED HELD");
                    EXPECT_EQ(t.Commit({.id = 0, .token_factors = {1, 2}}), "SHAPE_MISMATCH");
                    EXPECT_EQ(t.Commit({.id = 0, .token_factors = {1, 2, NAN}}), "INVALID_FIELD");
                    EXPECT_EQ(t.MicroBatch(0), "0 STAGED HELD");
                    EXPECT_EQ(t.Commit({.id = 0, .factor = 0.5, .token_factors = factors}), "OK");
                    EXPECT_EQ(t.Commit({.id = 0, .factor = 0.5, .token_factors = factors}), "OK replayed");
                    EXPECT_EQ(t.Commit({.id = 0, .factor = 0.5}), "MICRO_BATCH_CONFLICT");
                    EXPECT_EQ(t.Commit({.id = 0, .factor = 0.5, .token_factors = {2, -1, 0.5F}}), "MICRO_BATCH_CONFLICT");
                  },
                  [factors](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true, .late_token_factors = true}), "STAGED HELD");
                    EXPECT_EQ(t.Commit({.id = 0, .factor = 0.5, .token_factors = factors}), "OK");
                  },
                  {"0 COMMITTED HELD"}});
  rows.push_back({"LateTokenFactorsMayBeLeftOut",
                  "HELD: without token_factors it is what EAGER would have added",
                  [](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true, .late_token_factors = true}), "STAGED HELD");
                    EXPECT_EQ(t.Commit({.id = 0, .factor = 0.5}), "OK");
                  },
                  [](Trial& t) { EXPECT_EQ(t.Submit({.id = 0, .loss_scale = 0.5}), "COMMITTED DIRECT"); },
                  {"0 COMMITTED HELD"}});
  rows.push_back({"TokenFactorsOnlyForHeld",
                  "token_factors at commit are for what is HELD",
                  [factors](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 0, .late_token_factors = true}), "INVALID_COMBINATION");
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED");
                    EXPECT_EQ(t.Commit({.id = 0, .token_factors = factors}), "INVALID_COMBINATION");
                    EXPECT_EQ(t.MicroBatch(0), "0 STAGED STAGED");
                    EXPECT_EQ(t.Commit({.id = 0, .factor = 0.5}), "OK");
                  },
                  StageAndCommitHalf,
                  {"0 COMMITTED STAGED"}});
  rows.push_back({"HeldIsDropped",
                  "HELD and discarded: the accumulator is bitwise as it was, the memory is free",
                  [](Trial& t) {
                    SubmitFirst(t);
                    EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true, .late_token_factors = true}), "STAGED HELD");
                    EXPECT_TRUE(t.AwaitMetric("headwater_held_bytes", 72));  // 3 rows of 5 fp32 and a target
                    EXPECT_EQ(t.Discard({.id = 1}), "OK dropped");
                    EXPECT_TRUE(t.AwaitMetric("headwater_held_bytes", 0));
                  },
                  SubmitFirst,
                  {kEagerLine, "1 DISCARDED HELD"}});
  rows.push_back({"HeldBytesAreBounded",
                  "no memory to hold it in: STAGING_FULL",
                  [](Trial& t) {
                    for (const int64_t id : {0, 1}) {
                      EXPECT_EQ(t.Submit({.id = id, .explicit_commit = true, .late_token_factors = true}), "STAGED HELD");
                    }
                    EXPECT_EQ(t.Submit({.id = 2, .explicit_commit = true, .late_token_factors = true}), "STAGING_FULL");
                    EXPECT_EQ(t.last_error().code, grpc::StatusCode::RESOURCE_EXHAUSTED);
                    EXPECT_EQ(t.last_error().at("limit"), "max_held_bytes");
                    EXPECT_EQ(t.last_error().at("requestedBytes"), "72");
                    EXPECT_EQ(t.last_error().at("availableBytes"), "0");
                    EXPECT_TRUE(t.last_error().retry_ms.has_value());
                    EXPECT_EQ(t.Discard({.id = 0}), "OK dropped");
                    EXPECT_EQ(t.Submit({.id = 2, .explicit_commit = true, .late_token_factors = true}), "STAGED HELD");
                    EXPECT_EQ(t.Commit({.id = 2}), "OK");
                    EXPECT_EQ(t.Commit({.id = 1}), "OK");
                  },
                  [](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 2}), "COMMITTED DIRECT");
                    EXPECT_EQ(t.Submit({.id = 1}), "COMMITTED DIRECT");
                  },
                  {"0 DISCARDED HELD", "1 COMMITTED HELD", "2 COMMITTED HELD"},
                  {.adjust = [](ServerSetup& setup) { setup.options.limits.max_held_bytes = 144; }}});
  rows.push_back({"HeldCancelledWhileComputing",
                  "HELD: cancelled before its answer, nothing of it is left",
                  [](Trial& t) {
                    CancelWhileComputing(t, {.id = 0, .explicit_commit = true, .late_token_factors = true});
                    EXPECT_TRUE(t.AwaitMetric("headwater_held_bytes", 0));
                  },
                  NoCalls,
                  {}});
  rows.push_back({"HeldGoesWithItsStep",
                  "HELD and undecided when its step is closed: gone, and its memory free",
                  [](Trial& t) {
                    EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true, .late_token_factors = true}), "STAGED HELD");
                    EXPECT_EQ(t.DiscardGradient({}), "OK");
                    EXPECT_TRUE(t.AwaitMetric("headwater_held_bytes", 0));
                    EXPECT_EQ(t.Submit({.id = 0, .step = 1, .explicit_commit = true, .late_token_factors = true}), "STAGED HELD");
                    EXPECT_EQ(t.Take(), "OK");
                    EXPECT_TRUE(t.AwaitMetric("headwater_held_bytes", 0));
                  },
                  [](Trial& t) { EXPECT_EQ(t.DiscardGradient({}), "OK"); },
                  {}});
  return rows;
}

}  // namespace

std::vector<TransactionRow> FormRows() {
  std::vector<TransactionRow> rows = DirectRows();
  for (auto more : {StagedRows(), HeldRows()}) rows.insert(rows.end(), more.begin(), more.end());
  return rows;
}

}  // namespace headwater::testing
