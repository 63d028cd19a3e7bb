#include "headwater/client/teacher.h"

#include <mutex>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/src/connection.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/reaction.h"
#include "client/cpp/src/tensor_stream.h"
#include "client/cpp/src/transfer/teacher_transfer.h"

namespace headwater::client {
namespace {

using internal::Connection;
using internal::Deadline;
using internal::FutureState;

// One Stream() with its repetitions. Kept by the future's state, as every call is.
class TeacherCall {
 public:
  TeacherCall(std::shared_ptr<Connection> connection, v1::StreamTeacherHeader header, RowsView rows, void* cuda_stream,
              Deadline deadline, std::shared_ptr<FutureState<StreamedRows>> state)
      : connection_(std::move(connection)),
        retry_(connection_->MakeRetry(deadline, internal::Repeat::kIfNothingWasDone)),
        transfer_(connection_->row_transport(), std::move(header), rows, cuda_stream),
        state_(std::move(state)) {}

  void Start() {
    internal::React(
        [this] {
          transfer_.StartAttempt(retry_.deadline(), [this](absl::StatusOr<std::string> answer) { Ended(std::move(answer)); });
        },
        [this](absl::Status shortage) { Set(std::move(shortage)); });
  }

  void Cancel() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      cancelled_ = true;
    }
    transfer_.Cancel();
    connection_->timers().Hurry(this);
  }

 private:
  void Ended(absl::StatusOr<std::string> answer) {
    internal::React([&] { GoOnAfter(answer); },
                    [&](absl::Status shortage) { Set(answer.ok() ? std::move(shortage) : answer.status()); });
  }

  // Throws only if the call has neither ended nor goes on elsewhere.
  void GoOnAfter(const absl::StatusOr<std::string>& answer) {
    if (!answer.ok()) {
      {
        // Under the lock, so that Cancel() either is seen here or finds the task, which takes it first: until it is released the
        // call cannot end.
        std::lock_guard<std::mutex> lock(mutex_);
        const auto delay = cancelled_ ? std::nullopt : retry_.AfterFailure(answer.status());
        if (delay.has_value()) {
          return connection_->timers().Run(this, *delay, [this] {
            { std::lock_guard<std::mutex> begun(mutex_); }
            Start();
          });
        }
      }
      return Set(answer.status());
    }
    v1::StreamTeacherResponse response;
    if (!response.ParseFromString(*answer)) return Set(internal::MakeAnswerError("a StreamTeacherResponse that cannot be decoded"));
    Set(StreamedRows{response.row_count()});
  }

  void Set(absl::StatusOr<StreamedRows> result) {
    const std::shared_ptr<FutureState<StreamedRows>> state = state_;  // once the result is set this object may be gone
    state->Set(std::move(result));
  }

  const std::shared_ptr<Connection> connection_;
  internal::RetryState retry_;
  internal::TeacherTransfer transfer_;
  const std::shared_ptr<FutureState<StreamedRows>> state_;

  std::mutex mutex_;  // against Cancel()
  bool cancelled_ = false;
};

}  // namespace

Teacher::Teacher(std::shared_ptr<internal::Connection> connection, std::string join_key, int64_t total_rows)
    : connection_(std::move(connection)), join_key_(std::move(join_key)), total_rows_(total_rows) {}

Future<StreamedRows> Teacher::Stream(RowsView rows, absl::Span<const int32_t> row_indices, const CallOptions& options) const {
  auto state = std::make_shared<FutureState<StreamedRows>>();
  if (absl::Status status = internal::CheckRows("rows", rows); !status.ok()) {
    state->Set(std::move(status));
    return Future<StreamedRows>(state);
  }
  v1::StreamTeacherHeader header;
  header.set_join_key(join_key_);
  header.set_total_row_count(total_rows_);
  if (!row_indices.empty()) *header.mutable_row_indices() = internal::ToProto(row_indices);
  header.set_data_type(internal::ToProto(rows.data_type));
  header.set_hidden_size(rows.hidden_size);
  header.set_tenant(absl::StrCat("tenants/", connection_->options().tenant));
  auto call = std::make_shared<TeacherCall>(connection_, std::move(header), rows, options.cuda_stream,
                                            connection_->DeadlineOf(options), state);
  state->Keep(call, [raw = call.get()] { raw->Cancel(); });
  call->Start();
  return Future<StreamedRows>(state);
}

}  // namespace headwater::client
