// Bad values of all requests, and the fields that have none.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "headwater/v1/head_service.pb.h"
#include "headwater/v1/loss.pb.h"
#include "headwater/v1/loss_service.pb.h"
#include "tests/integration/support/bad_values.h"

namespace headwater::testing {
namespace {

const double kInfinity = std::numeric_limits<double>::infinity();

// ---- rows that several RPCs have

// Finite, but not as float32: what factors of losses and gradients must not be.
const std::vector<double> kBeyondFloat32 = {4e38, -4e38};

// NaN, the infinities, and `bad`.
void AddNumberRows(const BadValues& rows, const std::vector<std::string>& names, const std::vector<double>& bad) {
  std::vector<Edit> values = {Real(std::nan("")), Real(kInfinity), Real(-kInfinity)};
  for (const double value : bad) values.push_back(Real(value));
  rows.Add("INVALID_FIELD", names, values);
}

// A session's id.
void AddSessionRows(const BadValues& rows, const std::string& name, bool required, bool looks_up) {
  if (required) rows.Add("MISSING_FIELD", {name}, {Text("")});
  rows.Add("INVALID_FIELD", {name}, {Text("session"), Text(std::string(33, 's'))});
  if (looks_up) rows.Add("SESSION_NOT_FOUND", {name}, {Text(std::string(32, 's'))}, "");
}

// A HeadStep; `step`: the call works on a step.
void AddHeadStepRows(const BadValues& rows, const std::string& name, bool step) {
  rows.Add("MISSING_FIELD", {name, name + ".head_epoch"}, {Clear()});
  rows.Add("MISSING_FIELD", {name + ".head"}, {Text("")});
  rows.Add("INVALID_NAME", {name + ".head"}, {Text("tenants/default/heads/")});
  rows.Add("HEAD_NOT_FOUND", {name + ".head"}, {Text("tenants/default/heads/nobody"), Text("tenants/other/heads/student")}, "");
  rows.Add("INVALID_FIELD", {name + ".head_epoch"}, {Text("x")});
  rows.Add("EPOCH_FENCED", {name + ".head_epoch"}, {kStaleEpoch}, "");
  rows.Add("INVALID_FIELD", {name + ".step"}, {Int(-1)});
  if (!step) return;
  rows.Add("MISSING_FIELD", {name + ".step"}, {Clear()});
  rows.Add("STEP_MISMATCH", {name + ".step"}, {Int(7)}, "");
}

// ---- LossService ----------------------------------------------------------------------------------------------------

template <typename T>
Edit Elements(const std::vector<T>& values) {
  static_assert(sizeof(T) == 4);
  return Text(std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4));
}
Edit Integers(const std::vector<int32_t>& values) { return Elements(values); }
Edit Floats32(const std::vector<float>& values) { return Elements(values); }

Prepare Tensor(const std::string& path, v1::DataType type, const std::vector<int64_t>& shape, const Edit& data) {
  return {{path + ".data_type", Int(type)}, {path + ".shape", Ints(shape)}, {path + ".data", data}};
}
// Factors of three rows.
Prepare Factors(const std::string& path) { return Tensor(path, v1::DATA_TYPE_FLOAT32, {3}, Floats32({1, 1, 1})); }

// Two terms that are the same but for the second one's field.
Edit TwoTerms(const std::string& path, const Edit& edit) {
  return {"two terms, the second with " + path + " " + edit.what,
          [path, edit](google::protobuf::Message* parent, const google::protobuf::FieldDescriptor* field) {
            Times(2).apply(parent, field);
            Apply(parent->GetReflection()->MutableRepeatedMessage(parent, field, 1), path, edit);
          }};
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
              Tensor("header.terms.joined_teacher.row_indices", v1::DATA_TYPE_INT32, {3}, Integers({0, 4, 8})));
}
// Three rows of a top-k teacher with two entries each, one of which is not used.
Prepare TopK() {
  const std::string teacher = "header.terms.top_k_teacher.";
  return Join(Join({{"header.terms.jensen_shannon.beta", Real(0)}, {teacher + "k", Int(2)}},
                   Tensor(teacher + "ids", v1::DATA_TYPE_INT32, {3, 2}, Integers({0, 1, 2, 3, -1, 1}))),
              Tensor(teacher + "log_probs", v1::DATA_TYPE_FLOAT32, {3, 2}, Floats32({-1, -1, -1, -2, 0, -3})));
}
// An id that is well-formed; the session is looked up when the header is.
Prepare AnySession() { return {{"header.session_id", Text(std::string(32, 's'))}}; }

// Type, shape and length of a one-dimensional tensor; the caller adds rows for its values.
void AddTensorRows(const BadValues& rows, const std::string& name, v1::DataType wrong_type, int64_t wrong_size) {
  rows.Add("MISSING_FIELD", {name + ".data_type"}, {Clear()});
  rows.Add("DATA_TYPE_MISMATCH", {name + ".data_type"}, {Int(wrong_type), Int(77)});
  if (wrong_size >= 0) rows.Add("SHAPE_MISMATCH", {name + ".shape"}, {Ints({wrong_size})});
  rows.Add("SHAPE_MISMATCH", {name + ".shape"}, {Ints({-1}), Clear(), Ints(std::vector<int64_t>(12, 1))});
  rows.Add("DATA_LENGTH_MISMATCH", {name + ".data"}, {Text(std::string(11, '\0'))});
}

