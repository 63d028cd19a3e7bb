// A communicator between processes: a TCP connection for every two ranks.
//
// A collective is one or two exchanges, in which a rank sends to every other rank and receives from it. One poll loop serves all
// connections, so that no two ranks can wait for each other's buffers to drain. Gathered data goes to all at once. A small
// reduction gathers all elements and adds them up on every rank. In a large one, rank r adds up the r-th part of all ranks in rank
// order and sends the sum to all. Each element crosses the network twice then. Both add in one order, so all ranks have the same
// bits. A scattered sum is exchanged piece by piece to save memory.
//
// Each message has a header, which reveals ranks that did not make the same call.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <mutex>
#include <utility>

#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "kernels/comm/collective_clock.h"
#include "kernels/comm/tcp_socket.h"
#include "kernels/core/shard_layout.h"

namespace headwater::comm {
namespace {

// Reductions of at most so many bytes take one exchange.
constexpr int64_t kSmallBytes = 8192;
constexpr int64_t kGrain = 64;

struct Header {
  uint64_t sequence = 0;
  int64_t count = 0;
  int64_t operation = 0;
  bool operator==(const Header&) const = default;
};

enum Operation : int64_t { kGather = 1, kSumFloat, kSumDouble, kMax, kScatterSum, kGatherParts };

double Max(double a, double b) {
  if (a != a) return a;
  if (b != b) return b;
  return a > b ? a : b;
}

class TcpCommunicator final : public Communicator {
 public:
  // peers[r] is connected with rank r; the own one is empty.
  TcpCommunicator(int32_t rank, std::vector<Socket> peers)
      : rank_(rank), peers_(std::move(peers)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  int32_t rank() const override { return rank_; }
  int32_t world_size() const override { return static_cast<int32_t>(peers_.size()); }

  absl::Status AllReduceSum(float* data, int64_t count) override { return Reduce(data, count, kSumFloat, std::plus<float>()); }
  absl::Status AllReduceSum(double* data, int64_t count) override { return Reduce(data, count, kSumDouble, std::plus<double>()); }
  absl::Status AllReduceMax(double* data, int64_t count) override { return Reduce(data, count, kMax, Max); }

  absl::Status AllGather(const double* data, int64_t count, double* out) override {
    const size_t bytes = static_cast<size_t>(count) * sizeof(double);
    CollectiveClock::Collective collective(clock_);
    absl::Status status = Exchange(
        &collective, {++sequence_, count, kGather},
        [&](size_t) {
          return Out{data, bytes};
        },
        [&](size_t rank) {
          return In{out + static_cast<int64_t>(rank) * count, bytes};
        });
    if (bytes > 0) std::memcpy(out + rank_ * count, data, bytes);
    return status;
  }

  absl::Status ReduceScatterSum(float* data, absl::Span<const int64_t> bounds) override {
    CollectiveClock::Collective collective(clock_);
    constexpr int64_t kPiece = kReduceScatterBytes / static_cast<int64_t>(sizeof(float));
    int64_t longest = 0;
    for (size_t rank = 0; rank < peers_.size(); ++rank) longest = std::max(longest, bounds[rank + 1] - bounds[rank]);
    for (int64_t start = 0; start < longest; start += kPiece) {
      const auto piece_of = [&](size_t rank) {
        const int64_t end = bounds[rank + 1];
        return RowRange{std::min(bounds[rank] + start, end), std::min(bounds[rank] + start + kPiece, end)};
      };
      HEADWATER_RETURN_IF_ERROR(
          SumOwnPart(&collective, data, Header{++sequence_, longest, kScatterSum}, piece_of, std::plus<float>()));
    }
    return absl::OkStatus();
  }

  absl::Status AllGatherParts(void* data, absl::Span<const int64_t> bounds) override {
    char* const bytes = static_cast<char*>(data);
    const auto size_of = [&](size_t rank) { return static_cast<size_t>(bounds[rank + 1] - bounds[rank]); };
    const size_t own = static_cast<size_t>(rank_);
    CollectiveClock::Collective collective(clock_);
    return Exchange(
        &collective, {++sequence_, bounds.back(), kGatherParts},
        [&](size_t) {
          return Out{bytes + bounds[own], size_of(own)};
        },
        [&](size_t rank) {
          return In{bytes + bounds[rank], size_of(rank)};
        });
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

  CommunicatorTimes times() const override { return clock_.times(); }

 private:
  struct Out {
    const void* data = nullptr;
    size_t bytes = 0;
  };
  struct In {
    void* data = nullptr;
    size_t bytes = 0;
  };
  // The state of an exchange with one rank; positions include the header's bytes.
  struct Progress {
    Out out;
    In in;
    size_t sent = 0;
    size_t received = 0;
    Header header;
    size_t to_send() const { return sizeof(Header) + out.bytes - sent; }
    size_t to_receive() const { return sizeof(Header) + in.bytes - received; }
  };

  template <typename T, typename Combine>
  absl::Status Reduce(T* data, int64_t count, Operation operation, Combine combine) {
    const size_t ranks = peers_.size();
    const bool is_small = count * static_cast<int64_t>(sizeof(T)) <= kSmallBytes;
    const auto part_of = [&](size_t rank) {
      return is_small ? RowRange{0, count}
                      : SplitEvenly({0, count}, static_cast<int64_t>(rank), static_cast<int64_t>(ranks), kGrain);
    };
    CollectiveClock::Collective collective(clock_);
    absl::Status status = SumOwnPart(&collective, data, {++sequence_, count, operation}, part_of, combine);
    if (!status.ok() || is_small) return status;
    const RowRange own = part_of(static_cast<size_t>(rank_));
    return Exchange(
        &collective, {++sequence_, count, operation},
        [&](size_t) {
          return Out{data + own.start, BytesOf<T>(own)};
        },
        [&](size_t rank) {
          return In{data + part_of(rank).start, BytesOf<T>(part_of(rank))};
        });
  }

  template <typename T>
  static size_t BytesOf(const RowRange& range) {
    return static_cast<size_t>(range.size()) * sizeof(T);
  }

  // Sends each rank this rank's elements of its part, part_of(rank), and combines this rank's own part in rank order.
  template <typename T, typename PartOf, typename Combine>
  absl::Status SumOwnPart(CollectiveClock::Collective* collective, T* data, const Header& header, const PartOf& part_of,
                          Combine combine) {
    const RowRange own = part_of(static_cast<size_t>(rank_));
    scratch_.resize(peers_.size() * BytesOf<T>(own));
    T* const gathered = reinterpret_cast<T*>(scratch_.data());
    absl::Status status = Exchange(
        collective, header,
        [&](size_t rank) {
          return Out{data + part_of(rank).start, BytesOf<T>(part_of(rank))};
        },
        [&](size_t rank) {
          return In{gathered + static_cast<int64_t>(rank) * own.size(), BytesOf<T>(own)};
        });
    if (!status.ok()) return status;
    if (own.size() > 0) std::memcpy(gathered + rank_ * own.size(), data + own.start, BytesOf<T>(own));
    for (int64_t i = 0; i < own.size(); ++i) {
      T value = gathered[i];
      for (int64_t rank = 1; rank < world_size(); ++rank) value = combine(value, gathered[rank * own.size() + i]);
      data[own.start + i] = value;
    }
    return absl::OkStatus();
  }

  // out_of(rank), in_of(rank): the data to send to, and to receive from, each other rank.
  template <typename OutOf, typename InOf>
  absl::Status Exchange(CollectiveClock::Collective* collective, const Header& header, const OutOf& out_of, const InOf& in_of) {
    std::vector<Progress>& all = progress_;
    all.assign(peers_.size(), Progress());
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      if (!peers_[rank].open()) continue;
      all[rank].out = out_of(rank);
      all[rank].in = in_of(rank);
    }
    absl::Status status = Move(collective, header);
    if (!status.ok()) {
      Abort(status);
      std::lock_guard<std::mutex> lock(mutex_);
      return reason_;  // the first one: another thread's, perhaps
    }
    return status;
  }

  absl::Status Move(CollectiveClock::Collective* collective, const Header& header) {
    bool all_here = false;
    while (true) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!reason_.ok()) return reason_;
      }
      bool none_missing = true;
      polled_.assign(1, pollfd{wake_.fd(), POLLIN, 0});
      for (size_t rank = 0; rank < peers_.size(); ++rank) {
        if (!peers_[rank].open()) continue;
        Progress& one = progress_[rank];
        HEADWATER_RETURN_IF_ERROR(MoveOne(header, rank));
        none_missing = none_missing && one.received >= sizeof(Header);
        const int events = (one.to_send() > 0 ? POLLOUT : 0) | (one.to_receive() > 0 ? POLLIN : 0);
        if (events == 0) continue;
        polled_.push_back({peers_[rank].fd(), static_cast<short>(events), 0});
      }
      if (none_missing && !all_here) {
        all_here = true;
        collective->EveryRankIsHere();
      }
      if (polled_.size() == 1) return absl::OkStatus();
      // Without a timeout: the rank's leader detects lost ranks and aborts this.
      if (poll(polled_.data(), polled_.size(), -1) < 0 && errno != EINTR) return SocketError("poll", errno);
    }
  }

  // Sends and receives as much as the socket allows now.
  absl::Status MoveOne(const Header& header, size_t rank) {
    Progress& one = progress_[rank];
    const auto lost = [&](int error) {
      return SocketError("the connection with rank " + std::to_string(rank) + " is lost", error);
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
  const Socket wake_;
  CollectiveClock clock_;
  uint64_t sequence_ = 0;
  std::vector<Progress> progress_;  // by rank
  std::vector<pollfd> polled_;
  std::vector<char> scratch_;
  mutable std::mutex mutex_;
  absl::Status reason_;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<Communicator> MakeTcpCommunicator(int32_t rank, std::vector<Socket> peers) {
  return std::make_unique<TcpCommunicator>(rank, std::move(peers));
}

}  // namespace headwater::comm
