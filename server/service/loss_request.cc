#include "server/service/loss_request.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/service/field_check.h"

namespace headwater::service {
namespace {

// What a tensor field must be.
struct TensorRule {
  v1::DataType data_type;
  const char* data_type_name;
  int64_t size;  // of the first dimension; -1: any size >= 0 up to size_max
  int64_t size_max = std::numeric_limits<int64_t>::max();
  int64_t columns = 0;  // > 0: there is a second dimension, of this size; `size` is >= 0 then
};

std::string ShapeText(const v1::Tensor& tensor) {
  std::string shape = "[";
  for (int i = 0; i < tensor.shape_size() && i < 8; ++i) absl::StrAppend(&shape, i == 0 ? "" : ", ", tensor.shape(i));
  return shape + (tensor.shape_size() > 8 ? ", ...]" : "]");
}

// Checks type, shape and length of a tensor of 4-byte elements.
absl::Status CheckVector(const v1::Tensor& tensor, const std::string& field, const TensorRule& rule) {
  const std::string type_field = field + ".data_type";
  if (tensor.data_type() == v1::DATA_TYPE_UNSPECIFIED) return MissingField(type_field, rule.data_type_name);
  if (tensor.data_type() != rule.data_type) {
    return FieldError(ErrorReason::kDataTypeMismatch, type_field, rule.data_type_name,
                      v1::DataType_IsValid(tensor.data_type()) ? v1::DataType_Name(tensor.data_type())
                                                               : absl::StrCat(static_cast<int>(tensor.data_type())));
  }
  const bool is_matrix = rule.columns > 0;
  if (tensor.shape_size() != (is_matrix ? 2 : 1) || tensor.shape(0) < 0 || (rule.size >= 0 && tensor.shape(0) != rule.size) ||
      tensor.shape(0) > rule.size_max || (is_matrix && tensor.shape(1) != rule.columns)) {
    std::string expected = absl::StrCat("one dimension of at most ", rule.size_max);
    if (rule.size >= 0)
      expected = is_matrix ? absl::StrCat("[", rule.size, ", ", rule.columns, "]") : absl::StrCat("[", rule.size, "]");
    return FieldError(ErrorReason::kShapeMismatch, field + ".shape", expected, ShapeText(tensor));
  }
  const int64_t elements = tensor.shape(0) * (is_matrix ? rule.columns : 1);
  if (tensor.data().size() / 4 != static_cast<uint64_t>(elements) || tensor.data().size() % 4 != 0) {
    return FieldError(ErrorReason::kDataLengthMismatch, field + ".data", absl::StrCat(elements, " elements of 4 bytes"),
                      absl::StrCat(tensor.data().size(), " bytes"));
  }
  return absl::OkStatus();
}

template <typename T>
std::vector<T> CopyElements(const v1::Tensor& tensor) {
  std::vector<T> elements(tensor.data().size() / sizeof(T));
  if (!elements.empty()) std::memcpy(elements.data(), tensor.data().data(), tensor.data().size());
  return elements;
}

// Finite fp32 elements.
absl::StatusOr<std::vector<float>> DecodeFloats(const v1::Tensor& tensor, const std::string& field, const TensorRule& rule) {
  HEADWATER_RETURN_IF_ERROR(CheckVector(tensor, field, rule));
  std::vector<float> values = CopyElements<float>(tensor);
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    return FieldError(ErrorReason::kInvalidField, field + ".data", "finite elements", absl::StrCat(values[i], " at index ", i));
  }
  return values;
}

// One for each row of a term, if the tensor is there.
absl::StatusOr<std::optional<std::vector<float>>> DecodeRowFloats(bool present, const v1::Tensor& tensor, const std::string& field,
                                                                  int64_t row_count) {
  if (!present) return std::optional<std::vector<float>>();
  auto values = DecodeFloats(tensor, field, {v1::DATA_TYPE_FLOAT32, "FLOAT32", row_count});
  if (!values.ok()) return values.status();
  return std::optional<std::vector<float>>(*std::move(values));
}

absl::Status UnknownEnum(const std::string& field, const std::string& expected, int value) {
  return FieldError(ErrorReason::kInvalidField, field, expected, absl::StrCat(value));
}

// Logits are float32, and multiplied by its reciprocal.
absl::Status CheckTemperature(const std::string& field, double value) {
  const float reciprocal = static_cast<float>(1 / value);
  return CheckNumber(field, value, value > 0 && reciprocal > 0 && std::isfinite(reciprocal),
                     "a finite number > 0 whose reciprocal is a float32 > 0");
}

absl::StatusOr<CrossEntropyRequest> DecodeCrossEntropy(const v1::CrossEntropyLoss& loss, const std::string& field,
                                                       const Limits& limits) {
  CrossEntropyRequest decoded;
  decoded.label_smoothing = loss.label_smoothing();
  decoded.z_loss = loss.z_loss();
  HEADWATER_RETURN_IF_ERROR(CheckNumber(field + ".label_smoothing", decoded.label_smoothing,
                                        decoded.label_smoothing >= 0 && decoded.label_smoothing <= 1, "a number in [0, 1]"));
  HEADWATER_RETURN_IF_ERROR(CheckNotNegative(field + ".z_loss", decoded.z_loss));
  if (loss.has_class_weights()) {
    auto weights =
        DecodeFloats(loss.class_weights(), field + ".class_weights", {v1::DATA_TYPE_FLOAT32, "FLOAT32", -1, limits.max_vocab_size});
    if (!weights.ok()) return weights.status();
    decoded.class_weights = *std::move(weights);
  }
  if (loss.has_temperature()) decoded.temperature = loss.temperature();
  HEADWATER_RETURN_IF_ERROR(CheckTemperature(field + ".temperature", decoded.temperature));
  decoded.token_scaling = loss.token_scaling();
  return decoded;
}

absl::StatusOr<JensenShannonRequest> DecodeJensenShannon(const v1::JensenShannonLoss& loss, const std::string& field,
                                                         const Limits& limits) {
  JensenShannonRequest decoded;
  JsdSpec& options = decoded.options;
  if (loss.has_beta()) options.beta = loss.beta();
  if (loss.has_student_temperature()) options.student_temperature = loss.student_temperature();
  if (loss.has_teacher_temperature()) options.teacher_temperature = loss.teacher_temperature();
  options.hard_loss_weight = loss.hard_loss_weight();
  HEADWATER_RETURN_IF_ERROR(
      CheckNumber(field + ".beta", options.beta, options.beta >= 0 && options.beta <= 1, "a number in [0, 1]"));
  HEADWATER_RETURN_IF_ERROR(CheckTemperature(field + ".student_temperature", options.student_temperature));
  HEADWATER_RETURN_IF_ERROR(CheckTemperature(field + ".teacher_temperature", options.teacher_temperature));
  HEADWATER_RETURN_IF_ERROR(CheckNumber(field + ".hard_loss_weight", options.hard_loss_weight,
                                        options.hard_loss_weight >= 0 && options.hard_loss_weight <= 1, "a number in [0, 1]"));
  if (loss.has_hard_loss()) {
    if (options.hard_loss_weight == 0) {
      return FieldError(ErrorReason::kInvalidCombination, field + ".hard_loss", "nothing, because hard_loss_weight is 0",
                        "options of the hard loss");
    }
    if (loss.hard_loss().has_temperature()) {
      return FieldError(ErrorReason::kInvalidCombination, field + ".hard_loss.temperature",
                        "nothing, because a divergence's hard loss takes none", absl::StrCat(loss.hard_loss().temperature()));
    }
    if (loss.hard_loss().token_scaling()) {
      return FieldError(ErrorReason::kInvalidCombination, field + ".hard_loss.token_scaling",
                        "false, because a divergence's hard loss takes none", "true");
    }
    auto hard_loss = DecodeCrossEntropy(loss.hard_loss(), field + ".hard_loss", limits);
    if (!hard_loss.ok()) return hard_loss.status();
    decoded.hard_loss = *std::move(hard_loss);
  }
  switch (loss.vocab_alignment()) {
    case v1::VOCAB_ALIGNMENT_UNSPECIFIED:
    case v1::VOCAB_ALIGNMENT_REFUSE:
      break;
    case v1::VOCAB_ALIGNMENT_TRUNCATE_TO_COMMON:
      options.truncate_to_common = true;
      break;
    default:
      return UnknownEnum(field + ".vocab_alignment", "REFUSE or TRUNCATE_TO_COMMON", loss.vocab_alignment());
  }
  return decoded;
}

absl::StatusOr<std::optional<int64_t>> DecodeWeightVersion(bool present, int64_t version, const std::string& field) {
  if (!present) return std::optional<int64_t>();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast(field, version, 0));
  return std::optional<int64_t>(version);
}

