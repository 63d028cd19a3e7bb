#include "tests/integration/transactions/transaction_harness.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace headwater::testing {
namespace {

constexpr int64_t kRows = 3;
constexpr int64_t kVocab = 13;
constexpr int64_t kHidden = 5;
constexpr int64_t kRowBytes = kHidden * 4;
const std::vector<int32_t> kTargets = {1, 2, 3};

uint32_t SeedOf(uint32_t seed, int64_t id) { return seed != 0 ? seed : static_cast<uint32_t>(100 + id); }

// The name of an enum's value without its prefix.
std::string Short(const std::string& name, const std::string& prefix) { return name.substr(prefix.size()); }
std::string StateName(v1::ContributionState state) { return Short(v1::ContributionState_Name(state), "CONTRIBUTION_STATE_"); }
std::string FormName(v1::ContributionForm form) { return Short(v1::ContributionForm_Name(form), "CONTRIBUTION_FORM_"); }

std::string SummaryName(const v1::MicroBatchSummary& summary) {
  return absl::StrCat(StateName(summary.state()), " ", FormName(summary.form()), summary.replayed() ? " replayed" : "",
                      summary.payload_differs() ? " differs" : "");
}

}  // namespace

// ---- failing shards --------------------------------------------------------------------------------------------------

void ShardFault::Fail(ShardPhase phase, int32_t rank) {
  absl::MutexLock lock(&mutex_);
  what_ = What::kFail;
  phase_ = phase;
  rank_ = rank;
}

void ShardFault::Hold(ShardPhase phase) {
  absl::MutexLock lock(&mutex_);
  what_ = What::kHold;
  phase_ = phase;
}

void ShardFault::AwaitHeld() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](int* held) { return *held > 0; }, &held_));
}

void ShardFault::Clear() {
  absl::MutexLock lock(&mutex_);
  what_ = What::kNothing;
}

absl::Status ShardFault::Probe(ShardPhase phase, int32_t rank) {
  absl::MutexLock lock(&mutex_);
  if (what_ == What::kNothing || phase != phase_) return absl::OkStatus();
  if (what_ == What::kFail) return rank == rank_ ? absl::UnavailableError("the test lets this shard fail") : absl::OkStatus();
  ++held_;
  mutex_.Await(absl::Condition(
      +[](What* what) { return *what != What::kHold; }, &what_));
  --held_;
  return absl::OkStatus();
}

// ---- a stream in the hand --------------------------------------------------------------------------------------------

OpenCall::OpenCall(WireServer& server, const v1::MicroBatchHeader& header, const std::string& rows, int64_t sent_rows)
    : OpenStream(server.loss(), header, rows.substr(0, static_cast<size_t>(sent_rows * kRowBytes)), sent_rows),
      rows_(rows),
      sent_rows_(sent_rows) {
  if (sent_rows == kRows) stream->WritesDone();
}

void OpenCall::SendRest() {
  Send(HiddenChunk(rows_.substr(static_cast<size_t>(sent_rows_ * kRowBytes)), sent_rows_, kRows - sent_rows_));
  stream->WritesDone();
}

std::string OpenCall::Answer() {
  const grpc::Status status = End();
  if (status.error_code() == grpc::StatusCode::CANCELLED) return "CANCELLED";
  return status.ok() ? SummaryName(summary) : ReasonOf(status);
}

// ---- servers and heads -----------------------------------------------------------------------------------------------

Trial::Trial(const TrialSetup& setup, int shard_count)
    : setup_(setup), shard_count_(shard_count), fault_(std::make_shared<ShardFault>()) {
  Restart();
}

Trial::~Trial() {
  fault_->Clear();
  server_.reset();
}

void Trial::Restart() {
  server_.reset();
  ServerSetup setup;
  setup.engine.shard_count = shard_count_;
  setup.engine.shard_probe = [fault = fault_](ShardPhase phase, int32_t rank) { return fault->Probe(phase, rank); };
  setup.options.limits.max_step_wait = absl::Seconds(20);
  if (setup_.checkpoints) {
    setup.options.checkpoint_directory = directory() + "/checkpoints";
    setup.options.load_root = directory();
  }
  if (setup_.adjust != nullptr) setup_.adjust(setup);
  server_ = std::make_unique<WireServer>(setup);
}

