// ComputeLoss and what follows on it, through the wire: what comes back in which form, figures, limits, and what is refused at its
// header. tests/e2e/python/losses has the numbers, transactions/ what calls leave behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/support/open_stream.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {
namespace {

using ::testing::ElementsAre;

// Three rows of fp32 elements, and their targets.
constexpr int64_t kHeldBytes = 3 * kColumns * 4 + 3 * 4;

v1::HeadSpec WithoutSlots() {
  v1::HeadSpec spec = SmallSpec();
  spec.set_staging_slots(0);
  return spec;
}

// EXPLICIT, over three rows: of the kind that is held always, or where no slot is free.
enum class Held { kAlways, kIfNoSlotIsFree };
v1::MicroBatchHeader HeldHeader(const TestHead& head, int64_t micro_batch, Held held) {
  v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, micro_batch, {1, 2, 3});
  header.set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
  header.set_late_token_factors(held == Held::kAlways);
  header.set_allow_held(held == Held::kIfNoSlotIsFree);
  return header;
}

TEST(ComputeLoss, TheSummarySaysWhatWasComputed) {
  WireServer server;
  const TestHead head = server.MakeHead("student", SmallSpec());
  const TestHead teacher = server.MakeHead("teacher", FrozenSpec(13, 4), 7);
  v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 4, {3, -100, 12});
  v1::LossTerm* const soft = header.add_terms();
  *soft = header.terms(0);
  SetTeacher(soft, teacher.name());
  for (const auto output : {v1::TOKEN_OUTPUT_LOSS, v1::TOKEN_OUTPUT_LSE, v1::TOKEN_OUTPUT_ARGMAX, v1::TOKEN_OUTPUT_LSE}) {
    header.add_outputs(output);
  }
  const LossReply reply = server.MustCompute(header, Rows(3), {.teacher_rows = {{1, Rows(3, 6, 4)}}});
  ASSERT_EQ(reply.summary.terms_size(), 2);
  for (const v1::LossTermResult& result : reply.summary.terms()) {
    EXPECT_EQ(result.sums().valid_token_count(), 2);
    EXPECT_EQ(result.non_finite_row_count(), 0);
    EXPECT_EQ(result.weight_version(), head.head.weight_version());
    EXPECT_THAT(result.token_loss().shape(), ElementsAre(3));
    EXPECT_THAT(result.lse().shape(), ElementsAre(3));
    EXPECT_FALSE(result.has_entropy());
    EXPECT_EQ(result.argmax().data_type(), v1::DATA_TYPE_INT32);
    EXPECT_EQ(result.argmax().data().size(), 12U);
  }
  EXPECT_EQ(reply.summary.terms(1).teacher_weight_version(), teacher.head.weight_version());
  EXPECT_EQ(reply.summary.state(), v1::CONTRIBUTION_STATE_COMMITTED);
  EXPECT_EQ(reply.summary.form(), v1::CONTRIBUTION_FORM_DIRECT);
  EXPECT_EQ(reply.summary.step(), 0);
  EXPECT_EQ(reply.summary.digest().size(), 16U);
  EXPECT_EQ(reply.summary.transport(), "grpc");
  EXPECT_TRUE(reply.summary.timing().has_engine());
  EXPECT_FALSE(reply.summary.replayed());
}

TEST(ComputeLoss, AMicroBatchWithoutRowsIsCounted) {
  WireServer server;
  const TestHead head = server.MakeHead("empty", SmallSpec());
  const LossReply reply = server.MustCompute(CrossEntropyHeader(head, 0, 6, {}), "");
  EXPECT_EQ(reply.summary.state(), v1::CONTRIBUTION_STATE_COMMITTED);
  EXPECT_EQ(server.Steps(head).open().micro_batches(0).micro_batch(), 6);
  EXPECT_EQ(server.Gradient(head), Bytes(std::vector<float>(65, 0.0F)));
}

