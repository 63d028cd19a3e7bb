// DescriptorSocket: takes descriptors of shared memory from processes of this host, which gRPC cannot carry.
//
//   auto socket = DescriptorSocket::Listen({.path = "/run/headwater/memory.sock", .incarnation = ...});
//   auto memfd = (*socket)->Take(token);  // once
//
// A client connects (AF_UNIX, SOCK_SEQPACKET), sends one packet with one descriptor and gets one packet with a token. The client
// names the token to RegisterSharedMemory. docs/api.md, "Shared memory", has the packets byte by byte. A token is 32 random bytes,
// valid once and for a short time; its descriptor is closed if no call takes it.
//
// Bounded are connections, the time for a packet, and waiting descriptors, in total and of one user. One thread. Thread-safe.
#ifndef HEADWATER_SERVER_TRANSPORT_DESCRIPTOR_SOCKET_H_
#define HEADWATER_SERVER_TRANSPORT_DESCRIPTOR_SOCKET_H_

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/transport/file_descriptor.h"

namespace headwater::transport {

// The protocol's constants.
inline constexpr char kDescriptorMagic[4] = {'H', 'W', 'M', 'D'};
inline constexpr uint32_t kDescriptorProtocolVersion = 1;
inline constexpr size_t kDescriptorRequestBytes = 16;
inline constexpr size_t kDescriptorTokenBytes = 32;
inline constexpr size_t kDescriptorAnswerBytes = 4 + 4 + kDescriptorTokenBytes + 16;
inline constexpr size_t kDescriptorMaxErrorBytes = 256;

struct DescriptorSocketOptions {
  std::string path;       // absolute or not, of at most 107 bytes
  int mode = 0600;        // permissions of the socket
  bool any_user = false;  // also processes of other users than the server's own and root
  std::array<uint8_t, 16> incarnation{};
  absl::Duration token_lifetime = absl::Seconds(30);
  absl::Duration request_timeout = absl::Seconds(5);  // for a connection's packet
  int max_connections = 16;
  int max_tokens = 256;      // of all users
  int max_user_tokens = 64;  // of one
};

class DescriptorSocket {
 public:
  // Makes the socket, in place of a file on which no process listens. InvalidArgument for a path that is too long or an invalid
  // mode; Unavailable if the socket cannot be made there, or another server listens.
  static absl::StatusOr<std::unique_ptr<DescriptorSocket>> Listen(const DescriptorSocketOptions& options);
  // Closes the waiting descriptors, and removes the socket's file.
  ~DescriptorSocket();

  // The descriptor that was answered with `token`, which is invalid from then on. kInvalidField, with one message for a token that
  // was never given, was used, or is too old.
  absl::StatusOr<FileDescriptor> Take(absl::string_view token);
  const std::string& path() const { return path_; }  // absolute
  // Descriptors that wait to be taken.
  int64_t size() const {
    absl::MutexLock lock(&mutex_);
    return static_cast<int64_t>(waiting_.size());
  }

 private:
  struct Waiting {
    FileDescriptor memory;
    uid_t user = 0;
    absl::Time end;
  };
  struct Connection {
    FileDescriptor socket;
    uid_t user = 0;
    bool allowed = false;
    absl::Time end;
  };

  DescriptorSocket(const DescriptorSocketOptions& options, std::string path, FileDescriptor listener, FileDescriptor wake);
  void Run();
  // False if no connection can be taken now.
  bool Accept(std::vector<Connection>* connections);
  // Takes the packet of a connection, and answers it.
  void Serve(const Connection& connection);
  // Whether one more descriptor of the user may wait.
  absl::Status CheckRoom(uid_t user) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Closes the descriptors that are too old.
  void ForgetOld(absl::Time now);

  const DescriptorSocketOptions options_;
  const std::string path_;
  const FileDescriptor listener_;
  const FileDescriptor wake_;
  mutable absl::Mutex mutex_;
  std::map<std::string, Waiting> waiting_ ABSL_GUARDED_BY(mutex_);  // by token
  std::thread thread_;                                              // last: it uses the members above
};

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_DESCRIPTOR_SOCKET_H_
