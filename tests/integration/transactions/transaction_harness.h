// Rows of transaction tables: each tells a story over the wire and names the state that must be left, to the bit.
//
// A row's `story` runs against one server, with all its failures. Its `undisturbed` calls run against another server, with the
// same shards, heads and weights: they are the ones that alone should have counted. CompareStates() then wants the same step, step
// state, totals, accumulator and weights of every head, bitwise, and the micro-batches that the row lists. What the undisturbed
// calls themselves add is for tests/e2e/python, which compares it with fp64.
#ifndef HEADWATER_TESTS_INTEGRATION_TRANSACTIONS_TRANSACTION_HARNESS_H_
#define HEADWATER_TESTS_INTEGRATION_TRANSACTIONS_TRANSACTION_HARNESS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "tests/integration/support/open_stream.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {

// Answers are strings: "OK", "OK replayed", "OK dropped", of ComputeLoss "COMMITTED DIRECT" (state and form, then ` replayed` or
// ` differs`), or the reason of the error.

// A micro-batch of 3 rows: cross entropy.
struct Batch {
  int64_t id = 0;
  int64_t step = 0;
  uint32_t seed = 0;  // of the rows; 0: 100 + id
  std::string head = "student";
  int64_t attempt = 0;
  bool explicit_commit = false;
  bool allow_held = false;
  bool late_token_factors = false;
  bool first_wins = false;
  bool refuse_non_finite = false;
  bool has_nan = false;
  std::string session = {};
};

// AddGradient, of 4 rows.
struct Part {
  int64_t id = 0;
  int64_t step = 0;
  uint32_t seed = 0;  // of the rows; 0: 100 + id
  int64_t row_start = 2;
  double factor = 1;
  int64_t attempt = 0;
};

// Makes shards fail, or wait, at the beginning of a phase of work that changes a head. Thread-safe.
class ShardFault {
 public:
  void Fail(ShardPhase phase, int32_t rank) { Set(What::kFail, phase, rank); }
  // Whoever comes to the phase waits there until Clear().
  void Hold(ShardPhase phase) { Set(What::kHold, phase, 0); }
  void AwaitHeld() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](int* held) { return *held > 0; }, &held_));
  }
  void Clear() { Set(What::kNothing, ShardPhase::kPrepare, 0); }
  absl::Status Probe(ShardPhase phase, int32_t rank) {
    absl::MutexLock lock(&mutex_);
    if (what_ == What::kNothing || phase != phase_) return absl::OkStatus();
    if (what_ == What::kFail) return rank == rank_ ? absl::UnavailableError("the test lets this shard fail") : absl::OkStatus();
    ++held_;
    mutex_.Await(absl::Condition(
        +[](What* what) { return *what != What::kHold; }, &what_));
    --held_;
    return absl::OkStatus();
  }

 private:
  enum class What { kNothing, kFail, kHold };
  void Set(What what, ShardPhase phase, int32_t rank) {
    absl::MutexLock lock(&mutex_);
    what_ = what;
    phase_ = phase;
    rank_ = rank;
  }
  absl::Mutex mutex_;
  What what_ ABSL_GUARDED_BY(mutex_) = What::kNothing;
  ShardPhase phase_ ABSL_GUARDED_BY(mutex_) = ShardPhase::kPrepare;
  int32_t rank_ ABSL_GUARDED_BY(mutex_) = 0;
  int held_ ABSL_GUARDED_BY(mutex_) = 0;
};

// How a row's servers and heads differ from the default.
struct TrialSetup {
  ServerSetup server = {};
  std::map<std::string, v1::HeadSpec> specs = {};  // heads that are not SmallSpec()
  bool checkpoints = false;
};

// "COMMITTED DIRECT"; a form that is not there is left out.
inline std::string ContributionName(v1::ContributionState state, v1::ContributionForm form) {
  const auto name = [](const std::string& of, const std::string& prefix) { return of.substr(prefix.size()); };
  const std::string state_name = name(v1::ContributionState_Name(state), "CONTRIBUTION_STATE_");
  if (form == v1::CONTRIBUTION_FORM_UNSPECIFIED) return state_name;
  return absl::StrCat(state_name, " ", name(v1::ContributionForm_Name(form), "CONTRIBUTION_FORM_"));
}
inline std::string SummaryName(const v1::MicroBatchSummary& summary) {
  return absl::StrCat(ContributionName(summary.state(), summary.form()), summary.replayed() ? " replayed" : "",
                      summary.payload_differs() ? " differs" : "");
}

