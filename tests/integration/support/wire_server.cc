#include "tests/integration/support/wire_server.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

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

bool Await(const std::function<bool()>& holds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

WireServer::WireServer(const ServerSetup& setup) : gate_(std::make_shared<Gate>()) {
  service::ServerOptions options = setup.options;
  options.listen_addresses.push_back(absl::StrCat("unix:", directory(), "/socket"));
  EngineOptions engine_options = setup.engine;
  if (engine_options.thread_count == 0) engine_options.thread_count = 2;
  auto engine = std::make_unique<GatedEngine>(Valued(CreateCpuEngine(engine_options), "CreateCpuEngine"), gate_);
  server_ = Valued(service::Server::Start(options, std::move(engine)), "Server::Start");
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

std::shared_ptr<grpc::Channel> WireServer::NewChannel() const {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetMaxReceiveMessageSize(64 << 20);
  return grpc::CreateCustomChannel(server_->addresses().back(), grpc::InsecureChannelCredentials(), arguments);
}

grpc::Status WireServer::Create(const std::string& name, const v1::HeadSpec& spec, v1::Head* head) {
  v1::CreateHeadRequest request;
  request.set_name(name);
  *request.mutable_spec() = spec;
  v1::CreateHeadResponse response;
  const grpc::Status status = Call(&Heads::CreateHead, request, &response);
  *head = response.head();
  return status;
}

TestHead WireServer::MakeHead(const std::string& id, const v1::HeadSpec& spec, uint32_t seed) {
  TestHead head;
  Require(Create(absl::StrCat("tenants/default/heads/", id), spec, &head.head), "CreateHead");
  head.weight = Random(static_cast<size_t>(spec.vocab_size() * spec.hidden_size()), seed, 1.0F);
  Require(Upload(head.head, v1::HEAD_TENSOR_WEIGHT, head.weight, &head.head), "UploadWeights");
  if (spec.has_bias()) {
    head.bias = Random(static_cast<size_t>(spec.vocab_size()), seed + 1, 0.5F);
    Require(Upload(head.head, v1::HEAD_TENSOR_BIAS, head.bias, &head.head), "UploadWeights (bias)");
  }
  return head;
}

grpc::Status WireServer::Upload(const v1::Head& head, v1::HeadTensor tensor, const std::vector<float>& values, v1::Head* updated,
                                std::optional<int64_t> closes_step) {
  constexpr int64_t kChunkBytes = 64;
  grpc::ClientContext context;
  const auto stream = heads_->UploadWeights(&context);
  v1::UploadWeightsRequest request;
  const std::string bytes = Bytes(values);
  *request.mutable_header() = UploadHeader(head, absl::StrCat("upload-", static_cast<int>(tensor), "-", head.weight_version()),
                                           static_cast<int64_t>(bytes.size()));
  request.mutable_header()->set_tensor(tensor);
  if (closes_step.has_value()) request.mutable_header()->set_closes_step(*closes_step);
  v1::UploadWeightsResponse response;
  if (!stream->Write(request) || !stream->Read(&response)) return stream->Finish();
  for (int64_t offset = response.resume_offset_bytes(); offset < static_cast<int64_t>(bytes.size()); offset += kChunkBytes) {
    request.mutable_chunk()->set_offset_bytes(offset);
    request.mutable_chunk()->set_data(bytes.substr(static_cast<size_t>(offset), static_cast<size_t>(kChunkBytes)));
    if (!stream->Write(request)) break;
  }
  stream->WritesDone();
  if (stream->Read(&response)) *updated = response.head();
  return stream->Finish();
}

v1::Head WireServer::Get(const std::string& name) {
  v1::GetHeadRequest request;
  request.set_name(name);
  v1::Head head;
  Require(Call(&Heads::GetHead, request, &head), "GetHead");
  return head;
}

LossReply WireServer::Compute(const v1::MicroBatchHeader& header, const std::string& rows, const std::string& teacher_rows,
                              const SendOptions& send) {
  LossReply reply;
  grpc::ClientContext context;
  if (!send.request_id.empty()) context.AddMetadata("x-request-id", send.request_id);
  if (send.deadline_ms.has_value()) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(*send.deadline_ms));
  }
  const auto stream = loss_->ComputeLoss(&context);
  v1::ComputeLossRequest request;
  *request.mutable_header() = header;
  bool open = stream->Write(request);
  const auto send_rows = [&](const std::string& bytes, v1::ChunkRole role, int32_t term_index, int64_t row_count) {
    if (row_count == 0 || bytes.empty()) return;
    const size_t row_bytes = bytes.size() / static_cast<size_t>(row_count);
    std::vector<int64_t> starts;
    for (int64_t start = 0; start < row_count; start += send.chunk_rows) starts.push_back(start);
    if (send.reversed) std::reverse(starts.begin(), starts.end());
    for (const int64_t start : starts) {
      const int64_t count = std::min(send.chunk_rows, row_count - start);
      v1::RowChunk* const chunk = request.mutable_chunk();
      chunk->set_role(role);
      chunk->set_term_index(term_index);
      chunk->set_row_start(start);
      chunk->set_row_count(count);
      chunk->set_data(bytes.substr(static_cast<size_t>(start) * row_bytes, static_cast<size_t>(count) * row_bytes));
      open = open && stream->Write(request);
    }
  };
  send_rows(rows, v1::CHUNK_ROLE_HIDDEN, 0, header.row_count());
  std::map<int32_t, std::string> teachers = send.teacher_rows;
  if (!teacher_rows.empty()) teachers[0] = teacher_rows;
  for (const auto& [term_index, bytes] : teachers) {
    const v1::LossTerm& term = header.terms(term_index);
    send_rows(bytes, v1::CHUNK_ROLE_TEACHER_HIDDEN, term_index,
              term.has_row_count() ? term.row_count() : header.row_count() - term.row_start());
  }
  stream->WritesDone();
  v1::ComputeLossResponse response;
  while (stream->Read(&response)) {
    if (response.has_chunk()) {
      reply.chunk_starts.push_back(response.chunk().row_start());
      reply.grad_hidden += response.chunk().data();
    } else {
      reply.summary = response.summary();
    }
  }
  reply.status = stream->Finish();
  for (const auto& [key, value] : context.GetServerInitialMetadata()) {
    reply.initial_metadata.emplace(std::string(key.data(), key.size()), std::string(value.data(), value.size()));
  }
  return reply;
}

