// The wire without the client library, for what the library never does: streams that stop, regions that lie, bytes that trickle.
#ifndef HEADWATER_TESTS_E2E_CPP_RAW_WIRE_H_
#define HEADWATER_TESTS_E2E_CPP_RAW_WIRE_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "headwater/v1/error.pb.h"
#include "headwater/v1/loss_service.grpc.pb.h"
#include "headwater/v1/session_service.grpc.pb.h"

namespace headwater::e2e {

// The reason of an error, or "OK"; "UNAVAILABLE" and the like where there is none.
std::string ReasonOf(const grpc::Status& status);

// Stubs on a connection of their own.
class RawWire {
 public:
  explicit RawWire(const std::string& target);

  v1::LossService::Stub& loss() { return *loss_; }
  v1::SessionService::Stub& sessions() { return *sessions_; }

  // Throws std::runtime_error if it is refused.
  std::string OpenSession(std::chrono::milliseconds lease = std::chrono::minutes(1));
  // The region's id, or "" and why not.
  std::string Register(const v1::RegisterSharedMemoryRequest& request, grpc::Status* status);
  grpc::Status Unregister(const std::string& session, const std::string& region);
  // A whole micro-batch whose rows lie in regions, or come as one chunk: `rows` is empty then.
  grpc::Status Compute(const v1::MicroBatchHeader& header, const std::string& rows, v1::MicroBatchSummary* summary = nullptr);

 private:
  std::unique_ptr<v1::LossService::Stub> loss_;
  std::unique_ptr<v1::SessionService::Stub> sessions_;
};

// Memory that a client makes to share it. Unmapped and closed with the object.
class SharedMemory {
 public:
  // A memfd, sealed as the server wants it unless `sealed` is false. Throws std::runtime_error if the system has none.
  explicit SharedMemory(int64_t bytes, bool sealed = true);
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  int descriptor() const { return descriptor_; }
  unsigned char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  int descriptor_ = -1;
  unsigned char* data_ = nullptr;
  const int64_t bytes_;
};

// Gives a descriptor to the server's socket, as docs/api.md says, and returns the token; "" if it is refused.
std::string SendDescriptor(const std::string& socket_path, int descriptor, int64_t bytes);

// A connection that speaks as much HTTP/2 as it takes to begin a call, by hand, so that its bytes can be sent one by one.
class TrickledCall {
 public:
  // Connects to `unix:PATH`, and begins a call of `method` ("/headwater.v1.LossService/ComputeLoss").
  TrickledCall(const std::string& target, const std::string& method);
  TrickledCall(const TrickledCall&) = delete;
  TrickledCall& operator=(const TrickledCall&) = delete;
  ~TrickledCall();

  // Sends bytes of the call's data, in a frame of their own. False if the server has closed the connection.
  bool Send(const std::string& bytes);
  // Whether the server has ended the call (trailers or a reset of the stream) or the connection; reads what has come.
  bool Ended();

  // `message` as gRPC frames it.
  static std::string Framed(const std::string& message);

 private:
  bool SendFrame(int type, int flags, uint32_t stream, const std::string& payload);

  int socket_ = -1;
  std::string received_;
  bool ended_ = false;
};

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_RAW_WIRE_H_
