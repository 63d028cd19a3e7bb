#include "server/service/group_service.h"

#include <functional>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "headwater/kernels/error.h"
#include "server/group/group_assembly.h"
#include "server/guard/stream_watchdog.h"
#include "server/service/loss/stream_io.h"
#include "server/service/server_core.h"

namespace headwater::service {

using observability::RpcMethod;

namespace {

class StreamCall final : public group::JoinCall {
 public:
  // `allowed_still`: whether the worker may still be in the group; if not, the group treats the call as ended. The watchdog ends a
  // call that sends no first message.
  StreamCall(grpc::ServerContext& context, grpc::ServerReaderWriter<v1::JoinResponse, v1::JoinRequest>& stream,
             guard::StreamWatchdog& watchdog, std::function<absl::Status()> allowed_still)
      : context_(context), stream_(stream), watchdog_(watchdog), allowed_still_(std::move(allowed_still)) {}

  // Checked with every message; a live worker sends several a second.
  bool Read(v1::JoinRequest* message) override {
    return (has_begun_ ? stream_.Read(message) : ReadFirst(message)) && allowed_still_().ok();
  }
  bool Send(const v1::JoinResponse& message) override { return stream_.Write(message); }
  void Cancel() override { context_.TryCancel(); }

  std::string host() const override {
    // "ipv4:10.0.0.1:4711", "ipv6:%5B::1%5D:4711", with a zone "ipv6:%5Bfe80::1%252%5D:4711", or "unix:...", which is a process of
    // this host.
    std::string peer = context_.peer();
    if (absl::StartsWith(peer, "ipv4:")) return peer.substr(5, peer.rfind(':') - 5);
    if (!absl::StartsWith(peer, "ipv6:")) return "";
    const size_t start = peer.find_first_of("[B") + 1;
    const std::string host = peer.substr(start, peer.find_last_of("]%") - start);
    return absl::StrCat("[", absl::StrReplaceAll(host, {{"%25", "%"}}), "]");
  }

 private:
  bool ReadFirst(v1::JoinRequest* message) {
    has_begun_ = true;
    guard::StreamWatchdog::Watch watch(&watchdog_, [this](const absl::Status& why) { guard::EndCall(context_, why); });
    return ReadMessage(watch, stream_, message);
  }

  grpc::ServerContext& context_;
  grpc::ServerReaderWriter<v1::JoinResponse, v1::JoinRequest>& stream_;
  guard::StreamWatchdog& watchdog_;
  const std::function<absl::Status()> allowed_still_;
  bool has_begun_ = false;
};

}  // namespace

grpc::Status GroupServiceImpl::Join(grpc::ServerContext* context,
                                    grpc::ServerReaderWriter<v1::JoinResponse, v1::JoinRequest>* stream) {
  const auto join = [&](RpcScope& scope) -> absl::Status {
    const ServerOptions& options = entrance_.core.options;
    const auto& assembly = options.group;
    if (assembly == nullptr) {
      return MakeError(ErrorReason::kFeatureNotBuilt, "this server has no workers: it was started without --workers",
                       {{"feature", "workers"}});
    }
    // A worker holds shards of the heads of all tenants: no permission on some heads is enough.
    const std::string& token = scope.caller().token_name();
    if (!token.empty() && token != options.worker_token) {
      return MakeError(ErrorReason::kPermissionDenied, "only the token that the server's --worker_token names may join",
                       {{"permission", "admin"}, {"method", "/headwater.v1.GroupService/Join"}, {"expected", "worker_token"}});
    }
    const std::function<absl::Status()> allowed_still = scope.AllowedStill();
    StreamCall call(*context, *stream, entrance_.core.watchdog, allowed_still);
    absl::Status ended = assembly->Serve(call);
    absl::Status allowed = allowed_still();
    return allowed.ok() ? ended : allowed;
  };
  return RunRpc(entrance_, *context, RpcMethod::kJoin, join, /*always=*/true);
}

}  // namespace headwater::service