// `path` from the request on.
void AddCrossEntropyRows(const BadValues& rows, const std::string& path) {
  AddNumberRows(rows, {path + ".label_smoothing"}, {-0.1, 1.1, 2});
  AddNumberRows(rows, {path + ".z_loss"}, {-1e-9, 4e38});
  const std::string weights = path + ".class_weights";
  const BadValues with_weights = rows.At("", Tensor(weights, v1::DATA_TYPE_FLOAT32, {13}, Floats32(std::vector<float>(13, 1))));
  AddTensorRows(with_weights, weights, v1::DATA_TYPE_INT32, -1);
  with_weights.At("", {{weights + ".data", Text(std::string(48, '\0'))}}).Add("SHAPE_MISMATCH", {weights + ".shape"}, {Ints({12})});
  for (const float value : {std::nanf(""), static_cast<float>(kInfinity)}) {
    std::vector<float> values(13, 1);
    values[7] = value;
    with_weights.Add("INVALID_FIELD", {weights + ".data"}, {Floats32(values)});
  }
}

// A place in a region, which needs a session; `name` from the request on.
void AddSharedRows(const BadValues& rows, const std::string& name) {
  rows.At("", {{name + ".region_id", Text("region")}}).Add("MISSING_FIELD", {name}, {Make()}, "header.session_id");
  rows.At("", AnySession()).Add("MISSING_FIELD", {name + ".region_id"}, {Text("")});
  rows.At("", Join(AnySession(), {{name + ".region_id", Text("region")}}))
      .Add("INVALID_FIELD", {name + ".offset_bytes"}, {Int(-1)});
}

void AddHeaderRows(const BadValues& rows) {
  const BadValues header = rows.At("header.");
  rows.Add("MISSING_FIELD", {"header"}, {Clear()}, "message");
  header.Add("MISSING_FIELD", {"micro_batch", "compute_mode", "data_type", "terms"}, {Clear()});
  header.Add("INVALID_FIELD", {"micro_batch", "attempt", "row_count", "stripe_count"}, {Int(-1)});
  header.Add("INVALID_FIELD", {"compute_mode", "commit_mode", "on_mismatch", "non_finite_policy"}, {Int(9)});
  header.Add("INVALID_COMBINATION", {"compute_mode"}, {Int(v1::COMPUTE_MODE_FORWARD_ONLY)}, "header.micro_batch");
  header.Add("LIMIT_EXCEEDED", {"row_count"}, {Int((1 << 18) + 1), kFar});
  header.Add("SHAPE_MISMATCH", {"row_count"}, {Int(4)}, "header.terms[0].targets.shape");
  header.Add("LIMIT_EXCEEDED", {"stripe_count"}, {Int(17)});
  const BadValues striped = header.At("", {{"header.stripe_count", Int(2)}});
  striped.Add("MISSING_FIELD", {"transfer_id"}, {Text("")});
  striped.Add("INVALID_FIELD", {"transfer_id"}, {Text("id")});
  header.Add("INVALID_COMBINATION", {"transfer_id"}, {Text(std::string(16, 't'))});
  AddSharedRows(rows, "header.hidden_rows");
  AddSharedRows(rows, "header.grad_hidden_rows");
  header.At("", Join(AnySession(), {{"header.grad_hidden_rows.region_id", Text("region")}, {"header.return_grad_hidden", Int(0)}}))
      .Add("INVALID_COMBINATION", {"grad_hidden_rows"}, {Make()});
  header.Add("INVALID_FIELD", {"hidden_size"}, {Int(0)});
  header.Add("LIMIT_EXCEEDED", {"hidden_size"}, {Int((1 << 16) + 1)});
  header.Add("SHAPE_MISMATCH", {"hidden_size"}, {Int(6)});
  header.Add("DATA_TYPE_MISMATCH", {"data_type"}, {Int(v1::DATA_TYPE_INT32), Int(77)});
  header.Add("DATA_LENGTH_MISMATCH", {"data_type"}, {Int(v1::DATA_TYPE_BFLOAT16)}, "chunk.data");
  header.Add("LIMIT_EXCEEDED", {"terms"}, {Times(65)}, "header.terms");
  // Of one head at two steps, or two epochs.
  header.Add("INVALID_COMBINATION", {"terms"}, {TwoTerms("head.step", Int(1))}, "header.terms[1].head.step");
  header.Add("INVALID_COMBINATION", {"terms"}, {TwoTerms("head.head_epoch", kStaleEpoch)}, "header.terms[1].head.head_epoch");
  header.Add("TARGET_OUT_OF_VOCAB", {"terms"}, {TwoTerms("targets.data", Integers({1, 2, 13}))}, "header.terms[1].targets.data");
  header.Add("INVALID_FIELD", {"outputs"}, {Int(0), Int(99)}, "header.outputs[0]");
  header.At("", Join(Jsd(), {{"header.terms.targets", Clear()}}))
      .Add("INVALID_COMBINATION", {"outputs"}, {Int(v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY)});
  const BadValues forward = header.At("", ForwardOnly());
  forward.Add("INVALID_COMBINATION", {"commit_mode"}, {Int(v1::COMMIT_MODE_EXPLICIT)});
  forward.Add("INVALID_COMBINATION", {"on_mismatch"}, {Int(v1::ON_MISMATCH_FIRST_WINS)});
  forward.Add("INVALID_COMBINATION", {"return_grad_hidden", "allow_held"}, {Int(1)});
  header.Add("DATA_TYPE_MISMATCH", {"grad_hidden_data_type"}, {Int(v1::DATA_TYPE_INT32)});
  header.Add("INVALID_COMBINATION", {"late_token_factors"}, {Int(1)});  // of an EAGER one
  AddSessionRows(header, "session_id", false, true);
  AddNumberRows(header, {"grad_hidden_scale"}, kBeyondFloat32);
}

