// gRPC handlers of headwater.v1.GroupService.
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "headwater/kernels/error.h"
#include "headwater/v1/group_service.grpc.pb.h"
#include "server/group/group_assembly.h"
#include "server/service/call/stream_io.h"
#include "server/service/services.h"

namespace headwater::service {

namespace {

using JoinStream = grpc::ServerReaderWriter<v1::JoinResponse, v1::JoinRequest>;

class StreamCall final : public group::JoinCall {
 public:
  StreamCall(RpcScope& scope, JoinStream& stream) : scope_(scope), stream_(stream) {}

  // Whether the worker may still be in the group is checked with every message; a live worker sends several a second. If not, the
  // group treats the call as ended. The watchdog ends a call that sends no first message.
  bool Read(v1::JoinRequest* message) override {
    const auto read = [&] { return stream_.Read(message); };
    std::optional<ClientWatch> watch;
    if (!std::exchange(has_begun_, true)) watch.emplace(scope_);
    return (watch.has_value() ? Watched(*watch, read) : read()) && scope_.AllowedStill()().ok();
  }
  bool Send(const v1::JoinResponse& message) override { return stream_.Write(message); }
  void Cancel() override { scope_.context().TryCancel(); }

  std::string host() const override {
    // "ipv4:10.0.0.1:4711", "ipv6:%5B::1%5D:4711", with a zone "ipv6:%5Bfe80::1%252%5D:4711", or "unix:...", which is a process of
    // this host.
    const std::string peer = scope_.context().peer();
    if (absl::StartsWith(peer, "ipv4:")) return peer.substr(5, peer.rfind(':') - 5);
    if (!absl::StartsWith(peer, "ipv6:")) return "";
    const size_t start = peer.find_first_of("[B") + 1;
    const std::string host = peer.substr(start, peer.find_last_of("]%") - start);
    return absl::StrCat("[", absl::StrReplaceAll(host, {{"%25", "%"}}), "]");
  }

 private:
  RpcScope& scope_;
  JoinStream& stream_;
  bool has_begun_ = false;
};

absl::Status Join(RpcScope& scope, JoinStream& stream) {
  const ServerOptions& options = scope.core().options;
  if (options.group == nullptr) {
    return MakeError(ErrorReason::kFeatureNotBuilt, "this server has no workers: it was started without --workers",
                     {{"feature", "workers"}});
  }
  // A worker holds shards of the heads of all tenants: no permission on some heads is enough.
  const std::string token = scope.caller().token_name();
  if (!token.empty() && token != options.worker_token) {
    return MakeError(ErrorReason::kPermissionDenied, "only the token that the server's --worker_token names may join",
                     {{"permission", "admin"}, {"method", "/headwater.v1.GroupService/Join"}, {"expected", "worker_token"}});
  }
  StreamCall call(scope, stream);
  const absl::Status ended = options.group->Serve(call);
  HEADWATER_RETURN_IF_ERROR(scope.AllowedStill()());
  return ended;
}

class GroupServiceImpl final : public v1::GroupService::Service {
 public:
  explicit GroupServiceImpl(const Entrance& entrance) : entrance_(entrance) {}

 private:
  // Takes a thread of the calls' for as long as the worker is there.
  grpc::Status Join(grpc::ServerContext* context, JoinStream* stream) override {
    return RunRpc(entrance_, *context, observability::RpcMethod::kJoin,
                  [stream](RpcScope& scope) { return service::Join(scope, *stream); });
  }

  const Entrance entrance_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeGroupService(const Entrance& entrance) { return std::make_unique<GroupServiceImpl>(entrance); }

}  // namespace headwater::service
