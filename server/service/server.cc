#include "server/service/server.h"

#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/return_if_error.h"
#include "server/group/group_assembly.h"
#include "server/guard/call_guard.h"
#include "server/guard/connection_gate.h"
#include "server/observability/logging.h"
#include "server/observability/metrics.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/access/ports.h"
#include "server/service/server_core.h"
#include "server/service/services.h"

namespace headwater::service {
namespace {

using observability::Log;
using observability::LogField;
using observability::LogLevel;
using observability::MonotonicNow;

// Apart from FailedCallLines(): strangers' handshakes must not hide calls that fail, nor these the handshakes.
guard::LineBudget& GrpcLines() {
  static auto* const budget = new guard::LineBudget(/*a_second=*/10, /*at_once=*/100);
  return *budget;
}

// By gRPC's severity.
constexpr LogLevel kLevels[] = {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kError};

void TakeLine(gpr_log_func_args* line) {
  const absl::string_view message = line->message;
  const absl::string_view path = line->file;
  const absl::string_view file = path.substr(path.rfind('/') + 1);
  // OpenSSL's refusal of a handshake. gRPC has no other place that reports one.
  const bool handshake = file == "ssl_transport_security.cc" && absl::StartsWith(message, "Handshake failed");
  if (handshake) observability::Metrics::CountTlsHandshakeFailure();
  std::optional<int64_t> left_out = GrpcLines().Take();
  if (absl::StartsWith(message, "assertion failed")) left_out = left_out.value_or(0);  // the last line of a process that aborts
  if (!left_out.has_value()) return;
  std::vector<LogField> fields = {{"message", std::string(message)}, {"source", absl::StrCat(file, ":", line->line)}};
  if (*left_out > 0) fields.emplace_back("lines_left_out", *left_out);
  Log(handshake ? LogLevel::kWarning : kLevels[line->severity], handshake ? "tls_handshake_failed" : "grpc", fields);
}

constexpr int kWindowBytes = 4 << 20;

int Milliseconds(absl::Duration duration) { return static_cast<int>(absl::ToInt64Milliseconds(duration)); }

constexpr const char* kServiceNames[] = {"headwater.v1.LossService", "headwater.v1.HeadService", "headwater.v1.SessionService",
                                         "headwater.v1.GroupService"};

absl::Status CannotListen(const absl::Status& why) {
  return absl::UnavailableError(absl::StrCat("cannot listen on all of the addresses: ", why.message()));
}

// The reflection library registers its plugin for every server; this takes it out again unless it was asked for.
class ReflectionOption final : public grpc::ServerBuilderOption {
 public:
  explicit ReflectionOption(bool enabled) : enabled_(enabled) {}
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    if (enabled_) return;
    plugins->erase(std::remove_if(plugins->begin(), plugins->end(),
                                  [](const auto& plugin) { return plugin->name() == "proto_server_reflection"; }),
                   plugins->end());
  }

 private:
  const bool enabled_;
};

// One warning for each address that the whole network can reach without an identity, or with a token that can be read on the way.
void WarnOfOpenAddress(const ServerOptions& options, const std::string& address) {
  if (!options.tls_client_ca.empty()) return;
  const bool tls = !options.tls_certificate.empty();
  const bool tokens = !options.token_file.empty();
  if (tls && tokens) return;
  Log(LogLevel::kWarning, "unprotected",
      {{"address", address},
       {"message", tls ? "whoever reaches this address may do everything: set token_file or tls_client_ca"
                   : tokens
                       ? "tokens and tensors can be read on the way to this address: set tls_certificate and tls_key"
                       : "whoever reaches this address may read and do everything: set tls_certificate, tls_key and token_file"}});
}

}  // namespace

void TakeGrpcLog() { gpr_set_log_function(&TakeLine); }

// Ports of one role: a gRPC server with services of its own, which know the role.
struct Server::Ports {
  std::vector<std::unique_ptr<grpc::Service>> services;
  std::vector<std::string> addresses;
  std::unique_ptr<grpc::Server> grpc_server;
  // One for TCP and one for Unix sockets: they hand gRPC the connections that the gate lets in.
  std::array<std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor>, 2> acceptors;

