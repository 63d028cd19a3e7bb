// gRPC handlers of headwater.v1.LossService.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_SERVICE_H_
#define HEADWATER_SERVER_SERVICE_LOSS_SERVICE_H_

#include "headwater/v1/loss_service.grpc.pb.h"
#include "server/service/server_core.h"

namespace headwater::service {

class LossServiceImpl final : public v1::LossService::Service {
 public:
  // `core` must outlive the service.
  explicit LossServiceImpl(ServerCore& core) : core_(core) {}

  grpc::Status ComputeLoss(grpc::ServerContext* context,
                           grpc::ServerReaderWriter<v1::ComputeLossResponse, v1::ComputeLossRequest>* stream) override;
  grpc::Status TransferRows(grpc::ServerContext* context,
                            grpc::ServerReaderWriter<v1::TransferRowsResponse, v1::TransferRowsRequest>* stream) override;
  grpc::Status StreamTeacher(grpc::ServerContext* context, grpc::ServerReader<v1::StreamTeacherRequest>* reader,
                             v1::StreamTeacherResponse* response) override;
  grpc::Status CommitMicroBatch(grpc::ServerContext* context, const v1::CommitMicroBatchRequest* request,
                                v1::CommitMicroBatchResponse* response) override;
  grpc::Status DiscardMicroBatch(grpc::ServerContext* context, const v1::DiscardMicroBatchRequest* request,
                                 v1::DiscardMicroBatchResponse* response) override;

 private:
  ServerCore& core_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LOSS_SERVICE_H_
