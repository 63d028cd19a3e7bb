// Head's weights: set, read, saved and restored.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/heads/head.h"
#include "server/model_files/xxh3.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::heads {
namespace {

// A source that fails in the middle leaves the head LOST. Its own reason says that the head is as before.
absl::Status LostWithItsSource(const absl::Status& status) {
  return MakeError(ErrorReason::kEngineFailed,
                   absl::StrCat("the head is lost: part of its weights had been set when their source, which had been read to its "
                                "end before, failed: ",
                                std::string(status.message()), "; restore a checkpoint or set the weights again"));
}

// The error of a call that was to change all weights: the head is LOST if it has `changed`.
absl::Status FailedChange(Head& head, const absl::Status& status, bool changed) {
  const absl::Status failed = AfterTheBeginning(status, changed);
  if (changed) head.MarkLost(failed);
  return failed;
}

}  // namespace

// ---- setting ---------------------------------------------------------------------------------------------------------

absl::StatusOr<HeadInfo> Head::SetTensor(const Epoch& epoch, HeadTensor tensor, DataType data_type, const void* data,
                                         int64_t byte_count, const WaitLimits& limits) {
  const std::vector<TensorUpdate> updates = {UpdateFromMemory(tensor, data_type, data)};
  HEADWATER_RETURN_IF_ERROR(tensors.CheckUpdates(updates));
  HEADWATER_RETURN_IF_ERROR(tensors.CheckBytes(tensor, data_type, byte_count));
  return SetTensors(epoch, updates, limits);
}

absl::StatusOr<HeadInfo> Head::SetTensors(const Epoch& epoch, const std::vector<TensorUpdate>& updates, const WaitLimits& limits) {
  HEADWATER_RETURN_IF_ERROR(tensors.CheckUpdates(updates));
  HEADWATER_RETURN_IF_ERROR(CheckEpoch(epoch));
  HEADWATER_RETURN_IF_ERROR(tensors.ReadThrough(updates));
  HEADWATER_ASSIGN_OR_RETURN(const scheduler::Admission admission, Admit(kWritesWeights, limits));
  bool was_loading = false;
  {
    const Turn turn(sequencer);
    HEADWATER_RETURN_IF_ERROR(Check(epoch, Need::kAnyState, false));
    was_loading = state == HeadState::kLoading;
  }
  const bool sets_weight =
      std::any_of(updates.begin(), updates.end(), [](const TensorUpdate& update) { return update.tensor == HeadTensor::kWeight; });
  bool changed = false;
  bool source_failed = false;
  absl::StatusOr<std::string> checksum = "";
  absl::Status written = tensors.Write(updates, changed, source_failed);
  if (written.ok() && spec_.trainable && !std::holds_alternative<std::monostate>(spec_.optimizer)) {
    written = on_engine->ResetOptimizerState();
  }
  if (written.ok() && sets_weight) {
    checksum = tensors.Checksum();
    written = checksum.status();
  }
  written = AfterTheBeginning(written, changed);
  if (!written.ok()) {
    if (changed && !was_loading) {
      MarkLost(written);
      return source_failed ? LostWithItsSource(written) : written;
    }
    if (changed) {
      const Turn turn(sequencer);
      for (const TensorUpdate& update : updates) weights.MarkUnset(update.tensor);
    }
    return written;
  }
  const Turn turn(sequencer);
  for (const TensorUpdate& update : updates) weights.MarkSet(update.tensor);
  const Epoch epoch_before = current_epoch;
  std::vector<Epoch> recovered_before = std::move(recovers_epochs);
  StartAfresh(steps.open().step);
  if (was_loading) current_epoch = epoch_before;
  if (was_loading) recovers_epochs = std::move(recovered_before);
  if (!weights.HasAllTensors()) state = HeadState::kLoading;
  weights.SetUpdateCount(0);
  weights.NextVersion();
  if (sets_weight) weights.SetChecksum(*std::move(checksum));
  return Describe();
}

// ---- the trainer's own optimizer -------------------------------------------------------------------------------------

