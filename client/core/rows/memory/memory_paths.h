// MemoryPaths: the paths by which the rows of a call reach a server of the same host without the network.
//
//   std::shared_ptr<MemoryPaths> paths = MemoryPaths::Create(target, channel, client_options, {});
//   auto placement = paths->Place(memory, "", Transport::kAuto, {deadline, cancel});  // or why not, in one sentence
//   header.set_session_id(placement->session_id());
//   ... header.hidden_rows <- placement->reads()[0].shared, header.grad_hidden_rows <- placement->write()->shared, no chunks
//   the server answered OK:            placement->Finish();          // grad_hidden is in the caller's memory now
//   it answered another status:        nothing; the placement serves the next attempt, or goes
//   it answered REGION_NOT_FOUND or SESSION_NOT_FOUND:  placement->Renew(session id, {deadline, cancel}), then the attempt again
//   the call ended without its answer (cancelled, deadline, broken connection):  placement->Abandon(), then the caller's result
//
// Paths. Rows in memory of AllocateRows() are used in place (shared_memory). Other host memory is copied, by several threads, into
// slots of shared regions (shared_memory). Device memory is used in place (cuda_ipc). Where its allocation is private or cannot be
// exported, it is copied on the device into memory that can be (cuda_ipc). The second case sets why_not_better(). Where device
// memory cannot be shared with the server at all, it goes through page-locked shared regions (shared_memory, why_not_better()).
//
// Regions are registered with the server when a call first needs them, once for each session that does. Everything is thread-safe
// except a single Placement. Placements and rows keep their MemoryPaths.
#ifndef HEADWATER_CLIENT_CORE_ROWS_MEMORY_MEMORY_PATHS_H_
#define HEADWATER_CLIENT_CORE_ROWS_MEMORY_MEMORY_PATHS_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/core/call/exchange.h"
#include "client/core/link/wait.h"
#include "client/core/rows/memory/arena.h"
#include "client/core/rows/memory/copy_threads.h"
#include "client/core/rows/memory/device_memory.h"
#include "client/core/rows/memory/server_regions.h"
#include "client/core/rows/memory/shared_region.h"
#include "headwater/client/options.h"

namespace headwater::client::internal {

class MemoryPaths;

struct PlacedTensor {
  explicit PlacedTensor(const RowsView& rows) : mine(rows) {}

  std::shared_ptr<const Backing> backing() const;

  RowsView mine;
  v1::SharedRows shared;
  std::shared_ptr<const SharedRegion> region;  // one of the two
  std::shared_ptr<const DeviceBacking> device;
  std::shared_ptr<DeviceContext> context;  // of device memory, wherever it was placed
  std::shared_ptr<Arena::Block> block;     // null: in place
};

// Rows that a call may name. Move-only; gives its slots back when it goes.
class Placement {
 public:
  Placement(Placement&&) noexcept = default;
  Placement& operator=(Placement&&) noexcept = default;

  // Path of the hidden states.
  Transport path() const { return reads_.front().device != nullptr ? Transport::kCudaIpc : Transport::kSharedMemory; }
  // The session in which the regions are registered: it goes into the header.
  const std::string& session_id() const { return session_id_; }
  const std::vector<PlacedTensor>& reads() const { return reads_; }    // hidden states, then those teachers that have rows
  const std::optional<PlacedTensor>& write() const { return write_; }  // if CallMemory::result has memory
  // Why rows were copied on the way, or why device memory took the host's path; one sentence without its full stop, or empty.
  const std::string& why_not_better() const { return why_not_better_; }

  // The server answered OK: copies grad_hidden to where the caller wants it, if it is not there. Blocks for the copy.
  absl::Status Finish();
  // The server has forgotten the regions or the session: registers again, for `session_id` (empty: an own session). The rows stay
  // where they are. Blocks.
  absl::Status Renew(const std::string& session_id, const Wait& wait);
  // The call ended without the server's answer, so that the server may still read and write. Returns when the server uses nothing
  // any more, or after 10 s without its answer. Slots that it may still write to are never used again.
  void Abandon();

 private:
  friend class MemoryPaths;

  Placement(std::shared_ptr<MemoryPaths> paths, const CallMemory& memory);
  // Calls visit(tensor, whether it is the write) until an error.
  template <typename Visit>
  absl::Status ForEach(Visit&& visit);
  absl::Status Place(PlacedTensor* tensor, Transport demand, const Wait& wait);
  absl::Status PlaceInHostMemory(PlacedTensor* tensor, const Wait& wait);
  absl::Status PlaceInDeviceMemory(PlacedTensor* tensor, const Wait& wait);
  absl::Status Register(PlacedTensor* tensor, const Wait& wait);
  // The rows' way into their placed memory.
  absl::Status CopyIn(CuStream stream);

