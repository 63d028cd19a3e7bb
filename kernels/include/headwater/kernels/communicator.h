// Communicator: the only exchange between the shards of a head.
//
// Each executor (a thread with a shard, a GPU, a process) holds one rank. All ranks make the same calls in the same order
// with equal counts; a call returns when this rank's result is there. Reductions add in rank order, so results do not depend on
// timing. Buffers are the caller's.
#ifndef HEADWATER_KERNELS_COMMUNICATOR_H_
#define HEADWATER_KERNELS_COMMUNICATOR_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace headwater {

// A rank's times in collectives so far.
struct CommunicatorTimes {
  std::chrono::nanoseconds waiting{0};        // until all other ranks were in the same call
  std::chrono::nanoseconds communicating{0};  // from then until this rank's result was there
};

// Memory that ReduceScatterSum() takes on a rank, for each rank of the group.
inline constexpr int64_t kReduceScatterBytes = int64_t{1} << 20;

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int32_t rank() const = 0;
  virtual int32_t world_size() const = 0;

  // data[i] becomes the sum (the maximum; NaN if any rank has NaN) over the ranks' data[i], on every rank.
  virtual absl::Status AllReduceSum(float* data, int64_t count) = 0;
  virtual absl::Status AllReduceSum(double* data, int64_t count) = 0;
  virtual absl::Status AllReduceMax(double* data, int64_t count) = 0;
  // out[r * count + i] becomes rank r's data[i].
  virtual absl::Status AllGather(const double* data, int64_t count, double* out) = 0;
  // Sums over the ranks' data, scattered by `bounds` in elements: world_size + 1 ascending numbers, the same on all ranks. Part r
  // is [bounds[r], bounds[r + 1]). This rank's part becomes the sum over the ranks' data there, in rank order; the other parts,
  // whose elements cross the network once, stay unchanged.
  virtual absl::Status ReduceScatterSum(float* data, absl::Span<const int64_t> bounds) = 0;
  // Gathers the ranks' parts: part r of `data`, by `bounds` in bytes, becomes rank r's.
  virtual absl::Status AllGatherParts(void* data, absl::Span<const int64_t> bounds) = 0;
  // Makes every call of every rank, now waiting or later, return `reason` (an error). For failures; idempotent; any thread.
  virtual void Abort(const absl::Status& reason) = 0;
  // OK until an abort; afterwards the error that calls return. Never waits; any thread.
  virtual absl::Status status() const = 0;
  // Includes the call in progress. Any thread.
  virtual CommunicatorTimes times() const = 0;
};

// One communicator for each of `world_size` threads of this process.
std::vector<std::unique_ptr<Communicator>> MakeInProcessCommunicators(int32_t world_size);

// Connects the ranks of several processes: every two of them get a TCP connection. Data is neither encrypted nor authenticated: for
// networks whose hosts are trusted.
class TcpMeeting {
 public:
  virtual ~TcpMeeting() = default;
  // Listens on `host`, an IPv4 or IPv6 address ("0.0.0.0" and "[::]": all of both), at a port that the system picks. Unavailable.
  static absl::StatusOr<std::unique_ptr<TcpMeeting>> Listen(const std::string& host);
  virtual int32_t port() const = 0;

  // Connects this rank with all others, once. addresses[r]: rank r's listener, "host:port" or ":port" on this host. The host is an
  // IP address ("[...]:port" for IPv6) or a name; this rank's own is ignored. `secret`: 32 random bytes, shared only by the ranks.
  // Every two ranks prove to each other that they know it, without sending it. Other callers are refused, and silent ones delay no
  // rank. kEngineFailed if not all are connected within `setup_timeout`, or if a rank is refused. kCancelled soon after
  // `cancelled`, called on this thread several times a second, has returned true. A call of the communicator fails when a
  // connection is lost or when the ranks did not make the same call. The communicator is aborted then, and the others' with it, as
  // they lose their connections to this rank. A call waits for a silent rank until Abort().
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Meet(
      int32_t rank, const std::vector<std::string>& addresses, const std::string& secret, std::chrono::milliseconds setup_timeout,
      const std::function<bool()>& cancelled = [] { return false; }) = 0;
};

}  // namespace headwater

#endif  // HEADWATER_KERNELS_COMMUNICATOR_H_
