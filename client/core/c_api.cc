#include "headwater/client/c_api.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/core/core.h"
#include "client/core/link/error.h"
#include "client/core/rows/tensor_exchanges.h"
#include "headwater/client/future.h"
#include "headwater/kernels/return_if_error.h"

struct hw_client_error {
  int32_t code = 0;
  std::string message;
  std::string details;
};

struct hw_client {
  std::shared_ptr<headwater::client::internal::Core> core;
};

struct hw_client_memory {
  headwater::client::internal::RowMemory memory;
};

namespace headwater::client::internal {
namespace {

hw_client_error* MakeError(const absl::Status& status) {
  auto error = std::make_unique<hw_client_error>();
  error->code = static_cast<int32_t>(status.code());
  error->message = Sentence(status);
  v1::RpcStatus details;
  details.set_code(error->code);
  details.set_message(error->message);
  status.ForEachPayload([&details](absl::string_view url, const absl::Cord& value) {
    google::protobuf::Any* detail = details.add_details();
    detail->set_type_url(std::string(url));
    detail->set_value(std::string(value));
  });
  error->details = details.SerializeAsString();
  return error.release();
}

// Runs `body`, which returns an absl::Status.
template <typename Body>
hw_client_error* Guard(Body body) noexcept {
  const absl::Status status = body();
  return status.ok() ? nullptr : MakeError(status);
}

absl::Status Missing(const char* field) {
  return MakeLocalError(v1::ERROR_REASON_MISSING_FIELD, absl::StatusCode::kInvalidArgument, absl::StrCat(field, " is missing"),
                        {{"field", field}});
}

// The struct's own size is one that this version knows.
template <typename Struct>
absl::Status CheckStruct(const char* field, const Struct* value) {
  if (value == nullptr) return Missing(field);
  const int64_t known = static_cast<int64_t>(sizeof(Struct));
  bool valid = value->struct_bytes >= known;
  const auto* bytes = reinterpret_cast<const unsigned char*>(value);
  for (int64_t i = known; valid && i < value->struct_bytes; ++i) valid = bytes[i] == 0;
  if (valid) return absl::OkStatus();
  return InvalidView(v1::ERROR_REASON_INVALID_FIELD, absl::StrCat(field, ".struct_bytes"),
                     absl::StrCat("at least ", known, " and zeros beyond"), absl::StrCat(value->struct_bytes));
}

// Sets a field; false if the text is no value of it.
bool Parse(const std::string& value, std::string* field) {
  *field = value;
  return true;
}

bool Parse(const std::string& value, bool* field) {
  *field = value == "1";
  return *field || value == "0";
}

template <typename Number>
bool Parse(const std::string& value, Number* field) {
  return absl::SimpleAtoi(value, field);
}

bool Parse(const std::string& value, std::optional<int64_t>* field) { return absl::SimpleAtoi(value, &field->emplace()); }

bool Parse(const std::string& value, std::chrono::milliseconds* field) {
  int32_t number = 0;  // far from the overflow of any clock
  const bool is_number = absl::SimpleAtoi(value, &number);
  *field = std::chrono::milliseconds(number);
  return is_number;
}

bool Parse(const std::string& value, Transport* field) {
  for (const Transport transport : {Transport::kAuto, Transport::kGrpc, Transport::kSharedMemory, Transport::kCudaIpc}) {
    *field = transport;
    if (value == TransportName(transport)) return true;
  }
  return false;
}

using Setter = std::function<bool(const std::string& value, ClientOptions& options)>;

template <typename Field>
Setter Set(Field ClientOptions::*member) {
  return [member](const std::string& value, ClientOptions& options) { return Parse(value, &(options.*member)); };
}

template <typename Field>
Setter Set(Field RetryPolicy::*member) {
  return [member](const std::string& value, ClientOptions& options) { return Parse(value, &(options.retry.*member)); };
}

Setter Set(std::string TlsOptions::*member) {
  return [member](const std::string& value, ClientOptions& options) {
    if (!options.tls.has_value()) options.tls.emplace();
    *options.tls.*member = value;
    return !value.empty();
  };
}

// `tls=0` contradicts any other option of TLS.
bool SetTls(const std::string& value, ClientOptions& options) {
  bool wanted = false;
  if (!Parse(value, &wanted) || (!wanted && options.tls.has_value())) return false;
  if (wanted && !options.tls.has_value()) options.tls.emplace();
  return true;
}

const std::map<std::string, Setter>& Setters() {
  static const auto* const setters = new std::map<std::string, Setter>{
      {"transport", Set(&ClientOptions::transport)},
      {"stripes", Set(&ClientOptions::stripes)},
      {"chunk_bytes", Set(&ClientOptions::chunk_bytes)},
      {"max_message_bytes", Set(&ClientOptions::max_message_bytes)},
      {"connect_timeout_ms", Set(&ClientOptions::connect_timeout)},
      {"timeout_ms", Set(&ClientOptions::timeout)},
      {"session_lease_ms", Set(&ClientOptions::session_lease)},
      {"max_attempts", Set(&RetryPolicy::max_attempts)},
      {"initial_backoff_ms", Set(&RetryPolicy::initial_backoff)},
      {"max_backoff_ms", Set(&RetryPolicy::max_backoff)},
      {"replay_bytes", Set(&ClientOptions::replay_bytes)},
      {"replay_steps", Set(&ClientOptions::replay_steps)},
      {"client_name", Set(&ClientOptions::client_name)},
      {"tls", SetTls},
      {"ca_certificate", Set(&TlsOptions::ca_certificate)},
      {"client_certificate", Set(&TlsOptions::client_certificate)},
      {"client_key", Set(&TlsOptions::client_key)},
      {"server_name", Set(&TlsOptions::server_name)},
      {"token", Set(&ClientOptions::token)},
      {"traceparent", Set(&ClientOptions::traceparent)},
      {"allow_plaintext_token", Set(&ClientOptions::allow_plaintext_token)},
  };
  return *setters;
}

absl::Status InvalidOption(const std::string& field, const std::string& message) {
  return MakeLocalError(v1::ERROR_REASON_INVALID_FIELD, absl::StatusCode::kInvalidArgument, message, {{"field", field}});
}

// Lines `key=value`, as c_api.h lists them; empty lines are skipped. INVALID_ARGUMENT for an unknown key or an invalid value.
// Ranges are checked by Core::Open().
absl::StatusOr<ClientOptions> ParseClientOptions(const std::string& text) {
  ClientOptions options;
  options.client_name = "headwater-c";
  // The caller prints notices itself.
  options.on_notice = [](const std::string&) {};
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipWhitespace())) {
    const std::pair<std::string, std::string> option = absl::StrSplit(absl::StripAsciiWhitespace(line), absl::MaxSplits('=', 1));
    const auto setter = Setters().find(option.first);
    if (setter == Setters().end()) return InvalidOption(option.first, absl::StrCat("there is no option ", option.first));
    if (!setter->second(option.second, options)) {
      return InvalidOption(option.first, absl::StrCat("option ", option.first, " cannot be ", option.second));
    }
  }
  return options;
}

