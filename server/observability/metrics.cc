#include "server/observability/metrics.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
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

constexpr const char* kMethodNames[] = {
#define HEADWATER_RPC_NAME(name) #name,
    HEADWATER_RPC_METHODS(HEADWATER_RPC_NAME)
#undef HEADWATER_RPC_NAME
};
constexpr size_t kMethodCount = static_cast<size_t>(RpcMethod::kCount);

constexpr const char* kCodeNames[] = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};
constexpr size_t kCodeCount = std::size(kCodeNames);

constexpr const char* kReasonNames[] = {
#define HEADWATER_REASON_NAME(enumerator, name, code) #name,
    HEADWATER_ERROR_REASONS(HEADWATER_REASON_NAME)
#undef HEADWATER_REASON_NAME
};
constexpr size_t kReasonCount = std::size(kReasonNames);

constexpr const char* kDirectionNames[] = {"in", "out"};
constexpr const char* kTransportNames[] = {"grpc", "shared_memory", "cuda_ipc"};
constexpr size_t kTransportCount = static_cast<size_t>(Transport::kCount);
static_assert(std::size(kTransportNames) == kTransportCount);
constexpr const char* kRegionKindNames[] = {"shared", "named", "device"};
static_assert(std::size(kRegionKindNames) == kRegionKindCount);
constexpr const char* kLossNames[] = {"cross_entropy", "jensen_shannon"};
constexpr const char* kOutcomeNames[] = {"committed", "staged",   "held",       "evaluated", "replayed",
                                         "discarded", "conflict", "superseded", "refused",   "cancelled"};
constexpr const char* kStepNames[] = {"applied", "discarded", "replaced"};
constexpr const char* kActivityNames[] = {"compute", "wait", "communicate"};
static_assert(std::size(kActivityNames) == static_cast<size_t>(RankActivity::kCount));
constexpr const char* kSessionEndNames[] = {"closed", "expired"};
constexpr const char* kCertificateNames[] = {"server", "client_ca"};
static_assert(std::size(kCertificateNames) == static_cast<size_t>(CertificateUse::kCount));
constexpr const char* kTraceNames[] = {"written", "left_out", "failed"};
constexpr const char* kPurposeNames[] = {"weight",          "bias",    "grad_weight", "grad_bias", "master_weight",
                                         "optimizer_state", "staging", "workspace",   "other"};
constexpr size_t kPurposeCount = std::size(kPurposeNames);

// Seconds; a micro-batch takes from a millisecond to minutes.
const std::vector<double> kSecondsBuckets = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60};

// Shares of a whole, up to 1.
const std::vector<double> kRatioBuckets = {0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1};

// One family: what the registry and the document say about it.
struct Description {
  const char* name;
  const char* type;
  const char* labels;  // for the document: "`method`, `code`", or "none"
  const char* help;
};

enum FamilyIndex {
  kRequests,
  kRequestSeconds,
  kRefusals,
  kQueueSeconds,
  kUploadSeconds,
  kComputeSeconds,
  kDownloadSeconds,
  kCommitSeconds,
  kComputeBusy,
  kRankSeconds,
  kProductFlops,
  kProductRate,
  kChunkFill,
  kBytes,
  kTransports,
  kTokens,
  kNonFiniteRows,
  kMicroBatches,
  kCommits,
  kDiscards,
  kSteps,
  kSessionEnds,
  kSessionDiscards,
  kRestoredHeads,
  kSkippedCheckpoints,
  kExpiredHeads,
  kEarlyStarts,
  kStalls,
  kTraces,
  kRefusedConnections,
  kDroppedConnections,
  kTlsHandshakeFailures,
  kTlsCertificateEnd,
  kUnsavedChange,
  kHeads,
  kSessions,
  kWaitingCalls,
  kAbandonedCalls,
  kWaitingContributions,
  kQueueDepth,
  kInFlightBytes,
  kUploadBytes,
  kHeldBytes,
  kJoinBytes,
  kRowMemory,
  kRegions,
  kRegionBytes,
  kConnections,
  kMaxQueueDepth,
  kMaxInFlightBytes,
  kMaxConnections,
  kMemoryPlanned,
  kMemoryBudget,
  kServing,
  kBuildInfo,
  kProcessStart,
  kProcessMemory,
  kFamilyCount,
};

