#include "client/cpp/src/loss_call.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/decision.h"
#include "client/cpp/src/retried_call.h"
#include "client/cpp/src/tensor_stream.h"

namespace headwater::client::internal {
namespace {

using SetResult = std::function<void(absl::StatusOr<MultiResult>)>;

// Rows that go up, chunk by chunk.
class RowSource {
 public:
  RowSource(v1::ChunkRole role, int term_index, const RowsView& rows) : role_(role), term_index_(term_index), rows_(rows) {}

  bool done() const { return next_row_ == rows_.row_count; }

  void FillChunk(int64_t chunk_bytes, v1::RowChunk& chunk) {
    const int64_t row_bytes = rows_.row_bytes();
    const int64_t rows = std::min(std::max<int64_t>(1, chunk_bytes / row_bytes), rows_.row_count - next_row_);
    chunk.set_role(role_);
    chunk.set_term_index(term_index_);
    chunk.set_row_start(next_row_);
    chunk.set_row_count(rows);
    chunk.set_data(static_cast<const unsigned char*>(rows_.data) + next_row_ * row_bytes, static_cast<size_t>(rows * row_bytes));
    next_row_ += rows;
  }

 private:
  v1::ChunkRole role_;
  int term_index_;
  RowsView rows_;
  int64_t next_row_ = 0;
};

// What an attempt reads and writes on the caller's side.
struct RowsOfCall {
  std::vector<RowSource> sources;  // with rows left
  int64_t row_count = 0;
  unsigned char* grad_destination = nullptr;  // null: grad_hidden is not wanted
  int64_t grad_row_bytes = 0;
};

using AttemptDone = std::function<void(absl::Status status, v1::MicroBatchSummary* summary)>;

// One attempt. gRPC calls OnWriteDone and OnReadDone one at a time each, but the two concurrently: the writing half of the members
// belongs to the one, the reading half to the other, and OnDone, which comes last, sees both.
class LossStream : public grpc::ClientBidiReactor<v1::ComputeLossRequest, v1::ComputeLossResponse> {
 public:
  LossStream(Connection& connection, v1::MicroBatchHeader header, RowsOfCall rows, AttemptDone done)
      : connection_(connection), done_(std::move(done)), rows_(std::move(rows)) {
    *request_.mutable_header() = std::move(header);
  }

  void Start(grpc::ClientContext& context) {
    context_ = &context;
    connection_.loss().async()->ComputeLoss(&context, this);
    StartRead(&response_);
    Write();
    StartCall();
  }

  void OnWriteDone(bool ok) override {
    // Not ok: the server answered before it had read everything, or the connection broke. OnDone tells which.
    if (!ok || rows_.sources.empty()) return;
    rows_.sources.front().FillChunk(connection_.options().chunk_bytes, *request_.mutable_chunk());
    if (rows_.sources.front().done()) rows_.sources.erase(rows_.sources.begin());
    Write();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (absl::Status status = TakeResponse(); !status.ok()) {
      answer_error_ = std::move(status);
      context_->TryCancel();
      return;
    }
    StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    const AttemptDone done = std::move(done_);  // which may destroy this object
    absl::Status result = Result(status);
    done(std::move(result), summary_.has_value() ? &*summary_ : nullptr);
  }

 private:
  // Sends request_, and the end of the stream with the last one.
  void Write() {
    if (rows_.sources.empty()) {
      StartWriteLast(&request_, grpc::WriteOptions());
    } else {
      StartWrite(&request_);
    }
  }

  absl::Status TakeResponse() {
    if (summary_.has_value()) return MakeAnswerError("a message after the summary");
    if (response_.has_summary()) {
      summary_.emplace(std::move(*response_.mutable_summary()));
      return absl::OkStatus();
    }
    if (!response_.has_chunk()) return MakeAnswerError("a message without chunk or summary");
    const v1::RowChunk& chunk = response_.chunk();
    if (rows_.grad_destination == nullptr || chunk.role() != v1::CHUNK_ROLE_GRAD_HIDDEN) {
      return MakeAnswerError(absl::StrCat("a chunk of role ", v1::ChunkRole_Name(chunk.role()), " that was not asked for"));
    }
    if (chunk.row_start() != rows_received_ || chunk.row_count() < 1 || chunk.row_count() > rows_.row_count - rows_received_ ||
        chunk.data().size() != static_cast<size_t>(chunk.row_count() * rows_.grad_row_bytes)) {
      return MakeAnswerError(absl::StrCat("grad_hidden rows [", chunk.row_start(), ", +", chunk.row_count(), ") with ",
                                          chunk.data().size(), " bytes, expected them to go on at row ", rows_received_, " of ",
                                          rows_.row_count, " with ", rows_.grad_row_bytes, " bytes a row"));
    }
    std::memcpy(rows_.grad_destination + rows_received_ * rows_.grad_row_bytes, chunk.data().data(), chunk.data().size());
    rows_received_ += chunk.row_count();
    return absl::OkStatus();
  }

