#include "client/core/link/channel.h"

#include <grpc/grpc.h>
#include <grpcpp/create_channel_posix.h>

#include "client/core/link/security.h"
#include "client/core/link/target.h"

namespace headwater::client::internal {

namespace {

// Window of a connection that carries rows, equal to the server's.
constexpr int kWindowBytes = 4 << 20;
// A connection whose other side does not answer is given up after this, twice: its machine is gone, or the way there is. gRPC would
// keep pending writes, and every call on the connection, for as long as the system resends: a quarter of an hour.
constexpr int kKeepaliveMs = 20000;

// The arguments of all channels of this client to `target`.
grpc::ChannelArguments CommonArguments(const std::string& target, const ClientOptions& options) {
  // gRPC would shut itself down with the last connection, and that waits for a poller that may sleep for ten seconds.
  [[maybe_unused]] static const bool kept_initialized = (grpc_init(), true);
  grpc::ChannelArguments arguments;
  // A repeated micro-batch is the decision of this library, with an id and an attempt; the transport must never make it.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  arguments.SetInt(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, static_cast<int>(options.max_message_bytes));
  arguments.SetInt(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, static_cast<int>(options.max_message_bytes));
  if (!IsUnix(target)) {
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  }
  return arguments;
}

// The additional arguments of channels that carry rows.
grpc::ChannelArguments DataArguments(const std::string& peer, const ClientOptions& options) {
  grpc::ChannelArguments arguments = CommonArguments(peer, options);
  // Frames and a window in which a chunk fits, from the first message on. gRPC would find larger ones by probing, for a fifth more
  // CPU time on one connection.
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kWindowBytes);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kWindowBytes);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  return arguments;
}

// Makes a channel with a socket of its own, opened by gRPC.
std::shared_ptr<grpc::Channel> Create(const std::string& target, const ClientOptions& options, grpc::ChannelArguments arguments) {
  // Channels with equal arguments share one socket otherwise, and one socket is one core's worth of bandwidth.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // A proxy that the environment names for web traffic would silently take `localhost` too.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // gRPC's own back-off grows to two minutes: a trainer waits for a restarted server by the second.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  AddTlsArguments(options, &arguments);
  return grpc::experimental::CreateCustomChannelWithInterceptors(target, MakeCredentials(options), arguments,
                                                                 MakeInterceptors(options));
}

}  // namespace

std::shared_ptr<grpc::Channel> MakeDataChannel(const std::string& peer, const ClientOptions& options) {
  return Create(peer, options, DataArguments(peer, options));
}

std::shared_ptr<grpc::Channel> MakeDataChannel(const std::string& peer, const std::string& authority, int socket_fd,
                                               const ClientOptions& options) {
  grpc::ChannelArguments arguments = DataArguments(peer, options);
  arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, authority);
  return grpc::experimental::CreateCustomInsecureChannelWithInterceptorsFromFd(peer, socket_fd, arguments,
                                                                               MakeInterceptors(options));
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target, const ClientOptions& options) {
  return Create(ToGrpcTarget(target), options, CommonArguments(target, options));
}

}  // namespace headwater::client::internal
