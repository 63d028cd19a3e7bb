// ScriptedServer: an in-process gRPC server that misbehaves as a test tells it to.
#ifndef HEADWATER_TESTS_E2E_CPP_SUPPORT_SCRIPTED_SERVER_H_
#define HEADWATER_TESTS_E2E_CPP_SUPPORT_SCRIPTED_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "headwater/v1/head_service.grpc.pb.h"
#include "headwater/v1/loss_service.grpc.pb.h"
#include "headwater/v1/session_service.grpc.pb.h"

namespace headwater::e2e {

// A status as headwaterd makes it: reason, metadata, and a delay of `retry_ms` if that is not 0.
grpc::Status ErrorWithReason(grpc::StatusCode code, const std::string& reason, int64_t retry_ms = 0,
                             const std::map<std::string, std::string>& metadata = {{"field", "value"}});

// Each call is recorded and counted, and runs a copy of the function of its name. A function may be replaced once the calls that it
// is for have begun. Device regions, GetHead, TakeHead and GetServerInfo work as `state` says. tests/e2e/protocol has a server that
// knows sessions and restarts, too.
class ScriptedServer {
 public:
  using LossStream = grpc::ServerReaderWriter<v1::ComputeLossResponse, v1::ComputeLossRequest>;
  using TransferStream = grpc::ServerReaderWriter<v1::TransferRowsResponse, v1::TransferRowsRequest>;
  using UploadStream = grpc::ServerReaderWriter<v1::UploadWeightsResponse, v1::UploadWeightsRequest>;

  struct Call {
    std::string method;
    std::string peer;  // the client's end of the connection
  };
  // What the one head and the process are like.
  struct State {
    std::string incarnation = std::string(16, 'i');
    std::string epoch = std::string(16, 'e');
    v1::HeadState head_state = v1::HEAD_STATE_READY;
    int64_t hidden_size = 4;
    int64_t max_stripes = 0;  // 0: a server that knows of none
    std::vector<std::string> features;
    bool named_regions = false;
    std::map<std::string, std::string> device_regions;  // by id, the handles of those that were registered
  };

  ScriptedServer();
  ~ScriptedServer();

  std::string target() const { return "127.0.0.1:" + std::to_string(port_); }

  std::function<grpc::Status(grpc::ServerContext*, LossStream*)> compute_loss;
  std::function<grpc::Status(grpc::ServerContext*, TransferStream*)> transfer_rows;  // not set: UNIMPLEMENTED
  std::function<grpc::Status(UploadStream*)> upload_weights;
  std::function<grpc::Status(const v1::ListHeadsRequest&, v1::ListHeadsResponse*)> list_heads;
  // Of these, what is not set answers with unary_status.
  std::function<grpc::Status(const v1::CommitMicroBatchRequest&)> commit;
  std::function<grpc::Status(const v1::DiscardMicroBatchRequest&)> discard;
  std::function<grpc::Status(const v1::SealStepRequest&)> seal;
  std::function<grpc::Status(const v1::AddGradientHeader&, const std::string& bytes)> add_gradient;
  std::function<void()> unregister_memory;  // before it is given back; may be empty
  grpc::Status unary_status;                // of everything that has no function
  std::atomic<int> calls = 0;               // but for those of sessions, GetHead, TakeHead and GetServerInfo

  // Reads or changes the state.
  template <typename Use>
  auto WithState(Use use) {
    std::lock_guard<std::mutex> lock(mutex_);
    return use(state_);
  }
  // All calls of a method so far.
  std::vector<Call> CallsOf(const std::string& method) const;

 private:
  class Loss;
  class Heads;
  class Sessions;

  void Record(const std::string& method, const grpc::ServerContext& context);
  void Describe(const std::string& name, v1::Head* head);

  mutable std::mutex mutex_;
  State state_;
  std::vector<Call> recorded_;
  std::unique_ptr<Loss> loss_;
  std::unique_ptr<Heads> heads_;
  std::unique_ptr<Sessions> sessions_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_SCRIPTED_SERVER_H_
