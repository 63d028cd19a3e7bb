#include "headwater/client/c_api.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cpp/src/c_api_options.h"
#include "client/cpp/src/connection.h"
#include "client/cpp/src/error.h"
#include "client/cpp/src/row_memory.h"
#include "client/cpp/src/tensor_stream.h"
#include "client/cpp/src/transfer/micro_batch_transfer.h"
#include "client/cpp/src/transfer/teacher_transfer.h"

struct hw_client_error {
  int32_t code = 0;
  std::string message;
  std::string details;
};

struct hw_client {
  std::shared_ptr<headwater::client::internal::Connection> connection;
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

// For when not even an error can be made; nobody frees it.
hw_client_error* NoMemoryError() {
  static hw_client_error error{static_cast<int32_t>(absl::StatusCode::kResourceExhausted), {}, {}};
  return &error;
}

// Runs `body`, which returns an absl::Status; no exception leaves it.
template <typename Body>
hw_client_error* Guard(Body body) noexcept {
  try {
    const absl::Status status = [&body]() -> absl::Status {
      try {
        return body();
      } catch (const std::bad_alloc&) {
        return MakeLocalError(v1::ERROR_REASON_MEMORY_BUDGET_EXCEEDED, absl::StatusCode::kResourceExhausted,
                              "no memory on this side");
      } catch (const std::exception& error) {
        return MakeLocalError(v1::ERROR_REASON_INTERNAL, absl::StatusCode::kInternal, error.what());
      }
    }();
    return status.ok() ? nullptr : MakeError(status);
  } catch (...) {
    return NoMemoryError();
  }
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
  RowsView view;
  if (rows.data == nullptr && rows.row_count == 0) return view;
  if (rows.data_type < HW_CLIENT_FLOAT32 || rows.data_type > HW_CLIENT_FLOAT16) {
    return InvalidView(v1::ERROR_REASON_INVALID_FIELD, absl::StrCat(field, ".data_type"), "1, 2 or 3",
                       absl::StrCat(rows.data_type));
  }
  if (rows.memory != HW_CLIENT_HOST && rows.memory != HW_CLIENT_CUDA) {
    return InvalidView(v1::ERROR_REASON_INVALID_FIELD, absl::StrCat(field, ".memory"), "0 or 1", absl::StrCat(rows.memory));
  }
  view.data = rows.data;
  view.row_count = rows.row_count;
  view.hidden_size = rows.hidden_size;
  view.data_type = static_cast<DataType>(rows.data_type);
  view.memory = static_cast<Memory>(rows.memory);
  if (absl::Status status = CheckRows(field, view); !status.ok()) return status;
  return view;
}

// Rows of what shape a view must be; what has no rows may have any.
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

absl::StatusOr<CallTensors> MakeTensors(const hw_client_micro_batch& call, const v1::MicroBatchHeader& header) {
  CallTensors tensors;
  tensors.cuda_stream = call.cuda_stream;
  absl::StatusOr<RowsView> hidden = ToView("hidden", call.hidden);
  if (!hidden.ok()) return hidden.status();
  absl::Status status = CheckShape("hidden", *hidden, header.row_count(), header.hidden_size(), header.data_type());
  if (!status.ok()) return status;
  tensors.hidden = *hidden;
  tensors.hidden.hidden_size = header.hidden_size();
  if (call.teacher_count != 0 && (call.teachers == nullptr || call.teacher_count != header.terms_size())) {
    return InvalidView(v1::ERROR_REASON_SHAPE_MISMATCH, "teachers", absl::StrCat("0 or ", header.terms_size()),
                       absl::StrCat(call.teacher_count));
  }
  for (int i = 0; i < header.terms_size(); ++i) {
    const v1::LossTerm& term = header.terms(i);
    RowsView rows;
    if (call.teacher_count != 0) {
      absl::StatusOr<RowsView> view = ToView("teachers", call.teachers[i]);
      if (!view.ok()) return view.status();
      rows = *view;
    }
    const int64_t expected_rows = term.has_teacher_hidden() ? RowsOf(term, header) : 0;
    status = CheckShape("teachers", rows, expected_rows, std::nullopt, term.teacher_hidden().data_type());
    if (!status.ok()) return status;
    tensors.teacher_hidden.push_back(rows);
  }
  const bool want_grad =
      header.has_return_grad_hidden() ? header.return_grad_hidden() : header.compute_mode() == v1::COMPUTE_MODE_FORWARD_BACKWARD;
  absl::StatusOr<RowsView> grad = ToView("grad_hidden", call.grad_hidden);
  if (!grad.ok()) return grad.status();
  const v1::DataType grad_type =
      header.grad_hidden_data_type() == v1::DATA_TYPE_UNSPECIFIED ? header.data_type() : header.grad_hidden_data_type();
  status = CheckShape("grad_hidden", *grad, want_grad ? header.row_count() : 0, header.hidden_size(), grad_type);
  if (!status.ok()) return status;
  if (want_grad) {
    tensors.grad_hidden = call.grad_hidden.data;
    tensors.grad_row_bytes = grad->row_bytes();
    tensors.grad_memory = grad->memory;
  }
  return tensors;
}

// Lets go of connections on behalf of the library's own threads, which a connection's end would wait for.
class Reaper {
 public:
  static Reaper& Get() {
    static Reaper* const reaper = new Reaper;  // for the life of the process
    return *reaper;
  }

