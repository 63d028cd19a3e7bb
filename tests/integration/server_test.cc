// The server around the handlers: limits at and above, metrics, traces, request ids, start and options, and the loss of its device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "headwater/kernels/error.h"
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
  WireServer without;  // access_test.cc has one with it
  EXPECT_EQ(CallRaw(without.NewChannel(), method, {""}).status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

// bad_values_table.cc has those of which the usual value is tried.
TEST(Limits, AreAcceptedAtTheLimitAndRefusedOneAbove) {
  ServerSetup setup;
  service::Limits& limits = setup.options.limits;
  limits.max_hidden_size = 8;
  limits.max_chunk_bytes = 64;
  limits.max_staging_slots = 3;
  limits.max_step_micro_batches = 4;
  limits.max_heads = 3;
  WireServer server(setup);
  v1::HeadSpec spec = SmallSpec(16, 8);
  spec.set_staging_slots(3);
  const TestHead head = server.MakeHead("h", spec);
  spec.set_staging_slots(4);
  ExpectError(server.Create("tenants/default/heads/x", spec), "LIMIT_EXCEEDED",
              {{"limit", "max_staging_slots"}, {"maximum", "3"}, {"actual", "4"}});
  // Two rows of 32 bytes are a chunk at the limit.
  const auto compute = [&](int64_t id, int64_t chunk_rows) {
    const v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, id, std::vector<int32_t>(12, 1));
    return server.Compute(header, Rows(12, 1, 8), {.chunk_rows = chunk_rows}).status;
  };
  ExpectError(compute(0, 3), "LIMIT_EXCEEDED", {{"limit", "max_chunk_bytes"}, {"maximum", "64"}, {"actual", "96"}});
  for (const int64_t id : {0, 1, 2, 3}) EXPECT_EQ(ReasonOf(compute(id, 2)), "OK");
  EXPECT_EQ(ReasonOf(compute(4, 2)), "LIMIT_EXCEEDED");
  EXPECT_EQ(ReasonOf(server.Seal(head, {.ids = {0, 1, 2, 3, 4}})), "LIMIT_EXCEEDED");
  EXPECT_EQ(ReasonOf(server.Seal(head, {.ids = {0, 1, 2, 3}})), "OK");
  for (const char* const id : {"second", "third"}) server.MakeHead(id, SmallSpec());
  EXPECT_EQ(ReasonOf(server.Create("tenants/default/heads/fourth", SmallSpec())), "QUOTA_EXCEEDED");
}

TEST(Limits, OfAMessageAreGrpcs) {
  ServerSetup setup;
  service::Limits& limits = setup.options.limits;
  limits.max_chunk_bytes = 1 << 16;
  limits.max_message_bytes = 1 << 18;
  limits.max_micro_batch_rows = 1024;
  limits.max_hidden_size = 64;
  HeadServer server(setup);
  const std::string before = server.Snapshot(server.head);
  OpenStream call(server.loss(), CrossEntropyHeader(server.head, 0, 0, {1}), std::string(1 << 18, 'x'), 1);
  call.stream->WritesDone();
  EXPECT_FALSE(call.End().ok());
  EXPECT_EQ(server.Snapshot(server.head), before);
}

TEST(Sessions, LeasesAreAtMostTheServers) {
  WireServer server(WithLimit(&service::Limits::max_session_lease, absl::Seconds(20)));
  for (const int64_t asked_s : {0, 60}) {  // 0: not asked; the default is 30 s
    v1::OpenSessionRequest request;
    if (asked_s > 0) request.mutable_lease()->set_seconds(asked_s);
    EXPECT_EQ(server.Must(&Sessions::OpenSession, request).lease().seconds(), 20);
  }
}

