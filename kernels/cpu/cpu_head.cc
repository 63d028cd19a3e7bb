#include "kernels/cpu/cpu_head.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "headwater/kernels/error.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/optimizer.h"
#include "kernels/cpu/row_kernels.h"

namespace headwater::cpu {
namespace {

// Parts begin at multiples of this many elements: whole cache lines.
constexpr int64_t kPartGrain = 1024;
// Products of AddToGradient() that are rounded at once.
constexpr int64_t kAddBlock = 1024;

bool IsMaster(HeadTensor tensor) { return tensor == HeadTensor::kMasterWeight || tensor == HeadTensor::kMasterBias; }

bool IsWeightShaped(HeadTensor tensor) {
  return tensor == HeadTensor::kWeight || tensor == HeadTensor::kMasterWeight || tensor == HeadTensor::kGradWeight ||
         tensor == HeadTensor::kMoment1Weight || tensor == HeadTensor::kMoment2Weight;
}

absl::Status OnParts(const ShardContext& context, const HeadShard& shard,
                     absl::FunctionRef<void(const HeadShard&, int32_t, int32_t, int32_t)> work) {
  const int32_t parts = context.pool.thread_count();
  context.pool.Run(parts, [&](int32_t part) { work(shard, context.rank, part, parts); });
  return absl::OkStatus();
}

}  // namespace

absl::Status ToFactor(double factor, float* out) {
  *out = static_cast<float>(factor);
  if (std::isfinite(*out)) return absl::OkStatus();
  return MakeError(ErrorReason::kInvalidField, "factor must be finite in fp32, got " + std::to_string(factor),
                   {{"field", "factor"}});
}

CpuHead::CpuHead(std::shared_ptr<EngineCore> core, const HeadSpec& spec, HeadPlan plan)
    : core_(std::move(core)), spec_(spec), plan_(std::move(plan)), slot_taken_(static_cast<size_t>(spec.staging_slots), false) {
  for (size_t i = 0; i < plan_.shards.size(); ++i) {
    HeadShard shard;
    shard.rows = plan_.shards[i];
    shard.valid_rows = std::clamp<int64_t>(spec_.transform.valid_vocab_size - shard.rows.start, 0, shard.rows.size());
    shard.hidden_size = spec_.hidden_size;
    shard.data_type = spec_.data_type;
    shard.has_bias = spec_.has_bias;
    shard.layout = plan_.layouts[i];
    if (shard.rows.size() > 0) vocab_shards_.push_back({shard.rows.start, shard.rows.end, "cpu"});
    shards_.push_back(std::move(shard));
  }
}

CpuHead::~CpuHead() {
  std::lock_guard<std::mutex> lock(core_->plan_mutex);
  core_->planned_bytes -= plan_.memory.total_bytes;
}

absl::StatusOr<std::unique_ptr<CpuHead>> CpuHead::Create(std::shared_ptr<EngineCore> core, const HeadSpec& spec, HeadPlan plan) {
  std::unique_ptr<CpuHead> head(new CpuHead(std::move(core), spec, std::move(plan)));
  absl::Status status = head->Allocate();
  if (!status.ok()) return status;
  return head;
}

absl::Status CpuHead::Allocate() {
  absl::Status status;
  const auto map = [&status](int64_t bytes, MappedMemory* memory) {
    if (!status.ok()) return;
    absl::StatusOr<MappedMemory> mapped = MappedMemory::Map(bytes);
    status = mapped.status();
    if (status.ok()) *memory = *std::move(mapped);
  };
  const int64_t state_tensors = OptimizerStateTensors(spec_.optimizer);
  for (HeadShard& shard : shards_) {
    const int64_t weights = shard.rows.size() * spec_.hidden_size;
    const int64_t biases = spec_.has_bias ? shard.rows.size() : 0;
    map(weights * ElementBytes(spec_.data_type), &shard.weight);
    map(biases * ElementBytes(spec_.data_type), &shard.bias);
    if (HasSeparateMaster(spec_)) {
      map(weights * 4, &shard.master_weight);
      map(biases * 4, &shard.master_bias);
    }
    if (spec_.trainable) {
      map(weights * 4, &shard.grad_weight);
      map(biases * 4, &shard.grad_bias);
    }
    if (state_tensors > 0) {
      map(weights * 4, &shard.moment1_weight);
      map(biases * 4, &shard.moment1_bias);
    }
    if (state_tensors > 1) {
      map(weights * 4, &shard.moment2_weight);
      map(biases * 4, &shard.moment2_bias);
    }
    shard.staging.resize(static_cast<size_t>(spec_.staging_slots));
    for (MappedMemory& slot : shard.staging) map((weights + biases) * 4, &slot);
    map(shard.layout.mapped_bytes, &shard.workspace);
  }
  return status;
}

bool CpuHead::HasTensor(HeadTensor tensor) const {
  const int64_t state_tensors = OptimizerStateTensors(spec_.optimizer);
  if (!IsWeightShaped(tensor) && !spec_.has_bias) return false;
  switch (tensor) {
    case HeadTensor::kWeight:
    case HeadTensor::kBias:
    case HeadTensor::kMasterWeight:
    case HeadTensor::kMasterBias:
      return true;
    case HeadTensor::kGradWeight:
    case HeadTensor::kGradBias:
      return spec_.trainable;
    case HeadTensor::kMoment1Weight:
    case HeadTensor::kMoment1Bias:
      return state_tensors >= 1;
    case HeadTensor::kMoment2Weight:
    case HeadTensor::kMoment2Bias:
      return state_tensors >= 2;
  }
  return false;
}

int64_t CpuHead::ElementCount(HeadTensor tensor) const {
  if (!HasTensor(tensor)) return 0;
  return IsWeightShaped(tensor) ? spec_.vocab_size * spec_.hidden_size : spec_.vocab_size;
}

DataType CpuHead::TensorDataType(HeadTensor tensor) const {
  return tensor == HeadTensor::kWeight || tensor == HeadTensor::kBias ? spec_.data_type : DataType::kFloat32;
}

CpuHead::Place CpuHead::PlaceOf(const HeadShard& shard, HeadTensor tensor) const {
  const bool separate = HasSeparateMaster(spec_);
  const int64_t stored_bytes = ElementBytes(spec_.data_type);
  switch (tensor) {
    case HeadTensor::kWeight:
      return {&shard.weight, stored_bytes, true};
    case HeadTensor::kBias:
      return {&shard.bias, stored_bytes, false};
    case HeadTensor::kMasterWeight:
      return separate ? Place{&shard.master_weight, 4, true} : Place{&shard.weight, stored_bytes, true};
    case HeadTensor::kMasterBias:
      return separate ? Place{&shard.master_bias, 4, false} : Place{&shard.bias, stored_bytes, false};
    case HeadTensor::kGradWeight:
      return {&shard.grad_weight, 4, true};
    case HeadTensor::kGradBias:
      return {&shard.grad_bias, 4, false};
    case HeadTensor::kMoment1Weight:
      return {&shard.moment1_weight, 4, true};
    case HeadTensor::kMoment1Bias:
      return {&shard.moment1_bias, 4, false};
    case HeadTensor::kMoment2Weight:
      return {&shard.moment2_weight, 4, true};
    case HeadTensor::kMoment2Bias:
      return {&shard.moment2_bias, 4, false};
  }
  return {};
}

absl::Status CpuHead::CheckRange(HeadTensor tensor, int64_t element_start, int64_t element_count) const {
  const int64_t total = ElementCount(tensor);
  if (element_start >= 0 && element_count >= 0 && element_start <= total && element_count <= total - element_start) {
    return absl::OkStatus();
  }
  return MakeError(ErrorReason::kChunkOutOfRange,
                   std::string(HeadTensorName(tensor)) + " has " + std::to_string(total) + " elements, the range begins at " +
                       std::to_string(element_start) + " and has " + std::to_string(element_count),
                   {{"field", HeadTensorName(tensor)},
                    {"elementCount", std::to_string(total)},
                    {"rangeStart", std::to_string(element_start)},
                    {"rangeCount", std::to_string(element_count)}});
}

CpuHead::Piece CpuHead::PieceOf(const HeadShard& shard, HeadTensor tensor, int64_t element_start, int64_t element_count) const {
  const int64_t columns = IsWeightShaped(tensor) ? spec_.hidden_size : 1;
  const int64_t first = std::max(element_start, shard.rows.start * columns);
  const int64_t last = std::min(element_start + element_count, shard.rows.end * columns);
  if (first >= last) return {};
  return {first - shard.rows.start * columns, last - first, first - element_start};
}

absl::Status CpuHead::ReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const {
  absl::Status status = CheckRange(tensor, element_start, element_count);
  if (!status.ok()) return status;
  for (const HeadShard& shard : shards_) {
    const Piece piece = PieceOf(shard, tensor, element_start, element_count);
    if (piece.count == 0) continue;
    const Place place = PlaceOf(shard, tensor);
    const char* from = place.memory->As<char>() + piece.first * place.element_bytes;
    if (IsMaster(tensor) && place.element_bytes != 4) {
      ToFloat(from, spec_.data_type, piece.count, static_cast<float*>(out) + piece.offset);
    } else {
      std::memcpy(static_cast<char*>(out) + piece.offset * place.element_bytes, from,
                  static_cast<size_t>(piece.count * place.element_bytes));
    }
  }
  return absl::OkStatus();
}

absl::Status CpuHead::WriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) {
  absl::Status status = CheckRange(tensor, element_start, element_count);
  if (!status.ok()) return status;
  const auto write = [&](const HeadShard& shard) {
    WritePiece(shard, tensor, PieceOf(shard, tensor, element_start, element_count), in);
  };
  const auto has_piece = [&](const HeadShard& shard) { return PieceOf(shard, tensor, element_start, element_count).count > 0; };
  if (std::count_if(shards_.begin(), shards_.end(), has_piece) > 1) {
    return ChangeOnParts([&](const HeadShard& shard, int32_t, int32_t part, int32_t) {
      if (part == 0) write(shard);
    });
  }
  // Nothing to decide: no other shard takes part, and other heads' work need not be waited for.
  for (const HeadShard& shard : shards_) write(shard);
  return absl::OkStatus();
}

