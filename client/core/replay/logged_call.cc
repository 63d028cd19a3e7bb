#include "client/core/replay/logged_call.h"

#include <utility>

#include "client/core/call/messages.h"
#include "client/core/core.h"
#include "client/core/link/random_id.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {

absl::StatusOr<std::shared_ptr<const LoggedCall>> CopyForLog(Core& core, const Method& method,
                                                             const google::protobuf::Message& message, const CallMemory& memory) {
  const auto call = std::make_shared<LoggedCall>();
  call->method = &method;
  call->bytes = static_cast<int64_t>(message.ByteSizeLong());
  HEADWATER_ASSIGN_OR_RETURN(call->message, CopyOf(message));
  call->memory.rows = memory.rows;
  call->memory.teachers = memory.teachers;
  MemoryPaths& paths = core.row_transport().memory();
  const auto take = [&](RowsView& view) -> absl::Status {
    const int64_t bytes = view.bytes();
    if (bytes == 0 || view.data == nullptr) return absl::OkStatus();
    HEADWATER_ASSIGN_OR_RETURN(Bytes copy, Bytes::Allocate(bytes, "rows for the log"));
    if (view.memory == Memory::kHost) {
      paths.Copy(copy.data(), view.data, bytes);
    } else {
      // By way of page-locked memory, which is used again: fresh and pageable memory costs several times the copy.
      HEADWATER_ASSIGN_OR_RETURN(const auto context, paths.ContextOf(view.data));
      const absl::StatusOr<RowMemory> staging = paths.AllocateStaging(view.data, bytes);
      const bool is_staged = staging.ok() && staging->page_locked;
      unsigned char* const to = is_staged ? staging->data : copy.data();
      const CuStream stream = static_cast<CuStream>(memory.cuda_stream);
      if (absl::Status copied = context->CopyNow(stream, to, view.data, bytes); !copied.ok()) {
        // The destination is free for others from now on: no copy may be under way.
        static_cast<void>(context->Synchronize(stream));
        return copied;
      }
      if (is_staged) paths.Copy(copy.data(), to, bytes);
    }
    view.memory = Memory::kHost;
    view.data = copy.data();
    call->bytes += bytes;
    call->copies.push_back(std::move(copy));
    return absl::OkStatus();
  };
  HEADWATER_RETURN_IF_ERROR(take(call->memory.rows));
  for (RowsView& rows : call->memory.teachers) {
    HEADWATER_RETURN_IF_ERROR(take(rows));
  }
  return call;
}

absl::Status CallAgain(Core& core, const LoggedCall& call, const HeadUses& heads, const Wait& wait) {
  HEADWATER_ASSIGN_OR_RETURN(const auto message, CopyOf(*call.message));
  SetEpochs(*message, heads);
  // The server has lost the content of an earlier upload.
  if (call.method->shape == Shape::kUpload) SetText(*message, "upload_id", RandomHexId());
  return core.RunInner(*message, call.memory, wait).status();
}

}  // namespace headwater::client::internal