absl::StatusOr<Deadline> DeadlineOf(int64_t timeout_ns) {
  if (timeout_ns <= 0) {
    return InvalidView(v1::ERROR_REASON_INVALID_FIELD, "timeout_ns", "> 0", absl::StrCat(timeout_ns));
  }
  return DeadlineIn(std::chrono::nanoseconds(timeout_ns));
}

absl::StatusOr<RowsView> ToView(const char* field, const hw_client_rows& rows) {
  if (rows.struct_bytes != 0 && rows.struct_bytes != static_cast<int64_t>(sizeof(rows))) {
    return InvalidView(v1::ERROR_REASON_INVALID_FIELD, absl::StrCat(field, ".struct_bytes"), absl::StrCat("0 or ", sizeof(rows)),
                       absl::StrCat(rows.struct_bytes));
  }
  if (rows.data == nullptr && rows.row_count == 0) return RowsView();
  if (rows.data_type < HW_CLIENT_FLOAT32 || rows.data_type > HW_CLIENT_FLOAT16) {
    return InvalidView(v1::ERROR_REASON_INVALID_FIELD, absl::StrCat(field, ".data_type"), "1, 2 or 3",
                       absl::StrCat(rows.data_type));
  }
  if (rows.memory < HW_CLIENT_HOST || rows.memory > HW_CLIENT_CUDA_PRIVATE) {
    return InvalidView(v1::ERROR_REASON_INVALID_FIELD, absl::StrCat(field, ".memory"), "0, 1 or 2", absl::StrCat(rows.memory));
  }
  const RowsView view{rows.data, static_cast<DataType>(rows.data_type), rows.row_count, rows.hidden_size,
                      static_cast<Memory>(rows.memory)};
  HEADWATER_RETURN_IF_ERROR(CheckRows(field, view));
  return view;
}

