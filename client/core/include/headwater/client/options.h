// The options of a connection, and the facts about its paths.
#ifndef HEADWATER_CLIENT_OPTIONS_H_
#define HEADWATER_CLIENT_OPTIONS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace headwater::client {

// How calls are repeated that failed for want of a connection or of room (client.h says which). Nothing is repeated beyond the
// call's deadline.
struct RetryPolicy {
  int max_attempts = 5;                            // >= 1, the first one included; 1 repeats nothing. See client.h, Replay
  std::chrono::milliseconds initial_backoff{100};  // > 0; doubled after each attempt. Half to all of it is waited, at random
  std::chrono::milliseconds max_backoff{5000};     // >= initial_backoff. A longer wait that the server asks for is respected
};

// How rows travel.
enum class Transport : int32_t {
  kAuto = 0,          // the best one that works, for each micro-batch
  kGrpc = 1,          // over gRPC, spread over several connections
  kSharedMemory = 2,  // host memory that the server maps: same host
  kCudaIpc = 3,       // the trainer's own device memory, read and written in place: same host, an engine on its GPUs
};

// `auto`, `grpc`, `shared_memory`, `cuda_ipc`.
const char* TransportName(Transport transport);

// The traffic of one path, of micro-batches that succeeded.
struct TransportCounts {
  int64_t micro_batches = 0;
  int64_t bytes = 0;  // of rows and their gradients, both ways
};

// A connection's paths and their traffic. Empty strings before the first micro-batch of the kind.
struct TransportStats {
  std::string host_transport;  // path of rows in host memory
  std::string cuda_transport;  // path of rows in device memory
  std::string why_not_better;  // one sentence; empty: there is no better path, or nothing is known yet
  int64_t stripes = 0;         // streams of the last micro-batch over gRPC
  TransportCounts grpc;
  TransportCounts shared_memory;
  TransportCounts cuda_ipc;
};

// TLS to the server. Files are in PEM, and are read again when they change: connections that are made from then on take the new
// ones.
struct TlsOptions {
  // Authorities that may have signed the server's certificate; empty: those of the system.
  std::string ca_certificate;
  // The certificate chain that this client presents to a server that asks for it (mTLS), and its key; both or neither.
  std::string client_certificate;
  std::string client_key;
  // The name that the server's certificate must be for; empty: the host of the target.
  std::string server_name;
};

// Options of a connection.
struct ClientOptions {
  // Deadline of every call that names no other, repetitions included. > 0.
  std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  // How long Connect() waits for the server to answer. > 0.
  std::chrono::milliseconds connect_timeout{std::chrono::seconds(10)};
  // Bytes of rows or weights in one message, at least one row. In [1, max_message_bytes - 64 KiB].
  int64_t chunk_bytes = int64_t{1} << 20;
  // Longest message that is sent or accepted. In [128 KiB, 1 GiB].
  int64_t max_message_bytes = int64_t{64} << 20;
  // Heads with short names, and ListHeads(), are this tenant's.
  std::string tenant = "default";
  RetryPolicy retry{};
  // Lease of the session that is asked for; the server may grant less. 0: no session, so that undecided micro-batches have no
  // owner.
  std::chrono::milliseconds session_lease{std::chrono::seconds(30)};
  // Shown in the server's logs; at most 128 bytes.
  std::string client_name = "headwater-cpp";
  // Room of the replay log, >= 0; 0: no replay. The oldest closed steps go first; an open step that takes more is not kept:
  // STEP_LOST is final then. Rows are copied when their micro-batch has succeeded.
  int64_t replay_bytes = 0;
  // Closed steps that are kept beside the open one, >= 0; absent: as many as there is room for.
  std::optional<int64_t> replay_steps{};
  // Anything but kAuto demands a path: a micro-batch that cannot go that way fails with TRANSPORT_UNAVAILABLE, which says why.
  Transport transport = Transport::kAuto;
  // Connections that the rows of a micro-batch are spread over at most, in [1, 64]; small ones take fewer.
  int stripes = 8;
  // Absent: nothing is encrypted. Not for Unix sockets.
  std::optional<TlsOptions> tls{};
  // Sent with every call, for a server that asks for one (--token_file); empty: none. Printable ASCII without blanks. A token is
  // not sent in plain text but to loopback addresses and Unix sockets.
  std::string token{};
  // Sends the token nevertheless, over a network that only the two sides can read.
  bool allow_plaintext_token = false;
  // Sent with every call: the caller's span, as the metadata `traceparent` of W3C Trace Context says it
  // (00-TRACE_ID-SPAN_ID-FLAGS). The server's log names it, and a server with --trace_dir writes traces if its flags say that the
  // trace is recorded. Empty: none.
  std::string traceparent{};
  // Receives each notice once: a sentence about something that works but is slow, or is not kept for replay. Examples: why rows
  // take no better path, why an open step is not kept, that a micro-batch was HELD for want of a slot. Called by any thread, must
  // not block. Empty: notices go to the standard error output.
  std::function<void(const std::string& sentence)> on_notice{};
};

}  // namespace headwater::client

#endif  // HEADWATER_CLIENT_OPTIONS_H_
