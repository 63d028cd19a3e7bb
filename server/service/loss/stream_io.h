// Reading and writing a client's stream. A call is cancelled when its client neither sends nor takes anything for too long. A
// stream that was cut is an error, one that ended is not.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_STREAM_IO_H_
#define HEADWATER_SERVER_SERVICE_LOSS_STREAM_IO_H_

#include <grpcpp/server_context.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/guard/stream_watchdog.h"
#include "server/service/call/rpc_scope.h"
#include "server/service/request/field_check.h"
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

// Calls `take(&message)` for each message until the client half-closes. Returns the first error of `take`, the watchdog's reason,
// kCancelled / kDeadlineExceeded if the stream was cut, or ServerCore::lost(). kQueueFull if too many threads read already.
template <typename Message, typename Stream, typename Take>
absl::Status ReadAll(ServerCore& core, grpc::ServerContext& context, RpcScope& scope, Stream& stream, Take&& take) {
  // The thread stands still while the client sends nothing: half of the threads stay for other calls.
  struct Reading {
    std::atomic<int64_t>& threads;
    const int64_t before = threads.fetch_add(1);
    ~Reading() { threads.fetch_sub(1); }
  } reading{core.reading_threads};
  if (const int64_t most = std::max(1, core.options.max_threads / 2); reading.before >= most) {
    return MakeError(ErrorReason::kQueueFull,
                     absl::StrCat("each stream that is read holds a thread: expected at most ", most,
                                  " at once (half of max_threads), and that many are in progress; try again"),
                     {{"limit", "max_threads"}, {"maximum", absl::StrCat(most)}, {kRetryAfterMsKey, "500"}});
  }
  guard::StreamWatchdog::Watch watch(&core.watchdog, [&context](const absl::Status& why) { guard::EndCall(context, why); });
  watch.Allow(scope.AllowedStill());
  Message message;
  while (ReadMessage(watch, stream, &message)) {
    if (absl::Status lost = core.lost(); !lost.ok()) return lost;
    if (absl::Status status = take(&message); !status.ok()) return status;
  }
  if (absl::Status why = watch.why(); !why.ok()) return why;
  return scope.Cancelled() ? scope.CancelledError() : absl::OkStatus();
}

// The answers of a stream. Write() returns false when the client is gone, or has taken nothing for too long.
template <typename Stream>
class WatchedWriter {
 public:
  WatchedWriter(ServerCore& core, grpc::ServerContext& context, RpcScope& scope, Stream& stream)
      : watch_(&core.watchdog, [&context](const absl::Status& why) { guard::EndCall(context, why); }), stream_(stream) {
    watch_.Allow(scope.AllowedStill());
  }

  template <typename Message>
  bool Write(const Message& message) {
    watch_.Begin();
    const bool written = stream_.Write(message);
    watch_.End();
    return written;
  }

 private:
  guard::StreamWatchdog::Watch watch_;
  Stream& stream_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LOSS_STREAM_IO_H_
