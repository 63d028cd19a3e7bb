#include "server/service/request/canonical_header.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "headwater/v1/loss_service.pb.h"
#include "server/service/limits.h"
#include "server/service/request/loss_request.h"
#include "tests/integration/support/message_path.h"

namespace headwater::service {
namespace {

using headwater::testing::Clear;
using headwater::testing::Edit;
using headwater::testing::Int;
using headwater::testing::Real;
using headwater::testing::Text;
using headwater::testing::Times;

void SetVector(v1::Tensor* tensor, v1::DataType type, int64_t size) {
  tensor->Clear();
  tensor->set_data_type(type);
  tensor->add_shape(size);
  tensor->set_data(std::string(static_cast<size_t>(4 * size), '\0'));
}

v1::MicroBatchHeader CrossEntropy() {
  v1::MicroBatchHeader header;
  header.set_micro_batch(3);
  header.set_compute_mode(v1::COMPUTE_MODE_FORWARD_BACKWARD);
  header.set_row_count(4);
  header.set_hidden_size(8);
  header.set_data_type(v1::DATA_TYPE_BFLOAT16);
  v1::LossTerm* const term = header.add_terms();
  term->mutable_head()->set_head("tenants/default/heads/h");
  term->mutable_head()->set_head_epoch(std::string(16, 'e'));
  term->mutable_head()->set_step(7);
  term->mutable_cross_entropy();
  SetVector(term->mutable_targets(), v1::DATA_TYPE_INT32, 4);
  return header;
}

v1::MicroBatchHeader Jsd() {
  v1::MicroBatchHeader header = CrossEntropy();
  v1::LossTerm* const term = header.mutable_terms(0);
  term->mutable_jensen_shannon()->set_hard_loss_weight(0.5);
  term->mutable_teacher_hidden()->set_head("tenants/default/heads/t");
  term->mutable_teacher_hidden()->set_data_type(v1::DATA_TYPE_FLOAT32);
  return header;
}

// With two entries a row.
v1::MicroBatchHeader TopK() {
  v1::MicroBatchHeader header = CrossEntropy();
  v1::LossTerm* const term = header.mutable_terms(0);
  term->mutable_jensen_shannon()->set_beta(0);
  v1::TopKTeacher* const teacher = term->mutable_top_k_teacher();
  teacher->set_k(2);
  SetVector(teacher->mutable_ids(), v1::DATA_TYPE_INT32, 8);
  SetVector(teacher->mutable_log_probs(), v1::DATA_TYPE_FLOAT32, 8);
  for (v1::Tensor* const tensor : {teacher->mutable_ids(), teacher->mutable_log_probs()}) {
    tensor->set_shape(0, 4);
    tensor->add_shape(2);
  }
  return header;
}

std::string Canonical(const v1::MicroBatchHeader& header) {
  const auto request = DecodeMicroBatchHeader(header, Limits{});
  EXPECT_TRUE(request.ok()) << request.status();
  return request.ok() ? CanonicalHeader(*request) : "";
}

TEST(CanonicalHeader, FillsInDefaults) {
  v1::MicroBatchHeader header = CrossEntropy();
  const std::string implicit = Canonical(header);
  header.set_commit_mode(v1::COMMIT_MODE_EAGER);
  header.set_non_finite_policy(v1::NON_FINITE_POLICY_REPORT);
  header.set_return_grad_hidden(true);
  header.set_grad_hidden_data_type(v1::DATA_TYPE_BFLOAT16);
  header.set_grad_hidden_scale(1);
  header.mutable_terms(0)->set_row_count(4);
  header.mutable_terms(0)->set_ignore_index(-100);
  header.mutable_terms(0)->set_loss_scale(1);
  header.mutable_terms(0)->mutable_cross_entropy()->set_temperature(1);
  EXPECT_EQ(Canonical(header), implicit);
  header = Jsd();
  const std::string implicit_jsd = Canonical(header);
  v1::JensenShannonLoss* const jsd = header.mutable_terms(0)->mutable_jensen_shannon();
  jsd->set_beta(0.5);
  jsd->set_student_temperature(1);
  jsd->set_teacher_temperature(1);
  jsd->mutable_hard_loss();
  jsd->set_vocab_alignment(v1::VOCAB_ALIGNMENT_REFUSE);
  EXPECT_EQ(Canonical(header), implicit_jsd);
}

// Byte for byte what 0.1 made of it: replay logs and checkpoints of 0.1 name micro-batches by the digest of these bytes.
TEST(CanonicalHeader, OfACallOf01KeepsItsBytes) {
  std::string expected = "headwater.header.1";
  const auto integer = [&expected](int64_t value) { expected.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  const auto text = [&](const std::string& value) {
    integer(static_cast<int64_t>(value.size()));
    expected += value;
  };
  const int64_t one = 0x3FF0000000000000;  // the bits of 1.0
  for (const int64_t value : {1, 3, 1, 4, 8, 2, 0, 0, 0, 1, 2}) integer(value);
  integer(one);
  integer(1);
  text("tenants/default/heads/h");
  integer(1);
  text(std::string(16, 'e'));
  for (const int64_t value : {1, 7, 0, 4, 1}) integer(value);
  text(std::string(16, '\0'));
  for (const int64_t value : {-100, 0}) integer(value);
  integer(one);
  for (const int64_t value : {0, 0, 0, 0, 0}) integer(value);
  EXPECT_EQ(Canonical(CrossEntropy()), expected);
}

TEST(CanonicalHeader, LeavesOutWhatDoesNotChangeTheMeaning) {
  v1::MicroBatchHeader header = CrossEntropy();
  const std::string before = Canonical(header);
  header.set_on_mismatch(v1::ON_MISMATCH_FIRST_WINS);
  header.set_session_id(std::string(32, 's'));
  header.set_attempt(7);
  header.set_allow_held(true);
  EXPECT_EQ(Canonical(header), before);
  header.set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
  const std::string explicit_commit = Canonical(header);
  header.set_late_token_factors(true);
  EXPECT_EQ(Canonical(header), explicit_commit);
  header = CrossEntropy();
  header.add_outputs(v1::TOKEN_OUTPUT_LSE);
  header.add_outputs(v1::TOKEN_OUTPUT_LOSS);
  const std::string ordered = Canonical(header);
  header.clear_outputs();
  for (const auto output : {v1::TOKEN_OUTPUT_LOSS, v1::TOKEN_OUTPUT_LSE, v1::TOKEN_OUTPUT_LOSS}) header.add_outputs(output);
  EXPECT_EQ(Canonical(header), ordered);
}

// A field by its path, and another value of it.
using Change = std::pair<std::string, Edit>;
Change To(const std::string& path, const Edit& edit) { return {path, edit}; }

// With each of the changes `base` must have a header that is not among `seen` yet.
template <typename Message>
void ExpectApart(const Message& base, const std::vector<Change>& changes, std::string (*canonical)(const Message&),
                 std::set<std::string>* seen) {
  for (const auto& [path, edit] : changes) {
    Message header = base;
    headwater::testing::Apply(&header, path, edit);
    EXPECT_TRUE(seen->insert(canonical(header)).second) << path << " " << edit.what;
  }
}

TEST(CanonicalHeader, TellsEverythingElseApart) {
  std::set<std::string> seen = {Canonical(CrossEntropy()), Canonical(Jsd()), Canonical(TopK())};
  EXPECT_EQ(seen.size(), 3u);
  const auto expect_apart = [&seen](const v1::MicroBatchHeader& base, const std::vector<Change>& changes) {
    ExpectApart(base, changes, Canonical, &seen);
  };
  const auto floats = [](int64_t size) {
    return Edit{"floats", [size](google::protobuf::Message* parent, const google::protobuf::FieldDescriptor* field) {
                  SetVector(static_cast<v1::Tensor*>(parent->GetReflection()->MutableMessage(parent, field)), v1::DATA_TYPE_FLOAT32,
                            size);
                }};
  };
  const auto bytes = [](size_t size) {  // all 0 but one
    std::string data(size, '\0');
    data[5] = 1;
    return Text(data);
  };
  for (const v1::MicroBatchHeader& base : {CrossEntropy(), Jsd()}) {
    expect_apart(base, {To("micro_batch", Int(4)), To("hidden_size", Int(9)), To("data_type", Int(v1::DATA_TYPE_FLOAT16)),
                        To("commit_mode", Int(v1::COMMIT_MODE_EXPLICIT)),
                        To("non_finite_policy", Int(v1::NON_FINITE_POLICY_REFUSE)), To("outputs", Int(v1::TOKEN_OUTPUT_ARGMAX)),
                        To("return_grad_hidden", Int(0)), To("grad_hidden_data_type", Int(v1::DATA_TYPE_FLOAT32)),
                        To("grad_hidden_scale", Real(0.5)), To("terms.head.head", Text("tenants/default/heads/other")),
                        To("terms.head.head_epoch", Text(std::string(16, 'f'))), To("terms.head.step", Int(8)),
                        To("terms.targets.data", bytes(16)), To("terms.ignore_index", Int(0)), To("terms.token_weights", floats(4)),
                        To("terms.loss_scale", Real(2)), To("terms.expected_weight_version", Int(1)), To("terms", Times(2))});
    v1::MicroBatchHeader longer = base;
    longer.set_row_count(5);
    longer.mutable_terms(0)->set_row_count(4);
    expect_apart(longer, {To("terms.row_start", Int(0)), To("terms.row_start", Int(1))});
  }
  expect_apart(CrossEntropy(), {To("terms.cross_entropy.label_smoothing", Real(0.1)), To("terms.cross_entropy.z_loss", Real(0.1)),
                                To("terms.cross_entropy.class_weights", floats(9)), To("terms.cross_entropy.temperature", Real(2)),
                                To("terms.cross_entropy.token_scaling", Int(1)), To("terms.entropy_factors", floats(4)),
                                To("terms.lse_factors", floats(4)), To("terms.gradient_resolution", Real(0.5)),
                                To("terms.gradient_resolution", Real(0.25))});
  const std::string jsd = "terms.jensen_shannon.";
  const std::string teacher = "terms.teacher_hidden.";
  expect_apart(Jsd(),
               {To(jsd + "beta", Real(0.1)), To(jsd + "student_temperature", Real(2)), To(jsd + "teacher_temperature", Real(2)),
                To(jsd + "hard_loss_weight", Real(0.25)), To(jsd + "vocab_alignment", Int(v1::VOCAB_ALIGNMENT_TRUNCATE_TO_COMMON)),
                To(jsd + "hard_loss.z_loss", Real(0.1)), To(teacher + "head", Text("tenants/default/heads/u")),
                To(teacher + "head_epoch", Text(std::string(16, 't'))), To(teacher + "data_type", Int(v1::DATA_TYPE_BFLOAT16)),
                To(teacher + "expected_weight_version", Int(1))});
  v1::MicroBatchHeader soft = Jsd();
  soft.mutable_terms(0)->mutable_jensen_shannon()->set_hard_loss_weight(0);
  expect_apart(soft, {To("terms.targets", Clear())});
  const std::string top_k = "terms.top_k_teacher.";
  expect_apart(TopK(), {To(jsd + "student_temperature", Real(2)), To(top_k + "ids.data", bytes(32)),
                        To(top_k + "log_probs.data", bytes(32)), To("terms.targets", Clear())});
}

std::string CanonicalGradient(const v1::AddGradientHeader& header) {
  const auto request = DecodeAddGradientHeader(header);
  EXPECT_TRUE(request.ok()) << request.status();
  return request.ok() ? CanonicalHeader(*request) : "";
}

TEST(CanonicalHeader, OfAGradientTellsEverythingApart) {
  v1::AddGradientHeader base;
  base.mutable_head()->set_head("tenants/default/heads/h");
  base.mutable_head()->set_head_epoch(std::string(16, 'e'));
  base.mutable_head()->set_step(7);
  base.set_micro_batch(3);
  base.set_row_count(4);
  v1::AddGradientHeader same = base;
  same.set_factor(1);
  same.set_attempt(2);
  same.set_session_id(std::string(32, 's'));
  EXPECT_EQ(CanonicalGradient(same), CanonicalGradient(base));
  std::set<std::string> seen = {CanonicalGradient(base)};
  ExpectApart(
      base,
      {To("head.head", Text("tenants/other/heads/h")), To("head.head_epoch", Text(std::string(16, 'f'))), To("head.step", Int(8)),
       To("micro_batch", Int(4)), To("row_start", Int(1)), To("row_count", Int(5)), To("factor", Real(-1))},
      CanonicalGradient, &seen);
}

}  // namespace
}  // namespace headwater::service
