// Makes the calls of a headwater.fuzz.Sequence to a server, and holds every answer against what a client may expect.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_SEQUENCE_CLIENT_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_SEQUENCE_CLIENT_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tests/fuzz/fuzz.pb.h"
#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/client_state.h"
#include "tests/integration/support/raw_call.h"
#include "tests/integration/support/wire_server.h"
#include "tests/unit/transport/descriptor_peer.h"
#include "tests/unit/transport/region_memory.h"

namespace headwater::fuzz {

// The API's methods in the order of their services.
inline const std::vector<const google::protobuf::MethodDescriptor*>& Methods() {
  static const auto methods = [] {
    std::vector<const google::protobuf::MethodDescriptor*> found;
    for (const char* service : {"LossService", "HeadService", "SessionService"}) {
      const auto* const descriptor =
          google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(absl::StrCat("headwater.v1.", service));
      for (int i = 0; i < descriptor->method_count(); ++i) found.push_back(descriptor->method(i));
    }
    return found;
  }();
  return methods;
}

// The one that takes such a request.
inline const google::protobuf::MethodDescriptor& MethodOf(const google::protobuf::Descriptor* request) {
  return **std::find_if(Methods().begin(), Methods().end(),
                        [request](const auto* method) { return method->input_type() == request; });
}

inline std::unique_ptr<google::protobuf::Message> NewAnswer(const google::protobuf::MethodDescriptor& method) {
  const auto* const type = google::protobuf::MessageFactory::generated_factory()->GetPrototype(method.output_type());
  return std::unique_ptr<google::protobuf::Message>(type->New());
}

inline bool IsPlain(const std::string& text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
}

// The token of memory that a descriptor socket has taken; empty if it has not.
inline std::string NewToken(const std::string& socket) {
  constexpr int64_t kMemoryBytes = 4096;
  static const transport::FileDescriptor memory(testing::MakeMemory(kMemoryBytes));
  const transport::FileDescriptor client = testing::ConnectTo(socket);
  FUZZ_CHECK(client.valid(), std::strerror(errno));
  std::array<char, 512> answer{};
  if (!testing::SendDescriptors(client.get(), testing::DescriptorRequest(kMemoryBytes), {memory.get()})) return "";
  const ssize_t bytes = recv(client.get(), answer.data(), answer.size(), 0);
  return bytes >= 40 ? std::string(answer.data() + 8, 32) : "";
}

// One sequence's client.
class SequenceClient {
 public:
  // `answered` is told each call's name and what it was answered with: OK, a reason, or gRPC's code. From any thread.
  SequenceClient(testing::WireServer& server, const std::shared_ptr<grpc::Channel>& channel, const std::string& descriptor_socket,
                 std::function<void(const std::string& call, const std::string& answer)> answered)
      : server_(server),
        channel_(channel),
        answered_(std::move(answered)),
        known_([descriptor_socket] { return NewToken(descriptor_socket); }) {}

  // Returns when all calls have ended.
  void Run(const Sequence& sequence) {
    constexpr int kMaxCalls = 64;
    constexpr size_t kMaxBackground = 8;
    std::vector<std::thread> background;
    for (int i = 0; i < std::min(sequence.calls_size(), kMaxCalls); ++i) {
      const Call& call = sequence.calls(i);
      if (call.background() && background.size() < kMaxBackground) {
        background.emplace_back([this, &call] { RunCall(call); });
      } else {
        RunCall(call);
      }
    }
    for (std::thread& thread : background) thread.join();
  }

  // Deletes the heads that were made, and ends the sessions.
  void CleanUp() {
    const auto ask = [this](const Message& request, Message* answer) {
      return Exchange("clean_up", MethodOf(request.GetDescriptor()), {request.SerializeAsString()}, END_HALF_CLOSE, answer);
    };
    // Also those of calls that were given up before they were answered.
    v1::ListHeadsResponse listed;
    FUZZ_CHECK(ask(v1::ListHeadsRequest(), &listed).ok());
    for (const v1::Head& head : listed.heads()) known_.Learn(head);
    for (const std::string& name : known_.heads()) {
      v1::GetHeadRequest get;
      get.set_name(name);
      v1::Head head;
      if (!ask(get, &head).ok()) continue;
      v1::DeleteHeadRequest request;
      request.set_name(name);
      request.set_epoch(head.epoch());
      request.set_force(true);
      v1::DeleteHeadResponse deleted;
      FUZZ_CHECK(ask(request, &deleted).ok());
    }
    for (const std::string& id : known_.sessions()) {
      v1::CloseSessionRequest request;
      request.set_session_id(id);
      v1::CloseSessionResponse closed;
      ask(request, &closed);  // a session that is closed already is absent
    }
  }