TestHead& Trial::Head(const std::string& id) {
  absl::MutexLock lock(&state_mutex_);
  const auto found = heads_.find(id);
  if (found != heads_.end()) return found->second;
  const auto spec = setup_.specs.find(id);
  uint32_t seed = 1;
  for (const char letter : id) seed = seed * 31 + static_cast<uint8_t>(letter);
  return heads_[id] = server_->MakeHead(id, spec != setup_.specs.end() ? spec->second : SmallSpec(kVocab, kHidden), seed);
}

std::vector<std::string> Trial::HeadIds() const {
  std::vector<std::string> ids;
  absl::MutexLock lock(&state_mutex_);
  for (const auto& [id, head] : heads_) ids.push_back(id);
  return ids;
}

std::string Trial::Answer(const grpc::Status& status, const std::string& detail) {
  if (status.ok()) return detail;
  absl::MutexLock lock(&error_mutex_);
  last_error_ = DecodeError(status);
  // gRPC ends a call that is cancelled, or late, by itself: without details.
  if (last_error_.reason.empty() && last_error_.code == grpc::StatusCode::CANCELLED) return "CANCELLED";
  if (last_error_.reason.empty() && last_error_.code == grpc::StatusCode::DEADLINE_EXCEEDED) return "DEADLINE_EXCEEDED";
  return ReasonOf(status);
}

std::string Trial::Tell(const WireError& error, const std::string& answer) {
  absl::MutexLock lock(&error_mutex_);
  last_error_ = error;
  return answer;
}

WireError Trial::last_error() const {
  absl::MutexLock lock(&error_mutex_);
  return last_error_;
}

// ---- micro-batches ---------------------------------------------------------------------------------------------------

v1::MicroBatchHeader Trial::HeaderOf(const Batch& batch) {
  v1::MicroBatchHeader header = CrossEntropyHeader(Head(batch.head), batch.step, batch.id, kTargets);
  header.set_attempt(batch.attempt);
  if (batch.explicit_commit) header.set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
  if (batch.first_wins) header.set_on_mismatch(v1::ON_MISMATCH_FIRST_WINS);
  if (batch.refuse_non_finite) header.set_non_finite_policy(v1::NON_FINITE_POLICY_REFUSE);
  header.set_allow_held(batch.allow_held);
  header.set_late_token_factors(batch.late_token_factors);
  header.set_session_id(batch.session);
  return header;
}

std::string Trial::RowsOf(const Batch& batch) {
  std::vector<float> rows = Random(static_cast<size_t>(kRows * kHidden), SeedOf(batch.seed, batch.id), 1);
  if (batch.has_nan) rows[7] = std::numeric_limits<float>::quiet_NaN();
  return Bytes(rows);
}

LossReply Trial::Compute(const Batch& batch, SendOptions send) {
  send.deadline_ms = deadline_ms;
  return server_->Compute(HeaderOf(batch), RowsOf(batch), "", send);
}

std::string Trial::Submit(const Batch& batch) {
  return SubmitEdited(batch, [](v1::MicroBatchHeader&) {});
}

std::string Trial::SubmitEdited(const Batch& batch, const std::function<void(v1::MicroBatchHeader&)>& edit) {
  v1::MicroBatchHeader header = HeaderOf(batch);
  edit(header);
  const LossReply reply = server_->Compute(header, RowsOf(batch), "", {.deadline_ms = deadline_ms});
  return Answer(reply.status, SummaryName(reply.summary));
}

std::unique_ptr<OpenCall> Trial::Open(const Batch& batch, int64_t sent_rows) {
  return std::make_unique<OpenCall>(*server_, HeaderOf(batch), RowsOf(batch), sent_rows);
}

void Trial::Cancel(OpenCall& call) {
  call.context.TryCancel();
  EXPECT_EQ(call.Answer(), "CANCELLED");
}

void Trial::CancelHeld(OpenCall& call) {
  Cancel(call);
  EXPECT_TRUE(AwaitMetric("headwater_abandoned_calls", 1));
}