void AddTermRows(const BadValues& rows) {
  const BadValues term = rows.At("header.terms.");
  AddHeadStepRows(term, "head", true);
  term.Add("INVALID_FIELD", {"row_start", "expected_weight_version"}, {Int(-1)});
  term.Add("INVALID_FIELD", {"row_start"}, {Int(4)});
  term.Add("SHAPE_MISMATCH", {"row_start"}, {Int(1)}, "header.terms[0].targets.shape");
  term.Add("INVALID_FIELD", {"row_count"}, {Int(0), Int(-3), Int(4)});
  term.At("", {{"header.terms.row_start", Int(1)}}).Add("INVALID_FIELD", {"row_count"}, {kFar});
  term.Add("MISSING_FIELD", {"targets"}, {Clear()});
  term.Add("TARGET_OUT_OF_VOCAB", {"targets.data"}, {Integers({1, 2, 13}), Integers({1, -1, 3})});
  term.At("", {{"header.terms.targets.data", Integers({1, -100, 3})}})
      .Add("TARGET_OUT_OF_VOCAB", {"ignore_index"}, {Int(5)}, "header.terms[0].targets.data");
  term.Add("MISSING_FIELD", {"cross_entropy"}, {Clear()}, "header.terms[0].loss");
  term.Add("MISSING_FIELD", {"jensen_shannon"}, {Make()}, "header.terms[0].teacher_hidden");
  term.Add("INVALID_COMBINATION", {"teacher_hidden", "top_k_teacher"}, {Make()}, "header.terms[0].teacher_source");
  term.Add("WEIGHT_VERSION_MISMATCH", {"expected_weight_version"}, {Int(99)}, "head.expected_weight_version");
  AddTensorRows(term, "targets", v1::DATA_TYPE_FLOAT32, 4);
  AddNumberRows(term, {"loss_scale"}, kBeyondFloat32);
  AddNumberRows(term, {"gradient_resolution"}, {-0.5, 1.5, 1e-9});
  for (const Prepare& prepare :
       {ForwardOnly(), HardJsd(), Factors("header.terms.entropy_factors"), Factors("header.terms.lse_factors")}) {
    term.At("", prepare).Add("INVALID_COMBINATION", {"gradient_resolution"}, {Real(0.25)});
  }
  for (const std::string name : {"token_weights", "entropy_factors", "lse_factors"}) {
    const BadValues with_values = term.At("", Factors("header.terms." + name));
    AddTensorRows(with_values, name, v1::DATA_TYPE_INT32, 2);
    with_values.Add("INVALID_FIELD", {name + ".data"},
                    {Floats32({1, std::nanf(""), 1}), Floats32({1, static_cast<float>(-kInfinity), 1})});
    if (name == "token_weights") continue;
    const Prepare late = {{"header.commit_mode", Int(v1::COMMIT_MODE_EXPLICIT)}, {"header.late_token_factors", Int(1)}};
    for (const Prepare& prepare : {Jsd(), ForwardOnly(), late}) {
      with_values.At("", prepare).Add("INVALID_COMBINATION", {name + ".data"}, {Floats32({1, 1, 1})}, "header.terms[0]." + name);
    }
  }
  AddCrossEntropyRows(rows, "header.terms.cross_entropy");
  AddNumberRows(term, {"cross_entropy.temperature"}, {0, -1, 1e-39, 1e46});
}

// What an inline and a joined teacher have in common.
void AddTeacherRows(const BadValues& teacher) {
  teacher.Add("MISSING_FIELD", {"head"}, {Text("")});
  teacher.Add("INVALID_NAME", {"head"}, {Text("tenants/default/heads/UPPER")});
  teacher.Add("HEAD_NOT_FOUND", {"head"}, {Text("tenants/default/heads/nobody")}, "");
  teacher.Add("INVALID_FIELD", {"head_epoch"}, {Text(std::string(17, 'x'))});
  teacher.Add("EPOCH_FENCED", {"head_epoch"}, {kStaleEpoch}, "");
  teacher.Add("MISSING_FIELD", {"data_type"}, {Clear()});
  teacher.Add("DATA_TYPE_MISMATCH", {"data_type"}, {Int(v1::DATA_TYPE_INT32)});
  teacher.Add("INVALID_FIELD", {"expected_weight_version"}, {Int(-1)});
  teacher.Add("WEIGHT_VERSION_MISMATCH", {"expected_weight_version"}, {Int(99)}, "teacher.expected_weight_version");
}