 private:
  using Message = google::protobuf::Message;
  using MethodDescriptor = google::protobuf::MethodDescriptor;

  // Sends the messages, ends as `end` says, and reads what comes into `answer`.
  grpc::Status Exchange(
      absl::string_view name, const MethodDescriptor& method, const std::vector<std::string>& messages, End end, Message* answer,
      const std::function<void()>& on_answer = [] {}) {
    testing::RawOptions options;
    // A stream that is left open ends soon. No other call takes so long that is not stuck, on any machine: one that needs it hangs.
    options.deadline = end == END_DEADLINE ? std::chrono::milliseconds(10) : std::chrono::seconds(100);
    options.half_close = end != END_CANCEL && end != END_DEADLINE;  // also for a number that is none
    options.cancel = end == END_CANCEL;
    options.on_answer = [&](const std::string& bytes) {
      FUZZ_CHECK(answer->ParseFromString(bytes));
      on_answer();
      return true;
    };
    const std::string path = absl::StrCat("/", method.service()->full_name(), "/", method.name());
    const grpc::Status status = testing::CallRaw(channel_, path, messages, options).status;
    CheckStatus(name, status, end);
    return status;
  }

  // What a failed call may say.
  void CheckStatus(absl::string_view name, const grpc::Status& status, End end) {
    const testing::WireError error = testing::DecodeError(status);
    const std::string code = absl::StrCat(static_cast<int>(error.code));
    answered_(std::string(name), status.ok() ? "OK" : error.reason.empty() ? code : error.reason);
    if (status.ok()) return;
    const std::string said = absl::StrCat(name, ": ", code, " ", error.reason, " ", error.message);
    // What the client did itself, and what gRPC refuses before the server sees it, has no reason.
    FUZZ_CHECK(error.code != grpc::StatusCode::DEADLINE_EXCEEDED || end == END_DEADLINE || error.reason == "DEADLINE_EXCEEDED",
               said);
    FUZZ_CHECK(error.reason != "INTERNAL" && error.reason != "ENGINE_FAILED", said);
    if (error.reason.empty()) {
      FUZZ_CHECK(error.code == grpc::StatusCode::CANCELLED || error.code == grpc::StatusCode::DEADLINE_EXCEEDED ||
                     error.code == grpc::StatusCode::RESOURCE_EXHAUSTED || name == "raw",
                 said);
      return;
    }
    FUZZ_CHECK(IsPlain(error.message) && error.message.size() <= 4096, said);
    FUZZ_CHECK(!absl::StrContains(error.message, server_.directory()) && !absl::StrContains(error.message, "0x7f"), said);
    for (const auto& [key, value] : error.metadata) {
      FUZZ_CHECK(IsPlain(value) && !absl::StrContains(value, server_.directory()), absl::StrCat(said, "; ", key, ": ", value));
    }
  }

  void RunCall(const Call& call) {
    switch (call.call_case()) {
      case Call::CALL_NOT_SET:
        return;
      case Call::kUpload:
        return RunUpload(call.upload());
      case Call::kAddGradient:
        return RunAddGradient(call.add_gradient());
      case Call::kCompute:
        return RunCompute(call.compute());
      case Call::kTeacher:
        return RunTeacher(call.teacher());
      case Call::kRaw:
        return RunRaw(call.raw());
      default:
        return RunRequest(call);
    }
  }

  // A call of one request, the message that the call holds.
  void RunRequest(const Call& call) {
    const auto* const field = Call::descriptor()->FindFieldByNumber(call.call_case());
    const MethodDescriptor& method = MethodOf(field->message_type());
    Call sent = call;
    Message* const request = sent.GetReflection()->MutableMessage(&sent, field);
    known_.FillIn(request);
    const v1::HeadStep step = sent.has_get_step()    ? sent.get_step().head()
                              : sent.has_seal_step() ? sent.seal_step().head()
                                                     : sent.apply().head();
    const Acknowledged::Committed before = acknowledged_.Before(step);
    const std::unique_ptr<Message> answer = NewAnswer(method);
    if (!Exchange(field->name(), method, {request->SerializeAsString()}, END_HALF_CLOSE, answer.get()).ok()) return;
    if (!sent.create_head().validate_only()) known_.Learn(*answer);
    // Several attempts may have been staged by now, whose tokens may differ: which it was is not known here.
    for (const v1::HeadStep& head : sent.commit().heads()) acknowledged_.Add(head, sent.commit().micro_batch(), std::nullopt);
    if (const auto* const got = dynamic_cast<const v1::GetStepResponse*>(answer.get())) {
      CheckStep(step, got->open(), before);
    } else if (const auto* const sealed = dynamic_cast<const v1::SealStepResponse*>(answer.get())) {
      acknowledged_.CheckTotals(step, before, sealed->totals());
    } else if (const auto* const applied = dynamic_cast<const v1::ApplyOptimizerStepResponse*>(answer.get())) {
      acknowledged_.CheckTotals(step, before, applied->totals());
      FUZZ_CHECK(applied->open_step() == step.step() + 1);
    }
  }

