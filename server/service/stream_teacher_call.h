// StreamTeacherCall: one StreamTeacher stream, without its I/O; see AddGradientCall for the pattern. Not thread-safe.
#ifndef HEADWATER_SERVER_SERVICE_STREAM_TEACHER_CALL_H_
#define HEADWATER_SERVER_SERVICE_STREAM_TEACHER_CALL_H_

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "headwater/v1/loss_service.pb.h"
#include "server/heads/session_registry.h"
#include "server/service/access.h"
#include "server/service/server_core.h"
#include "server/transport/teacher_join.h"

namespace headwater::service {

class StreamTeacherCall {
 public:
  StreamTeacherCall(ServerCore& core, Caller caller) : core_(core), caller_(std::move(caller)) {}

  // Takes the header, with which the rows get their place, or a chunk, whose rows are copied there.
  absl::Status OnMessage(v1::StreamTeacherRequest* message);
  // The teacher has half-closed: when this returns OK all rows are kept, and trainers can have them.
  absl::Status Finish(v1::StreamTeacherResponse* response);

 private:
  absl::Status OnHeader(const v1::StreamTeacherHeader& header);
  absl::Status OnChunk(const v1::RowChunk& chunk);

  ServerCore& core_;
  const Caller caller_;
  heads::SessionRegistry::Use session_use_;
  std::unique_ptr<transport::TeacherStream> stream_;  // once the header is accepted
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_STREAM_TEACHER_CALL_H_
