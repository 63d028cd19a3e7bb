#include "server/service/request/canonical_header.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <optional>
#include <type_traits>
#include <variant>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "headwater/kernels/each_name.h"
#include "headwater/kernels/engine.h"

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
  void Tensor(absl::Span<const T> tensor) {
    Bytes(tensor.data(), tensor.size() * sizeof(T));
  }
  template <typename T>
  void OptionalTensor(absl::Span<const T> tensor) {
    Integer(tensor.data() != nullptr);
    if (tensor.data() != nullptr) Tensor(tensor);
  }
  // An option that 0.1 did not have: nothing where it is not used, so that a call of 0.1 keeps its bytes.
  template <typename T>
  void LaterOption(const char* name, T value, T unused) {
    if (value == unused) return;
    Text(name);
    if constexpr (!std::is_same_v<T, bool>) Real(static_cast<double>(value));
  }
  void LaterTensor(const char* name, absl::Span<const float> tensor) {
    if (tensor.data() == nullptr) return;
    Text(name);
    OptionalTensor(tensor);
  }
  std::string& bytes() { return bytes_; }

 private:
  std::string bytes_;
};

void WriteCrossEntropy(const CrossEntropySpec& loss, Writer* out) {
  out->Real(loss.label_smoothing);
  out->Real(loss.z_loss);
  out->OptionalTensor(loss.class_weights);
}

bool HadIn01(absl::string_view name) {
  constexpr absl::string_view kNames[] = {"label_smoothing",     "z_loss",           "beta",      "student_temperature",
                                          "teacher_temperature", "hard_loss_weight", "row_start", "row_count",
                                          "ignore_index",        "loss_scale"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

#define HEADWATER_WRITE_LATER(name) \
  if (!HadIn01(#name)) out->LaterOption(#name, options.name, unused.name);
void WriteLater(const CrossEntropySpec& options, Writer* out) {
  const CrossEntropySpec unused;
  HEADWATER_EACH(HEADWATER_WRITE_LATER, HEADWATER_CROSS_ENTROPY_OPTIONS)
}
void WriteLater(const JsdSpec& options, Writer* out) {
  const JsdSpec unused;
  HEADWATER_EACH(HEADWATER_WRITE_LATER, HEADWATER_JSD_OPTIONS)
  WriteLater(options.hard_loss, out);
}
void WriteLater(const TopKSpec& /*options*/, Writer* /*out*/) {}
void WriteLater(const LossTerm& options, Writer* out) {
  std::visit([&](const auto& loss) { WriteLater(loss, out); }, options.loss);
  out->LaterTensor("entropy_factors", options.entropy_factors);
  out->LaterTensor("lse_factors", options.lse_factors);
  const LossTerm unused;
  HEADWATER_EACH(HEADWATER_WRITE_LATER, HEADWATER_TERM_OPTIONS)
}
#undef HEADWATER_WRITE_LATER

void WriteTerm(const LossTermRequest& request, Writer* out) {
  const LossTerm& term = request.term;
  out->Text(request.head.name.ToString());
  out->OptionalEpoch(request.head.epoch);
  out->OptionalInteger(request.head.step);
  out->Integer(term.row_start);
  out->Integer(term.row_count);
  out->OptionalTensor(term.targets);
  out->Integer(term.ignore_index);
  out->OptionalTensor(term.token_weights);
  out->Real(term.loss_scale);
  out->OptionalInteger(request.expected_weight_version);
  if (const auto* cross_entropy = std::get_if<CrossEntropySpec>(&term.loss)) {
    out->Integer(0);
    WriteCrossEntropy(*cross_entropy, out);
    return;
  }
  if (const auto* top_k = std::get_if<TopKSpec>(&term.loss)) {
    out->Integer(2);
    out->Integer(top_k->k);
    out->Tensor(top_k->ids);
    out->Tensor(top_k->log_probs);
    out->Real(top_k->student_temperature);
    return;
  }
  const JsdSpec& jsd = std::get<JsdSpec>(term.loss);
  out->Integer(1);
  out->Real(jsd.beta);
  out->Real(jsd.student_temperature);
  out->Real(jsd.teacher_temperature);
  out->Real(jsd.hard_loss_weight);
  out->Integer(jsd.truncate_to_common);
  WriteCrossEntropy(jsd.hard_loss, out);
  out->Text(request.teacher->name.ToString());
  out->OptionalEpoch(request.teacher->epoch);
  out->Integer(static_cast<int64_t>(request.teacher->data_type));
  out->OptionalInteger(request.teacher->expected_weight_version);
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
    WriteLater(term.term, &out);
  }
  return std::move(out.bytes());
}

std::vector<std::string> LaterOptions() {
  std::vector<std::string> names;
#define HEADWATER_ADD_LATER(name) \
  if (!HadIn01(#name)) names.push_back(#name);
  HEADWATER_EACH(HEADWATER_ADD_LATER, HEADWATER_CROSS_ENTROPY_OPTIONS)
  HEADWATER_EACH(HEADWATER_ADD_LATER, HEADWATER_JSD_OPTIONS)
  HEADWATER_EACH(HEADWATER_ADD_LATER, HEADWATER_TERM_OPTIONS)
#undef HEADWATER_ADD_LATER
  return names;
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
