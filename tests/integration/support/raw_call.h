// Calls to services whose stubs the distribution does not package: reflection and health.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_RAW_CALL_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_RAW_CALL_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace headwater::testing {

// Calls a unary method by name with encoded bytes, and with a token unless that is empty.
inline grpc::Status CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method, const std::string& request,
                            std::string* response, const std::string& token = "") {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  const grpc::Slice slice(request);
  const grpc::ByteBuffer request_buffer(&slice, 1);
  const auto call = stub.PrepareUnaryCall(&context, method, request_buffer, &queue);
  call->StartCall();
  grpc::ByteBuffer buffer;
  grpc::Status status;
  call->Finish(&buffer, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  std::vector<grpc::Slice> slices;
  response->clear();
  if (status.ok() && buffer.Dump(&slices).ok()) {
    for (const grpc::Slice& part : slices) response->append(reinterpret_cast<const char*>(part.begin()), part.size());
  }
  return status;
}

// grpc.health.v1.HealthCheckResponse.ServingStatus: 1 SERVING, 2 NOT_SERVING; -1 if the call failed.
inline int Health(const std::shared_ptr<grpc::Channel>& channel, const std::string& service) {
  std::string request;
  if (!service.empty()) request = std::string("\x0a") + static_cast<char>(service.size()) + service;  // field 1, a string
  std::string response;
  if (!CallRaw(channel, "/grpc.health.v1.Health/Check", request, &response).ok()) return -1;
  return response.size() == 2 && response[0] == 0x08 ? response[1] : 0;  // field 1, a varint
}

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_RAW_CALL_H_
