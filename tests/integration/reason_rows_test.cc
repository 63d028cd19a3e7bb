// One row for every reason of error.proto that no bad value of a field brings about (bad_input_test.cc has those): how it comes
// about over the wire, each on 1 and on 3 shards. A reason without a row in either table fails the test. The answer carries the
// reason's canonical code and its ErrorInfo, and the student's head is bitwise what it was.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "tests/integration/support/bad_values.h"
#include "tests/integration/support/raw_call.h"
#include "tests/integration/transactions/transaction_harness.h"

namespace {

// While set, no file takes a byte; while set, each write to a file waits.
std::atomic<bool> disk_is_full{false}, disk_hangs{false};
std::atomic<int> hanging_writes{0};

}  // namespace

// The linker sends every write() of our own code through here (--wrap=write).
extern "C" ssize_t __real_write(int descriptor, const void* data, size_t byte_count);
extern "C" ssize_t __wrap_write(int descriptor, const void* data, size_t byte_count) {
  struct stat status;
  if ((!disk_is_full && !disk_hangs) || descriptor <= STDERR_FILENO || fstat(descriptor, &status) != 0 ||
      !S_ISREG(status.st_mode)) {
    return __real_write(descriptor, data, byte_count);
  }
  if (disk_is_full) {
    errno = ENOSPC;
    return -1;
  }
  ++hanging_writes;
  while (disk_hangs) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return __real_write(descriptor, data, byte_count);
}

