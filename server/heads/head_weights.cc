// Head's weights: set, read, saved and restored.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/checkpoint/xxh3.h"
#include "server/heads/head.h"

namespace headwater::heads {
namespace {

HeadTensor MasterOf(HeadTensor tensor) {
  return tensor == HeadTensor::kWeight ? HeadTensor::kMasterWeight : HeadTensor::kMasterBias;
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

absl::Status Head::SetTensor(const Epoch& epoch, HeadTensor tensor, DataType data_type, const void* data, int64_t byte_count) {
  TensorUpdate update;
  update.tensor = tensor;
  update.data_type = data_type;
  update.source = [data, data_type](int64_t element_start, int64_t element_count, void* out) {
    const int64_t element_bytes = ElementBytes(data_type);
    std::memcpy(out, static_cast<const char*>(data) + element_start * element_bytes,
                static_cast<size_t>(element_count * element_bytes));
    return absl::OkStatus();
  };
  const std::vector<TensorUpdate> updates = {std::move(update)};
  if (absl::Status status = CheckUpdates(updates); !status.ok()) return status;
  const int64_t expected = engine_head_->ElementCount(tensor) * ElementBytes(data_type);
  if (byte_count != expected) {
    return MakeError(ErrorReason::kDataLengthMismatch,
                     absl::StrCat(HeadTensorName(tensor), " as ", DataTypeName(data_type), " has ", expected,
                                  " bytes, the call brings ", byte_count),
                     {{"expected", absl::StrCat(expected)}, {"actual", absl::StrCat(byte_count)}, {"field", "total_bytes"}});
  }
  return SetTensors(epoch, updates);
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

absl::Status Head::WriteTensors(const std::vector<TensorUpdate>& updates, bool& changed) {
  for (const TensorUpdate& update : updates) {
    // fp32 for 16-bit storage goes to the master, from which the engine rounds the stored weight.
    const HeadTensor tensor = update.data_type == spec_.data_type ? update.tensor : MasterOf(update.tensor);
    const int64_t total = engine_head_->ElementCount(tensor);
    const int64_t piece = kTensorPieceBytes / ElementBytes(update.data_type);
    const auto buffer = std::make_unique<char[]>(static_cast<size_t>(std::min(piece, total) * ElementBytes(update.data_type)));
    for (int64_t start = 0; start < total; start += piece) {
      const int64_t count = std::min(piece, total - start);
      if (absl::Status status = update.source(start, count, buffer.get()); !status.ok()) return status;
      changed = true;
      if (absl::Status status = engine_head_->WriteTensor(tensor, start, count, buffer.get()); !status.ok()) return status;
    }
  }
  if (!spec_.trainable) return absl::OkStatus();
  if (absl::Status status = engine_head_->ZeroGradient(); !status.ok()) return status;
  return std::holds_alternative<std::monostate>(spec_.optimizer) ? absl::OkStatus() : engine_head_->ResetOptimizerState();
}

absl::StatusOr<std::string> Head::ChecksumWeight() const {
  checkpoint::Xxh3Hasher hasher;
  const int64_t element_bytes = ElementBytes(spec_.data_type);
  const int64_t total = engine_head_->ElementCount(HeadTensor::kWeight);
  const int64_t piece = kTensorPieceBytes / element_bytes;
  const auto buffer = std::make_unique<char[]>(static_cast<size_t>(std::min(piece, total) * element_bytes));
  for (int64_t start = 0; start < total; start += piece) {
    const int64_t count = std::min(piece, total - start);
    if (absl::Status status = engine_head_->ReadTensor(HeadTensor::kWeight, start, count, buffer.get()); !status.ok())
      return status;
    hasher.Update(buffer.get(), count * element_bytes);
  }
  return hasher.Digest();
}

absl::Status Head::SetTensors(const Epoch& epoch, const std::vector<TensorUpdate>& updates) {
  if (absl::Status status = CheckUpdates(updates); !status.ok()) return status;
  absl::MutexLock compute_lock(&compute_mutex_);
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
  absl::Status written = WriteTensors(updates, changed);
  std::string checksum;
  if (written.ok() && sets(HeadTensor::kWeight)) {
    absl::StatusOr<std::string> computed = ChecksumWeight();
    if (computed.ok()) checksum = *std::move(computed);
    written = computed.status();
  }
  if (!written.ok()) {
    if (changed && !was_loading) {
      MarkLost(written);
    } else if (changed) {
      absl::MutexLock state_lock(&state_mutex_);
      if (sets(HeadTensor::kWeight)) has_weight_ = false;
      if (sets(HeadTensor::kBias)) has_bias_ = false;
    }
    return written;
  }
  staged_.clear();
  absl::MutexLock state_lock(&state_mutex_);
  if (sets(HeadTensor::kWeight)) has_weight_ = true;
  if (sets(HeadTensor::kBias)) has_bias_ = true;
  if (!was_loading) epoch_ = NewEpoch();
  state_ = HasAllTensors() ? HeadState::kReady : HeadState::kLoading;
  lost_cause_.clear();
  ledger_.Reset(ledger_.open().step);
  last_apply_.reset();
  update_count_ = 0;
  ++weight_version_;
  if (sets(HeadTensor::kWeight)) weight_checksum_ = std::move(checksum);
  return absl::OkStatus();
}

absl::Status Head::ReadWeights(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out,
                               std::optional<int64_t> version) const {
  absl::MutexLock compute_lock(&compute_mutex_);
  {
    absl::MutexLock state_lock(&state_mutex_);
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
                                                 const std::string& checkpoint_name, bool overwrite) {
  absl::MutexLock compute_lock(&compute_mutex_);
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
  absl::StatusOr<int64_t> total_bytes = store.Save(name_.tenant, name_.head, info, *engine_head_, overwrite);
  if (!total_bytes.ok()) return total_bytes.status();
  return SavedCheckpoint{info.step, *total_bytes};
}

absl::Status Head::Restore(const Epoch& epoch, checkpoint::CheckpointStore& store, const std::string& checkpoint_name) {
  absl::MutexLock compute_lock(&compute_mutex_);
  if (absl::Status status = LockAndCheck(&epoch, Need::kAnyState, false); !status.ok()) return status;
  absl::StatusOr<checkpoint::CheckpointInfo> info = store.Load(name_.tenant, name_.head, checkpoint_name, *engine_head_);
  if (!info.ok()) return AfterChange(info.status());
  staged_.clear();
  if (spec_.trainable) {
    if (absl::Status status = AfterChange(engine_head_->ZeroGradient()); !status.ok()) return status;
  }
  absl::StatusOr<std::string> checksum = ChecksumWeight();
  if (!checksum.ok()) {
    MarkLost(checksum.status());
    return checksum.status();
  }
  absl::MutexLock state_lock(&state_mutex_);
  epoch_ = NewEpoch();
  state_ = HeadState::kReady;
  lost_cause_.clear();
  has_weight_ = true;
  has_bias_ = spec_.has_bias;
  ledger_.Reset(info->step);
  last_apply_.reset();
  update_count_ = info->update_count;
  ++weight_version_;
  weight_checksum_ = *std::move(checksum);
  return absl::OkStatus();
}

}  // namespace headwater::heads
