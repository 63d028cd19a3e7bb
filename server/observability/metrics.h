// Every metric family of the server, in this one table; docs/metrics.md is printed from it.
//
// Labels are bounded enumerations that are declared here; clients cannot choose one. Families are made once, children when they
// are first needed and then kept: recording costs one atomic addition. Thread-safe.
#ifndef HEADWATER_SERVER_OBSERVABILITY_METRICS_H_
#define HEADWATER_SERVER_OBSERVABILITY_METRICS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "headwater/kernels/error.h"

struct MHD_Daemon;

namespace headwater::observability {

// Answers GET and HEAD of /metrics on a thread of its own. A stalled client delays neither other clients nor the destructor.
// prometheus-cpp's own exposer is not used: civetweb gives its threads stacks of 100 KiB. OpenBLAS' thread-local memory takes 60 of
// them, and a scrape needed nearly all of the rest.
class MetricsEndpoint {
 public:
  static constexpr unsigned kMaxConnections = 32;      // to one address; more wait
  static constexpr unsigned kIdleTimeoutSeconds = 10;  // of a connection without traffic

  // `address` is host:port, as for ListenTcp(); port 0 picks one. `page` makes the text of a scrape; the endpoint's thread calls it
  // until the destructor returns. UNAVAILABLE: cannot listen there; INVALID_ARGUMENT: not an address.
  static absl::StatusOr<std::unique_ptr<MetricsEndpoint>> Listen(const std::string& address, std::function<std::string()> page);
  ~MetricsEndpoint();
  MetricsEndpoint(const MetricsEndpoint&) = delete;
  MetricsEndpoint& operator=(const MetricsEndpoint&) = delete;

  int port() const { return port_; }
  const std::function<std::string()>& page() const { return page_; }

 private:
  MetricsEndpoint(std::function<std::string()> page, int port) : page_(std::move(page)), port_(port) {}