  // Unavailable if an address cannot be listened on.
  absl::Status Listen(const ServerOptions& options, const std::vector<std::string>& wanted, const Entrance& entrance,
                      const std::shared_ptr<grpc::ServerCredentials>& credentials, const SocketAccess& socket_access,
                      const grpc::ResourceQuota& quota) {
    const Limits& limits = options.limits;
    grpc::ServerBuilder builder;
    builder.SetOption(std::make_unique<ReflectionOption>(options.reflection));
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> guards;
    const auto authorize = [entrance](const char* method, const guard::CallGuard::Metadata& metadata) {
      return entrance.core.access->Authorize(FindAccessRow(method), entrance.role, AuthorizationOf(metadata)).status();
    };
    guards.push_back(std::make_unique<guard::CallGuard>(*entrance.core.backlog, authorize, limits.max_health_watches));
    builder.experimental().SetInterceptorCreators(std::move(guards));
    builder.SetMaxReceiveMessageSize(static_cast<int>(limits.max_message_bytes));
    // A worker gets in one message the bytes of one or more of a client's, in wider types perhaps. None of these may be too large,
    // because it would cost the group. All else that is sent has limits of its own.
    builder.SetMaxSendMessageSize(options.group != nullptr ? -1 : static_cast<int>(limits.max_message_bytes));
    // Tensors do not shrink, and a compressed message could unfold to many times its size.
    builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
    builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
    builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
    builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, options.max_pollers);
    builder.SetResourceQuota(quota);
    // Frames and a window in which a chunk fits, from the first message on. gRPC would find larger ones by probing, which costs
    // pings, and more: about a tenth of both sides' CPU time. The window also bounds the unread bytes of a stream.
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kWindowBytes);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kWindowBytes);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    // A client that vanished without a word is noticed within 40 s; one that pings too often is sent away.
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, Milliseconds(limits.min_ping_interval));
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, static_cast<int>(limits.max_connection_streams));
    builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, static_cast<int>(limits.max_metadata_bytes));
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, Milliseconds(limits.max_handshake_time));
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, Milliseconds(limits.max_connection_idle));
    for (const auto make : {MakeLossService, MakeHeadService, MakeSessionService, MakeGroupService}) {
      builder.RegisterService(services.emplace_back(make(entrance)).get());
    }

    guard::ConnectionGate& gate = entrance.core.gates->emplace_back(limits.max_connections, options.max_cancel_rate);
    for (const std::string& address : wanted) {
      HEADWATER_ASSIGN_OR_RETURN(const ListenAddress parsed, ParseListenAddress(address));
      auto& acceptor = acceptors[parsed.is_unix() ? 1 : 0];
      if (acceptor == nullptr) {
        using Type = grpc::ServerBuilder::experimental_type::ExternalConnectionType;
        // Connections of a Unix socket have no addresses of their own: a connection's number identifies the client.
        acceptor = builder.experimental().AddExternalConnectionAcceptor(
            Type::FROM_FD, parsed.is_unix() ? guard::CountCalls(grpc_insecure_server_credentials_create(), entrance.core.backlog,
                                                                /*is_counted=*/false)
                                            : credentials);
      }
      const auto take = [to = acceptor.get()](int listener_fd, int fd) {
        grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
        connection.listener_fd = listener_fd;
        connection.fd = fd;
        to->HandleNewConnection(&connection);
      };
      if (parsed.is_unix()) {
        // A socket is at no moment more open than it should be.
        const absl::Cleanup restore = [before = umask(0177)] { umask(before); };
        if (absl::Status status = gate.ListenUnix(parsed.path, take); !status.ok()) return CannotListen(status);
        HEADWATER_RETURN_IF_ERROR(SetSocketAccess(parsed.path, socket_access));
        addresses.push_back(address);
      } else {
        auto bound = gate.ListenTcp(parsed.host, parsed.port, take);
        if (!bound.ok()) return CannotListen(bound.status());
        addresses.push_back(absl::StrCat(parsed.host, ":", *bound));
      }
      if (!parsed.is_local()) WarnOfOpenAddress(options, addresses.back());
    }
    grpc_server = builder.BuildAndStart();
    if (grpc_server == nullptr) return absl::UnavailableError("gRPC's server cannot be started");
    return absl::OkStatus();
  }
};

