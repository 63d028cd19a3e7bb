// MicroBatchAdmission: from a header to a micro-batch whose heads, rows and memory are reserved.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/loss_options.h"
#include "headwater/kernels/top_k.h"
#include "proto/headwater/v1/term_codec.h"
#include "server/heads/head_registry.h"
#include "server/heads/steps/submit.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/loss/micro_batch.h"
#include "server/service/request/field_check.h"

namespace headwater::service {
namespace {

using transport::RegionAccess;
using transport::RegionUse;

// ---- the terms -------------------------------------------------------------------------------------------------------

absl::StatusOr<heads::SubmittedTerm> FindHeads(const Caller& caller, const heads::HeadRegistry& registry,
                                               const LossTermRequest& term) {
  heads::SubmittedTerm submitted;
  submitted.term = term.term;
  HEADWATER_ASSIGN_OR_RETURN(submitted.head, caller.Find(registry, term.head.name));
  submitted.head_epoch = term.head.epoch;
  submitted.step = term.head.step;
  submitted.expected_weight_version = term.expected_weight_version;
  if (!term.teacher.has_value()) return submitted;
  HEADWATER_ASSIGN_OR_RETURN(submitted.teacher_head, caller.Find(registry, term.teacher->name));
  submitted.teacher_head_epoch = term.teacher->epoch;
  submitted.expected_teacher_weight_version = term.teacher->expected_weight_version;
  submitted.term.teacher_hidden = {nullptr, term.term.row_count, submitted.teacher_head->spec().hidden_size,
                                   term.teacher->data_type};
  return submitted;
}

absl::Status CheckHeads(const MicroBatchRequest& request, const LossTermRequest& term, const heads::SubmittedTerm& submitted,
                        const std::string& field) {
  const HeadSpec& spec = submitted.head->spec();
  if (request.hidden_size != spec.hidden_size) {
    return FieldError(ErrorReason::kShapeMismatch, "header.hidden_size",
                      absl::StrCat(spec.hidden_size, ", as ", submitted.head->name().ToString(), " has"),
                      absl::StrCat(request.hidden_size));
  }
  if (spec.trainable && request.backward) {
    if (!request.micro_batch.has_value()) {
      return MissingField("header.micro_batch", "a number >= 0, because the head is trainable");
    }
    if (!term.head.epoch.has_value()) {
      return MissingField(field + ".head.head_epoch", "the head's epoch, because the head is trainable");
    }
    if (!term.head.step.has_value()) return MissingField(field + ".head.step", "a step number >= 0, because the head is trainable");
  }
  if (!spec.trainable && term.head.step.has_value()) {
    return InvalidCombination(field + ".head.step", "nothing, because the head is frozen", absl::StrCat(*term.head.step));
  }
  if (term.term.gradient_resolution != 0 && !spec.trainable) {
    return InvalidCombination(field + ".gradient_resolution", "0, because the head is frozen: draws are made of a step",
                              absl::StrCat(term.term.gradient_resolution));
  }
  HEADWATER_RETURN_IF_ERROR(CheckTermOptionsWithHead(field, term.term, spec));
  if (!term.teacher.has_value()) return absl::OkStatus();
  const int64_t student_vocab = spec.transform.valid_vocab_size;
  const int64_t teacher_vocab = submitted.teacher_head->spec().transform.valid_vocab_size;
  if (student_vocab != teacher_vocab && !std::get<JsdSpec>(term.term.loss).truncate_to_common) {
    return FieldError(ErrorReason::kVocabSizeMismatch, field + ".jensen_shannon.vocab_alignment",
                      absl::StrCat("equal vocabularies, or TRUNCATE_TO_COMMON; the student has ", student_vocab, " valid columns"),
                      absl::StrCat(teacher_vocab, " valid columns of the teacher"));
  }
  return absl::OkStatus();
}

// Cuts class weights to the columns that have probability.
absl::Status FitClassWeights(const HeadSpec& spec, const std::string& field, LossTerm* term) {
  auto* const jsd = std::get_if<JsdSpec>(&term->loss);
  CrossEntropySpec* const cross_entropy = jsd != nullptr ? &jsd->hard_loss : std::get_if<CrossEntropySpec>(&term->loss);
  if (cross_entropy == nullptr || cross_entropy->class_weights.data() == nullptr) return absl::OkStatus();
  absl::Span<const float>& weights = cross_entropy->class_weights;
  const int64_t size = static_cast<int64_t>(weights.size());
  if (size != spec.transform.valid_vocab_size && size != spec.vocab_size) {
    return FieldError(ErrorReason::kShapeMismatch,
                      absl::StrCat(field, jsd != nullptr ? ".jensen_shannon.hard_loss" : ".cross_entropy", ".class_weights.shape"),
                      absl::StrCat("[", spec.transform.valid_vocab_size, "]"), absl::StrCat("[", size, "]"));
  }
  weights = weights.first(static_cast<size_t>(spec.transform.valid_vocab_size));
  return absl::OkStatus();
}

// The seed of a term's draws: a digest of its head, step, micro-batch and index. A repeat draws alike. Changing it changes the bits
// of dithered gradients.
uint64_t DitherSeed(const MicroBatchRequest& request, size_t index) {
  const HeadStepRequest& head = request.terms[index].head;
  const Digest digest = DigestBuilder().Finish(
      absl::StrCat("headwater.dither.1 ", head.name.ToString(), " ", *head.step, " ", *request.micro_batch, " ", index));
  uint64_t seed = 0;
  std::memcpy(&seed, digest.data(), sizeof(seed));
  return seed;
}

// Finds the heads of all terms, checks the header against them, and fills in `submission->terms`, except rows and outputs. Spans
// point into `request`, which must stay where it is; class weights are cut to the columns that have probability. kHeadNotFound,
// kPermissionDenied, kShapeMismatch, kMissingField, kInvalidCombination, kVocabSizeMismatch.
absl::Status BuildTerms(const Caller& caller, const heads::HeadRegistry& registry, MicroBatchRequest* request,
                        heads::Submission* submission) {
  bool any_trainable = false;
  for (size_t i = 0; i < request->terms.size(); ++i) {
    LossTermRequest& term = request->terms[i];
    HEADWATER_ASSIGN_OR_RETURN(auto submitted, FindHeads(caller, registry, term));
    const HeadSpec& spec = submitted.head->spec();
    any_trainable = any_trainable || spec.trainable;
    HEADWATER_RETURN_IF_ERROR(CheckHeads(*request, term, submitted, TermField(i)));
    HEADWATER_RETURN_IF_ERROR(FitClassWeights(spec, TermField(i), &term.term));
    submitted.term.loss = term.term.loss;
    if (term.term.gradient_resolution != 0) submitted.term.dither_seed = DitherSeed(*request, i);
    submission->terms.push_back(std::move(submitted));
  }
  if (any_trainable || !request->micro_batch.has_value()) return absl::OkStatus();
  return InvalidCombination("header.micro_batch", "nothing, because every head is frozen", absl::StrCat(*request->micro_batch));
}

// Whether the micro-batch, while it is undecided, must be kept as its rows: no free slot changes that.
bool MustBeHeld(const heads::Submission& submission) {
  if (submission.late_token_factors) return true;
  const auto has_no_slot = [](const heads::SubmittedTerm& term) {
    return term.head->spec().trainable && term.head->spec().staging_slots == 0;
  };
  return submission.explicit_commit && submission.hold != nullptr &&
         std::any_of(submission.terms.begin(), submission.terms.end(), has_no_slot);
}

std::vector<heads::HeadUse> UseHeads(const heads::Submission& submission) {
  std::vector<heads::HeadUse> uses;
  const auto use_once = [&uses](const std::shared_ptr<heads::Head>& head) {
    const auto is_it = [&head](const heads::HeadUse& use) { return use.head() == head; };
    if (head != nullptr && std::none_of(uses.begin(), uses.end(), is_it)) uses.emplace_back(head);
  };
  for (const heads::SubmittedTerm& term : submission.terms) {
    use_once(term.head);
    use_once(term.teacher_head);
  }
  return uses;
}

// kTargetOutOfVocab, and the errors of CheckTopKRows(). For terms that BuildTerms() has made.
absl::Status CheckTargets(const MicroBatchRequest& request, const heads::Submission& submission) {
  for (size_t i = 0; i < request.terms.size(); ++i) {
    const LossTerm& term = request.terms[i].term;
    const int64_t valid_vocab_size = submission.terms[i].head->spec().transform.valid_vocab_size;
    if (const auto* top_k = std::get_if<TopKSpec>(&term.loss)) {
      HEADWATER_RETURN_IF_ERROR(CheckTopKRows(TermField(i) + ".top_k_teacher", ".data", *top_k, valid_vocab_size));
    }
    for (size_t row = 0; row < term.targets.size(); ++row) {
      const int32_t target = term.targets[row];
      if (target == term.ignore_index || (target >= 0 && target < valid_vocab_size)) continue;
      return FieldError(ErrorReason::kTargetOutOfVocab, TermField(i) + ".targets.data",
                        absl::StrCat("ids in [0, ", valid_vocab_size, ") or ignore_index ", term.ignore_index),
                        absl::StrCat(target, " at index ", row));
    }
  }
  return absl::OkStatus();
}

// ---- admission -------------------------------------------------------------------------------------------------------

class MicroBatchAdmission {
 public:
  explicit MicroBatchAdmission(AdmittedMicroBatch& micro_batch)
      : batch_(micro_batch), core_(micro_batch.core), scope_(micro_batch.scope) {}

