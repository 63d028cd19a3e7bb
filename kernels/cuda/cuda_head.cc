#include "kernels/cuda/cuda_head.h"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "kernels/core/head_tensors.h"
#include "kernels/core/optimizer_step.h"
#include "kernels/cuda/computation/deferred_grad_weight.h"
#include "kernels/cuda/computation/matrix_rows.h"
#include "kernels/cuda/computation/workspace.h"
#include "kernels/cuda/device_group.h"
#include "kernels/cuda/rows/parameters.h"
#include "kernels/cuda/rows/reference_row.h"

namespace headwater::cuda {
namespace {

static_assert(kLibraryBytes == Products::kWorkspaceBytes, "the plan and cuBLASLt must agree on its part of the workspace");

constexpr int64_t kInt8MeansBytes = 256;

bool IsGradient(HeadTensor tensor) { return tensor == HeadTensor::kGradWeight || tensor == HeadTensor::kGradBias; }

const DeviceMemory& MemoryOf(const ShardStorage& storage, HeadTensor tensor, bool separate_master) {
  switch (tensor) {
    case HeadTensor::kWeight:
      break;
    case HeadTensor::kBias:
      return storage.bias;
    case HeadTensor::kMasterWeight:
      return separate_master ? storage.master_weight : storage.weight;
    case HeadTensor::kMasterBias:
      return separate_master ? storage.master_bias : storage.bias;
    case HeadTensor::kGradWeight:
      return storage.grad_weight;
    case HeadTensor::kGradBias:
      return storage.grad_bias;
    case HeadTensor::kMoment1Weight:
      return storage.moment1_weight;
    case HeadTensor::kMoment1Bias:
      return storage.moment1_bias;
    case HeadTensor::kMoment2Weight:
      return storage.moment2_weight;
    case HeadTensor::kMoment2Bias:
      return storage.moment2_bias;
  }
  return storage.weight;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaHead>> CudaHead::Create(std::shared_ptr<EngineCore> core, const HeadSpec& spec, HeadPlan plan) {
  HEADWATER_RETURN_IF_ERROR(core->Admit(plan.own_bytes, plan.workspace_bytes, plan.memory.ToString()));
  std::unique_ptr<CudaHead> head(new CudaHead(std::move(core), spec, std::move(plan)));
  HEADWATER_RETURN_IF_ERROR(head->Allocate());
  return head;
}

CudaHead::CudaHead(std::shared_ptr<EngineCore> core, const HeadSpec& spec, HeadPlan plan)
    : HeadBase(spec, std::move(plan.memory), std::move(plan.shards), "cuda:" + std::to_string(core->options().device_index)),
      core_(std::move(core)),
      own_bytes_(plan.own_bytes),
      chunk_bytes_(plan.workspace_bytes - kLibraryBytes) {}

CudaHead::~CudaHead() {
  {
    WorkLock lock(*core_);
    core_->deferred().Discard(*this);
    // Work that has not been waited for may still read and write it.
    static_cast<void>(core_->Synchronize("work of a head that goes away"));
    storage_.clear();
  }
  // Given back only now that it is free.
  core_->Release(own_bytes_);
}

absl::Status CudaHead::Allocate() {
  WorkLock lock(*core_);
  absl::Status status;
  const auto allocate = [&status](int64_t bytes, DeviceMemory* memory) {
    if (!status.ok()) return;
    absl::StatusOr<DeviceMemory> allocated = DeviceMemory::Allocate(bytes);
    status = allocated.status();
    if (status.ok()) *memory = *std::move(allocated);
  };
  const int64_t stored_bytes = ElementBytes(spec().data_type);
  const int64_t state_tensors = OptimizerStateTensors(spec().optimizer);
  for (int32_t index = 0; index < core_->held_shards(); ++index) {
    const RowRange& own_rows = shard_rows()[static_cast<size_t>(RankOf(index))];
    const RowRange rows = is_replica() ? RowRange{0, spec().vocab_size} : own_rows;
    const int64_t weights = rows.size() * PaddedWidth(spec().hidden_size);
    const int64_t biases = spec().has_bias ? rows.size() : 0;
    ShardStorage storage;
    storage.rows = rows;
    storage.updated = is_replica() ? own_rows : RowRange{0, rows.size()};
    const int64_t state_weights = storage.updated.size() * PaddedWidth(spec().hidden_size);
    const int64_t state_biases = spec().has_bias ? storage.updated.size() : 0;
    allocate(weights * stored_bytes, &storage.weight);
    allocate(biases * stored_bytes, &storage.bias);
    if (spec().int8_teacher) allocate(kInt8MeansBytes + Int8Bytes(rows.size(), spec().hidden_size), &storage.int8_weight);
    if (HasSeparateMaster(spec())) {
      allocate(state_weights * 4, &storage.master_weight);
      allocate(state_biases * 4, &storage.master_bias);
    }
    if (spec().trainable) {
      allocate(weights * 4, &storage.grad_weight);
      allocate(biases * 4, &storage.grad_bias);
    }
    if (state_tensors > 0) {
      allocate(state_weights * 4, &storage.moment1_weight);
      allocate(state_biases * 4, &storage.moment1_bias);
    }
    if (state_tensors > 1) {
      allocate(state_weights * 4, &storage.moment2_weight);
      allocate(state_biases * 4, &storage.moment2_bias);
    }
    if (HasReference(spec(), core_->group() != nullptr)) allocate(ReferenceBytes(spec().hidden_size), &storage.reference);
    storage.staging.resize(static_cast<size_t>(spec().staging_slots));
    for (DeviceMemory& slot : storage.staging) allocate((weights + biases) * 4, &slot);
    storage_.push_back(std::move(storage));
  }
  return status;
}

TensorPlace CudaHead::PlaceOf(int32_t rank, HeadTensor tensor) const {
  const bool separate = HasSeparateMaster(spec());
  const bool is_stored = tensor == HeadTensor::kWeight || tensor == HeadTensor::kBias || (IsMaster(tensor) && !separate);
  TensorPlace place;
  place.data = MemoryOf(storage_[static_cast<size_t>(rank)], tensor, separate).As<char>();
  place.element = is_stored ? ElementOf(spec().data_type) : Element::kFloat32;
  if (IsWeightShaped(tensor)) {
    place.columns = spec().hidden_size;
    place.stride = PaddedWidth(spec().hidden_size);
  }
  return place;
}

CudaHead::Piece CudaHead::HeldPiece(int32_t rank, HeadTensor tensor, int64_t element_start, int64_t element_count) const {
  if (is_replica() && IsWholeInReplica(spec(), tensor)) return {element_start, element_count, 0};
  return PieceOf(RankOf(rank), tensor, element_start, element_count);
}

CudaHead::Piece CudaHead::UpdatedPiece(int32_t rank, HeadTensor tensor, int64_t element_start, int64_t element_count) const {
  Piece piece = PieceOf(RankOf(rank), tensor, element_start, element_count);
  if (is_replica()) piece.first = element_start + piece.offset;
  return piece;
}

ShardWeights CudaHead::shard_weights(int32_t rank) const {
  const ShardStorage& storage = storage_[static_cast<size_t>(rank)];
  ShardWeights shard;
  shard.weight = storage.weight.As<void>();
  shard.bias = storage.bias.As<void>();
  shard.element = ElementOf(spec().data_type);
  shard.vocab_start = storage.rows.start;
  shard.columns = is_replica() ? spec().transform.valid_vocab_size : ValidRows(RankOf(rank));
  shard.width = spec().hidden_size;
  shard.stride = PaddedWidth(spec().hidden_size);
  return shard;
}

Int8Rows CudaHead::int8_weights(int32_t rank) const {
  const ShardWeights shard = shard_weights(rank);
  return LayOutInt8(storage_[static_cast<size_t>(rank)].int8_weight.As<char>() + kInt8MeansBytes, shard.columns, shard.width);
}

absl::Status CudaHead::MakeInt8Weights() {
  if (int8_is_made_) return absl::OkStatus();
  for (int32_t rank = 0; rank < shard_count(); ++rank) {
    const ShardWeights shard = shard_weights(rank);
    if (shard.columns == 0) continue;
    const Int8Rows copy = int8_weights(rank);
    const ConstMatrix weight = {shard.weight, shard.columns, shard.width, shard.stride, shard.element};
    double* const means = storage_[static_cast<size_t>(rank)].int8_weight.As<double>();
    HEADWATER_RETURN_IF_ERROR(core_->Check(LaunchQuantizeRows(weight, copy, core_->stream()), "the int8 copy of the weights"));
    HEADWATER_RETURN_IF_ERROR(core_->Check(LaunchInt8Means(copy, means, core_->stream()), "the int8 copy of the weights"));
  }
  int8_is_made_ = true;
  return absl::OkStatus();
}

ShardWeights CudaHead::reference() const {
  const int64_t stride = PaddedWidth(spec().hidden_size);
  ShardWeights row = shard_weights(0);
  auto* const elements =
      reinterpret_cast<uint16_t*>(storage_.front().reference.As<double>() + ReferenceElements(spec().hidden_size));
  row.weight = elements;
  row.bias = spec().has_bias ? elements + stride : nullptr;
  row.vocab_start = 0;
  row.columns = 1;
  return row;
}

absl::Status CudaHead::MakeReference() {
  if (reference_is_made_) return absl::OkStatus();
  int64_t samples = 0;
  for (int32_t rank = 0; rank < merged_shards(); ++rank) samples += ReferenceSamples(ValidRows(rank));
  const int64_t count = ReferenceElements(spec().hidden_size);  // those behind the bias stay 0
  double* const sums = storage_.front().reference.As<double>();
  constexpr char kWhat[] = "the reference row";
  HEADWATER_RETURN_IF_ERROR(
      core_->Check(LaunchSumReference(shard_weights(0), 1.0 / static_cast<double>(samples), sums, core_->stream()), kWhat));
  HEADWATER_RETURN_IF_ERROR(group()->merges().AllReduceSum(sums, sums, count, core_->stream()));
  HEADWATER_RETURN_IF_ERROR(core_->Check(LaunchRoundReference(sums, count, sums + count, core_->stream()), kWhat));
  reference_is_made_ = true;
  return absl::OkStatus();
}

WeightTarget CudaHead::accumulator(int32_t rank) const {
  const ShardStorage& storage = storage_[static_cast<size_t>(rank)];
  return {storage.grad_weight.As<float>(), storage.grad_bias.As<float>()};
}

WeightTarget CudaHead::staging_slot(int32_t rank, int32_t slot) const {
  float* weight = staging_memory(rank, slot).As<float>();
  const int64_t weights = storage_[static_cast<size_t>(rank)].rows.size() * PaddedWidth(spec().hidden_size);
  return {weight, spec().has_bias && weights > 0 ? weight + weights : nullptr};
}

const DeviceMemory& CudaHead::staging_memory(int32_t rank, int32_t slot) const {
  return storage_[static_cast<size_t>(rank)].staging[static_cast<size_t>(slot)];
}

absl::Status CudaHead::FlushGradient(HeadTensor tensor) const {
  return IsGradient(tensor) ? core_->deferred().FlushFor(*this) : absl::OkStatus();
}

absl::Status CudaHead::DoReadTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const {
  HEADWATER_RETURN_IF_ERROR(CheckRange(tensor, element_start, element_count));
  WorkLock lock(*core_);
  HEADWATER_RETURN_IF_ERROR(core_->health());
  HEADWATER_RETURN_IF_ERROR(FlushGradient(tensor));
  const DataType type = TensorDataType(tensor);
  TensorCopy copy(*core_);
  for (int32_t rank = 0; rank < shard_count(); ++rank) {
    const Piece piece = HeldPiece(rank, tensor, element_start, element_count);
    if (piece.count == 0) continue;
    char* to = static_cast<char*>(out) + piece.offset * ElementBytes(type);
    HEADWATER_RETURN_IF_ERROR(core_->EndIfFailed(copy.Read(PlaceOf(rank, tensor), piece.first, piece.count, ElementOf(type), to)));
  }
  return absl::OkStatus();
}

absl::Status CudaHead::DoWriteTensor(HeadTensor tensor, int64_t element_start, int64_t element_count, const void* in) {
  HEADWATER_RETURN_IF_ERROR(CheckRange(tensor, element_start, element_count));
  WorkLock lock(*core_);
  int8_is_made_ = reference_is_made_ = false;
  TensorCopy copy(*core_);
  const auto write = [&] {
    HEADWATER_RETURN_IF_ERROR(FlushGradient(tensor));
    if (is_replica()) return WriteReplica(&copy, tensor, element_start, element_count, in);
    for (int32_t rank = 0; rank < shard_count(); ++rank) {
      const Piece piece = PieceOf(RankOf(rank), tensor, element_start, element_count);
      if (piece.count > 0) HEADWATER_RETURN_IF_ERROR(WritePiece(&copy, tensor, rank, piece, in));
    }
    return absl::OkStatus();
  };
  if (core_->group() != nullptr || ShardsWith(tensor, element_start, element_count) > 1) {
    return core_->RunDecided([](int32_t) { return absl::OkStatus(); }, write);
  }
  // Nothing to decide: no other shard takes part.
  HEADWATER_RETURN_IF_ERROR(core_->health());
  return core_->EndIfFailed(write());
}

absl::Status CudaHead::WritePiece(TensorCopy* copy, HeadTensor tensor, int32_t rank, const Piece& piece, const void* in) {
  const DataType type = TensorDataType(tensor);
  const char* from = static_cast<const char*>(in) + piece.offset * ElementBytes(type);
  // A stored tensor and a master of its own follow each other.
  const bool is_stored = tensor == HeadTensor::kWeight || tensor == HeadTensor::kBias;
  const bool has_follower = HasSeparateMaster(spec()) && (is_stored || IsMaster(tensor));
  TensorPlace follower;
  if (has_follower && IsWeightShaped(tensor)) {
    follower = PlaceOf(rank, is_stored ? HeadTensor::kMasterWeight : HeadTensor::kWeight);
  } else if (has_follower) {
    follower = PlaceOf(rank, is_stored ? HeadTensor::kMasterBias : HeadTensor::kBias);
  }
  return copy->Write(from, ElementOf(type), PlaceOf(rank, tensor), piece.first, piece.count, has_follower ? &follower : nullptr);
}

absl::Status CudaHead::Clear(const DeviceMemory& memory) const {
  if (memory.bytes() == 0) return absl::OkStatus();
  return core_->Check(cudaMemsetAsync(memory.As<void>(), 0, static_cast<size_t>(memory.bytes()), core_->stream()),
                      "clearing a tensor");
}

absl::Status CudaHead::ClearUnwrittenRows(int32_t rank) {
  const DeviceMemory& memory = storage_[static_cast<size_t>(rank)].grad_weight;
  const int64_t first = shard_weights(rank).columns * PaddedWidth(spec().hidden_size) * int64_t{sizeof(float)};
  if (memory.bytes() <= first) return absl::OkStatus();
  return core_->Check(cudaMemsetAsync(memory.As<char>() + first, 0, static_cast<size_t>(memory.bytes() - first), core_->stream()),
                      "clearing a tensor");
}

void CudaHead::NoteZeros(Zeros zeros) {
  if (!core_->options().deterministic) zeros_ = zeros;
}

absl::Status CudaHead::WriteZeros() const {
  if (std::exchange(zeros_, Zeros::kNone) != Zeros::kCounted) return absl::OkStatus();
  for (const ShardStorage& storage : storage_) HEADWATER_RETURN_IF_ERROR(Clear(storage.grad_weight));
  return absl::OkStatus();
}

absl::Status CudaHead::DoZeroGradient() {
  WorkLock lock(*core_);
  return core_->RunDecidedByShard([this](int32_t rank) {
    core_->deferred().Discard(*this);
    const ShardStorage& storage = storage_[static_cast<size_t>(rank)];
    HEADWATER_RETURN_IF_ERROR(Clear(storage.grad_bias));
    HEADWATER_RETURN_IF_ERROR(core_->options().deterministic ? Clear(storage.grad_weight) : ClearUnwrittenRows(rank));
    NoteZeros(Zeros::kCounted);
    gradient_known_ = true;
    return absl::OkStatus();
  });
}

absl::Status CudaHead::DoAddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                                       const float* in) {
  float alpha = 0;
  HEADWATER_RETURN_IF_ERROR(CheckAddToGradient(tensor, element_start, element_count, factor, &alpha));
  WorkLock lock(*core_);
  TensorCopy copy(*core_);
  return core_->RunDecidedByShard([&](int32_t rank) {
    HEADWATER_RETURN_IF_ERROR(FlushGradient(tensor));
    const Piece piece = UpdatedPiece(rank, tensor, element_start, element_count);
    if (piece.count == 0) return absl::OkStatus();
    return copy.AddProduct(in + piece.offset, alpha, PlaceOf(rank, tensor), piece.first, piece.count);
  });
}

absl::Status CudaHead::DoResetOptimizerState() {
  WorkLock lock(*core_);
  return core_->RunDecidedByShard([this](int32_t rank) {
    const ShardStorage& storage = storage_[static_cast<size_t>(rank)];
    for (const DeviceMemory* memory :
         {&storage.moment1_weight, &storage.moment1_bias, &storage.moment2_weight, &storage.moment2_bias}) {
      HEADWATER_RETURN_IF_ERROR(Clear(*memory));
    }
    return absl::OkStatus();
  });
}

absl::StatusOr<GradientStats> CudaHead::DoComputeGradientStats() const {
  WorkLock lock(*core_);
  HEADWATER_RETURN_IF_ERROR(core_->health());
  HEADWATER_RETURN_IF_ERROR(core_->CheckWorkspace());
  HEADWATER_RETURN_IF_ERROR(core_->deferred().FlushFor(*this));
  const cudaStream_t stream = core_->stream();
  const size_t result_count = 2 * storage_.size();
  Workspace workspace(core_->workspace().As<void>(), core_->workspace().bytes());
  void* scratch = workspace.TakeBytes(kGradientStatsBytes);
  auto* results = workspace.Take<GradientStatsResult>(static_cast<int64_t>(result_count));
  const size_t result_bytes = result_count * sizeof(GradientStatsResult);
  auto* host = core_->bounce().As<GradientStatsResult>();
  const auto enqueue = [&] {
    HEADWATER_RETURN_IF_ERROR(core_->Check(cudaMemsetAsync(results, 0, result_bytes, stream), "clearing gradient statistics"));
    for (size_t shard = 0; shard < storage_.size(); ++shard) {
      // Padding is 0, and adds nothing.
      const RowRange& rows = storage_[shard].updated;
      const DeviceMemory* tensors[2] = {&storage_[shard].grad_weight, &storage_[shard].grad_bias};
      const int64_t strides[2] = {PaddedWidth(spec().hidden_size), 1};
      for (size_t i = 0; i < 2; ++i) {
        if (tensors[i]->bytes() == 0 || rows.size() == 0) continue;
        HEADWATER_RETURN_IF_ERROR(
            core_->Check(LaunchGradientStats(tensors[i]->As<float>() + rows.start * strides[i], rows.size() * strides[i], scratch,
                                             results + 2 * shard + i, stream),
                         "taking gradient statistics"));
      }
    }
    return core_->Check(cudaMemcpyAsync(host, results, result_bytes, cudaMemcpyDeviceToHost, stream),
                        "copying gradient statistics");
  };
  HEADWATER_RETURN_IF_ERROR(core_->EndIfFailed(enqueue()));
  HEADWATER_RETURN_IF_ERROR(core_->Synchronize("taking gradient statistics"));
  GradientStats total;
  for (size_t i = 0; i < result_count; ++i) {
    total.norm_squared += host[i].norm_squared;
    total.non_finite_count += host[i].non_finite_count;
  }
  return total;
}

absl::Status CudaHead::UpdateParameters(const OptimizerStep& step, int32_t rank, bool is_weight) {
  const RowRange& rows = storage_[static_cast<size_t>(rank)].updated;
  // Where a tensor has the first of them.
  const auto place = [&](HeadTensor weight, HeadTensor bias) {
    const HeadTensor tensor = is_weight ? weight : bias;
    TensorPlace found = PlaceOf(rank, tensor);
    if (is_replica() && IsWholeInReplica(spec(), tensor)) found.data += rows.start * found.stride * BytesOf(found.element);
    return found;
  };
  const TensorPlace parameter = place(HeadTensor::kMasterWeight, HeadTensor::kMasterBias);
  const TensorPlace stored = place(HeadTensor::kWeight, HeadTensor::kBias);
  const auto floats = [](const TensorPlace& tensor) { return reinterpret_cast<float*>(tensor.data); };
  ParameterArrays arrays;
  arrays.count = rows.size() * parameter.stride;
  if (arrays.count == 0) return absl::OkStatus();
  arrays.parameter = floats(parameter);
  arrays.gradient = floats(place(HeadTensor::kGradWeight, HeadTensor::kGradBias));
  arrays.moment1 = floats(place(HeadTensor::kMoment1Weight, HeadTensor::kMoment1Bias));
  arrays.moment2 = floats(place(HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias));
  if (HasSeparateMaster(spec())) {
    arrays.stored = stored.data;
    arrays.stored_element = stored.element;
  }
  const cudaStream_t stream = core_->stream();
  if (const auto* adamw = std::get_if<AdamWSpec>(&step.settings); adamw != nullptr) {
    HEADWATER_RETURN_IF_ERROR(core_->Check(LaunchAdamW(MakeAdamWScalars(step, *adamw), arrays, stream), "an AdamW update"));
  } else {
    const SgdSpec& sgd = std::get<SgdSpec>(step.settings);
    if (sgd.momentum == 0) arrays.moment1 = nullptr;  // without momentum there is no buffer to keep
    HEADWATER_RETURN_IF_ERROR(core_->Check(LaunchSgd(MakeSgdScalars(step, sgd), arrays, stream), "an SGD update"));
  }
  // 0 / 0 without an epsilon, or a rate that is infinite in fp32, would make padding NaN, and products with it.
  const auto clear_padding = [&](void* data, Element element) {
    if (data == nullptr) return absl::OkStatus();
    return core_->Check(ClearPadding({data, rows.size(), parameter.columns, parameter.stride, element}, stream),
                        "clearing padding");
  };
  for (float* tensor : {arrays.parameter, arrays.moment1, arrays.moment2}) {
    HEADWATER_RETURN_IF_ERROR(clear_padding(tensor, Element::kFloat32));
  }
  return clear_padding(arrays.stored, arrays.stored_element);
}

absl::Status CudaHead::DoApplyOptimizer(const OptimizerStep& step) {
  HEADWATER_RETURN_IF_ERROR(CheckOptimizerStep(spec(), step));
  WorkLock lock(*core_);
  reference_is_made_ = false;
  return core_->RunDecidedByShard([&](int32_t rank) {
    HEADWATER_RETURN_IF_ERROR(core_->deferred().FlushFor(*this));
    HEADWATER_RETURN_IF_ERROR(UpdateParameters(step, rank, /*is_weight=*/true));
    if (spec().has_bias) HEADWATER_RETURN_IF_ERROR(UpdateParameters(step, rank, /*is_weight=*/false));
    if (is_replica()) return GatherWeights();
    NoteZeros(Zeros::kWritten);  // by the update
    return absl::OkStatus();
  });
}

}  // namespace headwater::cuda
