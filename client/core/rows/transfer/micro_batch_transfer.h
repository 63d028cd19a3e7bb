// MicroBatchTransfer: the attempts of one micro-batch, each by the best path there is.
#ifndef HEADWATER_CLIENT_CORE_ROWS_TRANSFER_MICRO_BATCH_TRANSFER_H_
#define HEADWATER_CLIENT_CORE_ROWS_TRANSFER_MICRO_BATCH_TRANSFER_H_

#include <memory>
#include <optional>

#include "client/core/rows/memory/memory_paths.h"
#include "client/core/rows/transfer/rows_call.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::client::internal {

// One attempt of a micro-batch. It repairs its path by itself: a region that the server has forgotten is registered again, a server
// that refuses stripes gets one stream.
class MicroBatchTransfer : public RowsCall {
 public:
  // `memory.teachers`: one for each term of the header, or fewer; without memory: the term has no such rows.
  MicroBatchTransfer(RowTransport& transport, const v1::MicroBatchHeader& header, CallMemory memory);

  // `request`: a header that says everything but how its rows travel. `done` is not called by this thread unless a call could not
  // even be begun.
  void Start(const google::protobuf::Message& request, Deadline deadline, Done done) override;

 private:
  absl::Status Begin();
  // The server has forgotten the session or a region of the placement.
  absl::Status BeginAgain();
  // Places the rows in shared memory if that is possible and wanted. An error ends the attempt, unless `wait` was shorter
  // than the attempt.
  absl::Status Place(const Wait& wait);
  absl::Status SendAll();
  absl::Status SendPlaced();
  absl::Status SendRows();
  void SendRequest(TransferRequest request);
  void Ended(TransferResult result) override;
  bool EndBlocks(const TransferResult& result) const override;
  void EndedPlaced(TransferResult result);
  void EndedByRows(TransferResult result);
  // Prepares the memory where gradients for device memory arrive, and their copy.
  absl::Status PrepareGradCopy(TransferRequest* request);
  // The gradient's way from the host to the device ends, for an answer or for nothing.
  absl::Status FinishGradCopy(bool answered);
  // The attempt has succeeded, by the path of that name.
  void Succeed(std::string summary, const char* path);

  int64_t bytes_up() const;
  int64_t bytes_down() const;
  // Bytes that go over the streams; over shared memory none do.
  int64_t stream_bytes_up() const { return placement_.has_value() ? 0 : bytes_up(); }
  int64_t stream_bytes_down() const { return placement_.has_value() ? 0 : bytes_down(); }
  bool is_small() const;

  CallMemory memory_;                    // `result` as large as the gradient; without data: none is wanted
  absl::StatusOr<Bytes> own_ = Bytes();  // the gradient's, where the caller gives no memory
  std::optional<Placement> placement_;
  std::optional<RowMemory> grad_copy_;
  std::shared_ptr<DeviceContext> grad_context_;

  v1::MicroBatchHeader header_;
  bool session_given_ = false;  // by the caller, who replaces it if it has ended
  bool repeated_ = false;       // this attempt, for the path's sake
  int streams_ = 0;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_TRANSFER_MICRO_BATCH_TRANSFER_H_
