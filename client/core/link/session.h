// Session: the server-side lease that owns this client's undecided contributions.
#ifndef HEADWATER_CLIENT_CORE_LINK_SESSION_H_
#define HEADWATER_CLIENT_CORE_LINK_SESSION_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/core/link/channel.h"
#include "client/core/link/wait.h"
#include "headwater/v1/session_service.grpc.pb.h"

namespace headwater::client::internal {

// One session at a time, opened when it is first needed and kept alive by a thread, both on a channel of their own. Thread-safe.
class Session {
 public:
  // `on_lost` runs on the thread that keeps the session alive when the server does not know it any more; it must not block.
  Session(
      std::string target, const ClientOptions& options, std::function<void()> on_lost = [] {})
      : target_(std::move(target)), options_(options), on_lost_(std::move(on_lost)) {}
  // Closes the session, if the server answers within a second.
  ~Session() { Close(std::chrono::system_clock::now() + std::chrono::seconds(1)); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Ends the session on the server, if that answers by then; its lease ends by itself. No other is opened. Idempotent.
  void Close(Deadline deadline);

  // The id of the session, which is opened if there is none. Empty if the options want no session. Blocks. The opening continues
  // when its waiters give up, and serves the next caller.
  absl::StatusOr<std::string> Id(const Wait& wait);

  // The id of the session that is open; empty if none is.
  std::string OpenId() const;

  // The server does not know `id` any more: the next Id() opens another.
  void Forget(const std::string& id);

 private:
  // The session's thread: opens the session when it is wanted, and renews its lease.
  void Run();
  // Both, and Call(), run with the lock, and release it while the server is asked.
  void Open(std::unique_lock<std::mutex>& lock);
  // How long to wait until the next renewal.
  std::chrono::nanoseconds Renew(std::unique_lock<std::mutex>& lock, const std::string& id);
  // Makes a blocking call, which Close() cancels.
  template <typename Request, typename Response>
  absl::Status Call(std::unique_lock<std::mutex>& lock, Deadline deadline, const Request& request, Response* response,
                    grpc::Status (v1::SessionService::Stub::*method)(grpc::ClientContext*, const Request&, Response*));

  const std::string target_;
  const ClientOptions options_;
  const std::function<void()> on_lost_;

  mutable std::mutex mutex_;
  std::condition_variable_any changed_;
  std::unique_ptr<v1::SessionService::Stub> stub_;  // made with the first opening
  bool is_wanted_ = false;                          // an opening is to be made, or under way
  Deadline opening_deadline_{};
  int64_t opening_count_ = 0;    // that have ended
  absl::Status opening_status_;  // of the last one
  std::string id_;
  std::chrono::nanoseconds lease_{0};
  grpc::ClientContext* call_ = nullptr;  // the one that is under way
  bool stopping_ = false;
  std::thread thread_;  // runs from the first opening on
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_SESSION_H_
