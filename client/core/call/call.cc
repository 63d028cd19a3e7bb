#include "client/core/call/call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/call/messages.h"
#include "client/core/core.h"
#include "client/core/link/error.h"
#include "client/core/replay/recovery.h"
#include "headwater/client/error.h"

namespace headwater::client::internal {
namespace {

using google::protobuf::Message;

// How often a call reopens a lost session; more losses mean that the server forgets sessions as fast as they are opened.
constexpr int kMaxSessionLosses = 3;
constexpr std::chrono::nanoseconds kAtOnce{0};

// Whether the server may have executed, or may still execute, the call that failed for this client.
bool MayHaveBeenDone(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsCancelled(status);
}

bool IsCut(const absl::Status& status) { return absl::IsUnavailable(status) && ErrorReason(status).empty(); }

const v1::Head* HeadIn(const Message& answer) {
  if (const auto* created = dynamic_cast<const v1::CreateHeadResponse*>(&answer)) return &created->head();
  return dynamic_cast<const v1::Head*>(&answer);
}

// Parses the bytes that an exchange has brought, if there are any.
absl::Status Read(const Method& method, Answer* answer) {
  if (answer->message != nullptr) return absl::OkStatus();
  return WithMemoryFor(static_cast<int64_t>(answer->bytes.size()), "an answer", [&]() -> absl::Status {
    answer->message.reset(method.answer->New());
    if (!answer->message->ParseFromString(answer->bytes)) {
      return MakeAnswerError(absl::StrCat("a ", answer->message->GetDescriptor()->name(), " that cannot be decoded"));
    }
    auto* const summary = dynamic_cast<v1::MicroBatchSummary*>(answer->message.get());
    if (summary == nullptr || !summary->transport().empty()) return absl::OkStatus();
    // The server does not say the path. `transport` is the last field: bytes behind an encoded message belong to it.
    v1::MicroBatchSummary path;
    path.set_transport(answer->transport);
    answer->bytes += path.SerializeAsString();
    summary->MergeFrom(path);
    return absl::OkStatus();
  });
}

bool HasJoinedTeacher(const Message& message) {
  const auto* const header = dynamic_cast<const v1::MicroBatchHeader*>(&message);
  return header != nullptr && std::any_of(header->terms().begin(), header->terms().end(),
                                          [](const v1::LossTerm& term) { return term.has_joined_teacher(); });
}

bool IsExplicit(const Message& message) {
  const auto* const header = dynamic_cast<const v1::MicroBatchHeader*>(&message);
  return header != nullptr && header->commit_mode() == v1::COMMIT_MODE_EXPLICIT;
}

}  // namespace

Call::Call(std::shared_ptr<Core> core, Request request, CallMode mode, Done done)
    : core_(std::move(core)),
      method_(*request.method),
      message_(std::move(request.message)),
      memory_(std::move(request.memory)),
      mode_(mode),
      is_patient_(request.patient),
      is_owned_(request.is_owned),
      is_background_(request.is_background),
      done_(std::move(done)),
      heads_(mode == CallMode::kNormal ? core_->head_states().UsesOf(*message_) : HeadUses()),
      named_attempt_(GetInteger(*message_, "attempt").value_or(0)),
      retry_(core_->options().retry, request.deadline, method_.repeat,
             /*awaits_server=*/core_->options().replay_bytes > 0 && request.patient && method_.patient),
      exchange_(MakeExchange(*core_, method_, *message_, memory_)) {
  opens_session_ = method_.session == InSession::kExplicit || method_.session == InSession::kOwned;
  // A decision is about the submissions before it.
  const bool decides = method_.record == Record::kCommit || method_.record == Record::kDiscard;
  if (decides && named_attempt_ == 0 && micro_batch().has_value()) {
    for (const HeadUse& use : heads_) {
      if (use.step.has_value()) attempt_ = std::max(attempt_, use.state->AttemptOf(*use.step, *micro_batch()));
    }
    SetInteger(*message_, "attempt", attempt_);
  }
}

std::optional<int64_t> Call::micro_batch() const { return GetInteger(*message_, "micro_batch"); }

void Call::Start() {
  if (mode_ == CallMode::kNormal) {
    if (absl::Status status = core_->Enlist(shared_from_this()); !status.ok()) return End(std::move(status));
    if (method_.settles) settlement_ = core_->abandoned().Mark(*message_);
  }
  TryBegin();
}

void Call::Cancel() {
  cancel_.request_stop();
  std::shared_ptr<Call> inner;
  std::function<void()> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    inner = inner_;
    waiting = core_->row_transport().beginnings().Withdraw(this);
  }
  if (inner != nullptr) inner->Cancel();
  exchange_->Cancel();
  if (waiting) core_->row_transport().endings().Run(this, std::move(waiting));
  core_->timers().Hurry(this);
  core_->waiting().Hurry(this);
}

