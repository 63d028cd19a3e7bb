#include "server/service/compute_loss_call.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "headwater/kernels/error.h"
#include "server/observability/metrics.h"
#include "server/service/canonical_header.h"
#include "server/service/field_check.h"
#include "server/service/proto_encoding.h"
#include "server/service/retry_after.h"

namespace headwater::service {
namespace {

using observability::MicroBatchOutcome;

constexpr char kTermField[] = "header.terms[0]";

// How the cross entropy's options are nested in the term.
struct CrossEntropyOf {
  CrossEntropyRequest* options;
  std::string field;
};

CrossEntropyOf FindCrossEntropy(LossTermRequest* term) {
  if (auto* cross_entropy = std::get_if<CrossEntropyRequest>(&term->loss)) {
    return {cross_entropy, absl::StrCat(kTermField, ".cross_entropy")};
  }
  return {&std::get<JensenShannonRequest>(term->loss).hard_loss, absl::StrCat(kTermField, ".jensen_shannon.hard_loss")};
}

CrossEntropySpec ToSpec(const CrossEntropyRequest& request) {
  CrossEntropySpec spec{request.label_smoothing, request.z_loss, {}};
  if (request.class_weights.has_value()) spec.class_weights = *request.class_weights;
  return spec;
}

MicroBatchOutcome OutcomeOf(const heads::SubmissionOutcome& outcome) {
  if (outcome.replayed || outcome.payload_differs) return MicroBatchOutcome::kReplayed;
  switch (outcome.state) {
    case heads::ContributionState::kCommitted:
      return MicroBatchOutcome::kCommitted;
    case heads::ContributionState::kStaged:
      return MicroBatchOutcome::kStaged;
    default:
      return MicroBatchOutcome::kEvaluated;
  }
}

MicroBatchOutcome OutcomeOf(const absl::Status& error) {
  if (HasReason(error, ErrorReason::kMicroBatchConflict)) return MicroBatchOutcome::kConflict;
  const bool cancelled = HasReason(error, ErrorReason::kCancelled) || HasReason(error, ErrorReason::kDeadlineExceeded);
  return cancelled ? MicroBatchOutcome::kCancelled : MicroBatchOutcome::kRefused;
}

}  // namespace

// [rows of the term] each; empty if not asked for.
struct ComputeLossCall::TokenOutputs {
  std::vector<float> token_loss;
  std::vector<float> lse;
  std::vector<float> target_log_probability;
  std::vector<float> entropy;
  std::vector<int32_t> argmax;
};

ComputeLossCall::ComputeLossCall(ServerCore& core, std::string client, std::function<bool()> cancelled, absl::Time deadline)
    : core_(core), client_(std::move(client)), cancelled_(std::move(cancelled)), deadline_(deadline) {}

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
  switch (message->message_case()) {
    case v1::ComputeLossRequest::kHeader:
      if (header_seen_) {
        return Done(FieldError(ErrorReason::kProtocolViolation, "header", "one header, first", "a second header"));
      }
      header_seen_ = true;
      return Done(OnHeader(message->header()));
    case v1::ComputeLossRequest::kChunk:
      if (!header_seen_) return Done(FieldError(ErrorReason::kProtocolViolation, "header", "a header first", "a chunk"));
      return Done(OnChunk(message->mutable_chunk()));
    case v1::ComputeLossRequest::MESSAGE_NOT_SET:
      break;
  }
  return Done(MissingField("message", "a header or a chunk"));
}

absl::Status ComputeLossCall::OnHeader(const v1::MicroBatchHeader& header) {
  header_time_ = last_row_time_ = absl::Now();
  auto request = DecodeMicroBatchHeader(header, core_.options.limits);
  if (!request.ok()) return request.status();
  request_ = *std::move(request);
  head_name_ = request_.terms.front().head.head.ToString();
  HEADWATER_RETURN_IF_ERROR(BuildSubmission());
  HEADWATER_RETURN_IF_ERROR(heads::Head::CheckSubmission(submission_));
  HEADWATER_RETURN_IF_ERROR(CheckTargets());
  return ReserveBytes();
}

