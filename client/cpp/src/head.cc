// Micro-batches, and the decisions about them.
#include "headwater/client/head.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/link/error.h"
#include "client/core/link/notice.h"
#include "client/core/rows/tensor_exchanges.h"
#include "client/cpp/src/calls.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/head_handle.h"
#include "headwater/kernels/return_if_error.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::client {

using internal::Answer;
using internal::ContributionKey;
using internal::HeadHandle;
using internal::ToProto;

namespace internal {

// The names in a decision about a micro-batch.
struct ContributionKey {
  std::shared_ptr<Core> core;
  std::vector<v1::HeadStep> heads;  // the trainable ones
  int64_t micro_batch = 0;
  int64_t attempt = 0;  // 0: the one that was submitted last
};

}  // namespace internal

namespace {

// A micro-batch, from its arguments to its result.
struct LossCall {
  std::shared_ptr<internal::Core> core;
  v1::MicroBatchHeader header{};
  internal::CallMemory memory{};                       // `teachers`: one for each term; without memory: the term has no teacher
  std::vector<std::shared_ptr<HeadHandle>> trained{};  // the heads whose steps it adds to, once each
  TensorBuffer grad_hidden{};                          // the result's own
};

void AddOutputs(const TokenOutputs& outputs, v1::MicroBatchHeader& header) {
  if (outputs.loss) header.add_outputs(v1::TOKEN_OUTPUT_LOSS);
  if (outputs.lse) header.add_outputs(v1::TOKEN_OUTPUT_LSE);
  if (outputs.target_log_probability) header.add_outputs(v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY);
  if (outputs.entropy) header.add_outputs(v1::TOKEN_OUTPUT_ENTROPY);
  if (outputs.argmax) header.add_outputs(v1::TOKEN_OUTPUT_ARGMAX);
  if (outputs.mean_logits) header.add_outputs(v1::TOKEN_OUTPUT_MEAN_LOGITS);
  if (outputs.log_sum_sq_probs) header.add_outputs(v1::TOKEN_OUTPUT_LOG_SUM_SQ_PROBS);
}

// Fills in everything but the terms. The views' types and sizes go in unchanged: the server checks them.
void Describe(const RowsView& hidden, const MicroBatchOptions& options, LossCall& call) {
  call.memory.rows = hidden;
  v1::MicroBatchHeader& header = call.header;
  WriteFields(options, header);
  header.set_compute_mode(options.forward_only ? v1::COMPUTE_MODE_FORWARD_ONLY : v1::COMPUTE_MODE_FORWARD_BACKWARD);
  header.set_row_count(hidden.row_count);
  header.set_hidden_size(hidden.hidden_size);
  header.set_data_type(ToProto(hidden.data_type));
  header.set_commit_mode(static_cast<v1::CommitMode>(options.commit));
  AddOutputs(options.outputs, header);
  header.set_return_grad_hidden(options.return_grad_hidden.value_or(!options.forward_only));
  if (options.grad_hidden_scale != 1.0) header.set_grad_hidden_scale(options.grad_hidden_scale);
}

// `term` has its head and, for a divergence, its teacher.
void AddTerm(LossCall& call, const LossTerm& term, const HeadHandle& head, const HeadHandle* teacher, std::optional<int64_t> step) {
  v1::LossTerm& proto = *call.header.add_terms();
  *proto.mutable_head() = head.At(step);
  WriteFields(term, proto);
  if (!term.token_weights.empty()) *proto.mutable_token_weights() = ToProto(term.token_weights);
  if (!term.entropy_factors.empty()) *proto.mutable_entropy_factors() = ToProto(term.entropy_factors);
  if (!term.lse_factors.empty()) *proto.mutable_lse_factors() = ToProto(term.lse_factors);
  const auto* const jsd = std::get_if<JsdOptions>(&term.loss);
  // Required for cross entropy, also where there are no rows.
  if (!term.targets.empty() || jsd == nullptr) *proto.mutable_targets() = ToProto(term.targets);
  if (jsd == nullptr) {
    *proto.mutable_cross_entropy() = ToProto(std::get<CrossEntropyOptions>(term.loss));
  } else {
    *proto.mutable_jensen_shannon() = ToProto(*jsd);
  }
  const auto describe = [&](auto& source, DataType data_type) {
    source.set_head(teacher->name);
    source.set_head_epoch(teacher->epoch());
    source.set_data_type(ToProto(data_type));
    const bool has_version = jsd != nullptr && jsd->expected_teacher_weight_version.has_value();
    if (has_version) source.set_expected_weight_version(*jsd->expected_teacher_weight_version);
  };
  if (teacher != nullptr && term.joined_teacher.has_value()) {
    const JoinedTeacherOptions& joined = *term.joined_teacher;
    v1::JoinedTeacher& source = *proto.mutable_joined_teacher();
    describe(source, joined.data_type.value_or(call.memory.rows.data_type));
    source.set_join_key(joined.join_key);
    source.set_total_row_count(joined.total_rows);
    if (!joined.row_indices.empty()) *source.mutable_row_indices() = ToProto(joined.row_indices);
  } else if (teacher != nullptr) {
    describe(*proto.mutable_teacher_hidden(), term.teacher_hidden.data_type);
  }
  if (term.top_k_teacher.has_value()) {
    const TopKTeacher& top_k = *term.top_k_teacher;
    v1::TopKTeacher& source = *proto.mutable_top_k_teacher();
    source.set_k(top_k.k);
    *source.mutable_ids() = ToProto(top_k.ids);
    *source.mutable_log_probs() = ToProto(top_k.log_probs);
    for (v1::Tensor* const tensor : {source.mutable_ids(), source.mutable_log_probs()}) {
      tensor->set_shape(0, tensor->shape(0) / std::max(top_k.k, 1));
      tensor->add_shape(top_k.k);
    }
  }
  call.memory.teachers.push_back(teacher == nullptr ? RowsView() : term.teacher_hidden);
}

absl::Status OtherClientError(const char* field) {
  return internal::MakeLocalError(v1::ERROR_REASON_INVALID_COMBINATION, absl::StatusCode::kInvalidArgument,
                                  absl::StrCat(field, ": expected a head of the same client as the micro-batch's"),
                                  {{"field", field}});
}

// The wire carries bytes: rows of another shape, but as many bytes, would be taken.
absl::Status CheckTeacherRows(const RowsView& hidden, const LossTerm& term, const HeadHandle& teacher) {
  const RowsView& rows = term.teacher_hidden;
  if (term.row_start < 0 || term.row_start > hidden.row_count) return absl::OkStatus();  // which the server refuses
  const int64_t row_count = term.row_count.value_or(hidden.row_count - term.row_start);
  const int64_t hidden_size = teacher.spec.hidden_size;
  if (rows.row_count == row_count && (row_count == 0 || rows.hidden_size == hidden_size)) return absl::OkStatus();
  return internal::InvalidView(v1::ERROR_REASON_SHAPE_MISMATCH, "teacher_hidden",
                               absl::StrCat("[", row_count, ", ", hidden_size, "], the term's rows of ", teacher.name),
                               absl::StrCat("[", rows.row_count, ", ", rows.hidden_size, "]"));
}

absl::Status CheckTopKAlone(const LossTerm& term) {
  const auto* const jsd = std::get_if<JsdOptions>(&term.loss);
  const char* other = nullptr;
  if (term.teacher.has_value()) other = "teacher";
  if (term.joined_teacher.has_value()) other = "joined_teacher";
  if (term.teacher_hidden.data != nullptr) other = "teacher_hidden";
  if (jsd != nullptr && jsd->expected_teacher_weight_version.has_value()) other = "expected_teacher_weight_version";
  if (other == nullptr) return absl::OkStatus();
  return internal::MakeLocalError(v1::ERROR_REASON_INVALID_COMBINATION, absl::StatusCode::kInvalidArgument,
                                  absl::StrCat("terms.top_k_teacher: expected without ", other),
                                  {{"field", "terms.top_k_teacher"}});
}

absl::Status AddTerms(LossCall& call, absl::Span<const LossTerm> terms, const std::shared_ptr<HeadHandle>& caller_handle,
                      const MicroBatchOptions& options) {
  const HeadHandle& caller = *caller_handle;
  for (const LossTerm& term : terms) {
    const std::shared_ptr<HeadHandle> head_handle = term.head.has_value() ? HeadHandle::Of(*term.head) : caller_handle;
    const std::shared_ptr<HeadHandle> teacher_handle = term.teacher.has_value() ? HeadHandle::Of(*term.teacher) : nullptr;
    const HeadHandle& head = *head_handle;
    const HeadHandle* const teacher = teacher_handle.get();
    if (head.core != caller.core) return OtherClientError("terms.head");
    if (teacher != nullptr && teacher->core != caller.core) return OtherClientError("terms.teacher");
    if (term.joined_teacher.has_value() && (teacher == nullptr || term.teacher_hidden.data != nullptr)) {
      return internal::MakeLocalError(v1::ERROR_REASON_INVALID_COMBINATION, absl::StatusCode::kInvalidArgument,
                                      "terms.joined_teacher: expected with a teacher's head, and without teacher_hidden",
                                      {{"field", "terms.joined_teacher"}});
    }
    if (term.top_k_teacher.has_value()) HEADWATER_RETURN_IF_ERROR(CheckTopKAlone(term));
    if (teacher != nullptr && !term.joined_teacher.has_value()) {
      HEADWATER_RETURN_IF_ERROR(CheckTeacherRows(call.memory.rows, term, *teacher));
    }
    std::optional<int64_t> step = term.step;
    if (!step.has_value() && (head.spec.trainable || &head == &caller)) step = options.step;
    if (step.has_value() && std::none_of(call.trained.begin(), call.trained.end(),
                                         [&](const std::shared_ptr<HeadHandle>& known) { return known->name == head.name; })) {
      call.trained.push_back(head_handle);
    }
    AddTerm(call, term, head, teacher, step);
  }
  return absl::OkStatus();
}

// Checks values that would make this side read or write out of bounds, and sets the gradient's destination.
absl::Status PlaceRows(const MicroBatchOptions& options, LossCall& call) {
  internal::CallMemory& memory = call.memory;
  HEADWATER_RETURN_IF_ERROR(internal::CheckRows("hidden", memory.rows));
  for (const RowsView& rows : memory.teachers) {
    HEADWATER_RETURN_IF_ERROR(internal::CheckRows("teacher_hidden", rows));
  }
  const absl::Span<unsigned char> given = options.grad_hidden;
  if (!call.header.return_grad_hidden()) {
    if (given.empty()) return absl::OkStatus();
    return internal::InvalidView(v1::ERROR_REASON_INVALID_COMBINATION, "grad_hidden", "no memory, as no gradient was asked for",
                                 absl::StrCat(given.size(), " bytes"));
  }
  memory.result = memory.rows;
  memory.result.data_type = options.grad_hidden_data_type.value_or(memory.rows.data_type);
  memory.result.memory = given.empty() ? Memory::kHost : options.grad_hidden_memory;
  memory.result.data = given.data();
  const int64_t expected = memory.result.bytes();
  if (given.empty()) {
    HEADWATER_ASSIGN_OR_RETURN(call.grad_hidden,
                               internal::MakeBuffer(memory.result.data_type, {memory.rows.row_count, memory.rows.hidden_size}));
    memory.result.data = call.grad_hidden.data();
  } else if (static_cast<int64_t>(given.size()) != expected) {
    return internal::InvalidView(v1::ERROR_REASON_DATA_LENGTH_MISMATCH, "grad_hidden", absl::StrCat(expected, " bytes"),
                                 absl::StrCat(given.size(), " bytes"));
  }
  return absl::OkStatus();
}

void NoteForm(const LossCall& call, ContributionForm form) {
  for (const std::shared_ptr<HeadHandle>& head : call.trained) {
    if (!head->ShouldWarnOfHeld(form, !call.header.late_token_factors())) continue;
    internal::GiveNotice(
        call.core->options(),
        absl::StrCat("a micro-batch of ", head->name,
                     " found all staging slots taken by others that wait for their commit; the server keeps its rows and "
                     "computes them again at commit, a third more work. Create the head with more "
                     "HeadSpec::staging_slots, one for each micro-batch that waits at once"));
  }
}

absl::StatusOr<MultiResult> Read(LossCall& call, const Answer& answer) {
  const auto& summary = static_cast<const v1::MicroBatchSummary&>(*answer.message);
  absl::StatusOr<MultiResult> result = internal::FromProto(summary, call.header);
  if (!result.ok()) return result;
  result->grad_hidden = std::move(call.grad_hidden);
  result->attempt = answer.attempt;
  if (!call.header.has_micro_batch()) return result;
  NoteForm(call, result->form);
  if (result->state == ContributionState::kStaged) {
    ContributionKey key{call.core, {}, call.header.micro_batch(), answer.attempt};
    for (const std::shared_ptr<HeadHandle>& head : call.trained) {
      for (const v1::LossTerm& term : call.header.terms()) {
        if (term.head().head() != head->name || !term.head().has_step()) continue;
        key.heads.push_back(term.head());
        break;
      }
    }
    result->contribution.emplace(std::make_shared<const ContributionKey>(std::move(key)));
  }
  return result;
}

// Makes the call. `to_result` makes the caller's result of the answer's.
template <typename Result, typename ToResult>
Future<Result> Submit(const std::shared_ptr<HeadHandle>& caller, const RowsView& hidden, absl::Span<const LossTerm> terms,
                      const MicroBatchOptions& micro_batch, const CallOptions& options, ToResult to_result) {
  const auto call = std::make_shared<LossCall>(LossCall{caller->core});
  call->memory.cuda_stream = options.cuda_stream;
  Describe(hidden, micro_batch, *call);
  absl::Status status = AddTerms(*call, terms, caller, micro_batch);
  if (status.ok()) status = PlaceRows(micro_batch, *call);
  if (!status.ok()) return internal::Failed<Result>(std::move(status));
  return internal::Start<Result>(call->core, call->header, options, call->memory,
                                 [call, to_result](const Answer& answer) -> absl::StatusOr<Result> {
                                   HEADWATER_ASSIGN_OR_RETURN(MultiResult result, Read(*call, answer));
                                   return to_result(std::move(result));
                                 });
}

// A micro-batch of one term.
Future<LossResult> SubmitOne(const std::shared_ptr<HeadHandle>& caller, const RowsView& hidden, const LossTerm& term,
                             const MicroBatchOptions& micro_batch, const CallOptions& options) {
  return Submit<LossResult>(caller, hidden, {&term, 1}, micro_batch, options, [](MultiResult result) {
    TermResult first = std::move(result.terms[0]);
    return LossResult{std::move(first), static_cast<MicroBatchResult&&>(result)};
  });
}

// The single term that `micro_batch` describes.
LossTerm MakeTerm(absl::Span<const int32_t> targets, const MicroBatchOptions& micro_batch) {
  LossTerm term;
  term.targets = targets;
  term.token_weights = micro_batch.token_weights;
  term.entropy_factors = micro_batch.entropy_factors;
  term.lse_factors = micro_batch.lse_factors;
  term.gradient_resolution = micro_batch.gradient_resolution;
  term.loss_scale = micro_batch.loss_scale;
  term.ignore_index = micro_batch.ignore_index;
  term.expected_weight_version = micro_batch.expected_weight_version;
  return term;
}

template <typename Response, typename Result, typename Message>
Future<Result> Decide(const ContributionKey& key, Message message, const CallOptions& options) {
  message.mutable_heads()->Assign(key.heads.begin(), key.heads.end());
  message.set_micro_batch(key.micro_batch);
  message.set_attempt(key.attempt);
  return internal::Start<Result>(key.core, std::move(message), options, {}, [](const Answer& answer) {
    return internal::Read<Result>(static_cast<const Response&>(*answer.message));
  });
}

Future<CommitResult> StartCommit(const ContributionKey& key, const CommitOptions& commit, const CallOptions& options) {
  v1::CommitMicroBatchRequest request;
  request.set_factor(commit.factor);
  if (!commit.token_factors.empty()) *request.mutable_token_factors() = ToProto(commit.token_factors);
  return Decide<v1::CommitMicroBatchResponse, CommitResult>(key, std::move(request), options);
}

Future<DiscardResult> StartDiscard(const ContributionKey& key, const CallOptions& options) {
  return Decide<v1::DiscardMicroBatchResponse, DiscardResult>(key, v1::DiscardMicroBatchRequest(), options);
}

ContributionKey KeyOf(const HeadHandle& head, int64_t step, int64_t micro_batch) {
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
  return SubmitOne(handle_, hidden, term, micro_batch, options);
}

Future<LossResult> Head::Jsd(RowsView hidden, const Head& teacher, RowsView teacher_hidden, absl::Span<const int32_t> targets,
                             const JsdOptions& loss, const MicroBatchOptions& micro_batch, const CallOptions& options) {
  LossTerm term = MakeTerm(targets, micro_batch);
  term.loss = loss;
  term.teacher = teacher;
  term.teacher_hidden = teacher_hidden;
  return SubmitOne(handle_, hidden, term, micro_batch, options);
}

Future<LossResult> Head::Jsd(RowsView hidden, const Head& teacher, const JoinedTeacherOptions& joined,
                             absl::Span<const int32_t> targets, const JsdOptions& loss, const MicroBatchOptions& micro_batch,
                             const CallOptions& options) {
  LossTerm term = MakeTerm(targets, micro_batch);
  term.loss = loss;
  term.teacher = teacher;
  term.joined_teacher = joined;
  return SubmitOne(handle_, hidden, term, micro_batch, options);
}

Future<LossResult> Head::Jsd(RowsView hidden, const TopKTeacher& teacher, absl::Span<const int32_t> targets, const JsdOptions& loss,
                             const MicroBatchOptions& micro_batch, const CallOptions& options) {
  LossTerm term = MakeTerm(targets, micro_batch);
  term.loss = loss;
  term.top_k_teacher = teacher;
  return SubmitOne(handle_, hidden, term, micro_batch, options);
}

Future<MultiResult> Head::Multi(RowsView hidden, absl::Span<const LossTerm> terms, const MicroBatchOptions& micro_batch,
                                const CallOptions& options) {
  return Submit<MultiResult>(handle_, hidden, terms, micro_batch, options, [](MultiResult result) { return result; });
}

Future<CommitResult> Head::Commit(int64_t step, int64_t micro_batch, double factor, const CallOptions& options) {
  return Commit(step, micro_batch, CommitOptions{.factor = factor}, options);
}

Future<CommitResult> Head::Commit(int64_t step, int64_t micro_batch, const CommitOptions& commit, const CallOptions& options) {
  return StartCommit(KeyOf(*handle_, step, micro_batch), commit, options);
}

Future<DiscardResult> Head::Discard(int64_t step, int64_t micro_batch, const CallOptions& options) {
  return StartDiscard(KeyOf(*handle_, step, micro_batch), options);
}

Future<CommitResult> Contribution::Commit(const CommitOptions& commit, const CallOptions& options) const {
  return StartCommit(*key_, commit, options);
}

Future<DiscardResult> Contribution::Discard(const CallOptions& options) const { return StartDiscard(*key_, options); }

}  // namespace headwater::client