  absl::Status Admit(v1::MicroBatchHeader header) {
    batch_.times.header = observability::MonotonicNow();
    HEADWATER_ASSIGN_OR_RETURN(MicroBatchRequest& request = batch_.payload->request,
                               DecodeMicroBatchHeader(std::move(header), core_.options.limits));
    heads::Submission& submission = batch_.submission;
    scope_.set_head(request.terms.front().head.name.ToString());
    if (request.transfer.has_value()) {
      HEADWATER_ASSIGN_OR_RETURN(auto entry, core_.transfers.Announce(*request.transfer));
      batch_.entry.emplace(std::move(entry));
    }
    if (request.session.has_value()) {
      const heads::SessionId& session = *request.session;
      batch_.client = "session " + absl::BytesToHexString({reinterpret_cast<const char*>(session.data()), session.size()});
    }
    HEADWATER_ASSIGN_OR_RETURN(scope_.session(), core_.UseSession(request.session));
    HEADWATER_RETURN_IF_ERROR(BuildTerms(scope_.caller(), core_.registry, &request, &submission));
    scope_.heads() = UseHeads(submission);
    HEADWATER_RETURN_IF_ERROR(CheckTargets(request, submission));
    FillSubmission();
    HEADWATER_RETURN_IF_ERROR(FindRows());
    HEADWATER_RETURN_IF_ERROR(FindGrad());
    HEADWATER_RETURN_IF_ERROR(AwaitSteps());
    HEADWATER_RETURN_IF_ERROR(heads::CheckSubmission(submission));
    HEADWATER_RETURN_IF_ERROR(ReserveBytes());
    HEADWATER_RETURN_IF_ERROR(ClaimJoined());
    // The header is accepted: from here on a higher attempt takes effect.
    if (submission.attempt > 0 && submission.micro_batch.has_value()) {
      HEADWATER_RETURN_IF_ERROR(heads::Announce(submission, scope_.wait_limits()));
    }
    return PlaceRows();
  }

