#include "server/service/foreign_rpc_guard.h"

#include <grpc/grpc.h>
#include <grpcpp/server_context.h>

#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/observability/logging.h"
#include "server/service/access_table.h"
#include "server/service/line_budget.h"

namespace headwater::service {
namespace {

using grpc::experimental::InterceptionHookPoints;

// It never ends by itself, and anybody may call it.
constexpr char kHealthWatch[] = "/grpc.health.v1.Health/Watch";

class Guard final : public grpc::experimental::Interceptor {
 public:
  // `watches` counts the calls of kHealthWatch that are in progress and not refused; null for a call of another method.
  Guard(const Entrance& entrance, grpc::experimental::ServerRpcInfo& info, std::shared_ptr<std::atomic<int64_t>> watches)
      : entrance_(entrance), info_(info), watches_(std::move(watches)) {
    if (watches_ != nullptr) place_ = watches_->fetch_add(1);
  }
  ~Guard() override { GiveBack(); }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) Check(*methods);
    methods->Proceed();
  }

 private:
  void Check(grpc::experimental::InterceptorBatchMethods& methods) {
    const AccessRow* const row = FindAccessRow(info_.method());
    const auto caller = entrance_.core.access->Authorize(row, entrance_.role, AuthorizationOf(*methods.GetRecvInitialMetadata()));
    const int64_t most = entrance_.core.options.limits.max_health_watches;
    if (!caller.ok()) {
      End(caller.status());
    } else if (place_ >= most) {
      End(absl::ResourceExhaustedError(
          absl::StrCat("expected at most ", most, " watches of the health (max_health_watches), and that many are open")));
    }
  }

  void GiveBack() {
    if (watches_ != nullptr) watches_->fetch_sub(1);
    watches_ = nullptr;
  }

  void End(const absl::Status& why) {
    GiveBack();  // gRPC may keep a call that has ended for a while, and whoever is refused asks again
    // Ends the call with this status before its handler has begun, which then finds nothing to read and nobody to answer.
    grpc_call_cancel_with_status(info_.server_context()->c_call(), static_cast<grpc_status_code>(why.code()),
                                 std::string(why.message()).c_str(), nullptr);
    if (!FailedCallLines().Take().has_value()) return;
    observability::Log(observability::LogLevel::kWarning, "rpc",
                       {{"method", info_.method()},
                        {"code", observability::CanonicalCodeName(why.code())},
                        {"message", std::string(why.message())}});
  }

  const Entrance& entrance_;
  grpc::experimental::ServerRpcInfo& info_;
  std::shared_ptr<std::atomic<int64_t>> watches_;
  int64_t place_ = 0;
};

}  // namespace

grpc::experimental::Interceptor* ForeignRpcGuard::CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) {
  if (absl::StartsWith(info->method(), "/headwater.v1.")) return nullptr;
  const bool watch = std::strcmp(info->method(), kHealthWatch) == 0;
  return new Guard(entrance_, *info, watch ? watches_ : nullptr);
}

}  // namespace headwater::service