absl::Status ValidateJoinKey(const std::string& join_key, const std::string& field) {
  if (join_key.empty()) return MissingField(field, "1 to 256 bytes");
  if (join_key.size() <= 256) return absl::OkStatus();
  return FieldError(ErrorReason::kInvalidField, field, "1 to 256 bytes", absl::StrCat(join_key.size(), " bytes"));
}

// Indices of rows of a set of `total_row_count`.
absl::StatusOr<std::vector<int32_t>> DecodeRowIndices(const v1::Tensor& tensor, const std::string& field, const TensorRule& rule,
                                                      int64_t total_row_count) {
  HEADWATER_RETURN_IF_ERROR(CheckVector(tensor, field, rule));
  std::vector<int32_t> indices = CopyElements<int32_t>(tensor);
  for (const int32_t index : indices) {
    if (index < 0 || index >= total_row_count) {
      return FieldError(ErrorReason::kInvalidField, field + ".data", absl::StrCat("indices in [0, ", total_row_count, ")"),
                        absl::StrCat(index));
    }
  }
  return indices;
}

// Rows in a region of the session.
absl::StatusOr<std::optional<SharedRowsRequest>> DecodeSharedRows(bool present, const v1::SharedRows& rows, bool has_session,
                                                                  const std::string& field) {
  if (!present) return std::optional<SharedRowsRequest>();
  if (!has_session) return MissingField("header.session_id", absl::StrCat("the session of the region that ", field, " names"));
  if (rows.region_id().empty()) return MissingField(field + ".region_id", "the id that RegisterSharedMemory answered");
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast(field + ".offset_bytes", rows.offset_bytes(), 0));
  return std::optional<SharedRowsRequest>({rows.region_id(), rows.offset_bytes()});
}

// Which head the teacher is, and of what type its rows are: what each source of them says alike.
template <typename Source>
absl::StatusOr<TeacherRequest> DecodeTeacherHead(const Source& source, const std::string& field) {
  auto name = DecodeHeadName(source.head(), field + ".head");
  if (!name.ok()) return name.status();
  auto epoch = DecodeOptionalEpoch(source.head_epoch(), field + ".head_epoch");
  if (!epoch.ok()) return epoch.status();
  auto data_type = DecodeFloatType(source.data_type(), field + ".data_type");
  if (!data_type.ok()) return data_type.status();
  auto version = DecodeWeightVersion(source.has_expected_weight_version(), source.expected_weight_version(),
                                     field + ".expected_weight_version");
  if (!version.ok()) return version.status();
  return TeacherRequest{*std::move(name), *epoch, *data_type, *version, std::nullopt, std::nullopt};
}