  std::shared_ptr<MemoryPaths> paths_;
  std::string session_id_;
  std::vector<PlacedTensor> reads_;
  std::optional<PlacedTensor> write_;
  std::string why_not_better_;
};

// Memory for rows that the library hands out. It is given back with the last copy of this.
struct RowMemory {
  std::shared_ptr<void> owner{};  // keeps the memory, and the object that it is a part of
  unsigned char* data = nullptr;  // aligned to 4096 bytes
  bool shared = false;            // in a region that a server of the same host can map
  bool page_locked = false;       // copies between it and a GPU need no thread that waits; only staging can be
};

// Ordinary memory. RESOURCE_EXHAUSTED.
absl::StatusOr<RowMemory> AllocateOrdinaryRows(int64_t bytes);

struct MemoryPathsOptions {
  // Host memory of all shared regions, > 0.
  int64_t max_shared_bytes = int64_t{16} << 30;
  // Device memory for rows whose own allocation cannot be exported, >= 0.
  int64_t max_device_bytes = int64_t{4} << 30;
  // Threads that copy rows, this one included; 0: half of those that can run at once (ComputeThreads()), at most 8.
  int copy_threads = 0;
};

class MemoryPaths : public std::enable_shared_from_this<MemoryPaths> {
 public:
  // Makes no call and no memory yet. `channel` leads to the server; sessions get connections of their own, to `target`.
  static std::shared_ptr<MemoryPaths> Create(const std::string& target, std::shared_ptr<grpc::Channel> channel,
                                             const ClientOptions& client_options, const MemoryPathsOptions& options);
  // Closes the own session, which gives the server's side of all its regions back.
  ~MemoryPaths() { Close(); }
  // Closes the own session before; nothing is placed any more. Idempotent.
  void Close() { server_.CloseSession(); }
  MemoryPaths(const MemoryPaths&) = delete;
  MemoryPaths& operator=(const MemoryPaths&) = delete;

  // Places the rows of a call, whose hidden states are not empty; they stay as they are until the placement has gone. `session_id`:
  // the session that the call must name because it owns the contribution. Empty: a session of this object, which is opened when it
  // is first needed. (A call without a session, whose contribution has no owner, cannot be placed.) Copies rows that lie elsewhere,
  // and records the stream's work so far. Blocks for copies and registrations, at most for `wait`: a server that hangs delays no
  // cancelled call. Openings and registrations in progress then serve the next call.
  //
  // `demand`: the path that the call must take, kAuto for the best that works; never kGrpc.
  //
  // FAILED_PRECONDITION / TRANSPORT_UNAVAILABLE: the path does not work for these rows; the message says why in one sentence.
  // Properties that do not depend on the rows are found out once a minute, so that asking again costs nothing. Other errors are
  // those of OpenSession and RegisterSharedMemory.
  absl::StatusOr<Placement> Place(const CallMemory& memory, const std::string& session_id, Transport demand, const Wait& wait);

  // Memory that Place() uses without a copy, zero at first and whatever was left there when it is used again. Makes no call.
  // RESOURCE_EXHAUSTED / MEMORY_BUDGET_EXCEEDED beyond max_shared_bytes; FAILED_PRECONDITION / TRANSPORT_UNAVAILABLE where the
  // system has no shared memory.
  absl::StatusOr<RowMemory> AllocateRows(int64_t bytes);

  // Host memory through which rows of device memory go by gRPC. It is page-locked for the device of `device_data` where possible,
  // and reused, because fresh and pageable memory costs several times the copy. Errors are AllocateRows()'s.
  absl::StatusOr<RowMemory> AllocateStaging(const void* device_data, int64_t bytes);
  // The context of device memory, for copies of it. TRANSPORT_UNAVAILABLE without CUDA.
  absl::StatusOr<std::shared_ptr<DeviceContext>> ContextOf(const void* device_data);

  // Host memory, like memcpy(), by this object's threads. Blocks.
  void Copy(void* to, const void* from, int64_t bytes) { copies_.Copy(to, from, bytes); }

  // A session that the caller has found to be gone: its registrations are forgotten.
  void Forget(const std::string& session_id) { server_.Forget(session_id); }

 private:
  friend class Placement;

  MemoryPaths(const std::string& target, std::shared_ptr<grpc::Channel> channel, const ClientOptions& client_options,
              const MemoryPathsOptions& options);

  ServerRegions server_;  // first: the others report their drops to it
  CopyThreads copies_;
  Arena host_;
  DeviceMemory device_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_MEMORY_MEMORY_PATHS_H_