  void Drop(std::shared_ptr<Connection> connection) {
    std::lock_guard<std::mutex> lock(mutex_);
    dropped_.push_back(std::move(connection));
    changed_.notify_one();
  }

 private:
  Reaper() {
    std::thread([this] { Loop(); }).detach();
  }

  void Loop() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !dropped_.empty(); });
      const std::shared_ptr<Connection> connection = std::move(dropped_.front());
      dropped_.pop_front();
      lock.unlock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Connection>> dropped_;
};

}  // namespace
}  // namespace headwater::client::internal

using namespace headwater::client;
using namespace headwater::client::internal;
namespace v1 = headwater::v1;

struct hw_client_call {
  hw_client_call(std::shared_ptr<Connection> connection_of_call, hw_client_done done_of_call, void* context_of_call)
      : connection(std::move(connection_of_call)), done(done_of_call), context(context_of_call) {}

  // By a thread of the library, once.
  void End(absl::StatusOr<std::string> outcome) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      result.emplace(std::move(outcome));
      changed.notify_all();
    }
    if (done != nullptr) {
      hw_client_call* const outer = std::exchange(in_done, this);
      done(context);
      in_done = outer;
    }
    {
      std::lock_guard<std::mutex> lock(mutex);
      done_returned = true;
      changed.notify_all();
      if (!free_after_done) return;
    }
    Reaper::Get().Drop(std::move(connection));
    delete this;
  }

  static thread_local hw_client_call* in_done;  // the call whose `done` this thread runs

  std::shared_ptr<Connection> connection;
  const hw_client_done done;
  void* const context;
  std::unique_ptr<RowsCall> transfer;  // goes before the connection

  std::mutex mutex;
  std::condition_variable changed;
  std::optional<absl::StatusOr<std::string>> result;
  bool done_returned = false;
  bool free_after_done = false;
};

thread_local hw_client_call* hw_client_call::in_done = nullptr;

namespace {

// Runs `start`, of the call that `out` names already, because it may end, and be freed, before `start` returns. With an error there
// is no call: it has not begun, and goes.
template <typename StartCall>
void Start(std::unique_ptr<hw_client_call> call, hw_client_call** out, StartCall start) {
  *out = call.get();
  try {
    start(call.get());
  } catch (...) {
    *out = nullptr;
    throw;
  }
  static_cast<void>(call.release());
}

}  // namespace

int32_t hw_client_abi_version(void) { return HW_CLIENT_ABI_VERSION; }

int32_t hw_client_error_code(const hw_client_error* error) { return error == nullptr ? 0 : error->code; }
const char* hw_client_error_message(const hw_client_error* error) { return error == nullptr ? "" : error->message.c_str(); }
const void* hw_client_error_details(const hw_client_error* error, int64_t* size) {
  if (size != nullptr) *size = error == nullptr ? 0 : static_cast<int64_t>(error->details.size());
  return error == nullptr ? nullptr : error->details.data();
}
void hw_client_error_free(hw_client_error* error) {
  if (error != NoMemoryError()) delete error;
}

