// Fields that messages and structs have by the same names: each pair of types names them once, for both ways.
#ifndef HEADWATER_V1_FIELDS_H_
#define HEADWATER_V1_FIELDS_H_

#include <concepts>

#include "headwater/kernels/each_name.h"

// A field that the message leaves unset keeps the struct's default. An absent optional stays unset in the message.
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
// Only what differs from the struct's default: a message of an older version stays as that version wrote it.
#define HEADWATER_WRITE_CHANGED_FIELD(name) \
  if (!(value.name == Value{}.name)) {      \
    HEADWATER_WRITE_FIELD(name)             \
  }
// ReadFields(), WriteFields() and WriteChangedFields() of two types, in the struct's namespace, where internal::SetField(from, to)
// converts a field that is read. Only the called direction must compile: a pair may be read-only.
#define HEADWATER_FIELDS(MessageType, Struct, ...)                         \
  template <std::same_as<MessageType> Message>                             \
  void ReadFields(const Message& message, Struct& value) {                 \
    HEADWATER_EACH(HEADWATER_READ_FIELD, __VA_ARGS__)                      \
  }                                                                        \
  template <std::same_as<Struct> Value, std::same_as<MessageType> Message> \
  void WriteFields(const Value& value, Message& message) {                 \
    HEADWATER_EACH(HEADWATER_WRITE_FIELD, __VA_ARGS__)                     \
  }                                                                        \
  template <std::same_as<Struct> Value, std::same_as<MessageType> Message> \
  void WriteChangedFields(const Value& value, Message& message) {          \
    HEADWATER_EACH(HEADWATER_WRITE_CHANGED_FIELD, __VA_ARGS__)             \
  }

#endif  // HEADWATER_V1_FIELDS_H_
