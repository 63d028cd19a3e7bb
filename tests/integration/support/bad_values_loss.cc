// Bad values of LossService's requests.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "headwater/v1/loss.pb.h"
#include "headwater/v1/loss_service.pb.h"
#include "tests/integration/support/bad_values.h"

namespace headwater::testing {
namespace {

const double kNan = std::numeric_limits<double>::quiet_NaN();
const double kInfinity = std::numeric_limits<double>::infinity();

std::string Elements(const std::vector<int32_t>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4);
}
std::string Elements(const std::vector<float>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4);
}

Prepare Tensor(const std::string& path, v1::DataType type, int64_t size, const std::string& data) {
  return {{path + ".data_type", Int(type)}, {path + ".shape", Ints({size})}, {path + ".data", Text(data)}};
}

// Two terms that are the same but for the second one's field.
Edit TwoTerms(const std::string& path, const Edit& edit) {
  return [path, edit](google::protobuf::Message* parent, const google::protobuf::FieldDescriptor* field) {
    Times(2)(parent, field);
    Apply(parent->GetReflection()->MutableRepeatedMessage(parent, field, 1), path, edit);
  };
}

// JSD with an inline teacher.
Prepare Jsd() {
  return {{"header.terms.jensen_shannon", Make()},
          {"header.terms.teacher_hidden.head", Text(kTeacherName)},
          {"header.terms.teacher_hidden.data_type", Int(v1::DATA_TYPE_FLOAT32)}};
}
Prepare HardJsd() { return Join(Jsd(), {{"header.terms.jensen_shannon.hard_loss_weight", Real(0.5)}}); }
Prepare ForwardOnly() {
  return {{"header.compute_mode", Int(v1::COMPUTE_MODE_FORWARD_ONLY)},
          {"header.micro_batch", Clear()},
          {"header.terms.head.step", Clear()}};
}
Prepare JoinedTeacher() {
  return Join({{"header.terms.jensen_shannon", Make()},
               {"header.terms.joined_teacher.head", Text(kTeacherName)},
               {"header.terms.joined_teacher.join_key", Text("key")},
               {"header.terms.joined_teacher.total_row_count", Int(9)},
               {"header.terms.joined_teacher.data_type", Int(v1::DATA_TYPE_FLOAT32)}},
              Tensor("header.terms.joined_teacher.row_indices", v1::DATA_TYPE_INT32, 3, Elements(std::vector<int32_t>{0, 4, 8})));
}

// Three rows of a top-k teacher with two entries each, one of which is not used.
Prepare TopK() {
  const auto tensor = [](const char* name, v1::DataType type, const std::string& data) {
    const std::string path = std::string("header.terms.top_k_teacher.") + name;
    return Prepare{{path + ".data_type", Int(type)}, {path + ".shape", Ints({3, 2})}, {path + ".data", Text(data)}};
  };
  return Join(Join({{"header.terms.jensen_shannon.beta", Real(0)}, {"header.terms.top_k_teacher.k", Int(2)}},
                   tensor("ids", v1::DATA_TYPE_INT32, Elements(std::vector<int32_t>{0, 1, 2, 3, -1, 1}))),
              tensor("log_probs", v1::DATA_TYPE_FLOAT32, Elements(std::vector<float>{-1, -1, -1, -2, 0, -3})));
}

// An id that is well-formed; the session is looked up when the header is.
Prepare AnySession() { return {{"header.session_id", Text(std::string(32, 's'))}}; }

// Type, shape and length of a one-dimensional tensor; the caller adds rows for its values.
void AddTensorRows(const std::string& rpc, const std::string& path, v1::DataType wrong_type, int64_t wrong_size,
                   const Prepare& prepare, std::vector<BadValue>* rows) {
  rows->push_back({rpc, path + ".data_type", "unset", Clear(), "MISSING_FIELD", kThePath, prepare});
  rows->push_back({rpc, path + ".data_type", "another", Int(wrong_type), "DATA_TYPE_MISMATCH", kThePath, prepare});
  rows->push_back({rpc, path + ".data_type", "unknown", Int(77), "DATA_TYPE_MISMATCH", kThePath, prepare});
  if (wrong_size >= 0)
    rows->push_back({rpc, path + ".shape", "wrong size", Ints({wrong_size}), "SHAPE_MISMATCH", kThePath, prepare});
  rows->push_back({rpc, path + ".shape", "negative", Ints({-1}), "SHAPE_MISMATCH", kThePath, prepare});
  rows->push_back({rpc, path + ".shape", "no dimension", Clear(), "SHAPE_MISMATCH", kThePath, prepare});
  rows->push_back(
      {rpc, path + ".shape", "dimensions by the dozen", Ints(std::vector<int64_t>(12, 1)), "SHAPE_MISMATCH", kThePath, prepare});
  rows->push_back(
      {rpc, path + ".data", "not whole elements", Text(std::string(11, '\0')), "DATA_LENGTH_MISMATCH", kThePath, prepare});
}

