// The identity of a head: its resource name, `tenants/{tenant}/heads/{head}`, and its epoch.
#ifndef HEADWATER_SERVER_HEADS_HEAD_NAME_H_
#define HEADWATER_SERVER_HEADS_HEAD_NAME_H_

#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"

namespace headwater::heads {

inline constexpr char kDefaultTenant[] = "default";

// A parsed name. Both ids match [a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?.
struct HeadName {
  std::string tenant;
  std::string head;
  std::string ToString() const;  // the full resource name
};

// kInvalidName with `field` = `field_name` for anything else than a full resource name.
absl::StatusOr<HeadName> ParseHeadName(const std::string& name, const std::string& field_name);

// Checks `tenants/{tenant}` and returns the tenant; empty is the default tenant.
absl::StatusOr<std::string> ParseTenantName(const std::string& name, const std::string& field_name);

// Random 128 bits that change whenever a head's state does not continue the one before.
using Epoch = std::array<uint8_t, 16>;

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

#endif  // HEADWATER_SERVER_HEADS_HEAD_NAME_H_