constexpr Description kDescriptions[kFamilyCount] = {
    {"headwater_requests_total", "counter", "`method`, `code`", "Finished RPCs."},
    {"headwater_request_seconds", "histogram", "`method`", "Time from an RPC's start to its end."},
    {"headwater_refusals_total", "counter", "`reason`", "Failed RPCs by the reason that was sent (docs/errors.md)."},
    {"headwater_queue_seconds", "histogram", "none", "Time from a micro-batch's last row to the engine's start."},
    {"headwater_upload_seconds", "histogram", "none", "Time from a micro-batch's header to its last row."},
    {"headwater_compute_seconds", "histogram", "none", "Time that a micro-batch was in the engine, whatever came of it."},
    {"headwater_download_seconds", "histogram", "none", "Time from the engine's end to the last chunk of grad_hidden."},
    {"headwater_commit_seconds", "histogram", "none",
     "Time that CommitMicroBatch took to add a contribution, once its step was open; EAGER ones are added while they are "
     "computed."},
    {"headwater_compute_busy_seconds_total", "counter", "none",
     "Time in which at least one micro-batch, or the commit of one, was in the engine."},
    {"headwater_rank_seconds_total", "counter", "`rank` (from 0 on), `activity` (compute, wait, communicate)",
     "Time that each rank of a group of processes was in calls of the engine: computing; waiting for other ranks to come to a "
     "collective, for rows and for a decision; moving and adding exchanged sums. Workers report theirs twice a second. "
     "Served with --workers only."},
    {"headwater_product_flops_total", "counter", "none",
     "Floating point operations of the matrix products that the micro-batches needed at least: for each term 2 x rows x vocabulary "
     "x "
     "hidden size for the logits, as much for the teacher's, for grad_hidden, and for grad_weight if it was added or staged."},
    {"headwater_product_flops_per_second", "gauge", "none",
     "Bare matrix products' rate on this machine, the floor: --product_tflops, else measured at the start (CPU engine). Not served "
     "where it is not known."},
    {"headwater_token_chunk_fill_ratio", "histogram", "none",
     "Rows of a micro-batch over the rows that its token chunks have room for. Each micro-batch is looked at alone, though the "
     "engine may compute small ones together."},
    {"headwater_bytes_total", "counter", "`direction` (in, out), `transport` (grpc, shared_memory, cuda_ipc)",
     "Tensor bytes moved, by the path that they took."},
    {"headwater_transport_micro_batches_total", "counter", "`transport` (grpc, shared_memory, cuda_ipc)",
     "Micro-batches that succeeded, by the path of their hidden states."},
    {"headwater_tokens_total", "counter", "`loss` (cross_entropy, jensen_shannon)", "Rows computed that were not ignored."},
    {"headwater_non_finite_rows_total", "counter", "none", "Rows with a NaN or an infinity in their loss or gradient."},
    {"headwater_micro_batches_total", "counter",
     "`outcome` (committed, staged, held, evaluated, replayed, discarded, conflict, superseded, refused, cancelled)",
     "Micro-batches by what became of the call; `evaluated` ones belong to no step, `superseded` ones gave way to a higher "
     "attempt."},
    {"headwater_commits_total", "counter", "none",
     "Contributions added to an accumulator, by EAGER calls, CommitMicroBatch and AddGradient."},
    {"headwater_discards_total", "counter", "none", "Uncommitted contributions dropped by DiscardMicroBatch."},
    {"headwater_steps_total", "counter", "`how` (applied, discarded, replaced)", "Steps closed."},
    {"headwater_sessions_ended_total", "counter", "`how` (closed, expired)", "Sessions that ended."},
    {"headwater_session_discards_total", "counter", "`how` (closed, expired)",
     "Undecided contributions dropped because their session ended, by how the session ended."},
    {"headwater_restored_heads_total", "counter", "none", "Heads brought back from a checkpoint at the server's start."},
    {"headwater_skipped_checkpoints_total", "counter", "none",
     "Checkpoints passed over at the server's start because they are damaged; the log names them."},
    {"headwater_expired_heads_total", "counter", "none", "Heads deleted because no call named them for --idle_head_timeout."},
    {"headwater_early_starts_total", "counter", "none", "Micro-batches that took their turn before all of their rows had come."},
    {"headwater_stalls_total", "counter", "none", "Of those, the ones that gave it up because their rows stayed away."},
    {"headwater_traces_total", "counter", "`outcome` (written, left_out, failed)",
     "Calls that asked to be traced, with --trace_dir; `left_out`: they came too fast."},
    {"headwater_connections_refused_total", "counter", "none", "Connections closed at once because --max_connections were open."},
    {"headwater_connections_dropped_total", "counter", "none",
     "Connections closed because their client cancelled calls faster than --max_cancel_rate, or had more of them wait than "
     "--max_reset_backlog."},
    {"headwater_tls_handshake_failures_total", "counter", "none",
     "TLS handshakes that failed: the client speaks no TLS, does not trust the server, or has no certificate that is accepted."},
    {"headwater_tls_certificate_expiry_timestamp_seconds", "gauge", "`certificate` (server, client_ca)",
     "When the first certificate in the file of --tls_certificate, or of --tls_client_ca, ends, since 1970-01-01 00:00 UTC. Served "
     "for the files that the server has."},
    {"headwater_unsaved_change_age_seconds", "gauge", "none",
     "Time since the oldest change of a trainable head's weights that no checkpoint has, over all heads; 0: all are saved. Served "
     "with --checkpoint_directory."},
    {"headwater_heads", "gauge", "none", "Heads that exist."},
    {"headwater_sessions", "gauge", "none", "Sessions that are open."},
    {"headwater_waiting_calls", "gauge", "none",
     "Calls that wait for a step, for micro-batches, for their head to be free, made or deleted, or for a region."},
    {"headwater_abandoned_calls", "gauge", "none", "ComputeLoss in progress whose client has gone."},
    {"headwater_waiting_contributions", "gauge", "none",
     "Contributions that are committed and wait for lower ids (deterministic mode)."},
    {"headwater_queue_depth", "gauge", "none", "Micro-batches that wait for the engine."},
    {"headwater_in_flight_bytes", "gauge", "none", "Tensor bytes reserved by ComputeLoss and AddGradient calls in progress."},
    {"headwater_upload_bytes", "gauge", "none", "Host memory reserved by unfinished weight uploads."},
    {"headwater_held_bytes", "gauge", "none", "Host memory of the rows of HELD contributions."},
    {"headwater_join_bytes", "gauge", "none", "Host memory of teachers' rows that wait to be joined, or are kept for a repeat."},
    {"headwater_row_memory_bytes", "gauge", "`state` (used, idle)",
     "Host memory of micro-batches' rows and gradients: in use, HELD contributions included, and kept for the next ones."},
    {"headwater_regions", "gauge", "`kind` (shared, named, device)",
     "Regions of clients' memory that are open: sealed memory passed as a descriptor, files under /dev/shm, device memory."},
    {"headwater_region_bytes", "gauge", "`kind` (shared, named, device)", "Bytes of those regions."},
    {"headwater_connections", "gauge", "none", "Connections that are open."},
    {"headwater_max_queue_depth", "gauge", "none", "--max_queue_depth."},
    {"headwater_max_in_flight_bytes", "gauge", "none", "--max_in_flight_bytes."},
    {"headwater_max_connections", "gauge", "none", "--max_connections."},
    {"headwater_memory_planned_bytes", "gauge",
     "`purpose` (weight, bias, grad_weight, grad_bias, master_weight, optimizer_state, staging, workspace, other)",
     "Memory of the engine's device that the heads' plans take; they take it when they are created."},
    {"headwater_memory_budget_bytes", "gauge", "none", "Memory that all heads together may take."},
    {"headwater_serving", "gauge", "none", "1 while health is SERVING, else 0."},
    {"headwater_build_info", "gauge", "`version`, `engine`", "Always 1."},
    {"process_start_time_seconds", "gauge", "none", "When the process began, since 1970-01-01 00:00 UTC."},
    {"process_resident_memory_bytes", "gauge", "none", "Host memory of the process that is resident, shared memory included."},
};

