#include "tests/e2e/cpp/scripted_server.h"

#include <chrono>
#include <cstdlib>

#include "headwater/v1/error.pb.h"

namespace headwater::e2e {

grpc::Status ErrorWithReason(grpc::StatusCode code, const std::string& reason, int64_t retry_ms) {
  v1::RpcStatus details;
  details.set_code(code);
  v1::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("headwater");
  (*info.mutable_metadata())["field"] = "value";
  google::protobuf::Any* detail = details.add_details();
  detail->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  detail->set_value(info.SerializeAsString());
  if (retry_ms > 0) {
    v1::RetryInfo retry;
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(retry_ms * 1000000));
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
    ++script_.calls;
    const auto script = script_.compute_loss;
    return script(context, stream);
  }
  grpc::Status CommitMicroBatch(grpc::ServerContext*, const v1::CommitMicroBatchRequest*, v1::CommitMicroBatchResponse*) override {
    ++script_.calls;
    return script_.unary_status;
  }

 private:
  ScriptedServer& script_;
};

class ScriptedServer::Heads : public v1::HeadService::Service {
 public:
  explicit Heads(ScriptedServer& script) : script_(script) {}

  grpc::Status GetHead(grpc::ServerContext*, const v1::GetHeadRequest* request, v1::Head* response) override {
    response->set_name(request->name());
    response->set_epoch(std::string(16, 'e'));
    response->mutable_spec()->set_vocab_size(8);
    response->mutable_spec()->set_hidden_size(4);
    response->mutable_spec()->set_data_type(v1::DATA_TYPE_FLOAT32);
    return grpc::Status::OK;
  }
  grpc::Status UploadWeights(grpc::ServerContext*, UploadStream* stream) override {
    ++script_.calls;
    const auto script = script_.upload_weights;
    return script(stream);
  }
  grpc::Status ListHeads(grpc::ServerContext*, const v1::ListHeadsRequest* request, v1::ListHeadsResponse* response) override {
    ++script_.calls;
    const auto script = script_.list_heads;
    return script(*request, response);
  }
  grpc::Status ApplyOptimizerStep(grpc::ServerContext*, const v1::ApplyOptimizerStepRequest*,
                                  v1::ApplyOptimizerStepResponse*) override {
    ++script_.calls;
    return script_.unary_status;
  }

 private:
  ScriptedServer& script_;
};

ScriptedServer::ScriptedServer() : loss_(std::make_unique<Loss>(*this)), heads_(std::make_unique<Heads>(*this)) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
  builder.RegisterService(loss_.get());
  builder.RegisterService(heads_.get());
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) std::abort();
}

ScriptedServer::~ScriptedServer() { server_->Shutdown(std::chrono::system_clock::now()); }

}  // namespace headwater::e2e
