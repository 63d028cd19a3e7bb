// Steps and gradients.
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/core/rows/tensor_exchanges.h"
#include "client/cpp/src/calls.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/head_handle.h"
#include "headwater/client/head.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client {

using internal::FromProto;
using internal::ToProto;

namespace {

// A call on one step.
template <typename Response, typename Message>
absl::StatusOr<Response> CallOnStep(const internal::HeadHandle& handle, std::optional<int64_t> step, Message message,
                                    const CallOptions& options, internal::CallMemory memory = {}) {
  *message.mutable_head() = handle.At(step);
  return internal::Run<Response>(*handle.core, std::move(message), options, std::move(memory));
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
  HEADWATER_ASSIGN_OR_RETURN(auto response, CallOnStep<v1::SealStepResponse>(*handle_, step, std::move(request), options));
  if (IsEmpty(expected)) handle_->SetEmptyStep(step);
  return SealResult{FromProto(response.totals()), response.gradient_norm_squared(), response.non_finite_count(),
                    response.replayed()};
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
  HEADWATER_ASSIGN_OR_RETURN(auto response,
                             CallOnStep<v1::AddGradientResponse>(*handle_, step, std::move(header), options, {.rows = rows}));
  return AddGradientResult{response.replayed()};
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
  request.set_learning_rate(apply.learning_rate);
  request.set_gradient_factor(apply.gradient_factor);
  if (apply.max_grad_norm.has_value()) request.set_max_grad_norm(*apply.max_grad_norm);
  request.set_other_grad_norm_squared(apply.other_grad_norm_squared);
  if (apply.weight_decay.has_value()) request.set_weight_decay(*apply.weight_decay);
  if (apply.beta1.has_value()) request.set_beta1(*apply.beta1);
  if (apply.beta2.has_value()) request.set_beta2(*apply.beta2);
  if (apply.epsilon.has_value()) request.set_epsilon(*apply.epsilon);
  if (apply.momentum.has_value()) request.set_momentum(*apply.momentum);
  HEADWATER_ASSIGN_OR_RETURN(auto response,
                             CallOnStep<v1::ApplyOptimizerStepResponse>(*handle_, step, std::move(request), options));
  return ApplyResult{.open_step = response.open_step(),
                     .weight_version = response.weight_version(),
                     .global_grad_norm = response.global_grad_norm(),
                     .gradient_norm_squared = response.gradient_norm_squared(),
                     .clip_factor = response.clip_factor(),
                     .totals = FromProto(response.totals()),
                     .replayed = response.replayed()};
}

absl::StatusOr<DiscardGradientResult> Head::DiscardGradient(int64_t step, const CallOptions& options) {
  HEADWATER_ASSIGN_OR_RETURN(auto response,
                             CallOnStep<v1::DiscardGradientResponse>(*handle_, step, v1::DiscardGradientRequest(), options));
  return DiscardGradientResult{response.open_step(), response.replayed()};
}

absl::StatusOr<GradientNormResult> Head::GradientNorm(int64_t step, double gradient_factor, const CallOptions& options) {
  v1::GetGradientNormRequest request;
  request.set_gradient_factor(gradient_factor);
  HEADWATER_ASSIGN_OR_RETURN(auto response, CallOnStep<v1::GetGradientNormResponse>(*handle_, step, std::move(request), options));
  return GradientNormResult{response.gradient_norm_squared(), response.non_finite_count()};
}

absl::StatusOr<StepStates> Head::GetStep(const CallOptions& options) {
  HEADWATER_ASSIGN_OR_RETURN(auto response, CallOnStep<v1::GetStepResponse>(*handle_, std::nullopt, v1::GetStepRequest(), options));
  StepStates states;
  states.open = FromProto(response.open());
  if (response.has_last_closed()) states.last_closed = FromProto(response.last_closed());
  return states;
}

}  // namespace headwater::client
