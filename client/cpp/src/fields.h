// SetField() of HEADWATER_FIELDS for the client's types.
#ifndef HEADWATER_CLIENT_SRC_FIELDS_H_
#define HEADWATER_CLIENT_SRC_FIELDS_H_

#include <google/protobuf/timestamp.pb.h>

#include <chrono>
#include <concepts>
#include <optional>

#include "client/core/link/duration.h"
#include "proto/headwater/v1/fields.h"

namespace headwater::client::internal {

// Converts a field of a message to one of a struct. It is a number, an enumerator, bytes, a time, a message with fields named here,
// or repeated.
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

#endif  // HEADWATER_CLIENT_SRC_FIELDS_H_