// Children of a family by up to two enumerated labels, made at first use.
template <typename T, size_t kRows, size_t kColumns = 1>
class Grid {
 public:
  template <typename Make>
  T& Get(size_t row, size_t column, Make&& make) {
    std::atomic<T*>& slot = children_[row * kColumns + column];
    T* child = slot.load(std::memory_order_acquire);
    if (child == nullptr) {
      child = &make();  // Family::Add() returns the existing child for labels that it knows, so a race is harmless
      slot.store(child, std::memory_order_release);
    }
    return *child;
  }

 private:
  std::array<std::atomic<T*>, kRows * kColumns> children_{};
};

// The child of a family with a single label.
template <size_t kCount>
prometheus::Counter& ChildOf(Grid<prometheus::Counter, kCount>& children, prometheus::Family<prometheus::Counter>& family,
                             const char* label, const char* const (&names)[kCount], size_t index) {
  return children.Get(index, 0, [&]() -> prometheus::Counter& { return family.Add({{label, names[index]}}); });
}

// The process's resident memory, as the kernel tells it; 0 where it does not.
double ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  double total = 0, resident = 0;
  if (!(statm >> total >> resident)) return 0;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE));
}

// gRPC reports them to the process's log, which does not say whose connection it was.
std::atomic<int64_t>& TlsHandshakeFailures() {
  static std::atomic<int64_t> failures{0};
  return failures;
}

