#include "client/cpp/src/loss_call.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/decision.h"
#include "client/cpp/src/notice.h"
#include "client/cpp/src/retried_call.h"
#include "client/cpp/src/tensor_stream.h"
#include "client/cpp/src/transfer/micro_batch_transfer.h"

namespace headwater::client::internal {
namespace {

using SetResult = std::function<void(absl::StatusOr<MultiResult>)>;

const HeadUse* FindHead(const HeadUses& heads, const std::string& name) {
  const auto use = std::find_if(heads.begin(), heads.end(), [&name](const HeadUse& head) { return head.state->name == name; });
  return use == heads.end() ? nullptr : &*use;
}

// Whether the server may have taken, or still take, what failed for this client.
bool MayHaveBeenDone(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsCancelled(status);
}

// A micro-batch with all its attempts.
class LossCall : public RetriedCall {
 public:
  LossCall(std::shared_ptr<Connection> connection, LossInput input, Deadline deadline, CallMode call_mode, SetResult set_result)
      : RetriedCall(std::move(connection), input.heads, input.header.commit_mode() == v1::COMMIT_MODE_EXPLICIT, deadline,
                    call_mode),
        input_(std::move(input)),
        set_result_(std::move(set_result)),
        transfer_(this->connection().row_transport(), MakeTensors(input_, grad_hidden_)) {}

 private:
  void StartAttempt() override {
    v1::MicroBatchHeader header = input_.header;
    // Without an id nothing is added, and nothing has an attempt. In a recovery the attempt stays: the decision that follows names
    // it.
    const bool next_attempt = header.has_micro_batch() && mode() == CallMode::kNormal;
    if (next_attempt) {
      if (attempt_count() == 1) first_attempt_ = std::max(input_.header.attempt(), KnownAttempt());
      header.set_attempt(first_attempt_ + attempt_count() - 1);
      NoteAttempt(header.attempt());
    }
    header.set_session_id(session_id());
    for (v1::LossTerm& term : *header.mutable_terms()) {
      term.mutable_head()->set_head_epoch(FindHead(heads(), term.head().head())->epoch);
      if (term.has_teacher_hidden()) {
        term.mutable_teacher_hidden()->set_head_epoch(FindHead(heads(), term.teacher_hidden().head())->epoch);
      } else if (term.has_joined_teacher()) {
        term.mutable_joined_teacher()->set_head_epoch(FindHead(heads(), term.joined_teacher().head())->epoch);
      }
    }
    attempt_ = header.attempt();
    transfer_.StartAttempt(std::move(header), deadline(), [this](absl::StatusOr<MicroBatchAnswer> answer) {
      absl::StatusOr<MultiResult> result;
      React(
          [&] {
            result = Read(answer);
            if (result.ok()) Complete(*result);
          },
          [&](absl::Status shortage) { result = std::move(shortage); });
      if (!result.ok()) return Failed(result.status());
      Succeeded();
      const SetResult set_result = std::move(set_result_);  // once it has run this object may be gone
      set_result(std::move(result));
    });
  }

  void CancelAttempt() override { transfer_.Cancel(); }

  absl::StatusOr<MultiResult> Read(const absl::StatusOr<MicroBatchAnswer>& answer) const {
    if (!answer.ok()) return answer.status();
    v1::MicroBatchSummary summary;
    if (!summary.ParseFromString(answer->summary)) return MakeAnswerError("a summary that cannot be decoded");
    absl::StatusOr<MultiResult> result = FromProto(summary, input_.header);
    if (result.ok() && result->transport.empty()) result->transport = answer->transport;
    return result;
  }

  void SetError(absl::Status status) override {
    // The last attempt may still be computing: who decides, or sends the rows again, supersedes it.
    if (mode() == CallMode::kNormal && input_.header.has_micro_batch() && attempt_count() > 0 && MayHaveBeenDone(status)) {
      React([&] { NoteAttempt(attempt_ + 1); }, [](const absl::Status&) {});
    }
    const SetResult set_result = std::move(set_result_);
    set_result(std::move(status));
  }

  // The newest attempt of the micro-batch that this client has sent, by whichever call.
  int64_t KnownAttempt() const {
    int64_t known = 0;
    for (const HeadUse& use : heads()) {
      if (use.step.has_value()) known = std::max(known, use.state->AttemptOf(*use.step, input_.header.micro_batch()));
    }
    return known;
  }
  void NoteAttempt(int64_t attempt) const {
    for (const HeadUse& use : heads()) {
      if (use.step.has_value()) use.state->SetAttempt(*use.step, input_.header.micro_batch(), attempt);
    }
  }