void CpuHead::WritePiece(const HeadShard& shard, HeadTensor tensor, const Piece& piece, const void* in) {
  if (piece.count == 0) return;
  const bool is_stored = tensor == HeadTensor::kWeight || tensor == HeadTensor::kBias;
  const HeadTensor stored = IsWeightShaped(tensor) ? HeadTensor::kWeight : HeadTensor::kBias;
  const HeadTensor master = IsWeightShaped(tensor) ? HeadTensor::kMasterWeight : HeadTensor::kMasterBias;
  const Place place = PlaceOf(shard, tensor);
  char* to = place.memory->As<char>() + piece.first * place.element_bytes;
  if (IsMaster(tensor) && place.element_bytes != 4) {
    FromFloat(static_cast<const float*>(in) + piece.offset, piece.count, spec_.data_type, to);
    return;
  }
  const char* from = static_cast<const char*>(in) + piece.offset * place.element_bytes;
  std::memcpy(to, from, static_cast<size_t>(piece.count * place.element_bytes));
  if (!HasSeparateMaster(spec_)) return;
  if (is_stored) {
    ToFloat(from, spec_.data_type, piece.count, PlaceOf(shard, master).memory->As<float>() + piece.first);
  } else if (IsMaster(tensor)) {
    FromFloat(reinterpret_cast<const float*>(to), piece.count, spec_.data_type,
              PlaceOf(shard, stored).memory->As<uint16_t>() + piece.first);
  }
}