namespace headwater::testing {
namespace {

using ::testing::IsEmpty;
using ::testing::Not;

struct ReasonRow {
  std::string reason;                             // without ERROR_REASON_
  std::function<std::string(Trial&)> provoke;     // the answer
  std::function<void(Trial&)> prepare = nullptr;  // beside the student, which is there
  TrialSetup setup = {};
  // Details of the answer are gRPC's own, which ends a late call by itself: only the code is sent by us, and counted.
  bool by_grpc = false;
  // The server starts, or ends: there is no state to compare.
  bool no_state = false;
};

// Reasons of other tests: access_test.cc has the first two, and clients report the third themselves.
const std::vector<std::string> kElsewhere = {"UNAUTHENTICATED", "PERMISSION_DENIED", "TRANSPORT_UNAVAILABLE"};

// ---- what rows are made of -------------------------------------------------------------------------------------------

// A checkpoint `other` of a head `aux` of another spec, and then the head that Head() makes.
void SaveAnotherAux(Trial& t) {
  const TestHead other = t.server().MakeHead("aux", SmallSpec(13, 4));
  Require(t.server().Save(other, "other"), "SaveCheckpoint");
  t.server().Must(&Heads::DeleteHead, RequestOn<v1::DeleteHeadRequest>(other));
  t.Head("aux");
}

// ---- the table -------------------------------------------------------------------------------------------------------

std::vector<ReasonRow> RequestRows() {
  return {
      {"VOCAB_SIZE_MISMATCH",
       [](Trial& t) {
         return t.Submit({.id = 0},
                         [&t](v1::MicroBatchHeader& header) { SetTeacher(header.mutable_terms(0), t.Head("teacher").name()); });
       },
       [](Trial& t) { t.Head("teacher"); },
       {.specs = {{"teacher", FrozenSpec(12)}}}},
      {"CHECKPOINT_SPEC_MISMATCH", [](Trial& t) { return t.Restore("other", "aux"); }, SaveAnotherAux, {.checkpoints = true}},
      {"FILE_CORRUPT",
       [](Trial& t) {
         auto request = RequestOn<v1::LoadWeightsRequest>(t.Head());
         request.set_path("garbage.safetensors");
         return t.Tell(t.server().Call(&Heads::LoadWeights, request));
       },
       [](Trial& t) { std::ofstream(t.directory() + "/garbage.safetensors") << "garbage"; },
       {.checkpoints = true}},
      {"DISK_FULL",
       [](Trial& t) {
         disk_is_full = true;
         const std::string answer = t.Save("too-much");
         const WireError error = t.last_error();
         disk_is_full = false;
         EXPECT_EQ(t.Restore("too-much"), "CHECKPOINT_NOT_FOUND");
         return t.Tell(error, answer);
       },
       nullptr,
       {.checkpoints = true}},
  };
}

std::vector<ReasonRow> StepStateRows() {
  v1::HeadSpec no_optimizer = SmallSpec();
  no_optimizer.clear_optimizer();
  return {
      {"STEP_SEALED", [](Trial& t) { return t.Submit({.id = 0}); }, [](Trial& t) { EXPECT_EQ(t.Seal({}), "OK"); }},
      {"WEIGHTS_NOT_LOADED",
       [](Trial& t) {
         TestHead empty;
         Require(t.server().Create("tenants/default/heads/empty", SmallSpec(), &empty.head), "CreateHead");
         return t.Tell(t.server().Compute(CrossEntropyHeader(empty, 0, 0, {1, 2, 3}), Trial::RowsOf({})).status);
       }},
      {"MICRO_BATCH_UNCOMMITTED", [](Trial& t) { return t.Seal({.ids = {0}}); }, StageFirst},
      {"MICRO_BATCH_UNEXPECTED", [](Trial& t) { return t.Seal({}); }, SubmitFirst},
      {"OPTIMIZER_NOT_CONFIGURED", [](Trial& t) { return t.Apply({}); }, nullptr, {.specs = {{"student", no_optimizer}}}},
      {"NON_FINITE_VALUES", [](Trial& t) { return t.Submit({.id = 0, .refuse_non_finite = true, .has_nan = true}); }},
      {"NON_FINITE_GRADIENT", [](Trial& t) { return t.Apply({.ids = {0}}); },
       [](Trial& t) {
         const LossReply reply = t.Compute({.id = 0, .has_nan = true});
         EXPECT_EQ(reply.summary.terms(0).non_finite_row_count(), 1);
         const v1::SealStepResponse sealed =
             t.server().Must(&Heads::SealStep, RequestOn<v1::SealStepRequest>(t.Head(), StepEnd{.ids = {0}}));
         EXPECT_GT(sealed.non_finite_count(), 0);
         EXPECT_EQ(sealed.totals().non_finite_row_count(), 1);
       }},
      {"STEP_LOST",
       [](Trial& t) { return t.Submit({.id = 0}); },
       [](Trial& t) {
         EXPECT_EQ(t.Save("s0"), "OK");
         t.Restart();
       },
       {.checkpoints = true}},
      {"STEP_CONFLICT", [](Trial& t) { return t.Apply({.learning_rate = 0.5}); }, [](Trial& t) { EXPECT_EQ(t.Apply({}), "OK"); }},
      {"ATTEMPT_SUPERSEDED", [](Trial& t) { return t.Submit({.id = 0, .attempt = 1, .explicit_commit = true}); },
       [](Trial& t) { EXPECT_EQ(t.Submit({.id = 0, .attempt = 2, .explicit_commit = true}), "STAGED STAGED"); }},
      {"MICRO_BATCH_DISCARDED", [](Trial& t) { return t.Submit({.id = 0}); },
       [](Trial& t) { EXPECT_EQ(t.Discard({.id = 0}), "OK"); }},
      {"MICRO_BATCH_IN_PROGRESS",
       [](Trial& t) {
         t.server().gate().Close();
         const auto first = t.Open({.id = 0, .explicit_commit = true}, 3);
         t.server().gate().AwaitWaiting();
         const std::string answer = t.Submit({.id = 0, .explicit_commit = true});
         t.CancelHeld(*first);
         t.server().gate().Open();
         EXPECT_TRUE(t.server().AwaitNothingInFlight());
         return answer;
       }},
      {"NOT_SESSION_OWNER", [](Trial& t) { return t.Commit({.id = 0, .session = t.OpenSession()}); },
       [](Trial& t) { EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true, .session = t.OpenSession()}), "STAGED STAGED"); }},
  };
}

