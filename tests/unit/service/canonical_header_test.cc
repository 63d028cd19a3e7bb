#include "server/service/request/canonical_header.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "headwater/v1/loss_service.pb.h"
#include "server/service/limits.h"
#include "server/service/request/loss_request.h"

namespace headwater::service {
namespace {

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

TEST(CanonicalHeader, TellsEverythingElseApart) {
  using Change = std::function<void(v1::MicroBatchHeader*)>;
  const std::vector<Change> changes = {
      [](auto* h) { h->set_micro_batch(4); },
      [](auto* h) { h->set_hidden_size(9); },
      [](auto* h) { h->set_data_type(v1::DATA_TYPE_FLOAT16); },
      [](auto* h) { h->set_commit_mode(v1::COMMIT_MODE_EXPLICIT); },
      [](auto* h) { h->set_non_finite_policy(v1::NON_FINITE_POLICY_REFUSE); },
      [](auto* h) { h->add_outputs(v1::TOKEN_OUTPUT_ARGMAX); },
      [](auto* h) { h->set_return_grad_hidden(false); },
      [](auto* h) { h->set_grad_hidden_data_type(v1::DATA_TYPE_FLOAT32); },
      [](auto* h) { h->set_grad_hidden_scale(0.5); },
      [](auto* h) { h->set_row_count(5), h->mutable_terms(0)->set_row_count(4); },
      [](auto* h) { h->set_row_count(5), h->mutable_terms(0)->set_row_start(1); },
      [](auto* h) { h->mutable_terms(0)->mutable_head()->set_head("tenants/default/heads/other"); },
      [](auto* h) { h->mutable_terms(0)->mutable_head()->set_head_epoch(std::string(16, 'f')); },
      [](auto* h) { h->mutable_terms(0)->mutable_head()->set_step(8); },
      [](auto* h) { h->mutable_terms(0)->mutable_targets()->mutable_data()->at(5) = 1; },
      [](auto* h) { h->mutable_terms(0)->set_ignore_index(0); },
      [](auto* h) { SetVector(h->mutable_terms(0)->mutable_token_weights(), v1::DATA_TYPE_FLOAT32, 4); },
      [](auto* h) { h->mutable_terms(0)->set_loss_scale(2); },
      [](auto* h) { h->mutable_terms(0)->set_expected_weight_version(1); },
      [](auto* h) { *h->add_terms() = h->terms(0); },
  };
  const std::vector<Change> cross_entropy_changes = {
      [](auto* h) { h->mutable_terms(0)->mutable_cross_entropy()->set_label_smoothing(0.1); },
      [](auto* h) { h->mutable_terms(0)->mutable_cross_entropy()->set_z_loss(0.1); },
      [](auto* h) { SetVector(h->mutable_terms(0)->mutable_cross_entropy()->mutable_class_weights(), v1::DATA_TYPE_FLOAT32, 9); },
      [](auto* h) { h->mutable_terms(0)->mutable_cross_entropy()->set_temperature(2); },
      [](auto* h) { h->mutable_terms(0)->mutable_cross_entropy()->set_token_scaling(true); },
      [](auto* h) { SetVector(h->mutable_terms(0)->mutable_entropy_factors(), v1::DATA_TYPE_FLOAT32, 4); },
      [](auto* h) { SetVector(h->mutable_terms(0)->mutable_lse_factors(), v1::DATA_TYPE_FLOAT32, 4); },
      [](auto* h) { h->mutable_terms(0)->set_gradient_resolution(0.5); },
      [](auto* h) { h->mutable_terms(0)->set_gradient_resolution(0.25); },
  };
  const std::vector<Change> jsd_changes = {
      [](auto* h) { h->mutable_terms(0)->mutable_jensen_shannon()->set_beta(0.1); },
      [](auto* h) { h->mutable_terms(0)->mutable_jensen_shannon()->set_student_temperature(2); },
      [](auto* h) { h->mutable_terms(0)->mutable_jensen_shannon()->set_teacher_temperature(2); },
      [](auto* h) { h->mutable_terms(0)->mutable_jensen_shannon()->set_hard_loss_weight(0.25); },
      [](auto* h) { h->mutable_terms(0)->mutable_jensen_shannon()->set_vocab_alignment(v1::VOCAB_ALIGNMENT_TRUNCATE_TO_COMMON); },
      [](auto* h) { h->mutable_terms(0)->mutable_jensen_shannon()->mutable_hard_loss()->set_z_loss(0.1); },
      [](auto* h) { h->mutable_terms(0)->mutable_teacher_hidden()->set_head("tenants/default/heads/u"); },
      [](auto* h) { h->mutable_terms(0)->mutable_teacher_hidden()->set_head_epoch(std::string(16, 't')); },
      [](auto* h) { h->mutable_terms(0)->mutable_teacher_hidden()->set_data_type(v1::DATA_TYPE_BFLOAT16); },
      [](auto* h) { h->mutable_terms(0)->mutable_teacher_hidden()->set_expected_weight_version(1); },
      [](auto* h) { h->mutable_terms(0)->clear_targets(), h->mutable_terms(0)->mutable_jensen_shannon()->set_hard_loss_weight(0); },
  };
  const std::vector<Change> top_k_changes = {
      [](auto* h) { h->mutable_terms(0)->mutable_jensen_shannon()->set_student_temperature(2); },
      [](auto* h) { h->mutable_terms(0)->mutable_top_k_teacher()->mutable_ids()->mutable_data()->at(5) = 1; },
      [](auto* h) { h->mutable_terms(0)->mutable_top_k_teacher()->mutable_log_probs()->mutable_data()->at(5) = 1; },
      [](auto* h) { h->mutable_terms(0)->clear_targets(); },
  };
  std::set<std::string> seen = {Canonical(CrossEntropy()), Canonical(Jsd()), Canonical(TopK())};
  size_t expected = 3;
  const auto try_all = [&](const v1::MicroBatchHeader& base, const std::vector<Change>& some) {
    for (const Change& change : some) {
      v1::MicroBatchHeader header = base;
      change(&header);
      seen.insert(Canonical(header));
      EXPECT_EQ(seen.size(), ++expected);
    }
  };
  try_all(CrossEntropy(), changes);
  try_all(CrossEntropy(), cross_entropy_changes);
  try_all(Jsd(), changes);
  try_all(Jsd(), jsd_changes);
  try_all(TopK(), top_k_changes);
}

TEST(CanonicalHeader, OfAGradientTellsEverythingApart) {
  v1::AddGradientHeader base;
  base.mutable_head()->set_head("tenants/default/heads/h");
  base.mutable_head()->set_head_epoch(std::string(16, 'e'));
  base.mutable_head()->set_step(7);
  base.set_micro_batch(3);
  base.set_row_count(4);
  const auto canonical = [](const v1::AddGradientHeader& header) {
    const auto request = DecodeAddGradientHeader(header);
    EXPECT_TRUE(request.ok()) << request.status();
    return request.ok() ? CanonicalHeader(*request) : "";
  };
  v1::AddGradientHeader same = base;
  same.set_factor(1);
  same.set_attempt(2);
  same.set_session_id(std::string(32, 's'));
  EXPECT_EQ(canonical(same), canonical(base));
  std::set<std::string> seen = {canonical(base)};
  const std::vector<std::function<void(v1::AddGradientHeader*)>> changes = {
      [](auto* h) { h->mutable_head()->set_head("tenants/other/heads/h"); },
      [](auto* h) { h->mutable_head()->set_head_epoch(std::string(16, 'f')); },
      [](auto* h) { h->mutable_head()->set_step(8); },
      [](auto* h) { h->set_micro_batch(4); },
      [](auto* h) { h->set_row_start(1); },
      [](auto* h) { h->set_row_count(5); },
      [](auto* h) { h->set_factor(-1); },
  };
  for (const auto& change : changes) {
    v1::AddGradientHeader header = base;
    change(&header);
    EXPECT_TRUE(seen.insert(canonical(header)).second);
  }
}

}  // namespace
}  // namespace headwater::service
