// Micro-batches.
#include "headwater/client/head.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/rows/tensor_exchanges.h"
#include "client/cpp/src/calls.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/decision.h"
#include "client/cpp/src/head_handle.h"
#include "client/cpp/src/loss_call.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client {

using internal::HeadHandle;
using internal::LossInput;
using internal::ToProto;

namespace {

void AddOutputs(const TokenOutputs& outputs, v1::MicroBatchHeader& header) {
  if (outputs.loss) header.add_outputs(v1::TOKEN_OUTPUT_LOSS);
  if (outputs.lse) header.add_outputs(v1::TOKEN_OUTPUT_LSE);
  if (outputs.target_log_probability) header.add_outputs(v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY);
  if (outputs.entropy) header.add_outputs(v1::TOKEN_OUTPUT_ENTROPY);
  if (outputs.argmax) header.add_outputs(v1::TOKEN_OUTPUT_ARGMAX);
}

// The header without terms. The views' types and sizes go into it as they are: the server is the one that knows what fits.
LossInput MakeInput(const RowsView& hidden, const MicroBatchOptions& options) {
  LossInput input;
  input.hidden = hidden;
  input.grad_hidden_data_type = options.grad_hidden_data_type.value_or(hidden.data_type);
  input.want_grad_hidden = options.return_grad_hidden.value_or(!options.forward_only);
  input.grad_hidden = options.grad_hidden;
  input.grad_hidden_memory = options.grad_hidden_memory;

  v1::MicroBatchHeader& header = input.header;
  if (options.micro_batch.has_value()) header.set_micro_batch(*options.micro_batch);
  header.set_attempt(options.attempt);
  header.set_compute_mode(options.forward_only ? v1::COMPUTE_MODE_FORWARD_ONLY : v1::COMPUTE_MODE_FORWARD_BACKWARD);
  header.set_row_count(hidden.row_count);
  header.set_hidden_size(hidden.hidden_size);
  header.set_data_type(ToProto(hidden.data_type));
  header.set_commit_mode(static_cast<v1::CommitMode>(options.commit));
  header.set_allow_held(options.allow_held);
  header.set_late_token_factors(options.late_token_factors);
  header.set_on_mismatch(static_cast<v1::OnMismatch>(options.on_mismatch));
  header.set_non_finite_policy(static_cast<v1::NonFinitePolicy>(options.non_finite_policy));
  AddOutputs(options.outputs, header);
  header.set_return_grad_hidden(input.want_grad_hidden);
  if (options.grad_hidden_data_type.has_value()) header.set_grad_hidden_data_type(ToProto(*options.grad_hidden_data_type));
  if (options.grad_hidden_scale != 1.0) header.set_grad_hidden_scale(options.grad_hidden_scale);
  return input;
}

// `term` has its head and, for a divergence, its teacher.
void AddTerm(LossInput& input, const LossTerm& term, const HeadHandle& head, const HeadHandle* teacher,
             std::optional<int64_t> step) {
  v1::LossTerm& proto = *input.header.add_terms();
  *proto.mutable_head() = head.At(step);
  proto.set_row_start(term.row_start);
  if (term.row_count.has_value()) proto.set_row_count(*term.row_count);
  proto.set_ignore_index(term.ignore_index);
  proto.set_loss_scale(term.loss_scale);
  if (!term.token_weights.empty()) *proto.mutable_token_weights() = ToProto(term.token_weights);
  if (term.expected_weight_version.has_value()) proto.set_expected_weight_version(*term.expected_weight_version);
  const auto* const jsd = std::get_if<JsdOptions>(&term.loss);
  // Required for cross entropy, also where there are no rows.
  if (!term.targets.empty() || jsd == nullptr) *proto.mutable_targets() = ToProto(term.targets);
  if (jsd == nullptr) {
    *proto.mutable_cross_entropy() = ToProto(std::get<CrossEntropyOptions>(term.loss));
  } else {
    *proto.mutable_jensen_shannon() = ToProto(*jsd);
  }
  const bool has_version = jsd != nullptr && jsd->expected_teacher_weight_version.has_value();
  if (teacher != nullptr && term.joined_teacher.has_value()) {
    const JoinedTeacherOptions& joined = *term.joined_teacher;
    v1::JoinedTeacher* source = proto.mutable_joined_teacher();
    source->set_head(teacher->name);
    source->set_head_epoch(teacher->epoch());
    source->set_join_key(joined.join_key);
    source->set_total_row_count(joined.total_rows);
    if (!joined.row_indices.empty()) *source->mutable_row_indices() = ToProto(joined.row_indices);
    source->set_data_type(ToProto(joined.data_type.value_or(input.hidden.data_type)));
    if (has_version) source->set_expected_weight_version(*jsd->expected_teacher_weight_version);
  } else if (teacher != nullptr) {
    v1::TeacherHidden* source = proto.mutable_teacher_hidden();
    source->set_head(teacher->name);
    source->set_head_epoch(teacher->epoch());
    source->set_data_type(ToProto(term.teacher_hidden.data_type));
    if (has_version) source->set_expected_weight_version(*jsd->expected_teacher_weight_version);
  }
  input.teacher_hidden.push_back(teacher == nullptr ? RowsView() : term.teacher_hidden);
}

absl::Status OtherClientError(const char* field) {
  return internal::MakeLocalError(v1::ERROR_REASON_INVALID_COMBINATION, absl::StatusCode::kInvalidArgument,
                                  absl::StrCat(field, ": expected a head of the same client as the micro-batch's"),
                                  {{"field", field}});
}

// The wire carries bytes: rows of another shape, but as many bytes, would be taken.
absl::Status CheckTeacherRows(const LossInput& input, const LossTerm& term, const HeadHandle& teacher) {
  const RowsView& rows = term.teacher_hidden;
  if (term.row_start < 0 || term.row_start > input.hidden.row_count) return absl::OkStatus();  // which the server refuses
  const int64_t row_count = term.row_count.value_or(input.hidden.row_count - term.row_start);
  const int64_t hidden_size = teacher.spec.hidden_size;
  if (rows.row_count == row_count && (row_count == 0 || rows.hidden_size == hidden_size)) return absl::OkStatus();
  return internal::InvalidView(v1::ERROR_REASON_SHAPE_MISMATCH, "teacher_hidden",
                               absl::StrCat("[", row_count, ", ", hidden_size, "], the term's rows of ", teacher.name),
                               absl::StrCat("[", rows.row_count, ", ", rows.hidden_size, "]"));
}

using HandleOf = std::shared_ptr<HeadHandle> (*)(const Head&);

absl::Status AddTerms(LossInput& input, absl::Span<const LossTerm> terms, const std::shared_ptr<HeadHandle>& caller_handle,
                      const MicroBatchOptions& options, HandleOf handle_of) {
  const HeadHandle& caller = *caller_handle;
  for (const LossTerm& term : terms) {
    const std::shared_ptr<HeadHandle> head_handle = term.head.has_value() ? handle_of(*term.head) : caller_handle;
    const std::shared_ptr<HeadHandle> teacher_handle = term.teacher.has_value() ? handle_of(*term.teacher) : nullptr;
    const HeadHandle& head = *head_handle;
    const HeadHandle* const teacher = teacher_handle.get();
    if (head.core != caller.core) return OtherClientError("terms.head");
    if (teacher != nullptr && teacher->core != caller.core) return OtherClientError("terms.teacher");
    if (term.joined_teacher.has_value() && (teacher == nullptr || term.teacher_hidden.data != nullptr)) {
      return internal::MakeLocalError(v1::ERROR_REASON_INVALID_COMBINATION, absl::StatusCode::kInvalidArgument,
                                      "terms.joined_teacher: expected with a teacher's head, and without teacher_hidden",
                                      {{"field", "terms.joined_teacher"}});
    }
    if (teacher != nullptr && !term.joined_teacher.has_value()) {
      HEADWATER_RETURN_IF_ERROR(CheckTeacherRows(input, term, *teacher));
    }
    std::optional<int64_t> step = term.step;
    if (!step.has_value() && (head.spec.trainable || &head == &caller)) step = options.step;
    if (step.has_value() && std::none_of(input.trained.begin(), input.trained.end(),
                                         [&](const std::shared_ptr<HeadHandle>& known) { return known->name == head.name; })) {
      input.trained.push_back(head_handle);
    }
    AddTerm(input, term, head, teacher, step);
  }
  return absl::OkStatus();
}

// Start(core, input, options) makes the call.
template <typename Result, typename StartCall>
Future<Result> StartTerms(const std::shared_ptr<HeadHandle>& caller, RowsView hidden, absl::Span<const LossTerm> terms,
                          const MicroBatchOptions& micro_batch, const CallOptions& options, HandleOf handle_of, StartCall start) {
  LossInput input = MakeInput(hidden, micro_batch);
  input.cuda_stream = options.cuda_stream;
  if (absl::Status status = AddTerms(input, terms, caller, micro_batch, handle_of); !status.ok()) {
    return internal::Failed<Result>(std::move(status));
  }
  return start(caller->core, std::move(input), options);
}

// The single term that `micro_batch` describes.
LossTerm MakeTerm(absl::Span<const int32_t> targets, const MicroBatchOptions& micro_batch) {
  LossTerm term;
  term.targets = targets;
  term.token_weights = micro_batch.token_weights;
  term.loss_scale = micro_batch.loss_scale;
  term.ignore_index = micro_batch.ignore_index;
  term.expected_weight_version = micro_batch.expected_weight_version;
  return term;
}

internal::ContributionKey MakeKey(const HeadHandle& head, int64_t step, int64_t micro_batch) {
  return {head.core, {head.At(step)}, micro_batch, 0};
}

}  // namespace

