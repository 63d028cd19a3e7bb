// Head's weights: set, read, saved and restored.
#include <algorithm>
#include <memory>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/heads/compute_locks.h"
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

}  // namespace

// ---- setting ---------------------------------------------------------------------------------------------------------

absl::StatusOr<HeadInfo> Head::SetTensor(const Epoch& epoch, HeadTensor tensor, DataType data_type, const void* data,
                                         int64_t byte_count, const WaitLimits& limits) {
  const std::vector<TensorUpdate> updates = {UpdateFromMemory(tensor, data_type, data)};
  if (absl::Status status = tensors_.CheckUpdates(updates); !status.ok()) return status;
  if (absl::Status status = tensors_.CheckBytes(tensor, data_type, byte_count); !status.ok()) return status;
  return SetTensors(epoch, updates, limits);
}

absl::StatusOr<HeadInfo> Head::SetTensors(const Epoch& epoch, const std::vector<TensorUpdate>& updates, const WaitLimits& limits) {
  if (absl::Status status = tensors_.CheckUpdates(updates); !status.ok()) return status;
  if (absl::Status status = LockAndCheck(&epoch, Need::kAnyState, false); !status.ok()) return status;
  if (absl::Status status = tensors_.ReadThrough(updates); !status.ok()) return status;
  const HeadGate::FileCall file_call(gate_, limits);
  if (!file_call.status().ok()) return file_call.status();
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::Status status = CheckInTime(limits); !status.ok()) return status;
  bool was_loading = false;
  {
    absl::MutexLock state_lock(&state_mutex_);
    if (absl::Status status = Check(&epoch, Need::kAnyState, false); !status.ok()) return status;
    was_loading = state_ == HeadState::kLoading;
  }
  const bool sets_weight =
      std::any_of(updates.begin(), updates.end(), [](const TensorUpdate& update) { return update.tensor == HeadTensor::kWeight; });
  bool changed = false;
  bool source_failed = false;
  std::string checksum;
  absl::Status written = tensors_.Write(updates, changed, source_failed);
  if (written.ok() && spec_.trainable && !std::holds_alternative<std::monostate>(spec_.optimizer)) {
    written = engine_head_->ResetOptimizerState();
  }
  if (written.ok() && sets_weight) {
    absl::StatusOr<std::string> computed = tensors_.Checksum();
    if (computed.ok()) checksum = *std::move(computed);
    written = computed.status();
  }
  written = AfterTheBeginning(written, changed);
  if (!written.ok()) {
    if (changed && !was_loading) {
      MarkLost(written);
      return source_failed ? LostWithItsSource(written) : written;
    }
    if (changed) {
      absl::MutexLock state_lock(&state_mutex_);
      for (const TensorUpdate& update : updates) weights_.MarkUnset(update.tensor);
    }
    return written;
  }
  absl::MutexLock state_lock(&state_mutex_);
  for (const TensorUpdate& update : updates) weights_.MarkSet(update.tensor);
  const Epoch epoch_before = epoch_;
  std::vector<Epoch> recovered_before = std::move(recovers_epochs_);
  StartAfresh(steps_.open().step);
  if (was_loading) epoch_ = epoch_before;
  if (was_loading) recovers_epochs_ = std::move(recovered_before);
  if (!weights_.HasAllTensors()) state_ = HeadState::kLoading;
  weights_.SetUpdateCount(0);
  weights_.NextVersion();
  if (sets_weight) weights_.SetChecksum(std::move(checksum));
  return DescribeLocked();
}

// ---- the trainer's own optimizer -------------------------------------------------------------------------------------

absl::Status Head::WriteShadow() {
  std::vector<TensorUpdate> updates;
  WeightRecord::Shadows shadows;
  {
    absl::MutexLock state_lock(&state_mutex_);
    shadows = weights_.shadows();
  }
  for (const auto& [name, entry] : shadows)
    updates.push_back(UpdateFromMemory(name, entry.tensor.data_type, entry.tensor.data.get()));
  bool changed = false;
  bool source_failed = false;  // never: they are in memory
  const absl::Status written = tensors_.Write(updates, changed, source_failed);
  absl::StatusOr<std::string> checksum = written.ok() ? tensors_.Checksum() : written;
  if (!checksum.ok()) {
    const absl::Status failed = AfterTheBeginning(checksum.status(), changed);
    if (changed) MarkLost(failed);
    return failed;
  }
  absl::MutexLock state_lock(&state_mutex_);
  weights_.SetChecksum(*std::move(checksum));
  return absl::OkStatus();
}

