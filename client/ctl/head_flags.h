// The flags that describe a head, for `plan` and `load --create`.
#ifndef HEADWATER_CLIENT_CTL_HEAD_FLAGS_H_
#define HEADWATER_CLIENT_CTL_HEAD_FLAGS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/client/types.h"

namespace headwater::ctl {

// Their names.
extern const std::vector<std::string> kHeadFlags;

// The specification that the flags give. `defaults`: what flags that were not given mean. A usage error for a name that is not
// known, sizes that are missing, and optimizer settings without that optimizer; ranges are the server's to check.
absl::StatusOr<client::HeadSpec> HeadSpecFromFlags(const client::HeadSpec& defaults);

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_HEAD_FLAGS_H_
