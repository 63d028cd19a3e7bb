// Weights, checkpoints and life of a head.
#include <string>
#include <utility>

#include "client/cpp/src/convert.h"
#include "client/cpp/src/head_handle.h"
#include "client/cpp/src/tensor_stream.h"
#include "headwater/client/head.h"

namespace headwater::client {

using internal::Deadline;
using internal::FromProto;
using internal::Repeat;
using internal::ToProto;
using Heads = v1::HeadService::Stub;

absl::StatusOr<HeadInfo> Head::UploadWeights(HeadTensor tensor, TensorView values, const CallOptions& options) {
  if (absl::Status status = internal::CheckElements("values", values); !status.ok()) return status;
  const Deadline deadline = handle_->connection->DeadlineOf(options);
  internal::Upload upload(handle_->connection, tensor, values);
  absl::StatusOr<v1::Head> head;
  const absl::Status status = handle_->connection->Retry(Repeat::kSafe, deadline, [&](grpc::ClientContext&) {
    head = upload.Send(name(), epoch(), std::nullopt, deadline);
    return head.status();
  });
  if (!status.ok()) return status;
  return handle_->Adopt(*head, deadline);
}

absl::StatusOr<HeadInfo> Head::LoadWeights(const std::string& path, const std::string& weight_tensor,
                                           const std::string& bias_tensor, const CallOptions& options) {
  v1::LoadWeightsRequest request;
  request.set_name(name());
  request.set_epoch(epoch());
  request.set_path(path);
  request.set_weight_tensor(weight_tensor);
  request.set_bias_tensor(bias_tensor);
  const Deadline deadline = handle_->connection->DeadlineOf(options);
  absl::StatusOr<v1::Head> head =
      handle_->connection->Call(handle_->connection->heads(), &Heads::LoadWeights, request, Repeat::kIfNothingWasDone, deadline);
  if (!head.ok()) return head.status();
  return handle_->Adopt(*head, deadline);
}

absl::StatusOr<TensorBuffer> Head::DownloadWeights(HeadTensor tensor, CallOptions options) {
  return DownloadWeights(tensor, spec().data_type, options);
}

absl::StatusOr<TensorBuffer> Head::DownloadWeights(HeadTensor tensor, DataType data_type, CallOptions options) {
  v1::DownloadWeightsRequest request;
  request.set_name(name());
  request.set_tensor(static_cast<v1::HeadTensor>(tensor));
  request.set_data_type(ToProto(data_type));
  internal::Connection& connection = *handle_->connection;
  // Frozen weights are the same at any epoch.
  internal::HeadUses trained = spec().trainable ? handle_->AtStep(std::nullopt) : internal::HeadUses();
  TensorBuffer buffer(data_type, internal::ShapeOf(spec(), tensor));
  const absl::Status status = connection.RetryOnSteps(trained, connection.DeadlineOf(options), [&](grpc::ClientContext& context) {
    if (!trained.empty()) request.set_epoch(trained[0].epoch);
    return internal::ReadTensor(connection, context, *connection.heads().DownloadWeights(&context, request), buffer);
  });
  if (!status.ok()) return status;
  return buffer;
}

absl::StatusOr<SaveResult> Head::Save(const std::string& checkpoint, bool overwrite, const CallOptions& options) {
  v1::SaveCheckpointRequest request;
  request.set_name(name());
  request.set_checkpoint(checkpoint);
  request.set_overwrite(overwrite);
  internal::Connection& connection = *handle_->connection;
  internal::HeadUses heads = handle_->AtStep(std::nullopt);
  v1::SaveCheckpointResponse response;
  const absl::Status status = connection.RetryOnSteps(
      heads, connection.DeadlineOf(options),
      [&](grpc::ClientContext& context) {
        request.set_epoch(heads[0].epoch);
        return connection.FromGrpc(connection.heads().SaveCheckpoint(&context, request, &response));
      },
      overwrite ? Repeat::kSafe : Repeat::kIfNothingWasDone);
  if (!status.ok()) return status;
  return SaveResult{response.checkpoint(), response.step(), response.total_bytes()};
}

absl::StatusOr<HeadInfo> Head::Restore(const std::string& checkpoint, const CallOptions& options) {
  v1::RestoreCheckpointRequest request;
  request.set_name(name());
  request.set_epoch(epoch());
  request.set_checkpoint(checkpoint);
  const Deadline deadline = handle_->connection->DeadlineOf(options);
  absl::StatusOr<v1::Head> head = handle_->connection->Call(handle_->connection->heads(), &Heads::RestoreCheckpoint, request,
                                                            Repeat::kIfNothingWasDone, deadline);
  if (!head.ok()) return head.status();
  return handle_->Adopt(*head, deadline);
}

absl::StatusOr<HeadInfo> Head::Info(const CallOptions& options) const {
  v1::GetHeadRequest request;
  request.set_name(name());
  absl::StatusOr<v1::Head> head =
      handle_->connection->Call(handle_->connection->heads(), &Heads::GetHead, request, Repeat::kSafe, options);
  if (!head.ok()) return head.status();
  return FromProto(*head);
}

absl::Status Head::Delete(bool force, const CallOptions& options) {
  v1::DeleteHeadRequest request;
  request.set_name(name());
  request.set_epoch(epoch());
  request.set_force(force);
  const absl::Status status =
      handle_->connection->Call(handle_->connection->heads(), &Heads::DeleteHead, request, Repeat::kIfNothingWasDone, options)
          .status();
  if (status.ok()) handle_->connection->replay_log().Forget(*handle_->state);  // nothing is to be repeated on it
  return status;
}

}  // namespace headwater::client
