#include "tests/fuzz/support/message_input.h"

#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/text_format.h>

namespace headwater::fuzz {

bool ReadMessageInput(const uint8_t* data, size_t size, google::protobuf::Message* message) {
  // Errors of a mutated text are not logged.
  static const bool silent_parser = google::protobuf::SetLogHandler(nullptr) == nullptr;
  static_cast<void>(silent_parser);
  message->Clear();
  if (size == 0 || data[0] != '#') return message->ParseFromArray(data, static_cast<int>(size));
  return google::protobuf::TextFormat::ParseFromString(std::string(reinterpret_cast<const char*>(data) + 1, size - 1), message);
}

std::string WriteMessageInput(const google::protobuf::Message& message, bool text) {
  if (!text) return message.SerializeAsString();
  std::string bytes;
  google::protobuf::TextFormat::PrintToString(message, &bytes);
  return "#" + bytes;
}

}  // namespace headwater::fuzz
