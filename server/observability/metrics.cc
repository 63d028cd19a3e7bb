#include "server/observability/metrics.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <fstream>
#include <initializer_list>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"
#include "server/observability/metrics_endpoint.h"

namespace headwater::observability {
namespace {

// A label with its values. Families are served with all values of their labels from the start, so that the first event is an
// increase. Values of labels that are not `is_eager` are served from their first use on.
struct Label {
  const char* name = nullptr;                      // null: the family has no such label
  std::initializer_list<const char*> values = {};  // empty: not known here
  bool is_listed = true;                           // in the document
  bool is_eager = true;
  constexpr size_t count() const { return std::max<size_t>(values.size(), 1); }
  constexpr const char* value(size_t index) const { return values.begin()[index]; }
  template <typename Enum>
  constexpr bool Names(Enum count) const {
    return values.size() == static_cast<size_t>(count);
  }
};

#define HEADWATER_RPC_NAME(name) #name,
#define HEADWATER_REASON_NAME(enumerator, name, code) #name,
constexpr Label kMethod = {"method", {HEADWATER_RPC_METHODS(HEADWATER_RPC_NAME)}, false, false};
constexpr Label kReason = {"reason", {HEADWATER_ERROR_REASONS(HEADWATER_REASON_NAME)}, false};
#undef HEADWATER_RPC_NAME
#undef HEADWATER_REASON_NAME
constexpr Label kCode = {"code",
                         {"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
                          "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
                          "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"},
                         false,
                         false};
constexpr Label kVersion = {"version", {}, true, false};
constexpr Label kEngine = {"engine", {}, true, false};
constexpr Label kRank = {"rank", {}, true, false};
constexpr Label kActivity = {"activity", {"compute", "wait", "communicate"}};
constexpr Label kDirection = {"direction", {"in", "out"}};
constexpr Label kTransport = {"transport", {"grpc", "shared_memory", "cuda_ipc"}};
constexpr Label kLoss = {"loss", {"cross_entropy", "jensen_shannon"}};
constexpr Label kOutcome = {
    "outcome",
    {"committed", "staged", "held", "evaluated", "replayed", "discarded", "conflict", "superseded", "refused", "cancelled"}};
constexpr Label kStepEnd = {"how", {"applied", "discarded", "replaced"}};
constexpr Label kSessionEndLabel = {"how", {"closed", "expired"}};
constexpr Label kTraceEnd = {"outcome", {"written", "left_out", "failed"}};
constexpr Label kCertificate = {"certificate", {"server", "client_ca"}};
constexpr Label kMemoryState = {"state", {"used", "idle"}};
constexpr Label kRegionKind = {"kind", {"shared", "named", "device"}};
constexpr Label kPurpose = {
    "purpose", {"weight", "bias", "grad_weight", "grad_bias", "master_weight", "optimizer_state", "staging", "workspace", "other"}};
static_assert(kMethod.Names(RpcMethod::kCount) && kDirection.Names(Direction::kCount) && kTransport.Names(Transport::kCount) &&
              kLoss.Names(LossKind::kCount) && kOutcome.Names(MicroBatchOutcome::kCount) && kStepEnd.Names(StepOutcome::kCount) &&
              kActivity.Names(RankActivity::kCount) && kSessionEndLabel.Names(SessionEnd::kCount) &&
              kTraceEnd.Names(TraceOutcome::kCount) && kCertificate.Names(CertificateUse::kCount) &&
              kRegionKind.Names(kRegionKindCount));

// The last two are histograms. A late gauge is served from the first time that it is set.
enum Kind { kCounter, kGauge, kLateGauge, kSeconds, kRatios };
// Seconds; a micro-batch takes from a millisecond to minutes.
const std::vector<double> kSecondsBuckets = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60};
// Shares of a whole, up to 1.
const std::vector<double> kRatioBuckets = {0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1};

// X(index, name, kind, help, labels...): every family, one row each. At most two labels.
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
enum FamilyIndex {
#define HEADWATER_FAMILY_INDEX(index, ...) index,
  HEADWATER_METRICS(HEADWATER_FAMILY_INDEX)
#undef HEADWATER_FAMILY_INDEX
      kFamilyCount
};

struct Row {
  const char* name;
  Kind kind;
  const char* help;
  Label first = {};
  Label second = {};
};
constexpr Row kRows[] = {
#define HEADWATER_FAMILY_ROW(index, ...) {__VA_ARGS__},
    HEADWATER_METRICS(HEADWATER_FAMILY_ROW)
#undef HEADWATER_FAMILY_ROW
};

using Counters = prometheus::Family<prometheus::Counter>;
using Gauges = prometheus::Family<prometheus::Gauge>;
using Histograms = prometheus::Family<prometheus::Histogram>;

// The process's resident memory, as the kernel reports it; 0 if it does not.
double ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  double total = 0, resident = 0;
  if (!(statm >> total >> resident)) return 0;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE));
}