TEST(ComputeLoss, GradHiddenComesInAscendingChunksWithinTheLimitOrNotAtAll) {
  ServerSetup setup;
  setup.options.limits.max_hidden_size = 64;
  setup.options.limits.max_chunk_bytes = 256;  // 12 rows of 5 fp32
  WireServer server(setup);
  const TestHead head = server.MakeHead("chunked", SmallSpec());
  v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 0, std::vector<int32_t>(30, 1));
  const LossReply reply = server.MustCompute(header, Rows(30));
  EXPECT_THAT(reply.chunk_starts, ElementsAre(0, 12, 24));
  EXPECT_EQ(reply.grad_hidden.size(), 600U);
  const std::string gradient = server.Gradient(head);
  header.set_micro_batch(1);
  header.set_return_grad_hidden(false);
  EXPECT_TRUE(server.MustCompute(header, Rows(30)).grad_hidden.empty());
  EXPECT_NE(server.Gradient(head), gradient);
}

TEST(Limits, OutputsOfAllTermsTravelInOneMessage) {
  ServerSetup setup;
  setup.options.limits.max_chunk_bytes = 1 << 12;
  setup.options.limits.max_hidden_size = 64;
  setup.options.limits.max_micro_batch_rows = 1 << 12;
  setup.options.limits.max_message_bytes = (1 << 12) * v1::TokenOutput_MAX * 4 + (64 << 10);
  WireServer server(setup);
  const std::vector<int32_t> targets(1 << 12, 1);
  v1::MicroBatchHeader header = CrossEntropyHeader(server.MakeHead("h", SmallSpec()), 0, 0, targets);
  *header.add_terms() = CrossEntropyHeader(server.MakeHead("other", SmallSpec()), 0, 0, targets).terms(0);
  for (int output = v1::TOKEN_OUTPUT_LOSS; v1::TokenOutput_IsValid(output); ++output) {
    header.add_outputs(static_cast<v1::TokenOutput>(output));
  }
  ExpectError(server.Compute(header, Rows(1 << 12)).status, "LIMIT_EXCEEDED",
              {{"limit", "max_message_bytes"}, {"field", "header.outputs"}});
}

TEST(Limits, OfABatchsBytesHoldForAddGradient) {
  HeadServer server(WithLimit(&service::Limits::max_micro_batch_bytes, 60));
  auto header = RequestOn<v1::AddGradientHeader>(server.head);
  header.set_micro_batch(0);
  header.set_row_count(3);
  EXPECT_EQ(ReasonOf(server.AddGradient(header, Random(15, 9, 1))), "OK");  // at the limit
  const std::string before = server.Snapshot(server.head);
  header.set_micro_batch(1);
  header.set_row_count(4);
  ExpectError(server.AddGradient(header, Random(20, 9, 1)), "LIMIT_EXCEEDED", {{"limit", "max_micro_batch_bytes"}});
  EXPECT_EQ(server.Snapshot(server.head), before);
  EXPECT_EQ(server.Metric("headwater_in_flight_bytes"), "0");
}

// ---- steps -----------------------------------------------------------------------------------------------------------

