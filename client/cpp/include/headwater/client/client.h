// Client: a connection to a Headwater server.
//
//   absl::StatusOr<Client> client = Client::Connect("localhost:50051");
//   absl::StatusOr<Head> head = client->CreateHead("student", spec);
//   absl::Status uploaded = head->UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight)).status();
//   absl::StatusOr<LossResult> result =
//       head->CrossEntropy(RowsView::Float32(hidden, hidden_size), targets, {}, {.step = 0, .micro_batch = 0}).Get();
//
// Repetitions. Calls whose repetition is safe are repeated by RetryPolicy, and never by gRPC. They are repeated after UNAVAILABLE
// (the connection was cut, the server starts or drains) and where the server has no room. No room means QUEUE_FULL,
// IN_FLIGHT_BYTES_EXCEEDED, ORDERED_WINDOW_FULL, and STAGING_FULL where another session has the slot. A micro-batch is sent again
// under the next attempt's number. Commit, Discard, Seal, Apply, DiscardGradient, AddGradient and ReplaceWeights are sent again
// with the same arguments, by which the server recognises them. UploadWeights resumes where it was cut, until its last byte is on
// its way. Some calls would have another effect the second time: CreateHead, AttachHead, DeleteHead, Take(only_if_current),
// Restore, LoadWeights, Save without `overwrite`. They are repeated only after an answer which says that nothing was done. Wrong
// arguments, conflicts, fenced epochs and lost steps are final at once.
//
// Sessions. A session owns this client's undecided micro-batches, which are discarded when it ends. The first CommitMode::kExplicit
// opens it (with replay: Connect()), a thread renews its lease on a connection of its own, and it closes with the connection. A
// session that has ended meanwhile (its lease passed, or the server restarted) is replaced at the next explicit call, with replay
// at once.
//
// Paths of rows. A micro-batch takes the best path that works (ClientOptions::transport demands one). That is device memory in
// place on GPUs of the server's host, host memory that both sides share, else gRPC over several connections.
// MicroBatchResult::transport names the path, stats() the reason why it was not a better one. The first time, a line on the
// standard error output also gives the reason.
//
// Replay. With ClientOptions::replay_bytes the client keeps what it sends: micro-batches, decisions, gradients, and the calls that
// close steps. After a restart of the server, heads come back at the open step, or at an older one. If that step is still kept, the
// client takes the head, repeats the later calls and continues; the caller sees a slow call. One trainer of a run takes the head
// and the others join it; where another run has taken it, EPOCH_FENCED is final. Otherwise STEP_LOST is (RestoredFrom()), and its
// message says why. A step with micro-batches of a joined teacher is not kept: the teacher's rows were another's. Several calls in
// flight are repeated in the order in which they had succeeded. Handles that were opened separately on one epoch of a head end at
// one new epoch. A client that makes no call repeats its part as well: other trainers may wait for it. A call follows eight
// restarts at most. The server is away if it cannot be reached, cuts the call off, or says DRAINING or STARTING. A call that may be
// repeated is then tried again, whatever RetryPolicy::max_attempts says, at most a second apart unless the server asks for more.
// About a second before its deadline it is UNAVAILABLE. CheckHealth() does not wait.
#ifndef HEADWATER_CLIENT_CLIENT_H_
#define HEADWATER_CLIENT_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/client/error.h"
#include "headwater/client/head.h"
#include "headwater/client/options.h"
#include "headwater/client/teacher.h"
#include "headwater/client/types.h"

namespace headwater::client {

// A connection. Cheap to copy (copies share it); thread-safe. Heads and futures keep the connection alive by themselves. One that
// was moved from may only be assigned to or destroyed.
class Client {
 public:
  // Connects to `target`: `host:port` (an IPv6 host in brackets; before it gRPC's dns:, ipv4: or ipv6: if need be),
  // `unix:/path/to/socket` or `unix-abstract:name`. Waits until the server is reached; a server that is still starting
  // is waited for. HTTP proxies of the environment are not used.
  //
  // INVALID_ARGUMENT if the target is none of these, its path has more than 107 bytes, or an option is out of range. A client's key
  // that does not belong to its certificate is one. UNAVAILABLE, with gRPC's reason, if no server answers within `connect_timeout`.
  // A name that is not resolved and a TLS handshake that fails are tried for a quarter of it.
  static absl::StatusOr<Client> Connect(const std::string& target, const ClientOptions& options = {});

