// CallArrivals: tells the backlog of every call that gRPC has got to, before the call has its handler. Those that gRPC refuses by
// itself, for want of a thread, never have one, and would be taken for calls that wait for ever.
#ifndef HEADWATER_SERVER_SERVICE_CALL_ARRIVALS_H_
#define HEADWATER_SERVER_SERVICE_CALL_ARRIVALS_H_

#include <grpcpp/support/server_interceptor.h>

#include "server/transport/call_backlog.h"

namespace headwater::service {

class CallArrivals final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  // The backlog must outlive the server that this is given to.
  explicit CallArrivals(transport::CallBacklog& backlog) : backlog_(backlog) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) override;

 private:
  transport::CallBacklog& backlog_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_CALL_ARRIVALS_H_
