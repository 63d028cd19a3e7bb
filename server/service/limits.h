// The limits of a server: one table, from which everything that lists them follows.
#ifndef HEADWATER_SERVER_SERVICE_LIMITS_H_
#define HEADWATER_SERVER_SERVICE_LIMITS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/flags/flag_types.h"

namespace headwater::service {

// Units of a limit: the types of its value and of its flag.
template <typename ValueType, typename FlagType = ValueType>
struct LimitUnit {
  using Value = ValueType;
  using Flag = FlagType;
};
using CountLimit = LimitUnit<int64_t>;
using BytesLimit = LimitUnit<int64_t, BytesFlag>;
using TimeLimit = LimitUnit<absl::Duration, DurationFlag>;
using NumberLimit = LimitUnit<int32_t>;
using RateLimit = LimitUnit<double>;

// Room in a message for everything that is not a chunk's data or a per-token output.
inline constexpr int64_t kMessageOverheadBytes = 64 << 10;

// The part of a call's metadata that gRPC itself makes, with room for a short token.
inline constexpr int64_t kLeastMetadataBytes = 1 << 10;

// Bounds of the table. Targets, sizes of messages and gRPC's arguments are of 32 bits; gRPC counts milliseconds in 31 bits.
inline constexpr int64_t kNoMaximum = INT64_MAX;
inline constexpr absl::Duration kLeastTime = absl::Nanoseconds(1);
inline constexpr absl::Duration kMostTime = absl::Hours(1000);
inline constexpr absl::Duration kLeastGrpcTime = absl::Milliseconds(1);
inline constexpr absl::Duration kMostGrpcTime = absl::Hours(500);

// X(unit, name, default, minimum, maximum, help): the limits in the order of their numbers in headwater.v1.Limits. A row makes the
// field of Limits, the flag --name with its default and help, the check of its range, and the value in headwater.v1.Limits. There
// the name of a time ends in `_s`. `help` is also the row of the flag in docs/flags.md. The flag expands the
// default outside of this namespace: a default is a literal or a qualified name.
#define HEADWATER_LIMITS(X)                                                                                                        \
  X(Bytes, max_message_bytes, 16 << 20, 1, INT32_MAX, "bytes of one gRPC message")                                                 \
  X(Bytes, max_chunk_bytes, 4 << 20, 1, kNoMaximum, "bytes of data in one chunk")                                                  \
  X(Count, max_micro_batch_rows, 1 << 18, 1, kNoMaximum, "rows of a micro-batch")                                                  \
  X(Bytes, max_micro_batch_bytes, int64_t{2} << 30, 1, kNoMaximum, "bytes of all rows of one micro-batch")                         \
  X(Count, max_vocab_size, 1 << 24, 1, INT32_MAX, "rows of a head")                                                                \
  X(Count, max_hidden_size, 1 << 16, 1, kNoMaximum, "columns of a head")                                                           \
  X(Count, max_heads, 64, 1, kNoMaximum, "heads of the server")                                                                    \
  X(Count, max_step_micro_batches, 1 << 16, 1, kNoMaximum, "micro-batches of a step")                                              \
  X(Count, max_staging_slots, 64, 0, INT32_MAX, "staging slots of a head")                                                         \
  X(Count, max_queue_depth, 64, 1, kNoMaximum, "micro-batches that wait for the engine")                                           \
  X(Bytes, max_in_flight_bytes, int64_t{8} << 30, 1, kNoMaximum,                                                                   \
    "tensor bytes of all ComputeLoss and AddGradient calls in progress")                                                           \
  X(Bytes, max_upload_bytes, int64_t{8} << 30, 1, kNoMaximum, "host memory of all weight uploads that are not complete, in bytes") \
  X(Count, max_sessions, 4096, 1, kNoMaximum, "sessions that are open")                                                            \
  X(Time, max_session_lease, absl::Minutes(10), kLeastTime, kMostTime, "lease of a session")                                       \
  X(Bytes, max_held_bytes, int64_t{4} << 30, 0, kNoMaximum,                                                                        \
    "host memory of the rows of all HELD contributions, with their targets and weights, in bytes; 0: none is held")                \
  X(Count, max_waiting_calls, 16384, 0, kNoMaximum,                                                                                \
    "calls that wait for a step, for micro-batches, for their head to be free, made or deleted, or for a region; streams among "   \
    "them hold a thread each, and are at most a quarter of --max_threads")                                                         \
  X(Time, max_step_wait, absl::Minutes(5), kLeastTime, kMostTime,                                                                  \
    "how long a call waits for a step or its micro-batches, whatever its deadline")                                                \
  X(Count, max_heads_per_tenant, 64, 1, kNoMaximum, "heads of one tenant")                                                         \
  X(Bytes, max_tenant_memory_bytes, 0, 0, kNoMaximum,                                                                              \
    "memory that the plans of one tenant's heads add up to, in bytes; 0: no limit")                                                \
  X(Count, max_terms, 64, 1, kNoMaximum, "loss terms of a micro-batch, and heads of its commit or discard")                        \
  X(Count, max_stripes, 16, 1, INT32_MAX, "streams that carry the rows of one micro-batch")                                        \
  X(Time, max_stripe_wait, absl::Seconds(10), kLeastTime, kMostTime, "how long a stripe waits for its primary stream")             \
  X(Count, max_session_regions, 64, 0, kNoMaximum, "shared memory regions of one session; 0: none may be registered")              \
  X(Bytes, max_region_bytes, int64_t{64} << 30, 0, kNoMaximum, "bytes of one shared memory region; 0: none may be registered")     \
  X(Bytes, max_join_bytes, int64_t{4} << 30, 0, kNoMaximum,                                                                        \
    "host memory of all teacher rows that wait to be joined, in bytes; 0: none is kept")                                           \
  X(Time, max_join_wait, absl::Minutes(1), kLeastTime, kMostTime,                                                                  \
    "how long one side of a join waits for the other, and how long teacher rows without a request stay")                           \
  X(Count, max_connections, 4096, 1, INT32_MAX,                                                                                    \
    "connections to --listen_addresses, and as many to --admin_listen_addresses; one more is closed at once")                      \
  X(Count, max_connection_streams, 256, 1, INT32_MAX,                                                                              \
    "calls in progress on one connection; a client of gRPC waits with the next one")                                               \
  X(Bytes, max_metadata_bytes, 8 << 10, kLeastMetadataBytes, INT32_MAX,                                                            \
    "bytes of a call's metadata as HTTP/2 counts them: names, values, and 32 for each; at least 1024; more is RESOURCE_EXHAUSTED") \
  X(Time, max_stream_time, absl::Hours(1), kLeastTime, kMostTime,                                                                  \
    "how long a streaming call may take in all, whichever side is slow; then it is DEADLINE_EXCEEDED")                             \
  X(Time, max_handshake_time, absl::Seconds(10), kLeastGrpcTime, kMostGrpcTime,                                                    \
    "how long a new connection may take until TLS and HTTP/2 are agreed on; then it is closed")                                    \
  X(Time, max_connection_idle, absl::Minutes(10), kLeastGrpcTime, kMostGrpcTime,                                                   \
    "a connection without a call for so long is closed; clients of gRPC make a new one when they need it")                         \
  X(Time, min_ping_interval, absl::Seconds(5), kLeastGrpcTime, kMostGrpcTime,                                                      \
    "a connection whose client pings more often than this is closed at the third time; with --workers at most 30s")                \
  X(Count, max_health_watches, 256, 1, kNoMaximum,                                                                                 \
    "calls of grpc.health.v1.Health/Watch in progress, which need no token; one more is RESOURCE_EXHAUSTED")                       \
  X(Count, ordered_window, 1024, 1, kNoMaximum, "--deterministic: contributions of a step that may be there before lower ids are")

// X(unit, name, default, minimum, maximum, help): limits that are not sent to clients. A row makes the field of ServerOptions, the
// flag and the check of its range.
#define HEADWATER_SERVER_SETTINGS(X)                                                                                               \
  X(Number, max_threads, 256, 8, INT32_MAX,                                                                                        \
    "calls that hold a thread, at least 8: that many ComputeLoss, one more of which is answered QUEUE_FULL, and that many of all " \
    "others, one more of which is answered RESOURCE_EXHAUSTED by gRPC itself, without a reason")                                   \
  X(Number, max_pollers, 2, 1, INT32_MAX, "threads that wait for new calls, at least 1")                                           \
  X(Time, stream_idle_timeout, absl::Seconds(120), kLeastTime, absl::InfiniteDuration(),                                           \
    "a stream whose client sends nothing, or takes no answer, for so long is cancelled")                                           \
  X(Rate, max_cancel_rate, 100, 1e-6, 1e9,                                                                                         \
    "calls a second that the clients of one host may cancel, and ten times as many at once; beyond that, a host:port connection "  \
    "is closed at the 17th call that its client cancels")                                                                          \
  X(Number, max_reset_backlog, 64, 0, INT32_MAX,                                                                                   \
    "calls of one host:port connection that may wait for the server although its client has reset them: with more than these and " \
    "--max_connection_streams, the connection is closed")                                                                          \
  X(Time, engine_stall_timeout, absl::Minutes(5), absl::ZeroDuration(), absl::InfiniteDuration(),                                  \
    "an engine that computes and gets no further for so long is stuck: the process ends as when the device is lost; with "         \
    "--workers at least twice --rank_timeout; 0: never")                                                                           \
  X(Time, idle_head_timeout, absl::ZeroDuration(), absl::ZeroDuration(), absl::InfiniteDuration(),                                 \
    "a head that no call has named for so long is deleted, whatever its open step holds; 0: never")

struct Limits {
#define HEADWATER_LIMIT_FIELD(unit, name, default_value, ...) unit##Limit::Value name = default_value;
  HEADWATER_LIMITS(HEADWATER_LIMIT_FIELD)
#undef HEADWATER_LIMIT_FIELD
};

// InvalidArgument if a limit lies outside its range, or if two of them contradict each other. A row must fit a chunk; a chunk and
// the per-token outputs of the largest micro-batch must fit a message.
absl::Status ValidateLimits(const Limits& limits);

// InvalidArgument if a field of HEADWATER_SERVER_SETTINGS lies outside its range.
struct ServerOptions;
absl::Status ValidateSettings(const ServerOptions& options);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LIMITS_H_
