// Fields that messages and structs have by the same names: each pair of types names them once, for both ways.
#ifndef HEADWATER_V1_FIELDS_H_
#define HEADWATER_V1_FIELDS_H_

#include <concepts>

// DO(name) for each of up to 16 names, each in a scan of its own by the preprocessor.
#define HEADWATER_EACH(DO, ...) __VA_OPT__(HEADWATER_EXPAND(HEADWATER_EACH_STEP(DO, __VA_ARGS__)))
#define HEADWATER_EACH_STEP(DO, name, ...) DO(name) __VA_OPT__(HEADWATER_EACH_AGAIN HEADWATER_NO_ARGUMENTS(DO, __VA_ARGS__))
#define HEADWATER_EACH_AGAIN() HEADWATER_EACH_STEP
#define HEADWATER_NO_ARGUMENTS ()
#define HEADWATER_EXPAND(...) HEADWATER_EXPAND_4(HEADWATER_EXPAND_4(HEADWATER_EXPAND_4(HEADWATER_EXPAND_4(__VA_ARGS__))))
#define HEADWATER_EXPAND_4(...) HEADWATER_SCAN(HEADWATER_SCAN(HEADWATER_SCAN(HEADWATER_SCAN(__VA_ARGS__))))
#define HEADWATER_SCAN(...) __VA_ARGS__

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
// ReadFields() and WriteFields() of two types, in the struct's namespace, where internal::SetField(from, to) converts a field that
// is read. Only the called direction must compile: a pair may be read-only.
#define HEADWATER_FIELDS(MessageType, Struct, ...)                         \
  template <std::same_as<MessageType> Message>                             \
  void ReadFields(const Message& message, Struct& value) {                 \
    HEADWATER_EACH(HEADWATER_READ_FIELD, __VA_ARGS__)                      \
  }                                                                        \
  template <std::same_as<Struct> Value, std::same_as<MessageType> Message> \
  void WriteFields(const Value& value, Message& message) {                 \
    HEADWATER_EACH(HEADWATER_WRITE_FIELD, __VA_ARGS__)                     \
  }

#endif  // HEADWATER_V1_FIELDS_H_