 private:
  absl::StatusOr<RegionUse> FindRegion(const v1::SharedRows& shared, int64_t bytes, RegionAccess access, DataType type,
                                       const std::string& field) const {
    return core_.regions.Find(*batch_.payload->request.session, shared.region_id(), shared.offset_bytes(), bytes, access,
                              ElementBytes(type), field);
  }

  absl::Status FindRows() {
    const MicroBatchRequest& request = batch_.payload->request;
    RowsView& hidden = batch_.submission.hidden;
    HEADWATER_RETURN_IF_ERROR(AddSource(RowsOf(0, "hidden", 0, hidden), request.hidden_rows, "header.hidden_rows", nullptr));
    batch_.path = PathOf(batch_.payload->sources.front()->region());
    for (size_t i = 0; i < request.terms.size(); ++i) {
      const LossTermRequest& term = request.terms[i];
      if (!term.teacher.has_value()) continue;
      const bool is_only_term = request.terms.size() == 1;
      HEADWATER_RETURN_IF_ERROR(AddSource(
          RowsOf(1 + static_cast<int32_t>(i), is_only_term ? "teacher_hidden" : absl::StrCat("teacher_hidden of terms[", i, "]"),
                 term.term.row_start, batch_.submission.terms[i].term.teacher_hidden),
          term.teacher->rows, TermField(i) + (term.teacher->joined.has_value() ? ".joined_teacher" : ".teacher_hidden.rows"),
          &*term.teacher));
    }
    return absl::OkStatus();
  }

