#include "server/service/compute_loss_call.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "headwater/kernels/error.h"
#include "server/observability/metrics.h"
#include "server/service/canonical_header.h"
#include "server/service/field_check.h"
#include "server/service/loss_terms.h"
#include "server/service/message_order.h"
#include "server/service/proto_encoding.h"
#include "server/service/retry_after.h"

namespace headwater::service {
namespace {

using observability::MicroBatchOutcome;

MicroBatchOutcome OutcomeOf(const heads::SubmissionOutcome& outcome) {
  if (outcome.replayed || outcome.payload_differs) return MicroBatchOutcome::kReplayed;
  switch (outcome.state) {
    case heads::ContributionState::kCommitted:
      return MicroBatchOutcome::kCommitted;
    case heads::ContributionState::kStaged:
      return outcome.form == heads::ContributionForm::kHeld ? MicroBatchOutcome::kHeld : MicroBatchOutcome::kStaged;
    default:
      return MicroBatchOutcome::kEvaluated;
  }
}

MicroBatchOutcome OutcomeOf(const absl::Status& error) {
  if (HasReason(error, ErrorReason::kMicroBatchConflict)) return MicroBatchOutcome::kConflict;
  if (HasReason(error, ErrorReason::kAttemptSuperseded)) return MicroBatchOutcome::kSuperseded;
  const bool cancelled = HasReason(error, ErrorReason::kCancelled) || HasReason(error, ErrorReason::kDeadlineExceeded);
  return cancelled ? MicroBatchOutcome::kCancelled : MicroBatchOutcome::kRefused;
}

}  // namespace

// All that a submission's terms and rows point to.
struct ComputeLossCall::Payload {
  MicroBatchRequest request;
  std::unique_ptr<transport::RowAssembler> hidden;
  std::vector<std::unique_ptr<transport::RowAssembler>> teacher_hidden;  // one for each term; null without a teacher
  transport::ByteBudget::Reservation held;                               // of max_held_bytes, once it is held

