#include "server/observability/metrics.h"

#include <microhttpd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string_view>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "headwater/kernels/listen_tcp.h"
#include "headwater/kernels/return_if_error.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"

namespace headwater::observability {
namespace {

MHD_Result Send(MHD_Connection* connection, unsigned code, const std::string& body, const char* header, const char* value) {
  MHD_Response* response =
      MHD_create_response_from_buffer(body.size(), const_cast<char*>(body.data()), MHD_RESPMEM_MUST_COPY);  // NOLINT: only read
  if (response == nullptr) return MHD_NO;
  MHD_add_response_header(response, header, value);
  const MHD_Result queued = MHD_queue_response(connection, code, response);
  MHD_destroy_response(response);
  return queued;
}

MHD_Result Answer(void* endpoint, MHD_Connection* connection, const char* url, const char* method, const char* /*version*/,
                  const char* /*body*/, size_t* body_bytes, void** state) {
  // Called once with the headers alone; requests with a body are refused then.
  static char has_begun;
  const std::string_view verb = method;
  if (verb != MHD_HTTP_METHOD_GET && verb != MHD_HTTP_METHOD_HEAD) {
    return Send(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "expected GET\n", MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
  }
  if (*state == nullptr) {
    *state = &has_begun;
    return MHD_YES;
  }
  *body_bytes = 0;
  constexpr char kPlain[] = "text/plain; charset=utf-8";
  if (std::string_view(url) != "/metrics") {
    return Send(connection, MHD_HTTP_NOT_FOUND, "expected /metrics\n", MHD_HTTP_HEADER_CONTENT_TYPE, kPlain);
  }
  return Send(connection, MHD_HTTP_OK, static_cast<MetricsEndpoint*>(endpoint)->page()(), MHD_HTTP_HEADER_CONTENT_TYPE,
              "text/plain; version=0.0.4; charset=utf-8");
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Listen(const std::string& address,
                                                                         std::function<std::string()> page) {
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon == std::string::npos || colon == 0 || !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return absl::InvalidArgumentError("metrics: expected host:port, with a port from 0 to 65535, got '" + address + "'");
  }
  const absl::StatusOr<TcpListeners> listening = ListenTcp(address.substr(0, colon), port);
  if (absl::IsNotFound(listening.status())) {
    return absl::InvalidArgumentError("metrics: expected host:port, got '" + address +
                                      "': " + std::string(listening.status().message()));
  }
  if (!listening.ok()) {
    return absl::UnavailableError("metrics: cannot listen on " + address + ": " + std::string(listening.status().message()));
  }
  std::unique_ptr<MetricsEndpoint> endpoint(new MetricsEndpoint(std::move(page), listening->port));
  for (const int fd : listening->sockets) {  // each daemon closes its own
    MHD_Daemon* const daemon = MHD_start_daemon(MHD_USE_AUTO_INTERNAL_THREAD, /*port=*/0, nullptr, nullptr, &Answer, endpoint.get(),
                                                MHD_OPTION_LISTEN_SOCKET, fd,                  //
                                                MHD_OPTION_CONNECTION_LIMIT, kMaxConnections,  //
                                                MHD_OPTION_CONNECTION_TIMEOUT, kIdleTimeoutSeconds, MHD_OPTION_END);
    if (daemon == nullptr) return absl::UnavailableError("metrics: the HTTP server on " + address + " cannot be started");
    endpoint->daemons_.push_back(daemon);
  }
  return endpoint;
}

MetricsEndpoint::~MetricsEndpoint() {
  for (MHD_Daemon* const daemon : daemons_) MHD_stop_daemon(daemon);
}

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

#define HEADWATER_RPC_NAME(service, name, needs) #name,
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
constexpr Label kRegionKind = {"kind", {"shared", "named", "device"}};  // by transport::RegionKind
constexpr Label kPurpose = {"purpose",
                            {"weight", "bias", "int8_weight", "grad_weight", "grad_bias", "master_weight", "optimizer_state",
                             "staging", "workspace", "other"}};
static_assert(kMethod.Names(RpcMethod::kCount) && kDirection.Names(Direction::kCount) && kTransport.Names(Transport::kCount) &&
              kLoss.Names(LossKind::kCount) && kOutcome.Names(MicroBatchOutcome::kCount) && kStepEnd.Names(StepOutcome::kCount) &&
              kActivity.Names(RankActivity::kCount) && kSessionEndLabel.Names(SessionEnd::kCount) &&
              kTraceEnd.Names(TraceOutcome::kCount) && kCertificate.Names(CertificateUse::kCount) &&
              kMemoryState.Names(RowMemory::kCount));

// The last two are histograms. A late gauge is served from the first time that it is set.
enum Kind { kCounter, kGauge, kLateGauge, kSeconds, kRatios };
// Seconds; a micro-batch takes from a millisecond to minutes.
const std::vector<double> kSecondsBuckets = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60};
// Shares of a whole, up to 1.
const std::vector<double> kRatioBuckets = {0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1};

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

// Brings a counter to a total that was counted elsewhere; a counter takes increases only.
void RaiseTo(prometheus::Counter& counter, double total) { counter.Increment(std::max(0.0, total - counter.Value())); }

}  // namespace

const char* RpcMethodName(RpcMethod method) { return kMethod.value(Index(method)); }

const char* TransportName(Transport transport) { return kTransport.value(Index(transport)); }

const char* CanonicalCodeName(absl::StatusCode code) { return Index(code) < kCode.count() ? kCode.value(Index(code)) : "UNKNOWN"; }

struct Metrics::Families {
  Families() {
    for (size_t i = 0; i < std::size(kRows); ++i) {
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
      for (size_t second = 0; second < row.second.count(); ++second) Child<T>(static_cast<Metric>(index), first, second);
    }
  }