  const std::function<std::string()> page_;
  const int port_;
  std::vector<MHD_Daemon*> daemons_;  // one for each address that the host's name stands for
};

// X(service, name, needs): every RPC, as label `method`, with the service::Permission that it needs. Compute is the work of a
// training run, or an evaluation, with a head that exists. Admin makes and removes heads, and moves their state in and out. Compute
// alone cannot take a head's weights, nor replace them except by training: an UploadWeights that closes no step needs
// kUploadOutsideStep. A client that has a session's secret id may renew and close the session. A worker that joins gets the rows
// and the weights of all heads.
#define HEADWATER_RPC_METHODS(X)             \
  X(Loss, ComputeLoss, kCompute)             \
  X(Loss, TransferRows, kCompute)            \
  X(Loss, StreamTeacher, kCompute)           \
  X(Loss, CommitMicroBatch, kCompute)        \
  X(Loss, DiscardMicroBatch, kCompute)       \
  X(Head, CreateHead, kAdmin)                \
  X(Head, GetHead, kRead)                    \
  X(Head, ListHeads, kRead)                  \
  X(Head, DeleteHead, kAdmin)                \
  X(Head, TakeHead, kCompute)                \
  X(Head, UploadWeights, kCompute)           \
  X(Head, LoadWeights, kAdmin)               \
  X(Head, DownloadWeights, kAdmin)           \
  X(Head, GetStep, kRead)                    \
  X(Head, SealStep, kCompute)                \
  X(Head, ApplyOptimizerStep, kCompute)      \
  X(Head, DiscardGradient, kCompute)         \
  X(Head, DownloadGradient, kCompute)        \
  X(Head, GetGradientNorm, kCompute)         \
  X(Head, AddGradient, kCompute)             \
  X(Head, SaveCheckpoint, kAdmin)            \
  X(Head, ListCheckpoints, kAdmin)           \
  X(Head, RestoreCheckpoint, kAdmin)         \
  X(Head, DeleteCheckpoint, kAdmin)          \
  X(Session, GetServerInfo, kToken)          \
  X(Session, OpenSession, kToken)            \
  X(Session, KeepAlive, kToken)              \
  X(Session, CloseSession, kToken)           \
  X(Group, Join, kAdmin)                     \
  X(Session, RegisterSharedMemory, kCompute) \
  X(Session, UnregisterSharedMemory, kCompute)

enum class RpcMethod {
#define HEADWATER_RPC_ENUMERATOR(service, name, needs) k##name,
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
enum class RowMemory { kUsed, kIdle, kCount };
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

// `grpc`, `shared_memory`, `cuda_ipc`: the values of MicroBatchSummary.transport too. The pointer is static.
const char* TransportName(Transport transport);

// X(metric, name, kind, help, labels...): every family, one row each. At most two labels. metrics.cc has the kinds and labels.
#define HEADWATER_METRICS(X)                                                                                                       \
  X(kRequests, "headwater_requests_total", kCounter, "Finished RPCs.", kMethod, kCode)                                             \
  X(kRequestSeconds, "headwater_request_seconds", kSeconds, "Time from an RPC's start to its end.", kMethod)                       \
  X(kRefusals, "headwater_refusals_total", kCounter, "Failed RPCs by the reason that was sent (docs/errors.md).", kReason)         \
  X(kQueueSeconds, "headwater_queue_seconds", kSeconds, "Time from a micro-batch's last row to the engine's start.")               \
  X(kUploadSeconds, "headwater_upload_seconds", kSeconds, "Time from a micro-batch's header to its last row.")                     \
  X(kComputeSeconds, "headwater_compute_seconds", kSeconds, "Time that a micro-batch was in the engine, whatever came of it.")     \
  X(kDownloadSeconds, "headwater_download_seconds", kSeconds, "Time from the engine's end to the last chunk of grad_hidden.")      \
  X(kCommitSeconds, "headwater_commit_seconds", kSeconds,                                                                          \
    "Time that CommitMicroBatch took to add a contribution, once its step was open; EAGER ones are added while they are "          \
    "computed.")                                                                                                                   \
  X(kComputeBusy, "headwater_compute_busy_seconds_total", kCounter,                                                                \
    "Time in which at least one micro-batch, or the commit of one, was in the engine.")                                            \
  X(kRankSeconds, "headwater_rank_seconds_total", kCounter,                                                                        \
    "Time that each rank, from 0 on, of a group of processes was in calls of the engine: computing; waiting for other ranks to "   \
    "come to a collective, for rows and for a decision; moving and adding exchanged sums. Workers report theirs twice a second. "  \
    "Served with --workers only.",                                                                                                 \
    kRank, kActivity)                                                                                                              \
  X(kProductFlops, "headwater_product_flops_total", kCounter,                                                                      \
    "Floating point operations of the matrix products that the micro-batches needed at least: for each term 2 x rows x "           \
    "vocabulary x hidden size for the logits, as much for the teacher's, for grad_hidden, and for grad_weight if it was added or " \
    "staged.")                                                                                                                     \
  X(kProductRate, "headwater_product_flops_per_second", kLateGauge,                                                                \
    "Bare matrix products' rate on this machine, the floor: --product_tflops, else measured at the start (CPU engine). Not "       \
    "served where it is not known.")                                                                                               \
  X(kChunkFill, "headwater_token_chunk_fill_ratio", kRatios,                                                                       \
    "Rows of a micro-batch over the rows that its token chunks have room for. Each micro-batch is looked at alone, though the "    \
    "engine may compute small ones together.")                                                                                     \
  X(kBytes, "headwater_bytes_total", kCounter, "Tensor bytes moved, by the path that they took.", kDirection, kTransport)          \
  X(kTransports, "headwater_transport_micro_batches_total", kCounter,                                                              \
    "Micro-batches that succeeded, by the path of their hidden states.", kTransport)                                               \
  X(kTokens, "headwater_tokens_total", kCounter, "Rows computed that were not ignored.", kLoss)                                    \
  X(kNonFiniteRows, "headwater_non_finite_rows_total", kCounter, "Rows with a NaN or an infinity in their loss or gradient.")      \
  X(kMicroBatches, "headwater_micro_batches_total", kCounter,                                                                      \
    "Micro-batches by what became of the call; `evaluated` ones belong to no step, `superseded` ones gave way to a higher "        \
    "attempt.",                                                                                                                    \
    kOutcome)                                                                                                                      \
  X(kCommits, "headwater_commits_total", kCounter,                                                                                 \
    "Contributions added to an accumulator, by EAGER calls, CommitMicroBatch and AddGradient.")                                    \
  X(kDiscards, "headwater_discards_total", kCounter, "Uncommitted contributions dropped by DiscardMicroBatch.")                    \
  X(kSteps, "headwater_steps_total", kCounter, "Steps closed.", kStepEnd)                                                          \
  X(kSessionEnds, "headwater_sessions_ended_total", kCounter, "Sessions that ended.", kSessionEndLabel)                            \
  X(kSessionDiscards, "headwater_session_discards_total", kCounter,                                                                \
    "Undecided contributions dropped because their session ended, by how the session ended.", kSessionEndLabel)                    \
  X(kRestoredHeads, "headwater_restored_heads_total", kCounter, "Heads brought back from a checkpoint at the server's start.")     \
  X(kSkippedCheckpoints, "headwater_skipped_checkpoints_total", kCounter,                                                          \
    "Checkpoints passed over at the server's start because they are damaged; the log names them.")                                 \
  X(kExpiredHeads, "headwater_expired_heads_total", kCounter, "Heads deleted because no call named them for --idle_head_timeout.") \
  X(kEarlyStarts, "headwater_early_starts_total", kCounter,                                                                        \
    "Micro-batches that took their turn before all of their rows had come.")                                                       \
  X(kStalls, "headwater_stalls_total", kCounter, "Of those, the ones that gave it up because their rows stayed away.")             \
  X(kTraces, "headwater_traces_total", kCounter,                                                                                   \
    "Calls that asked to be traced, with --trace_dir; `left_out`: they came too fast.", kTraceEnd)                                 \
  X(kRefusedConnections, "headwater_connections_refused_total", kCounter,                                                          \
    "Connections closed at once because --max_connections were open.")                                                             \
  X(kDroppedConnections, "headwater_connections_dropped_total", kCounter,                                                          \
    "Connections closed because their client cancelled calls faster than --max_cancel_rate, or had more of them wait than "        \
    "--max_reset_backlog.")                                                                                                        \
  X(kTlsHandshakeFailures, "headwater_tls_handshake_failures_total", kCounter,                                                     \
    "TLS handshakes that failed: the client speaks no TLS, does not trust the server, or has no certificate that is accepted.")    \
  X(kTlsCertificateEnd, "headwater_tls_certificate_expiry_timestamp_seconds", kLateGauge,                                          \
    "When the first certificate in the file of --tls_certificate, or of --tls_client_ca, ends, since 1970-01-01 00:00 UTC. "       \
    "Served for the files that the server has.",                                                                                   \
    kCertificate)                                                                                                                  \
  X(kUnsavedChange, "headwater_unsaved_change_age_seconds", kLateGauge,                                                            \
    "Time since the oldest change of a trainable head's weights that no checkpoint has, over all heads; 0: all are saved. Served " \
    "with --checkpoint_directory.")                                                                                                \
  X(kHeads, "headwater_heads", kGauge, "Heads that exist.")                                                                        \
  X(kSessions, "headwater_sessions", kGauge, "Sessions that are open.")                                                            \
  X(kWaitingCalls, "headwater_waiting_calls", kGauge,                                                                              \
    "Calls that wait for a step, for micro-batches, for their head to be free, made or deleted, or for a region.")                 \
  X(kAbandonedCalls, "headwater_abandoned_calls", kGauge, "ComputeLoss in progress whose client has gone.")                        \
  X(kWaitingContributions, "headwater_waiting_contributions", kGauge,                                                              \
    "Contributions that are committed and wait for lower ids (deterministic mode).")                                               \
  X(kQueueDepth, "headwater_queue_depth", kGauge, "Micro-batches that wait for the engine.")                                       \
  X(kInFlightBytes, "headwater_in_flight_bytes", kGauge,                                                                           \
    "Tensor bytes reserved by ComputeLoss and AddGradient calls in progress.")                                                     \
  X(kUploadBytes, "headwater_upload_bytes", kGauge, "Host memory reserved by unfinished weight uploads.")                          \
  X(kHeldBytes, "headwater_held_bytes", kGauge, "Host memory of the rows of HELD contributions.")                                  \
  X(kJoinBytes, "headwater_join_bytes", kGauge, "Host memory of teachers' rows that wait to be joined, or are kept for a repeat.") \
  X(kRowMemory, "headwater_row_memory_bytes", kGauge,                                                                              \
    "Host memory of micro-batches' rows and gradients: in use, HELD contributions included, and kept for the next ones.",          \
    kMemoryState)                                                                                                                  \
  X(kRegions, "headwater_regions", kGauge,                                                                                         \
    "Regions of clients' memory that are open: sealed memory passed as a descriptor, files under /dev/shm, device memory.",        \
    kRegionKind)                                                                                                                   \
  X(kRegionBytes, "headwater_region_bytes", kGauge, "Bytes of those regions.", kRegionKind)                                        \
  X(kConnections, "headwater_connections", kGauge, "Connections that are open.")                                                   \
  X(kMaxQueueDepth, "headwater_max_queue_depth", kGauge, "--max_queue_depth.")                                                     \
  X(kMaxInFlightBytes, "headwater_max_in_flight_bytes", kGauge, "--max_in_flight_bytes.")                                          \
  X(kMaxConnections, "headwater_max_connections", kGauge, "--max_connections.")                                                    \
  X(kMemoryPlanned, "headwater_memory_planned_bytes", kGauge,                                                                      \
    "Memory of the engine's device that the heads' plans take; they take it when they are created.", kPurpose)                     \
  X(kMemoryBudget, "headwater_memory_budget_bytes", kGauge, "Memory that all heads together may take.")                            \
  X(kServing, "headwater_serving", kGauge, "1 while health is SERVING, else 0.")                                                   \
  X(kBuildInfo, "headwater_build_info", kGauge, "Always 1.", kVersion, kEngine)                                                    \
  X(kProcessStart, "process_start_time_seconds", kGauge, "When the process began, since 1970-01-01 00:00 UTC.")                    \
  X(kProcessMemory, "process_resident_memory_bytes", kGauge, "Host memory of the process that is resident, shared memory included.")
enum class Metric {
#define HEADWATER_METRIC_ENUMERATOR(metric, ...) metric,
  HEADWATER_METRICS(HEADWATER_METRIC_ENUMERATOR)
#undef HEADWATER_METRIC_ENUMERATOR
};

// A label's value, as the number of its enumerator.
struct LabelValue {
  LabelValue() = default;
  template <typename Value>
  LabelValue(Value value) : index(static_cast<size_t>(value)) {}  // NOLINT: an enumerator is one
  size_t index = 0;
};

class Metrics {
 public:
  // `version` and `engine` label the build information.
  Metrics(const std::string& version, const std::string& engine);
  ~Metrics();

