#include "server/service/server.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/observability/logging.h"
#include "server/service/head_service.h"
#include "server/service/loss_service.h"
#include "server/service/server_core.h"
#include "server/service/session_service.h"

namespace headwater::service {
namespace {

using observability::Log;
using observability::LogLevel;

constexpr int kWindowBytes = 4 << 20;
constexpr const char* kServiceNames[] = {"headwater.v1.LossService", "headwater.v1.HeadService", "headwater.v1.SessionService"};

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

// "0.0.0.0:0" with the port that was picked; Unix sockets as they are.
std::string BoundAddress(const std::string& address, int port) {
  if (absl::StartsWith(address, "unix:")) return address;
  return absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
}

}  // namespace

struct Server::State {
  // Destroyed from the bottom up: the gRPC server first, the core last.
  std::unique_ptr<ServerCore> core;
  std::unique_ptr<LossServiceImpl> loss_service;
  std::unique_ptr<HeadServiceImpl> head_service;
  std::unique_ptr<SessionServiceImpl> session_service;
  std::vector<std::string> addresses;
  int metrics_port = 0;
  absl::Mutex drain_mutex;
  bool drained ABSL_GUARDED_BY(drain_mutex) = false;
  bool drained_cleanly ABSL_GUARDED_BY(drain_mutex) = false;
  std::unique_ptr<grpc::Server> grpc_server;

  void SetHealth(bool serving) {
    grpc::HealthCheckServiceInterface* const health = grpc_server->GetHealthCheckService();
    health->SetServingStatus("", serving);
    for (const char* name : kServiceNames) health->SetServingStatus(name, serving);
  }
};

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options, std::unique_ptr<LossEngine> engine) {
  if (options.listen_addresses.empty()) return absl::InvalidArgumentError("listen_addresses: expected at least one, got none");
  auto core = ServerCore::Create(options, std::move(engine));
  if (!core.ok()) return core.status();
  auto state = std::make_unique<State>();
  state->core = *std::move(core);
  state->loss_service = std::make_unique<LossServiceImpl>(*state->core);
  state->head_service = std::make_unique<HeadServiceImpl>(*state->core);
  state->session_service = std::make_unique<SessionServiceImpl>(*state->core);

  // Once, and never undone: when the last user of gRPC goes, the library's own shutdown can wait 10 s for its background poller.
  static const bool grpc_stays = (grpc_init(), true);
  static_cast<void>(grpc_stays);
  grpc::EnableDefaultHealthCheckService(true);
  // The reference keeps the linker from dropping the library; the option takes the plugin out again.
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  builder.SetOption(std::make_unique<ReflectionOption>(options.reflection));
  builder.SetMaxReceiveMessageSize(static_cast<int>(options.limits.max_message_bytes));
  builder.SetMaxSendMessageSize(static_cast<int>(options.limits.max_message_bytes));
  // Tensors do not shrink, and a compressed message could unfold to many times its size.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, options.max_pollers);
  builder.SetResourceQuota(grpc::ResourceQuota("headwater").SetMaxThreads(options.max_threads));
  // Frames and a window in which a chunk fits, from the first message on. gRPC would find larger ones by probing, which costs
  // pings, and more: about a tenth of both sides' CPU time. The window is also what a stream may bring that nobody reads yet.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kWindowBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kWindowBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // two servers on one port would share its clients at random
  // A client that vanished without a word is noticed within 40 s; one that pings more often than every 5 s is sent away.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
  std::vector<int> ports(options.listen_addresses.size(), 0);
  for (size_t i = 0; i < ports.size(); ++i) {
    builder.AddListeningPort(options.listen_addresses[i], grpc::InsecureServerCredentials(), &ports[i]);
  }
  builder.RegisterService(state->loss_service.get());
  builder.RegisterService(state->head_service.get());
  builder.RegisterService(state->session_service.get());
  state->grpc_server = builder.BuildAndStart();
  if (state->grpc_server == nullptr || std::find(ports.begin(), ports.end(), 0) != ports.end()) {
    return absl::UnavailableError("cannot listen on all of the addresses; is another server there?");
  }
  state->SetHealth(false);
  for (size_t i = 0; i < ports.size(); ++i) state->addresses.push_back(BoundAddress(options.listen_addresses[i], ports[i]));
  if (!options.metrics_address.empty()) {
    auto port = state->core->metrics.Listen(options.metrics_address);
    if (!port.ok()) return port.status();
    state->metrics_port = *port;
  }
  state->core->WatchEngine([state = state.get(), on_lost = options.on_engine_lost](const absl::Status& lost) {
    state->SetHealth(false);
    Log(LogLevel::kError, "engine_lost", {{"message", std::string(lost.message())}});
    if (on_lost) on_lost(lost);
  });
  return std::unique_ptr<Server>(new Server(std::move(state)));
}

Server::Server(std::unique_ptr<State> state) : state_(std::move(state)) {}

Server::~Server() {
  Drain(absl::ZeroDuration());
  state_->core->StopWatchingEngine();  // it tells the gRPC server, which goes before the core
}

absl::Status Server::BecomeReady() {
  const absl::Time start = absl::Now();
  if (absl::Status status = SelfTest(*state_->core->engine); !status.ok()) {
    Log(LogLevel::kError, "self_test_failed", {{"message", std::string(status.message())}});
    return status;
  }
  state_->core->RestoreHeads();
  absl::MutexLock lock(&state_->drain_mutex);
  if (state_->drained) return absl::OkStatus();
  state_->core->SetPhase(ServerCore::Phase::kServing);
  state_->SetHealth(true);
  if (absl::Status lost = state_->core->lost(); !lost.ok()) {  // looked at after SetHealth(): the watch may have come first
    state_->SetHealth(false);
    return lost;
  }
  Log(LogLevel::kInfo, "serving", {{"self_test_ms", absl::ToDoubleMilliseconds(absl::Now() - start)}});
  return absl::OkStatus();
}

bool Server::Drain(absl::Duration timeout) {
  absl::MutexLock lock(&state_->drain_mutex);
  if (state_->drained) return state_->drained_cleanly;
  state_->drained = true;
  const absl::Time deadline = absl::Now() + timeout;
  state_->core->SetPhase(ServerCore::Phase::kDraining);
  state_->core->transfers.Drain();
  state_->SetHealth(false);
  // While accepted calls finish, new ones still get an answer that says why they are refused.
  state_->drained_cleanly = state_->core->AwaitIdle(deadline);
  // After a clean drain only last answers on their way and health watches are left: they get a moment. Otherwise calls that ran
  // into the timeout are, and they are cancelled now.
  const auto moment = state_->drained_cleanly ? std::chrono::seconds(1) : std::chrono::seconds(0);
  state_->grpc_server->Shutdown(std::chrono::system_clock::now() + moment);
  state_->grpc_server->Wait();
  state_->core->queue.Drain();
  Log(LogLevel::kInfo, "drained", {{"clean", state_->drained_cleanly ? "true" : "false"}});
  return state_->drained_cleanly;
}

const std::vector<std::string>& Server::addresses() const { return state_->addresses; }
int Server::metrics_port() const { return state_->metrics_port; }
void Server::CheckEngine() { state_->core->CheckEngine(); }
std::string Server::SerializeMetrics() const { return state_->core->metrics.Serialize(); }
LossEngine& Server::engine() { return *state_->core->engine; }

}  // namespace headwater::service
