// Every metric family of the server, in this one file and its .cc; docs/metrics.md is printed from the same table.
//
// Labels are bounded enumerations that are declared here; clients cannot choose one. Families are made once, children when they
// are first needed and then kept: recording costs one atomic addition. Thread-safe.
#ifndef HEADWATER_SERVER_OBSERVABILITY_METRICS_H_
#define HEADWATER_SERVER_OBSERVABILITY_METRICS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "headwater/kernels/error.h"

namespace headwater::observability {

// X(name): every RPC, as label `method`.
#define HEADWATER_RPC_METHODS(X) \
  X(ComputeLoss)                 \
  X(TransferRows)                \
  X(StreamTeacher)               \
  X(CommitMicroBatch)            \
  X(DiscardMicroBatch)           \
  X(CreateHead)                  \
  X(GetHead)                     \
  X(ListHeads)                   \
  X(DeleteHead)                  \
  X(TakeHead)                    \
  X(UploadWeights)               \
  X(LoadWeights)                 \
  X(DownloadWeights)             \
  X(GetStep)                     \
  X(SealStep)                    \
  X(ApplyOptimizerStep)          \
  X(DiscardGradient)             \
  X(DownloadGradient)            \
  X(GetGradientNorm)             \
  X(AddGradient)                 \
  X(SaveCheckpoint)              \
  X(ListCheckpoints)             \
  X(RestoreCheckpoint)           \
  X(DeleteCheckpoint)            \
  X(GetServerInfo)               \
  X(OpenSession)                 \
  X(KeepAlive)                   \
  X(CloseSession)                \
  X(Join)                        \
  X(RegisterSharedMemory)        \
  X(UnregisterSharedMemory)

enum class RpcMethod {
#define HEADWATER_RPC_ENUMERATOR(name) k##name,
  HEADWATER_RPC_METHODS(HEADWATER_RPC_ENUMERATOR)
#undef HEADWATER_RPC_ENUMERATOR
      kCount,
};

// `ComputeLoss` and the like. The pointer is static.
const char* RpcMethodName(RpcMethod method);

// `OK`, `INVALID_ARGUMENT`, ... The pointer is static.
const char* CanonicalCodeName(absl::StatusCode code);

enum class Direction { kIn, kOut, kCount };
enum class Transport { kGrpc, kSharedMemory, kCudaIpc, kCount };
// As transport::RegionKind: sealed memory that was passed as a descriptor, files under /dev/shm, device memory.
inline constexpr size_t kRegionKindCount = 3;
enum class LossKind { kCrossEntropy, kJensenShannon, kCount };
enum class MicroBatchOutcome {
  kCommitted,
  kStaged,
  kHeld,
  kEvaluated,
  kReplayed,
  kDiscarded,
  kConflict,
  kSuperseded,
  kRefused,
  kCancelled,
  kCount
};
enum class StepOutcome { kApplied, kDiscarded, kReplaced, kCount };
enum class SessionEnd { kClosed, kExpired, kCount };
enum class RankActivity { kCompute, kWait, kCommunicate, kCount };
enum class TraceOutcome { kWritten, kLeftOut, kFailed, kCount };
// The server's own certificates, or the authorities of --tls_client_ca.
enum class CertificateUse { kServer, kClientCa, kCount };
enum class Phase { kQueue, kUpload, kCompute, kDownload, kCommit };

// `grpc`, `shared_memory`, `cuda_ipc`: the values of MicroBatchSummary.transport too. The pointer is static.
const char* TransportName(Transport transport);

// Limits that gauges are compared with; constant.
struct GaugeLimits {
  int64_t queue_depth = 0;
  int64_t in_flight_bytes = 0;
  int64_t connections = 0;
};

// Values that are read from the server at each scrape.
struct GaugeReadings {
  int64_t head_count = 0;
  int64_t queue_depth = 0;
  int64_t in_flight_bytes = 0;
  int64_t upload_bytes = 0;
  int64_t held_bytes = 0;
  int64_t join_bytes = 0;
  int64_t used_row_bytes = 0;
  int64_t idle_row_bytes = 0;
  int64_t session_count = 0;
  int64_t waiting_calls = 0;
  int64_t abandoned_calls = 0;
  int64_t connections = 0;
  int64_t waiting_contributions = 0;
  std::array<int64_t, kRegionKindCount> region_count{};
  std::array<int64_t, kRegionKindCount> region_bytes{};
  int64_t memory_budget_bytes = 0;
  bool serving = false;
  // Age of the oldest change of a trainable head that no checkpoint has, 0 without such a change; nullopt: no checkpoints.
  std::optional<absl::Duration> unsaved;
  absl::Duration busy;  // since the start: time in which micro-batches, or their commits, were in the engine
  // By rank of a group of processes: time since the start, by RankActivity.
  std::vector<std::array<absl::Duration, static_cast<size_t>(RankActivity::kCount)>> rank_times;
  std::map<std::string, int64_t> planned_bytes;  // by purpose of MemoryPlan; unknown purposes are counted as `other`
};

class Metrics {
 public:
  // `version` and `engine` label the build information.
  Metrics(const std::string& version, const std::string& engine);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // One finished RPC. A failed one is also counted by its reason.
  void CountRequest(RpcMethod method, const absl::Status& status, absl::Duration duration);
  // Tensor bytes of micro-batches, by the path that they took.
  void CountBytes(Direction direction, int64_t bytes, Transport transport = Transport::kGrpc);
  // A micro-batch that succeeded, by the path of its hidden states.
  void CountTransport(Transport transport);
  void CountTokens(LossKind loss, int64_t valid_tokens);
  // Floating point operations (a multiply-add is two) of the matrix products that a micro-batch needs at least.
  void CountProductFlops(double flops);
  // How full the token chunks of a micro-batch were, in (0, 1].
  void ObserveChunkFill(double ratio);
  void CountNonFiniteRows(int64_t rows);
  void CountMicroBatch(MicroBatchOutcome outcome);
  void CountCommit();  // a contribution went into an accumulator: EAGER, or by CommitMicroBatch
  void CountStep(StepOutcome outcome);
  void CountSessionEnds(SessionEnd how, int64_t sessions);
  void CountSessionDiscards(SessionEnd how, int64_t micro_batches);  // undecided when their session ended
  void CountRestoredHeads(int64_t heads);
  void CountSkippedCheckpoints(int64_t checkpoints);  // damaged, at the start
  void CountExpiredHeads(int64_t heads);
  // A micro-batch took its turn before it was complete; a stalled one gave it up because its rows did not come.
  void CountEarlyStart();
  void CountStall();
  void CountTrace(TraceOutcome outcome);
  void CountRefusedConnection();
  void CountDroppedConnection();
  void ObservePhase(Phase phase, absl::Duration duration);

  // Floating point operations a second of bare matrix products on this machine: what utilisation is measured against. Without it
  // the metric is not served.
  void SetProductRate(double flops_per_second);
  void SetLimits(const GaugeLimits& limits);
  // The first end of the certificates of a file. Without it the metric is not served.
  void SetCertificateEnd(CertificateUse use, absl::Time end);

  // `read` is called at every scrape, on the scraping thread, until it is replaced. Empty: no readings.
  void SetGaugeSource(std::function<GaugeReadings()> read);

  // A TLS handshake has failed. Counted for the whole process, over all servers.
  static void CountTlsHandshakeFailure();

  // A scrape's answer, in Prometheus' text format.
  std::string Serialize() const;

  // Serves /metrics on `address` (host:port; port 0 picks one). At most once. Returns the port; an error says why it cannot listen.
  absl::StatusOr<int> Listen(const std::string& address);

 private:
  struct Families;
  std::unique_ptr<Families> families_;
};

// The contents of docs/metrics.md.
std::string MetricsDocument();

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_METRICS_H_