  static RowSource::Rows RowsOf(int32_t digest_stream, std::string name, int64_t row_start, RowsView& view) {
    return {digest_stream, std::move(name), row_start, view.row_count, view.column_count * ElementBytes(view.data_type), &view, ""};
  }

  // Adds the source of `rows`; `field` names it in the header. `teacher`: whose rows they are; null: they are the hidden states.
  absl::Status AddSource(RowSource::Rows rows, const v1::SharedRows* shared, std::string field, const TeacherRequest* teacher) {
    auto& sources = batch_.payload->sources;
    rows.field = std::move(field);
    if (shared != nullptr) {
      HEADWATER_ASSIGN_OR_RETURN(RegionUse region, FindRegion(*shared, rows.row_count * rows.row_bytes, RegionAccess::kRead,
                                                              rows.view->data_type, rows.field));
      sources.push_back(MakeRegionRows(std::move(rows), std::move(region)));
    } else if (teacher != nullptr && teacher->joined.has_value()) {
      transport::JoinedSet set = {teacher->name.tenant, teacher->joined->join_key, teacher->joined->total_row_count,
                                  rows.view->column_count, rows.view->data_type};
      sources.push_back(MakeJoinedRows(std::move(rows), std::move(set), teacher->joined->row_indices, JoinUser()));
    } else {
      sources.push_back(std::make_unique<RowSource>(std::move(rows)));
    }
    return absl::OkStatus();
  }

  // The user of joined rows: a repeat of this micro-batch is the same one, whatever its attempt. Empty without a micro-batch.
  std::string JoinUser() const {
    const MicroBatchRequest& request = batch_.payload->request;
    if (!request.micro_batch.has_value()) return "";
    const HeadStepRequest& head = request.terms.front().head;
    return absl::StrCat(head.name.ToString(), "/", head.epoch.has_value() ? heads::EpochToHex(*head.epoch) : "", "/",
                        head.step.value_or(-1), "/", *request.micro_batch);
  }

  absl::Status FindGrad() {
    const MicroBatchRequest& request = batch_.payload->request;
    if (request.grad_hidden_rows == nullptr) return absl::OkStatus();
    const std::string field = "header.grad_hidden_rows";
    const int64_t bytes = request.row_count * request.hidden_size * ElementBytes(request.grad_hidden_data_type);
    HEADWATER_ASSIGN_OR_RETURN(
        auto region, FindRegion(*request.grad_hidden_rows, bytes, RegionAccess::kWrite, request.grad_hidden_data_type, field));
    for (const auto& source : batch_.payload->sources) {
      if (source->region() == nullptr || !RegionUse::Overlap(*source->region(), region)) continue;
      return InvalidField(field, "memory apart from the rows that are read", "memory that overlaps it");
    }
    batch_.grad_region = std::move(region);
    return absl::OkStatus();
  }