std::vector<ReasonRow> ServerStateRows() {
  TrialSetup ordered = {.server = WithLimit(&service::Limits::ordered_window, 1)};
  ordered.server.options.deterministic = ordered.server.engine.deterministic = true;
  return {
      {"ORDERED_WINDOW_FULL", [](Trial& t) { return t.Submit({.id = 2}); },
       [](Trial& t) { EXPECT_EQ(t.Submit({.id = 1, .explicit_commit = true}), "STAGED HELD"); }, ordered},
      {"ORDER_PASSED", [](Trial& t) { return t.Submit({.id = 0, .attempt = 1}); },
       [](Trial& t) {
         t.Discard({.id = 0});
         EXPECT_EQ(t.Submit({.id = 1}), "COMMITTED HELD");
       },
       ordered},
      {"STAGING_FULL", [](Trial& t) { return t.Submit({.id = 1, .explicit_commit = true}); }, StageFirst},
      {"QUEUE_FULL",
       [](Trial& t) {
         const auto first = t.Open({.id = 0, .step = 1}, 3);
         EXPECT_TRUE(t.AwaitMetric("headwater_waiting_calls", 1));
         const std::string answer = t.Submit({.id = 1, .step = 1});
         t.Cancel(*first);
         EXPECT_TRUE(t.AwaitMetric("headwater_waiting_calls", 0));
         return answer;
       },
       nullptr,
       {.server = WithLimit(&service::Limits::max_waiting_calls, 1)}},
      {"QUOTA_EXCEEDED",
       [](Trial& t) { return t.Tell(t.server().Create("tenants/default/heads/second", SmallSpec())); },
       nullptr,
       {.server = WithLimit(&service::Limits::max_heads_per_tenant, 1)}},
      {"IN_FLIGHT_BYTES_EXCEEDED",
       [](Trial& t) {
         const auto first = t.Open({.id = 0}, 1);
         EXPECT_TRUE(t.AwaitMetric("headwater_in_flight_bytes", 120));
         const std::string answer = t.Submit({.id = 1});
         const WireError error = t.last_error();
         EXPECT_EQ(error.at("requestedBytes"), "120");
         EXPECT_EQ(error.at("availableBytes"), "0");
         EXPECT_TRUE(error.retry_ms.has_value());
         t.Cancel(*first);
         EXPECT_TRUE(t.server().AwaitNothingInFlight());
         // What could never fit is not worth waiting for.
         const LossReply never = t.server().Compute(CrossEntropyHeader(t.Head(), 0, 1, {1, 2, 3, 4}), "");
         EXPECT_EQ(DecodeError(never.status).at("limit"), "max_micro_batch_bytes");
         return t.Tell(error, answer);
       },
       nullptr,
       {.server = WithLimit(&service::Limits::max_micro_batch_bytes, 60, WithLimit(&service::Limits::max_in_flight_bytes, 120))}},
      {.reason = "DRAINING",
       .provoke =
           [](Trial& t) {
             const auto accepted = t.Open({.id = 0}, 1);
             EXPECT_TRUE(t.AwaitMetric("headwater_in_flight_bytes", 120));
             // They wait for what the drain lets nobody send.
             auto early = std::async(std::launch::async, [&t] { return t.Submit({.id = 0, .step = 1}); });
             auto seal = std::async(std::launch::async, [&t] { return t.Seal({.ids = {5}, .wait = true}); });
             EXPECT_TRUE(t.AwaitMetric("headwater_waiting_calls", 2));
             auto drained = std::async(std::launch::async, [&t] { return t.server().server().Drain(absl::Seconds(20)); });
             std::string answer;
             EXPECT_TRUE(Await([&] {
               answer = t.GetStep();
               return answer != "OK";
             }));
             const WireError error = t.last_error();
             EXPECT_TRUE(error.retry_ms.has_value());
             for (const char* const service :
                  {"", "headwater.v1.LossService", "headwater.v1.HeadService", "headwater.v1.SessionService"}) {
               EXPECT_EQ(Health(t.server().NewChannel(), service), 2) << service;
             }
             EXPECT_EQ(early.get(), "DRAINING");
             EXPECT_EQ(seal.get(), "DRAINING");
             accepted->SendRest();
             EXPECT_EQ(accepted->Answer(), "COMMITTED DIRECT");
             EXPECT_TRUE(drained.get());
             return t.Tell(error, answer);
           },
       .no_state = true},
      {.reason = "STARTING",
       .provoke =
           [](Trial& t) {
             const std::string answer = t.KeepAlive(std::string(32, 's'));
             EXPECT_TRUE(t.last_error().retry_ms.has_value());
             grpc::ClientContext context;
             EXPECT_EQ(ReasonOf(EndOf(*t.server().loss().TransferRows(&context))), "STARTING");
             EXPECT_TRUE(t.server().server().BecomeReady().ok());
             SubmitFirst(t);
             return answer;
           },
       .setup = {.server = {.ready = false}},
       .no_state = true},
      {"SHARD_NOT_READY",
       [](Trial& t) {
         t.fault().Fail(ShardPhase::kPrepare, t.last_rank());
         const std::string answer = t.Submit({.id = 0});
         t.fault().Clear();
         return answer;
       }},
      {"ENGINE_FAILED",
       [](Trial& t) {
         t.fault().Fail(ShardPhase::kAct, t.last_rank());
         const std::string answer = t.Submit({.id = 0, .explicit_commit = true});
         t.fault().Clear();
         return answer;
       }},
      {"INTERNAL",
       [](Trial& t) {
         t.server().gate().FailNext(absl::UnknownError("a secret of the server"));
         const std::string answer = t.Submit({.id = 0, .explicit_commit = true});
         EXPECT_THAT(t.last_error().message, Not(::testing::HasSubstr("secret")));
         return answer;
       }},
      {"CANCELLED",
       [](Trial& t) {
         // A second stream takes an upload over: the first one is cancelled by the server.
         UploadStream first(t.server().heads(), UploadHeader(t.Head().head, "by-hand"));
         UploadStream second(t.server().heads(), UploadHeader(t.Head().head, "by-hand"));
         EXPECT_TRUE(first.resume_offset == 0 && second.resume_offset == 0);
         first.Send(0, "1234");
         const std::string answer = t.Tell(first.End());
         second.Cancel();
         return answer;
       }},
      {.reason = "DEADLINE_EXCEEDED",
       .provoke =
           [](Trial& t) {
             t.deadline_ms = 60;
             const std::string answer = t.Submit({.id = 0, .step = 1});
             EXPECT_TRUE(t.AwaitMetric("headwater_waiting_calls", 0));
             return answer;
           },
       .by_grpc = true},
      {"STRIPE_LOST",
       [](Trial& t) {
         // Its second stream never comes, and the first one brings nothing.
         v1::MicroBatchHeader header = t.HeaderOf({.id = 0});
         header.set_transfer_id(std::string(16, 't'));
         header.set_stripe_count(2);
         const std::string answer = t.Tell(OpenStream(t.server().loss(), header).End());
         EXPECT_TRUE(t.server().AwaitNothingInFlight());
         return answer;
       },
       nullptr,
       {.server = WithLimit(&service::Limits::max_stripe_wait, absl::Milliseconds(20))}},
  };
}

