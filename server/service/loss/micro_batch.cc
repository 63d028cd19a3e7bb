#include "server/service/loss/micro_batch.h"

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "proto/headwater/v1/term_codec.h"
#include "server/service/request/field_check.h"

namespace headwater::service {

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

}  // namespace headwater::service