  // The child of a family by the numbers of its labels' values, made at first use.
  template <typename T>
  T& Child(Metric metric, LabelValue first = {}, LabelValue second = {}) {
    const size_t index = Index(metric);
    const Row& row = kRows[index];
    std::atomic<void*>& slot = children[index][first.index * row.second.count() + second.index];
    T* child = static_cast<T*>(slot.load(std::memory_order_acquire));
    if (child != nullptr) return *child;
    prometheus::Labels labels;
    if (row.first.name != nullptr) labels.emplace(row.first.name, row.first.value(first.index));
    if (row.second.name != nullptr) labels.emplace(row.second.name, row.second.value(second.index));
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

  prometheus::Registry registry;
  std::array<std::variant<Counters*, Gauges*, Histograms*>, std::size(kRows)> families;
  std::array<std::vector<std::atomic<void*>>, std::size(kRows)> children;

  absl::Mutex source_mutex;
  std::function<void()> source ABSL_GUARDED_BY(source_mutex);

  // Declared last: it stops before a scrape's sources are destroyed.
  std::unique_ptr<MetricsEndpoint> endpoint;
};

Metrics::Metrics(const std::string& version, const std::string& engine) : families_(std::make_unique<Families>()) {
  std::get<Gauges*>(families_->families[Index(Metric::kBuildInfo)])->Add({{kVersion.name, version}, {kEngine.name, engine}}).Set(1);
  Set(Metric::kProcessStart, absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
}

Metrics::~Metrics() = default;

void Metrics::CountRequest(RpcMethod method, const absl::Status& status, absl::Duration duration) {
  const size_t code = Index(status.code()) < kCode.count() ? Index(status.code()) : Index(absl::StatusCode::kUnknown);
  Count(Metric::kRequests, 1, method, code);
  Observe(Metric::kRequestSeconds, duration, method);
  if (!status.ok()) Count(Metric::kRefusals, 1, GetErrorReason(status));
}

void Metrics::CountMicroBatch(MicroBatchOutcome outcome) {
  Count(Metric::kMicroBatches, 1, outcome);
  if (outcome == MicroBatchOutcome::kDiscarded) Count(Metric::kDiscards);
}

void Metrics::Add(Metric counter, double events, LabelValue first, LabelValue second) {
  families_->Child<prometheus::Counter>(counter, first, second).Increment(events);
}
void Metrics::Raise(Metric counter, double total) { RaiseTo(families_->Child<prometheus::Counter>(counter), total); }
void Metrics::SetTo(Metric gauge, double value, LabelValue label) { families_->Child<prometheus::Gauge>(gauge, label).Set(value); }
void Metrics::Observe(Metric histogram, double value, LabelValue label) {
  families_->Child<prometheus::Histogram>(histogram, label).Observe(value);
}

void Metrics::RaiseRankSeconds(size_t rank, RankActivity activity, absl::Duration total) {
  Counters& family = *std::get<Counters*>(families_->families[Index(Metric::kRankSeconds)]);
  RaiseTo(family.Add({{kRank.name, absl::StrCat(rank)}, {kActivity.name, kActivity.value(Index(activity))}}),
          absl::ToDoubleSeconds(total));
}

void Metrics::SetPlannedBytes(const std::map<std::string, int64_t>& by_purpose) {
  std::array<int64_t, kPurpose.count()> planned{};
  for (const auto& [purpose, bytes] : by_purpose) planned[PurposeIndex(purpose)] += bytes;
  for (size_t purpose = 0; purpose < planned.size(); ++purpose) Set(Metric::kMemoryPlanned, planned[purpose], purpose);
}

void Metrics::CountTlsHandshakeFailure() { TlsHandshakeFailures().fetch_add(1, std::memory_order_relaxed); }

void Metrics::SetGaugeSource(std::function<void()> read) {
  absl::MutexLock lock(&families_->source_mutex);
  families_->source = std::move(read);
}

std::string Metrics::Serialize() {
  {
    absl::MutexLock lock(&families_->source_mutex);
    if (families_->source) families_->source();
  }
  Raise(Metric::kTlsHandshakeFailures, static_cast<double>(TlsHandshakeFailures().load(std::memory_order_relaxed)));
  Set(Metric::kProcessMemory, ResidentBytes());
  return prometheus::TextSerializer().Serialize(families_->registry.Collect());
}

absl::StatusOr<int> Metrics::Listen(const std::string& address) {
  HEADWATER_ASSIGN_OR_RETURN(families_->endpoint, MetricsEndpoint::Listen(address, [this] { return Serialize(); }));
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
