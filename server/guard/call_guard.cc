#include "server/guard/call_guard.h"

#include <grpcpp/server_context.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/guard/stream_watchdog.h"
#include "server/observability/logging.h"
#include "server/observability/metrics.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::guard {

bool CallBacklog::OnCall(int64_t connection, absl::Time now) {
  std::string dropped;
  {
    absl::MutexLock lock(&mutex_);
    if (connections_.size() >= sweep_at_) Sweep(now);
    Connection& known = At(connection, now);
    if (!known.is_over) {
      if (known.waiting + 1 <= static_cast<double>(most_)) {
        known.waiting += 1;
        return true;
      }
      known.is_over = true;
    }
    dropped = TakeForDrop(known);
  }
  if (!dropped.empty()) drop_(dropped);
  return false;
}

void CallBacklog::OnTaken(int64_t connection, const std::string& peer, absl::Time now) {
  std::string dropped;
  {
    absl::MutexLock lock(&mutex_);
    Connection& known = At(connection, now);
    known.waiting = std::max(0.0, known.waiting - 1);
    if (known.peer.empty()) known.peer = peer;
    dropped = TakeForDrop(known);
  }
  if (!dropped.empty()) drop_(dropped);
}

CallBacklog::Connection& CallBacklog::At(int64_t connection, absl::Time now) {
  const auto [place, is_new] = connections_.try_emplace(connection);
  Connection& known = place->second;
  if (is_new) known.last = now;
  const double seconds = std::max(0.0, absl::ToDoubleSeconds(now - known.last));
  known.waiting = std::max(0.0, known.waiting - forgotten_a_second_ * seconds);
  known.last = now;
  return known;
}

void CallBacklog::Sweep(absl::Time now) {
  for (auto place = connections_.begin(); place != connections_.end();) {
    const Connection& known = place->second;
    const bool nothing_waits = known.waiting <= forgotten_a_second_ * absl::ToDoubleSeconds(now - known.last);
    place = nothing_waits ? connections_.erase(place) : std::next(place);
  }
  sweep_at_ = std::max(kLeastSweep, 2 * connections_.size());
}

std::string CallBacklog::TakeForDrop(Connection& connection) {
  if (!connection.is_over || connection.is_dropped || connection.peer.empty()) return "";
  connection.is_dropped = true;
  return connection.peer;
}

namespace {

// A watch never ends by itself, and needs no token.
constexpr char kHealthWatch[] = "/grpc.health.v1.Health/Watch";

// Each connection has an authentication context, which its calls share; this is a property of it.
constexpr char kConnectionProperty[] = "headwater_connection";
struct Connection {
  int64_t number = 0;      // its name for the backlog
  int64_t is_counted = 0;  // 1 if its calls are
};

// gRPC's contexts have no lock of their own.
absl::Mutex& PropertiesMutex() {
  static absl::Mutex mutex(absl::kConstInit);
  return mutex;
}

std::optional<Connection> FindConnection(const grpc_auth_context* context) {
  grpc_auth_property_iterator properties = grpc_auth_context_find_properties_by_name(context, kConnectionProperty);
  const grpc_auth_property* const property = grpc_auth_property_iterator_next(&properties);
  Connection connection;
  if (property == nullptr || property->value_length != sizeof(connection)) return std::nullopt;
  std::memcpy(&connection, property->value, sizeof(connection));
  return connection;
}

std::optional<Connection> FindConnection(grpc_call* call) {
  grpc_auth_context* const context = call == nullptr ? nullptr : grpc_call_auth_context(call);
  if (context == nullptr) return std::nullopt;
  std::optional<Connection> connection;
  {
    absl::MutexLock lock(&PropertiesMutex());
    connection = FindConnection(context);
  }
  grpc_auth_context_release(context);
  return connection;
}

struct Processor {
  std::shared_ptr<CallBacklog> backlog;
  bool counts = false;
};

void OnMetadata(void* state, grpc_auth_context* context, const grpc_metadata*, size_t, grpc_process_auth_metadata_done_cb done,
                void* user_data) {
  const Processor& processor = *static_cast<const Processor*>(state);
  CallBacklog& backlog = *processor.backlog;
  std::optional<Connection> connection;
  {
    absl::MutexLock lock(&PropertiesMutex());
    connection = FindConnection(context);
    if (!connection.has_value()) {
      connection = Connection{backlog.NewConnection(), processor.counts ? 1 : 0};
      grpc_auth_context_add_property(context, kConnectionProperty, reinterpret_cast<const char*>(&*connection),
                                     sizeof(*connection));
    }
  }
  if (connection->is_counted == 0 || backlog.OnCall(connection->number, observability::MonotonicNow())) {
    done(user_data, nullptr, 0, nullptr, 0, GRPC_STATUS_OK, nullptr);
  } else {
    done(user_data, nullptr, 0, nullptr, 0, GRPC_STATUS_RESOURCE_EXHAUSTED,
         "too many calls of the connection wait that were reset (max_reset_backlog)");
  }
}

class CountedCredentials final : public grpc::ServerCredentials {
 public:
  CountedCredentials(grpc_server_credentials* credentials, Processor state) : credentials_(credentials) {
    grpc_auth_metadata_processor processor{};
    processor.process = OnMetadata;
    processor.destroy = [](void* own) { delete static_cast<Processor*>(own); };
    processor.state = new Processor(std::move(state));
    grpc_server_credentials_set_auth_metadata_processor(credentials_, processor);
  }
  ~CountedCredentials() override { grpc_server_credentials_release(credentials_); }

