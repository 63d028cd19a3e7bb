// Head's weights: set, read, saved and restored.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/planned_bytes.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/heads/compute_locks.h"
#include "server/heads/head.h"
#include "server/heads/numerics.h"
#include "server/model_files/xxh3.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::heads {
namespace {

HeadTensor MasterOf(HeadTensor tensor) {
  return tensor == HeadTensor::kWeight ? HeadTensor::kMasterWeight : HeadTensor::kMasterBias;
}

TensorUpdate UpdateFromMemory(HeadTensor tensor, DataType data_type, const void* data) {
  return {tensor, data_type,
          [data, data_type](int64_t element_start, int64_t element_count, void* out) {
            const int64_t element_bytes = ElementBytes(data_type);
            std::memcpy(out, static_cast<const char*>(data) + element_start * element_bytes,
                        static_cast<size_t>(element_count * element_bytes));
            return absl::OkStatus();
          },
          /*in_memory=*/true};
}

// A shard that is not ready, or a piece without memory, stops a change in time only if nothing has been changed before.
absl::Status AfterTheBeginning(const absl::Status& status, bool changed) {
  if (!changed || !(HasReason(status, ErrorReason::kShardNotReady) || HasReason(status, ErrorReason::kMemoryBudgetExceeded))) {
    return status;
  }
  return MakeError(ErrorReason::kEngineFailed, absl::StrCat("the change had begun, but ", std::string(status.message())));
}

// A source that fails in the middle leaves the head LOST. Its own reason says that the head is as before.
absl::Status LostWithItsSource(const absl::Status& status) {
  return MakeError(ErrorReason::kEngineFailed,
                   absl::StrCat("the head is lost: part of its weights had been set when their source, which had been read to its "
                                "end before, failed: ",
                                std::string(status.message()), "; restore a checkpoint or set the weights again"));
}

}  // namespace

absl::Status Head::CheckElements(HeadTensor tensor, int64_t element_start, int64_t element_count) const {
  const int64_t total = engine_head_->ElementCount(tensor);
  if (total == 0) {
    return MakeError(ErrorReason::kInvalidField, absl::StrCat(name_.ToString(), " has no ", HeadTensorName(tensor)),
                     {{"field", "tensor"}, {"actual", HeadTensorName(tensor)}});
  }
  if (element_start < 0 || element_count < 0 || element_count > total || element_start > total - element_count) {
    return MakeError(ErrorReason::kChunkOutOfRange,
                     absl::StrCat(element_count, " elements from ", element_start, " on do not lie in ", HeadTensorName(tensor),
                                  ", which has ", total),
                     {{"elementStart", absl::StrCat(element_start)},
                      {"elementCount", absl::StrCat(element_count)},
                      {"expected", absl::StrCat(total)}});
  }
  return absl::OkStatus();
}

// ---- setting ---------------------------------------------------------------------------------------------------------

absl::StatusOr<HeadInfo> Head::SetTensor(const Epoch& epoch, HeadTensor tensor, DataType data_type, const void* data,
                                         int64_t byte_count, const WaitLimits& limits) {
  const std::vector<TensorUpdate> updates = {UpdateFromMemory(tensor, data_type, data)};
  if (absl::Status status = CheckUpdates(updates); !status.ok()) return status;
  if (absl::Status status = CheckTensorBytes(tensor, data_type, byte_count); !status.ok()) return status;
  return SetTensors(epoch, updates, limits);
}

absl::Status Head::CheckTensorBytes(HeadTensor tensor, DataType data_type, int64_t byte_count) const {
  const int64_t expected = engine_head_->ElementCount(tensor) * ElementBytes(data_type);
  if (byte_count == expected) return absl::OkStatus();
  return MakeError(ErrorReason::kDataLengthMismatch,
                   absl::StrCat(HeadTensorName(tensor), " as ", DataTypeName(data_type), " has ", expected,
                                " bytes, the call brings ", byte_count),
                   {{"expected", absl::StrCat(expected)}, {"actual", absl::StrCat(byte_count)}, {"field", "total_bytes"}});
}

