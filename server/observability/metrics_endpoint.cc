#include "server/observability/metrics_endpoint.h"

#include <microhttpd.h>

#include <cstddef>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "headwater/kernels/listen_tcp.h"

namespace headwater::observability {
namespace {

MHD_Result Send(MHD_Connection* connection, unsigned code, const std::string& body, const char* header, const char* value) {
  MHD_Response* response =
      MHD_create_response_from_buffer(body.size(), const_cast<char*>(body.data()), MHD_RESPMEM_MUST_COPY);  // NOLINT: only read
  if (response == nullptr) return MHD_NO;
  MHD_add_response_header(response, header, value);
  const MHD_Result queued = MHD_queue_response(connection, code, response);
  MHD_destroy_response(response);
  return queued;
}

MHD_Result Answer(void* endpoint, MHD_Connection* connection, const char* url, const char* method, const char* /*version*/,
                  const char* /*body*/, size_t* body_bytes, void** state) {
  // Called once with the headers alone; requests with a body are refused then.
  static char has_begun;
  const std::string_view verb = method;
  if (verb != MHD_HTTP_METHOD_GET && verb != MHD_HTTP_METHOD_HEAD) {
    return Send(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "expected GET\n", MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
  }
  if (*state == nullptr) {
    *state = &has_begun;
    return MHD_YES;
  }
  *body_bytes = 0;
  constexpr char kPlain[] = "text/plain; charset=utf-8";
  if (std::string_view(url) != "/metrics") {
    return Send(connection, MHD_HTTP_NOT_FOUND, "expected /metrics\n", MHD_HTTP_HEADER_CONTENT_TYPE, kPlain);
  }
  return Send(connection, MHD_HTTP_OK, static_cast<MetricsEndpoint*>(endpoint)->page()(), MHD_HTTP_HEADER_CONTENT_TYPE,
              "text/plain; version=0.0.4; charset=utf-8");
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Listen(const std::string& address,
                                                                         std::function<std::string()> page) {
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon == std::string::npos || colon == 0 || !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return absl::InvalidArgumentError("metrics: expected host:port, with a port from 0 to 65535, got '" + address + "'");
  }
  const absl::StatusOr<TcpListeners> listening = ListenTcp(address.substr(0, colon), port);
  if (absl::IsNotFound(listening.status())) {
    return absl::InvalidArgumentError("metrics: expected host:port, got '" + address +
                                      "': " + std::string(listening.status().message()));
  }
  if (!listening.ok()) {
    return absl::UnavailableError("metrics: cannot listen on " + address + ": " + std::string(listening.status().message()));
  }
  std::unique_ptr<MetricsEndpoint> endpoint(new MetricsEndpoint(std::move(page), listening->port));
  for (const int fd : listening->sockets) {  // each daemon closes its own
    MHD_Daemon* const daemon = MHD_start_daemon(MHD_USE_AUTO_INTERNAL_THREAD, /*port=*/0, nullptr, nullptr, &Answer, endpoint.get(),
                                                MHD_OPTION_LISTEN_SOCKET, fd,                  //
                                                MHD_OPTION_CONNECTION_LIMIT, kMaxConnections,  //
                                                MHD_OPTION_CONNECTION_TIMEOUT, kIdleTimeoutSeconds, MHD_OPTION_END);
    if (daemon == nullptr) return absl::UnavailableError("metrics: the HTTP server on " + address + " cannot be started");
    endpoint->daemons_.push_back(daemon);
  }
  return endpoint;
}

MetricsEndpoint::~MetricsEndpoint() {
  for (MHD_Daemon* const daemon : daemons_) MHD_stop_daemon(daemon);
}

}  // namespace headwater::observability
