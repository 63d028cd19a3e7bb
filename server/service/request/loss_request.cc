#include "server/service/request/loss_request.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/loss_options.h"
#include "proto/headwater/v1/term_codec.h"
#include "server/service/request/field_check.h"

namespace headwater::service {
namespace {

// ---- tensors ---------------------------------------------------------------------------------------------------------

// The type and shape that a tensor field must have.
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

// Checks a vector of finite fp32 elements.
absl::Status CheckFloats(const v1::Tensor& tensor, const std::string& field, int64_t size,
                         int64_t size_max = std::numeric_limits<int64_t>::max()) {
  HEADWATER_RETURN_IF_ERROR(CheckVector(tensor, field, {v1::DATA_TYPE_FLOAT32, "FLOAT32", size, size_max}));
  for (size_t i = 0; i < tensor.data().size() / sizeof(float); ++i) {
    float value = 0;
    std::memcpy(&value, tensor.data().data() + i * sizeof(float), sizeof(float));
    if (std::isfinite(value)) continue;
    return InvalidField(field + ".data", "finite elements", absl::StrCat(value, " at index ", i));
  }
  return absl::OkStatus();
}

template <typename T>
std::vector<T> CopyElements(const v1::Tensor& tensor) {
  std::vector<T> elements(tensor.data().size() / sizeof(T));
  if (!elements.empty()) std::memcpy(elements.data(), tensor.data().data(), tensor.data().size());
  return elements;
}

// ---- requests --------------------------------------------------------------------------------------------------------

absl::Status CheckEnum(const std::string& field, bool is_known, const char* expected, int value) {
  return is_known ? absl::OkStatus() : InvalidField(field, expected, absl::StrCat(value));
}

absl::Status CheckClassWeights(const v1::CrossEntropyLoss& loss, const std::string& field, const Limits& limits) {
  if (!loss.has_class_weights()) return absl::OkStatus();
  return CheckFloats(loss.class_weights(), field + ".class_weights", -1, limits.max_vocab_size);
}

// Checks a divergence for what CheckTermOptions() cannot know, because only the message has it.
absl::Status CheckJensenShannon(const v1::JensenShannonLoss& loss, const std::string& field, const Limits& limits) {
  if (loss.has_hard_loss() && loss.hard_loss_weight() == 0) {
    return InvalidCombination(field + ".hard_loss", "nothing, because hard_loss_weight is 0", "options of the hard loss");
  }
  if (loss.hard_loss().has_temperature()) {
    return InvalidCombination(field + ".hard_loss.temperature", "nothing, because a divergence's hard loss takes none",
                              absl::StrCat(loss.hard_loss().temperature()));
  }
  HEADWATER_RETURN_IF_ERROR(CheckEnum(field + ".vocab_alignment", v1::VocabAlignment_IsValid(loss.vocab_alignment()),
                                      "REFUSE or TRUNCATE_TO_COMMON", loss.vocab_alignment()));
  return CheckClassWeights(loss.hard_loss(), field + ".hard_loss", limits);
}

absl::Status ValidateJoinKey(const std::string& join_key, const std::string& field) {
  if (join_key.empty()) return MissingField(field, "1 to 256 bytes");
  if (join_key.size() <= 256) return absl::OkStatus();
  return InvalidField(field, "1 to 256 bytes", absl::StrCat(join_key.size(), " bytes"));
}

// Indices of rows of a set of `total_row_count`.
absl::StatusOr<std::vector<int32_t>> DecodeRowIndices(const v1::Tensor& tensor, const std::string& field, const TensorRule& rule,
                                                      int64_t total_row_count) {
  HEADWATER_RETURN_IF_ERROR(CheckVector(tensor, field, rule));
  std::vector<int32_t> indices = CopyElements<int32_t>(tensor);
  for (const int32_t index : indices) {
    if (index < 0 || index >= total_row_count) {
      return InvalidField(field + ".data", absl::StrCat("indices in [0, ", total_row_count, ")"), absl::StrCat(index));
    }
  }
  return indices;
}

// Rows in a region of the session.
absl::StatusOr<const v1::SharedRows*> CheckSharedRows(bool present, const v1::SharedRows& rows, bool has_session,
                                                      const std::string& field) {
  if (!present) return nullptr;
  if (!has_session) return MissingField("header.session_id", absl::StrCat("the session of the region that ", field, " names"));
  if (rows.region_id().empty()) return MissingField(field + ".region_id", "the id that RegisterSharedMemory answered");
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast(field + ".offset_bytes", rows.offset_bytes(), 0));
  return &rows;
}

// The teacher's head, and the type of its rows: the common fields of all sources.
template <typename Source>
absl::StatusOr<TeacherRequest> DecodeTeacherHead(const Source& source, const std::string& field) {
  HEADWATER_ASSIGN_OR_RETURN(auto head, DecodeHead(source.head(), field + ".head", source.head_epoch(), field + ".head_epoch"));
  HEADWATER_ASSIGN_OR_RETURN(auto data_type, DecodeFloatType(source.data_type(), field + ".data_type"));
  HEADWATER_ASSIGN_OR_RETURN(auto version, OptionalNumber(field + ".expected_weight_version", source.has_expected_weight_version(),
                                                          source.expected_weight_version()));
  return TeacherRequest{std::move(head), data_type, version, nullptr, std::nullopt};
}

absl::StatusOr<TeacherRequest> DecodeJoinedTeacher(const v1::JoinedTeacher& joined, const std::string& field, int64_t term_rows) {
  HEADWATER_ASSIGN_OR_RETURN(auto teacher, DecodeTeacherHead(joined, field));
  JoinedTeacherRequest rows;
  rows.join_key = joined.join_key();
  HEADWATER_RETURN_IF_ERROR(ValidateJoinKey(rows.join_key, field + ".join_key"));
  HEADWATER_ASSIGN_OR_RETURN(rows.total_row_count, AtLeast(field + ".total_row_count", joined.total_row_count(), 1));
  if (joined.has_row_indices()) {
    HEADWATER_ASSIGN_OR_RETURN(rows.row_indices, DecodeRowIndices(joined.row_indices(), field + ".row_indices",
                                                                  {v1::DATA_TYPE_INT32, "INT32", term_rows}, rows.total_row_count));
  } else if (term_rows > rows.total_row_count) {
    return InvalidField(field + ".total_row_count",
                        absl::StrCat("at least the term's ", term_rows, " rows, because there are no row_indices"),
                        absl::StrCat(rows.total_row_count));
  }
  teacher.joined = std::move(rows);
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
  HEADWATER_ASSIGN_OR_RETURN(auto teacher, DecodeTeacherHead(term.teacher_hidden(), teacher_field));
  HEADWATER_ASSIGN_OR_RETURN(teacher.rows, CheckSharedRows(term.teacher_hidden().has_rows(), term.teacher_hidden().rows(),
                                                           has_session, teacher_field + ".rows"));
  return teacher;
}

// The top-k teacher of a divergence, which has no other option then than its student_temperature.
absl::Status CheckTopK(const v1::LossTerm& term, const std::string& field, int64_t term_rows) {
  JsdSpec loss;
  ReadFields(term.jensen_shannon(), loss);
  const auto refuse = [&](const char* option, const char* expected, const std::string& actual) {
    return InvalidCombination(absl::StrCat(field, ".jensen_shannon.", option),
                              absl::StrCat(expected, ", because the teacher is a top_k_teacher"), actual);
  };
  if (loss.beta != 0) return refuse("beta", "0", absl::StrCat(loss.beta));
  if (loss.teacher_temperature != 1) return refuse("teacher_temperature", "nothing", absl::StrCat(loss.teacher_temperature));
  if (loss.hard_loss_weight != 0) return refuse("hard_loss_weight", "0", absl::StrCat(loss.hard_loss_weight));
  if (term.jensen_shannon().vocab_alignment() == v1::VOCAB_ALIGNMENT_TRUNCATE_TO_COMMON) {
    return refuse("vocab_alignment", "nothing", "TRUNCATE_TO_COMMON");
  }
  const v1::TopKTeacher& teacher = term.top_k_teacher();
  const std::string teacher_field = field + ".top_k_teacher";
  const std::string shape = absl::StrCat("[", term_rows, ", ", teacher.k(), "]");
  if (!teacher.has_ids()) return MissingField(teacher_field + ".ids", "INT32 " + shape);
  if (!teacher.has_log_probs()) return MissingField(teacher_field + ".log_probs", "FLOAT32 " + shape);
  TensorRule rule = {v1::DATA_TYPE_INT32, "INT32", term_rows};
  rule.columns = teacher.k();
  HEADWATER_RETURN_IF_ERROR(CheckVector(teacher.ids(), teacher_field + ".ids", rule));
  rule.data_type = v1::DATA_TYPE_FLOAT32;
  rule.data_type_name = "FLOAT32";
  return CheckVector(teacher.log_probs(), teacher_field + ".log_probs", rule);
}

// The loss, and that the term has a teacher if and only if the loss takes one.
absl::Status DecodeLoss(const v1::LossTerm& term, const std::string& field, bool has_session, const Limits& limits,
                        LossTermRequest* decoded) {
  switch (term.loss_case()) {
    case v1::LossTerm::kCrossEntropy:
      if (term.teacher_source_case() != v1::LossTerm::TEACHER_SOURCE_NOT_SET) {
        return InvalidCombination(field + ".teacher_source", "no teacher, because the loss is cross_entropy", "a teacher");
      }
      return CheckClassWeights(term.cross_entropy(), field + ".cross_entropy", limits);
    case v1::LossTerm::kJensenShannon: {
      HEADWATER_RETURN_IF_ERROR(CheckJensenShannon(term.jensen_shannon(), field + ".jensen_shannon", limits));
      if (term.has_top_k_teacher()) return CheckTopK(term, field, decoded->term.row_count);
      HEADWATER_ASSIGN_OR_RETURN(decoded->teacher, DecodeTeacher(term, field, decoded->term.row_count, has_session));
      return absl::OkStatus();
    }
    case v1::LossTerm::LOSS_NOT_SET:
      break;
  }
  return MissingField(field + ".loss", "cross_entropy or jensen_shannon");
}

// One value for each of the term's rows.
absl::Status CheckRowTensors(const v1::LossTerm& message, const LossTerm& term, const std::string& field) {
  if (message.has_targets()) {
    HEADWATER_RETURN_IF_ERROR(CheckVector(message.targets(), field + ".targets", {v1::DATA_TYPE_INT32, "INT32", term.row_count}));
  } else {
    const auto* jsd = std::get_if<JsdSpec>(&term.loss);
    if (std::holds_alternative<CrossEntropySpec>(term.loss) || (jsd != nullptr && jsd->hard_loss_weight > 0)) {
      return MissingField(field + ".targets", absl::StrCat("INT32 [", term.row_count, "]"));
    }
  }
  const std::tuple<bool, const char*, const v1::Tensor*> tensors[] = {
      {message.has_token_weights(), ".token_weights", &message.token_weights()},
      {message.has_entropy_factors(), ".entropy_factors", &message.entropy_factors()},
      {message.has_lse_factors(), ".lse_factors", &message.lse_factors()}};
  for (const auto& [is_there, name, tensor] : tensors) {
    if (is_there) HEADWATER_RETURN_IF_ERROR(CheckFloats(*tensor, field + name, term.row_count));
  }
  return absl::OkStatus();
}

absl::StatusOr<LossTermRequest> DecodeTerm(const v1::LossTerm& message, const std::string& field, const MicroBatchRequest& request,
                                           const Limits& limits) {
  LossTermRequest decoded;
  HEADWATER_ASSIGN_OR_RETURN(decoded.head, DecodeHeadStep(message.has_head(), message.head(), field + ".head"));
  const int64_t micro_batch_rows = request.row_count;
  HEADWATER_RETURN_IF_ERROR(CheckRange(field + ".row_start", message.row_start(), 0, micro_batch_rows));
  const int64_t rows_left = micro_batch_rows - message.row_start();
  if (message.has_row_count()) {
    HEADWATER_RETURN_IF_ERROR(CheckRange(field + ".row_count", message.row_count(), micro_batch_rows == 0 ? 0 : 1, rows_left));
  }
  LossTerm& term = decoded.term;
  term = ReadTerm(message);
  if (!message.has_row_count()) term.row_count = rows_left;
  HEADWATER_RETURN_IF_ERROR(CheckTermOptions(field, term, request.backward));
  HEADWATER_ASSIGN_OR_RETURN(
      decoded.expected_weight_version,
      OptionalNumber(field + ".expected_weight_version", message.has_expected_weight_version(), message.expected_weight_version()));
  HEADWATER_RETURN_IF_ERROR(DecodeLoss(message, field, request.session.has_value(), limits, &decoded));
  HEADWATER_RETURN_IF_ERROR(CheckRowTensors(message, term, field));
  const bool has_factors = message.has_entropy_factors() || message.has_lse_factors();
  if (!has_factors || !request.late_token_factors) return decoded;
  return InvalidCombination(field + (message.has_entropy_factors() ? ".entropy_factors" : ".lse_factors"),
                            "nothing, because of late_token_factors", "factors");
}

// Options that only make sense for a micro-batch that is added to a step.
absl::Status CheckWithoutMicroBatch(const v1::MicroBatchHeader& header, const MicroBatchRequest& decoded, const char* why) {
  const std::tuple<bool, const char*, const char*, std::string> options[] = {
      {header.has_micro_batch(), "micro_batch", "nothing", absl::StrCat(header.micro_batch())},
      {decoded.explicit_commit, "commit_mode", "EAGER", "EXPLICIT"},
      {decoded.first_wins, "on_mismatch", "CONFLICT", "FIRST_WINS"},
      {decoded.allow_held, "allow_held", "false", "true"}};
  for (const auto& [is_set, field, expected, actual] : options) {
    if (is_set) return InvalidCombination(absl::StrCat("header.", field), absl::StrCat(expected, ", ", why), actual);
  }
  return absl::OkStatus();
}

// Modes of the header.
absl::Status DecodeModes(const v1::MicroBatchHeader& header, MicroBatchRequest* decoded) {
  constexpr char kComputeModes[] = "FORWARD_BACKWARD or FORWARD_ONLY";
  if (header.compute_mode() == v1::COMPUTE_MODE_UNSPECIFIED) return MissingField("header.compute_mode", kComputeModes);
  HEADWATER_RETURN_IF_ERROR(
      CheckEnum("header.compute_mode", v1::ComputeMode_IsValid(header.compute_mode()), kComputeModes, header.compute_mode()));
  decoded->backward = header.compute_mode() == v1::COMPUTE_MODE_FORWARD_BACKWARD;
  HEADWATER_RETURN_IF_ERROR(
      CheckEnum("header.commit_mode", v1::CommitMode_IsValid(header.commit_mode()), "EAGER or EXPLICIT", header.commit_mode()));
  HEADWATER_RETURN_IF_ERROR(CheckEnum("header.on_mismatch", v1::OnMismatch_IsValid(header.on_mismatch()), "CONFLICT or FIRST_WINS",
                                      header.on_mismatch()));
  HEADWATER_RETURN_IF_ERROR(CheckEnum("header.non_finite_policy", v1::NonFinitePolicy_IsValid(header.non_finite_policy()),
                                      "REPORT or REFUSE", header.non_finite_policy()));
  decoded->explicit_commit = header.commit_mode() == v1::COMMIT_MODE_EXPLICIT;
  decoded->first_wins = header.on_mismatch() == v1::ON_MISMATCH_FIRST_WINS;
  decoded->refuse_non_finite = header.non_finite_policy() == v1::NON_FINITE_POLICY_REFUSE;
  for (int i = 0; i < header.outputs_size(); ++i) {
    const v1::TokenOutput output = header.outputs(i);
    HEADWATER_RETURN_IF_ERROR(CheckEnum(
        absl::StrCat("header.outputs[", i, "]"), v1::TokenOutput_IsValid(output) && output != v1::TOKEN_OUTPUT_UNSPECIFIED,
        "LOSS, LSE, TARGET_LOG_PROBABILITY, ENTROPY, ARGMAX, MEAN_LOGITS or LOG_SUM_SQ_PROBS", output));
    decoded->outputs |= TokenOutputBit(output);
  }
  decoded->allow_held = header.allow_held();
  decoded->late_token_factors = header.late_token_factors();
  if (!decoded->late_token_factors || decoded->explicit_commit) return absl::OkStatus();
  return InvalidCombination("header.late_token_factors", "false, because the commit_mode is not EXPLICIT", "true");
}

absl::Status DecodeGradHidden(const v1::MicroBatchHeader& header, MicroBatchRequest* decoded) {
  decoded->return_grad_hidden = header.has_return_grad_hidden() ? header.return_grad_hidden() : decoded->backward;
  if (decoded->return_grad_hidden && !decoded->backward) {
    return InvalidCombination("header.return_grad_hidden", "false, because the call is FORWARD_ONLY", "true");
  }
  decoded->grad_hidden_data_type = decoded->data_type;
  if (header.grad_hidden_data_type() != v1::DATA_TYPE_UNSPECIFIED) {
    HEADWATER_ASSIGN_OR_RETURN(decoded->grad_hidden_data_type,
                               DecodeFloatType(header.grad_hidden_data_type(), "header.grad_hidden_data_type"));
  }
  HEADWATER_ASSIGN_OR_RETURN(decoded->grad_hidden_scale,
                             FactorOrOne("header.grad_hidden_scale", header.has_grad_hidden_scale(), header.grad_hidden_scale()));
  return absl::OkStatus();
}

bool SameHead(const heads::HeadName& a, const heads::HeadName& b) { return a.tenant == b.tenant && a.head == b.head; }

// Terms of one head must agree about its epoch and step.
absl::Status CheckSameStep(const LossTermRequest& earlier, const LossTermRequest& later, size_t earlier_index,
                           const std::string& later_field) {
  if (!SameHead(earlier.head.name, later.head.name)) return absl::OkStatus();
  const std::string expected = absl::StrCat("the same as ", TermField(earlier_index), ", which names the same head");
  if (earlier.head.epoch != later.head.epoch) {
    return InvalidCombination(later_field + ".head.head_epoch", expected, "another one");
  }
  if (earlier.head.step != later.head.step) {
    return InvalidCombination(later_field + ".head.step", expected,
                              later.head.step.has_value() ? absl::StrCat(*later.head.step) : "nothing");
  }
  return absl::OkStatus();
}

absl::Status DecodeTerms(const v1::MicroBatchHeader& header, const Limits& limits, MicroBatchRequest* decoded) {
  if (header.terms_size() == 0) return MissingField("header.terms", "at least one loss term");
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.terms", header.terms_size(), "max_terms", limits.max_terms));
  const bool wants_log_probability = (decoded->outputs & TokenOutputBit(v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY)) != 0;
  for (int i = 0; i < header.terms_size(); ++i) {
    const std::string field = TermField(static_cast<size_t>(i));
    HEADWATER_ASSIGN_OR_RETURN(auto term, DecodeTerm(header.terms(i), field, *decoded, limits));
    if (header.terms(i).has_top_k_teacher() && (decoded->outputs & ~TokenOutputBit(v1::TOKEN_OUTPUT_LOSS)) != 0) {
      return InvalidCombination("header.outputs", absl::StrCat("no output but LOSS, because terms[", i, "] has a top_k_teacher"),
                                "others");
    }
    if (wants_log_probability && !header.terms(i).has_targets()) {
      return InvalidCombination("header.outputs", absl::StrCat("no TARGET_LOG_PROBABILITY, because terms[", i, "] has no targets"),
                                "TARGET_LOG_PROBABILITY");
    }
    if (!decoded->backward && term.head.step.has_value()) {
      return InvalidCombination(field + ".head.step", "nothing, because the call is FORWARD_ONLY", absl::StrCat(*term.head.step));
    }
    for (size_t earlier = 0; earlier < decoded->terms.size(); ++earlier) {
      HEADWATER_RETURN_IF_ERROR(CheckSameStep(decoded->terms[earlier], term, earlier, field));
    }
    decoded->terms.push_back(std::move(term));
  }
  return absl::OkStatus();
}

// The common part of commit and discard.
template <typename Request>
absl::StatusOr<DecisionRequest> DecodeDecision(const Request& request, const Limits& limits) {
  DecisionRequest decoded;
  if (request.heads_size() == 0) return MissingField("heads", "one entry for each trainable head of the micro-batch");
  HEADWATER_RETURN_IF_ERROR(CheckLimit("heads", request.heads_size(), "max_terms", limits.max_terms));
  for (int i = 0; i < request.heads_size(); ++i) {
    const std::string field = absl::StrCat("heads[", i, "]");
    HEADWATER_ASSIGN_OR_RETURN(auto head, DecodeHeadAtStep(true, request.heads(i), field));
    for (const HeadAtStep& earlier : decoded.heads) {
      if (SameHead(earlier.name, head.name)) {
        return InvalidCombination(field + ".head", "each head once", head.name.ToString() + " twice");
      }
    }
    decoded.heads.push_back(std::move(head));
  }
  HEADWATER_ASSIGN_OR_RETURN(decoded.micro_batch,
                             DecodeMicroBatchId(request.has_micro_batch(), request.micro_batch(), "micro_batch"));
  HEADWATER_ASSIGN_OR_RETURN(decoded.attempt, AtLeast("attempt", request.attempt(), 0));
  HEADWATER_ASSIGN_OR_RETURN(decoded.session, DecodeOptionalSession(request.session_id(), "session_id"));
  return decoded;
}

// An id of fixed size. kMissingField if empty.
template <typename Id>
absl::StatusOr<Id> DecodeId(const std::string& bytes, const std::string& field, const char* what) {
  Id id;
  const std::string size = absl::StrCat(id.size(), " bytes");
  if (bytes.empty()) return MissingField(field, absl::StrCat(what, ", ", size));
  if (bytes.size() != id.size()) {
    return InvalidField(field, size, absl::StrCat(bytes.size(), " bytes"));
  }
  std::memcpy(id.data(), bytes.data(), id.size());
  return id;
}

template <typename Id>
absl::StatusOr<std::optional<Id>> DecodeOptionalId(const std::string& bytes, const std::string& field, const char* what) {
  if (bytes.empty()) return std::optional<Id>();
  HEADWATER_ASSIGN_OR_RETURN(auto id, DecodeId<Id>(bytes, field, what));
  return std::optional<Id>(id);
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
    HEADWATER_ASSIGN_OR_RETURN(decoded->transfer,
                               DecodeId<TransferId>(header.transfer_id(), "header.transfer_id", "drawn at random for this call"));
  } else if (!header.transfer_id().empty()) {
    return InvalidCombination("header.transfer_id", "nothing, because stripe_count is not above 1",
                              absl::StrCat(header.transfer_id().size(), " bytes"));
  }
  const bool session = decoded->session.has_value();
  HEADWATER_ASSIGN_OR_RETURN(decoded->hidden_rows,
                             CheckSharedRows(header.has_hidden_rows(), header.hidden_rows(), session, "header.hidden_rows"));
  HEADWATER_ASSIGN_OR_RETURN(decoded->grad_hidden_rows, CheckSharedRows(header.has_grad_hidden_rows(), header.grad_hidden_rows(),
                                                                        session, "header.grad_hidden_rows"));
  if (decoded->grad_hidden_rows != nullptr && !decoded->return_grad_hidden) {
    return InvalidCombination("header.grad_hidden_rows", "nothing, because grad_hidden is not returned", "a region");
  }
  return absl::OkStatus();
}

}  // namespace

