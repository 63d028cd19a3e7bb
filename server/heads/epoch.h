// Epoch: random 128 bits that change whenever a head's state does not continue the one before.
#ifndef HEADWATER_SERVER_HEADS_EPOCH_H_
#define HEADWATER_SERVER_HEADS_EPOCH_H_

#include <array>
#include <cstdint>
#include <string>

namespace headwater::heads {

using Epoch = std::array<uint8_t, 16>;

// From the operating system's random source.
Epoch NewEpoch();

// Lower-case hexadecimal, 32 characters. For messages and logs.
std::string EpochToHex(const Epoch& epoch);

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_EPOCH_H_
