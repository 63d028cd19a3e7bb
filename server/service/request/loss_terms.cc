#include "server/service/request/loss_terms.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/loss_options.h"
#include "headwater/kernels/top_k.h"
#include "server/service/request/field_check.h"

namespace headwater::service {
namespace {

absl::StatusOr<heads::SubmittedTerm> FindHeads(const Caller& caller, const heads::HeadRegistry& registry,
                                               const LossTermRequest& term) {
  heads::SubmittedTerm submitted;
  submitted.term = term.term;
  HEADWATER_ASSIGN_OR_RETURN(submitted.head, caller.Find(registry, term.head.head));
  submitted.head_epoch = term.head.epoch;
  submitted.step = term.head.step;
  submitted.expected_weight_version = term.expected_weight_version;
  if (!term.teacher.has_value()) return submitted;
  HEADWATER_ASSIGN_OR_RETURN(submitted.teacher_head, caller.Find(registry, term.teacher->head));
  submitted.teacher_head_epoch = term.teacher->epoch;
  submitted.expected_teacher_weight_version = term.teacher->expected_weight_version;
  submitted.term.teacher_hidden = {nullptr, term.term.row_count, submitted.teacher_head->spec().hidden_size,
                                   term.teacher->data_type};
  return submitted;
}

// Checks the header against the term's heads.
absl::Status CheckHeads(const MicroBatchRequest& request, const LossTermRequest& term, const heads::SubmittedTerm& submitted,
                        const std::string& field) {
  const HeadSpec& spec = submitted.head->spec();
  if (request.hidden_size != spec.hidden_size) {
    return FieldError(ErrorReason::kShapeMismatch, "header.hidden_size",
                      absl::StrCat(spec.hidden_size, ", as ", submitted.head->name().ToString(), " has"),
                      absl::StrCat(request.hidden_size));
  }
  if (spec.trainable && request.backward) {
    if (!request.micro_batch.has_value()) {
      return MissingField("header.micro_batch", "a number >= 0, because the head is trainable");
    }
    if (!term.head.epoch.has_value()) {
      return MissingField(field + ".head.head_epoch", "the head's epoch, because the head is trainable");
    }
    if (!term.head.step.has_value()) return MissingField(field + ".head.step", "a step number >= 0, because the head is trainable");
  }
  if (!spec.trainable && term.head.step.has_value()) {
    return FieldError(ErrorReason::kInvalidCombination, field + ".head.step", "nothing, because the head is frozen",
                      absl::StrCat(*term.head.step));
  }
  if (term.term.gradient_resolution != 0 && !spec.trainable) {
    return FieldError(ErrorReason::kInvalidCombination, field + ".gradient_resolution",
                      "0, because the head is frozen: draws are made of a step", absl::StrCat(term.term.gradient_resolution));
  }
  HEADWATER_RETURN_IF_ERROR(CheckTermOptionsWithHead(field, term.term, spec));
  if (!term.teacher.has_value()) return absl::OkStatus();
  const int64_t student_vocab = spec.transform.valid_vocab_size;
  const int64_t teacher_vocab = submitted.teacher_head->spec().transform.valid_vocab_size;
  if (student_vocab != teacher_vocab && !std::get<JsdSpec>(term.term.loss).truncate_to_common) {
    return FieldError(ErrorReason::kVocabSizeMismatch, field + ".jensen_shannon.vocab_alignment",
                      absl::StrCat("equal vocabularies, or TRUNCATE_TO_COMMON; the student has ", student_vocab, " valid columns"),
                      absl::StrCat(teacher_vocab, " valid columns of the teacher"));
  }
  return absl::OkStatus();
}

// Cuts class weights to the columns that have probability.
absl::Status FitClassWeights(const HeadSpec& spec, const std::string& field, LossTerm* term) {
  auto* const jsd = std::get_if<JsdSpec>(&term->loss);
  CrossEntropySpec* const cross_entropy = jsd != nullptr ? &jsd->hard_loss : std::get_if<CrossEntropySpec>(&term->loss);
  if (cross_entropy == nullptr || cross_entropy->class_weights.data() == nullptr) return absl::OkStatus();
  absl::Span<const float>& weights = cross_entropy->class_weights;
  const int64_t size = static_cast<int64_t>(weights.size());
  if (size != spec.transform.valid_vocab_size && size != spec.vocab_size) {
    return FieldError(ErrorReason::kShapeMismatch,
                      absl::StrCat(field, jsd != nullptr ? ".jensen_shannon.hard_loss" : ".cross_entropy", ".class_weights.shape"),
                      absl::StrCat("[", spec.transform.valid_vocab_size, "]"), absl::StrCat("[", size, "]"));
  }
  weights = weights.first(static_cast<size_t>(spec.transform.valid_vocab_size));
  return absl::OkStatus();
}

// The seed of a term's draws: a digest of its head, step, micro-batch and index. A repeat draws alike. Changing it changes the bits
// of dithered gradients.
uint64_t DitherSeed(const MicroBatchRequest& request, size_t index) {
  const HeadStepRequest& head = request.terms[index].head;
  const Digest digest = DigestBuilder().Finish(
      absl::StrCat("headwater.dither.1 ", head.head.ToString(), " ", *head.step, " ", *request.micro_batch, " ", index));
  uint64_t seed = 0;
  std::memcpy(&seed, digest.data(), sizeof(seed));
  return seed;
}

}  // namespace

std::string TermField(size_t index) { return absl::StrCat("header.terms[", index, "]"); }

absl::Status BuildTerms(const Caller& caller, const heads::HeadRegistry& registry, MicroBatchRequest* request,
                        heads::Submission* submission) {
  bool any_trainable = false;
  for (size_t i = 0; i < request->terms.size(); ++i) {
    LossTermRequest& term = request->terms[i];
    HEADWATER_ASSIGN_OR_RETURN(auto submitted, FindHeads(caller, registry, term));
    const HeadSpec& spec = submitted.head->spec();
    any_trainable = any_trainable || spec.trainable;
    HEADWATER_RETURN_IF_ERROR(CheckHeads(*request, term, submitted, TermField(i)));
    HEADWATER_RETURN_IF_ERROR(FitClassWeights(spec, TermField(i), &term.term));
    submitted.term.loss = term.term.loss;
    if (term.term.gradient_resolution != 0) submitted.term.dither_seed = DitherSeed(*request, i);
    submission->terms.push_back(std::move(submitted));
  }
  if (any_trainable || !request->micro_batch.has_value()) return absl::OkStatus();
  return FieldError(ErrorReason::kInvalidCombination, "header.micro_batch", "nothing, because every head is frozen",
                    absl::StrCat(*request->micro_batch));
}

bool MustBeHeld(const heads::Submission& submission) {
  if (submission.late_token_factors) return true;
  const auto has_no_slot = [](const heads::SubmittedTerm& term) {
    return term.head->spec().trainable && term.head->spec().staging_slots == 0;
  };
  return submission.explicit_commit && submission.hold != nullptr &&
         std::any_of(submission.terms.begin(), submission.terms.end(), has_no_slot);
}

std::vector<heads::HeadUse> UseHeads(const heads::Submission& submission) {
  std::vector<heads::HeadUse> uses;
  const auto use_once = [&uses](const std::shared_ptr<heads::Head>& head) {
    const auto is_it = [&head](const heads::HeadUse& use) { return use.head() == head; };
    if (head != nullptr && std::none_of(uses.begin(), uses.end(), is_it)) uses.emplace_back(head);
  };
  for (const heads::SubmittedTerm& term : submission.terms) {
    use_once(term.head);
    use_once(term.teacher_head);
  }
  return uses;
}

absl::Status CheckTargets(const MicroBatchRequest& request, const heads::Submission& submission) {
  for (size_t i = 0; i < request.terms.size(); ++i) {
    const LossTerm& term = request.terms[i].term;
    const int64_t valid_vocab_size = submission.terms[i].head->spec().transform.valid_vocab_size;
    if (const auto* top_k = std::get_if<TopKSpec>(&term.loss)) {
      HEADWATER_RETURN_IF_ERROR(CheckTopKRows(TermField(i) + ".top_k_teacher", ".data", *top_k, valid_vocab_size));
    }
    for (size_t row = 0; row < term.targets.size(); ++row) {
      const int32_t target = term.targets[row];
      if (target == term.ignore_index || (target >= 0 && target < valid_vocab_size)) continue;
      return FieldError(ErrorReason::kTargetOutOfVocab, TermField(i) + ".targets.data",
                        absl::StrCat("ids in [0, ", valid_vocab_size, ") or ignore_index ", term.ignore_index),
                        absl::StrCat(target, " at index ", row));
    }
  }
  return absl::OkStatus();
}

}  // namespace headwater::service
