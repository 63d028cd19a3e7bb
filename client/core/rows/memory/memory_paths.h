// MemoryPaths: how the rows of a call reach a server of the same host without the network.
//
//   std::shared_ptr<MemoryPaths> paths = MemoryPaths::Create(target, channel, client_options, {});
//   auto placement = paths->Place(rows, "", PathDemand::kBest, {deadline, cancel});  // or why not, in one sentence
//   header.set_session_id(placement->session_id());
//   ... header.hidden_rows <- placement->reads()[0], header.grad_hidden_rows <- *placement->write(), and no chunks
//   the server answered OK:            placement->Finish();          // grad_hidden is in the caller's memory now
//   it answered another status:        nothing; the placement serves the next attempt, or goes
//   it answered REGION_NOT_FOUND or SESSION_NOT_FOUND:  placement->Renew(session id, {deadline, cancel}), then the attempt again
//   the call ended without its answer (cancelled, deadline, broken connection):  placement->Abandon(), before the caller is told
//
// Paths. Rows in memory of AllocateRows() are used in place (shared_memory). Other host memory is copied, by several threads, into
// slots of shared regions (shared_memory). Device memory is used in place (cuda_ipc); where its allocation cannot be exported, it
// is copied on the device into memory that can (cuda_ipc, with why_not_better()); where device memory cannot be shared with the
// server at all, through page-locked shared regions (shared_memory, with why_not_better()).
//
// Regions are registered with the server when a call first needs them, once for each session that does. All of it is thread-safe
// but for a single Placement. Placements and rows keep what they need of a MemoryPaths that has gone.
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
#include "client/core/link/channel.h"
#include "client/core/link/wait.h"
#include "client/core/rows/memory/device_read.h"
#include "headwater/client/options.h"

namespace headwater::client::internal {

// In ascending order of preference.
enum class MemoryPath { kSharedMemory, kCudaIpc };
// `shared_memory`, `cuda_ipc`: as in MicroBatchSummary.transport.
const char* MemoryPathName(MemoryPath path);

// Which path a call must take; kBest: the best that works.
enum class PathDemand { kBest, kSharedMemory, kCudaIpc };

// Memory of one tensor of a call.
struct RowsMemory {
  void* data = nullptr;  // not written if the rows are read
  int64_t bytes = 0;     // >= 1
  bool on_device = false;
};

// All tensors of a call. The memory stays the caller's, and stays as it is until the placement has gone.
struct CallRows {
  std::vector<RowsMemory> reads;    // hidden states first
  std::optional<RowsMemory> write;  // grad_hidden
  // CUstream on whose work so far device memory depends; null: the legacy default stream.
  void* stream = nullptr;
};

// As v1::SharedRows.
struct PlacedRows {
  std::string region_id;
  int64_t offset_bytes = 0;
};

class MemoryPathsState;  // what placements and rows keep

// Rows that a call may name. Move-only; gives its slots back when it goes.
class Placement {
 public:
  Placement(Placement&&) noexcept;
  Placement& operator=(Placement&&) noexcept;
  ~Placement();

  // Path of the hidden states.
  MemoryPath path() const;
  // The session in which the regions are registered: it goes into the header.
  const std::string& session_id() const;
  const std::vector<PlacedRows>& reads() const;    // one for each of CallRows::reads
  const std::optional<PlacedRows>& write() const;  // if CallRows::write
  // Why rows were copied on the way, or why device memory took the host's path; one sentence without its full stop, or empty.
  const std::string& why_not_better() const;

  // The server answered OK: copies grad_hidden to where the caller wants it, if it is not there. Blocks for the copy.
  absl::Status Finish();
  // The server has forgotten the regions or the session: registers again, for `session_id` (empty: an own session). The rows stay
  // where they are. Blocks.
  absl::Status Renew(const std::string& session_id, const Wait& wait);
  // The call ended without the server's answer, so that the server may still read and write. Returns when it does no more, or after
  // 10 s without an answer to that; slots that it may still write to are never used again.
  void Abandon();