// Resolves names and fills in everything of the submission but what has to do with rows.
absl::Status ComputeLossCall::BuildSubmission() {
  LossTermRequest& term = request_.terms.front();
  auto head = core_.registry.Find(term.head.head);
  if (!head.ok()) return head.status();
  heads::SubmittedTerm submitted;
  submitted.head = *std::move(head);
  submitted.head_epoch = term.head.epoch;
  submitted.step = term.head.step;
  submitted.expected_weight_version = term.expected_weight_version;
  const HeadSpec& spec = submitted.head->spec();

  if (term.teacher.has_value()) {
    auto teacher = core_.registry.Find(term.teacher->head);
    if (!teacher.ok()) return teacher.status();
    submitted.teacher_head = *std::move(teacher);
    submitted.teacher_head_epoch = term.teacher->epoch;
    submitted.expected_teacher_weight_version = term.teacher->expected_weight_version;
    submitted.term.teacher_hidden = {nullptr, term.row_count, submitted.teacher_head->spec().hidden_size, term.teacher->data_type};
  }
  submission_.terms.push_back(std::move(submitted));
  HEADWATER_RETURN_IF_ERROR(CheckHeads());

  if (const CrossEntropyOf cross_entropy = FindCrossEntropy(&term); cross_entropy.options->class_weights.has_value()) {
    std::vector<float>& weights = *cross_entropy.options->class_weights;
    const int64_t size = static_cast<int64_t>(weights.size());
    if (size != spec.transform.valid_vocab_size && size != spec.vocab_size) {
      return FieldError(ErrorReason::kShapeMismatch, cross_entropy.field + ".class_weights.shape",
                        absl::StrCat("[", spec.transform.valid_vocab_size, "]"), absl::StrCat("[", size, "]"));
    }
    weights.resize(static_cast<size_t>(spec.transform.valid_vocab_size));  // columns beyond have no probability, so no weight
  }

  LossTerm& engine_term = submission_.terms.front().term;
  engine_term.row_start = term.row_start;
  engine_term.row_count = term.row_count;
  if (term.targets.has_value()) engine_term.targets = *term.targets;
  engine_term.ignore_index = term.ignore_index;
  if (term.token_weights.has_value()) engine_term.token_weights = *term.token_weights;
  engine_term.loss_scale = term.loss_scale;
  if (const auto* cross_entropy = std::get_if<CrossEntropyRequest>(&term.loss)) {
    engine_term.loss = ToSpec(*cross_entropy);
  } else {
    const JensenShannonRequest& jsd = std::get<JensenShannonRequest>(term.loss);
    JsdSpec options = jsd.options;
    options.hard_loss = ToSpec(jsd.hard_loss);
    engine_term.loss = options;
  }

  submission_.micro_batch = request_.micro_batch;
  submission_.backward = request_.backward;
  submission_.explicit_commit = request_.explicit_commit;
  submission_.first_wins = request_.first_wins;
  submission_.refuse_non_finite = request_.refuse_non_finite;
  submission_.hidden = {nullptr, request_.row_count, request_.hidden_size, request_.data_type};
  submission_.grad_hidden_scale = request_.grad_hidden_scale;
  return absl::OkStatus();
}

