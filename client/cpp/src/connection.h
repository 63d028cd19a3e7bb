// Connection: one gRPC channel, its stubs and the options that every call needs. Thread-safe.
#ifndef HEADWATER_CLIENT_SRC_CONNECTION_H_
#define HEADWATER_CLIENT_SRC_CONNECTION_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "client/cpp/src/error.h"
#include "headwater/client/client.h"
#include "headwater/client/future.h"
#include "headwater/v1/head_service.grpc.pb.h"
#include "headwater/v1/loss_service.grpc.pb.h"
#include "headwater/v1/session_service.grpc.pb.h"

namespace headwater::client::internal {

using Deadline = std::chrono::system_clock::time_point;

class Connection {
 public:
  // Waits until the channel is connected.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(const std::string& target, const ClientOptions& options);

  const ClientOptions& options() const { return options_; }
  const std::string& target() const { return target_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  v1::LossService::Stub& loss() { return *loss_; }
  v1::HeadService::Stub& heads() { return *heads_; }
  v1::SessionService::Stub& session() { return *session_; }

  Deadline DeadlineOf(const CallOptions& call) const;

  // A blocking unary call: Call(stub, &Stub::Method, request, options).
  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                                const Request& request, const CallOptions& call) {
    grpc::ClientContext context;
    context.set_deadline(DeadlineOf(call));
    Response response;
    const grpc::Status status = (stub.*method)(&context, request, &response);
    if (!status.ok()) return FromGrpcStatus(status, target_);
    return response;
  }

 private:
  Connection(std::string target, const ClientOptions& options, std::shared_ptr<grpc::Channel> channel);

  const std::string target_;
  const ClientOptions options_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::LossService::Stub> loss_;
  const std::unique_ptr<v1::HeadService::Stub> heads_;
  const std::unique_ptr<v1::SessionService::Stub> session_;
};

// A unary call whose result comes by a future. `start(context, request, response, done)` hands it to gRPC; `convert(response)`
// makes the result.
template <typename Result, typename Request, typename Response, typename Start, typename Convert>
Future<Result> CallAsync(std::shared_ptr<Connection> connection, Request request, const CallOptions& options, Start start,
                         Convert convert) {
  struct Call {
    std::shared_ptr<Connection> connection;
    grpc::ClientContext context;
    Request request;
    Response response;
  };
  auto state = std::make_shared<FutureState<Result>>();
  auto call = std::make_shared<Call>();
  call->connection = std::move(connection);
  call->context.set_deadline(call->connection->DeadlineOf(options));
  call->request = std::move(request);
  Call* const raw = call.get();
  state->Keep(std::move(call), [raw] { raw->context.TryCancel(); });
  // gRPC's side holds no reference to the call: see FutureState.
  start(*raw->connection, &raw->context, &raw->request, &raw->response, [state, raw, convert](const grpc::Status& status) {
    state->Set(status.ok() ? absl::StatusOr<Result>(convert(raw->response)) : FromGrpcStatus(status, raw->connection->target()));
  });
  return Future<Result>(state);
}

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_CONNECTION_H_