void AddJsdRows(const BadValues& rows) {
  const std::string jsd = "header.terms.jensen_shannon.";
  const BadValues inline_teacher = rows.At("", Jsd());
  const BadValues hard = rows.At(jsd, HardJsd());
  inline_teacher.Add("INVALID_COMBINATION", {jsd + "hard_loss"}, {Make()});  // without a weight
  hard.Add("INVALID_COMBINATION", {"hard_loss.temperature"}, {Real(2)});
  hard.Add("INVALID_COMBINATION", {"hard_loss.token_scaling"}, {Int(1)});
  inline_teacher.Add("INVALID_FIELD", {jsd + "vocab_alignment"}, {Int(9)});
  AddTeacherRows(inline_teacher.At("header.terms.teacher_hidden."));
  AddSharedRows(inline_teacher, "header.terms.teacher_hidden.rows");
  AddNumberRows(inline_teacher, {jsd + "beta", jsd + "hard_loss_weight"}, {-0.01, 1.01});
  AddNumberRows(inline_teacher, {jsd + "student_temperature", jsd + "teacher_temperature"}, {0, -1, 1e-300, 1e300});
  AddCrossEntropyRows(rows.At("", HardJsd()), jsd + "hard_loss");

  const BadValues joined = rows.At("header.terms.joined_teacher.", JoinedTeacher());
  rows.At("", JoinedTeacher()).Add("JOIN_INCOMPLETE", {"header.terms.joined_teacher"}, {Make()}, "");  // nobody sends rows
  AddTeacherRows(joined);
  joined.At("", {{"header.terms.joined_teacher.row_indices", Clear()}}).Add("INVALID_FIELD", {"total_row_count"}, {Int(2)});
  joined.Add("INVALID_FIELD", {"total_row_count"}, {Int(0)});
  joined.Add("MISSING_FIELD", {"join_key"}, {Text("")});
  joined.Add("INVALID_FIELD", {"join_key"}, {Text(std::string(257, 'k'))});
  joined.At("", {{"header.terms.joined_teacher.row_indices.shape", Ints({2})}})
      .Add("SHAPE_MISMATCH", {"row_indices"}, {Make()}, "header.terms[0].joined_teacher.row_indices.shape");
  joined.Add("INVALID_FIELD", {"row_indices.data"}, {Integers({0, 4, 9})});
  AddTensorRows(joined, "row_indices", v1::DATA_TYPE_FLOAT32, 2);

  const BadValues cached = rows.At("header.terms.", {{"header.terms.jensen_shannon", Make()}});
  cached.At("", {{"header.terms.cached_teacher.cache_key", Text("k")}}).Add("FEATURE_NOT_BUILT", {"cached_teacher"}, {Make()});
  cached.Add("MISSING_FIELD", {"cached_teacher.cache_key"}, {Text("")});

  const BadValues top_k = rows.At("header.terms.top_k_teacher.", TopK());
  top_k.Add("INVALID_FIELD", {"k"}, {Int(0), Int(1025)});
  top_k.Add("MISSING_FIELD", {"ids", "log_probs"}, {Clear()});
  top_k.Add("TARGET_OUT_OF_VOCAB", {"ids.data"}, {Integers({0, 1, 2, 99, -1, 1}), Integers({0, 1, 2, -2, -1, 1})});
  top_k.Add("INVALID_FIELD", {"ids.data"}, {Integers({0, 1, 2, 2, -1, 1})});  // an id twice
  top_k.Add("INVALID_FIELD", {"log_probs.data"},                              // above 0, not finite, more than all mass
            {Floats32({-1, -1, -1, 0.5F, -1, -1}), Floats32({-1, -1, static_cast<float>(-kInfinity), -1, -1, -1}),
             Floats32({-0.5F, -0.5F, -1, -1, -1, -1})});
  AddTensorRows(top_k, "ids", v1::DATA_TYPE_FLOAT32, 2);
  AddTensorRows(top_k, "log_probs", v1::DATA_TYPE_INT32, 2);
  const BadValues with_top_k = rows.At("", TopK());
  with_top_k.Add("INVALID_COMBINATION", {jsd + "beta"}, {Clear(), Real(1)});
  with_top_k.Add("INVALID_COMBINATION", {jsd + "teacher_temperature"}, {Real(2)});
  with_top_k.Add("INVALID_COMBINATION", {jsd + "hard_loss_weight"}, {Real(0.5)});
  with_top_k.Add("INVALID_COMBINATION", {jsd + "vocab_alignment"}, {Int(v1::VOCAB_ALIGNMENT_TRUNCATE_TO_COMMON)});
  with_top_k.Add("INVALID_COMBINATION", {"header.outputs"}, {Ints({v1::TOKEN_OUTPUT_LSE})});
}

// Of 3 rows, 60 bytes.
void AddChunkRows(const BadValues& rows) {
  const BadValues chunk = rows.At("chunk.");
  rows.Add("PROTOCOL_VIOLATION", {"chunk"}, {Make()}, "header");
  chunk.Add("MISSING_FIELD", {"role"}, {Clear()});
  chunk.Add("INVALID_FIELD", {"role"}, {Int(v1::CHUNK_ROLE_GRAD_HIDDEN)});
  chunk.Add("PROTOCOL_VIOLATION", {"role"}, {Int(v1::CHUNK_ROLE_TEACHER_HIDDEN)});
  chunk.Add("INVALID_FIELD", {"term_index"}, {Int(1)});
  chunk.Add("CHUNK_OUT_OF_RANGE", {"row_start"}, {Int(-1), Int(1), kFar}, "chunk");
  chunk.Add("CHUNK_OUT_OF_RANGE", {"row_count"}, {Int(0), Int(4)}, "chunk");
  chunk.Add("DATA_LENGTH_MISMATCH", {"row_count"}, {Int(2)}, "chunk.data");
  chunk.Add("DATA_LENGTH_MISMATCH", {"data"}, {Text(""), Text(std::string(61, '\0'))});
  chunk.Add("LIMIT_EXCEEDED", {"data"}, {Text(std::string((4 << 20) + 1, '\0'))});
}

void AddDecisionRows(std::vector<BadValue>* table) {
  const BadValues commit(table, "CommitMicroBatch");
  for (const BadValues& rows : {commit, BadValues(table, "DiscardMicroBatch")}) {
    AddHeadStepRows(rows, "heads", true);
    rows.Add("MISSING_FIELD", {"micro_batch"}, {Clear()});
    rows.Add("INVALID_FIELD", {"micro_batch", "attempt"}, {Int(-1)});
    rows.Add("INVALID_COMBINATION", {"heads"}, {Times(2)}, "heads[1].head");
    rows.Add("LIMIT_EXCEEDED", {"heads"}, {Times(65)}, "heads");
    AddSessionRows(rows, "session_id", false, true);
  }
  commit.Add("MICRO_BATCH_NOT_FOUND", {"micro_batch"}, {Int(77)}, "");
  AddNumberRows(commit, {"factor"}, kBeyondFloat32);
  const BadValues with_factors = commit.At("", Factors("token_factors"));
  with_factors.Add("INVALID_COMBINATION", {"token_factors"}, {Make()}, "");  // of one that is not held
  AddTensorRows(with_factors, "token_factors", v1::DATA_TYPE_INT32, (1 << 18) + 1);
  with_factors.Add("INVALID_FIELD", {"token_factors.data"}, {Floats32({1, std::nanf(""), 1})});
}