// What the header says against what the heads are.
absl::Status ComputeLossCall::CheckHeads() const {
  const LossTermRequest& term = request_.terms.front();
  const heads::SubmittedTerm& submitted = submission_.terms.front();
  const HeadSpec& spec = submitted.head->spec();
  if (request_.hidden_size != spec.hidden_size) {
    return FieldError(ErrorReason::kShapeMismatch, "header.hidden_size", absl::StrCat(spec.hidden_size, ", as the head has"),
                      absl::StrCat(request_.hidden_size));
  }
  if (spec.trainable && request_.backward) {
    if (!request_.micro_batch.has_value())
      return MissingField("header.micro_batch", "a number >= 0, because the head is trainable");
    if (!term.head.epoch.has_value()) {
      return MissingField(absl::StrCat(kTermField, ".head.head_epoch"), "the head's epoch, because the head is trainable");
    }
    if (!term.head.step.has_value()) {
      return MissingField(absl::StrCat(kTermField, ".head.step"), "a step number >= 0, because the head is trainable");
    }
  }
  if (!spec.trainable && request_.micro_batch.has_value()) {
    return FieldError(ErrorReason::kInvalidCombination, "header.micro_batch", "nothing, because the head is frozen",
                      absl::StrCat(*request_.micro_batch));
  }
  if (!spec.trainable && term.head.step.has_value()) {
    return FieldError(ErrorReason::kInvalidCombination, absl::StrCat(kTermField, ".head.step"),
                      "nothing, because the head is frozen", absl::StrCat(*term.head.step));
  }
  if (!term.teacher.has_value()) return absl::OkStatus();
  const int64_t student_vocab = spec.transform.valid_vocab_size;
  const int64_t teacher_vocab = submitted.teacher_head->spec().transform.valid_vocab_size;
  if (student_vocab != teacher_vocab && !std::get<JensenShannonRequest>(term.loss).options.truncate_to_common) {
    return FieldError(ErrorReason::kVocabSizeMismatch, absl::StrCat(kTermField, ".jensen_shannon.vocab_alignment"),
                      absl::StrCat("equal vocabularies, or TRUNCATE_TO_COMMON; the student has ", student_vocab, " valid columns"),
                      absl::StrCat(teacher_vocab, " valid columns of the teacher"));
  }
  return absl::OkStatus();
}

absl::Status ComputeLossCall::CheckTargets() const {
  const LossTermRequest& term = request_.terms.front();
  if (!term.targets.has_value()) return absl::OkStatus();
  const auto* jsd = std::get_if<JensenShannonRequest>(&term.loss);
  const bool only_ignored_matters = jsd != nullptr && jsd->options.hard_loss_weight == 0 &&
                                    (request_.outputs & TokenOutputBit(v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY)) == 0;
  if (only_ignored_matters) return absl::OkStatus();
  const int64_t valid_vocab_size = submission_.terms.front().head->spec().transform.valid_vocab_size;
  for (size_t i = 0; i < term.targets->size(); ++i) {
    const int32_t target = (*term.targets)[i];
    if (target == term.ignore_index || (target >= 0 && target < valid_vocab_size)) continue;
    return FieldError(ErrorReason::kTargetOutOfVocab, absl::StrCat(kTermField, ".targets.data"),
                      absl::StrCat("ids in [0, ", valid_vocab_size, ") or ignore_index ", term.ignore_index),
                      absl::StrCat(target, " at index ", i));
  }
  return absl::OkStatus();
}

// Admits the micro-batch's tensors: rows in, gradient and per-token outputs out.
absl::Status ComputeLossCall::ReserveBytes() {
  const Limits& limits = core_.options.limits;
  const LossTermRequest& term = request_.terms.front();
  hidden_ = std::make_unique<transport::RowAssembler>(request_.row_count, request_.hidden_size, request_.data_type);
  int64_t row_bytes = request_.row_count * hidden_->row_bytes();
  if (term.teacher.has_value()) {
    const RowsView& view = submission_.terms.front().term.teacher_hidden;
    teacher_hidden_ = std::make_unique<transport::RowAssembler>(view.row_count, view.column_count, view.data_type);
    row_bytes += term.row_count * teacher_hidden_->row_bytes();
  }
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", row_bytes, "max_micro_batch_bytes", limits.max_micro_batch_bytes));

  int64_t bytes = row_bytes;
  if (request_.return_grad_hidden) {
    bytes += request_.row_count * request_.hidden_size * ElementBytes(request_.grad_hidden_data_type);
  }
  for (uint32_t bits = request_.outputs; bits != 0; bits &= bits - 1) bytes += term.row_count * 4;
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", bytes, "max_in_flight_bytes", limits.max_in_flight_bytes));
  if (core_.in_flight.TryReserve(bytes, &reservation_)) return absl::OkStatus();
  const int64_t available = core_.in_flight.available_bytes();
  return MakeError(ErrorReason::kInFlightBytesExceeded,
                   absl::StrCat("the micro-batch needs ", bytes, " bytes, and ", available, " of ", limits.max_in_flight_bytes,
                                " (max_in_flight_bytes) are free; try again"),
                   {{"limit", "max_in_flight_bytes"},
                    {"maximum", absl::StrCat(limits.max_in_flight_bytes)},
                    {"requestedBytes", absl::StrCat(bytes)},
                    {"availableBytes", absl::StrCat(available)},
                    {kRetryAfterMsKey, "50"}});
}