 private:
  friend class MemoryPaths;
  struct State;
  explicit Placement(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Memory in a shared region, aligned to 4096 bytes, zero at first and whatever was left there when it is used again. Move-only.
class SharedRowsBuffer {
 public:
  SharedRowsBuffer() = default;
  SharedRowsBuffer(SharedRowsBuffer&&) noexcept;
  SharedRowsBuffer& operator=(SharedRowsBuffer&&) noexcept;
  ~SharedRowsBuffer();

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Whether copies between it and a GPU need no thread that waits. Only staging can be.
  bool page_locked() const { return page_locked_; }

 private:
  friend class MemoryPaths;
  std::shared_ptr<MemoryPathsState> paths_;
  std::shared_ptr<void> block_;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  bool page_locked_ = false;
};

struct MemoryPathsOptions {
  // Host memory of all shared regions, > 0.
  int64_t max_shared_bytes = int64_t{16} << 30;
  // Device memory for rows whose own allocation cannot be exported, >= 0.
  int64_t max_device_bytes = int64_t{4} << 30;
  // Threads that copy rows, this one included; 0: half of those that can run at once (ComputeThreads()), at most 8.
  int copy_threads = 0;
};

class MemoryPaths {
 public:
  // Makes no call and no memory yet. `channel` leads to the server; sessions get connections of their own, to `target`.
  static std::shared_ptr<MemoryPaths> Create(const std::string& target, std::shared_ptr<grpc::Channel> channel,
                                             const ClientOptions& client_options, const MemoryPathsOptions& options);
  // Closes the own session, which gives the server's side of all its regions back.
  ~MemoryPaths();
  // Closes the own session before; nothing is placed any more. Idempotent.
  void Close();
  MemoryPaths(const MemoryPaths&) = delete;
  MemoryPaths& operator=(const MemoryPaths&) = delete;

  // Places the rows of a call. `session_id`: the session that the call must name because it owns the contribution; empty: one of
  // this object's own, which is opened when it is first needed. (A call that must have no session, so that nobody owns its
  // contribution, cannot be placed.) Copies rows that lie elsewhere, and records the stream's work so far. Blocks for copies and
  // registrations, as long as `wait` says at most: a server that stands still delays no cancelled call. What it had begun to open
  // or register then serves the next call.
  //
  // FAILED_PRECONDITION / TRANSPORT_UNAVAILABLE: the path does not work for these rows; the message says why in one sentence. What
  // does not depend on the rows is found out once a minute, so that asking again costs nothing. Other errors are those of
  // OpenSession and RegisterSharedMemory.
  absl::StatusOr<Placement> Place(const CallRows& rows, const std::string& session_id, PathDemand demand, const Wait& wait);

  // Memory that Place() uses without a copy. Makes no call. RESOURCE_EXHAUSTED / MEMORY_BUDGET_EXCEEDED beyond max_shared_bytes;
  // FAILED_PRECONDITION / TRANSPORT_UNAVAILABLE where the system has no shared memory.
  absl::StatusOr<SharedRowsBuffer> AllocateRows(int64_t bytes);

  // Host memory through which rows of device memory go by gRPC: page-locked for the device of `device_data` where that can be had,
  // and used again, because fresh and pageable memory costs several times the copy. Errors are AllocateRows()'s.
  absl::StatusOr<SharedRowsBuffer> AllocateStaging(const void* device_data, int64_t bytes);
  // Copies device memory to the host after the work so far of `stream`. Blocks for the copy. TRANSPORT_UNAVAILABLE without CUDA.
  absl::Status CopyToHost(void* to, const void* device_data, int64_t bytes, void* stream);
  // Begins to copy device memory to page-locked staging, after the work so far of `stream`. Blocks for that work. Errors are
  // CopyToHost()'s.
  absl::StatusOr<std::unique_ptr<DeviceRead>> BeginCopyToHost(void* to, const void* device_data, int64_t bytes, void* stream);
  // Copies to the device come after the work so far of `stream` on that device's memory.
  absl::Status OrderCopies(const void* device_data, int64_t bytes, void* stream);
  // Copies host memory to the device beside all its streams' later work; AwaitCopies() tells when it is there. Waits for nothing if
  // the host's memory is page-locked. Errors are CopyToHost()'s.
  absl::Status CopyToDevice(void* device_data, const void* from, int64_t bytes);
  // Blocks until all is there that has been copied to the device of `device_data`.
  absl::Status AwaitCopies(const void* device_data, int64_t bytes);

  // A session that the caller has found to be gone: its registrations are forgotten.
  void Forget(const std::string& session_id);

 private:
  explicit MemoryPaths(std::shared_ptr<MemoryPathsState> state);
  const std::shared_ptr<MemoryPathsState> state_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_MEMORY_MEMORY_PATHS_H_