// gRPC reports these failures only to the process's log, without naming the connection.
std::atomic<int64_t>& TlsHandshakeFailures() {
  static std::atomic<int64_t> failures{0};
  return failures;
}

size_t PurposeIndex(const std::string& purpose) {
  const auto* const other = kPurpose.values.end() - 1;
  return static_cast<size_t>(std::find(kPurpose.values.begin(), other, purpose) - kPurpose.values.begin());
}

template <typename Enum>
size_t Index(Enum value) {
  return static_cast<size_t>(value);
}

}  // namespace

const char* RpcMethodName(RpcMethod method) { return kMethod.value(Index(method)); }

const char* TransportName(Transport transport) { return kTransport.value(Index(transport)); }

const char* CanonicalCodeName(absl::StatusCode code) { return Index(code) < kCode.count() ? kCode.value(Index(code)) : "UNKNOWN"; }

struct Metrics::Families {
  Families() {
    for (size_t i = 0; i < kFamilyCount; ++i) {
      const Row& row = kRows[i];
      children[i] = std::vector<std::atomic<void*>>(row.first.count() * row.second.count());
      if (row.kind == kCounter) {
        Register<prometheus::Counter>(row, i, prometheus::BuildCounter());
      } else if (row.kind == kGauge || row.kind == kLateGauge) {
        Register<prometheus::Gauge>(row, i, prometheus::BuildGauge());
      } else {
        Register<prometheus::Histogram>(row, i, prometheus::BuildHistogram());
      }
    }
  }

  template <typename T, typename Builder>
  void Register(const Row& row, size_t index, Builder builder) {
    families[index] = &builder.Name(row.name).Help(row.help).Register(registry);
    if (row.kind == kLateGauge || !row.first.is_eager || !row.second.is_eager) return;
    for (size_t first = 0; first < row.first.count(); ++first) {
      for (size_t second = 0; second < row.second.count(); ++second) Child<T>(static_cast<FamilyIndex>(index), first, second);
    }
  }

  // The child of a family by the numbers of its labels' values, made at first use.
  template <typename T>
  T& Child(FamilyIndex index, size_t first = 0, size_t second = 0) {
    const Row& row = kRows[index];
    std::atomic<void*>& slot = children[index][first * row.second.count() + second];
    T* child = static_cast<T*>(slot.load(std::memory_order_acquire));
    if (child != nullptr) return *child;
    prometheus::Labels labels;
    if (row.first.name != nullptr) labels.emplace(row.first.name, row.first.value(first));
    if (row.second.name != nullptr) labels.emplace(row.second.name, row.second.value(second));
    // Family::Add() returns the child that it has for these labels, so a race is harmless.
    auto& family = *std::get<prometheus::Family<T>*>(families[index]);
    if constexpr (std::is_same_v<T, prometheus::Histogram>) {
      child = &family.Add(labels, row.kind == kSeconds ? kSecondsBuckets : kRatioBuckets);
    } else {
      child = &family.Add(labels);
    }
    slot.store(child, std::memory_order_release);
    return *child;
  }

  template <typename Number>
  void Count(FamilyIndex index, Number events, size_t first = 0, size_t second = 0) {
    Child<prometheus::Counter>(index, first, second).Increment(static_cast<double>(events));
  }
  template <typename Number>
  void Set(FamilyIndex index, Number value, size_t first = 0, size_t second = 0) {
    Child<prometheus::Gauge>(index, first, second).Set(static_cast<double>(value));
  }
  void Observe(FamilyIndex index, double value, size_t first = 0) { Child<prometheus::Histogram>(index, first).Observe(value); }
  // Brings a counter to a total that was counted elsewhere; a counter takes increases only.
  static void Raise(prometheus::Counter& counter, double total) { counter.Increment(std::max(0.0, total - counter.Value())); }

  std::vector<prometheus::MetricFamily> Collect() {
    {
      absl::MutexLock lock(&source_mutex);
      if (source) Refresh(source());
    }
    return registry.Collect();
  }