void Call::TryBegin() {
  if (cancelled()) {
    return End(MakeLocalError(v1::ERROR_REASON_CANCELLED, absl::StatusCode::kCancelled, "the call was cancelled"));
  }
  if (AwaitTurn() || AwaitSettlement() || AwaitSession() || AwaitRecovery() || AwaitSeal()) return;
  ++attempt_count_;
  FillIn();
  exchange_->Start(*message_, retry_.deadline(), [this](absl::StatusOr<Answer> answer) { Answered(std::move(answer)); });
}

bool Call::AwaitTurn() {
  if (!is_loss() || mode_ == CallMode::kInner || has_turn_) return false;
  has_turn_ = core_->turns().TryTake(this);
  return !has_turn_ && TryLater([this] { return !core_->turns().HasCome(this); }, Until().Check());
}

bool Call::AwaitSettlement() {
  const auto is_blocked = [this] { return !core_->abandoned().IsSettled(settlement_); };
  if (settlement_ < 0 || !is_blocked()) return false;
  constexpr char kLate[] = "the call's time ended while it waited until abandoned contributions were discarded";
  return TryLater(is_blocked, Until().Check().ok()
                                  ? absl::OkStatus()
                                  : MakeLocalError(v1::ERROR_REASON_DEADLINE_EXCEEDED, absl::StatusCode::kDeadlineExceeded, kLate));
}

bool Call::AwaitSession() {
  const bool wanted = method_.session == InSession::kIfOpen || (method_.session == InSession::kExplicit && IsExplicit(*message_)) ||
                      (method_.session == InSession::kOwned && is_owned_);
  const bool may_block = std::exchange(may_block_, false);
  if (!wanted) return false;
  session_id_ = core_->session().OpenId();
  if (!session_id_.empty() || !opens_session_ || core_->options().session_lease.count() == 0) return false;
  if (!may_block) {
    // Waiting for a session here would hold up the caller, or all timers.
    std::lock_guard<std::mutex> lock(mutex_);
    RunLocked(cancelled() ? core_->row_transport().endings() : core_->row_transport().beginnings(), kAtOnce, [this] {
      may_block_ = true;
      TryBegin();
    });
    return true;
  }
  absl::StatusOr<std::string> id = core_->session().Id(Until());
  if (!id.ok()) {
    Failed(id.status());
    return true;
  }
  session_id_ = *std::move(id);
  return false;
}

bool Call::AwaitRecovery() {
  if (mode_ == CallMode::kInner || !method_.follows) return false;
  ReplayLog& log = core_->replay_log();
  entered_ = log.TryEnter(heads_);
  return !entered_ &&
         TryLater([&log] { return log.recovering(); }, Until().Check().ok() ? absl::OkStatus() : EndedInRecovery(Until()));
}

bool Call::TryLater(const std::function<bool()>& is_blocked, absl::Status late) {
  if (late.ok()) {
    Await(is_blocked, [this] { TryBegin(); });
  } else {
    End(std::move(late));
  }
  return true;
}

