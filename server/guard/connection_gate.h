// ConnectionGate: the listening sockets of a group of ports, and the bound on the connections that they admit.
//
// A connection counts until its new owner has shut it down (docs/adr/0018-limits.md). Holds hostile_connections_latency_ratio,
// hostile_connections_descriptors_left and hostile_resets_latency_ratio of docs/benchmarks/trust.md.
#ifndef HEADWATER_SERVER_GUARD_CONNECTION_GATE_H_
#define HEADWATER_SERVER_GUARD_CONNECTION_GATE_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/transport/file_descriptor.h"

namespace headwater::guard {

// gRPC's name of a client with that address: ipv4:HOST:PORT, ipv6:%5BHOST%5D:PORT, or with a zone ipv6:%5BHOST%25ZONE%5D:PORT.
// Empty for other families.
std::string PeerName(const sockaddr_storage& address);

// Thread-safe from Start() on.
class ConnectionGate {
 public:
  // Takes over `fd`, a connected socket that does not block, and must shut it down (shutdown(2)) at its end.
  using Take = std::function<void(int listener_fd, int fd)>;

  // At most `max_connections` (>= 1) over all sockets. The clients of one host may cancel `cancels_a_second` (> 0) calls, and ten
  // times as many at once.
  ConnectionGate(int64_t max_connections, double cancels_a_second)
      : max_connections_(max_connections), cancels_a_second_(cancels_a_second) {}
  // Stops. Connections that were handed over stay open.
  ~ConnectionGate();

  // Listens as headwater::ListenTcp() does. Returns the port, chosen by the system if `port` is 0. Unavailable if it cannot listen.
  absl::StatusOr<int> ListenTcp(const std::string& host, int port, Take take);
  // Listens on a Unix socket. Replaces a dead server's file; Unavailable if a process listens on it. The gate removes its file.
  absl::Status ListenUnix(const std::string& path, Take take);

  // Begins to accept. Once, after all Listen*(). Unavailable if the system has no more descriptors.
  absl::Status Start();
  // Stops listening; hands over no connection after it has returned. Idempotent.
  void Stop();

  // A client has cancelled a call. If its host cancels too many, the client is cut off, unless it has cancelled at most 16 itself.
  // `peer`: gRPC's name, ipv4:HOST:PORT or ipv6:%5BHOST%5D:PORT; clients of Unix sockets are unnamed and not counted. `now`, here
  // and below, is observability::MonotonicNow().
  void OnCancelled(const std::string& peer, absl::Time now);
  // Cuts a client off at once, and limits its host's other clients to 16 cancels each for now. `peer`: as in OnCancelled(). For
  // 10 s after a client was cut off, its host's new connections are handed over 250 ms late.
  void Drop(const std::string& peer, absl::Time now);

  int64_t connections() const { return connections_.load(); }
  // Connections closed so far: above `max_connections`, and with too many OnCancelled(), or Drop().
  int64_t refused() const { return refused_.load(); }
  int64_t dropped() const { return dropped_.load(); }

 private:
  struct Listener {
    transport::FileDescriptor socket;
    Take take;
    bool tcp = false;
    std::string path;  // of a Unix socket
    ino_t inode = 0;   // of its file
  };
  struct Peer {
    int duplicate = -1;
    int64_t cancels = 0;
  };
  // The number of calls that the connections of one host may still cancel together.
  struct Host {
    double cancels_left = 0;
    absl::Time last_cancel;
    absl::Time last_cut = absl::InfinitePast();
  };
  struct Held {  // a new connection that waits
    absl::Time due;
    const Listener* listener;
    int fd;
    int duplicate;
  };

  void Run();
  // Accepts waiting connections, a bounded number at once.
  void Accept(const Listener& listener);
  // False if the connection was refused.
  bool LetIn(const Listener& listener, int fd);
  // Closes one waiting connection with the spare descriptor, when the process has no other.
  void RefuseWithTheSpare(int listener_fd);
  void Forget(int duplicate);
  // Hands over those of held_ that are due. Returns the milliseconds until the next one is; -1 if there is none.
  int HandOver(absl::Time now);
  // Ends a connection of the host for its owner and the gate.
  void CutOff(std::map<std::string, Peer>::iterator peer, Host& host, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(peers_mutex_);
  // The host of the peer, with what it may cancel now.
  Host& HostOf(const std::string& peer, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(peers_mutex_);

  const int64_t max_connections_;
  const double cancels_a_second_;
  std::vector<Listener> listeners_;
  transport::FileDescriptor epoll_;
  transport::FileDescriptor stop_;         // eventfd
  transport::FileDescriptor spare_;        // of the thread
  std::map<int, std::string> duplicates_;  // of the thread, with the peers' names; closed with the gate
  std::deque<Held> held_;                  // of the thread, the next one first
  absl::Mutex peers_mutex_;
  std::map<std::string, Peer> peers_ ABSL_GUARDED_BY(peers_mutex_);
  std::map<std::string, Host> hosts_ ABSL_GUARDED_BY(peers_mutex_);  // that have cancelled calls lately
  std::atomic<int64_t> connections_{0};
  std::atomic<int64_t> refused_{0};
  std::atomic<int64_t> dropped_{0};
  std::thread thread_;
};

// Raises the process's limit of open descriptors, as far as allowed, to fit `connections`. Returns the resulting limit.
int64_t MakeRoomForConnections(int64_t connections);
// Descriptors that the process needs for so many connections.
int64_t DescriptorsFor(int64_t connections);

}  // namespace headwater::guard

#endif  // HEADWATER_SERVER_GUARD_CONNECTION_GATE_H_
