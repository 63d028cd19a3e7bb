#include "kernels/cpu/cpu_head.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/core/head_tensors.h"
#include "kernels/core/optimizer_step.h"
#include "kernels/cpu/optimizer.h"
#include "kernels/cpu/rows/convert.h"
#include "kernels/cpu/rows/row_kernels.h"

namespace headwater::cpu {
namespace {

// Parts begin at multiples of this many elements: whole cache lines.
constexpr int64_t kPartGrain = 1024;
// Products of AddToGradient() that are rounded at once.
constexpr int64_t kAddBlock = 1024;

absl::Status OnParts(const ShardContext& context, const HeadShard& shard,
                     absl::FunctionRef<void(const HeadShard&, int32_t, int32_t, int32_t)> work) {
  const int32_t parts = context.pool.thread_count();
  context.pool.Run(parts, [&](int32_t part) { work(shard, context.rank, part, parts); });
  return absl::OkStatus();
}

}  // namespace

CpuHead::CpuHead(std::shared_ptr<EngineCore> core, const HeadSpec& spec, HeadPlan plan)
    : HeadBase(spec, plan.memory, plan.is_replica() ? plan.group_shards : plan.shards, "cpu"),
      core_(std::move(core)),
      plan_(std::move(plan)) {
  for (size_t i = 0; i < plan_.shards.size(); ++i) {
    HeadShard shard;
    shard.rows = plan_.shards[i];
    shard.valid_rows = is_replica() ? spec.transform.valid_vocab_size : ValidRows(static_cast<int32_t>(i));
    shard.hidden_size = spec.hidden_size;
    shard.data_type = spec.data_type;
    shard.has_bias = spec.has_bias;
    shard.layout = plan_.layouts[i];
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
  const int64_t state_tensors = OptimizerStateTensors(spec().optimizer);
  for (size_t rank = 0; rank < shard_rows().size(); ++rank) {
    if (!core_->executors.holds(static_cast<int32_t>(rank))) continue;
    HeadShard& shard = shards_[is_replica() ? 0 : rank];
    const int64_t weights = shard.rows.size() * spec().hidden_size;
    const int64_t biases = spec().has_bias ? shard.rows.size() : 0;
    const int64_t state_rows = UpdatedRows(static_cast<int32_t>(rank)).size();
    const int64_t state_weights = state_rows * spec().hidden_size;
    const int64_t state_biases = spec().has_bias ? state_rows : 0;
    map(weights * ElementBytes(spec().data_type), &shard.weight);
    map(biases * ElementBytes(spec().data_type), &shard.bias);
    if (HasSeparateMaster(spec())) {
      map(state_weights * 4, &shard.master_weight);
      map(state_biases * 4, &shard.master_bias);
    }
    if (spec().trainable) {
      map(weights * 4, &shard.grad_weight);
      map(biases * 4, &shard.grad_bias);
    }
    if (state_tensors > 0) {
      map(state_weights * 4, &shard.moment1_weight);
      map(state_biases * 4, &shard.moment1_bias);
    }
    if (state_tensors > 1) {
      map(state_weights * 4, &shard.moment2_weight);
      map(state_biases * 4, &shard.moment2_bias);
    }
    shard.staging.resize(static_cast<size_t>(spec().staging_slots));
    for (MappedMemory& slot : shard.staging) map((weights + biases) * 4, &slot);
    map(shard.layout.mapped_bytes, &shard.workspace);
  }
  return status;
}

CpuHead::Place CpuHead::PlaceOf(const HeadShard& shard, HeadTensor tensor) const {
  const bool separate = HasSeparateMaster(spec());
  const int64_t stored_bytes = ElementBytes(spec().data_type);
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

RowRange CpuHead::UpdatedRows(int32_t rank) const {
  const RowRange& rows = shard_rows()[static_cast<size_t>(rank)];
  return is_replica() ? rows : RowRange{0, rows.size()};
}

CpuHead::Piece CpuHead::HeldPiece(int32_t rank, HeadTensor tensor, int64_t element_start, int64_t element_count) const {
  if (is_replica() && IsWholeInReplica(spec(), tensor)) return {element_start, element_count, 0};
  return PieceOf(rank, tensor, element_start, element_count);
}

absl::Status CpuHead::DoReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const {
  absl::Status status = CheckRange(tensor, element_start, element_count);
  if (!status.ok()) return status;
  for (int32_t rank = 0; rank < core_->executors.shard_count(); ++rank) {
    if (!core_->executors.holds(rank)) continue;
    const Piece piece = HeldPiece(rank, tensor, element_start, element_count);
    if (piece.count == 0) continue;
    const Place place = PlaceOf(Held(rank), tensor);
    const char* from = place.memory->As<char>() + piece.first * place.element_bytes;
    if (IsMaster(tensor) && place.element_bytes != 4) {
      ToFloat(from, spec().data_type, piece.count, static_cast<float*>(out) + piece.offset);
    } else {
      std::memcpy(static_cast<char*>(out) + piece.offset * place.element_bytes, from,
                  static_cast<size_t>(piece.count * place.element_bytes));
    }
  }
  return absl::OkStatus();
}

absl::Status CpuHead::DoWriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) {
  absl::Status status = CheckRange(tensor, element_start, element_count);
  if (!status.ok()) return status;
  if (is_replica()) {
    return ChangeOnParts([&](const HeadShard&, int32_t rank, int32_t part, int32_t) {
      if (part == 0) WriteReplica(rank, tensor, element_start, element_count, in);
    });
  }
  const auto write = [&](int32_t rank) {
    WritePiece(shard(rank), tensor, PieceOf(rank, tensor, element_start, element_count), in);
  };
  if (core_->executors.is_group() || ShardsWith(tensor, element_start, element_count) > 1) {
    return ChangeOnParts([&](const HeadShard&, int32_t rank, int32_t part, int32_t) {
      if (part == 0) write(rank);
    });
  }
  // Nothing to decide: no other shard takes part, and other heads' work need not be waited for.
  for (int32_t rank = 0; rank < shard_count(); ++rank) write(rank);
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
    FromFloat(static_cast<const float*>(in) + piece.offset, piece.count, spec().data_type, to);
    return;
  }
  const char* from = static_cast<const char*>(in) + piece.offset * place.element_bytes;
  std::memcpy(to, from, static_cast<size_t>(piece.count * place.element_bytes));
  if (!HasSeparateMaster(spec())) return;
  if (is_stored) {
    ToFloat(from, spec().data_type, piece.count, PlaceOf(shard, master).memory->As<float>() + piece.first);
  } else if (IsMaster(tensor)) {
    FromFloat(reinterpret_cast<const float*>(to), piece.count, spec().data_type,
              PlaceOf(shard, stored).memory->As<uint16_t>() + piece.first);
  }
}

absl::Status CpuHead::RunOnParts(PartWork work) const {
  std::lock_guard<std::mutex> lock(core_->work_mutex);
  return core_->executors.Run([&](const ShardContext& context) { return OnParts(context, Held(context.rank), work); });
}

absl::Status CpuHead::ChangeOnParts(PartWork work) {
  std::lock_guard<std::mutex> lock(core_->work_mutex);
  return core_->executors.RunDecided([](const ShardContext&) { return absl::OkStatus(); },
                                     [&](const ShardContext& context) { return OnParts(context, Held(context.rank), work); });
}

absl::Status CpuHead::DoZeroGradient() {
  return ChangeOnParts([](const HeadShard& shard, int32_t, int32_t part, int32_t parts) {
    for (const MappedMemory* memory : {&shard.grad_weight, &shard.grad_bias}) {
      const RowRange range = SplitEvenly({0, memory->bytes() / 4}, part, parts, kPartGrain);
      if (range.size() > 0) std::memset(memory->As<float>() + range.start, 0, static_cast<size_t>(range.size()) * 4);
    }
  });
}

absl::Status CpuHead::DoAddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                                      const float* in) {
  float alpha = 0;
  absl::Status status = CheckAddToGradient(tensor, element_start, element_count, factor, &alpha);
  if (!status.ok()) return status;
  return ChangeOnParts([&](const HeadShard& shard, int32_t rank, int32_t part, int32_t parts) {
    const Piece piece = PieceOf(rank, tensor, element_start, element_count);
    const RowRange range = SplitEvenly({0, piece.count}, part, parts, kPartGrain);
    const int64_t first = is_replica() ? element_start + piece.offset : piece.first;
    float* gradient = PlaceOf(shard, tensor).memory->As<float>() + first;
    float products[kAddBlock];
    for (int64_t start = range.start; start < range.end; start += kAddBlock) {
      const int64_t count = std::min(kAddBlock, range.end - start);
      // Rounded in memory before they are added: a kernel that does both may fuse them.
      GetRowKernels().scale(in + piece.offset + start, count, alpha, products);
      GetRowKernels().add_scaled(products, count, 1, gradient + start);
    }
  });
}