  void FillSubmission() {
    const MicroBatchRequest& request = batch_.payload->request;
    heads::Submission& submission = batch_.submission;
    submission.label = scope_.request_id();
    submission.micro_batch = request.micro_batch;
    submission.attempt = request.attempt;
    submission.session = request.session;
    submission.backward = request.backward;
    submission.explicit_commit = request.explicit_commit;
    submission.first_wins = request.first_wins;
    submission.refuse_non_finite = request.refuse_non_finite;
    submission.late_token_factors = request.late_token_factors;
    if (request.allow_held || request.late_token_factors || core_.options.deterministic) {
      submission.hold = [&batch = batch_] { return batch.Hold(/*anyway=*/false); };
      submission.hold_first = [&batch = batch_] { return batch.Hold(/*anyway=*/true); };
    }
    submission.hidden = {nullptr, request.row_count, request.hidden_size, request.data_type};
    submission.grad_hidden_scale = request.grad_hidden_scale;
  }

  absl::Status AwaitSteps() {
    if (!batch_.submission.backward) return absl::OkStatus();
    for (const heads::SubmittedTerm& term : batch_.submission.terms) {
      if (!term.step.has_value() || !term.head_epoch.has_value()) continue;
      HEADWATER_RETURN_IF_ERROR(term.head->AwaitStep({*term.head_epoch, *term.step}, scope_.wait_limits()));
    }
    return absl::OkStatus();
  }

  // Admits the tensors: rows in, gradient and per-token outputs out.
  absl::Status ReserveBytes() {
    const Limits& limits = core_.options.limits;
    const MicroBatchRequest& request = batch_.payload->request;
    int64_t row_bytes = 0;
    int64_t bytes = 0;  // that take memory of the server
    for (const auto& source : batch_.payload->sources) {
      row_bytes += source->bytes();
      bytes += source->bytes_to_reserve(batch_.copies_early());
    }
    HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", row_bytes, "max_micro_batch_bytes", limits.max_micro_batch_bytes));
    // Deterministic mode holds rows that others wait for even beyond the budget: another attempt finds its place in the end.
    if (!core_.options.deterministic && MustBeHeld(batch_.submission)) {
      HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", batch_.payload->bytes(), "max_held_bytes", limits.max_held_bytes));
    }

    // All per-token outputs travel in the summary, which is one message.
    constexpr int64_t kTermBytes = 512;
    int64_t output_rows = 0;
    for (const LossTermRequest& term : request.terms) output_rows += term.term.row_count;
    const int64_t output_bytes = output_rows * 4 * std::popcount(request.outputs);
    const int64_t summary_bytes = output_bytes + kTermBytes * static_cast<int64_t>(request.terms.size());
    HEADWATER_RETURN_IF_ERROR(
        CheckLimit("header.outputs", summary_bytes, "max_message_bytes", limits.max_message_bytes - kMessageOverheadBytes));

    bytes += output_bytes;
    if (batch_.grad_region.has_value()) {
      bytes += batch_.grad_region->staged_bytes();
    } else if (request.return_grad_hidden) {
      bytes += request.row_count * request.hidden_size * ElementBytes(request.grad_hidden_data_type);
    }
    HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", bytes, "max_in_flight_bytes", limits.max_in_flight_bytes));
    return core_.ReserveInFlight(batch_.client, bytes, "the micro-batch", &batch_.reservation);
  }

  absl::Status ClaimJoined() {
    for (const auto& source : batch_.payload->sources) {
      HEADWATER_ASSIGN_OR_RETURN(auto claim, source->Claim(core_.join));
      if (claim != nullptr) batch_.claims->push_back(std::move(claim));
    }
    if (!batch_.claims->empty()) batch_.submission.until_decided = batch_.claims;
    return absl::OkStatus();
  }