absl::StatusOr<ReplaceReply> Head::Replace(const StepKey& key, const ShadowTensor& tensor, const WaitLimits& limits) {
  HEADWATER_RETURN_IF_ERROR(tensors.CheckUpdates({UpdateFromMemory(tensor.tensor, tensor.data_type, tensor.data.get())}));
  HEADWATER_RETURN_IF_ERROR(tensors.CheckBytes(tensor.tensor, tensor.data_type, tensor.byte_count));
  model_files::Xxh3Hasher hasher;
  hasher.Update(tensor.data.get(), tensor.byte_count);
  const std::string checksum = absl::StrCat(DataTypeName(tensor.data_type), ":", hasher.Digest());

  HEADWATER_ASSIGN_OR_RETURN(const scheduler::Admission admission, Admit(kWritesWeights, limits));
  std::vector<TensorUpdate> updates;
  {
    const Turn turn(sequencer);
    HEADWATER_RETURN_IF_ERROR(Check(key.epoch, Need::kReady, true));
    if (const StepRecord* closed = steps.ledger().FindClosed(key.step); closed != nullptr) {
      if (weights.WasReplacedBy(tensor.tensor, checksum)) {
        return ReplaceReply{.closed = true, .replayed = true, .head = Describe()};
      }
      return StepConflict(key.step, closed->state == StepState::kReplaced ? "other weights" : "another call");
    }
    HEADWATER_RETURN_IF_ERROR(steps.ledger().CheckClose(key.step, StepState::kReplaced));
    if (!weights.AddShadow(tensor, checksum)) return ReplaceReply{.head = Describe()};
    // The shadows stay until the step closes: dropping one needs an admission, too.
    for (const auto& [name, entry] : weights.shadows()) {
      updates.push_back(UpdateFromMemory(name, entry.tensor.data_type, entry.tensor.data.get()));
    }
  }
  bool changed = false;
  bool source_failed = false;  // never: they are in memory
  const absl::Status written = tensors.Write(updates, changed, source_failed);
  absl::StatusOr<std::string> stored = written.ok() ? tensors.Checksum() : written;
  if (!stored.ok()) return FailedChange(*this, stored.status(), changed);
  const Turn turn(sequencer);
  weights.SetChecksum(*std::move(stored));
  HEADWATER_RETURN_IF_ERROR(CloseStep(key.step, StepState::kReplaced));
  weights.NextVersion();
  return ReplaceReply{.closed = true, .head = Describe()};
}

bool Head::DropShadow(const void* data) {
  // Not between Replace()'s count of the tensors and its write.
  const absl::StatusOr<scheduler::Admission> admission = Admit(kReadsWeights, /*wait=*/{});
  if (!admission.ok()) return false;
  const Turn turn(sequencer);
  return weights.DropShadow(data);
}

// ---- reading ---------------------------------------------------------------------------------------------------------

absl::Status Head::ReadWeights(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out,
                               std::optional<int64_t> version, const std::optional<Epoch>& epoch, const WaitLimits& limits) const {
  HEADWATER_ASSIGN_OR_RETURN(const scheduler::Admission admission, Admit(kReadsWeights, limits));
  {
    const Turn turn(sequencer);
    // A head that has come back may be read at the epoch that it came back with, before a new owner takes it.
    HEADWATER_RETURN_IF_ERROR(CheckEpoch(epoch));
    HEADWATER_RETURN_IF_ERROR(Check(std::nullopt, Need::kReady, false));
    HEADWATER_RETURN_IF_ERROR(CheckVersion(version));
  }
  return tensors.Read(tensor, element_start, element_count, out);
}

// ---- checkpoints -----------------------------------------------------------------------------------------------------

namespace {

// Save(), by an operation that is admitted for it.
absl::StatusOr<SavedCheckpoint> SaveNow(Head& head, const std::optional<Epoch>& epoch, checkpoint::CheckpointStore& store,
                                        const std::string& checkpoint_name, bool overwrite) {
  checkpoint::CheckpointInfo info;
  int64_t version = 0;
  {
    const Turn turn(head.sequencer);
    if (head.spec().trainable && !epoch.has_value()) {
      return MakeError(ErrorReason::kMissingField, "epoch is required for a trainable head", {{"field", "epoch"}});
    }
    HEADWATER_RETURN_IF_ERROR(head.Check(epoch, Need::kReady, false));
    info.step = head.steps.open().step;
    info.update_count = head.weights.update_count();
    version = head.weights.version();
  }
  info.name = checkpoint_name;
  HEADWATER_ASSIGN_OR_RETURN(const int64_t total_bytes, head.tensors.Save(store, info, overwrite));
  std::string checkpoints = store.Steps(head.name().tenant, head.name().head);
  const Turn turn(head.sequencer);
  head.weights.MarkSaved(version, info.step);
  head.steps.ledger().SetCheckpoints(std::move(checkpoints));
  return SavedCheckpoint{info.step, total_bytes};
}

// The epoch of a head that is to be saved because it has changed.
std::optional<Epoch> EpochIfChanged(const Head& head) {
  const Turn turn(head.sequencer);
  const bool changed = !head.retired && head.state == HeadState::kReady && !head.weights.IsSaved(head.steps.open().step);
  return changed ? std::optional(head.current_epoch) : std::nullopt;
}

}  // namespace

