// ComputeLossStream: one ComputeLoss call, the primary stream of a transfer. From its header on a call thread runs it, which waits;
// chunks are taken, and rows of the gradient sent, by gRPC's threads meanwhile. A client that sends no header holds no thread.
#ifndef HEADWATER_SERVER_SERVICE_COMPUTE_LOSS_STREAM_H_
#define HEADWATER_SERVER_SERVICE_COMPUTE_LOSS_STREAM_H_

#include <grpcpp/server_context.h>

#include <atomic>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/v1/loss_service.pb.h"
#include "server/service/chunk_codec.h"
#include "server/service/rpc_scope.h"
#include "server/service/server_core.h"
#include "server/service/transfer.h"

namespace headwater::service {

class ComputeLossStream final : public RowStream {
 public:
  // The reactor for gRPC.
  static RawReactor* Start(ServerCore& core, grpc::CallbackServerContext& context) noexcept;
  using RowStream::RowStream;

  void OnTransferEnd(bool) override {}

 private:
  void OnFirstMessage(bool ok, grpc::ByteBuffer* message) override;
  void OnStreamGone(Transfer* transfer) override;
  void OnRefused(const absl::Status&) override {}  // the transfer is broken, which the call's thread sees
  bool OnEnded(const absl::Status& why) override;

  // The whole call, on a call thread.
  void Run();
  absl::Status Serve(RpcScope& scope, std::optional<grpc::ByteBuffer>* last);
  absl::StatusOr<v1::MicroBatchHeader> Header();
  // The whole call, of one that has no header to begin with: on gRPC's thread.
  absl::Status EndWithoutHeader(RpcScope& scope);

  // By whoever answers the call: its thread, or who finds that there will be none.
  std::atomic<bool> taken_{false};
  // Whether the call is in progress, and whether its client has gone meanwhile.
  enum class Progress { kRunning, kAbandoned, kEnded };
  std::atomic<Progress> progress_{Progress::kRunning};
  std::optional<ReceivedMessage> first_;  // before the call's thread begins, then of it
  std::shared_ptr<Transfer> transfer_;    // of the call's thread, once the header is accepted
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_COMPUTE_LOSS_STREAM_H_
