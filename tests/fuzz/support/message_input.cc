#include "tests/fuzz/support/message_input.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/text_format.h>

namespace headwater::fuzz {
namespace {

// What a mutated text is wrong in is nobody's business.
class Silent final : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int, google::protobuf::io::ColumnNumber, const std::string&) override {}
};

}  // namespace

bool ReadMessageInput(const uint8_t* data, size_t size, google::protobuf::Message* message) {
  // Nor what it logs of bytes that are no text.
  static const bool silent_parser = google::protobuf::SetLogHandler(nullptr) == nullptr;
  static_cast<void>(silent_parser);
  message->Clear();
  if (size == 0 || data[0] != '#') return message->ParseFromArray(data, static_cast<int>(size));
  Silent silent;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&silent);
  return parser.ParseFromString(std::string(reinterpret_cast<const char*>(data) + 1, size - 1), message);
}

std::string WriteMessageInput(const google::protobuf::Message& message, bool text) {
  if (!text) return message.SerializeAsString();
  std::string bytes;
  google::protobuf::TextFormat::PrintToString(message, &bytes);
  return "#" + bytes;
}

}  // namespace headwater::fuzz