absl::Status Head::CheckUpdates(const std::vector<TensorUpdate>& updates) const {
  if (updates.empty()) return MakeError(ErrorReason::kMissingField, "at least one tensor must be given", {{"field", "tensor"}});
  for (size_t index = 0; index < updates.size(); ++index) {
    const TensorUpdate& update = updates[index];
    const char* name = HeadTensorName(update.tensor);
    const bool is_bias = update.tensor == HeadTensor::kBias;
    if ((update.tensor != HeadTensor::kWeight && !is_bias) || (is_bias && !spec_.has_bias)) {
      return MakeError(
          ErrorReason::kInvalidField,
          absl::StrCat("tensor must be ", spec_.has_bias ? "weight or bias" : "weight, the head has no bias", ", it is ", name),
          {{"field", "tensor"}, {"expected", spec_.has_bias ? "weight or bias" : "weight"}, {"actual", name}});
    }
    if (update.data_type != spec_.data_type && update.data_type != DataType::kFloat32) {
      return MakeError(
          ErrorReason::kDataTypeMismatch,
          absl::StrCat(name, " is set as ", DataTypeName(spec_.data_type), " or float32, the call brings ",
                       DataTypeName(update.data_type)),
          {{"field", "data_type"}, {"expected", DataTypeName(spec_.data_type)}, {"actual", DataTypeName(update.data_type)}});
    }
    if (index > 0 && update.tensor == updates[0].tensor) {
      return MakeError(ErrorReason::kInvalidField, absl::StrCat(name, " is given twice"), {{"field", "tensor"}, {"actual", name}});
    }
  }
  return absl::OkStatus();
}

