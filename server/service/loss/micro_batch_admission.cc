// MicroBatchAdmission: from a header to a micro-batch whose heads, rows and memory are reserved.
#include <bit>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/heads/steps/submit.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/loss/micro_batch.h"
#include "server/service/request/field_check.h"
#include "server/service/request/loss_terms.h"

namespace headwater::service {
namespace {

using transport::RegionAccess;
using transport::RegionUse;

class MicroBatchAdmission {
 public:
  MicroBatchAdmission(const Caller& caller, const scheduler::WaitLimits& limits, AdmittedMicroBatch& micro_batch)
      : caller_(caller), limits_(limits), batch_(micro_batch), core_(micro_batch.core) {}

  absl::Status Admit(v1::MicroBatchHeader header) {
    batch_.times.header = observability::MonotonicNow();
    HEADWATER_ASSIGN_OR_RETURN(MicroBatchRequest& request = batch_.payload->request,
                               DecodeMicroBatchHeader(std::move(header), core_.options.limits));
    heads::Submission& submission = batch_.submission;
    batch_.head_name = request.terms.front().head.head.ToString();
    if (request.transfer.has_value()) {
      HEADWATER_ASSIGN_OR_RETURN(auto entry, core_.transfers.Announce(*request.transfer));
      batch_.entry.emplace(std::move(entry));
    }
    if (request.session.has_value()) {
      const heads::SessionId& session = *request.session;
      batch_.client = "session " + absl::BytesToHexString({reinterpret_cast<const char*>(session.data()), session.size()});
    }
    HEADWATER_ASSIGN_OR_RETURN(batch_.session_use, core_.UseSession(request.session));
    HEADWATER_RETURN_IF_ERROR(BuildTerms(caller_, core_.registry, &request, &submission));
    batch_.head_uses = UseHeads(submission);
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
      HEADWATER_RETURN_IF_ERROR(heads::Announce(submission, limits_));
    }
    return PlaceRows();
  }

 private:
  absl::StatusOr<RegionUse> FindRegion(const SharedRowsRequest& shared, int64_t bytes, RegionAccess access, DataType type,
                                       const std::string& field) const {
    return core_.regions.Find(*batch_.payload->request.session, shared.region_id, shared.offset_bytes, bytes, access,
                              ElementBytes(type), field);
  }

  // Where the rows come from, by the header.
  absl::Status FindRows() {
    const MicroBatchRequest& request = batch_.payload->request;
    HEADWATER_RETURN_IF_ERROR(AddSource(0, "hidden", 0, batch_.submission.hidden, request.hidden_rows, "header.hidden_rows"));
    batch_.path = PathOf(batch_.payload->sources.front()->region());
    for (size_t i = 0; i < request.terms.size(); ++i) {
      const LossTermRequest& term = request.terms[i];
      if (!term.teacher.has_value()) continue;
      HEADWATER_RETURN_IF_ERROR(AddSource(
          1 + static_cast<int32_t>(i),
          request.terms.size() == 1 ? "teacher_hidden" : absl::StrCat("teacher_hidden of terms[", i, "]"), term.term.row_start,
          batch_.submission.terms[i].term.teacher_hidden, term.teacher->rows, TermField(i) + ".teacher_hidden.rows"));
    }
    return absl::OkStatus();
  }

  // Adds the source of the rows of `view`; `field` names `shared`.
  absl::Status AddSource(int32_t digest_stream, std::string name, int64_t row_start, RowsView& view,
                         const std::optional<SharedRowsRequest>& shared, std::string field) {
    auto& sources = batch_.payload->sources;
    RowSource::Rows rows = {
        digest_stream, std::move(name), row_start, view.row_count, view.column_count * ElementBytes(view.data_type),
        &view,         std::move(field)};
    if (shared.has_value()) {
      HEADWATER_ASSIGN_OR_RETURN(
          RegionUse region, FindRegion(*shared, rows.row_count * rows.row_bytes, RegionAccess::kRead, view.data_type, rows.field));
      sources.push_back(MakeRegionRows(std::move(rows), std::move(region)));
    } else if (digest_stream > 0 && TeacherOf(rows).joined.has_value()) {
      sources.push_back(JoinedSource(std::move(rows)));
    } else {
      sources.push_back(MakeChunkRows(std::move(rows)));
    }
    return absl::OkStatus();
  }

