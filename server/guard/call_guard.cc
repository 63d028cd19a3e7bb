#include "server/guard/call_guard.h"

#include <grpcpp/server_context.h>

#include <cstring>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/guard/counted_calls.h"
#include "server/guard/line_budget.h"
#include "server/guard/stream_watchdog.h"
#include "server/observability/logging.h"
#include "server/observability/metrics.h"

namespace headwater::guard {
namespace {

// A watch never ends by itself, and needs no token.
constexpr char kHealthWatch[] = "/grpc.health.v1.Health/Watch";

}  // namespace

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
