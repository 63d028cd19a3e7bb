// The messages of a client's stream, and reading and writing them on a thread of gRPC's. A call is cancelled when its client
// neither sends nor takes anything for too long. A stream that was cut is an error, one that ended is not.
#ifndef HEADWATER_SERVER_SERVICE_CALL_STREAM_IO_H_
#define HEADWATER_SERVER_SERVICE_CALL_STREAM_IO_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/v1/head_service.pb.h"
#include "server/guard/stream_watchdog.h"
#include "server/service/call/rpc_scope.h"
#include "server/service/request/field_check.h"
#include "server/service/server_core.h"
#include "server/transport/byte_budget.h"

namespace headwater::service {

// ---- the order of a client's messages: one header, first; then chunks

// The first message, where it is read by itself: kProtocolViolation for a chunk, kMissingField for neither.
template <typename Message>
absl::Status CheckHeaderFirst(const Message& message) {
  if (message.has_header()) return absl::OkStatus();
  if (!message.has_chunk()) return MissingField("message", "a header first");
  return FieldError(ErrorReason::kProtocolViolation, "header", "a header first", "a chunk");
}

// A message after the header: kProtocolViolation for a second header, kMissingField for neither.
template <typename Message>
absl::Status CheckNextChunk(const Message& message) {
  if (message.has_chunk()) return absl::OkStatus();
  if (!message.has_header()) return MissingField("message", "a header or a chunk");
  return FieldError(ErrorReason::kProtocolViolation, "header", "one header, first", "a second header");
}

// The stream has ended without a header.
inline absl::Status NoHeader() {
  return FieldError(ErrorReason::kProtocolViolation, "header", "a header first", "the stream's end");
}

// Checks a chunk of bytes as far as that needs to know nothing of its stream, and counts its bytes. kInvalidField, kLimitExceeded.
inline absl::Status CheckByteChunk(ServerCore& core, const v1::ByteChunk& chunk) {
  const int64_t data_bytes = static_cast<int64_t>(chunk.data().size());
  HEADWATER_RETURN_IF_ERROR(CheckAtLeast("chunk.offset_bytes", chunk.offset_bytes(), 0));
  HEADWATER_RETURN_IF_ERROR(CheckLimit("chunk.data", data_bytes, "max_chunk_bytes", core.options.limits.max_chunk_bytes));
  core.metrics.Count(observability::Metric::kBytes, data_bytes, observability::Direction::kIn);
  return absl::OkStatus();
}

// Appends the next bytes of `total_bytes` in all. kChunkOutOfRange unless they begin where the buffer ends, and fit. `what` they
// belong to, for the message of kMemoryBudgetExceeded.
inline absl::Status AppendBytes(transport::GrowingBuffer& buffer, int64_t offset, const std::string& data, int64_t total_bytes,
                                const char* what) {
  if (offset != buffer.size()) {
    return FieldError(ErrorReason::kChunkOutOfRange, "chunk.offset_bytes", absl::StrCat(buffer.size(), ", where the upload stands"),
                      absl::StrCat(offset));
  }
  const int64_t left = total_bytes - buffer.size();
  const int64_t data_bytes = static_cast<int64_t>(data.size());
  if (data_bytes < 1 || data_bytes > left) {
    return FieldError(ErrorReason::kChunkOutOfRange, "chunk.data",
                      absl::StrCat("1 to ", left, " bytes, which are left of the upload"), absl::StrCat(data_bytes, " bytes"));
  }
  if (buffer.Append(data.data(), data_bytes)) return absl::OkStatus();
  return MakeError(ErrorReason::kMemoryBudgetExceeded,
                   absl::StrCat("the host has no memory for ", data_bytes, " more bytes of ", what),
                   {{"requestedBytes", absl::StrCat(data_bytes)}});
}

// The stream has ended: kProtocolViolation if bytes are missing.
inline absl::Status CheckAllBytes(const transport::GrowingBuffer& buffer, int64_t total_bytes) {
  if (buffer.size() == total_bytes) return absl::OkStatus();
  return FieldError(ErrorReason::kProtocolViolation, "chunk", absl::StrCat(total_bytes, " bytes in all"),
                    absl::StrCat(buffer.size()));
}

// ---- reading and writing

// Reads or writes one message by `io`. False at the end of the stream, and when the client is gone or is idle for too long.
template <typename Io>
bool Watched(guard::StreamWatchdog::Watch& watch, Io&& io) {
  watch.Begin();
  const bool done = io();
  watch.End();
  return done;
}

// Watches the client of a call, and whether the call is still allowed.
struct ClientWatch : guard::StreamWatchdog::Watch {
  explicit ClientWatch(RpcScope& scope)
      : Watch(&scope.core().watchdog, [&scope](const absl::Status& why) { guard::EndCall(scope.context(), why); }) {
    Allow(scope.AllowedStill());
  }
};

// The messages of a client's stream: a header, then chunks until the client half-closes. The watchdog watches the client until
// then. Every error ends the call: those of the order, the watchdog's, kCancelled or kDeadlineExceeded if the stream was cut,
// and ServerCore::lost().
template <typename Message>
class MessageReader {
 public:
  using Header = std::decay_t<decltype(std::declval<const Message&>().header())>;