  void Refresh(const GaugeReadings& readings) ABSL_EXCLUSIVE_LOCKS_REQUIRED(source_mutex) {
    Raise(Child<prometheus::Counter>(kComputeBusy), absl::ToDoubleSeconds(readings.busy));
    for (size_t rank = 0; rank < readings.rank_times.size(); ++rank) {
      for (size_t activity = 0; activity < kActivity.count(); ++activity) {
        Raise(std::get<Counters*>(families[kRankSeconds])
                  ->Add({{kRank.name, absl::StrCat(rank)}, {kActivity.name, kActivity.value(activity)}}),
              absl::ToDoubleSeconds(readings.rank_times[rank][activity]));
      }
    }
    Raise(Child<prometheus::Counter>(kTlsHandshakeFailures),
          static_cast<double>(TlsHandshakeFailures().load(std::memory_order_relaxed)));
    if (readings.unsaved.has_value()) Set(kUnsavedChange, absl::ToDoubleSeconds(*readings.unsaved));
    Set(kProcessMemory, ResidentBytes());
    Set(kHeads, readings.head_count);
    Set(kQueueDepth, readings.queue_depth);
    Set(kInFlightBytes, readings.in_flight_bytes);
    Set(kUploadBytes, readings.upload_bytes);
    Set(kHeldBytes, readings.held_bytes);
    Set(kJoinBytes, readings.join_bytes);
    Set(kRowMemory, readings.used_row_bytes, 0);
    Set(kRowMemory, readings.idle_row_bytes, 1);
    Set(kSessions, readings.session_count);
    Set(kConnections, readings.connections);
    Set(kWaitingCalls, readings.waiting_calls);
    Set(kAbandonedCalls, readings.abandoned_calls);
    Set(kWaitingContributions, readings.waiting_contributions);
    Set(kMemoryBudget, readings.memory_budget_bytes);
    Set(kServing, readings.serving ? 1 : 0);
    for (size_t kind = 0; kind < kRegionKindCount; ++kind) {
      Set(kRegions, readings.region_count[kind], kind);
      Set(kRegionBytes, readings.region_bytes[kind], kind);
    }
    std::array<int64_t, kPurpose.count()> planned{};
    for (const auto& [purpose, bytes] : readings.planned_bytes) planned[PurposeIndex(purpose)] += bytes;
    for (size_t purpose = 0; purpose < planned.size(); ++purpose) Set(kMemoryPlanned, planned[purpose], purpose);
  }

  prometheus::Registry registry;
  std::array<std::variant<Counters*, Gauges*, Histograms*>, kFamilyCount> families;
  std::array<std::vector<std::atomic<void*>>, kFamilyCount> children;

  absl::Mutex source_mutex;
  std::function<GaugeReadings()> source ABSL_GUARDED_BY(source_mutex);

  // Declared last: it stops before a scrape's sources are destroyed.
  std::unique_ptr<MetricsEndpoint> endpoint;
};

