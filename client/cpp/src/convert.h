// Between the wire's messages and the client's own types.
#ifndef HEADWATER_CLIENT_SRC_CONVERT_H_
#define HEADWATER_CLIENT_SRC_CONVERT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/src/fields.h"
#include "headwater/client/head.h"
#include "headwater/client/types.h"
#include "headwater/v1/head_service.pb.h"
#include "headwater/v1/loss_service.pb.h"
#include "headwater/v1/session_service.pb.h"

namespace headwater::client {

// Fields of requests.
HEADWATER_FIELDS(v1::HeadSpec, HeadSpec, vocab_size, hidden_size, data_type, has_bias, trainable, staging_slots, initial_step,
                 int8_teacher)
HEADWATER_FIELDS(v1::LogitTransform, HeadSpec, logit_scale, softcap, valid_vocab_size)
HEADWATER_FIELDS(v1::AdamW, AdamW, beta1, beta2, epsilon, weight_decay)
HEADWATER_FIELDS(v1::Sgd, Sgd, momentum, dampening, nesterov, weight_decay)
HEADWATER_FIELDS(v1::CrossEntropyLoss, CrossEntropyOptions, label_smoothing, z_loss, token_scaling)
HEADWATER_FIELDS(v1::JensenShannonLoss, JsdOptions, beta, student_temperature, teacher_temperature, hard_loss_weight)
HEADWATER_FIELDS(v1::LossTerm, LossTerm, row_start, row_count, ignore_index, gradient_resolution, loss_scale,
                 expected_weight_version)
HEADWATER_FIELDS(v1::MicroBatchHeader, MicroBatchOptions, micro_batch, attempt, allow_held, late_token_factors, on_mismatch,
                 non_finite_policy, grad_hidden_data_type)
HEADWATER_FIELDS(v1::ApplyOptimizerStepRequest, ApplyOptions, learning_rate, gradient_factor, max_grad_norm,
                 other_grad_norm_squared, weight_decay, beta1, beta2, epsilon, momentum)

// Fields of answers.
inline void ReadFields(const v1::MemoryItem& message, MemoryPlan::Item& value) {
  value = {message.purpose(), message.total_bytes()};
}
HEADWATER_FIELDS(v1::MemoryPlan, MemoryPlan, items, total_bytes, available_bytes, token_chunk_rows)
HEADWATER_FIELDS(v1::VocabShard, VocabShard, vocab_start, vocab_end, device)
HEADWATER_FIELDS(v1::Head, HeadInfo, name, epoch, state, weight_version, open_step, shards, memory_plan, create_time,
                 weight_checksum, restored_checkpoint)
HEADWATER_FIELDS(v1::Checkpoint, CheckpointInfo, checkpoint, step, total_bytes, save_time, damaged)
HEADWATER_FIELDS(v1::SaveCheckpointResponse, SaveResult, checkpoint, step, total_bytes)
HEADWATER_FIELDS(v1::StepTotals, StepTotals, micro_batch_count, valid_token_count, loss_sum, token_weight_sum, non_finite_row_count)
HEADWATER_FIELDS(v1::MicroBatchState, MicroBatchInfo, micro_batch, attempt, state, digest, valid_token_count, factor, form)
HEADWATER_FIELDS(v1::Step, StepInfo, step, state, micro_batches, totals)
HEADWATER_FIELDS(v1::GetStepResponse, StepStates, open, last_closed)
HEADWATER_FIELDS(v1::SealStepResponse, SealResult, totals, gradient_norm_squared, non_finite_count, replayed)
HEADWATER_FIELDS(v1::ApplyOptimizerStepResponse, ApplyResult, open_step, weight_version, global_grad_norm, gradient_norm_squared,
                 clip_factor, totals, replayed)
HEADWATER_FIELDS(v1::AddGradientResponse, AddGradientResult, replayed)
HEADWATER_FIELDS(v1::DiscardGradientResponse, DiscardGradientResult, open_step, replayed)
HEADWATER_FIELDS(v1::GetGradientNormResponse, GradientNormResult, gradient_norm_squared, non_finite_count)
HEADWATER_FIELDS(v1::CommitMicroBatchResponse, CommitResult, replayed)
HEADWATER_FIELDS(v1::DiscardMicroBatchResponse, DiscardResult, dropped)
HEADWATER_FIELDS(v1::StreamTeacherResponse, StreamedRows, row_count)
HEADWATER_FIELDS(v1::LossSums, TermResult, loss_sum, soft_loss_sum, hard_loss_sum, z_loss_sum, token_weight_sum, target_weight_sum,
                 valid_token_count, teacher_mean_square_error)
HEADWATER_FIELDS(v1::GradientDither, GradientDither, entry_count, squared_error, squared_norm)
HEADWATER_FIELDS(v1::LossTermResult, TermResult, non_finite_row_count, weight_version, teacher_weight_version, dither)
HEADWATER_FIELDS(v1::Timing, Timing, queue, upload, engine, download)
HEADWATER_FIELDS(v1::MicroBatchSummary, MicroBatchResult, state, form, replayed, payload_differs, digest, step, timing, transport)
HEADWATER_FIELDS(v1::Device, DeviceInfo, name, model, memory_budget_bytes, memory_planned_bytes, uuid)
HEADWATER_FIELDS(v1::ServerInfo, ServerInfo, version, incarnation, engine, engine_note, devices, features, start_time,
                 descriptor_socket, named_regions, deterministic)

}  // namespace headwater::client

namespace headwater::client::internal {

// `student` -> `tenants/{tenant}/heads/student`; a name with a slash stays as it is.
std::string FullHeadName(const std::string& tenant, const std::string& name);

v1::HeadSpec ToProto(const HeadSpec& spec);
v1::ExpectedMicroBatches ToProto(const ExpectedMicroBatches& expected);
v1::CrossEntropyLoss ToProto(const CrossEntropyOptions& options);
v1::JensenShannonLoss ToProto(const JsdOptions& options);
v1::Tensor ToProto(absl::Span<const float> values);
v1::Tensor ToProto(absl::Span<const int32_t> values);
inline v1::DataType ToProto(DataType type) { return static_cast<v1::DataType>(type); }

HeadInfo FromProto(const v1::Head& head);
inline CheckpointInfo FromProto(const v1::Checkpoint& checkpoint) { return Read<CheckpointInfo>(checkpoint); }
HeadSpec FromProto(const v1::HeadSpec& spec);
ServerInfo FromProto(const v1::ServerInfo& info);
// Everything but grad_hidden, attempt and contribution. INTERNAL if it has not the terms of `header`, with an entry for each row in
// their per-token outputs.
absl::StatusOr<MultiResult> FromProto(const v1::MicroBatchSummary& summary, const v1::MicroBatchHeader& header);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_CONVERT_H_
