// The answer of a ComputeLoss call: sums, per-token outputs, state and times of its micro-batch.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

#include "proto/headwater/v1/term_codec.h"
#include "server/service/loss/micro_batch.h"
#include "server/service/request/loss_request.h"
#include "server/service/request/proto_encoding.h"

namespace headwater::service {
namespace {

// A per-token output of floats, in the engine's term and in the answer.
struct FloatOutput {
  v1::TokenOutput output;
  float* LossTerm::*values;
  v1::Tensor* (v1::LossTermResult::*tensor)();
};
constexpr FloatOutput kFloatOutputs[] = {
    {v1::TOKEN_OUTPUT_LOSS, &LossTerm::token_loss, &v1::LossTermResult::mutable_token_loss},
    {v1::TOKEN_OUTPUT_LSE, &LossTerm::lse, &v1::LossTermResult::mutable_lse},
    {v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY, &LossTerm::target_log_probability,
     &v1::LossTermResult::mutable_target_log_probability},
    {v1::TOKEN_OUTPUT_ENTROPY, &LossTerm::entropy, &v1::LossTermResult::mutable_entropy},
    {v1::TOKEN_OUTPUT_MEAN_LOGITS, &LossTerm::mean_logits, &v1::LossTermResult::mutable_mean_logits},
    {v1::TOKEN_OUTPUT_LOG_SUM_SQ_PROBS, &LossTerm::log_sum_sq_probs, &v1::LossTermResult::mutable_log_sum_sq_probs},
};

bool Wants(const AdmittedMicroBatch& batch, v1::TokenOutput output) {
  return (batch.payload->request.outputs & TokenOutputBit(output)) != 0;
}

void EncodeTensor(const void* values, int64_t count, v1::DataType type, v1::Tensor* tensor) {
  tensor->set_data_type(type);
  tensor->add_shape(count);
  if (count > 0) tensor->set_data(values, static_cast<size_t>(count) * 4);
}

}  // namespace

void AllocateTokenOutputs(AdmittedMicroBatch& batch) {
  batch.token_outputs.resize(batch.submission.terms.size());
  for (size_t i = 0; i < batch.token_outputs.size(); ++i) {
    LossTerm& term = batch.submission.terms[i].term;
    TokenOutputs& outputs = batch.token_outputs[i];
    const size_t rows = static_cast<size_t>(term.row_count);
    if (rows == 0) continue;
    outputs.floats.resize(rows * static_cast<size_t>(std::count_if(std::begin(kFloatOutputs), std::end(kFloatOutputs),
                                                                   [&](const auto& one) { return Wants(batch, one.output); })));
    float* next = outputs.floats.data();
    for (const FloatOutput& one : kFloatOutputs) {
      if (Wants(batch, one.output)) term.*one.values = std::exchange(next, next + rows);
    }
    if (!Wants(batch, v1::TOKEN_OUTPUT_ARGMAX)) continue;
    outputs.argmax.resize(rows);
    term.argmax = outputs.argmax.data();
  }
}

void EncodeSummary(const AdmittedMicroBatch& batch, const heads::SubmissionOutcome& outcome, absl::Time now,
                   v1::MicroBatchSummary* summary) {
  for (size_t i = 0; i < outcome.terms.size(); ++i) {
    const LossTerm& computed = batch.submission.terms[i].term;
    v1::LossTermResult* const term = summary->add_terms();
    WriteFields(outcome.terms[i], *term->mutable_sums());
    term->set_non_finite_row_count(outcome.terms[i].non_finite_row_count);
    if (computed.gradient_resolution != 0) WriteFields(outcome.terms[i].dither, *term->mutable_dither());
    term->set_weight_version(outcome.weight_versions[i]);
    term->set_teacher_weight_version(outcome.teacher_weight_versions[i]);
    for (const FloatOutput& one : kFloatOutputs) {
      if (!Wants(batch, one.output)) continue;
      EncodeTensor(computed.*one.values, computed.row_count, v1::DATA_TYPE_FLOAT32, (term->*one.tensor)());
    }
    if (!Wants(batch, v1::TOKEN_OUTPUT_ARGMAX)) continue;
    EncodeTensor(computed.argmax, computed.row_count, v1::DATA_TYPE_INT32, term->mutable_argmax());
  }

  summary->set_state(static_cast<v1::ContributionState>(outcome.state));
  summary->set_form(static_cast<v1::ContributionForm>(outcome.form));
  summary->set_replayed(outcome.replayed);
  summary->set_payload_differs(outcome.payload_differs);
  if (batch.submission.backward) summary->set_digest(outcome.digest.data(), outcome.digest.size());
  if (outcome.step.has_value()) summary->set_step(*outcome.step);
  const MicroBatchTimes& times = batch.times;
  v1::Timing* const timing = summary->mutable_timing();
  EncodeDuration(times.last_row - times.header, timing->mutable_upload());
  EncodeDuration(times.engine_start - times.last_row, timing->mutable_queue());
  EncodeDuration(times.engine_end - times.engine_start, timing->mutable_engine());
  EncodeDuration(now - times.engine_end, timing->mutable_download());
  summary->set_transport(observability::TransportName(batch.path));
}

}  // namespace headwater::service