void AddCrossEntropyRows(const std::string& path, const Prepare& prepare, std::vector<BadValue>* rows) {
  const std::string rpc = "ComputeLoss";
  AddNumberRows(rpc, path + ".label_smoothing", {-0.1, 1.1, 2}, prepare, rows);
  AddNumberRows(rpc, path + ".z_loss", {-1e-9, 4e38}, prepare, rows);
  const std::string weights = path + ".class_weights";
  const Prepare with_weights = Join(prepare, Tensor(weights, v1::DATA_TYPE_FLOAT32, 13, Elements(std::vector<float>(13, 1))));
  AddTensorRows(rpc, weights, v1::DATA_TYPE_INT32, -1, with_weights, rows);
  rows->push_back({rpc, weights + ".shape", "not the vocabulary's size", Ints({12}), "SHAPE_MISMATCH", kThePath,
                   Join(with_weights, {{weights + ".data", Text(std::string(48, '\0'))}})});
  for (const float value : {std::nanf(""), static_cast<float>(kInfinity)}) {
    std::vector<float> values(13, 1);
    values[7] = value;
    rows->push_back({rpc, weights + ".data", "an element", Text(Elements(values)), "INVALID_FIELD", kThePath, with_weights});
  }
}

std::vector<BadValue> HeaderRows() {
  const std::string rpc = "ComputeLoss";
  std::vector<BadValue> rows = {
      {rpc, "header", "unset", Clear(), "MISSING_FIELD", "message"},
      {rpc, "header.micro_batch", "negative", Int(-1), "INVALID_FIELD"},
      {rpc, "header.micro_batch", "unset", Clear(), "MISSING_FIELD"},
      {rpc, "header.attempt", "negative", Int(-1), "INVALID_FIELD"},
      {rpc, "header.compute_mode", "unset", Clear(), "MISSING_FIELD"},
      {rpc, "header.compute_mode", "unknown", Int(9), "INVALID_FIELD"},
      {rpc, "header.compute_mode", "FORWARD_ONLY of a micro-batch", Int(v1::COMPUTE_MODE_FORWARD_ONLY), "INVALID_COMBINATION",
       "header.micro_batch"},
      {rpc, "header.row_count", "negative", Int(-1), "INVALID_FIELD"},
      {rpc, "header.row_count", "above the limit", Int((1 << 18) + 1), "LIMIT_EXCEEDED"},
      {rpc, "header.row_count", "far above", Int(std::numeric_limits<int64_t>::max()), "LIMIT_EXCEEDED"},
      {rpc, "header.row_count", "not the targets'", Int(4), "SHAPE_MISMATCH", "header.terms[0].targets.shape"},
      {rpc, "header.stripe_count", "negative", Int(-1), "INVALID_FIELD"},
      {rpc, "header.stripe_count", "above the limit", Int(17), "LIMIT_EXCEEDED"},
      {rpc, "header.transfer_id", "empty, with stripes", Text(""), "MISSING_FIELD", kThePath, Set("header.stripe_count", Int(2))},
      {rpc, "header.transfer_id", "short", Text("id"), "INVALID_FIELD", kThePath, Set("header.stripe_count", Int(2))},
      {rpc, "header.transfer_id", "without stripes", Text(std::string(16, 't')), "INVALID_COMBINATION"},
      {rpc, "header.hidden_rows", "without a session", Make(), "MISSING_FIELD", "header.session_id"},
      {rpc, "header.hidden_rows.region_id", "empty", Text(""), "MISSING_FIELD", kThePath, AnySession()},
      {rpc, "header.hidden_rows.offset_bytes", "negative", Int(-1), "INVALID_FIELD", kThePath,
       Join(AnySession(), {{"header.hidden_rows.region_id", Text("region")}})},
      {rpc, "header.grad_hidden_rows", "without a session", Make(), "MISSING_FIELD", "header.session_id"},
      {rpc, "header.grad_hidden_rows", "not returned", Make(), "INVALID_COMBINATION", kThePath,
       Join(AnySession(), {{"header.grad_hidden_rows.region_id", Text("region")}, {"header.return_grad_hidden", Int(0)}})},
      {rpc, "header.grad_hidden_rows.region_id", "empty", Text(""), "MISSING_FIELD", kThePath, AnySession()},
      {rpc, "header.grad_hidden_rows.offset_bytes", "negative", Int(-1), "INVALID_FIELD", kThePath,
       Join(AnySession(), {{"header.grad_hidden_rows.region_id", Text("region")}})},
      {rpc, "header.hidden_size", "zero", Int(0), "INVALID_FIELD"},
      {rpc, "header.hidden_size", "above the limit", Int((1 << 16) + 1), "LIMIT_EXCEEDED"},
      {rpc, "header.hidden_size", "not the head's", Int(6), "SHAPE_MISMATCH"},
      {rpc, "header.data_type", "unset", Clear(), "MISSING_FIELD"},
      {rpc, "header.data_type", "INT32", Int(v1::DATA_TYPE_INT32), "DATA_TYPE_MISMATCH"},
      {rpc, "header.data_type", "unknown", Int(77), "DATA_TYPE_MISMATCH"},
      {rpc, "header.data_type", "not the rows'", Int(v1::DATA_TYPE_BFLOAT16), "DATA_LENGTH_MISMATCH", "chunk.data"},
      {rpc, "header.terms", "none", Clear(), "MISSING_FIELD", "header.terms"},
      {rpc, "header.terms", "above the limit", Times(65), "LIMIT_EXCEEDED", "header.terms"},
      {rpc, "header.terms", "of one head at two steps", TwoTerms("head.step", Int(1)), "INVALID_COMBINATION",
       "header.terms[1].head.step"},
      {rpc, "header.terms", "of one head at two epochs", TwoTerms("head.head_epoch", Text(std::string(16, 'x'))),
       "INVALID_COMBINATION", "header.terms[1].head.head_epoch"},
      {rpc, "header.terms", "the second with a bad target",
       TwoTerms("targets.data", Text(Elements(std::vector<int32_t>{1, 2, 13}))), "TARGET_OUT_OF_VOCAB",
       "header.terms[1].targets.data"},
      {rpc, "header.commit_mode", "unknown", Int(9), "INVALID_FIELD"},
      {rpc, "header.commit_mode", "EXPLICIT without a micro-batch", Int(v1::COMMIT_MODE_EXPLICIT), "INVALID_COMBINATION", kThePath,
       ForwardOnly()},
      {rpc, "header.on_mismatch", "unknown", Int(9), "INVALID_FIELD"},
      {rpc, "header.on_mismatch", "FIRST_WINS without a micro-batch", Int(v1::ON_MISMATCH_FIRST_WINS), "INVALID_COMBINATION",
       kThePath, ForwardOnly()},
      {rpc, "header.non_finite_policy", "unknown", Int(9), "INVALID_FIELD"},
      {rpc, "header.outputs", "unset", Int(0), "INVALID_FIELD", "header.outputs[0]"},
      {rpc, "header.outputs", "unknown", Int(99), "INVALID_FIELD", "header.outputs[0]"},
      {rpc, "header.outputs", "of targets that are not there", Int(v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY), "INVALID_COMBINATION",
       kThePath, Join(Jsd(), {{"header.terms.targets", Clear()}})},
      {rpc, "header.return_grad_hidden", "in FORWARD_ONLY", Int(1), "INVALID_COMBINATION", kThePath, ForwardOnly()},
      {rpc, "header.grad_hidden_data_type", "INT32", Int(v1::DATA_TYPE_INT32), "DATA_TYPE_MISMATCH"},
      {rpc, "header.allow_held", "without a micro-batch", Int(1), "INVALID_COMBINATION", kThePath, ForwardOnly()},
      {rpc, "header.late_token_factors", "of an EAGER one", Int(1), "INVALID_COMBINATION"},
  };
  AddSessionRows(rpc, "header.session_id", false, true, &rows);
  AddNumberRows(rpc, "header.grad_hidden_scale", kBeyondFloat32, {}, &rows);
  return rows;
}