absl::StatusOr<TeacherRequest> DecodeJoinedTeacher(const v1::JoinedTeacher& joined, const std::string& field, int64_t term_rows) {
  auto teacher = DecodeTeacherHead(joined, field);
  if (!teacher.ok()) return teacher;
  JoinedTeacherRequest rows;
  rows.join_key = joined.join_key();
  HEADWATER_RETURN_IF_ERROR(ValidateJoinKey(rows.join_key, field + ".join_key"));
  rows.total_row_count = joined.total_row_count();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast(field + ".total_row_count", rows.total_row_count, 1));
  if (joined.has_row_indices()) {
    auto indices = DecodeRowIndices(joined.row_indices(), field + ".row_indices", {v1::DATA_TYPE_INT32, "INT32", term_rows},
                                    rows.total_row_count);
    if (!indices.ok()) return indices.status();
    rows.row_indices = *std::move(indices);
  } else if (term_rows > rows.total_row_count) {
    return FieldError(ErrorReason::kInvalidField, field + ".total_row_count",
                      absl::StrCat("at least the term's ", term_rows, " rows, because there are no row_indices"),
                      absl::StrCat(rows.total_row_count));
  }
  teacher->joined = std::move(rows);
  return teacher;
}

// The teacher of a JSD term. Teachers that are not built are validated, then refused.
absl::StatusOr<TeacherRequest> DecodeTeacher(const v1::LossTerm& term, const std::string& field, int64_t term_rows,
                                             bool has_session) {
  switch (term.teacher_source_case()) {
    case v1::LossTerm::kTeacherHidden:
      break;
    case v1::LossTerm::kJoinedTeacher:
      return DecodeJoinedTeacher(term.joined_teacher(), field + ".joined_teacher", term_rows);
    case v1::LossTerm::kCachedTeacher:
      if (term.cached_teacher().cache_key().empty()) return MissingField(field + ".cached_teacher.cache_key", "a name");
      return FeatureNotBuilt(field + ".cached_teacher", "cached_teacher");
    case v1::LossTerm::kTopKTeacher:  // DecodeTopK()'s
    case v1::LossTerm::TEACHER_SOURCE_NOT_SET:
      return MissingField(field + ".teacher_hidden", "a teacher, because the loss is jensen_shannon");
  }
  const std::string teacher_field = field + ".teacher_hidden";
  auto teacher = DecodeTeacherHead(term.teacher_hidden(), teacher_field);
  if (!teacher.ok()) return teacher;
  auto rows =
      DecodeSharedRows(term.teacher_hidden().has_rows(), term.teacher_hidden().rows(), has_session, teacher_field + ".rows");
  if (!rows.ok()) return rows.status();
  teacher->rows = *std::move(rows);
  return teacher;
}

// The top-k teacher of a divergence, which has no other option then than its student_temperature.
absl::StatusOr<TopKRequest> DecodeTopK(const v1::LossTerm& term, const JsdSpec& loss, const std::string& field, int64_t term_rows) {
  const auto refuse = [&](const char* option, const char* expected, const std::string& actual) {
    return FieldError(ErrorReason::kInvalidCombination, absl::StrCat(field, ".jensen_shannon.", option),
                      absl::StrCat(expected, ", because the teacher is a top_k_teacher"), actual);
  };
  if (loss.beta != 0) return refuse("beta", "0", absl::StrCat(loss.beta));
  if (loss.teacher_temperature != 1) return refuse("teacher_temperature", "nothing", absl::StrCat(loss.teacher_temperature));
  if (loss.hard_loss_weight != 0) return refuse("hard_loss_weight", "0", absl::StrCat(loss.hard_loss_weight));
  if (loss.truncate_to_common) return refuse("vocab_alignment", "nothing", "TRUNCATE_TO_COMMON");

  const v1::TopKTeacher& teacher = term.top_k_teacher();
  const std::string teacher_field = field + ".top_k_teacher";
  TopKRequest decoded;
  decoded.k = teacher.k();
  decoded.student_temperature = loss.student_temperature;
  HEADWATER_RETURN_IF_ERROR(CheckRange(teacher_field + ".k", decoded.k, 1, kMaxTopK));
  const std::string shape = absl::StrCat("[", term_rows, ", ", decoded.k, "]");
  if (!teacher.has_ids()) return MissingField(teacher_field + ".ids", "INT32 " + shape);
  if (!teacher.has_log_probs()) return MissingField(teacher_field + ".log_probs", "FLOAT32 " + shape);
  TensorRule rule = {v1::DATA_TYPE_INT32, "INT32", term_rows};
  rule.columns = decoded.k;
  HEADWATER_RETURN_IF_ERROR(CheckVector(teacher.ids(), teacher_field + ".ids", rule));
  decoded.ids = CopyElements<int32_t>(teacher.ids());
  rule.data_type = v1::DATA_TYPE_FLOAT32;
  rule.data_type_name = "FLOAT32";
  HEADWATER_RETURN_IF_ERROR(CheckVector(teacher.log_probs(), teacher_field + ".log_probs", rule));
  decoded.log_probs = CopyElements<float>(teacher.log_probs());
  return decoded;
}

