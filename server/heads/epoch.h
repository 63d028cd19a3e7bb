// Epoch: random 128 bits that change whenever a head's state does not continue the one before.
#ifndef HEADWATER_SERVER_HEADS_EPOCH_H_
#define HEADWATER_SERVER_HEADS_EPOCH_H_

#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/strings/escaping.h"

namespace headwater::heads {

using Epoch = std::array<uint8_t, 16>;

// From the operating system's random source.
inline Epoch NewEpoch() {
  Epoch epoch;
  // From the kernel itself, like the ids of sessions: a fork or a restart cannot repeat it. The kernel always gives so few bytes. A
  // repeated epoch would mix up two lives of a head, so without random bytes the server aborts.
  if (getentropy(epoch.data(), epoch.size()) != 0) std::abort();
  return epoch;
}

// Lower-case hexadecimal, 32 characters. For messages and logs.
inline std::string EpochToHex(const Epoch& epoch) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(epoch.data()), epoch.size()});
}

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_EPOCH_H_
