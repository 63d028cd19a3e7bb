#include "tests/e2e/cpp/support/scripted_server.h"

#include <chrono>
#include <cstdlib>

#include "headwater/v1/error.pb.h"

namespace headwater::e2e {

grpc::Status ErrorWithReason(grpc::StatusCode code, const std::string& reason, int64_t retry_ms,
                             const std::map<std::string, std::string>& metadata) {
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

class ScriptedServer::Loss : public v1::LossService::Service {
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
    const auto script = script_.commit;
    return script ? script(*request) : script_.unary_status;
  }
  grpc::Status DiscardMicroBatch(grpc::ServerContext* context, const v1::DiscardMicroBatchRequest* request,
                                 v1::DiscardMicroBatchResponse*) override {
    script_.Record("DiscardMicroBatch", *context);
    const auto script = script_.discard;
    return script ? script(*request) : script_.unary_status;
  }

 private:
  ScriptedServer& script_;
};

class ScriptedServer::Heads : public v1::HeadService::Service {
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
    const auto script = script_.seal;
    return script ? script(*request) : script_.unary_status;
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
    const auto script = script_.add_gradient;
    return script ? script(header, bytes) : script_.unary_status;
  }

 private:
  ScriptedServer& script_;
};

class ScriptedServer::Sessions : public v1::SessionService::Service {
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

void ScriptedServer::Record(const std::string& method, const grpc::ServerContext& context) {
  if (method != "GetHead" && method != "TakeHead" && method != "GetServerInfo" && method != "OpenSession" &&
      method != "KeepAlive" && method != "CloseSession") {
    ++calls;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  recorded_.push_back({method, context.peer()});
}

std::vector<ScriptedServer::Call> ScriptedServer::CallsOf(const std::string& method) const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Call> result;
  for (const Call& call : recorded_) {
    if (call.method == method) result.push_back(call);
  }
  return result;
}

void ScriptedServer::Describe(const std::string& name, v1::Head* head) {
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

ScriptedServer::ScriptedServer()
    : loss_(std::make_unique<Loss>(*this)), heads_(std::make_unique<Heads>(*this)), sessions_(std::make_unique<Sessions>(*this)) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
  builder.RegisterService(loss_.get());
  builder.RegisterService(heads_.get());
  builder.RegisterService(sessions_.get());
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) std::abort();
}

ScriptedServer::~ScriptedServer() { server_->Shutdown(std::chrono::system_clock::now()); }

}  // namespace headwater::e2e