LossReply WireServer::MustCompute(const v1::MicroBatchHeader& header, const std::string& rows, const std::string& teacher_rows,
                                  const SendOptions& send) {
  LossReply reply = Compute(header, rows, teacher_rows, send);
  Require(reply.status, "ComputeLoss");
  return reply;
}

v1::HeadStep WireServer::At(const TestHead& head, int64_t step) const {
  v1::HeadStep head_step;
  head_step.set_head(head.name());
  head_step.set_head_epoch(head.head.epoch());
  head_step.set_step(step);
  return head_step;
}

grpc::Status WireServer::Commit(const TestHead& head, int64_t step, int64_t micro_batch, double factor,
                                const std::string& session) {
  v1::CommitMicroBatchRequest request;
  *request.add_heads() = At(head, step);
  request.set_micro_batch(micro_batch);
  request.set_factor(factor);
  request.set_session_id(session);
  return Call(&Loss::CommitMicroBatch, request);
}

grpc::Status WireServer::Discard(const TestHead& head, int64_t step, int64_t micro_batch) {
  v1::DiscardMicroBatchRequest request;
  *request.add_heads() = At(head, step);
  request.set_micro_batch(micro_batch);
  return Call(&Loss::DiscardMicroBatch, request);
}

grpc::Status WireServer::Seal(const TestHead& head, int64_t step, const std::vector<int64_t>& ids) {
  v1::SealStepRequest request;
  *request.mutable_head() = At(head, step);
  request.mutable_expected()->mutable_ids()->mutable_ids()->Assign(ids.begin(), ids.end());
  return Call(&Heads::SealStep, request);
}

grpc::Status WireServer::Apply(const v1::ApplyOptimizerStepRequest& request, v1::ApplyOptimizerStepResponse* response) {
  return Call(&Heads::ApplyOptimizerStep, request, response);
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
  for (const std::string& recovered : recovers_epochs) request.add_recovers_epochs(recovered);
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
  v1::OpenSessionResponse response;
  Require(Call(&Sessions::OpenSession, request, &response), "OpenSession");
  return response.session_id();
}

