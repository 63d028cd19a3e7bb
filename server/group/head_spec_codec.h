// A head's specification and its optimizer as messages and back, for clients' answers and for ranks.
#ifndef HEADWATER_SERVER_GROUP_HEAD_SPEC_CODEC_H_
#define HEADWATER_SERVER_GROUP_HEAD_SPEC_CODEC_H_

#include <variant>

#include "headwater/kernels/types.h"
#include "headwater/v1/head_service.pb.h"
#include "proto/headwater/v1/fields.h"

namespace headwater {

namespace internal {

template <typename From, typename To>
void SetField(const From& from, To& to) {
  to = static_cast<To>(from);
}

}  // namespace internal

HEADWATER_FIELDS(v1::HeadSpec, HeadSpec, vocab_size, hidden_size, data_type, has_bias, trainable, staging_slots, initial_step,
                 parallelism)
HEADWATER_FIELDS(v1::LogitTransform, LogitTransform, logit_scale, softcap, valid_vocab_size)
HEADWATER_FIELDS(v1::AdamW, AdamWSpec, beta1, beta2, epsilon, weight_decay)
HEADWATER_FIELDS(v1::Sgd, SgdSpec, momentum, dampening, nesterov, weight_decay)

namespace group {

inline void EncodeOptimizer(const OptimizerSpec& optimizer, v1::OptimizerSpec* out) {
  if (const auto* adamw = std::get_if<AdamWSpec>(&optimizer)) WriteFields(*adamw, *out->mutable_adamw());
  if (const auto* sgd = std::get_if<SgdSpec>(&optimizer)) WriteFields(*sgd, *out->mutable_sgd());
}

// Without checks: what EncodeOptimizer() has written.
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

// Without checks: what EncodeHeadSpec() has written.
inline HeadSpec DecodeHeadSpec(const v1::HeadSpec& message) {
  HeadSpec spec;
  ReadFields(message, spec);
  ReadFields(message.transform(), spec.transform);
  spec.optimizer = DecodeOptimizer(message.optimizer());
  return spec;
}

}  // namespace group
}  // namespace headwater

#endif  // HEADWATER_SERVER_GROUP_HEAD_SPEC_CODEC_H_