  // Names are full (`tenants/{tenant}/heads/{head}`) or short (`student` is tenants/default/heads/student, if that is the tenant).

  // Makes a head, without weights: upload or load them next. ALREADY_EXISTS / HEAD_ALREADY_EXISTS; RESOURCE_EXHAUSTED /
  // MEMORY_BUDGET_EXCEEDED with the memory plan in the message.
  absl::StatusOr<Head> CreateHead(const std::string& name, const HeadSpec& spec, const CallOptions& options = {});
  // Makes a head, or opens the one of that name if its specification is the same except for initial_step; Head::created() says
  // which. So all ranks, and a trainer that was started again, can make the same call. UNAVAILABLE if the answer was lost: whether
  // the head is new, and wants its weights, is not known then. ALREADY_EXISTS / HEAD_SPEC_MISMATCH.
  absl::StatusOr<Head> AttachHead(const std::string& name, const HeadSpec& spec, const CallOptions& options = {});
  // The memory plan of a head that CreateHead() would make; makes nothing. The head fits if its plan's total_bytes are at most its
  // available_bytes. Errors of the specification are those of CreateHead().
  absl::StatusOr<HeadInfo> PlanHead(const std::string& name, const HeadSpec& spec, const CallOptions& options = {});
  // Takes up a head that exists, at its current epoch. NOT_FOUND / HEAD_NOT_FOUND.
  absl::StatusOr<Head> OpenHead(const std::string& name, const CallOptions& options = {});
  // All heads of the tenant, by name. One deadline for all pages that the server makes of them.
  absl::StatusOr<std::vector<HeadInfo>> ListHeads(const CallOptions& options = {});
  // The checkpoints under a head's name, newest first; damaged ones last. The head need not exist. One deadline for all pages.
  // FAILED_PRECONDITION / STORAGE_NOT_CONFIGURED.
  absl::StatusOr<std::vector<CheckpointInfo>> ListCheckpoints(const std::string& head, const CallOptions& options = {});
  // Removes one of them from the server's disk; false if there is none. The head need not exist.
  absl::StatusOr<bool> DeleteCheckpoint(const std::string& head, const std::string& checkpoint, const CallOptions& options = {});
  // Frees a head whatever its epoch; its checkpoints stay. `force`: even with undecided contributions or a non-empty open step
  // (FAILED_PRECONDITION / HEAD_IN_USE otherwise).
  absl::Status DeleteHead(const std::string& name, bool force = false, const CallOptions& options = {});

  // Memory for rows in a region that a server of the same host can map; ordinary memory where the system has none. Makes no call.
  // INVALID_ARGUMENT for sizes that are negative or overflow; RESOURCE_EXHAUSTED if there is no memory.
  absl::StatusOr<RowsBuffer> AllocateRows(int64_t row_count, int64_t hidden_size, DataType data_type);
  // The paths of the rows, and their traffic so far.
  TransportStats stats() const;

  // For a teacher's process: sends rows for micro-batches that name the same key (JoinedTeacherOptions). Calls nothing yet.
  // `total_rows` >= 1: rows of the joined set.
  Teacher OpenTeacher(const std::string& join_key, int64_t total_rows);

  absl::StatusOr<ServerInfo> GetServerInfo(const CallOptions& options = {});
  // grpc.health.v1. An empty `service` is the server as a whole. A service that the server does not know is kServiceUnknown.
  absl::StatusOr<HealthStatus> CheckHealth(const std::string& service = "", const CallOptions& options = {});

 private:
  explicit Client(std::shared_ptr<internal::Core> core);

  std::shared_ptr<internal::Core> core_;
};

}  // namespace headwater::client

#endif  // HEADWATER_CLIENT_CLIENT_H_