std::vector<BadValue> TermRows() {
  const std::string rpc = "ComputeLoss";
  const std::string term = "header.terms.";
  std::vector<BadValue> rows = {
      {rpc, term + "head", "unset", Clear(), "MISSING_FIELD"},
      {rpc, term + "head.head", "empty", Text(""), "MISSING_FIELD"},
      {rpc, term + "head.head", "malformed", Text("student"), "INVALID_NAME"},
      {rpc, term + "head.head", "unknown", Text("tenants/default/heads/nobody"), "HEAD_NOT_FOUND", ""},
      {rpc, term + "head.head", "another tenant's", Text("tenants/other/heads/student"), "HEAD_NOT_FOUND", ""},
      {rpc, term + "head.head_epoch", "unset", Clear(), "MISSING_FIELD"},
      {rpc, term + "head.head_epoch", "short", Text("abc"), "INVALID_FIELD"},
      {rpc, term + "head.head_epoch", "stale", Text(std::string(16, 'x')), "EPOCH_FENCED", ""},
      {rpc, term + "head.step", "unset", Clear(), "MISSING_FIELD"},
      {rpc, term + "head.step", "negative", Int(-1), "INVALID_FIELD"},
      {rpc, term + "head.step", "not the open one", Int(7), "STEP_MISMATCH", ""},
      {rpc, term + "row_start", "negative", Int(-1), "INVALID_FIELD"},
      {rpc, term + "row_start", "beyond the rows", Int(4), "INVALID_FIELD"},
      {rpc, term + "row_start", "not the targets'", Int(1), "SHAPE_MISMATCH", "header.terms[0].targets.shape"},
      {rpc, term + "row_count", "zero", Int(0), "INVALID_FIELD"},
      {rpc, term + "row_count", "negative", Int(-3), "INVALID_FIELD"},
      {rpc, term + "row_count", "beyond the rows", Int(4), "INVALID_FIELD"},
      {rpc, term + "row_count", "far beyond", Int(std::numeric_limits<int64_t>::max()), "INVALID_FIELD", kThePath,
       Set("header.terms.row_start", Int(1))},
      {rpc, term + "targets", "unset", Clear(), "MISSING_FIELD"},
      {rpc, term + "targets.data", "beyond the vocabulary", Text(Elements(std::vector<int32_t>{1, 2, 13})), "TARGET_OUT_OF_VOCAB"},
      {rpc, term + "targets.data", "negative", Text(Elements(std::vector<int32_t>{1, -1, 3})), "TARGET_OUT_OF_VOCAB"},
      {rpc, term + "ignore_index", "not the ignored target's", Int(5), "TARGET_OUT_OF_VOCAB", "header.terms[0].targets.data",
       Set("header.terms.targets.data", Text(Elements(std::vector<int32_t>{1, -100, 3})))},
      {rpc, term + "cross_entropy", "no loss", Clear(), "MISSING_FIELD", "header.terms[0].loss"},
      {rpc, term + "jensen_shannon", "without a teacher", Make(), "MISSING_FIELD", "header.terms[0].teacher_hidden"},
      {rpc, term + "teacher_hidden", "for cross entropy", Make(), "INVALID_COMBINATION", "header.terms[0].teacher_source"},
      {rpc, term + "expected_weight_version", "negative", Int(-1), "INVALID_FIELD"},
      {rpc, term + "expected_weight_version", "another", Int(99), "WEIGHT_VERSION_MISMATCH", "head.expected_weight_version"},
  };
  AddTensorRows(rpc, term + "targets", v1::DATA_TYPE_FLOAT32, 4, {}, &rows);
  AddNumberRows(rpc, term + "loss_scale", kBeyondFloat32, {}, &rows);
  AddNumberRows(rpc, term + "gradient_resolution", {-0.5, 1.5, 1e-9}, {}, &rows);
  const auto no_resolution = [&](const char* what, const Prepare& prepare) {
    rows.push_back({rpc, term + "gradient_resolution", what, Real(0.25), "INVALID_COMBINATION", kThePath, prepare});
  };
  no_resolution("in FORWARD_ONLY", ForwardOnly());
  no_resolution("with a hard loss", HardJsd());
  for (const char* const name : {"entropy_factors", "lse_factors"}) {
    no_resolution("with factors", Tensor(term + name, v1::DATA_TYPE_FLOAT32, 3, Elements(std::vector<float>{1, 1, 1})));
  }
  for (const std::string& name : {std::string("token_weights"), std::string("entropy_factors"), std::string("lse_factors")}) {
    const Prepare values = Tensor(term + name, v1::DATA_TYPE_FLOAT32, 3, Elements(std::vector<float>{1, 1, 1}));
    AddTensorRows(rpc, term + name, v1::DATA_TYPE_INT32, 2, values, &rows);
    for (const float value : {std::nanf(""), static_cast<float>(-kInfinity)}) {
      rows.push_back({rpc, term + name + ".data", "not finite", Text(Elements(std::vector<float>{1, value, 1})), "INVALID_FIELD",
                      kThePath, values});
    }
    if (name == "token_weights") continue;
    const auto refused = [&](const char* what, const Prepare& prepare) {
      rows.push_back({rpc, term + name + ".data", what, Text(Elements(std::vector<float>{1, 1, 1})), "INVALID_COMBINATION",
                      "header.terms[0]." + name, Join(values, prepare)});
    };
    refused("of a divergence", Jsd());
    refused("in FORWARD_ONLY", ForwardOnly());
    refused("with late_token_factors",
            {{"header.commit_mode", Int(v1::COMMIT_MODE_EXPLICIT)}, {"header.late_token_factors", Int(1)}});
  }
  AddCrossEntropyRows(term + "cross_entropy", {}, &rows);
  AddNumberRows(rpc, term + "cross_entropy.temperature", {0, -1, 1e-39, 1e46}, {}, &rows);
  return rows;
}

