// ScriptedServer: an in-process gRPC server that misbehaves as a test tells it to.
#ifndef HEADWATER_TESTS_E2E_CPP_SUPPORT_SCRIPTED_SERVER_H_
#define HEADWATER_TESTS_E2E_CPP_SUPPORT_SCRIPTED_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "headwater/v1/error.pb.h"
#include "headwater/v1/head_service.grpc.pb.h"
#include "headwater/v1/loss_service.grpc.pb.h"
#include "headwater/v1/session_service.grpc.pb.h"

namespace headwater::e2e {

// A status as headwaterd makes it: reason, metadata, and a delay of `retry_ms` if that is not 0.
inline grpc::Status ErrorWithReason(grpc::StatusCode code, const std::string& reason, int64_t retry_ms = 0,
                                    const std::map<std::string, std::string>& metadata = {{"field", "value"}}) {
  v1::RpcStatus details;
  details.set_code(code);
  v1::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("headwater");
  info.mutable_metadata()->insert(metadata.begin(), metadata.end());
  google::protobuf::Any* detail = details.add_details();
  detail->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  detail->set_value(info.SerializeAsString());
  if (retry_ms > 0) {
    v1::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(retry_ms / 1000);
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(retry_ms % 1000 * 1000000));
    detail = details.add_details();
    detail->set_type_url("type.googleapis.com/google.rpc.RetryInfo");
    detail->set_value(retry.SerializeAsString());
  }
  return grpc::Status(code, "scripted", details.SerializeAsString());
}

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

  ScriptedServer() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(&loss_);
    builder.RegisterService(&heads_);
    builder.RegisterService(&sessions_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) std::abort();
  }
  ~ScriptedServer() { server_->Shutdown(std::chrono::system_clock::now()); }

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
  std::vector<Call> CallsOf(const std::string& method) const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Call> result;
    for (const Call& call : recorded_) {
      if (call.method == method) result.push_back(call);
    }
    return result;
  }

 private:
  class Loss : public v1::LossService::Service {
   public:
    explicit Loss(ScriptedServer& script) : script_(script) {}
    grpc::Status ComputeLoss(grpc::ServerContext* context, LossStream* stream) override {
      script_.Record("ComputeLoss", *context);
      const auto script = script_.compute_loss;
      return script(context, stream);
    }
    grpc::Status TransferRows(grpc::ServerContext* context, TransferStream* stream) override {
      script_.Record("TransferRows", *context);
      const auto script = script_.transfer_rows;
      return script ? script(context, stream) : grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "");
    }
    grpc::Status CommitMicroBatch(grpc::ServerContext* context, const v1::CommitMicroBatchRequest* request,
                                  v1::CommitMicroBatchResponse*) override {
      script_.Record("CommitMicroBatch", *context);
      return script_.Answer(script_.commit, *request);
    }
    grpc::Status DiscardMicroBatch(grpc::ServerContext* context, const v1::DiscardMicroBatchRequest* request,
                                   v1::DiscardMicroBatchResponse*) override {
      script_.Record("DiscardMicroBatch", *context);
      return script_.Answer(script_.discard, *request);
    }

   private:
    ScriptedServer& script_;
  };

  class Heads : public v1::HeadService::Service {
   public:
    explicit Heads(ScriptedServer& script) : script_(script) {}
    grpc::Status GetHead(grpc::ServerContext* context, const v1::GetHeadRequest* request, v1::Head* response) override {
      script_.Record("GetHead", *context);
      script_.Describe(request->name(), response);
      return grpc::Status::OK;
    }
    grpc::Status TakeHead(grpc::ServerContext* context, const v1::TakeHeadRequest* request, v1::Head* response) override {
      script_.Record("TakeHead", *context);
      script_.WithState([](State& state) {
        ++state.epoch[0];
        state.head_state = v1::HEAD_STATE_READY;
      });
      script_.Describe(request->name(), response);
      return grpc::Status::OK;
    }
    grpc::Status CreateHead(grpc::ServerContext* context, const v1::CreateHeadRequest* request,
                            v1::CreateHeadResponse* response) override {
      script_.Record("CreateHead", *context);
      script_.Describe(request->name(), response->mutable_head());
      return script_.unary_status;
    }
    grpc::Status UploadWeights(grpc::ServerContext* context, UploadStream* stream) override {
      script_.Record("UploadWeights", *context);
      const auto script = script_.upload_weights;
      return script(stream);
    }
    grpc::Status ListHeads(grpc::ServerContext* context, const v1::ListHeadsRequest* request,
                           v1::ListHeadsResponse* response) override {
      script_.Record("ListHeads", *context);
      const auto script = script_.list_heads;
      return script(*request, response);
    }
    grpc::Status SealStep(grpc::ServerContext* context, const v1::SealStepRequest* request, v1::SealStepResponse*) override {
      script_.Record("SealStep", *context);
      return script_.Answer(script_.seal, *request);
    }
    grpc::Status AddGradient(grpc::ServerContext* context, grpc::ServerReader<v1::AddGradientRequest>* reader,
                             v1::AddGradientResponse*) override {
      script_.Record("AddGradient", *context);
      v1::AddGradientRequest request;
      v1::AddGradientHeader header;
      std::string bytes;
      while (reader->Read(&request)) {
        if (request.has_header()) header = request.header();
        bytes += request.chunk().data();
      }
      return script_.Answer(script_.add_gradient, header, bytes);
    }

   private:
    ScriptedServer& script_;
  };

  class Sessions : public v1::SessionService::Service {
   public:
    explicit Sessions(ScriptedServer& script) : script_(script) {}
    grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest*, v1::ServerInfo* response) override {
      script_.Record("GetServerInfo", *context);
      script_.WithState([response](State& state) {
        response->set_incarnation(state.incarnation);
        response->mutable_limits()->set_max_stripes(state.max_stripes);
        for (const std::string& feature : state.features) response->add_features(feature);
        response->set_named_regions(state.named_regions);
      });
      return grpc::Status::OK;
    }
    grpc::Status OpenSession(grpc::ServerContext* context, const v1::OpenSessionRequest*,
                             v1::OpenSessionResponse* response) override {
      script_.Record("OpenSession", *context);
      response->mutable_lease()->set_seconds(30);
      response->set_session_id(std::string(32, 's'));
      return grpc::Status::OK;
    }
    grpc::Status KeepAlive(grpc::ServerContext* context, const v1::KeepAliveRequest*, v1::KeepAliveResponse*) override {
      script_.Record("KeepAlive", *context);
      return grpc::Status::OK;
    }
    grpc::Status CloseSession(grpc::ServerContext* context, const v1::CloseSessionRequest*, v1::CloseSessionResponse*) override {
      script_.Record("CloseSession", *context);
      return grpc::Status::OK;
    }
    grpc::Status RegisterSharedMemory(grpc::ServerContext* context, const v1::RegisterSharedMemoryRequest* request,
                                      v1::RegisterSharedMemoryResponse* response) override {
      script_.Record("RegisterSharedMemory", *context);
      const std::string id = "region" + std::to_string(script_.CallsOf("RegisterSharedMemory").size());
      script_.WithState([&](State& state) { state.device_regions[id] = request->cuda_ipc_handle(); });
      response->set_region_id(id);
      return grpc::Status::OK;
    }
    grpc::Status UnregisterSharedMemory(grpc::ServerContext* context, const v1::UnregisterSharedMemoryRequest* request,
                                        v1::UnregisterSharedMemoryResponse*) override {
      script_.Record("UnregisterSharedMemory", *context);
      if (const auto script = script_.unregister_memory; script) script();
      script_.WithState([request](State& state) { state.device_regions.erase(request->region_id()); });
      return grpc::Status::OK;
    }

   private:
    ScriptedServer& script_;
  };

  template <typename Script, typename... Arguments>
  grpc::Status Answer(Script script, const Arguments&... arguments) const {
    return script ? script(arguments...) : unary_status;
  }
  void Record(const std::string& method, const grpc::ServerContext& context) {
    if (method != "GetHead" && method != "TakeHead" && method != "GetServerInfo" && method != "OpenSession" &&
        method != "KeepAlive" && method != "CloseSession") {
      ++calls;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    recorded_.push_back({method, context.peer()});
  }
  void Describe(const std::string& name, v1::Head* head) {
    std::lock_guard<std::mutex> lock(mutex_);
    head->set_name(name);
    head->set_epoch(state_.epoch);
    head->set_state(state_.head_state);
    head->set_open_step(0);
    head->mutable_spec()->set_vocab_size(8);
    head->mutable_spec()->set_hidden_size(state_.hidden_size);
    head->mutable_spec()->set_data_type(v1::DATA_TYPE_FLOAT32);
    head->mutable_spec()->set_trainable(true);
  }

  mutable std::mutex mutex_;
  State state_;
  std::vector<Call> recorded_;
  Loss loss_{*this};
  Heads heads_{*this};
  Sessions sessions_{*this};
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_SCRIPTED_SERVER_H_
