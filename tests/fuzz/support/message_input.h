// Inputs that are messages: binary, or in text form behind a first byte '#'.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_MESSAGE_INPUT_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_MESSAGE_INPUT_H_

#include <google/protobuf/message.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace headwater::fuzz {

// False if the bytes are no such message.
bool ReadMessageInput(const uint8_t* data, size_t size, google::protobuf::Message* message);
// In text form if `text`.
std::string WriteMessageInput(const google::protobuf::Message& message, bool text);

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_MESSAGE_INPUT_H_
