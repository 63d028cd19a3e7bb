#include "server/service/canonical_header.h"

#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace headwater::service {
namespace {

class Writer {
 public:
  explicit Writer(const char* kind) : bytes_(kind) {}
  void Integer(int64_t value) {
    const uint64_t bits = static_cast<uint64_t>(value);
    for (int shift = 0; shift < 64; shift += 8) bytes_ += static_cast<char>((bits >> shift) & 0xff);
  }
  void Real(double value) { Integer(static_cast<int64_t>(std::bit_cast<uint64_t>(value))); }
  void Bytes(const void* data, size_t byte_count) {
    Integer(static_cast<int64_t>(byte_count));
    bytes_.append(static_cast<const char*>(data), byte_count);
  }
  void Text(const std::string& text) { Bytes(text.data(), text.size()); }
  void OptionalInteger(const std::optional<int64_t>& value) {
    Integer(value.has_value());
    if (value.has_value()) Integer(*value);
  }
  void OptionalEpoch(const std::optional<heads::Epoch>& epoch) {
    Integer(epoch.has_value());
    if (epoch.has_value()) Bytes(epoch->data(), epoch->size());
  }
  template <typename T>
  void OptionalTensor(const std::optional<std::vector<T>>& tensor) {
    Integer(tensor.has_value());
    if (tensor.has_value()) Bytes(tensor->data(), tensor->size() * sizeof(T));
  }
  std::string& bytes() { return bytes_; }

 private:
  std::string bytes_;
};

void WriteCrossEntropy(const CrossEntropyRequest& loss, Writer* out) {
  out->Real(loss.label_smoothing);
  out->Real(loss.z_loss);
  out->OptionalTensor(loss.class_weights);
}

// Options that earlier versions did not have: nothing where they are not used, so that a call of theirs keeps its bytes.
void WriteLaterOptions(const LossTermRequest& term, Writer* out) {
  const auto* cross_entropy = std::get_if<CrossEntropyRequest>(&term.loss);
  if (cross_entropy != nullptr && cross_entropy->temperature != 1) {
    out->Text("temperature");
    out->Real(cross_entropy->temperature);
  }
  if (cross_entropy != nullptr && cross_entropy->token_scaling) out->Text("token_scaling");
  const auto write_factors = [&](const char* name, const std::optional<std::vector<float>>& factors) {
    if (!factors.has_value()) return;
    out->Text(name);
    out->OptionalTensor(factors);
  };
  write_factors("entropy_factors", term.entropy_factors);
  write_factors("lse_factors", term.lse_factors);
  if (term.gradient_resolution != 0) {
    out->Text("gradient_resolution");
    out->Real(term.gradient_resolution);
  }
}

void WriteTerm(const LossTermRequest& term, Writer* out) {
  out->Text(term.head.head.ToString());
  out->OptionalEpoch(term.head.epoch);
  out->OptionalInteger(term.head.step);
  out->Integer(term.row_start);
  out->Integer(term.row_count);
  out->OptionalTensor(term.targets);
  out->Integer(term.ignore_index);
  out->OptionalTensor(term.token_weights);
  out->Real(term.loss_scale);
  out->OptionalInteger(term.expected_weight_version);
  if (const auto* cross_entropy = std::get_if<CrossEntropyRequest>(&term.loss)) {
    out->Integer(0);
    WriteCrossEntropy(*cross_entropy, out);
    return;
  }
  if (const auto* top_k = std::get_if<TopKRequest>(&term.loss)) {
    out->Integer(2);
    out->Integer(top_k->k);
    out->Bytes(top_k->ids.data(), top_k->ids.size() * sizeof(int32_t));
    out->Bytes(top_k->log_probs.data(), top_k->log_probs.size() * sizeof(float));
    out->Real(top_k->student_temperature);
    return;
  }
  const JensenShannonRequest& jsd = std::get<JensenShannonRequest>(term.loss);
  out->Integer(1);
  out->Real(jsd.options.beta);
  out->Real(jsd.options.student_temperature);
  out->Real(jsd.options.teacher_temperature);
  out->Real(jsd.options.hard_loss_weight);
  out->Integer(jsd.options.truncate_to_common);
  WriteCrossEntropy(jsd.hard_loss, out);
  out->Text(term.teacher->head.ToString());
  out->OptionalEpoch(term.teacher->epoch);
  out->Integer(static_cast<int64_t>(term.teacher->data_type));
  out->OptionalInteger(term.teacher->expected_weight_version);
}

}  // namespace

std::string CanonicalHeader(const MicroBatchRequest& request) {
  Writer out("headwater.header.1");
  out.OptionalInteger(request.micro_batch);
  out.Integer(request.backward);
  out.Integer(request.row_count);
  out.Integer(request.hidden_size);
  out.Integer(static_cast<int64_t>(request.data_type));
  out.Integer(request.explicit_commit);
  out.Integer(request.refuse_non_finite);
  out.Integer(request.outputs);
  out.Integer(request.return_grad_hidden);
  out.Integer(static_cast<int64_t>(request.grad_hidden_data_type));
  out.Real(request.grad_hidden_scale);
  out.Integer(static_cast<int64_t>(request.terms.size()));
  for (const LossTermRequest& term : request.terms) {
    WriteTerm(term, &out);
    WriteLaterOptions(term, &out);
  }
  return std::move(out.bytes());
}

std::string CanonicalHeader(const GradientRequest& request) {
  Writer out("headwater.gradient.1");
  out.Text(request.name.ToString());
  out.Bytes(request.key.epoch.data(), request.key.epoch.size());
  out.Integer(request.key.step);
  out.Integer(request.micro_batch);
  out.Integer(request.row_start);
  out.Integer(request.row_count);
  out.Real(request.factor);
  return std::move(out.bytes());
}

}  // namespace headwater::service
