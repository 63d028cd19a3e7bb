// Reading and writing a client's stream on a thread of gRPC's. A call is cancelled when its client neither sends nor takes anything
// for too long. A stream that was cut is an error, one that ended is not.
#ifndef HEADWATER_SERVER_SERVICE_CALL_STREAM_IO_H_
#define HEADWATER_SERVER_SERVICE_CALL_STREAM_IO_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/guard/stream_watchdog.h"
#include "server/service/call/rpc_scope.h"
#include "server/service/request/field_check.h"
#include "server/service/request/message_order.h"
#include "server/service/server_core.h"

namespace headwater::service {

// Reads one message. False at the end of the stream.
template <typename Stream, typename Message>
bool ReadMessage(guard::StreamWatchdog::Watch& watch, Stream& stream, Message* message) {
  watch.Begin();
  const bool read = stream.Read(message);
  watch.End();
  return read;
}

// Writes one message. False when the client is gone, or has taken nothing for too long.
template <typename Stream, typename Message>
bool WriteMessage(guard::StreamWatchdog::Watch& watch, Stream& stream, const Message& message) {
  watch.Begin();
  const bool written = stream.Write(message);
  watch.End();
  return written;
}

// Watches the client of a call, and whether the call is still allowed.
struct ClientWatch : guard::StreamWatchdog::Watch {
  explicit ClientWatch(RpcScope& scope)
      : Watch(&scope.core().watchdog, [&scope](const absl::Status& why) { guard::EndCall(scope.context(), why); }) {
    Allow(scope.AllowedStill());
  }
};

// The messages of a client's stream: a header, then chunks until the client half-closes. The watchdog watches the client until
// then. Every error ends the call: those of message_order.h, the watchdog's, kCancelled or kDeadlineExceeded if the stream was cut,
// and ServerCore::lost().
template <typename Message>
class MessageReader {
 public:
  using Header = std::decay_t<decltype(std::declval<const Message&>().header())>;

  // Both must outlive the reader.
  template <typename Stream>
  MessageReader(RpcScope& scope, Stream& stream)
      : scope_(scope), place_(std::in_place, scope.core().reading_threads), watch_(std::in_place, scope) {
    read_ = [this, &stream] { return ReadMessage(*watch_, stream, &message_); };
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
