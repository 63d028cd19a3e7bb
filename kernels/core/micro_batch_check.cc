#include "kernels/core/micro_batch_check.h"

#include <cmath>
#include <sstream>
#include <string>
#include <utility>
#include <variant>

#include "headwater/kernels/error.h"
#include "headwater/kernels/loss_options.h"
#include "headwater/kernels/return_if_error.h"
#include "headwater/kernels/top_k.h"

namespace headwater {
namespace {

std::string NumberText(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

absl::Status BadField(const std::string& field, const std::string& expected, const std::string& actual) {
  return FieldError(ErrorReason::kInvalidField, field, expected, actual);
}

absl::Status Missing(const std::string& field) {
  return MakeError(ErrorReason::kMissingField, field + " is required and was not given", {{"field", field}});
}

absl::Status BadCombination(const std::string& field, const std::string& message) {
  return MakeError(ErrorReason::kInvalidCombination, message, {{"field", field}});
}

absl::Status CheckCount(const std::string& field, const std::string& what, int64_t expected, int64_t actual) {
  if (expected == actual) return absl::OkStatus();
  return MakeError(ErrorReason::kShapeMismatch,
                   field + " has " + std::to_string(actual) + " " + what + ", expected " + std::to_string(expected),
                   {{"field", field}, {"expected", std::to_string(expected)}, {"actual", std::to_string(actual)}});
}

absl::Status CheckType(const std::string& field, DataType type) {
  if (type == DataType::kFloat32 || type == DataType::kBFloat16 || type == DataType::kFloat16) return absl::OkStatus();
  return BadField(field + ".data_type", "float32, bfloat16 or float16", std::to_string(static_cast<int32_t>(type)));
}

absl::Status CheckMemory(const std::string& field, MemorySpace memory, bool has_device) {
  if (memory == MemorySpace::kHost || (memory == MemorySpace::kDevice && has_device)) return absl::OkStatus();
  if (memory != MemorySpace::kDevice) {
    return BadField(field + ".memory", "host or device", std::to_string(static_cast<int32_t>(memory)));
  }
  return MakeError(ErrorReason::kInvalidField, field + ".memory must be host: this engine has no device memory",
                   {{"field", field + ".memory"}, {"expected", "host"}, {"actual", "device"}});
}

absl::Status CheckFinite(const std::string& field, absl::Span<const float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) return BadField(field + "[" + std::to_string(i) + "]", "finite", NumberText(values[i]));
  }
  return absl::OkStatus();
}

// One finite value for each row, or none.
absl::Status CheckRowValues(const std::string& field, const LossTerm& term, absl::Span<const float> values) {
  if (values.empty()) return absl::OkStatus();
  HEADWATER_RETURN_IF_ERROR(CheckCount(field, "entries", term.row_count, static_cast<int64_t>(values.size())));
  return CheckFinite(field, values);
}

absl::Status CheckClassWeights(const std::string& field, const CrossEntropySpec& spec, const HeadSpec& head) {
  if (spec.class_weights.empty()) return absl::OkStatus();
  const int64_t count = static_cast<int64_t>(spec.class_weights.size());
  if (count != head.vocab_size) {
    HEADWATER_RETURN_IF_ERROR(CheckCount(field + ".class_weights", "entries", head.transform.valid_vocab_size, count));
  }
  return CheckFinite(field + ".class_weights", spec.class_weights);
}

absl::Status CheckJsd(const std::string& name, const LossTerm& term, const JsdSpec& spec, bool has_device) {
  if (term.teacher_head == nullptr) return Missing(name + ".teacher_head");
  HEADWATER_RETURN_IF_ERROR(CheckClassWeights(name + ".jensen_shannon.hard_loss", spec.hard_loss, term.head->spec()));
  const HeadSpec& teacher = term.teacher_head->spec();
  HEADWATER_RETURN_IF_ERROR(CheckType(name + ".teacher_hidden", term.teacher_hidden.data_type));
  HEADWATER_RETURN_IF_ERROR(CheckMemory(name + ".teacher_hidden", term.teacher_hidden.memory, has_device));
  HEADWATER_RETURN_IF_ERROR(CheckCount(name + ".teacher_hidden", "rows", term.row_count, term.teacher_hidden.row_count));
  HEADWATER_RETURN_IF_ERROR(CheckCount(name + ".teacher_hidden", "columns", teacher.hidden_size, term.teacher_hidden.column_count));
  if (term.teacher_hidden.data == nullptr && term.row_count > 0) return Missing(name + ".teacher_hidden");
  const int64_t student_size = term.head->spec().transform.valid_vocab_size;
  const int64_t teacher_size = teacher.transform.valid_vocab_size;
  if (student_size != teacher_size && !spec.truncate_to_common) {
    return MakeError(ErrorReason::kVocabSizeMismatch,
                     "the student's valid vocabulary has " + std::to_string(student_size) + " entries and the teacher's " +
                         std::to_string(teacher_size) + "; ask for truncation to the common prefix if that is meant",
                     {{"field", name + ".teacher_head"},
                      {"studentValidVocabSize", std::to_string(student_size)},
                      {"teacherValidVocabSize", std::to_string(teacher_size)}});
  }
  return absl::OkStatus();
}

absl::Status CheckTopK(const std::string& name, const LossTerm& term, const TopKSpec& spec) {
  const int64_t entries = term.row_count * spec.k;
  HEADWATER_RETURN_IF_ERROR(CheckCount(name + ".top_k_teacher.ids", "entries", entries, static_cast<int64_t>(spec.ids.size())));
  HEADWATER_RETURN_IF_ERROR(
      CheckCount(name + ".top_k_teacher.log_probs", "entries", entries, static_cast<int64_t>(spec.log_probs.size())));
  if (WantsLogitOutputs(term)) {
    return BadCombination(name + ".top_k_teacher", "a term with a top-k teacher has no per-token output but token_loss");
  }
  return CheckTopKRows(name + ".top_k_teacher", "", spec, term.head->spec().transform.valid_vocab_size);
}

absl::Status CheckTargets(const std::string& name, const LossTerm& term) {
  const int64_t valid_vocab_size = term.head->spec().transform.valid_vocab_size;
  for (size_t i = 0; i < term.targets.size(); ++i) {
    const int32_t target = term.targets[i];
    if (target == term.ignore_index || (target >= 0 && target < valid_vocab_size)) continue;
    return MakeError(ErrorReason::kTargetOutOfVocab,
                     name + ".targets[" + std::to_string(i) + "] is " + std::to_string(target) + ", expected an id in [0, " +
                         std::to_string(valid_vocab_size) + ") or ignore_index " + std::to_string(term.ignore_index),
                     {{"field", name + ".targets"},
                      {"index", std::to_string(i)},
                      {"actual", std::to_string(target)},
                      {"validVocabSize", std::to_string(valid_vocab_size)}});
  }
  return absl::OkStatus();
}

absl::Status CheckTerm(const std::string& name, const MicroBatch& micro_batch, const LossTerm& term, bool has_device) {
  if (term.head == nullptr) return Missing(name + ".head");
  const int64_t rows = micro_batch.hidden.row_count;
  if (term.row_start < 0 || term.row_start > rows) {
    return BadField(name + ".row_start", "in [0, " + std::to_string(rows) + "]", std::to_string(term.row_start));
  }
  if (term.row_count < 0 || term.row_count > rows - term.row_start) {
    return BadField(name + ".row_count", "in [0, " + std::to_string(rows - term.row_start) + "]", std::to_string(term.row_count));
  }
  HEADWATER_RETURN_IF_ERROR(CheckCount("hidden", "columns", term.head->spec().hidden_size, micro_batch.hidden.column_count));
  HEADWATER_RETURN_IF_ERROR(CheckTermOptions(name, term, micro_batch.backward));
  HEADWATER_RETURN_IF_ERROR(CheckTermOptionsWithHead(name, term, term.head->spec()));
  HEADWATER_RETURN_IF_ERROR(CheckRowValues(name + ".token_weights", term, term.token_weights));
  HEADWATER_RETURN_IF_ERROR(CheckRowValues(name + ".entropy_factors", term, term.entropy_factors));
  HEADWATER_RETURN_IF_ERROR(CheckRowValues(name + ".lse_factors", term, term.lse_factors));
  const auto* jsd = std::get_if<JsdSpec>(&term.loss);
  if (jsd != nullptr) {
    HEADWATER_RETURN_IF_ERROR(CheckJsd(name, term, *jsd, has_device));
  } else {
    const auto* cross_entropy = std::get_if<CrossEntropySpec>(&term.loss);
    if (cross_entropy != nullptr) {
      HEADWATER_RETURN_IF_ERROR(CheckClassWeights(name + ".cross_entropy", *cross_entropy, term.head->spec()));
    } else {
      HEADWATER_RETURN_IF_ERROR(CheckTopK(name, term, std::get<TopKSpec>(term.loss)));
    }
    if (term.teacher_head != nullptr || term.teacher_hidden.data != nullptr) {
      const char* what =
          cross_entropy != nullptr ? " is a cross entropy and takes no teacher" : " has a top-k teacher and takes no other";
      return BadCombination(name + ".teacher_head", name + what);
    }
  }
  if (term.targets.empty()) {
    const bool needed = jsd != nullptr ? jsd->hard_loss_weight > 0 : std::holds_alternative<CrossEntropySpec>(term.loss);
    return needed && term.row_count > 0 ? Missing(name + ".targets") : absl::OkStatus();
  }
  HEADWATER_RETURN_IF_ERROR(CheckCount(name + ".targets", "entries", term.row_count, static_cast<int64_t>(term.targets.size())));
  return CheckTargets(name, term);
}

absl::Status CheckModes(const MicroBatch& micro_batch) {
  if (!micro_batch.backward && micro_batch.grad_hidden.data != nullptr) {
    return BadCombination("grad_hidden", "grad_hidden is only computed with backward");
  }
  if (!micro_batch.backward && micro_batch.grad_weight != GradWeightMode::kNone) {
    return BadCombination("grad_weight", "grad_weight is only computed with backward");
  }
  if (micro_batch.refuse_non_finite && micro_batch.grad_weight == GradWeightMode::kAccumulate) {
    return BadCombination("refuse_non_finite", "refuse_non_finite needs a staged contribution: a direct one cannot be taken back");
  }
  if (micro_batch.digest_rows && micro_batch.flow == nullptr) {
    return BadCombination("digest_rows", "digest_rows needs a flow, which alone gets the rows' sum");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckHeads(const MicroBatch& micro_batch, absl::FunctionRef<bool(const EngineHead&)> is_own) {
  for (size_t i = 0; i < micro_batch.terms.size(); ++i) {
    for (const EngineHead* head : {micro_batch.terms[i].head, micro_batch.terms[i].teacher_head}) {
      if (head == nullptr || is_own(*head)) continue;
      const std::string field = "terms[" + std::to_string(i) + "]";
      return MakeError(ErrorReason::kInvalidField, field + " names a head of another engine", {{"field", field}});
    }
  }
  return absl::OkStatus();
}

absl::Status CheckMicroBatch(const MicroBatch& micro_batch, bool has_device) {
  const RowsView& hidden = micro_batch.hidden;
  if (hidden.row_count < 0) return BadField("hidden.row_count", ">= 0", std::to_string(hidden.row_count));
  if (hidden.data == nullptr && hidden.row_count > 0) return Missing("hidden");
  HEADWATER_RETURN_IF_ERROR(CheckType("hidden", hidden.data_type));
  HEADWATER_RETURN_IF_ERROR(CheckMemory("hidden", hidden.memory, has_device));
  if (micro_batch.after != nullptr && !has_device) {
    return MakeError(ErrorReason::kInvalidField, "after must not be given: this engine has no device",
                     {{"field", "after"}, {"expected", "none"}, {"actual", "an event"}});
  }
  HEADWATER_RETURN_IF_ERROR(CheckModes(micro_batch));
  const MutableRowsView& grad_hidden = micro_batch.grad_hidden;
  if (grad_hidden.data != nullptr) {
    HEADWATER_RETURN_IF_ERROR(CheckType("grad_hidden", grad_hidden.data_type));
    HEADWATER_RETURN_IF_ERROR(CheckMemory("grad_hidden", grad_hidden.memory, has_device));
    HEADWATER_RETURN_IF_ERROR(CheckCount("grad_hidden", "rows", hidden.row_count, grad_hidden.row_count));
    HEADWATER_RETURN_IF_ERROR(CheckCount("grad_hidden", "columns", hidden.column_count, grad_hidden.column_count));
    if (!std::isfinite(micro_batch.grad_hidden_scale)) {
      return BadField("grad_hidden_scale", "finite", NumberText(micro_batch.grad_hidden_scale));
    }
  }
  if (micro_batch.terms.empty()) return Missing("terms");
  for (size_t i = 0; i < micro_batch.terms.size(); ++i) {
    HEADWATER_RETURN_IF_ERROR(CheckTerm("terms[" + std::to_string(i) + "]", micro_batch, micro_batch.terms[i], has_device));
  }
  return absl::OkStatus();
}

absl::Status RefuseTopK(const MicroBatch& micro_batch, const std::string& engine) {
  for (const LossTerm& term : micro_batch.terms) {
    if (!std::holds_alternative<TopKSpec>(term.loss)) continue;
    return MakeError(ErrorReason::kFeatureNotBuilt, engine + " has no top-k teachers (top_k_teacher)",
                     {{"feature", "top_k_teacher"}});
  }
  return absl::OkStatus();
}

absl::Status RefuseResolution(const MicroBatch& micro_batch, absl::FunctionRef<const char*(const LossTerm&)> refused) {
  for (size_t i = 0; i < micro_batch.terms.size(); ++i) {
    const LossTerm& term = micro_batch.terms[i];
    if (term.gradient_resolution == 0) continue;
    const auto* cross_entropy = std::get_if<CrossEntropySpec>(&term.loss);
    const bool smooths = cross_entropy != nullptr && cross_entropy->label_smoothing > 0;
    const char* const of = smooths ? "a cross entropy with label_smoothing" : refused(term);
    if (of == nullptr) continue;
    const std::string field = "terms[" + std::to_string(i) + "].gradient_resolution";
    return MakeError(ErrorReason::kFeatureNotBuilt, field + " of " + of + " is not built for GPUs; it must be 0",
                     {{"field", field}, {"feature", "gradient_resolution"}});
  }
  return absl::OkStatus();
}

absl::StatusOr<Parallelism> ParallelismOf(const MicroBatch& micro_batch) {
  const Parallelism first = micro_batch.terms.front().head->spec().parallelism;
  for (size_t i = 0; i < micro_batch.terms.size(); ++i) {
    const LossTerm& term = micro_batch.terms[i];
    for (const EngineHead* head : {term.head, term.teacher_head}) {
      if (head == nullptr || head->spec().parallelism == first) continue;
      return MakeError(
          ErrorReason::kInvalidCombination,
          std::string("in a group all heads of a micro-batch, teachers too, must have the same parallelism; there are ") +
              ParallelismName(first) + " and " + ParallelismName(head->spec().parallelism),
          {{"field", "terms[" + std::to_string(i) + "]"},
           {"expected", ParallelismName(first)},
           {"actual", ParallelismName(head->spec().parallelism)}});
    }
  }
  return first;
}

}  // namespace headwater
