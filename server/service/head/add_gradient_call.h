// AddGradientCall: one AddGradient stream, without its I/O: its handler feeds it the messages in order. One thread.
#ifndef HEADWATER_SERVER_SERVICE_HEAD_ADD_GRADIENT_CALL_H_
#define HEADWATER_SERVER_SERVICE_HEAD_ADD_GRADIENT_CALL_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "headwater/v1/head_service.pb.h"
#include "server/heads/head.h"
#include "server/heads/session_registry.h"
#include "server/scheduler/waiting.h"
#include "server/service/access/access.h"
#include "server/service/request/head_request.h"
#include "server/service/server_core.h"
#include "server/transport/byte_budget.h"
#include "server/transport/growing_buffer.h"

namespace headwater::service {

class AddGradientCall {
 public:
  // `limits` bounds the waits; its waiter, which must be there, is asked until the rows are added.
  // `client` is the identity that the budget knows.
  AddGradientCall(ServerCore& core, Caller caller, std::string client, scheduler::WaitLimits limits)
      : core_(core), caller_(std::move(caller)), client_(std::move(client)), limits_(std::move(limits)) {}

  // Takes the header, which is checked against the head before any byte is accepted and may have to wait for its step, or a chunk.
  absl::Status OnMessage(v1::AddGradientRequest* message);
  // The client has half-closed: adds the rows. When this returns OK they are committed.
  absl::Status Finish(v1::AddGradientResponse* response);

  // The head's name once the header was valid; for logs.
  const std::string& head_name() const { return head_name_; }

 private:
  absl::Status OnHeader(const v1::AddGradientHeader& header);
  absl::Status OnChunk(const v1::ByteChunk& chunk);
  int64_t total_bytes() const { return request_.row_count * row_bytes_; }

  ServerCore& core_;
  const Caller caller_;
  const std::string client_;
  const scheduler::WaitLimits limits_;
  GradientRequest request_;
  heads::SessionRegistry::Use session_use_;
  std::string head_name_;
  heads::HeadUse head_;
  int64_t row_bytes_ = 0;
  transport::ByteBudget::Reservation reservation_;
  std::optional<transport::GrowingBuffer> rows_;  // once the header is accepted
  bool header_seen_ = false;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_HEAD_ADD_GRADIENT_CALL_H_
