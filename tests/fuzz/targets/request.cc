// The validators of all requests. Input: a headwater.fuzz.Call. What is refused is refused with a reason that may be shown; what
// is taken is within the limits, however it was spelled.
#include <cmath>
#include <set>
#include <string>

#include "server/service/request/canonical_header.h"
#include "server/service/request/head_request.h"
#include "server/service/request/loss_request.h"
#include "tests/fuzz/fuzz.pb.h"
#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/messages.h"
#include "tests/fuzz/support/target.h"

namespace headwater::fuzz {
namespace {

// Small, so that inputs reach them.
service::Limits SmallLimits() {
  service::Limits limits;
  limits.max_micro_batch_rows = 16;
  limits.max_vocab_size = 64;
  limits.max_hidden_size = 16;
  limits.max_step_micro_batches = 8;
  limits.max_staging_slots = 3;
  limits.max_terms = 3;
  limits.max_stripes = 4;
  return limits;
}

const service::Limits& Limits() {
  static const service::Limits limits = SmallLimits();
  return limits;
}

void Check(const heads::HeadName& name) { FUZZ_CHECK(heads::ParseHeadName(name.ToString(), "name").ok()); }

void Check(const service::HeadAtEpoch& request) { Check(request.name); }

void CheckStep(const service::HeadAtStep& request) {
  Check(request.name);
  FUZZ_CHECK(request.key.step >= 0);
}

void Check(const service::HeadAtStep& request) { CheckStep(request); }

void Check(const v1::SharedRows& rows) { FUZZ_CHECK(!rows.region_id().empty() && rows.offset_bytes() >= 0); }

void Check(const CrossEntropySpec& loss) {
  FUZZ_CHECK(loss.label_smoothing >= 0 && loss.label_smoothing <= 1 && loss.z_loss >= 0 && std::isfinite(loss.z_loss));
  FUZZ_CHECK(loss.temperature > 0 && std::isfinite(loss.temperature));
  FUZZ_CHECK(static_cast<int64_t>(loss.class_weights.size()) <= Limits().max_vocab_size);
  for (const float weight : loss.class_weights) FUZZ_CHECK(std::isfinite(weight));
}

void Check(const service::TeacherRequest& teacher, int64_t term_rows) {
  Check(teacher.name);
  FUZZ_CHECK(teacher.rows == nullptr || !teacher.joined.has_value());
  FUZZ_CHECK(!teacher.expected_weight_version.has_value() || *teacher.expected_weight_version >= 0);
  if (teacher.rows != nullptr) Check(*teacher.rows);
  if (!teacher.joined.has_value()) return;
  const service::JoinedTeacherRequest& joined = *teacher.joined;
  FUZZ_CHECK(!joined.join_key.empty() && joined.join_key.size() <= 256 && joined.total_row_count >= 1);
  if (joined.row_indices.empty()) FUZZ_CHECK(term_rows <= joined.total_row_count || term_rows == 0);
  if (!joined.row_indices.empty()) FUZZ_CHECK(static_cast<int64_t>(joined.row_indices.size()) == term_rows);
  for (const int32_t index : joined.row_indices) FUZZ_CHECK(index >= 0 && index < joined.total_row_count);
}

void Check(const service::LossTermRequest& request, const service::MicroBatchRequest& micro_batch) {
  Check(request.head.name);
  FUZZ_CHECK(!request.expected_weight_version.has_value() || *request.expected_weight_version >= 0);
  if (request.head.step.has_value()) FUZZ_CHECK(*request.head.step >= 0 && micro_batch.backward);
  const LossTerm& term = request.term;
  FUZZ_CHECK(term.row_start >= 0 && term.row_count >= 0 && term.row_start <= micro_batch.row_count);
  FUZZ_CHECK(term.row_count <= micro_batch.row_count - term.row_start);
  const auto rows = static_cast<size_t>(term.row_count);
  FUZZ_CHECK(term.targets.data() == nullptr || term.targets.size() == rows);
  for (const absl::Span<const float> values : {term.token_weights, term.entropy_factors, term.lse_factors}) {
    FUZZ_CHECK(values.data() == nullptr || values.size() == rows);
    for (const float value : values) FUZZ_CHECK(std::isfinite(value));
  }
  const bool has_factors = !term.entropy_factors.empty() || !term.lse_factors.empty();
  FUZZ_CHECK(std::isfinite(term.loss_scale));
  const auto* const jsd = std::get_if<JsdSpec>(&term.loss);
  FUZZ_CHECK(request.teacher.has_value() == (jsd != nullptr));
  if (has_factors) FUZZ_CHECK(jsd == nullptr && micro_batch.backward && !micro_batch.late_token_factors);
  if (term.gradient_resolution != 0) {
    FUZZ_CHECK(term.gradient_resolution >= kSmallestGradientResolution && term.gradient_resolution <= 1 && micro_batch.backward);
    FUZZ_CHECK(!has_factors && (jsd == nullptr || jsd->hard_loss_weight == 0));
  }
  if (const auto* const top_k = std::get_if<TopKSpec>(&term.loss)) {
    FUZZ_CHECK(top_k->k >= 1 && top_k->k <= kMaxTopK && top_k->student_temperature > 0);
    FUZZ_CHECK(top_k->ids.size() == rows * static_cast<size_t>(top_k->k) && top_k->log_probs.size() == top_k->ids.size());
    FUZZ_CHECK((micro_batch.outputs & ~service::TokenOutputBit(v1::TOKEN_OUTPUT_LOSS)) == 0);
    FUZZ_CHECK(term.gradient_resolution == 0 && !has_factors);
    return;
  }
  if (jsd == nullptr) {
    FUZZ_CHECK(term.targets.data() != nullptr);
    return Check(std::get<CrossEntropySpec>(term.loss));
  }
  FUZZ_CHECK(jsd->beta >= 0 && jsd->beta <= 1 && jsd->hard_loss_weight >= 0 && jsd->hard_loss_weight <= 1);
  FUZZ_CHECK(jsd->student_temperature > 0 && std::isfinite(jsd->student_temperature));
  FUZZ_CHECK(jsd->teacher_temperature > 0 && std::isfinite(jsd->teacher_temperature));
  FUZZ_CHECK(term.targets.data() != nullptr || jsd->hard_loss_weight == 0);
  Check(jsd->hard_loss);
  FUZZ_CHECK(jsd->hard_loss.temperature == 1 && !jsd->hard_loss.token_scaling);
  Check(*request.teacher, term.row_count);
}

void Check(const service::MicroBatchRequest& request) {
  FUZZ_CHECK(request.row_count >= 0 && request.row_count <= Limits().max_micro_batch_rows);
  FUZZ_CHECK(request.hidden_size >= 1 && request.hidden_size <= Limits().max_hidden_size);
  FUZZ_CHECK(!request.terms.empty() && static_cast<int64_t>(request.terms.size()) <= Limits().max_terms);
  FUZZ_CHECK(request.stripe_count >= 1 && request.stripe_count <= Limits().max_stripes);
  FUZZ_CHECK(request.transfer.has_value() == (request.stripe_count > 1));
  FUZZ_CHECK(request.attempt >= 0 && (!request.micro_batch.has_value() || *request.micro_batch >= 0));
  FUZZ_CHECK(!request.micro_batch.has_value() || request.backward);
  FUZZ_CHECK(!request.late_token_factors || request.explicit_commit);
  FUZZ_CHECK(request.grad_hidden_rows == nullptr || request.return_grad_hidden);
  FUZZ_CHECK(std::isfinite(request.grad_hidden_scale));
  for (const v1::SharedRows* const rows : {request.hidden_rows, request.grad_hidden_rows}) {
    FUZZ_CHECK(rows == nullptr || request.session.has_value());
    if (rows != nullptr) Check(*rows);
  }
  for (const service::LossTermRequest& term : request.terms) Check(term, request);
  FUZZ_CHECK(service::CanonicalHeader(request) == service::CanonicalHeader(service::MicroBatchRequest(request)));
}

void Check(const service::DecisionRequest& request) {
  FUZZ_CHECK(!request.heads.empty() && static_cast<int64_t>(request.heads.size()) <= Limits().max_terms);
  std::set<std::string> names;
  for (const service::HeadAtStep& head : request.heads) {
    CheckStep(head);
    FUZZ_CHECK(names.insert(head.name.ToString()).second);
  }
  FUZZ_CHECK(request.micro_batch >= 0 && request.attempt >= 0 && std::isfinite(request.arguments.factor));
  FUZZ_CHECK(static_cast<int64_t>(request.arguments.token_factors.size()) <= Limits().max_micro_batch_rows);
  for (const float factor : request.arguments.token_factors) FUZZ_CHECK(std::isfinite(factor));
}

void Check(const service::TransferRowsRequest& request) { FUZZ_CHECK(request.stripe_index >= 1); }

void Check(const service::StreamTeacherRequest& request) {
  FUZZ_CHECK(request.set.total_row_count >= 1 && request.set.hidden_size >= 1 &&
             request.set.hidden_size <= Limits().max_hidden_size);
  FUZZ_CHECK(!request.set.join_key.empty() && request.set.join_key.size() <= 256);
  FUZZ_CHECK(static_cast<int64_t>(request.row_indices.size()) <= Limits().max_micro_batch_rows);
  for (const int32_t index : request.row_indices) FUZZ_CHECK(index >= 0 && index < request.set.total_row_count);
  // Without indices the stream has all rows.
  FUZZ_CHECK(!request.row_indices.empty() || request.set.total_row_count <= Limits().max_micro_batch_rows);
}

void Check(const service::CreateRequest& request) {
  Check(request.name);
  const HeadSpec& spec = request.spec;
  FUZZ_CHECK(spec.vocab_size >= 1 && spec.vocab_size <= Limits().max_vocab_size);
  FUZZ_CHECK(spec.hidden_size >= 1 && spec.hidden_size <= Limits().max_hidden_size);
  FUZZ_CHECK(spec.staging_slots >= 0 && spec.staging_slots <= Limits().max_staging_slots && spec.initial_step >= 0);
  FUZZ_CHECK(spec.trainable || spec.staging_slots == 0);
  FUZZ_CHECK(std::isfinite(spec.transform.logit_scale) && spec.transform.logit_scale != 0);
  FUZZ_CHECK(!spec.transform.softcap.has_value() || (std::isfinite(*spec.transform.softcap) && *spec.transform.softcap > 0));
  FUZZ_CHECK(spec.transform.valid_vocab_size >= 1 && spec.transform.valid_vocab_size <= spec.vocab_size);
}

void Check(const service::ListRequest& request) { FUZZ_CHECK(request.page_size >= 0); }

void Check(const service::TakeRequest& request) {
  Check(request.name);
  FUZZ_CHECK(static_cast<int>(request.recovers_epochs.size()) <= service::kMaxRecoversEpochs);
}

void Check(const service::UploadRequest& request) {
  Check(request.name);
  FUZZ_CHECK(!request.upload_id.empty() && request.upload_id.size() <= 64 && request.total_bytes >= 1);
  FUZZ_CHECK(request.checksum.empty() || request.checksum.size() == 16);
  FUZZ_CHECK(!request.closes_step.has_value() || *request.closes_step >= 0);
}

void CheckPath(const v1::LoadWeightsRequest& request) {
  FUZZ_CHECK(!request.path().empty() && request.path().size() <= 1024 && request.path().front() != '/');
  FUZZ_CHECK(("/" + request.path() + "/").find("/../") == std::string::npos);
  for (const std::string* text : {&request.path(), &request.weight_tensor(), &request.bias_tensor()}) {
    FUZZ_CHECK(text->size() <= 1024 && text->find('\0') == std::string::npos);
  }
}

void Check(const service::DownloadWeightsRequest& request) {
  Check(request.name);
  FUZZ_CHECK(request.offset_bytes >= 0);
}

void Check(const service::DownloadGradientRequest& request) {
  CheckStep(request);
  FUZZ_CHECK(request.offset_bytes >= 0 && std::isfinite(request.factor));
}

void Check(const heads::ExpectedMicroBatches& expected) {
  if (const auto* const count = std::get_if<int64_t>(&expected)) {
    FUZZ_CHECK(*count >= 0 && *count <= Limits().max_step_micro_batches);
    return;
  }
  const auto& ids = std::get<std::vector<int64_t>>(expected);
  FUZZ_CHECK(static_cast<int64_t>(ids.size()) <= Limits().max_step_micro_batches);
  const std::set<int64_t> distinct(ids.begin(), ids.end());
  FUZZ_CHECK(distinct.size() == ids.size() && (distinct.empty() || *distinct.begin() >= 0));
}

void Check(const service::SealRequest& request) {
  CheckStep(request);
  Check(request.expected);
}

void Check(const service::ApplyRequest& request) {
  CheckStep(request);
  if (request.expected.has_value()) Check(*request.expected);
}

void Check(const service::GradientNormRequest& request) {
  CheckStep(request);
  FUZZ_CHECK(std::isfinite(request.factor));
}

// Of a request that names a checkpoint.
template <typename Named>
void CheckCheckpoint(const Named& request, const std::string& epoch, bool epoch_required) {
  const auto decoded = service::DecodeCheckpoint(request.name(), epoch, epoch_required, request.checkpoint());
  if (!decoded.ok()) return CheckRefusal(decoded.status());
  Check(*decoded);
  const std::string& checkpoint = request.checkpoint();
  FUZZ_CHECK(!checkpoint.empty() && checkpoint.size() <= 128 && checkpoint.front() != '.');
  FUZZ_CHECK(checkpoint.find('/') == std::string::npos && checkpoint.find('\0') == std::string::npos);
}

void Check(const service::GradientRequest& request) {
  CheckStep(request);
  FUZZ_CHECK(request.micro_batch >= 0 && request.attempt >= 0 && request.row_start >= 0 && request.row_count >= 1);
  FUZZ_CHECK(std::isfinite(request.factor) && !service::CanonicalHeader(request).empty());
}

void Check(absl::Duration lease) { FUZZ_CHECK(lease > absl::ZeroDuration() && lease < absl::InfiniteDuration()); }

void Check(const service::ListCheckpointsRequest& request) {
  Check(request.name);
  FUZZ_CHECK(request.page_size >= 0);
}

void Check(const service::RegisterRequest& request) {
  FUZZ_CHECK(request.size_bytes >= 1 && request.offset_bytes >= 0);
  int64_t end = 0;
  FUZZ_CHECK(!__builtin_add_overflow(request.size_bytes, request.offset_bytes, &end));
  if (request.device.has_value()) FUZZ_CHECK(request.offset_bytes == 0);
}

template <typename Decoded>
void CheckDecoded(const absl::StatusOr<Decoded>& decoded) {
  if (!decoded.ok()) return CheckRefusal(decoded.status());
  Check(*decoded);
}

void CheckRequest(const Call& request) {
  namespace s = service;
  switch (request.call_case()) {
    case Call::kCompute:
      for (const Stripe& stripe : request.compute().stripes()) CheckDecoded(s::DecodeTransferRowsHeader(stripe.header()));
      return CheckDecoded(s::DecodeMicroBatchHeader(request.compute().header(), Limits()));
    case Call::kCommit:
      return CheckDecoded(s::DecodeCommit(request.commit(), Limits()));
    case Call::kDiscard:
      return CheckDecoded(s::DecodeDiscard(request.discard(), Limits()));
    case Call::kTeacher:
      return CheckDecoded(s::DecodeStreamTeacherHeader(request.teacher().header(), Limits()));
    case Call::kCreateHead:
      return CheckDecoded(s::DecodeCreate(request.create_head(), Limits()));
    case Call::kListHeads:
      return CheckDecoded(s::DecodeList(request.list_heads()));
    case Call::kDeleteHead:
      return CheckDecoded(s::DecodeHeadAtEpoch(request.delete_head().name(), request.delete_head().epoch()));
    case Call::kTakeHead:
      return CheckDecoded(s::DecodeTake(request.take_head()));
    case Call::kUpload:
      return CheckDecoded(s::DecodeUploadHeader(request.upload().header()));
    case Call::kLoadWeights:
      if (s::DecodeLoad(request.load_weights()).ok()) CheckPath(request.load_weights());
      return CheckDecoded(s::DecodeLoad(request.load_weights()));
    case Call::kDownloadWeights:
      return CheckDecoded(s::DecodeDownloadWeights(request.download_weights()));
    case Call::kDownloadGradient:
      return CheckDecoded(s::DecodeDownloadGradient(request.download_gradient()));
    case Call::kGetStep:
      return CheckDecoded(s::DecodeGetStep(request.get_step()));
    case Call::kSealStep:
      return CheckDecoded(s::DecodeSeal(request.seal_step(), Limits()));
    case Call::kApply:
      return CheckDecoded(s::DecodeApply(request.apply(), Limits()));
    case Call::kDiscardGradient:
      return CheckDecoded(s::DecodeHeadAtStep(request.discard_gradient().has_head(), request.discard_gradient().head(), "head"));
    case Call::kGradientNorm:
      return CheckDecoded(s::DecodeGradientNorm(request.gradient_norm()));
    case Call::kSave:
      return CheckCheckpoint(request.save(), request.save().epoch(), false);
    case Call::kListCheckpoints:
      return CheckDecoded(s::DecodeListCheckpoints(request.list_checkpoints()));
    case Call::kRestore:
      return CheckCheckpoint(request.restore(), request.restore().epoch(), true);
    case Call::kDeleteCheckpoint:
      return CheckCheckpoint(request.delete_checkpoint(), "", false);
    case Call::kAddGradient:
      return CheckDecoded(s::DecodeAddGradientHeader(request.add_gradient().header()));
    case Call::kOpenSession:
      if (s::DecodeOpenSession(request.open_session(), Limits()).ok())
        FUZZ_CHECK(request.open_session().client_name().size() <= 128);
      return CheckDecoded(s::DecodeOpenSession(request.open_session(), Limits()));
    case Call::kRegisterMemory:
      return CheckDecoded(s::DecodeRegisterSharedMemory(request.register_memory()));
    case Call::kUnregisterMemory:
      if (const auto session = s::DecodeUnregisterSharedMemory(request.unregister_memory()); !session.ok()) {
        return CheckRefusal(session.status());
      }
      FUZZ_CHECK(!request.unregister_memory().region_id().empty());
      return;
    case Call::kGetHead:
    case Call::kKeepAlive:
    case Call::kCloseSession:
    case Call::kServerInfo:
    case Call::kRaw:
    case Call::CALL_NOT_SET:
      return;
  }
}

}  // namespace

void CheckInput(InputReader input) {
  Call request;
  if (ReadMessageInput(input, &request)) CheckRequest(request);
}

// libFuzzer's, absent where the corpora are tests.
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size) __attribute__((weak));

// Mutates fields, and now and then the bytes that they are sent as.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  MessageMutator mutator(seed, {"tenants/default/heads/a", "tenants/a/heads/b", "tenants/a", "a", "../a", "a/../b", "headwater-x",
                                std::string(16, 'e'), std::string(32, 's'), std::string(64, 'h'), std::string("\0\0\x80\x3f", 4),
                                std::string("\0\0\xc0\x7f", 4), std::string("\1\0\0\0\2\0\0\0\3\0\0\0", 12)});
  Call request;
  if (mutator.Below(16) == 0 || !ReadMessageInput({data, size}, &request)) return LLVMFuzzerMutate(data, size, max_size);
  mutator.Mutate(&request);
  return WriteMessageInput(request, /*text=*/false, data, max_size, size);
}

}  // namespace headwater::fuzz