absl::StatusOr<LossTermRequest> DecodeTerm(const v1::LossTerm& term, const std::string& field, int64_t micro_batch_rows,
                                           bool has_session, const Limits& limits) {
  LossTermRequest decoded;
  auto head = DecodeHeadStep(term.has_head(), term.head(), field + ".head", /*step_required=*/false);
  if (!head.ok()) return head.status();
  decoded.head = *std::move(head);

  decoded.row_start = term.row_start();
  HEADWATER_RETURN_IF_ERROR(CheckRange(field + ".row_start", decoded.row_start, 0, micro_batch_rows));
  const int64_t rows_left = micro_batch_rows - decoded.row_start;
  decoded.row_count = term.has_row_count() ? term.row_count() : rows_left;
  if (term.has_row_count()) {
    HEADWATER_RETURN_IF_ERROR(CheckRange(field + ".row_count", decoded.row_count, micro_batch_rows == 0 ? 0 : 1, rows_left));
  }

  decoded.ignore_index = term.has_ignore_index() ? term.ignore_index() : kDefaultIgnoreIndex;
  decoded.loss_scale = term.has_loss_scale() ? term.loss_scale() : 1;
  HEADWATER_RETURN_IF_ERROR(CheckFactor(field + ".loss_scale", decoded.loss_scale));
  decoded.gradient_resolution = term.gradient_resolution();
  HEADWATER_RETURN_IF_ERROR(
      CheckNumber(field + ".gradient_resolution", decoded.gradient_resolution,
                  decoded.gradient_resolution == 0 ||
                      (decoded.gradient_resolution >= kSmallestGradientResolution && decoded.gradient_resolution <= 1),
                  "0 or a number in [2^-24, 1]"));
  auto version =
      DecodeWeightVersion(term.has_expected_weight_version(), term.expected_weight_version(), field + ".expected_weight_version");
  if (!version.ok()) return version.status();
  decoded.expected_weight_version = *version;

  bool targets_required = true;
  switch (term.loss_case()) {
    case v1::LossTerm::kCrossEntropy: {
      auto loss = DecodeCrossEntropy(term.cross_entropy(), field + ".cross_entropy", limits);
      if (!loss.ok()) return loss.status();
      decoded.loss = *std::move(loss);
      if (term.teacher_source_case() != v1::LossTerm::TEACHER_SOURCE_NOT_SET) {
        return FieldError(ErrorReason::kInvalidCombination, field + ".teacher_source",
                          "no teacher, because the loss is cross_entropy", "a teacher");
      }
      break;
    }
    case v1::LossTerm::kJensenShannon: {
      auto loss = DecodeJensenShannon(term.jensen_shannon(), field + ".jensen_shannon", limits);
      if (!loss.ok()) return loss.status();
      if (term.has_top_k_teacher()) {
        auto top_k = DecodeTopK(term, loss->options, field, decoded.row_count);
        if (!top_k.ok()) return top_k.status();
        decoded.loss = *std::move(top_k);
        targets_required = false;
        break;
      }
      targets_required = loss->options.hard_loss_weight > 0;
      decoded.loss = *std::move(loss);
      auto teacher = DecodeTeacher(term, field, decoded.row_count, has_session);
      if (!teacher.ok()) return teacher.status();
      decoded.teacher = *std::move(teacher);
      break;
    }
    case v1::LossTerm::LOSS_NOT_SET:
      return MissingField(field + ".loss", "cross_entropy or jensen_shannon");
  }

  if (term.has_targets()) {
    HEADWATER_RETURN_IF_ERROR(CheckVector(term.targets(), field + ".targets", {v1::DATA_TYPE_INT32, "INT32", decoded.row_count}));
    decoded.targets = CopyElements<int32_t>(term.targets());
  } else if (targets_required) {
    return MissingField(field + ".targets", absl::StrCat("INT32 [", decoded.row_count, "]"));
  }
  auto weights = DecodeRowFloats(term.has_token_weights(), term.token_weights(), field + ".token_weights", decoded.row_count);
  if (!weights.ok()) return weights.status();
  decoded.token_weights = *std::move(weights);
  auto entropy_factors =
      DecodeRowFloats(term.has_entropy_factors(), term.entropy_factors(), field + ".entropy_factors", decoded.row_count);
  if (!entropy_factors.ok()) return entropy_factors.status();
  decoded.entropy_factors = *std::move(entropy_factors);
  auto lse_factors = DecodeRowFloats(term.has_lse_factors(), term.lse_factors(), field + ".lse_factors", decoded.row_count);
  if (!lse_factors.ok()) return lse_factors.status();
  decoded.lse_factors = *std::move(lse_factors);
  return decoded;
}

// The factors of entropy and lse, which only some calls may have.
absl::Status CheckFactorsAllowed(const MicroBatchRequest& request, const LossTermRequest& term, const std::string& field) {
  const char* why = nullptr;
  if (!std::holds_alternative<CrossEntropyRequest>(term.loss)) {
    why = "nothing, because the loss is jensen_shannon";
  } else if (!request.backward) {
    why = "nothing, because the call is FORWARD_ONLY";
  } else if (request.late_token_factors) {
    why = "nothing, because of late_token_factors";
  }
  if (why == nullptr || (!term.entropy_factors.has_value() && !term.lse_factors.has_value())) return absl::OkStatus();
  return FieldError(ErrorReason::kInvalidCombination,
                    absl::StrCat(field, term.entropy_factors.has_value() ? ".entropy_factors" : ".lse_factors"), why, "factors");
}