bool Call::AwaitSeal() {
  for (HeadUse& use : heads_) {
    if (mode_ == CallMode::kNormal) use.epoch = use.state->epoch();
  }
  if (!is_repetition() || method_.record != Record::kApply || sealed_) return false;
  const auto& apply = static_cast<const v1::ApplyOptimizerStepRequest&>(*message_);
  if (!apply.has_expected()) return false;
  v1::SealStepRequest seal;
  *seal.mutable_head() = apply.head();
  if (mode_ == CallMode::kNormal && !heads_.empty()) seal.mutable_head()->set_head_epoch(heads_[0].epoch);
  *seal.mutable_expected() = apply.expected();
  seal.set_wait(true);
  RunInner(seal, [this](absl::StatusOr<Answer> answer) {
    if (!answer.ok()) return Failed(answer.status());
    sealed_ = true;
    Leave();
    TryBegin();
  });
  return true;
}

void Call::FillIn() {
  // Calls of a recovery carry the epochs that it has found.
  if (mode_ == CallMode::kNormal) SetEpochs(*message_, heads_);
  if (method_.session != InSession::kNo) SetText(*message_, "session_id", session_id_);
  if (method_.record == Record::kSeal && is_repetition()) static_cast<v1::SealStepRequest&>(*message_).set_wait(true);
  const std::optional<int64_t> id = micro_batch();
  const bool submits = is_loss() || method_.record == Record::kGradient;
  if (!submits || !id.has_value() || mode_ == CallMode::kInner) {
    attempt_ = GetInteger(*message_, "attempt").value_or(0);
    return;
  }
  // A loss rises by attempt, because the server may be computing the one before. In a recovery the attempt stays: the decision that
  // follows names it.
  int64_t first = named_attempt_;
  for (const HeadUse& use : heads_) {
    if (use.step.has_value()) first = std::max(first, use.state->FirstAttempt(*use.step, *id, named_attempt_));
  }
  attempt_ = attempt_count_ == 1 ? first : is_loss() ? attempt_ + 1 : attempt_;
  SetInteger(*message_, "attempt", attempt_);
  for (const HeadUse& use : heads_) {
    if (use.step.has_value()) use.state->NoteAttempt(*use.step, *id, attempt_, named_attempt_);
  }
}

void Call::Await(const std::function<bool()>& is_blocked, std::function<void()> go_on) {
  std::lock_guard<std::mutex> lock(mutex_);
  RunLocked(core_->waiting(), retry_.deadline() - std::chrono::system_clock::now(), std::move(go_on));
  // The awaited event may have come before the task existed.
  if (!is_blocked()) core_->waiting().Hurry(this);
}

void Call::RunLocked(DelayedTasks& threads, std::chrono::nanoseconds delay, std::function<void()> task) {
  threads.Run(this, cancelled() ? kAtOnce : delay, [this, task = std::move(task)] {
    { std::lock_guard<std::mutex> begun(mutex_); }
    task();
  });
}

void Call::BeginAfter(std::chrono::nanoseconds delay) {
  std::lock_guard<std::mutex> lock(mutex_);
  RunLocked(core_->timers(), delay, [this] { TryBegin(); });
}

void Call::RunInner(const Message& message, Done go_on) {
  Request request{.method = &MethodOf(message), .message = std::unique_ptr<Message>(message.New()), .deadline = retry_.deadline()};
  request.message->CopyFrom(message);
  request.patient = is_patient_;
  request.is_background = is_background_;
  auto inner = std::make_shared<Call>(core_, std::move(request), CallMode::kInner, std::move(go_on));
  Call* const started = inner.get();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    inner_ = std::move(inner);
    if (cancelled()) started->Cancel();
  }
  started->Start();  // its end may end this call, which keeps it
}

void Call::Leave() {
  if (entered_) core_->replay_log().Leave(heads_);
  entered_ = false;
}