TEST(RequestIds, AreTakenOverOrMade) {
  HeadServer server;
  const auto id_of = [&](const std::string& sent) {
    SendOptions send;
    if (!sent.empty()) send.metadata = {{"x-request-id", sent}};
    const LossReply reply = server.Compute(CrossEntropyHeader(server.head, 0, 0, {1}), Rows(1), send);
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
  WireServer server(WithOption(&service::ServerOptions::metrics_address, "127.0.0.1:0"));
  const TestHead head = server.MakeHead("secret-name", SmallSpec());
  v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 0, {1, -100, 3});
  const std::string rows = Rows(3);
  server.MustCompute(header, rows);  // committed
  server.MustCompute(header, rows);  // replayed
  EXPECT_FALSE(server.Compute(header, Rows(3, 2)).status.ok());
  header.set_micro_batch(1);
  header.set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
  server.MustCompute(header, rows);  // staged
  Require(server.Discard(head, {.id = 1}), "discarded");
  header.mutable_terms(0)->mutable_head()->set_step(9);
  EXPECT_FALSE(server.Compute(header, rows).status.ok());
  server.Must(&Heads::ApplyOptimizerStep, RequestOn<v1::ApplyOptimizerStepRequest>(head, StepEnd{.ids = {0}}));

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
  server.MustCompute(header, rows);  // staged
  Require(server.Commit(head, {.id = 2, .step = 1}), "committed");
  EXPECT_EQ(server.Metric("headwater_commit_seconds_count"), "1");
  EXPECT_NE(server.Metric("headwater_compute_busy_seconds_total"), "0");
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
  WireServer server(WithOption(&service::ServerOptions::trace_dir, folder.path()));
  const TestHead head = server.MakeHead("traced", SmallSpec());
  const auto traceparent = [](const char* flags) { return std::string("00-") + kTraceId + "-b7ad6b7169203331-" + flags; };
  const auto compute = [&](int64_t micro_batch, const char* flags, v1::CommitMode commit_mode, int seed = 1) {
    v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, micro_batch, std::vector<int32_t>(kRows, 1));
    header.set_commit_mode(commit_mode);
    const SendOptions send = {.chunk_rows = kRows,
                              .metadata = {{"x-request-id", "request-of-the-test"}, {"traceparent", traceparent(flags)}}};
    return server.Compute(header, Rows(kRows, seed), send).status;
  };
  Require(compute(0, "01", v1::COMMIT_MODE_EAGER), "recorded");
  const std::string trace = AwaitTrace(folder.path(), 1);
  for (const char* part :
       {kTraceId, "\"parent_span_id\":\"b7ad6b7169203331\"", "\"request_id\":\"request-of-the-test\"", "\"method\":\"ComputeLoss\"",
        "\"code\":\"OK\"", "\"name\":\"upload\"", "\"name\":\"compute\"", "\"name\":\"download\"",
        "\"name\":\"engine: grad_hidden\"", " to 3000\"", "\"name\":\"decision: all rows are there\"", "\"rows\":\"3000\"",
        "\"transport\":\"grpc\"", "\"head\":\"tenants/default/heads/traced\""}) {
    EXPECT_THAT(trace, HasSubstr(part));
  }
  Require(compute(1, "00", v1::COMMIT_MODE_EAGER), "not recorded");
  EXPECT_FALSE(compute(0, "03", v1::COMMIT_MODE_EAGER, /*seed=*/2).ok());  // other rows; what is refused is traced, too
  EXPECT_THAT(AwaitTrace(folder.path(), 2), HasSubstr("\"reason\":\"MICRO_BATCH_CONFLICT\""));
  Require(compute(2, "00", v1::COMMIT_MODE_EXPLICIT), "staged");
  grpc::ClientContext context;
  context.AddMetadata("traceparent", traceparent("01"));
  v1::CommitMicroBatchResponse response;
  const auto commit = RequestOn<v1::CommitMicroBatchRequest>(head, Decision{.id = 2});
  Require(server.loss().CommitMicroBatch(&context, commit, &response), "committed");
  const std::string committed = AwaitTrace(folder.path(), 3);
  EXPECT_THAT(committed, HasSubstr("\"name\":\"commit\""));
  EXPECT_THAT(committed, HasSubstr("\"method\":\"CommitMicroBatch\""));
  // Counted once the file is there.
  EXPECT_TRUE(server.AwaitMetric("headwater_traces_total{outcome=\"written\"}", 3));
}

