#include "tests/fuzz/support/sequence_client.h"

#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/descriptor_client.h"

namespace headwater::fuzz {
namespace {

using google::protobuf::Message;
using google::protobuf::MethodDescriptor;

// Far beyond what any call takes that is not stuck, on any machine: a call that needs it hangs.
constexpr std::chrono::seconds kHang(100);
// For streams that are left open.
constexpr std::chrono::milliseconds kShortDeadline(10);
constexpr int kMaxCalls = 64;
constexpr int kMaxStripes = 4;
constexpr size_t kMaxBackground = 8;

// How a message says that its call ends; in the first way if it says what is none.
template <typename Message>
End EndOf(const Message& message) {
  return End_IsValid(message.end()) ? message.end() : END_HALF_CLOSE;
}

void SetDeadline(grpc::ClientContext* context, End end) {
  const auto now = std::chrono::system_clock::now();
  if (end == END_DEADLINE) {
    context->set_deadline(now + kShortDeadline);
  } else {
    context->set_deadline(now + kHang);
  }
}

// The API's methods in the order of their services.
const std::vector<const MethodDescriptor*>& Methods() {
  static const std::vector<const MethodDescriptor*> methods = [] {
    std::vector<const MethodDescriptor*> found;
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
const MethodDescriptor& MethodOf(const google::protobuf::Descriptor* request) {
  return **std::find_if(Methods().begin(), Methods().end(),
                        [request](const MethodDescriptor* method) { return method->input_type() == request; });
}

std::unique_ptr<Message> NewAnswer(const MethodDescriptor& method) {
  return std::unique_ptr<Message>(google::protobuf::MessageFactory::generated_factory()->GetPrototype(method.output_type())->New());
}

// A stream's messages: its header, if it has one, and its chunks; `shape` tells how many bytes those of "*" get.
template <typename Request, typename Stream, typename Header, typename... Shape>
std::vector<std::string> Messages(const Stream& stream, const Header& header, const Shape&... shape) {
  std::vector<std::string> messages;
  Request request;
  if (stream.has_header()) {
    *request.mutable_header() = header;
    messages.push_back(request.SerializeAsString());
  }
  for (const auto& chunk : stream.chunks()) {
    *request.mutable_chunk() = chunk;
    KnownState::FillIn(request.mutable_chunk(), shape...);
    messages.push_back(request.SerializeAsString());
  }
  return messages;
}

std::string NewToken(const std::string& path) {
  static const transport::FileDescriptor memory = MakeMemory(/*sealed=*/true);
  const transport::FileDescriptor client = ConnectTo(path);
  std::array<char, 512> answer{};
  if (!SendPacket(client.get(), testing::DescriptorRequest(kMemoryBytes), {memory.get()})) return "";
  const ssize_t bytes = ReceiveAnswer(client.get(), answer.data(), answer.size());
  return bytes >= 40 ? std::string(answer.data() + 8, 32) : "";
}

bool IsPlain(const std::string& text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
}

}  // namespace

SequenceClient::SequenceClient(testing::WireServer& server, const std::shared_ptr<grpc::Channel>& channel,
                               const std::string& descriptor_socket,
                               std::function<void(const std::string&, const std::string&)> answered)
    : server_(server),
      channel_(channel),
      answered_(std::move(answered)),
      known_([descriptor_socket] { return NewToken(descriptor_socket); }) {}

SequenceClient::~SequenceClient() {
  for (std::thread& thread : background_) thread.join();
}

void SequenceClient::Answered(absl::string_view name, const grpc::Status& status, End end) {
  const testing::WireError error = testing::DecodeError(status);
  answered_(std::string(name), status.ok()            ? "OK"
                               : error.reason.empty() ? absl::StrCat(static_cast<int>(error.code))
                                                      : error.reason);
  if (status.ok()) return;
  const std::string said = absl::StrCat(name, ": ", static_cast<int>(error.code), " ", error.reason, " ", error.message);
  // What the client did itself, and what gRPC refuses before the server sees it, has no reason.
  FUZZ_CHECK(error.code != grpc::StatusCode::DEADLINE_EXCEEDED || end == END_DEADLINE || error.reason == "DEADLINE_EXCEEDED", said);
  FUZZ_CHECK(error.reason != "INTERNAL" && error.reason != "ENGINE_FAILED", said);
  if (error.reason.empty()) {
    FUZZ_CHECK(error.code == grpc::StatusCode::CANCELLED || error.code == grpc::StatusCode::DEADLINE_EXCEEDED ||
                   error.code == grpc::StatusCode::RESOURCE_EXHAUSTED || absl::StrContains(name, "raw"),
               said);
    return;
  }
  FUZZ_CHECK(IsPlain(error.message) && error.message.size() <= 4096, said);
  FUZZ_CHECK(!absl::StrContains(error.message, server_.directory()) && !absl::StrContains(error.message, "0x7f"), said);
  for (const auto& [key, value] : error.metadata) {
    FUZZ_CHECK(IsPlain(value) && !absl::StrContains(value, server_.directory()), absl::StrCat(said, "; ", key, ": ", value));
  }
}

void SequenceClient::Run(const Sequence& sequence) {
  for (int i = 0; i < std::min(sequence.calls_size(), kMaxCalls); ++i) {
    const Call& call = sequence.calls(i);
    if (call.background() && background_.size() < kMaxBackground) {
      background_.emplace_back([this, &call] { RunCall(call); });
    } else {
      RunCall(call);
    }
  }
  for (std::thread& thread : background_) thread.join();
  background_.clear();
}

void SequenceClient::RunCall(const Call& call) {
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

grpc::Status SequenceClient::Exchange(const MethodDescriptor& method, const std::vector<std::string>& messages, End end,
                                      const std::function<void(const std::string&)>& on_answer) {
  grpc::GenericStub stub(channel_);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  SetDeadline(&context, end);
  const auto call = stub.PrepareCall(&context, absl::StrCat("/", method.service()->full_name(), "/", method.name()), &queue);
  // One operation at a time.
  const auto done = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  call->StartCall(nullptr);
  bool open = done();
  for (const std::string& message : messages) {
    if (!open) break;
    const grpc::Slice slice(message);
    call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    open = done();
  }
  if (end == END_CANCEL) context.TryCancel();
  if (open && end == END_HALF_CLOSE) {
    call->WritesDone(nullptr);
    done();
  }
  do {
    grpc::ByteBuffer answer;
    call->Read(&answer, nullptr);
    open = done();
    grpc::Slice bytes;
    if (!open || !answer.DumpToSingleSlice(&bytes).ok()) continue;
    on_answer(std::string(reinterpret_cast<const char*>(bytes.begin()), bytes.size()));
  } while (open);
  grpc::Status status;
  call->Finish(&status, nullptr);
  done();
  return status;
}

void SequenceClient::RunRequest(const Call& call) {
  const auto* const field = Call::descriptor()->FindFieldByNumber(call.call_case());
  const MethodDescriptor& method = MethodOf(field->message_type());
  Call sent = call;
  Message* const request = sent.GetReflection()->MutableMessage(&sent, field);
  known_.FillIn(request);
  const v1::HeadStep step = sent.has_get_step()    ? sent.get_step().head()
                            : sent.has_seal_step() ? sent.seal_step().head()
                                                   : sent.apply().head();
  const Acknowledged::Contributions before = acknowledged_.Before(step);
  const std::unique_ptr<Message> answer = NewAnswer(method);
  const grpc::Status status = Exchange(method, {request->SerializeAsString()}, END_HALF_CLOSE,
                                       [&](const std::string& bytes) { FUZZ_CHECK(answer->ParseFromString(bytes)); });
  Answered(field->name(), status);
  if (!status.ok()) return;
  if (!sent.create_head().validate_only()) Learn(*answer);
  if (sent.has_commit()) acknowledged_.Committed(sent.commit());
  if (const auto* const got = dynamic_cast<const v1::GetStepResponse*>(answer.get())) {
    acknowledged_.CheckStep(step, got->open(), before);
  } else if (const auto* const sealed = dynamic_cast<const v1::SealStepResponse*>(answer.get())) {
    acknowledged_.CheckTotals(step, before, sealed->totals());
  } else if (const auto* const applied = dynamic_cast<const v1::ApplyOptimizerStepResponse*>(answer.get())) {
    acknowledged_.CheckTotals(step, before, applied->totals());
    FUZZ_CHECK(applied->open_step() == step.step() + 1);
  }
}

template <typename Request, typename Response>
grpc::Status SequenceClient::Stream(const char* name, const std::vector<std::string>& messages, End end,
                                    const std::function<void(const Response&)>& on_answer) {
  Response response;
  const grpc::Status status = Exchange(MethodOf(Request::descriptor()), messages, end, [&](const std::string& bytes) {
    FUZZ_CHECK(response.ParseFromString(bytes));
    if (on_answer) on_answer(response);
  });
  Answered(name, status, end);
  return status;
}

void SequenceClient::RunUpload(const Upload& upload) {
  v1::UploadWeightsHeader header = upload.header();
  known_.FillIn(&header);
  Stream<v1::UploadWeightsRequest, v1::UploadWeightsResponse>(
      "upload", Messages<v1::UploadWeightsRequest>(upload, header, header.total_bytes()), EndOf(upload),
      [this](const v1::UploadWeightsResponse& response) { known_.AddHead(response.head()); });
}

void SequenceClient::RunAddGradient(const AddGradient& add) {
  v1::AddGradientHeader header = add.header();
  known_.FillIn(&header);
  const int64_t bytes = header.row_count() > 0 && header.row_count() < 64 ? header.row_count() * 20 : 0;
  acknowledged_.Try(header);
  const grpc::Status status = Stream<v1::AddGradientRequest, v1::AddGradientResponse>(
      "add_gradient", Messages<v1::AddGradientRequest>(add, header, bytes), EndOf(add));
  if (status.ok()) acknowledged_.Added(header);
}

void SequenceClient::RunCompute(const Compute& compute) {
  v1::MicroBatchHeader header = compute.header();
  known_.FillIn(&header);
  acknowledged_.Try(header);
  std::vector<std::thread> stripes;
  for (int i = 0; i < std::min(compute.stripes_size(), kMaxStripes); ++i) {
    stripes.emplace_back([this, &compute, &header, i] { RunStripe(compute.stripes(i), header); });
  }
  bool summarized = false;
  v1::MicroBatchSummary summary;
  const grpc::Status status =
      Stream<v1::ComputeLossRequest, v1::ComputeLossResponse>("compute", Messages<v1::ComputeLossRequest>(compute, header, header),
                                                              EndOf(compute), [&](const v1::ComputeLossResponse& response) {
                                                                FUZZ_CHECK(!summarized, "something came behind the summary");
                                                                if (!response.has_summary()) return;
                                                                summarized = true;
                                                                summary = response.summary();
                                                              });
  for (std::thread& stripe : stripes) stripe.join();
  if (!status.ok()) return;
  FUZZ_CHECK(summarized, "an OK without a summary");
  acknowledged_.Computed(header, summary);
}

void SequenceClient::RunStripe(const Stripe& stripe, const v1::MicroBatchHeader& micro_batch) {
  v1::TransferRowsHeader header = stripe.header();
  known_.FillIn(&header);
  Stream<v1::TransferRowsRequest, v1::TransferRowsResponse>(
      "stripe", Messages<v1::TransferRowsRequest>(stripe, header, micro_batch), EndOf(stripe));
}

void SequenceClient::RunTeacher(const Teacher& teacher) {
  v1::StreamTeacherHeader header = teacher.header();
  known_.FillIn(&header);
  Stream<v1::StreamTeacherRequest, v1::StreamTeacherResponse>(
      "teacher", Messages<v1::StreamTeacherRequest>(teacher, header, header.data_type(), header.hidden_size()), EndOf(teacher));
}

void SequenceClient::RunRaw(const Raw& raw) {
  const MethodDescriptor& method = *Methods()[raw.method() % Methods().size()];
  const std::unique_ptr<Message> answer = NewAnswer(method);
  const grpc::Status status = Exchange(method, {raw.messages().begin(), raw.messages().end()}, EndOf(raw),
                                       [&](const std::string& bytes) { FUZZ_CHECK(answer->ParseFromString(bytes)); });
  // What it has made is to be cleaned up, too.
  if (status.ok()) Learn(*answer);
  Answered("raw", status, EndOf(raw));
}

void SequenceClient::Learn(const Message& answer) {
  if (const auto* const head = dynamic_cast<const v1::Head*>(&answer)) known_.AddHead(*head);
  if (const auto* const created = dynamic_cast<const v1::CreateHeadResponse*>(&answer)) known_.AddHead(created->head());
  if (const auto* const opened = dynamic_cast<const v1::OpenSessionResponse*>(&answer)) known_.AddSession(opened->session_id());
  if (const auto* const registered = dynamic_cast<const v1::RegisterSharedMemoryResponse*>(&answer)) {
    known_.AddRegion(registered->region_id());
  }
}

void SequenceClient::CleanUp() {
  const auto ask = [this]<typename Response, typename Request>(const Request& request, Response* response) {
    return Stream<Request, Response>("clean_up", {request.SerializeAsString()}, END_HALF_CLOSE,
                                     [response](const Response& answer) { *response = answer; });
  };
  // Also those of calls that were given up before they were answered.
  v1::ListHeadsResponse listed;
  FUZZ_CHECK(ask(v1::ListHeadsRequest(), &listed).ok());
  for (const v1::Head& head : listed.heads()) known_.AddHead(head);
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

}  // namespace headwater::fuzz