  absl::Status Result(const grpc::Status& status) {
    if (!answer_error_.ok()) return answer_error_;
    if (!status.ok()) return connection_.FromGrpc(status);
    if (!summary_.has_value()) return MakeAnswerError("the stream ended without a summary");
    if (rows_.grad_destination != nullptr && rows_received_ != rows_.row_count) {
      return MakeAnswerError(absl::StrCat("grad_hidden ended after ", rows_received_, " of ", rows_.row_count, " rows"));
    }
    return absl::OkStatus();
  }

  Connection& connection_;
  AttemptDone done_;
  grpc::ClientContext* context_ = nullptr;

  // Writing, but for what does not change in rows_.
  v1::ComputeLossRequest request_;
  RowsOfCall rows_;

  // Reading.
  v1::ComputeLossResponse response_;
  absl::Status answer_error_;
  std::optional<v1::MicroBatchSummary> summary_;
  int64_t rows_received_ = 0;
};

const HeadUse* FindHead(const HeadUses& heads, const std::string& name) {
  const auto use = std::find_if(heads.begin(), heads.end(), [&name](const HeadUse& head) { return head.state->name == name; });
  return use == heads.end() ? nullptr : &*use;
}

// A micro-batch with all its attempts.
class LossCall : public RetriedCall {
 public:
  LossCall(std::shared_ptr<Connection> connection, LossInput input, Deadline deadline, CallMode call_mode, SetResult set_result)
      : RetriedCall(std::move(connection), input.heads, input.header.commit_mode() == v1::COMMIT_MODE_EXPLICIT, deadline,
                    call_mode),
        input_(std::move(input)),
        set_result_(std::move(set_result)) {
    if (!input_.want_grad_hidden || !input_.grad_hidden.empty()) return;
    grad_hidden_ = TensorBuffer(input_.grad_hidden_data_type, {input_.hidden.row_count, input_.hidden.hidden_size});
  }

 private:
  void StartAttempt() override {
    v1::MicroBatchHeader header = input_.header;
    // Without an id nothing is added, and nothing has an attempt. In a recovery the attempt stays: the decision that follows names
    // it.
    const bool next_attempt = header.has_micro_batch() && mode() == CallMode::kNormal;
    if (next_attempt) header.set_attempt(input_.header.attempt() + attempt_count() - 1);
    header.set_session_id(session_id());
    for (v1::LossTerm& term : *header.mutable_terms()) {
      term.mutable_head()->set_head_epoch(FindHead(heads(), term.head().head())->epoch);
      if (!term.has_teacher_hidden()) continue;
      term.mutable_teacher_hidden()->set_head_epoch(FindHead(heads(), term.teacher_hidden().head())->epoch);
    }
    attempt_ = header.attempt();
    stream_ = std::make_unique<LossStream>(
        connection(), std::move(header), MakeRows(), [this](absl::Status status, v1::MicroBatchSummary* summary) {
          absl::StatusOr<MultiResult> result =
              status.ok() ? FromProto(*summary, input_.header) : absl::StatusOr<MultiResult>(std::move(status));
          if (!result.ok()) return Failed(result.status());
          Complete(*result);
          Succeeded();
          const SetResult set_result = std::move(set_result_);  // once it has run this object may be gone
          set_result(std::move(result));
        });
    stream_->Start(context());
  }

  void SetError(absl::Status status) override {
    const SetResult set_result = std::move(set_result_);
    set_result(std::move(status));
  }

  RowsOfCall MakeRows() {
    RowsOfCall rows;
    rows.row_count = input_.hidden.row_count;
    const auto add = [&rows](v1::ChunkRole role, int term_index, const RowsView& view) {
      if (view.row_count > 0 && view.hidden_size > 0) rows.sources.emplace_back(role, term_index, view);
    };
    add(v1::CHUNK_ROLE_HIDDEN, 0, input_.hidden);
    for (size_t i = 0; i < input_.teacher_hidden.size(); ++i) {
      add(v1::CHUNK_ROLE_TEACHER_HIDDEN, static_cast<int>(i), input_.teacher_hidden[i]);
    }
    if (input_.want_grad_hidden) {
      rows.grad_row_bytes = input_.hidden.hidden_size * ElementBytes(input_.grad_hidden_data_type);
      rows.grad_destination =
          input_.grad_hidden.empty() ? static_cast<unsigned char*>(grad_hidden_.data()) : input_.grad_hidden.data();
    }
    return rows;
  }

  // What the summary does not say, and what the client keeps.
  void Complete(MultiResult& result) {
    result.grad_hidden = std::move(grad_hidden_);
    result.attempt = attempt_;
    if (mode() == CallMode::kReplay || !input_.header.has_micro_batch()) return;
    MicroBatchKey key;
    key.micro_batch = input_.header.micro_batch();
    key.attempt = attempt_;
    for (const HeadUse& use : heads()) {
      if (!use.step.has_value()) continue;
      key.heads.push_back(use);
      use.state->SetAttempt(*use.step, key.micro_batch, attempt_);
      connection().replay_log().StepIsOpen(use.state, *use.step);
    }
    if (connection().replay_log().enabled()) Log();
    if (result.state == ContributionState::kStaged) {
      result.contribution.emplace(std::make_shared<const ContributionKey>(ContributionKey{shared_connection(), std::move(key)}));
    }
  }