// Combinations that dithering is not built for; those with the head's spec are for CheckHeads().
absl::Status CheckResolutionAllowed(const MicroBatchRequest& request, const LossTermRequest& term, const std::string& field) {
  if (term.gradient_resolution == 0) return absl::OkStatus();
  const char* why = nullptr;
  const auto* jsd = std::get_if<JensenShannonRequest>(&term.loss);
  if (!request.backward) {
    why = "0, because the call is FORWARD_ONLY";
  } else if (term.entropy_factors.has_value() || term.lse_factors.has_value()) {
    why = "0, because of the factors of entropy or lse";
  } else if (jsd != nullptr && jsd->options.hard_loss_weight > 0) {
    why = "0, because of the hard loss";
  } else if (std::holds_alternative<TopKRequest>(term.loss)) {
    why = "0, because of the top_k_teacher";
  }
  if (why == nullptr) return absl::OkStatus();
  return FieldError(ErrorReason::kInvalidCombination, field + ".gradient_resolution", why, absl::StrCat(term.gradient_resolution));
}

// Options that only make sense for a micro-batch that is added to a step.
absl::Status CheckWithoutMicroBatch(const v1::MicroBatchHeader& header, const MicroBatchRequest& decoded, const char* why) {
  if (header.has_micro_batch()) {
    return FieldError(ErrorReason::kInvalidCombination, "header.micro_batch", absl::StrCat("nothing, ", why),
                      absl::StrCat(header.micro_batch()));
  }
  if (decoded.explicit_commit) {
    return FieldError(ErrorReason::kInvalidCombination, "header.commit_mode", absl::StrCat("EAGER, ", why), "EXPLICIT");
  }
  if (decoded.first_wins) {
    return FieldError(ErrorReason::kInvalidCombination, "header.on_mismatch", absl::StrCat("CONFLICT, ", why), "FIRST_WINS");
  }
  if (decoded.allow_held) {
    return FieldError(ErrorReason::kInvalidCombination, "header.allow_held", absl::StrCat("false, ", why), "true");
  }
  return absl::OkStatus();
}

// Modes of the header.
absl::Status DecodeModes(const v1::MicroBatchHeader& header, MicroBatchRequest* decoded) {
  switch (header.compute_mode()) {
    case v1::COMPUTE_MODE_FORWARD_BACKWARD:
      decoded->backward = true;
      break;
    case v1::COMPUTE_MODE_FORWARD_ONLY:
      break;
    case v1::COMPUTE_MODE_UNSPECIFIED:
      return MissingField("header.compute_mode", "FORWARD_BACKWARD or FORWARD_ONLY");
    default:
      return UnknownEnum("header.compute_mode", "FORWARD_BACKWARD or FORWARD_ONLY", header.compute_mode());
  }
  if (!v1::CommitMode_IsValid(header.commit_mode())) {
    return UnknownEnum("header.commit_mode", "EAGER or EXPLICIT", header.commit_mode());
  }
  if (!v1::OnMismatch_IsValid(header.on_mismatch())) {
    return UnknownEnum("header.on_mismatch", "CONFLICT or FIRST_WINS", header.on_mismatch());
  }
  if (!v1::NonFinitePolicy_IsValid(header.non_finite_policy())) {
    return UnknownEnum("header.non_finite_policy", "REPORT or REFUSE", header.non_finite_policy());
  }
  decoded->explicit_commit = header.commit_mode() == v1::COMMIT_MODE_EXPLICIT;
  decoded->first_wins = header.on_mismatch() == v1::ON_MISMATCH_FIRST_WINS;
  decoded->refuse_non_finite = header.non_finite_policy() == v1::NON_FINITE_POLICY_REFUSE;
  for (int i = 0; i < header.outputs_size(); ++i) {
    const v1::TokenOutput output = header.outputs(i);
    if (!v1::TokenOutput_IsValid(output) || output == v1::TOKEN_OUTPUT_UNSPECIFIED) {
      return UnknownEnum(absl::StrCat("header.outputs[", i, "]"),
                         "LOSS, LSE, TARGET_LOG_PROBABILITY, ENTROPY, ARGMAX, MEAN_LOGITS or LOG_SUM_SQ_PROBS", output);
    }
    decoded->outputs |= TokenOutputBit(output);
  }
  return absl::OkStatus();
}

absl::Status DecodeGradHidden(const v1::MicroBatchHeader& header, MicroBatchRequest* decoded) {
  decoded->return_grad_hidden = header.has_return_grad_hidden() ? header.return_grad_hidden() : decoded->backward;
  if (decoded->return_grad_hidden && !decoded->backward) {
    return FieldError(ErrorReason::kInvalidCombination, "header.return_grad_hidden", "false, because the call is FORWARD_ONLY",
                      "true");
  }
  decoded->grad_hidden_data_type = decoded->data_type;
  if (header.grad_hidden_data_type() != v1::DATA_TYPE_UNSPECIFIED) {
    auto type = DecodeFloatType(header.grad_hidden_data_type(), "header.grad_hidden_data_type");
    if (!type.ok()) return type.status();
    decoded->grad_hidden_data_type = *type;
  }
  decoded->grad_hidden_scale = header.has_grad_hidden_scale() ? header.grad_hidden_scale() : 1;
  return CheckFactor("header.grad_hidden_scale", decoded->grad_hidden_scale);
}