std::vector<ReasonRow> AllRows() {
  std::vector<ReasonRow> rows = RequestRows();
  for (const auto& more : {StepStateRows(), ServerStateRows()}) rows.insert(rows.end(), more.begin(), more.end());
  return rows;
}

void PrintTo(const ReasonRow& row, std::ostream* out) { *out << row.reason; }

// ---- the tests -------------------------------------------------------------------------------------------------------

// What can be seen of the student, as far as its state lets it be seen.
std::string Observe(Trial& t) {
  v1::Head head = t.server().Get(t.Head().name());
  if (head.state() == v1::HEAD_STATE_READY) return t.server().Snapshot(t.Head(), head.open_step());
  head.mutable_memory_plan()->clear_available_bytes();
  return absl::StrCat(head.SerializeAsString(), "|", t.server().Weights(t.Head()));
}

class ReasonRows : public ::testing::TestWithParam<std::tuple<ReasonRow, int>> {};

TEST_P(ReasonRows, IsAnswered) {
  const auto& [row, shard_count] = GetParam();
  Trial trial(row.setup, shard_count);
  if (!row.no_state) trial.Head();
  if (row.prepare != nullptr) row.prepare(trial);
  const std::string before = row.no_state ? "" : Observe(trial);
  EXPECT_EQ(row.provoke(trial), row.reason);
  const WireError error = trial.last_error();
  EXPECT_EQ(static_cast<int>(error.code), static_cast<int>(CodeOf(row.reason)));
  EXPECT_THAT(error.message, Not(IsEmpty()));
  if (!row.by_grpc) {
    EXPECT_EQ(error.reason, row.reason);
    EXPECT_EQ(error.domain, "headwater");
  }
  if (!row.no_state) {
    EXPECT_TRUE(Observe(trial) == before) << "the refused call has changed something";
  }
}

