// ScriptedServer: an in-process gRPC server that misbehaves as a test tells it to.
#ifndef HEADWATER_TESTS_E2E_CPP_SCRIPTED_SERVER_H_
#define HEADWATER_TESTS_E2E_CPP_SCRIPTED_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "headwater/v1/head_service.grpc.pb.h"
#include "headwater/v1/loss_service.grpc.pb.h"

namespace headwater::e2e {

// A status as headwaterd makes it: reason, metadata, and a delay of `retry_ms` if that is not 0.
grpc::Status ErrorWithReason(grpc::StatusCode code, const std::string& reason, int64_t retry_ms = 0);

// Each call runs a copy of the function of its name and counts. A function may be replaced once the calls that it is for have
// begun.
class ScriptedServer {
 public:
  using LossStream = grpc::ServerReaderWriter<v1::ComputeLossResponse, v1::ComputeLossRequest>;
  using UploadStream = grpc::ServerReaderWriter<v1::UploadWeightsResponse, v1::UploadWeightsRequest>;

  ScriptedServer();
  ~ScriptedServer();

  std::string target() const { return "127.0.0.1:" + std::to_string(port_); }

  std::function<grpc::Status(grpc::ServerContext*, LossStream*)> compute_loss;
  std::function<grpc::Status(UploadStream*)> upload_weights;
  std::function<grpc::Status(const v1::ListHeadsRequest&, v1::ListHeadsResponse*)> list_heads;
  grpc::Status unary_status;  // of CommitMicroBatch and ApplyOptimizerStep
  std::atomic<int> calls = 0;

 private:
  class Loss;
  class Heads;
  std::unique_ptr<Loss> loss_;
  std::unique_ptr<Heads> heads_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SCRIPTED_SERVER_H_
