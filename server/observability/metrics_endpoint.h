// MetricsEndpoint: the page that Prometheus scrapes, over plain HTTP.
#ifndef HEADWATER_SERVER_OBSERVABILITY_METRICS_ENDPOINT_H_
#define HEADWATER_SERVER_OBSERVABILITY_METRICS_ENDPOINT_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

struct MHD_Daemon;

namespace headwater::observability {

// Answers GET and HEAD of /metrics on a thread of its own. A stalled client delays neither other clients nor the destructor.
// prometheus-cpp's own exposer is not used: civetweb gives its threads stacks of 100 KiB. OpenBLAS' thread-local memory takes 60 of
// them, and a scrape needed nearly all of the rest.
class MetricsEndpoint {
 public:
  static constexpr unsigned kMaxConnections = 32;      // to one address; more wait
  static constexpr unsigned kIdleTimeoutSeconds = 10;  // of a connection without traffic

  // `address` is host:port, as for ListenTcp(); port 0 picks one. `page` makes the text of a scrape; the endpoint's thread calls it
  // until the destructor returns. UNAVAILABLE: cannot listen there; INVALID_ARGUMENT: not an address.
  static absl::StatusOr<std::unique_ptr<MetricsEndpoint>> Listen(const std::string& address, std::function<std::string()> page);
  ~MetricsEndpoint();
  MetricsEndpoint(const MetricsEndpoint&) = delete;
  MetricsEndpoint& operator=(const MetricsEndpoint&) = delete;

  int port() const { return port_; }
  const std::function<std::string()>& page() const { return page_; }

 private:
  MetricsEndpoint(std::function<std::string()> page, int port) : page_(std::move(page)), port_(port) {}

  const std::function<std::string()> page_;
  const int port_;
  std::vector<MHD_Daemon*> daemons_;  // one for each address that the host's name stands for
};

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_METRICS_ENDPOINT_H_
