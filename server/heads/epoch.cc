#include "server/heads/epoch.h"

#include <random>

namespace headwater::heads {

Epoch NewEpoch() {
  // libstdc++ reads the CPU's or the kernel's generator for each value; no state of ours that a fork or a restart could repeat.
  std::random_device device;
  std::uniform_int_distribution<int> byte(0, 255);
  Epoch epoch;
  for (uint8_t& value : epoch) value = static_cast<uint8_t>(byte(device));
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
