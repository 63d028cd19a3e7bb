// The server around the handlers: limits at and above, metrics, traces, request ids, start and options.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/integration/support/open_stream.h"
#include "tests/integration/support/raw_call.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

TEST(Reflection, IsThereOnlyIfAskedFor) {
  const std::string method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  WireServer without;
  EXPECT_EQ(CallRaw(without.NewChannel(), method, {""}).status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  ServerSetup setup;
  setup.options.reflection = true;
  WireServer with(setup);
  const RawReply reply = CallRaw(with.NewChannel(), method, {"\x3a\x01*"});
  EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::OK);
  EXPECT_THAT(reply.answer, HasSubstr("headwater.v1.LossService"));
}

// bad_values_*.cc has those of which the usual value is tried.
TEST(Limits, AreAcceptedAtTheLimitAndRefusedOneAbove) {
  ServerSetup setup;
  service::Limits& limits = setup.options.limits;
  limits.max_hidden_size = 8;
  limits.max_chunk_bytes = 64;
  limits.max_staging_slots = 3;
  limits.max_step_micro_batches = 4;
  limits.max_heads = 3;
  WireServer server(setup);
  const auto expect_limit = [](const grpc::Status& status, const std::string& limit, const std::string& maximum,
                               const std::string& actual) {
    const WireError error = DecodeError(status);
    EXPECT_EQ(error.code, grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(error.reason, "LIMIT_EXCEEDED");
    EXPECT_EQ(error.at("limit"), limit);
    EXPECT_EQ(error.at("maximum"), maximum);
    EXPECT_EQ(error.at("actual"), actual);
  };
  v1::Head unused;
  v1::HeadSpec spec = SmallSpec(16, 8);
  spec.set_staging_slots(3);
  const TestHead head = server.MakeHead("h", spec);
  spec.set_staging_slots(4);
  expect_limit(server.Create("tenants/default/heads/x", spec, &unused), "max_staging_slots", "3", "4");
  // Two rows of 32 bytes are a chunk at the limit.
  const auto compute = [&](int64_t id, int64_t chunk_rows) {
    const v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, id, std::vector<int32_t>(12, 1));
    return server.Compute(header, Bytes(Random(96, 1, 1)), "", {.chunk_rows = chunk_rows}).status;
  };
  expect_limit(compute(0, 3), "max_chunk_bytes", "64", "96");
  for (const int64_t id : {0, 1, 2, 3}) EXPECT_EQ(ReasonOf(compute(id, 2)), "OK");
  EXPECT_EQ(ReasonOf(compute(4, 2)), "LIMIT_EXCEEDED");
  EXPECT_EQ(ReasonOf(server.Seal(head, 0, {0, 1, 2, 3, 4})), "LIMIT_EXCEEDED");
  EXPECT_EQ(ReasonOf(server.Seal(head, 0, {0, 1, 2, 3})), "OK");
  for (const char* const id : {"second", "third"}) server.MakeHead(id, SmallSpec());
  EXPECT_EQ(ReasonOf(server.Create("tenants/default/heads/fourth", SmallSpec(), &unused)), "QUOTA_EXCEEDED");
}

TEST(Limits, OfAMessageAreGrpcs) {
  ServerSetup setup;
  service::Limits& limits = setup.options.limits;
  limits.max_chunk_bytes = 1 << 16;
  limits.max_message_bytes = 1 << 18;
  limits.max_micro_batch_rows = 1024;
  limits.max_hidden_size = 64;
  WireServer server(setup);
  const TestHead head = server.MakeHead("h", SmallSpec());
  const std::string before = server.Snapshot(head);
  OpenStream call(server.loss(), CrossEntropyHeader(head, 0, 0, {1}), std::string(1 << 18, 'x'), 1);
  call.stream->WritesDone();
  EXPECT_FALSE(call.End().ok());
  EXPECT_EQ(server.Snapshot(head), before);
}

