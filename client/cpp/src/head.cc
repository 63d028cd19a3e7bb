#include "headwater/client/head.h"

#include <utility>
#include <vector>

#include "client/cpp/src/connection.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/head_handle.h"
#include "client/cpp/src/loss_call.h"
#include "client/cpp/src/tensor_stream.h"

namespace headwater::client {

using internal::FromProto;
using internal::ToProto;
using Heads = v1::HeadService::Stub;

namespace {

void AddOutputs(const TokenOutputs& outputs, v1::MicroBatchHeader& header) {
  if (outputs.loss) header.add_outputs(v1::TOKEN_OUTPUT_LOSS);
  if (outputs.lse) header.add_outputs(v1::TOKEN_OUTPUT_LSE);
  if (outputs.target_log_probability) header.add_outputs(v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY);
  if (outputs.entropy) header.add_outputs(v1::TOKEN_OUTPUT_ENTROPY);
  if (outputs.argmax) header.add_outputs(v1::TOKEN_OUTPUT_ARGMAX);
}

// Header and one term, all but the loss itself. The views' types and sizes go into the header as they are: the server is the
// one that knows what fits.
internal::LossInput MakeInput(const internal::HeadHandle& handle, const RowsView& hidden, absl::Span<const int32_t> targets,
                              const MicroBatchOptions& options) {
  internal::LossInput input;
  input.hidden = hidden;
  input.grad_hidden_data_type = options.grad_hidden_data_type.value_or(hidden.data_type);
  input.want_grad_hidden = options.return_grad_hidden.value_or(!options.forward_only);
  input.grad_hidden = options.grad_hidden;

  v1::MicroBatchHeader& header = input.header;
  if (options.micro_batch.has_value()) header.set_micro_batch(*options.micro_batch);
  header.set_compute_mode(options.forward_only ? v1::COMPUTE_MODE_FORWARD_ONLY : v1::COMPUTE_MODE_FORWARD_BACKWARD);
  header.set_row_count(hidden.row_count);
  header.set_hidden_size(hidden.hidden_size);
  header.set_data_type(ToProto(hidden.data_type));
  header.set_commit_mode(static_cast<v1::CommitMode>(options.commit));
  header.set_on_mismatch(static_cast<v1::OnMismatch>(options.on_mismatch));
  header.set_non_finite_policy(static_cast<v1::NonFinitePolicy>(options.non_finite_policy));
  AddOutputs(options.outputs, header);
  header.set_return_grad_hidden(input.want_grad_hidden);
  if (options.grad_hidden_data_type.has_value()) header.set_grad_hidden_data_type(ToProto(*options.grad_hidden_data_type));
  if (options.grad_hidden_scale != 1.0) header.set_grad_hidden_scale(options.grad_hidden_scale);

  v1::LossTerm* term = header.add_terms();
  *term->mutable_head() = options.step.has_value() ? handle.AtStep(*options.step) : handle.AtEpoch();
  term->set_ignore_index(options.ignore_index);
  term->set_loss_scale(options.loss_scale);
  if (!options.token_weights.empty()) *term->mutable_token_weights() = ToProto(options.token_weights);
  if (options.expected_weight_version.has_value()) term->set_expected_weight_version(*options.expected_weight_version);
  if (!targets.empty()) *term->mutable_targets() = ToProto(targets);
  return input;
}

std::vector<int64_t> ShapeOf(const HeadSpec& spec, HeadTensor tensor) {
  if (tensor == HeadTensor::kBias) return {spec.vocab_size};
  return {spec.vocab_size, spec.hidden_size};
}

}  // namespace

Head::Head(std::shared_ptr<internal::HeadHandle> handle) : handle_(std::move(handle)) {}

const std::string& Head::name() const { return handle_->name; }
const HeadSpec& Head::spec() const { return handle_->spec; }
std::string Head::epoch() const { return handle_->epoch(); }

Future<LossResult> Head::CrossEntropy(RowsView hidden, absl::Span<const int32_t> targets, const CrossEntropyOptions& loss,
                                      const MicroBatchOptions& micro_batch, const CallOptions& options) {
  internal::LossInput input = MakeInput(*handle_, hidden, targets, micro_batch);
  v1::LossTerm& term = *input.header.mutable_terms(0);
  // Required for cross entropy, also where there are no rows.
  if (targets.empty()) *term.mutable_targets() = ToProto(targets);
  *term.mutable_cross_entropy() = ToProto(loss);
  return internal::StartLossCall(handle_->connection, std::move(input), options);
}

Future<LossResult> Head::Jsd(RowsView hidden, const Head& teacher, RowsView teacher_hidden, absl::Span<const int32_t> targets,
                             const JsdOptions& loss, const MicroBatchOptions& micro_batch, const CallOptions& options) {
  internal::LossInput input = MakeInput(*handle_, hidden, targets, micro_batch);
  input.teacher_hidden = teacher_hidden;
  v1::LossTerm& term = *input.header.mutable_terms(0);
  *term.mutable_jensen_shannon() = ToProto(loss);
  v1::TeacherHidden* source = term.mutable_teacher_hidden();
  source->set_head(teacher.name());
  source->set_head_epoch(teacher.epoch());
  source->set_data_type(ToProto(teacher_hidden.data_type));
  if (loss.expected_teacher_weight_version.has_value()) {
    source->set_expected_weight_version(*loss.expected_teacher_weight_version);
  }
  return internal::StartLossCall(handle_->connection, std::move(input), options);
}

Future<CommitResult> Head::Commit(int64_t step, int64_t micro_batch, double factor, const CallOptions& options) {
  v1::CommitMicroBatchRequest request;
  *request.add_heads() = handle_->AtStep(step);
  request.set_micro_batch(micro_batch);
  request.set_factor(factor);
  return internal::CallAsync<CommitResult, v1::CommitMicroBatchRequest, v1::CommitMicroBatchResponse>(
      handle_->connection, std::move(request), options,
      [](internal::Connection& connection, auto... arguments) {
        connection.loss().async()->CommitMicroBatch(std::move(arguments)...);
      },
      [](const v1::CommitMicroBatchResponse& response) { return CommitResult{response.replayed()}; });
}

Future<DiscardResult> Head::Discard(int64_t step, int64_t micro_batch, const CallOptions& options) {
  v1::DiscardMicroBatchRequest request;
  *request.add_heads() = handle_->AtStep(step);
  request.set_micro_batch(micro_batch);
  return internal::CallAsync<DiscardResult, v1::DiscardMicroBatchRequest, v1::DiscardMicroBatchResponse>(
      handle_->connection, std::move(request), options,
      [](internal::Connection& connection, auto... arguments) {
        connection.loss().async()->DiscardMicroBatch(std::move(arguments)...);
      },
      [](const v1::DiscardMicroBatchResponse& response) { return DiscardResult{response.dropped()}; });
}

absl::StatusOr<SealResult> Head::Seal(int64_t step, const ExpectedMicroBatches& expected, const CallOptions& options) {
  v1::SealStepRequest request;
  *request.mutable_head() = handle_->AtStep(step);
  *request.mutable_expected() = ToProto(expected);
  absl::StatusOr<v1::SealStepResponse> response =
      handle_->connection->Call(handle_->connection->heads(), &Heads::SealStep, request, options);
  if (!response.ok()) return response.status();
  return SealResult{FromProto(response->totals()), response->gradient_norm_squared(), response->non_finite_count(),
                    response->replayed()};
}

absl::StatusOr<ApplyResult> Head::Apply(int64_t step, const ApplyOptions& apply, const CallOptions& options) {
  v1::ApplyOptimizerStepRequest request;
  *request.mutable_head() = handle_->AtStep(step);
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
  absl::StatusOr<v1::ApplyOptimizerStepResponse> response =
      handle_->connection->Call(handle_->connection->heads(), &Heads::ApplyOptimizerStep, request, options);
  if (!response.ok()) return response.status();
  return ApplyResult{.open_step = response->open_step(),
                     .weight_version = response->weight_version(),
                     .global_grad_norm = response->global_grad_norm(),
                     .gradient_norm_squared = response->gradient_norm_squared(),
                     .clip_factor = response->clip_factor(),
                     .totals = FromProto(response->totals()),
                     .replayed = response->replayed()};
}

absl::StatusOr<DiscardGradientResult> Head::DiscardGradient(int64_t step, const CallOptions& options) {
  v1::DiscardGradientRequest request;
  *request.mutable_head() = handle_->AtStep(step);
  absl::StatusOr<v1::DiscardGradientResponse> response =
      handle_->connection->Call(handle_->connection->heads(), &Heads::DiscardGradient, request, options);
  if (!response.ok()) return response.status();
  return DiscardGradientResult{response->open_step(), response->replayed()};
}

absl::StatusOr<TensorBuffer> Head::Gradient(int64_t step, HeadTensor tensor, double gradient_factor, const CallOptions& options) {
  v1::DownloadGradientRequest request;
  *request.mutable_head() = handle_->AtStep(step);
  request.set_tensor(static_cast<v1::HeadTensor>(tensor));
  request.set_gradient_factor(gradient_factor);
  return internal::DownloadTensor(
      *handle_->connection,
      [&](grpc::ClientContext* context) { return handle_->connection->heads().DownloadGradient(context, request); },
      DataType::kFloat32, ShapeOf(handle_->spec, tensor), options);
}

absl::StatusOr<GradientNormResult> Head::GradientNorm(int64_t step, double gradient_factor, const CallOptions& options) {
  v1::GetGradientNormRequest request;
  *request.mutable_head() = handle_->AtStep(step);
  request.set_gradient_factor(gradient_factor);
  absl::StatusOr<v1::GetGradientNormResponse> response =
      handle_->connection->Call(handle_->connection->heads(), &Heads::GetGradientNorm, request, options);
  if (!response.ok()) return response.status();
  return GradientNormResult{response->gradient_norm_squared(), response->non_finite_count()};
}

absl::StatusOr<StepStates> Head::GetStep(const CallOptions& options) {
  v1::GetStepRequest request;
  *request.mutable_head() = handle_->AtEpoch();
  absl::StatusOr<v1::GetStepResponse> response =
      handle_->connection->Call(handle_->connection->heads(), &Heads::GetStep, request, options);
  if (!response.ok()) return response.status();
  StepStates states;
  states.open = FromProto(response->open());
  if (response->has_last_closed()) states.last_closed = FromProto(response->last_closed());
  return states;
}

absl::StatusOr<HeadInfo> Head::UploadWeights(HeadTensor tensor, TensorView values, const CallOptions& options) {
  v1::UploadWeightsHeader header;
  header.set_name(handle_->name);
  header.set_epoch(handle_->epoch());
  header.set_tensor(static_cast<v1::HeadTensor>(tensor));
  header.set_data_type(ToProto(values.data_type));
  absl::StatusOr<v1::Head> head = internal::UploadTensor(handle_->connection, std::move(header), values, options);
  if (!head.ok()) return head.status();
  return handle_->Adopt(*head);
}

absl::StatusOr<HeadInfo> Head::LoadWeights(const std::string& path, const std::string& weight_tensor,
                                           const std::string& bias_tensor, const CallOptions& options) {
  v1::LoadWeightsRequest request;
  request.set_name(handle_->name);
  request.set_epoch(handle_->epoch());
  request.set_path(path);
  request.set_weight_tensor(weight_tensor);
  request.set_bias_tensor(bias_tensor);
  absl::StatusOr<v1::Head> head = handle_->connection->Call(handle_->connection->heads(), &Heads::LoadWeights, request, options);
  if (!head.ok()) return head.status();
  return handle_->Adopt(*head);
}

absl::StatusOr<TensorBuffer> Head::DownloadWeights(HeadTensor tensor, CallOptions options) {
  return DownloadWeights(tensor, handle_->spec.data_type, options);
}

absl::StatusOr<TensorBuffer> Head::DownloadWeights(HeadTensor tensor, DataType data_type, CallOptions options) {
  v1::DownloadWeightsRequest request;
  request.set_name(handle_->name);
  request.set_tensor(static_cast<v1::HeadTensor>(tensor));
  request.set_data_type(ToProto(data_type));
  return internal::DownloadTensor(
      *handle_->connection,
      [&](grpc::ClientContext* context) { return handle_->connection->heads().DownloadWeights(context, request); }, data_type,
      ShapeOf(handle_->spec, tensor), options);
}

absl::StatusOr<SaveResult> Head::Save(const std::string& checkpoint, bool overwrite, const CallOptions& options) {
  v1::SaveCheckpointRequest request;
  request.set_name(handle_->name);
  request.set_epoch(handle_->epoch());
  request.set_checkpoint(checkpoint);
  request.set_overwrite(overwrite);
  absl::StatusOr<v1::SaveCheckpointResponse> response =
      handle_->connection->Call(handle_->connection->heads(), &Heads::SaveCheckpoint, request, options);
  if (!response.ok()) return response.status();
  return SaveResult{response->checkpoint(), response->step(), response->total_bytes()};
}

absl::StatusOr<HeadInfo> Head::Restore(const std::string& checkpoint, const CallOptions& options) {
  v1::RestoreCheckpointRequest request;
  request.set_name(handle_->name);
  request.set_epoch(handle_->epoch());
  request.set_checkpoint(checkpoint);
  absl::StatusOr<v1::Head> head =
      handle_->connection->Call(handle_->connection->heads(), &Heads::RestoreCheckpoint, request, options);
  if (!head.ok()) return head.status();
  return handle_->Adopt(*head);
}

absl::StatusOr<HeadInfo> Head::Info(const CallOptions& options) const {
  v1::GetHeadRequest request;
  request.set_name(handle_->name);
  absl::StatusOr<v1::Head> head = handle_->connection->Call(handle_->connection->heads(), &Heads::GetHead, request, options);
  if (!head.ok()) return head.status();
  return FromProto(*head);
}

absl::Status Head::Delete(bool force, const CallOptions& options) {
  v1::DeleteHeadRequest request;
  request.set_name(handle_->name);
  request.set_epoch(handle_->epoch());
  request.set_force(force);
  return handle_->connection->Call(handle_->connection->heads(), &Heads::DeleteHead, request, options).status();
}

}  // namespace headwater::client
