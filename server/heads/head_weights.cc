// Head's weights: set, read, saved and restored.
#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/heads/head.h"
#include "server/heads/head_core.h"
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

// Swaps the shadow in; the sealed step is to be closed then. By an operation that writes the weights.
absl::Status WriteShadow(HeadCore& core) {
  std::vector<TensorUpdate> updates;
  WeightRecord::Shadows shadows;
  {
    const Turn turn(core.sequencer);
    shadows = core.weights.shadows();
  }
  for (const auto& [name, entry] : shadows)
    updates.push_back(UpdateFromMemory(name, entry.tensor.data_type, entry.tensor.data.get()));
  bool changed = false;
  bool source_failed = false;  // never: they are in memory
  const absl::Status written = core.tensors.Write(updates, changed, source_failed);
  absl::StatusOr<std::string> checksum = written.ok() ? core.tensors.Checksum() : written;
  if (!checksum.ok()) {
    const absl::Status failed = AfterTheBeginning(checksum.status(), changed);
    if (changed) core.MarkLost(failed);
    return failed;
  }
  const Turn turn(core.sequencer);
  core.weights.SetChecksum(*std::move(checksum));
  return absl::OkStatus();
}

}  // namespace

// ---- setting ---------------------------------------------------------------------------------------------------------

absl::StatusOr<HeadInfo> Head::SetTensor(const Epoch& epoch, HeadTensor tensor, DataType data_type, const void* data,
                                         int64_t byte_count, const WaitLimits& limits) {
  const std::vector<TensorUpdate> updates = {UpdateFromMemory(tensor, data_type, data)};
  if (absl::Status status = core_->tensors.CheckUpdates(updates); !status.ok()) return status;
  if (absl::Status status = core_->tensors.CheckBytes(tensor, data_type, byte_count); !status.ok()) return status;
  return SetTensors(epoch, updates, limits);
}

absl::StatusOr<HeadInfo> Head::SetTensors(const Epoch& epoch, const std::vector<TensorUpdate>& updates, const WaitLimits& limits) {
  if (absl::Status status = core_->tensors.CheckUpdates(updates); !status.ok()) return status;
  if (absl::Status status = CheckEpoch(epoch); !status.ok()) return status;
  if (absl::Status status = core_->tensors.ReadThrough(updates); !status.ok()) return status;
  HeadCore& core = *core_;
  const absl::StatusOr<scheduler::Admission> admission = core.Admit(kWritesWeights, limits);
  if (!admission.ok()) return admission.status();
  bool was_loading = false;
  {
    const Turn turn(core.sequencer);
    if (absl::Status status = core.Check(&epoch, Need::kAnyState, false); !status.ok()) return status;
    was_loading = core.state == HeadState::kLoading;
  }
  const bool sets_weight =
      std::any_of(updates.begin(), updates.end(), [](const TensorUpdate& update) { return update.tensor == HeadTensor::kWeight; });
  bool changed = false;
  bool source_failed = false;
  std::string checksum;
  absl::Status written = core.tensors.Write(updates, changed, source_failed);
  if (written.ok() && core.spec.trainable && !std::holds_alternative<std::monostate>(core.spec.optimizer)) {
    written = core.on_engine->ResetOptimizerState();
  }
  if (written.ok() && sets_weight) {
    absl::StatusOr<std::string> computed = core.tensors.Checksum();
    if (computed.ok()) checksum = *std::move(computed);
    written = computed.status();
  }
  written = AfterTheBeginning(written, changed);
  if (!written.ok()) {
    if (changed && !was_loading) {
      core.MarkLost(written);
      return source_failed ? LostWithItsSource(written) : written;
    }
    if (changed) {
      const Turn turn(core.sequencer);
      for (const TensorUpdate& update : updates) core.weights.MarkUnset(update.tensor);
    }
    return written;
  }
  const Turn turn(core.sequencer);
  for (const TensorUpdate& update : updates) core.weights.MarkSet(update.tensor);
  const Epoch epoch_before = core.epoch;
  std::vector<Epoch> recovered_before = std::move(core.recovers_epochs);
  core.StartAfresh(core.steps.open().step);
  if (was_loading) core.epoch = epoch_before;
  if (was_loading) core.recovers_epochs = std::move(recovered_before);
  if (!core.weights.HasAllTensors()) core.state = HeadState::kLoading;
  core.weights.SetUpdateCount(0);
  core.weights.NextVersion();
  if (sets_weight) core.weights.SetChecksum(std::move(checksum));
  return core.Describe();
}

// ---- the trainer's own optimizer -------------------------------------------------------------------------------------

