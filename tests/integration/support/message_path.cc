#include "tests/integration/support/message_path.h"

#include <stdexcept>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace headwater::testing {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

void SetInteger(Message* parent, const FieldDescriptor* field, int64_t value) {
  const auto* reflection = parent->GetReflection();
  const bool repeated = field->is_repeated();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      repeated ? reflection->AddInt32(parent, field, static_cast<int32_t>(value))
               : reflection->SetInt32(parent, field, static_cast<int32_t>(value));
      break;
    case FieldDescriptor::CPPTYPE_INT64:
      repeated ? reflection->AddInt64(parent, field, value) : reflection->SetInt64(parent, field, value);
      break;
    case FieldDescriptor::CPPTYPE_ENUM:
      repeated ? reflection->AddEnumValue(parent, field, static_cast<int>(value))
               : reflection->SetEnumValue(parent, field, static_cast<int>(value));
      break;
    case FieldDescriptor::CPPTYPE_BOOL:
      reflection->SetBool(parent, field, value != 0);
      break;
    default:
      throw std::logic_error(absl::StrCat(field->full_name(), " is no integer"));
  }
}

void CollectPaths(const Descriptor& descriptor, const std::string& prefix, std::vector<std::string>* paths) {
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor* const field = descriptor.field(i);
    paths->push_back(prefix + field->name());
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      CollectPaths(*field->message_type(), absl::StrCat(prefix, field->name(), "."), paths);
    }
  }
}

}  // namespace

Edit Clear() {
  return {"unset", [](Message* parent, const FieldDescriptor* field) { parent->GetReflection()->ClearField(parent, field); }};
}

Edit Make() {
  return {"set", [](Message* parent, const FieldDescriptor* field) { parent->GetReflection()->MutableMessage(parent, field); }};
}

Edit Empty() {
  return {"empty",
          [](Message* parent, const FieldDescriptor* field) { parent->GetReflection()->MutableMessage(parent, field)->Clear(); }};
}

Edit Times(int count) {
  return {absl::StrCat(count, " times"), [count](Message* parent, const FieldDescriptor* field) {
            const auto* reflection = parent->GetReflection();
            while (reflection->FieldSize(*parent, field) < count) {
              Message* const added = reflection->AddMessage(parent, field);
              added->CopyFrom(reflection->GetRepeatedMessage(*parent, field, 0));
            }
          }};
}

Edit Int(int64_t value) {
  return {absl::StrCat(value), [value](Message* parent, const FieldDescriptor* field) { SetInteger(parent, field, value); }};
}

Edit Ints(const std::vector<int64_t>& values) {
  return {absl::StrJoin(values, ", "), [values](Message* parent, const FieldDescriptor* field) {
            parent->GetReflection()->ClearField(parent, field);
            for (const int64_t value : values) SetInteger(parent, field, value);
          }};
}

Edit Real(double value) {
  return {absl::StrCat(value),
          [value](Message* parent, const FieldDescriptor* field) { parent->GetReflection()->SetDouble(parent, field, value); }};
}

Edit Text(const std::string& value) {
  return {absl::StrCat(value.size(), " bytes: ", absl::CHexEscape(value.substr(0, 80))),
          [value](Message* parent, const FieldDescriptor* field) { parent->GetReflection()->SetString(parent, field, value); }};
}

Edit Texts(const std::vector<std::string>& values) {
  return {absl::StrJoin(values, ", "), [values](Message* parent, const FieldDescriptor* field) {
            parent->GetReflection()->ClearField(parent, field);
            for (const std::string& value : values) parent->GetReflection()->AddString(parent, field, value);
          }};
}

void Apply(Message* message, const std::string& path, const Edit& edit) {
  const size_t dot = path.find('.');
  const FieldDescriptor* const field = message->GetDescriptor()->FindFieldByName(path.substr(0, dot));
  if (field == nullptr) throw std::logic_error(absl::StrCat(message->GetDescriptor()->full_name(), " has no ", path));
  if (dot == std::string::npos) return edit.apply(message, field);
  const auto* reflection = message->GetReflection();
  Message* next = nullptr;
  if (!field->is_repeated()) {
    next = reflection->MutableMessage(message, field);
  } else {
    next = reflection->FieldSize(*message, field) == 0 ? reflection->AddMessage(message, field)
                                                       : reflection->MutableRepeatedMessage(message, field, 0);
  }
  Apply(next, path.substr(dot + 1), edit);
}

std::vector<std::string> FieldPaths(const Descriptor& descriptor) {
  std::vector<std::string> paths;
  CollectPaths(descriptor, "", &paths);
  return paths;
}

}  // namespace headwater::testing