inline constexpr int64_t kBatchRows = 3;
inline constexpr int64_t kRowBytes = kColumns * 4;

// A ComputeLoss stream that a story holds in its hands. Sends the header and the first `sent_rows` of the 3 rows; with all of them,
// half-closes.
class OpenCall : public OpenStream {
 public:
  OpenCall(WireServer& server, const v1::MicroBatchHeader& header, const std::string& rows, int64_t sent_rows)
      : OpenStream(server.loss(), header), rows_(rows), sent_rows_(sent_rows) {
    if (sent_rows > 0) Send(ChunkOf(rows, kRowBytes, 0, sent_rows));
    if (sent_rows == kBatchRows) stream->WritesDone();
  }
  ~OpenCall() { context.TryCancel(); }
  void SendRest() {
    Send(ChunkOf(rows_, kRowBytes, sent_rows_, kBatchRows - sent_rows_));
    stream->WritesDone();
  }
  // Reads to the end.
  std::string Answer() {
    const grpc::Status status = End();
    if (status.error_code() == grpc::StatusCode::CANCELLED) return "CANCELLED";
    return status.ok() ? SummaryName(summary) : ReasonOf(status);
  }

 private:
  const std::string rows_;
  const int64_t sent_rows_;
};

// One server, and what a trainer believes of its heads.
class Trial {
 public:
  Trial(const TrialSetup& setup, int shard_count) : setup_(setup), shard_count_(shard_count) { Restart(); }
  ~Trial() { fault_->Clear(); }

  WireServer& server() { return *server_; }
  ShardFault& fault() { return *fault_; }
  const std::string& directory() const { return folder_.path(); }  // of checkpoints, and the load root
  int32_t last_rank() const { return shard_count_ - 1; }
  // The head of this id as the trainer knows it; made, with weights that follow from the id, when it is first asked for.
  TestHead& Head(const std::string& id = "student") {
    absl::MutexLock lock(&mutex_);
    const auto found = heads_.find(id);
    if (found != heads_.end()) return found->second;
    const auto spec = setup_.specs.find(id);
    uint32_t seed = 1;
    for (const char letter : id) seed = seed * 31 + static_cast<uint8_t>(letter);
    return heads_[id] = server_->MakeHead(id, spec != setup_.specs.end() ? spec->second : SmallSpec(), seed);
  }
  std::vector<std::string> HeadIds() const {
    std::vector<std::string> ids;
    absl::MutexLock lock(&mutex_);
    for (const auto& [id, head] : heads_) ids.push_back(id);
    return ids;
  }
  // The trainer does not know the head any more: Head() makes it anew.
  void Forget(const std::string& id) {
    absl::MutexLock lock(&mutex_);
    heads_.erase(id);
  }
  // Learns the epoch that is current now.
  void Refresh() { Head().head = server_->Get(Head().name()); }
  // The server dies and another comes up on the same checkpoints. The trainer's beliefs stay.
  void Restart() {
    server_.reset();
    ServerSetup setup = setup_.server;
    setup.engine.shard_count = shard_count_;
    setup.engine.shard_probe = [fault = fault_](ShardPhase phase, int32_t rank) { return fault->Probe(phase, rank); };
    setup.options.limits.max_step_wait = std::min(setup.options.limits.max_step_wait, absl::Seconds(20));
    if (setup_.checkpoints) {
      setup.options.checkpoint_directory = directory() + "/checkpoints";
      setup.options.load_root = directory();
    }
    server_ = std::make_unique<WireServer>(setup);
  }

