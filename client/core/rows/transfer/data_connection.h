// DataConnection: one connection for rows, over a socket that this library owns.
#ifndef HEADWATER_CLIENT_CORE_ROWS_TRANSFER_DATA_CONNECTION_H_
#define HEADWATER_CLIENT_CORE_ROWS_TRANSFER_DATA_CONNECTION_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/core/link/channel.h"
#include "client/core/link/wait.h"

namespace headwater::client::internal {

// A connection for rows, instead of an ordinary channel. All connections of a micro-batch must lead to the same server process,
// whatever the name resolves to. This one leads to the address at which that process has answered. gRPC also delays the end of a
// connection until its pending data has been written. If the other side hangs, slices of the caller's memory would stay in use for
// as long. Shutting the socket down ends the write at once.
//
// A connection that broke is never reopened, but replaced by another. Thread-safe.
class DataConnection {
 public:
  // Connects to `peer`, as grpc::ClientContext::peer() names the server. TLS, and addresses outside the internet and Unix families,
  // use an ordinary channel. If the other side hangs, the channel's keepalive ends a pending write. UNAVAILABLE if no server
  // answers there; DEADLINE_EXCEEDED or CANCELLED where the wait ends before.
  static absl::StatusOr<std::shared_ptr<DataConnection>> Open(const std::string& peer, const ClientOptions& options,
                                                              const Wait& wait);
  ~DataConnection();
  DataConnection(const DataConnection&) = delete;
  DataConnection& operator=(const DataConnection&) = delete;

  grpc::GenericStub& stub() { return stub_; }
  const std::string& peer() const { return peer_; }

  // Whether calls may still be made on it, as far as this side has heard.
  bool usable() const;
  // A call on it failed as they do when it is gone: no further calls.
  void Retire() { retired_ = true; }
  // Ends the connection, and every call on it, at once; gRPC releases pending data.
  void Break();

  // Calls that use it: for the choice of the least busy one.
  std::atomic<int> calls = 0;

 private:
  DataConnection(std::string peer, std::shared_ptr<grpc::Channel> channel, int socket)
      : peer_(std::move(peer)), stub_(std::move(channel)), socket_(socket) {}

  const std::string peer_;
  grpc::GenericStub stub_;
  const int socket_;  // a second descriptor of it; -1 for an ordinary channel
  std::atomic<bool> retired_ = false;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_TRANSFER_DATA_CONNECTION_H_
