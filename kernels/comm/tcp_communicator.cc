// A communicator between processes: a TCP connection for every two ranks.
//
// A collective is one or two exchanges, in each of which a rank sends something to every other one and receives something from it,
// all at the same time in one poll loop, so that no two ranks can wait for each other's buffers to drain. What is gathered goes to
// all at once. A reduction of few elements gathers all and adds up everywhere; of many, rank r gets the r-th part of all ranks'
// elements, adds it up in rank order, and sends the sum to all: each element crosses the network twice. Either way an element's sum
// has one order, so all ranks have the same bits.
//
// Each message has a header, by which ranks that did not make the same call find out.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "headwater/kernels/communicator.h"
#include "headwater/kernels/error.h"
#include "kernels/comm/tcp_socket.h"
#include "kernels/core/shard_layout.h"

namespace headwater {
namespace {

using comm::Clock;
using comm::Socket;

constexpr size_t kSecretBytes = 32;
constexpr std::array<char, 8> kGreeting = {'h', 'w', 'g', 'r', 'o', 'u', 'p', '1'};
// Reductions of at most so many bytes take one exchange.
constexpr int64_t kSmallBytes = 8192;
constexpr int64_t kGrain = 64;

// What a rank that connects says first. The one that accepts answers with the secret's second half.
struct Greeting {
  std::array<char, 8> magic = kGreeting;
  int32_t rank = 0;
  std::array<char, kSecretBytes / 2> proof{};
};

struct Header {
  uint64_t sequence = 0;
  int64_t count = 0;
  int64_t operation = 0;
  bool operator==(const Header&) const = default;
};

enum Operation : int64_t { kGather = 1, kSumFloat, kSumDouble, kMaxFloat, kMaxDouble, kBarrier };

bool SameBytes(const char* a, const char* b, size_t count) {  // in a time that does not depend on them
  unsigned char difference = 0;
  for (size_t i = 0; i < count; ++i) difference = static_cast<unsigned char>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

template <typename T>
T Add(T a, T b) {
  return a + b;
}
template <typename T>
T Max(T a, T b) {
  if (a != a) return a;
  if (b != b) return b;
  return a > b ? a : b;
}

class TcpCommunicator final : public Communicator {
 public:
  // peers[r] is connected with rank r; the own one is empty.
  TcpCommunicator(int32_t rank, std::vector<Socket> peers, std::chrono::milliseconds stall_timeout)
      : rank_(rank), peers_(std::move(peers)), stall_timeout_(stall_timeout), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  int32_t rank() const override { return rank_; }
  int32_t world_size() const override { return static_cast<int32_t>(peers_.size()); }

  absl::Status AllReduceSum(float* data, int64_t count) override { return Reduce(data, count, kSumFloat, Add<float>); }
  absl::Status AllReduceSum(double* data, int64_t count) override { return Reduce(data, count, kSumDouble, Add<double>); }
  absl::Status AllReduceMax(float* data, int64_t count) override { return Reduce(data, count, kMaxFloat, Max<float>); }
  absl::Status AllReduceMax(double* data, int64_t count) override { return Reduce(data, count, kMaxDouble, Max<double>); }

  absl::Status AllGather(const double* data, int64_t count, double* out) override { return Gather(data, count, kGather, out); }

  absl::Status Barrier() override {
    return Exchange(
        {++sequence_, 0, kBarrier}, [](size_t) { return Out{}; }, [](size_t) { return In{}; });
  }

  void Abort(const absl::Status& reason) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!reason_.ok()) return;
      reason_ = reason;
    }
    for (const Socket& peer : peers_) {
      if (peer.open()) shutdown(peer.fd(), SHUT_RDWR);
    }
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_.fd(), &one, sizeof(one));
  }

  absl::Status status() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return reason_;
  }

 private:
  struct Out {
    const void* data = nullptr;
    size_t bytes = 0;
  };
  struct In {
    void* data = nullptr;
    size_t bytes = 0;
  };
  // Where an exchange with one rank is; positions count the header's bytes too.
  struct Progress {
    Out out;
    In in;
    size_t sent = 0;
    size_t received = 0;
    Header header;
    size_t to_send() const { return sizeof(Header) + out.bytes - sent; }
    size_t to_receive() const { return sizeof(Header) + in.bytes - received; }
  };

  template <typename T>
  absl::Status Gather(const T* data, int64_t count, Operation operation, T* out) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    absl::Status status = Exchange(
        {++sequence_, count, operation},
        [&](size_t) {
          return Out{data, bytes};
        },
        [&](size_t rank) {
          return In{out + static_cast<int64_t>(rank) * count, bytes};
        });
    if (bytes > 0) std::memcpy(out + rank_ * count, data, bytes);
    return status;
  }

  template <typename T>
  absl::Status Reduce(T* data, int64_t count, Operation operation, T (*combine)(T, T)) {
    const size_t ranks = peers_.size();
    const bool is_small = count * static_cast<int64_t>(sizeof(T)) <= kSmallBytes;
    const auto part_of = [&](size_t rank) {
      return is_small ? RowRange{0, count}
                      : SplitEvenly({0, count}, static_cast<int64_t>(rank), static_cast<int64_t>(ranks), kGrain);
    };
    const RowRange own = part_of(static_cast<size_t>(rank_));
    scratch_.resize(ranks * static_cast<size_t>(own.size()) * sizeof(T));
    T* const gathered = reinterpret_cast<T*>(scratch_.data());
    const auto bytes_of = [](const RowRange& range) { return static_cast<size_t>(range.size()) * sizeof(T); };
    absl::Status status = Exchange(
        {++sequence_, count, operation},
        [&](size_t rank) {
          return Out{data + part_of(rank).start, bytes_of(part_of(rank))};
        },
        [&](size_t rank) {
          return In{gathered + static_cast<int64_t>(rank) * own.size(), bytes_of(own)};
        });
    if (!status.ok()) return status;
    if (own.size() > 0) std::memcpy(gathered + rank_ * own.size(), data + own.start, bytes_of(own));
    for (int64_t i = 0; i < own.size(); ++i) {
      T value = gathered[i];
      for (int64_t rank = 1; rank < world_size(); ++rank) value = combine(value, gathered[rank * own.size() + i]);
      data[own.start + i] = value;
    }
    if (is_small) return absl::OkStatus();
    return Exchange(
        {++sequence_, count, operation},
        [&](size_t) {
          return Out{data + own.start, bytes_of(own)};
        },
        [&](size_t rank) {
          return In{data + part_of(rank).start, bytes_of(part_of(rank))};
        });
  }

  // out_of(rank), in_of(rank): what goes to, and comes from, each other rank.
  template <typename OutOf, typename InOf>
  absl::Status Exchange(const Header& header, const OutOf& out_of, const InOf& in_of) {
    std::vector<Progress>& all = progress_;
    all.assign(peers_.size(), Progress());
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      if (!peers_[rank].open()) continue;
      all[rank].out = out_of(rank);
      all[rank].in = in_of(rank);
    }
    absl::Status status = Move(header);
    if (!status.ok()) {
      Abort(status);
      std::lock_guard<std::mutex> lock(mutex_);
      return reason_;  // the first one: another thread's, perhaps
    }
    return status;
  }

  absl::Status Move(const Header& header) {
    Clock::time_point last_progress = Clock::now();
    while (true) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!reason_.ok()) return reason_;
      }
      polled_.assign(1, pollfd{wake_.fd(), POLLIN, 0});
      bool moved = false;
      for (size_t rank = 0; rank < peers_.size(); ++rank) {
        if (!peers_[rank].open()) continue;
        absl::Status status = MoveOne(header, rank, &moved);
        if (!status.ok()) return status;
        const Progress& one = progress_[rank];
        const int events = (one.to_send() > 0 ? POLLOUT : 0) | (one.to_receive() > 0 ? POLLIN : 0);
        if (events != 0) polled_.push_back({peers_[rank].fd(), static_cast<short>(events), 0});
      }
      if (polled_.size() == 1) return absl::OkStatus();
      const Clock::time_point now = Clock::now();
      if (moved) last_progress = now;
      if (now - last_progress >= stall_timeout_) return Stalled();
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(stall_timeout_ - (now - last_progress)).count();
      if (poll(polled_.data(), polled_.size(), static_cast<int>(std::min<int64_t>(left + 1, 1000))) < 0 && errno != EINTR) {
        return comm::SocketError("poll", errno);
      }
    }
  }

  absl::Status Stalled() const {
    std::string silent;
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      if (peers_[rank].open() && progress_[rank].to_receive() > 0) silent += (silent.empty() ? "" : ", ") + std::to_string(rank);
    }
    return MakeError(ErrorReason::kEngineFailed, "rank " + std::to_string(rank_) + " has heard nothing of rank " + silent +
                                                     " for " + std::to_string(stall_timeout_.count()) + " ms");
  }

  // What the socket takes and gives now.
  absl::Status MoveOne(const Header& header, size_t rank, bool* moved) {
    Progress& one = progress_[rank];
    const auto lost = [&](int error) {
      return comm::SocketError("the connection with rank " + std::to_string(rank) + " is lost", error);
    };
    while (one.to_send() > 0) {
      const size_t of_header = one.sent < sizeof(Header) ? one.sent : sizeof(Header);
      iovec parts[2] = {{const_cast<char*>(reinterpret_cast<const char*>(&header)) + of_header, sizeof(Header) - of_header},
                        {const_cast<char*>(static_cast<const char*>(one.out.data)) + (one.sent - of_header),
                         one.out.bytes - (one.sent - of_header)}};
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = 2;
      const ssize_t sent = sendmsg(peers_[rank].fd(), &message, MSG_NOSIGNAL);
      if (sent < 0 && errno == EAGAIN) break;
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) return lost(errno);
      one.sent += static_cast<size_t>(sent);
      *moved = true;
    }
    while (one.to_receive() > 0) {
      const size_t of_header = one.received < sizeof(Header) ? one.received : sizeof(Header);
      const bool in_header = of_header < sizeof(Header);
      char* const to = in_header ? reinterpret_cast<char*>(&one.header) + of_header
                                 : static_cast<char*>(one.in.data) + (one.received - sizeof(Header));
      const ssize_t received = recv(peers_[rank].fd(), to, in_header ? sizeof(Header) - of_header : one.to_receive(), 0);
      if (received < 0 && errno == EAGAIN) break;
      if (received < 0 && errno == EINTR) continue;
      if (received <= 0) return lost(received == 0 ? ECONNRESET : errno);
      one.received += static_cast<size_t>(received);
      *moved = true;
      if (one.received == sizeof(Header) && !(one.header == header)) {
        return MakeError(ErrorReason::kEngineFailed, "ranks disagree: operation " + std::to_string(header.operation) + " of " +
                                                         std::to_string(header.count) + " elements meets " +
                                                         std::to_string(one.header.operation) + " of " +
                                                         std::to_string(one.header.count) + " on rank " + std::to_string(rank));
      }
    }
    return absl::OkStatus();
  }

  const int32_t rank_;
  const std::vector<Socket> peers_;
  const std::chrono::milliseconds stall_timeout_;
  const Socket wake_;
  uint64_t sequence_ = 0;
  std::vector<Progress> progress_;  // by rank
  std::vector<pollfd> polled_;
  std::vector<char> scratch_;
  mutable std::mutex mutex_;
  absl::Status reason_;  // guarded by mutex_
};