TEST(Sessions, LeasesAreAtMostTheServers) {
  WireServer server(WithLimit(&service::Limits::max_session_lease, absl::Seconds(20)));
  for (const int64_t asked_s : {0, 60}) {  // 0: not asked; the default is 30 s
    v1::OpenSessionRequest request;
    if (asked_s > 0) request.mutable_lease()->set_seconds(asked_s);
    v1::OpenSessionResponse opened;
    Require(server.Call(&Sessions::OpenSession, request, &opened), "OpenSession");
    EXPECT_EQ(opened.lease().seconds(), 20);
  }
}

TEST(RequestIds, AreTakenOverOrMade) {
  WireServer server;
  const TestHead head = server.MakeHead("h", SmallSpec());
  const std::string rows = Bytes(Random(5, 1, 1));
  const auto id_of = [&](const std::string& sent) {
    const LossReply reply = server.Compute(CrossEntropyHeader(head, 0, 0, {1}), rows, "", {.request_id = sent});
    const auto found = reply.initial_metadata.find("x-request-id");
    return found == reply.initial_metadata.end() ? "" : found->second;
  };
  EXPECT_EQ(id_of("trainer-7/step:12.0_a"), "trainer-7/step:12.0_a");
  EXPECT_THAT(id_of(""), MatchesRegex("[0-9a-f]{32}"));
  EXPECT_NE(id_of(""), id_of(""));
  EXPECT_THAT(id_of("with space\"quote"), MatchesRegex("[0-9a-f]{32}"));
  EXPECT_THAT(id_of(std::string(129, 'a')), MatchesRegex("[0-9a-f]{32}"));
  EXPECT_EQ(id_of(std::string(128, 'a')), std::string(128, 'a'));
}

TEST(Metrics, TellWhatHappened) {
  ServerSetup setup;
  setup.options.metrics_address = "127.0.0.1:0";
  WireServer server(setup);
  const TestHead head = server.MakeHead("secret-name", SmallSpec());
  v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 0, {1, -100, 3});
  const std::string rows = Bytes(Random(15, 1, 1));
  Require(server.Compute(header, rows).status, "committed");
  Require(server.Compute(header, rows).status, "replayed");
  EXPECT_FALSE(server.Compute(header, Bytes(Random(15, 2, 1))).status.ok());
  header.set_micro_batch(1);
  header.set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
  Require(server.Compute(header, rows).status, "staged");
  Require(server.Discard(head, 0, 1), "discarded");
  header.mutable_terms(0)->mutable_head()->set_step(9);
  EXPECT_FALSE(server.Compute(header, rows).status.ok());
  v1::ApplyOptimizerStepRequest apply;
  *apply.mutable_head() = server.At(head, 0);
  apply.mutable_expected()->set_count(1);
  apply.set_learning_rate(0.1);
  Require(server.Apply(apply), "applied");

  ASSERT_NE(server.server().metrics_port(), 0);
  const std::string text = server.server().SerializeMetrics();
  for (const char* line : {
           "headwater_requests_total{code=\"OK\",method=\"ComputeLoss\"} 3\n",
           "headwater_requests_total{code=\"ABORTED\",method=\"ComputeLoss\"} 1\n",
           "headwater_micro_batches_total{outcome=\"committed\"} 1\n",
           "headwater_micro_batches_total{outcome=\"replayed\"} 1\n",
           "headwater_micro_batches_total{outcome=\"conflict\"} 1\n",
           "headwater_micro_batches_total{outcome=\"staged\"} 1\n",
           "headwater_micro_batches_total{outcome=\"discarded\"} 1\n",
           "headwater_micro_batches_total{outcome=\"refused\"} 1\n",
           "headwater_refusals_total{reason=\"STEP_MISMATCH\"} 1\n",
           "headwater_refusals_total{reason=\"MICRO_BATCH_CONFLICT\"} 1\n",
           "headwater_commits_total 1\n",
           "headwater_discards_total 1\n",
           "headwater_steps_total{how=\"applied\"} 1\n",
           "headwater_tokens_total{loss=\"cross_entropy\"} 6\n",
           "headwater_heads 1\n",
           "headwater_queue_depth 0\n",
           "headwater_memory_planned_bytes{purpose=\"weight\"} 260\n",
           "headwater_bytes_total{direction=\"out\",transport=\"grpc\"} 180\n",
           "headwater_compute_seconds_count 4\n",  // the conflict's, too: it was met there
           "headwater_commit_seconds_count 0\n",
           "headwater_token_chunk_fill_ratio_count 3\n",
           // 2 rows that are not ignored, 13 x 5: two products in each of three calls, and grad_weight's in two of them.
           "headwater_product_flops_total 2080\n",
           "headwater_max_queue_depth 64\n",
           // Nothing of it has happened, and yet it is there.
           "headwater_refusals_total{reason=\"INTERNAL\"} 0\n",
           "headwater_serving 1\n",
       }) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  EXPECT_THAT(text, Not(HasSubstr("secret-name")));
  EXPECT_THAT(text, HasSubstr("headwater_product_flops_per_second "));  // measured
  header.set_micro_batch(2);
  header.mutable_terms(0)->mutable_head()->set_step(1);
  Require(server.Compute(header, rows).status, "staged");
  Require(server.Commit(head, 1, 2, 1), "committed");
  EXPECT_EQ(server.MetricLine("headwater_commit_seconds_count"), "headwater_commit_seconds_count 1");
  EXPECT_NE(server.MetricLine("headwater_compute_busy_seconds_total"), "headwater_compute_busy_seconds_total 0");
}