  void Log() {
    LogEntry entry;
    entry.heads = heads();
    entry.micro_batch = input_.header.micro_batch();
    entry.is_loss = true;
    // The rows stay the caller's only until the result is there.
    struct Copy {
      LossInput input;
      std::vector<std::string> rows;
    };
    auto copy = std::make_shared<Copy>();
    copy->input = input_;
    copy->input.header.set_attempt(attempt_);
    copy->input.grad_hidden = {};
    const auto take = [&copy, &entry](RowsView& view) {
      const size_t bytes = static_cast<size_t>(view.row_count * view.row_bytes());
      copy->rows.emplace_back(static_cast<const char*>(view.data), bytes);
      entry.bytes += static_cast<int64_t>(bytes);
    };
    take(copy->input.hidden);
    for (RowsView& view : copy->input.teacher_hidden) take(view);
    copy->input.hidden.data = copy->rows[0].data();
    for (size_t i = 0; i < copy->input.teacher_hidden.size(); ++i) copy->input.teacher_hidden[i].data = copy->rows[i + 1].data();
    entry.bytes += static_cast<int64_t>(copy->input.header.ByteSizeLong());
    entry.repeat = std::make_shared<Repetition>([copy](Connection& target, const HeadUses& uses, Deadline deadline) {
      LossInput input = copy->input;
      input.heads = uses;
      auto state = std::make_shared<FutureState<MultiResult>>();
      // Not kept beyond this call: the connection is the recovery's.
      LossCall call(std::shared_ptr<Connection>(std::shared_ptr<Connection>(), &target), std::move(input), deadline,
                    CallMode::kReplay, [state](absl::StatusOr<MultiResult> result) { state->Set(std::move(result)); });
      call.Start();
      return state->Take().status();
    });
    connection().replay_log().Add(std::move(entry));
  }

  LossInput input_;
  SetResult set_result_;
  int64_t attempt_ = 0;
  TensorBuffer grad_hidden_;
  std::unique_ptr<LossStream> stream_;  // of the last attempt
};

absl::Status CheckInput(const LossInput& input) {
  if (absl::Status status = CheckRows("hidden", input.hidden); !status.ok()) return status;
  for (const RowsView& rows : input.teacher_hidden) {
    if (absl::Status status = CheckRows("teacher_hidden", rows); !status.ok()) return status;
  }
  if (input.grad_hidden.empty()) return absl::OkStatus();
  if (!input.want_grad_hidden) {
    return InvalidView(v1::ERROR_REASON_INVALID_COMBINATION, "grad_hidden", "no memory, as no gradient was asked for",
                       absl::StrCat(input.grad_hidden.size(), " bytes"));
  }
  const int64_t expected = input.hidden.row_count * input.hidden.hidden_size * ElementBytes(input.grad_hidden_data_type);
  if (static_cast<int64_t>(input.grad_hidden.size()) != expected) {
    return InvalidView(v1::ERROR_REASON_DATA_LENGTH_MISMATCH, "grad_hidden", absl::StrCat(expected, " bytes"),
                       absl::StrCat(input.grad_hidden.size(), " bytes"));
  }
  return absl::OkStatus();
}

void Begin(std::shared_ptr<Connection> connection, LossInput input, const CallOptions& options, SetResult set_result,
           const std::function<void(std::shared_ptr<LossCall>)>& keep) {
  if (absl::Status status = CheckInput(input); !status.ok()) return set_result(std::move(status));
  const Deadline deadline = connection->DeadlineOf(options);
  auto call =
      std::make_shared<LossCall>(std::move(connection), std::move(input), deadline, CallMode::kNormal, std::move(set_result));
  keep(call);
  call->Start();
}

}  // namespace

void AddHead(LossInput& input, const std::shared_ptr<HeadState>& head, std::optional<int64_t> step) {
  if (FindHead(input.heads, head->name) == nullptr) input.heads.push_back({.state = head, .step = step});
}

void StartLossCall(std::shared_ptr<Connection> connection, LossInput input, const CallOptions& options,
                   const std::shared_ptr<FutureState<MultiResult>>& state) {
  Begin(
      std::move(connection), std::move(input), options,
      [state](absl::StatusOr<MultiResult> result) { state->Set(std::move(result)); },
      [&state](std::shared_ptr<LossCall> call) { state->Keep(call, [raw = call.get()] { raw->Cancel(); }); });
}

void StartLossCall(std::shared_ptr<Connection> connection, LossInput input, const CallOptions& options,
                   const std::shared_ptr<FutureState<LossResult>>& state) {
  Begin(
      std::move(connection), std::move(input), options,
      [state](absl::StatusOr<MultiResult> result) {
        if (!result.ok()) return state->Set(result.status());
        TermResult term = std::move(result->terms[0]);
        state->Set(LossResult{std::move(term), static_cast<MicroBatchResult&&>(*result)});
      },
      [&state](std::shared_ptr<LossCall> call) { state->Keep(call, [raw = call.get()] { raw->Cancel(); }); });
}

}  // namespace headwater::client::internal