class TcpMeetingImpl final : public TcpMeeting {
 public:
  TcpMeetingImpl(Socket listener, int32_t port) : listener_(std::move(listener)), port_(port) {}
  int32_t port() const override { return port_; }

  absl::StatusOr<std::unique_ptr<Communicator>> Meet(int32_t rank, const std::vector<std::string>& addresses,
                                                     const std::string& secret, std::chrono::milliseconds setup_timeout,
                                                     std::chrono::milliseconds stall_timeout) override {
    if (secret.size() != kSecretBytes) return MakeError(ErrorReason::kInternal, "a group's secret has 32 bytes");
    const Clock::time_point deadline = Clock::now() + setup_timeout;
    std::vector<Socket> peers(addresses.size());
    for (int32_t peer = 0; peer < rank; ++peer) {
      absl::StatusOr<Socket> socket = Call(rank, addresses[static_cast<size_t>(peer)], secret, deadline);
      if (!socket.ok()) return Failed(rank, socket.status());
      peers[static_cast<size_t>(peer)] = *std::move(socket);
    }
    for (int32_t missing = static_cast<int32_t>(addresses.size()) - rank - 1; missing > 0;) {
      absl::StatusOr<Socket> socket = comm::AcceptTcp(listener_, deadline);
      if (!socket.ok()) return Failed(rank, socket.status());
      const int32_t peer = Answer(*socket, secret, deadline);
      // Whoever it was, it is no rank that is missing.
      if (peer <= rank || peer >= static_cast<int32_t>(addresses.size()) || peers[static_cast<size_t>(peer)].open()) continue;
      peers[static_cast<size_t>(peer)] = *std::move(socket);
      --missing;
    }
    return std::unique_ptr<Communicator>(std::make_unique<TcpCommunicator>(rank, std::move(peers), stall_timeout));
  }