absl::StatusOr<ReplaceReply> Head::Replace(const StepKey& key, const ShadowTensor& tensor, const WaitLimits& limits) {
  if (absl::Status status = core_->tensors.CheckUpdates({UpdateFromMemory(tensor.tensor, tensor.data_type, tensor.data.get())});
      !status.ok()) {
    return status;
  }
  if (absl::Status status = core_->tensors.CheckBytes(tensor.tensor, tensor.data_type, tensor.byte_count); !status.ok())
    return status;
  model_files::Xxh3Hasher hasher;
  hasher.Update(tensor.data.get(), tensor.byte_count);
  const std::string checksum = absl::StrCat(DataTypeName(tensor.data_type), ":", hasher.Digest());

  HeadCore& core = *core_;
  const absl::StatusOr<scheduler::Admission> admission = core.Admit(kWritesWeights, limits);
  if (!admission.ok()) return admission.status();
  std::map<HeadTensor, std::string> checksums;
  {
    const Turn turn(core.sequencer);
    if (absl::Status status = core.Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
    const std::optional<StepRecord>& last_closed = core.steps.ledger().last_closed();
    if (last_closed.has_value() && last_closed->step == key.step) {
      if (core.weights.WasReplacedBy(tensor.tensor, checksum)) {
        return ReplaceReply{.closed = true, .replayed = true, .head = core.Describe()};
      }
      return MakeError(ErrorReason::kStepConflict,
                       absl::StrCat("step ", key.step, " was closed by ",
                                    last_closed->state == StepState::kReplaced ? "other weights" : "another call",
                                    "; the open step is ", core.steps.open().step),
                       {{"step", absl::StrCat(key.step)}, {"openStep", absl::StrCat(core.steps.open().step)}});
    }
    if (absl::Status status = core.steps.ledger().CheckClose(key.step, StepState::kReplaced); !status.ok()) return status;
    if (!core.weights.AddShadow(tensor, checksum)) return ReplaceReply{.head = core.Describe()};
    for (const auto& [name, entry] : core.weights.shadows()) checksums[name] = entry.checksum;
  }
  if (absl::Status status = WriteShadow(core); !status.ok()) return status;
  const Turn turn(core.sequencer);
  if (absl::Status status = core.CloseStep(key.step, StepState::kReplaced); !status.ok()) return status;
  core.weights.MarkReplaced(std::move(checksums));
  core.weights.NextVersion();
  return ReplaceReply{.closed = true, .head = core.Describe()};
}

bool Head::DropShadow(const void* data) {
  // Not between Replace()'s count of the tensors and its write.
  const absl::StatusOr<scheduler::Admission> admission = core_->Admit(kReadsWeights, /*wait=*/{});
  if (!admission.ok()) return false;
  const Turn turn(core_->sequencer);
  return core_->weights.DropShadow(data);
}

// ---- reading ---------------------------------------------------------------------------------------------------------

absl::Status Head::ReadWeights(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out,
                               std::optional<int64_t> version, const std::optional<Epoch>& epoch, const WaitLimits& limits) const {
  HeadCore& core = *core_;
  const absl::StatusOr<scheduler::Admission> admission = core.Admit(kReadsWeights, limits);
  if (!admission.ok()) return admission.status();
  {
    const Turn turn(core.sequencer);
    // A head that has come back may be read at the epoch that it came back with, before a new owner takes it.
    if (epoch.has_value()) {
      if (absl::Status status = core.Check(&*epoch, Need::kAnyState, false); !status.ok()) return status;
    }
    if (absl::Status status = core.Check(nullptr, Need::kReady, false); !status.ok()) return status;
    if (version.has_value() && *version != core.weights.version()) {
      return MakeError(ErrorReason::kWeightVersionMismatch,
                       absl::StrCat("the call expects version ", *version, " of the weights of ", core.name.ToString(),
                                    ", they are of version ", core.weights.version()),
                       {{"expected", absl::StrCat(*version)}, {"actual", absl::StrCat(core.weights.version())}});
    }
  }
  return core.tensors.Read(tensor, element_start, element_count, out);
}

// ---- checkpoints -----------------------------------------------------------------------------------------------------

namespace {

// Save(), by an operation that is admitted for it.
absl::StatusOr<SavedCheckpoint> SaveNow(HeadCore& core, const std::optional<Epoch>& epoch, checkpoint::CheckpointStore& store,
                                        const std::string& checkpoint_name, bool overwrite) {
  checkpoint::CheckpointInfo info;
  int64_t version = 0;
  {
    const Turn turn(core.sequencer);
    if (core.spec.trainable && !epoch.has_value()) {
      return MakeError(ErrorReason::kMissingField, "epoch is required for a trainable head", {{"field", "epoch"}});
    }
    if (absl::Status status = core.Check(epoch.has_value() ? &*epoch : nullptr, Need::kReady, false); !status.ok()) return status;
    info.step = core.steps.open().step;
    info.update_count = core.weights.update_count();
    version = core.weights.version();
  }
  info.name = checkpoint_name;
  const absl::StatusOr<int64_t> total_bytes = core.tensors.Save(store, info, overwrite);
  if (!total_bytes.ok()) return total_bytes.status();
  std::string checkpoints = store.Steps(core.name.tenant, core.name.head);
  const Turn turn(core.sequencer);
  core.weights.MarkSaved(version, info.step);
  core.steps.ledger().SetCheckpoints(std::move(checkpoints));
  return SavedCheckpoint{info.step, *total_bytes};
}

// The epoch of a head that is to be saved because it has changed.
std::optional<Epoch> EpochIfChanged(const HeadCore& core) {
  const Turn turn(core.sequencer);
  const bool changed = !core.retired && core.state == HeadState::kReady && !core.weights.IsSaved(core.steps.open().step);
  return changed ? std::optional(core.epoch) : std::nullopt;
}

}  // namespace

absl::StatusOr<SavedCheckpoint> Head::Save(const std::optional<Epoch>& epoch, checkpoint::CheckpointStore& store,
                                           const std::string& checkpoint_name, bool overwrite, const WaitLimits& limits) {
  const absl::StatusOr<scheduler::Admission> admission = core_->Admit(kSaves, limits);
  if (!admission.ok()) return admission.status();
  return SaveNow(*core_, epoch, store, checkpoint_name, overwrite);
}

absl::StatusOr<bool> Head::SaveIfChanged(checkpoint::CheckpointStore& store, const std::string& checkpoint_name,
                                         absl::Time deadline, bool waits) {
  if (!EpochIfChanged(*core_).has_value()) return false;
  if (observability::MonotonicNow() >= deadline) {
    return MakeError(ErrorReason::kDeadlineExceeded, absl::StrCat("no time is left to save ", core_->name.ToString()));
  }
  const absl::StatusOr<scheduler::Admission> admission = core_->Admit(kSaves, {waits ? deadline : absl::InfinitePast()});
  if (!admission.ok()) return admission.status();
  const std::optional<Epoch> epoch = EpochIfChanged(*core_);
  if (!epoch.has_value()) return false;
  const absl::Status status = SaveNow(*core_, epoch, store, checkpoint_name, /*overwrite=*/true).status();
  return status.ok() ? absl::StatusOr<bool>(true) : status;
}

void Head::CheckpointRemoved(const checkpoint::CheckpointStore& store) {
  HeadCore& core = *core_;
  std::string checkpoints = store.Steps(core.name.tenant, core.name.head);
  const Turn turn(core.sequencer);
  core.weights.ForgetSaved();
  core.steps.ledger().SetCheckpoints(std::move(checkpoints));
}

absl::StatusOr<HeadInfo> Head::Restore(const Epoch& epoch, checkpoint::CheckpointStore& store, const std::string& checkpoint_name,
                                       const WaitLimits& limits, bool comes_back) {
  HeadCore& core = *core_;
  const absl::StatusOr<scheduler::Admission> admission = core.Admit(kWritesWeights, limits);
  if (!admission.ok()) return admission.status();
  if (absl::Status status = CheckEpoch(comes_back ? std::nullopt : std::optional(epoch)); !status.ok()) return status;
  absl::StatusOr<std::string> note = core.tensors.CompareNumerics(store, checkpoint_name, /*must_agree=*/core.limits.deterministic);
  if (!note.ok()) return note.status();
  const absl::StatusOr<checkpoint::CheckpointInfo> info =
      store.Load(core.name.tenant, core.name.head, checkpoint_name, *core.on_engine);
  if (!info.ok()) return core.AfterChange(info.status());
  const absl::Status emptied = core.spec.trainable ? core.on_engine->ZeroGradient() : absl::OkStatus();
  absl::StatusOr<std::string> checksum = emptied.ok() ? core.tensors.Checksum() : emptied;
  if (!checksum.ok()) {
    const absl::Status failed = AfterTheBeginning(checksum.status(), /*changed=*/true);
    core.MarkLost(failed);
    return failed;
  }
  std::string checkpoints = store.Steps(core.name.tenant, core.name.head);
  core.tensors.ContinueRun(store, *info, comes_back);
  const Turn turn(core.sequencer);
  core.StartAfresh(info->step);
  core.steps.ledger().SetCheckpoints(std::move(checkpoints));
  core.restore_note = *std::move(note);
  if (comes_back && core.spec.trainable) {
    core.state = HeadState::kRestored;
    core.state_cause = checkpoint_name;
  }
  core.weights.MarkSet(HeadTensor::kWeight);
  if (core.spec.has_bias) core.weights.MarkSet(HeadTensor::kBias);
  core.weights.SetUpdateCount(info->update_count);
  core.weights.NextVersion();
  core.weights.SetChecksum(*std::move(checksum));
  core.weights.ForgetSaved();
  // A head comes back from its newest checkpoint. A trainer may choose an older one, which a restart would not find.
  if (comes_back) core.weights.MarkSaved(core.weights.version(), info->step);
  return core.Describe();
}

}  // namespace headwater::heads