  // Of rows and per-row data.
  int64_t bytes() const {
    int64_t bytes = request.row_count * hidden->row_bytes();
    for (size_t i = 0; i < request.terms.size(); ++i) {
      const LossTermRequest& term = request.terms[i];
      if (teacher_hidden[i] != nullptr) bytes += term.row_count * teacher_hidden[i]->row_bytes();
      if (term.targets.has_value()) bytes += term.row_count * int64_t{sizeof(int32_t)};
      if (term.token_weights.has_value()) bytes += term.row_count * int64_t{sizeof(float)};
    }
    return bytes;
  }
};

// [rows of the term] each; empty if not asked for.
struct ComputeLossCall::TokenOutputs {
  std::vector<float> token_loss;
  std::vector<float> lse;
  std::vector<float> target_log_probability;
  std::vector<float> entropy;
  std::vector<int32_t> argmax;
};

ComputeLossCall::ComputeLossCall(ServerCore& core, std::string client, heads::WaitLimits limits)
    : core_(core), client_(std::move(client)), limits_(std::move(limits)), payload_(std::make_shared<Payload>()) {}

ComputeLossCall::~ComputeLossCall() {
  if (!counted_) core_.metrics.CountMicroBatch(MicroBatchOutcome::kCancelled);  // its stream ended before Finish()
}

absl::Status ComputeLossCall::Done(absl::Status status) {
  if (!counted_ && !status.ok()) {
    core_.metrics.CountMicroBatch(OutcomeOf(status));
    counted_ = true;
  }
  return status;
}

absl::Status ComputeLossCall::OnMessage(v1::ComputeLossRequest* message) {
  return Done(TakeInOrder(
      message, header_seen_,
      [this](const v1::MicroBatchHeader& header) {
        header_seen_ = true;
        return OnHeader(header);
      },
      [this](v1::RowChunk* chunk) { return OnChunk(chunk); }));
}

absl::Status ComputeLossCall::OnHeader(const v1::MicroBatchHeader& header) {
  header_time_ = last_row_time_ = absl::Now();
  auto request = DecodeMicroBatchHeader(header, core_.options.limits);
  if (!request.ok()) return request.status();
  payload_->request = *std::move(request);
  head_name_ = payload_->request.terms.front().head.head.ToString();
  auto use = core_.UseSession(payload_->request.session);
  if (!use.ok()) return use.status();
  session_use_ = *std::move(use);
  HEADWATER_RETURN_IF_ERROR(BuildTerms(core_.registry, &payload_->request, &submission_));
  HEADWATER_RETURN_IF_ERROR(CheckTargets(payload_->request, submission_));
  FillSubmission();
  HEADWATER_RETURN_IF_ERROR(AwaitSteps());
  HEADWATER_RETURN_IF_ERROR(heads::Head::CheckSubmission(submission_));
  HEADWATER_RETURN_IF_ERROR(ReserveBytes());
  // The header is accepted: from here on a higher attempt takes effect.
  return submission_.attempt > 0 && submission_.micro_batch.has_value() ? heads::Head::Announce(submission_) : absl::OkStatus();
}

// Everything of the submission but terms, rows and outputs.
void ComputeLossCall::FillSubmission() {
  const MicroBatchRequest& request = payload_->request;
  submission_.micro_batch = request.micro_batch;
  submission_.attempt = request.attempt;
  submission_.session = request.session;
  submission_.backward = request.backward;
  submission_.explicit_commit = request.explicit_commit;
  submission_.first_wins = request.first_wins;
  submission_.refuse_non_finite = request.refuse_non_finite;
  submission_.late_token_factors = request.late_token_factors;
  if (request.allow_held || request.late_token_factors) {
    submission_.hold = [this] { return HoldPayload(); };
  }
  submission_.hidden = {nullptr, request.row_count, request.hidden_size, request.data_type};
  submission_.grad_hidden_scale = request.grad_hidden_scale;
}

absl::Status ComputeLossCall::AwaitSteps() {
  if (!submission_.backward) return absl::OkStatus();
  for (const heads::SubmittedTerm& term : submission_.terms) {
    if (!term.step.has_value() || !term.head_epoch.has_value()) continue;
    HEADWATER_RETURN_IF_ERROR(core_.waiting.AwaitStep(*term.head, {*term.head_epoch, *term.step}, limits_));
  }
  return absl::OkStatus();
}

// Admits the micro-batch's tensors: rows in, gradient and per-token outputs out.
absl::Status ComputeLossCall::ReserveBytes() {
  const Limits& limits = core_.options.limits;
  const MicroBatchRequest& request = payload_->request;
  payload_->hidden = std::make_unique<transport::RowAssembler>(request.row_count, request.hidden_size, request.data_type);
  int64_t row_bytes = request.row_count * payload_->hidden->row_bytes();
  int64_t output_rows = 0;
  for (size_t i = 0; i < request.terms.size(); ++i) {
    output_rows += request.terms[i].row_count;
    payload_->teacher_hidden.push_back(nullptr);
    if (!request.terms[i].teacher.has_value()) continue;
    const RowsView& view = submission_.terms[i].term.teacher_hidden;
    payload_->teacher_hidden[i] = std::make_unique<transport::RowAssembler>(view.row_count, view.column_count, view.data_type);
    row_bytes += view.row_count * payload_->teacher_hidden[i]->row_bytes();
  }
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", row_bytes, "max_micro_batch_bytes", limits.max_micro_batch_bytes));

  // All per-token outputs travel in the summary, which is one message.
  constexpr int64_t kTermBytes = 512;
  const int64_t output_bytes = output_rows * 4 * std::popcount(request.outputs);
  const int64_t summary_bytes = output_bytes + kTermBytes * static_cast<int64_t>(request.terms.size());
  HEADWATER_RETURN_IF_ERROR(
      CheckLimit("header.outputs", summary_bytes, "max_message_bytes", limits.max_message_bytes - kMessageOverheadBytes));

  int64_t bytes = row_bytes + output_bytes;
  if (request.return_grad_hidden) bytes += request.row_count * request.hidden_size * ElementBytes(request.grad_hidden_data_type);
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", bytes, "max_in_flight_bytes", limits.max_in_flight_bytes));
  return core_.ReserveInFlight(bytes, "the micro-batch", &reservation_);
}

absl::StatusOr<std::shared_ptr<const void>> ComputeLossCall::HoldPayload() {
  const int64_t bytes = payload_->bytes();
  if (core_.held.TryReserve(bytes, &payload_->held)) return std::shared_ptr<const void>(payload_);
  const int64_t available = core_.held.available_bytes();
  return MakeError(
      ErrorReason::kStagingFull,
      absl::StrCat("the contribution would be held as ", bytes, " bytes of rows, and ", available, " of ",
                   core_.held.capacity_bytes(), " (max_held_bytes) are free; commit or discard others, then try again"),
      {{"limit", "max_held_bytes"},
       {"maximum", absl::StrCat(core_.held.capacity_bytes())},
       {"requestedBytes", absl::StrCat(bytes)},
       {"availableBytes", absl::StrCat(available)},
       {kRetryAfterMsKey, "100"}});
}

absl::StatusOr<std::pair<transport::RowAssembler*, int32_t>> ComputeLossCall::StreamOf(const v1::RowChunk& chunk) {
  const int32_t term = chunk.term_index();
  const int32_t term_count = static_cast<int32_t>(payload_->request.terms.size());
  switch (chunk.role()) {
    case v1::CHUNK_ROLE_HIDDEN:
      if (term == 0) return std::pair(payload_->hidden.get(), int32_t{0});
      return FieldError(ErrorReason::kInvalidField, "chunk.term_index", "0, because the rows belong to all terms",
                        absl::StrCat(term));
    case v1::CHUNK_ROLE_TEACHER_HIDDEN: {
      if (term < 0 || term >= term_count) {
        return FieldError(ErrorReason::kInvalidField, "chunk.term_index", absl::StrCat("a term in [0, ", term_count, ")"),
                          absl::StrCat(term));
      }
      transport::RowAssembler* const rows = payload_->teacher_hidden[static_cast<size_t>(term)].get();
      if (rows != nullptr) return std::pair(rows, 1 + term);
      return FieldError(ErrorReason::kProtocolViolation, "chunk.role",
                        absl::StrCat("HIDDEN, because terms[", term, "] has no teacher_hidden"), "TEACHER_HIDDEN");
    }
    case v1::CHUNK_ROLE_UNSPECIFIED:
      return MissingField("chunk.role", "HIDDEN or TEACHER_HIDDEN");
    default:
      return FieldError(ErrorReason::kInvalidField, "chunk.role", "HIDDEN or TEACHER_HIDDEN",
                        absl::StrCat(static_cast<int>(chunk.role())));
  }
}

absl::Status ComputeLossCall::OnChunk(v1::RowChunk* chunk) {
  const auto stream = StreamOf(*chunk);
  if (!stream.ok()) return stream.status();
  const auto [rows, digest_stream] = *stream;
  const int64_t data_bytes = static_cast<int64_t>(chunk->data().size());
  HEADWATER_RETURN_IF_ERROR(CheckLimit("chunk.data", data_bytes, "max_chunk_bytes", core_.options.limits.max_chunk_bytes));
  HEADWATER_RETURN_IF_ERROR(rows->Check(chunk->row_start(), chunk->row_count(), data_bytes, "chunk"));
  if (submission_.backward) {  // before Add(), which may take the data
    digest_.AddRows(digest_stream, chunk->row_start(), chunk->row_count(), rows->row_bytes(), chunk->data().data());
  }
  HEADWATER_RETURN_IF_ERROR(rows->Add(chunk->row_start(), chunk->row_count(), chunk->mutable_data(), "chunk"));
  core_.metrics.CountBytes(observability::Direction::kIn, data_bytes);
  last_row_time_ = absl::Now();
  return absl::OkStatus();
}

// The client has half-closed: every row must be there.
absl::Status ComputeLossCall::CompleteRows() {
  HEADWATER_RETURN_IF_ERROR(CheckHeaderSeen(header_seen_));
  HEADWATER_RETURN_IF_ERROR(payload_->hidden->CheckComplete("hidden"));
  submission_.hidden = payload_->hidden->view();
  const bool one_term = submission_.terms.size() == 1;
  for (size_t i = 0; i < submission_.terms.size(); ++i) {
    const transport::RowAssembler* const rows = payload_->teacher_hidden[i].get();
    if (rows == nullptr) continue;
    HEADWATER_RETURN_IF_ERROR(rows->CheckComplete(one_term ? "teacher_hidden" : absl::StrCat("teacher_hidden of terms[", i, "]")));
    submission_.terms[i].term.teacher_hidden = rows->view();
  }
  return absl::OkStatus();
}

void ComputeLossCall::AllocateOutputs() {
  const MicroBatchRequest& request = payload_->request;
  token_outputs_.resize(request.terms.size());
  for (size_t i = 0; i < request.terms.size(); ++i) {
    const size_t rows = static_cast<size_t>(request.terms[i].row_count);
    const auto allocate = [&](v1::TokenOutput output, auto* values) {
      if ((request.outputs & TokenOutputBit(output)) != 0) values->resize(rows);
      return values->empty() ? nullptr : values->data();
    };
    TokenOutputs& outputs = token_outputs_[i];
    LossTerm& term = submission_.terms[i].term;
    term.token_loss = allocate(v1::TOKEN_OUTPUT_LOSS, &outputs.token_loss);
    term.lse = allocate(v1::TOKEN_OUTPUT_LSE, &outputs.lse);
    term.target_log_probability = allocate(v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY, &outputs.target_log_probability);
    term.entropy = allocate(v1::TOKEN_OUTPUT_ENTROPY, &outputs.entropy);
    term.argmax = allocate(v1::TOKEN_OUTPUT_ARGMAX, &outputs.argmax);
  }
  if (request.return_grad_hidden && request.row_count > 0) {
    const int64_t row_bytes = request.hidden_size * ElementBytes(request.grad_hidden_data_type);
    grad_hidden_.reset(new uint8_t[static_cast<size_t>(request.row_count * row_bytes)]);  // the engine writes every row
    submission_.grad_hidden = {grad_hidden_.get(), request.row_count, request.hidden_size, request.grad_hidden_data_type};
  }
}

absl::Status ComputeLossCall::Finish() {
  HEADWATER_RETURN_IF_ERROR(Done(CompleteRows()));
  AllocateOutputs();
  if (submission_.backward) submission_.digest = digest_.Finish(CanonicalHeader(payload_->request));

  absl::StatusOr<heads::SubmissionOutcome> outcome = MakeError(ErrorReason::kInternal, "the queue did not run the job");
  const absl::Status queued = core_.queue.Run(
      client_,
      [&] {
        engine_start_time_ = absl::Now();
        outcome = heads::Head::Submit(submission_, *core_.engine, limits_.cancelled);
        engine_end_time_ = absl::Now();
      },
      limits_.cancelled, limits_.deadline);
  if (!queued.ok()) return Done(queued);
  if (!outcome.ok()) return Done(outcome.status());
  outcome_ = *std::move(outcome);
  CountOutcome();
  return absl::OkStatus();
}

void ComputeLossCall::CountOutcome() {
  counted_ = true;
  observability::Metrics& metrics = core_.metrics;
  const MicroBatchOutcome what = OutcomeOf(*outcome_);
  metrics.CountMicroBatch(what);
  if (what == MicroBatchOutcome::kCommitted) metrics.CountCommit();
  for (size_t i = 0; i < outcome_->terms.size(); ++i) {
    const bool jsd = std::holds_alternative<JensenShannonRequest>(payload_->request.terms[i].loss);
    const LossSums& sums = outcome_->terms[i];
    metrics.CountTokens(jsd ? observability::LossKind::kJensenShannon : observability::LossKind::kCrossEntropy,
                        sums.valid_token_count);
    metrics.CountNonFiniteRows(sums.non_finite_row_count);
  }
  metrics.ObservePhase(observability::Phase::kUpload, last_row_time_ - header_time_);
  metrics.ObservePhase(observability::Phase::kQueue, engine_start_time_ - last_row_time_);
  metrics.ObservePhase(observability::Phase::kEngine, engine_end_time_ - engine_start_time_);
}

bool ComputeLossCall::NextChunk(v1::RowChunk* chunk) {
  constexpr int64_t kChunkBytes = 1 << 20;
  const MutableRowsView& grad = submission_.grad_hidden;
  if (grad.data == nullptr || next_grad_row_ >= grad.row_count) return false;
  const int64_t row_bytes = grad.column_count * ElementBytes(grad.data_type);
  const int64_t chunk_bytes = std::min(kChunkBytes, core_.options.limits.max_chunk_bytes);
  const int64_t rows = std::min(grad.row_count - next_grad_row_, std::max<int64_t>(1, chunk_bytes / row_bytes));
  chunk->set_role(v1::CHUNK_ROLE_GRAD_HIDDEN);
  chunk->set_term_index(0);
  chunk->set_row_start(next_grad_row_);
  chunk->set_row_count(rows);
  chunk->set_data(static_cast<const uint8_t*>(grad.data) + next_grad_row_ * row_bytes, static_cast<size_t>(rows * row_bytes));
  next_grad_row_ += rows;
  core_.metrics.CountBytes(observability::Direction::kOut, rows * row_bytes);
  return true;
}

void ComputeLossCall::FillSummary(v1::MicroBatchSummary* summary) {
  const heads::SubmissionOutcome& outcome = *outcome_;
  for (size_t i = 0; i < outcome.terms.size(); ++i) {
    v1::LossTermResult* const term = summary->add_terms();
    EncodeLossSums(outcome.terms[i], term->mutable_sums());
    term->set_non_finite_row_count(outcome.terms[i].non_finite_row_count);
    term->set_weight_version(outcome.weight_versions[i]);
    term->set_teacher_weight_version(outcome.teacher_weight_versions[i]);
    const auto encode = [&](v1::TokenOutput output, const auto& values, v1::DataType type,
                            v1::Tensor* (v1::LossTermResult::*field)()) {
      if ((payload_->request.outputs & TokenOutputBit(output)) == 0) return;
      v1::Tensor* const tensor = (term->*field)();
      tensor->set_data_type(type);
      tensor->add_shape(static_cast<int64_t>(values.size()));
      tensor->set_data(values.data(), values.size() * 4);
    };
    using Result = v1::LossTermResult;
    const TokenOutputs& outputs = token_outputs_[i];
    encode(v1::TOKEN_OUTPUT_LOSS, outputs.token_loss, v1::DATA_TYPE_FLOAT32, &Result::mutable_token_loss);
    encode(v1::TOKEN_OUTPUT_LSE, outputs.lse, v1::DATA_TYPE_FLOAT32, &Result::mutable_lse);
    encode(v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY, outputs.target_log_probability, v1::DATA_TYPE_FLOAT32,
           &Result::mutable_target_log_probability);
    encode(v1::TOKEN_OUTPUT_ENTROPY, outputs.entropy, v1::DATA_TYPE_FLOAT32, &Result::mutable_entropy);
    encode(v1::TOKEN_OUTPUT_ARGMAX, outputs.argmax, v1::DATA_TYPE_INT32, &Result::mutable_argmax);
  }

  summary->set_state(static_cast<v1::ContributionState>(outcome.state));
  summary->set_form(static_cast<v1::ContributionForm>(outcome.form));
  summary->set_replayed(outcome.replayed);
  summary->set_payload_differs(outcome.payload_differs);
  if (submission_.backward) summary->set_digest(submission_.digest.data(), submission_.digest.size());
  if (outcome.step.has_value()) summary->set_step(*outcome.step);
  const absl::Time now = absl::Now();
  core_.metrics.ObservePhase(observability::Phase::kDownload, now - engine_end_time_);
  v1::Timing* const timing = summary->mutable_timing();
  EncodeDuration(last_row_time_ - header_time_, timing->mutable_upload());
  EncodeDuration(engine_start_time_ - last_row_time_, timing->mutable_queue());
  EncodeDuration(engine_end_time_ - engine_start_time_, timing->mutable_engine());
  EncodeDuration(now - engine_end_time_, timing->mutable_download());
  summary->set_transport("grpc");
}

}  // namespace headwater::service
