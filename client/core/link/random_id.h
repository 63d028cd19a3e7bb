// Ids that no two clients make alike, wherever and however often they are started.
#ifndef HEADWATER_CLIENT_CORE_LINK_RANDOM_ID_H_
#define HEADWATER_CLIENT_CORE_LINK_RANDOM_ID_H_

#include <random>
#include <string>

#include "absl/strings/escaping.h"

namespace headwater::client::internal {

// 16 bytes from the machine's own generator: no state of this process that a fork could repeat. Any thread.
inline std::string RandomId() {
  std::random_device device;
  std::string id(16, '\0');
  for (char& byte : id) byte = static_cast<char>(device());
  return id;
}
// The same, as 32 hexadecimal digits.
inline std::string RandomHexId() { return absl::BytesToHexString(RandomId()); }

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_RANDOM_ID_H_