constexpr char kTraceId[] = "0af7651916cd43dd8448eb211c80319c";

// What a call was traced as, once there are `count` files; the newest one.
std::string AwaitTrace(const std::string& folder, size_t count) {
  std::vector<std::filesystem::path> files;
  EXPECT_TRUE(Await([&] {
    files.clear();
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().extension() == ".json") files.push_back(entry.path());
    }
    return files.size() == count;
  }));
  return files.empty() ? "" : ReadFile(*std::max_element(files.begin(), files.end()));
}

TEST(Traces, OfMicroBatchesAreWrittenIfTheCallerRecordsThem) {
  constexpr int64_t kRows = 3000;  // enough for the engine to take them as they come
  const TemporaryDirectory folder;
  ServerSetup setup;
  setup.options.trace_dir = folder.path();
  WireServer server(setup);
  const TestHead head = server.MakeHead("traced", SmallSpec());
  const auto compute = [&](int64_t micro_batch, const char* flags, bool is_explicit, int seed = 1) {
    grpc::ClientContext context;
    context.AddMetadata("x-request-id", "request-of-the-test");
    context.AddMetadata("traceparent", std::string("00-") + kTraceId + "-b7ad6b7169203331-" + flags);
    const auto stream = server.loss().ComputeLoss(&context);
    v1::ComputeLossRequest request;
    *request.mutable_header() = CrossEntropyHeader(head, 0, micro_batch, std::vector<int32_t>(kRows, 1));
    if (is_explicit) request.mutable_header()->set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
    stream->Write(request);
    *request.mutable_chunk() = HiddenChunk(Bytes(Random(kRows * 5, seed, 1)), 0, kRows);
    stream->Write(request);
    stream->WritesDone();
    return EndOf(*stream);
  };
  Require(compute(0, "01", false), "recorded");
  const std::string trace = AwaitTrace(folder.path(), 1);
  for (const char* part :
       {kTraceId, "\"parent_span_id\":\"b7ad6b7169203331\"", "\"request_id\":\"request-of-the-test\"", "\"method\":\"ComputeLoss\"",
        "\"code\":\"OK\"", "\"name\":\"upload\"", "\"name\":\"compute\"", "\"name\":\"download\"",
        "\"name\":\"engine: grad_hidden\"", " to 3000\"", "\"name\":\"decision: all rows are there\"", "\"rows\":\"3000\"",
        "\"transport\":\"grpc\"", "\"head\":\"tenants/default/heads/traced\""}) {
    EXPECT_THAT(trace, HasSubstr(part));
  }
  Require(compute(1, "00", false), "not recorded");
  EXPECT_FALSE(compute(0, "03", false, /*seed=*/2).ok());  // other rows; what is refused is traced, too
  EXPECT_THAT(AwaitTrace(folder.path(), 2), HasSubstr("\"reason\":\"MICRO_BATCH_CONFLICT\""));
  Require(compute(2, "00", true), "staged");
  grpc::ClientContext context;
  context.AddMetadata("traceparent", std::string("00-") + kTraceId + "-b7ad6b7169203331-01");
  v1::CommitMicroBatchRequest commit;
  *commit.add_heads() = server.At(head, 0);
  commit.set_micro_batch(2);
  commit.set_factor(1);
  v1::CommitMicroBatchResponse response;
  Require(server.loss().CommitMicroBatch(&context, commit, &response), "committed");
  const std::string committed = AwaitTrace(folder.path(), 3);
  EXPECT_THAT(committed, HasSubstr("\"name\":\"commit\""));
  EXPECT_THAT(committed, HasSubstr("\"method\":\"CommitMicroBatch\""));
  // Counted once the file is there.
  EXPECT_TRUE(server.AwaitMetric("headwater_traces_total{outcome=\"written\"}", 3));
}