Metrics::Metrics(const std::string& version, const std::string& engine) : families_(std::make_unique<Families>()) {
  std::get<Gauges*>(families_->families[kBuildInfo])->Add({{kVersion.name, version}, {kEngine.name, engine}}).Set(1);
  families_->Set(kProcessStart, absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
}

Metrics::~Metrics() = default;

void Metrics::CountRequest(RpcMethod method, const absl::Status& status, absl::Duration duration) {
  const size_t code = Index(status.code()) < kCode.count() ? Index(status.code()) : Index(absl::StatusCode::kUnknown);
  families_->Count(kRequests, 1, Index(method), code);
  families_->Observe(kRequestSeconds, absl::ToDoubleSeconds(duration), Index(method));
  if (!status.ok()) families_->Count(kRefusals, 1, Index(GetErrorReason(status)));
}

void Metrics::CountBytes(Direction direction, int64_t bytes, Transport transport) {
  families_->Count(kBytes, bytes, Index(direction), Index(transport));
}

void Metrics::CountTransport(Transport transport) { families_->Count(kTransports, 1, Index(transport)); }
void Metrics::CountTokens(LossKind loss, int64_t valid_tokens) { families_->Count(kTokens, valid_tokens, Index(loss)); }
void Metrics::CountProductFlops(double flops) { families_->Count(kProductFlops, flops); }
void Metrics::ObserveChunkFill(double ratio) { families_->Observe(kChunkFill, ratio); }
void Metrics::CountNonFiniteRows(int64_t rows) { families_->Count(kNonFiniteRows, rows); }

void Metrics::CountMicroBatch(MicroBatchOutcome outcome) {
  families_->Count(kMicroBatches, 1, Index(outcome));
  if (outcome == MicroBatchOutcome::kDiscarded) families_->Count(kDiscards, 1);
}

void Metrics::CountCommit() { families_->Count(kCommits, 1); }
void Metrics::CountStep(StepOutcome outcome) { families_->Count(kSteps, 1, Index(outcome)); }
void Metrics::CountSessionEnds(SessionEnd how, int64_t sessions) { families_->Count(kSessionEnds, sessions, Index(how)); }
void Metrics::CountSessionDiscards(SessionEnd how, int64_t micro_batches) {
  families_->Count(kSessionDiscards, micro_batches, Index(how));
}
void Metrics::CountRestoredHeads(int64_t heads) { families_->Count(kRestoredHeads, heads); }
void Metrics::CountSkippedCheckpoints(int64_t checkpoints) { families_->Count(kSkippedCheckpoints, checkpoints); }
void Metrics::CountExpiredHeads(int64_t heads) { families_->Count(kExpiredHeads, heads); }
void Metrics::CountEarlyStart() { families_->Count(kEarlyStarts, 1); }
void Metrics::CountStall() { families_->Count(kStalls, 1); }
void Metrics::CountTrace(TraceOutcome outcome) { families_->Count(kTraces, 1, Index(outcome)); }
void Metrics::CountRefusedConnection() { families_->Count(kRefusedConnections, 1); }
void Metrics::CountDroppedConnection() { families_->Count(kDroppedConnections, 1); }

void Metrics::ObservePhase(Phase phase, absl::Duration duration) {
  constexpr FamilyIndex kPhases[] = {kQueueSeconds, kUploadSeconds, kComputeSeconds, kDownloadSeconds, kCommitSeconds};
  families_->Observe(kPhases[Index(phase)], absl::ToDoubleSeconds(duration));
}

void Metrics::SetProductRate(double flops_per_second) { families_->Set(kProductRate, flops_per_second); }

void Metrics::SetLimits(const GaugeLimits& limits) {
  families_->Set(kMaxQueueDepth, limits.queue_depth);
  families_->Set(kMaxInFlightBytes, limits.in_flight_bytes);
  families_->Set(kMaxConnections, limits.connections);
}

void Metrics::SetCertificateEnd(CertificateUse use, absl::Time end) {
  families_->Set(kTlsCertificateEnd, absl::ToDoubleSeconds(end - absl::UnixEpoch()), Index(use));
}

void Metrics::CountTlsHandshakeFailure() { TlsHandshakeFailures().fetch_add(1, std::memory_order_relaxed); }

void Metrics::SetGaugeSource(std::function<GaugeReadings()> read) {
  absl::MutexLock lock(&families_->source_mutex);
  families_->source = std::move(read);
}

std::string Metrics::Serialize() const { return prometheus::TextSerializer().Serialize(families_->Collect()); }

absl::StatusOr<int> Metrics::Listen(const std::string& address) {
  auto endpoint = MetricsEndpoint::Listen(address, [this] { return Serialize(); });
  if (!endpoint.ok()) return endpoint.status();
  families_->endpoint = *std::move(endpoint);
  return families_->endpoint->port();
}

std::string MetricsDocument() {
  std::string text =
      "# Metrics\n"
      "\n"
      "Served in Prometheus' text format under `/metrics` at `--metrics_address`. This page is printed by\n"
      "`headwaterd --print_metrics_doc`; a test compares the two. Labels are bounded enumerations: no name, id or address of a "
      "client\n"
      "ever becomes one. `method` is the RPC's name, `code` the canonical gRPC code, `reason` one of [errors.md](errors.md).\n"
      "\n"
      "| Family | Type | Labels | Meaning |\n"
      "|---|---|---|---|\n";
  constexpr const char* kKindNames[] = {"counter", "gauge", "gauge", "histogram", "histogram"};
  for (const Row& row : kRows) {
    std::string labels;
    for (const Label& label : {row.first, row.second}) {
      if (label.name == nullptr) continue;
      absl::StrAppend(&labels, labels.empty() ? "`" : ", `", label.name, "`");
      if (label.is_listed && label.values.size() > 0) absl::StrAppend(&labels, " (", absl::StrJoin(label.values, ", "), ")");
    }
    absl::StrAppend(&text, "| `", row.name, "` | ", kKindNames[row.kind], " | ", labels.empty() ? "none" : labels, " | ", row.help,
                    " |\n");
  }
  return absl::StrCat(text, "\nHistogram buckets, in seconds: ", absl::StrJoin(kSecondsBuckets, ", "),
                      ". Of ratios: ", absl::StrJoin(kRatioBuckets, ", "), ".\n");
}

}  // namespace headwater::observability