// Checks the shape of a view; a view without rows may have any.
absl::Status CheckShape(const char* field, const RowsView& view, int64_t row_count, std::optional<int64_t> hidden_size,
                        v1::DataType data_type) {
  const auto mismatch = [field](v1::ErrorReason reason, const char* member, int64_t expected, int64_t actual) {
    return InvalidView(reason, absl::StrCat(field, ".", member), absl::StrCat(expected, ", as the header says"),
                       absl::StrCat(actual));
  };
  if (view.row_count != row_count) return mismatch(v1::ERROR_REASON_SHAPE_MISMATCH, "row_count", row_count, view.row_count);
  if (row_count == 0) return absl::OkStatus();
  if (hidden_size.has_value() && view.hidden_size != *hidden_size) {
    return mismatch(v1::ERROR_REASON_SHAPE_MISMATCH, "hidden_size", *hidden_size, view.hidden_size);
  }
  if (static_cast<int>(view.data_type) != static_cast<int>(data_type)) {
    return mismatch(v1::ERROR_REASON_DATA_TYPE_MISMATCH, "data_type", data_type, static_cast<int>(view.data_type));
  }
  return absl::OkStatus();
}

int64_t RowsOf(const v1::LossTerm& term, const v1::MicroBatchHeader& header) {
  return term.has_row_count() ? term.row_count() : header.row_count() - term.row_start();
}

// Checks that the caller's side of a micro-batch fits its header.
absl::Status CheckLoss(const v1::MicroBatchHeader& header, int64_t teacher_count, CallMemory* memory) {
  HEADWATER_RETURN_IF_ERROR(CheckShape("rows", memory->rows, header.row_count(), header.hidden_size(), header.data_type()));
  memory->rows.hidden_size = header.hidden_size();
  if (teacher_count != 0 && teacher_count != header.terms_size()) {
    return InvalidView(v1::ERROR_REASON_SHAPE_MISMATCH, "teachers", absl::StrCat("0 or ", header.terms_size()),
                       absl::StrCat(teacher_count));
  }
  memory->teachers.resize(static_cast<size_t>(header.terms_size()));
  for (int i = 0; i < header.terms_size(); ++i) {
    const v1::LossTerm& term = header.terms(i);
    const int64_t expected_rows = term.has_teacher_hidden() ? RowsOf(term, header) : 0;
    HEADWATER_RETURN_IF_ERROR(CheckShape("teachers", memory->teachers[static_cast<size_t>(i)], expected_rows, std::nullopt,
                                         term.teacher_hidden().data_type()));
  }
  if (memory->result.data == nullptr && memory->result.row_count == 0) return absl::OkStatus();
  return CheckShape("result_rows", memory->result, WantsGradHidden(header) ? header.row_count() : 0, header.hidden_size(),
                    GradHiddenType(header));
}

absl::Status CheckHost(const char* field, const RowsView& rows) {
  if (rows.memory == Memory::kHost) return absl::OkStatus();
  return InvalidView(v1::ERROR_REASON_INVALID_FIELD, absl::StrCat(field, ".memory"), "host memory", "device memory");
}

// Checks the rows and result memory of methods other than ComputeLoss.
absl::Status CheckMemory(const google::protobuf::Message& message, Shape shape, const CallMemory& memory) {
  const int64_t rows = memory.rows.row_count;
  if (shape == Shape::kDownload) return CheckHost("result_rows", memory.result);
  if (shape == Shape::kTeacher) {
    const auto& header = static_cast<const v1::StreamTeacherHeader&>(message);
    return CheckShape("rows", memory.rows, rows, header.hidden_size(), header.data_type());
  }
  if (shape == Shape::kGradient) {
    const auto& header = static_cast<const v1::AddGradientHeader&>(message);
    HEADWATER_RETURN_IF_ERROR(CheckShape("rows", memory.rows, header.row_count(), std::nullopt, v1::DATA_TYPE_FLOAT32));
  } else if (shape == Shape::kUpload) {
    const auto& header = static_cast<const v1::UploadWeightsHeader&>(message);
    HEADWATER_RETURN_IF_ERROR(CheckShape("rows", memory.rows, rows, std::nullopt, header.data_type()));
  } else {
    return absl::OkStatus();
  }
  return CheckHost("rows", memory.rows);
}