  // Each credentials have one processor, and this one is taken.
  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override { std::abort(); }

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  grpc_server_credentials* const credentials_;
};

// Reports to the backlog that gRPC starts a call, before the call has its handler. A call that gRPC refuses for lack of a thread
// never has a handler, and would count as waiting forever.
void CountStart(CallBacklog& backlog, grpc::ServerContextBase& context) {
  const std::optional<Connection> connection = FindConnection(context.c_call());
  if (!connection.has_value() || connection->is_counted == 0) return;
  backlog.OnTaken(connection->number, context.peer(), observability::MonotonicNow());
}

}  // namespace

std::shared_ptr<grpc::ServerCredentials> CountCalls(grpc_server_credentials* credentials, std::shared_ptr<CallBacklog> backlog,
                                                    bool is_counted) {
  return std::make_shared<CountedCredentials>(credentials, Processor{std::move(backlog), is_counted});
}

std::optional<int64_t> ConnectionOf(grpc_call* call) {
  const std::optional<Connection> connection = FindConnection(call);
  return connection.has_value() ? std::optional(connection->number) : std::nullopt;
}

class CallGuard::Guard final : public grpc::experimental::Interceptor {
 public:
  Guard(const CallGuard& all, grpc::experimental::ServerRpcInfo& info) : all_(all), info_(info) {
    if (std::strcmp(info.method(), kHealthWatch) != 0) return;
    watches_ = all.watches_;
    place_ = watches_->fetch_add(1);
  }
  ~Guard() override { GiveBack(); }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    // Once for each call, whether a handler follows or not.
    if (methods->QueryInterceptionHookPoint(grpc::experimental::InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      CountStart(all_.backlog_, *info_.server_context());
      if (!absl::StartsWith(info_.method(), "/headwater.v1.")) Check(*methods);
    }
    methods->Proceed();
  }

 private:
  void Check(grpc::experimental::InterceptorBatchMethods& methods) {
    if (absl::Status allowed = all_.authorize_(info_.method(), *methods.GetRecvInitialMetadata()); !allowed.ok()) {
      End(allowed);
    } else if (place_ >= all_.max_health_watches_) {
      End(absl::ResourceExhaustedError(absl::StrCat("expected at most ", all_.max_health_watches_,
                                                    " watches of the health (max_health_watches), and that many are open")));
    }
  }

  void GiveBack() {
    if (watches_ != nullptr) watches_->fetch_sub(1);
    watches_ = nullptr;
  }

  void End(const absl::Status& why) {
    GiveBack();  // gRPC may keep an ended call for a while, and refused clients retry
    // Ends the call with this status before its handler runs; the handler then finds no message and cannot answer.
    EndCall(*info_.server_context(), why);
    if (!FailedCallLines().Take().has_value()) return;
    observability::Log(observability::LogLevel::kWarning, "rpc",
                       {{"method", info_.method()},
                        {"code", observability::CanonicalCodeName(why.code())},
                        {"message", std::string(why.message())}});
  }

  const CallGuard& all_;
  grpc::experimental::ServerRpcInfo& info_;
  std::shared_ptr<std::atomic<int64_t>> watches_;  // that are in progress and not refused; null for a call of another method
  int64_t place_ = 0;
};

grpc::experimental::Interceptor* CallGuard::CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) {
  return new Guard(*this, *info);
}

}  // namespace headwater::guard
