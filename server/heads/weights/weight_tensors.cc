#include "server/heads/weights/weight_tensors.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/checkpoint/manifest.h"
#include "server/model_files/xxh3.h"
#include "server/observability/monotonic_clock.h"
#include "server/scheduler/sequencer.h"

namespace headwater::heads {

using checkpoint::ForEachPiece;

namespace {

HeadTensor MasterOf(HeadTensor tensor) {
  return tensor == HeadTensor::kWeight ? HeadTensor::kMasterWeight : HeadTensor::kMasterBias;
}

}  // namespace

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

absl::Status AfterTheBeginning(const absl::Status& status, bool changed) {
  if (!changed || !(HasReason(status, ErrorReason::kShardNotReady) || HasReason(status, ErrorReason::kMemoryBudgetExceeded))) {
    return status;
  }
  return MakeError(ErrorReason::kEngineFailed, absl::StrCat("the change had begun, but ", std::string(status.message())));
}

std::string DescribeNumerics(const LossEngine& engine, const EngineHead& head) {
  const EngineOptions& options = engine.options();
  const auto append_shard = [](std::string* out, const VocabShard& shard) {
    absl::StrAppend(out, shard.vocab_start, "-", shard.vocab_end);
  };
  const auto append_model = [](std::string* out, const EngineDevice& device) { absl::StrAppend(out, device.model); };
  const bool is_cpu = engine.name() == "cpu";
  const bool uses_onednn = options.bfloat16_products == Bfloat16Products::kOneDnn && head.spec().data_type == DataType::kBFloat16;
  return absl::StrCat("engine=", engine.name(), "; device=", absl::StrJoin(engine.devices(), ",", append_model),
                      "; shards=", absl::StrJoin(head.shards(), ",", append_shard), "; workspace_bytes=", options.workspace_bytes,
                      "; token_chunk_rows=", options.token_chunk_rows,
                      is_cpu ? absl::StrCat("; threads=", options.thread_count, uses_onednn ? "; bf16_products=onednn" : "")
                             : absl::StrCat("; algorithms=", options.timed_search ? "timed" : "proposed",
                                            "; portable_kernels=", options.portable_kernels ? "yes" : "no"),
                      "; deterministic=", options.deterministic ? "yes" : "no",
                      head.spec().parallelism == Parallelism::kRows ? "; parallelism=rows" : "");
}

absl::Status WeightTensors::CheckElements(HeadTensor tensor, int64_t element_start, int64_t element_count) const {
  const int64_t total = engine_head_.ElementCount(tensor);
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

absl::Status WeightTensors::CheckUpdates(const std::vector<TensorUpdate>& updates) const {
  if (updates.empty()) return MakeError(ErrorReason::kMissingField, "at least one tensor must be given", {{"field", "tensor"}});
  for (size_t index = 0; index < updates.size(); ++index) {
    const TensorUpdate& update = updates[index];
    const char* name = HeadTensorName(update.tensor);
    const bool is_bias = update.tensor == HeadTensor::kBias;
    if ((update.tensor != HeadTensor::kWeight && !is_bias) || (is_bias && !spec_.has_bias)) {
      return FieldError(ErrorReason::kInvalidField, "tensor", spec_.has_bias ? "weight or bias" : "weight", name);
    }
    if (update.data_type != spec_.data_type && update.data_type != DataType::kFloat32) {
      return FieldError(ErrorReason::kDataTypeMismatch, "data_type", DataTypeName(spec_.data_type), DataTypeName(update.data_type));
    }
    if (index > 0 && update.tensor == updates[0].tensor) {
      return MakeError(ErrorReason::kInvalidField, absl::StrCat(name, " is given twice"), {{"field", "tensor"}, {"actual", name}});
    }
  }
  return absl::OkStatus();
}

absl::Status WeightTensors::CheckBytes(HeadTensor tensor, DataType data_type, int64_t byte_count) const {
  const int64_t expected = engine_head_.ElementCount(tensor) * ElementBytes(data_type);
  if (byte_count == expected) return absl::OkStatus();
  return FieldError(ErrorReason::kDataLengthMismatch, "total_bytes", absl::StrCat(expected), absl::StrCat(byte_count));
}

absl::Status WeightTensors::ReadThrough(const std::vector<TensorUpdate>& updates) const {
  for (const TensorUpdate& update : updates) {
    if (update.in_memory) continue;
    HEADWATER_RETURN_IF_ERROR(
        ForEachPiece(0, engine_head_.ElementCount(update.tensor), ElementBytes(update.data_type), update.source));
  }
  return absl::OkStatus();
}

absl::Status WeightTensors::Write(const std::vector<TensorUpdate>& updates, bool& changed, bool& source_failed) {
  const auto after_change = [&changed](const absl::Status& status) {
    changed = changed || !HasReason(status, ErrorReason::kShardNotReady);  // which leaves everything as it was
    return status;
  };
  for (const TensorUpdate& update : updates) {
    // fp32 for 16-bit storage goes to the master, from which the engine rounds the stored weight.
    const HeadTensor tensor = update.data_type == spec_.data_type ? update.tensor : MasterOf(update.tensor);
    const auto write = [&](int64_t start, int64_t count, void* buffer) {
      if (absl::Status status = update.source(start, count, buffer); !status.ok()) {
        source_failed = true;
        return status;
      }
      // Before the first write, because a shard writes without asking the others: one that is not ready is found in time.
      if (!changed && spec_.trainable) HEADWATER_RETURN_IF_ERROR(after_change(engine_head_.ZeroGradient()));
      return after_change(engine_head_.WriteTensor(tensor, start, count, buffer));
    };
    HEADWATER_RETURN_IF_ERROR(ForEachPiece(0, engine_head_.ElementCount(tensor), ElementBytes(update.data_type), write));
  }
  return absl::OkStatus();
}

absl::Status WeightTensors::Read(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const {
  if (tensor != HeadTensor::kWeight && tensor != HeadTensor::kBias && tensor != HeadTensor::kMasterWeight &&
      tensor != HeadTensor::kMasterBias) {
    return FieldError(ErrorReason::kInvalidField, "tensor", "weight or bias", HeadTensorName(tensor));
  }
  HEADWATER_RETURN_IF_ERROR(CheckElements(tensor, element_start, element_count));
  return engine_head_.ReadTensor(tensor, element_start, element_count, out);
}

absl::Status WeightTensors::ReadGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, float* out) const {
  if (tensor == HeadTensor::kWeight) tensor = HeadTensor::kGradWeight;
  if (tensor == HeadTensor::kBias) tensor = HeadTensor::kGradBias;
  if (tensor != HeadTensor::kGradWeight && tensor != HeadTensor::kGradBias) {
    return FieldError(ErrorReason::kInvalidField, "tensor", "grad_weight or grad_bias", HeadTensorName(tensor));
  }
  HEADWATER_RETURN_IF_ERROR(CheckElements(tensor, element_start, element_count));
  return engine_head_.ReadTensor(tensor, element_start, element_count, out);
}

absl::StatusOr<std::string> WeightTensors::Checksum() const {
  model_files::Xxh3Hasher hasher;
  const auto read = [&](int64_t start, int64_t count, void* buffer) {
    HEADWATER_RETURN_IF_ERROR(engine_head_.ReadTensor(HeadTensor::kWeight, start, count, buffer));
    hasher.Update(buffer, count * ElementBytes(spec_.data_type));
    return absl::OkStatus();
  };
  HEADWATER_RETURN_IF_ERROR(ForEachPiece(0, engine_head_.ElementCount(HeadTensor::kWeight), ElementBytes(spec_.data_type), read));
  return hasher.Digest();
}

absl::StatusOr<int64_t> WeightTensors::Save(checkpoint::CheckpointStore& store, checkpoint::CheckpointInfo info, bool overwrite) {
  info.spec = spec_;
  info.numerics = DescribeNumerics(engine_, engine_head_);
  absl::StatusOr<int64_t> total_bytes = store.Save(name_.tenant, name_.head, info, engine_head_, overwrite);
  if (total_bytes.ok()) has_run_ = true;
  return total_bytes;
}

absl::StatusOr<std::string> WeightTensors::CompareNumerics(const checkpoint::CheckpointStore& store,
                                                           const std::string& checkpoint_name, bool must_agree) const {
  const absl::StatusOr<checkpoint::CheckpointInfo> info = store.Read(name_.tenant, name_.head, checkpoint_name);
  if (!info.ok()) return "";  // Load() says so too
  const std::string here = DescribeNumerics(engine_, engine_head_);
  if (info->numerics == here) return "";
  const std::string there = info->numerics.empty() ? "not known" : info->numerics;
  if (must_agree && !info->numerics.empty()) {
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

void WeightTensors::ContinueRun(checkpoint::CheckpointStore& store, const checkpoint::CheckpointInfo& info, bool comes_back) {
  if (!has_run_) has_run_ = comes_back || store.Continue(name_.tenant, name_.head, info);
}

void WeightRecord::MarkUnset(HeadTensor tensor) {
  PresenceOf(tensor) = false;
  if (tensor == HeadTensor::kWeight) checksum_.clear();
}

void WeightRecord::Forget() {
  MarkUnset(HeadTensor::kWeight);
  MarkUnset(HeadTensor::kBias);
  EndStep(/*replaced=*/false);
}

int64_t WeightRecord::NextVersion() {
  if (!unsaved_since_.has_value()) unsaved_since_ = observability::MonotonicNow();
  return ++version_;
}

void WeightRecord::MarkSaved(int64_t version, int64_t step) {
  saved_ = {version, step};
  if (version == version_) unsaved_since_.reset();
}

bool WeightRecord::AddShadow(const ShadowTensor& tensor, std::string checksum) {
  shadows_[tensor.tensor] = {tensor, std::move(checksum)};
  return shadows_.size() == (needs_bias_ ? 2U : 1U);
}

bool WeightRecord::DropShadow(const void* data) {
  return std::erase_if(shadows_, [data](auto& entry) {
           if (entry.second.tensor.data.get() != data) return false;
           scheduler::Turn::Free(std::move(entry.second.tensor.data));
           return true;
         }) > 0;
}

void WeightRecord::EndStep(bool replaced) {
  replaced_.clear();
  for (auto& [tensor, entry] : shadows_) {
    if (replaced) replaced_[tensor] = std::move(entry.checksum);
    scheduler::Turn::Free(std::move(entry.tensor.data));
  }
  shadows_.clear();
}

bool WeightRecord::WasReplacedBy(HeadTensor tensor, const std::string& checksum) const {
  const auto found = replaced_.find(tensor);
  return found != replaced_.end() && found->second == checksum;
}

}  // namespace headwater::heads
