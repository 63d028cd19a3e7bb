#include "client/cpp/src/connection.h"

#include <grpc/grpc.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace headwater::client::internal {
namespace {

// Room in a message for everything but the chunk's data.
constexpr int64_t kMessageOverheadBytes = 64 << 10;
constexpr int64_t kMinMessageBytes = 128 << 10;
constexpr int64_t kMaxMessageBytes = int64_t{1} << 30;

absl::Status CheckOption(bool valid, const char* field, int64_t actual, const std::string& expected) {
  if (valid) return absl::OkStatus();
  return MakeLocalError(v1::ERROR_REASON_INVALID_FIELD, absl::StatusCode::kInvalidArgument,
                        absl::StrCat("ClientOptions.", field, " is ", actual, ", expected ", expected),
                        {{"field", field}, {"expected", expected}, {"actual", absl::StrCat(actual)}});
}

absl::Status CheckOptions(const ClientOptions& options) {
  const int64_t max_chunk_bytes = options.max_message_bytes - kMessageOverheadBytes;
  for (const absl::Status& status :
       {CheckOption(options.timeout.count() > 0, "timeout", options.timeout.count(), "milliseconds > 0"),
        CheckOption(options.connect_timeout.count() > 0, "connect_timeout", options.connect_timeout.count(), "milliseconds > 0"),
        CheckOption(options.max_message_bytes >= kMinMessageBytes && options.max_message_bytes <= kMaxMessageBytes,
                    "max_message_bytes", options.max_message_bytes,
                    absl::StrCat("[", kMinMessageBytes, ", ", kMaxMessageBytes, "]")),
        CheckOption(options.chunk_bytes >= 1 && options.chunk_bytes <= max_chunk_bytes, "chunk_bytes", options.chunk_bytes,
                    absl::StrCat("[1, ", max_chunk_bytes, "] (max_message_bytes - 64 KiB)")),
        CheckOption(options.max_upload_retries >= 0, "max_upload_retries", options.max_upload_retries, ">= 0")}) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

grpc::ChannelArguments MakeArguments(const ClientOptions& options) {
  grpc::ChannelArguments arguments;
  // A repeated micro-batch is a decision of the trainer, with an id and an attempt; the transport must never make it.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  arguments.SetInt(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, static_cast<int>(options.max_message_bytes));
  arguments.SetInt(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, static_cast<int>(options.max_message_bytes));
  // Channels with equal arguments share one socket otherwise, and one socket is one core's worth of bandwidth.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // A proxy that the environment names for web traffic would silently take `localhost` too.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // gRPC's own back-off grows to two minutes: a trainer waits for a restarted server by the second.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  return arguments;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Connection>> Connection::Open(const std::string& target, const ClientOptions& options) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  // gRPC would shut itself down with the last connection, and that waits for a poller that may sleep for ten seconds.
  [[maybe_unused]] static const bool kept_initialized = (grpc_init(), true);
  std::shared_ptr<grpc::Channel> channel =
      grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), MakeArguments(options));
  if (!channel->WaitForConnected(std::chrono::system_clock::now() + options.connect_timeout)) {
    return absl::UnavailableError(
        absl::StrCat("no headwater server answers at ", target, " within ", options.connect_timeout.count(), " ms"));
  }
  return std::shared_ptr<Connection>(new Connection(target, options, std::move(channel)));
}

Connection::Connection(std::string target, const ClientOptions& options, std::shared_ptr<grpc::Channel> channel)
    : target_(std::move(target)),
      options_(options),
      channel_(std::move(channel)),
      loss_(v1::LossService::NewStub(channel_)),
      heads_(v1::HeadService::NewStub(channel_)),
      session_(v1::SessionService::NewStub(channel_)) {}

Deadline Connection::DeadlineOf(const CallOptions& call) const {
  return std::chrono::system_clock::now() + (call.timeout.count() > 0 ? call.timeout : options_.timeout);
}

}  // namespace headwater::client::internal
