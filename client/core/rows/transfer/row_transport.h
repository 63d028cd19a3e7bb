// RowTransport: the state that calls with rows share on one connection.
#ifndef HEADWATER_CLIENT_CORE_ROWS_TRANSFER_ROW_TRANSPORT_H_
#define HEADWATER_CLIENT_CORE_ROWS_TRANSFER_ROW_TRANSPORT_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "client/core/link/delayed_tasks.h"
#include "client/core/rows/memory/memory_paths.h"
#include "client/core/rows/transfer/connection_pool.h"
#include "headwater/client/options.h"

namespace headwater::client::internal {

// Facts about the server process that answers now, as calls need them.
struct ServerFacts {
  std::string peer;             // its address, as grpc::ClientContext::peer()
  int max_stripes = 1;          // streams of a micro-batch
  int64_t max_chunk_bytes = 0;  // 0: not known
};

// Thread-safe. The calls that use it keep it alive until they have ended.
class RowTransport {
 public:
  // `channel` leads to `target`; facts about the server are asked over it.
  RowTransport(std::string target, const ClientOptions& options, std::shared_ptr<grpc::Channel> channel);

  const std::string& target() const { return target_; }
  const ClientOptions& options() const { return options_; }
  ConnectionPool& connections() { return connections_; }
  MemoryPaths& memory() { return *memory_; }
  DelayedTasks& timers() { return timers_; }
  // Threads for the beginnings of calls, which may wait for the server: connecting, placing rows.
  DelayedTasks& beginnings() { return beginnings_; }
  // Threads for the ends of calls, which never wait behind beginnings that a hanging server holds up.
  DelayedTasks& endings() { return endings_; }

  // The facts known without asking.
  std::optional<ServerFacts> facts() const;
  // Asks the server. Blocks; the caller may cancel `context`.
  absl::StatusOr<ServerFacts> AskForFacts(grpc::ClientContext& context);
  // Another process may answer from now on.
  void ForgetFacts();
  // The server at `peer` refuses further streams.
  void UseOneStream(const std::string& peer);

  // A micro-batch has succeeded. `path`: "grpc", ...; `stripes` only counts for that one.
  void Count(const std::string& path, bool on_device, int64_t bytes, int stripes);
  // Why rows did not take a better path, or empty. The first sentence becomes a notice.
  void SetWhyNotBetter(const std::string& sentence);
  TransportStats stats() const;

 private:
  const std::string target_;
  const ClientOptions options_;
  const std::shared_ptr<grpc::Channel> channel_;

  mutable std::mutex mutex_;
  std::optional<ServerFacts> facts_;
  std::string one_stream_peer_;
  TransportStats stats_;
  bool notice_given_ = false;

  ConnectionPool connections_;
  const std::shared_ptr<MemoryPaths> memory_;
  DelayedTasks timers_;
  DelayedTasks endings_;
  DelayedTasks beginnings_;  // these two last: their tasks use the others
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_TRANSFER_ROW_TRANSPORT_H_