std::vector<BadValue> JsdRows() {
  const std::string rpc = "ComputeLoss";
  const std::string jsd = "header.terms.jensen_shannon.";
  const std::string teacher = "header.terms.teacher_hidden.";
  const std::string joined = "header.terms.joined_teacher.";
  const std::string top_k = "header.terms.top_k_teacher.";
  std::vector<BadValue> rows = {
      {rpc, jsd + "hard_loss", "without a weight", Make(), "INVALID_COMBINATION", kThePath, Jsd()},
      {rpc, jsd + "hard_loss.temperature", "of a hard loss", Real(2), "INVALID_COMBINATION", kThePath, HardJsd()},
      {rpc, jsd + "hard_loss.token_scaling", "of a hard loss", Int(1), "INVALID_COMBINATION", kThePath, HardJsd()},
      {rpc, jsd + "vocab_alignment", "unknown", Int(9), "INVALID_FIELD", kThePath, Jsd()},
      {rpc, teacher + "head", "empty", Text(""), "MISSING_FIELD", kThePath, Jsd()},
      {rpc, teacher + "head", "malformed", Text("tenants/default/heads/UPPER"), "INVALID_NAME", kThePath, Jsd()},
      {rpc, teacher + "head", "unknown", Text("tenants/default/heads/nobody"), "HEAD_NOT_FOUND", "", Jsd()},
      {rpc, teacher + "head_epoch", "long", Text(std::string(17, 'x')), "INVALID_FIELD", kThePath, Jsd()},
      {rpc, teacher + "head_epoch", "stale", Text(std::string(16, 'x')), "EPOCH_FENCED", "", Jsd()},
      {rpc, teacher + "data_type", "unset", Clear(), "MISSING_FIELD", kThePath, Jsd()},
      {rpc, teacher + "data_type", "INT32", Int(v1::DATA_TYPE_INT32), "DATA_TYPE_MISMATCH", kThePath, Jsd()},
      {rpc, teacher + "expected_weight_version", "negative", Int(-1), "INVALID_FIELD", kThePath, Jsd()},
      {rpc, teacher + "expected_weight_version", "another", Int(99), "WEIGHT_VERSION_MISMATCH", "teacher.expected_weight_version",
       Jsd()},
      {rpc, "header.terms.joined_teacher", "of whom nobody sends rows", Make(), "JOIN_INCOMPLETE", "", JoinedTeacher()},
      {rpc, joined + "head", "unknown", Text("tenants/default/heads/nobody"), "HEAD_NOT_FOUND", "", JoinedTeacher()},
      {rpc, joined + "head_epoch", "stale", Text(std::string(16, 'x')), "EPOCH_FENCED", "", JoinedTeacher()},
      {rpc, joined + "expected_weight_version", "another", Int(99), "WEIGHT_VERSION_MISMATCH", "teacher.expected_weight_version",
       JoinedTeacher()},
      {rpc, joined + "head_epoch", "long", Text(std::string(17, 'x')), "INVALID_FIELD", kThePath, JoinedTeacher()},
      {rpc, joined + "data_type", "unset", Clear(), "MISSING_FIELD", kThePath, JoinedTeacher()},
      {rpc, joined + "data_type", "INT32", Int(v1::DATA_TYPE_INT32), "DATA_TYPE_MISMATCH", kThePath, JoinedTeacher()},
      {rpc, joined + "expected_weight_version", "negative", Int(-1), "INVALID_FIELD", kThePath, JoinedTeacher()},
      {rpc, joined + "total_row_count", "below the term's rows", Int(2), "INVALID_FIELD", kThePath,
       Join(JoinedTeacher(), {{joined + "row_indices", Clear()}})},
      {rpc, teacher + "rows", "without a session", Make(), "MISSING_FIELD", "header.session_id",
       Join(Jsd(), {{teacher + "rows.region_id", Text("region")}})},
      {rpc, teacher + "rows.region_id", "empty", Text(""), "MISSING_FIELD", kThePath, Join(Jsd(), AnySession())},
      {rpc, teacher + "rows.offset_bytes", "negative", Int(-1), "INVALID_FIELD", kThePath,
       Join(Join(Jsd(), AnySession()), {{teacher + "rows.region_id", Text("region")}})},
      {rpc, joined + "head", "empty", Text(""), "MISSING_FIELD", kThePath, JoinedTeacher()},
      {rpc, joined + "head", "malformed", Text("x/y"), "INVALID_NAME", kThePath, JoinedTeacher()},
      {rpc, joined + "join_key", "empty", Text(""), "MISSING_FIELD", kThePath, JoinedTeacher()},
      {rpc, joined + "join_key", "long", Text(std::string(257, 'k')), "INVALID_FIELD", kThePath, JoinedTeacher()},
      {rpc, joined + "row_indices", "fewer than the term's rows", Make(), "SHAPE_MISMATCH",
       "header.terms[0].joined_teacher.row_indices.shape", Join(JoinedTeacher(), Set(joined + "row_indices.shape", Ints({2})))},
      {rpc, joined + "row_indices.data", "beyond the set", Text(Elements(std::vector<int32_t>{0, 4, 9})), "INVALID_FIELD", kThePath,
       JoinedTeacher()},
      {rpc, joined + "total_row_count", "zero", Int(0), "INVALID_FIELD", kThePath, JoinedTeacher()},
      {rpc, "header.terms.cached_teacher", "given", Make(), "FEATURE_NOT_BUILT", kThePath,
       Join(Set("header.terms.jensen_shannon", Make()), Set("header.terms.cached_teacher.cache_key", Text("k")))},
      {rpc, "header.terms.cached_teacher.cache_key", "empty", Text(""), "MISSING_FIELD", kThePath,
       Set("header.terms.jensen_shannon", Make())},
      {rpc, "header.terms.top_k_teacher", "of a cross entropy", Make(), "INVALID_COMBINATION", "header.terms[0].teacher_source"},
      {rpc, top_k + "k", "zero", Int(0), "INVALID_FIELD", kThePath, TopK()},
      {rpc, top_k + "ids", "unset", Clear(), "MISSING_FIELD", kThePath, TopK()},
      {rpc, top_k + "log_probs", "unset", Clear(), "MISSING_FIELD", kThePath, TopK()},
      {rpc, top_k + "k", "too many", Int(1025), "INVALID_FIELD", kThePath, TopK()},
      {rpc, top_k + "ids.data", "beyond the vocabulary", Text(Elements(std::vector<int32_t>{0, 1, 2, 99, -1, 1})),
       "TARGET_OUT_OF_VOCAB", kThePath, TopK()},
      {rpc, top_k + "ids.data", "below -1", Text(Elements(std::vector<int32_t>{0, 1, 2, -2, -1, 1})), "TARGET_OUT_OF_VOCAB",
       kThePath, TopK()},
      {rpc, top_k + "ids.data", "an id twice", Text(Elements(std::vector<int32_t>{0, 1, 2, 2, -1, 1})), "INVALID_FIELD", kThePath,
       TopK()},
      {rpc, top_k + "log_probs.data", "above 0", Text(Elements(std::vector<float>{-1, -1, -1, 0.5F, -1, -1})), "INVALID_FIELD",
       kThePath, TopK()},
      {rpc, top_k + "log_probs.data", "not finite",
       Text(Elements(std::vector<float>{-1, -1, -std::numeric_limits<float>::infinity(), -1, -1, -1})), "INVALID_FIELD", kThePath,
       TopK()},
      {rpc, top_k + "log_probs.data", "more than all mass", Text(Elements(std::vector<float>{-0.5F, -0.5F, -1, -1, -1, -1})),
       "INVALID_FIELD", kThePath, TopK()},
      {rpc, jsd + "beta", "unset, with a top-k teacher", Clear(), "INVALID_COMBINATION", kThePath, TopK()},
      {rpc, jsd + "beta", "1, with a top-k teacher", Real(1), "INVALID_COMBINATION", kThePath, TopK()},
      {rpc, jsd + "teacher_temperature", "with a top-k teacher", Real(2), "INVALID_COMBINATION", kThePath, TopK()},
      {rpc, jsd + "hard_loss_weight", "with a top-k teacher", Real(0.5), "INVALID_COMBINATION", kThePath, TopK()},
      {rpc, jsd + "vocab_alignment", "with a top-k teacher", Int(v1::VOCAB_ALIGNMENT_TRUNCATE_TO_COMMON), "INVALID_COMBINATION",
       kThePath, TopK()},
      {rpc, "header.outputs", "LSE, with a top-k teacher", Ints({v1::TOKEN_OUTPUT_LSE}), "INVALID_COMBINATION", kThePath, TopK()},
  };
  AddTensorRows(rpc, joined + "row_indices", v1::DATA_TYPE_FLOAT32, 2, JoinedTeacher(), &rows);
  AddTensorRows(rpc, top_k + "ids", v1::DATA_TYPE_FLOAT32, 2, TopK(), &rows);
  AddTensorRows(rpc, top_k + "log_probs", v1::DATA_TYPE_INT32, 2, TopK(), &rows);
  AddNumberRows(rpc, jsd + "beta", {-0.01, 1.01}, Jsd(), &rows);
  AddNumberRows(rpc, jsd + "student_temperature", {0, -1, 1e-300, 1e300}, Jsd(), &rows);
  AddNumberRows(rpc, jsd + "teacher_temperature", {0, -1, 1e-300, 1e300}, Jsd(), &rows);
  AddNumberRows(rpc, jsd + "hard_loss_weight", {-0.01, 1.01}, Jsd(), &rows);
  AddCrossEntropyRows(jsd + "hard_loss", HardJsd(), &rows);
  return rows;
}