  // ---- micro-batches
  v1::MicroBatchHeader HeaderOf(const Batch& batch) {
    v1::MicroBatchHeader header = CrossEntropyHeader(Head(batch.head), batch.step, batch.id, {1, 2, 3});
    header.set_attempt(batch.attempt);
    if (batch.explicit_commit) header.set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
    if (batch.first_wins) header.set_on_mismatch(v1::ON_MISMATCH_FIRST_WINS);
    if (batch.refuse_non_finite) header.set_non_finite_policy(v1::NON_FINITE_POLICY_REFUSE);
    header.set_allow_held(batch.allow_held);
    header.set_late_token_factors(batch.late_token_factors);
    header.set_session_id(batch.session);
    return header;
  }
  static std::string RowsOf(const Batch& batch) {
    std::vector<float> rows = RandomRows(kBatchRows, batch.seed, batch.id);
    if (batch.has_nan) rows[7] = std::numeric_limits<float>::quiet_NaN();
    return Bytes(rows);
  }
  LossReply Compute(const Batch& batch) { return server_->Compute(HeaderOf(batch), RowsOf(batch)); }
  // With `edit` applied to the header.
  std::string Submit(const Batch& batch, const std::function<void(v1::MicroBatchHeader&)>& edit = nullptr) {
    v1::MicroBatchHeader header = HeaderOf(batch);
    if (edit != nullptr) edit(header);
    const LossReply reply = server_->Compute(header, RowsOf(batch), {.deadline_ms = deadline_ms});
    return Tell(reply.status, SummaryName(reply.summary));
  }
  std::unique_ptr<OpenCall> Open(const Batch& batch, int64_t sent_rows) {
    return std::make_unique<OpenCall>(*server_, HeaderOf(batch), RowsOf(batch), sent_rows);
  }
  // Cancels. The server learns of it a moment later: await what it shows then.
  void Cancel(OpenCall& call) {
    call.context.TryCancel();
    EXPECT_EQ(call.Answer(), "CANCELLED");
  }
  // The same for a call that the engine is held up with: returns when the server knows that the call's client has gone.
  void CancelHeld(OpenCall& call) {
    Cancel(call);
    EXPECT_TRUE(AwaitMetric("headwater_abandoned_calls", 1));
  }
  std::string Commit(const Decision& decision) {
    return Ask(&Loss::CommitMicroBatch, RequestOn<v1::CommitMicroBatchRequest>(Head(), decision));
  }
  std::string Discard(const Decision& decision) {
    return Ask(&Loss::DiscardMicroBatch, RequestOn<v1::DiscardMicroBatchRequest>(Head(), decision));
  }
  std::string AddPart(const Part& part) {
    constexpr int64_t kPartRows = 4;
    auto header = RequestOn<v1::AddGradientHeader>(Head(), part.step);
    header.set_micro_batch(part.id);
    header.set_attempt(part.attempt);
    header.set_row_start(part.row_start);
    header.set_row_count(kPartRows);
    header.set_factor(part.factor);
    bool replayed = false;
    const grpc::Status status = server_->AddGradient(header, RandomRows(kPartRows, part.seed, part.id), &replayed);
    return Tell(status, replayed ? "OK replayed" : "OK");
  }

