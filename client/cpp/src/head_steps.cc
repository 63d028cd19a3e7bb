// Steps and gradients.
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/core/link/error.h"
#include "client/core/rows/tensor_exchanges.h"
#include "client/cpp/src/calls.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/head_handle.h"
#include "headwater/client/head.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client {

using internal::ToProto;

namespace {

// A call on one step.
template <typename Result, typename Response, typename Message>
absl::StatusOr<Result> CallOnStep(const internal::HeadHandle& handle, std::optional<int64_t> step, Message message,
                                  const CallOptions& options, internal::CallMemory memory = {}) {
  *message.mutable_head() = handle.At(step);
  HEADWATER_ASSIGN_OR_RETURN(auto response, internal::Run<Response>(*handle.core, std::move(message), options, std::move(memory)));
  return internal::Read<Result>(response);
}

bool IsEmpty(const ExpectedMicroBatches& expected) {
  const int64_t* const count = std::get_if<int64_t>(&expected);
  return count != nullptr ? *count == 0 : std::get<std::vector<int64_t>>(expected).empty();
}

}  // namespace

absl::StatusOr<SealResult> Head::Seal(int64_t step, const ExpectedMicroBatches& expected, const SealOptions& seal,
                                      const CallOptions& options) {
  v1::SealStepRequest request;
  *request.mutable_expected() = ToProto(expected);
  request.set_wait(seal.wait);
  auto result = CallOnStep<SealResult, v1::SealStepResponse>(*handle_, step, std::move(request), options);
  if (result.ok() && IsEmpty(expected)) handle_->SetEmptyStep(step);
  return result;
}

absl::StatusOr<AddGradientResult> Head::AddGradient(int64_t step, int64_t micro_batch, RowsView rows, int64_t row_start,
                                                    double factor, const CallOptions& options) {
  if (rows.data_type != DataType::kFloat32) {
    return internal::InvalidView(v1::ERROR_REASON_DATA_TYPE_MISMATCH, "rows", "float32", DataTypeName(rows.data_type));
  }
  HEADWATER_RETURN_IF_ERROR(internal::CheckRows("rows", rows));
  if (rows.memory != Memory::kHost) {
    return internal::InvalidView(v1::ERROR_REASON_INVALID_FIELD, "rows.memory", "host memory, from which gradients are read",
                                 "device memory");
  }
  // The wire carries no columns: the head's are meant.
  if (rows.hidden_size != spec().hidden_size) {
    return internal::InvalidView(v1::ERROR_REASON_SHAPE_MISMATCH, "rows", absl::StrCat(spec().hidden_size, " columns"),
                                 absl::StrCat(rows.hidden_size));
  }
  v1::AddGradientHeader header;
  header.set_micro_batch(micro_batch);
  header.set_row_start(row_start);
  header.set_row_count(rows.row_count);
  header.set_factor(factor);
  return CallOnStep<AddGradientResult, v1::AddGradientResponse>(*handle_, step, std::move(header), options, {.rows = rows});
}

absl::StatusOr<ApplyResult> Head::Apply(int64_t step, const ApplyOptions& apply, const CallOptions& options) {
  if (!apply.allow_empty && (apply.expected.has_value() ? IsEmpty(*apply.expected) : handle_->empty_step() == step)) {
    return internal::MakeLocalError(
        v1::ERROR_REASON_INVALID_COMBINATION, absl::StatusCode::kInvalidArgument,
        absl::StrCat("step ", step, " of ", name(),
                     " has no micro-batch: to apply it would decay the weights without a gradient. "
                     "Submit its micro-batches first, call DiscardGradient(), or set ApplyOptions::allow_empty"),
        {{"field", "allow_empty"}, {"step", absl::StrCat(step)}});
  }
  v1::ApplyOptimizerStepRequest request;
  if (apply.expected.has_value()) *request.mutable_expected() = ToProto(*apply.expected);
  WriteFields(apply, request);
  return CallOnStep<ApplyResult, v1::ApplyOptimizerStepResponse>(*handle_, step, std::move(request), options);
}

absl::StatusOr<DiscardGradientResult> Head::DiscardGradient(int64_t step, const CallOptions& options) {
  return CallOnStep<DiscardGradientResult, v1::DiscardGradientResponse>(*handle_, step, v1::DiscardGradientRequest(), options);
}

absl::StatusOr<GradientNormResult> Head::GradientNorm(int64_t step, double gradient_factor, const CallOptions& options) {
  v1::GetGradientNormRequest request;
  request.set_gradient_factor(gradient_factor);
  return CallOnStep<GradientNormResult, v1::GetGradientNormResponse>(*handle_, step, std::move(request), options);
}

absl::StatusOr<StepStates> Head::GetStep(const CallOptions& options) {
  return CallOnStep<StepStates, v1::GetStepResponse>(*handle_, std::nullopt, v1::GetStepRequest(), options);
}

}  // namespace headwater::client
