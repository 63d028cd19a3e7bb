// Calls by the name of a method, with encoded messages: of services whose stubs the distribution does not package, and of any.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_RAW_CALL_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_RAW_CALL_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace headwater::testing {

struct RawReply {
  grpc::Status status;
  std::string answer;  // the last message that came
};

struct RawOptions {
  std::vector<std::string> authorization = {};  // values of that metadata
  std::chrono::milliseconds deadline = std::chrono::seconds(60);
  bool half_close = true;  // when all messages are sent; else the stream stays open until it ends in another way
  bool cancel = false;     // before an answer is read
  // Gets each answer; false cancels the call, as a watch never ends by itself.
  std::function<bool(const std::string&)> on_answer = [](const std::string&) { return true; };
};

// A call of any kind.
inline RawReply CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                        const std::vector<std::string>& messages, const RawOptions& options = {}) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  for (const std::string& value : options.authorization) context.AddMetadata("authorization", value);
  context.set_deadline(std::chrono::system_clock::now() + options.deadline);
  const auto call = stub.PrepareCall(&context, method, &queue);
  // One operation at a time.
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
  if (options.cancel) context.TryCancel();
  if (open && options.half_close) {
    call->WritesDone(nullptr);
    next();
  }
  RawReply reply;
  grpc::ByteBuffer buffer;
  for (open = true; open;) {
    call->Read(&buffer, nullptr);
    open = next();
    grpc::Slice bytes;
    if (!open || !buffer.DumpToSingleSlice(&bytes).ok()) continue;
    reply.answer.assign(reinterpret_cast<const char*>(bytes.begin()), bytes.size());
    if (!options.on_answer(reply.answer)) context.TryCancel();
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