absl::StatusOr<Request> MakeRequest(Core& core, const hw_client_request& request) {
  HEADWATER_RETURN_IF_ERROR(CheckStruct("request", &request));
  if (request.method == nullptr) return Missing("method");
  if (request.message == nullptr && request.message_bytes != 0) return Missing("message");
  constexpr int32_t kKnownFlags = HW_CLIENT_DO_NOT_WAIT | HW_CLIENT_OWNED | HW_CLIENT_BACKGROUND;
  if ((request.flags & ~kKnownFlags) != 0 || request.reserved != 0) {
    return InvalidView(v1::ERROR_REASON_INVALID_FIELD, "flags", "those of this version", absl::StrCat(request.flags));
  }
  HEADWATER_ASSIGN_OR_RETURN(const Deadline deadline, DeadlineOf(request.timeout_ns));
  const Method* const method = FindMethod(request.method);
  if (method == nullptr) return absl::UnimplementedError(absl::StrCat("there is no method ", request.method));
  std::unique_ptr<google::protobuf::Message> message(method->request->New());
  absl::Status parsed = WithMemoryFor(request.message_bytes, "a message", [&]() -> absl::Status {
    if (request.message_bytes >= 0 && request.message_bytes <= INT32_MAX &&
        message->ParseFromArray(request.message, static_cast<int>(request.message_bytes))) {
      return absl::OkStatus();
    }
    return InvalidView(v1::ERROR_REASON_INVALID_FIELD, "message", absl::StrCat("a serialized ", message->GetDescriptor()->name()),
                       absl::StrCat(request.message_bytes, " bytes that are none"));
  });
  if (!parsed.ok()) return parsed;
  CallMemory memory;
  memory.cuda_stream = request.cuda_stream;
  HEADWATER_ASSIGN_OR_RETURN(memory.rows, ToView("rows", request.rows));
  HEADWATER_ASSIGN_OR_RETURN(memory.result, ToView("result_rows", request.result_rows));
  if (request.teacher_count < 0 || (request.teacher_count > 0 && request.teachers == nullptr)) return Missing("teachers");
  for (int64_t i = 0; i < request.teacher_count; ++i) {
    HEADWATER_ASSIGN_OR_RETURN(RowsView teacher, ToView("teachers", request.teachers[i]));
    memory.teachers.push_back(teacher);
  }
  absl::Status fits = method->shape == Shape::kLoss
                          ? CheckLoss(static_cast<const v1::MicroBatchHeader&>(*message), request.teacher_count, &memory)
                          : CheckMemory(*message, method->shape, memory);
  if (!fits.ok()) return fits;
  Request made = core.MakeRequest(std::move(message), std::move(memory), deadline);
  made.patient = (request.flags & HW_CLIENT_DO_NOT_WAIT) == 0;
  made.is_owned = (request.flags & HW_CLIENT_OWNED) != 0;
  made.is_background = (request.flags & HW_CLIENT_BACKGROUND) != 0;
  return made;
}

}  // namespace
}  // namespace headwater::client::internal

using namespace headwater::client;
using namespace headwater::client::internal;
namespace v1 = headwater::v1;

struct hw_client_call {
  // By a thread of the library, once. A caller that has seen the result may free this.
  void End(absl::StatusOr<Answer> outcome) {
    if (outcome.ok()) {
      if (outcome->bytes.empty()) outcome->bytes = outcome->message->SerializeAsString();
      outcome->message.reset();
    }
    {
      std::lock_guard<std::mutex> lock(mutex);
      result.emplace(std::move(outcome));
      if (tag != 0) client->completions().Push(tag);
    }
    changed.notify_all();  // without the lock, which a thread that waits takes at once
  }

  std::shared_ptr<hw_client_call> self;  // the caller's; the library's own goes with the end
  std::shared_ptr<Core> client;
  uint64_t tag = 0;
  std::shared_ptr<Call> call;  // goes before the client

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::optional<absl::StatusOr<Answer>> result;
};

int32_t hw_client_abi_version(void) { return HW_CLIENT_ABI_VERSION; }

int32_t hw_client_error_code(const hw_client_error* error) { return error == nullptr ? 0 : error->code; }
const char* hw_client_error_message(const hw_client_error* error) { return error == nullptr ? "" : error->message.c_str(); }
const void* hw_client_error_details(const hw_client_error* error, int64_t* size) {
  if (size != nullptr) *size = error == nullptr ? 0 : static_cast<int64_t>(error->details.size());
  return error == nullptr ? nullptr : error->details.data();
}
void hw_client_error_free(hw_client_error* error) { delete error; }