std::vector<BadValue> ChunkRows() {
  const std::string rpc = "ComputeLoss";
  return {
      {rpc, "chunk", "before the header", Make(), "PROTOCOL_VIOLATION", "header"},
      {rpc, "chunk.role", "unset", Clear(), "MISSING_FIELD"},
      {rpc, "chunk.role", "the server's", Int(v1::CHUNK_ROLE_GRAD_HIDDEN), "INVALID_FIELD"},
      {rpc, "chunk.role", "of a teacher that there is none", Int(v1::CHUNK_ROLE_TEACHER_HIDDEN), "PROTOCOL_VIOLATION"},
      {rpc, "chunk.term_index", "beyond the terms", Int(1), "INVALID_FIELD"},
      {rpc, "chunk.row_start", "negative", Int(-1), "CHUNK_OUT_OF_RANGE", "chunk"},
      {rpc, "chunk.row_start", "beyond the rows", Int(1), "CHUNK_OUT_OF_RANGE", "chunk"},
      {rpc, "chunk.row_start", "far beyond", Int(std::numeric_limits<int64_t>::max()), "CHUNK_OUT_OF_RANGE", "chunk"},
      {rpc, "chunk.row_count", "zero", Int(0), "CHUNK_OUT_OF_RANGE", "chunk"},
      {rpc, "chunk.row_count", "beyond the rows", Int(4), "CHUNK_OUT_OF_RANGE", "chunk"},
      {rpc, "chunk.row_count", "not the data's", Int(2), "DATA_LENGTH_MISMATCH", "chunk.data"},
      {rpc, "chunk.data", "empty", Text(""), "DATA_LENGTH_MISMATCH"},
      {rpc, "chunk.data", "one byte more", Text(std::string(61, '\0')), "DATA_LENGTH_MISMATCH"},
      {rpc, "chunk.data", "above the limit", Text(std::string((4 << 20) + 1, '\0')), "LIMIT_EXCEEDED"},
  };
}

