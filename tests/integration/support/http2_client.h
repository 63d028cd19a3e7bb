// A connection that speaks as much HTTP/2 as tests of what a server bears from strangers need: frames, written and read by hand.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_HTTP2_CLIENT_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_HTTP2_CLIENT_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <optional>
#include <string>

namespace headwater::testing {

inline constexpr uint8_t kDataFrame = 0;
inline constexpr uint8_t kHeadersFrame = 1;
inline constexpr uint8_t kEndStream = 1;   // flag
inline constexpr uint8_t kEndHeaders = 4;  // flag
inline constexpr uint8_t kResetFrame = 3;
inline constexpr uint8_t kSettingsFrame = 4;
inline constexpr uint8_t kPingFrame = 6;
inline constexpr uint8_t kGoAwayFrame = 7;

struct Http2Frame {
  std::string Encode() const {
    std::string bytes;
    const auto add = [&bytes](size_t value, int byte_count) {
      while (byte_count-- > 0) bytes.push_back(static_cast<char>(value >> 8 * byte_count));
    };
    add(payload.size(), 3);
    add(type, 1);
    add(flags, 1);
    add(stream, 4);
    return bytes + payload;
  }

  uint8_t type = 0;
  uint8_t flags = 0;
  uint32_t stream = 0;
  std::string payload = {};
};

// What a client sends first.
inline std::string Http2Start() { return "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Http2Frame{kSettingsFrame}.Encode(); }

class Http2Client {
 public:
  // To a port of 127.0.0.1.
  explicit Http2Client(int port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~Http2Client() { close(fd_); }
  Http2Client(const Http2Client&) = delete;
  Http2Client& operator=(const Http2Client&) = delete;

  bool connected() const { return connected_; }
  // False once the server does not take anything any more.
  bool Send(const std::string& bytes) {
    return send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }
  // Waits up to 60 s for the next frame; nullopt at the end of the connection.
  std::optional<Http2Frame> Read() {
    if (!Fill(9)) return std::nullopt;
    const auto at = [this](size_t i) { return static_cast<uint32_t>(static_cast<uint8_t>(buffer_[i])); };
    const size_t length = (at(0) << 16) | (at(1) << 8) | at(2);
    Http2Frame frame;
    frame.type = static_cast<uint8_t>(at(3));
    frame.flags = static_cast<uint8_t>(at(4));
    frame.stream = (at(5) << 24) | (at(6) << 16) | (at(7) << 8) | at(8);
    if (!Fill(9 + length)) return std::nullopt;
    frame.payload = buffer_.substr(9, length);
    buffer_.erase(0, 9 + length);
    return frame;
  }
  // Whether the server has ended the connection, after reading all that it sent.
  bool AwaitEnd() {
    while (Read().has_value()) {
    }
    return ended_;
  }

 private:
  bool Fill(size_t bytes) {
    while (buffer_.size() < bytes) {
      pollfd ready{fd_, POLLIN, 0};
      if (poll(&ready, 1, 60000) <= 0) return false;
      char part[4096];
      const ssize_t count = recv(fd_, part, sizeof(part), 0);
      if (count <= 0) {
        ended_ = true;
        return false;
      }
      buffer_.append(part, static_cast<size_t>(count));
    }
    return true;
  }

  const int fd_;
  bool connected_ = false;
  bool ended_ = false;
  std::string buffer_;
};

// The fields of a gRPC call, without indexing or Huffman codes.
inline std::string CallHeaders(const std::string& method = "ComputeLoss") {
  std::string block;
  const auto add = [&block](const std::string& name, const std::string& value) {
    block += std::string(1, '\0') + static_cast<char>(name.size()) + name + static_cast<char>(value.size()) + value;
  };
  add(":method", "POST");
  add(":scheme", "http");
  add(":path", "/headwater.v1.LossService/" + method);
  add(":authority", "127.0.0.1");
  add("te", "trailers");
  add("content-type", "application/grpc");
  return block;
}

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_HTTP2_CLIENT_H_
