// What a message's bytes are made of, told by protobuf without knowing the message's type.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_WIRE_FORM_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_WIRE_FORM_H_

#include <google/protobuf/empty.pb.h>
#include <google/protobuf/unknown_field_set.h>

#include <string>
#include <vector>

namespace headwater::fuzz {

struct WireForm {
  bool valid = false;     // protobuf can read the bytes as a message without known fields
  bool shortest = false;  // every tag, length and number takes as few bytes as it can
  bool groups = false;    // there is one
  // The fields of wire type 2 in order, by number.
  struct Bytes {
    int number = 0;
    std::string value;
  };
  std::vector<Bytes> bytes;
};

inline WireForm ReadWireForm(const std::string& message) {
  WireForm form;
  google::protobuf::Empty empty;
  form.valid = empty.ParseFromString(message);
  if (!form.valid) return form;
  const google::protobuf::UnknownFieldSet& fields = empty.GetReflection()->GetUnknownFields(empty);
  for (int i = 0; i < fields.field_count(); ++i) {
    const google::protobuf::UnknownField& field = fields.field(i);
    if (field.type() == google::protobuf::UnknownField::TYPE_GROUP) form.groups = true;
    if (field.type() == google::protobuf::UnknownField::TYPE_LENGTH_DELIMITED) {
      form.bytes.push_back({field.number(), field.length_delimited()});
    }
  }
  form.shortest = empty.SerializeAsString() == message;
  return form;
}

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_WIRE_FORM_H_