void AddTransferRows(const BadValues& rows) {
  rows.Add("MISSING_FIELD", {"header"}, {Clear()}, "message");
  rows.Add("TRANSFER_NOT_FOUND", {"header.transfer_id"}, {Text(std::string(16, 't'))}, "");
  rows.Add("MISSING_FIELD", {"header.transfer_id"}, {Text("")});
  rows.Add("INVALID_FIELD", {"header.transfer_id"}, {Text("transfer"), Text(std::string(17, 't'))});
  rows.Add("INVALID_FIELD", {"header.stripe_index"}, {Int(0), Int(-1)});
  rows.Add("PROTOCOL_VIOLATION", {"chunk"}, {Make()}, "header");
}

void AddStreamTeacherRows(const BadValues& rows) {
  const BadValues header = rows.At("header.");
  rows.Add("MISSING_FIELD", {"header"}, {Clear()}, "message");
  rows.Add("PROTOCOL_VIOLATION", {"chunk"}, {Make()}, "header");
  header.Add("MISSING_FIELD", {"join_key"}, {Text("")});
  header.Add("INVALID_FIELD", {"join_key"}, {Text(std::string(257, 'k'))});
  header.Add("INVALID_FIELD", {"total_row_count", "hidden_size"}, {Int(0)});
  header.At("", {{"header.row_indices", Clear()}}).Add("LIMIT_EXCEEDED", {"total_row_count"}, {Int((1 << 18) + 1)});
  header.Add("MISSING_FIELD", {"tenant", "data_type"}, {Clear()});
  header.At("", {{"header.row_indices.shape", Ints({0})}, {"header.row_indices.data", Text("")}})
      .Add("SHAPE_MISMATCH", {"row_indices"}, {Make()}, "header.row_indices.shape");
  header.Add("INVALID_NAME", {"tenant"}, {Text("default")});
  header.Add("CHUNK_OUT_OF_RANGE", {"row_indices.data"}, {Integers({4, 4})}, "header.row_indices");
  header.Add("INVALID_FIELD", {"row_indices.data"}, {Integers({0, 9})});
  AddTensorRows(header, "row_indices", v1::DATA_TYPE_FLOAT32, -1);
  header.Add("DATA_TYPE_MISMATCH", {"data_type"}, {Int(v1::DATA_TYPE_INT32)});
  header.Add("LIMIT_EXCEEDED", {"hidden_size"}, {Int((1 << 16) + 1)});
  AddSessionRows(header, "session_id", false, false);
}

// ---- HeadService and SessionService -----------------------------------------------------------------------------------

const Edit kLongPath = Text(std::string(1025, 'p'));
const Edit kLargeChunk = Text(std::string((4 << 20) + 1, '\0'));
const Prepare kFrozen = {{"spec.trainable", Int(0)}};

// The `name` of a head; `looks_up`: it must exist.
void AddNameRows(const BadValues& rows, const std::string& name, bool looks_up) {
  rows.Add("MISSING_FIELD", {name}, {Text("")});
  rows.Add("INVALID_NAME", {name}, {Text("tenants/default/heads/.."), Text("tenants/default/heads/" + std::string(65, 'a'))});
  if (!looks_up) return;
  rows.Add("HEAD_NOT_FOUND", {name}, {Text("tenants/default/heads/nobody"), Text("tenants/other/heads/student")}, "");
}

void AddEpochRows(const BadValues& rows, const std::string& name, bool required) {
  if (required) rows.Add("MISSING_FIELD", {name}, {Clear()});
  rows.Add("INVALID_FIELD", {name}, {Text("abc")});
  rows.Add("EPOCH_FENCED", {name}, {kStaleEpoch}, "");
}

void AddTensorKindRows(const BadValues& rows, const std::string& name) {
  rows.Add("MISSING_FIELD", {name}, {Clear()});
  rows.Add("INVALID_FIELD", {name}, {Int(9)});
}

// Of 0 and 1, which are there.
void AddExpectedRows(const BadValues& rows) {
  rows.Add("MISSING_FIELD", {"expected"}, {Clear()});
  rows.At("", {{"expected", Clear()}}).Add("MISSING_FIELD", {"expected"}, {Make()});
  rows.Add("INVALID_FIELD", {"expected.count"}, {Int(-1)});
  rows.Add("LIMIT_EXCEEDED", {"expected.count"}, {Int((1 << 16) + 1)});
  rows.Add("MICRO_BATCH_MISSING", {"expected.count"}, {Int(9)}, "");
  rows.At("", {{"expected.ids.ids", Ints({0, 1, 2})}}).Add("MICRO_BATCH_MISSING", {"expected.ids"}, {Make()}, "");
  rows.Add("INVALID_FIELD", {"expected.ids.ids"}, {Ints({-4})}, "expected.ids.ids[0]");
  rows.Add("INVALID_FIELD", {"expected.ids.ids"}, {Ints({0, 1, 0})}, "expected.ids.ids[2]");
}