TEST(Server, TellsTheProductRateThatItIsGiven) {
  WireServer server(WithOption(&service::ServerOptions::product_tflops, 1.5));
  EXPECT_THAT(server.server().SerializeMetrics(), HasSubstr("headwater_product_flops_per_second 1500000000000\n"));
  WireServer without;  // nobody scrapes it, so nothing is measured
  EXPECT_THAT(without.server().SerializeMetrics(), Not(HasSubstr("headwater_product_flops_per_second ")));
  EXPECT_THROW(WireServer refused(WithOption(&service::ServerOptions::product_tflops, -1)), std::runtime_error);
}

TEST(Server, InDeterministicModeNeedsAnEngineThatIs) {
  EXPECT_THAT([] { WireServer server(WithOption(&service::ServerOptions::deterministic, true)); },
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
    HeadServer server;
    OpenStream upload(server.loss(), CrossEntropyHeader(server.head, 0, 0, {1, 2, 3}), Rows(1), 1);
    EXPECT_TRUE(server.AwaitMetric("headwater_in_flight_bytes", 120));
    upload.Cancel();
    EXPECT_TRUE(server.AwaitNothingInFlight());
    server.gate().Close();
    OpenStream call(server.loss(), CrossEntropyHeader(server.head, 0, 1, {1, 2, 3}), Rows(3), 3);
    call.stream->WritesDone();
    server.gate().AwaitWaiting();
    EXPECT_TRUE(server.AwaitMetric("headwater_abandoned_calls", 0));
    call.Cancel();
    EXPECT_TRUE(server.AwaitMetric("headwater_abandoned_calls", 1));
    server.gate().Open();
    EXPECT_TRUE(server.AwaitNothingInFlight());
    EXPECT_TRUE(server.AwaitMetric("headwater_abandoned_calls", 0));
    EXPECT_EQ(server.Find(server.head, 1).state(), v1::CONTRIBUTION_STATE_COMMITTED);
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("went away; nothing was added"));
  EXPECT_THAT(log, HasSubstr("went away; it had been computed: GetStep tells whether its micro-batch is in"));
}

// ---- an engine whose device is lost ------------------------------------------------------------------------------------------

// Health tells at once, every call in progress and every new one is answered ENGINE_FAILED, whatever it was doing, and the server
// can be drained. What the process does then is tests/e2e/cpp/cuda_module_test.cc.
absl::Status Illegal() {
  return MakeError(ErrorReason::kEngineFailed, "an illegal memory access was encountered",
                   {{"cudaError", "cudaErrorIllegalAddress"}});
}

class DeviceLost : public ::testing::Test {
 protected:
  DeviceLost() {
    ServerSetup setup;
    setup.options.on_engine_lost = [this](const absl::Status& lost) {
      health_when_told_ = Health(server_->NewChannel(), "");
      message_ = std::string(lost.message());
      ++told_;
    };
    setup.options.limits.max_queue_depth = 8;
    setup.options.queue_widths = {1, 1};
    server_ = std::make_unique<WireServer>(setup);
  }
  int HealthOf(const std::string& service) { return Health(server_->NewChannel(), service); }
  LossReply Compute(const TestHead& head, int64_t step = 0) {
    return server_->Compute(CrossEntropyHeader(head, step, 0, {1, 2, 3}), Rows(3));
  }
  static void ExpectLost(const grpc::Status& status, const char* what) {
    SCOPED_TRACE(what);
    const WireError error = ExpectError(status, "ENGINE_FAILED", {{"cudaError", "cudaErrorIllegalAddress"}});
    EXPECT_THAT(error.message, HasSubstr("the engine's device is lost"));
    EXPECT_THAT(error.message, HasSubstr("an illegal memory access was encountered"));
  }

  std::atomic<int> told_{0};
  std::atomic<int> health_when_told_{0};
  std::string message_;  // read after told_
  std::unique_ptr<WireServer> server_;
};

