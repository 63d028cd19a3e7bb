// gRPC handlers of headwater.v1.LossService.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_LOSS_SERVICE_H_
#define HEADWATER_SERVER_SERVICE_LOSS_LOSS_SERVICE_H_

#include "headwater/v1/loss_service.grpc.pb.h"
#include "server/service/call/rpc_scope.h"
#include "server/service/loss/raw_stream.h"
#include "server/service/server_core.h"

namespace headwater::service {

// ComputeLoss and TransferRows move tensors, so they get their messages as raw bytes, by callbacks; decisions may wait.
using LossServiceBase = v1::LossService::WithRawCallbackMethod_ComputeLoss<
    v1::LossService::WithRawCallbackMethod_TransferRows<v1::LossService::WithCallbackMethod_CommitMicroBatch<
        v1::LossService::WithCallbackMethod_DiscardMicroBatch<v1::LossService::Service>>>>;

class LossServiceImpl final : public LossServiceBase {
 public:
  // The core must outlive the service.
  explicit LossServiceImpl(const Entrance& entrance) : entrance_(entrance), core_(entrance.core) {}

  RawReactor* ComputeLoss(grpc::CallbackServerContext* context) noexcept override;   // compute_loss_stream.cc
  RawReactor* TransferRows(grpc::CallbackServerContext* context) noexcept override;  // transfer_rows_stream.cc
  // stream_teacher_call.cc
  grpc::Status StreamTeacher(grpc::ServerContext* context, grpc::ServerReader<v1::StreamTeacherRequest>* reader,
                             v1::StreamTeacherResponse* response) override;
  grpc::ServerUnaryReactor* CommitMicroBatch(grpc::CallbackServerContext* context, const v1::CommitMicroBatchRequest* request,
                                             v1::CommitMicroBatchResponse* response) override;
  grpc::ServerUnaryReactor* DiscardMicroBatch(grpc::CallbackServerContext* context, const v1::DiscardMicroBatchRequest* request,
                                              v1::DiscardMicroBatchResponse* response) override;

 private:
  const Entrance entrance_;
  ServerCore& core_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LOSS_LOSS_SERVICE_H_