// The 260 bytes of an upload, or the 20 of a part of a gradient.
void AddByteChunkRows(const BadValues& rows, size_t bytes) {
  rows.Add("MISSING_FIELD", {"header"}, {Clear()}, "message");
  rows.Add("PROTOCOL_VIOLATION", {"chunk"}, {Make()}, "header");
  rows.Add("INVALID_FIELD", {"chunk.offset_bytes"}, {Int(-1)});
  rows.Add("CHUNK_OUT_OF_RANGE", {"chunk.offset_bytes"}, {Int(4)});
  rows.Add("CHUNK_OUT_OF_RANGE", {"chunk.data"}, {Text(""), Text(std::string(bytes + 1, '\0'))});
  rows.Add("LIMIT_EXCEEDED", {"chunk.data"}, {kLargeChunk});
  rows.Add("PROTOCOL_VIOLATION", {"chunk.data"}, {Text(std::string(8, '\0'))}, "chunk");
}

void AddCreateRows(const BadValues& rows) {
  const BadValues spec = rows.At("spec.");
  rows.Add("MISSING_FIELD", {"spec"}, {Clear()});
  spec.Add("INVALID_FIELD", {"vocab_size"}, {Int(0), Int(-5)});
  spec.Add("LIMIT_EXCEEDED", {"vocab_size"}, {Int((1 << 24) + 1), kFar});
  spec.At("", {{"spec.hidden_size", Int(1 << 16)}}).Add("MEMORY_BUDGET_EXCEEDED", {"vocab_size"}, {Int(1 << 24)}, "");
  spec.Add("INVALID_FIELD", {"hidden_size"}, {Int(0)});
  spec.Add("LIMIT_EXCEEDED", {"hidden_size"}, {Int((1 << 16) + 1)});
  spec.Add("MISSING_FIELD", {"data_type"}, {Clear()});
  spec.Add("DATA_TYPE_MISMATCH", {"data_type"}, {Int(v1::DATA_TYPE_INT32)});
  spec.Add("INVALID_FIELD", {"transform.logit_scale"}, {Real(0)});
  spec.Add("INVALID_FIELD", {"transform.valid_vocab_size"}, {Int(0), Int(14)});
  spec.Add("INVALID_COMBINATION", {"trainable"}, {Int(0)}, "spec.optimizer");
  spec.Add("MISSING_FIELD", {"optimizer"}, {Empty()}, "spec.optimizer.optimizer");
  spec.At("", kFrozen).Add("INVALID_COMBINATION", {"optimizer.adamw", "optimizer.sgd"}, {Make()}, "spec.optimizer");
  spec.Add("INVALID_COMBINATION", {"optimizer.sgd.nesterov"}, {Int(1)});  // without momentum, and with dampening
  spec.At("", {{"spec.optimizer.sgd.momentum", Real(0.9)}, {"spec.optimizer.sgd.dampening", Real(0.1)}})
      .Add("INVALID_COMBINATION", {"optimizer.sgd.nesterov"}, {Int(1)});
  spec.Add("INVALID_FIELD", {"staging_slots", "low_rank", "initial_step"}, {Int(-1)});
  spec.Add("LIMIT_EXCEEDED", {"staging_slots"}, {Int(65)});
  spec.At("", Join(kFrozen, {{"spec.optimizer", Clear()}})).Add("INVALID_COMBINATION", {"staging_slots"}, {Int(1)});
  spec.Add("FEATURE_NOT_BUILT", {"low_rank"}, {Int(8)});
  spec.Add("INVALID_FIELD", {"parallelism"}, {Int(99)});
  spec.Add("INVALID_COMBINATION", {"int8_teacher"}, {Int(1)});
  rows.Add("INVALID_FIELD", {"if_exists"}, {Int(9)});
  rows.At("", {{"name", Text(kHeadName)}}).Add("HEAD_SPEC_MISMATCH", {"if_exists"}, {Int(v1::IF_EXISTS_ATTACH_IF_SAME_SPEC)}, "");
  AddNameRows(rows, "name", false);
  rows.Add("HEAD_ALREADY_EXISTS", {"name"}, {Text(kHeadName)}, "");
  AddNumberRows(spec, {"transform.logit_scale"}, {});
  AddNumberRows(spec, {"transform.softcap"}, {0, -1});
  AddNumberRows(spec, {"optimizer.adamw.beta1", "optimizer.adamw.beta2", "optimizer.sgd.momentum"}, {-0.1, 1});
  AddNumberRows(spec, {"optimizer.adamw.epsilon"}, {-1e-9});
  AddNumberRows(spec, {"optimizer.adamw.weight_decay", "optimizer.sgd.weight_decay"}, {-1e-9, 4e38});
  AddNumberRows(spec, {"optimizer.sgd.dampening"}, {-0.1, 1.1});
}

