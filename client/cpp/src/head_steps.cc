// Steps and gradients.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/head_handle.h"
#include "client/cpp/src/tensor_stream.h"
#include "headwater/client/head.h"

namespace headwater::client {

using internal::Connection;
using internal::Deadline;
using internal::FromProto;
using internal::HeadUses;
using internal::LogEntry;
using internal::Repetition;
using internal::ReplayLog;
using internal::ToProto;
using internal::Wait;
using Heads = v1::HeadService::Stub;

namespace {

// A unary call on one step. on_success(response, heads) runs before anybody can see that the call has ended, and puts it into the
// log.
template <typename Request, typename Response, typename OnSuccess>
absl::StatusOr<Response> CallOnStep(const internal::HeadHandle& handle, std::optional<int64_t> step,
                                    grpc::Status (Heads::*method)(grpc::ClientContext*, const Request&, Response*), Request request,
                                    const CallOptions& options, OnSuccess on_success) {
  Connection& connection = *handle.connection;
  HeadUses heads = handle.AtStep(step);
  Response response;
  const absl::Status status = connection.RetryOnSteps(heads, connection.DeadlineOf(options), [&](grpc::ClientContext& context) {
    *request.mutable_head() = heads[0].ToHeadStep();
    absl::Status result = connection.FromGrpc((connection.heads().*method)(&context, request, &response));
    if (result.ok()) on_success(response, heads);
    return result;
  });
  if (!status.ok()) return status;
  return response;
}

// The same for calls that leave nothing to repeat.
template <typename Request, typename Response>
absl::StatusOr<Response> CallOnStep(const internal::HeadHandle& handle, std::optional<int64_t> step,
                                    grpc::Status (Heads::*method)(grpc::ClientContext*, const Request&, Response*), Request request,
                                    const CallOptions& options) {
  return CallOnStep(handle, step, method, std::move(request), options, [](const Response&, const HeadUses&) {});
}

// A gradient of the caller's own on its way.
absl::StatusOr<v1::AddGradientResponse> SendGradient(Connection& connection, grpc::ClientContext& context,
                                                     const v1::AddGradientHeader& header, const char* bytes, int64_t byte_count) {
  v1::AddGradientResponse response;
  const auto writer = connection.heads().AddGradient(&context, &response);
  v1::AddGradientRequest request;
  *request.mutable_header() = header;
  bool open = writer->Write(request);
  for (int64_t offset = 0; open && offset < byte_count;) {
    const int64_t count = std::min(connection.options().chunk_bytes, byte_count - offset);
    request.mutable_chunk()->set_offset_bytes(offset);
    request.mutable_chunk()->set_data(bytes + offset, static_cast<size_t>(count));
    offset += count;
    open = writer->Write(request);  // not: the server has answered, or the connection broke; Finish() tells
  }
  writer->WritesDone();
  if (absl::Status status = connection.FromGrpc(writer->Finish()); !status.ok()) return status;
  return response;
}

void LogGradient(ReplayLog& log, const HeadUses& heads, const v1::AddGradientHeader& header, const char* bytes,
                 int64_t byte_count) {
  LogEntry entry;
  entry.heads = heads;
  entry.micro_batch = header.micro_batch();
  entry.bytes = byte_count + static_cast<int64_t>(header.ByteSizeLong());
  entry.repeat = std::make_shared<Repetition>([header, copy = std::string(bytes, static_cast<size_t>(byte_count))](
                                                  Connection& target, const HeadUses& uses, const Wait& wait) {
    v1::AddGradientHeader fresh = header;
    *fresh.mutable_head() = uses[0].ToHeadStep();
    return target.Retry(internal::Repeat::kSafe, wait, [&](grpc::ClientContext& context) {
      return SendGradient(target, context, fresh, copy.data(), static_cast<int64_t>(copy.size())).status();
    });
  });
  log.Add(std::move(entry));
}

void LogSeal(ReplayLog& log, const HeadUses& heads, const v1::SealStepRequest& request) {
  LogEntry entry;
  entry.heads = heads;
  entry.bytes = static_cast<int64_t>(request.ByteSizeLong());
  entry.repeat = std::make_shared<Repetition>([request](Connection& target, const HeadUses& uses, const Wait& wait) {
    v1::SealStepRequest fresh = request;
    *fresh.mutable_head() = uses[0].ToHeadStep();
    // Other trainers repeat their part at the same time.
    fresh.set_wait(true);
    return target.Call(target.heads(), &Heads::SealStep, fresh, internal::Repeat::kSafe, wait).status();
  });
  log.Add(std::move(entry));
}

void LogApply(ReplayLog& log, const HeadUses& heads, const v1::ApplyOptimizerStepRequest& request) {
  LogEntry entry;
  entry.heads = heads;
  entry.closes = true;
  entry.bytes = static_cast<int64_t>(request.ByteSizeLong());
  entry.repeat = std::make_shared<Repetition>([request](Connection& target, const HeadUses& uses, const Wait& wait) {
    v1::ApplyOptimizerStepRequest fresh = request;
    *fresh.mutable_head() = uses[0].ToHeadStep();
    if (fresh.has_expected()) {
      // Other trainers repeat their part at the same time.
      v1::SealStepRequest seal;
      *seal.mutable_head() = fresh.head();
      *seal.mutable_expected() = fresh.expected();
      seal.set_wait(true);
      absl::Status sealed = target.Call(target.heads(), &Heads::SealStep, seal, internal::Repeat::kSafe, wait).status();
      if (!sealed.ok()) return sealed;
    }
    return target.Call(target.heads(), &Heads::ApplyOptimizerStep, fresh, internal::Repeat::kSafe, wait).status();
  });
  log.Add(std::move(entry));
}

void LogDiscardGradient(ReplayLog& log, const HeadUses& heads) {
  LogEntry entry;
  entry.heads = heads;
  entry.closes = true;
  entry.repeat = std::make_shared<Repetition>([](Connection& target, const HeadUses& uses, const Wait& wait) {
    v1::DiscardGradientRequest request;
    *request.mutable_head() = uses[0].ToHeadStep();
    return target.Call(target.heads(), &Heads::DiscardGradient, request, internal::Repeat::kSafe, wait).status();
  });
  log.Add(std::move(entry));
}

void LogReplace(ReplayLog& log, const HeadUses& heads, const TensorView& weight, const std::optional<TensorView>& bias) {
  struct Copy {
    HeadTensor tensor;
    TensorView view;
    std::string bytes;
  };
  auto copies = std::make_shared<std::vector<Copy>>();
  const auto take = [&copies](HeadTensor tensor, const TensorView& view) {
    copies->push_back({tensor, view, std::string(static_cast<const char*>(view.data), static_cast<size_t>(view.bytes()))});
  };
  take(HeadTensor::kWeight, weight);
  if (bias.has_value()) take(HeadTensor::kBias, *bias);
  for (Copy& copy : *copies) copy.view.data = copy.bytes.data();
  LogEntry entry;
  entry.heads = heads;
  entry.closes = true;
  entry.bytes = weight.bytes() + (bias.has_value() ? bias->bytes() : 0);
  entry.repeat = std::make_shared<Repetition>([copies](Connection& target, const HeadUses& uses, const Wait& wait) {
    // Not kept beyond this call: the connection is the recovery's.
    const std::shared_ptr<Connection> borrowed(std::shared_ptr<Connection>(), &target);
    absl::Status status;
    for (const Copy& copy : *copies) {
      internal::Upload upload(borrowed, copy.tensor, copy.view);
      status = target.Retry(internal::Repeat::kSafe, wait, [&](grpc::ClientContext&) {
        return upload.Send(uses[0].state->name, uses[0].epoch, uses[0].step, wait).status();
      });
      if (!status.ok()) break;
    }
    return status;
  });
  log.Add(std::move(entry));
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
  absl::StatusOr<v1::SealStepResponse> response =
      CallOnStep(*handle_, step, &Heads::SealStep, request, options, [&](const v1::SealStepResponse&, const HeadUses& heads) {
        ReplayLog& log = handle_->connection->replay_log();
        log.StepIsOpen(handle_->state, step);
        if (log.enabled()) LogSeal(log, heads, request);
      });
  if (!response.ok()) return response.status();
  if (IsEmpty(expected)) handle_->state->SetEmptyStep(step);
  return SealResult{FromProto(response->totals()), response->gradient_norm_squared(), response->non_finite_count(),
                    response->replayed()};
}

absl::StatusOr<AddGradientResult> Head::AddGradient(int64_t step, int64_t micro_batch, RowsView rows, int64_t row_start,
                                                    double factor, const CallOptions& options) {
  if (rows.data_type != DataType::kFloat32) {
    return internal::MakeLocalError(v1::ERROR_REASON_DATA_TYPE_MISMATCH, absl::StatusCode::kInvalidArgument,
                                    absl::StrCat("rows: expected float32, got ", DataTypeName(rows.data_type)),
                                    {{"field", "rows"}, {"expected", "float32"}, {"actual", DataTypeName(rows.data_type)}});
  }
  if (absl::Status status = internal::CheckRows("rows", rows); !status.ok()) return status;
  if (rows.memory != Memory::kHost) {
    return internal::MakeLocalError(v1::ERROR_REASON_INVALID_FIELD, absl::StatusCode::kInvalidArgument,
                                    "rows.memory: expected host memory, from which gradients are read",
                                    {{"field", "rows.memory"}, {"expected", "kHost"}});
  }
  // The wire carries no columns: the head's are meant.
  if (rows.hidden_size != spec().hidden_size) {
    return internal::MakeLocalError(
        v1::ERROR_REASON_SHAPE_MISMATCH, absl::StatusCode::kInvalidArgument,
        absl::StrCat("rows: expected ", spec().hidden_size, " columns, got ", rows.hidden_size),
        {{"field", "rows"}, {"expected", absl::StrCat(spec().hidden_size)}, {"actual", absl::StrCat(rows.hidden_size)}});
  }
  v1::AddGradientHeader header;
  header.set_micro_batch(micro_batch);
  header.set_row_start(row_start);
  header.set_row_count(rows.row_count);
  header.set_factor(factor);
  Connection& connection = *handle_->connection;
  ReplayLog& log = connection.replay_log();
  const char* const bytes = static_cast<const char*>(rows.data);
  const int64_t byte_count = rows.row_count * rows.row_bytes();
  HeadUses heads = handle_->AtStep(step);
  AddGradientResult result;
  const absl::Status status = connection.RetryOnSteps(heads, connection.DeadlineOf(options), [&](grpc::ClientContext& context) {
    *header.mutable_head() = heads[0].ToHeadStep();
    const absl::StatusOr<v1::AddGradientResponse> response = SendGradient(connection, context, header, bytes, byte_count);
    if (!response.ok()) return response.status();
    result.replayed = response->replayed();
    log.StepIsOpen(handle_->state, step);
    if (log.enabled()) LogGradient(log, heads, header, bytes, byte_count);
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return result;
}

absl::StatusOr<ApplyResult> Head::Apply(int64_t step, const ApplyOptions& apply, const CallOptions& options) {
  if (!apply.allow_empty && (apply.expected.has_value() ? IsEmpty(*apply.expected) : handle_->state->empty_step() == step)) {
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
  absl::StatusOr<v1::ApplyOptimizerStepResponse> response =
      CallOnStep(*handle_, step, &Heads::ApplyOptimizerStep, request, options,
                 [&](const v1::ApplyOptimizerStepResponse&, const HeadUses& heads) {
                   ReplayLog& log = handle_->connection->replay_log();
                   log.StepIsOpen(handle_->state, step + 1);
                   if (log.enabled()) LogApply(log, heads, request);
                 });
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
  absl::StatusOr<v1::DiscardGradientResponse> response =
      CallOnStep(*handle_, step, &Heads::DiscardGradient, v1::DiscardGradientRequest(), options,
                 [&](const v1::DiscardGradientResponse&, const HeadUses& heads) {
                   ReplayLog& log = handle_->connection->replay_log();
                   log.StepIsOpen(handle_->state, step + 1);
                   if (log.enabled()) LogDiscardGradient(log, heads);
                 });
  if (!response.ok()) return response.status();
  return DiscardGradientResult{response->open_step(), response->replayed()};
}

absl::StatusOr<TensorBuffer> Head::Gradient(int64_t step, HeadTensor tensor, double gradient_factor, const CallOptions& options) {
  v1::DownloadGradientRequest request;
  request.set_tensor(static_cast<v1::HeadTensor>(tensor));
  request.set_gradient_factor(gradient_factor);
  Connection& connection = *handle_->connection;
  HeadUses heads = handle_->AtStep(step);
  TensorBuffer buffer(DataType::kFloat32, internal::ShapeOf(spec(), tensor));
  const absl::Status status = connection.RetryOnSteps(heads, connection.DeadlineOf(options), [&](grpc::ClientContext& context) {
    *request.mutable_head() = heads[0].ToHeadStep();
    return internal::ReadTensor(connection, context, *connection.heads().DownloadGradient(&context, request), buffer);
  });
  if (!status.ok()) return status;
  return buffer;
}

absl::StatusOr<GradientNormResult> Head::GradientNorm(int64_t step, double gradient_factor, const CallOptions& options) {
  v1::GetGradientNormRequest request;
  request.set_gradient_factor(gradient_factor);
  absl::StatusOr<v1::GetGradientNormResponse> response =
      CallOnStep(*handle_, step, &Heads::GetGradientNorm, std::move(request), options);
  if (!response.ok()) return response.status();
  return GradientNormResult{response->gradient_norm_squared(), response->non_finite_count()};
}

absl::StatusOr<StepStates> Head::GetStep(const CallOptions& options) {
  absl::StatusOr<v1::GetStepResponse> response = CallOnStep(*handle_, std::nullopt, &Heads::GetStep, v1::GetStepRequest(), options);
  if (!response.ok()) return response.status();
  StepStates states;
  states.open = FromProto(response->open());
  if (response->has_last_closed()) states.last_closed = FromProto(response->last_closed());
  return states;
}

absl::StatusOr<HeadInfo> Head::Take(bool only_if_current, const CallOptions& options) {
  v1::TakeHeadRequest request;
  request.set_name(name());
  if (only_if_current) request.set_epoch(epoch());
  const Deadline deadline = handle_->connection->DeadlineOf(options);
  absl::StatusOr<v1::Head> head =
      handle_->connection->Call(handle_->connection->heads(), &Heads::TakeHead, request,
                                only_if_current ? internal::Repeat::kIfNothingWasDone : internal::Repeat::kSafe, deadline);
  if (!head.ok()) return head.status();
  return handle_->Adopt(*head, deadline);
}

absl::StatusOr<HeadInfo> Head::ReplaceWeights(int64_t step, TensorView weight, std::optional<TensorView> bias,
                                              const CallOptions& options) {
  if (bias.has_value() != spec().has_bias) {
    return internal::MakeLocalError(v1::ERROR_REASON_INVALID_COMBINATION, absl::StatusCode::kInvalidArgument,
                                    absl::StrCat("bias: the head has ", spec().has_bias ? "one, none" : "none, one", " was given"),
                                    {{"field", "bias"}});
  }
  Connection& connection = *handle_->connection;
  HeadUses heads = handle_->AtStep(step);
  const Deadline deadline = connection.DeadlineOf(options);
  if (absl::Status status = internal::CheckElements("weight", weight); !status.ok()) return status;
  if (absl::Status status = internal::CheckElements("bias", bias.value_or(TensorView())); !status.ok()) return status;
  internal::Upload weight_upload(handle_->connection, HeadTensor::kWeight, weight);
  internal::Upload bias_upload(handle_->connection, HeadTensor::kBias, bias.value_or(TensorView()));
  absl::StatusOr<v1::Head> head;
  const absl::Status status = connection.RetryOnSteps(heads, deadline, [&](grpc::ClientContext&) {
    // A restart in between takes one half of the shadow with it: both tensors belong to one attempt.
    head = weight_upload.Send(name(), heads[0].epoch, step, deadline);
    if (head.ok() && bias.has_value()) head = bias_upload.Send(name(), heads[0].epoch, step, deadline);
    if (!head.ok()) return head.status();
    // Where the first one has waited for the second for a minute, it may have given way to another head's upload.
    if (bias.has_value() && head->open_step() == step) {
      return internal::MakeLocalError(v1::ERROR_REASON_IN_FLIGHT_BYTES_EXCEEDED, absl::StatusCode::kResourceExhausted,
                                      "the server needed the weight's room before the bias came: both have to be sent again");
    }
    ReplayLog& log = connection.replay_log();
    log.StepIsOpen(handle_->state, step + 1);
    const int64_t bytes = weight.bytes() + (bias.has_value() ? bias->bytes() : 0);
    if (log.enabled() && log.HasRoomFor(*handle_->state, step, bytes)) LogReplace(log, heads, weight, bias);
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return FromProto(*head);
}

}  // namespace headwater::client