absl::StatusOr<SavedCheckpoint> Head::Save(const std::optional<Epoch>& epoch, checkpoint::CheckpointStore& store,
                                           const std::string& checkpoint_name, bool overwrite, const WaitLimits& limits) {
  HEADWATER_ASSIGN_OR_RETURN(const scheduler::Admission admission, Admit(kSaves, limits));
  return SaveNow(*this, epoch, store, checkpoint_name, overwrite);
}

absl::StatusOr<bool> Head::SaveIfChanged(checkpoint::CheckpointStore& store, const std::string& checkpoint_name,
                                         absl::Time deadline, bool waits) {
  if (!EpochIfChanged(*this).has_value()) return false;
  if (observability::MonotonicNow() >= deadline) {
    return MakeError(ErrorReason::kDeadlineExceeded, absl::StrCat("no time is left to save ", name_.ToString()));
  }
  HEADWATER_ASSIGN_OR_RETURN(const scheduler::Admission admission, Admit(kSaves, {waits ? deadline : absl::InfinitePast()}));
  const std::optional<Epoch> epoch = EpochIfChanged(*this);
  if (!epoch.has_value()) return false;
  HEADWATER_RETURN_IF_ERROR(SaveNow(*this, epoch, store, checkpoint_name, /*overwrite=*/true).status());
  return true;
}

void Head::CheckpointRemoved(const checkpoint::CheckpointStore& store) {
  std::string checkpoints = store.Steps(name_.tenant, name_.head);
  const Turn turn(sequencer);
  weights.ForgetSaved();
  steps.ledger().SetCheckpoints(std::move(checkpoints));
}

absl::StatusOr<HeadInfo> Head::Restore(const Epoch& epoch, checkpoint::CheckpointStore& store, const std::string& checkpoint_name,
                                       const WaitLimits& limits, bool comes_back) {
  HEADWATER_ASSIGN_OR_RETURN(const scheduler::Admission admission, Admit(kWritesWeights, limits));
  HEADWATER_RETURN_IF_ERROR(CheckEpoch(comes_back ? std::nullopt : std::optional(epoch)));
  HEADWATER_ASSIGN_OR_RETURN(std::string note, tensors.CompareNumerics(store, checkpoint_name, /*must_agree=*/deterministic));
  const absl::StatusOr<checkpoint::CheckpointInfo> info = store.Load(name_.tenant, name_.head, checkpoint_name, *on_engine);
  if (!info.ok()) return AfterChange(info.status());
  const absl::Status emptied = spec_.trainable ? on_engine->ZeroGradient() : absl::OkStatus();
  absl::StatusOr<std::string> checksum = emptied.ok() ? tensors.Checksum() : emptied;
  if (!checksum.ok()) return FailedChange(*this, checksum.status(), /*changed=*/true);
  std::string checkpoints = store.Steps(name_.tenant, name_.head);
  tensors.ContinueRun(store, *info, comes_back);
  const Turn turn(sequencer);
  StartAfresh(info->step);
  steps.ledger().SetCheckpoints(std::move(checkpoints));
  restore_note_ = std::move(note);
  if (comes_back && spec_.trainable) {
    state = HeadState::kRestored;
    state_cause = checkpoint_name;
  }
  weights.MarkSet(HeadTensor::kWeight);
  if (spec_.has_bias) weights.MarkSet(HeadTensor::kBias);
  weights.SetUpdateCount(info->update_count);
  weights.NextVersion();
  weights.SetChecksum(*std::move(checksum));
  // A head comes back from its newest checkpoint. A trainer may choose an older one, which a restart would not find.
  if (comes_back) weights.MarkSaved(weights.version(), info->step);
  return Describe();
}

}  // namespace headwater::heads