  // Gets memory for rows that come, and for the gradient.
  absl::Status PlaceRows() {
    const MicroBatchRequest& request = batch_.payload->request;
    std::vector<Transfer::Tensor> tensors;
    for (const auto& source : batch_.payload->sources) {
      HEADWATER_ASSIGN_OR_RETURN(auto tensor, source->Place(core_.rows));
      tensors.push_back(std::move(tensor));
    }
    batch_.transfer = std::make_shared<Transfer>(
        core_,
        Transfer::Options{request.row_count, static_cast<int64_t>(request.terms.size()), request.stripe_count, request.backward},
        std::move(tensors));
    return PlaceGrad();
  }

  absl::Status PlaceGrad() {
    const MicroBatchRequest& request = batch_.payload->request;
    if (!request.return_grad_hidden || request.row_count == 0) return absl::OkStatus();
    MutableRowsView& grad_hidden = batch_.submission.grad_hidden;
    grad_hidden = {nullptr, request.row_count, request.hidden_size, request.grad_hidden_data_type};
    if (batch_.grad_region.has_value()) return absl::OkStatus();
    const int64_t row_bytes = request.hidden_size * ElementBytes(request.grad_hidden_data_type);
    HEADWATER_ASSIGN_OR_RETURN(auto block, core_.rows.Allocate(request.row_count * row_bytes));
    grad_hidden.data = block->data();
    batch_.transfer->OpenGrad(request.row_count, row_bytes, block->data(), block);
    batch_.sends_grad = true;
    return absl::OkStatus();
  }

  AdmittedMicroBatch& batch_;
  ServerCore& core_;
  RpcScope& scope_;
};

}  // namespace

int64_t MicroBatchPayload::bytes() const {
  int64_t bytes = 0;
  for (const auto& source : sources) bytes += source->bytes();
  for (const LossTermRequest& term : request.terms) {
    bytes += TensorBytes(term.term);
    if (term.teacher.has_value() && term.teacher->joined.has_value()) {
      bytes += static_cast<int64_t>(term.teacher->joined->row_indices.size() * sizeof(int32_t));
    }
  }
  return bytes;
}

absl::Status AdmittedMicroBatch::StartCopies() {
  for (const auto& source : payload->sources) {
    HEADWATER_RETURN_IF_ERROR(source->StartCopy(core, submission.after, payload, &copies));
  }
  return absl::OkStatus();
}

absl::Status AdmittedMicroBatch::AwaitCopies() const {
  absl::Status status;
  for (const std::shared_future<absl::Status>& copy : copies) status.Update(copy.get());
  return status;
}

absl::StatusOr<std::shared_ptr<const void>> AdmittedMicroBatch::Hold(bool anyway) {
  const int64_t bytes = payload->bytes();
  if (anyway) {
    core.held.ReserveAnyway(bytes, &payload->held);
  } else if (!core.held.TryReserve(bytes, &payload->held)) {
    const int64_t available = core.held.available_bytes();
    const bool a_slot_would_do = !payload->request.late_token_factors && !core.options.deterministic;
    return MakeError(ErrorReason::kStagingFull,
                     absl::StrCat("the contribution would be held as ", bytes, " bytes of rows, and ", available, " of ",
                                  core.held.capacity_bytes(), " (max_held_bytes) are free; commit or discard others first, ",
                                  a_slot_would_do ? "create the head with more staging_slots, or raise " : "or raise ",
                                  "--max_held_bytes of the server"),
                     {{"limit", "max_held_bytes"},
                      {"requestedBytes", absl::StrCat(bytes)},
                      {"availableBytes", absl::StrCat(available)},
                      {kRetryAfterMsKey, "500"}});
  }
  if (copies.empty()) HEADWATER_RETURN_IF_ERROR(StartCopies());
  HEADWATER_RETURN_IF_ERROR(AwaitCopies());
  for (const auto& source : payload->sources) source->UseCopy();
  return std::shared_ptr<const void>(payload);
}

absl::Status AdmitMicroBatch(v1::MicroBatchHeader header, AdmittedMicroBatch& micro_batch) {
  return MicroBatchAdmission(micro_batch).Admit(std::move(header));
}

}  // namespace headwater::service