absl::Status CpuHead::RunOnParts(PartWork work) const {
  std::lock_guard<std::mutex> lock(core_->work_mutex);
  return core_->executors.Run([&](const ShardContext& context) { return OnParts(context, shard(context.rank), work); });
}

absl::Status CpuHead::ChangeOnParts(PartWork work) {
  std::lock_guard<std::mutex> lock(core_->work_mutex);
  return core_->executors.RunDecided([](const ShardContext&) { return absl::OkStatus(); },
                                     [&](const ShardContext& context) { return OnParts(context, shard(context.rank), work); });
}

absl::Status CpuHead::ZeroGradient() {
  return ChangeOnParts([](const HeadShard& shard, int32_t, int32_t part, int32_t parts) {
    for (const MappedMemory* memory : {&shard.grad_weight, &shard.grad_bias}) {
      const RowRange range = SplitEvenly({0, memory->bytes() / 4}, part, parts, kPartGrain);
      if (range.size() > 0) std::memset(memory->As<float>() + range.start, 0, static_cast<size_t>(range.size()) * 4);
    }
  });
}

absl::Status CpuHead::AddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                                    const float* in) {
  if (tensor != HeadTensor::kGradWeight && tensor != HeadTensor::kGradBias) {
    return MakeError(ErrorReason::kInvalidField,
                     std::string("tensor must be grad_weight or grad_bias, got ") + HeadTensorName(tensor), {{"field", "tensor"}});
  }
  float alpha = 0;
  absl::Status status = ToFactor(factor, &alpha);
  if (status.ok()) status = CheckRange(tensor, element_start, element_count);
  if (!status.ok()) return status;
  return ChangeOnParts([&](const HeadShard& shard, int32_t, int32_t part, int32_t parts) {
    const Piece piece = PieceOf(shard, tensor, element_start, element_count);
    const RowRange range = SplitEvenly({0, piece.count}, part, parts, kPartGrain);
    float* gradient = PlaceOf(shard, tensor).memory->As<float>() + piece.first;
    float products[kAddBlock];
    for (int64_t start = range.start; start < range.end; start += kAddBlock) {
      const int64_t count = std::min(kAddBlock, range.end - start);
      // Rounded in memory before they are added: a kernel that does both may fuse them.
      GetRowKernels().scale(in + piece.offset + start, count, alpha, products);
      GetRowKernels().add_scaled(products, count, 1, gradient + start);
    }
  });
}

