// Joining a leader over gRPC: what `headwaterd --join` does.
#ifndef HEADWATER_SERVER_GROUP_JOIN_LEADER_H_
#define HEADWATER_SERVER_GROUP_JOIN_LEADER_H_

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/group/ranks/rank_worker.h"

namespace headwater::group {

// How often a worker asks over HTTP/2 whether its leader's host is there: a server must allow that (Limits::min_ping_interval).
inline constexpr absl::Duration kWorkerPingInterval = absl::Seconds(60);

struct LeaderAddress {
  std::string address;           // host:port, or unix:PATH for a leader on this host
  std::string ca;                // PEM file of who signed the leader's certificate; empty: no TLS
  std::string certificate, key;  // PEM files that the worker shows; empty: none
  std::string token_file;        // file with the worker's token; empty: none
};

// Where the leader's communicator is: the host of its address; empty, this host, for a Unix socket.
std::string LeaderHost(const std::string& address);

// One call of Join, to its end: RunWorker()'s reason, or why the leader has refused the worker. Files are read anew each time.
// InvalidArgument for files that cannot be read.
absl::Status JoinLeader(const LeaderAddress& leader, const WorkerOptions& options);

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_JOIN_LEADER_H_
