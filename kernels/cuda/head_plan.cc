#include "kernels/cuda/head_plan.h"

#include <algorithm>

#include "kernels/core/head_tensors.h"
#include "kernels/core/saturating.h"

namespace headwater::cuda {
namespace {

// PaddedWidth() of launch_types.h, which needs CUDA's headers.
int64_t Padded(int64_t elements) { return SaturatingAdd(elements, 7) / 8 * 8; }

// Adds up the memory of a row: `count` elements of `bytes`.
class Sum {
 public:
  void Add(int64_t count, int64_t bytes) { total_ = SaturatingAdd(total_, SaturatingMultiply(count, bytes)); }
  int64_t total() const { return total_; }

 private:
  int64_t total_ = 0;
};

// How a head's logits lie over shards, as far as an engine's chunks are concerned.
struct Split {
  int64_t columns = 0;        // of the logits that the engine has
  int32_t held_shards = 1;    // over which they lie
  int32_t merged_shards = 1;  // whose statistics meet in the engine
};

// `exchanges`: a divergence on a rank whose teacher is cut at other columns, all of which may have to travel.
ChunkCost CostOf(const HeadSpec& spec, const Split& split, int64_t logit_bytes, bool divergence, bool exchanges = false) {
  const int64_t width = spec.hidden_size;
  const int64_t padded = Padded(width);
  const bool wide = logit_bytes == 8;
  const int64_t matrix_bytes = wide ? 4 : 2;

  Sum row;
  const int64_t logits_per_column = !divergence ? 1 : split.held_shards > 1 || exchanges ? 3 : 2;
  // Each shard's columns are padded for themselves.
  row.Add(SaturatingAdd(Padded(split.columns), int64_t{8} * split.held_shards), logits_per_column * logit_bytes);
  if (exchanges) row.Add(spec.transform.valid_vocab_size, logit_bytes);
  if (logit_bytes == 2) row.Add(split.columns / 128 + split.held_shards, 4);  // sums of tiles
  row.Add(width, 4 + 4);                                                      // hidden as it came, grad_hidden as it goes
  row.Add(padded, matrix_bytes + (wide ? 8 : 0));                             // hidden
  row.Add(padded, 4 + matrix_bytes);                                          // M W; hidden, scaled
  row.Add(padded, 4);                                                         // grad_hidden summed over terms or shards
  if (divergence) {
    row.Add(width, 4);
    row.Add(padded, matrix_bytes + (wide ? 8 : 0));
  }
  // Statistics of each shard, and the uploads, reports and kept values of a row.
  row.Add(split.merged_shards, 192);
  row.Add(1, split.merged_shards > split.held_shards ? 304 : 288);

  Sum fixed;
  if (wide) fixed.Add(1, kPanelBytes);
  if (spec.has_bias) fixed.Add(Padded(split.columns), 16 * 8);  // partial sums of grad_bias
  fixed.Add(spec.transform.valid_vocab_size, 4 * 4 + 4);        // class weights of up to four terms; the teacher's bias
  fixed.Add(64 + 4 * int64_t{split.merged_shards}, 256);        // alignment
  return {fixed.total(), row.total()};
}

// The form that needs most: types of head and hidden states may always differ.
ChunkCost WidestCost(const HeadSpec& spec, const Split& split) { return CostOf(spec, split, 8, /*divergence=*/true); }
// The same, of whatever teacher.
ChunkCost LargestCost(const HeadSpec& spec, const Split& split) {
  return CostOf(spec, split, 8, /*divergence=*/true, /*exchanges=*/split.merged_shards > split.held_shards);
}

int64_t MostUsefulBytes(const HeadSpec& spec, const Split& split) {
  if (spec.data_type == DataType::kFloat32) return WidestCost(spec, split).Bytes(kMaxRows);
  const bool on_rank = split.merged_shards > split.held_shards;
  const int64_t divergence = CostOf(spec, split, 4, /*divergence=*/true).Bytes(on_rank ? kMaxRankRows : kMaxRows);
  if (spec.data_type != DataType::kBFloat16) return divergence;
  const ChunkCost exponentials = CostOf(spec, split, 2, /*divergence=*/false);
  return std::max(divergence, exponentials.Bytes(on_rank ? kMaxRankExponentialRows : kMaxExponentialRows));
}

// The rows of a cross entropy that fit into `bytes`; at least 1.
int64_t RowsFor(const HeadSpec& spec, const Split& split, int64_t bytes) {
  const ChunkCost cost = CostOf(spec, split, spec.data_type == DataType::kFloat32 ? 8 : 4, /*divergence=*/false);
  const int64_t rows = std::clamp<int64_t>((bytes - std::min(bytes, cost.fixed)) / cost.per_row, 1, kMaxRows);
  return rows > kRowGrain ? rows / kRowGrain * kRowGrain : rows;
}

}  // namespace

int64_t ChunkCost::Bytes(int64_t rows) const { return SaturatingAdd(fixed, SaturatingMultiply(per_row, rows)); }

ChunkCost CostOfChunk(const HeadSpec& spec, int32_t shard_count, int64_t logit_bytes, bool divergence) {
  return CostOf(spec, {spec.transform.valid_vocab_size, shard_count, shard_count}, logit_bytes, divergence);
}

ChunkCost CostOfRankChunk(const HeadSpec& spec, int32_t world_size, int64_t columns, int64_t logit_bytes, bool divergence) {
  return CostOf(spec, {columns, 1, world_size}, logit_bytes, divergence);
}

HeadPlan PlanHeadOnCuda(const HeadSpec& spec, const EngineOptions& options) {
  HeadPlan plan;
  plan.shards = SplitVocab(spec.vocab_size, options.shard_count, options.shard_weights);
  const int64_t row_stride = Padded(spec.hidden_size);
  Split split = {spec.transform.valid_vocab_size, options.shard_count, options.shard_count};
  int64_t held_rows = spec.vocab_size;
  if (options.group.world_size == 1) {
    AddTensorItems(spec, row_stride, &plan.memory);
  } else {
    const int64_t own_rows = plan.shards[static_cast<size_t>(options.group.rank)].size();
    if (spec.parallelism == Parallelism::kRows) {
      split = {spec.transform.valid_vocab_size, 1, 1};
      AddReplicaItems(spec, row_stride, own_rows, &plan.memory);
    } else {
      int64_t widest = 0;
      for (const RowRange& shard : plan.shards) widest = std::max(widest, shard.size());
      split = {widest, 1, options.group.world_size};
      held_rows = own_rows;
      HeadSpec held = spec;
      held.vocab_size = held_rows;
      AddTensorItems(held, row_stride, &plan.memory);
    }
  }
  if (spec.int8_teacher) {
    // CudaHead's means and Int8Bytes() of each shard.
    const int64_t bytes = SaturatingMultiply(held_rows, (spec.hidden_size + 127) / 128 * 128 + 8);
    AddPlanItem("int8_weight", SaturatingAdd(bytes, int64_t{1024} * split.held_shards), &plan.memory);
  }
  if (HasReference(spec, options.group.world_size > 1))
    AddPlanItem("reference_row", ReferenceBytes(spec.hidden_size), &plan.memory);
  plan.own_bytes = plan.memory.total_bytes;

  const bool exact = options.token_chunk_rows > 0;
  const int64_t least = LargestCost(spec, split).Bytes(exact ? options.token_chunk_rows : kRowGrain);
  const int64_t most = MostUsefulBytes(spec, split);
  const int64_t chunk_bytes = std::max(least, std::min(options.workspace_bytes - kLibraryBytes, most));
  plan.workspace_bytes = SaturatingAdd(kLibraryBytes, chunk_bytes);
  AddPlanItem("workspace", plan.workspace_bytes, &plan.memory);
  plan.memory.token_chunk_rows = exact ? options.token_chunk_rows : RowsFor(spec, split, chunk_bytes);
  return plan;
}

}  // namespace headwater::cuda
