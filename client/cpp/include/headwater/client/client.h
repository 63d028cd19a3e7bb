// Client: a connection to a Headwater server.
//
//   absl::StatusOr<Client> client = Client::Connect("localhost:50051");
//   absl::StatusOr<Head> head = client->CreateHead("student", spec);
//   absl::Status uploaded = head->UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight)).status();
//   absl::StatusOr<LossResult> result =
//       head->CrossEntropy(RowsView::Float32(hidden, hidden_size), targets, {}, {.step = 0, .micro_batch = 0}).Get();
//
// No call is repeated behind the caller's back, except UploadWeights, which resumes where it was cut.
#ifndef HEADWATER_CLIENT_CLIENT_H_
#define HEADWATER_CLIENT_CLIENT_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/client/error.h"
#include "headwater/client/head.h"
#include "headwater/client/types.h"

namespace headwater::client {

// Options of a connection.
struct ClientOptions {
  // Deadline of every call that names no other, retries included. > 0.
  std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  // How long Connect() waits for the server to answer. > 0.
  std::chrono::milliseconds connect_timeout{std::chrono::seconds(10)};
  // Bytes of rows or weights in one message, at least one row. In [1, max_message_bytes - 64 KiB].
  int64_t chunk_bytes = int64_t{1} << 20;
  // Longest message that is sent or accepted. In [128 KiB, 1 GiB].
  int64_t max_message_bytes = int64_t{64} << 20;
  // How often UploadWeights tries again after a cut connection. >= 0.
  int max_upload_retries = 5;
};

// A connection. Cheap to copy (copies share it); thread-safe. Heads and futures keep the connection alive by themselves.
class Client {
 public:
  // Connects to `target`: `host:port` or `unix:/path/to/socket`. Waits until the server is reached; a server that is still starting
  // is waited for. Without TLS. HTTP proxies of the environment are not used.
  //
  // INVALID_ARGUMENT if an option is out of range; UNAVAILABLE if nobody answers within `connect_timeout`.
  static absl::StatusOr<Client> Connect(const std::string& target, const ClientOptions& options = {});

  // Names are full (`tenants/{tenant}/heads/{head}`) or short (`student` is tenants/default/heads/student).

  // Makes a head, without weights: upload or load them next. ALREADY_EXISTS / HEAD_ALREADY_EXISTS; RESOURCE_EXHAUSTED /
  // MEMORY_BUDGET_EXCEEDED with the memory plan in the message.
  absl::StatusOr<Head> CreateHead(const std::string& name, const HeadSpec& spec, const CallOptions& options = {});
  // What CreateHead() would take; makes nothing. The head fits if its plan's total_bytes are at most its available_bytes. Errors of
  // the specification are those of CreateHead().
  absl::StatusOr<HeadInfo> PlanHead(const std::string& name, const HeadSpec& spec, const CallOptions& options = {});
  // Takes up a head that exists, at its current epoch. NOT_FOUND / HEAD_NOT_FOUND.
  absl::StatusOr<Head> OpenHead(const std::string& name, const CallOptions& options = {});
  // All heads of the tenant `default`, by name.
  absl::StatusOr<std::vector<HeadInfo>> ListHeads(const CallOptions& options = {});
  // Frees a head whatever its epoch; its checkpoints stay. `force`: even with undecided contributions or a non-empty open step
  // (FAILED_PRECONDITION / HEAD_IN_USE otherwise).
  absl::Status DeleteHead(const std::string& name, bool force = false, const CallOptions& options = {});

  absl::StatusOr<ServerInfo> GetServerInfo(const CallOptions& options = {});
  // grpc.health.v1. An empty `service` is the server as a whole. A service that the server does not know is kServiceUnknown.
  absl::StatusOr<HealthStatus> CheckHealth(const std::string& service = "", const CallOptions& options = {});

 private:
  explicit Client(std::shared_ptr<internal::Connection> connection);

  std::shared_ptr<internal::Connection> connection_;
};

}  // namespace headwater::client

#endif  // HEADWATER_CLIENT_CLIENT_H_