// Whether rows may be held, and what that is for.
absl::Status DecodeHolding(const v1::MicroBatchHeader& header, MicroBatchRequest* decoded) {
  decoded->allow_held = header.allow_held();
  decoded->late_token_factors = header.late_token_factors();
  if (decoded->late_token_factors && !decoded->explicit_commit) {
    return FieldError(ErrorReason::kInvalidCombination, "header.late_token_factors",
                      "false, because the commit_mode is not EXPLICIT", "true");
  }
  return absl::OkStatus();
}

bool SameHead(const heads::HeadName& a, const heads::HeadName& b) { return a.tenant == b.tenant && a.head == b.head; }

// Terms of one head must agree about its epoch and step.
absl::Status CheckSameStep(const LossTermRequest& earlier, const LossTermRequest& later, size_t earlier_index,
                           const std::string& later_field) {
  if (!SameHead(earlier.head.head, later.head.head)) return absl::OkStatus();
  const std::string expected = absl::StrCat("the same as header.terms[", earlier_index, "], which names the same head");
  if (earlier.head.epoch != later.head.epoch) {
    return FieldError(ErrorReason::kInvalidCombination, later_field + ".head.head_epoch", expected, "another one");
  }
  if (earlier.head.step != later.head.step) {
    return FieldError(ErrorReason::kInvalidCombination, later_field + ".head.step", expected,
                      later.head.step.has_value() ? absl::StrCat(*later.head.step) : "nothing");
  }
  return absl::OkStatus();
}

absl::Status DecodeTerms(const v1::MicroBatchHeader& header, const Limits& limits, MicroBatchRequest* decoded) {
  if (header.terms_size() == 0) return MissingField("header.terms", "at least one loss term");
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.terms", header.terms_size(), "max_terms", limits.max_terms));
  const bool wants_log_probability = (decoded->outputs & TokenOutputBit(v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY)) != 0;
  for (int i = 0; i < header.terms_size(); ++i) {
    const std::string field = absl::StrCat("header.terms[", i, "]");
    auto term = DecodeTerm(header.terms(i), field, decoded->row_count, decoded->session.has_value(), limits);
    if (!term.ok()) return term.status();
    HEADWATER_RETURN_IF_ERROR(CheckFactorsAllowed(*decoded, *term, field));
    HEADWATER_RETURN_IF_ERROR(CheckResolutionAllowed(*decoded, *term, field));
    if (std::holds_alternative<TopKRequest>(term->loss) && (decoded->outputs & ~TokenOutputBit(v1::TOKEN_OUTPUT_LOSS)) != 0) {
      return FieldError(ErrorReason::kInvalidCombination, "header.outputs",
                        absl::StrCat("no output but LOSS, because terms[", i, "] has a top_k_teacher"), "others");
    }
    if (wants_log_probability && !term->targets.has_value()) {
      return FieldError(ErrorReason::kInvalidCombination, "header.outputs",
                        absl::StrCat("no TARGET_LOG_PROBABILITY, because terms[", i, "] has no targets"), "TARGET_LOG_PROBABILITY");
    }
    if (!decoded->backward && term->head.step.has_value()) {
      return FieldError(ErrorReason::kInvalidCombination, field + ".head.step", "nothing, because the call is FORWARD_ONLY",
                        absl::StrCat(*term->head.step));
    }
    for (size_t earlier = 0; earlier < decoded->terms.size(); ++earlier) {
      HEADWATER_RETURN_IF_ERROR(CheckSameStep(decoded->terms[earlier], *term, earlier, field));
    }
    decoded->terms.push_back(*std::move(term));
  }
  return absl::OkStatus();
}

// What commit and discard have in common.
template <typename Request>
absl::StatusOr<DecisionRequest> DecodeDecision(const Request& request, const Limits& limits) {
  DecisionRequest decoded;
  if (request.heads_size() == 0) return MissingField("heads", "one entry for each trainable head of the micro-batch");
  HEADWATER_RETURN_IF_ERROR(CheckLimit("heads", request.heads_size(), "max_terms", limits.max_terms));
  for (int i = 0; i < request.heads_size(); ++i) {
    const std::string field = absl::StrCat("heads[", i, "]");
    auto head = DecodeHeadStep(true, request.heads(i), field, /*step_required=*/true);
    if (!head.ok()) return head.status();
    for (const HeadAtStep& earlier : decoded.heads) {
      if (SameHead(earlier.name, head->head)) {
        return FieldError(ErrorReason::kInvalidCombination, field + ".head", "each head once", head->head.ToString() + " twice");
      }
    }
    decoded.heads.push_back({head->head, {*head->epoch, *head->step}});
  }
  auto micro_batch = DecodeMicroBatchId(request.has_micro_batch(), request.micro_batch(), "micro_batch");
  if (!micro_batch.ok()) return micro_batch.status();
  decoded.micro_batch = *micro_batch;
  decoded.attempt = request.attempt();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("attempt", decoded.attempt, 0));
  auto session = DecodeOptionalSession(request.session_id(), "session_id");
  if (!session.ok()) return session.status();
  decoded.session = *session;
  return decoded;
}

// An id of fixed size. kMissingField if empty.
template <typename Id>
absl::StatusOr<Id> DecodeId(const std::string& bytes, const std::string& field, const char* what) {
  Id id;
  const std::string size = absl::StrCat(id.size(), " bytes");
  if (bytes.empty()) return MissingField(field, absl::StrCat(what, ", ", size));
  if (bytes.size() != id.size()) {
    return FieldError(ErrorReason::kInvalidField, field, size, absl::StrCat(bytes.size(), " bytes"));
  }
  std::memcpy(id.data(), bytes.data(), id.size());
  return id;
}