void AddWeightRows(std::vector<BadValue>* table) {
  const BadValues upload(table, "UploadWeights");
  AddByteChunkRows(upload, 260);
  const BadValues header = upload.At("header.");
  header.Add("MISSING_FIELD", {"upload_id"}, {Text("")});
  header.Add("INVALID_FIELD", {"upload_id"}, {Text(std::string(65, 'u'))});
  header.Add("MISSING_FIELD", {"data_type"}, {Clear()});
  header.Add("DATA_TYPE_MISMATCH", {"data_type"}, {Int(v1::DATA_TYPE_INT32), Int(v1::DATA_TYPE_FLOAT16)});
  header.Add("INVALID_FIELD", {"total_bytes"}, {Int(0)});
  header.Add("DATA_LENGTH_MISMATCH", {"total_bytes"}, {Int(259), kFar});
  header.Add("INVALID_FIELD", {"checksum"}, {Text("abc")});
  header.Add("CHECKSUM_MISMATCH", {"checksum"}, {Text(std::string(16, 'c'))});
  header.Add("INVALID_FIELD", {"closes_step"}, {Int(-1)});
  header.Add("STEP_NOT_SEALED", {"closes_step"}, {Int(0)});
  header.Add("STEP_MISMATCH", {"closes_step"}, {Int(7)});
  AddNameRows(header, "name", true);
  AddEpochRows(header, "epoch", true);
  AddTensorKindRows(header, "tensor");
  const BadValues load(table, "LoadWeights");
  load.Add("MISSING_FIELD", {"path"}, {Text("")});
  load.Add("INVALID_FIELD", {"path"}, {Text("/etc/passwd"), Text("a/../../b"), Text(std::string("a\0b", 3))});
  load.Add("INVALID_FIELD", {"path", "weight_tensor", "bias_tensor"}, {kLongPath});
  load.Add("WEIGHTS_NOT_FOUND", {"path"}, {Text("nowhere.safetensors")}, "");
  load.Add("WEIGHTS_NOT_FOUND", {"weight_tensor", "bias_tensor"}, {Text("no.such.tensor")}, "");
  AddNameRows(load, "name", true);
  AddEpochRows(load, "epoch", true);
  const BadValues download(table, "DownloadWeights");
  download.Add("DATA_TYPE_MISMATCH", {"data_type"}, {Int(v1::DATA_TYPE_INT32), Int(v1::DATA_TYPE_BFLOAT16)});
  download.Add("INVALID_FIELD", {"offset_bytes"}, {Int(-4), Int(264), Int(6)});
  download.Add("INVALID_FIELD", {"expected_weight_version"}, {Int(-1)});
  download.Add("WEIGHT_VERSION_MISMATCH", {"expected_weight_version"}, {Int(99)}, "");
  AddNameRows(download, "name", true);
  AddEpochRows(download, "epoch", false);
  AddTensorKindRows(download, "tensor");
}

void AddStepRows(std::vector<BadValue>* table) {
  AddHeadStepRows({table, "GetStep"}, "head", false);
  for (const char* rpc : {"SealStep", "ApplyOptimizerStep", "DiscardGradient", "DownloadGradient", "GetGradientNorm"}) {
    AddHeadStepRows({table, rpc}, "head", true);
  }
  AddExpectedRows({table, "SealStep"});
  const BadValues apply(table, "ApplyOptimizerStep");
  AddExpectedRows(apply);
  apply.Add("MISSING_FIELD", {"learning_rate"}, {Clear()});
  apply.Add("INVALID_COMBINATION", {"momentum"}, {Real(0.9)});                                     // of a head with AdamW
  apply.Add("INVALID_FIELD", {"max_grad_norm"}, {Real(std::nan("")), Real(-1), Real(-HUGE_VAL)});  // 0 and infinity: no clipping
  AddNumberRows(apply, {"learning_rate", "weight_decay"}, {-1e-9, 4e38});
  AddNumberRows(apply, {"gradient_factor"}, kBeyondFloat32);
  AddNumberRows(apply, {"other_grad_norm_squared", "epsilon"}, {-1e-9});
  AddNumberRows(apply, {"beta1", "beta2", "momentum"}, {-0.1, 1});
  const BadValues download(table, "DownloadGradient");
  download.Add("INVALID_FIELD", {"offset_bytes"}, {Int(-4), Int(264), Int(6)});
  AddTensorKindRows(download, "tensor");
  AddNumberRows(download, {"gradient_factor"}, kBeyondFloat32);
  AddNumberRows({table, "GetGradientNorm"}, {"gradient_factor"}, kBeyondFloat32);
}

void AddOtherRows(std::vector<BadValue>* table) {
  const BadValues heads(table, "ListHeads"), checkpoints(table, "ListCheckpoints");
  heads.Add("INVALID_NAME", {"parent"}, {Text("tenants/UPPER")});
  for (const BadValues& list : {heads, checkpoints}) {
    list.Add("INVALID_FIELD", {"page_size"}, {Int(-1), Int(1001)});
    list.Add("INVALID_FIELD", {"page_token"}, {Text("second page")});
  }
  checkpoints.Add("INVALID_FIELD", {"page_token"}, {Text("nowhere")});
  for (const char* rpc : {"GetHead", "TakeHead", "DeleteHead", "SaveCheckpoint", "RestoreCheckpoint"}) {
    AddNameRows({table, rpc}, "name", true);
  }
  for (const char* rpc : {"ListCheckpoints", "DeleteCheckpoint"}) AddNameRows({table, rpc}, "name", false);
  for (const char* rpc : {"DeleteHead", "TakeHead"}) AddEpochRows({table, rpc}, "epoch", false);
  for (const char* rpc : {"SaveCheckpoint", "RestoreCheckpoint"}) AddEpochRows({table, rpc}, "epoch", true);
  const BadValues take(table, "TakeHead");
  take.Add("HEAD_NOT_TRAINABLE", {"name"}, {Text(kTeacherName)}, "");
  const std::string epoch(16, 'x');
  take.Add("MISSING_FIELD", {"recovers_epochs"}, {Texts({epoch, ""})}, "recovers_epochs[1]");
  take.Add("INVALID_FIELD", {"recovers_epochs"}, {Texts({"abc"})}, "recovers_epochs[0]");
  take.Add("INVALID_FIELD", {"recovers_epochs"}, {Texts(std::vector<std::string>(17, epoch))});
  BadValues(table, "DeleteHead").Add("HEAD_IN_USE", {"force"}, {Int(0)}, "");
  const BadValues save(table, "SaveCheckpoint"), restore(table, "RestoreCheckpoint"), remove(table, "DeleteCheckpoint");
  for (const BadValues& rows : {save, restore, remove}) {
    rows.Add("MISSING_FIELD", {"checkpoint"}, {Text("")});
    rows.Add("INVALID_NAME", {"checkpoint"}, {Text("../x"), Text("a/b"), Text(std::string(129, 'c'))});
  }
  save.At("", {{"checkpoint", Text("there")}}).Add("CHECKPOINT_ALREADY_EXISTS", {"overwrite"}, {Int(0)}, "");
  restore.Add("CHECKPOINT_NOT_FOUND", {"checkpoint"}, {Text("nowhere")}, "");
}

