// The options of the C ABI.
#ifndef HEADWATER_CLIENT_CORE_C_API_OPTIONS_H_
#define HEADWATER_CLIENT_CORE_C_API_OPTIONS_H_

#include <string>

#include "absl/status/statusor.h"
#include "headwater/client/options.h"

namespace headwater::client::internal {

// Lines `key=value`, as c_api.h lists them; empty lines are skipped. INVALID_ARGUMENT for an unknown key, and a value that is none.
// Ranges are checked by Core::Open().
absl::StatusOr<ClientOptions> ParseClientOptions(const std::string& text);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_C_API_OPTIONS_H_