absl::Status CpuHead::ResetOptimizerState() {
  return ChangeOnParts([](const HeadShard& shard, int32_t, int32_t part, int32_t parts) {
    for (const MappedMemory* memory : {&shard.moment1_weight, &shard.moment1_bias, &shard.moment2_weight, &shard.moment2_bias}) {
      const RowRange range = SplitEvenly({0, memory->bytes() / 4}, part, parts, kPartGrain);
      if (range.size() > 0) std::memset(memory->As<float>() + range.start, 0, static_cast<size_t>(range.size()) * 4);
    }
  });
}

absl::StatusOr<GradientStats> CpuHead::ComputeGradientStats() const {
  const size_t parts_per_shard = static_cast<size_t>(core_->executors.threads_per_shard());
  std::vector<GradientStats> partial(shards_.size() * parts_per_shard);
  absl::Status status = RunOnParts([&](const HeadShard& shard, int32_t rank, int32_t part, int32_t parts) {
    const RowKernels& kernels = GetRowKernels();
    GradientStats& stats = partial[static_cast<size_t>(rank) * parts_per_shard + static_cast<size_t>(part)];
    for (const MappedMemory* memory : {&shard.grad_weight, &shard.grad_bias}) {
      const RowRange range = SplitEvenly({0, memory->bytes() / 4}, part, parts, kPartGrain);
      if (range.size() == 0) continue;
      stats.norm_squared += kernels.sum_of_squares(memory->As<float>() + range.start, range.size());
      stats.non_finite_count += kernels.count_non_finite(memory->As<float>() + range.start, range.size());
    }
  });
  if (!status.ok()) return status;
  GradientStats total;
  for (const GradientStats& stats : partial) {
    total.norm_squared += stats.norm_squared;
    total.non_finite_count += stats.non_finite_count;
  }
  return total;
}

