// Server: a headwater server in this process. headwaterd runs one; tests start one on port 0 or a Unix socket.
#ifndef HEADWATER_SERVER_SERVICE_SERVER_H_
#define HEADWATER_SERVER_SERVICE_SERVER_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "server/service/server_options.h"

namespace headwater::service {

// From now on gRPC's own lines are lines of observability::Log(): at most 10 each second, and 100 at once after a quiet time. A
// failed TLS handshake is `event=tls_handshake_failed` at level warning, and is always counted (observability::Metrics). Every
// other line is `event=grpc` at gRPC's own level. For the process, at its start.
void TakeGrpcLog();

// Life: Start() listens, with health NOT_SERVING and every call answered STARTING. BecomeReady() runs the engine's self-test,
// brings back the heads of an earlier server and turns to SERVING. Drain() turns to NOT_SERVING, answers new calls and step waits
// with DRAINING, and finishes the other accepted calls. The destructor stops. Thread-safe.
//
// When the engine's device is lost (LossEngine::health()), whatever the phase, health turns to NOT_SERVING. Calls in progress and
// new ones are answered ENGINE_FAILED, and ServerOptions::on_engine_lost is called. Only Drain() is left to do.
class Server {
 public:
  // InvalidArgument for contradicting options; Unavailable if an address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options, std::unique_ptr<LossEngine> engine);
  // Cancels what is still running.
  ~Server();

  // Waits for the workers, if the options name any, runs SelfTest(engine) and brings back the heads of an earlier server, if the
  // options say so. An error leaves the server NOT_SERVING: kCancelled soon after `cancelled` has returned true while it waits, or
  // before the next head. Once.
  absl::Status BecomeReady(const std::function<bool()>& cancelled = [] { return false; });
  // True if all accepted calls had ended by `timeout`; those that had not are cancelled. Then the server listens no more.
  // Idempotent.
  bool Drain(absl::Duration timeout);
  // False if Drain() was to save the heads (ServerOptions::drain_checkpoint) and one of them could not be.
  bool heads_saved() const;

  // Looks at the engine's device now, instead of within 50 ms.
  void CheckEngine();

  // Addresses that clients can connect to, in the order of the options, with the ports that were picked.
  const std::vector<std::string>& addresses() const;
  // addresses() of the admin_listen_addresses.
  std::vector<std::string> admin_addresses() const;
  // Port of the metrics endpoint; 0 without one.
  int metrics_port() const;
  // The text that a scrape returns.
  std::string SerializeMetrics() const;
  LossEngine& engine();

 private:
  struct Ports;
  struct State;
  explicit Server(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_SERVER_H_
