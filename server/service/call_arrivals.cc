#include "server/service/call_arrivals.h"

#include <grpcpp/server_context.h>

#include "server/service/counted_credentials.h"

namespace headwater::service {
namespace {

using grpc::experimental::InterceptionHookPoints;

class Arrival final : public grpc::experimental::Interceptor {
 public:
  Arrival(transport::CallBacklog& backlog, grpc::experimental::ServerRpcInfo& info) : backlog_(backlog), info_(info) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    // Once for each call, whether a handler follows or not.
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      OnCallTaken(backlog_, info_.server_context()->c_call(), info_.server_context()->peer());
    }
    methods->Proceed();
  }

 private:
  transport::CallBacklog& backlog_;
  grpc::experimental::ServerRpcInfo& info_;
};

}  // namespace

grpc::experimental::Interceptor* CallArrivals::CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) {
  return new Arrival(backlog_, *info);
}

}  // namespace headwater::service
