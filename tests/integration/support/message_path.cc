#include "tests/integration/support/message_path.h"

#include <google/protobuf/text_format.h>

#include <stdexcept>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace headwater::testing {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Merges a value in text format.
Edit Merge(const std::string& what, const std::string& value) {
  return {what, [value](Message* parent, const FieldDescriptor* field) {
            if (!google::protobuf::TextFormat::MergeFromString(absl::StrCat(field->name(), ": ", value), parent)) {
              throw std::logic_error(absl::StrCat(field->full_name(), " cannot be ", value.substr(0, 80)));
            }
          }};
}

Edit ClearAndMerge(const std::string& what, const std::string& value) {
  return {what, [value](Message* parent, const FieldDescriptor* field) {
            Clear().apply(parent, field);
            Merge("", value).apply(parent, field);
          }};
}

std::string Quoted(const std::string& value) { return absl::StrCat("\"", absl::CEscape(value), "\""); }

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

Edit Int(int64_t value) { return Merge(absl::StrCat(value), absl::StrCat(value)); }
Edit Ints(const std::vector<int64_t>& values) {
  const std::string list = absl::StrJoin(values, ", ");
  return ClearAndMerge(list, absl::StrCat("[", list, "]"));
}
Edit Real(double value) { return Merge(absl::StrCat(value), absl::StrCat(value)); }
Edit Text(const std::string& value) {
  return Merge(absl::StrCat(value.size(), " bytes: ", absl::CHexEscape(value.substr(0, 80))), Quoted(value));
}
Edit Texts(const std::vector<std::string>& values) {
  const auto quote = [](std::string* out, const std::string& value) { out->append(Quoted(value)); };
  return ClearAndMerge(absl::StrJoin(values, ", "), absl::StrCat("[", absl::StrJoin(values, ", ", quote), "]"));
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

std::vector<std::string> FieldPaths(const google::protobuf::Descriptor& descriptor) {
  std::vector<std::string> paths;
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor* const field = descriptor.field(i);
    paths.push_back(field->name());
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    for (const std::string& path : FieldPaths(*field->message_type())) paths.push_back(absl::StrCat(field->name(), ".", path));
  }
  return paths;
}

}  // namespace headwater::testing
