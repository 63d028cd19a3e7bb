// UploadCall: one UploadWeights stream, without its I/O: its handler feeds it the messages in order. One thread.
#ifndef HEADWATER_SERVER_SERVICE_HEAD_UPLOAD_CALL_H_
#define HEADWATER_SERVER_SERVICE_HEAD_UPLOAD_CALL_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/v1/head_service.pb.h"
#include "server/heads/head.h"
#include "server/scheduler/waiting.h"
#include "server/service/access/access.h"
#include "server/service/head/upload_store.h"
#include "server/service/request/head_request.h"
#include "server/service/server_core.h"

namespace headwater::service {

class UploadCall {
 public:
  // `limits` bounds the wait of one with `closes_step`, and that for the head.
  UploadCall(ServerCore& core, Caller caller, scheduler::WaitLimits limits)
      : core_(core), caller_(std::move(caller)), limits_(std::move(limits)) {}

  // Takes the header, which fills `response` with the offset to continue from, or a chunk, which leaves it empty.
  absl::Status OnMessage(v1::UploadWeightsRequest* message, v1::UploadWeightsResponse* response);
  // The client has half-closed: verifies the bytes and sets the tensor. An incomplete upload stays, for resuming.
  absl::Status Finish(v1::UploadWeightsResponse* response);

  // The head's name once the header was valid; for logs.
  const std::string& head_name() const { return head_name_; }

 private:
  absl::Status OnHeader(const v1::UploadWeightsHeader& header, v1::UploadWeightsResponse* response);
  absl::Status OnChunk(const v1::ByteChunk& chunk);
  // Returns the errors of Replace() that do not depend on the bytes.
  absl::Status CheckClosesStep();
  // Sets the tensor, or puts it into the head's shadow. Returns the head as it is then: of the epoch that this made, or kept.
  absl::StatusOr<heads::HeadInfo> UseTensor(std::shared_ptr<const uint8_t> bytes);

  ServerCore& core_;
  const Caller caller_;
  const scheduler::WaitLimits limits_;
  UploadRequest request_;
  std::string head_name_;
  heads::HeadUse head_;
  std::optional<UploadStore::Lease> upload_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_HEAD_UPLOAD_CALL_H_