TEST(Server, TellsTheProductRateThatItIsGiven) {
  ServerSetup setup;
  setup.options.product_tflops = 1.5;
  WireServer server(setup);
  EXPECT_THAT(server.server().SerializeMetrics(), HasSubstr("headwater_product_flops_per_second 1500000000000\n"));
  WireServer without;  // nobody scrapes it, so nothing is measured
  EXPECT_THAT(without.server().SerializeMetrics(), Not(HasSubstr("headwater_product_flops_per_second ")));
  setup.options.product_tflops = -1;
  EXPECT_THROW(WireServer refused(setup), std::runtime_error);
}

TEST(Server, InDeterministicModeNeedsAnEngineThatIs) {
  ServerSetup setup;
  setup.options.deterministic = true;
  EXPECT_THAT([&] { WireServer server(setup); },
              ::testing::ThrowsMessage<std::runtime_error>(HasSubstr("EngineOptions::deterministic")));
}

TEST(Server, RefusesCompressedMessages) {
  WireServer server;
  grpc::ClientContext context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  v1::GetHeadRequest request;
  request.set_name("tenants/default/heads/" + std::string(1 << 12, 'a'));
  v1::Head response;
  EXPECT_EQ(server.heads().GetHead(&context, request, &response).error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

// Who has gone is not told, but the log is: the truth.
TEST(Server, TheLogOfAnAbandonedCallTellsWhetherItWasComputed) {
  ::testing::internal::CaptureStderr();
  {
    WireServer server;
    const TestHead head = server.MakeHead("h", SmallSpec());
    const auto rows = [](int count) { return Bytes(Random(static_cast<size_t>(count) * 5, 5, 1)); };
    OpenStream upload(server.loss(), CrossEntropyHeader(head, 0, 0, {1, 2, 3}), rows(1), 1);
    EXPECT_TRUE(server.AwaitMetric("headwater_in_flight_bytes", 120));
    upload.Cancel();
    EXPECT_TRUE(server.AwaitNothingInFlight());
    server.gate().Close();
    OpenStream call(server.loss(), CrossEntropyHeader(head, 0, 1, {1, 2, 3}), rows(3), 3);
    call.stream->WritesDone();
    server.gate().AwaitWaiting();
    EXPECT_TRUE(server.AwaitMetric("headwater_abandoned_calls", 0));
    call.Cancel();
    EXPECT_TRUE(server.AwaitMetric("headwater_abandoned_calls", 1));
    server.gate().Open();
    EXPECT_TRUE(server.AwaitNothingInFlight());
    EXPECT_TRUE(server.AwaitMetric("headwater_abandoned_calls", 0));
    EXPECT_EQ(server.Find(head, 1).state(), v1::CONTRIBUTION_STATE_COMMITTED);
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("went away; nothing was added"));
  EXPECT_THAT(log, HasSubstr("went away; it had been computed: GetStep tells whether its micro-batch is in"));
}

}  // namespace
}  // namespace headwater::testing