  const TeacherRequest& TeacherOf(const RowSource::Rows& rows) const {
    return *batch_.payload->request.terms[static_cast<size_t>(rows.digest_stream - 1)].teacher;
  }

  std::unique_ptr<RowSource> JoinedSource(RowSource::Rows rows) const {
    const MicroBatchRequest& request = batch_.payload->request;
    const TeacherRequest& teacher = TeacherOf(rows);
    rows.field = TermField(static_cast<size_t>(rows.digest_stream - 1)) + ".joined_teacher";
    transport::JoinedSet set = {teacher.head.tenant, teacher.joined->join_key, teacher.joined->total_row_count,
                                rows.view->column_count, rows.view->data_type};
    // A repeat of this micro-batch is the same user of the rows, whatever its attempt.
    const HeadStepRequest& head = request.terms.front().head;
    std::string user = request.micro_batch.has_value()
                           ? absl::StrCat(head.head.ToString(), "/", head.epoch.has_value() ? heads::EpochToHex(*head.epoch) : "",
                                          "/", head.step.value_or(-1), "/", *request.micro_batch)
                           : "";
    return MakeJoinedRows(std::move(rows), std::move(set), teacher.joined->row_indices, std::move(user));
  }

  absl::Status FindGrad() {
    const MicroBatchRequest& request = batch_.payload->request;
    if (!request.grad_hidden_rows.has_value()) return absl::OkStatus();
    const std::string field = "header.grad_hidden_rows";
    const int64_t bytes = request.row_count * request.hidden_size * ElementBytes(request.grad_hidden_data_type);
    HEADWATER_ASSIGN_OR_RETURN(
        auto region, FindRegion(*request.grad_hidden_rows, bytes, RegionAccess::kWrite, request.grad_hidden_data_type, field));
    for (const auto& source : batch_.payload->sources) {
      if (source->region() == nullptr || !RegionUse::Overlap(*source->region(), region)) continue;
      return FieldError(ErrorReason::kInvalidField, field, "memory apart from the rows that are read", "memory that overlaps it");
    }
    batch_.grad_region = std::move(region);
    return absl::OkStatus();
  }

  // Everything of the submission but terms, rows and outputs.
  void FillSubmission() {
    const MicroBatchRequest& request = batch_.payload->request;
    heads::Submission& submission = batch_.submission;
    submission.label = batch_.request_id;
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
      HEADWATER_RETURN_IF_ERROR(term.head->AwaitStep({*term.head_epoch, *term.step}, limits_));
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

  // Claims the teacher rows that other processes send.
  absl::Status ClaimJoined() {
    auto claims = std::make_shared<std::vector<std::shared_ptr<transport::RowClaim>>>();
    for (const auto& source : batch_.payload->sources) HEADWATER_RETURN_IF_ERROR(source->Claim(core_.join, claims.get()));
    if (!claims->empty()) batch_.submission.until_decided = std::move(claims);
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

  const Caller& caller_;
  const scheduler::WaitLimits& limits_;
  AdmittedMicroBatch& batch_;
  ServerCore& core_;
};

}  // namespace

absl::Status AdmitMicroBatch(const Caller& caller, const scheduler::WaitLimits& limits, v1::MicroBatchHeader header,
                             AdmittedMicroBatch& micro_batch) {
  return MicroBatchAdmission(caller, limits, micro_batch).Admit(std::move(header));
}

}  // namespace headwater::service
