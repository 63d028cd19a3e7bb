// Durations on the wire.
#ifndef HEADWATER_CLIENT_CORE_LINK_DURATION_H_
#define HEADWATER_CLIENT_CORE_LINK_DURATION_H_

#include <google/protobuf/duration.pb.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "headwater/client/future.h"

namespace headwater::client::internal {

inline google::protobuf::Duration ToProto(std::chrono::milliseconds duration) {
  google::protobuf::Duration result;
  result.set_seconds(duration.count() / 1000);
  result.set_nanos(static_cast<int32_t>(duration.count() % 1000 * 1'000'000));
  return result;
}

// In [0, kLongestTimeout], because a server may name more nanoseconds than fit.
inline std::chrono::nanoseconds FromProto(const google::protobuf::Duration& duration) {
  const std::chrono::seconds longest = kLongestTimeout;
  const std::chrono::nanoseconds result =
      std::clamp(std::chrono::seconds(duration.seconds()), -longest, longest) + std::chrono::nanoseconds(duration.nanos());
  return std::clamp<std::chrono::nanoseconds>(result, std::chrono::nanoseconds(0), longest);
}

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_DURATION_H_