std::string TermField(size_t index) { return absl::StrCat("header.terms[", index, "]"); }

absl::StatusOr<heads::HeadName> DecodeHeadName(const std::string& name, const std::string& field) {
  if (name.empty()) return MissingField(field, "tenants/{tenant}/heads/{head}");
  return heads::ParseHeadName(name, field);
}

absl::StatusOr<heads::Epoch> DecodeEpoch(const std::string& bytes, const std::string& field) {
  return DecodeId<heads::Epoch>(bytes, field, kEpochWords);
}

absl::StatusOr<HeadAtEpoch> DecodeHead(const std::string& name, const std::string& name_field, const std::string& epoch,
                                       const std::string& epoch_field) {
  HeadAtEpoch decoded;
  HEADWATER_ASSIGN_OR_RETURN(decoded.name, DecodeHeadName(name, name_field));
  HEADWATER_ASSIGN_OR_RETURN(decoded.epoch, DecodeOptionalId<heads::Epoch>(epoch, epoch_field, kEpochWords));
  return decoded;
}

absl::StatusOr<heads::SessionId> DecodeSession(const std::string& bytes, const std::string& field) {
  return DecodeId<heads::SessionId>(bytes, field, kSessionWords);
}

absl::StatusOr<std::optional<heads::SessionId>> DecodeOptionalSession(const std::string& bytes, const std::string& field) {
  return DecodeOptionalId<heads::SessionId>(bytes, field, kSessionWords);
}

