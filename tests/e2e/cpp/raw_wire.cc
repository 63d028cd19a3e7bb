#include "tests/e2e/cpp/raw_wire.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

namespace headwater::e2e {
namespace {

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), std::min(path.size() + 1, sizeof(address.sun_path) - 1));
  return address;
}

int ConnectTo(const std::string& path, int type) {
  const int descriptor = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
  const sockaddr_un address = AddressOf(path);
  if (descriptor < 0 || connect(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    throw std::runtime_error("connecting to " + path + ": " + std::strerror(errno));
  }
  return descriptor;
}

// HPACK: a literal header that is not indexed, without Huffman codes; all strings here are shorter than 127 bytes.
void AddHeader(const std::string& name, const std::string& value, std::string* block) {
  block->push_back(0);
  for (const std::string& text : {name, value}) {
    block->push_back(static_cast<char>(text.size()));
    block->append(text);
  }
}

}  // namespace

std::string ReasonOf(const grpc::Status& status) {
  if (status.ok()) return "OK";
  v1::RpcStatus details;
  if (details.ParseFromString(status.error_details())) {
    for (const google::protobuf::Any& any : details.details()) {
      v1::ErrorInfo info;
      if (any.type_url().find("/google.rpc.ErrorInfo") != std::string::npos && info.ParseFromString(any.value())) {
        return info.reason();
      }
    }
  }
  switch (status.error_code()) {
    case grpc::StatusCode::CANCELLED:
      return "CANCELLED";
    case grpc::StatusCode::UNAVAILABLE:
      return "UNAVAILABLE";
    default:
      return "code " + std::to_string(status.error_code()) + ": " + status.error_message();
  }
}

RawWire::RawWire(const std::string& target) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto channel = grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
  loss_ = v1::LossService::NewStub(channel);
  sessions_ = v1::SessionService::NewStub(channel);
}

std::string RawWire::OpenSession(std::chrono::milliseconds lease) {
  grpc::ClientContext context;
  v1::OpenSessionRequest request;
  request.mutable_lease()->set_seconds(lease.count() / 1000);
  request.mutable_lease()->set_nanos(static_cast<int32_t>(lease.count() % 1000) * 1'000'000);
  v1::OpenSessionResponse response;
  const grpc::Status status = sessions_->OpenSession(&context, request, &response);
  if (!status.ok()) throw std::runtime_error("OpenSession: " + status.error_message());
  return response.session_id();
}

std::string RawWire::Register(const v1::RegisterSharedMemoryRequest& request, grpc::Status* status) {
  grpc::ClientContext context;
  v1::RegisterSharedMemoryResponse response;
  *status = sessions_->RegisterSharedMemory(&context, request, &response);
  return response.region_id();
}

grpc::Status RawWire::Unregister(const std::string& session, const std::string& region) {
  grpc::ClientContext context;
  v1::UnregisterSharedMemoryRequest request;
  request.set_session_id(session);
  request.set_region_id(region);
  v1::UnregisterSharedMemoryResponse response;
  return sessions_->UnregisterSharedMemory(&context, request, &response);
}

grpc::Status RawWire::Compute(const v1::MicroBatchHeader& header, const std::string& rows, v1::MicroBatchSummary* summary) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  const auto stream = loss_->ComputeLoss(&context);
  v1::ComputeLossRequest request;
  *request.mutable_header() = header;
  stream->Write(request);
  if (!rows.empty()) {
    request.mutable_chunk()->set_role(v1::CHUNK_ROLE_HIDDEN);
    request.mutable_chunk()->set_row_count(header.row_count());
    request.mutable_chunk()->set_data(rows);
    stream->Write(request);
  }
  stream->WritesDone();
  v1::ComputeLossResponse response;
  while (stream->Read(&response)) {
    if (response.has_summary() && summary != nullptr) *summary = response.summary();
  }
  return stream->Finish();
}