  // ---- steps
  std::string Seal(const StepEnd& end) { return Ask(&Heads::SealStep, RequestOn<v1::SealStepRequest>(Head(), end)); }
  std::string Apply(const StepEnd& end) {
    return Ask(&Heads::ApplyOptimizerStep, RequestOn<v1::ApplyOptimizerStepRequest>(Head(), end));
  }
  std::string DiscardGradient(int64_t step = 0) {
    return Ask(&Heads::DiscardGradient, RequestOn<v1::DiscardGradientRequest>(Head(), step));
  }
  // New weights that close a sealed step.
  std::string Replace(int64_t step = 0, uint32_t seed = 77) {
    v1::Head updated;
    const grpc::Status status =
        server_->Upload(Head().head, v1::HEAD_TENSOR_WEIGHT, Random(13 * kColumns, seed, 1), &updated, step);
    if (status.ok()) {
      EXPECT_EQ(updated.epoch(), Head().head.epoch());
    }
    return Tell(status, updated.open_step() == step + 1 ? "OK replaced" : "OK");
  }
  std::string Norm(int64_t step) { return Ask(&Heads::GetGradientNorm, RequestOn<v1::GetGradientNormRequest>(Head(), step)); }
  std::string Download(int64_t step) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(deadline_ms));
    auto request = RequestOn<v1::DownloadGradientRequest>(Head(), step);
    request.set_tensor(v1::HEAD_TENSOR_WEIGHT);
    std::string bytes;
    return Tell(ReadDownload(*server_->heads().DownloadGradient(&context, request), &bytes));
  }
  std::string GetStep() { return Ask(&Heads::GetStep, RequestOn<v1::GetStepRequest>(Head())); }

  // ---- heads and sessions
  // The trainer adopts the new epoch.
  std::string Take() { return Tell(server_->Take(&Head())); }
  std::string Save(const std::string& checkpoint) { return Tell(server_->Save(Head(), checkpoint)); }
  std::string Restore(const std::string& checkpoint, const std::string& id = "student") {
    auto request = RequestOn<v1::RestoreCheckpointRequest>(Head(id));
    request.set_checkpoint(checkpoint);
    v1::Head restored;
    const grpc::Status status = server_->Call(&Heads::RestoreCheckpoint, request, &restored);
    if (status.ok()) Head(id).head = restored;
    return Tell(status);
  }
  std::string OpenSession(int64_t lease_ms = 20000) { return server_->OpenSession(lease_ms); }
  std::string KeepAlive(const std::string& session) {
    v1::KeepAliveRequest request;
    request.set_session_id(session);
    return Ask(&Sessions::KeepAlive, request);
  }
  std::string CloseSession(const std::string& session) { return Tell(server_->CloseSession(session)); }

  // The answer of any call; the last error is remembered.
  std::string Tell(const grpc::Status& status, const std::string& detail = "OK") {
    if (status.ok()) return detail;
    const WireError error = DecodeError(status);
    // gRPC ends a call that is cancelled, or late, by itself: without details.
    if (error.reason.empty() && error.code == grpc::StatusCode::CANCELLED) return Tell(error, "CANCELLED");
    if (error.reason.empty() && error.code == grpc::StatusCode::DEADLINE_EXCEEDED) return Tell(error, "DEADLINE_EXCEEDED");
    return Tell(error, ReasonOf(status));
  }
  // Remembers an earlier error again; returns `answer`.
  std::string Tell(const WireError& error, const std::string& answer) {
    absl::MutexLock lock(&mutex_);
    last_error_ = error;
    return answer;
  }
  WireError last_error() const {
    absl::MutexLock lock(&mutex_);
    return last_error_;
  }

  // Of each call but AddPart(), Replace() and those on heads and sessions. A call that should not have waited fails its row, not
  // the whole run.
  static constexpr int kDeadlineMs = 25000;
  std::atomic<int> deadline_ms{kDeadlineMs};

  // ---- what can be seen
  // True once the metric's value is `value`; false if it does not become that.
  bool AwaitMetric(const std::string& name, int64_t value) const { return server_->AwaitMetric(name, value); }
  std::string Gradient(const std::string& id = "student") {
    return server_->Gradient(Head(id), server_->Get(Head(id).name()).open_step());
  }
  // "0 COMMITTED DIRECT", "1 DISCARDED", with ` @2` behind it for attempt 2; those of heads other than the student begin with
  // "id: ".
  std::vector<std::string> MicroBatches() {
    std::vector<std::string> lines;
    for (const std::string& id : HeadIds()) {
      if (!Head(id).head.spec().trainable()) continue;
      const v1::GetStepResponse steps = server_->Steps(Head(id));
      for (const v1::MicroBatchState& state : steps.open().micro_batches()) {
        lines.push_back(absl::StrCat(id == "student" ? "" : absl::StrCat(id, ": "), Line(state)));
      }
    }
    return lines;
  }
  std::string MicroBatch(int64_t id) { return Line(server_->Find(Head(), id)); }

 private:
  static std::vector<float> RandomRows(int64_t count, uint32_t seed, int64_t id) {
    return Random(count * kColumns, seed != 0 ? seed : static_cast<uint32_t>(100 + id), 1);
  }
  static std::string Line(const v1::MicroBatchState& state) {
    return absl::StrCat(state.micro_batch(), " ", ContributionName(state.state(), state.form()),
                        state.attempt() > 0 ? absl::StrCat(" @", state.attempt()) : "");
  }
  // A unary call: the answer, with what the response says of itself.
  template <typename Stub, typename Request, typename Response>
  std::string Ask(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                  const std::type_identity_t<Request>& request) {
    Response response;
    const grpc::Status status = server_->Call(method, request, &response, deadline_ms);
    std::string detail = "OK";
    if constexpr (requires { response.replayed(); }) detail += response.replayed() ? " replayed" : "";
    if constexpr (requires { response.dropped(); }) detail += response.dropped() ? " dropped" : "";
    if constexpr (requires { response.open_step(), request.head().step(); }) {
      EXPECT_EQ(response.open_step(), status.ok() ? request.head().step() + 1 : 0);
    }
    return Tell(status, detail);
  }

  const TrialSetup setup_;
  const int32_t shard_count_;
  const TemporaryDirectory folder_;
  const std::shared_ptr<ShardFault> fault_ = std::make_shared<ShardFault>();
  std::unique_ptr<WireServer> server_;
  mutable absl::Mutex mutex_;  // a story may make calls on several threads; what it does to one head it does in turn
  std::map<std::string, TestHead> heads_ ABSL_GUARDED_BY(mutex_);
  WireError last_error_ ABSL_GUARDED_BY(mutex_);
};