  // One finished RPC. A failed one is also counted by its reason.
  void CountRequest(RpcMethod method, const absl::Status& status, absl::Duration duration);
  // A micro-batch by what became of its call; a discarded one also counts as a discard.
  void CountMicroBatch(MicroBatchOutcome outcome);
  // Adds to a counter; the labels are those of its row.
  template <typename Number = int>
  void Count(Metric counter, Number events = 1, LabelValue first = {}, LabelValue second = {}) {
    Add(counter, static_cast<double>(events), first, second);
  }
  // Brings a counter to a total that was counted elsewhere; it never falls.
  void Raise(Metric counter, double total);
  template <typename Number>
  void Set(Metric gauge, Number value, LabelValue label = {}) {
    SetTo(gauge, static_cast<double>(value), label);
  }
  void Observe(Metric histogram, double value, LabelValue label = {});
  void Observe(Metric histogram, absl::Duration value, LabelValue label = {}) {
    Observe(histogram, absl::ToDoubleSeconds(value), label);
  }
  // kRankSeconds, with a rank that is not known here.
  void RaiseRankSeconds(size_t rank, RankActivity activity, absl::Duration total);
  // kMemoryPlanned by purpose of MemoryPlan; unknown purposes are counted as `other`.
  void SetPlannedBytes(const std::map<std::string, int64_t>& by_purpose);

  // `read` is called at every scrape, on the scraping thread, until it is replaced, to set the gauges. Null: no call.
  void SetGaugeSource(std::function<void()> read);

  // A TLS handshake has failed. Counted for the whole process, over all servers.
  static void CountTlsHandshakeFailure();

  // A scrape's answer, in Prometheus' text format.
  std::string Serialize();

  // Serves /metrics on `address` (host:port; port 0 picks one). At most once. Returns the port; an error says why it cannot listen.
  absl::StatusOr<int> Listen(const std::string& address);

 private:
  struct Families;
  void Add(Metric counter, double events, LabelValue first, LabelValue second);
  void SetTo(Metric gauge, double value, LabelValue label);

  std::unique_ptr<Families> families_;
};

// The contents of docs/metrics.md.
std::string MetricsDocument();

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_METRICS_H_
