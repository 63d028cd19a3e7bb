// Every number, boolean and enumerator of the messages that describe heads and losses passes through the engine's types unchanged:
// a field that a list of names lacks would be accepted and ignored.
#include <google/protobuf/message.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>

#include "headwater/v1/head_service.pb.h"
#include "headwater/v1/loss.pb.h"
#include "proto/headwater/v1/spec_codec.h"
#include "proto/headwater/v1/term_codec.h"

namespace headwater {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// A value that is no default.
void SetField(const FieldDescriptor& field, Message* message) {
  const google::protobuf::Reflection& reflection = *message->GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return reflection.SetDouble(message, &field, 0.25);
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.SetBool(message, &field, true);
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection.SetInt32(message, &field, 3);
    case FieldDescriptor::CPPTYPE_INT64:
      return reflection.SetInt64(message, &field, 3);
    default:
      return reflection.SetEnumValue(message, &field, 2);
  }
}

// Sets each field of `part`, which lies in `message`, and expects it back from `pass_on`; but for `others`.
template <typename M>
void ExpectPassedOn(M message, const std::function<Message*(M*)>& part, const std::function<M(const M&)>& pass_on,
                    const std::set<std::string>& others = {}) {
  const google::protobuf::Descriptor& type = *part(&message)->GetDescriptor();
  int passed = 0;
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    const bool is_scalar =
        field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE && field.cpp_type() != FieldDescriptor::CPPTYPE_STRING;
    if (!is_scalar || field.is_repeated() || others.count(field.name()) > 0) continue;
    M sent = message;
    SetField(field, part(&sent));
    M received = pass_on(sent);
    std::string expected;
    std::string actual;
    google::protobuf::TextFormat::PrintFieldValueToString(*part(&sent), &field, -1, &expected);
    google::protobuf::TextFormat::PrintFieldValueToString(*part(&received), &field, -1, &actual);
    EXPECT_EQ(actual, expected) << field.full_name();
    ++passed;
  }
  EXPECT_GT(passed, 0) << type.full_name();
}

TEST(CodecFields, OptionsOfALossArrive) {
  const std::function<v1::LossTerm(const v1::LossTerm&)> pass_on = [](const v1::LossTerm& message) {
    v1::LossTerm out;
    WriteTerm(ReadTerm(message), &out);
    return out;
  };
  v1::LossTerm cross_entropy;
  cross_entropy.mutable_cross_entropy();
  v1::LossTerm divergence;
  divergence.mutable_jensen_shannon();
  using Part = std::function<Message*(v1::LossTerm*)>;
  ExpectPassedOn(cross_entropy, Part([](auto* term) { return term; }), pass_on, {"expected_weight_version"});
  ExpectPassedOn(cross_entropy, Part([](auto* term) { return term->mutable_cross_entropy(); }), pass_on);
  ExpectPassedOn(divergence, Part([](auto* term) { return term->mutable_jensen_shannon(); }), pass_on);
  ExpectPassedOn(divergence, Part([](auto* term) { return term->mutable_jensen_shannon()->mutable_hard_loss(); }), pass_on);
}

TEST(CodecFields, ASpecificationArrives) {
  const std::function<v1::HeadSpec(const v1::HeadSpec&)> pass_on = [](const v1::HeadSpec& message) {
    v1::HeadSpec out;
    EncodeHeadSpec(DecodeHeadSpec(message), &out);
    return out;
  };
  using Part = std::function<Message*(v1::HeadSpec*)>;
  const v1::HeadSpec spec;
  ExpectPassedOn(spec, Part([](auto* head) { return head; }), pass_on, {"low_rank"});  // refused
  ExpectPassedOn(spec, Part([](auto* head) { return head->mutable_transform(); }), pass_on);
  ExpectPassedOn(spec, Part([](auto* head) { return head->mutable_optimizer()->mutable_adamw(); }), pass_on);
  ExpectPassedOn(spec, Part([](auto* head) { return head->mutable_optimizer()->mutable_sgd(); }), pass_on);
}

}  // namespace
}  // namespace headwater
