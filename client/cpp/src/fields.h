// Fields that messages and this library's structs have by the same names: each pair of types names them once, for both ways.
#ifndef HEADWATER_CLIENT_SRC_FIELDS_H_
#define HEADWATER_CLIENT_SRC_FIELDS_H_

#include <google/protobuf/timestamp.pb.h>

#include <chrono>
#include <concepts>
#include <optional>
#include <string>

#include "client/core/link/duration.h"

namespace headwater::client::internal {

// A field of a message becomes one of a struct: a number, an enumerator, bytes, a time, a message whose fields are named here, or
// a repeated one of these.
template <typename From, typename To>
void SetField(const From& from, To& to) {
  if constexpr (requires { ReadFields(from, to); }) {
    ReadFields(from, to);
  } else if constexpr (std::same_as<From, google::protobuf::Timestamp>) {
    to = To(std::chrono::duration_cast<typename To::duration>(std::chrono::seconds(from.seconds()) +
                                                              std::chrono::nanoseconds(from.nanos())));
  } else if constexpr (std::same_as<From, google::protobuf::Duration>) {
    to = FromProto(from);
  } else if constexpr (requires { to.emplace_back(); }) {
    for (const auto& item : from) SetField(item, to.emplace_back());
  } else {
    to = static_cast<To>(from);
  }
}
template <typename From, typename To>
void SetField(const From& from, std::optional<To>& to) {
  SetField(from, to.emplace());
}

template <typename Struct, typename Message>
Struct Read(const Message& message) {
  Struct result;
  ReadFields(message, result);
  return result;
}

}  // namespace headwater::client::internal

// DO(name) for each of up to 16 names, each in a scan of its own by the preprocessor.
#define HEADWATER_EACH(DO, ...) __VA_OPT__(HEADWATER_EXPAND(HEADWATER_EACH_STEP(DO, __VA_ARGS__)))
#define HEADWATER_EACH_STEP(DO, name, ...) DO(name) __VA_OPT__(HEADWATER_EACH_AGAIN HEADWATER_NO_ARGUMENTS(DO, __VA_ARGS__))
#define HEADWATER_EACH_AGAIN() HEADWATER_EACH_STEP
#define HEADWATER_NO_ARGUMENTS ()
#define HEADWATER_EXPAND(...) HEADWATER_EXPAND_4(HEADWATER_EXPAND_4(HEADWATER_EXPAND_4(HEADWATER_EXPAND_4(__VA_ARGS__))))
#define HEADWATER_EXPAND_4(...) HEADWATER_SCAN(HEADWATER_SCAN(HEADWATER_SCAN(HEADWATER_SCAN(__VA_ARGS__))))
#define HEADWATER_SCAN(...) __VA_ARGS__

// What a message leaves unset keeps the struct's default; what is absent in the struct stays unset.
#define HEADWATER_READ_FIELD(name)                                            \
  if constexpr (requires { message.has_##name(); }) {                         \
    if (message.has_##name()) internal::SetField(message.name(), value.name); \
  } else {                                                                    \
    internal::SetField(message.name(), value.name);                           \
  }
#define HEADWATER_WRITE_FIELD(name)                                                                     \
  if constexpr (requires { value.name.has_value(); }) {                                                 \
    if (value.name.has_value()) message.set_##name(static_cast<decltype(message.name())>(*value.name)); \
  } else {                                                                                              \
    message.set_##name(static_cast<decltype(message.name())>(value.name));                              \
  }
// ReadFields() and WriteFields() of two types, in the struct's namespace. Only what is called need exist: fields that are read may
// be ones that cannot be written.
#define HEADWATER_FIELDS(MessageType, Struct, ...)                         \
  template <std::same_as<MessageType> Message>                             \
  void ReadFields(const Message& message, Struct& value) {                 \
    HEADWATER_EACH(HEADWATER_READ_FIELD, __VA_ARGS__)                      \
  }                                                                        \
  template <std::same_as<Struct> Value, std::same_as<MessageType> Message> \
  void WriteFields(const Value& value, Message& message) {                 \
    HEADWATER_EACH(HEADWATER_WRITE_FIELD, __VA_ARGS__)                     \
  }

#endif  // HEADWATER_CLIENT_SRC_FIELDS_H_
