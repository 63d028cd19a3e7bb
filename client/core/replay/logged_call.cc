#include "client/core/replay/logged_call.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "client/core/call/messages.h"
#include "client/core/core.h"
#include "client/core/link/random_id.h"

namespace headwater::client::internal {

absl::StatusOr<std::shared_ptr<const LoggedCall>> CopyForLog(Core& core, const Method& method,
                                                             const google::protobuf::Message& message, const CallMemory& memory) {
  const auto call = std::make_shared<LoggedCall>();
  call->method = &method;
  call->bytes = static_cast<int64_t>(message.ByteSizeLong());
  absl::Status copied = WithMemoryFor(call->bytes, "a message for the log", [&] {
    call->message.reset(message.New());
    call->message->CopyFrom(message);
    return absl::OkStatus();
  });
  if (!copied.ok()) return copied;
  call->memory.rows = memory.rows;
  call->memory.teachers = memory.teachers;
  const auto take = [&](RowsView& view) -> absl::Status {
    const int64_t bytes = view.row_count * view.row_bytes();
    if (bytes == 0 || view.data == nullptr) return absl::OkStatus();
    absl::StatusOr<Bytes> copy = Bytes::Allocate(bytes, "rows for the log");
    if (!copy.ok()) return copy.status();
    if (view.memory == Memory::kHost) {
      std::memcpy(copy->data(), view.data, static_cast<size_t>(bytes));
    } else {
      const auto context = core.row_transport().memory().ContextOf(view.data);
      if (!context.ok()) return context.status();
      const auto stream = static_cast<CuStream>(memory.cuda_stream);
      if (absl::Status status = (*context)->CopyNow(stream, copy->data(), view.data, bytes); !status.ok()) return status;
    }
    view.memory = Memory::kHost;
    view.data = copy->data();
    call->bytes += bytes;
    call->copies.push_back(*std::move(copy));
    return absl::OkStatus();
  };
  if (absl::Status status = take(call->memory.rows); !status.ok()) return status;
  for (RowsView& rows : call->memory.teachers) {
    if (absl::Status status = take(rows); !status.ok()) return status;
  }
  return call;
}

absl::Status CallAgain(Core& core, const LoggedCall& call, const HeadUses& heads, const Wait& wait) {
  std::unique_ptr<google::protobuf::Message> message;
  absl::Status copied = WithMemoryFor(call.bytes, "a message", [&] {
    message.reset(call.message->New());
    message->CopyFrom(*call.message);
    return absl::OkStatus();
  });
  if (!copied.ok()) return copied;
  SetEpochs(*message, [&heads](const NamedHead& head) -> std::string {
    const auto use = std::find_if(heads.begin(), heads.end(), [&](const HeadUse& known) { return known.state->name == head.name; });
    return head.epoch.empty() || use == heads.end() ? "" : use->epoch;
  });
  // What the server has of an earlier one is gone.
  if (call.method->shape == Shape::kUpload) SetText(*message, "upload_id", RandomHexId());
  return core.RunInner(*call.method, *message, call.memory, wait).status();
}

}  // namespace headwater::client::internal
