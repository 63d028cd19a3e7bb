// Where the server is: the flags of every command that say so.
#ifndef HEADWATER_CLIENT_CTL_CONNECTION_H_
#define HEADWATER_CLIENT_CTL_CONNECTION_H_

#include <string>

#include "absl/status/statusor.h"
#include "headwater/client/client.h"

namespace headwater::ctl {

// --server, or its replacement.
std::string ServerAddress();
// A command's own argument instead of --server.
void SetServerAddress(const std::string& address);
// --tenant.
std::string Tenant();

// Connects as --server, --tenant, --timeout and --connect_timeout say. `session`: host and device memory can be shared with the
// server, which needs one; nothing is left undecided in any case.
absl::StatusOr<client::Client> Connect(client::Transport transport = client::Transport::kAuto, bool session = false);

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_CONNECTION_H_