hw_client_error* hw_client_connect(const char* target, const char* options, hw_client** out) {
  return Guard([&]() -> absl::Status {
    if (target == nullptr) return Missing("target");
    if (out == nullptr) return Missing("out");
    *out = nullptr;
    absl::StatusOr<ClientOptions> parsed = ParseClientOptions(options == nullptr ? "" : options);
    if (!parsed.ok()) return parsed.status();
    absl::StatusOr<std::shared_ptr<Connection>> connection = Connection::Open(target, *parsed);
    if (!connection.ok()) return connection.status();
    *out = new hw_client{*std::move(connection)};
    return absl::OkStatus();
  });
}

void hw_client_free(hw_client* client) { delete client; }

hw_client_error* hw_client_forget_session(hw_client* client, const void* id, int64_t size) {
  return Guard([&]() -> absl::Status {
    if (client == nullptr) return Missing("client");
    if (id == nullptr || size < 0) return Missing("id");
    client->connection->row_transport().memory().Forget(std::string(static_cast<const char*>(id), static_cast<size_t>(size)));
    return absl::OkStatus();
  });
}

int64_t hw_client_info(hw_client* client, char* text, int64_t size) {
  if (client == nullptr) return -1;
  std::string info;
  hw_client_error* const error = Guard([&] {
    const TransportStats stats = client->connection->row_transport().stats();
    absl::StrAppend(&info, "host_transport=", stats.host_transport, "\ncuda_transport=", stats.cuda_transport,
                    "\nwhy_not_better=", stats.why_not_better, "\nstripes=", stats.stripes, "\n");
    for (const auto& [name, counts] :
         {std::pair("grpc", stats.grpc), std::pair("shared_memory", stats.shared_memory), std::pair("cuda_ipc", stats.cuda_ipc)}) {
      absl::StrAppend(&info, "micro_batches.", name, "=", counts.micro_batches, "\nbytes.", name, "=", counts.bytes, "\n");
    }
    return absl::OkStatus();
  });
  if (error != nullptr) {
    hw_client_error_free(error);
    return -1;
  }
  if (text != nullptr && size > 0) {
    const size_t copied = std::min(info.size(), static_cast<size_t>(size) - 1);
    std::memcpy(text, info.data(), copied);
    text[copied] = '\0';
  }
  return static_cast<int64_t>(info.size());
}

hw_client_error* hw_client_allocate(hw_client* client, int64_t size_bytes, hw_client_memory** out) {
  return Guard([&]() -> absl::Status {
    if (client == nullptr) return Missing("client");
    if (out == nullptr) return Missing("out");
    *out = nullptr;
    if (size_bytes <= 0) return InvalidView(v1::ERROR_REASON_INVALID_FIELD, "size_bytes", "> 0", absl::StrCat(size_bytes));
    absl::StatusOr<RowMemory> memory = AllocateRowMemory(client->connection, size_bytes);
    if (!memory.ok()) return memory.status();
    *out = new hw_client_memory{*std::move(memory)};
    return absl::OkStatus();
  });
}

void* hw_client_memory_data(const hw_client_memory* memory) { return memory == nullptr ? nullptr : memory->memory.data; }
int32_t hw_client_memory_shared(const hw_client_memory* memory) { return memory != nullptr && memory->memory.shared ? 1 : 0; }
void hw_client_memory_free(hw_client_memory* memory) { delete memory; }

