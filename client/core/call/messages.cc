#include "client/core/call/messages.h"

#include <map>
#include <mutex>
#include <type_traits>
#include <vector>

namespace headwater::client::internal {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

const FieldDescriptor* FieldOf(const Message& message, const char* name, FieldDescriptor::CppType type) {
  const FieldDescriptor* const field = message.GetDescriptor()->FindFieldByName(name);
  return field != nullptr && field->cpp_type() == type && !field->is_repeated() ? field : nullptr;
}

const FieldDescriptor* TextField(const Message& message, const char* name, const char* other) {
  const FieldDescriptor* const field = FieldOf(message, name, FieldDescriptor::CPPTYPE_STRING);
  return field != nullptr ? field : FieldOf(message, other, FieldDescriptor::CPPTYPE_STRING);
}

// Whether heads are named somewhere in messages of this type that are part of requests.
bool MayNameHeads(const google::protobuf::Descriptor& type) {
  const std::string& name = type.name();
  return name == "HeadStep" || name == "LossTerm" || name == "TeacherHidden" || name == "JoinedTeacher";
}

// Where messages of a type name heads: the fields of a head that it names itself, or null, and the parts that may name others.
struct HeadFields {
  const FieldDescriptor* name = nullptr;
  const FieldDescriptor* epoch = nullptr;
  std::vector<const FieldDescriptor*> parts{};
};

// Looked for once for each type.
const HeadFields& HeadFieldsOf(const Message& message) {
  static std::mutex mutex;
  static auto* const known = new std::map<const google::protobuf::Descriptor*, HeadFields>();
  const google::protobuf::Descriptor& type = *message.GetDescriptor();
  std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, is_new] = known->try_emplace(&type);
  HeadFields& fields = entry->second;
  if (!is_new) return fields;
  fields.name = TextField(message, "head", "name");
  fields.epoch = TextField(message, "head_epoch", "epoch");
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor* const field = type.field(i);
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE && MayNameHeads(*field->message_type()))
      fields.parts.push_back(field);
  }
  return fields;
}

// Calls visit(message, name field, epoch field) for each part that names a head. `AnyMessage` is Message, const or not.
template <typename AnyMessage, typename Visit>
void Walk(AnyMessage& message, const Visit& visit) {
  const HeadFields& fields = HeadFieldsOf(message);
  if (fields.name != nullptr && fields.epoch != nullptr) visit(message, fields.name, fields.epoch);
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  for (const FieldDescriptor* const field : fields.parts) {
    const int count = field->is_repeated() ? reflection.FieldSize(message, field) : reflection.HasField(message, field) ? 1 : 0;
    for (int k = 0; k < count; ++k) {
      if constexpr (std::is_const_v<AnyMessage>) {
        Walk(field->is_repeated() ? reflection.GetRepeatedMessage(message, field, k) : reflection.GetMessage(message, field),
             visit);
      } else {
        Walk(*(field->is_repeated() ? reflection.MutableRepeatedMessage(&message, field, k)
                                    : reflection.MutableMessage(&message, field)),
             visit);
      }
    }
  }
}

NamedHead HeadAt(const Message& message, const FieldDescriptor* name, const FieldDescriptor* epoch) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  NamedHead head{reflection.GetString(message, name), reflection.GetString(message, epoch)};
  head.step = GetInteger(message, "step");
  if (!head.step.has_value()) head.step = GetInteger(message, "closes_step");
  return head;
}

}  // namespace

void ForEachHead(const Message& message, const std::function<void(const NamedHead&)>& visit) {
  Walk(message,
       [&](const Message& part, const FieldDescriptor* name, const FieldDescriptor* epoch) { visit(HeadAt(part, name, epoch)); });
}

void SetEpochs(Message& message, const std::function<std::string(const NamedHead&)>& epoch_of) {
  Walk(message, [&](Message& part, const FieldDescriptor* name, const FieldDescriptor* epoch) {
    std::string current = epoch_of(HeadAt(part, name, epoch));
    if (!current.empty()) part.GetReflection()->SetString(&part, epoch, std::move(current));
  });
}

std::optional<int64_t> GetInteger(const Message& message, const char* name) {
  const FieldDescriptor* const field = FieldOf(message, name, FieldDescriptor::CPPTYPE_INT64);
  if (field == nullptr || (field->has_presence() && !message.GetReflection()->HasField(message, field))) return std::nullopt;
  return message.GetReflection()->GetInt64(message, field);
}

std::optional<bool> GetBool(const Message& message, const char* name) {
  const FieldDescriptor* const field = FieldOf(message, name, FieldDescriptor::CPPTYPE_BOOL);
  if (field == nullptr || (field->has_presence() && !message.GetReflection()->HasField(message, field))) return std::nullopt;
  return message.GetReflection()->GetBool(message, field);
}

std::optional<std::string> GetText(const Message& message, const char* name) {
  const FieldDescriptor* const field = FieldOf(message, name, FieldDescriptor::CPPTYPE_STRING);
  if (field == nullptr) return std::nullopt;
  return message.GetReflection()->GetString(message, field);
}

void SetInteger(Message& message, const char* name, int64_t value) {
  if (const FieldDescriptor* const field = FieldOf(message, name, FieldDescriptor::CPPTYPE_INT64); field != nullptr) {
    message.GetReflection()->SetInt64(&message, field, value);
  }
}

void SetText(Message& message, const char* name, const std::string& value) {
  if (const FieldDescriptor* const field = FieldOf(message, name, FieldDescriptor::CPPTYPE_STRING); field != nullptr) {
    message.GetReflection()->SetString(&message, field, value);
  }
}

}  // namespace headwater::client::internal
