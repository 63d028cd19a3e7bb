#include "trainer.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "absl/strings/str_cat.h"

namespace headwater::history {
namespace {

constexpr int kMaxSessionLosses = 3;
constexpr int64_t kLogBytes[] = {1 << 20, 1 << 20, 250};  // the last is too small for most steps

// Two of them in turn.
std::string NameOfCheckpoint(int64_t step) { return absl::StrCat("s", step % 2); }

bool IsOneOf(const std::string& reason, std::initializer_list<const char*> reasons) {
  return std::find(reasons.begin(), reasons.end(), reason) != reasons.end();
}

}  // namespace

Trainer::Trainer(int rank, Job& job, uint64_t seed)
    : rank_(rank), job_(job), random_(seed), log_(std::make_unique<ClientLog>(kLogBytes[seed % 3])) {}

void Trainer::Die() {
  epoch_ = kNoEpoch;
  found_ = ' ';
  session_ = kNoSession;
  wants_save_ = false;
  log_ = std::make_unique<ClientLog>(kLogBytes[0]);
  call_.reset();
  attempt_.reset();
  job_.ready.erase(rank_);
  StartRound();
}

void Trainer::StartRound() {
  round_ = job_.round;
  step_ = job_.step;
  micro_batches_.clear();
  replays_.clear();
  sealed_ = false;
}

// ---- choosing the next call ------------------------------------------------------------------------------------------

Event Trainer::WithEpoch(Event event) const {
  for (Target& target : event.targets) target.epoch = epoch_;
  return event;
}

Event Trainer::Delete() const {
  Event event = WithEpoch(OnHead(Op::kDelete));
  event.force = true;
  return event;
}

// What becomes of the head that was found, if this trainer is the one to do something about it.
std::optional<Event> Trainer::ChooseFind() const {
  if (found_ == ' ') return OnHead(Op::kGetHead);
  if (found_ == 'B') return WithEpoch(OnHead(Op::kTake));
  if (rank_ != 0) return OnHead(Op::kGetHead);
  switch (found_) {
    case '-': {
      Event event = OnHead(Op::kCreate);
      event.if_exists = heads::IfExists::kAttachIfSameSpec;
      return event;
    }
    case 'L': {
      Event event = WithEpoch(OnHead(Op::kSetTensors));
      event.tensors = {HeadTensor::kWeight};
      if (job_.spec().has_bias) event.tensors = {HeadTensor::kBias, HeadTensor::kWeight};
      event.numbers = job_.initial_numbers();
      return event;
    }
    default:
      return ChooseRepair();
  }
}

// The newest checkpoint, or else a new head.
Event Trainer::ChooseRepair() const {
  if (job_.saved.empty()) return Delete();
  Event event = WithEpoch(OnHead(Op::kRestore));
  event.checkpoint = NameOfCheckpoint(*job_.saved.rbegin());
  return event;
}

// What nothing depends on.
std::optional<Event> Trainer::ChooseExtra() {
  switch (Pick(60)) {
    case 0:
      return OnHead(Op::kGetHead);
    case 1:
      return WithEpoch(OnHead(Op::kGetSteps));
    case 2:
      return WithEpoch(OnHead(Op::kReadWeights));
    case 3:
      return OnStep(Op::kGradientNorm);
    case 4:
    case 5:
    case 6:
      if (session_ == kNoSession) return std::nullopt;
      {
        Event event;
        event.kind = "trainer";
        event.op = Pick(3) == 0 ? Op::kCloseSession : Op::kRenewSession;
        event.session = session_;
        return event;
      }
    case 7: {  // the rows once more, as a recomputed forward sends them
      std::vector<int64_t> done;
      for (const auto& [id, micro_batch] : micro_batches_) {
        if (micro_batch.state == State::kDone && job_.KindOf(step_, id) == Job::Kind::kEager) done.push_back(id);
      }
      if (done.empty()) return std::nullopt;
      const int64_t id = done[static_cast<size_t>(Pick(static_cast<int>(done.size())))];
      Event event = WithEpoch(job_.Compute(step_, id));
      event.attempt = micro_batches_[id].attempt;
      return event;
    }
    case 8:  // the trainer's own wish, not a repair
      if (rank_ != 0 || job_.saved.empty()) return std::nullopt;
      return ChooseRepair();
    case 9:
      if (rank_ != 0 || Pick(3) > 0) return std::nullopt;
      return Delete();
    default:
      return std::nullopt;
  }
}

std::optional<Event> Trainer::ChooseClose() {
  if (rank_ != 0 || static_cast<int>(job_.ready.size()) < job_.trainers()) return std::nullopt;
  const Job::End end = job_.EndOf(step_);
  if ((end == Job::End::kSealAndApply || end == Job::End::kReplace) && !sealed_) return WithEpoch(job_.Seal(step_));
  if (sealed_ && Pick(2) == 0) return OnStep(Pick(3) == 0 ? Op::kGradientNorm : Op::kReadGradient);
  return WithEpoch(job_.Close(step_, sealed_));
}

std::optional<Event> Trainer::Choose() {
  if (epoch_ == kNoEpoch || found_ != 'R') return ChooseFind();
  if (!replays_.empty()) return WithEpoch(replays_.front());
  if (rank_ == 0 && wants_save_) {
    Event event = WithEpoch(OnHead(Op::kSave));
    event.checkpoint = NameOfCheckpoint(step_);
    event.overwrite = true;
    event.disk_full = Pick(12) == 0;
    event.disk_left = event.disk_full ? Pick(200) : 0;
    return event;
  }
  if (std::optional<Event> extra = ChooseExtra(); extra.has_value()) return extra;
  for (int64_t id = rank_; id < Job::kMicroBatches; id += job_.trainers()) {
    MicroBatch& micro_batch = micro_batches_[id];
    if (micro_batch.state == State::kDone) continue;
    Event event = micro_batch.state == State::kNew ? job_.Compute(step_, id) : job_.Decide(step_, id);
    event.attempt = micro_batch.attempt;
    return WithEpoch(event);
  }
  job_.ready.insert(rank_);
  return ChooseClose();
}

bool Trainer::NeedsSession(const Event& event) {
  return (event.op == Op::kCall && event.is_explicit) || event.op == Op::kCommit || event.op == Op::kDiscard;
}

// As the client says: what another execution would do otherwise is repeated only if nothing was done.
bool Trainer::IsSafe(const Event& event) { return event.op != Op::kTake && event.op != Op::kDelete && event.op != Op::kRestore; }

std::optional<Event> Trainer::Next() {
  if (attempt_.has_value()) return std::nullopt;
  if (round_ != job_.round) {
    call_.reset();
    log_->Forget();
    StartRound();
  }
  if (!call_.has_value()) {
    if (step_ != job_.step) {
      StartRound();
      log_->StepIsOpen(step_);
    }
    call_ = Choose();
    if (!call_.has_value()) return std::nullopt;
    is_replay_ = !replays_.empty() && found_ == 'R' && epoch_ != kNoEpoch;
    retries_.emplace(RetriesOf(IsSafe(*call_)));
    attempt_count_ = session_losses_ = 0;
  }
  if (NeedsSession(*call_)) {
    if (session_ == kNoSession) {
      attempt_ = Event();
      attempt_->kind = "trainer";
      attempt_->op = Op::kOpenSession;
      attempt_->seconds = 10 + Pick(30);
      return attempt_;
    }
    call_->session = session_;
  }
  attempt_ = call_;
  // In a recovery the attempt stays: the decision that follows names it.
  if (call_->op == Op::kCall && !is_replay_) attempt_->attempt += attempt_count_;
  ++attempt_count_;
  return attempt_;
}

// ---- what became of it -----------------------------------------------------------------------------------------------

void Trainer::Failed(const std::string& reason) {
  if (!attempt_.has_value()) return;
  const Event attempt = *std::exchange(attempt_, std::nullopt);
  if (attempt.op == Op::kOpenSession) return;  // another time
  if (NeedsSession(attempt) && reason == "SESSION_NOT_FOUND" && ++session_losses_ <= kMaxSessionLosses) {
    session_ = kNoSession;
    return;
  }
  if (round_ == job_.round && reason != "DEADLINE" && retries_->AfterFailure(ToStatus(reason)).has_value()) return;
  const Event call = *std::exchange(call_, std::nullopt);
  if (round_ != job_.round) return;
  if (call.op == Op::kCall) Current(call).attempt = attempt.attempt;
  GiveUp(call, reason);
}

// The call failed for good: what a training loop does about it.
void Trainer::GiveUp(const Event& call, const std::string& reason) {
  if (call.op == Op::kRenewSession || call.op == Op::kCloseSession) {
    session_ = kNoSession;
    return;
  }
  if (found_ != 'R' ||
      IsOneOf(reason, {"STEP_LOST", "EPOCH_FENCED", "HEAD_NOT_FOUND", "WEIGHTS_NOT_LOADED", "STEP_MISMATCH", "STEP_CONFLICT"})) {
    epoch_ = kNoEpoch;
    found_ = reason == "HEAD_NOT_FOUND" ? '-' : ' ';
    return;
  }
  if (is_replay_ && !reason.empty() && reason != "DEADLINE") {
    job_.GoBackTo(step_);  // the log does not help: the step is computed anew
    return;
  }
  if (call.op == Op::kSave) {
    wants_save_ = false;
    return;
  }
  if (!call.is_call() && call.op != Op::kCommit && call.op != Op::kDiscard) return;
  if (reason == "STEP_SEALED" && job_.KindOf(step_, call.micro_batch) == Job::Kind::kDiscarded) {
    Current(call).state = State::kDone;  // it is not in the step, and nothing comes into it any more
    return;
  }
  // A decision that came too late, or an attempt that another one of a life before has overtaken: its rows once more.
  if (IsOneOf(reason, {"MICRO_BATCH_DISCARDED", "MICRO_BATCH_NOT_FOUND", "NOT_SESSION_OWNER", "ATTEMPT_SUPERSEDED"})) {
    Current(call).state = State::kNew;
    ++Current(call).attempt;
  } else if (call.op == Op::kCall) {
    ++Current(call).attempt;
  }
}

void Trainer::Succeeded(const Reply& reply, int life) {
  if (!attempt_.has_value()) return;
  const Event attempt = *std::exchange(attempt_, std::nullopt);
  if (attempt.op == Op::kOpenSession) {
    session_ = static_cast<int>(reply.numbers.at(1));
    return;
  }
  call_.reset();
  if (round_ == job_.round) Finish(attempt, reply, life);
}

// What a head was found to be: numbers of an answer that says so.
void Trainer::Found(const std::vector<double>& head, int life) {
  const int epoch = static_cast<int>(head[0]);
  const int64_t open_step = static_cast<int64_t>(head[2]);
  const char before = std::exchange(found_, static_cast<char>(head[1]));
  if (found_ == 'R' && before == 'R' && epoch == epoch_) return;
  epoch_ = epoch;
  if (found_ != 'R') return;
  // In the same life of the server another epoch is one that this job has made, or somebody else's.
  if (epoch != job_.epoch && life == job_.life && !job_.own_epochs.contains(epoch)) {
    found_ = 'F';
    return;
  }
  if (open_step == job_.step + 1 && rank_ != 0) {  // its end is not acknowledged to the one who made it
    epoch_ = kNoEpoch;
    found_ = ' ';
    return;
  }
  job_.epoch = epoch;
  job_.life = life;
  if (open_step != job_.step) {
    job_.GoBackTo(open_step);  // from the checkpoint of that name that the trainers have
    return;
  }
  if (!log_->IsComplete(step_)) return job_.GoBackTo(step_);
  const std::vector<Event> entries = log_->Entries();
  replays_.assign(entries.begin(), entries.end());
  sealed_ = false;
}

void Trainer::Finish(const Event& call, const Reply& reply, int life) {
  if (is_replay_ && !replays_.empty()) {
    replays_.pop_front();
    return;
  }
  switch (call.op) {
    case Op::kGetHead:
    case Op::kCreate:
    case Op::kTake:
    case Op::kSetTensors:
    case Op::kRestore:
      if (call.op == Op::kSetTensors) wants_save_ = Pick(3) > 0;
      if (call.op != Op::kGetHead) job_.own_epochs.insert(static_cast<int>(reply.numbers[0]));
      return Found(reply.numbers, life);
    case Op::kDelete:
      job_.saved.clear();
      found_ = '-';
      epoch_ = kNoEpoch;
      return;
    case Op::kCloseSession:
      session_ = kNoSession;
      return;
    case Op::kSave:
      wants_save_ = false;
      job_.saved.insert(step_);
      return;
    case Op::kSeal:
      sealed_ = true;
      return;
    case Op::kAddGradient:
      Current(call).state = State::kDone;
      return log_->Add(call);
    case Op::kCall: {
      MicroBatch& micro_batch = Current(call);
      if (micro_batch.state == State::kDone) return;
      const bool is_staged = static_cast<int>(reply.numbers[reply.numbers.size() - 5]) == 2;
      if (call.is_explicit && !is_staged && job_.KindOf(step_, call.micro_batch) == Job::Kind::kDiscarded) {
        problem_ = absl::StrCat("  micro-batch ", call.micro_batch, " is committed, and nobody has asked for that\n");
      }
      micro_batch.attempt = call.attempt;
      micro_batch.state = is_staged ? State::kStaged : State::kDone;
      return log_->Add(call);
    }
    case Op::kCommit:
    case Op::kDiscard:
      Current(call).state = State::kDone;
      return log_->Add(call);
    case Op::kApply:
    case Op::kDiscardGradient:
    case Op::kReplace:
      job_.GoOn();
      StartRound();
      log_->StepIsOpen(step_);
      wants_save_ = Pick(3) == 0;
      return;
    default:
      return;
  }
}

}  // namespace headwater::history
