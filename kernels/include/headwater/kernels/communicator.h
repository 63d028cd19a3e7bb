// Communicator: the only place where the shards of a head meet.
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

// What one rank has spent in collectives so far; the rest of its time it did something else.
struct CommunicatorTimes {
  std::chrono::nanoseconds waiting{0};        // until all other ranks were in the same call
  std::chrono::nanoseconds communicating{0};  // from then until this rank's result was there
};

// Memory that ReduceScatterSum() takes on each rank, for each rank.
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
  // The parts of a buffer that all ranks have alike: part r is [bounds[r], bounds[r + 1]), the world_size + 1 bounds ascend and are
  // the same on all ranks. Of bounds in elements: data's part `rank` becomes the sum over the ranks' data there, added in rank
  // order. The other parts, whose elements cross the network once, are left as they were.
  virtual absl::Status ReduceScatterSum(float* data, absl::Span<const int64_t> bounds) = 0;
  // Of bounds in bytes: data's other parts become what their ranks have there.
  virtual absl::Status AllGatherParts(void* data, absl::Span<const int64_t> bounds) = 0;
  // Makes every call of every rank, now waiting or later, return `reason` (an error). For failures; idempotent; any thread.
  virtual void Abort(const absl::Status& reason) = 0;
  // OK until then; from then on the error that calls return. Never waits; any thread.
  virtual absl::Status status() const = 0;
  // Also of the call in progress. Any thread.
  virtual CommunicatorTimes times() const = 0;
};

// One communicator for each of `world_size` threads of this process.
std::vector<std::unique_ptr<Communicator>> MakeInProcessCommunicators(int32_t world_size);

// Where a rank of several processes waits for the others: every two of them get a TCP connection. What travels is neither encrypted
// nor checked: for networks whose hosts are trusted.
class TcpMeeting {
 public:
  virtual ~TcpMeeting() = default;
  // Listens on `host`, an IPv4 or IPv6 address ("0.0.0.0" and "[::]": all of both), at a port that the system picks. Unavailable.
  static absl::StatusOr<std::unique_ptr<TcpMeeting>> Listen(const std::string& host);
  virtual int32_t port() const = 0;

  // Connects this rank with all others, once. addresses[r]: where rank r listens, "host:port" with an IP address ("[...]:port" for
  // IPv6) or a name, or ":port" on this host; this rank's own is not looked at. `secret`: random, the same on all ranks and nowhere
  // else, 32 bytes. Every two ranks show each other that they know it, without telling it to anybody; whoever does not is sent
  // away, and who says nothing keeps nobody waiting. Fails with kEngineFailed if not all are connected within `setup_timeout`, or
  // if a rank is refused; with kCancelled soon after `cancelled`, which is asked on this thread several times a second, has
  // returned true. A call of the communicator fails when a connection is lost or when the ranks did not make the same call. Then
  // the communicator is aborted, and with it those of the others, which lose their connections to this one. A call waits for a rank
  // that says nothing until Abort().
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Meet(
      int32_t rank, const std::vector<std::string>& addresses, const std::string& secret, std::chrono::milliseconds setup_timeout,
      const std::function<bool()>& cancelled = [] { return false; }) = 0;
};

}  // namespace headwater

#endif  // HEADWATER_KERNELS_COMMUNICATOR_H_