absl::Status CpuHead::DoResetOptimizerState() {
  return ChangeOnParts([](const HeadShard& shard, int32_t, int32_t part, int32_t parts) {
    for (const MappedMemory* memory : {&shard.moment1_weight, &shard.moment1_bias, &shard.moment2_weight, &shard.moment2_bias}) {
      const RowRange range = SplitEvenly({0, memory->bytes() / 4}, part, parts, kPartGrain);
      if (range.size() > 0) std::memset(memory->As<float>() + range.start, 0, static_cast<size_t>(range.size()) * 4);
    }
  });
}

absl::StatusOr<GradientStats> CpuHead::DoComputeGradientStats() const {
  const size_t parts_per_shard = static_cast<size_t>(core_->executors.threads_per_shard());
  std::vector<GradientStats> partial(shard_rows().size() * parts_per_shard);
  absl::Status status = RunOnParts([&](const HeadShard& shard, int32_t rank, int32_t part, int32_t parts) {
    const RowKernels& kernels = GetRowKernels();
    GradientStats& stats = partial[static_cast<size_t>(rank) * parts_per_shard + static_cast<size_t>(part)];
    const RowRange rows = UpdatedRows(rank);
    for (const MappedMemory* memory : {&shard.grad_weight, &shard.grad_bias}) {
      if (memory->bytes() == 0) continue;
      const int64_t columns = memory == &shard.grad_weight ? spec().hidden_size : 1;
      const RowRange range = SplitEvenly({rows.start * columns, rows.end * columns}, part, parts, kPartGrain);
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

absl::Status CpuHead::DoApplyOptimizer(const OptimizerStep& step) {
  absl::Status status = CheckOptimizerStep(spec(), step);
  if (!status.ok()) return status;
  const auto update = [&](const HeadShard& shard, int32_t rank, int32_t part, int32_t parts) {
    const RowRange rows = UpdatedRows(rank);
    for (const bool is_weight : {true, false}) {
      if (!is_weight && !spec().has_bias) continue;
      const int64_t columns = is_weight ? spec().hidden_size : 1;
      const RowRange range = SplitEvenly({0, rows.size() * columns}, part, parts, kPartGrain);
      if (range.size() == 0) continue;
      const auto memory = [&](HeadTensor weight, HeadTensor bias) { return PlaceOf(shard, is_weight ? weight : bias).memory; };
      // The memory holds all rows, or begins with the first one that this rank updates.
      const int64_t first = rows.start * columns + range.start;
      const auto state_at = [&](const MappedMemory* tensor) {
        return tensor->bytes() == 0 ? nullptr : tensor->As<float>() + range.start;
      };
      const MappedMemory* master = memory(HeadTensor::kMasterWeight, HeadTensor::kMasterBias);
      ParameterPiece piece;
      piece.parameter = HasSeparateMaster(spec()) ? state_at(master) : master->As<float>() + first;
      piece.gradient = memory(HeadTensor::kGradWeight, HeadTensor::kGradBias)->As<float>() + first;
      piece.moment1 = state_at(memory(HeadTensor::kMoment1Weight, HeadTensor::kMoment1Bias));
      piece.moment2 = state_at(memory(HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias));
      if (HasSeparateMaster(spec())) {
        piece.stored = memory(HeadTensor::kWeight, HeadTensor::kBias)->As<uint16_t>() + first;
        piece.stored_type = spec().data_type;
      }
      piece.count = range.size();
      UpdateParameters(step, piece);
    }
  };
  std::lock_guard<std::mutex> lock(core_->work_mutex);
  return core_->executors.RunDecided([](const ShardContext&) { return absl::OkStatus(); },
                                     [&](const ShardContext& context) {
                                       absl::Status done = OnParts(context, Held(context.rank), update);
                                       return done.ok() && is_replica() ? GatherWeights(context) : done;
                                     });
}

}  // namespace headwater::cpu
