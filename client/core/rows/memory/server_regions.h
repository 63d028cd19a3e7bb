// ServerRegions: the client's memory as the server knows it: which backing is which region of which session.
#ifndef HEADWATER_CLIENT_CORE_ROWS_MEMORY_SERVER_REGIONS_H_
#define HEADWATER_CLIENT_CORE_ROWS_MEMORY_SERVER_REGIONS_H_

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
#include "client/core/link/channel.h"
#include "client/core/link/session.h"
#include "client/core/link/wait.h"
#include "client/core/rows/memory/device_memory.h"
#include "client/core/rows/memory/shared_region.h"
#include "headwater/v1/session_service.grpc.pb.h"

namespace headwater::client::internal {

// Thread-safe. A blocking call ends with its Wait, CANCELLED or DEADLINE_EXCEEDED, whether the server answers or not. A
// registration that the server may already be making continues by itself, and serves the next call that needs it.
class ServerRegions {
 public:
  // Cancels calls without waiters, and waits for their end.
  ~ServerRegions();
  ServerRegions(const ServerRegions&) = delete;
  ServerRegions& operator=(const ServerRegions&) = delete;
  // Makes no call yet.
  ServerRegions(const std::string& target, std::shared_ptr<grpc::Channel> channel, const ClientOptions& options);

  // Closes the own session, and its regions with it; nothing is registered any more.
  void CloseSession();

  // `session_id`, or the own session's if it is empty.
  absl::StatusOr<std::string> SessionOr(const std::string& session_id, const Wait& wait);

  // OK if host memory can be passed to this server, as far as is known; TRANSPORT_UNAVAILABLE says why not. `named` gets whether it
  // is passed by name.
  absl::Status HostMemoryWorks(const Wait& wait, bool* named);
  // Whether the server can use device memory.
  absl::Status DeviceMemoryWorks(const Wait& wait);
  // The last result of HostMemoryWorks(); makes no call.
  bool PassesByName() const;

  // The region of a backing in a session, registered if it is not. TRANSPORT_UNAVAILABLE: the server cannot use it, or has no room
  // for it; SESSION_NOT_FOUND; UNAVAILABLE and the like, as calls fail.
  absl::StatusOr<std::string> Register(const std::string& session_id, const SharedRegion& region, const Wait& wait);
  absl::StatusOr<std::string> Register(const std::string& session_id, const DeviceBacking& backing, const Wait& wait);

  // Gives the backings' regions back in all sessions, all at once. `until`: waits until the server uses them no more, also those
  // that another call gives back now (false: it may still use one). Otherwise the answers are not awaited.
  bool Drop(Backings backings, std::optional<Deadline> until);
  // The server does not know `region_id`, or another region of the same call. The backing is registered again when it is needed, if
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

  // The answers that a Drop() waits for. Guarded by farewells_mutex_.
  struct Answers {
    int missing = 0;
    bool unused = true;  // as far as has been answered
  };

  // A call that gives a region back. It belongs to this object, so that gRPC's own threads never hold the last reference to a
  // channel: they cannot shut gRPC down.
  struct Farewell {
    grpc::ClientContext context;
    v1::UnregisterSharedMemoryRequest request;
    v1::UnregisterSharedMemoryResponse response;
    Answers* answers = nullptr;  // null: without a waiter
    bool over = false;           // guarded by farewells_mutex_
  };

  // The registration of a backing in a session, from its first step to its answer. It belongs to this object for the same reason.
  struct Registration {
    grpc::ClientContext context;
    v1::RegisterSharedMemoryRequest request;
    v1::RegisterSharedMemoryResponse response;
    // Guarded by mutex_.
    bool sent = false;
    bool unwanted = false;  // the backing or the session has gone meanwhile: the region is given back
    bool over = false;
    bool alone = false;   // it failed because of the Wait of the call that made it: others try again
    absl::Status status;  // once it is over
  };

  using Region = std::pair<std::string, std::string>;  // session, id
  void GiveBack(const std::vector<Region>& regions, Deadline deadline, Answers* answers) noexcept;
  void Over(Farewell* farewell, const grpc::Status& answer);

  absl::StatusOr<std::shared_ptr<const v1::ServerInfo>> Info(const Wait& wait, bool again);
  // OK, or the known obstacle, or problem(info): a sentence, empty if there is none.
  template <typename Problem>
  absl::Status Works(std::optional<Finding>* known, const Wait& wait, Problem problem);
  absl::StatusOr<std::string> Token(const SharedRegion& region, const Wait& wait);
  template <typename Fill>
  absl::StatusOr<std::string> RegisterOnce(const std::string& session_id, const Backing& backing, const Wait& wait, Fill&& fill);
  void Send(const Key& key, Registration* registration, Deadline deadline);
  void Registered(const Key& key, Registration* registration, const grpc::Status& answer);
  // Nothing became of it.
  void End(Registration* registration, absl::Status status, bool alone);
  static Finding Unusable(const std::string& why);

  const std::string target_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::SessionService::Stub> stub_;

  mutable std::mutex mutex_;
  std::condition_variable_any changed_;  // a registration is over, a backing has been given back
  bool closed_ = false;
  std::shared_ptr<Session> session_;
  std::shared_ptr<const v1::ServerInfo> info_;
  std::optional<Finding> host_problem_;
  std::optional<Finding> device_problem_;
  std::map<Key, std::string> regions_;
  std::map<Key, std::shared_ptr<Registration>> registrations_;  // under way, and some that are over
  std::map<uint64_t, int> dropping_;                            // waits for the server, by Backing::key()
  std::map<uint64_t, Finding> refused_;                         // by Backing::key()

  std::mutex farewells_mutex_;
  std::condition_variable farewell_over_;
  std::list<Farewell> farewells_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_MEMORY_SERVER_REGIONS_H_
