// The memory plan of a head on the device. Arithmetic only: nothing of CUDA is needed to plan.
//
// A rank of a group plans its own shard. The workspace and the rows of a chunk follow from the widest shard of the head, so that
// all ranks have the same. For a head by rows (Parallelism::kRows) it plans like a single engine, except for masters and optimizer
// state, which are its shard's.
//
// Tensors of a head are its own. The workspace is the engine's, shared by its heads (their work is serialised) and as large as the
// largest that one of them plans:
//   workspace = cuBLASLt's 64 MiB + max(least, min(workspace_bytes - 64 MiB, most))
//   most      what the largest useful chunk needs: a divergence of kMaxRows rows in the head's ordinary form, or
//   kMaxExponentialRows
//             rows of exponentials; on a rank of a group kMaxRankRows or kMaxRankExponentialRows. More would gain nothing
//   least     what 128 rows (or EngineOptions::token_chunk_rows) of the form that needs most do, so that every loss can be
//   computed;
//             on a rank with a teacher that is cut at other columns, of whose logits all may have to travel
// Its last part also holds rows whose grad_weight product is deferred, as many as fit (DeferredGradWeight::ShareOf()).
// A chunk takes fixed + rows * per_row bytes (ChunkCost), by the form (term_form.h) of its term:
//   exponentials  2 bytes a logit
//   rows          4 bytes a logit; a divergence has two logits a column, and three with several shards, or a teacher that is
//                 cut at other columns: the teacher's cut anew, on a rank beside what the ranks hand each other.
//                 Where that is too much for all rows of a micro-batch: 2 bytes, and those of a slice of the rows
//   wide          8 bytes a logit, likewise; and a panel of kPanelBytes for converted weights
// and beside the logits, for each row, its hidden states and their gradient in all the types that they pass through.
#ifndef HEADWATER_KERNELS_CUDA_HEAD_PLAN_H_
#define HEADWATER_KERNELS_CUDA_HEAD_PLAN_H_

#include <cstdint>
#include <vector>

#include "headwater/kernels/engine.h"
#include "kernels/core/shard_layout.h"

namespace headwater::cuda {

// Rows at once where memory allows more: the products gain nothing from larger ones.
inline constexpr int64_t kMaxExponentialRows = 8192;
inline constexpr int64_t kMaxRows = 4096;
// The limit on a rank of a group. With a part of the columns, products do gain from more rows, and a row is small. The ranks meet a
// few times in a chunk, and the accumulator is read and written once.
inline constexpr int64_t kMaxRankExponentialRows = 32768;
inline constexpr int64_t kMaxRankRows = 8192;
// Rows of a chunk whose logits are computed slice by slice (term_form.h).
inline constexpr int64_t kMaxSlicedRows = kMaxExponentialRows;
// fp64 (fp32) copies of 16- or 32-bit weights are made this much at a time.
inline constexpr int64_t kPanelBytes = int64_t{64} << 20;
// The part of the workspace that cuBLASLt has for itself.
inline constexpr int64_t kLibraryBytes = int64_t{64} << 20;
// Chunks are multiples of this many rows, where there are enough: the products' tiles.
inline constexpr int64_t kRowGrain = 128;

// A rank of a group has a reference row of a bf16 head, unless it is a replica. It comes with the sums that it is made of.
inline bool HasReference(const HeadSpec& spec, bool in_group) {
  return in_group && spec.parallelism == Parallelism::kVocabulary && spec.data_type == DataType::kBFloat16;
}
// Elements of either, the bias included: the row begins at a multiple of 16 bytes, as its products want it.
constexpr int64_t ReferenceElements(int64_t hidden_size) { return hidden_size / 8 * 8 + 16; }
constexpr int64_t ReferenceBytes(int64_t hidden_size) { return ReferenceElements(hidden_size) * (8 + 2); }

struct HeadPlan {
  MemoryPlan memory;             // "workspace" is the engine's, shared by its heads
  std::vector<RowRange> shards;  // one for each of the engine's, or group's, shards, whatever its ranks hold; may be empty
  int64_t own_bytes = 0;         // memory.total_bytes without the workspace
  int64_t workspace_bytes = 0;   // cuBLASLt's part included
};

// Upper bounds, whatever the micro-batch asks for besides.
struct ChunkCost {
  int64_t fixed = 0;
  int64_t per_row = 0;
  int64_t Bytes(int64_t rows) const;  // saturates
};
// The cost of a chunk with one term whose logits take `logit_bytes` (2, 4 or 8) each. A teacher is taken to be of the head's own
// size: the plan of a larger one is larger.
ChunkCost CostOfChunk(const HeadSpec& spec, int32_t shard_count, int64_t logit_bytes, bool divergence);

// The cost of one rank's share of such a chunk, in a group of `world_size`, whose shard has `columns` of the vocabulary.
ChunkCost CostOfRankChunk(const HeadSpec& spec, int32_t world_size, int64_t columns, int64_t logit_bytes, bool divergence);

// `options` with all defaults filled in; `spec` valid. Saturates. token_chunk_rows is the number of rows whose logits a cross
// entropy with any options has at once. Its chunks may have more rows, and so may those of one with few options on Hopper.
HeadPlan PlanHeadOnCuda(const HeadSpec& spec, const EngineOptions& options);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_HEAD_PLAN_H_