TEST_F(DeviceLost, HealthTellsBeforeTheCallThatMetItIsAnswered) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  EXPECT_EQ(ReasonOf(Compute(head).status), "OK");
  EXPECT_EQ(HealthOf("headwater.v1.LossService"), 1);
  server_->gate().Lose(Illegal());
  ExpectLost(Compute(head).status, "the call that meets it");
  for (const char* service :
       {"", "headwater.v1.LossService", "headwater.v1.HeadService", "headwater.v1.SessionService", "headwater.v1.GroupService"}) {
    EXPECT_EQ(HealthOf(service), 2) << service;
  }
  EXPECT_TRUE(Await([&] { return told_ == 1; }));  // by the watch that met it too, if that was a moment earlier
  EXPECT_EQ(health_when_told_, 2);
  EXPECT_EQ(server_->Metric("headwater_serving"), "0");
  ExpectLost(server_->Create("tenants/default/heads/other", SmallSpec()), "a new call");
  EXPECT_TRUE(server_->Call(&Sessions::GetServerInfo, {}).ok());  // tells about itself to the end
  EXPECT_TRUE(server_->server().Drain(absl::Seconds(5)));
  EXPECT_EQ(told_, 1);
  EXPECT_THAT(message_, HasSubstr("illegal memory access"));
}

TEST_F(DeviceLost, AFailureThatTheDeviceSurvivesIsTheCallsAlone) {
  const TestHead head = server_->MakeHead("h", SmallSpec());
  server_->gate().FailNext(MakeError(ErrorReason::kEngineFailed, "shard 0 failed"));
  EXPECT_THAT(ExpectError(Compute(head).status, "ENGINE_FAILED").message, HasSubstr("shard 0 failed"));
  EXPECT_EQ(told_, 0);
  EXPECT_EQ(HealthOf(""), 1);
}

// One call in the engine, one in the queue, one that waits for the next step, one seal, and one that still uploads.
TEST_F(DeviceLost, EveryCallInProgressIsAnswered) {
  const TestHead computing = server_->MakeHead("computing", SmallSpec());
  const TestHead queued = server_->MakeHead("queued", SmallSpec());
  const TestHead waiting = server_->MakeHead("waiting", SmallSpec());
  const TestHead uploading = server_->MakeHead("uploading", SmallSpec());

  const std::string row = Rows(1);
  OpenStream upload(server_->loss(), CrossEntropyHeader(uploading, 0, 0, {1, 2, 3}), row, 1);
  ASSERT_TRUE(server_->AwaitInFlight());

  server_->gate().Close();
  std::thread in_engine([&] { ExpectLost(Compute(computing).status, "in the engine"); });
  server_->gate().AwaitWaiting();
  std::thread in_queue([&] { ExpectLost(Compute(queued).status, "in the queue"); });
  std::thread for_step([&] { ExpectLost(Compute(waiting, 1).status, "waiting for the next step"); });
  std::thread for_seal([&] { ExpectLost(server_->Seal(waiting, {.ids = {3}, .wait = true}), "a seal that waits"); });
  EXPECT_TRUE(server_->AwaitMetric("headwater_queue_depth", 1));
  EXPECT_TRUE(server_->AwaitMetric("headwater_waiting_calls", 2));

  // The gate stays closed: only the call in the engine has to wait for it.
  server_->gate().Lose(Illegal());
  in_queue.join();
  for_step.join();
  for_seal.join();
  upload.Send(HiddenChunk(row, 1, 1));
  ExpectLost(upload.End(), "in the middle of an upload");
  server_->gate().Open();
  in_engine.join();
  EXPECT_TRUE(Await([&] { return told_ == 1; }));
}

TEST_F(DeviceLost, WhileTheServerStarts) {
  WireServer server({.ready = false});
  server.gate().Lose(Illegal());
  EXPECT_FALSE(server.server().BecomeReady().ok());
  EXPECT_EQ(Health(server.NewChannel(), ""), 2);
}

}  // namespace
}  // namespace headwater::testing
