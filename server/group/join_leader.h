// Joins a leader over gRPC, for `headwaterd --join`.
#ifndef HEADWATER_SERVER_GROUP_JOIN_LEADER_H_
#define HEADWATER_SERVER_GROUP_JOIN_LEADER_H_

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/group/ranks/rank_worker.h"

namespace headwater::group {

// The interval of a worker's HTTP/2 pings to its leader: a server must allow it (Limits::min_ping_interval).
inline constexpr absl::Duration kWorkerPingInterval = absl::Seconds(60);

struct LeaderAddress {
  std::string address;           // host:port, or unix:PATH for a leader on this host
  std::string ca;                // PEM file of the authority of the leader's certificate; empty: no TLS
  std::string certificate, key;  // PEM files that the worker shows; empty: none
  std::string token_file;        // file with the worker's token; empty: none
};

// The host of the leader's communicator: that of its address; empty, this host, for a Unix socket.
std::string LeaderHost(const std::string& address);

// Makes one call of Join, to its end. Returns RunWorker()'s reason, or the leader's refusal. Files are read again each time.
// InvalidArgument for unreadable files.
absl::Status JoinLeader(const LeaderAddress& leader, const WorkerOptions& options);

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_JOIN_LEADER_H_