void AddMicroBatchRows(const std::string& rpc, const std::string& prefix, std::vector<BadValue>* rows) {
  rows->push_back({rpc, prefix + "micro_batch", "unset", Clear(), "MISSING_FIELD"});
  rows->push_back({rpc, prefix + "micro_batch", "negative", Int(-1), "INVALID_FIELD"});
  rows->push_back({rpc, prefix + "attempt", "negative", Int(-1), "INVALID_FIELD"});
}

}  // namespace

void AddNumberRows(const std::string& rpc, const std::string& path, const std::vector<double>& bad, const Prepare& prepare,
                   std::vector<BadValue>* rows) {
  for (const double value : {kNan, kInfinity, -kInfinity}) {
    rows->push_back({rpc, path, "not finite", Real(value), "INVALID_FIELD", kThePath, prepare});
  }
  for (const double value : bad)
    rows->push_back({rpc, path, std::to_string(value), Real(value), "INVALID_FIELD", kThePath, prepare});
}

void AddSessionRows(const std::string& rpc, const std::string& path, bool required, bool looks_up, std::vector<BadValue>* rows) {
  if (required) rows->push_back({rpc, path, "empty", Text(""), "MISSING_FIELD"});
  rows->push_back({rpc, path, "short", Text("session"), "INVALID_FIELD"});
  rows->push_back({rpc, path, "long", Text(std::string(33, 's')), "INVALID_FIELD"});
  if (looks_up) rows->push_back({rpc, path, "of nobody", Text(std::string(32, 's')), "SESSION_NOT_FOUND", ""});
}