struct Server::State {
  ~State() {  // nothing is accepted any more when the gRPC servers go
    if (core == nullptr) return;
    for (guard::ConnectionGate& gate : *core->gates) gate.Stop();
  }

  // Destroyed from the bottom up: the gRPC servers first, the core last.
  std::unique_ptr<ServerCore> core;
  std::optional<CertificateWatch> certificates;
  int metrics_port = 0;
  std::deque<Ports> ports;
  absl::Mutex drain_mutex;
  bool drained ABSL_GUARDED_BY(drain_mutex) = false;
  bool drained_cleanly ABSL_GUARDED_BY(drain_mutex) = false;
  bool heads_saved ABSL_GUARDED_BY(drain_mutex) = true;

  void SetHealth(bool serving) {
    for (const Ports& group : ports) {
      grpc::HealthCheckServiceInterface* const health = group.grpc_server->GetHealthCheckService();
      health->SetServingStatus("", serving);
      for (const char* name : kServiceNames) health->SetServingStatus(name, serving);
    }
  }
};

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options, std::unique_ptr<LossEngine> engine) {
  if (options.listen_addresses.empty()) return absl::InvalidArgumentError("listen_addresses: expected at least one, got none");
  for (const auto& [field, addresses] : {std::pair("listen_addresses", &options.listen_addresses),
                                         std::pair("admin_listen_addresses", &options.admin_listen_addresses)}) {
    for (const std::string& address : *addresses) {
      const absl::Status status = ParseListenAddress(address).status();
      if (!status.ok()) return absl::InvalidArgumentError(absl::StrCat(field, ": ", status.message()));
    }
  }
  HEADWATER_ASSIGN_OR_RETURN(const auto socket_access, MakeSocketAccess(options.unix_socket_owner, options.unix_socket_mode));
  auto state = std::make_unique<State>();
  HEADWATER_ASSIGN_OR_RETURN(state->core, ServerCore::Create(options, std::move(engine)));
  ServerCore& core = *state->core;
  // Once, and never undone: when the last user of gRPC goes, the library's own shutdown can wait 10 s for its background poller.
  static const bool grpc_stays = (grpc_init(), true);
  static_cast<void>(grpc_stays);
  HEADWATER_ASSIGN_OR_RETURN(const auto credentials, MakeServerCredentials(options, core.backlog));
  state->certificates.emplace(core.options, core.metrics);

  grpc::EnableDefaultHealthCheckService(true);
  // The reference keeps the linker from dropping the library; the option takes the plugin out again.
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ResourceQuota quota("headwater");
  quota.SetMaxThreads(options.max_threads);
  const auto listen = [&](const std::vector<std::string>& wanted, PortRole role) {
    return state->ports.emplace_back().Listen(options, wanted, Entrance(core, role), credentials, socket_access, quota);
  };
  const bool apart = !options.admin_listen_addresses.empty();
  HEADWATER_RETURN_IF_ERROR(listen(options.listen_addresses, apart ? PortRole::kData : PortRole::kAll));
  if (apart) HEADWATER_RETURN_IF_ERROR(listen(options.admin_listen_addresses, PortRole::kAll));
  state->SetHealth(false);
  for (guard::ConnectionGate& gate : *core.gates) HEADWATER_RETURN_IF_ERROR(gate.Start());
  if (!options.metrics_address.empty()) {
    HEADWATER_ASSIGN_OR_RETURN(state->metrics_port, core.metrics.Listen(options.metrics_address));
  }
  core.WatchEngine([state = state.get(), on_lost = options.on_engine_lost](const absl::Status& lost) {
    state->SetHealth(false);
    Log(LogLevel::kError, "engine_lost", {{"message", std::string(lost.message())}});
    if (on_lost) on_lost(lost);
  });
  return std::unique_ptr<Server>(new Server(std::move(state)));
}