size_t PurposeIndex(const std::string& purpose) {
  for (size_t i = 0; i + 1 < kPurposeCount; ++i) {
    if (purpose == kPurposeNames[i]) return i;
  }
  return kPurposeCount - 1;
}

}  // namespace

const char* RpcMethodName(RpcMethod method) { return kMethodNames[static_cast<size_t>(method)]; }

const char* TransportName(Transport transport) { return kTransportNames[static_cast<size_t>(transport)]; }

const char* CanonicalCodeName(absl::StatusCode code) {
  const size_t index = static_cast<size_t>(code);
  return index < kCodeCount ? kCodeNames[index] : "UNKNOWN";
}

struct Metrics::Families {
  prometheus::Registry registry;

  prometheus::Family<prometheus::Counter>& Counters(FamilyIndex index) {
    return prometheus::BuildCounter().Name(kDescriptions[index].name).Help(kDescriptions[index].help).Register(registry);
  }
  prometheus::Family<prometheus::Gauge>& Gauges(FamilyIndex index) {
    return prometheus::BuildGauge().Name(kDescriptions[index].name).Help(kDescriptions[index].help).Register(registry);
  }
  prometheus::Family<prometheus::Histogram>& Histograms(FamilyIndex index) {
    return prometheus::BuildHistogram().Name(kDescriptions[index].name).Help(kDescriptions[index].help).Register(registry);
  }
  // A counter with one label, all of whose children are there from the start: the first event is an increase then, too.
  template <size_t kCount>
  prometheus::Family<prometheus::Counter>& Counters(FamilyIndex index, const char* label, const char* const (&names)[kCount]) {
    prometheus::Family<prometheus::Counter>& family = Counters(index);
    for (const char* name : names) family.Add({{label, name}});
    return family;
  }
  prometheus::Histogram& SecondsHistogram(FamilyIndex index) { return Histograms(index).Add({}, kSecondsBuckets); }

  prometheus::Family<prometheus::Counter>& requests = Counters(kRequests);
  Grid<prometheus::Counter, kMethodCount, kCodeCount> requests_children;
  prometheus::Family<prometheus::Histogram>& request_seconds = Histograms(kRequestSeconds);
  Grid<prometheus::Histogram, kMethodCount> request_seconds_children;
  prometheus::Family<prometheus::Counter>& refusals = Counters(kRefusals, "reason", kReasonNames);
  Grid<prometheus::Counter, kReasonCount> refusals_children;

