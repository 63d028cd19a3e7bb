// Resource names: `tenants/{tenant}/heads/{head}`.
#ifndef HEADWATER_SERVER_HEADS_HEAD_NAME_H_
#define HEADWATER_SERVER_HEADS_HEAD_NAME_H_

#include <string>

#include "absl/status/statusor.h"

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

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_HEAD_NAME_H_
