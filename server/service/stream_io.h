// Reading and writing a client's stream: cancelled when the client neither sends nor takes anything for too long, and told apart
// whether it ended or was cut.
#ifndef HEADWATER_SERVER_SERVICE_STREAM_IO_H_
#define HEADWATER_SERVER_SERVICE_STREAM_IO_H_

#include <grpcpp/server_context.h>

#include "absl/status/status.h"
#include "server/service/rpc_scope.h"
#include "server/service/server_core.h"
#include "server/service/stream_watchdog.h"

namespace headwater::service {

// Reads one message. False at the end of the stream.
template <typename Stream, typename Message>
bool ReadMessage(StreamWatchdog::Watch& watch, Stream& stream, Message* message) {
  watch.Begin();
  const bool read = stream.Read(message);
  watch.End();
  return read;
}

// Calls `take(&message)` for each message until the client half-closes. Returns the first error of `take`, kCancelled /
// kDeadlineExceeded if the stream was cut, or ServerCore::lost().
template <typename Message, typename Stream, typename Take>
absl::Status ReadAll(ServerCore& core, grpc::ServerContext& context, RpcScope& scope, Stream& stream, Take&& take) {
  StreamWatchdog::Watch watch(&core.watchdog, [&context] { context.TryCancel(); });
  Message message;
  while (ReadMessage(watch, stream, &message)) {
    if (absl::Status lost = core.lost(); !lost.ok()) return lost;
    if (absl::Status status = take(&message); !status.ok()) return status;
  }
  return watch.expired() || scope.Cancelled() ? scope.CancelledError() : absl::OkStatus();
}

// The answers of a stream. Write() returns false when the client is gone, or has taken nothing for too long.
template <typename Stream>
class WatchedWriter {
 public:
  WatchedWriter(ServerCore& core, grpc::ServerContext& context, Stream& stream)
      : watch_(&core.watchdog, [&context] { context.TryCancel(); }), stream_(stream) {}

  template <typename Message>
  bool Write(const Message& message) {
    watch_.Begin();
    const bool written = stream_.Write(message);
    watch_.End();
    return written;
  }

 private:
  StreamWatchdog::Watch watch_;
  Stream& stream_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_STREAM_IO_H_