SharedMemory::SharedMemory(int64_t bytes, bool sealed) : bytes_(bytes) {
  descriptor_ = memfd_create("headwater-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor_ < 0 || ftruncate(descriptor_, bytes) != 0 || fallocate(descriptor_, 0, 0, bytes) != 0 ||
      (sealed && fcntl(descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)) {
    throw std::runtime_error(std::string("memfd: ") + std::strerror(errno));
  }
  void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (data == MAP_FAILED) throw std::runtime_error(std::string("mmap: ") + std::strerror(errno));
  data_ = static_cast<unsigned char*>(data);
}

SharedMemory::~SharedMemory() {
  munmap(data_, static_cast<size_t>(bytes_));
  close(descriptor_);
}

std::string SendDescriptor(const std::string& socket_path, int descriptor, int64_t bytes) {
  const int connection = ConnectTo(socket_path, SOCK_SEQPACKET);
  char packet[16] = {'H', 'W', 'M', 'D', 1};
  std::memcpy(packet + 8, &bytes, sizeof(bytes));
  iovec part{packet, sizeof(packet)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  char answer[512];
  ssize_t count = -1;
  if (sendmsg(connection, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(packet))) {
    count = recv(connection, answer, sizeof(answer), 0);
  }
  close(connection);
  // Magic, 0 for no error, token, incarnation.
  uint32_t error = 1;
  if (count >= 8) std::memcpy(&error, answer + 4, sizeof(error));
  return count == 4 + 4 + 32 + 16 && error == 0 ? std::string(answer + 8, 32) : "";
}

TrickledCall::TrickledCall(const std::string& target, const std::string& method)
    : socket_(ConnectTo(target.substr(std::strlen("unix:")), SOCK_STREAM)) {
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  if (send(socket_, preface.data(), preface.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(preface.size())) {
    throw std::runtime_error("the server takes no connection");
  }
  constexpr int kHeaders = 1;
  constexpr int kSettings = 4;
  constexpr int kEndHeaders = 4;
  std::string block;
  AddHeader(":method", "POST", &block);
  AddHeader(":scheme", "http", &block);
  AddHeader(":path", method, &block);
  AddHeader(":authority", "localhost", &block);
  AddHeader("content-type", "application/grpc", &block);
  AddHeader("te", "trailers", &block);
  if (!SendFrame(kSettings, 0, 0, "") || !SendFrame(kHeaders, kEndHeaders, 1, block)) {
    throw std::runtime_error("the server takes no call");
  }
}

TrickledCall::~TrickledCall() { close(socket_); }

bool TrickledCall::SendFrame(int type, int flags, uint32_t stream, const std::string& payload) {
  std::string frame;
  for (const int shift : {16, 8, 0}) frame.push_back(static_cast<char>(payload.size() >> shift));
  frame.push_back(static_cast<char>(type));
  frame.push_back(static_cast<char>(flags));
  for (const int shift : {24, 16, 8, 0}) frame.push_back(static_cast<char>(stream >> shift));
  frame += payload;
  return send(socket_, frame.data(), frame.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(frame.size());
}

bool TrickledCall::Send(const std::string& bytes) {
  constexpr int kData = 0;
  return SendFrame(kData, 0, 1, bytes);
}

bool TrickledCall::Ended() {
  char buffer[4096];
  while (true) {
    const ssize_t count = recv(socket_, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (count == 0) ended_ = true;
    if (count <= 0) break;
    received_.append(buffer, static_cast<size_t>(count));
  }
  constexpr size_t kFrameHeader = 9;
  constexpr int kHeaders = 1;
  constexpr int kReset = 3;
  constexpr int kEndStream = 1;
  while (received_.size() >= kFrameHeader) {
    const auto byte = [&](size_t place) { return static_cast<size_t>(static_cast<unsigned char>(received_[place])); };
    const size_t length = byte(0) << 16 | byte(1) << 8 | byte(2);
    if (received_.size() < kFrameHeader + length) break;
    const bool of_the_call = byte(8) == 1;
    if (of_the_call && (byte(3) == kReset || (byte(3) == kHeaders && (byte(4) & kEndStream) != 0))) ended_ = true;
    received_.erase(0, kFrameHeader + length);
  }
  return ended_;
}

std::string TrickledCall::Framed(const std::string& message) {
  std::string framed(1, '\0');
  for (const int shift : {24, 16, 8, 0}) framed.push_back(static_cast<char>(message.size() >> shift));
  return framed + message;
}

}  // namespace headwater::e2e
