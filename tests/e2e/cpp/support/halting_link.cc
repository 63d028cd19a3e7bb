#include "tests/e2e/cpp/support/halting_link.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <utility>

namespace headwater::e2e {
namespace {

constexpr int kLookMs = 20;
constexpr size_t kMostWaiting = size_t{1} << 20;

[[noreturn]] void Fail(const char* what) {
  std::cerr << "HaltingLink: " << what << ": " << std::strerror(errno) << "\n";
  std::abort();
}

}  // namespace

HaltingLink::HaltingLink(std::string socket_path) : socket_path_(std::move(socket_path)) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listener_ < 0) Fail("socket");
  sockaddr_in own{};
  own.sin_family = AF_INET;
  own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(own);
  if (bind(listener_, reinterpret_cast<sockaddr*>(&own), size) != 0 || listen(listener_, 16) != 0 ||
      getsockname(listener_, reinterpret_cast<sockaddr*>(&own), &size) != 0) {
    Fail("listen");
  }
  address_ = "127.0.0.1:" + std::to_string(ntohs(own.sin_port));
  thread_ = std::thread([this] { Run(); });
}

HaltingLink::~HaltingLink() {
  is_stopping_.store(true);
  thread_.join();
  for (const Connection& connection : connections_) {
    for (const int end : connection.ends) close(end);
  }
  close(listener_);
}

void HaltingLink::Accept() {
  const int caller = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (caller < 0) return;
  const int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  socket_path_.copy(to.sun_path, sizeof(to.sun_path) - 1);
  if (server < 0 || connect(server, reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0) {  // the server is not there now
    close(caller);
    if (server >= 0) close(server);
    return;
  }
  Connection& made = connections_.emplace_back();
  made.ends[0] = caller;
  made.ends[1] = server;
}

void HaltingLink::Move(Connection* connection, int from) {
  std::string& waiting = connection->waiting[from];
  char buffer[65536];
  if (waiting.size() < kMostWaiting) {
    const ssize_t read = recv(connection->ends[from], buffer, sizeof(buffer), 0);
    if (read > 0) waiting.append(buffer, static_cast<size_t>(read));
    if (read == 0 || (read < 0 && errno != EAGAIN && errno != EINTR)) connection->is_over = true;
  }
  if (waiting.empty()) return;
  const ssize_t sent = send(connection->ends[1 - from], waiting.data(), waiting.size(), MSG_NOSIGNAL);
  if (sent > 0) waiting.erase(0, static_cast<size_t>(sent));
  if (sent < 0 && errno != EAGAIN && errno != EINTR) connection->is_over = true;
}

void HaltingLink::Run() {
  while (!is_stopping_.load()) {
    std::vector<pollfd> polled = {{listener_, POLLIN, 0}};
    for (const Connection& connection : connections_) {
      for (int end = 0; end < 2; ++end) {
        const int room = connection.waiting[end].size() < kMostWaiting ? POLLIN : 0;
        polled.push_back({connection.ends[end], static_cast<short>(room | (connection.waiting[1 - end].empty() ? 0 : POLLOUT)), 0});
      }
    }
    if (is_halted_.load()) polled.clear();
    poll(polled.data(), polled.size(), kLookMs);
    if (is_halted_.load()) continue;
    Accept();
    for (Connection& connection : connections_) {
      for (int end = 0; end < 2; ++end) Move(&connection, end);
    }
    connections_.remove_if([](const Connection& connection) {
      if (!connection.is_over) return false;
      for (const int end : connection.ends) close(end);
      return true;
    });
  }
}

}  // namespace headwater::e2e