  prometheus::Histogram& queue_seconds = SecondsHistogram(kQueueSeconds);
  prometheus::Histogram& upload_seconds = SecondsHistogram(kUploadSeconds);
  prometheus::Histogram& compute_seconds = SecondsHistogram(kComputeSeconds);
  prometheus::Histogram& download_seconds = SecondsHistogram(kDownloadSeconds);
  prometheus::Histogram& commit_seconds = SecondsHistogram(kCommitSeconds);
  prometheus::Counter& compute_busy = Counters(kComputeBusy).Add({});
  prometheus::Family<prometheus::Counter>& rank_seconds = Counters(kRankSeconds);
  prometheus::Counter& product_flops = Counters(kProductFlops).Add({});
  prometheus::Family<prometheus::Gauge>& product_rate = Gauges(kProductRate);
  prometheus::Histogram& chunk_fill = Histograms(kChunkFill).Add({}, kRatioBuckets);

  prometheus::Family<prometheus::Counter>& bytes = Counters(kBytes);
  Grid<prometheus::Counter, static_cast<size_t>(Direction::kCount), kTransportCount> bytes_children;
  prometheus::Family<prometheus::Counter>& transports = Counters(kTransports, "transport", kTransportNames);
  Grid<prometheus::Counter, kTransportCount> transports_children;
  prometheus::Family<prometheus::Counter>& tokens = Counters(kTokens, "loss", kLossNames);
  Grid<prometheus::Counter, static_cast<size_t>(LossKind::kCount)> tokens_children;
  prometheus::Counter& non_finite_rows = Counters(kNonFiniteRows).Add({});
  prometheus::Family<prometheus::Counter>& micro_batches = Counters(kMicroBatches, "outcome", kOutcomeNames);
  Grid<prometheus::Counter, static_cast<size_t>(MicroBatchOutcome::kCount)> micro_batches_children;
  prometheus::Counter& commits = Counters(kCommits).Add({});
  prometheus::Counter& discards = Counters(kDiscards).Add({});
  prometheus::Family<prometheus::Counter>& steps = Counters(kSteps, "how", kStepNames);
  Grid<prometheus::Counter, static_cast<size_t>(StepOutcome::kCount)> steps_children;

  prometheus::Family<prometheus::Counter>& session_ends = Counters(kSessionEnds, "how", kSessionEndNames);
  Grid<prometheus::Counter, static_cast<size_t>(SessionEnd::kCount)> session_ends_children;
  prometheus::Family<prometheus::Counter>& session_discards = Counters(kSessionDiscards, "how", kSessionEndNames);
  Grid<prometheus::Counter, static_cast<size_t>(SessionEnd::kCount)> session_discards_children;
  prometheus::Counter& restored_heads = Counters(kRestoredHeads).Add({});
  prometheus::Counter& skipped_checkpoints = Counters(kSkippedCheckpoints).Add({});
  prometheus::Counter& expired_heads = Counters(kExpiredHeads).Add({});
  prometheus::Counter& early_starts = Counters(kEarlyStarts).Add({});
  prometheus::Counter& stalls = Counters(kStalls).Add({});
  prometheus::Family<prometheus::Counter>& traces = Counters(kTraces, "outcome", kTraceNames);
  Grid<prometheus::Counter, static_cast<size_t>(TraceOutcome::kCount)> traces_children;
  prometheus::Counter& refused_connections = Counters(kRefusedConnections).Add({});
  prometheus::Counter& dropped_connections = Counters(kDroppedConnections).Add({});
  prometheus::Counter& tls_handshake_failures = Counters(kTlsHandshakeFailures).Add({});
  prometheus::Family<prometheus::Gauge>& tls_certificate_end = Gauges(kTlsCertificateEnd);
  prometheus::Family<prometheus::Gauge>& unsaved_change = Gauges(kUnsavedChange);