hw_client_error* hw_client_submit(hw_client* client, const hw_client_micro_batch* micro_batch, hw_client_call** out) {
  return Guard([&]() -> absl::Status {
    if (client == nullptr) return Missing("client");
    if (out == nullptr) return Missing("out");
    *out = nullptr;
    if (absl::Status status = CheckStruct("micro_batch", micro_batch); !status.ok()) return status;
    if (micro_batch->header == nullptr) return Missing("header");
    const absl::StatusOr<Deadline> deadline = DeadlineOf(micro_batch->timeout_ns);
    if (!deadline.ok()) return deadline.status();
    v1::MicroBatchHeader header;
    if (micro_batch->header_bytes < 0 || micro_batch->header_bytes > INT32_MAX ||
        !header.ParseFromArray(micro_batch->header, static_cast<int>(micro_batch->header_bytes))) {
      return InvalidView(v1::ERROR_REASON_INVALID_FIELD, "header", "a serialized MicroBatchHeader",
                         absl::StrCat(micro_batch->header_bytes, " bytes that are none"));
    }
    header.clear_hidden_rows();
    header.clear_grad_hidden_rows();
    absl::StatusOr<CallTensors> tensors = MakeTensors(*micro_batch, header);
    if (!tensors.ok()) return tensors.status();
    auto call = std::make_unique<hw_client_call>(client->connection, micro_batch->done, micro_batch->context);
    auto transfer = std::make_unique<MicroBatchTransfer>(client->connection->row_transport(), *std::move(tensors));
    MicroBatchTransfer* const started = transfer.get();
    call->transfer = std::move(transfer);
    Start(std::move(call), out, [&](hw_client_call* raw) {
      started->StartAttempt(std::move(header), *deadline, [raw](absl::StatusOr<MicroBatchAnswer> answer) {
        if (answer.ok()) {
          raw->End(std::move(answer->summary));
        } else {
          raw->End(answer.status());
        }
      });
    });
    return absl::OkStatus();
  });
}

hw_client_error* hw_client_stream_teacher(hw_client* client, const hw_client_teacher_rows* rows, hw_client_call** out) {
  return Guard([&]() -> absl::Status {
    if (client == nullptr) return Missing("client");
    if (out == nullptr) return Missing("out");
    *out = nullptr;
    if (absl::Status status = CheckStruct("rows", rows); !status.ok()) return status;
    if (rows->header == nullptr) return Missing("header");
    const absl::StatusOr<Deadline> deadline = DeadlineOf(rows->timeout_ns);
    if (!deadline.ok()) return deadline.status();
    v1::StreamTeacherHeader header;
    if (rows->header_bytes < 0 || rows->header_bytes > INT32_MAX ||
        !header.ParseFromArray(rows->header, static_cast<int>(rows->header_bytes))) {
      return InvalidView(v1::ERROR_REASON_INVALID_FIELD, "header", "a serialized StreamTeacherHeader",
                         absl::StrCat(rows->header_bytes, " bytes that are none"));
    }
    const absl::StatusOr<RowsView> view = ToView("rows", rows->rows);
    if (!view.ok()) return view.status();
    if (absl::Status status = CheckShape("rows", *view, view->row_count, header.hidden_size(), header.data_type()); !status.ok()) {
      return status;
    }
    auto call = std::make_unique<hw_client_call>(client->connection, rows->done, rows->context);
    auto transfer =
        std::make_unique<TeacherTransfer>(client->connection->row_transport(), std::move(header), *view, rows->cuda_stream);
    TeacherTransfer* const started = transfer.get();
    call->transfer = std::move(transfer);
    Start(std::move(call), out, [&](hw_client_call* raw) {
      started->StartAttempt(*deadline, [raw](absl::StatusOr<std::string> answer) { raw->End(std::move(answer)); });
    });
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
      const absl::StatusOr<Deadline> deadline = DeadlineOf(std::max<int64_t>(timeout_ns, 1));
      call->changed.wait_for(lock, *deadline - std::chrono::system_clock::now(), has_ended);
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
    std::lock_guard<std::mutex> lock(const_cast<hw_client_call*>(call)->mutex);
    if (!call->result.has_value()) return absl::FailedPreconditionError("the call is still under way");
    if (!call->result->ok()) return call->result->status();
    *result = (*call->result)->data();
    *size = static_cast<int64_t>((*call->result)->size());
    return absl::OkStatus();
  });
}

void hw_client_call_cancel(hw_client_call* call) {
  if (call != nullptr) call->transfer->Cancel();
}

void hw_client_call_free(hw_client_call* call) {
  if (call == nullptr) return;
  if (hw_client_call::in_done == call) {
    std::lock_guard<std::mutex> lock(call->mutex);
    call->free_after_done = true;
    return;
  }
  call->transfer->Cancel();
  {
    std::unique_lock<std::mutex> lock(call->mutex);
    call->changed.wait(lock, [call] { return call->done_returned; });
  }
  // From another call's `done` this is a thread of the library too.
  if (hw_client_call::in_done != nullptr) Reaper::Get().Drop(std::move(call->connection));
  delete call;
}