  template <typename Header>
  Header Filled(Header header) const {
    known_.FillIn(&header);
    return header;
  }

  // A stream of its header, if it has one, and its chunks; `shape` tells how many bytes those of "*" get.
  template <typename Request, typename Stream, typename Header, typename... Shape>
  grpc::Status RunStream(absl::string_view name, const Stream& stream, const Header& header, Message* answer,
                         const std::function<void()>& on_answer, const Shape&... shape) {
    std::vector<std::string> messages;
    Request request;
    if (stream.has_header()) {
      *request.mutable_header() = header;
      messages.push_back(request.SerializeAsString());
    }
    for (const auto& chunk : stream.chunks()) {
      *request.mutable_chunk() = chunk;
      FillIn(request.mutable_chunk(), shape...);
      messages.push_back(request.SerializeAsString());
    }
    return Exchange(name, MethodOf(Request::descriptor()), messages, stream.end(), answer, on_answer);
  }

  void RunUpload(const Upload& upload) {
    const v1::UploadWeightsHeader header = Filled(upload.header());
    v1::UploadWeightsResponse response;
    const auto learn = [&] { known_.Learn(response); };
    RunStream<v1::UploadWeightsRequest>("upload", upload, header, &response, learn, header.total_bytes());
  }

  void RunAddGradient(const AddGradient& add) {
    const v1::AddGradientHeader header = Filled(add.header());
    const int64_t bytes = header.row_count() > 0 && header.row_count() < 64 ? header.row_count() * 20 : 0;
    acknowledged_.Try(header.head().head(), header.micro_batch());
    v1::AddGradientResponse response;
    if (!RunStream<v1::AddGradientRequest>(
             "add_gradient", add, header, &response, [] {}, bytes)
             .ok())
      return;
    acknowledged_.Add(header.head(), header.micro_batch(), 0);
  }

  void RunCompute(const Compute& compute) {
    constexpr int kMaxStripes = 4;
    const v1::MicroBatchHeader header = Filled(compute.header());
    for (const v1::LossTerm& term : header.terms()) acknowledged_.Try(term.head().head(), header.micro_batch());
    std::vector<std::thread> stripes;
    for (int i = 0; i < std::min(compute.stripes_size(), kMaxStripes); ++i) {
      stripes.emplace_back([this, &header, &stripe = compute.stripes(i)] {
        v1::TransferRowsResponse response;
        RunStream<v1::TransferRowsRequest>(
            "stripe", stripe, Filled(stripe.header()), &response, [] {}, header);
      });
    }
    bool summarized = false;
    v1::ComputeLossResponse response;
    const auto note = [&] {
      FUZZ_CHECK(!summarized, "something came behind the summary");
      summarized = response.has_summary();
    };
    const grpc::Status status = RunStream<v1::ComputeLossRequest>("compute", compute, header, &response, note, header);
    for (std::thread& stripe : stripes) stripe.join();
    if (!status.ok()) return;
    FUZZ_CHECK(summarized, "an OK without a summary");
    acknowledged_.Add(header, response.summary());
  }

  void RunTeacher(const Teacher& teacher) {
    const v1::StreamTeacherHeader header = Filled(teacher.header());
    v1::StreamTeacherResponse response;
    RunStream<v1::StreamTeacherRequest>(
        "teacher", teacher, header, &response, [] {}, header.data_type(), header.hidden_size());
  }

  void RunRaw(const Raw& raw) {
    const MethodDescriptor& method = *Methods()[raw.method() % Methods().size()];
    const std::unique_ptr<Message> answer = NewAnswer(method);
    // What it has made is to be cleaned up, too.
    if (Exchange("raw", method, {raw.messages().begin(), raw.messages().end()}, raw.end(), answer.get()).ok())
      known_.Learn(*answer);
  }

  testing::WireServer& server_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::function<void(const std::string&, const std::string&)> answered_;
  KnownState known_;
  Acknowledged acknowledged_;
};

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_SEQUENCE_CLIENT_H_