  prometheus::Gauge& heads = Gauges(kHeads).Add({});
  prometheus::Gauge& queue_depth = Gauges(kQueueDepth).Add({});
  prometheus::Gauge& in_flight_bytes = Gauges(kInFlightBytes).Add({});
  prometheus::Gauge& upload_bytes = Gauges(kUploadBytes).Add({});
  prometheus::Gauge& held_bytes = Gauges(kHeldBytes).Add({});
  prometheus::Gauge& join_bytes = Gauges(kJoinBytes).Add({});
  prometheus::Gauge& used_row_bytes = Gauges(kRowMemory).Add({{"state", "used"}});
  prometheus::Gauge& idle_row_bytes = Gauges(kRowMemory).Add({{"state", "idle"}});
  prometheus::Family<prometheus::Gauge>& regions = Gauges(kRegions);
  std::array<prometheus::Gauge*, kRegionKindCount> regions_children{};
  prometheus::Family<prometheus::Gauge>& region_bytes = Gauges(kRegionBytes);
  std::array<prometheus::Gauge*, kRegionKindCount> region_bytes_children{};
  prometheus::Gauge& sessions = Gauges(kSessions).Add({});
  prometheus::Gauge& connections = Gauges(kConnections).Add({});
  prometheus::Gauge& waiting_calls = Gauges(kWaitingCalls).Add({});
  prometheus::Gauge& abandoned_calls = Gauges(kAbandonedCalls).Add({});
  prometheus::Gauge& waiting_contributions = Gauges(kWaitingContributions).Add({});
  prometheus::Gauge& max_queue_depth = Gauges(kMaxQueueDepth).Add({});
  prometheus::Gauge& max_in_flight_bytes = Gauges(kMaxInFlightBytes).Add({});
  prometheus::Gauge& max_connections = Gauges(kMaxConnections).Add({});
  prometheus::Family<prometheus::Gauge>& memory_planned = Gauges(kMemoryPlanned);
  std::array<prometheus::Gauge*, kPurposeCount> memory_planned_children{};
  prometheus::Gauge& memory_budget = Gauges(kMemoryBudget).Add({});
  prometheus::Gauge& serving = Gauges(kServing).Add({});
  prometheus::Family<prometheus::Gauge>& build_info = Gauges(kBuildInfo);
  prometheus::Gauge& process_start = Gauges(kProcessStart).Add({});
  prometheus::Gauge& process_memory = Gauges(kProcessMemory).Add({});

  mutable absl::Mutex source_mutex;
  std::function<GaugeReadings()> source ABSL_GUARDED_BY(source_mutex);

  // Declared last: it is stopped before anything that a scrape reads goes away.
  std::unique_ptr<MetricsEndpoint> endpoint;

  std::vector<prometheus::MetricFamily> Collect() const {
    {
      absl::MutexLock lock(&source_mutex);
      if (source) Refresh(source());
    }
    return registry.Collect();
  }

  void Refresh(const GaugeReadings& readings) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(source_mutex) {
    // What was counted elsewhere; a counter takes increases only.
    compute_busy.Increment(std::max(0.0, absl::ToDoubleSeconds(readings.busy) - compute_busy.Value()));
    for (size_t rank = 0; rank < readings.rank_times.size(); ++rank) {
      for (size_t activity = 0; activity < std::size(kActivityNames); ++activity) {
        prometheus::Counter& counter = rank_seconds.Add({{"rank", std::to_string(rank)}, {"activity", kActivityNames[activity]}});
        counter.Increment(std::max(0.0, absl::ToDoubleSeconds(readings.rank_times[rank][activity]) - counter.Value()));
      }
    }
    const auto failures = static_cast<double>(TlsHandshakeFailures().load(std::memory_order_relaxed));
    tls_handshake_failures.Increment(std::max(0.0, failures - tls_handshake_failures.Value()));
    if (readings.unsaved.has_value()) unsaved_change.Add({}).Set(absl::ToDoubleSeconds(*readings.unsaved));
    process_memory.Set(ResidentBytes());
    heads.Set(static_cast<double>(readings.head_count));
    queue_depth.Set(static_cast<double>(readings.queue_depth));
    in_flight_bytes.Set(static_cast<double>(readings.in_flight_bytes));
    upload_bytes.Set(static_cast<double>(readings.upload_bytes));
    held_bytes.Set(static_cast<double>(readings.held_bytes));
    join_bytes.Set(static_cast<double>(readings.join_bytes));
    used_row_bytes.Set(static_cast<double>(readings.used_row_bytes));
    idle_row_bytes.Set(static_cast<double>(readings.idle_row_bytes));
    sessions.Set(static_cast<double>(readings.session_count));
    connections.Set(static_cast<double>(readings.connections));
    waiting_calls.Set(static_cast<double>(readings.waiting_calls));
    abandoned_calls.Set(static_cast<double>(readings.abandoned_calls));
    waiting_contributions.Set(static_cast<double>(readings.waiting_contributions));
    memory_budget.Set(static_cast<double>(readings.memory_budget_bytes));
    serving.Set(readings.serving ? 1 : 0);
    for (size_t i = 0; i < kRegionKindCount; ++i) {
      regions_children[i]->Set(static_cast<double>(readings.region_count[i]));
      region_bytes_children[i]->Set(static_cast<double>(readings.region_bytes[i]));
    }
    std::array<double, kPurposeCount> planned{};
    for (const auto& [purpose, planned_bytes] : readings.planned_bytes) {
      planned[PurposeIndex(purpose)] += static_cast<double>(planned_bytes);
    }
    for (size_t i = 0; i < kPurposeCount; ++i) memory_planned_children[i]->Set(planned[i]);
  }
};

