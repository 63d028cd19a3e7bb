// Calls by the name of a method, with encoded messages: of services whose stubs the distribution does not package, and of any.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_RAW_CALL_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_RAW_CALL_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace headwater::testing {

struct RawOptions {
  std::vector<std::string> authorization = {};  // values of that metadata
  std::chrono::milliseconds deadline = std::chrono::seconds(60);
  bool half_close = true;  // when all messages are sent; else the stream stays open until it ends in another way
  bool cancel = false;     // before an answer is read
  // Gets each answer; false cancels the call, as a watch never ends by itself.
  std::function<bool(const std::string&)> on_answer = [](const std::string&) { return true; };
};

// A call of any kind that has begun; step by step.
class RawCall {
 public:
  RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method, const RawOptions& options = {})
      : stub_(channel) {
    for (const std::string& value : options.authorization) context_.AddMetadata("authorization", value);
    context_.set_deadline(std::chrono::system_clock::now() + options.deadline);
    call_ = stub_.PrepareCall(&context_, method, &queue_);
    call_->StartCall(nullptr);
    Next();
  }

  grpc::ClientContext& context() { return context_; }
  // False once the call has ended.
  bool Write(const std::string& message) {
    const grpc::Slice slice(message);
    call_->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    return Next();
  }
  void WritesDone() {
    call_->WritesDone(nullptr);
    Next();
  }
  // The next message; nullopt at the end.
  std::optional<std::string> Read() {
    grpc::ByteBuffer buffer;
    call_->Read(&buffer, nullptr);
    std::vector<grpc::Slice> slices;
    if (!Next() || !buffer.Dump(&slices).ok()) return std::nullopt;
    std::string message;
    for (const grpc::Slice& part : slices) message.append(reinterpret_cast<const char*>(part.begin()), part.size());
    return message;
  }
  grpc::Status Finish() {
    grpc::Status status;
    call_->Finish(&status, nullptr);
    Next();
    return status;
  }

 private:
  bool Next() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::GenericStub stub_;
  grpc::CompletionQueue queue_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
};

struct RawReply {
  grpc::Status status;
  std::string answer;  // the last message that came
};

// A call from its messages to its end.
inline RawReply CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                        const std::vector<std::string>& messages, const RawOptions& options = {}) {
  RawCall call(channel, method, options);
  bool open = true;
  for (size_t i = 0; open && i < messages.size(); ++i) open = call.Write(messages[i]);
  if (options.cancel) call.context().TryCancel();
  if (open && options.half_close) call.WritesDone();
  RawReply reply;
  while (const auto answer = call.Read()) {
    reply.answer = *answer;
    if (!options.on_answer(reply.answer)) call.context().TryCancel();
  }
  reply.status = call.Finish();
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
