// gRPC handlers of headwater.v1.HeadService.
#ifndef HEADWATER_SERVER_SERVICE_HEAD_HEAD_SERVICE_H_
#define HEADWATER_SERVER_SERVICE_HEAD_HEAD_SERVICE_H_

#include "headwater/v1/head_service.grpc.pb.h"
#include "server/service/call/rpc_scope.h"
#include "server/service/server_core.h"

namespace headwater::service {

// Calls that may wait come by callbacks.
using HeadServiceBase = v1::HeadService::WithCallbackMethod_CreateHead<
    v1::HeadService::WithCallbackMethod_DeleteHead<v1::HeadService::WithCallbackMethod_TakeHead<
        v1::HeadService::WithCallbackMethod_LoadWeights<v1::HeadService::WithCallbackMethod_SealStep<
            v1::HeadService::WithCallbackMethod_ApplyOptimizerStep<v1::HeadService::WithCallbackMethod_DiscardGradient<
                v1::HeadService::WithCallbackMethod_GetGradientNorm<v1::HeadService::WithCallbackMethod_SaveCheckpoint<
                    v1::HeadService::WithCallbackMethod_RestoreCheckpoint<v1::HeadService::Service>>>>>>>>>>;

class HeadServiceImpl final : public HeadServiceBase {
 public:
  // The core must outlive the service.
  explicit HeadServiceImpl(const Entrance& entrance) : entrance_(entrance), core_(entrance.core) {}

  grpc::ServerUnaryReactor* CreateHead(grpc::CallbackServerContext* context, const v1::CreateHeadRequest* request,
                                       v1::CreateHeadResponse* response) override;
  grpc::Status GetHead(grpc::ServerContext* context, const v1::GetHeadRequest* request, v1::Head* response) override;
  grpc::Status ListHeads(grpc::ServerContext* context, const v1::ListHeadsRequest* request,
                         v1::ListHeadsResponse* response) override;
  grpc::ServerUnaryReactor* DeleteHead(grpc::CallbackServerContext* context, const v1::DeleteHeadRequest* request,
                                       v1::DeleteHeadResponse* response) override;
  grpc::ServerUnaryReactor* TakeHead(grpc::CallbackServerContext* context, const v1::TakeHeadRequest* request,
                                     v1::Head* response) override;
  grpc::Status UploadWeights(grpc::ServerContext* context,
                             grpc::ServerReaderWriter<v1::UploadWeightsResponse, v1::UploadWeightsRequest>* stream) override;
  grpc::ServerUnaryReactor* LoadWeights(grpc::CallbackServerContext* context, const v1::LoadWeightsRequest* request,
                                        v1::Head* response) override;
  grpc::Status DownloadWeights(grpc::ServerContext* context, const v1::DownloadWeightsRequest* request,
                               grpc::ServerWriter<v1::DownloadTensorResponse>* writer) override;
  grpc::Status GetStep(grpc::ServerContext* context, const v1::GetStepRequest* request, v1::GetStepResponse* response) override;
  grpc::ServerUnaryReactor* SealStep(grpc::CallbackServerContext* context, const v1::SealStepRequest* request,
                                     v1::SealStepResponse* response) override;
  grpc::ServerUnaryReactor* ApplyOptimizerStep(grpc::CallbackServerContext* context, const v1::ApplyOptimizerStepRequest* request,
                                               v1::ApplyOptimizerStepResponse* response) override;
  grpc::ServerUnaryReactor* DiscardGradient(grpc::CallbackServerContext* context, const v1::DiscardGradientRequest* request,
                                            v1::DiscardGradientResponse* response) override;
  grpc::Status DownloadGradient(grpc::ServerContext* context, const v1::DownloadGradientRequest* request,
                                grpc::ServerWriter<v1::DownloadTensorResponse>* writer) override;
  grpc::ServerUnaryReactor* GetGradientNorm(grpc::CallbackServerContext* context, const v1::GetGradientNormRequest* request,
                                            v1::GetGradientNormResponse* response) override;
  grpc::Status AddGradient(grpc::ServerContext* context, grpc::ServerReader<v1::AddGradientRequest>* reader,
                           v1::AddGradientResponse* response) override;
  grpc::ServerUnaryReactor* SaveCheckpoint(grpc::CallbackServerContext* context, const v1::SaveCheckpointRequest* request,
                                           v1::SaveCheckpointResponse* response) override;
  grpc::Status ListCheckpoints(grpc::ServerContext* context, const v1::ListCheckpointsRequest* request,
                               v1::ListCheckpointsResponse* response) override;
  grpc::ServerUnaryReactor* RestoreCheckpoint(grpc::CallbackServerContext* context, const v1::RestoreCheckpointRequest* request,
                                              v1::Head* response) override;
  grpc::Status DeleteCheckpoint(grpc::ServerContext* context, const v1::DeleteCheckpointRequest* request,
                                v1::DeleteCheckpointResponse* response) override;

 private:
  const Entrance entrance_;
  ServerCore& core_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_HEAD_HEAD_SERVICE_H_