absl::StatusOr<int64_t> DecodeMicroBatchId(bool present, int64_t micro_batch, const std::string& field) {
  if (!present) return MissingField(field, "a number >= 0");
  return AtLeast(field, micro_batch, 0);
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

absl::StatusOr<HeadStepRequest> DecodeHeadStep(bool present, const v1::HeadStep& head_step, const std::string& field) {
  if (!present) return MissingField(field, "a head");
  HEADWATER_ASSIGN_OR_RETURN(auto head,
                             DecodeHead(head_step.head(), field + ".head", head_step.head_epoch(), field + ".head_epoch"));
  HEADWATER_ASSIGN_OR_RETURN(auto step, OptionalNumber(field + ".step", head_step.has_step(), head_step.step()));
  return HeadStepRequest{std::move(head), step};
}

absl::StatusOr<HeadAtStep> DecodeHeadAtStep(bool present, const v1::HeadStep& head_step, const std::string& field) {
  HEADWATER_ASSIGN_OR_RETURN(HeadStepRequest decoded, DecodeHeadStep(present, head_step, field));
  if (!decoded.epoch.has_value()) return MissingField(field + ".head_epoch", "the head's epoch, 16 bytes");
  if (!decoded.step.has_value()) return MissingField(field + ".step", "a step number >= 0");
  return HeadAtStep{std::move(decoded.name), {*decoded.epoch, *decoded.step}};
}

absl::StatusOr<MicroBatchRequest> DecodeMicroBatchHeader(v1::MicroBatchHeader message, const Limits& limits) {
  MicroBatchRequest decoded;
  const auto kept = std::make_shared<v1::MicroBatchHeader>(std::move(message));
  kept->DiscardUnknownFields();
  decoded.message = kept;
  const v1::MicroBatchHeader& header = *kept;
  HEADWATER_ASSIGN_OR_RETURN(decoded.session, DecodeOptionalSession(header.session_id(), "header.session_id"));
  HEADWATER_ASSIGN_OR_RETURN(decoded.attempt, AtLeast("header.attempt", header.attempt(), 0));
  HEADWATER_ASSIGN_OR_RETURN(decoded.micro_batch,
                             OptionalNumber("header.micro_batch", header.has_micro_batch(), header.micro_batch()));
  HEADWATER_RETURN_IF_ERROR(DecodeModes(header, &decoded));

  HEADWATER_ASSIGN_OR_RETURN(decoded.row_count, AtLeast("header.row_count", header.row_count(), 0));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", decoded.row_count, "max_micro_batch_rows", limits.max_micro_batch_rows));
  HEADWATER_ASSIGN_OR_RETURN(decoded.hidden_size, AtLeast("header.hidden_size", header.hidden_size(), 1));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.hidden_size", decoded.hidden_size, "max_hidden_size", limits.max_hidden_size));
  HEADWATER_ASSIGN_OR_RETURN(decoded.data_type, DecodeFloatType(header.data_type(), "header.data_type"));
  HEADWATER_RETURN_IF_ERROR(DecodeGradHidden(header, &decoded));
  HEADWATER_RETURN_IF_ERROR(DecodePath(header, limits, &decoded));
  // Before the terms: their `step` would be named instead of the mode of the call.
  if (!decoded.backward) {
    HEADWATER_RETURN_IF_ERROR(CheckWithoutMicroBatch(header, decoded, "because the call is FORWARD_ONLY"));
  } else if (!decoded.micro_batch.has_value()) {
    HEADWATER_RETURN_IF_ERROR(CheckWithoutMicroBatch(header, decoded, "because the call carries no micro-batch"));
  }
  HEADWATER_RETURN_IF_ERROR(DecodeTerms(header, limits, &decoded));
  // Held rows keep the message, whose tensors alone are counted.
  google::protobuf::RepeatedField<int>().Swap(kept->mutable_outputs());
  return decoded;
}

absl::StatusOr<DecisionRequest> DecodeCommit(const v1::CommitMicroBatchRequest& request, const Limits& limits) {
  HEADWATER_ASSIGN_OR_RETURN(auto decision, DecodeDecision(request, limits));
  HEADWATER_ASSIGN_OR_RETURN(decision.arguments.factor, FactorOrOne("factor", request.has_factor(), request.factor()));
  if (request.has_token_factors()) {
    HEADWATER_RETURN_IF_ERROR(CheckFloats(request.token_factors(), "token_factors", -1, limits.max_micro_batch_rows));
    decision.arguments.token_factors = CopyElements<float>(request.token_factors());
  }
  return decision;
}

absl::StatusOr<DecisionRequest> DecodeDiscard(const v1::DiscardMicroBatchRequest& request, const Limits& limits) {
  return DecodeDecision(request, limits);
}

absl::StatusOr<TransferRowsRequest> DecodeTransferRowsHeader(const v1::TransferRowsHeader& header) {
  TransferRowsRequest decoded;
  HEADWATER_ASSIGN_OR_RETURN(decoded.transfer, DecodeId<TransferId>(header.transfer_id(), "header.transfer_id", kTransferWords));
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("header.stripe_index", header.stripe_index(), 1));
  decoded.stripe_index = header.stripe_index();
  return decoded;
}