hw_client_error* hw_client_connect(const char* target, const char* options, hw_client** out) {
  return Guard([&]() -> absl::Status {
    if (target == nullptr) return Missing("target");
    if (out == nullptr) return Missing("out");
    *out = nullptr;
    HEADWATER_ASSIGN_OR_RETURN(ClientOptions parsed, ParseClientOptions(options == nullptr ? "" : options));
    HEADWATER_ASSIGN_OR_RETURN(std::shared_ptr<Core> core, Core::Open(target, parsed));
    *out = new hw_client{std::move(core)};
    return absl::OkStatus();
  });
}

void hw_client_free(hw_client* client) { delete client; }

hw_client_error* hw_client_close(hw_client* client, int64_t timeout_ns) {
  return Guard([&]() -> absl::Status {
    if (client == nullptr) return Missing("client");
    client->core->Close(DeadlineIn(std::chrono::nanoseconds(std::max<int64_t>(timeout_ns, 0))));
    return absl::OkStatus();
  });
}

int64_t hw_client_info(hw_client* client, char* text, int64_t size) {
  if (client == nullptr) return -1;
  const TransportStats stats = client->core->row_transport().stats();
  std::string info = absl::StrCat("host_transport=", stats.host_transport, "\ncuda_transport=", stats.cuda_transport,
                                  "\nwhy_not_better=", stats.why_not_better, "\nstripes=", stats.stripes, "\n");
  for (const auto& [name, counts] :
       {std::pair("grpc", stats.grpc), std::pair("shared_memory", stats.shared_memory), std::pair("cuda_ipc", stats.cuda_ipc)}) {
    absl::StrAppend(&info, "micro_batches.", name, "=", counts.micro_batches, "\nbytes.", name, "=", counts.bytes, "\n");
  }
  if (text != nullptr && size > 0) {
    const size_t copied = std::min(info.size(), static_cast<size_t>(size) - 1);
    std::memcpy(text, info.data(), copied);
    text[copied] = '\0';
  }
  return static_cast<int64_t>(info.size());
}

int64_t hw_client_notice(hw_client* client, char* text, int64_t size) {
  if (client == nullptr) return -1;
  const size_t length = client->core->next_notice_bytes();
  if (length == 0 || text == nullptr || size <= 0) return static_cast<int64_t>(length);
  const std::string notice = client->core->TakeNotice(static_cast<size_t>(size) - 1);
  if (notice.empty()) return static_cast<int64_t>(length);
  std::memcpy(text, notice.c_str(), notice.size() + 1);
  return static_cast<int64_t>(notice.size());
}

void hw_client_stop_waiting(hw_client* client) {
  if (client != nullptr) client->core->StopWaiting();
}

hw_client_error* hw_client_allocate(hw_client* client, int64_t size_bytes, hw_client_memory** out) {
  return Guard([&]() -> absl::Status {
    if (client == nullptr) return Missing("client");
    if (out == nullptr) return Missing("out");
    *out = nullptr;
    if (size_bytes <= 0) return InvalidView(v1::ERROR_REASON_INVALID_FIELD, "size_bytes", "> 0", absl::StrCat(size_bytes));
    HEADWATER_ASSIGN_OR_RETURN(RowMemory memory, client->core->AllocateRows(size_bytes));
    *out = new hw_client_memory{std::move(memory)};
    return absl::OkStatus();
  });
}

void* hw_client_memory_data(const hw_client_memory* memory) { return memory == nullptr ? nullptr : memory->memory.data; }
int32_t hw_client_memory_shared(const hw_client_memory* memory) { return memory != nullptr && memory->memory.shared ? 1 : 0; }
void hw_client_memory_free(hw_client_memory* memory) { delete memory; }

hw_client_error* hw_client_start(hw_client* client, const hw_client_request* request, hw_client_call** out) {
  return Guard([&]() -> absl::Status {
    if (client == nullptr) return Missing("client");
    if (out == nullptr) return Missing("out");
    *out = nullptr;
    if (request == nullptr) return Missing("request");
    HEADWATER_ASSIGN_OR_RETURN(Request made, MakeRequest(*client->core, *request));
    const auto call = std::make_shared<hw_client_call>();
    call->self = call;
    *out = call.get();  // it may end, and be taken from the queue, before this returns
    call->client = client->core;
    call->tag = request->tag;
    call->call = client->core->NewCall(std::move(made), [call](absl::StatusOr<Answer> answer) { call->End(std::move(answer)); });
    call->call->Start();
    return absl::OkStatus();
  });
}

