#include "client/ctl/connection.h"

#include <chrono>

#include "absl/flags/flag.h"
#include "absl/time/time.h"

ABSL_FLAG(std::string, server, "localhost:50051", "where headwaterd listens: host:port or unix:PATH");
ABSL_FLAG(std::string, tenant, "default", "whose heads short names mean, and `heads` lists");
ABSL_FLAG(absl::Duration, timeout, absl::Minutes(30), "longest time of one call");
ABSL_FLAG(absl::Duration, connect_timeout, absl::Seconds(5), "how long to wait for the server to answer");

namespace headwater::ctl {

std::string ServerAddress() { return absl::GetFlag(FLAGS_server); }

void SetServerAddress(const std::string& address) { absl::SetFlag(&FLAGS_server, address); }

absl::StatusOr<client::Client> Connect(client::Transport transport, bool session) {
  client::ClientOptions options;
  options.tenant = absl::GetFlag(FLAGS_tenant);
  options.timeout = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_timeout));
  options.connect_timeout = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_connect_timeout));
  options.transport = transport;
  options.client_name = "headwaterctl";
  options.on_notice = [](const std::string&) {};
  if (!session) options.session_lease = std::chrono::milliseconds(0);
  return client::Client::Connect(ServerAddress(), options);
}

}  // namespace headwater::ctl
