// TransferRowsStream: one TransferRows call, a stripe of a transfer. Nothing here waits, so it needs no thread of its own.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_TRANSFER_ROWS_STREAM_H_
#define HEADWATER_SERVER_SERVICE_LOSS_TRANSFER_ROWS_STREAM_H_

#include <grpcpp/server_context.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/service/call/rpc_scope.h"
#include "server/service/loss/transfer.h"
#include "server/service/loss/transfer_registry.h"
#include "server/service/server_core.h"

namespace headwater::service {

class TransferRowsStream final : public RowStream {
 public:
  // The reactor for gRPC.
  static RawReactor* Start(ServerCore& core, grpc::CallbackServerContext& context) noexcept;
  TransferRowsStream(ServerCore& core, grpc::CallbackServerContext& context);

  void OnTransferEnd(bool succeeded) override;

 private:
  void OnFirstMessage(bool ok, grpc::ByteBuffer* message) override;
  void OnStreamGone(Transfer* transfer) override;
  void OnRefused(const absl::Status& status) override;
  bool OnEnded(const absl::Status& why) override;

  void FindTransfer(const TransferId& id, int32_t index);
  // Ends the call; only the first time has an effect.
  void End(absl::Status status);
  // Called by the thread that has set `ended_`: gRPC's context is there until then. Without a status the call was cancelled.
  void Answer(std::optional<absl::Status> status);

  RpcScope scope_;
  std::atomic<bool> ended_{false};

  absl::Mutex mutex_;
  std::optional<TransferId> id_ ABSL_GUARDED_BY(mutex_);  // once the header was valid
  int64_t number_ ABSL_GUARDED_BY(mutex_) = 0;            // in the registry
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LOSS_TRANSFER_ROWS_STREAM_H_
