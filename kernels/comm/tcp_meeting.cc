// Connects the ranks of several processes: each calls those below it, and takes the calls of those above.
//
// A caller must prove that it is a rank (tcp_handshake.h). All callers are handled in one poll loop. A silent caller only takes a
// place, until its time is over or others need the place.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <list>
#include <thread>
#include <utility>

#include "headwater/kernels/communicator.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "kernels/comm/tcp_handshake.h"
#include "kernels/comm/tcp_socket.h"

namespace headwater {
namespace comm {
namespace {

// Unidentified callers: one more displaces the first of them.
constexpr size_t kMaxVisitors = 64;
// The time for each to identify itself.
constexpr std::chrono::seconds kVisitTime(10);

// Sends a few bytes, for which a new connection always has room.
bool SendNow(const Socket& socket, const void* data, size_t bytes) {
  return send(socket.fd(), data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

// Takes the calls of the ranks above the own one.
class Reception {
 public:
  // Calls are taken at `listener`, and their connections go to `peers`.
  Reception(int32_t rank, const std::string& secret, const Socket& listener, std::vector<Socket>* peers)
      : rank_(rank), secret_(secret), listener_(listener), peers_(*peers) {}

  // Waits until all of those ranks are connected.
  absl::Status AwaitAll(const Patience& patience) {
    while (missing() > 0) {
      HEADWATER_RETURN_IF_ERROR(patience.Check());
      HEADWATER_RETURN_IF_ERROR(AwaitSomething());
      HEADWATER_RETURN_IF_ERROR(LetIn());
      const Clock::time_point now = Clock::now();
      visitors_.remove_if([&](Visitor& visitor) { return now >= visitor.end || !Hear(&visitor); });
    }
    return absl::OkStatus();
  }

 private:
  struct Visitor {
    Socket socket;
    Clock::time_point end;
    Challenge challenge;
    Claim claim;
    size_t received = 0;  // bytes of the claim
  };

  int64_t missing() const {
    return std::count_if(peers_.begin() + rank_ + 1, peers_.end(), [](const Socket& peer) { return !peer.open(); });
  }

  absl::Status AwaitSomething() {
    polled_.assign(1, pollfd{listener_.fd(), POLLIN, 0});
    for (const Visitor& visitor : visitors_) polled_.push_back({visitor.socket.fd(), POLLIN, 0});
    if (poll(polled_.data(), polled_.size(), static_cast<int>(kLook.count())) < 0 && errno != EINTR)
      return SocketError("poll", errno);
    return absl::OkStatus();
  }

  // Accepts waiting callers, at most kMaxVisitors at once.
  absl::Status LetIn() {
    for (size_t count = 0; count < kMaxVisitors; ++count) {
      absl::StatusOr<Socket> socket = AcceptTcp(listener_);
      if (!socket.ok() || !socket->open()) return socket.status();
      HEADWATER_ASSIGN_OR_RETURN(const Challenge challenge, MakeChallenge());
      if (!SendNow(*socket, &challenge, sizeof(Challenge))) continue;
      if (visitors_.size() == kMaxVisitors) visitors_.pop_front();
      visitors_.push_back({*std::move(socket), Clock::now() + kVisitTime, challenge, {}, 0});
    }
    return absl::OkStatus();
  }

  // Reads the caller's claim and answers it. False when the caller is done with: accepted, refused or lost.
  bool Hear(Visitor* visitor) {
    while (visitor->received < sizeof(Claim)) {
      char* const to = reinterpret_cast<char*>(&visitor->claim) + visitor->received;
      const ssize_t received = recv(visitor->socket.fd(), to, sizeof(Claim) - visitor->received, 0);
      if (received < 0 && errno == EINTR) continue;
      if (received < 0 && errno == EAGAIN) return true;
      if (received <= 0) return false;
      visitor->received += static_cast<size_t>(received);
    }
    const Claim& claim = visitor->claim;
    const bool could_be = claim.rank > rank_ && claim.rank < static_cast<int32_t>(peers_.size());
    if (!could_be || !IsTrue(secret_, rank_, visitor->challenge, claim)) {
      const Verdict refused;
      SendNow(visitor->socket, &refused, sizeof(refused));
      return false;
    }
    const Verdict verdict = MakeVerdict(secret_, rank_, visitor->challenge, claim);
    // The rank has abandoned an earlier connection, if any.
    if (SendNow(visitor->socket, &verdict, sizeof(verdict))) peers_[static_cast<size_t>(claim.rank)] = std::move(visitor->socket);
    return false;
  }

  const int32_t rank_;
  const std::string& secret_;
  const Socket& listener_;
  std::vector<Socket>& peers_;
  std::list<Visitor> visitors_;  // the first to come first
  std::vector<pollfd> polled_;
};

// Identifies to the called rank. *is_refused: that rank refuses the caller, or has not proved itself.
absl::Status ShakeHands(const Socket& socket, int32_t rank, int32_t called, const std::string& secret, const Patience& patience,
                        bool* is_refused) {
  Challenge challenge;
  HEADWATER_RETURN_IF_ERROR(ReceiveAll(socket, &challenge, sizeof(challenge), patience));
  const absl::StatusOr<Claim> claim = MakeClaim(secret, rank, called, challenge);
  *is_refused = !claim.ok();
  if (!claim.ok()) return claim.status();
  Verdict verdict;
  HEADWATER_RETURN_IF_ERROR(SendAll(socket, &*claim, sizeof(Claim), patience));
  HEADWATER_RETURN_IF_ERROR(ReceiveAll(socket, &verdict, sizeof(verdict), patience));
  *is_refused = !IsTrue(secret, called, challenge, *claim, verdict);
  if (!*is_refused) return absl::OkStatus();
  return MakeError(ErrorReason::kEngineFailed, verdict.is_taken == 1 ? "who answers does not know the group's secret"
                                                                     : "it says that this is none of its ranks");
}

// Connects with a rank below. Retries while the connection is lost before both are identified.
absl::StatusOr<Socket> Call(int32_t rank, int32_t called, const std::string& address, const std::string& secret,
                            const Patience& patience) {
  while (true) {
    absl::StatusOr<Socket> socket = ConnectTcp(address, patience);
    if (!socket.ok()) return socket;
    bool is_refused = false;
    const absl::Status status = ShakeHands(*socket, rank, called, secret, patience, &is_refused);
    if (status.ok()) return socket;
    if (is_refused || !HasReason(status, ErrorReason::kEngineFailed)) {
      return absl::Status(status.code(),
                          "rank " + std::to_string(called) + " at " + address + ": " + std::string(status.message()));
    }
    std::this_thread::sleep_for(kLook);
    HEADWATER_RETURN_IF_ERROR(patience.Check());
  }
}

class TcpMeetingImpl final : public TcpMeeting {
 public:
  TcpMeetingImpl(Socket listener, int32_t port) : listener_(std::move(listener)), port_(port) {}
  int32_t port() const override { return port_; }

  absl::StatusOr<std::unique_ptr<Communicator>> Meet(int32_t rank, const std::vector<std::string>& addresses,
                                                     const std::string& secret, std::chrono::milliseconds setup_timeout,
                                                     const std::function<bool()>& cancelled) override {
    if (secret.size() != kSecretBytes) return MakeError(ErrorReason::kInternal, "a group's secret has 32 bytes");
    const Patience patience = {Clock::now() + setup_timeout, cancelled};
    std::vector<Socket> peers(addresses.size());
    for (int32_t peer = 0; peer < rank; ++peer) {
      absl::StatusOr<Socket> socket = Call(rank, peer, addresses[static_cast<size_t>(peer)], secret, patience);
      if (!socket.ok()) return Failed(rank, socket.status());
      peers[static_cast<size_t>(peer)] = *std::move(socket);
    }
    const absl::Status status = Reception(rank, secret, listener_, &peers).AwaitAll(patience);
    if (!status.ok()) return Failed(rank, status);
    return MakeTcpCommunicator(rank, std::move(peers));
  }

 private:
  static absl::Status Failed(int32_t rank, const absl::Status& cause) {
    if (absl::IsCancelled(cause)) return MakeError(ErrorReason::kCancelled, "the other ranks are awaited no longer");
    return MakeError(ErrorReason::kEngineFailed,
                     "rank " + std::to_string(rank) + " could not meet the others: " + std::string(cause.message()));
  }

  const Socket listener_;
  const int32_t port_;
};

}  // namespace
}  // namespace comm

absl::StatusOr<std::unique_ptr<TcpMeeting>> TcpMeeting::Listen(const std::string& host) {
  int32_t port = 0;
  HEADWATER_ASSIGN_OR_RETURN(comm::Socket listener, comm::ListenAtAnyPort(host, &port));
  return std::unique_ptr<TcpMeeting>(std::make_unique<comm::TcpMeetingImpl>(std::move(listener), port));
}

}  // namespace headwater