void AddHeadStepRows(const std::string& rpc, const std::string& path, bool looks_up, bool step, std::vector<BadValue>* rows) {
  rows->push_back({rpc, path, "unset", Clear(), "MISSING_FIELD", path});
  rows->push_back({rpc, path + ".head", "empty", Text(""), "MISSING_FIELD"});
  rows->push_back({rpc, path + ".head", "malformed", Text("tenants/default/heads/"), "INVALID_NAME"});
  rows->push_back({rpc, path + ".head_epoch", "unset", Clear(), "MISSING_FIELD"});
  rows->push_back({rpc, path + ".head_epoch", "short", Text("x"), "INVALID_FIELD"});
  rows->push_back({rpc, path + ".step", "negative", Int(-1), "INVALID_FIELD"});
  if (step) rows->push_back({rpc, path + ".step", "unset", Clear(), "MISSING_FIELD"});
  if (looks_up) {
    rows->push_back({rpc, path + ".head", "unknown", Text("tenants/default/heads/nobody"), "HEAD_NOT_FOUND", ""});
    rows->push_back({rpc, path + ".head", "another tenant's", Text("tenants/other/heads/student"), "HEAD_NOT_FOUND", ""});
    rows->push_back({rpc, path + ".head_epoch", "stale", Text(std::string(16, 'x')), "EPOCH_FENCED", ""});
  }
  if (looks_up && step) rows->push_back({rpc, path + ".step", "not the open one", Int(7), "STEP_MISMATCH", ""});
}

