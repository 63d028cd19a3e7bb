// The answer of a ComputeLoss call: sums, per-token outputs, state and times of its micro-batch. Its metrics and its trace.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/each_name.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "proto/headwater/v1/term_codec.h"
#include "server/service/loss/micro_batch.h"
#include "server/service/request/head_request.h"
#include "server/service/request/loss_request.h"

namespace headwater::service {
namespace {

using observability::Metric;
using observability::MicroBatchOutcome;

HEADWATER_FIELDS(v1::MicroBatchSummary, heads::SubmissionOutcome, state, form, replayed, payload_differs, step)

MicroBatchOutcome OutcomeOf(const heads::SubmissionOutcome& outcome) {
  if (outcome.replayed || outcome.payload_differs) return MicroBatchOutcome::kReplayed;
  switch (outcome.state) {
    case heads::ContributionState::kCommitted:
      return MicroBatchOutcome::kCommitted;
    case heads::ContributionState::kStaged:
      return outcome.form == heads::ContributionForm::kHeld ? MicroBatchOutcome::kHeld : MicroBatchOutcome::kStaged;
    default:
      return MicroBatchOutcome::kEvaluated;
  }
}

// Floating point operations of the products that a micro-batch which succeeded needed at least (headwater_product_flops_total).
double ProductFlopsOf(const heads::Submission& submission, const heads::SubmissionOutcome& outcome) {
  const MicroBatchOutcome what = OutcomeOf(outcome);
  const bool contributes =
      what == MicroBatchOutcome::kCommitted || what == MicroBatchOutcome::kStaged || what == MicroBatchOutcome::kHeld;
  double flops = 0;
  for (size_t i = 0; i < submission.terms.size(); ++i) {
    const heads::SubmittedTerm& term = submission.terms[i];
    const double rows = static_cast<double>(outcome.terms[i].valid_token_count);
    const auto product = [rows](const HeadSpec& spec) {
      return 2 * rows * static_cast<double>(spec.vocab_size) * static_cast<double>(spec.hidden_size);
    };
    const HeadSpec& spec = term.head->spec();
    const int products = 1 + (submission.grad_hidden.row_count > 0 ? 1 : 0) + (contributes && spec.trainable ? 1 : 0);
    flops += products * product(spec);
    if (term.teacher_head != nullptr) flops += product(term.teacher_head->spec());
  }
  return flops;
}

// How full its token chunks were, by the plan of its first term's head; 0 if nothing was computed or the engine has no chunks.
double ChunkFillOf(const heads::Submission& submission, const heads::SubmissionOutcome& outcome) {
  int64_t rows = 0;
  for (const LossSums& sums : outcome.terms) rows = std::max(rows, sums.valid_token_count);
  const int64_t chunk_rows = submission.terms.front().head->token_chunk_rows();
  if (rows == 0 || chunk_rows <= 0) return 0;
  const int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
  return static_cast<double>(rows) / (static_cast<double>(chunks) * static_cast<double>(chunk_rows));
}

bool Wants(const AdmittedMicroBatch& batch, int output) {
  return (batch.payload->request.outputs & TokenOutputBit(static_cast<v1::TokenOutput>(output))) != 0;
}

template <typename Value>
void EncodeTensor(const Value* values, int64_t count, v1::Tensor* tensor) {
  tensor->set_data_type(std::is_same_v<Value, float> ? v1::DATA_TYPE_FLOAT32 : v1::DATA_TYPE_INT32);
  tensor->add_shape(count);
  if (count > 0) tensor->set_data(values, static_cast<size_t>(count) * sizeof(Value));
}

}  // namespace

// HEADWATER_TOKEN_OUTPUTS is in the order of v1.TokenOutput, from 1 on.
void AllocateTokenOutputs(AdmittedMicroBatch& batch) {
  batch.token_outputs.resize(batch.submission.terms.size());
  for (size_t i = 0; i < batch.token_outputs.size(); ++i) {
    LossTerm& term = batch.submission.terms[i].term;
    const size_t bytes = static_cast<size_t>(term.row_count) * 4;  // of one output
    if (bytes == 0) continue;
    batch.token_outputs[i].resize(bytes * static_cast<size_t>(std::popcount(batch.payload->request.outputs)));
    char* next = batch.token_outputs[i].data();
    int output = 0;
#define HEADWATER_PLACE_OUTPUT(name) \
  if (Wants(batch, ++output)) term.name = reinterpret_cast<decltype(term.name)>(std::exchange(next, next + bytes));
    HEADWATER_EACH(HEADWATER_PLACE_OUTPUT, HEADWATER_TOKEN_OUTPUTS)
#undef HEADWATER_PLACE_OUTPUT
  }
}

void EncodeSummary(const AdmittedMicroBatch& batch, absl::Time now, v1::MicroBatchSummary* summary) {
  const heads::SubmissionOutcome& outcome = *batch.outcome;
  for (size_t i = 0; i < outcome.terms.size(); ++i) {
    const LossTerm& computed = batch.submission.terms[i].term;
    v1::LossTermResult* const term = summary->add_terms();
    WriteFields(outcome.terms[i], *term->mutable_sums());
    term->set_non_finite_row_count(outcome.terms[i].non_finite_row_count);
    if (computed.gradient_resolution != 0) WriteFields(outcome.terms[i].dither, *term->mutable_dither());
    term->set_weight_version(outcome.weight_versions[i]);
    term->set_teacher_weight_version(outcome.teacher_weight_versions[i]);
    int output = 0;
#define HEADWATER_ENCODE_OUTPUT(name) \
  if (Wants(batch, ++output)) EncodeTensor(computed.name, computed.row_count, term->mutable_##name());
    HEADWATER_EACH(HEADWATER_ENCODE_OUTPUT, HEADWATER_TOKEN_OUTPUTS)
#undef HEADWATER_ENCODE_OUTPUT
  }

  WriteFields(outcome, *summary);
  if (batch.submission.backward) summary->set_digest(outcome.digest.data(), outcome.digest.size());
  const MicroBatchTimes& times = batch.times;
  v1::Timing* const timing = summary->mutable_timing();
  EncodeDuration(times.last_row - times.header, timing->mutable_upload());
  EncodeDuration(times.engine_start - times.last_row, timing->mutable_queue());
  EncodeDuration(times.engine_end - times.engine_start, timing->mutable_engine());
  EncodeDuration(now - times.engine_end, timing->mutable_download());
  summary->set_transport(observability::TransportName(batch.path));
}

void CountMicroBatch(const AdmittedMicroBatch& batch) {
  observability::Metrics& metrics = batch.core.metrics;
  const heads::SubmissionOutcome& outcome = *batch.outcome;
  const heads::Submission& submission = batch.submission;
  const MicroBatchOutcome what = OutcomeOf(outcome);
  metrics.CountMicroBatch(what);
  metrics.Count(Metric::kTransports, 1, batch.path);
  if (what == MicroBatchOutcome::kCommitted) metrics.Count(Metric::kCommits);
  for (size_t i = 0; i < outcome.terms.size(); ++i) {
    const bool is_divergence = !std::holds_alternative<CrossEntropySpec>(submission.terms[i].term.loss);
    const LossSums& sums = outcome.terms[i];
    metrics.Count(Metric::kTokens, sums.valid_token_count,
                  is_divergence ? observability::LossKind::kJensenShannon : observability::LossKind::kCrossEntropy);
    metrics.Count(Metric::kNonFiniteRows, sums.non_finite_row_count);
  }
  metrics.Count(Metric::kProductFlops, ProductFlopsOf(submission, outcome));
  if (const double fill = ChunkFillOf(submission, outcome); fill > 0) metrics.Observe(Metric::kChunkFill, fill);
  const auto observe = [&](Metric phase, absl::Duration duration) {
    metrics.Observe(phase, std::max(duration, absl::ZeroDuration()));  // phases overlap
  };
  observe(Metric::kUploadSeconds, batch.times.last_row - batch.times.header);
  observe(Metric::kQueueSeconds, batch.times.engine_start - batch.times.last_row);
}

MicroBatchOutcome OutcomeOf(const absl::Status& error) {
  if (HasReason(error, ErrorReason::kMicroBatchConflict)) return MicroBatchOutcome::kConflict;
  if (HasReason(error, ErrorReason::kAttemptSuperseded)) return MicroBatchOutcome::kSuperseded;
  const bool cancelled = HasReason(error, ErrorReason::kCancelled) || HasReason(error, ErrorReason::kDeadlineExceeded);
  return cancelled ? MicroBatchOutcome::kCancelled : MicroBatchOutcome::kRefused;
}

void TraceMicroBatch(const AdmittedMicroBatch& batch, absl::Time end) {
  if (batch.scope.trace() == nullptr) return;
  observability::CallTrace& trace = *batch.scope.trace();
  const MicroBatchTimes& times = batch.times;
  const auto add = [&](const char* phase, absl::Time from, absl::Time to) {
    if (to > from) trace.AddSpan(phase, phase, from, to);  // nothing may be left of a phase that another one overlapped
  };
  add("upload", times.header, times.last_row);
  add("queue", times.last_row, times.engine_start);
  add("compute", times.engine_start, times.engine_end);
  add("download", times.engine_end, end);
  trace.SetAttribute("transport", observability::TransportName(batch.path));
  trace.SetAttribute("rows", absl::StrCat(batch.submission.hidden.row_count));
  trace.SetAttribute("product_flops", absl::StrCat(ProductFlopsOf(batch.submission, *batch.outcome)));
  trace.SetAttribute("engine_detail", batch.submission.incoming != nullptr
                                          ? "rows as the engine waited for them, and as their gradient was ready"
                                          : "none: computed as a whole, perhaps together with others");
}

}  // namespace headwater::service
