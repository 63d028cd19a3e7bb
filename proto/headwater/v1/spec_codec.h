// A head's specification, its optimizer and a loss's options as messages and back: for clients' calls, for ranks and for answers.
//
// The names of the fields stand beside their structs in headwater/kernels/types.h; here is only what has another shape in the
// message. Nothing is checked.
#ifndef HEADWATER_V1_SPEC_CODEC_H_
#define HEADWATER_V1_SPEC_CODEC_H_

#include <variant>

#include "headwater/kernels/types.h"
#include "headwater/v1/head_service.pb.h"
#include "headwater/v1/loss.pb.h"
#include "proto/headwater/v1/fields.h"

namespace headwater {

namespace internal {

template <typename From, typename To>
void SetField(const From& from, To& to) {
  to = static_cast<To>(from);
}

}  // namespace internal

HEADWATER_FIELDS(v1::LogitTransform, LogitTransform, HEADWATER_LOGIT_TRANSFORM_FIELDS)
HEADWATER_FIELDS(v1::AdamW, AdamWSpec, HEADWATER_ADAMW_FIELDS)
HEADWATER_FIELDS(v1::Sgd, SgdSpec, HEADWATER_SGD_FIELDS)
HEADWATER_FIELDS(v1::HeadSpec, HeadSpec, HEADWATER_HEAD_SPEC_FIELDS, staging_slots, parallelism, int8_teacher)
HEADWATER_FIELDS(v1::CrossEntropyLoss, CrossEntropySpec, HEADWATER_CROSS_ENTROPY_OPTIONS)
HEADWATER_FIELDS(v1::JensenShannonLoss, JsdSpec, HEADWATER_JSD_OPTIONS)

inline void EncodeOptimizer(const OptimizerSpec& optimizer, v1::OptimizerSpec* out) {
  if (const auto* adamw = std::get_if<AdamWSpec>(&optimizer)) WriteFields(*adamw, *out->mutable_adamw());
  if (const auto* sgd = std::get_if<SgdSpec>(&optimizer)) WriteFields(*sgd, *out->mutable_sgd());
}

inline OptimizerSpec DecodeOptimizer(const v1::OptimizerSpec& message) {
  OptimizerSpec optimizer;
  if (message.has_adamw()) ReadFields(message.adamw(), optimizer.emplace<AdamWSpec>());
  if (message.has_sgd()) ReadFields(message.sgd(), optimizer.emplace<SgdSpec>());
  return optimizer;
}

inline void EncodeHeadSpec(const HeadSpec& spec, v1::HeadSpec* out) {
  WriteFields(spec, *out);
  WriteFields(spec.transform, *out->mutable_transform());
  if (!std::holds_alternative<std::monostate>(spec.optimizer)) EncodeOptimizer(spec.optimizer, out->mutable_optimizer());
}

// A field that is unset has the default of the message's documentation.
inline HeadSpec DecodeHeadSpec(const v1::HeadSpec& message) {
  HeadSpec spec;
  ReadFields(message, spec);
  if (message.parallelism() == v1::PARALLELISM_UNSPECIFIED) spec.parallelism = Parallelism::kVocabulary;
  if (!message.has_staging_slots()) spec.staging_slots = spec.trainable ? 1 : 0;
  spec.transform.valid_vocab_size = spec.vocab_size;
  ReadFields(message.transform(), spec.transform);
  spec.optimizer = DecodeOptimizer(message.optimizer());
  return spec;
}

}  // namespace headwater

#endif  // HEADWATER_V1_SPEC_CODEC_H_
