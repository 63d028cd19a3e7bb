#include "server/heads/epoch.h"

#include <unistd.h>

#include <cstdlib>

namespace headwater::heads {

Epoch NewEpoch() {
  Epoch epoch;
  // From the kernel itself, like the ids of sessions: a fork or a restart cannot repeat it. The kernel always gives so few bytes. A
  // repeated epoch would mix up two lives of a head, so without random bytes the server aborts.
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