// How most stories begin: micro-batch 0, eager, and the line that MicroBatches() has for it.
inline constexpr char kEagerLine[] = "0 COMMITTED DIRECT";
inline void SubmitFirst(Trial& t) { EXPECT_EQ(t.Submit({.id = 0}), "COMMITTED DIRECT"); }
inline void StageFirst(Trial& t) { EXPECT_EQ(t.Submit({.id = 0, .explicit_commit = true}), "STAGED STAGED"); }
inline void StageAndCommitFirst(Trial& t) {
  StageFirst(t);
  EXPECT_EQ(t.Commit({.id = 0}), "OK");
}
inline void ApplyFirst(Trial& t) {
  SubmitFirst(t);
  EXPECT_EQ(t.Apply({.ids = {0}}), "OK");
}

struct TransactionRow {
  std::string name;       // PascalCase
  std::string statement;  // of the design
  std::function<void(Trial&)> story;
  std::function<void(Trial&)> undisturbed = SubmitFirst;
  std::vector<std::string> micro_batches = {kEagerLine};  // Trial::MicroBatches() at the end
  TrialSetup setup = {};
};
inline void PrintTo(const TransactionRow& row, std::ostream* out) { *out << row.name; }

// A call that works on a step of the student: the answer.
struct StepCall {
  std::string name;  // of the RPC
  std::function<std::string(Trial& trial, int64_t step)> call;
  std::string answer;                           // in an open step that knows nothing
  std::vector<std::string> micro_batches = {};  // that it leaves there
};
inline std::vector<StepCall> StepCalls() {
  return {
      {"ComputeLoss", [](Trial& t, int64_t step) { return t.Submit({.id = 0, .step = step}); }, "COMMITTED DIRECT", {kEagerLine}},
      {"AddGradient", [](Trial& t, int64_t step) { return t.AddPart({.id = 1, .step = step}); }, "OK", {"1 COMMITTED DIRECT"}},
      {"CommitMicroBatch", [](Trial& t, int64_t step) { return t.Commit({.id = 2, .step = step}); }, "MICRO_BATCH_NOT_FOUND"},
      {"DiscardMicroBatch", [](Trial& t, int64_t step) { return t.Discard({.id = 3, .step = step}); }, "OK", {"3 DISCARDED"}},
      {"SealStep", [](Trial& t, int64_t step) { return t.Seal({.step = step}); }, "OK"},
      {"ApplyOptimizerStep", [](Trial& t, int64_t step) { return t.Apply({.step = step}); }, "OK"},
      {"DiscardGradient", [](Trial& t, int64_t step) { return t.DiscardGradient(step); }, "OK"},
      {"DownloadGradient", [](Trial& t, int64_t step) { return t.Download(step); }, "OK"},
      {"GetGradientNorm", [](Trial& t, int64_t step) { return t.Norm(step); }, "OK"},
      {"UploadWeights", [](Trial& t, int64_t step) { return t.Replace(step); }, "STEP_NOT_SEALED"},
  };
}

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_TRANSACTIONS_TRANSACTION_HARNESS_H_
