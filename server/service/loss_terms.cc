#include "server/service/loss_terms.h"

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
#include "headwater/kernels/top_k.h"
#include "server/service/field_check.h"

namespace headwater::service {
namespace {

// How the cross entropy's options are nested in the term; null where it has none.
struct CrossEntropyOf {
  CrossEntropyRequest* options;
  const char* field;
};

CrossEntropyOf FindCrossEntropy(LossTermRequest* term) {
  if (auto* cross_entropy = std::get_if<CrossEntropyRequest>(&term->loss)) return {cross_entropy, ".cross_entropy"};
  auto* jsd = std::get_if<JensenShannonRequest>(&term->loss);
  return {jsd != nullptr ? &jsd->hard_loss : nullptr, ".jensen_shannon.hard_loss"};
}

CrossEntropySpec ToSpec(const CrossEntropyRequest& request) {
  CrossEntropySpec spec{request.label_smoothing, request.z_loss, {}, request.temperature, request.token_scaling};
  if (request.class_weights.has_value()) spec.class_weights = *request.class_weights;
  return spec;
}

TopKSpec ToSpec(const TopKRequest& request) { return {request.k, request.ids, request.log_probs, request.student_temperature}; }

absl::StatusOr<heads::SubmittedTerm> FindHeads(const Caller& caller, const heads::HeadRegistry& registry,
                                               const LossTermRequest& term) {
  heads::SubmittedTerm submitted;
  auto head = caller.Find(registry, term.head.head);
  if (!head.ok()) return head.status();
  submitted.head = *std::move(head);
  submitted.head_epoch = term.head.epoch;
  submitted.step = term.head.step;
  submitted.expected_weight_version = term.expected_weight_version;
  if (!term.teacher.has_value()) return submitted;
  auto teacher = caller.Find(registry, term.teacher->head);
  if (!teacher.ok()) return teacher.status();
  submitted.teacher_head = *std::move(teacher);
  submitted.teacher_head_epoch = term.teacher->epoch;
  submitted.expected_teacher_weight_version = term.teacher->expected_weight_version;
  submitted.term.teacher_hidden = {nullptr, term.row_count, submitted.teacher_head->spec().hidden_size, term.teacher->data_type};
  return submitted;
}

// What the header says against what the term's heads are.
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
  if (term.gradient_resolution != 0) {
    const auto* cross_entropy = std::get_if<CrossEntropyRequest>(&term.loss);
    const char* why = nullptr;
    if (!spec.trainable) {
      why = "0, because the head is frozen: draws are made of a step";
    } else if (cross_entropy != nullptr && cross_entropy->label_smoothing > 0 && spec.transform.softcap.has_value()) {
      why = "0, because of label_smoothing behind the head's softcap";
    }
    if (why != nullptr) {
      return FieldError(ErrorReason::kInvalidCombination, field + ".gradient_resolution", why,
                        absl::StrCat(term.gradient_resolution));
    }
  }
  if (!term.teacher.has_value()) return absl::OkStatus();
  const int64_t student_vocab = spec.transform.valid_vocab_size;
  const int64_t teacher_vocab = submitted.teacher_head->spec().transform.valid_vocab_size;
  if (student_vocab != teacher_vocab && !std::get<JensenShannonRequest>(term.loss).options.truncate_to_common) {
    return FieldError(ErrorReason::kVocabSizeMismatch, field + ".jensen_shannon.vocab_alignment",
                      absl::StrCat("equal vocabularies, or TRUNCATE_TO_COMMON; the student has ", student_vocab, " valid columns"),
                      absl::StrCat(teacher_vocab, " valid columns of the teacher"));
  }
  return absl::OkStatus();
}

absl::Status FitClassWeights(const HeadSpec& spec, const std::string& field, LossTermRequest* term) {
  const CrossEntropyOf cross_entropy = FindCrossEntropy(term);
  if (cross_entropy.options == nullptr || !cross_entropy.options->class_weights.has_value()) return absl::OkStatus();
  std::vector<float>& weights = *cross_entropy.options->class_weights;
  const int64_t size = static_cast<int64_t>(weights.size());
  if (size != spec.transform.valid_vocab_size && size != spec.vocab_size) {
    return FieldError(ErrorReason::kShapeMismatch, absl::StrCat(field, cross_entropy.field, ".class_weights.shape"),
                      absl::StrCat("[", spec.transform.valid_vocab_size, "]"), absl::StrCat("[", size, "]"));
  }
  weights.resize(static_cast<size_t>(spec.transform.valid_vocab_size));  // columns beyond have no probability, so no weight
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

void FillEngineTerm(const LossTermRequest& term, LossTerm* engine_term) {
  engine_term->row_start = term.row_start;
  engine_term->row_count = term.row_count;
  if (term.targets.has_value()) engine_term->targets = *term.targets;
  engine_term->ignore_index = term.ignore_index;
  if (term.token_weights.has_value()) engine_term->token_weights = *term.token_weights;
  if (term.entropy_factors.has_value()) engine_term->entropy_factors = *term.entropy_factors;
  if (term.lse_factors.has_value()) engine_term->lse_factors = *term.lse_factors;
  engine_term->loss_scale = term.loss_scale;
  engine_term->gradient_resolution = term.gradient_resolution;
  if (const auto* cross_entropy = std::get_if<CrossEntropyRequest>(&term.loss)) {
    engine_term->loss = ToSpec(*cross_entropy);
    return;
  }
  if (const auto* top_k = std::get_if<TopKRequest>(&term.loss)) {
    engine_term->loss = ToSpec(*top_k);
    return;
  }
  const JensenShannonRequest& jsd = std::get<JensenShannonRequest>(term.loss);
  JsdSpec options = jsd.options;
  options.hard_loss = ToSpec(jsd.hard_loss);
  engine_term->loss = options;
}

}  // namespace

std::string TermField(size_t index) { return absl::StrCat("header.terms[", index, "]"); }

absl::Status BuildTerms(const Caller& caller, const heads::HeadRegistry& registry, MicroBatchRequest* request,
                        heads::Submission* submission) {
  bool any_trainable = false;
  for (size_t i = 0; i < request->terms.size(); ++i) {
    LossTermRequest& term = request->terms[i];
    auto submitted = FindHeads(caller, registry, term);
    if (!submitted.ok()) return submitted.status();
    const HeadSpec& spec = submitted->head->spec();
    any_trainable = any_trainable || spec.trainable;
    HEADWATER_RETURN_IF_ERROR(CheckHeads(*request, term, *submitted, TermField(i)));
    HEADWATER_RETURN_IF_ERROR(FitClassWeights(spec, TermField(i), &term));
    FillEngineTerm(term, &submitted->term);
    if (term.gradient_resolution != 0) submitted->term.dither_seed = DitherSeed(*request, i);
    submission->terms.push_back(*std::move(submitted));
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
    const LossTermRequest& term = request.terms[i];
    const int64_t valid_vocab_size = submission.terms[i].head->spec().transform.valid_vocab_size;
    if (const auto* top_k = std::get_if<TopKRequest>(&term.loss)) {
      HEADWATER_RETURN_IF_ERROR(CheckTopKRows(TermField(i) + ".top_k_teacher", ".data", ToSpec(*top_k), valid_vocab_size));
    }
    if (!term.targets.has_value()) continue;
    for (size_t row = 0; row < term.targets->size(); ++row) {
      const int32_t target = (*term.targets)[row];
      if (target == term.ignore_index || (target >= 0 && target < valid_vocab_size)) continue;
      return FieldError(ErrorReason::kTargetOutOfVocab, TermField(i) + ".targets.data",
                        absl::StrCat("ids in [0, ", valid_vocab_size, ") or ignore_index ", term.ignore_index),
                        absl::StrCat(target, " at index ", row));
    }
  }
  return absl::OkStatus();
}

}  // namespace headwater::service