template <typename Stub, typename Request, typename Response>
std::string Trial::Ask(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*), const Request& request,
                       Response* response) {
  const grpc::Status status = server_->Call(method, request, response, deadline_ms);
  std::string detail = "OK";
  if constexpr (requires { response->replayed(); }) detail += response->replayed() ? " replayed" : "";
  if constexpr (requires { response->dropped(); }) detail += response->dropped() ? " dropped" : "";
  if constexpr (requires { response->open_step(), request.head().step(); }) {
    EXPECT_EQ(response->open_step(), status.ok() ? request.head().step() + 1 : 0);
  }
  return Answer(status, detail);
}

std::string Trial::Commit(const Decision& decision) {
  v1::CommitMicroBatchRequest request;
  *request.add_heads() = At(decision.step);
  request.set_micro_batch(decision.id);
  request.set_attempt(decision.attempt);
  request.set_factor(decision.factor);
  request.set_session_id(decision.session);
  v1::CommitMicroBatchResponse response;
  return Ask(&Loss::CommitMicroBatch, request, &response);
}

std::string Trial::Discard(const Decision& decision) {
  v1::DiscardMicroBatchRequest request;
  *request.add_heads() = At(decision.step);
  request.set_micro_batch(decision.id);
  request.set_attempt(decision.attempt);
  request.set_session_id(decision.session);
  v1::DiscardMicroBatchResponse response;
  return Ask(&Loss::DiscardMicroBatch, request, &response);
}

std::string Trial::AddPart(const Part& part) {
  constexpr int64_t kPartRows = 4;
  v1::AddGradientHeader header;
  *header.mutable_head() = At(part.step);
  header.set_micro_batch(part.id);
  header.set_attempt(part.attempt);
  header.set_row_start(part.row_start);
  header.set_row_count(kPartRows);
  header.set_factor(part.factor);
  bool replayed = false;
  const grpc::Status status = server_->AddGradient(header, Random(kPartRows * kHidden, SeedOf(part.seed, part.id), 1), &replayed);
  return Answer(status, replayed ? "OK replayed" : "OK");
}

// ---- steps -----------------------------------------------------------------------------------------------------------

std::string Trial::Seal(const StepEnd& end) {
  v1::SealStepRequest request;
  *request.mutable_head() = At(end.step);
  request.mutable_expected()->mutable_ids()->mutable_ids()->Assign(end.ids.begin(), end.ids.end());
  request.set_wait(end.wait);
  v1::SealStepResponse response;
  return Ask(&Heads::SealStep, request, &response);
}

std::string Trial::Apply(const StepEnd& end) {
  v1::ApplyOptimizerStepRequest request;
  *request.mutable_head() = At(end.step);
  request.mutable_expected()->mutable_ids()->mutable_ids()->Assign(end.ids.begin(), end.ids.end());
  request.set_learning_rate(end.learning_rate);
  v1::ApplyOptimizerStepResponse response;
  return Ask(&Heads::ApplyOptimizerStep, request, &response);
}

std::string Trial::DiscardGradient(int64_t step) {
  v1::DiscardGradientRequest request;
  *request.mutable_head() = At(step);
  v1::DiscardGradientResponse response;
  return Ask(&Heads::DiscardGradient, request, &response);
}

std::string Trial::Replace(int64_t step, uint32_t seed) {
  TestHead& head = Head();
  v1::Head updated;
  const grpc::Status status = server_->Upload(head.head, v1::HEAD_TENSOR_WEIGHT, Random(kVocab * kHidden, seed, 1), &updated, step);
  if (status.ok()) {
    EXPECT_EQ(updated.epoch(), head.head.epoch());
  }
  return Answer(status, updated.open_step() == step + 1 ? "OK replaced" : "OK");
}

std::string Trial::Norm(int64_t step) {
  v1::GetGradientNormRequest request;
  *request.mutable_head() = At(step);
  v1::GetGradientNormResponse response;
  return Ask(&Heads::GetGradientNorm, request, &response);
}

std::string Trial::Download(int64_t step) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(deadline_ms));
  v1::DownloadGradientRequest request;
  *request.mutable_head() = At(step);
  request.set_tensor(v1::HEAD_TENSOR_WEIGHT);
  std::string bytes;
  return Answer(ReadDownload(*server_->heads().DownloadGradient(&context, request), &bytes));
}

std::string Trial::GetStep() {
  v1::GetStepRequest request;
  *request.mutable_head() = At(0);
  v1::GetStepResponse response;
  return Ask(&Heads::GetStep, request, &response);
}