hw_client_error* hw_client_call_wait(hw_client_call* call, int64_t timeout_ns, int32_t* ended) {
  return Guard([&]() -> absl::Status {
    if (call == nullptr) return Missing("call");
    std::unique_lock<std::mutex> lock(call->mutex);
    const auto has_ended = [call] { return call->result.has_value(); };
    if (timeout_ns < 0) {
      call->changed.wait(lock, has_ended);
    } else {
      call->changed.wait_for(lock, std::min<std::chrono::nanoseconds>(std::chrono::nanoseconds(timeout_ns), kLongestTimeout),
                             has_ended);
    }
    if (ended != nullptr) *ended = has_ended() ? 1 : 0;
    return absl::OkStatus();
  });
}

hw_client_error* hw_client_call_result(const hw_client_call* call, const void** result, int64_t* size) {
  return Guard([&]() -> absl::Status {
    if (call == nullptr) return Missing("call");
    if (result == nullptr) return Missing("result");
    if (size == nullptr) return Missing("size");
    *result = nullptr;
    *size = 0;
    std::lock_guard<std::mutex> lock(call->mutex);
    if (!call->result.has_value()) return absl::FailedPreconditionError("the call is still under way");
    if (!call->result->ok()) return call->result->status();
    *result = (*call->result)->bytes.data();
    *size = static_cast<int64_t>((*call->result)->bytes.size());
    return absl::OkStatus();
  });
}

void* hw_client_call_data(const hw_client_call* call, int64_t* size) {
  if (size != nullptr) *size = 0;
  if (call == nullptr) return nullptr;
  std::lock_guard<std::mutex> lock(call->mutex);
  if (!call->result.has_value() || !call->result->ok()) return nullptr;
  const Bytes& data = (*call->result)->data;
  if (size != nullptr) *size = data.size();
  return data.data();
}

int64_t hw_client_call_attempt(const hw_client_call* call) {
  if (call == nullptr) return 0;
  std::lock_guard<std::mutex> lock(call->mutex);
  return call->result.has_value() && call->result->ok() ? (*call->result)->attempt : 0;
}

void hw_client_call_progress(const hw_client_call* call, int64_t* sent_bytes, int64_t* total_bytes) {
  if (sent_bytes != nullptr) *sent_bytes = call == nullptr ? 0 : call->call->exchange().sent_bytes();
  if (total_bytes != nullptr) *total_bytes = call == nullptr ? 0 : call->call->exchange().total_bytes();
}

void hw_client_call_cancel(hw_client_call* call) {
  if (call != nullptr) call->call->Cancel();
}

void hw_client_call_free(hw_client_call* call) {
  if (call == nullptr) return;
  {
    std::unique_lock<std::mutex> lock(call->mutex);
    if (!call->result.has_value()) {
      lock.unlock();
      call->call->Cancel();
      lock.lock();
    }
    call->changed.wait(lock, [call] { return call->result.has_value(); });
  }
  // The last reference to a core must not be dropped by its own threads.
  call->call.reset();
  call->client.reset();
  call->self.reset();
}

int32_t hw_client_completion_fd(hw_client* client) { return client == nullptr ? -1 : client->core->completions().fd(); }

int64_t hw_client_completions(hw_client* client, uint64_t* tags, int64_t most) {
  return client == nullptr || tags == nullptr ? 0 : client->core->completions().Take(tags, most);
}

int64_t hw_client_head_epoch(hw_client* client, const char* head, const void* epoch, int64_t epoch_bytes, void* out,
                             int64_t out_bytes) {
  if (client == nullptr || head == nullptr || epoch == nullptr || epoch_bytes < 0 || out == nullptr) return -1;
  const std::string current =
      client->core->CurrentEpoch(head, std::string(static_cast<const char*>(epoch), static_cast<size_t>(epoch_bytes)));
  if (static_cast<int64_t>(current.size()) > out_bytes) return -1;
  std::memcpy(out, current.data(), current.size());
  return static_cast<int64_t>(current.size());
}

void hw_client_abandon(hw_client* client, const void* message, int64_t message_bytes) {
  v1::DiscardMicroBatchRequest request;
  if (client == nullptr || message == nullptr || message_bytes < 0 || message_bytes > INT32_MAX) return;
  if (request.ParseFromArray(message, static_cast<int>(message_bytes))) client->core->abandoned().Add(std::move(request));
}
