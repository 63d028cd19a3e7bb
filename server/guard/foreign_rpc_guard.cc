#include "server/guard/foreign_rpc_guard.h"

#include <grpcpp/server_context.h>

#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/guard/line_budget.h"
#include "server/guard/stream_watchdog.h"
#include "server/observability/logging.h"
#include "server/observability/metrics.h"

namespace headwater::guard {
namespace {

using grpc::experimental::InterceptionHookPoints;

// A watch never ends by itself, and needs no token.
constexpr char kHealthWatch[] = "/grpc.health.v1.Health/Watch";

class Guard final : public grpc::experimental::Interceptor {
 public:
  // `watches` counts the calls of kHealthWatch that are in progress and not refused; null for a call of another method.
  Guard(const ForeignRpcGuard::Authorize& authorize, int64_t max_watches, grpc::experimental::ServerRpcInfo& info,
        std::shared_ptr<std::atomic<int64_t>> watches)
      : authorize_(authorize), max_watches_(max_watches), info_(info), watches_(std::move(watches)) {
    if (watches_ != nullptr) place_ = watches_->fetch_add(1);
  }
  ~Guard() override { GiveBack(); }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) Check(*methods);
    methods->Proceed();
  }

 private:
  void Check(grpc::experimental::InterceptorBatchMethods& methods) {
    if (absl::Status allowed = authorize_(info_.method(), *methods.GetRecvInitialMetadata()); !allowed.ok()) {
      End(allowed);
    } else if (place_ >= max_watches_) {
      End(absl::ResourceExhaustedError(
          absl::StrCat("expected at most ", max_watches_, " watches of the health (max_health_watches), and that many are open")));
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

  const ForeignRpcGuard::Authorize& authorize_;
  const int64_t max_watches_;
  grpc::experimental::ServerRpcInfo& info_;
  std::shared_ptr<std::atomic<int64_t>> watches_;
  int64_t place_ = 0;
};

}  // namespace

grpc::experimental::Interceptor* ForeignRpcGuard::CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) {
  if (absl::StartsWith(info->method(), "/headwater.v1.")) return nullptr;
  const bool watch = std::strcmp(info->method(), kHealthWatch) == 0;
  return new Guard(authorize_, max_health_watches_, *info, watch ? watches_ : nullptr);
}

}  // namespace headwater::guard