// ---- heads -----------------------------------------------------------------------------------------------------------

std::string Trial::Take() { return Answer(server_->Take(&Head())); }

std::string Trial::Save(const std::string& checkpoint) {
  v1::SaveCheckpointRequest request;
  request.set_name(Head().name());
  request.set_epoch(Head().head.epoch());
  request.set_checkpoint(checkpoint);
  v1::SaveCheckpointResponse response;
  return Ask(&Heads::SaveCheckpoint, request, &response);
}

std::string Trial::Restore(const std::string& checkpoint, const std::string& id) {
  v1::RestoreCheckpointRequest request;
  request.set_name(Head(id).name());
  request.set_epoch(Head(id).head.epoch());
  request.set_checkpoint(checkpoint);
  v1::Head restored;
  const std::string answer = Ask(&Heads::RestoreCheckpoint, request, &restored);
  if (answer == "OK") Head(id).head = restored;
  return answer;
}

std::string Trial::KeepAlive(const std::string& session) {
  v1::KeepAliveRequest request;
  request.set_session_id(session);
  v1::KeepAliveResponse response;
  return Ask(&Sessions::KeepAlive, request, &response);
}

std::string Trial::CloseSession(const std::string& session) {
  v1::CloseSessionRequest request;
  request.set_session_id(session);
  v1::CloseSessionResponse response;
  return Ask(&Sessions::CloseSession, request, &response);
}

// ---- what can be seen ------------------------------------------------------------------------------------------------

std::string Trial::Gradient(const std::string& id) {
  return server_->Gradient(Head(id), server_->Get(Head(id).name()).open_step());
}

std::string Trial::Line(const v1::MicroBatchState& state) {
  const std::string form = state.form() == v1::CONTRIBUTION_FORM_UNSPECIFIED ? "" : absl::StrCat(" ", FormName(state.form()));
  return absl::StrCat(state.micro_batch(), " ", StateName(state.state()), form,
                      state.attempt() > 0 ? absl::StrCat(" @", state.attempt()) : "");
}

std::vector<std::string> Trial::MicroBatches() {
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

void Trial::Forget(const std::string& id) {
  absl::MutexLock lock(&state_mutex_);
  heads_.erase(id);
}

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

void SubmitFirst(Trial& t) { EXPECT_EQ(t.Submit({.id = 0}), "COMMITTED DIRECT"); }

void MakeForwardOnly(v1::MicroBatchHeader& header) {
  header.set_compute_mode(v1::COMPUTE_MODE_FORWARD_ONLY);
  header.clear_micro_batch();
  header.mutable_terms(0)->mutable_head()->clear_step();
  header.mutable_terms(0)->mutable_head()->clear_head_epoch();
}

const std::vector<StepCall>& StepCalls() {
  static const auto* const calls = new std::vector<StepCall>{
      {"ComputeLoss", [](Trial& t, int64_t step) { return t.Submit({.id = 0, .step = step}); }, "COMMITTED DIRECT"},
      {"AddGradient", [](Trial& t, int64_t step) { return t.AddPart({.id = 1, .step = step}); }, "OK"},
      {"CommitMicroBatch", [](Trial& t, int64_t step) { return t.Commit({.id = 2, .step = step}); }, "MICRO_BATCH_NOT_FOUND"},
      {"DiscardMicroBatch", [](Trial& t, int64_t step) { return t.Discard({.id = 3, .step = step}); }, "OK"},
      {"SealStep", [](Trial& t, int64_t step) { return t.Seal({.step = step}); }, "OK"},
      {"ApplyOptimizerStep", [](Trial& t, int64_t step) { return t.Apply({.step = step}); }, "OK"},
      {"DiscardGradient", [](Trial& t, int64_t step) { return t.DiscardGradient(step); }, "OK"},
      {"DownloadGradient", [](Trial& t, int64_t step) { return t.Download(step); }, "OK"},
      {"GetGradientNorm", [](Trial& t, int64_t step) { return t.Norm(step); }, "OK"},
      {"UploadWeights", [](Trial& t, int64_t step) { return t.Replace(step); }, "STEP_NOT_SEALED"},
  };
  return *calls;
}

}  // namespace headwater::testing