void Call::Answered(absl::StatusOr<Answer> answer) {
  if (!answer.ok()) return Failed(answer.status());
  answer_ = *std::move(answer);
  answer_.attempt = attempt_;
  if (absl::Status status = Read(method_, &answer_); !status.ok()) {
    if (mode_ == CallMode::kNormal) core_->replay_log().Drop(heads_, "an answer could not be read");
    return Failed(status);
  }
  if (mode_ == CallMode::kInner) return End(std::move(answer_));
  if (method_.follows) Record(*answer_.message);
  Leave();
  if (method_.news != HeadNews::kNoNews && TakeNews(*answer_.message)) return;
  End(std::move(answer_));
}

void Call::Failed(absl::Status status) {
  Leave();
  // This client has not cancelled the call: a server that shuts down cuts off calls that reach it in that moment.
  if (absl::IsCancelled(status) && !cancelled()) {
    status = absl::UnavailableError(absl::StrCat("the connection to ", core_->target(), " failed: ", Sentence(status)));
  }
  const std::string reason = ErrorReason(status);
  if (method_.shape == Shape::kTeacher && cut_ && reason == "CHUNK_OUT_OF_RANGE") {
    auto done = std::make_unique<v1::StreamTeacherResponse>();  // the stream whose answer was cut off had worked
    done->set_row_count(memory_.rows.row_count);
    return End(Answer{.message = std::move(done)});
  }
  cut_ |= IsCut(status);
  if (mode_ == CallMode::kNormal && method_.follows && MayRecover(core_->replay_log(), status)) {
    if (recovery_count_ == kMaxRecoveries)
      return End(StillLost(status, heads_, absl::StrCat(kMaxRecoveries, " restarts in one call")));
    ++recovery_count_;
    sealed_ = false;
    return RecoverFrom(status);
  }
  if (cancelled()) return End(status);
  // A repeat may be fenced by the effect of the first call.
  const bool all_sent = method_.repeat == Repeat::kUntilSent && exchange_->sent_bytes() == exchange_->total_bytes();
  if (all_sent && reason.empty()) return End(status);
  std::chrono::nanoseconds delay = kAtOnce;
  if (!session_id_.empty() && session_loss_count_ < kMaxSessionLosses && reason == "SESSION_NOT_FOUND") {
    ++session_loss_count_;
    core_->ForgetSession(session_id_);
    opens_session_ = true;
  } else if (const auto back_off = retry_.AfterFailure(status); back_off.has_value()) {
    if (is_background_ && retry_.away_count() >= core_->options().retry.max_attempts && core_->has_stopped_waiting()) {
      return End(MakeLocalError(v1::ERROR_REASON_CANCELLED, absl::StatusCode::kCancelled,
                                "the main program has returned, and the server is away"));
    }
    delay = *back_off;
  } else {
    return End(status);
  }
  BeginAfter(delay);
}

void Call::Record(const Message& answer) {
  ReplayLog& log = core_->replay_log();
  std::optional<int64_t> open_step = GetInteger(answer, "open_step");
  if (const v1::Head* head = HeadIn(answer); head != nullptr) open_step = head->open_step();
  const bool closes = method_.record == Record::kApply || method_.record == Record::kClose;
  for (const HeadUse& use : heads_) {
    if (!use.step.has_value()) continue;
    const bool is_closed = closes && open_step.has_value() && *open_step > *use.step;
    log.StepIsOpen(use.state, is_closed ? *open_step : *use.step);
  }
  if (!log.enabled() || method_.record == Record::kNone) return;
  if (is_loss() && !micro_batch().has_value()) return;
  if (is_loss() && GetBool(answer, "payload_differs").value_or(false)) return;  // another trainer's contribution counts
  // The rows of a joined teacher are lost with the server, and their sender does not know. A repetition would find no rows, or
  // those of another micro-batch with the same key.
  if (HasJoinedTeacher(*message_)) {
    return log.Drop(heads_, "it has micro-batches whose teacher's rows came from another stream (a join)");
  }
  LogEntry entry;
  entry.record = method_.record;
  entry.heads = heads_;
  entry.micro_batch = micro_batch().value_or(-1);
  entry.attempt = attempt_;
  entry.is_answered_again = GetBool(answer, "replayed").value_or(false);
  for (const HeadUse& use : heads_) {
    if (!use.step.has_value() && use.state->trainable) entry.reads.emplace_back(use.state, use.state->known_open_step());
    entry.closes |= closes && use.step.has_value() && open_step.value_or(0) > *use.step;
  }
  if (method_.shape == Shape::kUpload) {
    entry.part = static_cast<const v1::UploadWeightsHeader&>(*message_).tensor();
    if (!log.HasRoomFor(heads_, memory_.rows.bytes())) return;
  }
  absl::StatusOr<std::shared_ptr<const LoggedCall>> call = CopyForLog(*core_, method_, *message_, memory_);
  if (!call.ok()) return log.Drop(heads_, Sentence(call.status()));  // a recovery would repeat the step without it
  entry.call = *std::move(call);
  log.Add(std::move(entry));
}