  static CallTensors MakeTensors(const LossInput& input, TensorBuffer& own_grad_hidden) {
    CallTensors tensors;
    tensors.hidden = input.hidden;
    tensors.teacher_hidden = input.teacher_hidden;
    tensors.cuda_stream = input.cuda_stream;
    if (!input.want_grad_hidden) return tensors;
    tensors.grad_row_bytes = input.hidden.hidden_size * ElementBytes(input.grad_hidden_data_type);
    if (input.grad_hidden.empty()) {
      own_grad_hidden = TensorBuffer(input.grad_hidden_data_type, {input.hidden.row_count, input.hidden.hidden_size});
      tensors.grad_hidden = own_grad_hidden.data();
    } else {
      tensors.grad_hidden = input.grad_hidden.data();
      tensors.grad_memory = input.grad_hidden_memory;
    }
    return tensors;
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
      connection().replay_log().StepIsOpen(use.state, *use.step);
    }
    if (connection().replay_log().enabled()) Enter([this] { Log(); });
    NoteForm(result.form);
    if (result.state == ContributionState::kStaged) {
      result.contribution.emplace(std::make_shared<const ContributionKey>(ContributionKey{shared_connection(), std::move(key)}));
    }
  }

  void NoteForm(ContributionForm form) {
    for (const HeadUse& use : heads()) {
      if (!use.step.has_value() || !use.state->ShouldWarnOfHeld(form, !input_.header.late_token_factors())) continue;
      GiveNotice(connection().options(),
                 absl::StrCat("a micro-batch of ", use.state->name,
                              " found all staging slots taken by others that wait for their commit; the server keeps its rows and "
                              "computes them again at commit, a third more work. Create the head with more "
                              "HeadSpec::staging_slots, one for each micro-batch that waits at once"));
    }
  }

  void Log() {
    const auto& terms = input_.header.terms();
    if (std::any_of(terms.begin(), terms.end(), [](const v1::LossTerm& term) { return term.has_joined_teacher(); })) {
      // The rows of a joined teacher are gone with the server, and whoever has sent them does not know: a repetition would find
      // none, or those of another micro-batch that has the same key.
      return connection().replay_log().BeginAfter(heads());
    }
    LogEntry entry;
    entry.heads = heads();
    entry.micro_batch = input_.header.micro_batch();
    entry.attempt = attempt_;
    entry.is_loss = true;
    for (const HeadUse& use : heads()) {
      if (!use.step.has_value() && use.state->spec.trainable) entry.reads.emplace_back(use.state, use.state->known_open_step());
    }
    // The rows stay the caller's only until the result is there.
    struct Copy {
      LossInput input;
      std::vector<std::string> rows;
    };
    auto copy = std::make_shared<Copy>();
    copy->input = input_;
    copy->input.header.set_attempt(attempt_);
    copy->input.grad_hidden = {};
    copy->input.cuda_stream = nullptr;
    const auto take = [this, &copy, &entry](RowsView& view) {
      const int64_t bytes = view.row_count * view.row_bytes();
      std::string& rows = copy->rows.emplace_back(static_cast<size_t>(bytes), '\0');
      entry.bytes += bytes;
      if (view.memory == Memory::kHost) {
        if (bytes > 0) std::memcpy(rows.data(), view.data, static_cast<size_t>(bytes));
      } else if (!connection().row_transport().memory().CopyToHost(rows.data(), view.data, bytes, input_.cuda_stream).ok()) {
        entry.bytes = connection().options().replay_bytes + 1;  // does not fit: the step cannot be repeated
      }
      view.memory = Memory::kHost;
    };
    take(copy->input.hidden);
    for (RowsView& view : copy->input.teacher_hidden) take(view);
    copy->input.hidden.data = copy->rows[0].data();
    for (size_t i = 0; i < copy->input.teacher_hidden.size(); ++i) copy->input.teacher_hidden[i].data = copy->rows[i + 1].data();
    entry.bytes += static_cast<int64_t>(copy->input.header.ByteSizeLong());
    entry.repeat = std::make_shared<Repetition>([copy](Connection& target, const HeadUses& uses, const Wait& wait) {
      LossInput input = copy->input;
      input.heads = uses;
      auto state = std::make_shared<FutureState<MultiResult>>();
      // Not kept beyond this call: the connection is the recovery's.
      LossCall call(std::shared_ptr<Connection>(std::shared_ptr<Connection>(), &target), std::move(input), wait.deadline,
                    CallMode::kReplay, [state](absl::StatusOr<MultiResult> result) { state->Set(std::move(result)); });
      const std::stop_callback on_cancel(wait.cancel, [&call] { call.Cancel(); });
      call.Start();
      return state->Take().status();
    });
    connection().replay_log().Add(std::move(entry));
  }

  LossInput input_;
  SetResult set_result_;
  int64_t first_attempt_ = 0;
  int64_t attempt_ = 0;  // the newest one
  TensorBuffer grad_hidden_;
  MicroBatchTransfer transfer_;
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
