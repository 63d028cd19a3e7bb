#include "server/heads/epoch.h"

#include <unistd.h>

#include <cstdlib>

namespace headwater::heads {

Epoch NewEpoch() {
  Epoch epoch;
  // From the kernel itself, as the ids of sessions: no state of ours that a fork or a restart could repeat. It gives so few bytes
  // always; a server that could repeat an epoch would mix up two lives of a head, so it must not go on.
  if (getentropy(epoch.data(), epoch.size()) != 0) std::abort();
  return epoch;
}

std::string EpochToHex(const Epoch& epoch) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * epoch.size());
  for (const uint8_t value : epoch) {
    text.push_back(kDigits[value >> 4]);
    text.push_back(kDigits[value & 15]);
  }
  return text;
}

}  // namespace headwater::heads