std::vector<BadValue> LossServiceBadValues() {
  std::vector<BadValue> rows = HeaderRows();
  for (const auto& more : {TermRows(), JsdRows(), ChunkRows()}) rows.insert(rows.end(), more.begin(), more.end());
  for (const char* rpc : {"CommitMicroBatch", "DiscardMicroBatch"}) {
    AddHeadStepRows(rpc, "heads", true, true, &rows);
    AddMicroBatchRows(rpc, "", &rows);
    rows.push_back({rpc, "heads", "one twice", Times(2), "INVALID_COMBINATION", "heads[1].head"});
    rows.push_back({rpc, "heads", "above the limit", Times(65), "LIMIT_EXCEEDED", "heads"});
    AddSessionRows(rpc, "session_id", false, true, &rows);
  }
  rows.push_back({"CommitMicroBatch", "micro_batch", "unknown", Int(77), "MICRO_BATCH_NOT_FOUND", ""});
  AddNumberRows("CommitMicroBatch", "factor", kBeyondFloat32, {}, &rows);
  const std::string factors = "token_factors";
  const Prepare with_factors = Tensor(factors, v1::DATA_TYPE_FLOAT32, 3, Elements(std::vector<float>{1, 1, 1}));
  rows.push_back({"CommitMicroBatch", factors, "of one that is not held", Make(), "INVALID_COMBINATION", "", with_factors});
  AddTensorRows("CommitMicroBatch", factors, v1::DATA_TYPE_INT32, (1 << 18) + 1, with_factors, &rows);
  rows.push_back({"CommitMicroBatch", factors + ".data", "not finite", Text(Elements(std::vector<float>{1, std::nanf(""), 1})),
                  "INVALID_FIELD", kThePath, with_factors});

  rows.push_back({"TransferRows", "header", "unset", Clear(), "MISSING_FIELD", "message"});
  rows.push_back({"TransferRows", "header.transfer_id", "of nobody", Text(std::string(16, 't')), "TRANSFER_NOT_FOUND", ""});
  rows.push_back({"TransferRows", "header.transfer_id", "empty", Text(""), "MISSING_FIELD"});
  rows.push_back({"TransferRows", "header.transfer_id", "short", Text("transfer"), "INVALID_FIELD"});
  rows.push_back({"TransferRows", "header.transfer_id", "long", Text(std::string(17, 't')), "INVALID_FIELD"});
  rows.push_back({"TransferRows", "header.stripe_index", "the primary's", Int(0), "INVALID_FIELD"});
  rows.push_back({"TransferRows", "header.stripe_index", "negative", Int(-1), "INVALID_FIELD"});
  rows.push_back({"TransferRows", "chunk", "before the header", Make(), "PROTOCOL_VIOLATION", "header"});

  const std::string teacher = "StreamTeacher";
  rows.push_back({teacher, "header", "unset", Clear(), "MISSING_FIELD", "message"});
  rows.push_back({teacher, "chunk", "before the header", Make(), "PROTOCOL_VIOLATION", "header"});
  rows.push_back({teacher, "header.join_key", "empty", Text(""), "MISSING_FIELD"});
  rows.push_back({teacher, "header.join_key", "long", Text(std::string(257, 'k')), "INVALID_FIELD"});
  rows.push_back({teacher, "header.total_row_count", "zero", Int(0), "INVALID_FIELD"});
  rows.push_back({teacher, "header.total_row_count", "above the limit, in one stream", Int((1 << 18) + 1), "LIMIT_EXCEEDED",
                  kThePath, Set("header.row_indices", Clear())});
  rows.push_back({teacher, "header.tenant", "unset", Clear(), "MISSING_FIELD"});
  rows.push_back({teacher, "header.row_indices", "of no rows", Make(), "SHAPE_MISMATCH", "header.row_indices.shape",
                  Join(Set("header.row_indices.shape", Ints({0})), Set("header.row_indices.data", Text("")))});
  rows.push_back({teacher, "header.tenant", "malformed", Text("default"), "INVALID_NAME"});
  rows.push_back({teacher, "header.row_indices.data", "twice the same", Text(Elements(std::vector<int32_t>{4, 4})),
                  "CHUNK_OUT_OF_RANGE", "header.row_indices"});
  rows.push_back(
      {teacher, "header.row_indices.data", "beyond the set", Text(Elements(std::vector<int32_t>{0, 9})), "INVALID_FIELD"});
  AddTensorRows(teacher, "header.row_indices", v1::DATA_TYPE_FLOAT32, -1, {}, &rows);
  rows.push_back({teacher, "header.data_type", "unset", Clear(), "MISSING_FIELD"});
  rows.push_back({teacher, "header.data_type", "INT32", Int(v1::DATA_TYPE_INT32), "DATA_TYPE_MISMATCH"});
  rows.push_back({teacher, "header.hidden_size", "zero", Int(0), "INVALID_FIELD"});
  rows.push_back({teacher, "header.hidden_size", "above the limit", Int((1 << 16) + 1), "LIMIT_EXCEEDED"});
  AddSessionRows(teacher, "header.session_id", false, false, &rows);
  return rows;
}

}  // namespace headwater::testing
