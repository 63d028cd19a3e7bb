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
#include <utility>
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

// Each call but those that describe the server, and of sessions, is recorded and counted, and runs a copy of the function of its
// name. A function may be replaced once the calls that it is for have begun. Device regions, GetHead, TakeHead and GetServerInfo
// work as `state` says. tests/e2e/protocol has a server that knows sessions and restarts, too.
class ScriptedServer : v1::LossService::Service, v1::HeadService::Service, v1::SessionService::Service {
 public:
  using LossStream = grpc::ServerReaderWriter<v1::ComputeLossResponse, v1::ComputeLossRequest>;
  using TransferStream = grpc::ServerReaderWriter<v1::TransferRowsResponse, v1::TransferRowsRequest>;
  using UploadStream = grpc::ServerReaderWriter<v1::UploadWeightsResponse, v1::UploadWeightsRequest>;

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
  // What a ComputeLoss stream has brought: the bytes of each tensor by its role and term.
  struct MicroBatch {
    v1::MicroBatchHeader header;
    std::map<std::pair<v1::ChunkRole, int32_t>, std::string> rows;
  };

  ScriptedServer() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(static_cast<v1::LossService::Service*>(this));
    builder.RegisterService(static_cast<v1::HeadService::Service*>(this));
    builder.RegisterService(static_cast<v1::SessionService::Service*>(this));
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) std::abort();
  }
  ~ScriptedServer() override { server_->Shutdown(std::chrono::system_clock::now()); }

  std::string target() const { return "127.0.0.1:" + std::to_string(port_); }

  // Reads a stream to its end.
  static MicroBatch ReadAll(LossStream* stream) {
    MicroBatch micro_batch;
    v1::ComputeLossRequest request;
    while (stream->Read(&request)) {
      if (request.has_header()) micro_batch.header = request.header();
      if (request.has_chunk()) micro_batch.rows[{request.chunk().role(), request.chunk().term_index()}] += request.chunk().data();
    }
    return micro_batch;
  }
  // A well-formed answer without gradient rows.
  static grpc::Status Answer(LossStream* stream, const v1::MicroBatchHeader& header) {
    v1::ComputeLossResponse response;
    for (int i = 0; i < header.terms_size(); ++i) response.mutable_summary()->add_terms();
    response.mutable_summary()->set_state(header.commit_mode() == v1::COMMIT_MODE_EXPLICIT ? v1::CONTRIBUTION_STATE_STAGED
                                                                                           : v1::CONTRIBUTION_STATE_COMMITTED);
    stream->Write(response);
    return grpc::Status::OK;
  }

  std::function<grpc::Status(grpc::ServerContext*, LossStream*)> compute_loss;  // not set: the micro-batch is kept, and answered
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
  std::atomic<int> calls = 0;

  // Reads or changes the state.
  template <typename Use>
  auto WithState(Use use) {
    std::lock_guard<std::mutex> lock(mutex_);
    return use(state_);
  }
  // The client's end of the connection, for each call of a method so far.
  std::vector<std::string> PeersOf(const std::string& method) {
    std::lock_guard<std::mutex> lock(mutex_);
    return peers_[method];
  }
  // The micro-batch that was kept last.
  MicroBatch last() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return last_;
  }

 private:
  grpc::Status ComputeLoss(grpc::ServerContext* context, LossStream* stream) override {
    Record("ComputeLoss", *context);
    if (const auto script = compute_loss; script) return script(context, stream);
    const MicroBatch micro_batch = ReadAll(stream);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      last_ = micro_batch;
    }
    return Answer(stream, micro_batch.header);
  }
  grpc::Status TransferRows(grpc::ServerContext* context, TransferStream* stream) override {
    Record("TransferRows", *context);
    const auto script = transfer_rows;
    return script ? script(context, stream) : grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "");
  }
  grpc::Status CommitMicroBatch(grpc::ServerContext* context, const v1::CommitMicroBatchRequest* request,
                                v1::CommitMicroBatchResponse*) override {
    return Run("CommitMicroBatch", *context, commit, *request);
  }
  grpc::Status DiscardMicroBatch(grpc::ServerContext* context, const v1::DiscardMicroBatchRequest* request,
                                 v1::DiscardMicroBatchResponse*) override {
    return Run("DiscardMicroBatch", *context, discard, *request);
  }

  grpc::Status GetHead(grpc::ServerContext*, const v1::GetHeadRequest* request, v1::Head* response) override {
    return Describe(request->name(), response);
  }
  grpc::Status TakeHead(grpc::ServerContext*, const v1::TakeHeadRequest* request, v1::Head* response) override {
    WithState([](State& state) {
      ++state.epoch[0];
      state.head_state = v1::HEAD_STATE_READY;
    });
    return Describe(request->name(), response);
  }
  grpc::Status CreateHead(grpc::ServerContext* context, const v1::CreateHeadRequest* request,
                          v1::CreateHeadResponse* response) override {
    Record("CreateHead", *context);
    Describe(request->name(), response->mutable_head());
    return unary_status;
  }
  grpc::Status UploadWeights(grpc::ServerContext* context, UploadStream* stream) override {
    return Run("UploadWeights", *context, upload_weights, stream);
  }
  grpc::Status ListHeads(grpc::ServerContext* context, const v1::ListHeadsRequest* request,
                         v1::ListHeadsResponse* response) override {
    return Run("ListHeads", *context, list_heads, *request, response);
  }
  grpc::Status SealStep(grpc::ServerContext* context, const v1::SealStepRequest* request, v1::SealStepResponse*) override {
    return Run("SealStep", *context, seal, *request);
  }
  grpc::Status AddGradient(grpc::ServerContext* context, grpc::ServerReader<v1::AddGradientRequest>* reader,
                           v1::AddGradientResponse*) override {
    v1::AddGradientRequest request;
    v1::AddGradientHeader header;
    std::string bytes;
    while (reader->Read(&request)) {
      if (request.has_header()) header = request.header();
      bytes += request.chunk().data();
    }
    return Run("AddGradient", *context, add_gradient, header, bytes);
  }

  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*, v1::ServerInfo* response) override {
    return WithState([response](State& state) {
      response->set_incarnation(state.incarnation);
      response->mutable_limits()->set_max_stripes(state.max_stripes);
      for (const std::string& feature : state.features) response->add_features(feature);
      response->set_named_regions(state.named_regions);
      return grpc::Status::OK;
    });
  }
  grpc::Status OpenSession(grpc::ServerContext*, const v1::OpenSessionRequest*, v1::OpenSessionResponse* response) override {
    response->mutable_lease()->set_seconds(3600);  // so that nobody renews it
    response->set_session_id(std::string(32, 's'));
    return grpc::Status::OK;
  }
  grpc::Status CloseSession(grpc::ServerContext*, const v1::CloseSessionRequest*, v1::CloseSessionResponse*) override {
    return grpc::Status::OK;
  }
  grpc::Status RegisterSharedMemory(grpc::ServerContext* context, const v1::RegisterSharedMemoryRequest* request,
                                    v1::RegisterSharedMemoryResponse* response) override {
    Record("RegisterSharedMemory", *context);
    response->set_region_id("region" + std::to_string(PeersOf("RegisterSharedMemory").size()));
    return WithState([&](State& state) {
      state.device_regions[response->region_id()] = request->cuda_ipc_handle();
      return grpc::Status::OK;
    });
  }
  grpc::Status UnregisterSharedMemory(grpc::ServerContext* context, const v1::UnregisterSharedMemoryRequest* request,
                                      v1::UnregisterSharedMemoryResponse*) override {
    Record("UnregisterSharedMemory", *context);
    if (const auto script = unregister_memory; script) script();
    return WithState([request](State& state) {
      state.device_regions.erase(request->region_id());
      return grpc::Status::OK;
    });
  }

  template <typename Script, typename... Arguments>
  grpc::Status Run(const std::string& method, const grpc::ServerContext& context, Script script, Arguments&&... arguments) {
    Record(method, context);
    return script ? script(arguments...) : unary_status;
  }
  void Record(const std::string& method, const grpc::ServerContext& context) {
    ++calls;
    std::lock_guard<std::mutex> lock(mutex_);
    peers_[method].push_back(context.peer());
  }
  grpc::Status Describe(const std::string& name, v1::Head* head) {
    std::lock_guard<std::mutex> lock(mutex_);
    head->set_name(name);
    head->set_epoch(state_.epoch);
    head->set_state(state_.head_state);
    head->set_open_step(0);
    head->mutable_spec()->set_vocab_size(8);
    head->mutable_spec()->set_hidden_size(state_.hidden_size);
    head->mutable_spec()->set_data_type(v1::DATA_TYPE_FLOAT32);
    head->mutable_spec()->set_trainable(true);
    return grpc::Status::OK;
  }

  mutable std::mutex mutex_;
  State state_;
  std::map<std::string, std::vector<std::string>> peers_;  // by method
  MicroBatch last_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_SCRIPTED_SERVER_H_
