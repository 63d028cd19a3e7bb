// ServerRegions: the client's memory as the server knows it: which backing is which region of which session.
#ifndef HEADWATER_CLIENT_SRC_MEMORY_SERVER_REGIONS_H_
#define HEADWATER_CLIENT_SRC_MEMORY_SERVER_REGIONS_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/src/channel.h"
#include "client/cpp/src/memory/device_memory.h"
#include "client/cpp/src/memory/shared_region.h"
#include "client/cpp/src/session.h"
#include "headwater/v1/session_service.grpc.pb.h"

namespace headwater::client::internal {

// FAILED_PRECONDITION / TRANSPORT_UNAVAILABLE with a sentence.
absl::Status TransportUnavailable(const std::string& why);

// Thread-safe.
class ServerRegions {
 public:
  // Cancels what nobody waits for, and waits for its end.
  ~ServerRegions();
  ServerRegions(const ServerRegions&) = delete;
  ServerRegions& operator=(const ServerRegions&) = delete;
  // Makes no call yet.
  ServerRegions(const std::string& target, std::shared_ptr<grpc::Channel> channel, const ClientOptions& options);

  // Closes the own session; nothing can be registered in it any more.
  void CloseSession();

  // `session_id`, or the own session's if it is empty.
  absl::StatusOr<std::string> SessionOr(const std::string& session_id, Deadline deadline);

  // OK if host memory can be passed to this server, as far as is known; TRANSPORT_UNAVAILABLE says why not. `named` gets whether it
  // is passed by name.
  absl::Status HostMemoryWorks(Deadline deadline, bool* named);
  // The same for device memory.
  absl::Status DeviceMemoryWorks(Deadline deadline);
  // What HostMemoryWorks() found out last; makes no call.
  bool PassesByName() const;

  // The region of a backing in a session, registered if it is not. TRANSPORT_UNAVAILABLE: the server cannot use it, or has no room
  // for it; SESSION_NOT_FOUND; UNAVAILABLE and the like, as calls fail.
  absl::StatusOr<std::string> Register(const std::string& session_id, const SharedRegion& region, Deadline deadline);
  absl::StatusOr<std::string> Register(const std::string& session_id, const DeviceBacking& backing, Deadline deadline);

  // Gives a backing's regions back in all sessions. `wait`: until the server uses them no more (false: it may still); otherwise the
  // answers are not waited for.
  bool Drop(const Backing& backing, std::optional<Deadline> wait);
  // The server does not know `region_id`, or another region of the same call: the backing is registered again when it is needed, if
  // that has not been done since.
  void Lost(const std::string& session_id, const Backing& backing, const std::string& region_id);
  // The session has ended: its registrations are made again when they are needed.
  void Forget(const std::string& session_id);

 private:
  using Key = std::pair<std::string, uint64_t>;  // session, Backing::key()
  // A finding that is good for a while.
  struct Finding {
    absl::Status status;
    std::chrono::steady_clock::time_point end;
  };

  // A call that nobody waits for. It belongs to this object, so that gRPC's own threads never hold the last reference to a channel:
  // they cannot shut gRPC down.
  struct Farewell {
    grpc::ClientContext context;
    v1::UnregisterSharedMemoryRequest request;
    v1::UnregisterSharedMemoryResponse response;
    bool over = false;  // guarded by farewells_mutex_
  };

  using Region = std::pair<std::string, std::string>;  // session, id
  void GiveBack(const std::vector<Region>& regions);

  absl::StatusOr<v1::ServerInfo> Info(Deadline deadline, bool again);
  absl::StatusOr<std::string> Token(const SharedRegion& region, Deadline deadline);
  template <typename Fill>
  absl::StatusOr<std::string> RegisterOnce(const std::string& session_id, const Backing& backing, Deadline deadline, Fill&& fill);
  static Finding Unusable(const std::string& why);

  const std::string target_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::SessionService::Stub> stub_;
  std::mutex registering_;  // one registration at a time; taken before mutex_

  mutable std::mutex mutex_;
  std::shared_ptr<Session> session_;
  std::optional<v1::ServerInfo> info_;
  std::optional<Finding> host_problem_;
  std::optional<Finding> device_problem_;
  std::map<Key, std::string> regions_;
  std::map<uint64_t, Finding> refused_;  // by Backing::key()

  std::mutex farewells_mutex_;
  std::condition_variable farewell_over_;
  std::list<Farewell> farewells_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_MEMORY_SERVER_REGIONS_H_