std::string WireServer::MetricLine(const std::string& name) const {
  const std::string text = server_->SerializeMetrics();
  const size_t begin = text.find("\n" + name + " ");
  return begin == std::string::npos ? "" : text.substr(begin + 1, text.find('\n', begin + 1) - begin - 1);
}

bool WireServer::AwaitMetric(const std::string& name, int64_t value) const {
  return Await([&] { return MetricLine(name) == absl::StrCat(name, " ", value); });
}

bool WireServer::AwaitInFlight() const {
  return Await([&] { return MetricLine("headwater_in_flight_bytes") != "headwater_in_flight_bytes 0"; });
}

v1::GetStepResponse WireServer::Steps(const TestHead& head) {
  v1::GetStepRequest request;
  *request.mutable_head() = At(head, 0);
  v1::GetStepResponse response;
  Require(Call(&Heads::GetStep, request, &response), "GetStep");
  return response;
}

std::string WireServer::Gradient(const TestHead& head, int64_t step, double factor) {
  std::string bytes;
  for (const v1::HeadTensor tensor : {v1::HEAD_TENSOR_WEIGHT, v1::HEAD_TENSOR_BIAS}) {
    if (tensor == v1::HEAD_TENSOR_BIAS && !head.head.spec().has_bias()) continue;
    grpc::ClientContext context;
    v1::DownloadGradientRequest request;
    *request.mutable_head() = At(head, step);
    request.set_tensor(tensor);
    request.set_gradient_factor(factor);
    std::string part;
    Require(ReadDownload(*heads_->DownloadGradient(&context, request), &part), "DownloadGradient");
    bytes += part;
  }
  return bytes;
}

std::string WireServer::Weights(const TestHead& head) {
  std::string bytes;
  for (const v1::HeadTensor tensor : {v1::HEAD_TENSOR_WEIGHT, v1::HEAD_TENSOR_BIAS}) {
    if (tensor == v1::HEAD_TENSOR_BIAS && !head.head.spec().has_bias()) continue;
    grpc::ClientContext context;
    v1::DownloadWeightsRequest request;
    request.set_name(head.name());
    request.set_tensor(tensor);
    request.set_data_type(v1::DATA_TYPE_FLOAT32);
    std::string part;
    Require(ReadDownload(*heads_->DownloadWeights(&context, request), &part), "DownloadWeights");
    bytes += part;
  }
  return bytes;
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

std::vector<float> Random(size_t count, uint32_t seed, float scale) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

std::string Bytes(const std::vector<float>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

std::vector<float> Floats(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

v1::Tensor Int32Tensor(const std::vector<int32_t>& values) {
  v1::Tensor tensor;
  tensor.set_data_type(v1::DATA_TYPE_INT32);
  tensor.add_shape(static_cast<int64_t>(values.size()));
  tensor.set_data(values.data(), values.size() * sizeof(int32_t));
  return tensor;
}

v1::Tensor FloatTensor(const std::vector<float>& values) {
  v1::Tensor tensor;
  tensor.set_data_type(v1::DATA_TYPE_FLOAT32);
  tensor.add_shape(static_cast<int64_t>(values.size()));
  tensor.set_data(Bytes(values));
  return tensor;
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

v1::MicroBatchHeader CrossEntropyHeader(const TestHead& head, int64_t step, int64_t micro_batch,
                                        const std::vector<int32_t>& targets) {
  v1::MicroBatchHeader header;
  header.set_micro_batch(micro_batch);
  header.set_compute_mode(v1::COMPUTE_MODE_FORWARD_BACKWARD);
  header.set_row_count(static_cast<int64_t>(targets.size()));
  header.set_hidden_size(head.head.spec().hidden_size());
  header.set_data_type(v1::DATA_TYPE_FLOAT32);
  v1::LossTerm* const term = header.add_terms();
  term->mutable_head()->set_head(head.name());
  term->mutable_head()->set_head_epoch(head.head.epoch());
  term->mutable_head()->set_step(step);
  *term->mutable_targets() = Int32Tensor(targets);
  term->mutable_cross_entropy();
  return header;
}

}  // namespace headwater::testing