void AddGradientRows(const BadValues& rows) {
  AddByteChunkRows(rows, 20);
  const BadValues header = rows.At("header.");
  header.Add("MISSING_FIELD", {"micro_batch"}, {Clear()});
  header.Add("INVALID_FIELD", {"micro_batch", "attempt", "row_start"}, {Int(-1)});
  header.Add("MICRO_BATCH_CONFLICT", {"micro_batch"}, {Int(0)}, "");
  header.Add("INVALID_FIELD", {"row_start"}, {Int(13)});
  header.Add("INVALID_FIELD", {"row_count"}, {Int(0), Int(14)});
  header.At("", {{"header.row_start", Int(1)}}).Add("INVALID_FIELD", {"row_count"}, {kFar});
  header.Add("PROTOCOL_VIOLATION", {"row_count"}, {Int(2)}, "chunk");
  AddHeadStepRows(header, "head", true);
  AddNumberRows(header, {"factor"}, kBeyondFloat32);
  AddSessionRows(header, "session_id", false, true);
}

void AddSessionServiceRows(std::vector<BadValue>* table) {
  const BadValues open(table, "OpenSession");
  open.Add("INVALID_FIELD", {"client_name"}, {Text(std::string(129, 'n'))});
  open.Add("INVALID_FIELD", {"lease.seconds"}, {Int(-1), Int(315576000001)});  // beyond a Duration's range
  open.Add("INVALID_FIELD", {"lease.nanos"}, {Int(-1), Int(1000000000)});
  open.Add("INVALID_FIELD", {"lease"}, {Make()});  // 0
  const BadValues unregister(table, "UnregisterSharedMemory");
  unregister.Add("MISSING_FIELD", {"region_id"}, {Text("")});
  unregister.Add("REGION_NOT_FOUND", {"region_id"}, {Text("r")}, "");
  for (const char* rpc : {"KeepAlive", "CloseSession", "RegisterSharedMemory", "UnregisterSharedMemory"}) {
    AddSessionRows({table, rpc}, "session_id", true, std::string(rpc) != "CloseSession");
  }
  const BadValues rows(table, "RegisterSharedMemory");
  const Edit handle = Text(std::string(64, 'h'));
  rows.Add("MISSING_FIELD", {"descriptor_token"}, {Clear()}, "source");
  rows.Add("MISSING_FIELD", {"descriptor_token"}, {Text("")});
  rows.Add("STORAGE_NOT_CONFIGURED", {"descriptor_token"}, {Text("t")}, "");
  rows.Add("INVALID_NAME", {"shared_memory_name"}, {Text(""), Text("../mem"), Text("nccl-x")});
  rows.Add("STORAGE_NOT_CONFIGURED", {"shared_memory_name"}, {Text("headwater-x")}, "");
  rows.Add("INVALID_FIELD", {"cuda_ipc_handle"}, {Text("abc")});
  rows.Add("FEATURE_NOT_BUILT", {"cuda_ipc_handle"}, {handle}, "");
  rows.Add("INVALID_COMBINATION", {"cuda_event_handle"}, {handle});  // without memory
  rows.At("", {{"cuda_ipc_handle", handle}}).Add("INVALID_FIELD", {"cuda_event_handle"}, {Text("abc")});
  rows.Add("INVALID_FIELD", {"size_bytes"}, {Int(0)});
  rows.Add("INVALID_FIELD", {"offset_bytes"}, {Int(-1), kFar});
}

}  // namespace

std::vector<BadValue> AllBadValues() {
  std::vector<BadValue> table;
  const BadValues compute(&table, "ComputeLoss");
  AddHeaderRows(compute);
  AddTermRows(compute);
  AddJsdRows(compute);
  AddChunkRows(compute);
  AddDecisionRows(&table);
  AddTransferRows({&table, "TransferRows"});
  AddStreamTeacherRows({&table, "StreamTeacher"});
  AddCreateRows({&table, "CreateHead"});
  AddWeightRows(&table);
  AddStepRows(&table);
  AddOtherRows(&table);
  AddGradientRows({&table, "AddGradient"});
  AddSessionServiceRows(&table);
  return table;
}

std::vector<HarmlessField> HarmlessFields() {
  const char* const optional_message = "an optional message; its fields have rows";
  const char* const behind_refusal = "the RPC is refused at its header, so a chunk is never looked at";
  const char* const any_boolean = "both booleans are legal";
  return {
      {"ComputeLoss", "header.terms.token_weights", optional_message},
      {"ComputeLoss", "header.terms.entropy_factors", optional_message},
      {"ComputeLoss", "header.terms.lse_factors", optional_message},
      {"ComputeLoss", "header.terms.cross_entropy.token_scaling", any_boolean},
      {"ComputeLoss", "header.terms.cross_entropy.class_weights", optional_message},
      {"ComputeLoss", "header.terms.jensen_shannon.hard_loss.class_weights", optional_message},
      {"TransferRows", "chunk.*", "looked at like those of the primary stream, once there is one: stripes_test.cc"},
      {"StreamTeacher", "chunk.*", behind_refusal},
      {"SealStep", "wait", any_boolean},
      {"CreateHead", "spec.transform", optional_message},
      {"CreateHead", "spec.has_bias", any_boolean},
      {"CreateHead", "validate_only", any_boolean},
  };
}

}  // namespace headwater::testing