absl::StatusOr<ReplaceReply> Head::Replace(const StepKey& key, const ShadowTensor& tensor, const WaitLimits& limits) {
  if (absl::Status status = tensors_.CheckUpdates({UpdateFromMemory(tensor.tensor, tensor.data_type, tensor.data.get())});
      !status.ok()) {
    return status;
  }
  if (absl::Status status = tensors_.CheckBytes(tensor.tensor, tensor.data_type, tensor.byte_count); !status.ok()) return status;
  model_files::Xxh3Hasher hasher;
  hasher.Update(tensor.data.get(), tensor.byte_count);
  const std::string checksum = absl::StrCat(DataTypeName(tensor.data_type), ":", hasher.Digest());

  const HeadGate::Entry entered(gate_, limits);
  if (!entered.status().ok()) return entered.status();
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::Status status = CheckInTime(limits); !status.ok()) return status;
  std::map<HeadTensor, std::string> checksums;
  {
    absl::MutexLock state_lock(&state_mutex_);
    if (absl::Status status = Check(&key.epoch, Need::kReady, true); !status.ok()) return status;
    const std::optional<StepRecord>& last_closed = steps_.ledger().last_closed();
    if (last_closed.has_value() && last_closed->step == key.step) {
      if (weights_.WasReplacedBy(tensor.tensor, checksum)) {
        return ReplaceReply{.closed = true, .replayed = true, .head = DescribeLocked()};
      }
      return MakeError(ErrorReason::kStepConflict,
                       absl::StrCat("step ", key.step, " was closed by ",
                                    last_closed->state == StepState::kReplaced ? "other weights" : "another call",
                                    "; the open step is ", steps_.open().step),
                       {{"step", absl::StrCat(key.step)}, {"openStep", absl::StrCat(steps_.open().step)}});
    }
    if (absl::Status status = steps_.ledger().CheckClose(key.step, StepState::kReplaced); !status.ok()) return status;
    if (!weights_.AddShadow(tensor, checksum)) return ReplaceReply{.head = DescribeLocked()};
    for (const auto& [name, entry] : weights_.shadows()) checksums[name] = entry.checksum;
  }
  if (absl::Status status = WriteShadow(); !status.ok()) return status;
  absl::MutexLock state_lock(&state_mutex_);
  if (absl::Status status = CloseStep(key.step, StepState::kReplaced); !status.ok()) return status;
  weights_.MarkReplaced(std::move(checksums));
  weights_.NextVersion();
  return ReplaceReply{.closed = true, .head = DescribeLocked()};
}

bool Head::DropShadow(const void* data) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  // Replace() counts the tensors, and writes them after that, with this lock held.
  if (!compute_mutex_.TryLock()) return false;
  const absl::Cleanup unlock = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { compute_mutex_.Unlock(); };
  absl::MutexLock state_lock(&state_mutex_);
  return weights_.DropShadow(data);
}

// ---- reading ---------------------------------------------------------------------------------------------------------

absl::Status Head::ReadWeights(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out,
                               std::optional<int64_t> version, const std::optional<Epoch>& epoch, const WaitLimits& limits) const {
  const HeadGate::Entry entry(gate_, limits);
  if (!entry.status().ok()) return entry.status();
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::Status status = CheckInTime(limits); !status.ok()) return status;
  {
    absl::MutexLock state_lock(&state_mutex_);
    // A head that has come back may be read at the epoch that it came back with, before anybody takes it.
    if (epoch.has_value()) {
      if (absl::Status status = Check(&*epoch, Need::kAnyState, false); !status.ok()) return status;
    }
    if (absl::Status status = Check(nullptr, Need::kReady, false); !status.ok()) return status;
    if (version.has_value() && *version != weights_.version()) {
      return MakeError(ErrorReason::kWeightVersionMismatch,
                       absl::StrCat("the call expects version ", *version, " of the weights of ", name_.ToString(),
                                    ", they are of version ", weights_.version()),
                       {{"expected", absl::StrCat(*version)}, {"actual", absl::StrCat(weights_.version())}});
    }
  }
  return tensors_.Read(tensor, element_start, element_count, out);
}

// ---- checkpoints -----------------------------------------------------------------------------------------------------

absl::StatusOr<Head::SavedCheckpoint> Head::Save(const std::optional<Epoch>& epoch, checkpoint::CheckpointStore& store,
                                                 const std::string& checkpoint_name, bool overwrite, const WaitLimits& limits) {
  const HeadGate::FileCall file_call(gate_, limits);
  if (!file_call.status().ok()) return file_call.status();
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::Status status = CheckInTime(limits); !status.ok()) return status;
  return SaveLocked(epoch, store, checkpoint_name, overwrite);
}

std::optional<absl::StatusOr<bool>> Head::TrySaveIfChanged(checkpoint::CheckpointStore& store, const std::string& checkpoint_name,
                                                           absl::Time deadline) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (!compute_mutex_.TryLock()) return std::nullopt;
  const absl::Cleanup unlock = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { compute_mutex_.Unlock(); };
  std::optional<Epoch> epoch;
  {
    absl::MutexLock state_lock(&state_mutex_);
    if (!retired_ && state_ == HeadState::kReady && !weights_.IsSaved(steps_.open().step)) epoch = epoch_;
  }
  absl::StatusOr<bool> saved = false;
  if (epoch.has_value() && observability::MonotonicNow() >= deadline) {
    saved = MakeError(ErrorReason::kDeadlineExceeded, absl::StrCat("no time is left to save ", name_.ToString()));
  } else if (epoch.has_value()) {
    const HeadGate::FileCall file_call(gate_);
    if (!file_call.status().ok()) return std::nullopt;
    const absl::Status status = SaveLocked(epoch, store, checkpoint_name, /*overwrite=*/true).status();
    saved = status.ok() ? absl::StatusOr<bool>(true) : status;
  }
  return saved;
}