template <typename Id>
absl::StatusOr<std::optional<Id>> DecodeOptionalId(const std::string& bytes, const std::string& field, const char* what) {
  if (bytes.empty()) return std::optional<Id>();
  auto id = DecodeId<Id>(bytes, field, what);
  if (!id.ok()) return id.status();
  return std::optional<Id>(*id);
}

constexpr char kEpochWords[] = "the head's epoch";
constexpr char kSessionWords[] = "the id that OpenSession answered";
constexpr char kTransferWords[] = "the micro-batch's transfer_id";

// How the rows travel: over how many streams, or in which regions.
absl::Status DecodePath(const v1::MicroBatchHeader& header, const Limits& limits, MicroBatchRequest* decoded) {
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("header.stripe_count", header.stripe_count(), 0));
  decoded->stripe_count = std::max(header.stripe_count(), 1);
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.stripe_count", decoded->stripe_count, "max_stripes", limits.max_stripes));
  if (decoded->stripe_count > 1) {
    auto transfer = DecodeId<TransferId>(header.transfer_id(), "header.transfer_id", "drawn at random for this call");
    if (!transfer.ok()) return transfer.status();
    decoded->transfer = *transfer;
  } else if (!header.transfer_id().empty()) {
    return FieldError(ErrorReason::kInvalidCombination, "header.transfer_id", "nothing, because stripe_count is not above 1",
                      absl::StrCat(header.transfer_id().size(), " bytes"));
  }
  const bool session = decoded->session.has_value();
  auto hidden = DecodeSharedRows(header.has_hidden_rows(), header.hidden_rows(), session, "header.hidden_rows");
  if (!hidden.ok()) return hidden.status();
  decoded->hidden_rows = *std::move(hidden);
  auto grad_hidden = DecodeSharedRows(header.has_grad_hidden_rows(), header.grad_hidden_rows(), session, "header.grad_hidden_rows");
  if (!grad_hidden.ok()) return grad_hidden.status();
  decoded->grad_hidden_rows = *std::move(grad_hidden);
  if (decoded->grad_hidden_rows.has_value() && !decoded->return_grad_hidden) {
    return FieldError(ErrorReason::kInvalidCombination, "header.grad_hidden_rows", "nothing, because grad_hidden is not returned",
                      "a region");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<heads::HeadName> DecodeHeadName(const std::string& name, const std::string& field) {
  if (name.empty()) return MissingField(field, "tenants/{tenant}/heads/{head}");
  return heads::ParseHeadName(name, field);
}

absl::StatusOr<heads::Epoch> DecodeEpoch(const std::string& bytes, const std::string& field) {
  return DecodeId<heads::Epoch>(bytes, field, kEpochWords);
}

absl::StatusOr<std::optional<heads::Epoch>> DecodeOptionalEpoch(const std::string& bytes, const std::string& field) {
  return DecodeOptionalId<heads::Epoch>(bytes, field, kEpochWords);
}

absl::StatusOr<heads::SessionId> DecodeSession(const std::string& bytes, const std::string& field) {
  return DecodeId<heads::SessionId>(bytes, field, kSessionWords);
}

absl::StatusOr<std::optional<heads::SessionId>> DecodeOptionalSession(const std::string& bytes, const std::string& field) {
  return DecodeOptionalId<heads::SessionId>(bytes, field, kSessionWords);
}

absl::StatusOr<int64_t> DecodeMicroBatchId(bool present, int64_t micro_batch, const std::string& field) {
  if (!present) return MissingField(field, "a number >= 0");
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast(field, micro_batch, 0));
  return micro_batch;
}

absl::StatusOr<DataType> DecodeFloatType(v1::DataType type, const std::string& field) {
  switch (type) {
    case v1::DATA_TYPE_FLOAT32:
    case v1::DATA_TYPE_BFLOAT16:
    case v1::DATA_TYPE_FLOAT16:
      return static_cast<DataType>(type);
    case v1::DATA_TYPE_UNSPECIFIED:
      return MissingField(field, "FLOAT32, BFLOAT16 or FLOAT16");
    default:
      return FieldError(ErrorReason::kDataTypeMismatch, field, "FLOAT32, BFLOAT16 or FLOAT16",
                        v1::DataType_IsValid(type) ? v1::DataType_Name(type) : absl::StrCat(static_cast<int>(type)));
  }
}

absl::StatusOr<HeadStepRequest> DecodeHeadStep(bool present, const v1::HeadStep& head_step, const std::string& field,
                                               bool step_required) {
  if (!present) return MissingField(field, "a head");
  auto name = DecodeHeadName(head_step.head(), field + ".head");
  if (!name.ok()) return name.status();
  HeadStepRequest decoded{*std::move(name), std::nullopt, std::nullopt};
  auto epoch = DecodeOptionalEpoch(head_step.head_epoch(), field + ".head_epoch");
  if (!epoch.ok()) return epoch.status();
  decoded.epoch = *epoch;
  if (head_step.has_step()) {
    HEADWATER_RETURN_IF_ERROR(CheckAtLeast(field + ".step", head_step.step(), 0));
    decoded.step = head_step.step();
  }
  if (step_required && !decoded.epoch.has_value()) return MissingField(field + ".head_epoch", "the head's epoch, 16 bytes");
  if (step_required && !decoded.step.has_value()) return MissingField(field + ".step", "a step number >= 0");
  return decoded;
}

