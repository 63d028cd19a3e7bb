#include "tests/fuzz/support/sequence_client.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/descriptor_client.h"

namespace headwater::fuzz {
namespace {

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

// Writes the messages, ends as `end` says, and reads what comes.
template <typename Request, typename Response>
grpc::Status Talk(grpc::ClientContext* context, grpc::ClientReaderWriter<Request, Response>* stream,
                  const std::vector<Request>& messages, End end, const std::function<void(const Response&)>& on_response = {}) {
  for (const Request& message : messages) {
    if (!stream->Write(message)) break;
  }
  if (end == END_CANCEL) context->TryCancel();
  if (end == END_HALF_CLOSE) stream->WritesDone();
  Response response;
  while (stream->Read(&response)) {
    if (on_response) on_response(response);
  }
  return stream->Finish();
}

template <typename Request>
void Write(grpc::ClientContext* context, grpc::ClientWriter<Request>* stream, const std::vector<Request>& messages, End end) {
  for (const Request& message : messages) {
    if (!stream->Write(message)) break;
  }
  if (end == END_CANCEL) context->TryCancel();
  if (end == END_HALF_CLOSE) stream->WritesDone();
}

// The API's methods in the order of their services.
std::vector<std::string> MethodNames() {
  std::vector<std::string> names;
  for (const char* service : {"LossService", "HeadService", "SessionService"}) {
    const auto* const descriptor =
        google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(absl::StrCat("headwater.v1.", service));
    for (int i = 0; i < descriptor->method_count(); ++i) {
      names.push_back(absl::StrCat("/", descriptor->full_name(), "/", descriptor->method(i)->name()));
    }
  }
  return names;
}

std::string NewToken(const std::string& path) {
  static const transport::FileDescriptor memory = MakeMemory(/*sealed=*/true);
  const transport::FileDescriptor client = ConnectTo(path);
  std::array<char, 512> answer{};
  if (!SendPacket(client.get(), DescriptorPacket(), {memory.get()})) return "";
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

void SequenceClient::Answered(const char* name, const grpc::Status& status, End end) {
  const testing::WireError error = testing::DecodeError(status);
  answered_(name, status.ok() ? "OK" : error.reason.empty() ? absl::StrCat(static_cast<int>(error.code)) : error.reason);
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

template <typename Stub, typename Request, typename Response>
void SequenceClient::Unary(const char* name, Stub& stub,
                           grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*), Request request,
                           const std::function<void(const Request&, const Response&)>& then) {
  known_.FillIn(&request);
  grpc::ClientContext context;
  SetDeadline(&context, END_HALF_CLOSE);
  Response response;
  const grpc::Status status = (stub.*method)(&context, request, &response);
  Answered(name, status);
  if (status.ok() && then) then(request, response);
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
  using HeadStub = v1::HeadService::Stub;
  using LossStub = v1::LossService::Stub;
  HeadStub& heads = server_.heads();
  LossStub& loss = server_.loss();
  const auto learn = [this](const auto&, const v1::Head& head) { known_.AddHead(head); };
  const auto read = [this](const char* name, auto reader) {
    std::string bytes;
    Answered(name, testing::ReadDownload(*reader, &bytes));
  };
  switch (call.call_case()) {
    case Call::kCreateHead:
      return Unary<HeadStub, v1::CreateHeadRequest, v1::CreateHeadResponse>(
          "create_head", heads, &HeadStub::CreateHead, call.create_head(),
          [this](const v1::CreateHeadRequest& sent, const v1::CreateHeadResponse& response) {
            if (!sent.validate_only()) known_.AddHead(response.head());
          });
    case Call::kGetHead:
      return Unary<HeadStub, v1::GetHeadRequest, v1::Head>("get_head", heads, &HeadStub::GetHead, call.get_head(), learn);
    case Call::kListHeads:
      return Unary<HeadStub, v1::ListHeadsRequest, v1::ListHeadsResponse>("list_heads", heads, &HeadStub::ListHeads,
                                                                          call.list_heads());
    case Call::kDeleteHead:
      return Unary<HeadStub, v1::DeleteHeadRequest, v1::DeleteHeadResponse>("delete_head", heads, &HeadStub::DeleteHead,
                                                                            call.delete_head());
    case Call::kTakeHead:
      return Unary<HeadStub, v1::TakeHeadRequest, v1::Head>("take_head", heads, &HeadStub::TakeHead, call.take_head(), learn);
    case Call::kLoadWeights:
      return Unary<HeadStub, v1::LoadWeightsRequest, v1::Head>("load_weights", heads, &HeadStub::LoadWeights, call.load_weights(),
                                                               learn);
    case Call::kDownloadWeights: {
      v1::DownloadWeightsRequest request = call.download_weights();
      known_.FillIn(&request);
      grpc::ClientContext context;
      SetDeadline(&context, END_HALF_CLOSE);
      return read("download_weights", heads.DownloadWeights(&context, request));
    }
    case Call::kDownloadGradient: {
      v1::DownloadGradientRequest request = call.download_gradient();
      known_.FillIn(&request);
      grpc::ClientContext context;
      SetDeadline(&context, END_HALF_CLOSE);
      return read("download_gradient", heads.DownloadGradient(&context, request));
    }
    case Call::kGetStep: {
      v1::GetStepRequest request = call.get_step();
      known_.FillIn(&request);
      const Acknowledged::Contributions before = acknowledged_.Before(request.head());
      return Unary<HeadStub, v1::GetStepRequest, v1::GetStepResponse>(
          "get_step", heads, &HeadStub::GetStep, request, [&](const v1::GetStepRequest& sent, const v1::GetStepResponse& response) {
            acknowledged_.CheckStep(sent.head(), response.open(), before);
          });
    }
    case Call::kSealStep: {
      v1::SealStepRequest request = call.seal_step();
      known_.FillIn(&request);
      const Acknowledged::Contributions before = acknowledged_.Before(request.head());
      return Unary<HeadStub, v1::SealStepRequest, v1::SealStepResponse>(
          "seal_step", heads, &HeadStub::SealStep, request,
          [&](const v1::SealStepRequest& sent, const v1::SealStepResponse& response) {
            acknowledged_.CheckTotals(sent.head(), before, response.totals());
          });
    }
    case Call::kApply: {
      v1::ApplyOptimizerStepRequest request = call.apply();
      known_.FillIn(&request);
      const Acknowledged::Contributions before = acknowledged_.Before(request.head());
      return Unary<HeadStub, v1::ApplyOptimizerStepRequest, v1::ApplyOptimizerStepResponse>(
          "apply", heads, &HeadStub::ApplyOptimizerStep, request,
          [&](const v1::ApplyOptimizerStepRequest& sent, const v1::ApplyOptimizerStepResponse& response) {
            acknowledged_.CheckTotals(sent.head(), before, response.totals());
            FUZZ_CHECK(response.open_step() == sent.head().step() + 1);
          });
    }
    case Call::kDiscardGradient:
      return Unary<HeadStub, v1::DiscardGradientRequest, v1::DiscardGradientResponse>(
          "discard_gradient", heads, &HeadStub::DiscardGradient, call.discard_gradient());
    case Call::kGradientNorm:
      return Unary<HeadStub, v1::GetGradientNormRequest, v1::GetGradientNormResponse>(
          "gradient_norm", heads, &HeadStub::GetGradientNorm, call.gradient_norm());
    case Call::kSave:
      return Unary<HeadStub, v1::SaveCheckpointRequest, v1::SaveCheckpointResponse>("save", heads, &HeadStub::SaveCheckpoint,
                                                                                    call.save());
    case Call::kListCheckpoints:
      return Unary<HeadStub, v1::ListCheckpointsRequest, v1::ListCheckpointsResponse>(
          "list_checkpoints", heads, &HeadStub::ListCheckpoints, call.list_checkpoints());
    case Call::kDeleteCheckpoint:
      return Unary<HeadStub, v1::DeleteCheckpointRequest, v1::DeleteCheckpointResponse>(
          "delete_checkpoint", heads, &HeadStub::DeleteCheckpoint, call.delete_checkpoint());
    case Call::kRestore:
      return Unary<HeadStub, v1::RestoreCheckpointRequest, v1::Head>("restore", heads, &HeadStub::RestoreCheckpoint, call.restore(),
                                                                     learn);
    case Call::kCommit:
      return Unary<LossStub, v1::CommitMicroBatchRequest, v1::CommitMicroBatchResponse>(
          "commit", loss, &LossStub::CommitMicroBatch, call.commit(),
          [this](const v1::CommitMicroBatchRequest& sent, const v1::CommitMicroBatchResponse&) { acknowledged_.Committed(sent); });
    case Call::kDiscard:
      return Unary<LossStub, v1::DiscardMicroBatchRequest, v1::DiscardMicroBatchResponse>(
          "discard", loss, &LossStub::DiscardMicroBatch, call.discard());
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
      return RunSession(call);
  }
}

void SequenceClient::RunSession(const Call& call) {
  using Stub = v1::SessionService::Stub;
  Stub& sessions = server_.sessions();
  switch (call.call_case()) {
    case Call::kOpenSession:
      return Unary<Stub, v1::OpenSessionRequest, v1::OpenSessionResponse>(
          "open_session", sessions, &Stub::OpenSession, call.open_session(),
          [this](const auto&, const v1::OpenSessionResponse& response) { known_.AddSession(response.session_id()); });
    case Call::kKeepAlive:
      return Unary<Stub, v1::KeepAliveRequest, v1::KeepAliveResponse>("keep_alive", sessions, &Stub::KeepAlive, call.keep_alive());
    case Call::kCloseSession:
      return Unary<Stub, v1::CloseSessionRequest, v1::CloseSessionResponse>("close_session", sessions, &Stub::CloseSession,
                                                                            call.close_session());
    case Call::kRegisterMemory:
      return Unary<Stub, v1::RegisterSharedMemoryRequest, v1::RegisterSharedMemoryResponse>(
          "register_memory", sessions, &Stub::RegisterSharedMemory, call.register_memory(),
          [this](const auto&, const v1::RegisterSharedMemoryResponse& response) { known_.AddRegion(response.region_id()); });
    case Call::kUnregisterMemory:
      return Unary<Stub, v1::UnregisterSharedMemoryRequest, v1::UnregisterSharedMemoryResponse>(
          "unregister_memory", sessions, &Stub::UnregisterSharedMemory, call.unregister_memory());
    case Call::kServerInfo:
      return Unary<Stub, v1::GetServerInfoRequest, v1::ServerInfo>("server_info", sessions, &Stub::GetServerInfo,
                                                                   call.server_info());
    default:
      return;
  }
}

void SequenceClient::RunUpload(const Upload& upload) {
  std::vector<v1::UploadWeightsRequest> messages;
  if (upload.has_header()) {
    v1::UploadWeightsHeader* const header = messages.emplace_back().mutable_header();
    *header = upload.header();
    known_.FillIn(header);
  }
  for (const v1::ByteChunk& chunk : upload.chunks()) {
    *messages.emplace_back().mutable_chunk() = chunk;
    KnownState::FillIn(messages.back().mutable_chunk(), upload.header().total_bytes());
  }
  grpc::ClientContext context;
  SetDeadline(&context, EndOf(upload));
  const auto stream = server_.heads().UploadWeights(&context);
  const grpc::Status status = Talk<v1::UploadWeightsRequest, v1::UploadWeightsResponse>(
      &context, stream.get(), messages, EndOf(upload), [this](const v1::UploadWeightsResponse& response) {
        if (response.has_head()) known_.AddHead(response.head());
      });
  Answered("upload", status, EndOf(upload));
}

void SequenceClient::RunAddGradient(const AddGradient& add) {
  std::vector<v1::AddGradientRequest> messages;
  v1::AddGradientHeader header = add.header();
  known_.FillIn(&header);
  if (add.has_header()) *messages.emplace_back().mutable_header() = header;
  for (const v1::ByteChunk& chunk : add.chunks()) {
    *messages.emplace_back().mutable_chunk() = chunk;
    KnownState::FillIn(messages.back().mutable_chunk(),
                       header.row_count() > 0 && header.row_count() < 64 ? header.row_count() * 20 : 0);
  }
  acknowledged_.Try(header);
  grpc::ClientContext context;
  SetDeadline(&context, EndOf(add));
  v1::AddGradientResponse response;
  const auto stream = server_.heads().AddGradient(&context, &response);
  Write(&context, stream.get(), messages, EndOf(add));
  const grpc::Status status = stream->Finish();
  if (status.ok()) acknowledged_.Added(header);
  Answered("add_gradient", status, EndOf(add));
}

void SequenceClient::RunCompute(const Compute& compute) {
  std::vector<v1::ComputeLossRequest> messages;
  v1::MicroBatchHeader header = compute.header();
  known_.FillIn(&header);
  if (compute.has_header()) *messages.emplace_back().mutable_header() = header;
  for (const v1::RowChunk& chunk : compute.chunks()) {
    *messages.emplace_back().mutable_chunk() = chunk;
    KnownState::FillIn(messages.back().mutable_chunk(), header);
  }
  acknowledged_.Try(header);
  std::vector<std::thread> stripes;
  for (int i = 0; i < std::min(compute.stripes_size(), kMaxStripes); ++i) {
    stripes.emplace_back([this, &compute, &header, i] { RunStripe(compute.stripes(i), header); });
  }
  grpc::ClientContext context;
  SetDeadline(&context, EndOf(compute));
  const auto stream = server_.loss().ComputeLoss(&context);
  bool summarized = false;
  v1::MicroBatchSummary summary;
  const grpc::Status status = Talk<v1::ComputeLossRequest, v1::ComputeLossResponse>(
      &context, stream.get(), messages, EndOf(compute), [&](const v1::ComputeLossResponse& response) {
        FUZZ_CHECK(!summarized, "something came behind the summary");
        if (!response.has_summary()) return;
        summarized = true;
        summary = response.summary();
      });
  for (std::thread& stripe : stripes) stripe.join();
  Answered("compute", status, EndOf(compute));
  if (!status.ok()) return;
  FUZZ_CHECK(summarized, "an OK without a summary");
  acknowledged_.Computed(header, summary);
}

void SequenceClient::RunStripe(const Stripe& stripe, const v1::MicroBatchHeader& header) {
  std::vector<v1::TransferRowsRequest> messages;
  if (stripe.has_header()) {
    *messages.emplace_back().mutable_header() = stripe.header();
    known_.FillIn(messages.back().mutable_header());
  }
  for (const v1::RowChunk& chunk : stripe.chunks()) {
    *messages.emplace_back().mutable_chunk() = chunk;
    KnownState::FillIn(messages.back().mutable_chunk(), header);
  }
  grpc::ClientContext context;
  SetDeadline(&context, EndOf(stripe));
  const auto stream = server_.loss().TransferRows(&context);
  Answered("stripe", Talk<v1::TransferRowsRequest, v1::TransferRowsResponse>(&context, stream.get(), messages, EndOf(stripe)),
           EndOf(stripe));
}

void SequenceClient::RunTeacher(const Teacher& teacher) {
  std::vector<v1::StreamTeacherRequest> messages;
  if (teacher.has_header()) {
    *messages.emplace_back().mutable_header() = teacher.header();
    known_.FillIn(messages.back().mutable_header());
  }
  for (const v1::RowChunk& chunk : teacher.chunks()) {
    *messages.emplace_back().mutable_chunk() = chunk;
    KnownState::FillIn(messages.back().mutable_chunk(), teacher.header().data_type(), teacher.header().hidden_size());
  }
  grpc::ClientContext context;
  SetDeadline(&context, EndOf(teacher));
  v1::StreamTeacherResponse response;
  const auto stream = server_.loss().StreamTeacher(&context, &response);
  Write(&context, stream.get(), messages, EndOf(teacher));
  Answered("teacher", stream->Finish(), EndOf(teacher));
}

void SequenceClient::RunRaw(const Raw& raw) {
  static const std::vector<std::string> methods = MethodNames();
  grpc::GenericStub stub(channel_);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  SetDeadline(&context, EndOf(raw));
  const auto call = stub.PrepareCall(&context, methods[raw.method() % methods.size()], &queue);
  // One operation at a time.
  const auto done = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  call->StartCall(nullptr);
  bool open = done();
  for (const std::string& message : raw.messages()) {
    if (!open) break;
    const grpc::Slice slice(message);
    call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    open = done();
  }
  if (EndOf(raw) == END_CANCEL) context.TryCancel();
  if (open && EndOf(raw) == END_HALF_CLOSE) {
    call->WritesDone(nullptr);
    done();
  }
  grpc::ByteBuffer answer;
  do {
    grpc::ByteBuffer next;
    call->Read(&next, nullptr);
    open = done();
    if (open) answer.Swap(&next);
  } while (open);
  grpc::Status status;
  call->Finish(&status, nullptr);
  done();
  if (status.ok()) Learn(methods[raw.method() % methods.size()], answer);
  Answered("raw", status, EndOf(raw));
}

void SequenceClient::Learn(const std::string& method, const grpc::ByteBuffer& answer) {
  grpc::Slice bytes;
  if (!answer.Valid() || !answer.DumpToSingleSlice(&bytes).ok()) return;
  const int size = static_cast<int>(bytes.size());
  v1::OpenSessionResponse opened;
  v1::CreateHeadResponse created;
  if (absl::EndsWith(method, "/OpenSession") && opened.ParseFromArray(bytes.begin(), size)) known_.AddSession(opened.session_id());
  if (absl::EndsWith(method, "/CreateHead") && created.ParseFromArray(bytes.begin(), size)) known_.AddHead(created.head());
}

void SequenceClient::CleanUp() {
  {
    // Also those of calls that were given up before they were answered.
    v1::ListHeadsRequest list;
    v1::ListHeadsResponse listed;
    grpc::ClientContext context;
    const grpc::Status status = server_.heads().ListHeads(&context, list, &listed);
    FUZZ_CHECK(status.ok(), status.error_message());
    for (const v1::Head& head : listed.heads()) known_.AddHead(head);
  }
  for (const std::string& name : known_.heads()) {
    v1::GetHeadRequest get;
    get.set_name(name);
    v1::Head head;
    grpc::ClientContext get_context;
    if (!server_.heads().GetHead(&get_context, get, &head).ok()) continue;
    v1::DeleteHeadRequest request;
    request.set_name(name);
    request.set_epoch(head.epoch());
    request.set_force(true);
    v1::DeleteHeadResponse response;
    grpc::ClientContext context;
    const grpc::Status status = server_.heads().DeleteHead(&context, request, &response);
    FUZZ_CHECK(status.ok(), status.error_message());
  }
  for (const std::string& id : known_.sessions()) {
    v1::CloseSessionRequest request;
    request.set_session_id(id);
    v1::CloseSessionResponse response;
    grpc::ClientContext context;
    server_.sessions().CloseSession(&context, request, &response);  // one that is closed already is none
  }
}

}  // namespace headwater::fuzz