Head::Head(std::shared_ptr<HeadHandle> handle) : handle_(std::move(handle)) {}

const std::string& Head::name() const { return handle_->name; }
const HeadSpec& Head::spec() const { return handle_->spec; }
std::string Head::epoch() const { return handle_->epoch(); }
bool Head::created() const { return handle_->created; }

Future<LossResult> Head::CrossEntropy(RowsView hidden, absl::Span<const int32_t> targets, const CrossEntropyOptions& loss,
                                      const MicroBatchOptions& micro_batch, const CallOptions& options) {
  LossTerm term = MakeTerm(targets, micro_batch);
  term.loss = loss;
  return StartTerms<LossResult>(
      handle_, hidden, {&term, 1}, micro_batch, options, [](const Head& head) { return head.handle_; }, internal::StartLoss);
}

Future<LossResult> Head::Jsd(RowsView hidden, const Head& teacher, RowsView teacher_hidden, absl::Span<const int32_t> targets,
                             const JsdOptions& loss, const MicroBatchOptions& micro_batch, const CallOptions& options) {
  LossTerm term = MakeTerm(targets, micro_batch);
  term.loss = loss;
  term.teacher = teacher;
  term.teacher_hidden = teacher_hidden;
  return StartTerms<LossResult>(
      handle_, hidden, {&term, 1}, micro_batch, options, [](const Head& head) { return head.handle_; }, internal::StartLoss);
}

