// Generic access to messages of any type: heads with their epochs and steps, and single fields.
#ifndef HEADWATER_CLIENT_CORE_CALL_MESSAGES_H_
#define HEADWATER_CLIENT_CORE_CALL_MESSAGES_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "google/protobuf/message.h"

namespace headwater::client::internal {

// A head as a message names it: HeadStep, TeacherHidden, JoinedTeacher, or `name` and `epoch` of a request.
struct NamedHead {
  std::string name;
  std::string epoch;  // empty: the message names none
  std::optional<int64_t> step{};
};

// In the order of the fields.
void ForEachHead(const google::protobuf::Message& message, const std::function<void(const NamedHead&)>& visit);
// Puts another epoch in where `epoch_of` returns one that is not empty.
void SetEpochs(google::protobuf::Message& message, const std::function<std::string(const NamedHead&)>& epoch_of);

// A field by its name; nothing, or no effect, where the message has no such field, or an optional one is absent.
std::optional<int64_t> GetInteger(const google::protobuf::Message& message, const char* field);
std::optional<bool> GetBool(const google::protobuf::Message& message, const char* field);
std::optional<std::string> GetText(const google::protobuf::Message& message, const char* field);
void SetInteger(google::protobuf::Message& message, const char* field, int64_t value);
void SetText(google::protobuf::Message& message, const char* field, const std::string& value);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_CALL_MESSAGES_H_
