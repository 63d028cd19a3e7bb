#include "tests/integration/support/wire_server.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::testing {

std::string WireError::at(const std::string& key) const {
  const auto found = metadata.find(key);
  return found == metadata.end() ? "" : found->second;
}

WireError DecodeError(const grpc::Status& status) {
  WireError error;
  error.code = status.error_code();
  error.message = status.error_message();
  v1::RpcStatus details;
  if (!details.ParseFromString(status.error_details())) return error;
  for (const google::protobuf::Any& detail : details.details()) {
    v1::ErrorInfo info;
    v1::RetryInfo retry;
    if (absl::EndsWith(detail.type_url(), "/google.rpc.ErrorInfo") && info.ParseFromString(detail.value())) {
      error.reason = info.reason();
      error.domain = info.domain();
      error.metadata.insert(info.metadata().begin(), info.metadata().end());
    } else if (absl::EndsWith(detail.type_url(), "/google.rpc.RetryInfo") && retry.ParseFromString(detail.value())) {
      error.retry_ms = retry.retry_delay().seconds() * 1000 + retry.retry_delay().nanos() / 1000000;
    }
  }
  return error;
}

absl::StatusCode CodeOf(const std::string& reason) {
#define HEADWATER_CODE_OF(enumerator, name, code) \
  if (reason == #name) return absl::StatusCode::code;
  HEADWATER_ERROR_REASONS(HEADWATER_CODE_OF)
#undef HEADWATER_CODE_OF
  return absl::StatusCode::kUnknown;
}

std::string ReasonOf(const grpc::Status& status) {
  if (status.ok()) return "OK";
  const WireError error = DecodeError(status);
  return error.reason.empty() ? absl::StrCat("code ", static_cast<int>(error.code), ": ", error.message) : error.reason;
}

void Require(const grpc::Status& status, const std::string& what) {
  if (!status.ok()) throw std::runtime_error(absl::StrCat(what, ": ", ReasonOf(status), ": ", status.error_message()));
}

WireError ExpectError(const grpc::Status& status, const std::string& reason, const std::map<std::string, std::string>& metadata) {
  const WireError error = DecodeError(status);
  EXPECT_EQ(error.reason, reason) << "code " << error.code << ": " << error.message;
  EXPECT_EQ(static_cast<int>(error.code), static_cast<int>(CodeOf(reason)));
  EXPECT_EQ(error.domain, "headwater");
  EXPECT_FALSE(error.message.empty());
  for (const auto& [key, value] : metadata) EXPECT_EQ(error.at(key), value) << key << ": " << error.message;
  return error;
}

v1::HeadStep TestHead::At(int64_t step) const {
  v1::HeadStep head_step;
  head_step.set_head(name());
  head_step.set_head_epoch(head.epoch());
  head_step.set_step(step);
  return head_step;
}

WireServer::WireServer(const ServerSetup& setup) : gate_(std::make_shared<Gate>()) {
  service::ServerOptions options = setup.options;
  options.listen_addresses.push_back(absl::StrCat("unix:", directory(), "/socket"));
  EngineOptions engine_options = setup.engine;
  if (engine_options.thread_count == 0) engine_options.thread_count = 2;
  auto engine = std::make_unique<GatedEngine>(Value(CreateCpuEngine(engine_options)), gate_);
  server_ = Value(service::Server::Start(options, std::move(engine)));
  if (setup.ready) {
    if (absl::Status ready = server_->BecomeReady(); !ready.ok()) throw std::runtime_error(std::string(ready.message()));
  }
  const std::shared_ptr<grpc::Channel> channel = NewChannel();
  loss_ = v1::LossService::NewStub(channel);
  heads_ = v1::HeadService::NewStub(channel);
  sessions_ = v1::SessionService::NewStub(channel);
}

WireServer::~WireServer() {
  gate_->Open();
  server_.reset();
}

grpc::Status WireServer::Create(const std::string& name, const v1::HeadSpec& spec, v1::Head* head) {
  v1::CreateHeadRequest request;
  request.set_name(name);
  *request.mutable_spec() = spec;
  v1::CreateHeadResponse response;
  const grpc::Status status = Call(&Heads::CreateHead, request, &response);
  if (head != nullptr) *head = response.head();
  return status;
}

TestHead WireServer::MakeHead(const std::string& id, const v1::HeadSpec& spec, uint32_t seed) {
  TestHead head;
  Require(Create(absl::StrCat("tenants/default/heads/", id), spec, &head.head), "CreateHead");
  head.weight = Random(spec.vocab_size() * spec.hidden_size(), seed, 1.0F);
  Require(Upload(head.head, v1::HEAD_TENSOR_WEIGHT, head.weight, &head.head), "UploadWeights");
  if (spec.has_bias()) {
    const std::vector<float> bias = Random(spec.vocab_size(), seed + 1, 0.5F);
    Require(Upload(head.head, v1::HEAD_TENSOR_BIAS, bias, &head.head), "UploadWeights (bias)");
  }
  return head;
}

grpc::Status WireServer::Upload(const v1::Head& head, v1::HeadTensor tensor, const std::vector<float>& values, v1::Head* updated,
                                std::optional<int64_t> closes_step) {
  constexpr size_t kChunkBytes = 64;
  const std::string bytes = Bytes(values);
  v1::UploadWeightsHeader header = UploadHeader(head, absl::StrCat("upload-", static_cast<int>(tensor), "-", head.weight_version()),
                                                static_cast<int64_t>(bytes.size()));
  header.set_tensor(tensor);
  if (closes_step.has_value()) header.set_closes_step(*closes_step);
  UploadStream upload(*heads_, header);
  if (upload.resume_offset >= 0) {
    for (auto offset = static_cast<size_t>(upload.resume_offset); offset < bytes.size(); offset += kChunkBytes) {
      upload.Send(static_cast<int64_t>(offset), bytes.substr(offset, kChunkBytes));
    }
  }
  const grpc::Status status = upload.End();
  if (status.ok()) *updated = upload.head;
  return status;
}

v1::Head WireServer::Get(const std::string& name) {
  v1::GetHeadRequest request;
  request.set_name(name);
  return Must(&Heads::GetHead, request);
}

grpc::Status WireServer::AddGradient(const v1::AddGradientHeader& header, const std::vector<float>& rows, bool* replayed) {
  constexpr size_t kChunkBytes = 24;
  grpc::ClientContext context;
  v1::AddGradientResponse response;
  const auto writer = heads_->AddGradient(&context, &response);
  v1::AddGradientRequest request;
  *request.mutable_header() = header;
  bool open = writer->Write(request);
  const std::string bytes = Bytes(rows);
  for (size_t offset = 0; open && offset < bytes.size(); offset += kChunkBytes) {
    request.mutable_chunk()->set_offset_bytes(static_cast<int64_t>(offset));
    request.mutable_chunk()->set_data(bytes.substr(offset, kChunkBytes));
    open = writer->Write(request);
  }
  writer->WritesDone();
  const grpc::Status status = writer->Finish();
  if (replayed != nullptr) *replayed = response.replayed();
  return status;
}

grpc::Status WireServer::Take(TestHead* head, const std::string& epoch, const std::vector<std::string>& recovers_epochs) {
  v1::TakeHeadRequest request;
  request.set_name(head->name());
  request.set_epoch(epoch);
  request.mutable_recovers_epochs()->Assign(recovers_epochs.begin(), recovers_epochs.end());
  v1::Head taken;
  const grpc::Status status = Call(&Heads::TakeHead, request, &taken);
  if (status.ok()) head->head = taken;
  return status;
}

v1::MicroBatchState WireServer::Find(const TestHead& head, int64_t micro_batch) {
  const v1::GetStepResponse steps = Steps(head);
  for (const v1::MicroBatchState& state : steps.open().micro_batches()) {
    if (state.micro_batch() == micro_batch) return state;
  }
  return {};
}

std::string WireServer::OpenSession(int64_t lease_ms) {
  v1::OpenSessionRequest request;
  request.set_client_name("test");
  request.mutable_lease()->set_seconds(lease_ms / 1000);
  request.mutable_lease()->set_nanos(static_cast<int32_t>(lease_ms % 1000) * 1000000);
  return Must(&Sessions::OpenSession, request).session_id();
}

std::string WireServer::Metric(const std::string& name) const {
  const std::string text = server_->SerializeMetrics();
  const std::string begin = absl::StrCat("\n", name, " ");
  const size_t found = text.find(begin);
  if (found == std::string::npos) return "";
  return text.substr(found + begin.size(), text.find('\n', found + 1) - found - begin.size());
}

// What a download brings of the weight, then of the bias if there is one.
template <typename Request>
std::string Downloaded(Heads& heads, auto method, const TestHead& head, Request request) {
  std::string bytes;
  for (const v1::HeadTensor tensor : {v1::HEAD_TENSOR_WEIGHT, v1::HEAD_TENSOR_BIAS}) {
    if (tensor == v1::HEAD_TENSOR_BIAS && !head.head.spec().has_bias()) continue;
    grpc::ClientContext context;
    request.set_tensor(tensor);
    std::string part;
    Require(ReadDownload(*(heads.*method)(&context, request), &part), Request::descriptor()->name());
    bytes += part;
  }
  return bytes;
}

std::string WireServer::Gradient(const TestHead& head, int64_t step) {
  return Downloaded(*heads_, &Heads::DownloadGradient, head, RequestOn<v1::DownloadGradientRequest>(head, step));
}

std::string WireServer::Weights(const TestHead& head) {
  v1::DownloadWeightsRequest request;
  request.set_name(head.name());
  request.set_data_type(v1::DATA_TYPE_FLOAT32);
  return Downloaded(*heads_, &Heads::DownloadWeights, head, request);
}

std::string WireServer::Snapshot(const TestHead& head, int64_t step) {
  v1::Head described = Get(head.name());
  described.mutable_memory_plan()->clear_available_bytes();  // of the whole server, not of this head
  std::string snapshot = absl::StrCat(described.SerializeAsString(), "|", Weights(head));
  if (described.spec().trainable()) absl::StrAppend(&snapshot, "|", Steps(head).SerializeAsString(), "|", Gradient(head, step));
  return snapshot;
}

grpc::Status ReadDownload(grpc::ClientReader<v1::DownloadTensorResponse>& reader, std::string* bytes,
                          v1::DownloadTensorHeader* header) {
  bytes->clear();
  v1::DownloadTensorResponse response;
  while (reader.Read(&response)) {
    if (response.has_header() && header != nullptr) *header = response.header();
    if (response.has_chunk()) *bytes += response.chunk().data();
  }
  return reader.Finish();
}

void SetTeacher(v1::LossTerm* term, const std::string& teacher) {
  term->mutable_jensen_shannon();
  term->mutable_teacher_hidden()->set_head(teacher);
  term->mutable_teacher_hidden()->set_data_type(v1::DATA_TYPE_FLOAT32);
}

v1::HeadSpec SmallSpec(int64_t vocab_size, int64_t hidden_size) {
  v1::HeadSpec spec;
  spec.set_vocab_size(vocab_size);
  spec.set_hidden_size(hidden_size);
  spec.set_data_type(v1::DATA_TYPE_FLOAT32);
  spec.set_trainable(true);
  spec.mutable_optimizer()->mutable_adamw();
  return spec;
}

v1::HeadSpec FrozenSpec(int64_t vocab_size, int64_t hidden_size) {
  v1::HeadSpec spec = SmallSpec(vocab_size, hidden_size);
  spec.set_trainable(false);
  spec.clear_optimizer();
  return spec;
}

v1::UploadWeightsHeader UploadHeader(const v1::Head& head, const std::string& id, int64_t total_bytes) {
  v1::UploadWeightsHeader header;
  header.set_name(head.name());
  header.set_epoch(head.epoch());
  header.set_upload_id(id);
  header.set_tensor(v1::HEAD_TENSOR_WEIGHT);
  header.set_data_type(v1::DATA_TYPE_FLOAT32);
  header.set_total_bytes(total_bytes);
  return header;
}

}  // namespace headwater::testing