absl::StatusOr<Head::SavedCheckpoint> Head::SaveLocked(const std::optional<Epoch>& epoch, checkpoint::CheckpointStore& store,
                                                       const std::string& checkpoint_name, bool overwrite) {
  checkpoint::CheckpointInfo info;
  {
    absl::MutexLock state_lock(&state_mutex_);
    if (spec_.trainable && !epoch.has_value()) {
      return MakeError(ErrorReason::kMissingField, "epoch is required for a trainable head", {{"field", "epoch"}});
    }
    if (absl::Status status = Check(epoch.has_value() ? &*epoch : nullptr, Need::kReady, false); !status.ok()) return status;
    info.step = steps_.open().step;
    info.update_count = weights_.update_count();
  }
  info.name = checkpoint_name;
  const absl::StatusOr<int64_t> total_bytes = tensors_.Save(store, info, overwrite);
  if (!total_bytes.ok()) return total_bytes.status();
  std::string checkpoints = store.Steps(name_.tenant, name_.head);
  absl::MutexLock state_lock(&state_mutex_);
  weights_.MarkSaved(info.step);
  steps_.ledger().SetCheckpoints(std::move(checkpoints));
  return SavedCheckpoint{info.step, *total_bytes};
}

void Head::CheckpointRemoved(const checkpoint::CheckpointStore& store) {
  std::string checkpoints = store.Steps(name_.tenant, name_.head);
  absl::MutexLock state_lock(&state_mutex_);
  weights_.ForgetSaved();
  steps_.ledger().SetCheckpoints(std::move(checkpoints));
}

absl::Status Head::LoadCheckpoint(checkpoint::CheckpointStore& store, const std::string& checkpoint_name, bool comes_back) {
  absl::StatusOr<std::string> note = tensors_.CompareNumerics(store, checkpoint_name, /*must_agree=*/limits_.deterministic);
  if (!note.ok()) return note.status();
  const absl::StatusOr<checkpoint::CheckpointInfo> info = store.Load(name_.tenant, name_.head, checkpoint_name, *engine_head_);
  if (!info.ok()) return AfterChange(info.status());
  const absl::Status emptied = spec_.trainable ? engine_head_->ZeroGradient() : absl::OkStatus();
  absl::StatusOr<std::string> checksum = emptied.ok() ? tensors_.Checksum() : emptied;
  if (!checksum.ok()) {
    const absl::Status failed = AfterTheBeginning(checksum.status(), /*changed=*/true);
    MarkLost(failed);
    return failed;
  }
  std::string checkpoints = store.Steps(name_.tenant, name_.head);
  tensors_.ContinueRun(store, *info, comes_back);
  absl::MutexLock state_lock(&state_mutex_);
  StartAfresh(info->step);
  steps_.ledger().SetCheckpoints(std::move(checkpoints));
  restore_note_ = *std::move(note);
  if (comes_back && spec_.trainable) {
    state_ = HeadState::kRestored;
    restored_checkpoint_ = checkpoint_name;
  }
  weights_.MarkSet(HeadTensor::kWeight);
  if (spec_.has_bias) weights_.MarkSet(HeadTensor::kBias);
  weights_.SetUpdateCount(info->update_count);
  weights_.NextVersion();
  weights_.SetChecksum(*std::move(checksum));
  weights_.ForgetSaved();
  if (!comes_back) return absl::OkStatus();
  // The newest one; a restart would not find one that a trainer chose.
  weights_.MarkSaved(info->step);
  return absl::OkStatus();
}

absl::StatusOr<HeadInfo> Head::Restore(const Epoch& epoch, checkpoint::CheckpointStore& store, const std::string& checkpoint_name,
                                       const WaitLimits& limits) {
  const HeadGate::FileCall file_call(gate_, limits);
  if (!file_call.status().ok()) return file_call.status();
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::Status status = CheckInTime(limits); !status.ok()) return status;
  if (absl::Status status = LockAndCheck(&epoch, Need::kAnyState, false); !status.ok()) return status;
  if (absl::Status status = LoadCheckpoint(store, checkpoint_name, /*comes_back=*/false); !status.ok()) return status;
  return Describe();  // nobody else makes an epoch while the lock is held
}

absl::Status Head::ComeBack(checkpoint::CheckpointStore& store, const std::string& checkpoint_name) {
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::Status status = LockAndCheck(nullptr, Need::kAnyState, false); !status.ok()) return status;
  return LoadCheckpoint(store, checkpoint_name, /*comes_back=*/true);
}

}  // namespace headwater::heads
