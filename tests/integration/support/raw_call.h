// Calls by the name of a method, with encoded messages: of services whose stubs the distribution does not package, and of any.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_RAW_CALL_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_RAW_CALL_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace headwater::testing {

struct RawReply {
  grpc::Status status;
  std::string answer;  // the last message that came
};

// A call of any kind: its messages, and these values of "authorization". `first_answer`: cancels the call once one has come, as a
// watch never ends by itself.
inline RawReply CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                        const std::vector<std::string>& messages, const std::vector<std::string>& authorization = {},
                        bool first_answer = false) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  for (const std::string& value : authorization) context.AddMetadata("authorization", value);
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const auto call = stub.PrepareCall(&context, method, &queue);
  const auto next = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  call->StartCall(nullptr);
  bool open = next();
  for (size_t i = 0; open && i < messages.size(); ++i) {
    const grpc::Slice slice(messages[i]);
    call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    open = next();
  }
  if (open) {
    call->WritesDone(nullptr);
    next();
  }
  RawReply reply;
  grpc::ByteBuffer buffer;
  for (open = true; open;) {
    call->Read(&buffer, nullptr);
    open = next();
    std::vector<grpc::Slice> slices;
    if (!open || !buffer.Dump(&slices).ok()) continue;
    reply.answer.clear();
    for (const grpc::Slice& part : slices) reply.answer.append(reinterpret_cast<const char*>(part.begin()), part.size());
    if (first_answer) context.TryCancel();
  }
  call->Finish(&reply.status, nullptr);
  next();
  return reply;
}

// grpc.health.v1.HealthCheckResponse.ServingStatus: 1 SERVING, 2 NOT_SERVING; -1 if the call failed.
inline int Health(const std::shared_ptr<grpc::Channel>& channel, const std::string& service) {
  std::string request;
  if (!service.empty()) request = std::string("\x0a") + static_cast<char>(service.size()) + service;  // field 1, a string
  const RawReply reply = CallRaw(channel, "/grpc.health.v1.Health/Check", {request});
  if (!reply.status.ok()) return -1;
  return reply.answer.size() == 2 && reply.answer[0] == 0x08 ? reply.answer[1] : 0;  // field 1, a varint
}

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_RAW_CALL_H_