absl::Status ComputeLossCall::OnChunk(v1::RowChunk* chunk) {
  transport::RowAssembler* rows = nullptr;
  int32_t digest_stream = 0;
  switch (chunk->role()) {
    case v1::CHUNK_ROLE_HIDDEN:
      rows = hidden_.get();
      break;
    case v1::CHUNK_ROLE_TEACHER_HIDDEN:
      if (teacher_hidden_ == nullptr) {
        return FieldError(ErrorReason::kProtocolViolation, "chunk.role", "HIDDEN, because no term has teacher_hidden",
                          "TEACHER_HIDDEN");
      }
      rows = teacher_hidden_.get();
      digest_stream = 1;
      break;
    case v1::CHUNK_ROLE_UNSPECIFIED:
      return MissingField("chunk.role", "HIDDEN or TEACHER_HIDDEN");
    default:
      return FieldError(ErrorReason::kInvalidField, "chunk.role", "HIDDEN or TEACHER_HIDDEN",
                        absl::StrCat(static_cast<int>(chunk->role())));
  }
  if (chunk->term_index() != 0) {
    return FieldError(ErrorReason::kInvalidField, "chunk.term_index", "0, the only term", absl::StrCat(chunk->term_index()));
  }
  const int64_t data_bytes = static_cast<int64_t>(chunk->data().size());
  HEADWATER_RETURN_IF_ERROR(CheckLimit("chunk.data", data_bytes, "max_chunk_bytes", core_.options.limits.max_chunk_bytes));
  HEADWATER_RETURN_IF_ERROR(rows->Check(chunk->row_start(), chunk->row_count(), data_bytes, "chunk"));
  if (request_.backward) {  // before Add(), which may take the data
    digest_.AddRows(digest_stream, chunk->row_start(), chunk->row_count(), rows->row_bytes(), chunk->data().data());
  }
  HEADWATER_RETURN_IF_ERROR(rows->Add(chunk->row_start(), chunk->row_count(), chunk->mutable_data(), "chunk"));
  core_.metrics.CountBytes(observability::Direction::kIn, data_bytes);
  last_row_time_ = absl::Now();
  return absl::OkStatus();
}

void ComputeLossCall::AllocateOutputs() {
  const LossTermRequest& term = request_.terms.front();
  const size_t rows = static_cast<size_t>(term.row_count);
  LossTerm& engine_term = submission_.terms.front().term;
  token_outputs_ = std::make_unique<TokenOutputs>();
  const auto allocate = [&](v1::TokenOutput output, auto* values) {
    if ((request_.outputs & TokenOutputBit(output)) != 0) values->resize(rows);
    return values->empty() ? nullptr : values->data();
  };
  engine_term.token_loss = allocate(v1::TOKEN_OUTPUT_LOSS, &token_outputs_->token_loss);
  engine_term.lse = allocate(v1::TOKEN_OUTPUT_LSE, &token_outputs_->lse);
  engine_term.target_log_probability = allocate(v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY, &token_outputs_->target_log_probability);
  engine_term.entropy = allocate(v1::TOKEN_OUTPUT_ENTROPY, &token_outputs_->entropy);
  engine_term.argmax = allocate(v1::TOKEN_OUTPUT_ARGMAX, &token_outputs_->argmax);

  if (request_.return_grad_hidden && request_.row_count > 0) {
    const int64_t row_bytes = request_.hidden_size * ElementBytes(request_.grad_hidden_data_type);
    grad_hidden_.reset(new uint8_t[static_cast<size_t>(request_.row_count * row_bytes)]);  // the engine writes every row
    submission_.grad_hidden = {grad_hidden_.get(), request_.row_count, request_.hidden_size, request_.grad_hidden_data_type};
  }
}