// As trainers' options have it.
TEST(Apply, ZeroAndInfinityClipNothing) {
  WireServer server;
  v1::ApplyOptimizerStepRequest request;
  const auto apply = [&](const std::string& id, std::optional<double> max_grad_norm) {
    const TestHead head = server.MakeHead(id, SmallSpec());
    server.MustCompute(CrossEntropyHeader(head, 0, 0, {1, 2, 3}), Rows(3));
    request = RequestOn<v1::ApplyOptimizerStepRequest>(head, StepEnd{.ids = {0}});
    if (max_grad_norm.has_value()) request.set_max_grad_norm(*max_grad_norm);
    const v1::ApplyOptimizerStepResponse response = server.Must(&Heads::ApplyOptimizerStep, request);
    EXPECT_EQ(response.clip_factor(), 1);
    EXPECT_GT(response.global_grad_norm(), 0);
    return server.Weights(head);
  };
  const std::string unclipped = apply("unclipped", {});
  for (const double none : {0.0, std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(apply(absl::StrCat("h", none), none), unclipped);
    request.clear_max_grad_norm();  // the same arguments
    EXPECT_TRUE(server.Must(&Heads::ApplyOptimizerStep, request).replayed());
  }
}

TEST(Waiting, ForAStepIsNoIdleTimeOfItsClient) {
  ServerSetup setup;
  setup.options.limits.max_step_wait = absl::Milliseconds(300);
  setup.options.stream_idle_timeout = absl::Milliseconds(100);
  HeadServer server(setup);
  EXPECT_EQ(ReasonOf(server.Compute(CrossEntropyHeader(server.head, 1, 0, {1, 2, 3}), Rows(3)).status), "STEP_MISMATCH");
}

// head_ordered_test.cc has the order.
TEST(Deterministic, WhatWaitsForItsPredecessorsIsCounted) {
  ServerSetup setup;
  setup.engine.deterministic = setup.options.deterministic = true;
  HeadServer server(setup);
  server.MustCompute(CrossEntropyHeader(server.head, 0, 1, {1, 2, 3}), Rows(3));
  EXPECT_TRUE(server.AwaitMetric("headwater_waiting_contributions", 1));
  server.MustCompute(CrossEntropyHeader(server.head, 0, 0, {1, 2, 3}), Rows(3));
  EXPECT_TRUE(server.AwaitMetric("headwater_waiting_contributions", 0));
}

// ---- what is held ----------------------------------------------------------------------------------------------------

TEST(Held, BytesCountClassWeightsToo) {
  constexpr int64_t kVocab = 13;
  for (const int64_t missing : {1, 0}) {
    WireServer server(WithLimit(&service::Limits::max_held_bytes, kHeldBytes + kVocab * 4 - missing));
    v1::MicroBatchHeader header = HeldHeader(server.MakeHead("h", WithoutSlots()), 0, Held::kIfNoSlotIsFree);
    *header.mutable_terms(0)->mutable_cross_entropy()->mutable_class_weights() = TensorOf(std::vector<float>(kVocab, 0.5F));
    EXPECT_EQ(ReasonOf(server.Compute(header, Rows(3)).status), missing == 0 ? "OK" : "LIMIT_EXCEEDED");
  }
}

TEST(Held, ATeachersRowsAreKeptToo) {
  WireServer server;
  const TestHead head = server.MakeHead("student", SmallSpec());
  v1::MicroBatchHeader header = HeldHeader(head, 0, Held::kAlways);
  header.mutable_terms(0)->clear_targets();
  SetTeacher(header.mutable_terms(0), server.MakeHead("teacher", FrozenSpec(13, 4), 7).name());
  const LossReply held = server.MustCompute(header, Rows(3), {.teacher_rows = {{0, Rows(3, 6, 4)}}});
  EXPECT_EQ(held.summary.form(), v1::CONTRIBUTION_FORM_HELD);
  EXPECT_EQ(ReasonOf(server.Commit(head, {.id = 0})), "OK");
  EXPECT_NE(server.Gradient(head), Bytes(std::vector<float>(65, 0.0F)));
}

// Nobody sends rows in vain, again and again, of what no commit of another makes room for.
TEST(Held, WhatCanNeverBeHeldIsRefusedAtItsHeader) {
  for (const int64_t most : {int64_t{0}, kHeldBytes - 1}) {
    HeadServer server(WithLimit(&service::Limits::max_held_bytes, most));  // its head has one slot
    const TestHead without = server.MakeHead("without", WithoutSlots());
    for (const v1::MicroBatchHeader& header :
         {HeldHeader(server.head, 0, Held::kAlways), HeldHeader(without, 0, Held::kIfNoSlotIsFree)}) {
      OpenStream stream(server.loss(), header);  // no row is sent
      const WireError error = ExpectError(stream.End(), "LIMIT_EXCEEDED",
                                          {{"field", "header.row_count"},
                                           {"limit", "max_held_bytes"},
                                           {"maximum", absl::StrCat(most)},
                                           {"actual", absl::StrCat(kHeldBytes)}});
      EXPECT_FALSE(error.retry_ms.has_value());
    }
    // What a slot does for may be tried again when that is free, and what is added at once needs no room.
    const auto may_be_held = [&](int64_t id) {
      return ReasonOf(server.Compute(HeldHeader(server.head, id, Held::kIfNoSlotIsFree), Rows(3)).status);
    };
    EXPECT_EQ(may_be_held(0), "OK");
    EXPECT_EQ(may_be_held(1), "STAGING_FULL");
    Require(server.Commit(server.head, {.id = 0}), "CommitMicroBatch");
    EXPECT_EQ(may_be_held(1), "OK");
    v1::MicroBatchHeader eager = CrossEntropyHeader(without, 0, 1, {1, 2, 3});
    eager.set_non_finite_policy(v1::NON_FINITE_POLICY_REFUSE);
    eager.set_allow_held(true);
    EXPECT_EQ(ReasonOf(server.Compute(eager, Rows(3)).status), "OK");
  }
}

TEST(Held, TheirBytesAreBounded) {
  HeadServer server(WithLimit(&service::Limits::max_held_bytes, 2 * kHeldBytes));
  const auto hold = [&](int64_t id) { return server.Compute(HeldHeader(server.head, id, Held::kAlways), Rows(3)).status; };
  for (const int64_t id : {0, 1}) EXPECT_EQ(ReasonOf(hold(id)), "OK");
  EXPECT_TRUE(server.AwaitMetric("headwater_held_bytes", 2 * kHeldBytes));
  const WireError error =
      ExpectError(hold(2), "STAGING_FULL",
                  {{"limit", "max_held_bytes"}, {"requestedBytes", absl::StrCat(kHeldBytes)}, {"availableBytes", "0"}});
  EXPECT_TRUE(error.retry_ms.has_value());
  Require(server.Discard(server.head, {.id = 0}), "DiscardMicroBatch");
  EXPECT_EQ(ReasonOf(hold(2)), "OK");
}

TEST(Held, TheirCommitIsTimeInWhichTheEngineIsBusy) {
  WireServer server;
  const TestHead head = server.MakeHead("h", WithoutSlots());
  server.MustCompute(HeldHeader(head, 0, Held::kIfNoSlotIsFree), Rows(3));
  const std::string before = server.Metric("headwater_compute_busy_seconds_total");
  Require(server.Commit(head, {.id = 0}), "CommitMicroBatch");
  EXPECT_NE(server.Metric("headwater_compute_busy_seconds_total"), before);
}

// ---- gradient_resolution: what is drawn follows from head, step, micro-batch and term, and from nothing else ---------

struct Draw {
  std::string head = "h";
  int64_t step = 0;
  int32_t staging_slots = 1;
  std::function<void(v1::MicroBatchHeader&)> change = [](v1::MicroBatchHeader&) {};
};

// Both gradients of micro-batch 4, on a server of its own, as after a restart.
std::string Drawn(const Draw& draw) {
  WireServer server;
  v1::HeadSpec spec = SmallSpec(400, 12);
  spec.set_staging_slots(draw.staging_slots);
  spec.set_initial_step(draw.step);
  const TestHead head = server.MakeHead(draw.head, spec);
  v1::MicroBatchHeader header = CrossEntropyHeader(head, draw.step, 4, {3, 17, -100, 399, 0, 250, 8, 100});
  header.mutable_terms(0)->set_gradient_resolution(0.125);
  draw.change(header);
  const LossReply reply = server.MustCompute(header, Bytes(Random(8 * 12, 5, 2)));
  if (header.commit_mode() == v1::COMMIT_MODE_EXPLICIT) {
    Require(server.Commit(head, {.id = 4, .step = draw.step}), "CommitMicroBatch");
  }
  return server.Gradient(head, draw.step) + reply.grad_hidden;
}

TEST(GradientResolution, FormsRestartsAndAttemptsDrawAlike) {
  const std::string direct = Drawn({});
  EXPECT_TRUE(Drawn({}) == direct);
  EXPECT_TRUE(Drawn({.change = [](auto& header) { header.set_attempt(5); }}) == direct);
  const auto explicit_commit = [](v1::MicroBatchHeader& header) {
    header.set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
    header.set_allow_held(true);
  };
  EXPECT_TRUE(Drawn({.change = explicit_commit}) == direct) << "STAGED";
  EXPECT_TRUE(Drawn({.staging_slots = 0, .change = explicit_commit}) == direct) << "HELD";
}

TEST(GradientResolution, StepsMicroBatchesTermsAndHeadsDrawOtherwise) {
  const std::string direct = Drawn({});
  EXPECT_FALSE(Drawn({.head = "other"}) == direct);
  EXPECT_FALSE(Drawn({.step = 1}) == direct);
  EXPECT_FALSE(Drawn({.change = [](auto& header) { header.set_micro_batch(5); }}) == direct);
  // A first term that adds nothing.
  EXPECT_FALSE(Drawn({.change = [](v1::MicroBatchHeader& header) {
                 *header.add_terms() = header.terms(0);
                 *header.mutable_terms(0)->mutable_token_weights() = TensorOf(std::vector<float>(8));
               }}) == direct);
}

}  // namespace
}  // namespace headwater::testing