absl::StatusOr<MicroBatchRequest> DecodeMicroBatchHeader(const v1::MicroBatchHeader& header, const Limits& limits) {
  MicroBatchRequest decoded;
  auto session = DecodeOptionalSession(header.session_id(), "header.session_id");
  if (!session.ok()) return session.status();
  decoded.session = *session;
  decoded.attempt = header.attempt();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("header.attempt", decoded.attempt, 0));
  if (header.has_micro_batch()) {
    auto micro_batch = DecodeMicroBatchId(true, header.micro_batch(), "header.micro_batch");
    if (!micro_batch.ok()) return micro_batch.status();
    decoded.micro_batch = *micro_batch;
  }
  HEADWATER_RETURN_IF_ERROR(DecodeModes(header, &decoded));
  HEADWATER_RETURN_IF_ERROR(DecodeHolding(header, &decoded));

  decoded.row_count = header.row_count();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("header.row_count", decoded.row_count, 0));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", decoded.row_count, "max_micro_batch_rows", limits.max_micro_batch_rows));
  decoded.hidden_size = header.hidden_size();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("header.hidden_size", decoded.hidden_size, 1));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.hidden_size", decoded.hidden_size, "max_hidden_size", limits.max_hidden_size));
  auto data_type = DecodeFloatType(header.data_type(), "header.data_type");
  if (!data_type.ok()) return data_type.status();
  decoded.data_type = *data_type;
  HEADWATER_RETURN_IF_ERROR(DecodeGradHidden(header, &decoded));
  HEADWATER_RETURN_IF_ERROR(DecodePath(header, limits, &decoded));
  // Before the terms, whose `step` would be blamed for what the whole call is.
  if (!decoded.backward) {
    HEADWATER_RETURN_IF_ERROR(CheckWithoutMicroBatch(header, decoded, "because the call is FORWARD_ONLY"));
  } else if (!decoded.micro_batch.has_value()) {
    HEADWATER_RETURN_IF_ERROR(CheckWithoutMicroBatch(header, decoded, "because the call carries no micro-batch"));
  }
  HEADWATER_RETURN_IF_ERROR(DecodeTerms(header, limits, &decoded));
  return decoded;
}

absl::StatusOr<DecisionRequest> DecodeCommit(const v1::CommitMicroBatchRequest& request, const Limits& limits) {
  auto decision = DecodeDecision(request, limits);
  if (!decision.ok()) return decision;
  decision->arguments.factor = request.has_factor() ? request.factor() : 1;
  HEADWATER_RETURN_IF_ERROR(CheckFactor("factor", decision->arguments.factor));
  if (request.has_token_factors()) {
    auto factors =
        DecodeFloats(request.token_factors(), "token_factors", {v1::DATA_TYPE_FLOAT32, "FLOAT32", -1, limits.max_micro_batch_rows});
    if (!factors.ok()) return factors.status();
    decision->arguments.token_factors = *std::move(factors);
  }
  return decision;
}

absl::StatusOr<DecisionRequest> DecodeDiscard(const v1::DiscardMicroBatchRequest& request, const Limits& limits) {
  return DecodeDecision(request, limits);
}

absl::StatusOr<TransferRowsRequest> DecodeTransferRowsHeader(const v1::TransferRowsHeader& header) {
  TransferRowsRequest decoded;
  auto transfer = DecodeId<TransferId>(header.transfer_id(), "header.transfer_id", kTransferWords);
  if (!transfer.ok()) return transfer.status();
  decoded.transfer = *transfer;
  decoded.stripe_index = header.stripe_index();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("header.stripe_index", decoded.stripe_index, 1));
  return decoded;
}

absl::StatusOr<StreamTeacherRequest> DecodeStreamTeacherHeader(const v1::StreamTeacherHeader& header, const Limits& limits) {
  StreamTeacherRequest request;
  auto session = DecodeOptionalSession(header.session_id(), "header.session_id");
  if (!session.ok()) return session.status();
  request.session = *session;
  if (header.tenant().empty()) return MissingField("header.tenant", "tenants/{tenant}");
  auto tenant = heads::ParseTenantName(header.tenant(), "header.tenant");
  if (!tenant.ok()) return tenant.status();
  transport::JoinedSet& set = request.set;
  set.tenant = *std::move(tenant);
  set.join_key = header.join_key();
  HEADWATER_RETURN_IF_ERROR(ValidateJoinKey(set.join_key, "header.join_key"));
  set.total_row_count = header.total_row_count();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("header.total_row_count", set.total_row_count, 1));
  if (header.has_row_indices()) {
    auto indices = DecodeRowIndices(header.row_indices(), "header.row_indices",
                                    {v1::DATA_TYPE_INT32, "INT32", -1, limits.max_micro_batch_rows}, set.total_row_count);
    if (!indices.ok()) return indices.status();
    request.row_indices = *std::move(indices);
    if (request.row_indices.empty()) {
      return FieldError(ErrorReason::kShapeMismatch, "header.row_indices.shape", "at least one row", "[0]");
    }
  } else {
    HEADWATER_RETURN_IF_ERROR(
        CheckLimit("header.total_row_count", set.total_row_count, "max_micro_batch_rows", limits.max_micro_batch_rows));
  }
  auto data_type = DecodeFloatType(header.data_type(), "header.data_type");
  if (!data_type.ok()) return data_type.status();
  set.data_type = *data_type;
  set.hidden_size = header.hidden_size();
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("header.hidden_size", set.hidden_size, 1));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.hidden_size", set.hidden_size, "max_hidden_size", limits.max_hidden_size));
  return request;
}

}  // namespace headwater::service
