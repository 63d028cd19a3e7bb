#include "server/heads/head_core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/heads/head.h"
#include "server/heads/steps/commit_arguments.h"

namespace headwater::heads {
namespace {

// Begins the reason why a held micro-batch cannot be committed.
constexpr char kNeedsTeacher[] =
    "a held micro-batch is computed at its commit, and needs its teacher's head until then; discard it, or keep the head: ";

}  // namespace

absl::Status HeadDeleted(const HeadName& name) {
  return MakeError(ErrorReason::kHeadNotFound, absl::StrCat("there is no head ", name.ToString(), "; it has been deleted"),
                   {{"head", name.ToString()}});
}

HeadCore::HeadCore(const HeadName& head_name, const HeadSpec& head_spec, const HeadLimits& head_limits, LossEngine& head_engine,
                   std::shared_ptr<scheduler::Sequencer> head_sequencer, std::unique_ptr<EngineHead> head_on_engine)
    : name(head_name),
      spec(head_spec),
      limits(head_limits),
      create_time(absl::Now()),
      engine(head_engine),
      sequencer_owner(std::move(head_sequencer)),
      on_engine(std::move(head_on_engine)),
      tensors(name, spec, engine, *on_engine),
      steps(name, spec, limits),
      weights(spec.has_bias),
      epoch(NewEpoch()) {}

// ---- what every call begins with -------------------------------------------------------------------------------------

absl::Status HeadCore::EpochError(const Epoch& named) const {
  ErrorMetadata metadata = {{"expected", EpochToHex(epoch)}, {"actual", EpochToHex(named)}, {"headEpoch", EpochToHex(epoch)}};
  if (spec.trainable) {
    metadata["openStep"] = absl::StrCat(steps.open().step);
    metadata["checkpoints"] = steps.ledger().checkpoints();
  }
  return MakeError(
      ErrorReason::kEpochFenced,
      absl::StrCat("another run owns ", name.ToString(),
                   " now: since this client opened the head, it was taken over, restored or created anew, or its weights were set. "
                   "Stop, or open the head again, take it, and start the step over"),
      std::move(metadata));
}

absl::Status HeadCore::LostError() const {
  const std::string& checkpoints = steps.ledger().checkpoints();
  ErrorMetadata metadata = {{"head", name.ToString()},
                            {"headEpoch", EpochToHex(epoch)},
                            {"openStep", absl::StrCat(steps.open().step)},
                            {"checkpoints", checkpoints}};
  if (state == HeadState::kLost) {
    return MakeError(ErrorReason::kStepLost,
                     absl::StrCat(name.ToString(), " is lost since the engine failed (", state_cause,
                                  "); restore a checkpoint or set its weights again"),
                     std::move(metadata));
  }
  metadata["restoredStep"] = absl::StrCat(steps.open().step);
  metadata["checkpoint"] = state_cause;
  return MakeError(
      ErrorReason::kStepLost,
      absl::StrCat("the server has been started again: ", name.ToString(), " came back at step ", steps.open().step,
                   " from checkpoint ", state_cause,
                   "; take the head to go on from there, or restore one of its checkpoints, with their steps ", checkpoints),
      std::move(metadata));
}

absl::Status HeadCore::Check(const Epoch* expected, Need need, bool for_step) {
  steps.Settle();
  if (retired) return HeadDeleted(name);
  if (for_step && !spec.trainable) {
    return MakeError(ErrorReason::kHeadNotTrainable, absl::StrCat(name.ToString(), " is frozen: it has no steps"),
                     {{"head", name.ToString()}});
  }
  if (state == HeadState::kRestored && expected != nullptr && (need != Need::kAnyState || *expected != epoch)) return LostError();
  if (expected != nullptr && *expected != epoch) return EpochError(*expected);
  if (need != Need::kAnyState && state == HeadState::kLost) return LostError();
  if (need == Need::kReady && state == HeadState::kLoading) {
    const char* missing = weights.has_weight() ? "bias" : "weight";
    return MakeError(ErrorReason::kWeightsNotLoaded, absl::StrCat(name.ToString(), " has no ", missing, " yet"),
                     {{"head", name.ToString()}, {"missing", missing}});
  }
  return absl::OkStatus();
}

HeadInfo HeadCore::Describe() const {
  HeadInfo info;
  info.name = name;
  info.spec = spec;
  info.shards.assign(on_engine->shards().begin(), on_engine->shards().end());
  info.plan = on_engine->plan();
  info.create_time = create_time;
  info.epoch = epoch;
  info.recovers_epochs = recovers_epochs;
  info.state = state;
  info.weight_version = weights.version();
  if (spec.trainable) info.open_step = steps.open().step;
  info.waiting_count = steps.waiting_count();
  if (spec.trainable) info.unsaved_since = weights.unsaved_since();
  info.weight_checksum = weights.checksum();
  info.restore_note = restore_note;
  if (state == HeadState::kRestored) info.restored_checkpoint = state_cause;
  return info;
}

bool HeadCore::InUse() {
  steps.Settle();
  return running_calls > 0 || use_count > 0 || steps.HasContributions();
}

// ---- admission -------------------------------------------------------------------------------------------------------

void AddNeed(const HeadCore& head, const scheduler::Uses& uses, scheduler::Needs& needs) {
  const auto known = std::find_if(needs.begin(), needs.end(), [&head](const auto& need) { return need.record == head.record; });
  if (known == needs.end()) {
    needs.push_back({head.record, uses});
  } else {
    known->uses.weights = std::max(known->uses.weights, uses.weights);
    known->uses.accumulator = std::max(known->uses.accumulator, uses.accumulator);
  }
}

absl::StatusOr<scheduler::Admission> HeadCore::Admit(scheduler::Uses uses, const WaitLimits& wait) {
  const auto needs = [&]() -> absl::StatusOr<scheduler::Needs> {
    if (retired) return HeadDeleted(name);
    return scheduler::Needs{{record, uses}};
  };
  return sequencer.Acquire(needs, wait, kWaitsForHead);
}

// ---- changes ---------------------------------------------------------------------------------------------------------

void HeadCore::StepChanged() {
  MicroBatchChanged();
  step_changed.WakeAll();
}

absl::Status HeadCore::CloseStep(int64_t step, StepState how) {
  if (absl::Status status = steps.Close(step, how); !status.ok()) return status;
  weights.EndStep();
  StepChanged();
  return absl::OkStatus();
}

absl::Status HeadCore::AfterChange(const absl::Status& status) {
  if (IsEngineFailure(status)) MarkLost(status);
  return status;
}

void HeadCore::MarkLost(const absl::Status& cause) {
  const Turn turn(sequencer);
  steps.Reset(steps.open().step);
  weights.Forget();
  state = HeadState::kLost;
  state_cause = std::string(cause.message());
  StepChanged();
}

void HeadCore::StartAfresh(int64_t step) {
  steps.Reset(step);
  weights.EndStep();
  epoch = NewEpoch();
  recovers_epochs.clear();
  state = HeadState::kReady;
  state_cause.clear();
  StepChanged();
}

void HeadCore::MarkRetired() {
  retired = true;
  StepChanged();
  scheduler::Sequencer::Reconsider(*record);
}

bool HeadCore::IsItsTurn(const StepKey& key, int64_t micro_batch) const {
  // Only a missing predecessor is waited for; the call itself reports anything else.
  if (!in_order() || retired || state != HeadState::kReady || key.epoch != epoch || key.step != steps.open().step) return true;
  return steps.IsDue(micro_batch);
}

// ---- held rows, and additions in order -------------------------------------------------------------------------------

void HeldTeachers::Find(const HeldRows& held, scheduler::Needs& needs) {
  for (std::shared_ptr<Head>& head : std::exchange(heads_, {})) Turn::Free(std::move(head));
  for (const std::weak_ptr<Head>& teacher : held.teachers) {
    const std::shared_ptr<Head>& head = heads_.emplace_back(teacher.lock());
    if (head != nullptr) AddNeed(head->core(), head->core().reads(), needs);
  }
  versions_ = held.teacher_weight_versions;
}

absl::Status HeldTeachers::Check() const {
  for (size_t i = 0; i < heads_.size(); ++i) {
    if (heads_[i] == nullptr) {
      return MakeError(ErrorReason::kHeadNotFound, absl::StrCat(kNeedsTeacher, "it has been deleted"));
    }
    HeadCore& teacher = heads_[i]->core();
    if (absl::Status status = teacher.Check(nullptr, Need::kReady, false); !status.ok()) {
      return MakeError(GetErrorReason(status), absl::StrCat(kNeedsTeacher, std::string(status.message())),
                       GetErrorMetadata(status));
    }
    const int64_t version = teacher.weights.version();
    if (version == versions_[i]) continue;
    return MakeError(
        ErrorReason::kWeightVersionMismatch,
        absl::StrCat("the micro-batch is held, and was computed with version ", versions_[i], " of the weights of ",
                     teacher.name.ToString(), ", they are of version ", version, " now; discard it and submit it again"),
        {{"head", teacher.name.ToString()}, {"expected", absl::StrCat(versions_[i])}, {"actual", absl::StrCat(version)}});
  }
  return absl::OkStatus();
}

std::shared_ptr<const WaitingAddition> HeadCore::NextInOrder() const {
  return !in_order() || retired || state != HeadState::kReady ? nullptr
                                                              : steps.window()->Next(steps.open().state == StepState::kSealed);
}

namespace {

// `yields`: stops at a head whose weights another operation writes, or is to write first.
absl::Status AddInOrder(HeadCore& head, const WaitLimits& limits, bool yields) {
  if (!head.in_order()) return absl::OkStatus();
  while (true) {
    std::shared_ptr<const WaitingAddition> next;
    HeldTeachers teachers;
    const auto needs = [&]() -> absl::StatusOr<scheduler::Needs> {
      scheduler::Needs needed;
      Turn::Free(std::exchange(next, head.NextInOrder()));
      if (next != nullptr && yields && scheduler::Sequencer::IsWritten(*head.record)) Turn::Free(std::exchange(next, nullptr));
      if (next == nullptr) return needed;
      AddNeed(head, kChangesGradient, needed);
      teachers.Find(next->rows, needed);
      return needed;
    };
    const absl::StatusOr<scheduler::Admission> admission = head.sequencer.Acquire(needs, limits, kWaitsForHead);
    if (!admission.ok()) return admission.status();
    if (next == nullptr) return absl::OkStatus();
    absl::Status teacher;
    {
      const Turn turn(head.sequencer);
      teacher = teachers.Check();
    }
    if (!teacher.ok()) {
      // It was committed, but its addition can no longer be computed.
      return head.AfterChange(MakeError(ErrorReason::kEngineFailed, absl::StrCat("micro-batch ", next->micro_batch,
                                                                                 " was committed and waited for its turn, but ",
                                                                                 std::string(teacher.message()))));
    }
    if (absl::Status status = head.AfterChange(AddHeld(next->rows, next->arguments, head.engine)); !status.ok()) return status;
    const Turn turn(head.sequencer);
    head.steps.MarkAdded(next->micro_batch);
    head.MicroBatchChanged();
  }
}

}  // namespace

absl::Status AddInOrder(HeadCore& head, const WaitLimits& limits) { return AddInOrder(head, limits, /*yields=*/false); }

absl::Status AddInOrder(const std::vector<HeadCore*>& heads, const WaitLimits& limits) {
  for (HeadCore* head : heads) {
    absl::Status status = AddInOrder(*head, limits, /*yields=*/true);
    if (IsEngineFailure(status)) return status;
  }
  return absl::OkStatus();
}

}  // namespace headwater::heads
