// A checked micro-batch, prepared for the shards: which rows of which term run in which chunk, and where results go.
#ifndef HEADWATER_KERNELS_CPU_MICRO_BATCH_PLAN_H_
#define HEADWATER_KERNELS_CPU_MICRO_BATCH_PLAN_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "headwater/kernels/engine.h"
#include "kernels/core/cross_entropy_term.h"
#include "kernels/cpu/cpu_head.h"

namespace headwater::cpu {

// A row of a term.
struct ChunkRow {
  int64_t term_row = 0;   // in the term
  int64_t batch_row = 0;  // in the micro-batch
  int64_t chunk_row = 0;  // in its chunk
  int64_t target = -1;    // -1: none
  double token_weight = 1;
};

// A contribution's rows on one shard: a chunk's gradient of the logits and its hidden states, kept for the grad_weight product.
struct KeptRows {
  const float* gradient;  // [row_count, shard rows]; columns from the shard's valid rows on are not set
  const float* hidden;    // [row_count, hidden_size]
  int64_t row_count;
};

// What a contribution holds for one head until it is decided.
struct StagedHead {
  CpuHead* head = nullptr;
  int32_t slot = -1;
  bool keeps_rows = false;                  // else the slot holds the finished product
  std::vector<std::vector<KeptRows>> kept;  // by shard
  std::vector<int64_t> used_elements;       // by shard: floats of the slot taken by kept rows
  std::vector<uint8_t> has_product;         // by shard: whether the slot holds a product yet
};

// A term with what does not depend on the row.
struct TermPlan {
  const LossTerm* term = nullptr;
  CpuHead* head = nullptr;
  CpuHead* teacher = nullptr;    // JSD
  const JsdSpec* jsd = nullptr;  // null: cross entropy
  double hard_weight = 1;        // a; 1 for cross entropy
  double soft_weight = 0;        // 1 - a
  CrossEntropyTerm cross_entropy;
  bool wants_weighted = false;  // entropy
  bool wants_argmax = false;
  bool wants_cross_entropy = false;  // statistics of the student's row at all
  GradWeightMode grad_weight = GradWeightMode::kNone;
  StagedHead* staged = nullptr;  // kStage
  bool has_token_outputs = false;

  // Results; written by rank 0 only.
  LossSums sums;
  std::vector<uint8_t> non_finite;  // [row_count]
};

struct TermChunk {
  size_t term = 0;
  std::vector<ChunkRow> rows;
};

// Rows that are computed together.
struct Chunk {
  bool backward = false;
  std::vector<int64_t> batch_rows;  // increasing
  std::vector<TermChunk> terms;
};

struct MicroBatchPlan {
  const MicroBatch* micro_batch = nullptr;
  std::vector<TermPlan> terms;
  std::vector<Chunk> chunks;
  std::vector<std::unique_ptr<StagedHead>> staged;  // one for each head with a contribution
};

// Plans a micro-batch that CheckMicroBatch() passed and whose heads are CpuHeads. Takes staging slots; kStagingFull (and no slot
// taken) if one is missing.
absl::StatusOr<MicroBatchPlan> PlanMicroBatch(const MicroBatch& micro_batch, const EngineOptions& options);

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_MICRO_BATCH_PLAN_H_