INSTANTIATE_TEST_SUITE_P(Proto, ReasonRows, ::testing::Combine(::testing::ValuesIn(AllRows()), ::testing::Values(1, 3)),
                         [](const auto& row_and_shards) {
                           const std::string& reason = std::get<0>(row_and_shards.param).reason;
                           return absl::StrCat(absl::StrReplaceAll(reason, {{"_", ""}}), "On", std::get<1>(row_and_shards.param));
                         });

TEST(ReasonTable, HasARowForEveryReason) {
  std::map<std::string, int> row_counts;
  for (const ReasonRow& row : AllRows()) ++row_counts[row.reason];
  for (const std::string& reason : kElsewhere) ++row_counts[reason];
  for (const BadValue& row : AllBadValues()) row_counts.try_emplace(row.reason, 1);
  const google::protobuf::EnumDescriptor& reasons = *v1::ErrorReason_descriptor();
  const std::string prefix = "ERROR_REASON_";
  for (int i = 0; i < reasons.value_count(); ++i) {
    const std::string& full_name = reasons.value(i)->name();
    ASSERT_EQ(full_name.substr(0, prefix.size()), prefix);
    const std::string name = full_name.substr(prefix.size());
    if (reasons.value(i)->number() == v1::ERROR_REASON_UNSPECIFIED) continue;
    EXPECT_NE(CodeOf(name), absl::StatusCode::kUnknown) << name;
    EXPECT_EQ(row_counts[name], 1) << name;
    row_counts.erase(name);
  }
  EXPECT_THAT(row_counts, IsEmpty()) << "rows for reasons that there are not";
}

TEST(Save, KeepsNoMicroBatchWaiting) {
  Trial t({.checkpoints = true}, 1);
  t.Head();
  t.Head("other");
  disk_hangs = true;
  auto save = std::async(std::launch::async, [&t] { return t.Save("x"); });
  EXPECT_TRUE(Await([] { return hanging_writes > 0; }));
  for (const char* const head : {"student", "other"}) EXPECT_EQ(t.Submit({.id = 0, .head = head}), "COMMITTED DIRECT") << head;
  disk_hangs = false;
  EXPECT_EQ(save.get(), "OK");
}

}  // namespace
}  // namespace headwater::testing