bool Call::TakeNews(const Message& answer) {
  const v1::Head* const head = HeadIn(answer);
  const std::string name = head != nullptr ? head->name() : GetText(*message_, "name").value_or("");
  HeadStates& states = core_->head_states();
  const bool replaced = method_.news == HeadNews::kReplaced;
  std::shared_ptr<HeadState> before;  // which continues at another epoch
  if (method_.news != HeadNews::kDescribed) {
    for (const std::shared_ptr<HeadState>& state : states.AllOf(name)) {
      core_->replay_log().Forget(*state);
      state->End();
      if (replaced) before = state;
    }
    if (replaced && !heads_.empty()) before = heads_[0].state;
  }
  if (head == nullptr) return false;
  const std::shared_ptr<HeadState> known = states.FindKnown(name, head->epoch());
  const bool is_known = known != nullptr && known->is_introduced() && !replaced;
  if (is_known || !core_->replay_log().enabled()) {
    states.Introduce(*head, "", before);
    return false;
  }
  // Asked afterwards: if the server was started again in between, the epoch is not followed, rather than wrongly.
  RunInner(v1::GetServerInfoRequest(), [this, head = *head, before](absl::StatusOr<Answer> info) {
    if (!info.ok() && before == nullptr) return End(info.status());
    const std::string incarnation = info.ok() ? static_cast<const v1::ServerInfo&>(*info->message).incarnation() : "";
    core_->head_states().Introduce(head, incarnation, before);
    End(std::move(answer_));
  });
  return true;
}

void Call::RecoverFrom(const absl::Status& cause) {
  if (!Until().Check().ok()) return End(EndedInRecovery(Until()));
  if (IsRecovered(heads_)) return BeginAfter(kAtOnce);
  ReplayLog& log = core_->replay_log();
  ReplayLog::Gate gate = log.TryClose();
  if (gate == nullptr) return Await([&log] { return log.recovering(); }, [this, cause] { RecoverFrom(cause); });
  std::lock_guard<std::mutex> lock(mutex_);
  RunLocked(core_->recoveries(), kAtOnce, [this, cause, gate = std::move(gate)]() mutable {
    absl::Status recovered = Recover(*core_, std::move(gate), heads_, cause, Until());
    recovered.ok() ? BeginAfter(kAtOnce) : End(std::move(recovered));
  });
}

void Call::End(absl::StatusOr<Answer> result) {
  // The last attempt may still be computing: a decision, or a repetition with the rows, supersedes it.
  if (!result.ok() && is_loss() && mode_ == CallMode::kNormal && attempt_count_ > 0 && MayHaveBeenDone(result.status())) {
    if (const std::optional<int64_t> id = micro_batch(); id.has_value()) {
      for (const HeadUse& use : heads_) {
        if (use.step.has_value()) use.state->NoteAttempt(*use.step, *id, attempt_ + 1, named_attempt_);
      }
    }
  }
  if (is_loss()) core_->EndTurn(this, has_turn_);
  if (mode_ == CallMode::kNormal) core_->Discharge(this);
  const Done done = std::move(done_);
  done(std::move(result));
}

}  // namespace headwater::client::internal
