// Weights, checkpoints and life of a head.
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/link/error.h"
#include "client/cpp/src/calls.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/head_handle.h"
#include "headwater/client/head.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client {

using internal::FromProto;
using internal::HeadHandle;
using internal::Run;
using internal::ToProto;

namespace {

v1::UploadWeightsHeader MakeHeader(const HeadHandle& handle, HeadTensor tensor, const TensorView& values) {
  v1::UploadWeightsHeader header;
  header.set_name(handle.name);
  header.set_epoch(handle.epoch());
  header.set_tensor(static_cast<v1::HeadTensor>(tensor));
  header.set_data_type(ToProto(values.data_type));
  return header;
}

// A call that gives the head another epoch, which the handle takes over.
template <typename Message>
absl::StatusOr<HeadInfo> RunAndAdopt(HeadHandle& handle, Message message, const CallOptions& options,
                                     internal::CallMemory memory = {}) {
  HEADWATER_ASSIGN_OR_RETURN(auto head, Run<v1::Head>(*handle.core, std::move(message), options, std::move(memory)));
  return handle.Adopt(head);
}

template <typename Message>
absl::StatusOr<TensorBuffer> Download(HeadHandle& handle, Message message, DataType data_type, HeadTensor tensor,
                                      const CallOptions& options) {
  absl::StatusOr<TensorBuffer> buffer = internal::MakeBuffer(data_type, internal::ShapeOf(handle.spec, tensor));
  if (!buffer.ok()) return buffer;
  HEADWATER_RETURN_IF_ERROR(
      Run<v1::DownloadTensorHeader>(*handle.core, std::move(message), options, {.result = internal::RowsOf(*buffer)}).status());
  return buffer;
}

}  // namespace

absl::StatusOr<HeadInfo> Head::UploadWeights(HeadTensor tensor, TensorView values, const CallOptions& options) {
  HEADWATER_RETURN_IF_ERROR(internal::CheckElements("values", values));
  return RunAndAdopt(*handle_, MakeHeader(*handle_, tensor, values), options, {.rows = internal::RowsOf(values)});
}

absl::StatusOr<HeadInfo> Head::ReplaceWeights(int64_t step, TensorView weight, std::optional<TensorView> bias,
                                              const CallOptions& options) {
  if (bias.has_value() != spec().has_bias) {
    return internal::MakeLocalError(v1::ERROR_REASON_INVALID_COMBINATION, absl::StatusCode::kInvalidArgument,
                                    absl::StrCat("bias: the head has ", spec().has_bias ? "one, none" : "none, one", " was given"),
                                    {{"field", "bias"}});
  }
  HEADWATER_RETURN_IF_ERROR(internal::CheckElements("weight", weight));
  HEADWATER_RETURN_IF_ERROR(internal::CheckElements("bias", bias.value_or(TensorView())));
  const internal::Deadline deadline = DeadlineOf(*handle_->core, options);
  const auto send = [&](HeadTensor tensor, const TensorView& values) {
    v1::UploadWeightsHeader header = MakeHeader(*handle_, tensor, values);
    header.set_closes_step(step);
    return Run<v1::Head>(*handle_->core, std::move(header), deadline, {.rows = internal::RowsOf(values)});
  };
  for (int round = 1;; ++round) {
    absl::StatusOr<v1::Head> head = send(HeadTensor::kWeight, weight);
    if (head.ok() && bias.has_value()) head = send(HeadTensor::kBias, *bias);
    if (!head.ok()) return head.status();
    if (head->open_step() != step) return FromProto(*head);
    // Where the weight has waited for the bias for a minute, it may have given way to another head's upload.
    if (round >= handle_->core->options().retry.max_attempts) {
      return internal::MakeLocalError(v1::ERROR_REASON_IN_FLIGHT_BYTES_EXCEEDED, absl::StatusCode::kResourceExhausted,
                                      "the server needed the weight's room before the bias came: both have to be sent again");
    }
  }
}

absl::StatusOr<HeadInfo> Head::LoadWeights(const std::string& path, const std::string& weight_tensor,
                                           const std::string& bias_tensor, const CallOptions& options) {
  v1::LoadWeightsRequest request;
  request.set_name(name());
  request.set_epoch(epoch());
  request.set_path(path);
  request.set_weight_tensor(weight_tensor);
  request.set_bias_tensor(bias_tensor);
  return RunAndAdopt(*handle_, std::move(request), options);
}

absl::StatusOr<TensorBuffer> Head::DownloadWeights(HeadTensor tensor, CallOptions options) {
  return DownloadWeights(tensor, spec().data_type, options);
}

absl::StatusOr<TensorBuffer> Head::DownloadWeights(HeadTensor tensor, DataType data_type, CallOptions options) {
  v1::DownloadWeightsRequest request;
  request.set_name(name());
  request.set_tensor(static_cast<v1::HeadTensor>(tensor));
  request.set_data_type(ToProto(data_type));
  if (spec().trainable) request.set_epoch(epoch());  // frozen weights are the same at any epoch
  return Download(*handle_, std::move(request), data_type, tensor, options);
}

absl::StatusOr<TensorBuffer> Head::Gradient(int64_t step, HeadTensor tensor, double gradient_factor, const CallOptions& options) {
  v1::DownloadGradientRequest request;
  *request.mutable_head() = handle_->At(step);
  request.set_tensor(static_cast<v1::HeadTensor>(tensor));
  request.set_gradient_factor(gradient_factor);
  return Download(*handle_, std::move(request), DataType::kFloat32, tensor, options);
}

absl::StatusOr<SaveResult> Head::Save(const std::string& checkpoint, bool overwrite, const CallOptions& options) {
  v1::SaveCheckpointRequest request;
  request.set_name(name());
  request.set_epoch(epoch());
  request.set_checkpoint(checkpoint);
  request.set_overwrite(overwrite);
  HEADWATER_ASSIGN_OR_RETURN(auto response, Run<v1::SaveCheckpointResponse>(*handle_->core, std::move(request), options));
  return internal::Read<SaveResult>(response);
}

absl::StatusOr<HeadInfo> Head::Restore(const std::string& checkpoint, const CallOptions& options) {
  v1::RestoreCheckpointRequest request;
  request.set_name(name());
  request.set_epoch(epoch());
  request.set_checkpoint(checkpoint);
  return RunAndAdopt(*handle_, std::move(request), options);
}

absl::StatusOr<HeadInfo> Head::Take(bool only_if_current, const CallOptions& options) {
  v1::TakeHeadRequest request;
  request.set_name(name());
  if (only_if_current) request.set_epoch(epoch());
  return RunAndAdopt(*handle_, std::move(request), options);
}

absl::StatusOr<HeadInfo> Head::Info(const CallOptions& options) const {
  v1::GetHeadRequest request;
  request.set_name(name());
  HEADWATER_ASSIGN_OR_RETURN(auto head, Run<v1::Head>(*handle_->core, std::move(request), options));
  return FromProto(head);
}

absl::Status Head::Delete(bool force, const CallOptions& options) {
  v1::DeleteHeadRequest request;
  request.set_name(name());
  request.set_epoch(epoch());
  request.set_force(force);
  return Run<v1::DeleteHeadResponse>(*handle_->core, std::move(request), options).status();
}

}  // namespace headwater::client