 private:
  static absl::Status Failed(int32_t rank, const absl::Status& cause) {
    return MakeError(ErrorReason::kEngineFailed,
                     "rank " + std::to_string(rank) + " could not meet the others: " + std::string(cause.message()));
  }

  static absl::StatusOr<Socket> Call(int32_t rank, const std::string& address, const std::string& secret,
                                     Clock::time_point deadline) {
    absl::StatusOr<Socket> socket = comm::ConnectTcp(address, deadline);
    if (!socket.ok()) return socket;
    Greeting greeting;
    greeting.rank = rank;
    std::copy_n(secret.begin(), greeting.proof.size(), greeting.proof.begin());
    absl::Status status = comm::SendAll(*socket, &greeting, sizeof(greeting), deadline);
    std::array<char, kSecretBytes / 2> proof{};
    if (status.ok()) status = comm::ReceiveAll(*socket, proof.data(), proof.size(), deadline);
    if (!status.ok()) return status;
    if (!SameBytes(proof.data(), secret.data() + proof.size(), proof.size())) {
      return MakeError(ErrorReason::kEngineFailed, "who answers at " + address + " does not know the group's secret");
    }
    return socket;
  }

  // The rank that has connected; -1 if it is none.
  static int32_t Answer(const Socket& socket, const std::string& secret, Clock::time_point deadline) {
    // A stranger that says nothing holds up nobody for long.
    deadline = std::min(deadline, Clock::now() + std::chrono::seconds(2));
    Greeting greeting;
    if (!comm::ReceiveAll(socket, &greeting, sizeof(greeting), deadline).ok() || greeting.magic != kGreeting ||
        !SameBytes(greeting.proof.data(), secret.data(), greeting.proof.size()) ||
        !comm::SendAll(socket, secret.data() + greeting.proof.size(), kSecretBytes / 2, deadline).ok()) {
      return -1;
    }
    return greeting.rank;
  }

  const Socket listener_;
  const int32_t port_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TcpMeeting>> TcpMeeting::Listen(const std::string& host) {
  int32_t port = 0;
  absl::StatusOr<Socket> listener = comm::ListenTcp(host, &port);
  if (!listener.ok()) return listener.status();
  return std::unique_ptr<TcpMeeting>(std::make_unique<TcpMeetingImpl>(*std::move(listener), port));
}

}  // namespace headwater