absl::Status CpuHead::CheckOptimizerStep(const OptimizerStep& step) const {
  if (std::holds_alternative<std::monostate>(spec_.optimizer)) {
    return MakeError(ErrorReason::kOptimizerNotConfigured, "the head was created without an optimizer");
  }
  if (step.settings.index() != spec_.optimizer.index()) {
    return MakeError(ErrorReason::kInvalidCombination, "settings must be of the head's own kind of optimizer",
                     {{"field", "settings"}});
  }
  absl::Status status = ValidateOptimizerSpec(step.settings);
  if (!status.ok()) return status;
  const auto* sgd = std::get_if<SgdSpec>(&step.settings);
  if (sgd != nullptr && sgd->momentum > 0 && OptimizerStateTensors(spec_.optimizer) == 0) {
    return MakeError(ErrorReason::kInvalidCombination,
                     "settings.sgd.momentum must be 0: the head was created without momentum and has no buffer for it",
                     {{"field", "settings.sgd.momentum"}});
  }
  for (const auto& [field, value] :
       {std::pair<const char*, double>{"learning_rate", step.learning_rate}, {"gradient_multiplier", step.gradient_multiplier}}) {
    if (!std::isfinite(value)) {
      return MakeError(ErrorReason::kInvalidField, std::string(field) + " must be finite, got " + std::to_string(value),
                       {{"field", field}});
    }
  }
  if (step.learning_rate < 0) {
    return MakeError(ErrorReason::kInvalidField, "learning_rate must be >= 0, got " + std::to_string(step.learning_rate),
                     {{"field", "learning_rate"}});
  }
  if (step.update_count < 1) {
    return MakeError(ErrorReason::kInvalidField, "update_count must be >= 1, got " + std::to_string(step.update_count),
                     {{"field", "update_count"}});
  }
  return absl::OkStatus();
}

absl::Status CpuHead::ApplyOptimizer(const OptimizerStep& step) {
  absl::Status status = CheckOptimizerStep(step);
  if (!status.ok()) return status;
  return ChangeOnParts([&](const HeadShard& shard, int32_t, int32_t part, int32_t parts) {
    for (const bool is_weight : {true, false}) {
      if (!is_weight && !spec_.has_bias) continue;
      const auto memory = [&](HeadTensor weight, HeadTensor bias) { return PlaceOf(shard, is_weight ? weight : bias).memory; };
      const MappedMemory* gradient = memory(HeadTensor::kGradWeight, HeadTensor::kGradBias);
      const RowRange range = SplitEvenly({0, gradient->bytes() / 4}, part, parts, kPartGrain);
      if (range.size() == 0) continue;
      const auto at = [&](const MappedMemory* tensor) {
        return tensor->bytes() == 0 ? nullptr : tensor->As<float>() + range.start;
      };
      ParameterPiece piece;
      piece.parameter = at(memory(HeadTensor::kMasterWeight, HeadTensor::kMasterBias));
      piece.gradient = at(gradient);
      piece.moment1 = at(memory(HeadTensor::kMoment1Weight, HeadTensor::kMoment1Bias));
      piece.moment2 = at(memory(HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias));
      if (HasSeparateMaster(spec_)) {
        piece.stored = memory(HeadTensor::kWeight, HeadTensor::kBias)->As<uint16_t>() + range.start;
        piece.stored_type = spec_.data_type;
      }
      piece.count = range.size();
      UpdateParameters(step, piece);
    }
  });
}

int32_t CpuHead::FreeStagingSlots() const {
  std::lock_guard<std::mutex> lock(slots_mutex_);
  return static_cast<int32_t>(std::count(slot_taken_.begin(), slot_taken_.end(), false));
}

int32_t CpuHead::TakeStagingSlot() {
  std::lock_guard<std::mutex> lock(slots_mutex_);
  for (size_t slot = 0; slot < slot_taken_.size(); ++slot) {
    if (slot_taken_[slot]) continue;
    slot_taken_[slot] = true;
    return static_cast<int32_t>(slot);
  }
  return -1;
}

void CpuHead::FreeStagingSlot(int32_t slot) {
  std::lock_guard<std::mutex> lock(slots_mutex_);
  slot_taken_[static_cast<size_t>(slot)] = false;
}

}  // namespace headwater::cpu