absl::StatusOr<StreamTeacherRequest> DecodeStreamTeacherHeader(const v1::StreamTeacherHeader& header, const Limits& limits) {
  StreamTeacherRequest request;
  HEADWATER_ASSIGN_OR_RETURN(request.session, DecodeOptionalSession(header.session_id(), "header.session_id"));
  if (header.tenant().empty()) return MissingField("header.tenant", "tenants/{tenant}");
  transport::JoinedSet& set = request.set;
  HEADWATER_ASSIGN_OR_RETURN(set.tenant, heads::ParseTenantName(header.tenant(), "header.tenant"));
  set.join_key = header.join_key();
  HEADWATER_RETURN_IF_ERROR(ValidateJoinKey(set.join_key, "header.join_key"));
  HEADWATER_ASSIGN_OR_RETURN(set.total_row_count, AtLeast("header.total_row_count", header.total_row_count(), 1));
  if (header.has_row_indices()) {
    HEADWATER_ASSIGN_OR_RETURN(
        request.row_indices,
        DecodeRowIndices(header.row_indices(), "header.row_indices",
                         {v1::DATA_TYPE_INT32, "INT32", -1, limits.max_micro_batch_rows}, set.total_row_count));
    if (request.row_indices.empty()) {
      return FieldError(ErrorReason::kShapeMismatch, "header.row_indices.shape", "at least one row", "[0]");
    }
  } else {
    HEADWATER_RETURN_IF_ERROR(
        CheckLimit("header.total_row_count", set.total_row_count, "max_micro_batch_rows", limits.max_micro_batch_rows));
  }
  HEADWATER_ASSIGN_OR_RETURN(set.data_type, DecodeFloatType(header.data_type(), "header.data_type"));
  HEADWATER_ASSIGN_OR_RETURN(set.hidden_size, AtLeast("header.hidden_size", header.hidden_size(), 1));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.hidden_size", set.hidden_size, "max_hidden_size", limits.max_hidden_size));
  return request;
}

}  // namespace headwater::service