absl::Status ComputeLossCall::Finish() {
  if (!header_seen_) return Done(FieldError(ErrorReason::kProtocolViolation, "header", "a header first", "the stream's end"));
  if (absl::Status status = hidden_->CheckComplete("hidden"); !status.ok()) return Done(status);
  submission_.hidden = hidden_->view();
  if (teacher_hidden_ != nullptr) {
    if (absl::Status status = teacher_hidden_->CheckComplete("teacher_hidden"); !status.ok()) return Done(status);
    submission_.terms.front().term.teacher_hidden = teacher_hidden_->view();
  }
  AllocateOutputs();
  if (request_.backward) submission_.digest = digest_.Finish(CanonicalHeader(request_));

  absl::StatusOr<heads::SubmissionOutcome> outcome = MakeError(ErrorReason::kInternal, "the queue did not run the job");
  const absl::Status queued = core_.queue.Run(
      client_,
      [&] {
        engine_start_time_ = absl::Now();
        outcome = heads::Head::Submit(submission_, *core_.engine, cancelled_);
        engine_end_time_ = absl::Now();
      },
      cancelled_, deadline_);
  if (!queued.ok()) return Done(queued);
  if (!outcome.ok()) return Done(outcome.status());
  outcome_ = *std::move(outcome);
  counted_ = true;

  const bool jsd = std::holds_alternative<JensenShannonRequest>(request_.terms.front().loss);
  const LossSums& sums = outcome_->terms.front();
  observability::Metrics& metrics = core_.metrics;
  const MicroBatchOutcome what = OutcomeOf(*outcome_);
  metrics.CountMicroBatch(what);
  if (what == MicroBatchOutcome::kCommitted) metrics.CountCommit();
  metrics.CountTokens(jsd ? observability::LossKind::kJensenShannon : observability::LossKind::kCrossEntropy,
                      sums.valid_token_count);
  metrics.CountNonFiniteRows(sums.non_finite_row_count);
  metrics.ObservePhase(observability::Phase::kUpload, last_row_time_ - header_time_);
  metrics.ObservePhase(observability::Phase::kQueue, engine_start_time_ - last_row_time_);
  metrics.ObservePhase(observability::Phase::kEngine, engine_end_time_ - engine_start_time_);
  return absl::OkStatus();
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
  v1::LossTermResult* const term = summary->add_terms();
  EncodeLossSums(outcome.terms.front(), term->mutable_sums());
  term->set_non_finite_row_count(outcome.terms.front().non_finite_row_count);
  term->set_weight_version(outcome.weight_versions.front());
  term->set_teacher_weight_version(outcome.teacher_weight_versions.front());
  const auto encode = [&](v1::TokenOutput output, const auto& values, v1::DataType type,
                          v1::Tensor* (v1::LossTermResult::*field)()) {
    if ((request_.outputs & TokenOutputBit(output)) == 0) return;
    v1::Tensor* const tensor = (term->*field)();
    tensor->set_data_type(type);
    tensor->add_shape(static_cast<int64_t>(values.size()));
    tensor->set_data(values.data(), values.size() * 4);
  };
  using Result = v1::LossTermResult;
  encode(v1::TOKEN_OUTPUT_LOSS, token_outputs_->token_loss, v1::DATA_TYPE_FLOAT32, &Result::mutable_token_loss);
  encode(v1::TOKEN_OUTPUT_LSE, token_outputs_->lse, v1::DATA_TYPE_FLOAT32, &Result::mutable_lse);
  encode(v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY, token_outputs_->target_log_probability, v1::DATA_TYPE_FLOAT32,
         &Result::mutable_target_log_probability);
  encode(v1::TOKEN_OUTPUT_ENTROPY, token_outputs_->entropy, v1::DATA_TYPE_FLOAT32, &Result::mutable_entropy);
  encode(v1::TOKEN_OUTPUT_ARGMAX, token_outputs_->argmax, v1::DATA_TYPE_INT32, &Result::mutable_argmax);

  summary->set_state(static_cast<v1::ContributionState>(outcome.state));
  summary->set_form(static_cast<v1::ContributionForm>(outcome.form));
  summary->set_replayed(outcome.replayed);
  summary->set_payload_differs(outcome.payload_differs);
  if (request_.backward) summary->set_digest(submission_.digest.data(), submission_.digest.size());
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