  // Both must outlive the reader.
  template <typename Stream>
  MessageReader(RpcScope& scope, Stream& stream)
      : scope_(scope), place_(std::in_place, scope.core().reading_threads), watch_(std::in_place, scope) {
    read_ = [this, &stream] { return Watched(*watch_, [&] { return stream.Read(&message_); }); };
  }

  // Once, before the chunks. kQueueFull if too many threads read already.
  absl::StatusOr<Header> ReadHeader() {
    // The thread stands still while the client sends nothing: half of the threads stay for other calls.
    if (const int64_t most = std::max(1, scope_.core().options.max_threads / 2); place_->before >= most) {
      return MakeError(ErrorReason::kQueueFull,
                       absl::StrCat("each stream that is read holds a thread: expected at most ", most,
                                    " at once (half of max_threads), and that many are in progress; try again"),
                       {{"limit", "max_threads"}, {"maximum", absl::StrCat(most)}, {kRetryAfterMsKey, "500"}});
    }
    HEADWATER_ASSIGN_OR_RETURN(const bool read, Read());
    if (!read) return NoHeader();
    HEADWATER_RETURN_IF_ERROR(CheckHeaderFirst(message_));
    return std::move(*message_.mutable_header());
  }

  // Calls `take(chunk)` for each chunk, until its first error or the end.
  template <typename Take>
  absl::Status ReadChunks(Take&& take) {
    while (true) {
      HEADWATER_ASSIGN_OR_RETURN(const bool read, Read());
      if (!read) return absl::OkStatus();
      HEADWATER_RETURN_IF_ERROR(CheckNextChunk(message_));
      HEADWATER_RETURN_IF_ERROR(take(message_.chunk()));
    }
  }

 private:
  // One of the threads that read.
  struct Place {
    explicit Place(std::atomic<int64_t>& all) : threads(all), before(all.fetch_add(1)) {}
    ~Place() { threads.fetch_sub(1); }
    std::atomic<int64_t>& threads;
    const int64_t before;
  };

  // False at the end of the stream.
  absl::StatusOr<bool> Read() {
    if (read_()) {
      HEADWATER_RETURN_IF_ERROR(scope_.core().lost());
      return true;
    }
    const absl::Status why = watch_->why();
    watch_.reset();
    place_.reset();
    if (!why.ok()) return why;
    if (scope_.Cancelled()) return scope_.CancelledError();
    return false;
  }

  RpcScope& scope_;
  std::function<bool()> read_;
  Message message_;
  std::optional<Place> place_;  // until the end of the stream, like the watch
  std::optional<ClientWatch> watch_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_CALL_STREAM_IO_H_