Future<LossResult> Head::Jsd(RowsView hidden, const Head& teacher, const JoinedTeacherOptions& joined,
                             absl::Span<const int32_t> targets, const JsdOptions& loss, const MicroBatchOptions& micro_batch,
                             const CallOptions& options) {
  LossTerm term = MakeTerm(targets, micro_batch);
  term.loss = loss;
  term.teacher = teacher;
  term.joined_teacher = joined;
  return StartTerms<LossResult>(
      handle_, hidden, {&term, 1}, micro_batch, options, [](const Head& head) { return head.handle_; }, internal::StartLoss);
}

Future<MultiResult> Head::Multi(RowsView hidden, absl::Span<const LossTerm> terms, const MicroBatchOptions& micro_batch,
                                const CallOptions& options) {
  return StartTerms<MultiResult>(
      handle_, hidden, terms, micro_batch, options, [](const Head& head) { return head.handle_; }, internal::StartMulti);
}

Future<CommitResult> Head::Commit(int64_t step, int64_t micro_batch, double factor, const CallOptions& options) {
  return Commit(step, micro_batch, CommitOptions{.factor = factor}, options);
}

Future<CommitResult> Head::Commit(int64_t step, int64_t micro_batch, const CommitOptions& commit, const CallOptions& options) {
  return internal::StartCommit(MakeKey(*handle_, step, micro_batch), commit, options);
}

Future<DiscardResult> Head::Discard(int64_t step, int64_t micro_batch, const CallOptions& options) {
  return internal::StartDiscard(MakeKey(*handle_, step, micro_batch), options);
}

}  // namespace headwater::client
