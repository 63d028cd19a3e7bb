#include "server/service/loss/micro_batch_account.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <variant>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::service {

using observability::MicroBatchOutcome;
using observability::Phase;

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

MicroBatchOutcome OutcomeOf(const absl::Status& error) {
  if (HasReason(error, ErrorReason::kMicroBatchConflict)) return MicroBatchOutcome::kConflict;
  if (HasReason(error, ErrorReason::kAttemptSuperseded)) return MicroBatchOutcome::kSuperseded;
  const bool cancelled = HasReason(error, ErrorReason::kCancelled) || HasReason(error, ErrorReason::kDeadlineExceeded);
  return cancelled ? MicroBatchOutcome::kCancelled : MicroBatchOutcome::kRefused;
}

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

double ChunkFillOf(const heads::Submission& submission, const heads::SubmissionOutcome& outcome) {
  int64_t rows = 0;
  for (const LossSums& sums : outcome.terms) rows = std::max(rows, sums.valid_token_count);
  const int64_t chunk_rows = submission.terms.front().head->token_chunk_rows();
  if (rows == 0 || chunk_rows <= 0) return 0;
  const int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
  return static_cast<double>(rows) / (static_cast<double>(chunks) * static_cast<double>(chunk_rows));
}

void CountMicroBatch(observability::Metrics& metrics, const heads::Submission& submission, const heads::SubmissionOutcome& outcome,
                     observability::Transport path, const MicroBatchTimes& times) {
  const MicroBatchOutcome what = OutcomeOf(outcome);
  metrics.CountMicroBatch(what);
  metrics.CountTransport(path);
  if (what == MicroBatchOutcome::kCommitted) metrics.CountCommit();
  for (size_t i = 0; i < outcome.terms.size(); ++i) {
    const bool is_divergence = !std::holds_alternative<CrossEntropySpec>(submission.terms[i].term.loss);
    const LossSums& sums = outcome.terms[i];
    metrics.CountTokens(is_divergence ? observability::LossKind::kJensenShannon : observability::LossKind::kCrossEntropy,
                        sums.valid_token_count);
    metrics.CountNonFiniteRows(sums.non_finite_row_count);
  }
  metrics.CountProductFlops(ProductFlopsOf(submission, outcome));
  if (const double fill = ChunkFillOf(submission, outcome); fill > 0) metrics.ObserveChunkFill(fill);
  const auto observe = [&](Phase phase, absl::Duration duration) {
    metrics.ObservePhase(phase, std::max(duration, absl::ZeroDuration()));  // phases overlap
  };
  observe(Phase::kUpload, times.last_row - times.header);
  observe(Phase::kQueue, times.engine_start - times.last_row);
}

void TraceMicroBatch(observability::CallTrace& trace, const heads::Submission& submission, const heads::SubmissionOutcome& outcome,
                     observability::Transport path, const MicroBatchTimes& times, absl::Time end) {
  const auto add = [&](const char* phase, absl::Time from, absl::Time to) {
    if (to > from) trace.AddSpan(phase, phase, from, to);  // nothing may be left of a phase that another one overlapped
  };
  add("upload", times.header, times.last_row);
  add("queue", times.last_row, times.engine_start);
  add("compute", times.engine_start, times.engine_end);
  add("download", times.engine_end, end);
  trace.SetAttribute("transport", observability::TransportName(path));
  trace.SetAttribute("rows", absl::StrCat(submission.hidden.row_count));
  trace.SetAttribute("product_flops", absl::StrCat(ProductFlopsOf(submission, outcome)));
  trace.SetAttribute("engine_detail", submission.incoming != nullptr
                                          ? "rows as the engine waited for them, and as their gradient was ready"
                                          : "none: computed as a whole, perhaps together with others");
}

}  // namespace headwater::service