absl::Status Head::ReadThrough(const std::vector<TensorUpdate>& updates) const {
  for (const TensorUpdate& update : updates) {
    if (update.in_memory) continue;
    const int64_t total = engine_head_->ElementCount(update.tensor);
    const int64_t piece = kTensorPieceBytes / ElementBytes(update.data_type);
    const absl::StatusOr<PlannedBytes> buffer = AllocatePlanned(std::min(piece, total) * ElementBytes(update.data_type));
    if (!buffer.ok()) return buffer.status();
    for (int64_t start = 0; start < total; start += piece) {
      if (absl::Status status = update.source(start, std::min(piece, total - start), buffer->get()); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status Head::WriteTensors(const std::vector<TensorUpdate>& updates, bool& changed, bool& source_failed) {
  const auto after_change = [&changed](const absl::Status& status) {
    changed = changed || !HasReason(status, ErrorReason::kShardNotReady);  // which leaves everything as it was
    return status;
  };
  for (const TensorUpdate& update : updates) {
    // fp32 for 16-bit storage goes to the master, from which the engine rounds the stored weight.
    const HeadTensor tensor = update.data_type == spec_.data_type ? update.tensor : MasterOf(update.tensor);
    const int64_t total = engine_head_->ElementCount(tensor);
    const int64_t piece = kTensorPieceBytes / ElementBytes(update.data_type);
    const absl::StatusOr<PlannedBytes> buffer = AllocatePlanned(std::min(piece, total) * ElementBytes(update.data_type));
    if (!buffer.ok()) return buffer.status();
    for (int64_t start = 0; start < total; start += piece) {
      const int64_t count = std::min(piece, total - start);
      if (absl::Status status = update.source(start, count, buffer->get()); !status.ok()) {
        source_failed = true;
        return status;
      }
      // Before the first write, which a shard alone does not ask the others about: so one that is not ready is found in time.
      if (!changed && spec_.trainable) {
        if (absl::Status status = after_change(engine_head_->ZeroGradient()); !status.ok()) return status;
      }
      absl::Status status = after_change(engine_head_->WriteTensor(tensor, start, count, buffer->get()));
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Head::ChecksumWeight() const {
  model_files::Xxh3Hasher hasher;
  const int64_t element_bytes = ElementBytes(spec_.data_type);
  const int64_t total = engine_head_->ElementCount(HeadTensor::kWeight);
  const int64_t piece = kTensorPieceBytes / element_bytes;
  const absl::StatusOr<PlannedBytes> buffer = AllocatePlanned(std::min(piece, total) * element_bytes);
  if (!buffer.ok()) return buffer.status();
  for (int64_t start = 0; start < total; start += piece) {
    const int64_t count = std::min(piece, total - start);
    if (absl::Status status = engine_head_->ReadTensor(HeadTensor::kWeight, start, count, buffer->get()); !status.ok())
      return status;
    hasher.Update(buffer->get(), count * element_bytes);
  }
  return hasher.Digest();
}

absl::StatusOr<HeadInfo> Head::SetTensors(const Epoch& epoch, const std::vector<TensorUpdate>& updates, const WaitLimits& limits) {
  if (absl::Status status = CheckUpdates(updates); !status.ok()) return status;
  if (absl::Status status = LockAndCheck(&epoch, Need::kAnyState, false); !status.ok()) return status;
  if (absl::Status status = ReadThrough(updates); !status.ok()) return status;
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
  const auto sets = [&updates](HeadTensor tensor) {
    return std::any_of(updates.begin(), updates.end(), [tensor](const TensorUpdate& update) { return update.tensor == tensor; });
  };
  bool changed = false;
  bool source_failed = false;
  std::string checksum;
  absl::Status written = WriteTensors(updates, changed, source_failed);
  if (written.ok() && spec_.trainable && !std::holds_alternative<std::monostate>(spec_.optimizer)) {
    written = engine_head_->ResetOptimizerState();
  }
  if (written.ok() && sets(HeadTensor::kWeight)) {
    absl::StatusOr<std::string> computed = ChecksumWeight();
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
      if (sets(HeadTensor::kWeight)) {
        has_weight_ = false;
        weight_checksum_.clear();
      }
      if (sets(HeadTensor::kBias)) has_bias_ = false;
    }
    return written;
  }
  absl::MutexLock state_lock(&state_mutex_);
  if (sets(HeadTensor::kWeight)) has_weight_ = true;
  if (sets(HeadTensor::kBias)) has_bias_ = true;
  const Epoch epoch_before = epoch_;
  std::vector<Epoch> recovered_before = std::move(recovers_epochs_);
  StartAfresh(ledger_.open().step);
  if (was_loading) epoch_ = epoch_before;
  if (was_loading) recovers_epochs_ = std::move(recovered_before);
  if (!HasAllTensors()) state_ = HeadState::kLoading;
  update_count_ = 0;
  NextWeightVersion();
  if (sets(HeadTensor::kWeight)) weight_checksum_ = std::move(checksum);
  return DescribeLocked();
}

// ---- the trainer's own optimizer -------------------------------------------------------------------------------------

absl::Status Head::WriteShadow() {
  std::vector<TensorUpdate> updates;
  std::map<HeadTensor, ShadowEntry> shadow;
  {
    absl::MutexLock state_lock(&state_mutex_);
    shadow = shadow_;
  }
  for (const auto& [name, entry] : shadow)
    updates.push_back(UpdateFromMemory(name, entry.tensor.data_type, entry.tensor.data.get()));
  bool changed = false;
  bool source_failed = false;  // never: they are in memory
  const absl::Status written = WriteTensors(updates, changed, source_failed);
  absl::StatusOr<std::string> checksum = written.ok() ? ChecksumWeight() : written;
  if (!checksum.ok()) {
    const absl::Status failed = AfterTheBeginning(checksum.status(), changed);
    if (changed) MarkLost(failed);
    return failed;
  }
  absl::MutexLock state_lock(&state_mutex_);
  weight_checksum_ = *std::move(checksum);
  return absl::OkStatus();
}

absl::StatusOr<ReplaceReply> Head::Replace(const StepKey& key, const ShadowTensor& tensor, const WaitLimits& limits) {
  if (absl::Status status = CheckUpdates({UpdateFromMemory(tensor.tensor, tensor.data_type, tensor.data.get())}); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckTensorBytes(tensor.tensor, tensor.data_type, tensor.byte_count); !status.ok()) return status;
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
    const std::optional<StepRecord>& last_closed = ledger_.last_closed();
    if (last_closed.has_value() && last_closed->step == key.step) {
      const auto closed_with = last_replace_.find(tensor.tensor);
      if (closed_with != last_replace_.end() && closed_with->second == checksum) {
        return ReplaceReply{.closed = true, .replayed = true, .head = DescribeLocked()};
      }
      return MakeError(ErrorReason::kStepConflict,
                       absl::StrCat("step ", key.step, " was closed by ",
                                    last_closed->state == StepState::kReplaced ? "other weights" : "another call",
                                    "; the open step is ", ledger_.open().step),
                       {{"step", absl::StrCat(key.step)}, {"openStep", absl::StrCat(ledger_.open().step)}});
    }
    if (absl::Status status = ledger_.CheckClose(key.step, StepState::kReplaced); !status.ok()) return status;
    shadow_[tensor.tensor] = {tensor, checksum};
    if (shadow_.size() < (spec_.has_bias ? 2U : 1U)) return ReplaceReply{.head = DescribeLocked()};
    for (const auto& [name, entry] : shadow_) checksums[name] = entry.checksum;
  }
  if (absl::Status status = WriteShadow(); !status.ok()) return status;
  absl::MutexLock state_lock(&state_mutex_);
  if (absl::Status status = CloseStep(key.step, StepState::kReplaced); !status.ok()) return status;
  last_replace_ = std::move(checksums);
  NextWeightVersion();
  return ReplaceReply{.closed = true, .head = DescribeLocked()};
}

bool Head::DropShadow(const void* data) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  // Replace() counts the tensors, and writes them after that, with this lock held.
  if (!compute_mutex_.TryLock()) return false;
  const absl::Cleanup unlock = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { compute_mutex_.Unlock(); };
  absl::MutexLock state_lock(&state_mutex_);
  return std::erase_if(shadow_, [data](const auto& entry) { return entry.second.tensor.data.get() == data; }) > 0;
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
    if (version.has_value() && *version != weight_version_) {
      return MakeError(ErrorReason::kWeightVersionMismatch,
                       absl::StrCat("the call expects version ", *version, " of the weights of ", name_.ToString(),
                                    ", they are of version ", weight_version_),
                       {{"expected", absl::StrCat(*version)}, {"actual", absl::StrCat(weight_version_)}});
    }
  }
  if (tensor != HeadTensor::kWeight && tensor != HeadTensor::kBias && tensor != HeadTensor::kMasterWeight &&
      tensor != HeadTensor::kMasterBias) {
    return MakeError(ErrorReason::kInvalidField, absl::StrCat("tensor must be weight or bias, it is ", HeadTensorName(tensor)),
                     {{"field", "tensor"}, {"expected", "weight or bias"}, {"actual", HeadTensorName(tensor)}});
  }
  if (absl::Status status = CheckElements(tensor, element_start, element_count); !status.ok()) return status;
  return engine_head_->ReadTensor(tensor, element_start, element_count, out);
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
    const bool is_saved = saved_ == std::make_pair(weight_version_, ledger_.open().step);
    if (!retired_ && state_ == HeadState::kReady && !is_saved) epoch = epoch_;
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
    info.step = ledger_.open().step;
    info.update_count = update_count_;
  }
  info.name = checkpoint_name;
  info.spec = spec_;
  info.numerics = DescribeNumerics(engine_, *engine_head_);
  absl::StatusOr<int64_t> total_bytes = store.Save(name_.tenant, name_.head, info, *engine_head_, overwrite);
  if (!total_bytes.ok()) return total_bytes.status();
  has_run_ = true;
  std::string checkpoints = store.Steps(name_.tenant, name_.head);
  absl::MutexLock state_lock(&state_mutex_);
  saved_ = {weight_version_, info.step};
  unsaved_since_.reset();
  ledger_.SetCheckpoints(std::move(checkpoints));
  return SavedCheckpoint{info.step, *total_bytes};
}

void Head::CheckpointRemoved(const checkpoint::CheckpointStore& store) {
  std::string checkpoints = store.Steps(name_.tenant, name_.head);
  absl::MutexLock state_lock(&state_mutex_);
  saved_.reset();
  ledger_.SetCheckpoints(std::move(checkpoints));
}

absl::StatusOr<std::string> Head::CompareNumerics(const checkpoint::CheckpointStore& store,
                                                  const std::string& checkpoint_name) const {
  const absl::StatusOr<checkpoint::CheckpointInfo> info = store.Read(name_.tenant, name_.head, checkpoint_name);
  if (!info.ok()) return "";  // Load() says so too
  const std::string here = DescribeNumerics(engine_, *engine_head_);
  if (info->numerics == here) return "";
  const std::string there = info->numerics.empty() ? "not known" : info->numerics;
  if (limits_.deterministic && !info->numerics.empty()) {
    return MakeError(
        ErrorReason::kCheckpointSpecMismatch,
        absl::StrCat("checkpoint ", checkpoint_name, " of ", name_.ToString(), " was saved where sums are made otherwise: ", there,
                     "; here: ", here,
                     ". In deterministic mode it is not restored: start the server as it was, or without --deterministic"),
        {{"checkpoint", checkpoint_name}, {"field", "numerics"}, {"expected", here}, {"actual", there}});
  }
  return absl::StrCat("sums may differ in their last bits from those of the run that saved checkpoint ", checkpoint_name,
                      ": it was saved with ", there, "; here: ", here);
}

absl::Status Head::LoadCheckpoint(checkpoint::CheckpointStore& store, const std::string& checkpoint_name, bool comes_back) {
  absl::StatusOr<std::string> note = CompareNumerics(store, checkpoint_name);
  if (!note.ok()) return note.status();
  const absl::StatusOr<checkpoint::CheckpointInfo> info = store.Load(name_.tenant, name_.head, checkpoint_name, *engine_head_);
  if (!info.ok()) return AfterChange(info.status());
  const absl::Status emptied = spec_.trainable ? engine_head_->ZeroGradient() : absl::OkStatus();
  absl::StatusOr<std::string> checksum = emptied.ok() ? ChecksumWeight() : emptied;
  if (!checksum.ok()) {
    const absl::Status failed = AfterTheBeginning(checksum.status(), /*changed=*/true);
    MarkLost(failed);
    return failed;
  }
  std::string checkpoints = store.Steps(name_.tenant, name_.head);
  if (!has_run_) has_run_ = comes_back || store.Continue(name_.tenant, name_.head, *info);
  absl::MutexLock state_lock(&state_mutex_);
  StartAfresh(info->step);
  ledger_.SetCheckpoints(std::move(checkpoints));
  restore_note_ = *std::move(note);
  if (comes_back && spec_.trainable) {
    state_ = HeadState::kRestored;
    restored_checkpoint_ = checkpoint_name;
  }
  has_weight_ = true;
  has_bias_ = spec_.has_bias;
  update_count_ = info->update_count;
  NextWeightVersion();
  weight_checksum_ = *std::move(checksum);
  saved_.reset();
  if (!comes_back) return absl::OkStatus();
  // The newest one; a restart would not find one that a trainer chose.
  saved_ = {weight_version_, info->step};
  unsaved_since_.reset();
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
