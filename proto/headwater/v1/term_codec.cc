#include "proto/headwater/v1/term_codec.h"

#include <type_traits>
#include <variant>

#include "absl/types/span.h"

namespace headwater {
namespace {

template <typename T>
void ReadTensor(bool is_there, const v1::Tensor& tensor, absl::Span<const T>* out) {
  if (is_there) *out = {reinterpret_cast<const T*>(tensor.data().data()), tensor.data().size() / sizeof(T)};
}

template <typename T>
void WriteTensor(absl::Span<const T> values, v1::Tensor* out) {
  out->set_data_type(std::is_same_v<T, float> ? v1::DATA_TYPE_FLOAT32 : v1::DATA_TYPE_INT32);
  out->add_shape(static_cast<int64_t>(values.size()));
  out->set_data(values.data(), values.size() * sizeof(T));
}

CrossEntropySpec ReadCrossEntropy(const v1::CrossEntropyLoss& message) {
  CrossEntropySpec spec;
  ReadFields(message, spec);
  ReadTensor(message.has_class_weights(), message.class_weights(), &spec.class_weights);
  return spec;
}

void WriteCrossEntropy(const CrossEntropySpec& spec, v1::CrossEntropyLoss* out) {
  WriteChangedFields(spec, *out);
  if (!spec.class_weights.empty()) WriteTensor(spec.class_weights, out->mutable_class_weights());
}

}  // namespace

LossTerm ReadTerm(const v1::LossTerm& message) {
  LossTerm term;
  ReadFields(message, term);
#define HEADWATER_READ_TENSOR(name) ReadTensor(message.has_##name(), message.name(), &term.name);
  HEADWATER_EACH(HEADWATER_READ_TENSOR, HEADWATER_TERM_TENSORS)
#undef HEADWATER_READ_TENSOR
  if (!message.has_jensen_shannon()) {
    term.loss = ReadCrossEntropy(message.cross_entropy());
    return term;
  }
  JsdSpec jsd;
  ReadFields(message.jensen_shannon(), jsd);
  jsd.truncate_to_common = message.jensen_shannon().vocab_alignment() == v1::VOCAB_ALIGNMENT_TRUNCATE_TO_COMMON;
  jsd.hard_loss = ReadCrossEntropy(message.jensen_shannon().hard_loss());
  if (!message.has_top_k_teacher()) {
    term.loss = jsd;
    return term;
  }
  const v1::TopKTeacher& teacher = message.top_k_teacher();
  TopKSpec& top_k = term.loss.emplace<TopKSpec>();
  top_k.k = teacher.k();
  top_k.student_temperature = jsd.student_temperature;
  ReadTensor(true, teacher.ids(), &top_k.ids);
  ReadTensor(true, teacher.log_probs(), &top_k.log_probs);
  return term;
}

void WriteTerm(const LossTerm& term, v1::LossTerm* out) {
  WriteFields(term, *out);
#define HEADWATER_WRITE_TENSOR(name) \
  if (!term.name.empty()) WriteTensor(term.name, out->mutable_##name());
  HEADWATER_EACH(HEADWATER_WRITE_TENSOR, HEADWATER_TERM_TENSORS)
#undef HEADWATER_WRITE_TENSOR
  if (const auto* cross_entropy = std::get_if<CrossEntropySpec>(&term.loss)) {
    WriteCrossEntropy(*cross_entropy, out->mutable_cross_entropy());
  } else if (const auto* jsd = std::get_if<JsdSpec>(&term.loss)) {
    WriteChangedFields(*jsd, *out->mutable_jensen_shannon());
    if (jsd->truncate_to_common) out->mutable_jensen_shannon()->set_vocab_alignment(v1::VOCAB_ALIGNMENT_TRUNCATE_TO_COMMON);
    WriteCrossEntropy(jsd->hard_loss, out->mutable_jensen_shannon()->mutable_hard_loss());
  } else {
    const TopKSpec& top_k = std::get<TopKSpec>(term.loss);
    out->mutable_jensen_shannon()->set_student_temperature(top_k.student_temperature);
    out->mutable_top_k_teacher()->set_k(top_k.k);
    WriteTensor(top_k.ids, out->mutable_top_k_teacher()->mutable_ids());
    WriteTensor(top_k.log_probs, out->mutable_top_k_teacher()->mutable_log_probs());
  }
}

int64_t TensorBytes(const LossTerm& term) {
  size_t bytes = 0;
#define HEADWATER_ADD_BYTES(name) bytes += term.name.size() * sizeof(term.name[0]);
  HEADWATER_EACH(HEADWATER_ADD_BYTES, HEADWATER_TERM_TENSORS)
#undef HEADWATER_ADD_BYTES
  if (const auto* cross_entropy = std::get_if<CrossEntropySpec>(&term.loss)) {
    bytes += cross_entropy->class_weights.size() * sizeof(float);
  } else if (const auto* jsd = std::get_if<JsdSpec>(&term.loss)) {
    bytes += jsd->hard_loss.class_weights.size() * sizeof(float);
  } else {
    const TopKSpec& top_k = std::get<TopKSpec>(term.loss);
    bytes += top_k.ids.size() * sizeof(int32_t) + top_k.log_probs.size() * sizeof(float);
  }
  return static_cast<int64_t>(bytes);
}

}  // namespace headwater