Metrics::Metrics(const std::string& version, const std::string& engine) : families_(std::make_unique<Families>()) {
  for (size_t i = 0; i < kPurposeCount; ++i) {
    families_->memory_planned_children[i] = &families_->memory_planned.Add({{"purpose", kPurposeNames[i]}});
  }
  for (size_t i = 0; i < kRegionKindCount; ++i) {
    families_->regions_children[i] = &families_->regions.Add({{"kind", kRegionKindNames[i]}});
    families_->region_bytes_children[i] = &families_->region_bytes.Add({{"kind", kRegionKindNames[i]}});
  }
  for (const char* direction : kDirectionNames) {
    for (const char* transport : kTransportNames) {
      families_->bytes.Add({{"direction", direction}, {"transport", transport}});
    }
  }
  families_->build_info.Add({{"version", version}, {"engine", engine}}).Set(1);
  families_->process_start.Set(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
}

Metrics::~Metrics() = default;

void Metrics::CountRequest(RpcMethod method, const absl::Status& status, absl::Duration duration) {
  const size_t row = static_cast<size_t>(method);
  const size_t code = static_cast<size_t>(status.code()) < kCodeCount ? static_cast<size_t>(status.code())
                                                                      : static_cast<size_t>(absl::StatusCode::kUnknown);
  Families& f = *families_;
  f.requests_children
      .Get(row, code,
           [&]() -> prometheus::Counter& {
             return f.requests.Add({{"method", kMethodNames[row]}, {"code", kCodeNames[code]}});
           })
      .Increment();
  f.request_seconds_children
      .Get(row, 0,
           [&]() -> prometheus::Histogram& {
             return f.request_seconds.Add({{"method", kMethodNames[row]}}, kSecondsBuckets);
           })
      .Observe(absl::ToDoubleSeconds(duration));
  if (status.ok()) return;
  const size_t reason = static_cast<size_t>(GetErrorReason(status));
  ChildOf(f.refusals_children, f.refusals, "reason", kReasonNames, reason).Increment();
}

void Metrics::CountBytes(Direction direction, int64_t bytes, Transport transport) {
  const size_t index = static_cast<size_t>(direction);
  const size_t path = static_cast<size_t>(transport);
  Families& f = *families_;
  f.bytes_children
      .Get(index, path,
           [&]() -> prometheus::Counter& {
             return f.bytes.Add({{"direction", kDirectionNames[index]}, {"transport", kTransportNames[path]}});
           })
      .Increment(static_cast<double>(bytes));
}

void Metrics::CountTransport(Transport transport) {
  Families& f = *families_;
  ChildOf(f.transports_children, f.transports, "transport", kTransportNames, static_cast<size_t>(transport)).Increment();
}

void Metrics::CountTokens(LossKind loss, int64_t valid_tokens) {
  Families& f = *families_;
  ChildOf(f.tokens_children, f.tokens, "loss", kLossNames, static_cast<size_t>(loss)).Increment(static_cast<double>(valid_tokens));
}

void Metrics::CountProductFlops(double flops) { families_->product_flops.Increment(flops); }

void Metrics::ObserveChunkFill(double ratio) { families_->chunk_fill.Observe(ratio); }

void Metrics::CountNonFiniteRows(int64_t rows) { families_->non_finite_rows.Increment(static_cast<double>(rows)); }

void Metrics::CountMicroBatch(MicroBatchOutcome outcome) {
  Families& f = *families_;
  ChildOf(f.micro_batches_children, f.micro_batches, "outcome", kOutcomeNames, static_cast<size_t>(outcome)).Increment();
  if (outcome == MicroBatchOutcome::kDiscarded) f.discards.Increment();
}

void Metrics::CountCommit() { families_->commits.Increment(); }

void Metrics::CountStep(StepOutcome outcome) {
  Families& f = *families_;
  ChildOf(f.steps_children, f.steps, "how", kStepNames, static_cast<size_t>(outcome)).Increment();
}

void Metrics::CountSessionEnds(SessionEnd how, int64_t sessions) {
  Families& f = *families_;
  ChildOf(f.session_ends_children, f.session_ends, "how", kSessionEndNames, static_cast<size_t>(how))
      .Increment(static_cast<double>(sessions));
}

void Metrics::CountSessionDiscards(SessionEnd how, int64_t micro_batches) {
  Families& f = *families_;
  ChildOf(f.session_discards_children, f.session_discards, "how", kSessionEndNames, static_cast<size_t>(how))
      .Increment(static_cast<double>(micro_batches));
}

void Metrics::CountRestoredHeads(int64_t heads) { families_->restored_heads.Increment(static_cast<double>(heads)); }

void Metrics::CountSkippedCheckpoints(int64_t checkpoints) {
  families_->skipped_checkpoints.Increment(static_cast<double>(checkpoints));
}

void Metrics::CountExpiredHeads(int64_t heads) { families_->expired_heads.Increment(static_cast<double>(heads)); }

void Metrics::CountEarlyStart() { families_->early_starts.Increment(); }

void Metrics::CountStall() { families_->stalls.Increment(); }

void Metrics::CountTrace(TraceOutcome outcome) {
  Families& f = *families_;
  ChildOf(f.traces_children, f.traces, "outcome", kTraceNames, static_cast<size_t>(outcome)).Increment();
}

void Metrics::CountRefusedConnection() { families_->refused_connections.Increment(); }

void Metrics::CountDroppedConnection() { families_->dropped_connections.Increment(); }

void Metrics::ObservePhase(Phase phase, absl::Duration duration) {
  const double seconds = absl::ToDoubleSeconds(duration);
  switch (phase) {
    case Phase::kQueue:
      return families_->queue_seconds.Observe(seconds);
    case Phase::kUpload:
      return families_->upload_seconds.Observe(seconds);
    case Phase::kCompute:
      return families_->compute_seconds.Observe(seconds);
    case Phase::kDownload:
      return families_->download_seconds.Observe(seconds);
    case Phase::kCommit:
      return families_->commit_seconds.Observe(seconds);
  }
}

void Metrics::SetProductRate(double flops_per_second) { families_->product_rate.Add({}).Set(flops_per_second); }

void Metrics::SetLimits(const GaugeLimits& limits) {
  families_->max_queue_depth.Set(static_cast<double>(limits.queue_depth));
  families_->max_in_flight_bytes.Set(static_cast<double>(limits.in_flight_bytes));
  families_->max_connections.Set(static_cast<double>(limits.connections));
}

void Metrics::SetCertificateEnd(CertificateUse use, absl::Time end) {
  families_->tls_certificate_end.Add({{"certificate", kCertificateNames[static_cast<size_t>(use)]}})
      .Set(absl::ToDoubleSeconds(end - absl::UnixEpoch()));
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

namespace {

// " 0.5, 1"
std::string ListOf(const std::vector<double>& bounds) {
  std::string text;
  for (const double bound : bounds) {
    std::string number = std::to_string(bound);
    number.erase(number.find_last_not_of('0') + 1);
    if (number.back() == '.') number.pop_back();
    text += (text.empty() ? " " : ", ") + number;
  }
  return text;
}

}  // namespace

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
  for (const Description& family : kDescriptions) {
    text += "| `" + std::string(family.name) + "` | " + family.type + " | " + family.labels + " | " + family.help + " |\n";
  }
  return text + "\nHistogram buckets, in seconds:" + ListOf(kSecondsBuckets) + ". Of ratios:" + ListOf(kRatioBuckets) + ".\n";
}

}  // namespace headwater::observability