Server::Server(std::unique_ptr<State> state) : state_(std::move(state)) {}

Server::~Server() {
  Drain(absl::ZeroDuration());
  state_->core->StopWatchingEngine();  // it uses the gRPC server, which goes before the core
}

absl::Status Server::BecomeReady(const std::function<bool()>& cancelled) {
  if (const auto& group = state_->core->options.group; group != nullptr) HEADWATER_RETURN_IF_ERROR(group->Form());
  const absl::Time start = MonotonicNow();
  if (absl::Status status = SelfTest(*state_->core->engine); !status.ok()) {
    Log(LogLevel::kError, "self_test_failed", {{"message", std::string(status.message())}});
    return status;
  }
  state_->core->FindProductRate();
  state_->core->RestoreHeads(cancelled);
  if (cancelled()) return MakeError(ErrorReason::kCancelled, "the server is to end before it has begun");
  absl::MutexLock lock(&state_->drain_mutex);
  if (state_->drained) return absl::OkStatus();
  state_->core->SetPhase(ServerCore::Phase::kServing);
  state_->SetHealth(true);
  if (absl::Status lost = state_->core->lost(); !lost.ok()) {  // looked at after SetHealth(): the watch may have come first
    state_->SetHealth(false);
    return lost;
  }
  Log(LogLevel::kInfo, "serving", {{"self_test_ms", absl::ToDoubleMilliseconds(MonotonicNow() - start)}});
  return absl::OkStatus();
}

bool Server::Drain(absl::Duration timeout) {
  absl::MutexLock lock(&state_->drain_mutex);
  if (state_->drained) return state_->drained_cleanly;
  state_->drained = true;
  const absl::Time deadline = MonotonicNow() + timeout;
  state_->core->SetPhase(ServerCore::Phase::kDraining);
  state_->core->transfers.Drain();
  state_->SetHealth(false);
  // While accepted calls finish, new ones still get an answer that says why they are refused.
  if (state_->core->options.drain_checkpoint && timeout > absl::ZeroDuration() && state_->core->lost().ok()) {
    // Half of the time is for saving, however long calls take. Later changes are saved again, if there is time.
    state_->core->AwaitIdle(deadline - timeout / 2);
    state_->heads_saved = state_->core->SaveHeads(deadline);
    state_->drained_cleanly = state_->core->AwaitIdle(deadline);
    state_->heads_saved = state_->core->SaveHeads(deadline);
  } else {
    state_->drained_cleanly = state_->core->AwaitIdle(deadline);
  }
  if (state_->core->options.group != nullptr) state_->core->options.group->Dismiss();
  // After a clean drain only last answers on their way and health watches are left: they get a moment. Otherwise the calls that ran
  // into the timeout are cancelled now.
  const auto moment = state_->drained_cleanly ? std::chrono::seconds(1) : std::chrono::seconds(0);
  const auto end = std::chrono::system_clock::now() + moment;
  for (guard::ConnectionGate& gate : *state_->core->gates) gate.Stop();
  for (Ports& group : state_->ports) group.grpc_server->Shutdown(end);
  for (Ports& group : state_->ports) group.grpc_server->Wait();
  state_->core->queue.Drain();
  Log(LogLevel::kInfo, "drained", {{"clean", state_->drained_cleanly}});
  return state_->drained_cleanly;
}

bool Server::heads_saved() const {
  absl::MutexLock lock(&state_->drain_mutex);
  return state_->heads_saved;
}

const std::vector<std::string>& Server::addresses() const { return state_->ports.front().addresses; }
std::vector<std::string> Server::admin_addresses() const {
  return state_->ports.size() > 1 ? state_->ports.back().addresses : std::vector<std::string>();
}
int Server::metrics_port() const { return state_->metrics_port; }
void Server::CheckEngine() { state_->core->CheckEngine(); }
std::string Server::SerializeMetrics() const { return state_->core->metrics.Serialize(); }
LossEngine& Server::engine() { return *state_->core->engine; }

}  // namespace headwater::service
