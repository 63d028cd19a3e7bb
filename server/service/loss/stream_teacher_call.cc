// StreamTeacher: a teacher's rows, for trainers that join them.

#include <cstdint>
#include <memory>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/heads/session_registry.h"
#include "server/service/call/rpc_scope.h"
#include "server/service/loss/loss_service.h"
#include "server/service/loss/stream_io.h"
#include "server/service/request/field_check.h"
#include "server/service/request/loss_request.h"
#include "server/service/request/message_order.h"
#include "server/transport/join_handles.h"

namespace headwater::service {
namespace {

absl::Status TakeChunk(ServerCore& core, const v1::RowChunk& chunk, transport::TeacherStream& stream) {
  if (chunk.role() != v1::CHUNK_ROLE_TEACHER_HIDDEN) {
    return chunk.role() == v1::CHUNK_ROLE_UNSPECIFIED
               ? MissingField("chunk.role", "TEACHER_HIDDEN")
               : InvalidField("chunk.role", "TEACHER_HIDDEN", absl::StrCat(static_cast<int>(chunk.role())));
  }
  HEADWATER_RETURN_IF_ERROR(CheckRange("chunk.term_index", chunk.term_index(), 0, 0));
  const int64_t data_bytes = static_cast<int64_t>(chunk.data().size());
  HEADWATER_RETURN_IF_ERROR(CheckLimit("chunk.data", data_bytes, "max_chunk_bytes", core.options.limits.max_chunk_bytes));
  HEADWATER_RETURN_IF_ERROR(stream.Add(chunk.row_start(), chunk.row_count(), chunk.data().data(), data_bytes, "chunk"));
  core.metrics.CountBytes(observability::Direction::kIn, data_bytes);
  return absl::OkStatus();
}

// One stream, from its header to its end: when this returns OK all rows are kept, and trainers can have them.
absl::Status KeepRows(ServerCore& core, grpc::ServerContext& context, RpcScope& scope,
                      grpc::ServerReader<v1::StreamTeacherRequest>& reader, v1::StreamTeacherResponse* response) {
  heads::SessionRegistry::Use session_use;
  std::unique_ptr<transport::TeacherStream> stream;  // once the header is accepted
  const auto take_header = [&](const v1::StreamTeacherHeader& header) -> absl::Status {
    HEADWATER_ASSIGN_OR_RETURN(const StreamTeacherRequest request, DecodeStreamTeacherHeader(header, core.options.limits));
    HEADWATER_RETURN_IF_ERROR(scope.caller().CheckTenant(request.set.tenant));
    HEADWATER_ASSIGN_OR_RETURN(session_use, core.UseSession(request.session));
    HEADWATER_ASSIGN_OR_RETURN(stream, core.join.Open(request.set, request.row_indices, request.session));
    return absl::OkStatus();
  };
  HEADWATER_RETURN_IF_ERROR(
      (ReadAll<v1::StreamTeacherRequest>(core, context, scope, reader, [&](v1::StreamTeacherRequest* message) {
        return TakeInOrder(message, stream != nullptr, take_header,
                           [&](const v1::RowChunk* chunk) { return TakeChunk(core, *chunk, *stream); });
      })));
  HEADWATER_RETURN_IF_ERROR(CheckHeaderSeen(stream != nullptr));
  HEADWATER_RETURN_IF_ERROR(stream->Finish());
  response->set_row_count(stream->row_count());
  return absl::OkStatus();
}

}  // namespace

grpc::Status LossServiceImpl::StreamTeacher(grpc::ServerContext* context, grpc::ServerReader<v1::StreamTeacherRequest>* reader,
                                            v1::StreamTeacherResponse* response) {
  return RunRpc(entrance_, *context, observability::RpcMethod::kStreamTeacher,
                [&](RpcScope& scope) { return KeepRows(core_, *context, scope, *reader, response); });
}

}  // namespace headwater::service
